//! Space: freed clusters are reused and punched, unused ones of the session are released,
//! requests without space are refused, and how the file is extended.

use std::io;
use std::sync::Arc;

use cowslip_queue::{Buf, BufMut};

use super::disk::{Disk, Op};
use super::image::{self, Image};
use super::{CLUSTER, EIO, ENOSPC, block_on, faults};
use crate::Qcow2;
use crate::commit::writeback::is_no_space;
use crate::create::{CreateOptions, create};
use crate::file::{AlignedFile, Durability};
use crate::geometry::{Geometry, HostCluster};
use crate::growth::Situation;
use crate::options::OpenOptions;
use crate::policy::{AllocPolicy, DiscardPolicy};
use crate::space::growth;
use crate::space::punch;
use crate::space::state::HostSpace;
use crate::{Error, Result};

const DISK: u64 = 8 << 20;

fn options() -> OpenOptions {
    OpenOptions {
        writable: true,
        discard: DiscardPolicy::Unmap,
        ..OpenOptions::default()
    }
}

pub fn image_on(disk: &Arc<Disk>) -> Image {
    block_on(Image::open(disk.clone(), &options())).expect("the image is sound")
}

pub fn new_disk(cluster_size: u64, alignment_bytes: u32) -> Arc<Disk> {
    let disk = Disk::new(alignment_bytes);
    let create_options = CreateOptions {
        cluster_size,
        ..CreateOptions::new(DISK)
    };
    block_on(create(disk.clone(), None, &create_options)).expect("there is room");
    disk
}

/// The image itself, for what its doors do not show.
pub fn qcow2_on(disk: &Arc<Disk>) -> Qcow2 {
    block_on(image::open(disk.clone(), &options())).expect("the image is sound")
}

fn write(image: &Image, cluster: u64) -> Result<()> {
    let data = Buf::from(vec![0xaa; CLUSTER as usize]);
    block_on(image.write(cluster * CLUSTER, data, Durability::Cached))
}

fn discard(image: &Image, cluster: u64) {
    block_on(image.discard(cluster * CLUSTER, CLUSTER)).expect("nothing fails");
}

fn flush(image: &Image) {
    block_on(image.flush()).expect("nothing fails");
}

/// Clusters of the file that the guest's clusters are in.
fn hosts(disk: &Disk, guest: std::ops::Range<u64>) -> Vec<u64> {
    let bytes = disk.contents();
    let word = |at: u64| u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap());
    let offset = |entry: u64| entry & 0x00ff_ffff_ffff_fe00;
    let table = offset(word(word(40)));
    guest
        .map(|cluster| offset(word(table + 8 * cluster)) / CLUSTER)
        .collect()
}

fn discards(log: &[Op]) -> Vec<std::ops::Range<u64>> {
    let ranges = log.iter().filter_map(|op| match op {
        Op::Discard(range) => Some(range.clone()),
        _ => None,
    });
    ranges.collect()
}

/// Of freed clusters neighbours are punched together, each once and nothing else, and then all of
/// them are used again before the file grows: by the session that freed them, and by one that finds
/// them free.
#[test]
fn freed_space_is_punched_and_used_again() {
    let freed = [3u64, 4, 5, 9, 12, 13, 30, 31, 33, 35];
    for reopened in [false, true] {
        let disk = new_disk(CLUSTER, 512);
        let image = image_on(&disk);
        (0..64).for_each(|cluster| write(&image, cluster).unwrap());
        block_on(image.close()).expect("nothing fails");
        let mut image = image_on(&disk);
        let before = hosts(&disk, 0..64);
        let len = disk.len_bytes();
        disk.take_log();
        freed.iter().for_each(|&cluster| discard(&image, cluster));
        flush(&image);
        let places: Vec<u64> = freed.iter().map(|&c| before[c as usize]).collect();
        let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
        for place in &places {
            match runs.last_mut() {
                Some(run) if run.end == place * CLUSTER => run.end += CLUSTER,
                _ => runs.push(place * CLUSTER..(place + 1) * CLUSTER),
            }
        }
        assert_eq!(discards(&disk.take_log()), runs);
        if reopened {
            block_on(image.close()).expect("nothing fails");
            image = image_on(&disk);
        }
        let count = freed.len() as u64;
        (100..100 + count).for_each(|cluster| write(&image, cluster).unwrap());
        flush(&image);
        let mut after = hosts(&disk, 100..100 + count);
        after.sort_unstable();
        assert_eq!(after, places);
        assert_eq!(disk.len_bytes(), len, "nothing else was needed");
        block_on(image.close()).expect("nothing fails");
        assert_eq!(faults(disk.contents()), (0, 0));
    }
}

