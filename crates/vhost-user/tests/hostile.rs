//! Guests and front ends that break every rule: a clear event, and everything else goes on.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use cowslip_block::Disk;
use cowslip_block::disk::{HoldingDisk, MemoryDisk};
use cowslip_block::random::Random;
use cowslip_front::ring::{DRIVER_AT, NEXT, WRITE};
use cowslip_front::{
    DATA_AT, EVENT_IDX, FLUSH, Front, FrontQueue, GUEST, IN_ORDER, INDIRECT, MEMORY_BYTES, Make,
    PACKED, VERSION_1, guest,
};
use cowslip_vhost_user::Options;

use crate::running::Running;

const IN: u32 = 0;
const OUT: u32 = 1;

fn server() -> Running {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("disk", 1 << 20));
    Running::start(disk, Options::default())
}

/// Descriptors of a chain: address, length, flags.
type Chain = Vec<(u64, u32, u16)>;

/// Chains that are no requests, with words of the event that each causes.
fn broken_chains() -> Vec<(&'static str, Chain)> {
    let header = (guest(DATA_AT), 16, 0);
    let status = (guest(DATA_AT + 512), 1, WRITE);
    let end = GUEST + MEMORY_BYTES;
    vec![
        (
            "no place for header and",
            vec![(guest(DATA_AT), 15, 0), status],
        ),
        ("no place for header and", vec![header]),
        ("no place for header and", vec![status]),
        ("are not in its memory", vec![(0, 16, 0), status]),
        (
            "are not in its memory",
            vec![header, (end - 8, 16, WRITE), status],
        ),
        ("are not in its memory", vec![header, (u64::MAX, 1, WRITE)]),
        (
            "are not in its memory",
            vec![header, (guest(0), u32::MAX, WRITE), status],
        ),
        (
            "behind memory to write",
            vec![header, status, (guest(0), 512, 0)],
        ),
    ]
}

/// Indirect tables that are none.
fn broken_tables() -> Vec<(&'static str, (u64, u32, u16))> {
    let indirect = cowslip_front::ring::INDIRECT;
    vec![
        (
            "an indirect table of 0 bytes",
            (guest(DATA_AT), 0, indirect),
        ),
        (
            "an indirect table of 24 bytes",
            (guest(DATA_AT), 24, indirect),
        ),
        (
            "an indirect table of 4294967280",
            (guest(DATA_AT), 0xFFFF_FFF0, indirect),
        ),
        (
            "an indirect table of 32 bytes",
            (guest(DATA_AT), 32, indirect | WRITE),
        ),
        ("are not in its memory", (0, 32, indirect)),
    ]
}

/// Makes a chain available on one queue, and checks that this one alone stops.
fn expect_broken(features: u64, chain: &[(u64, u32, u16)], words: &str) {
    let server = server();
    let mut front = Front::connect(&server.path, features).unwrap();
    let mut bad = front.queue(0, 16).unwrap();
    let mut good = front.queue(1, 16).unwrap();
    assert_eq!(bad.request(OUT, 0, &[(DATA_AT, 512)]).unwrap(), 0);
    bad.ring.add_raw(chain);
    bad.kick_always().unwrap();
    server.wait_for_event("QueueBroken");
    assert!(
        server.has_event(words),
        "{words}: {:?}",
        server.events.lock().unwrap()
    );
    // The other queue works, and the broken one can be stopped.
    assert_eq!(good.request(IN, 0, &[(DATA_AT, 512)]).unwrap(), 0);
    front.stop_queue(0).unwrap();
    let mut again = front.queue(0, 16).unwrap();
    assert_eq!(again.request(IN, 0, &[(DATA_AT, 512)]).unwrap(), 0);
}

#[test]
fn a_broken_chain_stops_its_queue_with_a_reason_and_no_other() {
    for features in [VERSION_1, VERSION_1 | PACKED | EVENT_IDX] {
        for (words, chain) in broken_chains() {
            expect_broken(features, &chain, words);
        }
        expect_broken(
            features,
            &[(guest(DATA_AT), 32, 4)],
            "which was not negotiated",
        );
        for (words, table) in broken_tables() {
            expect_broken(features | INDIRECT, &[table], words);
        }
    }
}

#[test]
fn a_chain_of_more_than_4_gib_stops_its_queue() {
    for features in [VERSION_1 | INDIRECT, VERSION_1 | INDIRECT | PACKED] {
        let server = server();
        let mut front = Front::connect(&server.path, features).unwrap();
        let mut queue = front.queue(0, 16).unwrap();
        // The whole memory again and again: 257 times 16 MiB.
        let pieces = vec![(GUEST, MEMORY_BYTES as u32, true); 257];
        let header = [(guest(DATA_AT), 16, false)];
        let pieces = [&header[..], &pieces].concat();
        queue.ring.add_indirect(&pieces, (DATA_AT, guest(DATA_AT)));
        queue.kick_always().unwrap();
        server.wait_for_event("the chain at descriptor");
        assert!(server.has_event("more than 4294967296 bytes"));
    }
}

