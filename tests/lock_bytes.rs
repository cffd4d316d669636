//! The bytes that each command locks of each file, beside QEMU's, as `strace` sees them. What
//! differs on purpose is in [`DIFFERENT`], with its reason in docs/locking.md.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::{cowslip, outcome, run, scratch, scratch_beside};

const PEERS: &[&str] = &["qemu-img", "qemu-io", "strace"];

/// Lines that lock the same bytes of the same files here and there.
const SAME: &[&str] = &[
    "qemu-img convert -O qcow2 top.qcow2 x.qcow2",
    "qemu-img convert -n -O qcow2 top.qcow2 t.qcow2",
    "qemu-img convert -O qcow2 -B base.qcow2 -F qcow2 top.qcow2 x.qcow2",
    "qemu-img dd -O qcow2 if=top.qcow2 of=x.qcow2",
    "qemu-img dd -U -f raw -O raw if=r.raw of=x.raw",
    "qemu-img map top.qcow2",
    "qemu-img map -f raw r.raw",
    "qemu-img map over.qcow2",
    "qemu-img info over.qcow2",
    "qemu-img info --backing-chain overext.qcow2",
    "qemu-img compare top.qcow2 base.qcow2",
    "qemu-img compare -f raw -F raw r.raw r2.raw",
    "qemu-img compare over.qcow2 r.raw",
    "qemu-img measure -O qcow2 top.qcow2",
    "qemu-img measure -O qcow2 over.qcow2",
    "qemu-img measure -f raw -O qcow2 r.raw",
    "qemu-img commit top.qcow2",
    "qemu-img commit over.qcow2",
    "qemu-img commit -d over.qcow2",
    "qemu-img commit -b base.qcow2 third.qcow2",
    "qemu-img commit overext.qcow2",
    "qemu-img rebase -b base.qcow2 -F qcow2 third.qcow2",
    "qemu-img rebase -u -b base.qcow2 -F qcow2 third.qcow2",
    "qemu-img rebase -b r2.raw -F raw over.qcow2",
    "qemu-img amend -o lazy_refcounts=on top.qcow2",
    "qemu-img amend -o compat=0.10 t.qcow2",
    "qemu-img resize top.qcow2 +1M",
    "qemu-img resize -f raw r.raw +1M",
    "qemu-img resize ext.qcow2 +1M",
    "qemu-img snapshot -c s2 base.qcow2",
    "qemu-img snapshot -d s1 base.qcow2",
    "qemu-img bitmap --add top.qcow2 b1",
    "qemu-img bitmap --add --merge b0 -b base.qcow2 -F qcow2 top.qcow2 b1",
    "qemu-img create -q -f qcow2 x.qcow2 1M",
    "qemu-img create -q -f raw x.raw 1M",
    "qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 x.qcow2",
    "qemu-img create -q -f qcow2 -b r.raw -F raw x.qcow2",
    "qemu-img create -q -f qcow2 -o data_file=xd.raw x.qcow2 1M",
    "qemu-img bench -c 1 -f raw r.raw",
    "qemu-img bench -w -c 1 -f raw r.raw",
    "qemu-io -c quit over.qcow2",
    "qemu-io -r -c quit over.qcow2",
    "qemu-io -c quit -f raw r.raw",
];

/// Lines that differ in one file, the new target of a copy, which others must not write.
const CLAIMED: &[(&str, &str)] = &[
    ("qemu-img convert -f raw -O raw r.raw x.raw", "x.raw"),
    ("qemu-img convert -O raw over.qcow2 x.raw", "x.raw"),
    ("qemu-img convert -O raw ext.qcow2 x.raw", "x.raw"),
    ("qemu-img convert -O raw overext.qcow2 x.raw", "x.raw"),
    ("qemu-img convert -U -O raw over.qcow2 x.raw", "x.raw"),
    ("qemu-img convert -O raw top.qcow2 x.raw", "x.raw"),
    ("qemu-img convert -f raw -O raw r.raw r2.raw x.raw", "x.raw"),
    ("qemu-img convert -l s1 -O raw base.qcow2 x.raw", "x.raw"),
    (
        "qemu-img convert -O qcow2 -o data_file=xd.raw top.qcow2 x.qcow2",
        "xd.raw",
    ),
];

