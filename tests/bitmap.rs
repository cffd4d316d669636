//! `bitmap` beside qemu-img's: the same words, exit codes and lists; and bitmaps that both programs
//! keep up to date, made by either of them.
//!
//! Deliberate differences: several changes of one command line are made together, so one that is
//! refused ends the list and leaves what came before it, as in QEMU, but a crash leaves all of them
//! or none; zeroes and discards that change nothing leave a bitmap clean.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::Command;

use crate::support::golden::{self, words};
use crate::support::{cowslip, outcome, peers_are_installed, run, scratch, scratch_beside};
use serde_json::Value;

/// Command lines of `bitmap`, run one after the other on the same files; those that begin with `io`
/// write.
const LINES: &str = "

a.qcow2 b0
--add
--add a.qcow2
--add a.qcow2 b0 more
--add a.qcow2 b0
--add a.qcow2 b0
io write -P 1 100k 100k a.qcow2
--add -g 4k a.qcow2 b1
--add -g 4096 a.qcow2 b1
--add -g 1000 a.qcow2 bx
--add -g 256 a.qcow2 bx
--add -g 0 a.qcow2 bx
--add -g 4G a.qcow2 bx
--add -g x a.qcow2 bx
--add --granularity 1M a.qcow2 b2
io write -P 2 1M 70k a.qcow2
--disable a.qcow2 b1
io write -P 2 2M 1 a.qcow2
--add --disable a.qcow2 b3
io write -P 2 3M 1 a.qcow2
--enable a.qcow2 b3
io write -P 2 4M 5k a.qcow2
--merge b0 a.qcow2 b1
--merge b1 a.qcow2 b2
--merge nope a.qcow2 b0
--merge b0 a.qcow2 nope
--clear a.qcow2 b0
io write -P 3 5M 1k a.qcow2
--add --merge b0 --clear --merge b3 a.qcow2 b4
--remove --add a.qcow2 b4
--remove --remove a.qcow2 b4
--clear a.qcow2 nope
--remove a.qcow2 nope
--enable a.qcow2 nope
--disable a.qcow2 nope
--merge b0 -b a.qcow2 c.qcow2 c0
--add c.qcow2 c0
--merge b0 -b a.qcow2 -F qcow2 c.qcow2 c0
--merge b1 -b a.qcow2 -F qcow2 c.qcow2 c0
--merge b1 -b small.qcow2 -F qcow2 c.qcow2 c0
--merge b1 -b nosuch -F qcow2 c.qcow2 c0
--add small.qcow2 s0
--merge s0 -b small.qcow2 -F qcow2 c.qcow2 c0
-b c.qcow2 --add a.qcow2 b9
-F qcow2 --add a.qcow2 b9
-F qcow2 --merge b0 a.qcow2 b1
-g 4k --clear a.qcow2 b0
--add a.qcow2 ''
--add v2.qcow2 b
--clear v2.qcow2 b
--add -f raw r.raw b
--remove -f raw r.raw b
--add -f foo a.qcow2 b
--add missing.qcow2 b
--foo a.qcow2 b0
--image-opts --add driver=qcow2,file.filename=a.qcow2 opts
--image-opts --remove driver=qcow2,file.filename=a.qcow2 opts
--image-opts -f qcow2 --remove driver=qcow2,file.filename=a.qcow2 opts
--remove a.qcow2 b2
--add over.qcow2 o
io write -P 3 1M 64k over.qcow2
--add d.qcow2 d
io write -P 3 1M 64k d.qcow2
";

/// Images whose bitmaps are compared in the end.
const FILES: [&str; 5] = ["a.qcow2", "c.qcow2", "small.qcow2", "over.qcow2", "d.qcow2"];

fn qemu(dir: &Path, line: &str) -> String {
    run(Command::new("qemu-img").current_dir(dir).args(words(line)))
}

fn ours(dir: &Path, line: &str) -> String {
    run(golden::ours().current_dir(dir).args(words(line)))
}

