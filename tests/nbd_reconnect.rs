//! Exports of servers that are lost and come back, and of servers that are not there yet.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::golden::said;
use crate::support::rng::Rng;
use crate::support::running::Running;
use crate::support::{cowslip, outcome, run, scratch, scratch_beside};

const DISK_BYTES: u64 = 40 << 20;
/// Bytes after which a connection is closed: longer than the longest request, much shorter than a
/// disk.
const LIFE_BYTES: usize = 5 << 20;

/// Starts a server of ours.
fn serve(disk: &Path, socket: &Path, words: &[&str]) -> Running {
    let mut command = cowslip();
    command.args(["serve", "-f", "raw", "--socket"]).arg(socket);
    command.args(words).arg(disk).stdout(Stdio::null());
    let server = Running::start(&mut command);
    let begun = Instant::now();
    while UnixStream::connect(socket).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(30), "no server");
        std::thread::sleep(Duration::from_millis(5));
    }
    server
}

/// A relay between a client and a server, which closes both connections when a given number of
/// bytes has gone in one direction.
struct Cutter {
    socket: PathBuf,
    cuts: Arc<AtomicUsize>,
}

impl Cutter {
    /// Cuts the first `cuts` connections.
    fn start(socket: PathBuf, server: PathBuf, cuts: usize) -> Cutter {
        let listener = UnixListener::bind(&socket).unwrap();
        let left = Arc::new(AtomicUsize::new(cuts));
        let cutter = Cutter {
            socket,
            cuts: Arc::clone(&left),
        };
        // It ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), UnixStream::connect(&server).unwrap());
                let spent = Arc::new(AtomicUsize::new(0));
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let ends = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (spent, left) = (Arc::clone(&spent), Arc::clone(&left));
                    std::thread::spawn(move || pass_on(ends, &spent, &left));
                }
            }
        });
        cutter
    }

    fn cuts_left(&self) -> usize {
        self.cuts.load(Ordering::Relaxed)
    }

    fn image(&self, words: &str) -> String {
        format!("driver=nbd,path={}{words}", self.socket.display())
    }
}

fn pass_on((mut from, mut to): (UnixStream, UnixStream), spent: &AtomicUsize, left: &AtomicUsize) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = from.read(&mut buffer).unwrap_or(0);
        let before = spent.fetch_add(count, Ordering::Relaxed);
        // Of the two directions one gets there first.
        let is_over = before < LIFE_BYTES && before + count >= LIFE_BYTES;
        let one_less = |left: usize| left.checked_sub(1);
        let is_cut = is_over
            && left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
                .is_ok();
        if count == 0 || is_cut || to.write_all(&buffer[..count]).is_err() {
            drop(from.shutdown(Shutdown::Both));
            drop(to.shutdown(Shutdown::Both));
            return;
        }
    }
}

/// A disk of data and holes.
fn make_disk(path: &Path, rng: &mut Rng) {
    let disk = std::fs::File::create(path).unwrap();
    disk.set_len(DISK_BYTES).unwrap();
    for start in (0..DISK_BYTES).step_by(4 << 20) {
        disk.write_all_at(&rng.bytes(3 << 20), start).unwrap();
    }
}

fn convert(words: &[&str]) -> Command {
    let mut convert = cowslip();
    convert.args(["convert", "-q"]).args(words);
    convert
}

#[test]
fn a_copy_is_whole_however_often_the_server_was_lost() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    make_disk(&path("disk"), &mut Rng::new(1));
    let _server = serve(&path("disk"), &path("s"), &[]);
    let cutter = Cutter::start(path("cut"), path("s"), 4);
    let from = cutter.image(",reconnect-delay=60");
    run(convert(&["--image-opts", "-O", "raw", &from]).arg(path("copy")));
    assert_eq!(cutter.cuts_left(), 0, "it was cut");
    let [disk, copy] = ["disk", "copy"].map(|name| std::fs::read(path(name)).unwrap());
    assert!(disk == copy, "the copy differs");
}

#[test]
fn what_is_written_arrives_however_often_the_server_was_lost() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    make_disk(&path("disk"), &mut Rng::new(2));
    for cache in ["writethrough", "writeback"] {
        let target = std::fs::File::create(path(cache)).unwrap();
        target.set_len(DISK_BYTES).unwrap();
        let socket = |name: &str| path(&format!("{name}-{cache}"));
        let _server = serve(&path(cache), &socket("s"), &[]);
        let cutter = Cutter::start(socket("cut"), socket("s"), 4);
        let to = cutter.image(",reconnect-delay=60");
        let words = ["-n", "-t", cache, "-f", "raw", "--target-image-opts"];
        let converted = outcome(convert(&words).arg(path("disk")).arg(&to));
        // Which writes were acknowledged when a connection was lost is a matter of moments; only
        // durable ones need no flush.
        match cache {
            "writethrough" => assert!(converted.status.success(), "{}", said(&converted)),
            _ if converted.status.success() => {}
            _ => assert!(said(&converted).contains(LOST), "{}", said(&converted)),
        }
        assert_eq!(cutter.cuts_left(), 0, "it was cut");
        let [disk, copy] = ["disk", cache].map(|name| std::fs::read(path(name)).unwrap());
        assert!(disk == copy, "the copy differs: {cache}");
    }
}

/// The error of a flush that may not cover all writes acknowledged before.
const LOST: &str = "the connection was lost, and with it perhaps writes that the server had \
                    acknowledged and nobody had flushed";

