//! Clusters that hold what the layer below shows, or zeroes, lose their space when an image is
//! compacted: in all shapes, cut short at every write, and beside the requests of a guest.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{Durability, OpenOptions};
use cowslip::qcow2::check::Severity;
use cowslip::qcow2::compact::{CompactOptions, Compaction};
use cowslip::qcow2::create::{CreateOptions, Version, create};
use cowslip::qcow2::snapshot::NewSnapshot;
use cowslip::{Buf, BufMut, Error, Image, Job, Result};

use crate::support::crash::{Recorder, each_crash};
use crate::support::slow::SlowFile;
use crate::support::{block_on, our_check};

/// The file below.
struct Base(Arc<dyn BlockFile>);

impl Gate for Base {
    fn open(&self, _request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        Ok(Arc::clone(&self.0))
    }
}

fn opened(file: Arc<dyn BlockFile>, base: &Base) -> Image {
    opened_for(true, file, base)
}

fn opened_for(writable: bool, file: Arc<dyn BlockFile>, base: &Base) -> Image {
    let options = OpenOptions {
        writable,
        ..OpenOptions::default()
    };
    block_on(Image::open(file, options, base)).unwrap()
}

fn write(image: &Image, at: u64, bytes: &[u8]) {
    block_on(image.write(at, Buf::copy_of(bytes), Durability::Cached)).unwrap();
}

fn read(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(image.size() as usize);
    block_on(image.read(0, buf)).unwrap().to_vec()
}

fn wanted(zeroes: bool, dedupe_backing: bool) -> CompactOptions {
    CompactOptions {
        zeroes,
        dedupe_backing,
        ..CompactOptions::default()
    }
}

fn compact(image: &Image, zeroes: bool, dedupe_backing: bool) -> Result<Compaction> {
    block_on(image.compact(&wanted(zeroes, dedupe_backing), &Job::default()))
}

fn severities(bytes: Vec<u8>) -> Vec<Severity> {
    let mut findings = Vec::new();
    our_check(bytes, &mut findings).unwrap();
    findings.iter().map(|finding| finding.severity()).collect()
}

/// The last cluster ends behind the disk.
fn shapes() -> Vec<CreateOptions> {
    let plain = CreateOptions {
        cluster_size: 4096,
        ..CreateOptions::new((64 << 10) - 1536)
    };
    let with = |change: fn(&mut CreateOptions)| {
        let mut options = plain.clone();
        change(&mut options);
        options
    };
    vec![
        plain.clone(),
        with(|options| options.version = Version::V2),
        with(|options| options.cluster_size = 512),
        with(|options| {
            options.cluster_size = 16 << 10;
            options.extended_l2 = true;
            options.size = (256 << 10) - 5 * 512;
        }),
    ]
}

/// A byte of the base, other ones for each 512 bytes.
fn pattern(at: usize) -> u8 {
    (at / 512 % 250) as u8 + 1
}

/// An image over a base, which is shorter than it, and its disk. By eighths the image holds: what
/// the base does, zeroes, bytes of its own, all three by turns of 512 bytes; and the first of these
/// once more where the base is shorter, where zeroes are like what is below.
fn over_a_base(options: &CreateOptions) -> (Base, Vec<u8>, Vec<u8>) {
    let size = options.size as usize;
    let below = size / 2 + 512 * 3;
    let bytes: Vec<u8> = (0..below).map(pattern).collect();
    let base = Base(Arc::new(MemoryFile::new("base.raw", bytes.clone(), 1)));
    let file = Arc::new(MemoryFile::new("top", Vec::new(), 1));
    let of_top = CreateOptions {
        backing_file: Some("base.raw".to_string()),
        backing_format: Some("raw".to_string()),
        ..options.clone()
    };
    block_on(create(file.clone(), None, &of_top)).unwrap();
    let mut disk = bytes;
    disk.resize(size, 0);
    let image = opened(file.clone(), &base);
    let eighth = size / 8 / 512 * 512;
    for at in (0..size).step_by(512) {
        let end = size.min(at + 512);
        let kind = match at / eighth {
            3 => at / 512 % 3,
            7.. => 0,
            part => part % 4,
        };
        match kind {
            0 => {}
            1 => disk[at..end].fill(0),
            _ => disk[at..end].fill(251),
        }
    }
    // The rest of the base's half and the fifth eighth are not written.
    for part in [0..4 * eighth, 5 * eighth..size] {
        write(&image, part.start as u64, &disk[part]);
    }
    disk[4 * eighth..5 * eighth].fill(0);
    let shown = (4 * eighth..below).map(|at| (at, pattern(at)));
    shown.for_each(|(at, byte)| disk[at] = byte);
    block_on(image.flush()).unwrap();
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    (base, file.contents(), disk)
}

