//! The power fails while an image on a real file system is written. All operations of the engine on
//! its files are logged; the log is cut when a flush begins, when it has ended, and in between. A
//! possible state of the disk at the cut is composed from the log, and verified: by QEMU's check
//! and ours, and by reads of QEMU and ours, sector by sector. Flushed data is there, and the rest
//! is old or new.
//!
//! One case again, and with more cuts: `COWSLIP_SEED=7 COWSLIP_SHAPE=v3-65536-extended-raw-rc16
//! COWSLIP_CUTS=200 cargo test --test command power_cut`. More of them: `COWSLIP_SEEDS=20`.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::support::rng::Rng;
use crate::support::shape::{Below, Entries, Files, Shape, Version};
use crate::support::{
    cowslip, number_from_environment, outcome, peers_are_installed, qemu_img, scratch,
};
use cowslip::file::host::{HostGate, HostOptions, open_host_file};
use cowslip::file::{BlockFile, FileRequest, Gate, Role};
use cowslip::image::{DiscardPolicy, Durability, Format, OpenOptions, Space, ZeroOptions};
use cowslip::{Buf, BufMut, Image};
use cowslip_queue::{Backend, Queue};
use futures_util::future::join_all;
use log::{Log, LoggedFile, SECTOR_BYTES};

mod log;

/// Cuts of a case, unless the environment wants others.
const CUTS: u64 = 12;
/// Batches of concurrent requests of a case.
const BATCHES: u64 = 12;
const IMAGE: usize = 0;
const DATA: usize = 1;

#[test]
fn what_was_flushed_survives_and_both_checkers_agree() {
    if !peers_are_installed(&["qemu-img"]) {
        return;
    }
    let first = number_from_environment("COWSLIP_SEED").unwrap_or(1);
    let count = number_from_environment("COWSLIP_SEEDS").unwrap_or(1);
    let cuts = number_from_environment("COWSLIP_CUTS").unwrap_or(CUTS);
    let only = std::env::var("COWSLIP_SHAPE").ok();
    for shape in shapes() {
        if only.as_ref().is_some_and(|name| *name != shape.to_string()) {
            continue;
        }
        for seed in first..first + count {
            eprintln!("COWSLIP_SEED={seed} COWSLIP_SHAPE={shape} COWSLIP_CUTS={cuts}");
            let mut rng = Rng::named(seed, &format!("power cut {shape}"));
            let directory = scratch();
            let case = Case::run(&shape, directory.path(), &mut rng);
            for at in case.cuts(cuts, &mut rng) {
                case.judge(at, &mut rng);
            }
        }
    }
}

fn shapes() -> Vec<Shape> {
    use Below::{Chain, DataFile, Nothing, Raw, RawDataFile};
    use Entries::{Extended, Plain};
    let shape = |version, cluster_bytes, entries, below, refcount_bits| Shape {
        version,
        cluster_bytes,
        entries,
        below,
        refcount_bits,
    };
    vec![
        shape(Version::V2, 4096, Plain, Raw, 16),
        shape(Version::V3, 512, Plain, Nothing, 1),
        shape(Version::V3, 4096, Plain, Nothing, 16),
        shape(Version::V3, 65536, Plain, Chain, 16),
        shape(Version::V3, 16384, Extended, Nothing, 64),
        shape(Version::V3, 65536, Extended, Raw, 16),
        shape(Version::V3, 65536, Extended, DataFile, 16),
        shape(Version::V3, 4096, Plain, RawDataFile, 16),
    ]
}

/// A request to the disk that ended well: what the range reads as since.
struct Change {
    range: Range<u64>,
    after: Vec<u8>,
    /// Other bytes that a crash may leave of it: a discard's zeroes.
    or_zeroes: bool,
    begun: u64,
    ended: u64,
    fua: bool,
}

/// A flush of the disk.
struct GuestFlush {
    begun: u64,
    ended: u64,
}

/// A run with its log.
struct Case {
    directory: PathBuf,
    log: Log,
    /// The files as they were before.
    bases: Vec<Vec<u8>>,
    has_data_file: bool,
    disk: Vec<u8>,
    changes: Vec<Change>,
    flushes: Vec<GuestFlush>,
}

/// Opens files of the host, and logs what is done to the data file.
struct LoggingGate {
    host: HostGate,
    log: Log,
}

impl Gate for LoggingGate {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        let file = self.host.open(request)?;
        match request.role {
            Role::Backing => Ok(file),
            Role::Data => Ok(Arc::new(LoggedFile::new(file, &self.log, DATA))),
        }
    }
}

