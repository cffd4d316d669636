//! `serve --record` and `mount --record`: the trace has the requests that clients made, by every
//! transport, whatever becomes of the server.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use cowslip_front::{DATA_AT, Front, VERSION_1};
use cowslip_trace::{Kind, Reader, Request};

use crate::support::running::Running;
use crate::support::{cowslip, eventually, run, scratch, succeeds};

const SIZE: u64 = 16 << 20;

fn image(dir: &Path) -> PathBuf {
    let path = dir.join("a.qcow2");
    run(cowslip()
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&path)
        .arg(SIZE.to_string()));
    path
}

/// A server of `a.qcow2` in this directory, killed with the test.
struct Server {
    child: Running,
    socket: PathBuf,
}

impl Server {
    fn start(dir: &Path, transport: &str, words: &[&str]) -> Server {
        let socket = dir.join("socket");
        let mut command = cowslip();
        command.args(["serve", "-v", "-f", "qcow2"]);
        command.arg(transport).arg(&socket);
        command.args(words).arg(dir.join("a.qcow2"));
        let child = Running::start(command.current_dir(dir).stderr(Stdio::piped()));
        let server = Server { child, socket };
        eventually("the server answers", || {
            std::os::unix::net::UnixStream::connect(&server.socket).is_ok()
        });
        server
    }

    /// Ends it by a signal. Returns what it has said.
    fn end(mut self, signal: &str) -> String {
        run(Command::new("kill").args(["-s", signal, &self.child.id().to_string()]));
        let said = std::mem::take(&mut self.child.stderr).unwrap();
        let said = std::io::read_to_string(said).unwrap();
        self.child.wait().unwrap();
        said
    }

    /// Our own shell, as a client.
    fn io(&self, lines: &[&str]) {
        let mut command = cowslip();
        command.args(["io", "-f", "raw"]);
        for line in lines {
            command.args(["-c", line]);
        }
        run(command.arg(format!("nbd+unix:///?socket={}", self.socket.display())));
    }
}

/// The requests of a trace, without their times; of what was dropped.
fn trace(path: &Path) -> (Vec<Request>, u64) {
    let file = std::fs::File::open(path).unwrap();
    let mut reader = Reader::new(std::io::BufReader::new(file)).unwrap();
    assert_eq!(reader.header().disk_bytes, SIZE);
    assert_eq!(reader.header().block_bytes, 65_536);
    assert!(reader.header().began_us > 1_700_000_000_000_000);
    let requests: Vec<Request> = reader.by_ref().map(Result::unwrap).collect();
    assert!(requests.is_sorted_by_key(|request| request.at_us));
    let requests = requests.into_iter().map(|it| Request { at_us: 0, ..it });
    (requests.collect(), reader.dropped())
}

fn without_flushes(path: &Path) -> Vec<Request> {
    let (mut requests, dropped) = trace(path);
    assert_eq!(dropped, 0);
    requests.retain(|request| request.kind != Kind::Flush);
    requests
}

#[test]
fn what_a_client_of_nbd_asks_is_in_the_trace() {
    let dir = &scratch();
    image(dir);
    let server = Server::start(dir, "--socket", &["--record", "t"]);
    server.io(&[
        "write -P 1 64k 4k",
        "write -f -P 1 1M 64k",
        "read 64k 8k",
        "write -z -u 2M 64k",
        "write -z 3M 64k",
        "discard 1M 64k",
        "flush",
    ]);
    let said = server.end("TERM");
    assert!(said.contains("recorded "), "{said}");
    // The kernel's own thread, which writes for the ring, is not outside of the sandbox.
    assert!(!said.contains("does not cover"), "{said}");
    let (requests, dropped) = trace(&dir.join("t"));
    let flushes = requests.iter().filter(|it| it.kind == Kind::Flush).count();
    assert!(flushes >= 1);
    assert_eq!(dropped, 0);
    let expected = [
        Request::new(Kind::Write, 64 << 10, 4096),
        Request {
            is_durable: true,
            ..Request::new(Kind::Write, 1 << 20, 65_536)
        },
        Request::new(Kind::Read, 64 << 10, 8192),
        Request {
            may_unmap: true,
            ..Request::new(Kind::Zero, 2 << 20, 65_536)
        },
        Request::new(Kind::Zero, 3 << 20, 65_536),
        Request::new(Kind::Discard, 1 << 20, 65_536),
    ];
    assert_eq!(without_flushes(&dir.join("t")), expected);
    let mode = std::fs::metadata(dir.join("t")).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600, "nobody else may read what a guest did");
}

