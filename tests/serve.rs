//! `cowslip serve` and qemu-nbd's command line: starting, detaching, ending, refusing. What clients
//! see is tested in nbd_peers.rs.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::support::running::Running;
use crate::support::{
    cowslip, outcome, peers_are_installed, run, scratch, scratch_beside, succeeds,
};

fn our_nbd() -> Command {
    let mut command = cowslip();
    command.arg0("qemu-nbd");
    command
}

fn make_image(directory: &Path) -> PathBuf {
    succeeds(directory, "create -q -f qcow2 a.qcow2 64M");
    directory.join("a.qcow2")
}

/// Waits until a condition holds.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A server in the foreground; killed with the test.
struct Server {
    child: Running,
    socket: PathBuf,
}

impl Server {
    fn start(command: &mut Command, socket: &Path) -> Server {
        let child = Running::start(command);
        // Between its name and the server that listens there is a moment.
        eventually("it answers", || UnixStream::connect(socket).is_ok());
        Server {
            child,
            socket: socket.to_path_buf(),
        }
    }

    fn signal(&self, name: &str) {
        run(Command::new("kill").args(["-s", name, &self.child.id().to_string()]));
    }

    /// Has it end by a signal, with success.
    fn ends_in_order(self) {
        self.signal("TERM");
        assert_eq!(self.exit_code(), Some(0));
    }

    fn exit_code(mut self) -> Option<i32> {
        eventually("the server ends", || !self.socket.exists());
        let code = self.child.wait().unwrap().code();
        assert!(UnixStream::connect(&self.socket).is_err());
        code
    }
}

/// Our client writes through the server: `qemu-img` has one, we have a listing and QEMU's shell.
fn write_with_qemu(socket: &Path, export: &str) -> Output {
    let address = format!("nbd+unix:///{export}?socket={}", socket.display());
    outcome(Command::new("qemu-io").args(["-f", "raw", "-c", "write -P 7 1M 1M", &address]))
}

#[test]
fn each_ending_signal_ends_a_server_in_order() {
    if !peers_are_installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    for name in ["TERM", "INT", "HUP"] {
        let directory = scratch();
        let image = make_image(directory.path());
        let socket = directory.path().join("socket");
        let server = Server::start(
            cowslip()
                .arg("serve")
                .arg("--socket")
                .arg(&socket)
                .arg(&image),
            &socket,
        );
        assert!(write_with_qemu(&socket, "").status.success());
        server.signal(name);
        assert_eq!(server.exit_code(), Some(0), "{name}");
        run(Command::new("qemu-img")
            .args(["check", "-q", "-f", "qcow2"])
            .arg(&image));
        run(Command::new("qemu-io")
            .args(["-r", "-f", "qcow2", "-c", "read -P 7 1M 1M"])
            .arg(&image));
    }
}

#[test]
fn qemu_nbd_ends_with_its_last_client_unless_persistent() {
    let Some(directory) = scratch_beside(&["qemu-io"]) else {
        return;
    };
    let image = make_image(directory.path());
    let socket = directory.path().join("socket");
    let with = |option: &[&str]| {
        let mut command = our_nbd();
        command.args(["-f", "qcow2", "-x", "disk", "-k"]);
        command.arg(&socket).args(option).arg(&image);
        command
    };
    let server = Server::start(&mut with(&[]), &socket);
    assert!(write_with_qemu(&socket, "disk").status.success());
    assert_eq!(server.exit_code(), Some(0));

    let server = Server::start(&mut with(&["-t"]), &socket);
    assert!(write_with_qemu(&socket, "disk").status.success());
    assert!(!write_with_qemu(&socket, "other").status.success());
    assert!(write_with_qemu(&socket, "disk").status.success());
    server.ends_in_order();
}

#[test]
fn a_detached_server_can_be_reached_when_its_parent_has_ended() {
    let directory = scratch();
    let image = make_image(directory.path());
    let socket = directory.path().join("socket");
    let pid_file = directory.path().join("pid");
    let mut command = our_nbd();
    command
        .args([
            "-f", "qcow2", "-t", "--fork", "-x", "e", "-D", "of text", "-k",
        ])
        .arg(&socket)
        .arg(format!("--pid-file={}", pid_file.display()))
        .arg(&image);
    run(&mut command);
    let listed = run(our_nbd().arg("-L").arg("-k").arg(&socket));
    let pid = std::fs::read_to_string(&pid_file).unwrap();
    assert!(pid.ends_with('\n'));
    run(Command::new("kill").arg(pid.trim()));
    eventually("the server ends", || !socket.exists());
    assert_eq!(
        listed,
        "exports available: 1
 export: 'e'
  description: of text
  size:  67108864
  flags: 0x1ced ( flush fua trim zeroes df cache fast-zero block-status-payload )
  min block: 1
  opt block: 65536
  max block: 33554432
  transaction size: 64-bit
  available meta contexts: 1
   base:allocation
"
    );
}

