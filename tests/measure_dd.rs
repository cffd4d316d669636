//! `measure` and `dd` beside qemu-img's: the same words, numbers, exit codes and files.
//!
//! Deliberate differences: `dd` refuses an output that is its input, where qemu-img empties it;
//! snapshots are refused by name.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::Command;

use crate::support::golden::{self, words};
use crate::support::{cowslip, outcome, peers_are_installed, run, scratch, scratch_beside};

const MEASURE: &str = "

a.raw
odd.raw
nosuch
a.raw odd.raw
--size 1G
--size 1G a.raw
--size 1G --image-opts
--size 1G -f raw
--size 1G -l foo
--size abc
--size -1
--size 9E
-s 5G --size 1
-O foo --size 1G
--output=xml --size 1
-O qcow2 -o foo=1 --size 1G
-O qcow2 -o cluster_size=3 --size 1G
-O qcow2 -o cluster_size=4M --size 1G
-O qcow2 -o refcount_bits=3 --size 1G
-O qcow2 -o refcount_bits=128 --size 1G
-O qcow2 -o compat=foo --size 1G
-O qcow2 -o preallocation=foo --size 1G
-O qcow2 -o extended_l2=on,cluster_size=4k --size 1G
-O qcow2 -o cluster_size=512 --size 1E
-O qcow2 -o compression_type=foo --size 1G
-O qcow2 -o size=2G --size 1G
-O qcow2 -o lazy_refcounts=on,compat=0.10 --size 1G
-O qcow2 -o data_file=x --size 1G
-O qcow2 -o backing_file=a.qcow2 --size 1G
-O qcow2 -o backing_file=a.qcow2,backing_fmt=qcow2 a.raw
-O raw -o preallocation=full --size 1000
-O raw a.qcow2
-O qcow2 a.qcow2
-O qcow2 -f qcow2 a.qcow2
-O qcow2 -o compat=0.10 a.qcow2
-O qcow2 v2.qcow2
-O qcow2 over.qcow2
-O qcow2 marked.qcow2
-O qcow2 -o cluster_size=4k marked.qcow2
-O qcow2 --output=json marked.qcow2
-O qcow2 packed.qcow2
-O qcow2 -o preallocation=falloc a.raw
-O qcow2 -o preallocation=metadata a.raw
-O qcow2 --output=json a.raw
-U a.raw
-q a.raw
--image-opts driver=raw,file.filename=a.raw
-O qcow2 --image-opts driver=qcow2,file.filename=a.qcow2
--image-opts -f raw a.raw
";

const DD: &str = "

if=a.raw
of=x
bs=0 if=a.raw of=x
bs=abc if=a.raw of=x
bs=2G if=a.raw of=x
bs=8E if=a.raw of=x
count=abc if=a.raw of=x
count=-1 if=a.raw of=x
count=1k if=a.raw of=x
skip=-1 if=a.raw of=x
skip=1k if=a.raw of=x
foo=1 if=a.raw of=x
foo if=a.raw of=x
seek=1 if=a.raw of=x
conv=notrunc if=a.raw of=x
if=nosuch of=x
-f foo if=a.raw of=x
-O foo if=a.raw of=x
-n if=a.raw of=x
--image-opts -f raw if=a.raw of=x
if=a.raw of=/nosuch/x
if=a.raw of=d
-O qcow2 if=a.raw of=d
bs=1M count=1 skip=0 if=a.raw of=d
bs=4k count=3 if=a.raw of=d
bs=4k count=30 skip=10 if=a.raw of=d
bs=4k count=3 skip=10 if=a.raw of=d
bs=4k skip=1000 if=a.raw of=d
bs=3 count=5 skip=1 if=odd.raw of=d
bs=100 skip=3 if=odd.raw of=d
-O qcow2 bs=100 skip=3 if=odd.raw of=d
count=0 if=a.raw of=d
bs=1k count=10 if=a.raw of=d bs=2k
bs=512 skip=2049 if=a.raw of=d
bs=512 skip=9223372036854775807 if=a.raw of=d
-f qcow2 -O raw if=over.qcow2 of=d
-f qcow2 -O qcow2 if=packed.qcow2 of=d
-U if=a.raw of=d
--image-opts if=driver=raw,file.filename=a.raw of=d
";

