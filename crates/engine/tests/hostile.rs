//! Images as an attacker would make them, in memory: small valid images with seeded damage are
//! inspected, checked, read, mapped and written. Promises tested: no panic, no unbounded memory or
//! time (invariant S1), and no guest byte in a header, L1 table, refcount table, refcount block or L2
//! table (invariant S3).
//!
//! `COWSLIP_SEED=n` replays one seed, `COWSLIP_SEEDS=n` tries more of them.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

#[path = "hostile/damage.rs"]
mod damage;
#[path = "hostile/file.rs"]
mod file;
#[path = "hostile/layout.rs"]
mod layout;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{
    BackingChoice, DiscardPolicy, Format, OpenOptions, WriteOptions, ZeroOptions,
};
use cowslip::qcow2::check::{CheckOptions, CheckResult, Finding, Observer, check};
use cowslip::qcow2::create::{CreateOptions, Version, create};
use cowslip::qcow2::header::{CompressionType, Header};
use cowslip::qcow2::inspect::inspect;
use cowslip::{Buf, BufMut, Error, Image};

use damage::damage;
use file::Watched;
use layout::{Layout, MARK};

/// Seeds that are tried by default: about 20 seconds in a debug build.
const SEEDS: u64 = 6000;
/// A generous limit for the work on one small image.
const TIME_MAX: Duration = Duration::from_secs(10);

/// Files in memory complete at once, so whatever waits longer waits for nothing.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..10_000 {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
    panic!("a request waits for nothing");
}

/// A generator of test values: Knuth's MMIX constants.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 16
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

struct NoFiles;
impl Gate for NoFiles {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        Err(Error::Invalid(format!("no {}", request.name)))
    }
}

/// Counts findings, keeps none.
struct Ignore;
impl Observer for Ignore {
    fn finding(&mut self, finding: &Finding) {
        // The words too must not panic.
        std::hint::black_box(finding.to_string());
    }
}

fn open(file: &Arc<Watched>, writable: bool, random: &mut Random) -> cowslip::Result<Image> {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable,
        discard: random.pick(&[DiscardPolicy::Unmap, DiscardPolicy::Ignore]),
        backing: BackingChoice::None,
        cache_bytes: 8 * 4096,
        ..OpenOptions::default()
    };
    block_on(Image::open(file.clone(), options, &NoFiles))
}

/// Valid images of all kinds, with some of everything in them.
fn samples() -> Vec<Vec<u8>> {
    let base = CreateOptions::new(1 << 20);
    let shapes = [
        CreateOptions {
            cluster_size: 512,
            ..base.clone()
        },
        CreateOptions {
            cluster_size: 512,
            refcount_bits: 64,
            size: 300_032,
            ..base.clone()
        },
        CreateOptions {
            cluster_size: 4096,
            version: Version::V2,
            ..base.clone()
        },
        CreateOptions {
            cluster_size: 4096,
            refcount_bits: 1,
            ..base.clone()
        },
        CreateOptions {
            cluster_size: 16384,
            extended_l2: true,
            ..base.clone()
        },
        CreateOptions {
            cluster_size: 16384,
            extended_l2: true,
            refcount_bits: 8,
            compression_type: CompressionType::Zstd,
            ..base.clone()
        },
        CreateOptions {
            cluster_size: 65536,
            ..base.clone()
        },
        CreateOptions {
            cluster_size: 65536,
            compression_type: CompressionType::Zstd,
            ..base
        },
    ];
    shapes
        .iter()
        .enumerate()
        .map(|(i, shape)| sample(shape, i as u64))
        .collect()
}

fn sample(shape: &CreateOptions, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let file = Arc::new(Watched::new(Vec::new()));
    block_on(create(file.clone(), None, shape)).unwrap();
    for _ in 0..2 {
        let image = open(&file, true, &mut random).unwrap();
        for _ in 0..12 {
            exercise(&image, Content::Random, &mut random).unwrap();
        }
        block_on(image.close()).unwrap();
    }
    file.contents()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Random,
    /// What must never be found in metadata.
    Mark,
}

