//! `bench discard`: what is left of the space when half of what was written is discarded, in pieces
//! smaller than clusters. Over NBD, since `qemu-img bench` does not discard: the same client for both.
//!
//! The trace is synthetic: 30 % of the disk in pieces of 64 KiB at random places, each once; half of
//! them, drawn at random, discarded. It follows from a seed.

use std::cell::Cell as Counter;
use std::path::Path;
use std::time::{Duration, Instant};

use cowslip_nbd::export::Durability;
use cowslip_nbd::{Client, ClientError, ConnectOptions};
use cowslip_queue::{Backend, Buf, BufMut, Queue, Stream};
use futures_util::future::try_join_all;

use super::cell::{Backing, Cell, CellLoad, Contestant, Shape, Subclusters};
use super::load::permuted;
use super::report::{Column, Measurement, column};
use super::stage::{Stage, Turn, mebibytes};
use super::tables::Scale;
use crate::cmd::demo::server::{Kind, PageCache, Server};
use crate::error::CommandError;
use crate::host_usage::HostUsage;
use crate::interrupt::RemovedOnInterrupt;

const PIECE_BYTES: u64 = 64 << 10;
const DEPTH: u64 = 32;
const SEED: u64 = 1;
/// Of a hundred pieces of the disk.
const WRITTEN: u64 = 30;

const WRITES: Column = column("writes/s", 0);
const CPU: Column = column("CPU us", 1);
const CLOSE: Column = column("close ms", 0);
const LIVE: Column = column("live MiB", 0);
const SPACE: Column = column("MiB", 0);
const OVER_LIVE: Column = column("over live", 3);
const EXTENTS: Column = column("extents", 0);

/// Its cells.
pub fn cells(scale: &Scale) -> Vec<Cell> {
    use Subclusters::{Off, On};
    let shapes = [
        (64 << 10, Off),
        (1 << 20, Off),
        (1 << 20, On),
        (2 << 20, On),
    ];
    let cells = shapes.map(|(cluster_bytes, subclusters)| {
        let ours = scale.policies.iter().map(|p| Contestant::Cowslip(p));
        Cell {
            shape: Shape::new(cluster_bytes, subclusters, Backing::None),
            load: CellLoad::writes(trace(scale.disk_bytes).len() as u64 / 2, DEPTH, PIECE_BYTES),
            contestants: ours.chain([Contestant::QemuServer]).collect(),
        }
    });
    cells.to_vec()
}

/// The pieces that are written, by number, in order; the second half is discarded afterwards.
fn trace(disk_bytes: u64) -> Vec<u64> {
    let pieces = disk_bytes / PIECE_BYTES;
    let written = (pieces * WRITTEN / 100).max(2) / 2 * 2;
    let places = (0..written).map(|index| permuted(SEED, index, pieces));
    let places: Vec<u64> = places.collect();
    // Those that are discarded are drawn anew: not the last ones that were written.
    let drawn = (0..written).map(|index| permuted(SEED + 1, index, written));
    drawn.map(|index| places[index as usize]).collect()
}

/// One run: served, written, discarded, flushed, closed, checked.
///
/// # Errors
/// The server fails, or the image is not sound.
pub fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let kind = match turn.contestant {
        Contestant::Cowslip(_) => Kind::Cowslip,
        _ => Kind::installed_peer().unwrap_or(Kind::QemuNbd),
    };
    let file = RemovedOnInterrupt::new(&stage.prepare(cell, turn.contestant)?);
    let page_cache = PageCache::probe(stage.directory())?;
    let server = Server::start(kind, file.path(), stage.directory(), page_cache)?;
    let queue = Queue::new(Backend::Auto)
        .map_err(|e| CommandError::new(format!("Could not make a queue: {e}")))?;
    let trace = trace(stage.disk_bytes());
    let taken = queue.block_on(take(server.socket(), &trace))?;
    let closing = Instant::now();
    let cost = server.stop()?;
    let close = closing.elapsed();
    stage.check(turn.contestant, file.path())?;
    let usage = HostUsage::of(file.path())?;
    stage.dispose(turn.contestant, file.path())?;
    let discards = (trace.len() / 2) as f64;
    let live_bytes = (trace.len() as u64 - trace.len() as u64 / 2) * PIECE_BYTES;
    let mut measurement = Measurement {
        // With the close: what is put off until then is part of the price.
        iops: discards / (taken.discarding + close).as_secs_f64(),
        figures: Vec::new(),
        told: serde_json::Value::Null,
    };
    let writes_a_second = trace.len() as f64 / taken.writing.as_secs_f64();
    let requests = trace.len() as f64 + discards;
    measurement.add(WRITES, Some(writes_a_second));
    measurement.add(CPU, Some(cost.cpu_seconds * 1e6 / requests));
    measurement.add(CLOSE, Some(close.as_secs_f64() * 1e3));
    measurement.add(LIVE, Some(mebibytes(live_bytes)));
    measurement.add(SPACE, Some(mebibytes(usage.bytes)));
    measurement.add(OVER_LIVE, Some(usage.bytes as f64 / live_bytes as f64));
    measurement.add(EXTENTS, usage.extents.map(|extents| extents as f64));
    Ok(measurement)
}

/// How long the two parts took, each with its flush.
struct Taken {
    writing: Duration,
    discarding: Duration,
}

async fn take(socket: &Path, trace: &[u64]) -> Result<Taken, CommandError> {
    let failed = |error: ClientError| CommandError::new(format!("the server fails: {error}"));
    let stream = Stream::connect_unix(socket).await;
    let stream = stream.map_err(|error| failed(error.into()))?;
    let client = Client::connect(stream, &ConnectOptions::new("")).await;
    let client = client.map_err(failed)?;
    let mut data = BufMut::zeroed(PIECE_BYTES as usize);
    data.fill(165);
    let data = data.freeze();
    let start = Instant::now();
    each(trace, async |offset| {
        let piece: Buf = data.clone();
        client.write(offset, piece, Durability::Cached).await
    })
    .await
    .map_err(failed)?;
    client.flush().await.map_err(failed)?;
    let writing = start.elapsed();
    let start = Instant::now();
    each(&trace[trace.len() / 2..], async |offset| {
        client.trim(offset, PIECE_BYTES, Durability::Cached).await
    })
    .await
    .map_err(failed)?;
    client.flush().await.map_err(failed)?;
    let discarding = start.elapsed();
    client.disconnect().await.map_err(failed)?;
    Ok(Taken {
        writing,
        discarding,
    })
}

/// Sends a request for each piece, [`DEPTH`] at a time.
async fn each(
    pieces: &[u64],
    request: impl AsyncFn(u64) -> Result<(), ClientError>,
) -> Result<(), ClientError> {
    let next = Counter::new(0);
    let worker = async || {
        while let Some(piece) = pieces.get(next.get()) {
            next.set(next.get() + 1);
            request(piece * PIECE_BYTES).await?;
        }
        Ok(())
    };
    try_join_all((0..DEPTH).map(|_| worker())).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trace_visits_each_piece_once() {
        let mut trace = trace(64 << 20);
        assert_eq!(trace.len(), 306);
        assert!(!trace.is_sorted());
        trace.sort_unstable();
        trace.dedup();
        assert_eq!(trace.len(), 306);
        assert!(trace.iter().all(|piece| *piece < 1024));
    }
}