#[test]
fn what_is_below_or_zero_needs_no_space() {
    for options in shapes() {
        let (base, bytes, disk) = over_a_base(&options);
        let eighth = options.size / 8;
        let slack = 2 * options.cluster_size;
        let (mut sums, mut lens) = (Vec::new(), Vec::new());
        for (zeroes, dedupe) in [(false, false), (true, false), (false, true), (true, true)] {
            let what = format!("{options:?}: zeroes {zeroes}, dedupe {dedupe}");
            let file = Arc::new(MemoryFile::new("top", bytes.clone(), 1));
            let plan_of = |image: &Image| {
                block_on(image.compaction_plan(&wanted(zeroes, dedupe), &Job::default())).unwrap()
            };
            let image = opened_for(false, file.clone(), &base);
            let plan_of_reader = plan_of(&image);
            block_on(image.close()).unwrap();
            let image = opened(file.clone(), &base);
            let plan = plan_of(&image);
            assert_eq!(
                plan_of_reader.redundant_bytes, plan.redundant_bytes,
                "{what}"
            );
            assert_eq!(
                plan_of_reader.file_bytes_after, plan.file_bytes_after,
                "{what}"
            );
            let done = compact(&image, zeroes, dedupe).unwrap();
            assert!(read(&image) == disk, "{what}");
            assert_eq!(plan.redundant_bytes, done.redundant_bytes, "{what}");
            assert_eq!(plan.file_bytes_after, done.file_bytes, "{what}");
            // The session goes on.
            write(&image, 512, &[7; 1024]);
            block_on(image.close()).unwrap();
            let mut changed = disk.clone();
            changed[512..1536].fill(7);
            assert_eq!(severities(file.contents()), [], "{what}");
            let image = opened(file.clone(), &base);
            assert!(read(&image) == changed, "{what}");
            sums.push(done.redundant_bytes);
            lens.push(done.file_bytes);
        }
        let can_flag = options.version != Version::V2;
        assert_eq!(sums[0], 0);
        // The second, the sixth and the eighth, where the base has ended.
        let zero = if can_flag { 3 * eighth } else { 0 };
        assert!(sums[1] + 3 * slack >= zero, "{sums:?} {zero}");
        // The first and the eighth; the sixth.
        assert!(sums[2] + 3 * slack >= 3 * eighth, "{sums:?} {eighth}");
        assert!(sums[3] >= sums[1].max(sums[2]), "{sums:?}");
        if options.extended_l2 {
            // Every third subcluster of the fourth.
            let third = eighth / 3;
            assert!(sums[3] + slack >= 4 * eighth + third, "{sums:?}");
        }
        assert!(lens[3] + 2 * eighth < lens[0], "{lens:?}");
    }
}

#[test]
fn a_crash_while_clusters_lose_their_space_leaves_leaks_at_most() {
    for options in shapes() {
        let (base, start, disk) = over_a_base(&options);
        let file = Recorder::new(start.clone());
        let image = opened(file.clone(), &base);
        compact(&image, true, true).unwrap();
        let states = each_crash(&start, &file.ops(), |what, bytes| {
            let what = format!("{what}, {options:?}");
            let found = severities(bytes.to_vec());
            assert!(found.iter().all(|found| *found == Severity::Leak), "{what}");
            let file = Arc::new(MemoryFile::new("top", bytes.to_vec(), 1));
            let image = opened(file, &base);
            assert!(read(&image) == disk, "{what}");
        });
        assert!(states > 20, "{states}");
    }
}