impl Case {
    fn run(shape: &Shape, directory: &Path, rng: &mut Rng) -> Case {
        let files = Files::new(directory);
        let disk_bytes = (64 * shape.subcluster_bytes()).clamp(64 << 10, 2 << 20)
            + rng.below(20) * SECTOR_BYTES as u64;
        let below = files.make_below(shape, disk_bytes, rng);
        files.create_with_cowslip(shape, &below, disk_bytes);
        let truth = files.read_with_qemu(&["-f", "qcow2"]);
        let mut bases = vec![fs::read(&files.image).unwrap()];
        if shape.has_data_file() {
            bases.push(fs::read(directory.join("data.raw")).unwrap());
        }
        let mut case = Case {
            directory: directory.to_path_buf(),
            log: Log::default(),
            bases,
            has_data_file: shape.has_data_file(),
            disk: fs::read(truth).unwrap(),
            changes: Vec::new(),
            flushes: Vec::new(),
        };
        let queue = Queue::new(Backend::Auto).unwrap();
        queue.block_on(case.write(&files.image, rng));
        case
    }

    /// Batches of requests that do not overlap; flushes between some.
    async fn write(&mut self, image: &Path, rng: &mut Rng) {
        let image = self.open_logged(image).await;
        let mut model = self.disk.clone();
        for _ in 0..BATCHES {
            let mut ranges: Vec<Range<u64>> = Vec::new();
            for _ in 0..2 + rng.below(10) {
                let range = random_range(model.len() as u64, rng);
                if !ranges
                    .iter()
                    .any(|r| r.start < range.end && range.start < r.end)
                {
                    ranges.push(range);
                }
            }
            let requests = ranges
                .into_iter()
                .map(|range| change(&image, &self.log, range, Rng::new(rng.next())));
            let requests: Vec<_> = requests.collect();
            for mut change in join_all(requests).await {
                let range = change.range.start as usize..change.range.end as usize;
                // A discard says afterwards what it did.
                let (read, len) = (change.range.start, change.after.len());
                change.after = image
                    .read(read, BufMut::zeroed(len))
                    .await
                    .unwrap()
                    .to_vec();
                model[range].copy_from_slice(&change.after);
                self.changes.push(change);
            }
            if rng.once_in(3) {
                let begun = self.log.now();
                image.flush().await.unwrap();
                let ended = self.log.now();
                self.flushes.push(GuestFlush { begun, ended });
            }
        }
        image.close().await.unwrap();
    }

    async fn open_logged(&self, path: &Path) -> Image {
        let options = HostOptions {
            writable: true,
            ..HostOptions::default()
        };
        let file = open_host_file(path, &options).unwrap();
        let gate = LoggingGate {
            host: HostGate {
                options,
                ..HostGate::default()
            },
            log: self.log.clone(),
        };
        let open = OpenOptions {
            format: Some(Format::Qcow2),
            writable: true,
            discard: DiscardPolicy::Unmap,
            ..OpenOptions::default()
        };
        let logged = Arc::new(LoggedFile::new(file, &self.log, IMAGE));
        Image::open(logged, open, &gate).await.unwrap()
    }

    /// Moments to cut at: half of them where a flush begins or has ended.
    fn cuts(&self, count: u64, rng: &mut Rng) -> Vec<u64> {
        let flushes = self.log.flush_times();
        let end = self.log.now();
        let pick = |i| match i % 2 {
            0 => *rng.pick(&flushes) + rng.below(2),
            _ => 1 + rng.below(end),
        };
        (0..count).map(pick).collect()
    }

    /// Puts together what is left after a cut, and holds it against what must be there.
    fn judge(&self, at: u64, rng: &mut Rng) {
        eprintln!("  cut at {at}");
        let image = self.directory.join("image.qcow2");
        fs::write(
            &image,
            self.log.after_cut(IMAGE, &self.bases[IMAGE], at, rng),
        )
        .unwrap();
        if self.has_data_file {
            let data = self.log.after_cut(DATA, &self.bases[DATA], at, rng);
            fs::write(self.directory.join("data.raw"), data).unwrap();
        }
        self.check("after the cut", &image);
        let read = self.read_by_qemu(&image);
        let allowed = self.allowed(at);
        for (sector, bytes) in read.chunks(SECTOR_BYTES).enumerate() {
            assert!(
                allowed[sector].contains(&bytes),
                "sector {sector} holds none of its {} values; it begins with {:x?}",
                allowed[sector].len(),
                &bytes[..16.min(bytes.len())]
            );
        }
        // The image is taken up again, and nothing that is there gets lost by that.
        let queue = Queue::new(Backend::Auto).unwrap();
        queue.block_on(self.write_again(&image, &read));
        self.check("after the next session", &image);
    }

