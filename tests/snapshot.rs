//! `snapshot` beside qemu-img's: the same words, exit codes and lists, and images in which both
//! find the same snapshots; and what is our own.
//!
//! Deliberate differences: what cannot be counted is refused by name, and leaves no leak; `-d`
//! takes an ID under our own name; long options take their values as short ones do; a name of more
//! than 255 bytes is refused.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::support::golden::{self, words};
use crate::support::{
    cowslip, outcome, peer_succeeds, peers_are_installed, run, scratch, scratch_beside,
};
use serde_json::Value;

/// Command lines of `snapshot`, run one after the other on the same files.
const LINES: &str = "

a.qcow2
-l a.qcow2
-c one a.qcow2
-c one a.qcow2
-c 2 a.qcow2
-c '' a.qcow2
-c 7 a.qcow2
-l a.qcow2
a.qcow2
-q -l a.qcow2
-a nope a.qcow2
-d nope a.qcow2
-d 1 a.qcow2
-a 1 a.qcow2
-a one a.qcow2
-d one a.qcow2
-l a.qcow2
-d 2 a.qcow2
-a 7 a.qcow2
-d 7 a.qcow2
-q -c next a.qcow2
-l a.qcow2
-a one -c two a.qcow2
-l -l a.qcow2
-c one -c two a.qcow2
-l -d one a.qcow2
-l missing.qcow2
-c x missing.qcow2
-l a.qcow2 b.qcow2
-x a.qcow2
-l
-f raw -l a.qcow2
-f raw -c x a.qcow2
-f raw -a x a.qcow2
-f raw -d x a.qcow2
-f foo -d x a.qcow2
-f qcow2 -c of a.qcow2
--image-opts -l driver=qcow2,file.filename=a.qcow2
--image-opts -c opts driver=qcow2,file.filename=a.qcow2
--image-opts -f qcow2 -l driver=qcow2,file.filename=a.qcow2
-U -l a.qcow2
-U -c z a.qcow2
-U -d opts a.qcow2
--list a.qcow2
-l r.raw
-c x r.raw
-l v2.qcow2
-c x v2.qcow2
-c y v2.qcow2
-d x v2.qcow2
-a y v2.qcow2
-l v2.qcow2
-c x d.qcow2
-l d.qcow2
-a x d.qcow2
-d x d.qcow2
-a small s.qcow2
-c later s.qcow2
-a large s.qcow2
-d small s.qcow2
-l s.qcow2
-c over over.qcow2
-l over.qcow2
-a over over.qcow2
-d over over.qcow2
";

/// Files whose lists are compared after each line.
const FILES: [&str; 4] = ["a.qcow2", "v2.qcow2", "s.qcow2", "over.qcow2"];

fn prepare(dir: &Path) {
    let qemu = |line: &str| run(Command::new("qemu-img").current_dir(dir).args(words(line)));
    let write = |image: &str, command: &str| {
        let line = ["-f", "qcow2", "-c", command, image];
        run(Command::new("qemu-io").current_dir(dir).args(line));
    };
    for line in [
        "create -q -f qcow2 a.qcow2 1M",
        "create -q -f raw r.raw 1M",
        "create -q -f qcow2 -o compat=0.10 v2.qcow2 1M",
        "create -q -f qcow2 -o data_file=d.raw d.qcow2 1M",
        "create -q -f qcow2 s.qcow2 1M",
        "create -q -f qcow2 -b r.raw -F raw over.qcow2",
    ] {
        qemu(line);
    }
    for image in ["a.qcow2", "v2.qcow2", "over.qcow2"] {
        write(image, "write -P 3 64k 200k");
    }
    write("s.qcow2", "write -P 1 0 100k");
    qemu("snapshot -c small s.qcow2");
    qemu("resize -q s.qcow2 3M");
    write("s.qcow2", "write -P 2 2M 100k");
    qemu("snapshot -c large s.qcow2");
}

