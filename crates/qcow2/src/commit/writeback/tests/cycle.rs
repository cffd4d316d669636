//! One cycle: how many writes and barriers it takes, and whom it serves.

use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Poll, Waker};

use cowslip_queue::{Buf, BufMut, pending};

use super::disk::{Disk, Op};
use super::image::Image;
use super::space::{image_on, new_disk, qcow2_on};
use super::{CLUSTER, EIO, ENOSPC, block_on, faults};
use crate::backing::NoBacking;
use crate::commit::writeback::durability;
use crate::create::{CreateOptions, Preallocation, create};
use crate::file::Durability;
use crate::geometry::HostOffset;
use crate::job::{Attendant, Job, Moment};
use crate::mapping::tables::SliceCopy;

fn write(image: &Image, cluster: u64, byte: u8) {
    let data = Buf::from(vec![byte; CLUSTER as usize]);
    block_on(image.write(cluster * CLUSTER, data, Durability::Cached)).unwrap();
}

fn flushes_of(disk: &Disk, image: &Image) -> usize {
    disk.take_log();
    block_on(image.flush()).expect("nothing fails");
    let log = disk.take_log();
    log.iter().filter(|op| **op == Op::Flush).count()
}

#[test]
fn a_flush_takes_the_barriers_that_it_needs_and_no_more() {
    let disk = new_disk(CLUSTER, 1);
    let image = image_on(&disk);
    write(&image, 0, 1);
    assert_eq!(
        flushes_of(&disk, &image),
        2,
        "a new table, counts, an entry"
    );
    assert_eq!(flushes_of(&disk, &image), 0, "nothing has changed");
    write(&image, 1, 1);
    assert_eq!(flushes_of(&disk, &image), 2, "counts and an entry");
    write(&image, 1, 2);
    assert_eq!(flushes_of(&disk, &image), 1, "data alone");
    block_on(image.discard(0, CLUSTER)).unwrap();
    assert_eq!(flushes_of(&disk, &image), 1, "an entry alone");
}

/// A guest that flushes after every write into new space waits for one flush of the host, but when
/// counts are raised ahead, and when the file has grown or a hole was punched since the last one.
#[test]
fn a_flush_of_new_zeroes_takes_one_barrier() {
    let disk = new_disk(CLUSTER, 1);
    let image = image_on(&disk);
    let flushes: Vec<usize> = (0..40)
        .map(|cluster| {
            write(&image, cluster, 1);
            flushes_of(&disk, &image)
        })
        .collect();
    let ordered = flushes.iter().filter(|&&flushes| flushes == 2).count();
    assert!(flushes.iter().all(|flushes| (1..=2).contains(flushes)));
    assert!(ordered <= 8, "{flushes:?}");
    // Clusters counted ahead are no leak when the image is closed, nor beyond the end of
    // the file.
    block_on(image.close()).expect("nothing fails");
    assert_eq!(faults(disk.contents()), (0, 0));
    let bytes = disk.contents();
    let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let block = number(number(48));
    let counts = bytes[block..block + CLUSTER as usize].chunks(2);
    let beyond = counts.skip(bytes.len().div_ceil(CLUSTER as usize));
    assert!(beyond.into_iter().all(|count| count == [0, 0]));
}

/// Where a cycle of one barrier has failed, L1 on disk may refer to its new tables: they are
/// written like all others from then on, behind a barrier.
#[test]
fn tables_that_l1_may_reach_after_a_failure_are_new_no_longer() {
    const SMALL: u64 = 512;
    const TABLE: u64 = 64 * SMALL;
    let disk = new_disk(SMALL, 1);
    let image = qcow2_on(&disk);
    let l1 = image.header().l1_table_offset;
    let mut unordered = 0;
    for index in 0..100 {
        let data = Buf::from(vec![7; SMALL as usize]);
        block_on(image.write(index * TABLE, data, &NoBacking)).unwrap();
        let entry = l1 + 8 * index..l1 + 8 * index + 8;
        let is_l1 = move |op: &Op| *op == Op::Write(entry.clone());
        let is_entry = is_l1.clone();
        disk.fail(move |op| is_l1(op).then(|| std::io::Error::from_raw_os_error(ENOSPC)));
        disk.take_log();
        block_on(image.write_back()).expect_err("L1 has no space");
        let log = disk.take_log();
        let is_ordered = log.contains(&Op::Flush);
        assert!(!image.lock().mapping.tables.is_in_memory(index));
        disk.mend();
        block_on(image.write_back()).expect("there is space again");
        let log = disk.take_log();
        let written = log.iter().position(&is_entry).expect("it is written");
        assert!(log[..written].contains(&Op::Flush));
        unordered += u32::from(!is_ordered);
    }
    assert!((10..90).contains(&unordered), "{unordered}");
    block_on(image.close()).unwrap();
    assert_eq!(faults(disk.contents()), (0, 0));
}

