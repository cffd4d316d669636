//! Standard output or standard error that takes nothing: work is completed whatever becomes of its
//! progress and its messages, as by qemu-img; a result that is lost is an error with its cause.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::{cowslip, golden, outcome, run, scratch, scratch_beside};

/// Lines that print progress or a message, and the image that they leave. `old` is there before.
const WORK: &[(&str, &str)] = &[
    ("convert -p -f raw -O qcow2 a.raw b", "b"),
    ("convert -p -f raw -O qcow2 a.raw old", "old"),
    ("convert --progress=json -f raw -O qcow2 a.raw b", "b"),
    ("create -f qcow2 b 64M", "b"),
    ("create -p -f qcow2 -o preallocation=full b 16M", "b"),
    (
        "create -p -f raw -o preallocation=falloc marked 16M",
        "marked",
    ),
    ("resize -p -f qcow2 old 96M", "old"),
    ("resize -p -f qcow2 --preallocation full old 80M", "old"),
    ("rebase -p -f qcow2 -F qcow2 -b other above", "above"),
    ("commit -p -f qcow2 above", "old"),
    ("amend -p -f qcow2 -o lazy_refcounts=on old", "old"),
    ("snapshot -p -c s old", "old"),
    ("dd -p -f raw -O qcow2 if=a.raw of=b", "b"),
];

/// Lines whose output is what they were called for.
const RESULTS: &[&str] = &[
    "info old",
    "info --json old",
    "map old",
    "map --json old",
    "check old",
    "check --json old",
    "check --plan old",
    "compare old old",
    "compare --json old old",
    "measure -O qcow2 old",
    "measure --json -O qcow2 old",
    "snapshot -l marked",
    "create --json -f qcow2 b 64M",
    "convert --json -f raw -O qcow2 a.raw b",
    "dd --json -f raw -O qcow2 if=a.raw of=b",
    "resize --json -f qcow2 old 96M",
    "create -o help -f qcow2 b",
    "--help",
];

fn full() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

fn prepare(dir: &Path) {
    std::fs::write(dir.join("a.raw"), vec![5; 3 << 20]).unwrap();
    for line in [
        "create -q -f qcow2 old 64M",
        "create -q -f qcow2 other 64M",
        "create -q -f qcow2 -b old -F qcow2 above 64M",
        "create -q -f qcow2 marked 64M",
        "snapshot -q -c s marked",
        "io -c 'write -P 7 0 1M' -c 'write -P 9 5M 64k' above",
        "io -c 'write -P 8 2M 1M' old",
    ] {
        succeeds(dir, line);
    }
}

/// The words of a line; those in quotes are one.
fn words(line: &str) -> Vec<&str> {
    let parts = line.split('\'').enumerate();
    let parts = parts.flat_map(|(index, part)| match index % 2 {
        0 => part.split_whitespace().collect(),
        _ => vec![part],
    });
    parts.collect()
}

/// Runs a line, some of whose words are quoted.
fn succeeds(dir: &Path, line: &str) -> String {
    run(cowslip().current_dir(dir).args(words(line)))
}

