//! Command lines of qemu-img, qemu-io and qemu-nbd, right and wrong ones, beside these programs
//! themselves: on equal files the same exit code, the same text but for the differences that
//! `support/judge.rs` and `known.rs` name, the same disks, and images that both checkers accept.
//! Clients of both servers see the same exports.
//!
//! `COWSLIP_CLI_SEED` replays one case, or with `COWSLIP_CLI_CASES` that number of cases from there
//! on. A failure prints the seed, the commands that made the files, the lines and the outcome of
//! the last. Every test here has cases of its own: name the test, too.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::ops::Range;
use std::path::Path;
use std::process::{Command, Output};

mod aliases;
mod cast;
mod known;
mod lines;
mod programs;
mod served;

use crate::support::judge::{Layout, comparable};
use crate::support::mounted::Mounted;
use crate::support::twins::{Twin, Verdict, compare_files, qemu_img, twins};
use crate::support::{
    golden, number_from_environment, peers_are_installed, run, scratch, scratch_beside,
};
use cast::Cast;
use lines::Lines;

/// Cases of an ordinary test run: some seconds.
const CASES: u64 = 48;

/// Lines of a case, one after the other on the same files.
const LINES: u64 = 4;

/// Cases that begin with the same files.
const CASES_OF_A_CAST: u64 = 8;

fn check_case(seed: u64, cast: &Cast, directory: &Path) -> Verdict {
    let (theirs, ours) = twins(&cast.directory, directory, [qemu_img, golden::ours]);
    let mut generator = Lines::new(seed);
    let mut layout = Layout::Equal;
    let mut log = String::new();
    for _ in 0..LINES {
        let words = generator.line();
        log += &format!("  qemu-img {}\n", quoted(&words));
        let (expected, got) = (theirs.run(&words), ours.run(&words));
        let line = known::Line {
            words: &words,
            theirs: &comparable(&expected, layout),
            ours: &comparable(&got, layout),
            layout,
        };
        // If one has done something and the other has not, further lines cannot be compared.
        let compared = match (line.theirs == line.ours, line.may_leave_others()) {
            (false, _) if line.may_differ().is_some() => return Ok(()),
            (false, _) => Err(format!(
                "qemu-img says:\n{}\nours:\n{}\n",
                line.theirs, line.ours
            )),
            (true, None) => compare_files(&theirs, &ours, &mut layout),
            (true, Some(_)) => match compare_files(&theirs, &ours, &mut layout) {
                Ok(()) => Ok(()),
                Err(_) => return Ok(()),
            },
        };
        compared.map_err(|why| format!("seed {seed}:\n{}{log}{why}", cast.log))?;
    }
    Ok(())
}