/// Lets a job wait once, for this moment.
struct Waits(Mutex<Option<Moment>>);

impl Attendant for Waits {
    fn pace(&self, _: u64) -> Option<Moment> {
        self.0.lock().unwrap().take()
    }
}

/// A barrier covers the zeroes that were there when it was issued. A resize that is cancelled gives
/// back its space without the turn: beside a cycle, and behind the barrier of that.
#[test]
fn zeroes_behind_the_issue_of_a_barrier_wait_for_the_next() {
    let disk = new_disk(CLUSTER, 1);
    let image = qcow2_on(&disk);
    let below = NoBacking;
    // So that it can grow without another L1 table, which would take back what is counted ahead.
    let size = image.size();
    let (less, job) = (size - (1 << 20), Job::default());
    let shrink = image.resize(less, &below, (Preallocation::Off, &job));
    block_on(shrink).expect("nothing fails");
    let write = |cluster: u64| {
        let data = Buf::from(vec![7; CLUSTER as usize]);
        block_on(image.write(cluster * CLUSTER, data, &below)).unwrap();
    };
    for cluster in 0..12 {
        write(cluster);
        block_on(image.write_back()).unwrap();
    }
    let counted = image.lock().space.raised.ahead();
    assert!(counted > 0, "new space would have a count to wait for");
    let mut context = Context::from_waker(Waker::noop());

    // It has taken space that is counted, and waits.
    let (go_on, moment) = pending();
    let job = Job::attended(Waits(Mutex::new(Some(Box::pin(moment)))));
    let mut resize = pin!(image.resize(size, &below, (Preallocation::Full, &job)));
    assert!(resize.as_mut().poll(&mut context).is_pending());
    assert!(image.lock().space.raised.ahead() == counted);

    // Data alone: a cycle whose barrier covers all changes of space so far.
    write(0);
    disk.hold_flushes();
    let mut cycle = pin!(image.write_back());
    assert!(cycle.as_mut().poll(&mut context).is_pending());
    disk.take_log();
    job.cancel();
    go_on.complete(());
    assert!(resize.as_mut().poll(&mut context).is_pending());
    let punched = disk.take_log();
    let Some(Op::Discard(space)) = punched.iter().find(|op| matches!(op, Op::Discard(_))) else {
        panic!("the space was not given back: {punched:?}");
    };
    write(40);
    let written = disk.take_log();
    let is_there = |op: &Op| matches!(op, Op::Write(at) if space.contains(&at.start));
    assert!(
        written.iter().all(is_there),
        "{written:?} is not in {space:?}"
    );
    disk.release_flushes();
    block_on(cycle).expect("nothing fails");
    disk.take_log();
    // The next cycle is the one with which the resize takes back what it has done.
    block_on(resize).expect_err("it is cancelled");
    let log = disk.take_log();
    let l1 = image.header().l1_table_offset as usize;
    let word = disk.contents()[l1..l1 + 8].try_into().unwrap();
    let entry = (u64::from_be_bytes(word) & 0x00ff_ffff_ffff_fe00) + 8 * 40;
    let is_entry = |op: &Op| matches!(op, Op::Write(at) if at.contains(&entry));
    let written = log.iter().position(is_entry).expect("it is written");
    assert!(log[..written].contains(&Op::Flush), "{log:?}");
    block_on(image.close()).unwrap();
    assert_eq!(faults(disk.contents()), (0, 0));
}

/// Slices written again and again stay in memory like slices that are read.
#[test]
fn writes_look_at_tables_as_reads_do() {
    let disk = new_disk(CLUSTER, 1);
    let image = image_on(&disk);
    write(&image, 0, 1);
    let hits = || image.cache_statistics().hits;
    let before = hits();
    for _ in 0..10 {
        write(&image, 0, 2);
    }
    assert!(hits() >= before + 10, "{:?} after {before}", hits());
}

