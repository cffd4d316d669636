//! The log of pages that a migration copies: what the device writes is marked after it is written.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use cowslip_block::disk::MemoryDisk;
use cowslip_front::ring::{DEVICE_AT, DRIVER_AT};
use cowslip_front::{FLUSH, Front, FrontQueue, GUEST, PACKED, USER, VERSION_1, memory_file};
use cowslip_queue::SharedMemory;
use cowslip_vhost_user::Options;

use crate::running::Running;

const LOG_ALL: u64 = 1 << 26;

/// Begins the log, as QEMU does: its memory, the feature, then the addresses of the ring.
fn begin(front: &mut Front, log: (&OwnedFd, u64), (queue, at): (&FrontQueue, u64)) {
    let (file, len) = log;
    let payload = [len.to_le_bytes(), 0u64.to_le_bytes()].concat();
    assert_eq!(front.send_acked(6, &payload, &[file.as_fd()]).unwrap(), 0);
    let features = front.features | LOG_ALL;
    assert_eq!(
        front.send_acked(2, &features.to_le_bytes(), &[]).unwrap(),
        0
    );
    let mut addresses = [queue.index.to_le_bytes(), 1u32.to_le_bytes()].concat();
    for part in [0, DEVICE_AT as u64, DRIVER_AT as u64] {
        addresses.extend((USER + queue.ring.start as u64 + part).to_le_bytes());
    }
    addresses.extend(at.to_le_bytes());
    assert_eq!(front.send_acked(9, &addresses, &[]).unwrap(), 0);
}

fn server() -> Running {
    Running::start(
        Arc::new(MemoryDisk::new("disk", 1 << 20)),
        Options::default(),
    )
}

/// A page that is marked before it is written may be copied between the two, and then it is lost.
#[test]
fn a_used_ring_is_logged_after_it_is_written() {
    let server = server();
    let mut front = Front::connect(&server.path, VERSION_1 | FLUSH).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    // The log lies over the ring: the mark of its page is a bit of the used index, which a mark
    // that comes first would not survive.
    let index_at = DEVICE_AT + 3;
    let memory = front.file.try_clone().unwrap();
    begin(
        &mut front,
        (&memory, 1 << 20),
        (&queue, index_at as u64 * 8 * 4096),
    );
    queue
        .submit(&cowslip_front::Make::plain(4, 0, &[]))
        .unwrap();
    queue.kick_always().unwrap();
    let begun = std::time::Instant::now();
    while front.memory.load_u16(DEVICE_AT + 2) == 0 {
        assert!(
            begun.elapsed().as_secs() < 20,
            "the request does not complete"
        );
        std::thread::yield_now();
    }
    // What completes it is over when the queue has stopped.
    front.stop_queue(0).unwrap();
    assert_eq!(front.memory.load_u16(DEVICE_AT + 2), 0x0101);
}

/// Packed rings are written where their descriptors are.
#[test]
fn a_packed_ring_is_logged_where_it_is_written() {
    let server = server();
    let mut front = Front::connect(&server.path, VERSION_1 | FLUSH | PACKED).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    let file = memory_file(1 << 20).unwrap();
    let log = SharedMemory::map(file.as_fd(), 0, 1 << 20).unwrap();
    let device = GUEST + DEVICE_AT as u64;
    begin(&mut front, (&file, 1 << 20), (&queue, device));
    assert_eq!(queue.request(4, 0, &[]).unwrap(), 0);
    front.stop_queue(0).unwrap();
    let is_marked = |address: u64| {
        let page = address / 4096;
        log.load_u8((page / 8) as usize) & 1 << (page % 8) != 0
    };
    assert!(is_marked(device));
    assert!(is_marked(GUEST), "the descriptors");
    assert!(!is_marked(GUEST + DRIVER_AT as u64));
}