#[test]
fn a_full_disk_at_any_moment_leaves_the_disk_as_it_was() {
    let options = &shapes()[3];
    let (base, start, disk) = over_a_base(options);
    for budget in 0.. {
        let file = Recorder::failing_after(start.clone(), budget);
        let image = opened(file.clone(), &base);
        let outcome = compact(&image, true, true);
        assert!(read(&image) == disk, "{budget}");
        drop(image);
        let found = severities(file.contents());
        assert!(
            found.iter().all(|found| *found == Severity::Leak),
            "{budget}"
        );
        let file = Arc::new(MemoryFile::new("top", file.contents(), 1));
        assert!(read(&opened(file, &base)) == disk, "{budget}");
        if outcome.is_ok() {
            break;
        }
    }
}

/// Snapshots keep what they show, and the clusters that they share keep their space.
#[test]
fn what_snapshots_share_stays() {
    let (base, bytes, disk) = over_a_base(&shapes()[0]);
    let file = Arc::new(MemoryFile::new("top", bytes, 1));
    let image = opened(file.clone(), &base);
    let new = NewSnapshot {
        name: "s".to_string(),
        date_sec: 0,
        date_nsec: 0,
    };
    block_on(image.create_snapshot(&new, &Job::default())).unwrap();
    let first: Vec<u8> = (0..4096).map(pattern).collect();
    // One table and one cluster become the disk's own again.
    write(&image, 0, &[9; 4096]);
    write(&image, 0, &first);
    let done = compact(&image, true, true).unwrap();
    assert_eq!(done.redundant_bytes, 4096);
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    assert_eq!(severities(file.contents()), []);
}

/// The guest writes a cluster that is being compared: the write waits, and wins.
#[test]
fn a_write_to_a_cluster_that_is_compared_wins() {
    let options = &shapes()[0];
    let (of_raw, bytes, mut disk) = over_a_base(options);
    let below = block_on(of_raw.0.len()).unwrap() as usize;
    let slow = SlowFile::new((0..below).map(pattern).collect());
    let base = Base(slow.clone());
    let file = Arc::new(MemoryFile::new("top", bytes, 1));
    let image = opened(file.clone(), &base);
    // Requests know where the clusters are.
    assert!(read(&image) == disk);
    write(&image, 0, &disk[..4096]);
    slow.hold_reads(true);
    let compacting = CompactOptions {
        dedupe_backing: true,
        ..CompactOptions::default()
    };
    let job = Job::default();
    let mut compaction = pin!(image.compact(&compacting, &job));
    let mut context = Context::from_waker(Waker::noop());
    while slow.waiting_reads() == 0 {
        assert!(compaction.as_mut().poll(&mut context).is_pending());
    }
    let data = Buf::copy_of(&[99; 512]);
    let mut late = pin!(image.write(512, data, Durability::Cached));
    for _ in 0..5 {
        assert!(late.as_mut().poll(&mut context).is_pending(), "it waits");
        assert!(compaction.as_mut().poll(&mut context).is_pending());
    }
    slow.hold_reads(false);
    slow.let_reads_go();
    let (mut compacted, mut written) = (false, false);
    while !(compacted && written) {
        if !written && let Poll::Ready(outcome) = late.as_mut().poll(&mut context) {
            outcome.unwrap();
            written = true;
        }
        if !compacted && let Poll::Ready(outcome) = compaction.as_mut().poll(&mut context) {
            assert!(outcome.unwrap().redundant_bytes > 0);
            compacted = true;
        }
    }
    disk[512..1024].fill(99);
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    assert_eq!(severities(file.contents()), []);
    let image = opened(file, &base);
    assert!(read(&image) == disk);
}

#[test]
fn an_image_without_a_base_drops_zeroes_alone() {
    for options in shapes() {
        let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
        block_on(create(file.clone(), None, &options)).unwrap();
        let nothing = Base(file.clone());
        let image = opened(file.clone(), &nothing);
        let size = options.size as usize;
        let mut disk = vec![5; size];
        disk[size / 4..size / 2].fill(0);
        write(&image, 0, &disk);
        let refused = compact(&image, true, true);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        let done = compact(&image, true, false).unwrap();
        let most = options.size / 4;
        let slack = 2 * options.cluster_size;
        assert!(done.redundant_bytes <= most && done.redundant_bytes + slack >= most);
        assert!(read(&image) == disk);
        block_on(image.close()).unwrap();
        assert_eq!(severities(file.contents()), []);
        let image = opened(file.clone(), &nothing);
        assert!(read(&image) == disk);
    }
}