/// A cluster that was punched as a whole needs no zeroes beside a small write; one that was not,
/// because the host's blocks are larger than clusters or because the discard failed, shows no old
/// byte.
#[test]
fn only_what_is_punched_whole_counts_as_zeroes() {
    let small = |image: &Image, at: u64| {
        block_on(image.write(at + 100, Buf::from(vec![0xbb; 24]), Durability::Cached)).unwrap();
    };
    for (alignment, punches) in [
        (1, true),
        (1, false),
        (4096, true),
        (1024, true),
        (2048, true),
    ] {
        const SMALL: u64 = 512;
        let disk = new_disk(SMALL, alignment);
        let image = image_on(&disk);
        // Several runs, in blocks of the host that are freed in whole and in part.
        let old: Vec<u64> = (0..64).map(|i| i * SMALL).collect();
        for &at in &old {
            let data = Buf::from(vec![0xaa; SMALL as usize]);
            block_on(image.write(at, data, Durability::Cached)).unwrap();
        }
        flush(&image);
        let mut guest = vec![0xaau8; 64 * SMALL as usize];
        let freed: Vec<u64> = (0..64).filter(|i| i % 23 > 3).map(|i| i * SMALL).collect();
        for &at in &freed {
            block_on(image.discard(at, SMALL)).unwrap();
            guest[at as usize..][..SMALL as usize].fill(0);
        }
        if !punches {
            disk.fail(|op| matches!(op, Op::Discard(_)).then(|| io::Error::from_raw_os_error(EIO)));
        }
        flush(&image);
        disk.take_log();
        for &at in &freed {
            small(&image, at);
            guest[at as usize + 100..][..24].fill(0xbb);
        }
        let written: Vec<_> = disk.take_log();
        let lens = written.iter().filter_map(|op| match op {
            Op::Write(range) => Some(range.end - range.start),
            _ => None,
        });
        let whole = lens.clone().filter(|&len| len == SMALL).count();
        let part = lens.filter(|&len| len == 24).count();
        match (alignment, punches) {
            (1, true) => assert_eq!((part, whole), (freed.len(), 0)),
            (1, false) => assert_eq!((part, whole), (0, freed.len())),
            _ => {}
        }
        let read = block_on(image.read(0, BufMut::zeroed(guest.len()))).unwrap();
        assert!(
            read[..] == guest[..],
            "blocks of {alignment}, punched: {punches}"
        );
        flush(&image);
        block_on(image.close()).expect("nothing fails");
        assert_eq!(faults(disk.contents()), (0, 0));
    }
}

/// Clusters that wait in the quarantine are freed before a write is refused for want of space; one
/// that is refused has taken nothing, and the next may succeed.
#[test]
fn without_space_what_waits_to_be_freed_is_freed_first() {
    let disk = new_disk(CLUSTER, 1);
    let image = image_on(&disk);
    (0..16).for_each(|cluster| write(&image, cluster).unwrap());
    block_on(image.close()).expect("nothing fails");
    let image = image_on(&disk);
    let full = disk.len_bytes();
    disk.fill_up(full);
    let refused = write(&image, 100).expect_err("there is no room");
    assert!(is_no_space(&refused), "{refused}");
    (4..8).for_each(|cluster| discard(&image, cluster));
    disk.take_log();
    (100..104).for_each(|cluster| write(&image, cluster).unwrap());
    let refused = write(&image, 104).expect_err("there is no room again");
    assert!(is_no_space(&refused), "{refused}");
    assert_eq!(disk.len_bytes(), full);
    disk.mend();
    write(&image, 104).expect("there is room now");
    block_on(image.close()).expect("nothing fails");
    assert_eq!(faults(disk.contents()), (0, 0));
}

