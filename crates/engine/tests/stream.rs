//! Images that are made in the order of their file: they read as their source, are sound and
//! without leaks, and take space for data alone.

use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;

use cowslip::disk::{Disk, MemoryDisk, ZeroOptions};
use cowslip::file::Durability;
use cowslip::file::host::HostGate;
use cowslip::file::memory::MemoryFile;
use cowslip::image::OpenOptions;
use cowslip::qcow2::CompressionType;
use cowslip::qcow2::create::{CreateOptions, Preallocation, Version};
use cowslip::qcow2::stream::{Sink, Stored, Streamed, stream};
use cowslip::{Buf, BufMut, Error, Image, Job, Result, Workers};

use crate::support::{block_on, our_check};

/// Keeps the bytes; fails after a number of pushes.
struct Collector {
    bytes: Vec<u8>,
    pushes_left: usize,
}

impl Collector {
    fn new() -> Collector {
        Collector {
            bytes: Vec::new(),
            pushes_left: usize::MAX,
        }
    }
}

impl Sink for Collector {
    fn push(&mut self, bytes: Vec<u8>) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        assert!(!bytes.is_empty(), "a push has bytes");
        if self.pushes_left == 0 {
            return Box::pin(ready(Err(Error::invalid("the sink is full"))));
        }
        self.pushes_left -= 1;
        self.bytes.extend_from_slice(&bytes);
        Box::pin(ready(Ok(())))
    }
}

fn streamed(source: &dyn Disk, options: &CreateOptions, stored: Stored) -> (Vec<u8>, Streamed) {
    let mut sink = Collector::new();
    let job = Job::default();
    let way = (&Workers::default(), &job);
    let done = block_on(stream(source, (options, stored), &mut sink, way)).unwrap();
    assert_eq!(done.file_bytes, sink.bytes.len() as u64);
    let (first, rest) = sink.bytes.split_at_mut(done.header.len());
    assert!(first.iter().all(|byte| *byte == 0), "zeroes, so far");
    assert!(rest.len() as u64 + done.header.len() as u64 >= options.cluster_size);
    first.copy_from_slice(&done.header);
    let progress = job.progress();
    assert!(progress.done_bytes <= progress.total_bytes);
    (sink.bytes, done)
}

fn read(disk: &dyn Disk) -> Vec<u8> {
    let buf = BufMut::zeroed(disk.size() as usize);
    block_on(disk.read(0, buf.into())).unwrap().to_vec()
}

/// Numbers of a generator (xorshift).
fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// A disk with noise, text, zeroes that are stored, and holes.
fn disk(size: u64, seed: u64) -> MemoryDisk {
    let disk = MemoryDisk::new("source", size);
    let mut next = numbers(seed);
    for _ in 0..24 {
        if size == 0 {
            break;
        }
        let at = next() % size;
        let len = (next() % 200_000).min(size - at);
        let bytes: Vec<u8> = match next() % 4 {
            0 => vec![0; len as usize],
            1 => (0..len).map(|i| (i / 1000) as u8).collect(),
            _ => (0..len).map(|_| next() as u8).collect(),
        };
        let write = disk.write(at, Buf::from(bytes).into(), Durability::Cached);
        block_on(write).unwrap();
    }
    disk
}

fn check(source: &dyn Disk, options: &CreateOptions, stored: Stored) -> Streamed {
    let shown = format!("{options:?} {stored:?} {}", source.size());
    let (bytes, done) = streamed(source, options, stored);
    let mut findings = Vec::new();
    our_check(bytes.clone(), &mut findings).unwrap();
    assert_eq!(findings, [], "{shown}");
    let file = Arc::new(MemoryFile::new("made", bytes, 1));
    let gate = HostGate::default();
    let image = block_on(Image::open(file, OpenOptions::default(), &gate)).unwrap();
    let mut expected = read(source);
    expected.resize(expected.len().next_multiple_of(512), 0);
    assert!(read(&image) == expected, "{shown}");
    let mut data_bytes = 0;
    for extent in block_on(image.extents(0, image.size(), usize::MAX)).unwrap() {
        let range = extent.start as usize..(extent.start + extent.len) as usize;
        if !extent.zero {
            data_bytes += extent.len;
            for cluster in expected[range].chunks(options.cluster_size as usize) {
                assert!(cluster.iter().any(|byte| *byte != 0), "{shown}: {extent:?}");
            }
        }
    }
    assert_eq!(done.data_bytes.next_multiple_of(512), data_bytes, "{shown}");
    block_on(image.close()).unwrap();
    done
}

