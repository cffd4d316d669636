//! `bench metadata`: random requests over a disk of 8 TiB whose tables are larger than the memory
//! that they may take. Each budget is held against none; QEMU's cache of the same size is beside
//! it.
//!
//! The image is laid out in the order of the disk, or with 30 % of its entries scattered; it is
//! sparse, but for its metadata and what the requests touch. Ours visit random places, `qemu-img
//! bench` those of its step: it knows no other order. Reads of both, and overwrites, find written
//! space below. Ours are timed from when each table has been touched once, qemu-img's from the
//! start. After overwrites, which move nothing, our own `check` reads the image: qemu-img's takes
//! many minutes where entries are scattered.

use std::path::{Path, PathBuf};
use std::process::Command;

use cowslip_console::error::{CommandError, failed};
use cowslip_testbed::image::{Design, Mapping};
use serde_json::Value;

use crate::cell::{
    Backing, Before, CacheBudget, Cell, CellLoad, Contestant, Direction, Layout, Shape, Subclusters,
};
use crate::conditions::line_of;
use crate::description::Description;
use crate::report::{Column, Measurement, column};
use crate::run::run;
use crate::scale::Scale;
use crate::stage::{PATTERN, RSS, Stage, Turn, mebibytes};

const REQUEST_BYTES: u64 = 4096;
const SEED: &str = "--random=1";
/// A slice of a table, the unit of our cache, in bytes.
const SLICE_BYTES: u64 = 4096;

const HITS: Column = column("hits", 0);
const MISSES: Column = column("misses", 0);
/// Size of the cache at the end.
const CACHED: Column = column("cached MiB", 1);
const OPEN: Column = column("open ms", 1);
const CLOSE: Column = column("close ms", 1);

/// Note below the table.
const NOTE: &str = "Cowslip is timed from when each table has been touched once; qemu-img from its start, closing included, at places of its \
                        step. So they are not compared: 'x unlimited' holds Cowslip against itself with memory for all tables.";

/// The table.
pub const TABLE: Description = Description {
    // Sparse, but for its metadata.
    disk_bytes: 8 << 40,
    quick_disk_bytes: 8 << 40,
    // Fewer would find few places twice.
    requests: 100_000,
    note: Some(NOTE),
    // Tables and counts of the smallest clusters, and what the requests write.
    files_bytes: |disk_bytes| disk_bytes / 4096 + (4 << 30),
    measure,
    ..Description::usual("metadata", cells)
};

/// Its cells: those of an image follow one another.
fn cells(scale: &Scale) -> Vec<Cell> {
    use Subclusters::{Off, On};
    let mut cells = Vec::new();
    for (cluster_bytes, subclusters) in [
        (64 << 10, Off),
        (1 << 20, Off),
        (1 << 20, On),
        (2 << 20, On),
    ] {
        for layout in [Layout::Contiguous, Layout::Scattered] {
            let mut shape = Shape::new(cluster_bytes, subclusters, Backing::None);
            shape.before = Before::Laid(layout);
            for depth in &scale.depths {
                for direction in [Direction::Read, Direction::Write] {
                    cells.push(cell(scale, shape, (*depth, direction)));
                }
            }
        }
    }
    cells
}

fn cell(scale: &Scale, shape: Shape, (depth, direction): (u64, Direction)) -> Cell {
    use CacheBudget::{Mebibytes, Unlimited};
    let mut load = scale.writes(depth, REQUEST_BYTES);
    load.direction = direction;
    let budgets = [Mebibytes(64), Mebibytes(128)];
    let ours = budgets.into_iter().chain([Unlimited]);
    let qemus = budgets.map(Contestant::QemuImgCached);
    Cell::new(
        shape,
        load,
        ours.map(Contestant::CowslipCached).chain(qemus).collect(),
    )
}