fn prepare(dir: &Path) {
    for line in [
        "create -q -f qcow2 a.qcow2 8M",
        "create -q -f qcow2 c.qcow2 8M",
        "create -q -f qcow2 small.qcow2 1M",
        "create -q -f raw r.raw 1M",
        "create -q -f qcow2 -o compat=0.10 v2.qcow2 1M",
        "create -q -f qcow2 -o data_file=d.raw,data_file_raw=on d.qcow2 8M",
        "create -q -f qcow2 -b a.qcow2 -F qcow2 -o extended_l2=on,cluster_size=128k over.qcow2",
    ] {
        qemu(dir, line);
    }
}

/// Bitmaps as the programs list them in JSON.
fn listed(dir: &Path, mut program: Command, file: &str) -> Value {
    let info = run(program
        .current_dir(dir)
        .args(["info", "--output=json", file]));
    let info: Value = serde_json::from_str(&info).unwrap();
    info["format-specific"]["data"]["bitmaps"].clone()
}

fn names(list: &Value) -> Vec<String> {
    let list = list.as_array().cloned().unwrap_or_default();
    let name = |bitmap: &Value| bitmap["name"].as_str().unwrap().to_string();
    list.iter().map(name).collect()
}

/// Returns the dirty ranges that QEMU's server reports for a bitmap.
fn dirty(dir: &Path, file: &str, bitmap: &str) -> Vec<(u64, u64)> {
    let context = format!("--map=qemu:dirty-bitmap:{bitmap}");
    let line = [
        "--json", &context, "--", "[", "qemu-nbd", "-r", "-f", "qcow2", "-B", bitmap,
    ];
    let map = run(Command::new("nbdinfo")
        .current_dir(dir)
        .args(line)
        .args([file, "]"]));
    let map: Vec<Value> = serde_json::from_str(&map).unwrap();
    let dirty = map.iter().filter(|extent| extent["type"] == 1);
    let dirty = dirty.map(|extent| ["offset", "length"].map(|key| extent[key].as_u64().unwrap()));
    dirty.map(|[offset, length]| (offset, length)).collect()
}

fn said(mut program: Command, dir: &Path, line: &[&str]) -> String {
    let output = outcome(program.current_dir(dir).arg("bitmap").args(line));
    golden::said(&output)
}

/// `io`, the command, and the file.
fn write((dir, mut program): (&Path, Command), line: &str) {
    let words = words(line);
    let (file, command) = words[1..].split_last().unwrap();
    let line = ["-f", "qcow2", "-d", "unmap", "-c", &command.join(" "), file];
    run(program.current_dir(dir).args(line));
}

fn our_io() -> Command {
    let mut command = cowslip();
    command.arg("qemu-io");
    command
}

#[test]
fn bitmap_says_and_does_what_qemu_img_does() {
    if !peers_are_installed(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]) {
        return;
    }
    let (here, there) = (scratch(), scratch());
    prepare(here.path());
    golden::copy_files(here.path(), there.path());
    let mut failures = String::new();
    let long = "n".repeat(1024);
    let too_long = ["--add", "a.qcow2", &long];
    for line in golden::lines(LINES) {
        if line.starts_with("io ") {
            write((here.path(), our_io()), line);
            write((there.path(), Command::new("qemu-io")), line);
            continue;
        }
        compare((here.path(), there.path()), &words(line), &mut failures);
    }
    compare((here.path(), there.path()), &too_long, &mut failures);
    for file in FILES {
        // A difference of the lists was reported before.
        let list = listed(there.path(), Command::new("qemu-img"), file);
        let ours = names(&listed(here.path(), Command::new("qemu-img"), file));
        for name in names(&list).into_iter().filter(|name| ours.contains(name)) {
            let (ours, theirs) = (
                dirty(here.path(), file, &name),
                dirty(there.path(), file, &name),
            );
            if ours != theirs {
                failures += &format!("{file}, {name}: {ours:x?}\nexpected: {theirs:x?}\n");
            }
        }
        let checked = qemu(here.path(), &format!("check {file}"));
        assert!(checked.starts_with("No errors"), "{file}: {checked}");
    }
    assert!(failures.is_empty(), "{failures}");
}