    /// Returns the contents that each sector of the disk may have after a cut.
    fn allowed(&self, at: u64) -> Vec<Vec<&[u8]>> {
        const ZEROES: &[u8] = &[0; SECTOR_BYTES];
        let mut allowed: Vec<Vec<&[u8]>> =
            self.disk.chunks(SECTOR_BYTES).map(|s| vec![s]).collect();
        for change in self.changes.iter().filter(|change| change.begun < at) {
            let flush = self.flushes.iter().find(|flush| flush.begun > change.ended);
            let is_flushed = flush.is_some_and(|flush| flush.ended <= at);
            let is_durable = is_flushed || (change.fua && change.ended <= at);
            let first = change.range.start as usize / SECTOR_BYTES;
            for (i, bytes) in change.after.chunks(SECTOR_BYTES).enumerate() {
                let values = &mut allowed[first + i];
                if is_durable {
                    values.clear();
                }
                values.push(bytes);
                if change.or_zeroes && !is_durable {
                    values.push(&ZEROES[..bytes.len()]);
                }
            }
        }
        allowed
    }

    /// Neither checker finds more than leaks.
    fn check(&self, when: &str, image: &Path) {
        const ONLY_LEAKS: i32 = 3;
        for mut program in [Command::new("qemu-img"), cowslip()] {
            let output = outcome(program.args(["check", "-f", "qcow2"]).arg(image));
            let code = output.status.code();
            assert!(
                code == Some(0) || code == Some(ONLY_LEAKS),
                "{program:?} {when}: {}\n{}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }

    fn read_by_qemu(&self, image: &Path) -> Vec<u8> {
        let truth = self.directory.join("read.raw");
        qemu_img(&["convert", "-f", "qcow2", "-O", "raw"], &[image, &truth]);
        fs::read(truth).unwrap()
    }

    async fn write_again(&self, path: &Path, expected: &[u8]) {
        let options = HostOptions {
            writable: true,
            ..HostOptions::default()
        };
        let file = open_host_file(path, &options).unwrap();
        let open = OpenOptions {
            format: Some(Format::Qcow2),
            writable: true,
            ..OpenOptions::default()
        };
        let gate = HostGate {
            options,
            ..HostGate::default()
        };
        let image = Image::open(file, open, &gate).await.unwrap();
        let len = expected.len();
        let first = image.read(0, BufMut::zeroed(len)).await.unwrap();
        assert!(first[..] == *expected, "QEMU and we read differently");
        let half = len / 2 / SECTOR_BYTES * SECTOR_BYTES;
        let bytes = vec![0x5a; half];
        image
            .write(0, Buf::copy_of(&bytes), Durability::Cached)
            .await
            .unwrap();
        let second = image.read(0, BufMut::zeroed(len)).await.unwrap();
        assert!(second[..half] == bytes, "what was written is not there");
        assert!(second[half..] == expected[half..], "other bytes changed");
        image.close().await.unwrap();
    }
}

fn random_range(disk_bytes: u64, rng: &mut Rng) -> Range<u64> {
    let sectors = disk_bytes / SECTOR_BYTES as u64;
    let longest = if rng.once_in(4) { sectors / 2 } else { 24 };
    let len = 1 + rng.below(longest);
    let start = rng.below(sectors - len + 1);
    start * SECTOR_BYTES as u64..(start + len) * SECTOR_BYTES as u64
}

/// Runs one request, and times it.
async fn change(image: &Image, log: &Log, range: Range<u64>, mut rng: Rng) -> Change {
    let len = range.end - range.start;
    let fua = rng.once_in(8);
    let kind = rng.below(8);
    let bytes = rng.bytes(len as usize);
    let begun = log.now();
    let outcome = match kind {
        0 => image.discard(range.start, len).await,
        1 | 2 => {
            let options = ZeroOptions {
                space: Space::of_unmap(kind == 1),
                durability: Durability::of_fua(fua),
                fast_only: false,
            };
            image.write_zeroes(range.start, len, options).await
        }
        _ => {
            let data = Buf::copy_of(&bytes);
            image
                .write(range.start, data, Durability::of_fua(fua))
                .await
        }
    };
    outcome.unwrap();
    let ended = log.now();
    Change {
        range,
        after: bytes,
        or_zeroes: kind == 0,
        begun,
        ended,
        fua: fua && kind != 0,
    }
}