/// Another failure to extend the file is reported at once, and no space stays claimed.
#[test]
fn a_file_that_cannot_be_extended_fails_the_write_alone() {
    let disk = new_disk(CLUSTER, 1);
    let image = image_on(&disk);
    let fails = |op: &Op| matches!(op, Op::SetLen(_)).then(|| io::Error::from_raw_os_error(EIO));
    disk.fail(fails);
    disk.take_log();
    write(&image, 0).expect_err("it cannot grow");
    let asked = disk.take_log();
    assert_eq!(
        asked
            .iter()
            .filter(|op| matches!(op, Op::SetLen(_)))
            .count(),
        1
    );
    disk.mend();
    write(&image, 0).expect("it can now");
    block_on(image.close()).expect("nothing is latched");
    assert_eq!(faults(disk.contents()), (0, 0));
}

/// The claimed space is in the file, always, and is allocated once a session has grown by a MiB,
/// from the old end to the new one; a file that cannot allocate is asked once.
#[test]
fn the_file_is_extended_to_what_is_claimed() {
    for can_allocate in [true, false] {
        let disk = new_disk(CLUSTER, 1);
        let image = qcow2_on(&disk);
        if !can_allocate {
            disk.fail(|op| {
                matches!(op, Op::Allocate(_)).then(|| io::ErrorKind::Unsupported.into())
            });
        }
        disk.take_log();
        let start = image.lock().space.claimed() * CLUSTER;
        let (mut allocations, mut end) = (0, start);
        while end < start + (3 << 20) {
            // More than is free: what is asked for is never there already.
            let wanted = image.lock().space.free.clusters() + 1;
            let now = Situation {
                file_bytes: end,
                grown_bytes: end - start,
                free_bytes: None,
                needed_bytes: wanted * CLUSTER,
            };
            let step = growth::next_step(image.policy, &now, image.full_bytes());
            block_on(image.make_room(wanted)).expect("there is room");
            assert!(image.lock().space.free.clusters() >= wanted);
            let claimed = image.lock().space.claimed() * CLUSTER;
            assert_eq!(disk.len_bytes(), claimed);
            assert_eq!(claimed, end + step.bytes, "no blocks are needed yet");
            let grown = claimed - start;
            assert_eq!(block_on(image.turn.take()).grown_bytes, grown);
            let ahead = if grown < 1 << 20 {
                0
            } else {
                step.bytes / CLUSTER / 2
            };
            // With nothing free, so much is wanted.
            let mut state = image.lock();
            let free = state.space.free.clusters();
            let taken = state.space.take(free);
            assert_eq!(state.space.wanted_ahead().unwrap_or(0), ahead);
            state.space.give_back(&taken);
            drop(state);
            let log = disk.take_log();
            let grown: Vec<&Op> = log
                .iter()
                .filter(|op| matches!(op, Op::Allocate(_) | Op::SetLen(_)))
                .collect();
            let allocates = end >= start + (1 << 20);
            let asks = allocates && (can_allocate || allocations == 0);
            let mut expected = Vec::new();
            expected.extend(asks.then_some(Op::Allocate(end..claimed)));
            expected.extend((!allocates || !can_allocate).then_some(Op::SetLen(claimed)));
            assert_eq!(grown, expected.iter().collect::<Vec<_>>());
            allocations += u32::from(asks);
            end = claimed;
        }
        assert!(allocations > 0);
    }
    // Any other error than that the file cannot allocate fails the request.
    let disk = new_disk(CLUSTER, 1);
    let image = qcow2_on(&disk);
    block_on(image.make_room(300)).expect("there is room");
    let len = disk.len_bytes();
    disk.fail(|op| matches!(op, Op::Allocate(_)).then(|| io::Error::from_raw_os_error(ENOSPC)));
    let wanted = image.lock().space.free.clusters() + 1;
    let refused = block_on(image.make_room(wanted));
    assert!(is_no_space(&refused.expect_err("it cannot be allocated")));
    assert_eq!(disk.len_bytes(), len);
}

