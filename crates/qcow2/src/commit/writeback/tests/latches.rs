//! Failures after which memory and medium may differ: nothing is changed any more.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::disk::{Disk, Op};
use super::image::Image;
use super::space::{image_on, new_disk, qcow2_on};
use super::{CLUSTER, EIO, ENOSPC, block_on};
use crate::Qcow2;
use crate::commit::writeback::is_no_space;
use crate::control::amend::Amendment;
use crate::control::snapshot::{NewSnapshot, SnapshotChoice};
use crate::create::{CreateOptions, Version, create};
use crate::disk::ZeroOptions;
use crate::file::{Durability, Space};
use crate::options::OpenOptions;
use crate::policy::{AllocPolicy, DiscardPolicy};
use crate::{Buf, Error, Job, Result};

/// Has these operations fail without having done anything.
fn fail(disk: &Disk, errno: i32, fails: fn(&Op) -> bool) {
    disk.fail(move |op| fails(op).then(|| io::Error::from_raw_os_error(errno)));
    disk.take_log();
}

fn is_write(op: &Op) -> bool {
    matches!(op, Op::Write(_))
}

/// Returns what has been asked of the file, but for reads and flushes.
fn changes(disk: &Disk) -> Vec<Op> {
    let log = disk.take_log().into_iter();
    log.filter(|op| !matches!(op, Op::Read(_) | Op::Flush))
        .collect()
}

/// An image whose blocks count 64 clusters of 512 bytes each.
fn with_small_blocks() -> Arc<Disk> {
    let disk = Disk::new(1);
    let options = CreateOptions {
        cluster_size: 512,
        refcount_bits: 64,
        ..CreateOptions::new(1 << 20)
    };
    block_on(create(disk.clone(), None, &options)).expect("there is room");
    disk
}

/// A block that was not written for want of space, while its neighbours were: a shorter step would
/// take the space of these for zeroes.
#[test]
fn new_counts_that_could_not_be_written_stop_the_session() {
    for errno in [EIO, ENOSPC] {
        let disk = with_small_blocks();
        let image = qcow2_on(&disk);
        let wanted = image.lock().space.free.clusters() + 200;
        fail(&disk, errno, is_write);
        block_on(image.make_room(wanted)).expect_err("blocks cannot be written");
        let extensions = changes(&disk).into_iter();
        let extensions = extensions.filter(|op| matches!(op, Op::SetLen(_) | Op::Allocate(_)));
        assert_eq!(extensions.count(), 1, "no shorter step is tried");
        assert!(image.is_latched(), "after error {errno}");
        disk.mend();
        block_on(image.make_room(wanted)).expect_err("it is latched");
        assert_eq!(changes(&disk), []);
    }
}

/// Where blocks of a device are made, a table of a damaged image may lie (invariant S3).
#[test]
fn space_of_a_device_that_holds_a_table_is_not_counted() {
    const TABLE: u64 = 100;
    for holds_table in [false, true] {
        let disk = with_small_blocks();
        let l1 = u64::from_be_bytes(disk.contents()[40..48].try_into().unwrap());
        if holds_table {
            disk.patch(l1 + 8, &((1 << 63) | (TABLE * 512)).to_be_bytes());
        }
        let disk = Disk::device(disk, 256 * 512);
        let image = qcow2_on(&disk);
        let before = disk.contents();
        // The first block counts 64 clusters, of which some are in use.
        let outcome = block_on(image.make_room(65));
        if !holds_table {
            outcome.expect("the second block counts the rest");
            continue;
        }
        let error = outcome.expect_err("the table would be handed out");
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        assert!(image.is_latched());
        assert!(disk.contents() == before, "nothing is counted");
    }
}

