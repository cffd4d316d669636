//! `bench steady`: reads and overwrites of what is allocated, where a thin image should cost what a
//! raw file costs; and first writes into an image that was filled and trimmed before, as a disk is
//! that has been in use.

use crate::cell::{Backing, Before, Cell, Direction, RawFile, Shape, Subclusters};
use crate::description::Description;
use crate::scale::Scale;

const REQUEST_BYTES: u64 = 4096;
/// Clusters of the image in bytes: QEMU's default.
const CLUSTER_BYTES: u64 = 64 << 10;

/// The table.
pub const TABLE: Description = Description::usual("steady", cells);

/// Its cells.
fn cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = Vec::new();
    for depth in &scale.depths {
        for subclusters in [Subclusters::Off, Subclusters::On] {
            for (before, direction) in [
                (Before::Filled, Direction::Read),
                (Before::Filled, Direction::Write),
                (Before::Trimmed, Direction::Write),
            ] {
                let mut load = scale.writes(*depth, REQUEST_BYTES);
                load.direction = direction;
                let mut shape = Shape::new(CLUSTER_BYTES, subclusters, Backing::None);
                shape.before = before;
                let yardsticks: &[RawFile] = match before {
                    Before::Trimmed => &[RawFile::Sparse, RawFile::Written],
                    _ => &[RawFile::Written],
                };
                let contestants = match before {
                    Before::Trimmed => scale.contestants(yardsticks),
                    _ => scale.contestants_of_one_policy(yardsticks),
                };
                cells.push(Cell::new(shape, load, contestants));
            }
        }
    }
    cells
}
