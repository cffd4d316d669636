//! `serve --vhost-user`: a front end of our own against the program, which is killed meanwhile.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use cowslip_front::{
    self as front, DATA_AT, EVENT_IDX, FLUSH, Front, FrontQueue, Make, PACKED, VERSION_1,
    memory_file,
};

use crate::support::cowslip;

mod guest;
mod handover;
mod peers;
mod sessions;

const IN: u32 = 0;
const OUT: u32 = 1;
const IMAGE_BYTES: u64 = 16 << 20;

/// A server as a process of its own.
struct Served {
    child: Child,
    socket: PathBuf,
}

impl Served {
    fn start(image: &Path, socket: &Path, options: &[&str]) -> Served {
        let options = [&["-f", "qcow2"], options].concat();
        Served::start_named(image.to_str().unwrap(), socket, &options)
    }

    /// Serves an image of any name, with all options that it needs.
    fn start_named(name: &str, socket: &Path, options: &[&str]) -> Served {
        let child = cowslip()
            .args(["serve", "-v"])
            .args(options)
            .arg("--vhost-user")
            .arg(socket)
            .arg(name)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Served {
            child,
            socket: socket.to_path_buf(),
        }
    }

    /// Waits until the server accepts connections.
    fn wait(&mut self) {
        let begun = Instant::now();
        while std::os::unix::net::UnixStream::connect(&self.socket).is_err() {
            if let Some(status) = self.child.try_wait().unwrap() {
                let mut why = String::new();
                self.child
                    .stderr
                    .take()
                    .unwrap()
                    .read_to_string(&mut why)
                    .unwrap();
                panic!("the server ended: {status}: {why}");
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "no server");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn end(mut self) {
        let pid = i32::try_from(self.child.id()).unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        let mut said = String::new();
        self.child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut said)
            .unwrap();
        assert!(status.success(), "{status}: {said}");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        // What it said explains a failure.
        if std::thread::panicking()
            && let Some(mut stderr) = self.child.stderr.take()
        {
            let mut said = String::new();
            drop(stderr.read_to_string(&mut said));
            eprintln!("{said}");
        }
    }
}

fn image(dir: &Path) -> PathBuf {
    let path = dir.join("a.qcow2");
    let mut create = cowslip();
    create.args([
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=4k,extended_l2=off",
    ]);
    let status = create.arg(&path).arg("16M").status().unwrap();
    assert!(status.success());
    path
}

fn check(image: &Path) {
    let mut check = cowslip();
    let output = check.arg("check").arg(image).output().unwrap();
    // Leaks are what a killed process may leave.
    let code = output.status.code().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(code == 0 || code == 3, "{code}: {said}");
}

/// Sectors of a slot: each is written and read by one request at a time.
const SLOTS: usize = 32;
const SLOT_SECTORS: u64 = IMAGE_BYTES / 512 / SLOTS as u64;
const REQUEST_BYTES: usize = 8192;

/// Content of a slot on the disk, and the request that is under way for it.
#[derive(Clone, Default)]
struct Slot {
    /// Content of each piece of the slot: the number that its bytes were made of.
    pieces: Vec<u64>,
    /// The piece and the number that a write will leave, or the piece that is read.
    running: Option<(usize, Option<u64>)>,
}

fn content(number: u64, slot: usize, piece: usize) -> Vec<u8> {
    let words = 0..REQUEST_BYTES as u64 / 8;
    let mix = |word: u64| {
        let place = (slot as u64) << 32 | (piece as u64) << 16;
        (number ^ place ^ word << 48).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    };
    match number {
        0 => vec![0; REQUEST_BYTES],
        _ => words.flat_map(|word| mix(word).to_le_bytes()).collect(),
    }
}

/// Writes and reads at random, each in a slot of its own, and checks every byte that is read.
struct Load {
    slots: Vec<Slot>,
    state: u64,
    number: u64,
    completed: u64,
}

impl Load {
    fn new() -> Load {
        let pieces = SLOT_SECTORS as usize * 512 / REQUEST_BYTES;
        let slot = Slot {
            pieces: vec![0; pieces],
            running: None,
        };
        Load {
            slots: vec![slot; SLOTS],
            state: 1,
            number: 0,
            completed: 0,
        }
    }

    fn random(&mut self, limit: usize) -> usize {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.state >> 33) as usize % limit
    }