/// A file that was not cut, while memory takes its end to be earlier, would be extended over old
/// bytes, which would pass for zeroes.
#[test]
fn a_shrink_that_cannot_cut_the_file_stops_the_session() {
    let disk = new_disk(CLUSTER, 1);
    let options = OpenOptions {
        writable: true,
        discard: DiscardPolicy::Ignore,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(disk.clone(), &options)).expect("it is sound");
    let write = |at: u64, len: u64| {
        let data = Buf::from(vec![0xaa; len as usize]);
        block_on(image.write(at, data, Durability::Cached))
    };
    write(0, 16 * CLUSTER).expect("nothing fails yet");
    write(48 * CLUSTER, 16 * CLUSTER).expect("nothing fails yet");
    block_on(image.flush()).expect("nothing fails yet");
    fail(&disk, EIO, |op| matches!(op, Op::SetLen(_)));
    block_on(image.resize(32 * CLUSTER)).expect_err("the file cannot be cut");
    let log = changes(&disk);
    assert!(matches!(log.last(), Some(Op::SetLen(_))), "{log:?}");
    disk.mend();
    write(20 * CLUSTER + 100, 24).expect_err("bytes that were given up would be beside it");
    block_on(image.close()).expect_err("it is latched");
    assert_eq!(changes(&disk), []);
}

/// An image with a zero cluster in a table that a snapshot shares, and where the table is.
fn with_shared_zeroes() -> (Arc<Disk>, u64) {
    let disk = new_disk(CLUSTER, 1);
    let image = image_on(&disk);
    let data = Buf::from(vec![0xaa; 4 * CLUSTER as usize]);
    block_on(image.write(0, data, Durability::Cached)).expect("nothing fails yet");
    let zeroes = ZeroOptions {
        space: Space::Keep,
        ..ZeroOptions::default()
    };
    block_on(image.write_zeroes(CLUSTER, CLUSTER, zeroes)).expect("nothing fails yet");
    let snapshot = NewSnapshot {
        name: "shared".to_string(),
        date_sec: 0,
        date_nsec: 0,
    };
    block_on(image.create_snapshot(&snapshot, &Job::default())).expect("nothing fails yet");
    block_on(image.close()).expect("nothing fails yet");
    let contents = disk.contents();
    let word = |at: u64| {
        let bytes = &contents[at as usize..][..8];
        u64::from_be_bytes(bytes.try_into().expect("eight bytes"))
    };
    let table = word(word(40)) & !(1 << 63);
    (disk, table)
}

fn is_write_to(op: &Op, cluster_at: u64) -> bool {
    matches!(op, Op::Write(range) if range.start / CLUSTER == cluster_at / CLUSTER)
}

/// Checks that a session ends with the first failure of operations that `fails` names, once there
/// were as many writes to the cluster at `from`, the last of them included.
fn stops_after(
    (disk, image): (&Disk, &Image),
    (from, writes, fails): (u64, usize, fn(&Op) -> bool),
    work: impl Future<Output = Result<()>>,
) {
    let seen = AtomicUsize::new(0);
    disk.fail(move |op| {
        let is_write = usize::from(is_write_to(op, from));
        let seen = seen.fetch_add(is_write, Ordering::Relaxed) + is_write;
        (seen >= writes && fails(op)).then(|| io::Error::from_raw_os_error(EIO))
    });
    block_on(work).expect_err("it fails");
    disk.mend();
    disk.take_log();
    let data = Buf::from(vec![0xbb; 512]);
    block_on(image.write(0, data, Durability::Cached)).expect_err("it is latched");
    block_on(image.close()).expect_err("it is latched");
    assert_eq!(changes(disk), []);
}

/// A downgrade that could not write a table of a snapshot, or the counts behind it, has taken
/// counts in memory for another state than the medium's.
#[test]
fn a_downgrade_that_cannot_change_a_snapshot_stops_the_session() {
    for fails in [is_write, |op: &Op| *op == Op::Flush] {
        let (disk, table) = with_shared_zeroes();
        let image = image_on(&disk);
        let amendment = Amendment {
            version: Some(Version::V2),
            ..Amendment::default()
        };
        // The disk's own table comes first, elsewhere.
        let job = Job::default();
        stops_after(
            (&disk, &image),
            (table, 1, fails),
            image.amend(&amendment, &job),
        );
    }
}