/// Dates as words: the programs run at different times.
fn undated(text: &str) -> String {
    let is_date = |word: &str| word.len() == 10 && word.as_bytes()[4] == b'-';
    let is_time = |word: &str| word.len() == 8 && word.as_bytes()[2] == b':';
    let mut out = String::new();
    for part in text.split_inclusive(' ') {
        let word = part.trim_end();
        match (is_date(word), is_time(word)) {
            (true, _) => out += &part.replace(word, "YYYY-MM-DD"),
            (_, true) => out += &part.replace(word, "HH:MM:SS"),
            _ => out += part,
        }
    }
    out
}

fn said(mut program: Command, dir: &Path, line: &str) -> String {
    let program = program.current_dir(dir).env("TZ", "UTC");
    let output = outcome(program.arg("snapshot").args(words(line)));
    let text = golden::said(&output);
    undated(&text)
}

/// Returns qemu-img's description of an image, without dates and space.
fn described(dir: &Path, file: &str) -> Value {
    let line = ["info", "--output=json", file];
    let info = run(Command::new("qemu-img").current_dir(dir).args(line));
    let mut info: Value = serde_json::from_str(&info).unwrap();
    for key in ["actual-size", "children"] {
        info.as_object_mut().unwrap().remove(key);
    }
    if let Some(Value::Array(snapshots)) = info.get_mut("snapshots") {
        for snapshot in snapshots {
            for key in ["date-sec", "date-nsec"] {
                snapshot.as_object_mut().unwrap().remove(key);
            }
        }
    }
    info
}

#[test]
fn snapshot_says_and_does_what_qemu_img_does() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let (here, there) = (scratch(), scratch());
    prepare(here.path());
    golden::copy_files(here.path(), there.path());
    let mut failures = String::new();
    for line in golden::lines(LINES) {
        let ours = said(golden::ours(), here.path(), line);
        let theirs = said(Command::new("qemu-img"), there.path(), line);
        if ours != theirs {
            failures += &format!("snapshot {line}\n--- expected\n{theirs}--- actual\n{ours}");
        }
        for file in FILES.iter().filter(|file| line.ends_with(*file)) {
            let (ours, theirs) = (described(here.path(), file), described(there.path(), file));
            if ours != theirs {
                failures += &format!("snapshot {line}\n{file}: {ours}\nexpected: {theirs}\n");
            }
            let info = |dir: &Path, mut program: Command| {
                let line = ["info", file];
                undated(&run(program.current_dir(dir).env("TZ", "UTC").args(line)))
            };
            let (ours, theirs) = (
                info(here.path(), golden::ours()),
                info(here.path(), Command::new("qemu-img")),
            );
            if ours != theirs {
                failures += &format!("info {file}\n--- expected\n{theirs}--- actual\n{ours}");
            }
        }
    }
    for file in FILES {
        let mut check = Command::new("qemu-img");
        let checked = run(check.current_dir(&here).args(["check", file]));
        assert!(checked.starts_with("No errors"), "{file}: {checked}");
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn lists_are_told_to_programs_and_ids_are_deleted_under_our_own_name() {
    let dir = scratch();
    let ours = |line: &str| outcome(cowslip().current_dir(&dir).args(words(line)));
    let succeeds = |line: &str| {
        let output = ours(line);
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let ids = || {
        let list: Value = serde_json::from_str(&succeeds("snapshot -l --json x")).unwrap();
        let list = list.as_array().unwrap().clone();
        let id = |snapshot: &Value| snapshot["id"].as_str().unwrap().to_string();
        list.iter().map(id).collect::<Vec<_>>()
    };
    succeeds("create -q -f qcow2 x 64M");
    assert_eq!(ids(), Vec::<String>::new());
    for name in ["a", "1", "c"] {
        succeeds(&format!("snapshot -c {name} x"));
    }
    // The one named "1" goes first, then the one whose ID that is.
    succeeds("snapshot -d 1 x");
    assert_eq!(ids(), ["1", "3"]);
    succeeds("snapshot -d 1 x");
    assert_eq!(ids(), ["3"]);
    let refused = ours("snapshot -d 1 x");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        text.contains("Could not delete snapshot '1': snapshot not found"),
        "{text}"
    );
    let long = format!("snapshot -c {} x", "n".repeat(256));
    assert_eq!(ours(&long).status.code(), Some(1));
    assert_eq!(ids(), ["3"]);
    let wrote = cowslip()
        .current_dir(&dir)
        .args(["io", "-c", "write 0 10M", "x"])
        .output();
    assert!(wrote.unwrap().status.success());
    let progress = ours("snapshot --progress=json -c shown x");
    let text = String::from_utf8_lossy(&progress.stderr).into_owned();
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last["done"], last["total"], "{text}");
    let unknown = ours("snapshot --objects secret,id=s -l x");
    let text = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(text.contains("unrecognized option '--objects'"), "{text}");
}