#[test]
fn a_flush_by_the_next_server_does_not_stand_for_what_the_last_one_acknowledged() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    make_disk(&path("disk"), &mut Rng::new(5));
    // The writes before the server is replaced, and whether the flush after them fails.
    let cases = [
        ("", false),
        ("write 0 4k\nflush\n", false),
        ("write 4k 4k\n", true),
        ("write 4k 4k\nflush\nwrite 8k 4k\n", true),
        ("write -f 0 4k\n", false),
        ("discard 0 4k\n", true),
        ("write -z 0 4k\n", true),
    ];
    for (index, (lines, is_lost)) in cases.into_iter().enumerate() {
        // A server that was killed may keep its socket open for a moment.
        let socket = path(&format!("s{index}"));
        let image = format!("driver=nbd,path={},reconnect-delay=60", socket.display());
        let server = serve(&path("disk"), &socket, &[]);
        let (from_shell, to_us) = std::io::pipe().unwrap();
        let mut shell = cowslip();
        shell.args(["io", "--image-opts", &image]);
        shell
            .stdin(Stdio::piped())
            .stdout(to_us.try_clone().unwrap())
            .stderr(to_us);
        let mut running = shell.spawn().unwrap();
        drop(shell);
        let mut asks = running.stdin.take().unwrap();
        let mut stdout = std::io::BufReader::new(from_shell);
        asks.write_all(format!("{lines}read 64k 4k\n").as_bytes())
            .unwrap();
        wait_for(&mut stdout, "read 4096/4096 bytes at offset 65536");
        drop(server);
        let _next = serve(&path("disk"), &socket, &[]);
        asks.write_all(b"flush\nread 64k 4k\n").unwrap();
        drop(asks);
        let said = wait_for(&mut stdout, "read 4096/4096 bytes at offset 65536");
        let failed = said.contains("flush failed: Input/output error");
        assert_eq!(failed, is_lost, "{lines}: {said}");
        running.wait().unwrap();
    }
}

#[test]
fn without_a_delay_and_after_it_requests_fail() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    make_disk(&path("disk"), &mut Rng::new(3));
    let server = serve(&path("disk"), &path("s"), &[]);
    let cutter = Cutter::start(path("cut"), path("s"), 1);
    let from = cutter.image("");
    let failed = outcome(convert(&["--image-opts", "-O", "raw", &from]).arg(path("copy")));
    assert!(!failed.status.success(), "{}", said(&failed));
    assert_eq!(cutter.cuts_left(), 0, "it was cut");
    // This one does not come back, and another disk does not stand for it.
    let mut shell = cowslip();
    let from = format!("driver=nbd,path={},reconnect-delay=1", path("s").display());
    shell
        .args(["io", "--image-opts", &from])
        .stdin(Stdio::piped());
    let mut shell = shell
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut asks = shell.stdin.take().unwrap();
    let mut stdout = std::io::BufReader::new(shell.stdout.take().unwrap());
    asks.write_all(b"read 0 4k\n").unwrap();
    // To the end of the line: the rate that it ends with may end in "1 ops/sec" as well.
    wait_for(&mut stdout, "ops/sec)");
    drop(server);
    std::fs::File::create(path("other"))
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let _other = serve(&path("other"), &path("s"), &[]);
    asks.write_all(b"read 0 4k\nread 0 4k\n").unwrap();
    drop(asks);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert!(!rest.contains("ops"), "{rest}");
    assert_eq!(rest.matches("read failed").count(), 2, "{rest}");
    assert!(!shell.wait().unwrap().success());
}

/// Reads until a text has come; what was read.
fn wait_for(stdout: &mut impl Read, text: &str) -> String {
    let mut so_far = Vec::new();
    let mut byte = [0];
    while !String::from_utf8_lossy(&so_far).contains(text) {
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "{so_far:?}");
        so_far.push(byte[0]);
    }
    String::from_utf8_lossy(&so_far).into_owned()
}

#[test]
fn a_server_that_is_not_there_yet_is_waited_for() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    let path = |name: &str| dir.path().join(name);
    let at = |name: &str, words: &str| format!("driver=nbd,path={}{words}", path(name).display());
    // There is no server, or a silent one.
    let silent = UnixListener::bind(path("silent")).unwrap();
    let cases = [
        at("nobody", ""),
        at("nobody", ",open-timeout=1"),
        at("silent", ",open-timeout=1"),
        at("nobody", ",open-timeout=x"),
        at("nobody", ",reconnect-delay=1.5"),
    ];
    for words in cases {
        let begun = Instant::now();
        let options = ["info", "--image-opts", &words];
        let theirs = outcome(Command::new("qemu-img").args(options));
        let ours = outcome(cowslip().arg("qemu-img").args(options));
        assert_eq!(said(&ours), said(&theirs), "{words}");
        if words.ends_with("=1") {
            // Each of the two has waited for a second.
            assert!(begun.elapsed() >= Duration::from_secs(2), "{words}");
        }
    }
    drop(silent);
    make_disk(&path("disk"), &mut Rng::new(4));
    let waiting = cowslip()
        .args(["info", "--image-opts", &at("s", ",open-timeout=60")])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let _server = serve(&path("disk"), &path("s"), &[]);
    let output = waiting.wait_with_output().unwrap();
    assert!(said(&output).contains("40 MiB"), "{}", said(&output));
}
