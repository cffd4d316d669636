//! Compaction of images with subclusters: the space of those that hold nothing comes back, and
//! nothing else does.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use cowslip::file::host::NoFiles;
use cowslip::file::{Durability, Space};
use cowslip::image::{Image, OpenOptions, ZeroOptions};
use cowslip::job::{Attendant, Moment};
use cowslip::qcow2::compact::{CompactOptions, Compaction, CompactionPlan};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::qcow2::snapshot::NewSnapshot;
use cowslip::{Buf, BufMut, Job};

use crate::support::sparse::{BLOCK, Sparse};
use crate::support::{block_on, our_check};

const CLUSTER: u64 = 128 << 10;
const SIZE: u64 = 8 << 20;
/// Clusters of the disk that hold something.
const WRITTEN: u64 = 16;

fn write(
    image: &Image,
    (offset, len): (u64, u64),
    byte: u8,
) -> impl Future<Output = cowslip::Result<()>> {
    let data = Buf::copy_of(&vec![byte; len as usize]);
    image.write(offset, data, Durability::Cached)
}

fn read(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(image.size() as usize);
    block_on(image.read(0, buf)).unwrap().to_vec()
}

fn compact(image: &Image, options: &CompactOptions) -> Compaction {
    block_on(image.compact(options, &Job::default())).unwrap()
}

fn plan(image: &Image) -> CompactionPlan {
    let options = CompactOptions::default();
    block_on(image.compaction_plan(&options, &Job::default())).unwrap()
}

fn is_sound(file: &Sparse) {
    let checked = our_check(file.memory.contents(), &mut Vec::new()).unwrap();
    assert_eq!((checked.corruptions, checked.leaks), (0, 0));
}

/// An image of which one subcluster of every other cluster is written, the space of each cluster
/// as a whole.
fn image(cluster_bytes: u64) -> (Arc<Sparse>, Image) {
    let file = Sparse::new(Vec::new());
    let options = CreateOptions {
        extended_l2: true,
        cluster_size: cluster_bytes,
        ..CreateOptions::new(SIZE)
    };
    block_on(create(file.clone(), None, &options)).unwrap();
    let image = Sparse::open(&file);
    for number in 0..WRITTEN {
        let at = 2 * number * cluster_bytes + number * cluster_bytes / 32;
        block_on(write(&image, (at, cluster_bytes / 32), number as u8 + 1)).unwrap();
    }
    block_on(image.flush()).unwrap();
    // As a cluster's space is allocated by default, whether or not its bytes are written.
    let end = file.memory.contents().len() as u64;
    file.give(0..end);
    (file, image)
}

/// Closes an image whose disk is this, which it shows afterwards, too.
fn ends_with(file: &Arc<Sparse>, image: &Image, disk: &[u8]) {
    assert!(read(image) == disk);
    block_on(image.close()).unwrap();
    is_sound(file);
    assert!(read(&Sparse::open(file)) == disk);
}

#[test]
fn the_space_of_subclusters_that_were_never_written_comes_back() {
    let (file, image) = image(CLUSTER);
    let (disk, before) = (read(&image), file.given_bytes());
    let keeps = CompactOptions {
        subclusters: false,
        ..CompactOptions::default()
    };
    assert_eq!(compact(&image, &keeps).subcluster_bytes, 0);
    let kept = file.given_bytes();
    let expected = WRITTEN * 31 * BLOCK;
    assert!(kept <= before && kept > expected, "{kept}");
    assert_eq!(plan(&image).subcluster_bytes, expected);
    let done = compact(&image, &CompactOptions::default());
    assert_eq!(done.subcluster_bytes, expected);
    assert_eq!(file.given_bytes(), kept - expected);
    // They are holes now, and the next one finds nothing.
    assert_eq!(plan(&image).subcluster_bytes, 0);
    assert_eq!(
        compact(&image, &CompactOptions::default()).subcluster_bytes,
        0
    );
    assert!(read(&image) == disk);
    // A write takes its space again.
    block_on(write(&image, (BLOCK * 3, BLOCK), 77)).unwrap();
    block_on(image.close()).unwrap();
    is_sound(&file);
    let again = read(&Sparse::open(&file));
    assert!(
        again[3 * BLOCK as usize..4 * BLOCK as usize]
            .iter()
            .all(|&byte| byte == 77)
    );
    assert!(again[..BLOCK as usize] == disk[..BLOCK as usize]);
}

#[test]
fn a_plan_of_an_image_that_is_only_read_counts_them() {
    let (file, image) = image(CLUSTER);
    block_on(image.close()).unwrap();
    let reader = block_on(Image::open(file, OpenOptions::default(), &NoFiles)).unwrap();
    assert_eq!(plan(&reader).subcluster_bytes, WRITTEN * 31 * BLOCK);
}

