//! `bench preallocation`: random first writes of 4 KiB to images and raw files of each kind of
//! preallocation. The series of requests by tenths of a second is in the JSON.

use crate::cell::{Backing, Before, Cell, Contestant, RawFile, Shape, Subclusters};
use crate::description::{Description, Source};
use crate::scale::Scale;

const REQUEST_BYTES: u64 = 4096;
/// Clusters of the image in bytes, as the mail of 2020 that asked this had them.
const CLUSTER_BYTES: u64 = 64 << 10;

/// Units of allocation that the mails suggest for raw files on XFS.
const HINTS: [RawFile; 2] = [RawFile::Hinted(64 << 10), RawFile::Hinted(1 << 20)];

/// The mails of 2020 on preallocation and XFS.
const SOURCE: Source = Source {
    disk_bytes: 25 << 30,
    requests: 600_000,
    words: "Conditions of the source (2020): fio in a guest, 25 GiB, random writes of 4 KiB, each block once, fixed \
            seed, depth 32, one job, O_DIRECT, clusters of 64 KiB, an L2 cache that covers the disk; 60 s after a \
            ramp of 5 s, 300 s without, 60 s after 60 s. Here: no guest, and 600 000 requests rather than a \
            duration; what a ramp would hide is in the series of the JSON.",
};

/// The table.
pub const TABLE: Description = Description {
    zero_methods: &["zero-range", "write"],
    source: Some(SOURCE),
    is_about_series: true,
    ..Description::usual("preallocation", cells)
};

/// Its cells.
fn cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = Vec::new();
    for depth in &scale.depths {
        let sparse = [RawFile::Sparse, HINTS[0], HINTS[1]];
        for (mode, raw) in [
            ("off", &sparse[..]),
            ("metadata", &[RawFile::Sparse]),
            ("falloc", &[RawFile::Allocated]),
            ("full", &[RawFile::Written]),
        ] {
            let mut shape = Shape::new(CLUSTER_BYTES, Subclusters::Off, Backing::None);
            shape.before = Before::Preallocated(mode);
            let mut contestants = scale.contestants_of_one_policy(raw);
            if mode != "off" {
                // No cluster is new: nothing is left to be made zero.
                contestants.retain(|c| !matches!(c, Contestant::CowslipZeroing(_)));
            }
            cells.push(Cell::new(
                shape,
                scale.writes(*depth, REQUEST_BYTES),
                contestants,
            ));
        }
    }
    cells
}
