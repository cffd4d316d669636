//! Compaction in place: of images of all shapes against a model, cut short at every write, by a
//! crash, by the job's being cancelled, and by a full disk, and beside requests.

mod defragment;
mod full;
mod shared;

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use cowslip::file::BlockFile;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{Durability, OpenOptions};
use cowslip::job::{Attendant, Moment, Stage};
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::check::Severity;
use cowslip::qcow2::compact::{CompactOptions, Compaction, CompactionPlan};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image, IoVec, Job, Result};
use cowslip_queue::Pending;

use crate::snapshots::{Model, Random, SHAPES, checked_clean, made, open, read};
use crate::support::crash::{Op, Recorder, each_crash};
use crate::support::slow::{HELD, NoFiles, SlowFile};
use crate::support::{block_on, our_check, peers_are_installed};

fn compact(image: &Image) -> Result<Compaction> {
    block_on(image.compact(&CompactOptions::default(), &Job::default()))
}

/// A small budget, so that there are several batches.
fn thrifty(cluster_bytes: u64) -> CompactOptions {
    CompactOptions {
        budget_bytes: 3 * cluster_bytes,
        ..CompactOptions::default()
    }
}

fn cluster_bytes(image: &Image) -> u64 {
    let header = image.layers()[0].header.clone().unwrap();
    header.geometry().cluster_bytes()
}

/// A disk whose first half was discarded after its second half was written.
fn half_empty(create_options: &CreateOptions) -> (Vec<u8>, Vec<u8>) {
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    block_on(create(file.clone(), None, create_options)).unwrap();
    let image = open(file.clone());
    let size = create_options.size;
    let mut disk = vec![0; size as usize];
    for (at, byte) in disk.iter_mut().enumerate() {
        *byte = (at / 100 % 250) as u8 | 1;
    }
    block_on(image.write(0, Buf::copy_of(&disk), Durability::Cached)).unwrap();
    block_on(image.flush()).unwrap();
    block_on(image.discard(0, size / 2)).unwrap();
    disk[..size as usize / 2].fill(0);
    block_on(image.close()).unwrap();
    (file.contents(), disk)
}

fn shapes() -> Vec<CreateOptions> {
    let plain = CreateOptions {
        cluster_size: 4096,
        ..CreateOptions::new(96 << 10)
    };
    vec![
        plain.clone(),
        CreateOptions {
            cluster_size: 512,
            size: 24 << 10,
            ..plain.clone()
        },
        CreateOptions {
            cluster_size: 16 << 10,
            extended_l2: true,
            size: 300 << 10,
            ..plain
        },
    ]
}

#[test]
fn what_lies_behind_moves_before_and_the_file_is_cut() {
    for create_options in shapes() {
        let (bytes, disk) = half_empty(&create_options);
        let file = Arc::new(MemoryFile::new("image", bytes.clone(), 1));
        let image = open(file.clone());
        let (options, job) = (thrifty(cluster_bytes(&image)), Job::default());
        let plan = block_on(image.compaction_plan(&options, &job)).unwrap();
        let done = block_on(image.compact(&options, &job));
        let done = done.unwrap();
        assert!(read(&image) == disk);
        block_on(image.close()).unwrap();
        let len = file.contents().len() as u64;
        assert_eq!(done.file_bytes_before, bytes.len() as u64);
        assert_eq!((done.file_bytes, plan.file_bytes_after), (len, len));
        assert_eq!(done.moved_bytes, plan.moved_bytes);
        assert!(plan.moved_bytes > 0 && plan.file_bytes == bytes.len() as u64);
        assert_eq!(plan.used_bytes, len, "nothing in it is free");
        checked_clean(&file, "compacted");
        let image = open(file.clone());
        assert!(read(&image) == disk);
        // There is nothing left to do.
        let again = compact(&image).unwrap();
        assert_eq!((again.moved_bytes, again.file_bytes), (0, len));
    }
}