/// Makes one run on the image of the cell, which is made if it is not the last one's.
///
/// # Errors
/// A program fails, or the image is not sound.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let path = image(stage, &cell.shape)?;
    let mut command = bench(stage, turn.contestant, &path);
    add_load(&mut command, stage, turn.contestant, &cell.load);
    let ours = matches!(turn.contestant, Contestant::CowslipCached(_));
    if ours {
        let slices = stage.disk_bytes() / bytes_of_slice(&cell.shape);
        command.arg(format!("--warm-up={}", slices.max(1)));
        command.arg("--json");
    }
    let line = line_of(&command);
    let run = run(&mut command)?;
    if cell.load.direction == Direction::Write {
        stage.check_ourselves(&path)?;
    }
    // QEMU prints no figures; without them the output is two lines of text.
    let output: Value = serde_json::from_str(&run.output).unwrap_or_default();
    let requests = cell.load.requests as f64;
    let iops = output["iops"].as_f64().unwrap_or(requests / run.seconds);
    let mut measurement = Measurement::new(iops, Value::Null, Some(line));
    let milliseconds = |name: &str| output[name].as_f64().map(|seconds| seconds * 1e3);
    let cache = |name: &str| output["cache"][name].as_f64();
    measurement.add(HITS, cache("hits"));
    measurement.add(MISSES, cache("misses"));
    measurement.add(
        CACHED,
        output["cache"]["used-bytes"].as_u64().map(mebibytes),
    );
    measurement.add(RSS, Some(mebibytes(run.peak_rss_bytes)));
    measurement.add(OPEN, milliseconds("open-seconds"));
    measurement.add(CLOSE, milliseconds("close-seconds"));
    measurement.output = output;
    Ok(measurement)
}

/// Bytes of the disk that a slice maps.
fn bytes_of_slice(shape: &Shape) -> u64 {
    let entry_bytes = match shape.subclusters {
        Subclusters::On => 16,
        Subclusters::Off => 8,
    };
    SLICE_BYTES / entry_bytes * shape.cluster_bytes
}

fn bench(stage: &Stage<'_>, contestant: Contestant, path: &Path) -> Command {
    let budget = match contestant {
        Contestant::QemuImgCached(budget) | Contestant::CowslipCached(budget) => budget,
        _ => CacheBudget::Unlimited,
    };
    let options = format!("l2-cache-size={}", budget.bytes());
    stage.bench_with_options(contestant, path, &options)
}

fn add_load(command: &mut Command, stage: &Stage<'_>, contestant: Contestant, load: &CellLoad) {
    if load.direction == Direction::Write {
        command.args(["-w", PATTERN]);
    }
    command.args(["-c", &load.requests.to_string()]);
    command.args(["-d", &load.depth.to_string()]);
    command.args(["-s", &load.request_bytes.to_string()]);
    command.arg(match contestant {
        Contestant::QemuImgCached(_) => {
            format!("--step-size={}", stage.step_bytes(load.request_bytes))
        }
        _ => SEED.to_string(),
    });
}

/// The image of this shape, with space below all that will be requested.
fn image(stage: &Stage<'_>, shape: &Shape) -> Result<PathBuf, CommandError> {
    let directory = stage.shared_files(&shape.name(), |directory| {
        make(stage, shape, &directory.join("image.qcow2"))
    })?;
    Ok(directory.join("image.qcow2"))
}

fn make(stage: &Stage<'_>, shape: &Shape, path: &Path) -> Result<(), CommandError> {
    let design = Design {
        disk_bytes: stage.disk_bytes(),
        cluster_bits: shape.cluster_bytes.ilog2(),
        extended_l2: shape.subclusters == Subclusters::On,
        mapping: match shape.before {
            Before::Laid(Layout::Scattered) => Mapping::PartlyShuffled,
            _ => Mapping::InOrder,
        },
    };
    design.write(path).map_err(|e| failed("write", path, &e))?;
    let unlimited = CacheBudget::Unlimited;
    let load = CellLoad::writes(stage.requests_at(32, REQUEST_BYTES), 32, REQUEST_BYTES);
    // The places of ours, then those of qemu-img; ours writes both.
    for places in [
        Contestant::CowslipCached(unlimited),
        Contestant::QemuImgCached(unlimited),
    ] {
        let mut command = bench(stage, Contestant::CowslipCached(unlimited), path);
        add_load(&mut command, stage, places, &load);
        run(&mut command)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_map_what_the_format_says() {
        let plain = Shape::new(64 << 10, Subclusters::Off, Backing::None);
        assert_eq!(bytes_of_slice(&plain), 32 << 20);
        let extended = Shape::new(1 << 20, Subclusters::On, Backing::None);
        assert_eq!(bytes_of_slice(&extended), 256 << 20);
    }
}
