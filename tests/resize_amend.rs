//! `resize` and `amend` beside qemu-img's: the same words, exit codes, and images that mean the
//! same.
//!
//! Deliberate differences: where a longer backing file would show, what is added is marked zero,
//! and has its space, where qemu-img may write zeroes; the tail of the old last cluster of an image
//! with subclusters is marked zero; a data file gets its space where qemu-img only gives it its
//! length, and that length exactly; `amend` leaves zero clusters no space where nothing lies below
//! them.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use crate::support::golden::{self, words};
use crate::support::{
    cowslip, outcome, peer_succeeds, peers_are_installed, run, scratch, scratch_beside, succeeds,
};

mod chains;

/// Command lines of `resize`, run one after the other on the same files.
const RESIZE: &str = "

a.qcow2
a.qcow2 +foo
a.qcow2 foo
a.qcow2 2M 3M
a.qcow2 1M
a.qcow2 512k
--shrink a.qcow2 512k
a.qcow2 -1M
a.qcow2 -- -256k
--shrink a.qcow2 -256k
-q a.qcow2 +1
-q a.qcow2 +512
a.qcow2 +0
a.qcow2 0
--shrink a.qcow2 0
a.qcow2 1000
--preallocation=foo a.qcow2 2M
--preallocation=falloc --shrink a.qcow2 256
--preallocation=falloc a.qcow2 1000
nofile 1M
-f raw nofile 1M
r.raw 2M
-f raw r.raw 2M
-f raw r.raw 3000001
-f raw r.raw 1M
-f raw --shrink r.raw 1M
-f raw --preallocation=metadata r.raw 4M
-f raw --preallocation=falloc r.raw 4M
-f raw --preallocation=full r.raw 4M
-f raw --preallocation=full r.raw 5M
--image-opts driver=raw,file.filename=r.raw 6M
-f qcow2 a.qcow2 9E
-f qcow2 a.qcow2 +8E
-f qcow2 a.qcow2 5E
-f foo a.qcow2 5E
a.qcow2 10000000000000000000000
c.qcow2 1T
v2.qcow2 2M
--shrink a.qcow2 -512
a.qcow2 +1.5M
a.qcow2 1.5x
a.qcow2 ''
a.qcow2 +-5
a.qcow2 0x300000
";

/// Command lines of `amend`. Counts get another width in small clusters: with large ones QEMU takes
/// a minute.
const AMEND: &str = "
a.qcow2

-o compat=0.10
-o compat=0.10 a.qcow2 b.qcow2
-f qcow2 -o compat=0.10 a.qcow2
-f qcow2 -o compat=foo a.qcow2
-f qcow2 -o lazy_refcounts=on a.qcow2
-f qcow2 -o compat=v3,lazy_refcounts=on a.qcow2
-f qcow2 -o lazy_refcounts=off a.qcow2
-f qcow2 -o cluster_size=128k a.qcow2
-f qcow2 -o preallocation=full a.qcow2
-f qcow2 -o refcount_bits=7 a.qcow2
-f qcow2 -o refcount_bits=128 a.qcow2
-f qcow2 -o compat=0.10,refcount_bits=16 a.qcow2
-f qcow2 -o compat=0.10,refcount_bits=8 a.qcow2
-f qcow2 -o compat=1.1,lazy_refcounts=off a.qcow2
-f qcow2 -o compat=0.10 c.qcow2
-f qcow2 -o refcount_bits=1,compat=1.1 c.qcow2
-f qcow2 -o refcount_bits=8 c.qcow2
-f qcow2 -o compat=0.10 c.qcow2
-f qcow2 -o refcount_bits=16,lazy_refcounts=off c.qcow2
-f qcow2 -o size=2M a.qcow2
-f qcow2 -o size=1M a.qcow2
-f qcow2 -o backing_file=base.qcow2 a.qcow2
-f qcow2 -o backing_fmt=raw a.qcow2
-f qcow2 -o backing_file= a.qcow2
-f qcow2 -o data_file=x a.qcow2
-f qcow2 -o data_file_raw=on a.qcow2
-f qcow2 -o data_file=e.raw d.qcow2
-f qcow2 -o data_file_raw=off d.qcow2
-f qcow2 -o data_file_raw=on d.qcow2
-f qcow2 -o compat=0.10 d.qcow2
-f qcow2 -o data_file= d.qcow2
-f qcow2 -o lazy_refcounts=on d.qcow2
-f qcow2 -o help a.qcow2
-f qcow2 -o help
-f raw -o help
-f raw -o size=3M r.raw
-f qcow2 -o foo=1 a.qcow2
-f qcow2 -o extended_l2=on a.qcow2
-f qcow2 -o compression_type=zstd a.qcow2
-f qcow2 -o encryption=on a.qcow2
-o lazy_refcounts=on a.qcow2
-q -o lazy_refcounts=off a.qcow2
-o compat=0.10 x.qcow2
-o lazy_refcounts=on x.qcow2
-o size=4M v2.qcow2
-t foo -o size=4M v2.qcow2
-o compat=v3,size=3M v2.qcow2
-o compat=0.10 v2.qcow2
-o compat=0.10,size=1M v2.qcow2
-o backing_file=r.raw,backing_fmt=raw over.qcow2
-o backing_file=r.raw,lazy_refcounts=on over.qcow2
";