#[test]
fn a_broken_ring_stops_its_queue_with_a_reason() {
    // More is available than the ring has; a chain begins, or goes on, beyond the ring; a circle.
    type Harm = fn(&mut FrontQueue);
    let harm: [(&str, Harm); 4] = [
        ("chains are available in a ring of 16", |queue| {
            let at = queue.ring.start + DRIVER_AT + 2;
            queue.ring.memory.store_u16(at, 5000);
        }),
        ("a chain at descriptor 16 of a ring of 16", |queue| {
            queue.ring.offer(16)
        }),
        ("a chain goes on at descriptor 900 of 16", |queue| {
            let bytes = queue.ring.encode((guest(DATA_AT), 16, NEXT), 900);
            queue.ring.memory.write(queue.ring.descriptor_at(3), &bytes);
            queue.ring.offer(3);
        }),
        ("goes round in a circle", |queue| {
            let bytes = queue.ring.encode((guest(DATA_AT), 16, NEXT), 3);
            queue.ring.memory.write(queue.ring.descriptor_at(3), &bytes);
            queue.ring.offer(3);
        }),
    ];
    for (words, break_it) in harm {
        let server = server();
        let mut front = Front::connect(&server.path, VERSION_1).unwrap();
        let mut queue = front.queue(0, 16).unwrap();
        break_it(&mut queue);
        queue.kick_always().unwrap();
        server.wait_for_event("QueueBroken");
        assert!(
            server.has_event(words),
            "{words}: {:?}",
            server.events.lock().unwrap()
        );
    }
}

#[test]
fn impossible_requests_fail_and_the_queue_goes_on() {
    let server = server();
    let mut front = Front::connect(&server.path, VERSION_1 | FLUSH).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    let last = (1 << 20) / 512;
    for (kind, sector, len) in [
        (IN, last, 512),
        (OUT, last - 1, 1024),
        (IN, u64::MAX, 512),
        (OUT, 1 << 60, 512),
        (IN, 0, 100),
        (13, 0, 16),
        (13, 0, 15),
        (11, 0, 0),
    ] {
        front.memory.write(DATA_AT, &[0xFF; 1024]);
        let data = [(DATA_AT, len)];
        let data = if len == 0 { &[][..] } else { &data };
        let status = queue.request(kind, sector, data).unwrap();
        assert!(
            status == 1 || (kind == 13 && status == 2),
            "{kind} {sector}: {status}"
        );
    }
    // Unknown kinds, secure erase among them.
    for kind in [2, 5, 7, 14, 15, 99, u32::MAX] {
        assert_eq!(queue.request(kind, 0, &[]).unwrap(), 2);
    }
    assert_eq!(queue.request(OUT, last - 1, &[(DATA_AT, 512)]).unwrap(), 0);
}

#[test]
fn a_front_end_that_breaks_the_protocol_is_cut_off_and_the_next_is_served() {
    let server = server();
    let mut rng = Random(7);
    for round in 0..300 {
        let mut front = Front::connect(&server.path, VERSION_1).unwrap();
        let mut queue = front.queue(0, 16).unwrap();
        assert_eq!(queue.request(OUT, 0, &[(DATA_AT, 512)]).unwrap(), 0);
        if round % 3 == 0 {
            let bytes: Vec<u8> = (0..rng.below(200)).map(|_| rng.next() as u8).collect();
            front.send_bytes(&bytes);
            continue;
        }
        for _ in 0..20 {
            let code = rng.below(45) as u32;
            let len = [0, 4, 8, 12, 16, 20, 24, 40, 72][rng.below(9) as usize];
            let small = rng.below(2) == 0;
            let byte = |rng: &mut Random| if small { rng.below(3) } else { rng.next() } as u8;
            let payload: Vec<u8> = (0..len).map(|_| byte(&mut rng)).collect();
            let file = front.file.try_clone().unwrap();
            let files = [file.as_fd(); 3];
            let count = rng.below(4) as usize;
            front.send(code, &payload, &files[..count]);
        }
    }
    // What is half a message is not waited for by others.
    drop(UnixStream::connect(&server.path).unwrap());
    let mut front = Front::connect(&server.path, VERSION_1).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    assert_eq!(queue.request(IN, 0, &[(DATA_AT, 512)]).unwrap(), 0);
}