#[test]
fn the_disk_is_read_as_it_was() {
    let dir = scratch();
    let ours = |line: &[&str]| {
        let output = outcome(cowslip().current_dir(&dir).args(line));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (
            output.status.code(),
            text + &String::from_utf8_lossy(&output.stderr),
        )
    };
    let io = |image: &str, command: &str| {
        let (code, text) = ours(&["io", "-r", "--image-opts", "-c", command, image]);
        (code == Some(0), text)
    };
    let write = |command: &str| {
        assert_eq!(ours(&["io", "-c", command, "x"]).0, Some(0));
    };
    assert_eq!(ours(&["create", "-q", "-f", "qcow2", "x", "1M"]).0, Some(0));
    write("write -P 1 0 200k");
    assert_eq!(ours(&["snapshot", "-c", "then", "x"]).0, Some(0));
    assert_eq!(ours(&["resize", "-q", "x", "2M"]).0, Some(0));
    write("write -P 2 100k 1500k");
    for image in [
        "driver=qcow2,file.filename=x,snapshot.name=then",
        "driver=qcow2,file.filename=x,snapshot.id=1",
        "driver=qcow2,file.filename=x,snapshot.id=1,snapshot.name=then",
    ] {
        assert!(io(image, "read -P 1 0 200k").0, "{image}");
        assert!(io(image, "read -P 0 200k 824k").0, "{image}");
        assert!(!io(image, "read 1M 512").0, "the disk was smaller");
    }
    assert!(io("driver=qcow2,file.filename=x", "read -P 2 100k 1500k").0);
    for image in [
        "driver=qcow2,file.filename=x,snapshot.name=now",
        "driver=qcow2,file.filename=x,snapshot.id=1,snapshot.name=now",
        "driver=raw,file.filename=x,snapshot.id=1",
    ] {
        let (opens, text) = io(image, "read 0 512");
        assert!(!opens && text.contains("snapshot"), "{image}: {text}");
    }
    let writing = ["io", "--image-opts", "-c", "write 0 512"];
    let image = "driver=qcow2,file.filename=x,snapshot.id=1";
    let (code, text) = ours(&[&writing[..], &[image]].concat());
    assert!(
        code == Some(1) && text.contains("can only be read"),
        "{text}"
    );
}

/// Command lines that read a snapshot, each with the file that it makes or `-`.
const SOURCES: &str = "
convert -l small -O raw t.qcow2 OUT
convert -l large -O qcow2 t.qcow2 OUT
convert -l snapshot.id=1 -O qcow2 t.qcow2 OUT
convert -l snapshot.name=large -O raw -f qcow2 t.qcow2 OUT
convert -l snapshot.name=large,snapshot.id=2 -O raw t.qcow2 OUT
convert -l snapshot.name=small,snapshot.id=2 -O raw t.qcow2 OUT
convert -l 2 -c -O qcow2 t.qcow2 OUT
convert -l 3 -O raw t.qcow2 OUT
convert -l '' -O raw t.qcow2 OUT
convert -l snapshot.foo=1 -O raw t.qcow2 OUT
convert -l small -O raw nosuch OUT
convert -l small -O raw -f raw t.qcow2 OUT
convert -l small -O raw t.qcow2 t.qcow2 OUT
measure -l small -O qcow2 t.qcow2
measure -l snapshot.id=2 -O raw t.qcow2
measure -l large --output=json -O qcow2 t.qcow2
measure -l nosuch -O qcow2 t.qcow2
measure -l snapshot.foo=1 -O qcow2 t.qcow2
measure -l small -O qcow2 -f raw t.qcow2
measure -l small -O qcow2
";