#[test]
fn a_server_that_cannot_start_says_why_through_its_parent_too() {
    let directory = scratch();
    let image = make_image(directory.path());
    let image = image.to_str().unwrap();
    let socket = directory.path().join("socket");
    let socket = socket.to_str().unwrap();
    for (args, expected) in [
        (
            &["--fork", "-k", socket, "/nosuch"][..],
            "Failed to blk_new_open '/nosuch': Could not open '/nosuch': No such file or directory",
        ),
        (
            &["--fork", "-k", "/nosuch/socket", image],
            "Failed to bind socket to /nosuch/socket: No such file or directory",
        ),
        (
            &["--fork", "-k", socket, "--pid-file=/nosuch/pid", image],
            "Could not create '/nosuch/pid': No such file or directory",
        ),
        (&["-k", "socket", image], "socket path must be absolute"),
        (
            &["-k", socket, "-o", "67108865", image],
            "Offset (67108865) cannot be greater than size of the containing file (67108864)",
        ),
        (&["-e", "x", image], "Invalid shared device number 'x'"),
        (&["-o", "2M", image], "Invalid offset '2M'"),
        (&["--cache=foo", image], "Invalid cache mode `foo'"),
        (
            &["-n", "-n", image],
            "-n and --cache can only be specified once",
        ),
        (&["--aio=foo", image], "Invalid aio mode 'foo'"),
        (&["--discard=foo", image], "Invalid discard mode `foo'"),
        (
            &["--detect-zeroes=foo", image],
            "Failed to parse detect_zeroes mode: invalid parameter value: foo",
        ),
        (
            &["--detect-zeroes=unmap", image],
            "setting detect-zeroes to unmap is not allowed without setting discard operation to unmap",
        ),
        (&["-L", image], "List mode is incompatible with a file name"),
        (
            &["--tls-creds=x", image],
            "Failed to get TLS creds: No TLS credentials with id 'x'",
        ),
        (
            &["-P"],
            "invalid option -- 'P'\nqemu-nbd: Try `qemu-nbd --help' for more information.",
        ),
        (
            &["a", "b"],
            "Invalid number of arguments\nTry `qemu-nbd --help' for more information.",
        ),
    ] {
        let output = outcome(our_nbd().args(args));
        assert_eq!(
            String::from_utf8_lossy(&output.stderr),
            format!("qemu-nbd: {expected}\n"),
            "{args:?}"
        );
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(!Path::new(socket).exists(), "{args:?} leaves a socket");
    }
}

#[test]
fn a_file_in_the_sockets_place_is_not_removed() {
    let directory = scratch();
    let image = make_image(directory.path());
    let place = directory.path().join("precious");
    std::fs::write(&place, "data").unwrap();
    let output = outcome(our_nbd().arg("-k").arg(&place).arg(&image));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Address already in use"));
    assert_eq!(std::fs::read(&place).unwrap(), b"data");
}

fn serve(socket: &Path, image: &Path) -> Command {
    let mut command = cowslip();
    command.arg("serve").arg("-k").arg(socket).arg(image);
    command
}

#[test]
fn a_server_that_is_refused_its_image_leaves_the_socket_to_the_other() {
    let directory = scratch();
    let image = make_image(directory.path());
    let socket = directory.path().join("socket");
    let server = Server::start(&mut serve(&socket, &image), &socket);
    let second = outcome(&mut serve(&socket, &image));
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1));
    assert!(said.contains("Failed to get \"write\" lock"), "{said}");
    let listed = run(our_nbd().arg("-L").arg("-k").arg(&socket));
    assert!(listed.contains("exports available: 1"), "{listed}");
    server.ends_in_order();
}

/// Also where the other ends with its last client: who asks whether it is there is none.
#[test]
fn a_socket_on_which_a_server_answers_is_not_taken() {
    for persistent in [&["-t"][..], &[]] {
        let directory = scratch();
        let image = make_image(directory.path());
        let other = directory.path().join("b.qcow2");
        std::fs::copy(&image, &other).unwrap();
        let socket = directory.path().join("socket");
        let mut command = our_nbd();
        command.args(persistent).arg("-k").arg(&socket).arg(&image);
        let server = Server::start(&mut command, &socket);
        for _ in 0..3 {
            let second = outcome(&mut serve(&socket, &other));
            let said = String::from_utf8_lossy(&second.stderr);
            assert_eq!(
                said,
                format!(
                    "cowslip: A server is already listening on the socket '{}': stop it, or choose \
                     another path\n",
                    socket.display()
                )
            );
            assert_eq!(second.status.code(), Some(1));
        }
        let listed = run(our_nbd().arg("-L").arg("-k").arg(&socket));
        assert!(listed.contains("exports available: 1"), "{listed}");
        server.ends_in_order();
    }
}

/// Returns values that distinguish a file from a later one of the same name, whose inode may be the
/// same.
fn identity(path: &Path) -> Option<(u64, i64, i64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
}