/// Asserts that both programs print the same, and that both images have the same bitmaps according
/// to either program.
fn compare((here, there): (&Path, &Path), line: &[&str], failures: &mut String) {
    let ours = said(golden::ours(), here, line);
    let theirs = said(Command::new("qemu-img"), there, line);
    let file = line.len().checked_sub(2).map_or("", |at| line[at]);
    let (theirs, line) = (without_nodes(&theirs, file), line.join(" "));
    if ours != theirs {
        *failures += &format!("bitmap {line}\n--- expected\n{theirs}--- actual\n{ours}");
    }
    for file in FILES.iter().filter(|file| line.contains(*file)) {
        let expected = listed(there, Command::new("qemu-img"), file);
        for program in [Command::new("qemu-img"), golden::ours()] {
            let found = listed(here, program, file);
            if found != expected {
                *failures += &format!("bitmap {line}\n{file}: {found}\nexpected: {expected}\n");
            }
        }
    }
}

/// QEMU names a node of its graph, where we name the file.
fn without_nodes(text: &str, file: &str) -> String {
    let mut parts = text.split("#block");
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        out += file;
        out += part.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    out
}

/// Command lines of `convert` that are about bitmaps.
const CONVERSIONS: &str = "
--bitmaps -O raw a.qcow2 x.raw
--bitmaps -O qcow2 -f raw r.raw x
--bitmaps -O qcow2 a.qcow2 a.qcow2 x
--bitmaps -O qcow2 a.qcow2 one
--bitmaps -O qcow2 small.qcow2 five
--bitmaps -n -O qcow2 small.qcow2 five
--bitmaps -O qcow2 -o compat=0.10 a.qcow2 two
--skip-broken-bitmaps -O qcow2 a.qcow2 two
--bitmaps -n -O qcow2 a.qcow2 over.qcow2
--bitmaps -n -O qcow2 small.qcow2 c.qcow2
--bitmaps -c -O qcow2 -o cluster_size=4k a.qcow2 three
--bitmaps -O qcow2 broken.qcow2 four
--bitmaps --skip-broken-bitmaps -O qcow2 broken.qcow2 four
";

