//! `bench discard`: what is left of the space when half of what was written is discarded, in pieces
//! smaller than clusters. Over NBD, since `qemu-img bench` does not discard: the same client for
//! both.
//!
//! Two traces: a synthetic one, and what a file system asked of its disk ([`mod@trace`]).

use std::cell::Cell as Counter;
use std::path::Path;
use std::time::{Duration, Instant};

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;
use cowslip_nbd::export::{Durability, Space, ZeroOptions};
use cowslip_nbd::{Client, ClientError, ConnectOptions};
use cowslip_queue::{Backend, Buf, BufMut, Queue, Stream};
use futures_util::future::try_join_all;

use self::trace::{CHURN_DISK_BYTES, PIECE_BYTES, Request, Trace, Verb};
use crate::cell::{Backing, Cell, CellLoad, Direction, Shape, Subclusters};
use crate::description::Description;
use crate::peers::Peer;
use crate::report::{Column, Measurement, column};
use crate::scale::Scale;
use crate::server::Transport;
use crate::stage::{CLOSE, CPU, EXTENTS, SPACE, Stage, Turn, mebibytes};

mod trace;

const DEPTH: u64 = 32;

const WRITES: Column = column("writes/s", 0);
const LIVE: Column = column("live MiB", 0);
const OVER_LIVE: Column = column("over live", 3);

/// The table.
pub const TABLE: Description = Description {
    disk_bytes: 8 << 30,
    peers: &[Peer::StorageDaemon, Peer::QemuNbd],
    // There is no raw file.
    files_bytes: |disk_bytes| disk_bytes / 2 * 3,
    measure,
    has_depths: false,
    has_requests: false,
    ..Description::usual("discard", cells)
};

/// Its cells; those of the recorded trace where the disk is large enough for it.
fn cells(scale: &Scale) -> Vec<Cell> {
    use Subclusters::{Off, On};
    let shapes = [
        (64 << 10, Off),
        (1 << 20, Off),
        (1 << 20, On),
        (2 << 20, On),
    ];
    let churn = (scale.disk_bytes >= CHURN_DISK_BYTES).then_some(Direction::Churn);
    let cells = [Some(Direction::Write), churn]
        .into_iter()
        .flatten()
        .flat_map(|direction| {
            shapes.map(|(cluster_bytes, subclusters)| {
                let requests = trace(direction, scale.disk_bytes).len();
                Cell::new(
                    Shape::new(cluster_bytes, subclusters, Backing::None),
                    CellLoad {
                        direction,
                        ..CellLoad::writes(requests, DEPTH, PIECE_BYTES)
                    },
                    scale.servers(),
                )
            })
        });
    cells.collect()
}

fn trace(direction: Direction, disk_bytes: u64) -> Trace {
    match direction {
        Direction::Churn => Trace::churn(),
        Direction::Read | Direction::Write => Trace::synthetic(disk_bytes),
    }
}

/// Makes one run: served, written, discarded, flushed, closed, checked.
///
/// # Errors
/// The server fails, or the image is not sound.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let file = RemovedOnInterrupt::new(&stage.prepare(cell, turn.contestant)?);
    let server = stage.serve(turn.contestant, file.path(), Transport::Nbd)?;
    let queue = Queue::new(Backend::Auto)
        .map_err(|e| CommandError::new(format!("Could not make a queue: {e}")))?;
    let trace = trace(cell.load.direction, stage.disk_bytes());
    let taken = queue.block_on(take(server.at(), &trace))?;
    let closing = Instant::now();
    let cost = server.stop()?;
    let close = closing.elapsed();
    let usage = stage.finish(turn.contestant, file.path())?;
    let timed = match taken.writing {
        // The discards alone are timed.
        Some(_) => trace.count(Verb::Discard),
        None => trace.len(),
    };
    // With the close: what is put off until then is part of the price.
    let iops = timed as f64 / (taken.rest + close).as_secs_f64();
    let mut measurement = Measurement::new(iops, serde_json::Value::Null, None);
    let writes = trace.count(Verb::Write) as f64;
    let writes_a_second = taken.writing.map(|time| writes / time.as_secs_f64());
    measurement.add(WRITES, writes_a_second);
    measurement.add(CPU, Some(cost.cpu_seconds * 1e6 / trace.len() as f64));
    measurement.add(CLOSE, Some(close.as_secs_f64() * 1e3));
    measurement.add(LIVE, Some(mebibytes(trace.live_bytes)));
    measurement.add(SPACE, Some(mebibytes(usage.bytes)));
    measurement.add(
        OVER_LIVE,
        Some(usage.bytes as f64 / trace.live_bytes as f64),
    );
    measurement.add(EXTENTS, usage.extents.map(|extents| extents as f64));
    Ok(measurement)
}

/// How long it took, with its flushes.
struct Taken {
    /// The first part, if it is writes alone, and more follows.
    writing: Option<Duration>,
    rest: Duration,
}

async fn take(socket: &Path, trace: &Trace) -> Result<Taken, CommandError> {
    let failed = |error: ClientError| CommandError::new(format!("the server fails: {error}"));
    let stream = Stream::connect_unix(socket).await;
    let stream = stream.map_err(|error| failed(error.into()))?;
    let client = Client::connect(stream, &ConnectOptions::new("")).await;
    let client = client.map_err(failed)?;
    let longest = trace.parts.iter().flat_map(|part| &part.requests);
    let longest = longest.filter(|request| request.verb == Verb::Write);
    let longest = longest.map(|request| request.range.end - request.range.start);
    let mut data = BufMut::zeroed(longest.max().unwrap_or(0) as usize);
    data.fill(165);
    let data = data.freeze();
    let is_writing = |requests: &[Request]| requests.iter().all(|r| r.verb == Verb::Write);
    let mut writing = None;
    let mut start = Instant::now();
    for (index, part) in trace.parts.iter().enumerate() {
        each(&client, &part.requests, &data).await.map_err(failed)?;
        if part.flush {
            client.flush().await.map_err(failed)?;
        }
        if index == 0 && trace.parts.len() == 2 && is_writing(&part.requests) {
            writing = Some(start.elapsed());
            start = Instant::now();
        }
    }
    let rest = start.elapsed();
    client.disconnect().await.map_err(failed)?;
    Ok(Taken { writing, rest })
}

/// Sends the requests, [`DEPTH`] at a time.
async fn each(client: &Client, requests: &[Request], data: &Buf) -> Result<(), ClientError> {
    let next = Counter::new(0);
    let worker = async || {
        while let Some(Request { verb, range }) = requests.get(next.get()) {
            next.set(next.get() + 1);
            let len = range.end - range.start;
            match verb {
                Verb::Write => {
                    let piece = data.slice(0, len as usize);
                    client.write(range.start, piece, Durability::Cached).await?;
                }
                Verb::Discard => client.trim(range.start, len, Durability::Cached).await?,
                Verb::Zero => {
                    let how = ZeroOptions {
                        durability: Durability::Cached,
                        space: Space::Release,
                        fast_only: false,
                    };
                    client.write_zeroes(range.start, len, how).await?;
                }
            }
        }
        Ok(())
    };
    try_join_all((0..DEPTH).map(|_| worker())).await.map(drop)
}
