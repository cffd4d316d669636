//! The daemon as a service: readiness, signs of life and its end for a service manager, whose part
//! the test plays; sockets that the manager passes; the unit file of the repository.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::support::running::Running;
use crate::support::{cowslip, outcome, program, run, scratch, succeeds};

/// The manager's socket, with patience.
fn patient(socket: UnixDatagram) -> UnixDatagram {
    let patience = Some(Duration::from_secs(30));
    socket.set_read_timeout(patience).unwrap();
    socket
}

fn state(manager: &UnixDatagram) -> String {
    let mut bytes = [0; 256];
    let length = manager.recv(&mut bytes).expect("a state");
    String::from_utf8(bytes[..length].to_vec()).unwrap()
}

/// The states up to one, with it.
fn states_until(manager: &UnixDatagram, last: &str) -> Vec<String> {
    let mut states = Vec::new();
    loop {
        states.push(state(manager));
        if states.last().unwrap().lines().any(|line| line == last) {
            return states;
        }
    }
}

fn answers(dir: &Path, socket: &str) {
    run(cowslip()
        .current_dir(dir)
        .args(["ctl", socket, "query-version"]));
}

#[test]
fn the_manager_is_informed_of_readiness_life_and_end() {
    let dir = &scratch();
    let manager = patient(UnixDatagram::bind(dir.join("notify")).unwrap());
    let mut command = cowslip();
    command
        .current_dir(dir)
        .env("NOTIFY_SOCKET", dir.join("notify"))
        .env("WATCHDOG_USEC", "20000")
        .args(["daemon", "--control", "control"]);
    let mut daemon = Running::start(command.stdin(Stdio::null()));
    let states = states_until(&manager, "READY=1");
    let process = format!("MAINPID={}", daemon.id());
    assert!(states.last().unwrap().ends_with(&process), "{states:?}");
    // It is ready: no second try is needed.
    answers(dir, "control");
    for _ in 0..3 {
        states_until(&manager, "WATCHDOG=1");
    }
    // A process that does not run shows no sign of life.
    daemon.signal(Signal::STOP);
    manager
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let mut bytes = [0; 256];
    // Those that are under way.
    while manager.recv(&mut bytes).is_ok() {}
    daemon.signal(Signal::CONT);
    let manager = patient(manager);
    states_until(&manager, "WATCHDOG=1");
    daemon.signal(Signal::TERM);
    states_until(&manager, "STOPPING=1");
    assert_eq!(daemon.wait().unwrap().code(), Some(0));
}

#[test]
fn a_manager_may_have_an_abstract_name_and_no_watchdog() {
    let dir = &scratch();
    let name = format!("cowslip-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = patient(UnixDatagram::bind_addr(&address).unwrap());
    let mut command = cowslip();
    command
        .current_dir(dir)
        .env("NOTIFY_SOCKET", format!("@{name}"))
        .env("WATCHDOG_USEC", "20000")
        .env("WATCHDOG_PID", "1")
        .args(["daemon", "--control", "control"]);
    let mut daemon = Running::start(command.stdin(Stdio::null()));
    assert!(state(&manager).starts_with("READY=1\n"));
    succeeds(dir, "ctl control quit");
    assert_eq!(state(&manager), "STOPPING=1");
    assert_eq!(daemon.wait().unwrap().code(), Some(0));
}

#[test]
fn a_manager_that_cannot_be_reached_is_an_error() {
    let dir = scratch();
    let said = outcome(
        cowslip()
            .current_dir(dir.path())
            .env("NOTIFY_SOCKET", dir.path().join("nobody"))
            .args(["daemon", "--control", "control"]),
    );
    let text = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(1), "{text}");
    assert!(
        text.contains("Could not connect to the notify socket"),
        "{text}"
    );
    assert!(!dir.path().join("control").exists());
}

#[test]
fn passed_sockets_are_listened_on() {
    let dir = &scratch();
    let control = UnixListener::bind(dir.join("passed")).unwrap();
    let metrics = UnixListener::bind(dir.join("metrics")).unwrap();
    // As a service manager does: sockets from descriptor 3 on, and the process that they are for.
    let script = "exec 3<&0 4>&1 0</dev/null 1>&2; export LISTEN_PID=$$; exec \"$@\"";
    let mut command = Command::new("sh");
    command
        .current_dir(dir)
        .args(["-c", script, "sh"])
        .arg(program())
        .arg("daemon")
        .env("LISTEN_FDS", "2")
        .env("LISTEN_FDNAMES", "control:metrics")
        .stdin(std::os::fd::OwnedFd::from(control))
        .stdout(std::os::fd::OwnedFd::from(metrics));
    let mut daemon = Running::start(&mut command);
    answers(dir, "passed");
    use std::io::{Read, Write};
    let mut stream = UnixStream::connect(dir.join("metrics")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("cowslip_info"), "{text}");
    succeeds(dir, "ctl passed quit");
    assert_eq!(daemon.wait().unwrap().code(), Some(0));
    // The names are the manager's.
    assert!(dir.join("passed").exists());
}

#[test]
fn sockets_for_another_process_are_left_alone() {
    let dir = &scratch();
    let mut command = cowslip();
    command
        .current_dir(dir)
        .env("LISTEN_PID", "1")
        .env("LISTEN_FDS", "3")
        .args(["daemon", "--control", "control"]);
    let _daemon = crate::support::server::Server::start(&mut command, &dir.join("control"));
    answers(dir, "control");
}

/// The command line of the unit file is one that the daemon understands.
#[test]
fn the_unit_file_starts_a_daemon() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("contrib/systemd/cowslip-daemon.service");
    let unit = std::fs::read_to_string(&file).unwrap();
    let started = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let words: Vec<&str> = started.unwrap().split(' ').collect();
    assert_eq!(words[0], "/usr/bin/cowslip");
    assert_eq!(words.last(), Some(&"$COWSLIP_OPTIONS"));
    let dir = &scratch();
    let manager = patient(UnixDatagram::bind(dir.join("notify")).unwrap());
    let words = &words[1..words.len() - 1];
    let words = words.iter().map(|word| word.replace("/run/cowslip/", "./"));
    let mut command = cowslip();
    command
        .current_dir(dir)
        .env("NOTIFY_SOCKET", dir.join("notify"))
        .args(words);
    let _daemon = Running::start(command.stdin(Stdio::null()));
    assert!(state(&manager).starts_with("READY=1\n"));
    answers(dir, "control.sock");
}
