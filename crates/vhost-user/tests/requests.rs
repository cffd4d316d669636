//! Requests of all kinds and shapes, on rings of all kinds, against a model of the disk.

use std::sync::Arc;

use cowslip_block::Disk;
use cowslip_block::disk::MemoryDisk;
use cowslip_block::random::Random;
use cowslip_front::{
    DATA_AT, EVENT_IDX, FLUSH, Front, FrontQueue, GUEST, IN_ORDER, INDIRECT, MEMORY_BYTES, Make,
    PACKED, USER, VERSION_1,
};
use cowslip_queue::SharedMemory;
use cowslip_vhost_user::Options;

use crate::running::Running;

const DISK_BYTES: u64 = 4 << 20;
const IN: u32 = 0;
const OUT: u32 = 1;

fn disk() -> Arc<dyn Disk> {
    Arc::new(MemoryDisk::new("disk", DISK_BYTES))
}

/// All combinations of features that change a ring.
fn combinations() -> Vec<u64> {
    let mut all = Vec::new();
    for packed in [0, PACKED] {
        for event_idx in [0, EVENT_IDX] {
            for indirect in [0, INDIRECT] {
                let features = VERSION_1 | FLUSH | packed | event_idx | indirect;
                all.extend([features, features | IN_ORDER]);
            }
        }
    }
    all
}

/// Cuts a range of the memory into pieces.
fn cut(rng: &mut Random, start: usize, len: usize, pieces_max: u64) -> Vec<(usize, usize)> {
    let mut pieces = Vec::new();
    let (mut at, end) = (start, start + len);
    let count = 1 + rng.below(pieces_max);
    for _ in 1..count {
        if end - at > 1 {
            let piece = 1 + rng.below((end - at) as u64 - 1) as usize;
            pieces.push((at, piece));
            at += piece;
        }
    }
    pieces.push((at, end - at));
    pieces
}

/// Fills the memory of a request for the content's number of bytes at a sector. Returns the pieces
/// of memory of a request whose header names no sector.
fn prepare(
    rng: &mut Random,
    memory: &SharedMemory,
    (kind, start): (u32, usize),
    (sector, content): (u64, &[u8]),
) -> Option<Vec<(usize, usize)>> {
    match kind {
        OUT => memory.write(start, content),
        IN => memory.write(start, &vec![0xCC; content.len()]),
        4 => return Some(Vec::new()),
        8 => return Some(vec![(start, 20)]),
        _ => {
            let sectors = content.len() as u32 / 512;
            let mut record = [0; 16];
            record[..8].copy_from_slice(&sector.to_le_bytes());
            record[8..12].copy_from_slice(&sectors.to_le_bytes());
            record[12] = u8::from(kind == 13 && rng.below(2) == 0);
            memory.write(start, &record);
            return Some(cut(rng, start, 16, 2));
        }
    }
    None
}

