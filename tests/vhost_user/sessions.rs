//! Long sessions: queues stop and go on, front ends come again, slots of memory are added and
//! removed, and the disk grows, all beside requests; by our daemon and by qemu-storage-daemon,
//! which are started with the same options.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;

use cowslip_front::MEMORY_BYTES;
use cowslip_qmp::client::Client;
use cowslip_queue::SharedMemory;
use serde_json::json;

use super::*;
use crate::support::rng::Rng;
use crate::support::whose::Whose;
use crate::support::{number_from_environment, peers_are_installed};

/// Requests at a time, each with a part of the disk and of each slot of memory.
const SLOTS: usize = 12;
const SLOT_BYTES: usize = 64 << 10;
/// Bytes by which the disk grows.
const STEP_BYTES: u64 = 1 << 20;
/// Length of the second slot of memory.
const EXTRA_BYTES: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);
const FEATURES: u64 = VERSION_1 | EVENT_IDX | FLUSH | front::INDIRECT;
/// VIRTIO_BLK_T_FLUSH.
const FLUSH_KIND: u32 = 4;
/// VHOST_USER_SET_BACKEND_REQ_FD.
const SET_BACKEND_CHANNEL: u32 = 21;
/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
const CONFIG_CHANGED: u32 = 2;

/// The program that serves disks.
fn daemon_of(whose: Whose) -> Command {
    match whose {
        Whose::Ours => {
            let mut command = cowslip();
            command.arg("daemon");
            command
        }
        Whose::Theirs => Command::new("qemu-storage-daemon"),
    }
}

/// A daemon, ours or QEMU's.
struct Daemon {
    process: Child,
    client: Client,
}