#[test]
fn the_socket_of_a_server_that_was_killed_is_taken_over() {
    let directory = scratch();
    let image = make_image(directory.path());
    let socket = directory.path().join("socket");
    let server = Server::start(&mut serve(&socket, &image), &socket);
    drop(server);
    let old = identity(&socket);
    assert!(old.is_some(), "killed, it left its socket");
    let server = Server::start(&mut serve(&socket, &image), &socket);
    eventually("the new server has its own", || {
        identity(&socket).is_some_and(|new| Some(new) != old)
    });
    eventually("it answers", || UnixStream::connect(&socket).is_ok());
    server.ends_in_order();
}

#[test]
fn what_clients_write_above_a_temporary_snapshot_is_gone_with_it() {
    let directory = scratch();
    let image = make_image(directory.path());
    let before = std::fs::read(&image).unwrap();
    let socket = directory.path().join("socket");
    let mut served = our_nbd();
    served
        .env("TMPDIR", directory.path())
        .args(["--fork", "-s", "-f", "qcow2", "-k"]);
    run(served.arg(&socket).arg(&image));
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let commands = ["-c", "write -P 5 0 64k", "-c", "read -P 5 0 64k"];
    let written = run(cowslip()
        .args(["qemu-io", "-f", "raw"])
        .args(commands)
        .arg(&uri));
    assert!(
        written.contains("read 65536/65536") && !written.contains("failed"),
        "{written}"
    );
    assert_eq!(std::fs::read(&image).unwrap(), before);
    let left = std::fs::read_dir(directory.path()).unwrap();
    let left = left.filter(|entry| entry.as_ref().unwrap().path() != socket);
    assert_eq!(left.count(), 1, "the image alone");
}

#[test]
fn a_server_removes_its_own_socket_only() {
    let directory = scratch();
    let image = make_image(directory.path());
    let socket = directory.path().join("socket");
    let mut server = Server::start(&mut serve(&socket, &image), &socket);
    std::fs::remove_file(&socket).unwrap();
    let _others = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    server.signal("TERM");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
    assert!(socket.exists(), "another server's socket is gone");
}

#[test]
fn a_server_says_what_its_cache_does_and_goes_on() {
    let directory = scratch();
    let image = make_image(directory.path());
    let socket = directory.path().join("socket");
    let errors = directory.path().join("errors");
    let mut command = cowslip();
    command
        .args(["serve", "--cache-size", "1M", "--socket"])
        .args([&socket, &image])
        .stderr(std::fs::File::create(&errors).unwrap());
    let server = Server::start(&mut command, &socket);
    for lines in 1..=2 {
        server.signal("USR1");
        eventually("a line comes", || {
            std::fs::read_to_string(&errors).unwrap().lines().count() >= lines
        });
    }
    let said = std::fs::read_to_string(&errors).unwrap();
    let line = said.lines().last().unwrap();
    let json = line.strip_prefix("cowslip: ").unwrap_or(line);
    let cache = &serde_json::from_str::<serde_json::Value>(json).unwrap()["cache"];
    let budget = cache["budget-bytes"].as_u64().unwrap();
    assert!((1_000_000..=1 << 20).contains(&budget), "{cache}");
    assert_eq!(cache["misses"], 0, "nobody has asked for anything");
    server.ends_in_order();
}

#[test]
fn a_snapshot_is_served_in_the_place_of_the_disk_and_not_written() {
    let dir = &scratch();
    make_image(dir);
    let ours = |words: &[&str]| run(cowslip().current_dir(dir).args(words));
    ours(&["io", "-c", "write -P 1 0 64k", "a.qcow2"]);
    ours(&["snapshot", "-c", "before", "a.qcow2"]);
    ours(&["io", "-c", "write -P 2 0 64k", "a.qcow2"]);
    let socket = dir.join("socket");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let options = "driver=qcow2,file.filename=a.qcow2";
    for (words, pattern) in [
        (&["--snapshot", "before", "a.qcow2"][..], "1"),
        (&["--snapshot", "snapshot.name=before", "a.qcow2"], "1"),
        (&["--snapshot", "1", "--image-opts", options], "1"),
        (&["--image-opts", options], "2"),
    ] {
        let mut serve = cowslip();
        serve.current_dir(dir).args(["serve", "-k", "socket"]);
        let server = Server::start(serve.args(words), &socket);
        let read = format!("read -P {pattern} 0 64k");
        let said = ours(&["io", "-r", "-f", "raw", "-c", &read, &uri]);
        assert!(!said.contains("failed"), "{words:?}: {said}");
        let write = ["io", "-f", "raw", "-c", "write 0 512", &uri];
        let written = outcome(cowslip().args(write));
        assert_eq!(written.status.success(), pattern == "2", "{words:?}");
        server.ends_in_order();
    }
    for (words, why) in [
        (&["--snapshot", "after", "a.qcow2"][..], "snapshot"),
        (
            &["--image-opts", "-f", "qcow2", options],
            "cannot be used with",
        ),
        (
            &["--snapshot", "1", "--compact-background", "1M", "a.qcow2"],
            "cannot be used with",
        ),
    ] {
        let mut serve = cowslip();
        serve.current_dir(dir).args(["serve", "-k", "socket"]);
        let refused = outcome(serve.args(words));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            refused.status.code() == Some(1) && said.contains(why),
            "{words:?}: {said}"
        );
    }
}