#[test]
fn requests_of_a_virtual_machine_are_in_the_trace() {
    let dir = &scratch();
    image(dir);
    let server = Server::start(dir, "--vhost-user", &["--record", "t"]);
    let mut front = Front::connect(&server.socket, VERSION_1).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    for (kind, sector, bytes) in [(1, 128, 4096), (0, 128, 8192), (1, 8, 512)] {
        let status = queue.request(kind, sector, &[(DATA_AT, bytes)]).unwrap();
        assert_eq!(status, 0);
    }
    server.end("TERM");
    // A driver that knows no flush gets writes that are durable.
    let durable = |offset, len| Request {
        is_durable: true,
        ..Request::new(Kind::Write, offset, len)
    };
    let expected = [
        durable(65_536, 4096),
        Request::new(Kind::Read, 65_536, 8192),
        durable(4096, 512),
    ];
    assert_eq!(without_flushes(&dir.join("t")), expected);
}

#[test]
fn requests_to_a_file_are_in_the_trace() {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root || !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: /dev/fuse and root are needed");
        return;
    }
    let dir = &scratch();
    image(dir);
    let disk = dir.join("disk");
    succeeds(dir, "mount -f qcow2 --record t a.qcow2 disk");
    let file = std::fs::File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&[1; 4096], 1 << 20).unwrap();
    file.sync_all().unwrap();
    drop(file);
    run(cowslip().arg("umount").arg(&disk));
    let writes = without_flushes(&dir.join("t"));
    assert!(
        writes.contains(&Request::new(Kind::Write, 1 << 20, 4096)),
        "{writes:?}"
    );
}

#[test]
fn a_server_that_is_killed_leaves_a_trace_that_can_be_read() {
    let dir = &scratch();
    image(dir);
    let server = Server::start(dir, "--socket", &["--record", "t"]);
    server.io(&["write 0 4k", "write 1M 4k"]);
    let file = dir.join("t");
    eventually("the trace is written beside the serving", || {
        std::fs::metadata(&file).is_ok_and(|file| file.len() > 48)
    });
    server.end("KILL");
    let expected = [
        Request::new(Kind::Write, 0, 4096),
        Request::new(Kind::Write, 1 << 20, 4096),
    ];
    assert_eq!(without_flushes(&file), expected);
}

#[test]
fn a_trace_ends_at_its_limit_and_the_guest_goes_on() {
    let dir = &scratch();
    image(dir);
    let server = Server::start(dir, "--socket", &["--record", "t", "--record-limit", "64"]);
    server.io(&["write -P 5 0 4k", "write -P 6 1M 4k", "read -P 5 0 4k"]);
    server.io(&["read -P 6 1M 4k"]);
    server.end("TERM");
    let (requests, dropped) = trace(&dir.join("t"));
    assert!(requests.is_empty());
    assert!(dropped >= 4, "{dropped}");
    assert!(std::fs::metadata(dir.join("t")).unwrap().len() <= 48 + 32);
}

fn refused(dir: &Path, socket: &str, image: &str, file: &str) -> String {
    let Output { status, stderr, .. } = cowslip()
        .current_dir(dir)
        .args(["serve", "--socket", socket, "--record", file, image])
        .output()
        .unwrap();
    assert!(!status.success());
    String::from_utf8(stderr).unwrap()
}

#[test]
fn a_trace_overwrites_neither_its_image_nor_another_trace_that_is_recorded() {
    let dir = &scratch();
    let base = image(dir);
    let overlay = [
        "create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2",
    ];
    run(cowslip().current_dir(dir).args(overlay).arg("b.qcow2"));
    let before = std::fs::read(&base).unwrap();
    for (image, file) in [("a.qcow2", "a.qcow2"), ("b.qcow2", "a.qcow2")] {
        let said = refused(dir, "s", image, file);
        assert!(said.contains("a.qcow2"), "{said}");
    }
    assert_eq!(std::fs::read(&base).unwrap(), before);
    let said = refused(dir, "s", "a.qcow2", "no/where");
    assert!(said.contains("Could not record to 'no/where'"), "{said}");
    let said = refused(dir, "s", "a.qcow2", ".");
    assert!(said.contains("Could not record to '.'"), "{said}");

    let server = Server::start(dir, "--socket", &["--record", "t"]);
    server.io(&["write 0 4k"]);
    succeeds(dir, "create -q -f qcow2 d.qcow2 1M");
    let said = refused(dir, "s", "d.qcow2", "t");
    assert!(said.contains("Could not record to 't'"), "{said}");
    server.end("TERM");
    let expected = [Request::new(Kind::Write, 0, 4096)];
    assert_eq!(without_flushes(&dir.join("t")), expected);
}

#[test]
fn each_server_of_a_handover_records_what_it_has_served() {
    let dir = &scratch();
    image(dir);
    let mut first = Server::start(dir, "--socket", &["--record", "t1"]);
    first.io(&["write 0 4k"]);
    let second = Server::start(dir, "--socket", &["--record", "t2", "--handover"]);
    eventually("the first server ends", || {
        first.child.try_wait().unwrap().is_some()
    });
    second.io(&["write 1M 4k"]);
    second.end("TERM");
    let write = |offset| [Request::new(Kind::Write, offset, 4096)];
    assert_eq!(without_flushes(&dir.join("t1")), write(0));
    assert_eq!(without_flushes(&dir.join("t2")), write(1 << 20));
}
