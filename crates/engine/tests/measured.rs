//! A copy fits where `measure` said that it would: into a device of exactly that length, which
//! keeps the bytes that it had, and into a file that can become exactly that long.

use std::io;
use std::sync::Arc;

use cowslip::convert::{Failure, Form, Options, Order, Plan, Sources, TargetContent};
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Capabilities, Durability, Space};
use cowslip::image::{Format, OpenOptions};
use cowslip::measure::{geometry, measure};
use cowslip::qcow2::create::{CreateOptions, Preallocation, Version, create};
use cowslip::qcow2::header::{CompressionType, Header};
use cowslip::{Buf, BufMut, Image, IoVec, Job};
use cowslip_block::random::Random;
use cowslip_queue::Pending;

use crate::support::crash::{Recorder, each_crash};
use crate::support::slow::NoFiles;
use crate::support::{block_on, our_check};

/// How a file is limited to the measured length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    /// It has that length, and held something else.
    Device,
    /// It grows up to there, as under a quota.
    Quota,
}

/// A file that has no space beyond a length.
#[derive(Debug)]
struct Bounded {
    memory: MemoryFile,
    capabilities: Capabilities,
    limit: u64,
}

impl Bounded {
    fn new(kind: Limit, limit: u64) -> Arc<Bounded> {
        let bytes = match kind {
            Limit::Device => vec![0xa5; limit as usize],
            Limit::Quota => Vec::new(),
        };
        let memory = MemoryFile::new("target", bytes, 1);
        let capabilities = Capabilities {
            extends_with_zeroes: kind == Limit::Quota,
            ..memory.capabilities().clone()
        };
        Arc::new(Bounded {
            memory,
            capabilities,
            limit,
        })
    }

    fn within(&self, end: u64) -> io::Result<()> {
        match end <= self.limit {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(28)),
        }
    }
}

impl BlockFile for Bounded {
    cowslip_block::forward_to_file!(memory: name, len, read, discard, extents, flush, allocated_bytes);
    cowslip_block::file_from_fields!(capabilities);
    fn write(&self, offset: u64, data: IoVec, how: Durability) -> Pending<io::Result<()>> {
        let len = data.len();
        match self.within(offset + len as u64) {
            Ok(()) => self.memory.write(offset, data, how),
            failed => Pending::ready(failed),
        }
    }
    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        match self.within(offset + len) {
            Ok(()) => self.memory.zero(offset, len, space),
            failed => Pending::ready(failed),
        }
    }
    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        match self.within(offset + len) {
            Ok(()) => self.memory.allocate(offset, len),
            failed => Pending::ready(failed),
        }
    }
    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        let may_change = self.capabilities.extends_with_zeroes;
        match self.within(len) {
            Ok(()) if may_change => self.memory.set_len(len),
            Ok(()) => Pending::ready(Err(io::ErrorKind::InvalidInput.into())),
            failed => Pending::ready(failed),
        }
    }
}

/// Bytes that a codec makes much, little or nothing of.
fn bytes(random: &mut Random, len: u64) -> Vec<u8> {
    let noisy = random.below(5) * len / 4;
    let mut bytes = vec![random.below(255) as u8 + 1; len as usize];
    for byte in &mut bytes[..noisy as usize] {
        *byte = random.below(256) as u8;
    }
    bytes
}

async fn open(file: Arc<dyn BlockFile>, format: Format) -> Image {
    let options = OpenOptions {
        format: Some(format),
        writable: true,
        ..OpenOptions::default()
    };
    Image::open(file, options, &NoFiles).await.unwrap()
}

/// A disk with data here and there, or everywhere.
async fn source(seed: &mut Random, size: u64) -> Image {
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("source", Vec::new(), 1));
    let format = seed.pick(&[Format::Raw, Format::Qcow2, Format::Qcow2]);
    match format {
        Format::Raw => file.set_len(size).await.unwrap(),
        _ => {
            let options = CreateOptions {
                cluster_size: 1 << (9 + seed.below(8)),
                ..CreateOptions::new(size)
            };
            create(Arc::clone(&file), None, &options).await.unwrap();
        }
    }
    let image = open(file, format).await;
    let whole = seed.one_in(3);
    let mut at = 0;
    while at < size {
        let len = (seed.below(200) + 1).pow(2) * 16;
        let len = len.next_multiple_of(512).min(size - at);
        if whole || seed.one_in(2) {
            let data = Buf::from(bytes(seed, len));
            let written = image.write(at, data, Durability::Cached).await;
            written.unwrap();
        }
        at += len;
    }
    image
}

/// The options of a target that has a few hundred clusters at most, or thousands of the smallest.
fn shape(seed: &mut Random) -> CreateOptions {
    let cluster_bits = 9 + seed.below(13);
    let extended_l2 = cluster_bits >= 14 && seed.one_in(3);
    let version = match extended_l2 || seed.one_in(2) {
        true => Version::V3,
        false => Version::V2,
    };
    let most = (8 << 20 | 5 << cluster_bits).min(6000 << cluster_bits);
    CreateOptions {
        version,
        cluster_size: 1 << cluster_bits,
        extended_l2,
        refcount_bits: match version {
            Version::V3 => seed.pick(&[1, 16, 16, 64, 64]),
            Version::V2 => 16,
        },
        compression_type: match version {
            Version::V3 => seed.pick(&[CompressionType::Deflate, CompressionType::Zstd]),
            Version::V2 => CompressionType::Deflate,
        },
        preallocation: match seed.below(6) {
            0 => Preallocation::Metadata,
            1 => Preallocation::Falloc,
            2 => Preallocation::Full,
            _ => Preallocation::Off,
        },
        ..CreateOptions::new((seed.below(most / 512) + 1) * 512)
    }
}

