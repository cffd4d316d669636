//! The requirements on a file by the driver that the command line names, compared with QEMU's
//! programs.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::Command;

use crate::support::{cowslip, outcome, scratch_beside};

/// Both outputs and the exit status.
fn answers(mut program: Command, dir: &Path, words: &[&str]) -> (String, Option<i32>) {
    let output = outcome(program.current_dir(dir).args(words));
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    (
        String::from_utf8_lossy(&text).into_owned(),
        output.status.code(),
    )
}

fn same(program: &str, dir: &Path, words: &[&str]) {
    let theirs = answers(Command::new(program), dir, words);
    let mut ours = cowslip();
    ours.arg(program);
    assert_eq!(answers(ours, dir, words), theirs, "{program} {words:?}");
}

#[test]
fn a_file_is_what_its_driver_takes() {
    let Some(dir) = &scratch_beside(&["qemu-io", "qemu-img"]) else {
        return;
    };
    std::fs::create_dir(dir.join("d")).unwrap();
    std::fs::write(dir.join("f"), [0; 4096]).unwrap();
    for driver in ["file", "host_device", "host_cdrom"] {
        for name in ["d", "f", "/dev/null"] {
            let list = format!("driver={driver},filename={name},locking=off");
            // Of a drive that is none, QEMU says that it has no medium.
            let asks = (driver, name) != ("host_cdrom", "/dev/null");
            for open in [format!("open -o {list}"), format!("open -r -o {list}")] {
                let length = if asks { "length" } else { "sleep 0" };
                same("qemu-io", dir, &["-c", &open, "-c", length]);
            }
            if !asks {
                continue;
            }
            let list = format!("driver=raw,file.driver={driver},file.filename={name}");
            same("qemu-img", dir, &["map", "--image-opts", &list]);
        }
    }
    for words in [
        vec!["-c", "length", "d"],
        vec!["-r", "-c", "length", "d"],
        vec!["-r", "-f", "host_device", "-c", "length", "/dev/null"],
    ] {
        same("qemu-io", dir, &words);
    }
    for words in [
        vec!["info", "d"],
        vec!["check", "d"],
        vec!["resize", "-f", "raw", "d", "1M"],
        vec!["info", "-f", "file", "d"],
        vec!["convert", "-O", "raw", "d", "x"],
    ] {
        same("qemu-img", dir, &words);
    }
}