#[test]
fn images_of_all_shapes_keep_what_they_hold() {
    if !peers_are_installed() {
        return;
    }
    among_steps((3, 31), thrifty, |what, before, planned, done| {
        assert!(done.file_bytes <= before, "{what}");
        assert_eq!(
            done.file_bytes, planned.file_bytes_after,
            "{what}: {planned:?}"
        );
    });
}

/// Compacts images of all shapes among the steps of a model; `judge` gets the length of the file
/// before, the plan, and what was done.
fn among_steps(
    (seeds, factor): (u64, u64),
    options_of: fn(u64) -> CompactOptions,
    judge: impl Fn(&str, u64, CompactionPlan, Compaction),
) {
    for (create_options, size) in SHAPES {
        for seed in 0..seeds {
            let what = format!("{create_options}, seed {seed}");
            let file = Arc::new(MemoryFile::new("image", made(create_options, size), 1));
            let random = &mut Random(seed * factor + size);
            let mut model = Model::new(size);
            for _ in 0..3 {
                let image = open(file.clone());
                for _ in 0..25 {
                    model.step(&image, random);
                }
                let before = file.contents().len() as u64;
                let options = options_of(cluster_bytes(&image));
                let job = Job::default();
                let planned = block_on(image.compaction_plan(&options, &job)).unwrap();
                let done = block_on(image.compact(&options, &job)).unwrap();
                judge(&what, before, planned, done);
                assert!(read(&image) == model.disk, "{what}");
                for _ in 0..5 {
                    model.step(&image, random);
                }
                block_on(image.close()).unwrap();
                checked_clean(&file, &what);
                model.judge(&file, &what);
            }
        }
    }
}

/// Nothing but leaks, and the disk reads as it did; a further compaction ends well.
fn judge(what: &str, bytes: &[u8], disk: &[u8]) {
    let mut findings = Vec::new();
    our_check(bytes.to_vec(), &mut findings).unwrap();
    for finding in findings {
        assert_eq!(finding.severity(), Severity::Leak, "{what}: {finding}");
    }
    let file = Arc::new(MemoryFile::new("image", bytes.to_vec(), 1));
    let image = open(file.clone());
    assert!(read(&image) == disk, "{what}");
    compact(&image).unwrap();
    assert!(read(&image) == disk, "{what}: compacted");
    block_on(image.close()).unwrap();
    checked_clean(&file, what);
}

#[test]
fn a_crash_at_any_moment_leaves_leaks_at_most() {
    for create_options in shapes() {
        let (start, disk) = half_empty(&create_options);
        let file = Recorder::new(start.clone());
        let image = open(file.clone());
        let options = thrifty(cluster_bytes(&image));
        block_on(image.compact(&options, &Job::default())).unwrap();
        let states = each_crash(&start, &file.ops(), |what, bytes| judge(what, bytes, &disk));
        assert!(states > 50, "{states}");
    }
}

#[test]
fn a_full_disk_at_any_moment_leaves_what_there_was() {
    for create_options in shapes() {
        let (start, disk) = half_empty(&create_options);
        let options = thrifty(create_options.cluster_size);
        outlasts_a_full_disk((&start, &disk), &options, 0..);
    }
}

/// Compacts a file with a disk that fails after each of these numbers of operations, up to one that
/// is enough.
fn outlasts_a_full_disk(
    (start, disk): (&[u8], &[u8]),
    options: &CompactOptions,
    budgets: impl Iterator<Item = usize>,
) {
    let mut failures = 0;
    for budget in budgets {
        let file = Recorder::failing_after(start.to_vec(), budget);
        let image = open(file.clone());
        let outcome = block_on(image.compact(options, &Job::default()));
        assert!(read(&image) == disk, "{budget}");
        drop(image);
        judge(&format!("{budget}"), &file.contents(), disk);
        match outcome {
            Ok(_) => break,
            Err(_) => failures += 1,
        }
    }
    assert!(failures > 10, "{failures}");
}

/// Cancels a job when it has asked so often whether it may go on.
struct CancelAt {
    left: AtomicUsize,
    job: std::sync::OnceLock<Job>,
}