#[test]
fn convert_copies_bitmaps_as_qemu_img_does() {
    if !peers_are_installed(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]) {
        return;
    }
    let (here, there) = (scratch(), scratch());
    let (here, there) = (here.path(), there.path());
    for dir in [here, there] {
        prepare(dir);
        for line in [
            "bitmap --add small.qcow2 s",
            "bitmap --add -g 4k a.qcow2 fine",
            "bitmap --add -g 512 --disable a.qcow2 frozen",
            "bitmap --merge fine a.qcow2 frozen",
            "create -q -f qcow2 broken.qcow2 1M",
            "bitmap --add broken.qcow2 lost",
            "bitmap --add broken.qcow2 sound",
        ] {
            qemu(dir, line);
        }
        write((dir, Command::new("qemu-io")), "io write 1M 100k a.qcow2");
        lose_first_bitmap(&dir.join("broken.qcow2"));
    }
    let mut failures = String::new();
    for line in golden::lines(CONVERSIONS) {
        let said = |mut program: Command, dir: &Path| {
            let program = program.current_dir(dir).arg("convert").args(words(line));
            golden::said(&outcome(program))
        };
        let (ours, theirs) = (
            said(golden::ours(), here),
            said(Command::new("qemu-img"), there),
        );
        if ours != theirs {
            failures += &format!("convert {line}\n--- expected\n{theirs}--- actual\n{ours}");
        }
    }
    assert_eq!(
        listed(here, Command::new("qemu-img"), "c.qcow2"),
        Value::Null
    );
    for file in ["one", "three", "four"] {
        let list = listed(there, Command::new("qemu-img"), file);
        let found = listed(here, Command::new("qemu-img"), file);
        assert!(
            found == list && !names(&list).is_empty(),
            "{file}: {found}, not {list}"
        );
        for name in names(&list) {
            assert_eq!(
                dirty(here, file, &name),
                dirty(there, file, &name),
                "{file}"
            );
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// Marks the first bitmap of an image as one that was not saved properly.
fn lose_first_bitmap(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let magic = 0x2385_2875_u32.to_be_bytes();
    let at = bytes.windows(4).position(|window| window == magic).unwrap();
    let directory = u64::from_be_bytes(bytes[at + 24..at + 32].try_into().unwrap());
    bytes[directory as usize + 15] |= 1;
    std::fs::write(path, bytes).unwrap();
}

/// Operations on an image with bitmaps; each changes something, in whole clusters where QEMU's
/// discards round.
const CHANGES: [&str; 9] = [
    "write -P 1 100k 200k",
    "write -P 2 1000001 3",
    "write -z 64k 64k",
    "write -z -u 2M 128k",
    "discard 3M 256k",
    "write -c -P 3 4M 64k",
    "write -P 4 4100k 1k",
    "discard 5M 1M",
    "write -P 5 8388600 8",
];

/// Images in which bitmaps of all granularities follow the same changes, made by us and by QEMU in
/// turns.
#[test]
fn bitmaps_are_kept_up_to_date_by_either_program() {
    if !peers_are_installed(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]) {
        return;
    }
    for (create, granularities) in [
        ("-o cluster_size=512", ["512", "64k", "1M"]),
        ("-o cluster_size=64k", ["512", "4k", "2G"]),
        ("-o cluster_size=64k,extended_l2=on", ["512", "64k", "128k"]),
        ("-o cluster_size=2M", ["512", "4k", "2M"]),
    ] {
        let (here, there) = (scratch(), scratch());
        let (here, there) = (here.path(), there.path());
        for dir in [here, there] {
            qemu(dir, &format!("create -q -f qcow2 {create} x 8M"));
            // QEMU compresses only what is not there yet.
            for fill in ["io write -P 9 0 4M x", "io write -P 9 4160k 4032k x"] {
                write((dir, Command::new("qemu-io")), fill);
            }
        }
        for (number, granularity) in granularities.iter().enumerate() {
            let add = format!("bitmap --add -g {granularity} x b{number}");
            ours(here, &add);
            qemu(there, &add);
        }
        qemu(there, "bitmap --add x frozen");
        qemu(there, "bitmap --disable x frozen");
        qemu(here, "bitmap --add --disable x frozen");
        for (number, command) in CHANGES.iter().enumerate() {
            // Parts of a cluster are not compressed, and not discarded here.
            let whole = command.contains("-c ") || command.starts_with("discard");
            if create.ends_with("=2M") && whole {
                continue;
            }
            let line = format!("io {command} x");
            // The program that writes finds the bitmaps that the other one has stored.
            match number % 3 {
                2 => write((here, Command::new("qemu-io")), &line),
                _ => write((here, our_io()), &line),
            }
            write((there, Command::new("qemu-io")), &line);
        }
        for bitmap in ["b0", "b1", "b2", "frozen"] {
            let (found, expected) = (dirty(here, "x", bitmap), dirty(there, "x", bitmap));
            assert_eq!(found, expected, "{create}, {bitmap}");
            assert_eq!(found.is_empty(), bitmap == "frozen");
        }
        qemu(here, "bitmap --add x sum");
        qemu(here, "bitmap --merge b0 --merge b2 x sum");
        assert_eq!(names(&listed(here, golden::ours(), "x")).len(), 5);
        for mut program in [Command::new("qemu-img"), golden::ours()] {
            let checked = run(program.current_dir(here).args(["check", "x"]));
            assert!(checked.starts_with("No errors"), "{create}: {checked}");
        }
    }
}

/// Operations that change nothing a guest can see leave a bitmap clean.
#[test]
fn zeroes_and_discards_of_nothing_leave_a_bitmap_clean() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-nbd", "nbdinfo"]) else {
        return;
    };
    ours(dir.path(), "create -q -f qcow2 x 8M");
    ours(dir.path(), "bitmap --add x b");
    for line in ["io write -z -u 1M 1M x", "io discard 4M 1M x"] {
        write((dir.path(), our_io()), line);
    }
    assert_eq!(dirty(dir.path(), "x", "b"), [(1 << 20, 1 << 20)]);
    write((dir.path(), our_io()), "io discard 4M 1M x");
    ours(dir.path(), "bitmap --clear x b");
    write((dir.path(), our_io()), "io write -z -u 1M 1M x");
    assert_eq!(dirty(dir.path(), "x", "b"), []);
}
