//! Several connections to one export, from servers that offer them.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::golden::said;
use crate::support::rng::Rng;
use crate::support::running::Running;
use crate::support::{cowslip, run, scratch};

const DISK_BYTES: u64 = 24 << 20;
/// Bytes that the first connection carries quickly while it is alone.
const ALONE_BYTES: usize = 1 << 20;
/// How long each piece behind that takes: a disk takes seconds, which is long enough for the others
/// to come.
const SLOWNESS: Duration = Duration::from_millis(10);
/// Bytes of the handshake that a connection carries at most; requests are longer.
const HANDSHAKE_BYTES: usize = 4 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts a server of ours.
fn serve(disk: &Path, socket: &Path, clients: &str) -> Running {
    let mut command = cowslip();
    command.args(["qemu-nbd", "-t", "-f", "raw", "-e", clients, "-k"]);
    command.arg(socket).arg(disk).stdout(Stdio::null());
    let server = Running::start(&mut command);
    let begun = Instant::now();
    while !socket.exists() {
        assert!(begun.elapsed() < PATIENCE, "no server");
        std::thread::sleep(Duration::from_millis(5));
    }
    server
}

/// How many connections came, and how many of them carried more than a handshake.
#[derive(Default)]
struct Traffic {
    came: usize,
    used: usize,
}

/// A relay between a client and a server. A connection is slow behind its first [`ALONE_BYTES`],
/// until a given number of connections is used.
struct Relay {
    socket: PathBuf,
    traffic: Arc<Mutex<Traffic>>,
}

impl Relay {
    fn start(socket: PathBuf, server: PathBuf, wanted: usize) -> Relay {
        let listener = UnixListener::bind(&socket).unwrap();
        let traffic = Arc::new(Mutex::new(Traffic::default()));
        let relay = Relay {
            socket,
            traffic: Arc::clone(&traffic),
        };
        // It ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), UnixStream::connect(&server).unwrap());
                traffic.lock().unwrap().came += 1;
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let ends = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let traffic = Arc::clone(&traffic);
                    std::thread::spawn(move || pass_on(ends, &traffic, wanted));
                }
            }
        });
        relay
    }

    fn image(&self, connections: usize) -> String {
        let socket = self.socket.display();
        format!("driver=nbd,path={socket},connections={connections}")
    }

    /// How many connections came, and how many were used.
    fn seen(&self) -> (usize, usize) {
        let traffic = self.traffic.lock().unwrap();
        (traffic.came, traffic.used)
    }
}

fn pass_on((mut from, mut to): (UnixStream, UnixStream), traffic: &Mutex<Traffic>, wanted: usize) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0;
    loop {
        let count = from.read(&mut buffer).unwrap_or(0);
        let before = passed;
        passed += count;
        if before < HANDSHAKE_BYTES && passed >= HANDSHAKE_BYTES {
            traffic.lock().unwrap().used += 1;
        }
        if passed > ALONE_BYTES && traffic.lock().unwrap().used < wanted {
            std::thread::sleep(SLOWNESS);
        }
        if count == 0 || to.write_all(&buffer[..count]).is_err() {
            drop(from.shutdown(Shutdown::Both));
            drop(to.shutdown(Shutdown::Both));
            return;
        }
    }
}

fn convert(words: &[&str]) -> Command {
    let mut convert = cowslip();
    convert.args(["convert", "-q", "-W"]).args(words);
    convert
}

fn make_disk(path: &Path, seed: u64) {
    std::fs::write(path, Rng::new(seed).bytes(DISK_BYTES as usize)).unwrap();
}

fn assert_same(dir: &Path, one: &str, other: &str) {
    let [one, other] = [one, other].map(|name| std::fs::read(dir.join(name)).unwrap());
    assert!(one == other, "the disks differ");
}

#[test]
fn copies_go_over_as_many_connections_as_were_asked_for() {
    assert_eq!(copied(1, "8", (3, 3)), (3, 3));
}

/// Copies a disk, made from a seed, from a server that takes a number of clients. Returns how many
/// of the connections that are asked for have come and are used; a relay hurries when those that
/// are wanted are used.
fn copied(seed: u64, clients: &str, (wanted, asked): (usize, usize)) -> (usize, usize) {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    make_disk(&path("disk"), seed);
    let _server = serve(&path("disk"), &path("s"), clients);
    let relay = Relay::start(path("r"), path("s"), wanted);
    run(convert(&["--image-opts", "-O", "raw", &relay.image(asked)]).arg(path("copy")));
    assert_same(dir.path(), "disk", "copy");
    relay.seen()
}

#[test]
fn what_is_written_over_several_connections_arrives() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    make_disk(&path("disk"), 2);
    let target = std::fs::File::create(path("target")).unwrap();
    target.set_len(DISK_BYTES).unwrap();
    let _server = serve(&path("target"), &path("s"), "8");
    let relay = Relay::start(path("r"), path("s"), 4);
    let words = ["-n", "-f", "raw", "--target-image-opts"];
    run(convert(&words).arg(path("disk")).arg(relay.image(4)));
    assert_eq!(relay.seen(), (4, 4));
    assert_same(dir.path(), "disk", "target");
}

#[test]
fn a_server_of_one_client_has_one_connection() {
    assert_eq!(copied(3, "1", (1, 4)).0, 1);
}

#[test]
fn connections_that_a_server_does_not_take_are_not_waited_for() {
    assert_eq!(copied(4, "2", (2, 8)).1, 2);
}

#[test]
fn the_number_of_connections_has_bounds() {
    for number in ["0", "17", "many"] {
        let image = format!("driver=nbd,path=/nobody,connections={number}");
        let printed = cowslip().args(["info", "--image-opts", &image]).output();
        let printed = said(&printed.unwrap());
        assert!(printed.contains("between 1 and 16"), "{printed}");
    }
}