fn prepare(dir: &Path) {
    let data: Vec<u8> = (0..900_000_u32).map(|i| (i / 600) as u8).collect();
    std::fs::write(dir.join("a.raw"), data).unwrap();
    std::fs::write(dir.join("odd.raw"), [7; 1001]).unwrap();
    for line in [
        "create -q -f qcow2 a.qcow2 1M",
        "create -q -f qcow2 -o compat=0.10 v2.qcow2 3M",
        "create -q -f qcow2 -o cluster_size=4k base.qcow2 3M",
        "create -q -f qcow2 -b base.qcow2 -F qcow2 over.qcow2 5M",
        "create -q -f qcow2 marked.qcow2 1G",
        "bitmap --add marked.qcow2 first",
        "bitmap --add -g 4k marked.qcow2 second-with-a-longer-name",
        "convert -c -O qcow2 a.raw packed.qcow2",
    ] {
        run(Command::new("qemu-img").current_dir(dir).args(words(line)));
    }
    for (name, command) in [
        ("a.qcow2", "write -P 1 100k 1"),
        ("base.qcow2", "write -P 2 60k 100k"),
        ("base.qcow2", "write -P 2 2M 1"),
        ("over.qcow2", "write -z 64k 64k"),
        ("over.qcow2", "write -P 3 2500k 300k"),
    ] {
        run(Command::new("qemu-io")
            .current_dir(dir)
            .args(["-c", command, name]));
    }
}

fn compare(verb: &str, lines: &str, check: impl Fn(&Path, &Path, &str) -> String) {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let (here, there) = (scratch(), scratch());
    prepare(here.path());
    prepare(there.path());
    let mut failures = String::new();
    for line in golden::lines(lines) {
        let command_line = [&[verb][..], &words(line)].concat();
        failures += &golden::difference(&command_line, here.path(), there.path());
        failures += &check(here.path(), there.path(), line);
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn measure_tells_what_qemu_img_tells() {
    compare("measure", MEASURE, |_, _, _| String::new());
}

#[test]
fn sizes_are_qemu_imgs_for_all_geometries() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    let printed = |mut program: Command, options: &str, size: &str| {
        let line = ["measure", "-O", "qcow2", "-o", options, "--size", size];
        run(program.current_dir(&dir).args(line))
    };
    for bits in [9, 12, 14, 16, 19, 21] {
        for refcount_bits in [1, 16, 64] {
            for extended in ["off", "on"] {
                if extended == "on" && bits < 14 {
                    continue;
                }
                let options = format!(
                    "cluster_size={},refcount_bits={refcount_bits},extended_l2={extended}",
                    1 << bits
                );
                for size in ["1", "12345678", "1G", "100000000000"] {
                    let ours = printed(cowslip(), &options, size);
                    let theirs = printed(Command::new("qemu-img"), &options, size);
                    assert_eq!(ours, theirs, "{options} {size}");
                }
            }
        }
    }
}

#[test]
fn dd_says_and_does_what_qemu_img_does() {
    compare("dd", DD, |here, there, line| {
        let (ours, theirs) = (here.join("d"), there.join("d"));
        if !theirs.exists() {
            return String::new();
        }
        let format = if line.contains("-O qcow2") {
            "qcow2"
        } else {
            "raw"
        };
        let mut compare = Command::new("qemu-img");
        compare.args(["compare", "-s", "-f", format, "-F", format]);
        let compared = outcome(compare.args([&ours, &theirs]));
        let same = compared.status.success();
        for file in [ours, theirs] {
            std::fs::remove_file(file).unwrap();
        }
        match same {
            true => String::new(),
            false => format!("dd {line}: {}", String::from_utf8_lossy(&compared.stdout)),
        }
    });
}

#[test]
fn the_input_is_never_the_output() {
    let dir = scratch();
    std::fs::write(dir.path().join("a.raw"), [5; 4096]).unwrap();
    for words in [
        &["dd", "if=a.raw", "of=a.raw"][..],
        &["dd", "-U", "if=a.raw", "of=a.raw"],
    ] {
        let refused = outcome(cowslip().current_dir(&dir).args(words));
        assert_eq!(refused.status.code(), Some(1));
        assert_eq!(std::fs::read(dir.path().join("a.raw")).unwrap(), [5; 4096]);
    }
}
