//! A file system that reports at `close` alone that bytes are lost: here that of an image whose
//! tables find no space.

use std::ffi::OsString;

use super::{Mounted, SIZE, can_mount};
use crate::support::{cowslip, outcome, run};

/// Data is written at once, a table when a program closes the file: then without space.
const FAULT: &str = "[inject-error]\nevent = \"l2_alloc_write\"\nerrno = \"28\"\n";

fn mounted(is_faulty: bool) -> Mounted {
    let dir = tempfile::tempdir().unwrap();
    let [image, rules] = ["a.qcow2", "rules"].map(|name| dir.path().join(name));
    run(cowslip()
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&image)
        .arg(SIZE.to_string()));
    std::fs::write(&rules, FAULT).unwrap();
    let mut name = OsString::new();
    if is_faulty {
        name.push("blkdebug:");
        name.push(rules);
        name.push(":");
    }
    name.push(image);
    Mounted::named(dir, &name, &[])
}

#[test]
fn a_loss_that_only_a_close_reports_fails_the_command_that_wrote() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source.raw");
    std::fs::write(&source, vec![7; SIZE as usize]).unwrap();
    for (is_faulty, cache) in [(true, "unsafe"), (true, "writeback"), (false, "unsafe")] {
        let mounted = mounted(is_faulty);
        let file = mounted.file();
        let done = outcome(
            cowslip()
                .args(["convert", "-n", "-f", "raw", "-O", "raw", "-t", cache])
                .args([&source, &file]),
        );
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(
            done.status.code(),
            Some(i32::from(is_faulty)),
            "{cache}: {said}"
        );
        if !is_faulty {
            mounted.end();
            continue;
        }
        assert!(said.contains(file.to_str().unwrap()), "{cache}: {said}");
        assert!(said.contains("No space left"), "{cache}: {said}");
        if cache == "unsafe" {
            assert!(
                said.contains("bytes that were written to it may be lost"),
                "{said}"
            );
        }
    }
}