struct Attended(Arc<CancelAt>);

impl Attendant for Attended {
    fn pace(&self, _bytes: u64) -> Option<Moment> {
        if self.0.left.fetch_sub(1, Ordering::Relaxed) == 1
            && let Some(job) = self.0.job.get()
        {
            job.cancel();
        }
        None
    }
}

/// A job that is cancelled when it has asked so often whether it may go on.
fn cancelled_at(left: usize) -> (Job, Arc<CancelAt>) {
    let attendant = Arc::new(CancelAt {
        left: AtomicUsize::new(left),
        job: std::sync::OnceLock::new(),
    });
    let job = Job::attended(Attended(attendant.clone()));
    attendant.job.set(job.clone()).unwrap();
    (job, attendant)
}

#[test]
fn a_compaction_that_is_cancelled_gives_back_what_it_has_emptied() {
    let create_options = &shapes()[0];
    let (start, disk) = half_empty(create_options);
    let mut lens = Vec::new();
    for left in 1.. {
        let file = Arc::new(MemoryFile::new("image", start.clone(), 1));
        let image = open(file.clone());
        let (job, _attendant) = cancelled_at(left);
        let outcome = block_on(image.compact(&thrifty(4096), &job));
        assert!(read(&image) == disk, "{left}");
        // The session goes on.
        let data = Buf::copy_of(&[7; 4096]);
        block_on(image.write(0, data, Durability::Cached)).unwrap();
        block_on(image.close()).unwrap();
        checked_clean(&file, "cancelled");
        lens.push(file.contents().len());
        match outcome {
            Ok(_) => break,
            Err(error) => assert!(matches!(error, Error::Cancelled), "{error}"),
        }
    }
    assert!(lens.len() > 3);
    assert!(lens.is_sorted_by(|a, b| a >= b), "{lens:?}");
}

/// One that ends before it has begun does not cut the file either: for that it would have to check
/// it, while changes wait.
#[test]
fn a_compaction_that_is_cancelled_before_it_begins_changes_nothing() {
    let (mut start, _) = half_empty(&shapes()[0]);
    start.resize(start.len() + 8 * 4096, 0);
    let file = Arc::new(MemoryFile::new("image", start.clone(), 1));
    let image = open(file.clone());
    let job = Job::default();
    job.cancel();
    let outcome = block_on(image.compact(&thrifty(4096), &job));
    assert!(matches!(outcome, Err(Error::Cancelled)), "{outcome:?}");
    assert_eq!(file.contents().len(), start.len());
    block_on(image.close()).unwrap();
    checked_clean(&file, "cancelled");
}

/// Where the first refcount block is.
fn first_block(bytes: &[u8]) -> usize {
    let header = cowslip::qcow2::header::Header::parse(bytes, u64::MAX, "image").unwrap();
    let table = header.refcount_table_offset as usize;
    u64::from_be_bytes(bytes[table..table + 8].try_into().unwrap()) as usize
}

#[test]
fn leaks_are_freed() {
    let (bytes, disk) = half_empty(&shapes()[0]);
    let block = first_block(&bytes);
    let mut leaky = bytes.clone();
    let last = bytes.len() / 4096;
    leaky.resize(bytes.len() + 8 * 4096, 9);
    for cluster in [last + 1, last + 5] {
        leaky[block + 2 * cluster + 1] = 3;
    }
    let file = Arc::new(MemoryFile::new("image", leaky, 1));
    let image = open(file.clone());
    let done = compact(&image).unwrap();
    assert_eq!(done.leaked_bytes, 2 * 4096);
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    checked_clean(&file, "leaky");
    assert!(file.contents().len() < bytes.len());
}