/// Carries out `count` random requests, a few at a time, on sectors that no other queue uses.
fn random_requests(
    front: &Front,
    queue: &mut FrontQueue,
    (seed, count): (u64, usize),
    (first, sectors): (u64, u64),
) {
    let mut rng = Random(seed);
    let mut model = vec![0u8; (sectors * 512) as usize];
    let memory = Arc::clone(&front.memory);
    let area = DATA_AT + queue.index as usize * (2 << 20);
    assert!((area + (2 << 20)) as u64 <= MEMORY_BYTES);
    let mut made = 0;
    while made < count {
        // Requests of a round do not overlap, so their order does not matter.
        let round = 1 + rng.below(12);
        let part = sectors / round;
        let mut expected = Vec::new();
        for number in 0..round {
            if queue.ring.free_count() < 12 {
                break;
            }
            let len = 1 + rng.below(part.min(64));
            let sector = number * part + rng.below(part - len + 1);
            let bytes = (len * 512) as usize;
            let start = area + number as usize * (100 << 10) + rng.below(600) as usize;
            let range = (sector * 512) as usize..(sector * 512) as usize + bytes;
            let kind = [IN, IN, OUT, OUT, OUT, 4, 8, 11, 13][rng.below(9) as usize];
            let mut data = cut(&mut rng, start, bytes, 6);
            let mut at = first + sector;
            let content: Vec<u8> = (0..bytes).map(|_| rng.next() as u8).collect();
            let prepared = prepare(&mut rng, &memory, (kind, start), (at, &content));
            match kind {
                OUT => model[range.clone()].copy_from_slice(&content),
                13 => model[range.clone()].fill(0),
                _ => {}
            }
            if let Some(other) = prepared {
                (data, at) = (other, 0);
            }
            let cuts: &[u32] = [&[][..], &[4], &[1, 8, 15]][rng.below(3) as usize];
            queue
                .submit(&Make {
                    kind,
                    sector: at,
                    data: &data,
                    tag: expected.len() as u64,
                    header_cuts: cuts,
                    is_indirect: front.features & INDIRECT != 0 && rng.below(2) == 0,
                })
                .unwrap();
            expected.push((kind, range));
            made += 1;
        }
        queue.kick().unwrap();
        let in_flight = queue.requests.iter().flatten().count();
        let mut discarded = Vec::new();
        for _ in 0..in_flight {
            let (made, status) = queue.complete().unwrap();
            assert_eq!(status, 0, "{made:?}");
            let (kind, range) = &expected[made.tag as usize];
            match *kind {
                IN => {
                    let mut read = vec![0; range.len()];
                    memory.read(made.data[0].0, &mut read);
                    assert!(read == model[range.clone()], "{made:?}");
                }
                8 => {
                    let mut serial = [0; 20];
                    memory.read(made.data[0].0, &mut serial);
                    assert_eq!(&serial, b"a-serial-number\0\0\0\0\0");
                }
                11 => discarded.push(range.clone()),
                _ => {}
            }
        }
        // What was discarded may read as anything: known bytes again.
        for range in discarded {
            memory.write(area, &vec![7; range.len()]);
            let sector = first + (range.start / 512) as u64;
            assert_eq!(
                queue.request(OUT, sector, &[(area, range.len())]).unwrap(),
                0
            );
            model[range].fill(7);
        }
    }
}

fn options() -> Options {
    Options {
        serial: "a-serial-number".to_string(),
        threads: 2,
        is_in_order: true,
        ..Options::default()
    }
}

#[test]
fn requests_of_any_shape_do_what_they_say_on_rings_of_any_kind() {
    for features in combinations() {
        let server = Running::start(disk(), options());
        let mut front = Front::connect(&server.path, features).unwrap();
        let mut queue = front.queue(0, 128).unwrap();
        random_requests(&front, &mut queue, (features ^ 1, 600), (0, 4096));
        assert!(!server.has_event("Failed") && !server.has_event("Broken"));
    }
}

#[test]
fn queues_on_threads_of_their_own_share_a_disk() {
    let server = Running::start(disk(), options());
    let mut front = Front::connect(&server.path, VERSION_1 | EVENT_IDX | FLUSH).unwrap();
    let mut queues: Vec<FrontQueue> = (0..4)
        .map(|index| front.queue(index, 64).unwrap())
        .collect();
    let front = &front;
    std::thread::scope(|scope| {
        for (index, queue) in queues.iter_mut().enumerate() {
            scope.spawn(move || {
                let index = index as u64;
                random_requests(front, queue, (index, 400), (index * 2048, 2048));
            });
        }
    });
}

#[test]
fn a_stopped_queue_goes_on_where_it_was() {
    for features in [VERSION_1, VERSION_1 | EVENT_IDX, VERSION_1 | PACKED] {
        let server = Running::start(disk(), options());
        let mut front = Front::connect(&server.path, features).unwrap();
        let mut queue = front.queue(0, 16).unwrap();
        for round in 0..40u8 {
            front.memory.write(DATA_AT, &[round; 512]);
            assert_eq!(queue.request(OUT, 3, &[(DATA_AT, 512)]).unwrap(), 0);
            let base = front.stop_queue(0).unwrap();
            front.start_queue(&mut queue, base).unwrap();
            assert_eq!(queue.request(IN, 3, &[(DATA_AT + 512, 512)]).unwrap(), 0);
            let mut read = [0; 512];
            front.memory.read(DATA_AT + 512, &mut read);
            assert_eq!(read, [round; 512]);
        }
    }
}