/// An L1 entry of a damaged image that points beyond the end of the file: the file grows up to
/// there, and no further, since what were put there would be taken for a table (invariant S3).
#[test]
fn the_file_does_not_grow_over_a_table_that_is_beyond_its_end() {
    let grown = {
        let disk = new_disk(CLUSTER, 1);
        block_on(qcow2_on(&disk).make_room(1)).expect("there is room");
        disk.len_bytes() / CLUSTER
    };
    for table in grown - 3..grown + 3 {
        let disk = new_disk(CLUSTER, 1);
        let closed = disk.contents();
        let l1 = u64::from_be_bytes(closed[40..48].try_into().unwrap());
        // The second of the L1 entries; another one points further still.
        disk.patch(l1 + 8, &((1 << 63) | (table * CLUSTER)).to_be_bytes());
        disk.patch(
            l1 + 16,
            &((1 << 63) | ((table + 50) * CLUSTER)).to_be_bytes(),
        );
        let image = qcow2_on(&disk);
        let outcome = block_on(image.make_room(1));
        if table >= grown {
            outcome.expect("it ends before the table");
            assert_eq!(disk.len_bytes(), grown * CLUSTER);
            let rest = image.lock().space.free.clusters();
            block_on(image.make_room(rest + 8)).expect_err("it would not");
        } else {
            let error = outcome.expect_err("it would hold the table's place");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
            assert_eq!(disk.len_bytes(), closed.len() as u64);
        }
    }
}

/// Space that a session has grown and not used is cut off when it ends; older space stays, and
/// all of it stays while a request may still write there.
#[test]
fn a_session_gives_back_what_it_has_grown_and_not_used() {
    let disk = new_disk(CLUSTER, 1);
    let image = image_on(&disk);
    (0..40).for_each(|cluster| write(&image, cluster).unwrap());
    let busy = disk.len_bytes();
    block_on(image.close()).expect("nothing fails");
    let used = 1 + hosts(&disk, 0..40).into_iter().max().unwrap();
    assert_eq!(disk.len_bytes(), used * CLUSTER);
    assert!(busy > used * CLUSTER, "the test means nothing");

    // The tail is freed, and more is grown and freed: the file is again as it was.
    let image = image_on(&disk);
    (30..40).for_each(|cluster| discard(&image, cluster));
    flush(&image);
    (50..100).for_each(|cluster| write(&image, cluster).unwrap());
    (50..100).for_each(|cluster| discard(&image, cluster));
    block_on(image.close()).expect("nothing fails");
    assert_eq!(disk.len_bytes(), used * CLUSTER, "no shorter, no longer");
    assert_eq!(faults(disk.contents()), (0, 0));

    // Nothing is free at the end: nothing is cut, and the file is not touched.
    let image = image_on(&disk);
    disk.take_log();
    block_on(image.close()).expect("nothing fails");
    assert!(!disk.take_log().iter().any(|op| matches!(op, Op::SetLen(_))));

    for stays in ["latch", "abandoned", "nothing"] {
        let disk = new_disk(CLUSTER, 1);
        let image = qcow2_on(&disk);
        block_on(image.make_room(3)).expect("there is room");
        let (before, at_open) = (
            disk.len_bytes(),
            image.lock().space.claimed_at_open() * CLUSTER,
        );
        match stays {
            "latch" => image.latch(&Error::Latched(String::new())),
            "abandoned" => {
                let mut state = image.lock();
                let epoch = state.mapping.epochs.enter();
                state.mapping.epochs.abandon(epoch);
            }
            _ => {}
        }
        block_on(image.trim()).expect("nothing fails");
        let expected = if stays == "nothing" { at_open } else { before };
        assert_eq!(disk.len_bytes(), expected, "{stays}");
        let state = image.lock();
        assert_eq!(state.space.claimed() * CLUSTER, expected);
        assert_eq!(
            state
                .space
                .free
                .run_ending_at(state.space.claimed())
                .is_some(),
            stays != "nothing"
        );
    }
}

