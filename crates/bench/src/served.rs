//! `bench served`: random first writes over NBD. Each server has a fresh image and the same client,
//! fio with its engine for NBD: the same places in the same order, each once, and a flush at the
//! end.

use std::time::Instant;

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;
use serde_json::Value;

use crate::cell::{Backing, Cell, Shape, Subclusters};
use crate::description::Description;
use crate::fio::{Fio, Target};
use crate::peers::Peer;
use crate::report::{Column, Measurement, column};
use crate::scale::Scale;
use crate::server::Transport;
use crate::stage::{CLOSE, CPU, EXTENTS, P99, SPACE, Stage, Turn, mebibytes};

const CLUSTER_BYTES: u64 = 64 << 10;
const REQUEST_BYTES: u64 = 4096;

const MEAN: Column = column("mean us", 0);

/// The table.
pub const TABLE: Description = Description {
    policies: &["auto"],
    peers: &[Peer::StorageDaemon, Peer::QemuNbd],
    measure,
    ..Description::usual("served", cells)
};

/// Its cells.
fn cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = Vec::new();
    for depth in &scale.depths {
        for backing in [Backing::None, Backing::Raw] {
            for subclusters in [Subclusters::Off, Subclusters::On] {
                cells.push(Cell::new(
                    Shape::new(CLUSTER_BYTES, subclusters, backing),
                    scale.writes(*depth, REQUEST_BYTES),
                    scale.servers(),
                ));
            }
        }
    }
    cells
}

/// Makes one run: served, written, flushed, closed, checked.
///
/// # Errors
/// The server or fio fails, or the image is not sound.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let file = RemovedOnInterrupt::new(&stage.prepare(cell, turn.contestant)?);
    let server = stage.serve(turn.contestant, file.path(), Transport::Nbd)?;
    let socket = RemovedOnInterrupt::new(server.at());
    let before = server.cost_so_far()?.cpu_seconds;
    let mut fio = Fio::new(Target::Nbd(server.at()), &cell.load, stage.disk_bytes());
    let figures = fio.run()?;
    let cpu = server.cost_so_far()?.cpu_seconds - before;
    let closing = Instant::now();
    server.stop()?;
    let close = closing.elapsed();
    drop(socket);
    let usage = stage.finish(turn.contestant, file.path())?;
    let mut measurement = Measurement::new(figures.iops, Value::Null, Some(fio.line()));
    measurement.add(CPU, Some(cpu * 1e6 / figures.requests));
    measurement.add(MEAN, Some(figures.mean_us));
    measurement.add(P99, figures.p99_us);
    measurement.add(CLOSE, Some(close.as_secs_f64() * 1e3));
    measurement.add(SPACE, Some(mebibytes(usage.bytes)));
    measurement.add(EXTENTS, usage.extents.map(|extents| extents as f64));
    Ok(measurement)
}