#[test]
fn what_was_zeroed_or_discarded_since_comes_back_too() {
    let (file, image) = image(CLUSTER);
    block_on(write(&image, (0, CLUSTER), 9)).unwrap();
    let keep = ZeroOptions {
        space: Space::Keep,
        ..ZeroOptions::default()
    };
    block_on(image.write_zeroes(8 * BLOCK, 4 * BLOCK, keep)).unwrap();
    block_on(image.flush()).unwrap();
    let end = file.memory.contents().len() as u64;
    file.give(0..end);
    // Not yet durable when the compaction begins.
    block_on(image.discard(16 * BLOCK, 4 * BLOCK)).unwrap();
    let disk = read(&image);
    let done = compact(&image, &CompactOptions::default());
    assert_eq!(done.subcluster_bytes, ((WRITTEN - 1) * 31 + 8) * BLOCK);
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    is_sound(&file);
}

#[test]
fn where_subclusters_are_smaller_than_blocks_whole_blocks_come_back() {
    // Subclusters of 2 KiB: two to a block.
    let (file, image) = image(64 << 10);
    let disk = read(&image);
    let done = compact(&image, &CompactOptions::default());
    assert_eq!(done.subcluster_bytes, WRITTEN * 15 * BLOCK);
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    is_sound(&file);
}

#[test]
fn what_a_snapshot_has_stays() {
    let (file, image) = image(CLUSTER);
    block_on(write(&image, (0, CLUSTER), 9)).unwrap();
    let new = NewSnapshot {
        name: "s".into(),
        date_sec: 0,
        date_nsec: 0,
    };
    block_on(image.create_snapshot(&new, &Job::default())).unwrap();
    // The disk has nothing there any more, the snapshot has.
    block_on(image.discard(BLOCK, CLUSTER - BLOCK)).unwrap();
    block_on(image.flush()).unwrap();
    let disk = read(&image);
    let keeps = CompactOptions {
        subclusters: false,
        ..CompactOptions::default()
    };
    compact(&image, &keeps);
    let kept = file.given_bytes();
    // The disk's table is a copy, and all clusters of it are counted twice.
    assert_eq!(plan(&image).subcluster_bytes, 0);
    let done = compact(&image, &CompactOptions::default());
    assert_eq!((done.subcluster_bytes, file.given_bytes()), (0, kept));
    assert!(read(&image) == disk);
    let to = cowslip::qcow2::snapshot::SnapshotChoice::IdOrName("s".into());
    block_on(image.apply_snapshot(&to, &Job::default())).unwrap();
    let snapshot = read(&image);
    assert!(snapshot[..CLUSTER as usize].iter().all(|&byte| byte == 9));
    for number in 1..WRITTEN {
        let at = 2 * number * CLUSTER + number * BLOCK;
        let part = &snapshot[at as usize..][..BLOCK as usize];
        assert!(
            part.iter().all(|&byte| byte == number as u8 + 1),
            "{number}"
        );
    }
    block_on(image.close()).unwrap();
    is_sound(&file);
}

#[test]
fn a_guests_write_comes_first_or_waits_for_the_hole() {
    let (file, image) = image(CLUSTER);
    let mut context = Context::from_waker(Waker::noop());
    let mut expected = read(&image);
    file.hold_discards();
    {
        let options = CompactOptions::default();
        let job = Job::default();
        let mut compaction = pin!(image.compact(&options, &job));
        while file.held() == 0 {
            assert!(compaction.as_mut().poll(&mut context).is_pending());
        }
        // Into a subcluster that is being punched, and into one that holds data.
        let mut waits = pin!(write(&image, (5 * BLOCK, BLOCK), 55));
        for _ in 0..20 {
            assert!(waits.as_mut().poll(&mut context).is_pending());
            assert!(compaction.as_mut().poll(&mut context).is_pending());
        }
        block_on(write(&image, (0, BLOCK), 66)).unwrap();
        file.let_discards_go();
        block_on(compaction).unwrap();
        block_on(waits).unwrap();
    }
    expected[..BLOCK as usize].fill(66);
    expected[5 * BLOCK as usize..6 * BLOCK as usize].fill(55);
    ends_with(&file, &image, &expected);
}

/// Stops a compaction at one of the moments at which it may be stopped.
#[derive(Default)]
struct Stop {
    /// Further moments that pass.
    left: AtomicUsize,
    is_there: AtomicBool,
}

/// The same, for the job and for the test.
struct Stopping(Arc<Stop>);

