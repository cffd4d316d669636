//! `bench vhost-user` and `bench fuse`: how fast a disk is for virtual machines and for programs
//! that take files. Our server and qemu-storage-daemon's serve the same image in turn to the same
//! client: our own front end of vhost-user, or fio.
//!
//! A server of vhost-user is also killed under load and started again, and handed over to a
//! successor: the figure is the longest time without a completion.

use std::path::Path;
use std::time::{Duration, Instant};

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;
use cowslip_front::load::{Load, READ, WRITE};
use cowslip_load::{Histogram, permuted};
use serde_json::Value;

use self::restarts::gaps;
use crate::cell::{Backing, Before, Cell, CellLoad, Direction, Shape, Subclusters, Way};
use crate::description::Description;
use crate::fio::{Fio, Target};
use crate::peers::Peer;
use crate::report::{Column, Measurement, column};
use crate::scale::Scale;
use crate::server::{Server, Transport};
use crate::stage::{P99, SPACE, Stage, Turn, mebibytes};

mod restarts;

const CLUSTER_BYTES: u64 = 64 << 10;
const REQUEST_BYTES: u64 = 4096;
/// First writes are slower than others, and each needs a place of its own.
const FEWER_FIRST_WRITES: u64 = 8;
/// Seed of the places, the same for all.
const SEED: u64 = 7;
/// Descriptors of the front end's ring: three for each of the requests in flight, and some.
const RING_SIZE: u16 = 256;

/// CPU time of the server for a request, user and system.
const CPU: Column = column("CPU us", 2);
const P50: Column = column("p50 us", 1);
/// The longest time without a completion, of the restarts of a run.
const GAP: Column = column("gap ms", 1);

/// The table of vhost-user.
pub const VHOST_USER: Description = Description {
    note: Some(
        "NBD: the same image by fio over NBD. killed, handed over: 'gap ms' is the longest time \
         without a completion, of the restarts of a run.",
    ),
    ..served("vhost-user", vhost_user_cells)
};

/// The table of FUSE.
pub const FUSE: Description = served("fuse", fuse_cells);

const fn served(name: &'static str, cells: fn(&Scale) -> Vec<Cell>) -> Description {
    Description {
        disk_bytes: 1 << 30,
        quick_disk_bytes: 256 << 20,
        // Seconds, at the rates of these transports.
        requests: 200_000,
        policies: &["auto"],
        peers: &[Peer::StorageDaemon],
        measure,
        ..Description::usual(name, cells)
    }
}

/// Reads and overwrites at each depth.
fn of_filled_disk(scale: &Scale, transport: Transport) -> Vec<Cell> {
    let pairs = scale
        .depths
        .iter()
        .flat_map(|depth| [Direction::Read, Direction::Write].map(|direction| (*depth, direction)));
    let cells = pairs.map(|(depth, direction)| filled(scale, (depth, direction), transport));
    cells.collect()
}

fn filled(scale: &Scale, (depth, direction): (u64, Direction), transport: Transport) -> Cell {
    let mut shape = Shape::new(CLUSTER_BYTES, Subclusters::Off, Backing::None);
    shape.before = Before::Filled;
    let mut load = scale.writes(depth, REQUEST_BYTES);
    load.direction = direction;
    Cell {
        way: Some(Way::Served(transport)),
        ..Cell::new(shape, load, scale.servers())
    }
}

fn vhost_user_cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = of_filled_disk(scale, Transport::VhostUser);
    let Some(depth) = scale.depths.iter().copied().max() else {
        return cells;
    };
    let first_writes = (scale.requests_at(depth, REQUEST_BYTES) / FEWER_FIRST_WRITES).max(1);
    cells.push(Cell {
        way: Some(Way::Served(Transport::VhostUser)),
        ..Cell::new(
            Shape::new(CLUSTER_BYTES, Subclusters::On, Backing::None),
            CellLoad::writes(first_writes, depth, REQUEST_BYTES),
            scale.servers(),
        )
    });
    cells.push(filled(scale, (depth, Direction::Read), Transport::Nbd));
    for way in [Way::Killed, Way::HandedOver] {
        let mut cell = filled(scale, (depth, Direction::Write), Transport::VhostUser);
        cell.way = Some(way);
        // QEMU's server can do neither.
        cell.contestants
            .retain(|contestant| contestant.is_cowslip());
        cells.push(cell);
    }
    cells
}

fn fuse_cells(scale: &Scale) -> Vec<Cell> {
    of_filled_disk(scale, Transport::Fuse)
}

/// Places of requests in bytes, all at random, each once before any comes again.
fn places(load: &CellLoad, disk_bytes: u64) -> impl Iterator<Item = u64> + use<> {
    let (count, bytes) = ((disk_bytes / load.request_bytes).max(1), load.request_bytes);
    (0..).map(move |index| permuted(SEED, index % count, count) * bytes)
}