/// One random writing operation.
fn exercise(image: &Image, content: Content, random: &mut Random) -> cowslip::Result<()> {
    let size = image.size();
    if size == 0 {
        return Ok(());
    }
    let mut start = random.below(size.min(2 << 20));
    if random.one_in(8) {
        start = size - 1 - start;
    }
    let limit = if random.one_in(3) { 150_000 } else { 3000 };
    let len = 1 + random.below((size - start).min(limit));
    match random.below(10) {
        0..=4 => {
            let bytes: Vec<u8> = match content {
                Content::Mark => vec![MARK; len as usize],
                Content::Random => (0..len).map(|_| random.next() as u8 & 0x7f).collect(),
            };
            let fua = random.one_in(4);
            block_on(image.write(start, Buf::from(bytes), WriteOptions { fua }))
        }
        5 => {
            let options = ZeroOptions {
                may_unmap: random.one_in(2),
                ..ZeroOptions::default()
            };
            block_on(image.write_zeroes(start, len, options))
        }
        6 => block_on(image.discard(start, len)),
        7 => block_on(image.flush()),
        _ => {
            let unit = image.layers()[0]
                .header
                .as_ref()
                .map_or(512, |h| 1 << h.cluster_bits);
            let start = start / unit * unit;
            let len = unit.min(size - start);
            let fill = if content == Content::Mark { MARK } else { 7 };
            block_on(image.write_compressed(start, Buf::from(vec![fill; len as usize])))
        }
    }
}

/// Reads, maps and describes; every failure is fine that is an error.
fn look(file: &Arc<Watched>, random: &mut Random) {
    let described = block_on(inspect(&(file.clone() as Arc<dyn BlockFile>)));
    std::hint::black_box(described.map_err(|e| e.to_string()).is_ok());
    if let Ok(result) = run_check(file) {
        std::hint::black_box(result.is_clean());
    }
    let Ok(image) = open(file, false, random) else {
        return;
    };
    let size = image.size();
    for _ in 0..6 {
        let start = random.pick(&[0, size / 2, size.saturating_sub(100_000)]);
        let len = (size - start).min(200_000);
        std::hint::black_box(block_on(image.read(start, BufMut::zeroed(len as usize))).is_ok());
        let len = (size - start).min(random.pick(&[1 << 20, 1 << 34]));
        if let Ok(extents) = block_on(image.extents(start, len, 1000)) {
            let mut at = start;
            for extent in extents {
                assert!(
                    extent.start == at && extent.len > 0,
                    "{extent:?} after {at}"
                );
                at += extent.len;
            }
        }
    }
    block_on(image.close()).unwrap();
}

fn run_check(file: &Arc<Watched>) -> cowslip::Result<CheckResult> {
    let start = block_on(cowslip::qcow2::inspect::read_start(file.as_ref()))?;
    let header = Header::parse(&start, u64::MAX, file.name())?;
    let options = CheckOptions {
        memory_bytes_max: 64 << 20,
    };
    let file = file.clone() as Arc<dyn BlockFile>;
    block_on(check(&file, &header, &options, &mut Ignore))
}

/// Writes; what is metadata before must be metadata after.
fn change(file: &Arc<Watched>, random: &mut Random) {
    let before = file.contents();
    let Ok(image) = open(file, true, random) else {
        assert!(
            file.contents() == before,
            "a refused open has changed the file"
        );
        return;
    };
    let layout = Layout::of(&before);
    for _ in 0..8 {
        // Every failure is fine that is an error.
        std::hint::black_box(exercise(&image, Content::Mark, random).is_ok());
        layout.assert_intact(&before, &file.contents());
    }
    std::hint::black_box(block_on(image.close()).is_ok());
    layout.assert_intact(&before, &file.contents());
}

fn try_seed(samples: &[Vec<u8>], seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let sample = &samples[random.below(samples.len() as u64) as usize];
    let bytes = damage(sample, &mut random);
    let began = Instant::now();
    look(&Arc::new(Watched::new(bytes.clone())), &mut random);
    change(&Arc::new(Watched::new(bytes)), &mut random);
    assert!(began.elapsed() < TIME_MAX, "took {:?}", began.elapsed());
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap())
}

#[test]
fn damaged_images_are_errors_and_nothing_worse() {
    let samples = samples();
    for sample in &samples {
        let file = Arc::new(Watched::new(sample.clone()));
        assert!(run_check(&file).unwrap().is_clean());
    }
    if let Some(seed) = number("COWSLIP_SEED") {
        return try_seed(&samples, seed);
    }
    let seeds = number("COWSLIP_SEEDS").unwrap_or(SEEDS);
    let failed: Vec<u64> = (0..seeds)
        .filter(|&seed| {
            let tried = catch_unwind(AssertUnwindSafe(|| try_seed(&samples, seed)));
            if tried.is_err() {
                eprintln!("^ COWSLIP_SEED={seed}");
            }
            tried.is_err()
        })
        .collect();
    assert!(
        failed.is_empty(),
        "{} seeds failed: {failed:?}",
        failed.len()
    );
}