fn copy_of(template: &Path) -> crate::support::Scratch {
    let dir = scratch();
    golden::copy_files(template, dir.path());
    dir
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// The same files, with the same disks.
fn assert_same_images(line: &str, [one, other]: [&Path; 2]) {
    assert_eq!(names(one), names(other), "{line}");
    for name in names(one) {
        let mut compared = cowslip();
        compared
            .arg("compare")
            .args([one.join(&name), other.join(&name)]);
        let compared = outcome(&mut compared);
        assert_eq!(
            compared.status.code(),
            Some(0),
            "{line}: {name}: {compared:?}"
        );
    }
}

#[test]
fn progress_and_messages_that_cannot_be_written_decide_about_nothing() {
    let template = scratch();
    prepare(template.path());
    for (line, image) in WORK {
        let expected = copy_of(template.path());
        succeeds(&expected, line);
        let outputs: [fn(&mut Command) -> Output; 4] = [
            |command| command.stdout(full()).output().unwrap(),
            |command| command.stderr(full()).output().unwrap(),
            |command| command.stdout(full()).stderr(full()).output().unwrap(),
            |command| {
                // The reader has gone before anything is written.
                let (reader, writer) = std::io::pipe().unwrap();
                drop(reader);
                command.stdout(writer).output().unwrap()
            },
        ];
        for (index, output) in outputs.into_iter().enumerate() {
            let dir = copy_of(template.path());
            let mut command = cowslip();
            let output = output(command.current_dir(&dir).args(words(line)));
            assert_eq!(output.status.code(), Some(0), "{line}, {index}: {output:?}");
            assert_same_images(line, [expected.path(), dir.path()]);
            assert!(dir.path().join(image).exists(), "{line}");
        }
    }
}

#[test]
fn a_reader_that_goes_away_in_the_middle_stops_no_job() {
    for line in [
        "create -p -f raw -o preallocation=full --rate-limit 128M new 64M",
        "create -p -f qcow2 -o preallocation=full --rate-limit 128M new 64M",
        "resize -p -f raw --preallocation full --rate-limit 128M a.raw 64M",
        "allocate -p --method write --rate-limit 128M --size 64M new",
        "convert -p -f qcow2 -S 0 -O raw --rate-limit 128M other new",
    ] {
        let dir = scratch();
        prepare(dir.path());
        let mut command = cowslip();
        command.current_dir(&dir).args(words(line));
        let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        let mut some = [0; 60];
        child.stdout.take().unwrap().read_exact(&mut some).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{line}: {output:?}");
        assert!(output.stderr.is_empty(), "{line}: {output:?}");
        let name = match line.starts_with("resize") {
            true => "a.raw",
            false => "new",
        };
        let len = std::fs::metadata(dir.path().join(name)).unwrap().len();
        assert!(len >= 64 << 20, "{line}: {len}");
    }
}

#[test]
fn qemu_img_completes_its_work_in_the_same_way() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    for line in [
        "create -f qcow2 c 64M",
        "convert -p -f qcow2 -O qcow2 c d",
        "resize -f qcow2 c 96M",
        "rebase -p -f qcow2 -b d -F qcow2 c",
        "commit -p -f qcow2 c",
    ] {
        let mut theirs = Command::new("qemu-img");
        for command in [theirs.args(words(line)), golden::ours().args(words(line))] {
            let ended = command.stdout(full()).current_dir(&dir).output();
            assert_eq!(ended.unwrap().status.code(), Some(0), "{line}");
        }
    }
}

#[test]
fn a_result_that_cannot_be_written_is_an_error_that_names_the_cause() {
    let template = scratch();
    prepare(template.path());
    for line in RESULTS {
        let dir = copy_of(template.path());
        let expected = copy_of(template.path());
        succeeds(&expected, line);
        let mut command = cowslip();
        command.current_dir(&dir).args(words(line)).stdout(full());
        let output = outcome(command.stderr(Stdio::piped()));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {text}");
        let cause = "cowslip: Could not write to standard output: No space left on device\n";
        assert_eq!(text, cause, "{line}");
        assert_same_images(line, [expected.path(), dir.path()]);
    }
}

/// A line in a process whose standard output the shell redirects.
fn redirected(dir: &Path, line: &str, redirection: &str) -> Output {
    let ours = cowslip();
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("exec \"$@\" {redirection}"), "sh"])
        .arg(ours.get_program())
        .args(ours.get_args())
        .args(words(line))
        .current_dir(dir)
        .stderr(Stdio::piped());
    for (name, value) in ours.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    outcome(&mut command)
}

#[test]
fn standard_output_that_is_closed_or_opened_for_reading_takes_no_result() {
    let template = scratch();
    prepare(template.path());
    let more = ["completions bash", "io -f qcow2 -c length old"];
    for line in RESULTS.iter().chain(&more) {
        for redirection in [">&-", "1</dev/null"] {
            let dir = copy_of(template.path());
            let output = redirected(dir.path(), line, redirection);
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{line}: {text}");
            let cause = "cowslip: Could not write to standard output: Bad file descriptor\n";
            assert_eq!(text, cause, "{line} {redirection}");
        }
    }
    // What is only a message decides about nothing.
    for (line, image) in WORK {
        let dir = copy_of(template.path());
        let output = redirected(dir.path(), line, ">&-");
        assert_eq!(output.status.code(), Some(0), "{line}: {output:?}");
        assert!(dir.path().join(image).exists(), "{line}");
    }
    for redirection in [">/dev/null", "1<>/dev/null"] {
        let output = redirected(template.path(), "info old", redirection);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    }
}

#[test]
fn commands_of_the_shell_are_run_and_its_image_closed_without_an_output() {
    let dir = scratch();
    prepare(dir.path());
    let line = "io -f qcow2 -c 'read -v 0 64k' -c 'write -P 3 0 64k' -c 'write -P 4 8M 64k' old";
    let mut command = cowslip();
    let output = command.current_dir(&dir).args(words(line)).stdout(full());
    let output = output.stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("standard output: No space left on device"),
        "{text}"
    );
    let read = "io -r -f qcow2 -c 'read -P 3 0 64k' -c 'read -P 4 8M 64k' old";
    let read = succeeds(&dir, read);
    assert!(!read.contains("failed"), "{read}");
    let checked = succeeds(&dir, "check old");
    assert!(checked.contains("No errors were found"), "{checked}");
}
