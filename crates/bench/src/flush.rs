//! `bench flush`: first writes with a flush after every few. What a flush writes and waits for is
//! the price; skipping one would be a loss of data, so they are counted at the device too.

use crate::cell::{Backing, Cell, CellLoad, RawFile, Shape, Subclusters};
use crate::description::Description;
use crate::scale::Scale;

/// Sizes of clusters in bytes.
const CLUSTERS: [u64; 2] = [4 << 10, 64 << 10];
/// Writes to a flush; all of them are in flight together.
const INTERVALS: [u64; 3] = [1, 8, 32];
const REQUEST_BYTES: u64 = 4096;
/// Interval from which on there are as many requests as in other tables; fewer where flushes come
/// more often.
const FULL_INTERVAL: u64 = 32;

/// The table.
pub const TABLE: Description = Description {
    // As many as lie between two flushes.
    has_depths: false,
    ..Description::usual("flush", cells)
};

/// Its cells.
fn cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = Vec::new();
    for cluster_bytes in CLUSTERS {
        for interval in INTERVALS {
            let most = scale.disk_bytes / REQUEST_BYTES;
            let flushes = (scale.requests / FULL_INTERVAL * 4).clamp(1, most / interval);
            let flushes = flushes.min((scale.requests / interval).max(1));
            cells.push(Cell::new(
                Shape::new(cluster_bytes, Subclusters::Off, Backing::None),
                CellLoad {
                    flush_interval: interval,
                    ..CellLoad::writes(flushes * interval, interval, REQUEST_BYTES)
                },
                scale.contestants(&[RawFile::Sparse, RawFile::Written]),
            ));
        }
    }
    cells
}
