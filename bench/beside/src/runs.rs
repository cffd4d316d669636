//! One run: requests of one kind to one image, by one engine, on some threads.

use std::future::Future;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cowslip_queue::BufMut;
use futures_util::future::join_all;
use rustix::time::{ClockId, clock_gettime};

use crate::engines::Engine;

/// Bytes of a request.
pub const REQUEST_BYTES: u64 = 4096;
pub const CLUSTER_BYTES: u64 = 65536;

/// Kind of the requests of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// The image is opened, a block read, and the image closed.
    Open,
    /// Blocks are read at random.
    Read,
    /// Each write is the first to its cluster.
    FirstWrite,
    /// Blocks that are allocated are written at random.
    Overwrite,
    /// Each such write is followed by a flush.
    OverwriteFlush,
    /// Each first write is followed by a flush.
    FirstWriteFlush,
}

impl Row {
    pub fn is_first_write(self) -> bool {
        matches!(self, Row::FirstWrite | Row::FirstWriteFlush)
    }

    fn is_write(self) -> bool {
        !matches!(self, Row::Open | Row::Read)
    }

    fn flushes_each(self) -> bool {
        matches!(self, Row::OverwriteFlush | Row::FirstWriteFlush)
    }
}

/// The requests of a run: a limited number, begun within some time.
pub struct Requests {
    row: Row,
    disk_bytes: u64,
    seed: u64,
    most: u64,
    time: Duration,
    end: OnceLock<Instant>,
    next: AtomicU64,
}

/// An odd constant, far from any power of two: steps of it visit all of 2^n places.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

impl Requests {
    pub fn new(row: Row, disk_bytes: u64, (seed, most): (u64, u64), time: Duration) -> Requests {
        assert!(disk_bytes.is_power_of_two(), "steps visit all of it");
        Requests {
            row,
            disk_bytes,
            seed,
            most,
            time,
            end: OnceLock::new(),
            next: AtomicU64::new(0),
        }
    }

    /// Where request `index` goes. No two first writes go to one cluster.
    pub fn offset(&self, index: u64) -> u64 {
        let place = index.wrapping_add(self.seed).wrapping_mul(STEP);
        if !self.row.is_first_write() {
            let blocks = self.disk_bytes / REQUEST_BYTES;
            return (place >> 20) % blocks * REQUEST_BYTES;
        }
        let clusters = self.disk_bytes / CLUSTER_BYTES;
        let block = (place >> 40) % (CLUSTER_BYTES / REQUEST_BYTES);
        place % clusters * CLUSTER_BYTES + block * REQUEST_BYTES
    }

    /// The next request's place, while there is time.
    fn take(&self) -> Option<u64> {
        let end = self.end.get_or_init(|| Instant::now() + self.time);
        if Instant::now() >= *end {
            return None;
        }
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.most).then(|| self.offset(index))
    }

    /// How many have been made.
    pub fn made(&self) -> u64 {
        self.next.load(Ordering::Relaxed).min(self.most)
    }
}

/// The block that is written at `offset`, whichever write it is.
pub fn block(offset: u64) -> BufMut {
    let mut block = BufMut::for_overwrite(REQUEST_BYTES as usize);
    block.fill(0x5A);
    block[..8].copy_from_slice(&(offset + 1).to_le_bytes());
    block
}

/// Fails if these are not the bytes that were written at `offset`.
pub fn compare(offset: u64, block: &[u8]) {
    let is_ours = block[..8] == (offset + 1).to_le_bytes();
    assert!(
        is_ours && block[8..].iter().all(|byte| *byte == 0x5A),
        "other bytes at {offset}"
    );
}

/// Makes requests one after the other, until there are no more.
async fn ask<E: Engine>(engine: &E, requests: &Requests) {
    while let Some(offset) = requests.take() {
        if !requests.row.is_write() {
            let target = BufMut::for_overwrite(REQUEST_BYTES as usize);
            let read = engine.read(offset, target).await;
            assert_eq!(read[..8], (offset + 1).to_le_bytes(), "at {offset}");
            continue;
        }
        engine.write(offset, block(offset).freeze()).await;
        if requests.row.flushes_each() {
            engine.flush().await;
        }
    }
}

/// The time of a run.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    pub requests: u64,
    pub seconds: f64,
    /// CPU time of the process, with that of the kernel on its behalf.
    pub cpu_seconds: f64,
}

/// Clocks at the beginning of a run.
struct Watch(Instant, f64);

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

impl Watch {
    fn start() -> Watch {
        Watch(Instant::now(), cpu_seconds())
    }

    fn stop(self, requests: &Requests) -> Taken {
        Taken {
            requests: requests.made(),
            seconds: self.0.elapsed().as_secs_f64(),
            cpu_seconds: cpu_seconds() - self.1,
        }
    }
}

/// Opens the image again and again, and reads a block of it each time.
async fn open_often<E: Engine>(path: &Path, direct: bool, requests: &Requests) {
    while let Some(offset) = requests.take() {
        let engine = E::open(path, direct).await;
        let target = BufMut::for_overwrite(REQUEST_BYTES as usize);
        let read = engine.read(offset, target).await;
        assert_eq!(read[..8], (offset + 1).to_le_bytes(), "at {offset}");
        engine.close().await;
    }
}

/// A run on one thread, with `depth` requests in flight. Writes end with a flush, which counts.
pub fn on_one_thread<E: Engine>(
    (path, direct): (&Path, bool),
    requests: &Requests,
    depth: usize,
) -> Taken {
    E::run(async {
        if requests.row == Row::Open {
            let watch = Watch::start();
            open_often::<E>(path, direct, requests).await;
            return watch.stop(requests);
        }
        let engine = E::open(path, direct).await;
        let watch = Watch::start();
        join_all((0..depth).map(|_| ask(&engine, requests))).await;
        if requests.row.is_write() {
            engine.flush().await;
        }
        let taken = watch.stop(requests);
        engine.close().await;
        taken
    })
}

/// The same on several threads that share the image, each with `depth` requests in flight.
pub fn on_threads<E: Engine + Send + Sync>(
    (path, direct): (&Path, bool),
    requests: &Requests,
    (threads, depth): (usize, usize),
) -> Taken {
    let engine = E::run(E::open(path, direct));
    let watch = Watch::start();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| E::run(in_flight(&engine, requests, depth)));
        }
    });
    if requests.row.is_write() {
        E::run(engine.flush());
    }
    let taken = watch.stop(requests);
    E::run(engine.close());
    taken
}

fn in_flight<E: Engine>(engine: &E, requests: &Requests, depth: usize) -> impl Future<Output = ()> {
    let asking = (0..depth).map(move |_| ask(engine, requests));
    let all = join_all(asking);
    async move {
        all.await;
    }
}
