//! The VM state (`-b`): what one program saves, the other loads, in images of all kinds and through
//! internal snapshots that either makes, applies and deletes.
//!
//! On purpose three things are otherwise, and tested in the engine: a longer backing file does not
//! show in the area, a disk that grows over it shows zeroes, and one that shrinks leaks no
//! clusters.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use super::{our_io, qemu_io, text};
use crate::support::{cowslip, outcome, peers_are_installed, run, scratch};

/// Options of images, and the lines that save a state far away, which needs many L1 entries.
const IMAGES: [(&str, &str); 8] = [
    ("cluster_size=65536", "1T"),
    ("compat=0.10", "4G"),
    ("cluster_size=512", "1M"),
    ("cluster_size=512,compat=0.10", "100k"),
    ("cluster_size=2M", "1T"),
    ("extended_l2=on,cluster_size=65536", "300M"),
    ("extended_l2=on,cluster_size=16384,refcount_bits=64", "1G"),
    ("refcount_bits=8,lazy_refcounts=on", "64G"),
];

fn qemu_img() -> Command {
    Command::new("qemu-img")
}

fn our_img() -> Command {
    let mut command = cowslip();
    command.arg0("qemu-img");
    command
}

/// The programs of one side.
type Side = (fn() -> Command, fn() -> Command);

const THEIRS: Side = (qemu_img, qemu_io);
const OURS: Side = (our_img, our_io);

fn io(side: Side, directory: &Path, line: &str) {
    let mut command = side.1();
    command.args(["-f", "qcow2", "-c", line, "image.qcow2"]);
    let output = outcome(command.current_dir(directory));
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{line}: {said}");
}

fn img(side: Side, directory: &Path, words: &str) {
    let mut command = side.0();
    command.args(words.split(' ')).current_dir(directory);
    run(&mut command);
}

/// Saved, loaded, kept and brought back, each by the next side.
fn exchange(directory: &Path, options: &str, far: &str, sides: [Side; 2]) {
    let [a, b] = sides;
    let create = format!("create -q -f qcow2 -o {options} image.qcow2 1M");
    img(THEIRS, directory, &create);
    let sound = |when: &str| {
        for side in sides {
            let mut check = side.0();
            check.args(["check", "-q", "-f", "qcow2", "image.qcow2"]);
            let output = outcome(check.current_dir(directory));
            let said = text(&output.stdout) + &text(&output.stderr);
            assert!(output.status.success(), "{options}, {when}: {said}");
        }
    };
    let both_read = |commands: &[&str]| {
        for side in sides {
            commands
                .iter()
                .for_each(|command| io(side, directory, command));
        }
    };
    let read_far = format!("read -b -P 2 {far} 8k");
    io(a, directory, "write -P 9 0 1M");
    io(a, directory, "write -b -P 1 1k 60k");
    io(b, directory, &format!("write -b -P 2 {far} 8k"));
    let (before, saved) = ("read -b -P 0 0 1k", "read -b -P 1 1k 60k");
    both_read(&[before, saved, &read_far, "read -P 9 0 1M"]);
    sound("saved");
    img(b, directory, "snapshot -c one image.qcow2");
    io(a, directory, "write -b -P 3 0 512");
    io(b, directory, "write -b -P 4 60k 2k");
    sound("changed beside a snapshot");
    img(a, directory, "snapshot -c two image.qcow2");
    img(b, directory, "snapshot -a one image.qcow2");
    both_read(&[before, saved, "read -b -P 0 61k 1k"]);
    sound("applied");
    img(b, directory, "snapshot -d one image.qcow2");
    img(a, directory, "snapshot -a two image.qcow2");
    let changed = ["read -b -P 3 0 512", "read -b -P 4 60k 2k"];
    both_read(&[changed[0], changed[1], &read_far, "read -P 9 0 1M"]);
    img(a, directory, "snapshot -d two image.qcow2");
    sound("without snapshots");
}

#[test]
fn each_side_loads_what_the_other_saves() {
    if !peers_are_installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    for (options, far) in IMAGES {
        for sides in [[THEIRS, OURS], [OURS, THEIRS]] {
            let directory = scratch();
            exchange(directory.path(), options, far, sides);
        }
    }
}

/// A new size that moves the start of the area discards all of it.
#[test]
fn no_size_leaves_leaks() {
    if !peers_are_installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    for size in ["500k", "40M", "1G", "3G"] {
        let directory = &scratch();
        img(THEIRS, directory, "create -q -f qcow2 image.qcow2 600M");
        io(THEIRS, directory, "write -b -P 1 0 64k");
        io(THEIRS, directory, "write -b -P 2 512M 64k");
        img(
            OURS,
            directory,
            &format!("resize -q --shrink image.qcow2 {size}"),
        );
        img(THEIRS, directory, "check -q image.qcow2");
        let kept = u8::from(size == "1G");
        io(THEIRS, directory, &format!("read -b -P {kept} 0 64k"));
    }
}