#[test]
fn a_cycle_serves_all_who_wait_for_it() {
    let disk = new_disk(CLUSTER, 1);
    let image = qcow2_on(&disk);
    let turn = block_on(image.turn.take());
    let (mut first, mut second) = (pin!(image.write_back()), pin!(image.write_back()));
    let mut context = Context::from_waker(Waker::noop());
    assert!(first.as_mut().poll(&mut context).is_pending());
    assert!(second.as_mut().poll(&mut context).is_pending());
    drop(turn);
    block_on(first).expect("nothing fails");
    assert!(matches!(
        second.as_mut().poll(&mut context),
        Poll::Ready(Ok(()))
    ));
    let state = image.lock();
    assert!(state.committed.next_cut() == 2 && state.committed.is_durable(1));
}

#[test]
fn a_write_is_durable_by_itself_if_its_mapping_is() {
    assert_eq!(durability(Durability::Durable, true), Durability::Durable);
    assert_eq!(durability(Durability::Durable, false), Durability::Cached);
    assert_eq!(durability(Durability::Cached, true), Durability::Cached);
    assert_eq!(durability(Durability::Cached, false), Durability::Cached);
}

/// Neighbours go down together, up to as many as a write takes, and every slice goes where it
/// belongs: also one that lies where another's end times its length would be.
#[test]
fn slices_are_written_where_they_belong() {
    const LEN: u64 = 512;
    let disk = new_disk(CLUSTER, 1);
    let image = qcow2_on(&disk);
    let mut offsets: Vec<u64> = (100..400).map(|i| i * LEN).collect();
    offsets.extend([500, 501, 503].map(|i| i * LEN));
    offsets.extend([2, 3, 4 * LEN, 4 * LEN + 1].map(|i| (1000 + i) * LEN));
    offsets.extend([1, 2, 3 * LEN].map(|i| i * LEN));
    let copies: Vec<SliceCopy> = offsets
        .iter()
        .map(|&offset| SliceCopy {
            slice: 0,
            offset: HostOffset(offset),
            bytes: Buf::from([offset.to_be_bytes(); LEN as usize / 8].concat()),
        })
        .collect();
    disk.take_log();
    block_on(image.write_slices(copies.iter())).expect("nothing fails");
    let runs = [
        (1, 3),
        (100, 356),
        (356, 400),
        (500, 502),
        (503, 504),
        (1002, 1004),
        (3 * LEN, 3 * LEN + 1),
        (1000 + 4 * LEN, 1002 + 4 * LEN),
    ];
    let expected = runs.map(|(start, end)| Op::Write(start * LEN..end * LEN));
    assert_eq!(disk.take_log(), expected);
    let bytes = disk.contents();
    for offset in offsets {
        let slice = &bytes[offset as usize..][..LEN as usize];
        assert!(slice.chunks(8).all(|word| word == offset.to_be_bytes()));
    }
}

/// A new table where old bytes are: what no entry was written to reads as nothing.
#[test]
fn a_new_table_has_no_old_bytes() {
    const TABLE: u64 = 16384;
    let disk = Disk::new(1);
    let options = CreateOptions {
        cluster_size: TABLE,
        ..CreateOptions::new(64 << 20)
    };
    block_on(create(disk.clone(), None, &options)).expect("there is room");
    // Nothing can be punched, so that what is freed keeps its bytes.
    disk.fail(|op| matches!(op, Op::Discard(_)).then(|| std::io::Error::from_raw_os_error(EIO)));
    let image = image_on(&disk);
    for at in 0..8 {
        let data = Buf::from(vec![0xee; TABLE as usize]);
        block_on(image.write(at * TABLE, data, Durability::Cached)).unwrap();
    }
    block_on(image.discard(0, 8 * TABLE)).unwrap();
    block_on(image.flush()).unwrap();
    block_on(image.flush()).unwrap();
    // The second table, of which one slice has an entry.
    let second = TABLE / 8 * TABLE;
    let data = Buf::from(vec![0xbb; 100]);
    block_on(image.write(second + 700 * TABLE, data, Durability::Cached)).unwrap();
    block_on(image.close()).expect("nothing fails");
    assert_eq!(faults(disk.contents()), (0, 0));
    let image = image_on(&disk);
    let mut read = block_on(image.read(second, BufMut::zeroed(second as usize))).unwrap();
    let written = &mut read[700 * TABLE as usize..][..100];
    assert!(written.iter().all(|&byte| byte == 0xbb));
    written.fill(0);
    assert!(read.iter().all(|&byte| byte == 0));
}