/// While all counts are checked and all tables are read, requests end without the compaction's
/// being polled; what they take is no leak.
#[test]
fn requests_go_on_while_tables_are_read() {
    const CLUSTER: usize = 512;
    let create_options = CreateOptions {
        cluster_size: CLUSTER as u64,
        size: 2 << 20,
        ..shapes()[1].clone()
    };
    let (mut bytes, mut disk) = half_empty(&create_options);
    let block = first_block(&bytes);
    let free = (0..256).filter(|cluster| bytes[block + 2 * cluster + 1] == 0);
    let leaks: Vec<usize> = free.step_by(40).collect();
    assert!(leaks.len() > 2);
    for cluster in &leaks {
        bytes[block + 2 * cluster + 1] = 1;
    }
    let file = Arc::new(MemoryFile::new("image", bytes, 1));
    let image = open(file.clone());
    let (options, job) = (CompactOptions::default(), Job::default());
    let mut compaction = pin!(image.compact(&options, &job));
    let mut context = Context::from_waker(Waker::noop());
    let mut requests = 0;
    let done = loop {
        if let Poll::Ready(outcome) = compaction.as_mut().poll(&mut context) {
            break outcome.unwrap();
        }
        if job.progress().stage != Stage::Begin || job.progress().done_bytes == 0 {
            continue;
        }
        // It takes a cluster, gives one up, and writes both back.
        let (taken, given) = (requests * 7 % 2000, 4095 - requests * 11 % 2000);
        disk[taken * CLUSTER..][..CLUSTER].fill(7);
        disk[given * CLUSTER..][..CLUSTER].fill(0);
        let mut request = pin!(async {
            let data = Buf::copy_of(&[7; CLUSTER]);
            let at = (taken * CLUSTER) as u64;
            image.write(at, data, Durability::Cached).await?;
            image
                .discard((given * CLUSTER) as u64, CLUSTER as u64)
                .await?;
            image.flush().await
        });
        let ended = (0..100).find_map(|_| match request.as_mut().poll(&mut context) {
            Poll::Ready(ended) => Some(ended),
            Poll::Pending => None,
        });
        ended.expect("it waits for nothing").unwrap();
        requests += 1;
    };
    assert!(requests > 5, "{requests}");
    assert_eq!(done.leaked_bytes, (leaks.len() * CLUSTER) as u64);
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    checked_clean(&file, "beside requests");
}

/// Counts of 64 bits may be higher than a change of them can say.
#[test]
fn leaks_of_any_height_are_freed() {
    let create_options = CreateOptions {
        refcount_bits: 64,
        ..shapes()[0].clone()
    };
    let (bytes, disk) = half_empty(&create_options);
    let block = first_block(&bytes);
    let mut leaky = bytes.clone();
    let last = bytes.len() / 4096;
    leaky.resize(bytes.len() + 8 * 4096, 9);
    let heights = [(1 << 63) - 1, 1 << 63, (1 << 63) + 1, u64::MAX];
    for (height, cluster) in heights.into_iter().zip(last + 1..) {
        leaky[block + 8 * cluster..][..8].copy_from_slice(&u64::to_be_bytes(height));
    }
    // A cluster in use is counted too often, too.
    let used = (0..last)
        .rev()
        .find(|cluster| leaky[block + 8 * cluster + 7] == 1);
    leaky[block + 8 * used.unwrap()..][..8].copy_from_slice(&u64::MAX.to_be_bytes());
    let file = Arc::new(MemoryFile::new("image", leaky, 1));
    let image = open(file.clone());
    let done = compact(&image).unwrap();
    assert_eq!(done.leaked_bytes, 4 * 4096);
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    checked_clean(&file, "leaky");
}

#[test]
fn a_damaged_image_is_left_alone() {
    let (mut bytes, _) = half_empty(&shapes()[0]);
    let block = first_block(&bytes);
    let last = bytes.len() / 4096 - 1;
    bytes[block + 2 * last + 1] = 0;
    let file = Arc::new(MemoryFile::new("image", bytes.clone(), 1));
    let image = open(file.clone());
    let refused = compact(&image);
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    assert_eq!(file.contents().len(), bytes.len());
}

