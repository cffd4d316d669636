//! Compaction on btrfs, which frees an extent when none of its bytes is used any more.

use super::*;

/// Bytes that the file system has allocated, once it has carried out what was freed.
fn used_bytes(dir: &Path) -> u64 {
    let opened = std::fs::File::open(dir).unwrap();
    // What one commit gives up is free with the next.
    for _ in 0..3 {
        rustix::fs::syncfs(&opened).unwrap();
    }
    let found = rustix::fs::statvfs(dir).unwrap();
    (found.f_blocks - found.f_bfree) * found.f_frsize
}

fn rewritten(dir: &Path, words: &str) -> u64 {
    let done = ours(dir, &format!("compact --json {words} a.qcow2"));
    assert!(done.status.success(), "{done:?}");
    let done: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    done["rewritten-bytes"].as_u64().unwrap()
}

#[test]
fn btrfs_gets_the_space_of_holes_back() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let Some(mounted) = Mounted::of_size(&["mkfs.btrfs", "-q"], 400 << 20) else {
        return;
    };
    let dir = mounted.at.as_path();
    let empty = used_bytes(dir);
    let mib = 48;
    succeeds(dir, &format!("create -q -f qcow2 a.qcow2 {}M", mib + 1));
    age(dir, "a.qcow2", mib);
    // In few extents, however the writer has flushed.
    for words in [
        ["--reflink=never", "a.qcow2", "b.qcow2"],
        ["--", "b.qcow2", "a.qcow2"],
    ] {
        let tool = if words[0] == "--" { "mv" } else { "cp" };
        let done = Command::new(tool).current_dir(dir).args(words).status();
        assert!(done.unwrap().success());
    }
    let holder = scratch();
    let raw = holder.path().join("a.raw");
    let raw = raw.to_str().unwrap();
    let aged = used_bytes(dir) - empty;
    assert!(aged >= (mib + mib / 2) << 20, "{aged}");

    // The file has holes, whose extents hold data beside them.
    assert_eq!(rewritten(dir, "--keep-extents"), 0);
    assert!(blocks(dir, "a.qcow2") < (mib + 1) << 20);
    let kept = used_bytes(dir) - empty;
    assert!(kept > (mib + mib / 4) << 20, "{kept}");
    // The last extent of the file stays as it is, so that it must not be one of these.
    qemu_io(dir, "a.qcow2", &[format!("write -P 9 {mib}M 1M")]);
    qemu(dir, "qemu-img", &format!("convert -O raw a.qcow2 {raw}"));
    assert!(rewritten(dir, "") > 0);
    let now = used_bytes(dir) - empty;
    assert!(now < (mib + 4) << 20, "{now}");
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", &format!("compare {raw} a.qcow2"));

    // What a copy shares stays: it would only be doubled.
    qemu_io(
        dir,
        "a.qcow2",
        &["write -P 7 1M 64k", "write -P 8 9M 64k"].map(String::from),
    );
    let copied = Command::new("cp")
        .current_dir(dir)
        .args(["--reflink=always", "a.qcow2", "b.qcow2"])
        .status();
    assert!(copied.unwrap().success());
    assert_eq!(rewritten(dir, ""), 0);
    qemu(dir, "qemu-img", "compare a.qcow2 b.qcow2");
}
