//! Requests by way of the kernel's ring, which it offers where its parameter says so.

use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use super::{Mounted, can_mount, end_under_load, kill, model};
use crate::support::run;

/// The parameter.
const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// The parameter is on until this is dropped. The tests of this file run one at a time: it holds a
/// lock of all processes.
struct Offered {
    before: String,
    _lock: fs::File,
}

impl Offered {
    fn new() -> Option<Offered> {
        let before = fs::read_to_string(PARAMETER).ok();
        let (true, Some(before)) = (can_mount(), before) else {
            eprintln!("SKIPPED: no FUSE over io_uring here");
            return None;
        };
        let name = std::env::temp_dir().join("cowslip-test-fuse-ring.lock");
        let lock = fs::File::create(name).unwrap();
        lock.lock().unwrap();
        if fs::write(PARAMETER, "Y").is_err() {
            eprintln!("SKIPPED: {PARAMETER} cannot be set");
            return None;
        }
        Some(Offered {
            before,
            _lock: lock,
        })
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        drop(fs::write(PARAMETER, &self.before));
    }
}

/// A mounted file whose requests come by way of the ring, on `threads` threads.
fn mounted(threads: usize, options: &[&str]) -> Mounted {
    let count = threads.to_string();
    let ring = ["--fuse-uring", "on", "--threads", &count];
    let mounted = Mounted::new(&[options, &ring].concat());
    // The first request begins it.
    mounted.open().read_at(&mut [0], 0).unwrap();
    let tasks = format!("/proc/{}/task", mounted.child.id());
    let names = fs::read_dir(tasks).unwrap().map(|task| {
        let name = task.unwrap().path().join("comm");
        fs::read_to_string(name).unwrap_or_default()
    });
    let working = names.filter(|name| name.starts_with("fuse-")).count();
    assert_eq!(working, threads, "threads that have slots of the ring");
    mounted
}

#[test]
fn requests_come_by_way_of_the_ring() {
    let Some(_offered) = Offered::new() else {
        return;
    };
    for threads in [1, 2] {
        model::check(mounted(threads, &["--growable"]));
        end_under_load(mounted(threads, &["--sandbox", "on"]));
        kill(mounted(threads, &[]));
    }
}

#[test]
fn a_file_ends_while_requests_wait_for_a_slot() {
    let Some(_offered) = Offered::new() else {
        return;
    };
    let fio = Command::new("fio").arg("--version").output();
    if fio.is_err() {
        return eprintln!("SKIPPED: fio is not installed");
    }
    // More in flight than there are slots, verified; then again while the server is killed.
    for is_killed in [false, true] {
        let mut mounted = mounted(2, &["--cache", "writeback"]);
        let path = mounted.file();
        let mut load = Command::new("fio");
        load.args(["--name=x", "--ioengine=libaio", "--direct=1", "--bs=4k"])
            .args(["--iodepth=200", "--size=8M", "--rw=randwrite"])
            .args(["--verify=crc32c", "--output=/dev/null"])
            .current_dir(mounted.dir.path())
            .arg(format!("--filename={}", path.display()));
        if !is_killed {
            run(&mut load);
            mounted.end();
            continue;
        }
        load.args(["--time_based", "--runtime=20"]);
        let mut load = load.stderr(std::process::Stdio::piped()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(700));
        mounted.child.kill().unwrap();
        mounted.child.wait().unwrap();
        let status = load.wait().unwrap();
        let mut said = String::new();
        load.stderr
            .take()
            .unwrap()
            .read_to_string(&mut said)
            .unwrap();
        assert!(
            !status.success(),
            "its writes fail, and do not hang: {said}"
        );
        assert!(!Path::new(&path).exists() || fs::File::open(&path).is_err());
    }
}
