//! `clone`: on file systems with reflinks the files share their data, elsewhere an overlay is
//! offered. The first needs root and a loop device, and says so if it has neither.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::mounted::Mounted;
use crate::support::{cowslip, outcome, run, scratch, succeeds};

fn ours(dir: &Path, line: &str) -> Output {
    outcome(cowslip().current_dir(dir).args(line.split_whitespace()))
}

fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn io(dir: &Path, command: &str, image: &str) -> String {
    run(cowslip()
        .current_dir(dir)
        .args(["io", "-f", "qcow2", "-c", command, image]))
}

fn clones_share_and_are_independent(format: &[&str]) {
    let Some(mounted) = Mounted::new(format) else {
        return;
    };
    let dir = mounted.at.as_path();
    std::fs::write(dir.join("base.raw"), vec![3; 4 << 20]).unwrap();
    std::fs::create_dir(dir.join("sub")).unwrap();
    succeeds(dir, "create -q -f qcow2 -b base.raw -F raw a.qcow2 64M");
    io(dir, "write -P 7 8M 40M", "a.qcow2");
    let used = || {
        let free = rustix::fs::statvfs(dir).unwrap();
        (free.f_blocks - free.f_bfree) * free.f_frsize
    };
    run(&mut Command::new("sync"));
    let before = used();
    succeeds(dir, "clone a.qcow2 b.qcow2");
    succeeds(dir, "create --reflink a.qcow2 sub/c.qcow2");
    succeeds(dir, "clone base.raw d.raw");
    assert!(used() - before < 8 << 20, "{} bytes more", used() - before);
    for image in ["b.qcow2", "sub/c.qcow2"] {
        assert!(ours(dir, &format!("check {image}")).status.success());
        io(dir, "write -P 1 8M 1M", image);
        let read = io(dir, "read -P 3 0 4M", image) + &io(dir, "read -P 7 9M 39M", image);
        assert!(!read.contains("failed"), "{image}: {read}");
    }
    assert!(!io(dir, "read -P 7 8M 1M", "a.qcow2").contains("failed"));
    let info = succeeds(dir, "info --output=json sub/c.qcow2");
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(
        info["backing-filename"],
        dir.join("base.raw").to_str().unwrap()
    );
    let info = succeeds(dir, "info --output=json b.qcow2");
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["backing-filename"], "base.raw");

    // A raw copy shares the file; a part of the file is no copy of it.
    std::fs::write(dir.join("g.raw"), [[1; 65536], [2; 65536]].concat()).unwrap();
    succeeds(dir, "convert -f raw -O raw g.raw g.copy");
    let part = "driver=raw,offset=65536,file.filename=g.raw";
    succeeds(dir, &format!("convert --image-opts -O raw {part} g.part"));
    let [whole, copy, part] =
        ["g.raw", "g.copy", "g.part"].map(|name| std::fs::read(dir.join(name)).unwrap());
    assert!(
        copy == whole && part == whole[65536..],
        "not what was copied"
    );

    succeeds(dir, "create -q -f qcow2 -o data_file=e.raw e.qcow2 8M");
    io(dir, "write -P 4 0 8M", "e.qcow2");
    let refused = complaint(&ours(dir, "clone e.qcow2 f.qcow2"));
    assert!(
        refused.contains("'e.raw'") && refused.contains("--data-file"),
        "{refused}"
    );
    assert!(!dir.join("f.qcow2").exists());
    succeeds(dir, "clone --data-file f.raw e.qcow2 f.qcow2");
    io(dir, "write -P 5 0 1M", "f.qcow2");
    assert!(!io(dir, "read -P 4 0 8M", "e.qcow2").contains("failed"));
    assert!(!io(dir, "read -P 4 1M 7M", "f.qcow2").contains("failed"));
}

#[test]
fn clones_on_xfs_share_their_data() {
    clones_share_and_are_independent(&["mkfs.xfs", "-q", "-m", "reflink=1"]);
}

#[test]
fn clones_on_btrfs_share_their_data() {
    clones_share_and_are_independent(&["mkfs.btrfs", "-q"]);
}

#[test]
fn elsewhere_an_overlay_is_offered_or_the_file_copied() {
    let Some(mounted) = Mounted::new(&["mkfs.ext4", "-q"]) else {
        return;
    };
    let dir = mounted.at.as_path();
    succeeds(dir, "create -q -f qcow2 a.qcow2 64M");
    io(dir, "write -P 7 8M 4M", "a.qcow2");
    let refused = complaint(&ours(dir, "clone a.qcow2 b.qcow2"));
    let offer = refused
        .lines()
        .find(|line| line.starts_with("    cowslip create"))
        .unwrap();
    assert!(!dir.join("b.qcow2").exists());
    let words: Vec<&str> = offer.split_whitespace().skip(1).collect();
    run(cowslip().current_dir(dir).args(words));
    assert!(!io(dir, "read -P 7 8M 4M", "b.qcow2").contains("failed"));
    succeeds(dir, "clone --copy a.qcow2 c.qcow2");
    assert_eq!(
        std::fs::read(dir.join("a.qcow2")).unwrap(),
        std::fs::read(dir.join("c.qcow2")).unwrap()
    );
}

#[test]
fn a_file_that_exists_is_kept_unless_it_is_to_be_overwritten() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 golden.qcow2 1M");
    succeeds(dir, "clone --copy golden.qcow2 vm2.qcow2");
    io(dir, "write -P 7 0 64k", "vm2.qcow2");
    let before = std::fs::read(dir.join("vm2.qcow2")).unwrap();
    for line in [
        "clone golden.qcow2 vm2.qcow2",
        "clone --copy golden.qcow2 vm2.qcow2",
    ] {
        let refused = complaint(&ours(dir, line));
        assert!(
            refused.contains("'vm2.qcow2' exists already; --force"),
            "{refused}"
        );
        assert_eq!(std::fs::read(dir.join("vm2.qcow2")).unwrap(), before);
    }
    succeeds(dir, "clone --copy --force golden.qcow2 vm2.qcow2");
    assert_ne!(std::fs::read(dir.join("vm2.qcow2")).unwrap(), before);

    // Neither is the file of its data.
    succeeds(dir, "create -q -f qcow2 -o data_file=e.raw e.qcow2 1M");
    std::fs::write(dir.join("f.raw"), "precious").unwrap();
    let refused = complaint(&ours(dir, "clone --copy --data-file f.raw e.qcow2 f.qcow2"));
    assert!(refused.contains("f.raw' exists already"), "{refused}");
    assert_eq!(std::fs::read(dir.join("f.raw")).unwrap(), b"precious");
    assert!(!dir.join("f.qcow2").exists());
}

#[test]
fn what_is_damaged_or_in_use_is_not_cloned() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 a.qcow2 1M");
    let sound = std::fs::read(dir.join("a.qcow2")).unwrap();
    for (bit, why) in [(1, "not closed cleanly"), (2, "corrupt")] {
        let mut marked = sound.clone();
        marked[79] = bit;
        std::fs::write(dir.join("a.qcow2"), marked).unwrap();
        let refused = complaint(&ours(dir, "clone a.qcow2 b.qcow2"));
        assert!(refused.contains(why), "{refused}");
        assert!(!dir.join("b.qcow2").exists());
    }
    std::fs::write(dir.join("a.qcow2"), sound).unwrap();
    assert!(complaint(&ours(dir, "clone a.qcow2 a.qcow2")).contains("read as a source"));
}