    /// Makes requests for slots that have none, up to `depth` in flight.
    fn submit(&mut self, queue: &mut FrontQueue, depth: usize) {
        let running = self.slots.iter().filter(|slot| slot.running.is_some());
        let mut free = depth.saturating_sub(running.count());
        while free > 0 && queue.ring.free_count() >= 4 {
            let slot = self.random(SLOTS);
            if self.slots[slot].running.is_some() {
                continue;
            }
            free -= 1;
            let piece = self.random(self.slots[slot].pieces.len());
            let at = DATA_AT + slot * REQUEST_BYTES;
            let is_write = self.random(3) > 0;
            let memory = &queue.ring.memory;
            if is_write {
                self.number += 1;
                memory.write(at, &content(self.number, slot, piece));
            }
            self.slots[slot].running = Some((piece, is_write.then_some(self.number)));
            let sector = slot as u64 * SLOT_SECTORS + (piece * REQUEST_BYTES / 512) as u64;
            queue
                .submit(&Make {
                    kind: if is_write { OUT } else { IN },
                    sector,
                    data: &[(at, REQUEST_BYTES)],
                    tag: slot as u64,
                    header_cuts: &[],
                    is_indirect: false,
                })
                .unwrap();
        }
        queue.kick().unwrap();
    }

    /// Takes in a completion.
    fn complete(&mut self, queue: &FrontQueue, (made, status): (front::Made, u8)) {
        assert_eq!(status, 0, "{made:?}");
        let slot = made.tag as usize;
        let state = &mut self.slots[slot];
        let (piece, written) = state.running.take().expect("it completes once");
        match written {
            Some(number) => state.pieces[piece] = number,
            None => {
                let mut read = vec![0; REQUEST_BYTES];
                queue.ring.memory.read(made.data[0].0, &mut read);
                let expected = content(state.pieces[piece], slot, piece);
                assert!(read == expected, "slot {slot}, piece {piece}");
            }
        }
        self.completed += 1;
    }

    /// Waits for all that is in flight.
    fn drain(&mut self, queue: &mut FrontQueue) {
        while self.slots.iter().any(|slot| slot.running.is_some()) {
            let done = queue.complete().unwrap();
            self.complete(queue, done);
        }
    }

    /// Reads everything, and checks it.
    fn read_all(&mut self, queue: &mut FrontQueue) {
        for slot in 0..SLOTS {
            for piece in 0..self.slots[slot].pieces.len() {
                let sector = slot as u64 * SLOT_SECTORS + (piece * REQUEST_BYTES / 512) as u64;
                let status = queue
                    .request(IN, sector, &[(DATA_AT, REQUEST_BYTES)])
                    .unwrap();
                assert_eq!(status, 0);
                let mut read = vec![0; REQUEST_BYTES];
                queue.ring.memory.read(DATA_AT, &mut read);
                let expected = content(self.slots[slot].pieces[piece], slot, piece);
                assert!(read == expected, "slot {slot}, piece {piece}");
            }
        }
    }
}

/// Kills of each kind of ring. A soak has more: `COWSLIP_TEST_KILLS`.
fn kills() -> u64 {
    let asked = std::env::var("COWSLIP_TEST_KILLS").ok();
    asked.map_or(12, |text| text.parse().expect("a number"))
}

/// A server is killed again and again under load; each successor goes on with the requests that
/// were in flight. Nothing is lost, nothing completes twice.
fn killed_under_load(features: u64) {
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (image(dir.path()), dir.path().join("socket"));
    let memory = memory_file(front::MEMORY_BYTES).unwrap();
    let mut load = Load::new();
    let mut known: Option<(OwnedFd, Vec<u8>)> = None;
    let mut queue: Option<FrontQueue> = None;
    let (mut replayed, mut longest) = (0, Duration::ZERO);
    for round in 0..=kills() {
        let begun = Instant::now();
        let mut served = Served::start(&image, &socket, &[]);
        served.wait();
        let file = memory.try_clone().unwrap();
        let mut front = Front::connect_with(&socket, features, file).unwrap();
        match &known {
            Some((table, description)) => front.set_inflight(table, description).unwrap(),
            None => known = Some(front.get_inflight(1, 64).unwrap()),
        }
        let mut working = match queue.take() {
            Some(mut queue) => {
                // As QEMU, which does not know the place either.
                front.start_queue(&mut queue, 0).unwrap();
                queue
            }
            None => front.queue(0, 64).unwrap(),
        };
        let in_flight = load
            .slots
            .iter()
            .filter(|slot| slot.running.is_some())
            .count();
        if in_flight > 0 {
            let done = working.complete().unwrap();
            longest = longest.max(begun.elapsed());
            load.complete(&working, done);
            replayed += in_flight;
        }
        if round == kills() {
            load.drain(&mut working);
            load.read_all(&mut working);
            drop(front);
            served.end();
            break;
        }
        let until = Instant::now() + Duration::from_micros(500 + load.random(30_000) as u64);
        while Instant::now() < until {
            load.submit(&mut working, 24);
            while let Some(done) = working.try_complete().unwrap() {
                load.complete(&working, done);
            }
        }
        served.kill();
        queue = Some(working);
    }
    check(&image);
    let completed = load.completed;
    eprintln!(
        "{completed} requests, {replayed} of them in flight at a kill; longest gap {longest:?}"
    );
    assert!(completed > 100 && replayed > 10, "{completed} {replayed}");
}

