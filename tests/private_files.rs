//! Files that programs make for themselves cannot be opened by other users: each call that makes a
//! file is checked under strace, and only files that the command line names may have another mode.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{peers_are_installed, program, run, scratch};

/// A call that makes a file, such as `12 openat(AT_FDCWD, "a", O_RDWR|O_CREAT, 0600) = 3`.
#[derive(Debug, PartialEq, Eq)]
struct Made {
    line: String,
    path: String,
    /// Less what the mask takes away.
    mode: u32,
}

/// The files that were made, by a log of strace. A mask is set before others are started.
fn files_made(log: &str, mut mask: u32) -> Vec<Made> {
    let mut made = Vec::new();
    for line in log.lines() {
        let octal = |text: &str| u32::from_str_radix(text, 8).unwrap();
        if let Some((_, rest)) = line.split_once(" umask(") {
            mask = octal(rest.split(')').next().unwrap());
        }
        if !line.contains("O_CREAT") && !line.contains("O_TMPFILE") {
            continue;
        }
        let call = line.split(" <unfinished").next().unwrap();
        let call = call.rsplit_once(") =").map_or(call, |(call, _)| call);
        let mode = call.rsplit_once(", ").unwrap().1.trim_end_matches(')');
        let path = call.split('"').nth(1).unwrap();
        made.push(Made {
            line: line.to_string(),
            path: path.to_string(),
            mode: octal(mode) & !mask,
        });
    }
    made
}

/// Returns the files made besides those asked for, all of which other users cannot open.
fn expect_private(log: &str, asked_for: &[&str]) -> Vec<Made> {
    let made = files_made(log, 0o022);
    let is_own = |one: &&Made| {
        let is_asked = asked_for.iter().any(|path| one.path == *path);
        !is_asked && !one.path.starts_with("/dev/")
    };
    for one in made.iter().filter(is_own) {
        assert_eq!(one.mode & !0o600, 0, "{}", one.line);
    }
    made
}

/// The command under strace, which logs to `log`.
fn traced(dir: &Path, log: &Path) -> Command {
    let mut command = Command::new("strace");
    let calls = "trace=open,openat,openat2,creat,umask";
    command.args(["-f", "-qq", "-e", calls, "-o"]).arg(log);
    // With a name, a directory would be reachable for everybody who may enter it.
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    command.arg(program()).current_dir(dir);
    command.env("TMPDIR", dir);
    command
}

fn can_trace() -> bool {
    if !peers_are_installed(&["strace"]) {
        return false;
    }
    let mut trial = Command::new("strace");
    trial.args(["-qq", "-o", "/dev/null", "true"]);
    let may = trial.stderr(Stdio::null()).status();
    if !may.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: strace may not trace here");
        return false;
    }
    true
}

#[test]
fn calls_are_read_with_their_modes() {
    let log = r#"1 openat(AT_FDCWD, "a", O_RDWR|O_CREAT|O_EXCL, 0644) = 3
2 openat(AT_FDCWD, "b", O_RDONLY|O_CLOEXEC) = 3
3 umask(077) = 022
4 openat(AT_FDCWD, "/tmp", O_RDWR|O_TMPFILE, 0600 <unfinished ...>
5 open("c", O_WRONLY|O_CREAT, 0666) = -1 EACCES (Permission denied)
"#;
    let made = files_made(log, 0o022);
    let found: Vec<_> = made.iter().map(|m| (m.path.as_str(), m.mode)).collect();
    assert_eq!(found, [("a", 0o644), ("/tmp", 0o600), ("c", 0o600)]);
    assert_eq!(expect_private(log, &["a"]).len(), 3);
    assert!(std::panic::catch_unwind(|| expect_private(log, &[])).is_err());
}

#[test]
fn what_a_command_makes_for_itself_is_its_owners() {
    if !can_trace() {
        return;
    }
    let dir = &scratch();
    let log = dir.join("log");
    let lines: &[(&str, &[&str], usize)] = &[
        ("create -q -f qcow2 image 4M", &["image"], 1),
        (
            "create -q -f raw -o preallocation=falloc raw 1M",
            &["raw"],
            1,
        ),
        ("io -f qcow2 -s -c write_0_64k image", &[], 1),
        ("io -f qcow2 -s -t none -c write_0_64k image", &[], 1),
        ("allocate --size 2M space", &["space"], 3),
        ("convert -q -O qcow2 image copy", &["copy"], 1),
        ("measure -O qcow2 image", &[], 0),
        ("demo --json --size 16 --operations 20 --dir DIR", &[], 5),
        (
            "bench flush --json --repetitions=1 --requests=8 --size=16M --cells=64K, \
             --peers=none --dir=DIR",
            &[],
            1,
        ),
    ];
    for (line, asked_for, at_least) in lines {
        let place = dir.to_str().unwrap();
        let words = line
            .split(' ')
            .map(|word| word.replace('_', " ").replace("DIR", place));
        run(traced(dir, &log).args(words).stdin(Stdio::null()));
        let made = expect_private(&std::fs::read_to_string(&log).unwrap(), asked_for);
        assert!(made.len() >= *at_least, "{line}: {made:?}");
    }
}

#[test]
fn a_server_tells_its_process_to_its_owner_only() {
    if !can_trace() {
        return;
    }
    let dir = &scratch();
    let log = dir.join("log");
    std::fs::File::create(dir.join("disk"))
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let words = ["qemu-nbd", "-f", "raw", "--pid-file", "pid", "disk", "-k"];
    let socket = dir.join("s");
    let mut server = traced(dir, &log).args(words).arg(&socket).spawn().unwrap();
    let begun = Instant::now();
    while !socket.exists() {
        assert!(begun.elapsed() < Duration::from_secs(60), "no server");
        std::thread::sleep(Duration::from_millis(10));
    }
    // It ends with its only client.
    let name = format!("nbd+unix:///?socket={}", socket.display());
    run(crate::support::cowslip().args(["info", &name]));
    assert!(server.wait().unwrap().success());
    let made = expect_private(&std::fs::read_to_string(&log).unwrap(), &[]);
    assert!(made.iter().any(|one| one.path == "pid"), "{made:?}");
}