#[test]
fn a_ring_has_no_more_requests_in_flight_than_descriptors() {
    let disk = Arc::new(HoldingDisk::new(1 << 20, false));
    let server = Running::start(Arc::clone(&disk) as Arc<dyn Disk>, Options::default());
    let mut front = Front::connect(&server.path, VERSION_1 | FLUSH).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    let make = Make::plain(4, 0, &[]);
    let head = queue.submit(&make).unwrap();
    queue.kick_always().unwrap();
    // The same chain is made available again and again, before it was given back.
    for _ in 0..40 {
        for _ in 0..8 {
            queue.ring.offer(head);
        }
        queue.kick_always().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let most = disk.held();
    disk.let_go();
    front.stop_queue(0).unwrap();
    assert!((1..=16).contains(&most), "{most} in flight");
}

/// Whether a read that was made behind a flush completes before it does.
fn overtakes(features: u64) -> bool {
    let disk = Arc::new(HoldingDisk::new(1 << 20, false));
    let options = Options {
        is_in_order: true,
        ..Options::default()
    };
    let server = Running::start(Arc::clone(&disk) as Arc<dyn Disk>, options);
    let mut front = Front::connect(&server.path, features).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    let kinds = [
        (4, &[][..]),
        (IN, &[(DATA_AT, 512)]),
        (IN, &[(DATA_AT, 512)]),
    ];
    for (tag, (kind, data)) in kinds.into_iter().enumerate() {
        queue
            .submit(&Make {
                kind,
                sector: 0,
                data,
                tag: tag as u64,
                header_cuts: &[],
                is_indirect: false,
            })
            .unwrap();
    }
    queue.kick_always().unwrap();
    while disk.held() == 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let mut order = Vec::new();
    // The reads need nothing but a moment.
    let until = std::time::Instant::now() + std::time::Duration::from_millis(100);
    while order.len() < 2 && std::time::Instant::now() < until {
        order.extend(queue.try_complete().unwrap().map(|(made, _)| made.tag));
    }
    let has_overtaken = !order.is_empty();
    disk.let_go();
    while order.len() < 3 {
        order.push(queue.complete().unwrap().0.tag);
    }
    let expected = if has_overtaken { [1, 2, 0] } else { [0, 1, 2] };
    assert_eq!(order, expected);
    has_overtaken
}

#[test]
fn a_driver_that_wants_its_requests_in_order_gets_them_so() {
    for features in [VERSION_1 | FLUSH, VERSION_1 | FLUSH | PACKED | EVENT_IDX] {
        assert!(overtakes(features));
        assert!(!overtakes(features | IN_ORDER));
    }
}

#[test]
fn a_server_stops_although_a_front_end_has_begun_a_message() {
    for bytes in [&[1, 0, 0][..], &[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0]] {
        let server = server();
        let mut front = Front::connect(&server.path, VERSION_1).unwrap();
        front.send_bytes(bytes);
        std::thread::sleep(std::time::Duration::from_millis(20));
        server.handle.stop();
        server.wait_for_event("Disconnected");
        drop((server, front));
    }
}

#[test]
fn a_server_stops_although_a_front_end_takes_no_answers() {
    let server = server();
    let mut front = Front::connect(&server.path, VERSION_1).unwrap();
    let question = [1u32, 1, 0].iter().flat_map(|f| f.to_le_bytes());
    let questions: Vec<u8> = question.collect::<Vec<u8>>().repeat(100_000);
    front
        .send_bytes_for(&questions, std::time::Duration::from_millis(500))
        .unwrap();
    server.handle.stop();
    server.wait_for_event("Disconnected");
    drop((server, front));
}

#[test]
fn rings_full_of_noise_neither_end_nor_stall_the_server() {
    let mut rng = Random(3);
    for round in 0..120 {
        let features = [VERSION_1, VERSION_1 | PACKED][round % 2];
        let more = [0, EVENT_IDX, INDIRECT, EVENT_IDX | INDIRECT][rng.below(4) as usize];
        let server = server();
        let mut front = Front::connect(&server.path, features | more).unwrap();
        if rng.below(2) == 0 {
            front.get_inflight(2, 16).unwrap();
        }
        let queue = front.queue(0, 16).unwrap();
        let mut good = front.queue(1, 16).unwrap();
        for _ in 0..30 {
            let index = rng.below(16) as u16;
            let address = match rng.below(4) {
                0 => rng.next(),
                _ => GUEST + rng.below(MEMORY_BYTES),
            };
            let len = [1, 16, 48, 512, 4096, 70_000, u32::MAX][rng.below(7) as usize];
            let flags =
                (rng.below(8) as u16) | (rng.below(4) as u16) << 7 | rng.next() as u16 & 0x8000;
            let link = rng.below(20) as u16;
            let bytes = queue.ring.encode((address, len, flags), link);
            // The second ring is left alone, so that it can show that the server goes on.
            let is_good = (GUEST + 0x1_0000..GUEST + 0x2_0000).contains(&address);
            if !is_good {
                queue
                    .ring
                    .memory
                    .write(queue.ring.descriptor_at(index), &bytes);
            }
            let at = queue.ring.start + DRIVER_AT;
            queue
                .ring
                .memory
                .store_u16(at + 4 + 2 * usize::from(index), link);
            queue.ring.memory.store_u16(at + 2, rng.below(20) as u16);
            queue.kick_always().unwrap();
        }
        front.stop_queue(0).unwrap();
        // Noise may have been read into the memory of the other queue; it answers all the same.
        front.stop_queue(1).unwrap();
        good = {
            drop(good);
            front.queue(1, 16).unwrap()
        };
        assert_eq!(good.request(IN, 0, &[(DATA_AT, 512)]).unwrap(), 0);
    }
}