/// Measures, converts into what has just that much, and compares.
async fn fits(number: u64) -> Result<(), String> {
    let seed = &mut Random(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut shape = shape(seed);
    let mut images = Vec::new();
    let mut rest = shape.size;
    while rest > 0 {
        let size = match seed.one_in(3) {
            true => rest.min((seed.below(rest / 512 + 1) + 1) * 512),
            false => rest,
        };
        images.push(source(seed, size).await);
        rest -= size;
    }
    let sources = Sources::new(&images);
    shape.size = sources.size();
    let form = match shape.preallocation == Preallocation::Off && seed.one_in(2) {
        true => Form::Compressed,
        false => Form::Plain,
    };
    let geometry = geometry(&shape).unwrap();
    let measured = measure(&shape, &geometry, 0, Some(&sources)).await.unwrap();
    let limit = match shape.preallocation {
        Preallocation::Metadata => measured.fully_allocated,
        _ => measured.required,
    };
    let kind = seed.pick(&[Limit::Device, Limit::Quota]);
    // The old content of a device shows where clusters were assigned ahead.
    let unwritten = match kind == Limit::Quota || shape.preallocation == Preallocation::Off {
        true if seed.one_in(2) => TargetContent::Zeroes,
        _ => TargetContent::Unknown,
    };
    let options = Options {
        form,
        unwritten,
        order: seed.pick(&[Order::Guest, Order::Any]),
        in_flight: seed.pick(&[1, 8, 16]),
        ..Options::default()
    };
    let what = format!("seed {number}: {kind:?} of {limit} bytes, {shape:?}, {options:?}");

    let file = Bounded::new(kind, limit);
    let filled = fill(&file, &shape, (&sources, options)).await;
    filled.map_err(|error| format!("{what}: {error}"))?;
    let target = open(file.clone(), Format::Qcow2).await;
    let mut at = 0;
    for image in &images {
        let len = image.size() as usize;
        let wanted = image.read(0, BufMut::zeroed(len)).await.unwrap();
        let found = target.read(at, BufMut::zeroed(len)).await.unwrap();
        if wanted[..] != found[..] {
            return Err(format!("{what}: source at {at} differs"));
        }
        at += image.size();
    }
    target.close().await.unwrap();
    let mut findings = Vec::new();
    match our_check(file.memory.contents(), &mut findings) {
        Ok(result) if result.is_clean() => Ok(()),
        _ => Err(format!("{what}: {findings:?}")),
    }
}

/// Makes an image and converts into it.
async fn fill(
    file: &Arc<Bounded>,
    shape: &CreateOptions,
    (sources, options): (&Sources<'_>, Options),
) -> cowslip::Result<()> {
    create(file.clone(), None, shape).await?;
    let target = open(file.clone(), Format::Qcow2).await;
    let job = Job::default();
    let plan = Plan::new(sources, options, &job, &|_| ()).await;
    let done = match plan {
        Ok(plan) => plan.run(&target, &job).await,
        Err(failure) => Err(failure),
    };
    let closed = target.close().await;
    done.map_err(Failure::into_error)?;
    closed
}

#[test]
fn a_copy_fits_into_what_was_measured() {
    let outcomes = (0..100).map(|seed| block_on(fits(seed)));
    let failures: Vec<String> = outcomes.filter_map(Result::err).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The space of a device behind what the first refcount block counts is counted when it is needed,
/// in an order that a crash may break anywhere: no cluster is in use that is not counted.
#[test]
fn space_of_a_device_is_counted_in_order() {
    const PIECE: u64 = 256 << 10;
    let shape = CreateOptions {
        cluster_size: 512,
        refcount_bits: 64,
        ..CreateOptions::new(9 * PIECE)
    };
    let file = Recorder::new(Vec::new());
    block_on(create(file.clone(), None, &shape)).unwrap();
    let mut start = file.contents();
    start.resize(12 * PIECE as usize + 100, 0xa5);
    let device = Recorder::device(start.clone());
    block_on(async {
        let image = open(device.clone(), Format::Qcow2).await;
        for piece in 0..9u64 {
            let data = Buf::copy_of(&vec![piece as u8 + 1; PIECE as usize]);
            let written = image.write(piece * PIECE, data, Durability::Cached);
            written.await.unwrap();
            image.flush().await.unwrap();
        }
        image.close().await.unwrap();
    });
    let before = Header::parse(&start, u64::MAX, "before").unwrap();
    let after = Header::parse(&device.contents(), u64::MAX, "after").unwrap();
    assert_ne!(before.refcount_table_offset, after.refcount_table_offset);
    assert_eq!(device.contents().len(), start.len());

    let ops = device.ops();
    let states = each_crash(&start, &ops, |name, bytes| {
        let mut findings = Vec::new();
        let result = our_check(bytes.to_vec(), &mut findings).unwrap();
        assert!(result.corruptions == 0, "{name}: {findings:?}");
    });
    assert!(states > 500, "{states}");
    // All of it was flushed in the end.
    let found = block_on(async {
        let image = open(device.clone(), Format::Qcow2).await;
        image.read(0, BufMut::zeroed(9 * PIECE as usize)).await
    });
    let wanted = (0..9 * PIECE).map(|at| (at / PIECE) as u8 + 1);
    assert!(found.unwrap().iter().copied().eq(wanted));
}