/// A table of the disk that could not be written after a snapshot was deleted has flags that do not
/// follow its counts.
#[test]
fn a_deletion_that_cannot_set_flags_stops_the_session() {
    let (disk, table) = with_shared_zeroes();
    let image = image_on(&disk);
    let choice = SnapshotChoice::Name("shared".to_string());
    let job = Job::default();
    let deleted = image.delete_snapshot(&choice, &job);
    stops_after((&disk, &image), (table, 1, is_write), deleted);
}

fn with_hint() -> (Arc<Disk>, Qcow2) {
    let disk = Disk::new(1);
    let options = CreateOptions {
        cluster_size: CLUSTER,
        alloc_policy: AllocPolicy::Contiguous,
        ..CreateOptions::new(1 << 20)
    };
    block_on(create(disk.clone(), None, &options)).expect("there is room");
    let image = qcow2_on(&disk);
    block_on(image.ready_for_changes()).expect("nothing fails yet");
    (disk, image)
}

/// Want of space leaves the old hint, and stops nothing. After another failure the medium has the
/// old one or the new one.
#[test]
fn a_hint_that_could_not_be_written_stops_the_session_unless_space_is_missing() {
    for errno in [EIO, ENOSPC] {
        let (disk, image) = with_hint();
        let hint = image.header().extensions.allocation.expect("it has one");
        let new = hint.with_closes(hint.closes_ahead + 1);
        fail(&disk, errno, is_write);
        let error = block_on(image.write_allocation_hint(new)).expect_err("it fails");
        assert_eq!(is_no_space(&error), errno == ENOSPC);
        assert_eq!(image.header().extensions.allocation, Some(hint));
        assert_eq!(image.is_latched(), errno == EIO);
        disk.mend();
        disk.take_log();
        let again = block_on(image.write_allocation_hint(new));
        assert_eq!(again.is_ok(), errno == ENOSPC);
        let written = hint.data_offset..hint.data_offset + 8;
        let expected = Vec::from_iter(again.is_ok().then_some(Op::Write(written)));
        assert_eq!(changes(&disk), expected);
    }
}

/// After the failed write of a header the medium may have another one than memory, so the mark of
/// damage is not written into it.
#[test]
fn an_image_whose_header_is_unknown_is_not_marked_corrupt() {
    for fails in [is_write, |op: &Op| *op == Op::Flush] {
        let disk = new_disk(CLUSTER, 1);
        let image = qcow2_on(&disk);
        let mut header = image.header();
        header.compatible_features |= 1;
        fail(&disk, EIO, fails);
        block_on(image.write_header(&header)).expect_err("it fails");
        // A request that was under way meets damage.
        let damage = Error::Invalid("guest data is mapped to metadata".to_string());
        image.lock().health.latch_for_damage(damage);
        disk.mend();
        disk.take_log();
        let before = disk.contents();
        block_on(image.mark_corrupt());
        assert_eq!(disk.take_log(), []);
        assert!(disk.contents() == before && !image.header().is_corrupt());
    }
}

/// A snapshot whose table could not be read back after the header had been switched to it leaves
/// the protection of the state before.
#[test]
fn a_snapshot_that_cannot_be_protected_stops_the_session() {
    let disk = new_disk(CLUSTER, 1);
    let image = image_on(&disk);
    let data = Buf::from(vec![0xaa; 4 * CLUSTER as usize]);
    block_on(image.write(0, data, Durability::Cached)).expect("nothing fails yet");
    let snapshot = NewSnapshot {
        name: "unread".to_string(),
        date_sec: 0,
        date_nsec: 0,
    };
    let job = Job::default();
    let is_read = |op: &Op| matches!(op, Op::Read(_));
    // The first write marks the image, the second switches.
    stops_after((&disk, &image), (0, 2, is_read), async {
        image.create_snapshot(&snapshot, &job).await.map(drop)
    });
}
