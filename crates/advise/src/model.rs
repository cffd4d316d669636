//! The model: expected figures of an image from few coefficients. Rates are those of the machine of
//! docs/performance.md; their ratios are what counts.

use crate::facts::FileSystem;
use crate::figures::figure;

const MIB: f64 = 1048576.0;
const WRITE_BYTES: f64 = 4096.0;

/// An image's layout, as far as first writes know it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    /// Cluster in bytes.
    pub cluster_bytes: u64,
    /// Bytes that a first write allocates, and copies if there is something to copy.
    pub unit_bytes: u64,
    /// There is something below it.
    pub is_backed: bool,
    /// The policy.
    pub is_sparse: bool,
}

/// First writes to raw files: sparse, allocated, written throughout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RawFile {
    /// Holes.
    Sparse,
    /// Space that was never written.
    Allocated,
    /// Written throughout.
    Written,
}

/// First writes of 4 KiB a second to a raw file.
pub fn raw_writes(file: RawFile, on: FileSystem) -> f64 {
    figure(
        match file {
            RawFile::Sparse => "raw-sparse",
            RawFile::Allocated => "raw-allocated",
            RawFile::Written => "raw-written",
        },
        on,
    )
}

/// Copied bytes that a write pays for: `share` of the writes are the first to their unit.
pub fn copied_bytes(layout: &Layout, write_bytes: f64, share: f64) -> f64 {
    match layout.is_backed {
        true => share * (layout.unit_bytes as f64 - write_bytes).max(0.0),
        false => 0.0,
    }
}

/// First writes of 4 KiB, times the better of a sparse and an allocated raw file.
pub fn first_writes_beside_raw(layout: &Layout, share: f64, on: FileSystem) -> f64 {
    if !layout.is_backed {
        let is_small = layout.cluster_bytes <= 8192;
        return match (layout.is_sparse, is_small) {
            (true, _) => figure("sparse", on) * raw_writes(RawFile::Sparse, on) / better_raw(on),
            (false, true) => figure("empty-small", on),
            (false, false) => figure("empty", on),
        };
    }
    let copied = copied_bytes(layout, WRITE_BYTES, share);
    figure("backed", on) / (1.0 + copied / figure("copied-bytes", on))
}

fn better_raw(on: FileSystem) -> f64 {
    raw_writes(RawFile::Sparse, on).max(raw_writes(RawFile::Allocated, on))
}

/// First writes of 4 KiB a second.
pub fn first_writes(layout: &Layout, share: f64, on: FileSystem) -> f64 {
    first_writes_beside_raw(layout, share, on) * better_raw(on)
}

/// Expected share of `writes` at random that are the first to their unit.
pub fn first_share(writes: f64, disk_bytes: f64, unit_bytes: f64) -> f64 {
    if writes <= 0.0 {
        return 1.0;
    }
    let units = (disk_bytes / unit_bytes).max(1.0);
    units * (1.0 - (-writes / units).exp()) / writes
}

/// A read from front to back in MiB/s.
pub fn in_order(bytes: u64, runs: u64, is_rotational: bool, on: FileSystem) -> f64 {
    let mib = bytes.max(1) as f64 / MIB;
    let run_us = match is_rotational {
        true => figure("seek-us", on),
        false => figure("run-us", on),
    };
    let speed = match is_rotational {
        true => 124.0,
        false => figure("in-order-mib", on),
    };
    let further_runs = runs.saturating_sub(1) as f64;
    mib / (mib / speed + further_runs * run_us / 1e6)
}

/// Memory for the tables of `span_bytes` of a disk, in bytes; `scattered` is the share of clusters
/// that do not follow the one before them.
pub fn table_bytes(span_bytes: u64, layout: (u64, bool), scattered: f64) -> f64 {
    let (cluster_bytes, is_extended) = layout;
    let entries = (span_bytes / cluster_bytes.max(1)).max(1) as f64;
    let (ordered, three_tenths) = match is_extended {
        true => ("extended-ordered", "extended-scattered"),
        false => ("entry-ordered", "entry-scattered"),
    };
    let of = |name| figure(name, FileSystem::Ext4);
    let more = (of(three_tenths) - of(ordered)) / 0.3;
    // An entry that was not packed takes no more than this.
    let most = if is_extended { 16.5 } else { 8.25 };
    entries * (of(ordered) + more * scattered).min(most)
}

/// The share of random requests that read a table first.
pub fn misses(table_bytes: f64, budget_bytes: u64) -> f64 {
    (1.0 - budget_bytes as f64 / table_bytes.max(1.0)).max(0.0)
}

/// Speed with misses beside none: a table costs as much as the data.
pub fn speed_with_misses(misses: f64) -> f64 {
    1.0 / (1.0 + misses)
}

/// Space over live data after a file system's churn with fstrim.
pub fn churn(cluster_bytes: u64, is_sparse: bool, on: FileSystem) -> f64 {
    if is_sparse {
        return figure("churn-sparse", on);
    }
    // Between the measured ones, by the logarithm; none is known to be better below 64 KiB.
    let points = [
        (16.0, figure("churn-64k", on)),
        (20.0, figure("churn-1m", on)),
        (21.0, figure("churn-2m", on)),
    ];
    let bits = (cluster_bytes.max(1) as f64).log2();
    let (low, high) = match bits < 20.0 {
        true => (points[0], points[1]),
        false => (points[1], points[2]),
    };
    let share = ((bits - low.0) / (high.0 - low.0)).clamp(0.0, 1.0);
    low.1 + (high.1 - low.1) * share
}

/// First writes a second to an image of 64 KiB clusters by its preallocation.
pub fn preallocated_writes(kind: &str, on: FileSystem) -> f64 {
    match kind {
        "falloc" => figure("image-falloc", on),
        "full" => figure("image-full", on),
        _ => figure("image-off", on),
    }
}

/// QEMU's random read in microseconds, by the depth of the chain.
pub fn qemu_read_us(depth: u64) -> f64 {
    let of = |name| figure(name, FileSystem::Ext4);
    let (two, deep) = (of("qemu-read-2-us"), of("qemu-read-150-us"));
    two + (deep - two) * (depth.saturating_sub(2)) as f64 / 148.0
}

/// Memory of a process with a chain of this depth, in MiB, after reads.
pub fn chain_mib(depth: u64) -> f64 {
    let of = |name| figure(name, FileSystem::Ext4);
    of("chain-mib") + of("layer-kib") * depth.saturating_sub(1) as f64 / 1024.0
}