/// An image that is opened and closed all the time keeps its growth: closed twice in a row with
/// growth outstanding, the third close does not trim. The count lives in the image's hint.
#[test]
fn closes_with_growth_outstanding_are_counted_in_the_image() {
    let disk = Disk::new(1);
    let create_options = CreateOptions {
        cluster_size: CLUSTER,
        alloc_policy: AllocPolicy::Contiguous,
        ..CreateOptions::new(DISK)
    };
    block_on(create(disk.clone(), None, &create_options)).expect("there is room");
    let closes = || {
        let image = qcow2_on(&disk);
        let hint = image.lock().committed.header.extensions.allocation;
        hint.expect("the policy was given").closes_ahead
    };
    let session = |clusters: std::ops::Range<u64>| {
        let image = image_on(&disk);
        clusters.for_each(|cluster| write(&image, cluster).unwrap());
        let grown = disk.len_bytes();
        block_on(image.close()).expect("nothing fails");
        grown
    };
    assert_eq!(closes(), 0);
    for (before, clusters) in [(0, 0..40), (1, 40..80)] {
        assert_eq!(closes(), before);
        let grown = session(clusters);
        assert!(disk.len_bytes() < grown, "it is trimmed");
    }
    assert_eq!(closes(), 2);
    let grown = session(80..120);
    assert_eq!((disk.len_bytes(), closes()), (grown, 2), "it stays");
    assert_eq!(faults(disk.contents()), (0, 0));
    // A session that writes nothing leaves the image as it is, whatever it would have to say of the
    // row.
    for disk in [disk, new_disk(CLUSTER, 1)] {
        let image = image_on(&disk);
        disk.take_log();
        block_on(image.close()).expect("nothing fails");
        let log = disk.take_log();
        let is_write = |op: &&Op| matches!(op, Op::Write(_));
        assert_eq!(log.iter().find(is_write), None);
    }
}

/// Of subclusters, too, only those count as zeroes whose bytes were punched.
#[test]
fn only_subclusters_that_are_punched_count_as_zeroes() {
    const FIRST: HostCluster = HostCluster(7);
    let geometry = Geometry::new(14, 4, true).expect("subclusters of 512 bytes");
    // A block of the host, half of one, and the end of another with all of the next.
    let mask = 0xfff0_0f00 | 0xff;
    for (alignment, fails, zeroes) in [(1, false, mask), (4096, false, 0xff00_00ff), (1, true, 0)] {
        let disk = Disk::new(alignment);
        let end = (FIRST.0 + 1) * geometry.cluster_bytes();
        disk.patch(0, &vec![0xaa; end as usize]);
        if fails {
            disk.fail(|op| matches!(op, Op::Discard(_)).then(|| io::Error::from_raw_os_error(EIO)));
        }
        let file = AlignedFile::new(disk.clone());
        let found = block_on(punch::punch(&file, &geometry, (FIRST, mask)));
        assert_eq!(found, zeroes, "blocks of {alignment}");
        let bytes = disk.contents();
        let subclusters = bytes[FIRST.0 as usize * geometry.cluster_bytes() as usize..].chunks(512);
        for (i, bytes) in subclusters.enumerate() {
            let byte = if zeroes >> i & 1 == 0 { 0xaa } else { 0 };
            assert!(bytes.iter().all(|&b| b == byte), "subcluster {i}");
        }
    }
}