#[test]
fn a_target_length_is_enough() {
    let (bytes, disk) = half_empty(&shapes()[0]);
    let file = Arc::new(MemoryFile::new("image", bytes.clone(), 1));
    let image = open(file.clone());
    let options = CompactOptions {
        target_bytes: Some(bytes.len() as u64 - 3 * 4096),
        ..CompactOptions::default()
    };
    let done = block_on(image.compact(&options, &Job::default())).unwrap();
    assert_eq!(done.moved_bytes, 3 * 4096);
    assert_eq!(done.file_bytes, bytes.len() as u64 - 3 * 4096);
    assert!(read(&image) == disk);
}

/// The copy of a cluster is under way when the guest reads it, writes it, and writes elsewhere.
#[test]
fn requests_go_on_beside_a_move_and_a_write_wins() {
    let (bytes, _) = half_empty(&shapes()[0]);
    let file = SlowFile::new(bytes);
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
    let last = (96 << 10) - 4096;
    let write = |offset, byte| {
        let data = Buf::copy_of(&[byte; 4096]);
        image.write(offset, data, Durability::Cached)
    };
    let read_at = |offset| block_on(image.read(offset, BufMut::zeroed(4096))).unwrap();
    // The clusters' bytes hold their copies up.
    for offset in ((48 << 10)..(96 << 10)).step_by(4096) {
        let mut held = pin!(write(offset, HELD));
        let mut context = Context::from_waker(Waker::noop());
        while file.waiting() == 0 {
            assert!(held.as_mut().poll(&mut context).is_pending());
        }
        file.let_go();
        block_on(held).unwrap();
    }
    let mut context = Context::from_waker(Waker::noop());
    let job = Job::default();
    let options = CompactOptions::default();
    let mut compaction = pin!(image.compact(&options, &job));
    while file.waiting() == 0 {
        assert!(compaction.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(read_at(last)[..], [HELD; 4096], "reads find the old place");
    block_on(write(0, 5)).unwrap();
    let mut late = pin!(write(last, 6));
    for _ in 0..5 {
        assert!(late.as_mut().poll(&mut context).is_pending(), "it waits");
        assert!(compaction.as_mut().poll(&mut context).is_pending());
    }
    let mut context = Context::from_waker(Waker::noop());
    let (mut compacted, mut written) = (false, false);
    while !(compacted && written) {
        file.let_go();
        if !compacted && let Poll::Ready(outcome) = compaction.as_mut().poll(&mut context) {
            outcome.unwrap();
            compacted = true;
        }
        if !written && let Poll::Ready(outcome) = late.as_mut().poll(&mut context) {
            outcome.unwrap();
            written = true;
        }
    }
    assert_eq!(read_at(last)[..], [6; 4096]);
    assert_eq!(read_at(0)[..], [5; 4096]);
    block_on(image.close()).unwrap();
    checked_clean(&file.memory, "beside requests");
    // The guest's new cluster lay behind all others, and has moved, too.
    let len = file.memory.contents().len() as u64;
    assert_eq!(
        len,
        18 * 4096,
        "5 of metadata, 12 of the second half, 1 that is new"
    );
}

/// Lets one piece of work begin, and no further one until it is to go on.
#[derive(Clone, Default)]
struct Pausing(Arc<AtomicUsize>, Arc<AtomicUsize>);

impl Attendant for Pausing {
    fn pace(&self, bytes: u64) -> Option<Moment> {
        let Pausing(begun, goes_on) = self.clone();
        if bytes == 0
            || goes_on.load(Ordering::Relaxed) == 1
            || begun.fetch_add(1, Ordering::Relaxed) == 0
        {
            return None;
        }
        Some(Box::pin(std::future::poll_fn(move |_| {
            match goes_on.load(Ordering::Relaxed) {
                1 => Poll::Ready(()),
                _ => Poll::Pending,
            }
        })))
    }
}

/// A compaction that is paused, or keeps a pace, ends the moves that are under way: the guest does
/// not wait for its user.
#[test]
fn a_compaction_that_is_paused_keeps_no_request_waiting() {
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    block_on(create(file.clone(), None, &shapes()[0])).unwrap();
    let image = open(file.clone());
    let mut disk = vec![5; 96 << 10];
    block_on(image.write(0, Buf::copy_of(&disk), Durability::Cached)).unwrap();
    block_on(image.flush()).unwrap();
    // Places that do not follow on each other: each of the last six clusters moves by itself.
    for at in (0..12 * 4096).step_by(2 * 4096) {
        block_on(image.discard(at as u64, 4096)).unwrap();
        disk[at..at + 4096].fill(0);
    }
    block_on(image.close()).unwrap();
    let file = SlowFile::new(file.contents());
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
    let first = 18 * 4096;
    let data = Buf::copy_of(&[HELD; 4096]);
    let mut held = pin!(image.write(first as u64, data, Durability::Cached));
    let mut context = Context::from_waker(Waker::noop());
    assert!(held.as_mut().poll(&mut context).is_pending());
    file.let_go();
    block_on(held).unwrap();
    let attendant = Pausing::default();
    let job = Job::attended(attendant.clone());
    let options = CompactOptions::default();
    let mut compaction = pin!(image.compact(&options, &job));
    for _ in 0..1000 {
        assert!(compaction.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(
        file.waiting(),
        1,
        "the first is being copied, and the next may not begin"
    );
    let data = Buf::copy_of(&[6; 4096]);
    let mut late = pin!(image.write(first as u64, data, Durability::Cached));
    assert!(late.as_mut().poll(&mut context).is_pending());
    file.let_go();
    let is_written = (0..20).any(|_| {
        assert!(
            compaction.as_mut().poll(&mut context).is_pending(),
            "it is paused"
        );
        late.as_mut().poll(&mut context).is_ready()
    });
    assert!(is_written, "it waits for a job that is paused");
    attendant.1.store(1, Ordering::Relaxed);
    loop {
        file.let_go();
        if let Poll::Ready(outcome) = compaction.as_mut().poll(&mut context) {
            assert_eq!(outcome.unwrap().moved_bytes, 6 * 4096);
            break;
        }
    }
    disk[first..first + 4096].fill(6);
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    judge("paused", &file.memory.contents(), &disk);
}

/// The copies are under way when the compaction is dropped: what they may still write is not used
/// again in this session, neither by the guest nor by another compaction.
#[test]
fn a_compaction_that_is_dropped_leaves_leaks_at_most() {
    let (bytes, mut disk) = half_empty(&shapes()[0]);
    let file = SlowFile::new(bytes);
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
    let last = disk.len() - 4096;
    let mut held = pin!(image.write(last as u64, Buf::copy_of(&[HELD; 4096]), Durability::Cached));
    let mut context = Context::from_waker(Waker::noop());
    assert!(held.as_mut().poll(&mut context).is_pending());
    file.let_go();
    block_on(held).unwrap();
    disk[last..].fill(HELD);
    {
        // One cluster at a time, the last one first.
        let options = CompactOptions {
            budget_bytes: 4096,
            ..CompactOptions::default()
        };
        let job = Job::default();
        let mut compaction = Box::pin(image.compact(&options, &job));
        while file.waiting() == 0 {
            assert!(compaction.as_mut().poll(&mut context).is_pending());
        }
    }
    let places: Vec<_> = file.held();
    assert_eq!(places.len(), 1);
    for at in (0..disk.len()).step_by(4096).take(6) {
        let byte = at as u8 / 16 + 1;
        let data = Buf::copy_of(&[byte; 4096]);
        block_on(image.write(at as u64, data, Durability::Cached)).unwrap();
        disk[at..at + 4096].fill(byte);
    }
    compact(&image).unwrap();
    // What was on its way arrives late.
    file.let_go();
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    let bytes = file.memory.contents();
    let now = file.memory.contents().len() as u64;
    assert!(
        places[0] < now,
        "its place is not cut off: {places:?}, {now}"
    );
    judge("dropped", &bytes, &disk);
}
