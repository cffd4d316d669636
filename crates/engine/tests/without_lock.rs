//! Overwrites that take no lock, beside requests that want their cluster or their image alone.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::support::block_on;
use crate::support::slow::{HELD, NoFiles, SlowFile};
use cowslip::image::{DiscardPolicy, Durability, Format, OpenOptions};
use cowslip::job::Job;
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Buf, BufMut, Error, Image};

const BYTES: usize = 4096;

fn open(file: &Arc<SlowFile>) -> Image {
    let options = OpenOptions {
        writable: true,
        discard: DiscardPolicy::Unmap,
        format: Some(Format::Qcow2),
        ..OpenOptions::default()
    };
    block_on(Image::open(file.clone(), options, &NoFiles)).unwrap()
}

async fn write(image: &Image, offset: u64, byte: u8) -> cowslip::Result<()> {
    let data = Buf::copy_of(&[byte; BYTES]);
    image.write(offset, data, Durability::Cached).await
}

fn read(image: &Image) -> u8 {
    let bytes = block_on(image.read(0, BufMut::zeroed(BYTES))).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

/// An image whose first cluster has data, and has been overwritten once.
fn image_with_data(size: u64) -> (Arc<SlowFile>, Image) {
    let file = SlowFile::new(Vec::new());
    block_on(create(file.clone(), None, &CreateOptions::new(size))).unwrap();
    let image = open(&file);
    block_on(write(&image, 0, 0xaa)).unwrap();
    block_on(write(&image, 0, 0xab)).unwrap();
    let writes = image.write_statistics().unwrap();
    assert_eq!((writes.new_space, writes.in_place), (1, 1));
    (file, image)
}

fn is_pending<F: Future>(future: Pin<&mut F>) -> bool {
    let mut context = Context::from_waker(Waker::noop());
    matches!(future.poll(&mut context), Poll::Pending)
}

/// Whether a future waits for something other than its own work, of which it has little.
fn never_ends<F: Future>(mut future: Pin<&mut F>) -> bool {
    (0..1000).all(|_| is_pending(future.as_mut()))
}

#[test]
fn a_discard_waits_for_an_overwrite_and_a_later_one_for_the_discard() {
    let (file, image) = image_with_data(1 << 20);
    let mut first = pin!(write(&image, 0, HELD));
    assert!(is_pending(first.as_mut()) && file.waiting() == 1);
    let mut discard = pin!(image.discard(0, 1 << 16));
    assert!(
        is_pending(discard.as_mut()),
        "it has the cluster for itself"
    );
    let mut later = pin!(write(&image, 0, 0xcc));
    assert!(
        is_pending(later.as_mut()),
        "it is in line behind the discard"
    );
    file.let_go();
    block_on(first).unwrap();
    block_on(discard).unwrap();
    assert_eq!(read(&image), 0);
    block_on(later).unwrap();
    assert_eq!(read(&image), 0xcc);
    block_on(image.close()).unwrap();
}

#[test]
fn a_resize_waits_for_an_overwrite_and_holds_later_ones_back() {
    let (file, image) = image_with_data(1 << 20);
    let mut first = pin!(write(&image, 0, HELD));
    assert!(is_pending(first.as_mut()) && file.waiting() == 1);
    let mut resize = pin!(image.resize(2 << 20));
    assert!(never_ends(resize.as_mut()), "a request is under way");
    let mut later = pin!(write(&image, 0, 0xcc));
    assert!(is_pending(later.as_mut()), "changes are held back");
    file.let_go();
    block_on(first).unwrap();
    block_on(resize).unwrap();
    block_on(later).unwrap();
    assert_eq!((read(&image), image.size()), (0xcc, 2 << 20));
    block_on(image.close()).unwrap();
}

#[test]
fn a_snapshot_waits_for_an_overwrite_and_holds_later_ones_back() {
    let (file, image) = image_with_data(1 << 20);
    let mut first = pin!(write(&image, 0, HELD));
    assert!(is_pending(first.as_mut()) && file.waiting() == 1);
    let (new, job) = (
        NewSnapshot {
            name: "s".to_string(),
            ..NewSnapshot::default()
        },
        Job::default(),
    );
    let mut snapshot = pin!(image.create_snapshot(&new, &job));
    assert!(never_ends(snapshot.as_mut()), "a request is under way");
    let mut later = pin!(write(&image, 0, 0xcc));
    assert!(is_pending(later.as_mut()), "it would be in the snapshot");
    file.let_go();
    block_on(first).unwrap();
    let id = block_on(snapshot).unwrap();
    block_on(later).unwrap();
    assert_eq!(read(&image), 0xcc);
    // In place it would have gone into the snapshot.
    assert_eq!(image.write_statistics().unwrap().new_space, 2);
    let choice = SnapshotChoice::Id(id);
    block_on(image.apply_snapshot(&choice, &job)).unwrap();
    assert_eq!(read(&image), HELD);
    block_on(image.close()).unwrap();
}

#[test]
fn an_overwrite_that_was_dropped_keeps_its_space_and_nobody_waits_for_it() {
    let (file, image) = image_with_data(1 << 20);
    let host = file.writes().last().unwrap().clone();
    {
        let mut dropped = pin!(write(&image, 0, HELD));
        assert!(is_pending(dropped.as_mut()) && file.waiting() == 1);
    }
    block_on(image.discard(0, 1 << 16)).unwrap();
    for _ in 0..3 {
        block_on(image.flush()).unwrap();
    }
    let before = file.writes().len();
    for cluster in 0..4 {
        block_on(write(&image, cluster << 16, 0xcc)).unwrap();
    }
    let writes = &file.writes()[before..];
    assert!(writes.iter().all(|range| range.start != host.start));
    let refused = block_on(image.create_snapshot(&NewSnapshot::default(), &Job::default()));
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    file.let_go();
    assert_eq!(read(&image), 0xcc);
    block_on(image.close()).unwrap();
}

#[test]
fn a_resize_ends_though_reads_follow_each_other_without_a_pause() {
    let (file, image) = image_with_data(1 << 20);
    // A read whose bytes are there, and that has not ended.
    let begin_read = || {
        file.hold_reads(true);
        let mut read = Box::pin(image.read(0, BufMut::zeroed(BYTES)));
        assert!(is_pending(read.as_mut()));
        file.hold_reads(false);
        file.let_reads_go();
        read
    };
    let mut under_way = begin_read();
    let mut resize = pin!(image.resize(2 << 20));
    assert!(is_pending(resize.as_mut()), "a request is under way");
    let mut rounds = 0..16;
    let has_ended = rounds.any(|_| {
        let next = begin_read();
        block_on(std::mem::replace(&mut under_way, next)).unwrap();
        !is_pending(resize.as_mut())
    });
    assert!(has_ended, "one read or another is always under way");
    block_on(under_way).unwrap();
    block_on(image.close()).unwrap();
}

/// Sets the count of the cluster at a place in the file to 0.
fn forget_count(bytes: &mut [u8], host: u64) {
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let table = word(48) as usize;
    let block = word(table) as usize;
    let at = block + 2 * (host >> 16) as usize;
    assert_eq!(bytes[at..at + 2], [0, 1]);
    bytes[at..at + 2].fill(0);
}

#[test]
fn a_cluster_that_becomes_metadata_is_not_overwritten_any_more() {
    let (file, image) = image_with_data(4 << 30);
    let host = file.writes().last().unwrap().start;
    block_on(image.close()).unwrap();
    let mut bytes = file.memory.contents();
    forget_count(&mut bytes, host);
    let file = SlowFile::new(bytes);
    let image = open(&file);
    block_on(write(&image, 0, 0xac)).unwrap();
    block_on(write(&image, 0, 0xad)).unwrap();
    assert_eq!(read(&image), 0xad);
    // The counts say that the cluster is free: it becomes a table, or data, of another part.
    for gib in 1..4 {
        block_on(write(&image, gib << 30, 0xcc)).unwrap();
    }
    assert_eq!(image.is_protected(host), Some(true), "it is metadata now");
    let before = file.writes().len();
    let refused = block_on(write(&image, 0, 0xae));
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    let hit = |range: &std::ops::Range<u64>| range.start == host;
    assert!(!file.writes()[before..].iter().any(hit));
}