fn prepare(dir: &Path) {
    let qemu = |line: &str| run(Command::new("qemu-img").current_dir(dir).args(words(line)));
    for line in [
        "create -q -f qcow2 a.qcow2 1M",
        "create -q -f raw r.raw 1M",
        "create -q -f raw e.raw 1M",
        "create -q -f qcow2 -o cluster_size=512 c.qcow2 1M",
        "create -q -f qcow2 -o compat=0.10 v2.qcow2 1M",
        "create -q -f qcow2 -o extended_l2=on x.qcow2 1M",
        "create -q -f qcow2 -o data_file=d.raw,data_file_raw=on d.qcow2 1M",
        "create -q -f qcow2 -b r.raw -F raw over.qcow2",
        "snapshot -c x v2.qcow2",
    ] {
        qemu(line);
    }
}

/// Compares the output of both programs for each line, and the resulting files.
fn compare(verb: &str, lines: &str, files: &[&str]) {
    if !peers_are_installed(&["qemu-img"]) {
        return;
    }
    let (here, there) = (scratch(), scratch());
    prepare(here.path());
    golden::copy_files(here.path(), there.path());
    let mut failures = String::new();
    for line in golden::lines(lines) {
        let command_line = [&[verb][..], &words(line)].concat();
        failures += &golden::difference(&command_line, here.path(), there.path());
        for file in files {
            let info = |dir: &Path| {
                let line = ["info", "-U", "--output=json", file];
                let info = run(Command::new("qemu-img").current_dir(dir).args(line));
                let mut info: serde_json::Value = serde_json::from_str(&info).unwrap();
                // How much space is used is not what these verbs are about.
                for key in ["actual-size", "children"] {
                    info.as_object_mut().unwrap().remove(key);
                }
                info
            };
            let (ours, theirs) = (info(here.path()), info(there.path()));
            if ours != theirs {
                failures += &format!("{verb} {line}\n{file}: {ours}\nexpected: {theirs}\n");
            }
        }
    }
    for file in files.iter().filter(|file| file.ends_with(".qcow2")) {
        let checked = outcome(
            Command::new("qemu-img")
                .current_dir(&here)
                .args(["check", file]),
        );
        // One lost its data file's name.
        if !checked.status.success() && *file != "d.qcow2" {
            failures += &format!("{file}: {}", String::from_utf8_lossy(&checked.stdout));
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn resize_says_and_does_what_qemu_img_does() {
    compare(
        "resize",
        RESIZE,
        &["a.qcow2", "r.raw", "c.qcow2", "v2.qcow2"],
    );
}

#[test]
fn amend_says_and_does_what_qemu_img_does() {
    let files = [
        "a.qcow2",
        "c.qcow2",
        "d.qcow2",
        "x.qcow2",
        "v2.qcow2",
        "over.qcow2",
    ];
    compare("amend", AMEND, &files);
}

#[test]
fn what_resize_preallocates_is_what_qemu_img_preallocates() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let kinds = [
        "",
        "-o extended_l2=on",
        "-o cluster_size=4k",
        "-o compat=0.10",
        "-o data_file=d.raw",
        "-o data_file=d.raw,data_file_raw=on",
        "-b base.raw -F raw -o extended_l2=on",
        "-b base.raw -F raw",
    ];
    for kind in kinds {
        for how in ["off", "metadata", "falloc", "full"] {
            let dirs = [scratch(), scratch()];
            for (at, dir) in dirs.iter().enumerate() {
                std::fs::write(dir.path().join("base.raw"), vec![5; 3 << 20]).unwrap();
                let create = format!("create -q -f qcow2 {kind} x.qcow2 1000k");
                run(Command::new("qemu-img")
                    .current_dir(dir)
                    .args(words(&create)));
                let write = ["-f", "qcow2", "-c", "write -P 9 300k 200k", "x.qcow2"];
                run(Command::new("qemu-io").current_dir(dir).args(write));
                let mut program = match at {
                    0 => cowslip(),
                    _ => Command::new("qemu-img"),
                };
                let line = format!("resize --preallocation={how} x.qcow2 5001k");
                run(program.current_dir(dir).args(words(&line)));
            }
            let [ours, theirs] = [dirs[0].path(), dirs[1].path()];
            let case = format!("{kind} {how}");
            let checked = peer_succeeds(ours, "qemu-img check x.qcow2");
            assert!(checked.starts_with("No errors"), "{case}: {checked}");
            // Images with a data file name it, so they are compared as what they say.
            let bytes = |dir: &Path| {
                let line = "convert -f qcow2 -O raw x.qcow2 all.raw";
                run(Command::new("qemu-img").current_dir(dir).args(words(line)));
                std::fs::read(dir.join("all.raw")).unwrap()
            };
            assert!(bytes(ours) == bytes(theirs), "{case}: the disks differ");
            let keys: &[&str] = match kind.contains("extended") {
                true => &["data"],
                false => &["present", "data"],
            };
            // Over a backing file that is longer than the disk was, zeroes are said or written.
            if !kind.contains("-b ") {
                let mapped = |dir: &Path| golden::mapped(dir, "x.qcow2", keys);
                assert_eq!(mapped(ours), mapped(theirs), "{case}");
            }
            let stat = |dir: &Path, name: &str| std::fs::metadata(dir.join(name)).unwrap();
            let holder = if kind.contains("d.raw") {
                "d.raw"
            } else {
                "x.qcow2"
            };
            if how == "falloc" || how == "full" {
                assert!(stat(ours, holder).blocks() * 512 >= 4 << 20, "{case}");
            }
            if !kind.contains("d.raw") && !kind.contains("extended") && !kind.contains("4k") {
                let [a, b] = [stat(ours, holder), stat(theirs, holder)];
                // Each places refcount blocks in its own way.
                assert!(a.len().abs_diff(b.len()) <= 2 << 16, "{case}");
            }
        }
    }
}

#[test]
fn the_policy_is_amended() {
    let dir = scratch();
    let ours = |line: &str| succeeds(&dir, line);
    ours("create -q -f qcow2 x 1M");
    let policy = || {
        let info: serde_json::Value = serde_json::from_str(&ours("info --output=json x")).unwrap();
        info["format-specific"]["data"]["alloc-policy"].clone()
    };
    for wanted in ["sparse", "contiguous", "sparse"] {
        ours(&format!("amend -o alloc_policy={wanted} x"));
        assert_eq!(policy(), wanted);
    }
    ours("amend -o alloc_policy=auto x");
    assert_ne!(policy(), "sparse");
    assert!(ours("amend -o help").contains("alloc_policy="));
}

/// An image with data, zero clusters with space and without, above data and above nothing, beyond
/// an end that moved.
fn with_zeroes(dir: &Path) {
    std::fs::write(dir.join("base.raw"), vec![7; 1 << 20]).unwrap();
    for image in ["-b base.raw -F raw over.qcow2", "alone.qcow2 3M"] {
        let create = format!("create -q -f qcow2 -o cluster_size=4k {image}");
        run(Command::new("qemu-img")
            .current_dir(dir)
            .args(words(&create)));
    }
    for image in ["over.qcow2", "alone.qcow2"] {
        let lines = [
            "write -P 3 0 300k",
            "write -z 64k 64k",
            "write -z -u 128k 64k",
            "write -z 400k 301k",
            "write -z 960k 64k",
        ];
        let lines = lines.iter().flat_map(|line| ["-c", line]);
        run(Command::new("qemu-io")
            .current_dir(dir)
            .args(["-f", "qcow2"])
            .args(lines)
            .arg(image));
        let line = format!("resize -q --shrink {image} 999k");
        run(Command::new("qemu-img").current_dir(dir).args(words(&line)));
    }
}

fn checked_by_qemu(dir: &Path, file: &str) {
    let checked = run(Command::new("qemu-img")
        .current_dir(dir)
        .args(["check", file]));
    assert!(checked.starts_with("No errors"), "{file}: {checked}");
}

#[test]
fn zero_clusters_become_what_version_2_can_say() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    with_zeroes(dir.path());
    for file in ["over.qcow2", "alone.qcow2"] {
        let line = format!("convert -O raw {file} before.raw");
        run(Command::new("qemu-img")
            .current_dir(&dir)
            .args(words(&line)));
        let amend = ["amend", "-o", "compat=0.10", file];
        run(golden::ours().current_dir(&dir).args(amend));
        checked_by_qemu(dir.path(), file);
        run(golden::ours().current_dir(&dir).args(["check", file]));
        let info = run(cowslip().current_dir(&dir).args(["info", file]));
        assert!(info.contains("compat: 0.10"), "{info}");
        let compare = ["compare", "-s", "-f", "raw", "before.raw", file];
        // The old and the new allocation differ; the bytes do not.
        run(Command::new("qemu-img")
            .current_dir(&dir)
            .args(compare.iter().filter(|word| **word != "-s")));
    }
}

#[test]
fn refcounts_get_every_width_and_count_the_same() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    with_zeroes(dir.path());
    let ours = |line: &str| outcome(golden::ours().current_dir(&dir).args(words(line)));
    let convert = words("convert -O raw alone.qcow2 before.raw");
    run(Command::new("qemu-img").current_dir(&dir).args(convert));
    for bits in [1, 64, 2, 32, 4, 16, 8, 1] {
        let amended = ours(&format!("amend -o refcount_bits={bits} alone.qcow2"));
        assert!(amended.status.success(), "{}", golden::said(&amended));
        checked_by_qemu(dir.path(), "alone.qcow2");
        let info = succeeds(&dir, "info alone.qcow2");
        assert!(info.contains(&format!("refcount bits: {bits}\n")), "{info}");
        let compare = words("compare -f raw before.raw alone.qcow2");
        run(Command::new("qemu-img").current_dir(&dir).args(compare));
    }
    ours("amend -o refcount_bits=16 alone.qcow2");
    let snapshot = words("snapshot -c then alone.qcow2");
    run(Command::new("qemu-img").current_dir(&dir).args(snapshot));
    let bytes = std::fs::read(dir.path().join("alone.qcow2")).unwrap();
    let (refused, theirs) = (
        ours("amend -o refcount_bits=1 alone.qcow2"),
        outcome(
            Command::new("qemu-img")
                .current_dir(&dir)
                .args(words("amend -o refcount_bits=1 alone.qcow2")),
        ),
    );
    assert_eq!(golden::said(&refused), golden::said(&theirs));
    assert!(std::fs::read(dir.path().join("alone.qcow2")).unwrap() == bytes);
    // Down from another width and to version 2 in one change.
    ours("snapshot -d then alone.qcow2");
    ours("amend -o refcount_bits=4 alone.qcow2");
    let both = ours("amend -o compat=0.10,refcount_bits=16 alone.qcow2");
    assert!(both.status.success(), "{}", golden::said(&both));
    checked_by_qemu(dir.path(), "alone.qcow2");
}

