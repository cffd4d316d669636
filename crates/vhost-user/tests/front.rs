//! A front end for tests: the socket, the guest's memory, and queues with requests.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cowslip_block::Disk;
use cowslip_queue::{Backend, Listener, Queue, SharedMemory};
use cowslip_vhost_user::{Options, Server, ServerEvent, ServerHandle};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::ring::{DEVICE_AT, DRIVER_AT, DriverRing, Piece, RING_BYTES};

/// Where the guest's memory begins, for the guest and for the front end.
pub const GUEST: u64 = 0x10_0000;
pub const USER: u64 = 0x7000_0000_0000;
pub const MEMORY_BYTES: u64 = 16 << 20;
/// Where headers, status bytes, tables and data begin, behind the rings.
const SLOTS_AT: usize = 1 << 20;
const SLOT_BYTES: usize = 4096;
pub const DATA_AT: usize = 6 << 20;

pub const VERSION_1: u64 = 1 << 32;
pub const PACKED: u64 = 1 << 34;
pub const IN_ORDER: u64 = 1 << 35;
pub const EVENT_IDX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
pub const PROTOCOL: u64 = 1 << 30;
pub const FLUSH: u64 = 1 << 9;

/// A server on a thread of its own.
pub struct Running {
    pub path: PathBuf,
    pub handle: ServerHandle,
    pub events: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Running {
    pub fn start(disk: Arc<dyn Disk>, options: Options) -> Running {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Listener::unix(&path).unwrap();
        let mut server = Server::new(disk, options).unwrap();
        let events: Arc<Mutex<Vec<String>>> = Arc::default();
        let to = Arc::clone(&events);
        server.observe(move |event: &ServerEvent<'_>| {
            to.lock().unwrap().push(format!("{event:?}"));
        });
        let handle = server.handle();
        let thread = std::thread::spawn(move || {
            let queue = Queue::new(Backend::Auto).unwrap();
            queue.block_on(server.serve(listener));
        });
        Running {
            path,
            handle,
            events,
            thread: Some(thread),
            _dir: dir,
        }
    }