/// An image with snapshots of two states, of one size: qemu-img gives a snapshot the size that the
/// disk has now.
fn prepare_states(dir: &Path) {
    let create = words("create -q -f qcow2 t.qcow2 3M");
    run(Command::new("qemu-img").current_dir(dir).args(create));
    for (write, name) in [
        ("write -P 1 0 100k", "small"),
        ("write -P 2 50k 2M", "large"),
    ] {
        let write = ["-f", "qcow2", "-c", write, "t.qcow2"];
        run(Command::new("qemu-io").current_dir(dir).args(write));
        let snapshot = ["snapshot", "-c", name, "t.qcow2"];
        run(Command::new("qemu-img").current_dir(dir).args(snapshot));
    }
    let write = ["-f", "qcow2", "-c", "write -P 3 0 3M", "t.qcow2"];
    run(Command::new("qemu-io").current_dir(dir).args(write));
}

#[test]
fn a_snapshot_is_the_source_of_a_conversion() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    prepare_states(dir.path());
    for line in golden::lines(SOURCES) {
        let said = |mut program: Command, out: &str| {
            let line = words(line).into_iter();
            let line = line.map(|word| if word == "OUT" { out } else { word });
            golden::said(&outcome(program.current_dir(&dir).args(line)))
        };
        let (ours, theirs) = (
            said(golden::ours(), "ours"),
            said(Command::new("qemu-img"), "theirs"),
        );
        assert_eq!(ours, theirs, "{line}");
        let made = |file: &str| dir.path().join(file).exists();
        assert_eq!(made("ours"), made("theirs"), "{line}");
        if made("ours") {
            let compare = ["compare", "-s", "ours", "theirs"];
            run(Command::new("qemu-img").current_dir(&dir).args(compare));
            std::fs::remove_file(dir.path().join("ours")).unwrap();
            std::fs::remove_file(dir.path().join("theirs")).unwrap();
        }
    }
}

#[test]
fn a_snapshot_is_served_to_readers() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    prepare_states(dir.path());
    let socket = dir.path().join("socket");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    for snapshot in ["small", "snapshot.id=2"] {
        let mut server = cowslip();
        let server = server.current_dir(&dir).args(["qemu-nbd", "--fork"]);
        run(server
            .args(["-f", "qcow2", "-l", snapshot, "-k"])
            .arg(&socket)
            .arg("t.qcow2"));
        let convert = ["convert", "-l", snapshot, "-O", "raw", "t.qcow2", "then"];
        run(Command::new("qemu-img").current_dir(&dir).args(convert));
        let mut compare = Command::new("qemu-img");
        let compare = compare.current_dir(&dir).args(["compare", "-f"]);
        // The server ends with its only client, and its socket goes with it.
        run(compare.args(["raw", "-F", "raw", "then", &uri]));
        while socket.exists() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
    for (snapshot, refusal) in [
        (
            "3",
            "qemu-nbd: Failed to load snapshot: Can't find snapshot\n",
        ),
        (
            "snapshot.foo=1",
            "qemu-nbd: Invalid parameter 'snapshot.foo'\n\
             qemu-nbd: Failed in parsing snapshot param `snapshot.foo=1'\n",
        ),
    ] {
        for mut program in [qemu_nbd_of_ours(), Command::new("qemu-nbd")] {
            let program = program.current_dir(&dir).args(["-l", snapshot, "-k"]);
            let output = outcome(program.arg(&socket).arg("t.qcow2"));
            assert_eq!(String::from_utf8_lossy(&output.stderr), refusal);
            assert_eq!(output.status.code(), Some(1));
        }
    }
}