/// Disk and snapshots hold what they held, as QEMU's tools read them, and a layer below does not
/// show through.
#[test]
fn zero_clusters_of_snapshots_become_what_version_2_can_say() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    for backing in ["", "-b base.qcow2 -F qcow2"] {
        let dir = scratch();
        let run = |program: &str, line: &str| {
            let (quoted, rest) = line.split_once('|').unwrap_or(("", line));
            let mut command = Command::new(program);
            command.current_dir(&dir).args(words(rest));
            if !quoted.is_empty() {
                command.args(["-c", quoted]);
            }
            run(&mut command)
        };
        run("qemu-img", "create -q -f qcow2 base.qcow2 1M");
        run("qemu-io", "write -P 9 0 1M|base.qcow2");
        let create = format!("create -q -f qcow2 {backing} x.qcow2 1M");
        run("qemu-img", &create);
        for (command, snapshot) in [
            ("write -z 0 256k", "one"),
            ("write -P 1 64k 64k", "two"),
            ("write -z 128k 512k", "three"),
            ("write -P 2 0 1M", "four"),
            ("write -z -u 64k 64k", "five"),
        ] {
            run("qemu-io", &format!("{command}|x.qcow2"));
            run("qemu-img", &format!("snapshot -c {snapshot} x.qcow2"));
        }
        run("qemu-img", "snapshot -d two x.qcow2");
        let disks = |name: &str| {
            let of = |snapshot: &str| {
                let line = format!("convert -l {snapshot} -O raw {name} out");
                run("qemu-img", &line);
                std::fs::read(dir.path().join("out")).unwrap()
            };
            ["one", "three", "four", "five"].map(of)
        };
        let before = disks("x.qcow2");
        let line = ["amend", "-o", "compat=0.10", "x.qcow2"];
        let amended = outcome(cowslip().current_dir(&dir).args(line));
        assert!(amended.status.success(), "{}", golden::said(&amended));
        assert!(run("qemu-img", "info x.qcow2").contains("compat: 0.10"));
        let checked = run("qemu-img", "check x.qcow2");
        assert!(checked.starts_with("No errors"), "{checked}");
        assert!(disks("x.qcow2") == before, "{backing}");
        run("qemu-img", "snapshot -a three x.qcow2");
        run("qemu-img", "convert -O raw x.qcow2 out");
        assert!(std::fs::read(dir.path().join("out")).unwrap() == before[1]);
    }
}