/// Lines that differ, with the files that do: QEMU's bytes, and ours.
#[allow(clippy::type_complexity)] // A table.
const DIFFERENT: &[(&str, &[(&str, &[u64], &[u64])])] = &[
    // The target of a copy must not be written by others.
    (
        "qemu-img convert -n -f raw -O raw r.raw t.raw",
        &[("t.raw", &[100, 101], &[100, 101, 103, 201, 203])],
    ),
    (
        "qemu-img convert -n -O qcow2 top.qcow2 text.qcow2",
        &[("td.raw", &[100, 101, 103, 203], &[100, 101, 103, 201, 203])],
    ),
    // A copy of what is being written is torn, whichever command makes it.
    (
        "qemu-img dd -f raw -O raw if=r.raw of=x.raw",
        &[("r.raw", &[100], &[100, 201, 203])],
    ),
    (
        "qemu-img dd -O qcow2 if=over.qcow2 of=x.qcow2",
        &[("r.raw", &[100], &[100, 201, 203])],
    ),
    // A check opens the image alone.
    (
        "qemu-img check top.qcow2",
        &[("base.qcow2", &[100, 201, 203], &[])],
    ),
    (
        "qemu-img check -r all top.qcow2",
        &[("base.qcow2", &[100, 201, 203], &[])],
    ),
    ("qemu-img check ext.qcow2", &[("d.raw", &[100, 203], &[])]),
    // The list of snapshots is metadata, like the output of `info`.
    (
        "qemu-img snapshot -l base.qcow2",
        &[("base.qcow2", &[100, 201, 203], &[201, 203])],
    ),
];

type Locked = BTreeMap<String, BTreeSet<u64>>;

fn files(dir: &Path) {
    fs::write(dir.join("r.raw"), vec![7; 1 << 20]).unwrap();
    fs::write(dir.join("r2.raw"), vec![0; 1 << 20]).unwrap();
    let there = |program: &str, words: &[&str]| {
        run(Command::new(program).args(words).current_dir(dir));
    };
    let create = |line: &str| {
        let words = ["create", "-q", "-f"].into_iter();
        let words: Vec<&str> = words.chain(line.split_whitespace()).collect();
        there("qemu-img", &words);
    };
    for line in [
        "qcow2 base.qcow2 4M",
        "qcow2 -b base.qcow2 -F qcow2 top.qcow2",
        "qcow2 -b top.qcow2 -F qcow2 third.qcow2",
        "qcow2 -b r.raw -F raw over.qcow2",
        "qcow2 -o data_file=d.raw ext.qcow2 4M",
        "qcow2 -b ext.qcow2 -F qcow2 overext.qcow2",
        "qcow2 t.qcow2 4M",
        "raw t.raw 4M",
        "qcow2 -o data_file=td.raw text.qcow2 4M",
    ] {
        create(line);
    }
    there("qemu-img", &["bitmap", "--add", "base.qcow2", "b0"]);
    there("qemu-img", &["snapshot", "-c", "s1", "base.qcow2"]);
    for image in ["top.qcow2", "over.qcow2", "overext.qcow2"] {
        there("qemu-io", &["-c", "write 0 64k", image]);
    }
}

/// Locks that a program takes, by the last part of the file's name.
fn locked(line: &str, is_ours: bool, template: &Path) -> Locked {
    let dir = scratch();
    for file in fs::read_dir(template).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let (program, words) = line.split_once(' ').unwrap();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-y", "-o", "trace", "-e", "trace=fcntl"]);
    match is_ours {
        true => {
            std::os::unix::fs::symlink(cowslip().get_program(), dir.path().join(program)).unwrap();
            strace.arg(dir.path().join(program))
        }
        false => strace.arg(program),
    };
    strace.args(words.split_whitespace()).stdin(Stdio::null());
    let output = outcome(strace.current_dir(dir.path()));
    let is_difference = words.starts_with("compare") && output.status.code() == Some(1);
    assert!(
        output.status.success() || is_difference,
        "{line}: {output:?}"
    );
    let trace = fs::read_to_string(dir.path().join("trace")).unwrap();
    let mut locked = Locked::new();
    for call in trace.lines().filter_map(lock_call) {
        locked.entry(call.0).or_default().insert(call.1);
    }
    locked
}

