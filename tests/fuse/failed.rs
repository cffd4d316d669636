//! Servers that fail once they have mounted leave no mount.

use std::process::Stdio;
use std::time::{Duration, Instant};

use super::{can_mount, is_mounted};
use crate::support::{cowslip, create_image, outcome, run, scratch};

#[test]
fn a_server_that_fails_after_the_mount_unmounts_and_removes_its_file() {
    if !can_mount() {
        return;
    }
    let dir = scratch();
    let [image, file] = ["a.qcow2", "disk"].map(|name| dir.path().join(name));
    create_image(&image, "1M");
    let verbs = [
        &["mount", "--foreground"][..],
        &["mount"],
        &["serve", "--fuse"],
    ];
    for verb in verbs {
        let mut server = cowslip();
        server.args(verb);
        match verb[0] {
            "mount" => server.args([&image, &file]),
            _ => server.args([&file, &image]),
        };
        let failed = outcome(server.arg("--pid-file").arg(dir.path().join("none/pid")));
        let said = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(
            failed.status.code() == Some(1) && said.contains("none/pid"),
            "{said}"
        );
        assert!(!is_mounted(&file), "{verb:?} leaves a mount");
        assert!(!file.exists(), "{verb:?} leaves a file");
    }
    // Another one is not in its way.
    run(cowslip().arg("mount").args([&image, &file]));
    run(cowslip().arg("umount").arg(&file));
}

#[test]
fn a_server_that_is_killed_before_it_serves_leaves_no_mount() {
    if !can_mount() {
        return;
    }
    let dir = scratch();
    let [image, file, pid] = ["a.qcow2", "disk", "pid"].map(|name| dir.path().join(name));
    create_image(&image, "1M");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pid, rustix::fs::Mode::RWXU).unwrap();
    // It waits for a reader of its process number, and has mounted by then.
    let mut server = cowslip()
        .args(["mount", "--foreground", "--pid-file"])
        .args([&pid, &image, &file])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let wait = |is_there: bool| {
        while is_mounted(&file) != is_there {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "mounted: {}",
                !is_there
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait(true);
    server.kill().unwrap();
    server.wait().unwrap();
    wait(false);
}
