//! Damaged images under our own name: what fails says where, and a repair leaves nothing behind.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Output;

use crate::support::golden::words;
use crate::support::{cowslip, outcome, run, scratch, succeeds};

/// Guest offset of the cluster whose entry is damaged.
const AT: u64 = 20 << 20;

fn ended(dir: &Path, line: &str) -> Output {
    outcome(cowslip().current_dir(dir).args(words(line)))
}

fn write(dir: &Path, command: &str, image: &str) {
    run(cowslip()
        .current_dir(dir)
        .args(["io", "-f", "qcow2", "-c", command, image]));
}

fn word(bytes: &[u8], at: u64) -> u64 {
    let at = at as usize;
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// An image of 32 MiB whose L2 entry for [`AT`] points into the middle of a cluster. Returns the
/// place of the entry.
fn with_a_broken_entry(dir: &Path) -> u64 {
    succeeds(dir, "create -q -f qcow2 a 32M");
    write(dir, "write -P 7 0 32M", "a");
    let path = dir.join("a");
    let mut bytes = std::fs::read(&path).unwrap();
    let l1 = word(&bytes, 40);
    let l2 = word(&bytes, l1) & !(1 << 63);
    let entry = l2 + 8 * (AT >> 16);
    bytes[entry as usize + 6] |= 2;
    std::fs::write(&path, bytes).unwrap();
    entry
}

#[test]
fn the_shell_names_the_place_of_a_damage_and_its_remedy() {
    let dir = &scratch();
    let entry = with_a_broken_entry(dir);
    let before = std::fs::read(dir.join("a")).unwrap();
    for (command, begins) in [
        ("read 20M 64k", "read failed: Input/output error"),
        ("readv 20M 64k", "readv failed: Input/output error"),
        ("write 20M 64k", "write failed: Input/output error"),
        ("alloc 0 32M", "is_allocated failed: Input/output error"),
        ("discard 20M 64k", "discard failed: Input/output error"),
    ] {
        std::fs::write(dir.join("a"), &before).unwrap();
        let args = ["io", "-f", "qcow2", "-c", command, "a"];
        let failed = outcome(cowslip().current_dir(dir).args(args));
        let said = String::from_utf8_lossy(&failed.stdout).into_owned();
        let line = said.lines().next().unwrap();
        assert!(line.starts_with(begins), "{command}: {line}");
        let place = format!("'a' is corrupt: L2 entry at offset {entry:#x}: ");
        assert!(line.contains(&place), "{command}: {line}");
        let hint = "(check shows all damage, check -r all repairs it)";
        assert!(line.ends_with(hint), "{command}: {line}");

        std::fs::write(dir.join("a"), &before).unwrap();
        let mut theirs = cowslip();
        let as_qemu = theirs.arg0("qemu-io").current_dir(dir).args(&args[1..]);
        let said = outcome(as_qemu);
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert_eq!(said.lines().next(), Some(begins), "{command}");
    }
}

#[test]
fn a_conversion_names_the_guests_offset_of_a_damage() {
    let dir = &scratch();
    let entry = with_a_broken_entry(dir);
    for line in ["convert -f qcow2 -O raw a b", "dd -f qcow2 if=a of=b"] {
        let failed = ended(dir, line);
        let said = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert_eq!(failed.status.code(), Some(1), "{line}: {said}");
        let expected = format!(
            "error while reading block status at offset {AT}: 'a' is corrupt: L2 entry at offset \
             {entry:#x}: "
        );
        assert!(said.contains(&expected), "{line}: {said}");
        assert!(!dir.join("b").exists());
    }
    // In the second of two sources the offset is that in both.
    succeeds(dir, "create -q -f raw first 1M");
    let failed = ended(dir, "convert -O raw first a b");
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    let expected = format!("status at offset {}: ", AT + (1 << 20));
    assert!(said.contains(&expected), "{said}");
}

#[test]
fn a_repair_of_a_truncated_image_leaves_no_counts_behind_its_end() {
    for (options, lens) in [
        ("cluster_size=64k", [350_000, 1 << 20, 5_000_000]),
        ("cluster_size=512", [5000, 1 << 20, 5_000_000]),
        (
            "cluster_size=4k,refcount_bits=1",
            [100_000, 1 << 20, 5_000_000],
        ),
        (
            "cluster_size=64k,compat=0.10",
            [350_000, 1 << 20, 5_000_000],
        ),
    ] {
        let dir = &scratch();
        succeeds(dir, &format!("create -q -f qcow2 -o {options} whole 16M"));
        write(dir, "write -P 7 0 8M", "whole");
        for len in lens {
            let case = format!("{options}, {len}");
            let path = dir.join("a");
            std::fs::copy(dir.join("whole"), &path).unwrap();
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            file.set_len(len).unwrap();
            let repaired = ended(dir, "check -q -r all a");
            assert_eq!(repaired.status.code(), Some(0), "{case}: {repaired:?}");
            assert_eq!(ended(dir, "check a").status.code(), Some(0), "{case}");
            let plan = succeeds(dir, "check --plan a");
            assert_eq!(plan, "There is nothing to repair.\n", "{case}");
            // What the file grows over is free.
            write(dir, "write -P 9 10M 4M", "a");
            let checked = ended(dir, "check a");
            assert_eq!(checked.status.code(), Some(0), "{case}: {checked:?}");
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            file.set_len(32 << 20).unwrap();
            let checked = ended(dir, "check a");
            assert_eq!(checked.status.code(), Some(0), "{case}: {checked:?}");
            let args = ["io", "-r", "-f", "qcow2", "-c", "read -P 9 10M 4M", "a"];
            let read = run(cowslip().current_dir(dir).args(args));
            assert!(!read.contains("failed"), "{case}: {read}");
        }
    }
}
