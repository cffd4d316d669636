//! `check -r` that is interrupted: it says what that means, dies of the signal, and leaves an image
//! that is no worse; run again it completes.
//!
//! It is stopped by a pipe: its progress goes to standard output, which accepts a limited number of
//! bytes.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{cowslip, outcome, run, scratch};

/// Capacity of a pipe.
const PIPE_BYTES: usize = 65536;
const SIGINT: i32 = 2;

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// A disk of 32 MiB with 512-byte clusters, so that the walks through its tables have steps to
/// report. Counts are too low and too high, flags are wrong, an entry leads nowhere; the guest's
/// data from 1 MiB on is untouched.
fn broken_image(directory: &Path) -> Vec<u8> {
    let ours = || {
        let mut command = cowslip();
        command.current_dir(directory);
        command
    };
    run(ours()
        .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=512"])
        .args(["a.qcow2", "32M"]));
    run(ours().args(["io", "-f", "qcow2", "-c", "write -q -P 7 0 16M", "a.qcow2"]));
    let mut bytes = fs::read(directory.join("a.qcow2")).unwrap();
    let l1 = word(&bytes, 40) as usize;
    let l2 = (word(&bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize;
    bytes[l2..l2 + 8].copy_from_slice(&(1u64 << 63 | 1 << 50).to_be_bytes());
    bytes[l2 + 8] &= 0x7f;
    let counts = word(&bytes, word(&bytes, 48) as usize) as usize;
    bytes[counts + 400..counts + 410].fill(0);
    bytes[counts + 420..counts + 430].fill(3);
    bytes
}

fn repair(directory: &Path) -> Command {
    let mut command = cowslip();
    command
        .current_dir(directory)
        .args(["check", "-p", "-r", "all", "-f", "qcow2", "a.qcow2"]);
    command
}

fn corruptions(directory: &Path) -> u64 {
    let checked =
        outcome(
            cowslip()
                .current_dir(directory)
                .args(["check", "--output=json", "a.qcow2"]),
        );
    let report: serde_json::Value = serde_json::from_slice(&checked.stdout).unwrap();
    report["corruptions"].as_u64().unwrap_or(0)
}

fn assert_data_is_kept(directory: &Path) {
    let read = run(cowslip().current_dir(directory).args([
        "io",
        "-r",
        "-f",
        "qcow2",
        "-c",
        "read -P 7 1M 15M",
        "a.qcow2",
    ]));
    assert!(!read.contains("verification failed"), "{read}");
}

/// Interrupts a repair when it has written `said_bytes` to standard output.
fn interrupted_after(said_bytes: usize, directory: &Path) -> Output {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    writer
        .write_all(&vec![b'.'; PIPE_BYTES - said_bytes])
        .unwrap();
    let child = repair(directory)
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let blocked = format!("{} 0x1 ", libc::SYS_write);
    let call = format!("/proc/{}/syscall", child.id());
    while !fs::read_to_string(&call).unwrap().starts_with(&blocked) {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "it does not stop"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    run(Command::new("kill").args(["-s", "INT", &child.id().to_string()]));
    let output = child.wait_with_output().unwrap();
    let mut said = Vec::new();
    reader.read_to_end(&mut said).unwrap();
    assert!(said.len() <= PIPE_BYTES);
    output
}

#[test]
fn an_interrupted_repair_says_so_and_can_be_run_again() {
    let directory = &scratch();
    let image = directory.join("a.qcow2");
    let broken = broken_image(directory);
    fs::write(&image, &broken).unwrap();
    let before = corruptions(directory);
    assert!(before > 0);
    let whole = outcome(&mut repair(directory));
    assert_eq!(whole.status.code(), Some(0), "{whole:?}");
    let repaired = fs::read(&image).unwrap();
    assert!(repaired != broken);
    let said = whole
        .stdout
        .iter()
        .rposition(|&byte| byte == b'\r')
        .unwrap();

    let (mut untouched, mut touched) = (0, 0);
    // Most of it is said while the image is examined, the last when it is repaired and checked.
    for part in 0..=8 {
        fs::write(&image, &broken).unwrap();
        let output = interrupted_after(said * part / 8, directory);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(SIGINT), "{errors}");
        assert!(
            errors.ends_with(
                "The repair is not complete. The image is no worse than before; run it again.\n"
            ),
            "{errors}"
        );
        let left = fs::read(&image).unwrap();
        match left == broken {
            true => untouched += 1,
            false => touched += 1,
        }
        assert!(corruptions(directory) <= before, "{part}");
        assert_data_is_kept(directory);
        let again = outcome(&mut repair(directory));
        assert_eq!(again.status.code(), Some(0), "{again:?}");
        assert!(fs::read(&image).unwrap() == repaired, "{part}");
        assert_data_is_kept(directory);
    }
    assert!(untouched > 0 && touched > 0, "{untouched} {touched}");
}
