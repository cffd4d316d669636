//! The situations: the seeds' questions, and those that came with the engine.

use crate::facts::{Engine, Facts, FileSystem, Order, Space};
use crate::figures::figure;
use crate::model::{self, Layout, RawFile, raw_writes};

use super::Situation;
use super::facts::{GIB, facts, overlay, raw, scattered};

/// The situation of this title on a file system.
pub(super) fn of(title: &str, on: &str) -> Option<Situation> {
    let kind = FileSystem::of(on);
    TITLES
        .iter()
        .find(|(it, _)| *it == title)
        .map(|(title, make)| Situation {
            title,
            ..make(on, kind)
        })
}

type Make = fn(&str, FileSystem) -> Situation;

/// Titles, in the order of the seeds.
const TITLES: [(&str, Make); 20] = [
    ("a volume of known size", known_size),
    ("the same where no call allocates", known_size),
    ("recordings, direct writers at 3 MB/s each", recordings),
    ("direct writers at full speed", fast_streams),
    ("writers through the page cache", buffered_streams),
    (
        "an overlay in plain clusters, written at random",
        plain_overlay,
    ),
    (
        "an image without backing file, written at random",
        empty_image,
    ),
    ("an empty image that will be filled", filled_image),
    ("an overlay where a clone could be", overlay_or_clone),
    (
        "a guest that discards, 64 KiB clusters, little space",
        discards_little,
    ),
    ("a guest that discards, 1 MiB clusters", discards_large),
    ("a sparse image whose guest does not discard", sparse_image),
    ("8 TiB in 64 KiB clusters, 64 MiB for tables", large_disk),
    ("a chain of 150 images in QEMU", long_chain),
    ("20 internal snapshots, written at random", snapshots),
    ("a compressed image that is written", compressed),
    ("512 MiB in 126 025 runs, read in order", fragmented),
    ("a sparse raw file, written at random", sparse_raw),
    ("a raw file that was written throughout", written_raw),
    (
        "an image whose guest has deleted half of its files",
        dead_space,
    ),
];

fn situation(facts: Facts, workload: &'static str, subject: &'static str) -> Situation {
    Situation {
        title: "",
        facts,
        workload,
        subject,
        expected: None,
    }
}

/// The seed of 2009: libvirt's volumes.
fn known_size(on: &str, _: FileSystem) -> Situation {
    situation(raw(on, 0), "fill", "preallocation")
}

/// A raw file of some gibibytes that lies in this many extents.
fn stream(on: &str, bytes: u64, extents: u64) -> Facts {
    let mut facts = raw(on, bytes);
    facts.image.name = "recordings/a.ts".to_string();
    facts.image.disk_bytes = bytes;
    facts.space.file_bytes = bytes;
    facts.order = Order {
        bytes,
        runs: Some(extents),
        extents,
        perfect: 1,
    };
    facts
}

/// The seed of 2010: files that stream into one directory.
fn recordings(on: &str, _: FileSystem) -> Situation {
    situation(stream(on, 16 << 20, 256), "streams", "preallocation")
}

fn fast_streams(on: &str, _: FileSystem) -> Situation {
    situation(stream(on, 32 << 20, 428), "streams", "preallocation")
}

fn buffered_streams(on: &str, _: FileSystem) -> Situation {
    Situation {
        expected: Some(1.0),
        ..situation(stream(on, 32 << 20, 1), "streams", "preallocation")
    }
}

fn layout(unit_bytes: u64, is_backed: bool) -> Layout {
    Layout {
        cluster_bytes: 65_536,
        unit_bytes,
        is_backed,
        is_sparse: false,
    }
}

/// The seed of 2019: subclusters over a backing file. The bench's disk has 512 MiB, so that some of
/// its writes are not the first to their cluster.
fn plain_overlay(on: &str, kind: FileSystem) -> Situation {
    let writes = if kind == FileSystem::Btrfs {
        4000.0
    } else {
        2000.0
    };
    let share = model::first_share(writes, (GIB / 2) as f64, 65_536.0);
    let rate = |unit_bytes, share| model::first_writes(&layout(unit_bytes, true), share, kind);
    Situation {
        expected: Some(rate(4096, 1.0) / rate(65_536, share)),
        ..situation(overlay(on), "random-writes", "clusters")
    }
}

