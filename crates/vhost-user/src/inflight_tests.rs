//! Contents of the table for a successor, whenever the server before it ended.

use std::os::fd::AsFd;

use super::*;

fn table(is_packed: bool) -> Table {
    let shape = Shape {
        queues: 3,
        queue_size: 8,
        is_packed,
    };
    let file = Table::make_file(shape).unwrap();
    Table::map(file.as_fd(), (0, shape.bytes()), shape).unwrap()
}

#[test]
fn a_successor_repeats_what_the_split_ring_does_not_have() {
    let table = table(false);
    let open = || table.queue(1).unwrap().split(8).unwrap();
    let mut first = open();
    assert_eq!(first.recover(0), []);
    for head in [5, 2, 7] {
        first.take(head).unwrap();
    }
    assert!(first.take(2).is_err(), "it is in flight");
    assert_eq!(
        open().recover(0),
        [5, 2, 7],
        "in the order in which they were taken"
    );
    first.begin_completion(2);
    assert_eq!(open().recover(0), [5, 2, 7], "the ring does not have it");
    first.begin_completion(2);
    // The ring has it; the table is not done with it.
    assert_eq!(open().recover(1), [5, 7]);
    let mut next = open();
    assert_eq!(next.recover(1), [5, 7]);
    next.take(2).unwrap();
    next.begin_completion(5);
    next.end_completion(5, 2);
    assert_eq!(open().recover(2), [7, 2], "the order goes on");
    // Another queue has its own part.
    assert_eq!(table.queue(0).unwrap().split(8).unwrap().recover(0), []);
    assert!(table.queue(3).is_none());
}

fn descriptor(address: u64) -> Descriptor {
    Descriptor {
        address,
        len: 4,
        flags: 1,
        link: 9,
    }
}

#[test]
fn a_successor_repeats_what_the_packed_ring_does_not_have() {
    let table = table(true);
    let start = PackedPosition(0x8000);
    let open = |was_used: bool| {
        let queue = table.queue(2).unwrap();
        queue.packed(8, start, |_| Some(was_used)).unwrap()
    };
    let (mut first, recovered) = open(false);
    assert_eq!(recovered, None, "nobody has used it before");
    let one = first.take(&[descriptor(1)]).unwrap();
    let two = first.take(&[descriptor(2), descriptor(3)]).unwrap();
    let (next, recovered) = open(false);
    let in_flight = |entries: Vec<u16>, used, descriptors| Recovered {
        used: PackedPosition(used),
        entries,
        descriptors,
    };
    assert_eq!(recovered, Some(in_flight(vec![one, two], 0x8000, 3)));
    assert_eq!(next.descriptors(two), [descriptor(2), descriptor(3)]);
    // A completion that the ring does not have is taken back, with its descriptors.
    first.begin_completion(two, PackedPosition(0x8002));
    let (mut next, recovered) = open(false);
    assert_eq!(recovered, Some(in_flight(vec![one, two], 0x8000, 3)));
    assert_eq!(next.descriptors(two), [descriptor(2), descriptor(3)]);
    // One that the ring has is ended.
    next.begin_completion(two, PackedPosition(0x8002));
    let (mut next, recovered) = open(true);
    assert_eq!(recovered, Some(in_flight(vec![one], 0x8002, 1)));
    // All entries but one are free again.
    for number in 0..7 {
        next.take(&[descriptor(number)]).unwrap();
    }
    assert!(next.take(&[descriptor(8)]).is_err(), "the ring has no more");
    next.begin_completion(one, PackedPosition(0x8003));
    next.end_completion(one);
    next.take(&[descriptor(8)]).unwrap();
}

#[test]
fn a_position_that_is_half_the_old_one_is_that_of_a_completion_that_the_ring_has() {
    let table = table(true);
    let open = |was_used: bool| {
        let queue = table.queue(0).unwrap();
        let position = PackedPosition(0x8006);
        queue.packed(8, position, |_| Some(was_used)).unwrap()
    };
    let (mut first, _) = open(false);
    let one = first.take(&[descriptor(1), descriptor(2)]).unwrap();
    first.begin_completion(one, PackedPosition(0x0000));
    first.end_completion(one);
    // As if the server had ended before its last store, that of the wrap counter. Descriptor 0 has
    // never been used in the round that is the old one: the ring's answer would be misleading.
    let fields = table.queue(0).unwrap().fields;
    fields.store_u8(packed::OLD_USED_WRAP, 1);
    let (_, recovered) = open(false);
    assert_eq!(recovered.unwrap().used, PackedPosition(0x0000));
}

#[test]
fn noise_in_a_table_is_an_error_or_some_requests_and_nothing_worse() {
    let mut seed = 1u64;
    for round in 0..2000 {
        for is_packed in [false, true] {
            let table = table(is_packed);
            let bytes = table.shape.bytes() as usize;
            let mut noise: Vec<u8> = Vec::new();
            while noise.len() < bytes {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let small = round % 2 == 0;
                let byte = (seed >> 33) as u8;
                noise.push(if small { byte % 9 } else { byte });
            }
            table.memory.write(0, &noise);
            for queue in 0..3 {
                // The version and the number of entries are right.
                let part = table.queue(queue).unwrap();
                part.fields.store_u16(VERSION_AT, VERSION);
                part.fields.store_u16(ENTRY_COUNT_AT, 8);
                if !is_packed {
                    let mut split = part.split(8).unwrap();
                    let found = split.recover(seed as u16);
                    assert!(found.iter().all(|&head| head < 8));
                    split.begin_completion(3);
                    split.end_completion(3, 1);
                    continue;
                }
                let known = part.packed(8, PackedPosition(0), |at| {
                    (at.0 & 0x7FFF < 8).then_some(true)
                });
                let Ok((mut packed, Some(found))) = known else {
                    continue;
                };
                for &entry in &found.entries {
                    assert!(packed.descriptors(entry).len() <= 8);
                    packed.begin_completion(entry, PackedPosition(1));
                    packed.end_completion(entry);
                }
                drop(packed.take(&[descriptor(1), descriptor(2)]));
            }
        }
    }
}
