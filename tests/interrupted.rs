//! Ctrl-C, SIGTERM and SIGHUP in verbs that make or change an image: one line says what is left,
//! and it is true; no unfinished image passes for an image.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::path::Path;

use rustix::process::Signal;

use crate::support::golden::words;
use crate::support::running::signalled;
use crate::support::{cowslip, outcome, run, scratch, succeeds};

/// Contents of a file that existed.
static BEFORE: [u8; 100_000] = [3; 100_000];

/// Interrupts a command with `--progress=json` when it has reported some of its work. Returns what
/// it has said apart from its progress.
fn interrupted(dir: &Path, line: &str) -> String {
    let mut command = cowslip();
    command
        .current_dir(dir)
        .args(words(&format!("{line} --progress=json")));
    let said = signalled(command, Signal::INT).into_iter();
    said.map(|line| line + "\n").collect()
}

fn sources(dir: &Path) {
    std::fs::write(dir.join("a.raw"), vec![5; 32 << 20]).unwrap();
}

#[test]
fn a_target_that_is_not_completed_is_removed_or_emptied() {
    for line in [
        "create -f qcow2 -o preallocation=full --rate-limit 8M x 64M",
        "create -f raw -o preallocation=full --rate-limit 8M x 64M",
        "dd --rate-limit 1M -O qcow2 if=a.raw of=x",
        "dd --rate-limit 1M -O raw if=a.raw of=x",
        "convert --rate-limit 1M -O qcow2 a.raw x",
        "convert --rate-limit 4M -O raw -o preallocation=full a.raw x",
    ] {
        let dir = scratch();
        sources(dir.path());
        let path = dir.path().join("x");
        let said = interrupted(dir.path(), line);
        assert_eq!(said, "cowslip: Cancelled: 'x' was removed\n", "{line}");
        assert!(!path.exists(), "{line}");

        std::fs::write(&path, BEFORE).unwrap();
        let said = interrupted(dir.path(), line);
        assert_eq!(said, "cowslip: Cancelled: 'x' was emptied\n", "{line}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "{line}");
    }
}

#[test]
fn a_target_that_failed_is_removed_or_emptied_only_if_it_was_written() {
    let dir = scratch();
    let path = dir.path().join("x");
    // Refused before anything is touched.
    for line in [
        "create -f raw -o preallocation=full x 2P",
        "create -f qcow2 -o preallocation=falloc x 2T",
        "dd if=none of=x",
    ] {
        std::fs::write(&path, BEFORE).unwrap();
        let refused = outcome(cowslip().current_dir(&dir).args(words(line)));
        assert_eq!(refused.status.code(), Some(1), "{line}: {refused:?}");
        assert!(std::fs::read(&path).unwrap() == BEFORE, "{line}");
    }
}

#[test]
fn a_commit_that_is_interrupted_says_that_its_backing_file_has_a_part() {
    let dir = &scratch();
    for line in [
        "create -q -f qcow2 base 16M",
        "create -q -f qcow2 -b base -F qcow2 over 16M",
    ] {
        succeeds(dir, line);
    }
    let shell = ["io", "-f", "qcow2", "-c", "write -P 7 0 16M", "over"];
    run(cowslip().current_dir(dir).args(shell));
    let said = interrupted(dir, "commit --rate-limit 2M over");
    let expected = "cowslip: Cancelled: 'over' still has all of its data, and a part of it was \
                    written into 'base'; run commit again to complete it\n";
    assert_eq!(said, expected);
    let check = |image: &str| {
        let shell = ["io", "-r", "-f", "qcow2", "-c", "read -P 7 0 16M", image];
        let read = run(cowslip().current_dir(dir).args(shell));
        assert!(!read.contains("verification failed"), "{image}: {read}");
    };
    let shell = ["io", "-r", "-f", "qcow2", "-c", "read -P 7 0 64k", "base"];
    let base = run(cowslip().current_dir(dir).args(shell));
    assert!(!base.contains("verification failed"), "{base}");
    check("over");
    succeeds(dir, "commit over");
    check("base");
    for image in ["base", "over"] {
        run(cowslip().current_dir(dir).args(["check", image]));
    }
}

#[test]
fn a_cancellation_is_reported_once() {
    let dir = &scratch();
    sources(dir);
    for line in [
        "create -q -f qcow2 -b a.raw -F raw over 32M",
        "create -q -f qcow2 there 32M",
    ] {
        succeeds(dir, line);
    }
    for line in [
        "convert --rate-limit 1M -f raw -O qcow2 a.raw x",
        "convert --rate-limit 1M -n -f raw -O qcow2 a.raw there",
        "rebase --rate-limit 1M -f qcow2 -b '' over",
    ] {
        let said = interrupted(dir, line);
        let reports = said.to_lowercase().matches("cancelled").count();
        assert_eq!((reports, said.lines().count()), (1, 1), "{line}: {said}");
    }
}