/// The space of a new table is allocated where the table is, or the write is refused, once what is
/// freed has been tried; nothing is taken by then.
#[test]
fn a_table_without_space_fails_the_write_alone() {
    let disk = new_disk(CLUSTER, 1);
    let image = image_on(&disk);
    disk.fail(|op| {
        let is_allocation = matches!(op, Op::Allocate(_));
        is_allocation.then(|| io::Error::from_raw_os_error(ENOSPC))
    });
    let refused = write(&image, 0).expect_err("its table has no space");
    assert!(is_no_space(&refused), "{refused}");
    let is_allocation = |op: &&Op| matches!(op, Op::Allocate(_));
    let asked = disk.take_log().iter().filter(is_allocation).count();
    assert_eq!(asked, 2, "before and after a cycle");
    disk.mend();
    write(&image, 0).expect("there is room now");
    let log = disk.take_log();
    let allocated: Vec<_> = log.iter().filter(is_allocation).collect();
    flush(&image);
    let bytes = disk.contents();
    let word = |at: u64| u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap());
    let table = word(word(40)) & 0x00ff_ffff_ffff_fe00;
    assert_eq!(allocated, [&Op::Allocate(table..table + CLUSTER)]);
    block_on(image.close()).expect("nothing is latched");
    assert_eq!(faults(disk.contents()), (0, 0));
}

/// Space that was allocated for tables and not used goes with what was grown.
#[test]
fn space_of_tables_that_never_came_is_given_back() {
    let disk = new_disk(CLUSTER, 1);
    let image = qcow2_on(&disk);
    block_on(image.make_room(3)).expect("there is room");
    let before = image.lock().space.claimed_at_open() * CLUSTER;
    block_on(image.make_table_space()).expect("there is room");
    let for_tables = |space: &HostSpace| space.clusters_for_tables() - space.free.clusters();
    assert!(
        for_tables(&image.lock().space) > 0,
        "the test means nothing"
    );
    block_on(image.trim()).expect("nothing fails");
    assert_eq!(for_tables(&image.lock().space), 0);
    assert_eq!(disk.len_bytes(), before);
}

/// The rest of a cluster around a write reads as zeroes, also where the file calls old bytes a
/// hole.
#[test]
fn holes_are_believed_only_of_files_that_punch_them() {
    // Of so large a cluster, what a small write leaves is not written along with it.
    const LARGE: u64 = 64 << 10;
    for punches in [false, true] {
        let disk = Disk::called_a_hole(punches);
        let options = CreateOptions {
            cluster_size: LARGE,
            ..CreateOptions::new(DISK)
        };
        block_on(create(disk.clone(), None, &options)).expect("there is room");
        // Free clusters that an earlier session has left, with what was in them.
        let end = disk.len_bytes().next_multiple_of(LARGE);
        disk.patch(end, &[0xaa; 8 * LARGE as usize]);
        let image = image_on(&disk);
        let data = Buf::copy_of(&[1; 512]);
        block_on(image.write(0, data, Durability::Cached)).expect("there is room");
        let read = block_on(image.read(0, BufMut::zeroed(LARGE as usize)));
        let read = read.expect("it is there");
        assert_eq!(read[..512], [1; 512]);
        // A file that punches holes knows them: its word counts.
        let rest = if punches { 0xaa } else { 0 };
        let behind = &read[2 * CLUSTER as usize..];
        assert!(behind.iter().all(|&byte| byte == rest), "{punches}");
    }
}

/// A damaged entry of the L1 table is named by its offset in the file.
#[test]
fn a_damaged_entry_is_named_by_its_place_in_the_file() {
    let disk = Disk::new(1);
    let options = CreateOptions {
        cluster_size: CLUSTER,
        ..CreateOptions::new(8 << 20)
    };
    block_on(create(disk.clone(), None, &options)).expect("there is room");
    let word = disk.contents()[40..48].try_into().expect("eight bytes");
    let third_entry = u64::from_be_bytes(word) + 16;
    disk.patch(third_entry, &0x1ff_u64.to_be_bytes());
    let image = image_on(&disk);
    let third_table = 2 * (CLUSTER / 8) * CLUSTER;
    let read = block_on(image.read(third_table, BufMut::zeroed(512)));
    match read.expect_err("the entry has reserved bits") {
        Error::Corrupt {
            structure, offset, ..
        } => assert_eq!((structure, offset), ("L1 entry", third_entry)),
        other => panic!("{other}"),
    }
}