/// Options of all shapes, for disks of any size.
fn shapes() -> Vec<CreateOptions> {
    let shape = |cluster_size, change: fn(&mut CreateOptions)| {
        let mut options = CreateOptions {
            cluster_size,
            ..CreateOptions::new(0)
        };
        change(&mut options);
        options
    };
    vec![
        shape(65536, |_| {}),
        shape(512, |_| {}),
        shape(512, |options| options.version = Version::V2),
        shape(2 << 20, |_| {}),
        shape(4096, |options| options.refcount_bits = 1),
        shape(4096, |options| options.refcount_bits = 64),
        shape(16384, |options| options.extended_l2 = true),
        shape(65536, |options| {
            options.compression_type = CompressionType::Zstd;
            options.refcount_bits = 4;
        }),
        shape(2 << 20, |options| options.extended_l2 = true),
    ]
}

#[test]
fn images_of_all_shapes_read_as_their_source() {
    for (number, options) in shapes().iter().enumerate() {
        for size in [0, 512, 70_000, (5 << 20) + 1536] {
            let source = disk(size, size + number as u64);
            for stored in [Stored::Plain, Stored::Compressed] {
                check(&source, options, stored);
            }
        }
    }
}

/// Compressed clusters of a few bytes share clusters of the file until a count is full.
#[test]
fn counts_of_shared_clusters_stay_within_their_width() {
    let size = 8 << 20;
    let source = MemoryDisk::new("source", size);
    let bytes: Vec<u8> = (0..size).map(|at| (at >> 12) as u8 | 1).collect();
    block_on(source.write(0, Buf::from(bytes).into(), Durability::Cached)).unwrap();
    let mut before = u64::MAX;
    for refcount_bits in [1, 2, 4, 8] {
        let options = CreateOptions {
            cluster_size: 4096,
            refcount_bits,
            ..CreateOptions::new(0)
        };
        let done = check(&source, &options, Stored::Compressed);
        assert!(done.stored_bytes < before, "{refcount_bits}");
        before = done.stored_bytes;
    }
    assert!(before < 200_000, "{before}");
}

#[test]
fn zeroes_and_holes_take_no_space() {
    let source = MemoryDisk::new("source", 64 << 30);
    let write = |at, byte| {
        let bytes = Buf::from(vec![byte; 100]).into();
        block_on(source.write(at, bytes, Durability::Cached)).unwrap();
    };
    write(7, 1);
    write(48 << 30, 2);
    write(5 << 20, 0);
    block_on(source.zero(9 << 20, 1 << 20, ZeroOptions::default())).unwrap();
    let (bytes, done) = streamed(&source, &CreateOptions::new(0), Stored::Plain);
    assert_eq!(done.data_bytes, 2 * 65536);
    assert_eq!(done.stored_bytes, 2 * 65536);
    // The header, two tables, the L1 table, counts.
    assert_eq!(bytes.len(), 65536 * (1 + 2 + 2 + 1 + 2));
    let mut findings = Vec::new();
    our_check(bytes, &mut findings).unwrap();
    assert_eq!(findings, []);
}

#[test]
fn what_cannot_be_is_refused_and_failures_are_passed_on() {
    let source = disk(1 << 20, 5);
    let attempt = |change: fn(&mut CreateOptions), sink: &mut Collector, job: &Job| {
        let mut options = CreateOptions::new(0);
        change(&mut options);
        let way = (&Workers::default(), job);
        block_on(stream(&source, (&options, Stored::Plain), sink, way)).unwrap_err()
    };
    let refused = |change, why: &str| {
        let mut sink = Collector::new();
        let error = attempt(change, &mut sink, &Job::default()).to_string();
        assert!(error.contains(why), "{error}");
        assert!(sink.bytes.is_empty());
    };
    refused(|o| o.backing_file = Some("b".to_string()), "a backing file");
    refused(|o| o.data_file = Some("d".to_string()), "data file");
    refused(
        |o| o.preallocation = Preallocation::Metadata,
        "preallocated",
    );
    refused(|o| o.cluster_size = 3, "Cluster size must be");
    let mut full = Collector::new();
    full.pushes_left = 0;
    let error = attempt(|_| {}, &mut full, &Job::default());
    assert_eq!(error.to_string(), "the sink is full");
    let cancelled = Job::default();
    cancelled.cancel();
    let error = attempt(|_| {}, &mut Collector::new(), &cancelled);
    assert!(matches!(error, Error::Cancelled));
}
