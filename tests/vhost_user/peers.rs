//! Peers on both sides: the front end of libblkio (`virtio-driver`) and the one of our own make the
//! same requests of our server and of qemu-storage-daemon, and see the same.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::sync::Arc;

use cowslip_queue::SharedMemory;
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};

use super::*;
use crate::support::peers_are_installed;
use crate::support::rng::Rng;
use crate::support::running::Running;

/// Sectors of the disk.
const SECTORS: u64 = IMAGE_BYTES / 512;
/// Requests at a time, each with a part of the disk and of the memory.
const SLOTS: u64 = 12;
const SLOT_BYTES: usize = 128 << 10;

/// qemu-storage-daemon, which serves an image.
struct Daemon(Running);

impl Daemon {
    fn start(image: &Path, socket: &Path) -> Daemon {
        let image = image.display();
        let blockdev = format!(
            "driver=qcow2,node-name=disk,discard=unmap,file.driver=file,file.filename={image}"
        );
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=8,\
             addr.type=unix,addr.path={}",
            socket.display()
        );
        let mut command = Command::new("qemu-storage-daemon");
        command.args(["--blockdev", &blockdev, "--export", &export]);
        let daemon = Daemon(Running::start(&mut command));
        let begun = Instant::now();
        while !socket.exists() {
            assert!(begun.elapsed() < Duration::from_secs(20), "no daemon");
            std::thread::sleep(Duration::from_millis(1));
        }
        daemon
    }

    fn end(mut self) {
        self.0.signal(rustix::process::Signal::TERM);
        assert!(self.0.wait().unwrap().success());
    }
}

/// A request that both servers get.
#[derive(Clone, Debug)]
struct Request {
    kind: u32,
    sector: u64,
    bytes: usize,
    content: u64,
    /// Of a request to zero: its space may be deallocated.
    may_unmap: bool,
}

/// Requests of a round, which do not overlap.
fn round(rng: &mut Rng) -> Vec<Request> {
    let part = SECTORS / SLOTS;
    let mut requests = Vec::new();
    for slot in 0..1 + rng.below(SLOTS) {
        let kind = *rng.pick(&[IN, IN, OUT, OUT, OUT, 4, 11, 13]);
        let most = *rng.pick(&[1, 8, 16, 64, 256]);
        let sectors = 1 + rng.below(most);
        requests.push(Request {
            kind,
            sector: slot * part + rng.below(part - sectors),
            bytes: sectors as usize * 512,
            content: rng.next(),
            may_unmap: rng.once_in(2),
        });
    }
    requests
}

fn bytes(request: &Request) -> Vec<u8> {
    Rng::new(request.content).bytes(request.bytes)
}

/// The disk as the requests must have left it, and the outcome of one that was read.
struct Expected(Vec<u8>);

impl Expected {
    fn range(request: &Request) -> std::ops::Range<usize> {
        let start = request.sector as usize * 512;
        start..start + request.bytes
    }

    /// Notes a request that has completed; `read` is what it read.
    fn complete(&mut self, request: &Request, read: &[u8]) {
        let range = Expected::range(request);
        match request.kind {
            IN => assert!(read == &self.0[range], "{request:?}"),
            OUT => self.0[range].copy_from_slice(&bytes(request)),
            // Both deallocate; what is then below is nothing.
            13 => self.0[range].fill(0),
            _ => {}
        }
    }
}

/// Writes what was discarded, and may be anything, again.
fn refill(request: &Request) -> Request {
    Request {
        kind: OUT,
        ..request.clone()
    }
}

/// Runs requests in rounds, and reads the disk in the end.
fn rounds(run: &mut dyn FnMut(&[Request], &mut Expected)) -> Expected {
    let mut rng = Rng::new(5);
    let mut expected = Expected(vec![0; IMAGE_BYTES as usize]);
    for _ in 0..150 {
        let requests = round(&mut rng);
        run(&requests, &mut expected);
        let discarded = requests.iter().filter(|request| request.kind == 11);
        run(&discarded.map(refill).collect::<Vec<_>>(), &mut expected);
    }
    let everything = (0..SECTORS / 128).map(|index| Request {
        kind: IN,
        sector: index * 128,
        bytes: 128 * 512,
        content: 0,
        may_unmap: false,
    });
    for some in everything.collect::<Vec<_>>().chunks(SLOTS as usize) {
        run(some, &mut expected);
    }
    expected
}