/// File and byte of a line of strace's that takes a lock of one byte.
fn lock_call(line: &str) -> Option<(String, u64)> {
    let (call, lock) = line.split_once(", F_OFD_SETLK, {l_type=F_")?;
    let takes = lock.starts_with("RDLCK") || lock.starts_with("WRLCK");
    let name = call.split_once('<')?.1.strip_suffix('>')?;
    let start = lock.split_once("l_start=")?.1;
    let start = start.split_once(',')?.0.parse().ok()?;
    let name = name.rsplit('/').next()?.to_string();
    takes.then_some((name, start))
}

#[test]
fn every_command_locks_the_bytes_that_qemus_lock() {
    let Some(template) = scratch_beside(PEERS) else {
        return;
    };
    files(template.path());
    for line in SAME {
        assert_eq!(
            locked(line, true, template.path()),
            locked(line, false, template.path()),
            "ours, QEMU's: {line}"
        );
    }
}

#[test]
fn what_differs_from_qemus_locks_is_known() {
    let Some(template) = scratch_beside(PEERS) else {
        return;
    };
    files(template.path());
    for (line, target) in CLAIMED {
        let mut wanted = locked(line, false, template.path());
        let more = wanted.get_mut(*target).unwrap().insert(201);
        assert!(more, "QEMU claims it, too: {line}");
        assert_eq!(locked(line, true, template.path()), wanted, "{line}");
    }
    for (line, different) in DIFFERENT {
        let mut our = locked(line, true, template.path());
        let mut theirs = locked(line, false, template.path());
        for (file, qemu, ours) in *different {
            let of = |locked: &mut Locked| locked.remove(*file).unwrap_or_default();
            assert_eq!(
                of(&mut theirs),
                BTreeSet::from_iter(qemu.iter().copied()),
                "{line}: {file}"
            );
            assert_eq!(
                of(&mut our),
                BTreeSet::from_iter(ours.iter().copied()),
                "{line}: {file}"
            );
        }
        assert_eq!(our, theirs, "ours, QEMU's: {line}");
    }
}

/// A raw disk that another process writes is copied only where that is asked for.
#[test]
fn a_raw_disk_that_is_written_is_not_copied() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    files(dir.path());
    let mut writer = Command::new("qemu-io");
    writer.args(["-f", "raw", "r.raw"]).current_dir(dir.path());
    let mut writer = writer
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let ours = |words: &[&str]| {
        let mut command = cowslip();
        command.arg0("qemu-img").args(words).current_dir(dir.path());
        outcome(command.stdin(Stdio::null()))
    };
    // It has the file when it asks for a command.
    let mut prompt = [0];
    let said = writer.stdout.as_mut().unwrap().read(&mut prompt).unwrap();
    assert_eq!(said, 1, "qemu-io has ended");
    let lines = [
        "convert -f raw -O raw r.raw x.raw",
        "convert -O raw over.qcow2 x.raw",
        "dd -f raw -O raw if=r.raw of=x.raw",
        "dd -O raw if=over.qcow2 of=x.raw",
    ];
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        let refused = ours(&words);
        let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{line}: {errors}");
        assert!(
            errors.contains("Failed to get shared \"write\" lock"),
            "{line}: {errors}"
        );
        let forced = [&words[..1], &["-U"], &words[1..]].concat();
        let forced = ours(&forced);
        assert!(forced.status.success(), "-U {line}: {forced:?}");
    }
    let mut clone = cowslip();
    let clone = clone.args(["clone", "--copy", "-f", "raw", "r.raw", "c.raw"]);
    let refused = outcome(clone.current_dir(dir.path()));
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    drop(writer.stdin.take());
    writer.wait().unwrap();
}
