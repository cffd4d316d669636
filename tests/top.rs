//! `cowslip top`: figures of a daemon for scripts, of QEMU's daemon too, and in a terminal.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::server::{EXPORTED_DISK, Server};
use crate::support::{
    cowslip, eventually, outcome, program, run, scratch, scratch_beside, succeeds,
};

/// A daemon with a disk that is exported as `e`.
fn start(mut program: Command, dir: &Path) -> Server {
    let words = ["create", "-q", "-f", "qcow2", "a.qcow2", "8M"];
    run(cowslip().current_dir(dir).args(words));
    program.current_dir(dir).args([
        "--chardev",
        "socket,path=control,server=on,wait=off,id=c",
        "--monitor",
        "c",
    ]);
    program.args(EXPORTED_DISK);
    let server = Server::start(&mut program, &dir.join("control"));
    succeeds(dir, "ctl control query-block-exports");
    server
}

fn daemon() -> Command {
    let mut command = cowslip();
    command.arg("daemon");
    command
}

fn top(dir: &Path, words: &[&str]) -> String {
    run(cowslip()
        .current_dir(dir)
        .arg("top")
        .args(words)
        .arg("control"))
}

/// Has a disk written while its figures are taken.
fn figures(dir: &Path) -> Value {
    let mut writer = cowslip()
        .current_dir(dir)
        .args(["io", "-f", "raw", "nbd+unix:///a?socket=nbd"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = writer.stdin.take().unwrap();
    let mut found = Value::Null;
    eventually("writes are seen", || {
        let asking = std::thread::spawn({
            let dir = dir.to_path_buf();
            move || top(&dir, &["--once", "--json", "--interval", "0.3"])
        });
        while !asking.is_finished() {
            lines.write_all(b"write -P 7 0 64k\n").unwrap();
            lines.flush().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let text = asking.join().unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        found = serde_json::from_str(&text).unwrap();
        let disk = found["disks"].as_array().unwrap().iter();
        let disk = disk.clone().find(|disk| disk["node"] == "a").unwrap();
        disk["writes"]["per_second"].as_f64().unwrap() > 0.0
    });
    drop(lines);
    assert!(writer.wait().unwrap().success());
    found
}

#[test]
fn rates_and_latencies_of_an_interval_are_there_for_scripts() {
    let dir = &scratch();
    let _daemon = start(daemon(), dir);
    let found = figures(dir);
    let disk = &found["disks"][0];
    assert_eq!(disk["exports"][0], "e", "{found}");
    let writes = &disk["writes"];
    assert!(writes["mean_us"].as_f64().unwrap() > 0.0, "{found}");
    let p99 = writes["p99_us"].as_f64().unwrap();
    assert!(p99 >= writes["mean_us"].as_f64().unwrap() / 100.0 && p99 >= 10.0);
    let rate = writes["bytes_per_second"].as_f64().unwrap();
    let requests = writes["per_second"].as_f64().unwrap();
    assert!((rate / requests - 65536.0).abs() < 1.0, "{found}");
    assert!(disk["depth"].as_f64().unwrap() > 0.0);
    assert_eq!(disk["size_bytes"], 8 << 20);
    assert!(disk["disk_bytes"].as_u64().unwrap() >= 65536);
    let text = top(dir, &["--once", "--interval", "0.1"]);
    assert!(text.starts_with("DISK  NODE"), "{text}");
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(
        text.lines().nth(1).unwrap().starts_with("e     a "),
        "{text}"
    );
}

#[test]
fn a_daemon_of_qemu_is_shown_too() {
    let Some(dir) = &scratch_beside(&["qemu-storage-daemon"]) else {
        return;
    };
    let _daemon = start(Command::new("qemu-storage-daemon"), dir);
    // It counts no requests by node.
    let text = top(dir, &["--once", "--json", "--interval", "0.1"]);
    let found: Value = serde_json::from_str(&text).unwrap();
    let disks = found["disks"].as_array().unwrap();
    let disk = disks.iter().find(|disk| disk["node"] == "a").unwrap();
    assert_eq!(
        (&disk["exports"][0], &disk["size_bytes"]),
        (&"e".into(), &(8 << 20).into())
    );
}

#[test]
fn without_a_terminal_or_a_daemon_it_says_so() {
    let dir = &scratch();
    let said = outcome(cowslip().current_dir(dir).args(["top", "control"]));
    assert_eq!(said.status.code(), Some(1), "{said:?}");
    assert!(String::from_utf8_lossy(&said.stderr).contains("--once"));
    let said = outcome(
        cowslip()
            .current_dir(dir)
            .args(["top", "--once", "control"]),
    );
    assert_eq!(said.status.code(), Some(2), "{said:?}");
}

/// In a terminal of its own, which `script` makes.
#[test]
fn a_terminal_is_drawn_and_left_as_it_was() {
    let Some(dir) = &scratch_beside(&["script"]) else {
        return;
    };
    let _daemon = start(daemon(), dir);
    let line = format!("stty cols 150 rows 20; {} top control", program().display());
    let mut terminal = Command::new("script")
        .current_dir(dir)
        .env("TERM", "xterm")
        .args(["-q", "-e", "-c", &line, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut keys = terminal.stdin.take().unwrap();
    let mut screen = terminal.stdout.take().unwrap();
    let mut seen = String::new();
    let mut bytes = [0; 4096];
    while !seen.contains("ON DISK") {
        let count = screen.read(&mut bytes).unwrap();
        assert!(count > 0, "it has ended: {seen}");
        seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
    keys.write_all(b"q").unwrap();
    screen.read_to_string(&mut seen).unwrap();
    assert!(terminal.wait().unwrap().success(), "{seen}");
    // Into the alternate screen and back.
    assert!(seen.contains("\u{1b}[?1049h") && seen.contains("\u{1b}[?1049l"));
}