/// Makes requests by libblkio's driver, on several queues, and compares what is read. Returns the
/// disk at the end.
fn driven_by_libblkio(socket: &Path, features: VirtioFeatureFlags, queues: usize) -> Vec<u8> {
    // FLUSH, MQ, DISCARD and WRITE_ZEROES.
    let device = 1 << 9 | 1 << 12 | 1 << 13 | 1 << 14;
    let wanted = features.bits() | device;
    let begun = Instant::now();
    let mut transport = loop {
        match VhostUser::new(socket.to_str().unwrap(), wanted) {
            Ok(transport) => break transport,
            // QEMU's socket has its name some time before it listens.
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(10), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    // Buffers have addresses here, and their bytes in a file: the driver passes addresses on, and
    // the server finds in them what the file has.
    let len = SLOTS as usize * SLOT_BYTES;
    let mut space = vec![0u8; len + 4096];
    let skip = space.as_ptr().align_offset(4096);
    let window = &mut space[skip..skip + len];
    let file = memory_file(len as u64).unwrap();
    let memory = SharedMemory::map(file.as_fd(), 0, len as u64).unwrap();
    let address = window.as_ptr() as usize;
    let transport: &mut VirtioBlkTransport = &mut transport;
    transport
        .map_mem_region(address, len, file.as_raw_fd(), 0)
        .unwrap();
    assert!(transport.max_queues().is_some_and(|most| most >= queues));
    let config = transport.get_config().unwrap();
    assert_eq!(u64::from(config.capacity), SECTORS);
    let mut working = VirtioBlkQueue::<usize>::setup_queues(transport, queues, 64).unwrap();
    let kicks: Vec<_> = (0..queues)
        .map(|queue| transport.get_submission_notifier(queue))
        .collect();
    let calls: Vec<_> = (0..queues)
        .map(|queue| transport.get_completion_fd(queue))
        .collect();
    let mut run = |requests: &[Request], expected: &mut Expected| {
        for (slot, request) in requests.iter().enumerate() {
            let at = slot * SLOT_BYTES;
            let queue = &mut working[slot % queues];
            let (offset, len) = (request.sector * 512, request.bytes as u64);
            let buffer = &mut window[at..at + request.bytes];
            match request.kind {
                IN => {
                    memory.write(at, &vec![0xCC; request.bytes]);
                    queue.read(offset, buffer, slot).unwrap();
                }
                OUT => {
                    memory.write(at, &bytes(request));
                    queue.write(offset, buffer, slot).unwrap();
                }
                11 => queue.discard(offset, len, slot).unwrap(),
                13 => queue
                    .write_zeroes(offset, len, request.may_unmap, slot)
                    .unwrap(),
                _ => queue.flush(slot).unwrap(),
            }
            if queue.avail_notif_needed() {
                kicks[slot % queues].notify().unwrap();
            }
        }
        let mut left = requests.len();
        let begun = Instant::now();
        while left > 0 {
            for queue in &mut working {
                for completion in queue.completions() {
                    let request = &requests[completion.context];
                    assert_eq!(completion.ret, 0, "{request:?}");
                    let mut read = vec![0; request.bytes];
                    memory.read(completion.context * SLOT_BYTES, &mut read);
                    expected.complete(request, &read);
                    left -= 1;
                }
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{requests:?}");
            std::thread::yield_now();
        }
    };
    let expected = rounds(&mut run);
    drop((working, calls));
    expected.0
}

fn expect_content(image: &Path, content: &[u8]) {
    let raw = image.with_extension("raw");
    std::fs::write(&raw, content).unwrap();
    let mut compare = cowslip();
    compare.args(["compare", "-f", "qcow2", "-F", "raw"]);
    let output = compare.arg(image).arg(&raw).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn the_driver_of_libblkio_sees_one_disk_on_one_queue_and_on_eight() {
    // Not on packed rings: the driver begins those at a position (SET_VRING_BASE 0) of which both
    // wrap counters are 0, and then writes to the ring as if they were 1.
    let base = VirtioFeatureFlags::VERSION_1;
    for (features, queues) in [(base, 1), (base | VirtioFeatureFlags::RING_EVENT_IDX, 8)] {
        let dir = tempfile::tempdir().unwrap();
        let (image, socket) = (image(dir.path()), dir.path().join("socket"));
        let mut served = Served::start(&image, &socket, &["--threads", "2"]);
        served.wait();
        let content = driven_by_libblkio(&socket, features, queues);
        served.end();
        check(&image);
        expect_content(&image, &content);
    }
}

#[test]
fn the_driver_of_libblkio_sees_the_same_of_qemu_storage_daemon() {
    if !peers_are_installed(&["qemu-storage-daemon"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (image(dir.path()), dir.path().join("socket"));
    let daemon = Daemon::start(&image, &socket);
    let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
    let content = driven_by_libblkio(&socket, features, 8);
    daemon.end();
    expect_content(&image, &content);
}

/// A request of any shape by our own front end, by the rules or not.
struct Shaped {
    request: Request,
    /// Lengths of the pieces of its data.
    pieces: Vec<usize>,
    header_cuts: Vec<u32>,
    is_indirect: bool,
}

/// A request of the disk's, or one that cannot be carried out.
fn shaped(rng: &mut Rng, slot: usize) -> Shaped {
    let mut request = round(rng).swap_remove(0);
    request.sector += slot as u64 * (SECTORS / SLOTS);
    match rng.below(24) {
        0 => request.sector = SECTORS - rng.below(2),
        1 => request.sector = u64::MAX - rng.below(2),
        // Secure erase, one that there is not, and the serial number.
        2 => request.kind = *rng.pick(&[14, 99, 8]),
        _ => {}
    }
    let mut left = match request.kind {
        IN | OUT => request.bytes,
        8 => 20,
        11 | 13 => 16,
        _ => 0,
    };
    let mut pieces = Vec::new();
    while left > 0 {
        let len = match pieces.len() {
            0..5 if rng.once_in(2) => 1 + rng.below(left as u64) as usize,
            _ => left,
        };
        pieces.push(len);
        left -= len;
    }
    Shaped {
        request,
        pieces,
        header_cuts: rng.pick(&[&[][..], &[4], &[1, 8, 15]]).to_vec(),
        is_indirect: rng.once_in(2),
    }
}

/// The outcome of requests: status and bytes of each, by its number.
type Outcomes = BTreeMap<u64, (u8, Vec<u8>)>;

fn place(slot: usize) -> usize {
    // Pieces end anywhere, not at sectors alone.
    DATA_AT + slot * SLOT_BYTES * 2 + slot * 7
}

fn submit(queue: &mut FrontQueue, memory: &SharedMemory, (slot, shaped): (usize, &Shaped)) {
    let request = &shaped.request;
    let start = place(slot);
    let mut sector = request.sector;
    match request.kind {
        OUT => memory.write(start, &bytes(request)),
        11 | 13 => {
            let flags = u32::from(request.kind == 13 && request.may_unmap);
            let mut range = sector.to_le_bytes().to_vec();
            range.extend((request.bytes as u32 / 512).to_le_bytes());
            range.extend(flags.to_le_bytes());
            memory.write(start, &range);
            sector = 0;
        }
        _ => memory.write(start, &vec![0xCC; request.bytes]),
    }
    let mut at = start;
    let data: Vec<(usize, usize)> = shaped
        .pieces
        .iter()
        .map(|&len| {
            at += len;
            (at - len, len)
        })
        .collect();
    queue
        .submit(&Make {
            kind: request.kind,
            sector,
            data: &data,
            tag: slot as u64,
            header_cuts: &shaped.header_cuts,
            is_indirect: shaped.is_indirect,
        })
        .unwrap();
}

/// Makes requests of any shape, and returns the outcome of each.
fn driven_by_ourselves(socket: &Path, seed: u64) -> Outcomes {
    let mut front =
        Front::connect(socket, VERSION_1 | EVENT_IDX | FLUSH | front::INDIRECT).unwrap();
    let mut queue = front.queue(0, 128).unwrap();
    let memory = Arc::clone(&front.memory);
    let mut rng = Rng::new(seed);
    let mut outcomes = Outcomes::new();
    let mut number = 0;
    for _ in 0..400 {
        let count = 1 + rng.below(6) as usize;
        let mut requests: Vec<Shaped> = (0..count).map(|slot| shaped(&mut rng, slot)).collect();
        while !requests.is_empty() {
            for (slot, shaped) in requests.iter().enumerate() {
                submit(&mut queue, &memory, (slot, shaped));
            }
            queue.kick().unwrap();
            for _ in 0..requests.len() {
                let (made, status) = queue.complete().unwrap();
                let shaped = &requests[made.tag as usize];
                let mut read = Vec::new();
                // A read that fails may have read some of it.
                if shaped.request.kind == IN && status == 0 {
                    read.resize(shaped.request.bytes, 0);
                    memory.read(place(made.tag as usize), &mut read);
                }
                outcomes.insert(number + made.tag, (status, read));
            }
            number += requests.len() as u64;
            requests.retain(|shaped| shaped.request.kind == 11);
            for shaped in &mut requests {
                shaped.request = refill(&shaped.request);
                shaped.pieces = vec![shaped.request.bytes];
            }
        }
    }
    outcomes
}

#[test]
fn requests_of_any_shape_have_the_same_outcome_as_with_qemu_storage_daemon() {
    if !peers_are_installed(&["qemu-storage-daemon"]) {
        return;
    }
    for seed in 0..2 {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [ours, theirs] = dirs.each_ref().map(|dir| image(dir.path()));
        let [socket, other] = dirs.each_ref().map(|dir| dir.path().join("socket"));
        let mut served = Served::start(&ours, &socket, &[]);
        served.wait();
        let daemon = Daemon::start(&theirs, &other);
        let found = driven_by_ourselves(&socket, seed);
        let expected = driven_by_ourselves(&other, seed);
        served.end();
        daemon.end();
        assert_eq!(found.len(), expected.len());
        for (number, outcome) in &found {
            let (status, read) = &expected[number];
            assert_eq!(outcome.0, *status, "request {number} of seed {seed}");
            assert!(&outcome.1 == read, "request {number} of seed {seed}");
        }
        check(&ours);
        let mut compare = cowslip();
        let compared = compare.arg("compare").arg(&ours).arg(&theirs).output();
        assert!(compared.unwrap().status.success(), "seed {seed}");
    }
}