/// A load on a queue of the front end.
fn queue_load<I: Iterator<Item = u64>>(load: &CellLoad, places: I) -> std::io::Result<Load<I>> {
    let kind = match load.direction {
        Direction::Read => READ,
        _ => WRITE,
    };
    let bytes = usize::try_from(load.request_bytes).unwrap_or(usize::MAX);
    let depth = usize::try_from(load.depth).unwrap_or(usize::MAX);
    Load::new(0, (kind, bytes), depth, places)
}

/// Makes one run: served, loaded, closed, checked.
///
/// # Errors
/// The server or the client fails, or the image is not sound.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let way = cell.way.expect("each cell of these tables has one");
    let is_shared = cell.shape.before == Before::Filled;
    let image = match is_shared {
        true => stage.filled_image(&cell.shape)?,
        false => stage.prepare(cell, turn.contestant)?,
    };
    let removed = (!is_shared).then(|| RemovedOnInterrupt::new(&image));
    let mut server = stage.serve(turn.contestant, &image, way.transport())?;
    let at = RemovedOnInterrupt::new(server.at());
    let mut measurement = match way {
        Way::Killed | Way::HandedOver => gaps(&mut server, way, &cell.load, stage.disk_bytes())?,
        Way::Served(Transport::VhostUser) => by_front_end(&server, &cell.load, stage.disk_bytes())?,
        Way::Served(Transport::Nbd) => by_fio(&server, Target::Nbd(server.at()), cell, stage)?,
        Way::Served(Transport::Fuse) => by_fio(&server, Target::File(server.at()), cell, stage)?,
    };
    server.stop()?;
    drop(at);
    match is_shared {
        true => stage.check(turn.contestant, &image)?,
        false => {
            let usage = stage.finish(turn.contestant, &image)?;
            measurement.add(SPACE, Some(mebibytes(usage.bytes)));
        }
    }
    drop(removed);
    Ok(measurement)
}

fn by_fio(
    server: &Server,
    target: Target<'_>,
    cell: &Cell,
    stage: &Stage<'_>,
) -> Result<Measurement, CommandError> {
    let mut fio = Fio::new(target, &cell.load, stage.disk_bytes());
    let before = server.cost_so_far()?.cpu_seconds;
    let figures = fio.run()?;
    let cpu = server.cost_so_far()?.cpu_seconds - before;
    let mut measurement = Measurement::new(figures.iops, Value::Null, Some(fio.line()));
    measurement.add(CPU, Some(cpu * 1e6 / figures.requests));
    measurement.add(P50, figures.p50_us);
    measurement.add(P99, figures.p99_us);
    Ok(measurement)
}

fn by_front_end(
    server: &Server,
    load: &CellLoad,
    disk_bytes: u64,
) -> Result<Measurement, CommandError> {
    let mut run = FrontRun::default();
    let before = server.cost_so_far()?.cpu_seconds;
    let seconds = run.drive(server.at(), load, disk_bytes);
    let seconds = seconds.map_err(|e| CommandError::new(format!("The load fails: {e}")))?;
    let cpu = server.cost_so_far()?.cpu_seconds - before;
    let requests = load.requests as f64;
    let mut measurement = Measurement::new(requests / seconds, Value::Null, None);
    measurement.add(CPU, Some(cpu * 1e6 / requests));
    run.latencies(&mut measurement);
    Ok(measurement)
}

/// Latencies of the requests of a front end.
#[derive(Default)]
struct FrontRun {
    latency: Histogram,
}

impl FrontRun {
    /// Makes the requests of a load; the time until the last one has completed, in seconds.
    fn drive(&mut self, socket: &Path, load: &CellLoad, disk_bytes: u64) -> std::io::Result<f64> {
        let mut front = cowslip_front::Front::connect(socket, restarts::FEATURES)?;
        let mut queue = front.queue(0, RING_SIZE)?;
        let count = usize::try_from(load.requests).unwrap_or(usize::MAX);
        let mut requests = queue_load(load, places(load, disk_bytes).take(count))?;
        let begun = Instant::now();
        requests.run(&mut queue, |latency| self.latency.add(latency))?;
        let seconds = begun.elapsed().as_secs_f64();
        front.stop_queue(0)?;
        Ok(seconds)
    }

    fn latencies(&self, measurement: &mut Measurement) {
        let microseconds = |latency: Duration| Some(latency.as_secs_f64() * 1e6);
        measurement.add(P50, microseconds(self.latency.percentile(500_000)));
        measurement.add(P99, microseconds(self.latency.percentile(990_000)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_visited_each_once_and_come_round_again() {
        let load = CellLoad::writes(1, 1, 4096);
        let mut first: Vec<u64> = places(&load, 64 << 10).take(16).collect();
        let again: Vec<u64> = places(&load, 64 << 10).skip(16).take(16).collect();
        assert_eq!(first, again);
        assert!(!first.is_sorted());
        first.sort_unstable();
        assert!(first.into_iter().eq((0..16).map(|block| block * 4096)));
    }
}