#[test]
fn a_killed_servers_requests_are_carried_out_by_its_successor() {
    killed_under_load(VERSION_1 | EVENT_IDX | FLUSH);
}

#[test]
fn a_killed_servers_requests_on_packed_rings_are_carried_out_by_its_successor() {
    killed_under_load(VERSION_1 | EVENT_IDX | FLUSH | PACKED);
}

#[test]
fn one_image_is_served_over_both_transports_in_a_whole_sandbox() {
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (image(dir.path()), dir.path().join("socket"));
    let nbd = dir.path().join("nbd");
    let options = [
        "--socket",
        nbd.to_str().unwrap(),
        "--sandbox",
        "on",
        "--threads",
        "2",
    ];
    let mut served = Served::start(&image, &socket, &options);
    served.wait();
    let mut front = Front::connect(&socket, VERSION_1 | EVENT_IDX).unwrap();
    let mut queues: Vec<FrontQueue> = (0..3)
        .map(|index| front.queue(index, 16).unwrap())
        .collect();
    for (index, queue) in queues.iter_mut().enumerate() {
        let byte = index as u8 + 1;
        front.memory.write(DATA_AT, &[byte; 4096]);
        assert_eq!(
            queue
                .request(OUT, index as u64 * 8, &[(DATA_AT, 4096)])
                .unwrap(),
            0
        );
    }
    let uri = format!("nbd+unix:///?socket={}", nbd.display());
    let io = cowslip()
        .args([
            "io",
            "-f",
            "raw",
            "-c",
            "read -P 1 0 4k",
            "-c",
            "read -P 3 8k 4k",
        ])
        .args(["-c", "write -P 9 4k 4k", &uri])
        .output()
        .unwrap();
    assert!(io.status.success(), "{io:?}");
    assert_eq!(queues[0].request(IN, 8, &[(DATA_AT, 4096)]).unwrap(), 0);
    let mut read = [0; 4096];
    front.memory.read(DATA_AT, &mut read);
    assert_eq!(read, [9; 4096]);
    // A table of requests in flight is made within the sandbox.
    front.get_inflight(2, 16).unwrap();
    drop((queues, front));
    served.end();
    check(&image);
    assert!(!socket.exists() && !nbd.exists(), "the names are removed");
}

#[test]
fn a_disk_that_grows_as_a_file_grows_for_guests_and_clients() {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        return eprintln!("SKIPPED: /dev/fuse and root are needed");
    }
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (image(dir.path()), dir.path().join("socket"));
    let [file, nbd] = ["disk", "nbd"].map(|name| dir.path().join(name));
    let words = [file.to_str().unwrap(), "--growable", "--socket"];
    let options = [&["--fuse"], &words[..], &[nbd.to_str().unwrap()]].concat();
    let mut served = Served::start(&image, &socket, &options);
    served.wait();
    let mut front = Front::connect(&socket, VERSION_1).unwrap();
    assert_eq!(
        front.config(60).unwrap()[..8],
        (IMAGE_BYTES / 512).to_le_bytes()
    );
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    front.send_acked(21, &[], &[theirs.as_fd()]).unwrap();
    let disk = std::fs::File::options().write(true).open(&file).unwrap();
    disk.set_len(2 * IMAGE_BYTES).unwrap();
    drop(disk);
    let mut message = [0; 12];
    (&ours).read_exact(&mut message).unwrap();
    assert_eq!(message[..4], [2, 0, 0, 0], "the configuration has changed");
    let sectors = 2 * IMAGE_BYTES / 512;
    assert_eq!(front.config(60).unwrap()[..8], sectors.to_le_bytes());
    let mut queue = front.queue(0, 16).unwrap();
    front.memory.write(DATA_AT, &[6; 512]);
    let last = sectors - 1;
    assert_eq!(queue.request(OUT, last, &[(DATA_AT, 512)]).unwrap(), 0);
    let uri = format!("nbd+unix:///?socket={}", nbd.display());
    let read = format!("read -P 6 {} 512", last * 512);
    let words = ["io", "-f", "raw", "-r", "-c", &read, &uri];
    let io = cowslip().args(words).output().unwrap();
    let said = String::from_utf8_lossy(&io.stdout).into_owned();
    assert!(io.status.success() && !said.contains("failed"), "{said}");
    drop((queue, front));
    served.end();
    check(&image);
    assert!(!file.exists() && !socket.exists() && !nbd.exists());
}