    /// Waits for an event that contains a text.
    pub fn wait_for_event(&self, text: &str) {
        let begun = Instant::now();
        while !self.events.lock().unwrap().iter().any(|e| e.contains(text)) {
            let waited = begun.elapsed() < Duration::from_secs(20);
            assert!(waited, "no '{text}' in {:?}", self.events.lock().unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn has_event(&self, text: &str) -> bool {
        self.events.lock().unwrap().iter().any(|e| e.contains(text))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle.stop();
        if std::thread::panicking() {
            eprintln!("events: {:?}", self.events.lock().unwrap());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the server panicked");
        }
    }
}

/// A connection to a server.
pub struct Front {
    stream: UnixStream,
    pub file: OwnedFd,
    pub memory: Arc<SharedMemory>,
    pub features: u64,
}

pub fn memory_file(len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    file
}

impl Front {
    /// Connects, negotiates and passes the memory.
    pub fn connect(path: &Path, features: u64) -> Front {
        let file = memory_file(MEMORY_BYTES);
        Front::connect_with(path, features, file)
    }

    /// The same with a guest's memory that there is already.
    pub fn connect_with(path: &Path, features: u64, file: OwnedFd) -> Front {
        let stream = UnixStream::connect(path).unwrap();
        let timeout = Some(Duration::from_secs(30));
        stream.set_read_timeout(timeout).unwrap();
        let memory = SharedMemory::map(file.as_fd(), 0, MEMORY_BYTES).unwrap();
        let mut front = Front {
            stream,
            file,
            memory,
            features: 0,
        };
        let offered = front.ask_u64(1);
        assert_eq!(offered & features, features, "{offered:#x}");
        front.features = features | PROTOCOL;
        front.send(3, &[], &[]);
        // Queues, acknowledgements, a channel back, configuration, tables, slots of memory.
        let protocol = front.ask_u64(15) & 0x9229;
        front.send(16, &protocol.to_le_bytes(), &[]);
        front.send(2, &front.features.to_le_bytes(), &[]);
        front.add_memory();
        front
    }

    fn add_memory(&mut self) {
        let mut region = vec![0; 8];
        for field in [GUEST, MEMORY_BYTES, USER, 0] {
            region.extend(field.to_le_bytes());
        }
        let file = self.file.try_clone().unwrap();
        assert_eq!(self.send_acked(37, &region, &[file.as_fd()]), 0);
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        // The server may have closed the connection already.
        drop(self.stream.write_all(bytes));
    }

    /// Sends bytes until the server has taken none for a while.
    pub fn send_bytes_for(&mut self, bytes: &[u8], patience: Duration) {
        self.stream.set_write_timeout(Some(patience)).unwrap();
        self.send_bytes(bytes);
    }

    fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for field in [code, 1 | flags, payload.len() as u32] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(payload);
        bytes
    }

    fn send_flagged(&mut self, message: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let parts = [IoSlice::new(message)];
        // The server may have closed the connection already.
        let _sent = rustix::io::retry_on_intr(|| {
            sendmsg(&self.stream, &parts, &mut control, SendFlags::NOSIGNAL)
        });
    }

    pub fn send(&mut self, code: u32, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.send_flagged(&Front::message(code, 0, payload), descriptors);
    }

    /// Sends a message that asks for an answer: 0 is success.
    pub fn send_acked(&mut self, code: u32, payload: &[u8], descriptors: &[BorrowedFd<'_>]) -> u64 {
        self.send_flagged(&Front::message(code, 8, payload), descriptors);
        let (reply, _) = self.receive().expect("an answer");
        u64::from_le_bytes(reply.try_into().unwrap())
    }

    /// Receives an answer: its payload and descriptor. `None` is the end of the connection.
    pub fn receive(&mut self) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut header)];
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(&self.stream, &mut parts, &mut control, RecvFlags::WAITALL)
        });
        if received.ok()?.bytes != 12 {
            return None;
        }
        let passed = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let len = u32::from_le_bytes(header[8..].try_into().unwrap());
        let mut payload = vec![0; len as usize];
        self.stream.read_exact(&mut payload).ok()?;
        Some((payload, passed))
    }

    pub fn ask(&mut self, code: u32, payload: &[u8]) -> (Vec<u8>, Option<OwnedFd>) {
        self.send(code, payload, &[]);
        self.receive().expect("an answer")
    }

    pub fn ask_u64(&mut self, code: u32) -> u64 {
        u64::from_le_bytes(self.ask(code, &[]).0.try_into().unwrap())
    }

    /// The configuration space of the device.
    pub fn config(&mut self, len: u32) -> Vec<u8> {
        let mut payload = Vec::new();
        for field in [0, len, 0] {
            payload.extend(field.to_le_bytes());
        }
        payload.resize(12 + len as usize, 0);
        self.ask(24, &payload).0[12..].to_vec()
    }

    fn is_packed(&self) -> bool {
        self.features & PACKED != 0
    }

    /// Has the server make a table of requests in flight; returns it with its description.
    pub fn get_inflight(&mut self, queues: u16, size: u16) -> (OwnedFd, Vec<u8>) {
        let mut payload = vec![0; 16];
        payload.extend(queues.to_le_bytes());
        payload.extend(size.to_le_bytes());
        payload.extend([0; 4]);
        let (description, file) = self.ask(31, &payload);
        (file.expect("a table"), description)
    }

    /// Passes a table that another server has used.
    pub fn set_inflight(&mut self, table: &OwnedFd, description: &[u8]) {
        assert_eq!(self.send_acked(32, description, &[table.as_fd()]), 0);
    }

    /// Makes a queue and starts it.
    pub fn queue(&mut self, index: u32, size: u16) -> TestQueue {
        let start = index as usize * RING_BYTES;
        let has_event_idx = self.features & EVENT_IDX != 0;
        let kinds = (self.is_packed(), has_event_idx);
        let ring = DriverRing::new(&self.memory, (start, size), kinds);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let mut queue = TestQueue {
            index,
            ring,
            kick: eventfd(0, flags).unwrap(),
            call: eventfd(0, flags).unwrap(),
            requests: (0..size).map(|_| None).collect(),
        };
        let base = if self.is_packed() { 0x8000_8000 } else { 0 };
        self.start_queue(&mut queue, base);
        queue
    }

    /// Starts a queue at a place in its ring.
    pub fn start_queue(&mut self, queue: &mut TestQueue, base: u32) {
        let pair = |value: u32| [queue.index.to_le_bytes(), value.to_le_bytes()].concat();
        assert_eq!(
            self.send_acked(8, &pair(u32::from(queue.ring.size)), &[]),
            0
        );
        assert_eq!(self.send_acked(10, &pair(base), &[]), 0);
        let start = USER + queue.ring.start as u64;
        let mut addresses = pair(0);
        for part in [0, DEVICE_AT as u64, DRIVER_AT as u64] {
            addresses.extend((start + part).to_le_bytes());
        }
        addresses.extend(0u64.to_le_bytes());
        assert_eq!(self.send_acked(9, &addresses, &[]), 0);
        let index = u64::from(queue.index).to_le_bytes();
        let call = queue.call.try_clone().unwrap();
        assert_eq!(self.send_acked(13, &index, &[call.as_fd()]), 0);
        let kick = queue.kick.try_clone().unwrap();
        assert_eq!(self.send_acked(12, &index, &[kick.as_fd()]), 0);
        assert_eq!(self.send_acked(18, &pair(1), &[]), 0);
    }

    /// Stops a queue; its requests have completed then. Returns its place.
    pub fn stop_queue(&mut self, index: u32) -> u32 {
        let payload = [index.to_le_bytes(), 0u32.to_le_bytes()].concat();
        let (reply, _) = self.ask(11, &payload);
        u32::from_le_bytes(reply[4..].try_into().unwrap())
    }
}

