//! The maximum cost of a hostile image of 1 MiB: memory, counted by the allocator, and work,
//! counted in operations and bytes of the file. No clock is read. docs/security.md states these
//! bounds.
//!
//! One test, because the allocator counts for the whole process.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::sync::Arc;

use cowslip::file::BlockFile;
use cowslip::image::ZeroOptions;
use cowslip::qcow2::inspect::inspect;
use cowslip::qcow2::layout::Layout;
use cowslip::qcow2::repair::Scope;
use cowslip::{Buf, BufMut};
use cowslip_hostile::draw::Draw;
use cowslip_hostile::file::Watched;
use cowslip_hostile::repair::repair;
use cowslip_hostile::session::{OneDataFile, block_on, header, open, run_check};
use cowslip_hostile::worst::{self, BYTES};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The maximum cost of one verb.
struct Bound {
    memory_bytes: usize,
    operations: u64,
    bytes_read: u64,
}

impl Bound {
    const fn of(memory_mib: usize, operations: u64, mib_read: u64) -> Bound {
        Bound {
            memory_bytes: memory_mib << 20,
            operations,
            bytes_read: mib_read << 20,
        }
    }
}

/// `info`: the lists of snapshots and bitmaps, as text.
const INSPECT: Bound = Bound::of(4, 100, 2);
/// A check reads 16 times the file and 64 MiB, and the header before.
const CHECK: Bound = Bound::of(8, 8000, 81);
/// Opening, and requests of 1 MiB at most.
const READ: Bound = Bound::of(8, 5000, 16);
/// A map of the whole disk, or of what 1000 extents describe.
const EXTENTS: Bound = Bound::of(32, 5000, 8);
/// Where the metadata is, each place once; reads what a check may.
const LAYOUT: Bound = Bound::of(16, 10_000, 81);
/// Each of eight requests may look through all counts: some 1800 blocks of them.
const WRITE: Bound = Bound::of(16, 30_000, 16);

/// The walks of a plan, its run, and the check at the end; 64 MiB are what the caller allows.
const REPAIR: Bound = Bound::of(72, 40_000, 400);

/// Returns what was too much.
fn measure(
    image: &worst::Worst,
    verb: &str,
    bound: &Bound,
    work: impl FnOnce(&Arc<Watched>),
) -> Option<String> {
    let file = Arc::new(Watched::new(image.bytes.clone()));
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    work(&file);
    let memory = MEMORY.peak_usage().saturating_sub(before);
    let (operations, read) = (file.operations(), file.bytes_read());
    let report = format!(
        "{verb} of '{}': {} KiB of memory, {operations} operations, {} KiB read",
        image.name,
        memory >> 10,
        read >> 10
    );
    println!("{report}");
    let within =
        memory <= bound.memory_bytes && operations <= bound.operations && read <= bound.bytes_read;
    (!within).then_some(report)
}

/// Any failure is fine, as long as it is an error.
fn tolerate<T>(outcome: cowslip::Result<T>) {
    std::hint::black_box(outcome.map_err(|error| error.to_string()).is_ok());
}

fn read(file: &Arc<Watched>) {
    let Ok(image) = open(file, &OneDataFile::new(), false, &mut Draw::from_seed(1)) else {
        return;
    };
    let size = image.size();
    for start in [0, size / 2, size.saturating_sub(BYTES as u64)] {
        let len = (size - start).min(BYTES as u64) as usize;
        tolerate(block_on(image.read(start, BufMut::zeroed(len))));
    }
}

fn map(file: &Arc<Watched>) {
    let Ok(image) = open(file, &OneDataFile::new(), false, &mut Draw::from_seed(1)) else {
        return;
    };
    for len in [image.size(), image.size().min(1 << 32)] {
        tolerate(block_on(image.extents(0, len, 1000)));
    }
}

fn metadata_areas(file: &Arc<Watched>) {
    let Ok(header) = header(file) else { return };
    let shared = file.clone() as Arc<dyn BlockFile>;
    let Ok(layout) = block_on(Layout::read(&shared, &header)) else {
        return;
    };
    tolerate(block_on(layout.areas()));
}

fn write(file: &Arc<Watched>) {
    let gate = OneDataFile::new();
    let Ok(image) = open(file, &gate, true, &mut Draw::from_seed(1)) else {
        return;
    };
    let size = image.size();
    let data = |len: u64| Buf::from(vec![1; len as usize]);
    let zero = ZeroOptions::default();
    for start in [0, size / 2] {
        let len = (size - start).min(200_000);
        tolerate(block_on(image.write(start, data(len), Default::default())));
        tolerate(block_on(image.write_zeroes(start, len, zero)));
        tolerate(block_on(image.discard(start, len)));
    }
    let unit = 1 << image.layers()[0].header.as_ref().unwrap().cluster_bits;
    tolerate(block_on(image.write_compressed(0, data(unit))));
    tolerate(block_on(image.flush()));
    tolerate(block_on(image.resize(size.saturating_add(1 << 20))));
    tolerate(block_on(image.close()));
}

#[test]
fn the_worst_images_cost_a_bounded_amount() {
    let mut too_much = Vec::new();
    for image in worst::all() {
        assert_eq!(image.bytes.len(), BYTES);
        let inspected = measure(&image, "inspect", &INSPECT, |file| {
            tolerate(block_on(inspect(&(file.clone() as Arc<dyn BlockFile>))));
        });
        let checked = measure(&image, "check", &CHECK, |file| tolerate(run_check(file)));
        too_much.extend(inspected);
        too_much.extend(checked);
        too_much.extend(measure(&image, "repair", &REPAIR, |file| {
            // A plan reads L1 tables, and writes where they move, as much as a check may read.
            tolerate(repair(file, Scope::All));
        }));
        too_much.extend(measure(&image, "read", &READ, read));
        too_much.extend(measure(&image, "map", &EXTENTS, map));
        too_much.extend(measure(&image, "layout", &LAYOUT, metadata_areas));
        too_much.extend(measure(&image, "write", &WRITE, write));
    }
    assert!(too_much.is_empty(), "{}", too_much.join("\n"));
}