fn qemu_nbd_of_ours() -> Command {
    let mut command = cowslip();
    command.arg("qemu-nbd");
    command
}

/// Changes bytes of a file.
fn poke(file: &Path, offset: u64, bytes: &[u8]) {
    let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

/// Returns the output and the exit code of a program for these arguments of qemu-img.
fn answers(mut program: Command, dir: &Path, words: &[&str]) -> (String, Option<i32>) {
    let output = outcome(program.current_dir(dir).args(words));
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    (
        String::from_utf8_lossy(&text).into_owned(),
        output.status.code(),
    )
}

#[test]
fn a_zero_byte_ends_a_name_as_it_does_for_qemu_img() {
    let Some(dir) = &scratch_beside(&["qemu-img"]) else {
        return;
    };
    let image = dir.join("a.qcow2");
    peer_succeeds(dir, "qemu-img create -q -f qcow2 a.qcow2 1M");
    peer_succeeds(dir, "qemu-img snapshot -c name a.qcow2");
    let bytes = std::fs::read(&image).unwrap();
    let at = bytes
        .windows(5)
        .position(|bytes| bytes == b"1name")
        .unwrap();
    poke(&image, at as u64, b"1na\0e");
    for words in [
        vec!["snapshot", "-l", "a.qcow2"],
        vec!["info", "--output=json", "a.qcow2"],
        vec!["snapshot", "-a", "name", "a.qcow2"],
        vec!["snapshot", "-a", "na", "a.qcow2"],
    ] {
        let theirs = answers(Command::new("qemu-img"), dir, &words);
        assert_eq!(answers(golden::ours(), dir, &words), theirs, "{words:?}");
    }
    let deleted = answers(golden::ours(), dir, &["snapshot", "-d", "na", "a.qcow2"]);
    assert_eq!(deleted, (String::new(), Some(0)));
}

#[test]
fn a_table_of_more_than_64_mib_is_refused() {
    if !peers_are_installed(&["qemu-img"]) {
        return;
    }
    /// The longest ID and name, and all the extra data that there may be.
    const ENTRY_BYTES: u64 = (40u64 + 1024 + 2 * 65535).next_multiple_of(8);
    const TABLE: u64 = 1 << 20;
    let dir = &scratch();
    let image = dir.join("a.qcow2");
    peer_succeeds(dir, "qemu-img create -q -f qcow2 a.qcow2 1M");
    let count = (64u64 << 20) / ENTRY_BYTES + 1;
    for entry in 0..count {
        let at = TABLE + entry * ENTRY_BYTES;
        poke(&image, at + 12, &[0xff; 4]);
        poke(&image, at + 36, &1024_u32.to_be_bytes());
    }
    poke(&image, TABLE + count * ENTRY_BYTES - 1, &[0]);
    poke(&image, 60, &(count as u32).to_be_bytes());
    poke(&image, 64, &TABLE.to_be_bytes());
    for program in [Command::new("qemu-img"), golden::ours()] {
        let (text, status) = answers(program, dir, &["info", "a.qcow2"]);
        assert!(text.contains("Snapshot table is too big"), "{text}");
        assert_eq!(status, Some(1));
    }
}

#[test]
fn dates_are_those_of_the_time_zone() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    for line in ["create -q -f qcow2 a.qcow2 1M", "snapshot -c one a.qcow2"] {
        let mut program = Command::new("qemu-img");
        run(program.current_dir(dir.path()).args(words(line)));
    }
    // Rules, a name of the system's files if it has them, and nonsense.
    for zone in ["XYZ-5:30", "America/St_Johns", "UTC", "", "no/such"] {
        let listed = |mut program: Command| {
            let line = words("snapshot -l a.qcow2");
            run(program.current_dir(dir.path()).env("TZ", zone).args(line))
        };
        let (ours, theirs) = (listed(golden::ours()), listed(Command::new("qemu-img")));
        assert_eq!(ours, theirs, "TZ={zone}");
    }
}