/// A request that was made: where its memory is.
#[derive(Clone, Debug)]
pub struct Made {
    pub status_at: usize,
    /// Offsets and lengths of the data in the memory.
    pub data: Vec<(usize, usize)>,
    /// A number of the test.
    pub tag: u64,
}

/// A queue, on the driver's side.
pub struct TestQueue {
    pub index: u32,
    pub ring: DriverRing,
    kick: OwnedFd,
    call: OwnedFd,
    pub requests: Vec<Option<Made>>,
}

/// A request of a kind, at a sector, with pieces of data: offsets in the memory, and lengths.
pub struct Make<'a> {
    pub kind: u32,
    pub sector: u64,
    pub data: &'a [(usize, usize)],
    pub tag: u64,
    /// Offsets at which the header is cut into descriptors.
    pub header_cuts: &'a [u32],
    pub is_indirect: bool,
}

pub fn guest(at: usize) -> u64 {
    GUEST + at as u64
}

impl TestQueue {
    /// Memory for the header, status and table of the request that comes next.
    fn slot(&self) -> usize {
        let free = self.requests.iter().position(Option::is_none);
        let slot = free.expect("a free slot") + self.index as usize * 256;
        SLOTS_AT + slot * SLOT_BYTES
    }

    /// Makes a request available.
    pub fn submit(&mut self, make: &Make<'_>) -> u16 {
        let slot = self.slot();
        let memory = Arc::clone(&self.ring.memory);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&make.kind.to_le_bytes());
        header[8..].copy_from_slice(&make.sector.to_le_bytes());
        memory.write(slot, &header);
        let status_at = slot + 16;
        memory.store_u8(status_at, 0xEE);
        let device_writes = matches!(make.kind, 0 | 8);
        let mut pieces: Vec<Piece> = Vec::new();
        let mut at = 0;
        for &cut in make.header_cuts.iter().chain(&[16]) {
            pieces.push((guest(slot) + u64::from(at), cut - at, false));
            at = cut;
        }
        for &(offset, len) in make.data {
            pieces.push((guest(offset), len as u32, device_writes));
        }
        pieces.push((guest(status_at), 1, true));
        let id = match make.is_indirect {
            true => {
                let table = slot + 64;
                self.ring.add_indirect(&pieces, (table, guest(table)))
            }
            false => self.ring.add(&pieces),
        };
        // Slots are found by the requests that take them.
        let index = (slot - SLOTS_AT) / SLOT_BYTES - self.index as usize * 256;
        let made = Made {
            status_at,
            data: make.data.to_vec(),
            tag: make.tag,
        };
        self.requests[index] = Some(made);
        self.by_id(id, index);
        id
    }

    fn by_id(&mut self, id: u16, index: usize) {
        self.ring
            .memory
            .store_u16(ids_at(self.index) + usize::from(id) * 2, index as u16);
    }

    pub fn kick(&mut self) {
        if self.ring.wants_kick() {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Kicks whatever the device asked for.
    pub fn kick_always(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Waits for a notification, and takes it; returns whether there was one in time.
    pub fn is_notified(&self, seconds: i64) -> bool {
        let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        };
        let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&limit))).unwrap();
        ready == 1 && rustix::io::read(&self.call, &mut [0u8; 8]).is_ok()
    }

    /// The next completion, if there is one: the request and its status.
    pub fn try_complete(&mut self) -> Option<(Made, u8)> {
        let (id, _) = self.ring.take_used()?;
        let at = ids_at(self.index) + usize::from(id) * 2;
        let index = usize::from(self.ring.memory.load_u16(at));
        let made = self.requests[index]
            .take()
            .expect("a request that was made");
        let status = self.ring.memory.load_u8(made.status_at);
        Some((made, status))
    }

    /// Waits for a completion, by the notification that the driver asked for.
    pub fn complete(&mut self) -> (Made, u8) {
        loop {
            if let Some(done) = self.try_complete() {
                return done;
            }
            self.ring.wants_call();
            if let Some(done) = self.try_complete() {
                return done;
            }
            assert!(self.is_notified(20), "the device did not notify");
        }
    }

    /// Makes a request and waits for it, with nothing else in flight; returns its status.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[(usize, usize)]) -> u8 {
        self.submit(&Make {
            kind,
            sector,
            data,
            tag: 0,
            header_cuts: &[],
            is_indirect: false,
        });
        self.kick();
        self.complete().1
    }
}

/// Where the ids of the requests of a queue are noted, behind its ring.
fn ids_at(queue: u32) -> usize {
    queue as usize * RING_BYTES + 0x8000
}
