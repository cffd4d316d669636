//! Compaction in the background on a file system without any space: it goes on when there is some.

use std::io::{BufRead, BufReader};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{fill_up, length, qemu, qemu_io, raw_copy, small_file_system, succeeds, write_each};
use crate::support::{cowslip, run};

/// Longest wait for something that is to happen.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn without_space_it_tries_again_after_a_pause() {
    let Some(mounted) = small_file_system(64 << 20, "0") else {
        return;
    };
    let dir = mounted.at.as_path();
    succeeds(dir, "create -q -f qcow2 a.qcow2 16M");
    write_each(dir, "a.qcow2", 0..16, 0);
    // What is free is a hole, at the beginning of the file.
    qemu_io(dir, "a.qcow2", &["discard 0 8M".to_string()]);
    let (holder, raw) = raw_copy(dir);
    fill_up(dir);

    let before = length(dir, "a.qcow2");
    let socket = holder.path().join("s.sock");
    let mut server = cowslip();
    server
        .current_dir(dir)
        .args(["serve", "-v", "--socket"])
        .arg(&socket);
    server.args("--compact-background 64M/s --compact-idle-ms 50".split(' '));
    server.args(["--compact-pause", "1", "a.qcow2"]);
    let mut server = server.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let (sender, said) = mpsc::channel();
    let errors = BufReader::new(server.stderr.take().unwrap());
    std::thread::spawn(move || {
        for line in errors.lines().map_while(Result::ok) {
            drop(sender.send(line));
        }
    });
    // The guest changes nothing, and space may come back at any time.
    for _ in 0..2 {
        let line = loop {
            let line = said.recv_timeout(PATIENCE).unwrap();
            if line.contains("compacted") {
                break line;
            }
        };
        assert!(line.contains("cannot be compacted"), "{line}");
        assert!(line.contains("No space left"), "{line}");
    }
    assert_eq!(length(dir, "a.qcow2"), before);
    std::fs::remove_file(dir.join("filler")).unwrap();
    let begun = Instant::now();
    while length(dir, "a.qcow2") + (7 << 20) > before {
        assert!(begun.elapsed() < PATIENCE, "nothing comes back");
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut read = Command::new("qemu-io");
    read.args(["-f", "raw", "-c", "read -P 16 15M 1M"]);
    run(read.arg(format!("nbd+unix:///?socket={}", socket.display())));
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    qemu(dir, "qemu-img", "check a.qcow2");
    qemu(dir, "qemu-img", &format!("compare {raw} a.qcow2"));
}