#[test]
fn a_guest_learns_of_a_new_size() {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    let server = Running::start(disk(), options());
    let mut front = Front::connect(&server.path, VERSION_1).unwrap();
    let config = front.config(60).unwrap();
    assert_eq!(
        u64::from_le_bytes(config[..8].try_into().unwrap()),
        DISK_BYTES / 512
    );
    // Drivers ask for more than there is; the rest is zeroes.
    assert_eq!(front.config(200).unwrap()[..60], config);
    let (ours, theirs) = UnixStream::pair().unwrap();
    front.send_acked(21, &[], &[theirs.as_fd()]).unwrap();
    server.handle.resized();
    let mut message = [0; 12];
    (&ours).read_exact(&mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_guest_that_comes_from_another_server_learns_of_the_size_that_it_has_here() {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    let server = Running::start(disk(), options());
    let mut front = Front::connect(&server.path, VERSION_1).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    front.send_acked(21, &[], &[theirs.as_fd()]).unwrap();
    let (table, description) = front.get_inflight(1, 16).unwrap();
    front.set_inflight(&table, &description).unwrap();
    let mut message = [0; 12];
    // A front end ignores it before its rings work.
    assert!((&ours).read(&mut message).is_err());
    front.queue(0, 16).unwrap();
    ours.set_nonblocking(false).unwrap();
    (&ours).read_exact(&mut message).unwrap();
    assert_eq!(message[..4], [2, 0, 0, 0]);
}

#[test]
fn memory_comes_and_goes_while_queues_work() {
    use std::os::fd::AsFd;

    let server = Running::start(disk(), options());
    let mut front = Front::connect(&server.path, VERSION_1 | EVENT_IDX).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    let more = cowslip_front::memory_file(1 << 20).unwrap();
    let mut region = vec![0; 8];
    let start = 1u64 << 40;
    for field in [start, 1 << 20, start, 0] {
        region.extend(field.to_le_bytes());
    }
    for round in 0..20 {
        assert_eq!(front.send_acked(37, &region, &[more.as_fd()]).unwrap(), 0);
        assert_eq!(
            front.send_acked(37, &region, &[more.as_fd()]).unwrap(),
            1,
            "it overlaps itself"
        );
        assert_eq!(queue.request(OUT, round, &[(DATA_AT, 512)]).unwrap(), 0);
        assert_eq!(front.send_acked(38, &region, &[]).unwrap(), 0);
        assert_eq!(front.send_acked(38, &region, &[]).unwrap(), 1, "it is gone");
        assert_eq!(queue.request(IN, round, &[(DATA_AT, 512)]).unwrap(), 0);
    }
    assert_eq!(front.ask_u64(36).unwrap(), 509);
}

#[test]
fn a_ring_whose_memory_is_replaced_goes_on_in_the_new_memory() {
    use std::os::fd::AsFd;

    for features in [VERSION_1 | EVENT_IDX, VERSION_1 | PACKED] {
        let server = Running::start(disk(), options());
        let mut front = Front::connect(&server.path, features).unwrap();
        let mut queue = front.queue(0, 16).unwrap();
        let mut region = vec![0; 8];
        for field in [GUEST, MEMORY_BYTES, USER, 0] {
            region.extend(field.to_le_bytes());
        }
        let file = front.file.try_clone().unwrap();
        for round in 0..10 {
            assert_eq!(queue.request(OUT, round, &[(DATA_AT, 512)]).unwrap(), 0);
            // As QEMU does where regions are joined or cut: one goes, another one comes.
            assert_eq!(front.send_acked(38, &region, &[]).unwrap(), 0);
            queue
                .submit(&Make::plain(IN, round, &[(DATA_AT, 512)]))
                .unwrap();
            queue.kick().unwrap();
            assert_eq!(front.send_acked(37, &region, &[file.as_fd()]).unwrap(), 0);
            assert_eq!(queue.complete().unwrap().1, 0);
        }
        // A ring that has lost its memory can be stopped.
        assert_eq!(front.send_acked(38, &region, &[]).unwrap(), 0);
        let base = front.stop_queue(0).unwrap();
        assert_eq!(front.send_acked(37, &region, &[file.as_fd()]).unwrap(), 0);
        front.start_queue(&mut queue, base).unwrap();
        assert_eq!(queue.request(IN, 0, &[(DATA_AT, 512)]).unwrap(), 0);
    }
}

#[test]
fn a_ring_without_a_descriptor_for_kicks_is_polled() {
    let server = Running::start(disk(), options());
    let mut front = Front::connect(&server.path, VERSION_1 | EVENT_IDX).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    assert_eq!(
        front.send_acked(12, &0x100u64.to_le_bytes(), &[]).unwrap(),
        0
    );
    for sector in 0..20 {
        std::thread::sleep(std::time::Duration::from_millis(2));
        queue
            .submit(&Make {
                kind: OUT,
                sector,
                data: &[(DATA_AT, 512)],
                tag: 0,
                header_cuts: &[],
                is_indirect: false,
            })
            .unwrap();
        assert_eq!(queue.complete().unwrap().1, 0);
    }
}

#[test]
fn a_feature_that_a_message_negotiates_holds_for_its_own_answer() {
    let server = Running::start(disk(), options());
    let mut front = Front::connect(&server.path, VERSION_1).unwrap();
    front.send(16, &0u64.to_le_bytes(), &[]);
    assert_eq!(
        front.send_acked(16, &0x9229u64.to_le_bytes(), &[]).unwrap(),
        0
    );
    assert_eq!(front.ask_u64(17).unwrap(), 8);
}

#[test]
fn a_reset_device_takes_no_requests_before_its_rings_are_enabled() {
    use std::os::fd::AsFd;

    let server = Running::start(disk(), options());
    let mut front = Front::connect(&server.path, VERSION_1).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    assert_eq!(queue.request(OUT, 0, &[(DATA_AT, 512)]).unwrap(), 0);
    let base = front.stop_queue(0).unwrap();
    assert_eq!(front.send_acked(34, &[], &[]).unwrap(), 0);
    let payload = [0u32.to_le_bytes(), base.to_le_bytes()].concat();
    assert_eq!(front.send_acked(10, &payload, &[]).unwrap(), 0);
    let kick = memory_event();
    assert_eq!(
        front
            .send_acked(12, &0u64.to_le_bytes(), &[kick.as_fd()])
            .unwrap(),
        0
    );
    queue
        .submit(&Make::plain(OUT, 0, &[(DATA_AT, 512)]))
        .unwrap();
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(queue.try_complete().unwrap().is_none(), "it is not enabled");
    let payload = [0u32.to_le_bytes(), 1u32.to_le_bytes()].concat();
    assert_eq!(front.send_acked(18, &payload, &[]).unwrap(), 0);
    assert_eq!(queue.complete().unwrap().1, 0);
}

fn memory_event() -> std::os::fd::OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
}

#[test]
fn one_front_end_after_the_other_is_served() {
    let server = Running::start(disk(), options());
    for round in 0..10 {
        let mut front = Front::connect(&server.path, VERSION_1 | EVENT_IDX).unwrap();
        let mut queue = front.queue(round % 3, 16).unwrap();
        assert_eq!(queue.request(OUT, 0, &[(DATA_AT, 512)]).unwrap(), 0);
    }
    let events = server.events.lock().unwrap();
    assert!(
        events.iter().all(|event| !event.contains("Some")),
        "{events:?}"
    );
}