impl Daemon {
    fn start(mut command: Command, image: &Path) -> Daemon {
        let dir = image.parent().unwrap();
        let control = dir.join("control");
        let export = "type=vhost-user-blk,id=export,node-name=disk,writable=on,addr.type=unix";
        command
            .current_dir(dir)
            .args(["--blockdev", "driver=file,node-name=file,filename=a.qcow2"])
            .args(["--blockdev", "driver=qcow2,node-name=disk,file=file"])
            .args(["--export", &format!("{export},addr.path=disk")])
            .arg("--chardev")
            .arg("socket,id=control,path=control,server=on,wait=off")
            .args(["--monitor", "chardev=control"])
            .stdin(Stdio::null());
        let mut process = command.spawn().unwrap();
        let begun = Instant::now();
        loop {
            // QEMU's has lost the first command of a client that came early, once in hundreds of
            // runs: another connection is answered.
            if dir.join("disk").exists()
                && let Ok(client) = Client::connect(&control, Some(PATIENCE / 10))
            {
                return Daemon { process, client };
            }
            let ended = process.try_wait().unwrap();
            assert!(ended.is_none(), "{command:?} has ended: {ended:?}");
            assert!(begun.elapsed() < PATIENCE, "{command:?} does not answer");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn resize(&mut self, size: u64) {
        let arguments = json!({"node-name": "disk", "size": size});
        self.client.execute("block_resize", arguments).unwrap();
    }

    fn quit(mut self) {
        // QEMU's may have ended before it answers.
        drop(self.client.execute("quit", json!({})));
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// A request in flight.
struct Running {
    sector: u64,
    /// Offset of its data in the memory.
    at: usize,
    len: usize,
    /// Bytes that it writes; none for a read.
    written: Option<Vec<u8>>,
}

/// A guest, and how the disk reads for it.
struct Session {
    program: Whose,
    socket: PathBuf,
    front: Front,
    /// The channel for messages of the server.
    channel: UnixStream,
    queue: FrontQueue,
    /// A second slot of memory, behind the first one.
    extra: Option<Arc<SharedMemory>>,
    extra_file: OwnedFd,
    disk: Vec<u8>,
    running: Vec<Option<Running>>,
    submitted: u16,
    completed: u16,
    rng: Rng,
}

/// Passes a channel for messages of the server; returns the front end's side.
fn channel(front: &mut Front) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    let passed = front.send_acked(SET_BACKEND_CHANNEL, &[], &[theirs.as_fd()]);
    assert_eq!(passed.unwrap(), 0);
    ours
}

impl Session {
    fn new(program: Whose, socket: &Path, seed: u64) -> Session {
        let mut front = Front::connect(socket, FEATURES).unwrap();
        let channel = channel(&mut front);
        let queue = front.queue(0, 128).unwrap();
        Session {
            program,
            socket: socket.to_path_buf(),
            front,
            channel,
            queue,
            extra: None,
            extra_file: memory_file(EXTRA_BYTES).unwrap(),
            disk: vec![0; IMAGE_BYTES as usize],
            running: (0..SLOTS).map(|_| None).collect(),
            submitted: 0,
            completed: 0,
            rng: Rng::new(seed),
        }
    }

    /// The memory at an offset, and the offset there.
    fn memory(&self, at: usize) -> (&SharedMemory, usize) {
        match at.checked_sub(MEMORY_BYTES as usize) {
            None => (&self.front.memory, at),
            Some(at) => (self.extra.as_ref().unwrap(), at),
        }
    }

    /// Makes requests for some of the slots that have none.
    fn submit(&mut self) {
        for slot in 0..SLOTS {
            if self.running[slot].is_some() || self.rng.once_in(3) {
                continue;
            }
            // Parts of the disk as it was made, and of what it has grown by.
            let parts = [0..IMAGE_BYTES, IMAGE_BYTES..self.disk.len() as u64];
            let part = &parts[usize::from(!parts[1].is_empty() && self.rng.once_in(3))];
            let share = (part.end - part.start) / 512 / SLOTS as u64;
            let sectors = 1 + self.rng.below(share.min(SLOT_BYTES as u64 / 512));
            let sector = part.start / 512 + slot as u64 * share;
            let sector = sector + self.rng.below(share - sectors + 1);
            let len = sectors as usize * 512;
            let at = match &self.extra {
                Some(_) if self.rng.once_in(2) => MEMORY_BYTES as usize,
                _ => DATA_AT,
            };
            let at = at + slot * SLOT_BYTES;
            let written = self.rng.once_in(2).then(|| self.rng.bytes(len));
            let (memory, offset) = self.memory(at);
            memory.write(offset, &written.clone().unwrap_or_else(|| vec![0xCC; len]));
            let kind = if written.is_some() { OUT } else { IN };
            let made = self.queue.submit(&Make {
                kind,
                sector,
                data: &[(at, len)],
                tag: slot as u64,
                header_cuts: &[],
                is_indirect: self.rng.once_in(2),
            });
            made.unwrap();
            self.submitted = self.submitted.wrapping_add(1);
            self.running[slot] = Some(Running {
                sector,
                at,
                len,
                written,
            });
        }
        self.queue.kick().unwrap();
    }

    fn complete(&mut self, (made, status): (front::Made, u8)) {
        assert_eq!(status, 0, "{made:?}");
        self.completed = self.completed.wrapping_add(1);
        let running = self.running[made.tag as usize].take();
        let running = running.expect("it completes once");
        let place = running.sector as usize * 512;
        let on_disk = place..place + running.len;
        match running.written {
            Some(bytes) => self.disk[on_disk].copy_from_slice(&bytes),
            None => {
                let mut read = vec![0; running.len];
                let (memory, at) = self.memory(running.at);
                memory.read(at, &mut read);
                let sector = running.sector;
                assert!(read == self.disk[on_disk], "sector {sector}");
            }
        }
    }

    fn complete_some(&mut self) {
        while let Some(done) = self.queue.try_complete().unwrap() {
            self.complete(done);
        }
    }

    fn drain(&mut self) {
        while self.running.iter().any(Option::is_some) {
            let done = self.queue.complete().unwrap();
            self.complete(done);
        }
    }

    /// Stops the queue beside requests; what was taken completes. Returns the place in the ring.
    fn stop(&mut self) -> u32 {
        // Version 10.0.2 of QEMU's closes the event of a queue that stops before the requests in
        // flight have completed, and ends then: so none is in flight.
        if self.program == Whose::Theirs {
            self.drain();
        }
        let base = self.front.stop_queue(0).unwrap();
        let begun = Instant::now();
        loop {
            self.complete_some();
            if u32::from(self.completed) == base {
                return base;
            }
            let completed = self.completed;
            assert!(begun.elapsed() < PATIENCE, "{completed} of {base} complete");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn start(&mut self, base: u32) {
        self.front.start_queue(&mut self.queue, base).unwrap();
        // What was made available meanwhile is not notified again by others.
        self.queue.kick_always().unwrap();
    }

    /// Leaves and comes again, with the same memory.
    fn reconnect(&mut self) {
        let base = match self.rng.once_in(2) {
            true => self.stop(),
            false => {
                self.drain();
                u32::from(self.submitted)
            }
        };
        let file = self.front.file.try_clone().unwrap();
        // The connection ends first: a server has one at a time.
        self.front.disconnect().unwrap();
        self.front = Front::connect_with(&self.socket, FEATURES, file).unwrap();
        self.channel = channel(&mut self.front);
        if self.extra.is_some() {
            let file = &self.extra_file;
            self.front
                .add_region(MEMORY_BYTES, EXTRA_BYTES, file)
                .unwrap();
        }
        self.start(base);
    }

    fn add_or_remove_memory(&mut self) {
        let file = &self.extra_file;
        if self.extra.is_none() {
            let added = self.front.add_region(MEMORY_BYTES, EXTRA_BYTES, file);
            added.unwrap();
            self.extra = Some(SharedMemory::map(file.as_fd(), 0, EXTRA_BYTES).unwrap());
            return;
        }
        self.drain();
        let removed = self.front.remove_region(MEMORY_BYTES, EXTRA_BYTES);
        removed.unwrap();
        self.extra = None;
    }

    fn grow(&mut self, daemon: &mut Daemon) {
        let size = self.disk.len() as u64 + STEP_BYTES;
        daemon.resize(size);
        self.disk.resize(size as usize, 0);
        self.expect_notification();
        let config = self.front.config(8).unwrap();
        let sectors = u64::from_le_bytes(config.try_into().unwrap());
        assert_eq!(sectors * 512, size);
    }

    /// Receives the message that the configuration has changed.
    fn expect_notification(&mut self) {
        let mut header = [0; 12];
        self.channel.read_exact(&mut header).unwrap();
        let [code, flags, len] = [0, 4, 8].map(|at| {
            let field = header[at..at + 4].try_into().unwrap();
            u32::from_le_bytes(field)
        });
        assert_eq!((code, len), (CONFIG_CHANGED, 0));
        // An answer is asked for: version 1, a reply of 8 bytes, success.
        if flags & 8 != 0 {
            let answer = [code, 1 | 4, 8, 0, 0].map(u32::to_le_bytes).concat();
            self.channel.write_all(&answer).unwrap();
        }
    }

    fn flush(&mut self) {
        self.drain();
        self.submitted = self.submitted.wrapping_add(1);
        self.completed = self.completed.wrapping_add(1);
        assert_eq!(self.queue.request(FLUSH_KIND, 0, &[]).unwrap(), 0);
    }

    /// Runs the session; returns how the disk reads in the end.
    fn run(mut self, daemon: &mut Daemon, rounds: u64) -> Vec<u8> {
        for _ in 0..rounds {
            self.submit();
            match self.rng.below(12) {
                0 => {
                    let base = self.stop();
                    self.start(base);
                }
                1 => self.reconnect(),
                2 | 3 => self.add_or_remove_memory(),
                4 if self.disk.len() as u64 <= IMAGE_BYTES * 2 => self.grow(daemon),
                5 => self.flush(),
                6 => self.drain(),
                _ => self.complete_some(),
            }
        }
        self.drain();
        self.flush();
        self.disk
    }
}

/// Runs sessions. How many requests are in flight at an event is up to the program; each disk is
/// compared with what the guest knows of it.
fn sessions(program: Whose) {
    let rounds = number_from_environment("COWSLIP_ROUNDS").unwrap_or(400);
    for seed in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let path = image(dir.path());
        let mut daemon = Daemon::start(daemon_of(program), &path);
        let session = Session::new(program, &dir.path().join("disk"), seed);
        let disk = session.run(&mut daemon, rounds);
        daemon.quit();
        check(&path);
        let raw = dir.path().join("raw");
        let mut convert = cowslip();
        convert.arg("convert").args(["-O", "raw"]);
        let status = convert.arg(&path).arg(&raw).status().unwrap();
        assert!(status.success());
        assert!(std::fs::read(&raw).unwrap() == disk, "seed {seed}");
    }
}

#[test]
fn stops_reconnections_slots_of_memory_and_growth_lose_nothing_beside_requests() {
    sessions(Whose::Ours);
}

/// The front end keeps to the protocol as QEMU's daemon has it.
#[test]
fn the_same_sessions_are_served_by_qemu_storage_daemon() {
    if peers_are_installed(&["qemu-storage-daemon"]) {
        sessions(Whose::Theirs);
    }
}
