//! The file attributes of a new image: the extent size hint on XFS, and no copy-on-write on btrfs.
//! Needs root and a loop device.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::Command;

use crate::support::mounted::Mounted;
use crate::support::{cowslip, run};

fn create(dir: &Path, options: &[&str], image: &str) {
    let options = options.iter().flat_map(|option| ["-o", option]);
    let mut command = cowslip();
    command.current_dir(dir).args(["create", "-q", "-f"]);
    command.arg(if image.ends_with("raw") {
        "raw"
    } else {
        "qcow2"
    });
    run(command.args(options).args([image, "16M"]));
}

/// Returns the extent size hint of a file on XFS.
fn hint(dir: &Path, image: &str) -> u64 {
    let printed = run(Command::new("xfs_io")
        .current_dir(dir)
        .args(["-r", "-c", "extsize", image]));
    let bytes = printed.trim_start_matches('[').split(']').next().unwrap();
    bytes.parse().unwrap()
}

#[test]
fn xfs_hears_of_extents_as_the_policy_wants_them() {
    let Some(mounted) = Mounted::beside(&["xfs_io"], &["mkfs.xfs", "-q"]) else {
        return;
    };
    let dir = mounted.at.as_path();
    for (options, image, expected) in [
        (&[][..], "auto.qcow2", 1 << 20),
        (&["alloc_policy=contiguous"], "contiguous.qcow2", 1 << 20),
        (&["alloc_policy=sparse"], "sparse.qcow2", 0),
        (
            &["alloc_policy=sparse", "extent_size_hint=64k"],
            "own.qcow2",
            64 << 10,
        ),
        (&["extent_size_hint=2M"], "large.qcow2", 2 << 20),
        (&["extent_size_hint=0"], "none.qcow2", 0),
        (&[], "auto.raw", 1 << 20),
        (&["extent_size_hint=0"], "none.raw", 0),
    ] {
        create(dir, options, image);
        assert_eq!(hint(dir, image), expected, "{image}");
        let mut info = cowslip();
        info.current_dir(dir).args(["info", "--output=json", image]);
        let info: serde_json::Value = serde_json::from_str(&run(&mut info)).unwrap();
        let protocol = &info["children"][0]["info"];
        let shown = protocol["format-specific"]["data"]["extent-size-hint"].as_u64();
        assert_eq!(shown.unwrap_or(0), expected, "{info}");
    }
}

#[test]
fn a_hint_that_is_ignored_is_told() {
    let Some(mounted) = Mounted::beside(&["mkfs.ext4"], &["mkfs.ext4", "-q"]) else {
        return;
    };
    for (options, expected) in [
        (&["-o", "extent_size_hint=1M"][..], true),
        (&["-o", "extent_size_hint=0"], false),
        (&[], false),
    ] {
        let mut create = cowslip();
        create.current_dir(&mounted.at);
        create.args(["create", "-q", "-f", "qcow2"]).args(options);
        let output = create.args(["hint.qcow2", "16M"]).output().unwrap();
        assert!(output.status.success());
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            printed.contains("Failed to set extent size hint: Operation not supported"),
            expected,
            "{options:?}: {printed}"
        );
    }
}

#[test]
fn btrfs_hears_not_to_copy_on_write() {
    let Some(mounted) = Mounted::beside(&["lsattr"], &["mkfs.btrfs", "-q"]) else {
        return;
    };
    let dir = mounted.at.as_path();
    for (options, image, expected) in [
        (&[][..], "usual.qcow2", false),
        (&["nocow=on"], "nocow.qcow2", true),
        (&["nocow=off"], "off.qcow2", false),
        (&["nocow=on"], "nocow.raw", true),
    ] {
        create(dir, options, image);
        let listed = run(Command::new("lsattr").current_dir(dir).arg(image));
        let attributes = listed.split_whitespace().next().unwrap();
        assert_eq!(attributes.contains('C'), expected, "{image}: {listed}");
    }
}