impl Attendant for Stopping {
    fn pace(&self, _: u64) -> Option<Moment> {
        let stop = &self.0;
        if stop.left.load(Ordering::Relaxed) > 0 {
            stop.left.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        stop.is_there.store(true, Ordering::Relaxed);
        let mut has_waited = false;
        Some(Box::pin(poll_fn(move |context| {
            context.waker().wake_by_ref();
            match std::mem::replace(&mut has_waited, true) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })))
    }
}

/// A compaction that stands still anywhere meets a write that fills a subcluster then: it leaves
/// that one, and nothing of it is lost.
#[test]
fn a_subcluster_that_is_being_filled_is_not_punched() {
    let mut stops = 0;
    loop {
        let (file, image) = image(CLUSTER);
        let mut context = Context::from_waker(Waker::noop());
        let mut expected = read(&image);
        let stop = Arc::new(Stop::default());
        stop.left.store(stops, Ordering::Relaxed);
        let job = Job::attended(Stopping(Arc::clone(&stop)));
        let options = CompactOptions::default();
        let mut compaction = pin!(image.compact(&options, &job));
        while !stop.is_there.load(Ordering::Relaxed) {
            if compaction.as_mut().poll(&mut context).is_ready() {
                assert!(stops >= 3, "it stopped {stops} times");
                return;
            }
        }
        file.hold_writes();
        let mut fills = pin!(write(&image, (5 * BLOCK, BLOCK), 55));
        assert!(fills.as_mut().poll(&mut context).is_pending());
        let held = file.take_writes();
        file.hold_discards();
        stop.left.store(usize::MAX, Ordering::Relaxed);
        for _ in 0..200 {
            drop(compaction.as_mut().poll(&mut context));
        }
        file.let_writes_go(held);
        block_on(fills).unwrap();
        for _ in 0..200 {
            if let Poll::Ready(done) = compaction.as_mut().poll(&mut context) {
                done.unwrap();
                break;
            }
            file.let_discards_go();
            file.hold_discards();
        }
        file.let_discards_go();
        expected[5 * BLOCK as usize..6 * BLOCK as usize].fill(55);
        ends_with(&file, &image, &expected);
        stops += 1;
    }
}

#[test]
fn clusters_that_move_take_no_space_for_what_they_do_not_hold() {
    for subclusters in [true, false] {
        let (file, image) = image(CLUSTER);
        // What lies before them goes, and they move there.
        for number in 0..WRITTEN / 2 {
            block_on(image.discard(2 * number * CLUSTER, CLUSTER)).unwrap();
        }
        block_on(image.flush()).unwrap();
        let end = file.memory.contents().len() as u64;
        file.give(0..end);
        let disk = read(&image);
        let options = CompactOptions {
            subclusters,
            ..CompactOptions::default()
        };
        let done = compact(&image, &options);
        assert!(done.moved_bytes > 0);
        assert!(read(&image) == disk);
        // Data, and few clusters of metadata; or whole clusters.
        let most = (WRITTEN / 2) * BLOCK + 6 * CLUSTER;
        let given = file.given_bytes();
        assert_eq!(given <= most, subclusters, "{given} of {most}");
        assert_eq!(plan(&image).subcluster_bytes == 0, subclusters);
        block_on(image.close()).unwrap();
        is_sound(&file);
    }
}

#[test]
fn less_space_than_the_budget_is_enough() {
    let clusters = 40;
    for defragment in [false, true] {
        let file = Sparse::new(Vec::new());
        let options = CreateOptions {
            cluster_size: CLUSTER,
            ..CreateOptions::new(clusters * CLUSTER)
        };
        block_on(create(file.clone(), None, &options)).unwrap();
        let image = Sparse::open(&file);
        // From the end of the disk to its beginning.
        for number in (0..clusters).rev() {
            block_on(write(&image, (number * CLUSTER, CLUSTER), number as u8 + 1)).unwrap();
        }
        block_on(image.flush()).unwrap();
        let half = clusters / 2 * CLUSTER;
        block_on(image.discard(half, half)).unwrap();
        block_on(image.flush()).unwrap();
        let (disk, before) = (read(&image), file.memory.contents().len() as u64);
        // Three clusters, and some for tables.
        file.leave(3 * (CLUSTER / BLOCK) as usize + 1);
        let options = CompactOptions {
            defragment,
            ..CompactOptions::default()
        };
        let done = compact(&image, &options);
        assert!(done.moved_bytes >= half, "{done:?}");
        assert!(done.file_bytes + half <= before + CLUSTER, "{done:?}");
        ends_with(&file, &image, &disk);
    }
}
