//! `bench fragmentation`: images that are filled by random writes of 4 KiB, block by block; then
//! how many extents they have, and how fast they are read in order and at random. What is written
//! in the order of arrival is read out of order: this is what that costs. A raw file that was
//! written in order is beside it.

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;

use crate::cell::{Backing, Cell, CellLoad, Direction, RawFile, Shape, Subclusters};
use crate::conditions::line_of;
use crate::description::Description;
use crate::host_usage::HostUsage;
use crate::report::{Column, Measurement, column};
use crate::run::run;
use crate::scale::Scale;
use crate::stage::{EXTENTS, SPACE, Stage, Turn, mebibytes};

const BLOCK_BYTES: u64 = 4096;
const DEPTH: u64 = 32;
/// Clusters in bytes: small ones, QEMU's default, large ones.
const CLUSTERS: [(u64, Subclusters); 4] = [
    (4 << 10, Subclusters::Off),
    (64 << 10, Subclusters::Off),
    (64 << 10, Subclusters::On),
    (1 << 20, Subclusters::On),
];

const FILLED: Column = column("fill/s", 0);
const IN_ORDER: Column = column("in order MiB/s", 0);

/// The table.
pub const TABLE: Description = Description {
    // All of it is written, block by block.
    disk_bytes: 1 << 30,
    measure,
    has_depths: false,
    ..Description::usual("fragmentation", cells)
};

/// Its cells. The load is the random reads.
fn cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = Vec::new();
    for backing in [Backing::None, Backing::Raw] {
        for (cluster_bytes, subclusters) in CLUSTERS {
            let mut load = scale.writes(DEPTH, BLOCK_BYTES);
            load.direction = Direction::Read;
            cells.push(Cell::new(
                Shape::new(cluster_bytes, subclusters, backing),
                load,
                scale.contestants(&[RawFile::Sparse, RawFile::Written]),
            ));
        }
    }
    cells
}

/// Makes one run: filled at random, read in order, read at random.
///
/// # Errors
/// A program fails, or the image is not sound.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let contestant = turn.contestant;
    let file = RemovedOnInterrupt::new(&stage.prepare(cell, contestant)?);
    let blocks = stage.disk_bytes() / BLOCK_BYTES;
    let mut filled = None;
    if !contestant.is_raw_written() {
        let load = CellLoad::writes(blocks, DEPTH, BLOCK_BYTES);
        let filling = stage.command(
            &Cell {
                load,
                ..cell.clone()
            },
            contestant,
            file.path(),
        );
        filled = Some(blocks as f64 / run(&mut { filling })?.seconds);
    }
    stage.check(contestant, file.path())?;
    let usage = HostUsage::of(file.path())?;
    let in_order = run(&mut stage.in_order(contestant, file.path(), Direction::Read))?;
    let mut reading = stage.command(cell, contestant, file.path());
    let at_random = run(&mut reading)?;
    stage.dispose(contestant, file.path())?;
    let iops = cell.load.requests as f64 / at_random.seconds;
    let output = serde_json::from_str(&at_random.output).unwrap_or_default();
    let mut measurement = Measurement::new(iops, output, Some(line_of(&reading)));
    measurement.add(FILLED, filled);
    measurement.add(
        IN_ORDER,
        Some(mebibytes(stage.disk_bytes()) / in_order.seconds),
    );
    measurement.add(SPACE, Some(mebibytes(usage.bytes)));
    measurement.add(EXTENTS, usage.extents.map(|extents| extents as f64));
    Ok(measurement)
}