/// Words as a shell would take them.
fn quoted(words: &[String]) -> String {
    let plain = |word: &str| {
        let is_plain = |sign: char| sign.is_ascii_alphanumeric() || "-_=./:,+".contains(sign);
        !word.is_empty() && word.chars().all(is_plain)
    };
    let words = words.iter().map(|word| match plain(word) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// A case: its seed, the files that it begins with, and a directory for it.
type Check = fn(u64, &Cast, &Path) -> Verdict;

/// Where the files of some cases are.
enum Place {
    Scratch(crate::support::Scratch),
    Mounted(Mounted),
}

impl Place {
    fn scratch(_: u64) -> Place {
        Place::Scratch(scratch())
    }

    fn path(&self) -> &Path {
        match self {
            Place::Scratch(directory) => directory.path(),
            Place::Mounted(mounted) => &mounted.at,
        }
    }
}

/// A place for the cases that begin with the files of this number.
type PlaceOf = fn(u64) -> Place;

/// Runs as many cases as the environment wants, by default `usual`.
fn run_some(check: Check, usual: u64) {
    run_some_in(Place::scratch, check, usual);
}

/// The same in places of these.
fn run_some_in(place: PlaceOf, check: Check, usual: u64) {
    let seed = number_from_environment("COWSLIP_CLI_SEED");
    let cases = number_from_environment("COWSLIP_CLI_CASES");
    let count = cases.unwrap_or(if seed.is_some() { 1 } else { usual });
    run_cases(place, check, seed.unwrap_or(0)..seed.unwrap_or(0) + count);
}

/// Cases beyond those of an ordinary run.
fn run_many(check: Check, usual: u64) {
    run_many_in(Place::scratch, check, usual);
}

/// The same in places of these.
fn run_many_in(place: PlaceOf, check: Check, usual: u64) {
    let count = number_from_environment("COWSLIP_CLI_CASES").unwrap_or(usual);
    run_cases(place, check, 1 << 32..(1 << 32) + count);
}

/// Runs cases, and reports how many differ.
fn run_cases(place: PlaceOf, check: Check, seeds: Range<u64>) {
    let mut failures = Vec::new();
    let mut cast: Option<(u64, Place, Cast)> = None;
    for seed in seeds {
        let number = seed / CASES_OF_A_CAST;
        if cast.as_ref().is_none_or(|(made, ..)| *made != number) {
            let place = place(number);
            let made = Cast::make(place.path().join("cast"), number);
            cast = Some((number, place, made));
        }
        let (_, place, files) = cast.as_ref().unwrap();
        let case = place.path().join(seed.to_string());
        std::fs::create_dir(&case).unwrap();
        if let Err(why) = check(seed, files, &case) {
            eprintln!("{why}");
            failures.push(seed);
        }
        std::fs::remove_dir_all(&case).unwrap();
    }
    assert!(failures.is_empty(), "failing seeds: {failures:?}");
}

/// Lines that once did something else than qemu-img's, run one after the other on the same files.
const MENDED: &str = r#"
info -f
info --output
info --o json a.raw
info -f -U a.raw
info --backing-chain=3 a.raw
foo
-- info a.raw
info --image-opts img.qcow2
info --image-opts a=b
info json:{}
info ''
info -f raw json:{"driver":"qcow2","file.filename":"base.qcow2"}
info --object= a.raw
check -r foo --output
check -r leaks odd.raw
compare --object foo a.raw a.raw
compare -T foo a.raw
map -s 1k -l 3k base.qcow2
map --output=json -l 0 base.qcow2
create a b c
create -f raw -F raw x 1M
create -f qcow2 -o ,,size=2M x 1M
create -f qcow2 -o ? /dev/null
create -f file x 1M
convert -S -1 a.raw x
convert -O foo nosuch x
convert -n -O foo a.raw base.qcow2
convert -F raw nosuch x
convert -o ,help a.raw x
convert -O qcow2 -B base.qcow2 -F qcow2 a.raw a.raw x
convert -l s1 a.raw a.raw x
convert --target-image-opts -O raw a.raw x
commit -b nosuch base.qcow2
rebase -b co:lon -F raw mid.qcow2
rebase -f raw -b a.raw mid.qcow2
rebase -f raw -F raw -b nosuch mid.qcow2
resize base.qcow2 -k
resize base.qcow2 2M -512
resize --preallocation foo base.qcow2 -x
resize base.qcow2 -512 -q --shrink
snapshot -l -c x -Z
snapshot -U -d x nosuch
bitmap -g -1 --clear base.qcow2 b
bitmap -g 64k --clear base.qcow2
bitmap --add -f raw base.qcow2 ''
bitmap --disable orphan.qcow2 b
amend -o help
amend -o help base.qcow2
amend -o size=2M a.raw
amend -o extended_l2=on,foo=1 base.qcow2
amend -o size=2M -t foo
measure -O file a.raw
measure -o size=2M, -O qcow2
dd if=nosuch of=x -O foo
bench -c 1 -w a.raw
bench -t foo -c x
"#;

#[test]
fn lines_that_once_differed_differ_no_more() {
    let Some(directory) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let cast = Cast::make(directory.path().join("cast"), 0);
    let twins = twins(&cast.directory, directory.path(), [qemu_img, golden::ours]);
    let words = |line| {
        golden::words(line)
            .into_iter()
            .map(str::to_string)
            .collect()
    };
    expect_equal(MENDED, twins, words, comparable);
}

/// Runs lines one after the other on the files of both programs, and fails with all that do not do
/// the same.
fn expect_equal(
    lines: &'static str,
    (theirs, ours): (Twin, Twin),
    words: fn(&'static str) -> Vec<String>,
    normalized: fn(&Output, Layout) -> String,
) {
    let mut failures = String::new();
    for line in golden::lines(lines) {
        let words = words(line);
        let said = |twin: &Twin| normalized(&twin.run(&words), Layout::Free);
        let (expected, got) = (said(&theirs), said(&ours));
        if expected != got {
            failures += &format!("{line}\n--- expected\n{expected}\n--- actual\n{got}\n");
        }
        if let Err(why) = compare_files(&theirs, &ours, &mut Layout::Free) {
            failures += &format!("{line}\n{why}\n");
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// A chain that qemu-img 10.0.2 damages when it rebases with `-c`; what it shows before is what it
/// shows afterwards.
#[test]
fn a_compressed_rebase_keeps_the_disk() {
    let Some(directory) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let qemu = |program: &str, line: &[&str]| {
        run(Command::new(program).current_dir(&directory).args(line));
    };
    let create = ["create", "-q", "-f", "qcow2", "-o"];
    let made: [(&[&str], &[&str]); 3] = [
        (
            &["cluster_size=4k", "base.qcow2", "1M"],
            &["write -P 231 298496 95232", "write -P 95 123904 145920"],
        ),
        (
            &[
                "cluster_size=16k",
                "-b",
                "base.qcow2",
                "-F",
                "qcow2",
                "mid.qcow2",
                "1376256",
            ],
            &["write -P 95 140288 89088", "write -z 156160 86016"],
        ),
        (
            &[
                "compat=1.1",
                "-b",
                "mid.qcow2",
                "-F",
                "qcow2",
                "top.qcow2",
                "1M",
            ],
            &[
                "write -P 95 113664 59904",
                "write -z 757760 141824",
                "write -z 36864 71680",
            ],
        ),
    ];
    for (image, writes) in made {
        qemu("qemu-img", &[&create[..], image].concat());
        let name = image[image.len() - 2];
        let lines = writes.iter().flat_map(|line| ["-c", line]);
        let line: Vec<&str> = ["-f", "qcow2"]
            .into_iter()
            .chain(lines)
            .chain([name])
            .collect();
        qemu("qemu-io", &line);
    }
    qemu(
        "qemu-img",
        &["convert", "-O", "raw", "top.qcow2", "before.raw"],
    );
    let rebase = ["rebase", "-b", "base.qcow2", "-F", "raw", "-c", "top.qcow2"];
    run(golden::ours().current_dir(&directory).args(rebase));
    qemu(
        "qemu-img",
        &[
            "compare",
            "-f",
            "raw",
            "before.raw",
            "-F",
            "qcow2",
            "top.qcow2",
        ],
    );
}

#[test]
fn command_lines_do_what_qemu_imgs_do() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    run_some(check_case, CASES);
}

/// Differences beyond the seeds of an ordinary run: `cargo test --test command cli_differential --
/// --ignored`.
#[test]
#[ignore = "takes minutes"]
fn many_command_lines_do_what_qemu_imgs_do() {
    if peers_are_installed(&["qemu-img", "qemu-io"]) {
        run_many(check_case, 4000);
    }
}