/// The same seed's second half: subclusters without a backing file.
fn empty_image(on: &str, kind: FileSystem) -> Situation {
    let mut facts = facts(on);
    facts.space.data_bytes = GIB;
    let rate = |unit_bytes| model::first_writes(&layout(unit_bytes, false), 1.0, kind);
    Situation {
        expected: Some(rate(65_536) / rate(2048)),
        ..situation(facts, "random-writes", "clusters")
    }
}

/// The seed of 2020: first writes to an image, preallocated or not.
fn filled_image(on: &str, kind: FileSystem) -> Situation {
    let mut facts = facts(on);
    facts.space = Space {
        host_bytes: 1 << 20,
        ..Space::default()
    };
    let rate = |way| model::preallocated_writes(way, kind);
    Situation {
        expected: Some(rate("off") / rate("falloc")),
        ..situation(facts, "fill", "preallocation")
    }
}

fn overlay_or_clone(on: &str, kind: FileSystem) -> Situation {
    let overlaid = model::first_writes(&layout(2048, true), 1.0, kind);
    let mut facts = overlay(on);
    facts.image.has_subclusters = true;
    Situation {
        expected: Some(overlaid / figure("clone", kind)),
        ..situation(facts, "mixed", "format")
    }
}

fn discards(on: &str, cluster_bytes: u64, free_bytes: u64) -> Situation {
    let mut facts = facts(on);
    facts.image.cluster_bytes = cluster_bytes;
    facts.host.free_bytes = free_bytes;
    situation(facts, "discards", "policy")
}

fn discards_little(on: &str, _: FileSystem) -> Situation {
    discards(on, 65_536, 2 * GIB)
}

fn discards_large(on: &str, _: FileSystem) -> Situation {
    discards(on, 1 << 20, 400 * GIB)
}

fn sparse_image(on: &str, _: FileSystem) -> Situation {
    let mut facts = facts(on);
    facts.image.is_sparse = true;
    facts.space.data_bytes = GIB;
    situation(facts, "random-writes", "policy")
}

fn large_disk(on: &str, _: FileSystem) -> Situation {
    let mut facts = facts(on);
    facts.image.disk_bytes = 8 << 40;
    facts.space.data_bytes = 8 << 40;
    facts.space.scattered_permille = 300;
    facts.cache_bytes = 64 << 20;
    situation(facts, "read-mostly", "cache")
}

fn long_chain(on: &str, _: FileSystem) -> Situation {
    let mut facts = overlay(on);
    facts.image.depth = 150;
    facts.image.backing = Some(("149.qcow2".to_string(), Some("qcow2".to_string())));
    facts.engine = Engine::Qemu;
    situation(facts, "read-mostly", "chain")
}

fn snapshots(on: &str, _: FileSystem) -> Situation {
    let mut facts = facts(on);
    facts.image.snapshots = 20;
    facts.space.host_bytes = 35 * GIB;
    situation(facts, "random-writes", "snapshots")
}

fn compressed(on: &str, _: FileSystem) -> Situation {
    let mut facts = facts(on);
    facts.space.compressed_bytes = facts.space.data_bytes;
    facts.space.used_bytes = 8 * GIB;
    facts.space.host_bytes = 8 * GIB;
    situation(facts, "random-writes", "compression")
}

fn fragmented(on: &str, _: FileSystem) -> Situation {
    situation(scattered(on), "sequential", "order")
}

fn sparse_raw(on: &str, _: FileSystem) -> Situation {
    situation(raw(on, GIB), "random-writes", "preallocation")
}

fn written_raw(on: &str, kind: FileSystem) -> Situation {
    let image = model::preallocated_writes("full", kind);
    Situation {
        expected: Some(raw_writes(RawFile::Written, kind) / image),
        ..situation(raw(on, 40 * GIB), "random-writes", "format")
    }
}

fn dead_space(on: &str, _: FileSystem) -> Situation {
    let mut facts = facts(on);
    facts.space.used_bytes = 10 * GIB;
    facts.space.data_bytes = 10 * GIB;
    situation(facts, "read-mostly", "space")
}
