//! Requests of one image on one thread and on several at a time: whether threads get into each
//! other's way. Its file is memory, and reads and writes of the guest's data end at once, so what
//! is measured is the engine.
//!
//! ```text
//! cargo run --release -p cowslip --example cores -- read 2 2
//! ```
//!
//! The arguments are `read` or `write` (2 KiB at random, of 1 GiB that is allocated), the threads,
//! and the seconds of a run. Five runs on one thread and on all take turns; it prints the median
//! of their requests a second.
#![allow(clippy::unwrap_used)] // It ends by panicking.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Capabilities, Durability, FileExtent, Space};
use cowslip::image::{Format, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Image};
use cowslip_queue::{Backend, IoVec, IoVecMut, Pending, Queue};

const DISK_BYTES: u64 = 1 << 30;
/// Bytes of a request, and of those that fill the image: no table is read or written in pieces of
/// these sizes, so what has them is the guest's data.
const REQUEST_BYTES: usize = 2048;
const FILL_BYTES: usize = 1 << 20;
const RUNS: usize = 5;

/// A file in memory that leaves out the guest's data.
#[derive(Debug)]
struct NoData {
    memory: MemoryFile,
}

fn is_data(len: usize) -> bool {
    len == REQUEST_BYTES || len == FILL_BYTES
}

impl BlockFile for NoData {
    fn name(&self) -> &str {
        self.memory.name()
    }

    fn capabilities(&self) -> &Capabilities {
        self.memory.capabilities()
    }

    fn len(&self) -> Pending<std::io::Result<u64>> {
        self.memory.len()
    }

    fn read(&self, offset: u64, target: IoVecMut) -> Pending<(std::io::Result<()>, IoVecMut)> {
        match is_data(target.len()) {
            true => Pending::ready((Ok(()), target)),
            false => self.memory.read(offset, target),
        }
    }

    fn write(
        &self,
        offset: u64,
        data: IoVec,
        durability: Durability,
    ) -> Pending<std::io::Result<()>> {
        match is_data(data.len()) {
            true => Pending::ready(Ok(())),
            false => self.memory.write(offset, data, durability),
        }
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<std::io::Result<()>> {
        self.memory.zero(offset, len, space)
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<std::io::Result<()>> {
        self.memory.discard(offset, len)
    }

    fn allocate(&self, offset: u64, len: u64) -> Pending<std::io::Result<()>> {
        self.memory.allocate(offset, len)
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<std::io::Result<Vec<FileExtent>>> {
        self.memory.extents(offset, len)
    }

    fn flush(&self) -> Pending<std::io::Result<()>> {
        self.memory.flush()
    }

    fn set_len(&self, len: u64) -> Pending<std::io::Result<()>> {
        self.memory.set_len(len)
    }
}

/// An open image all of whose clusters are allocated.
async fn image() -> Image {
    let file: Arc<dyn BlockFile> = Arc::new(NoData {
        memory: MemoryFile::new("image", Vec::new(), 1),
    });
    let options = CreateOptions::new(DISK_BYTES);
    create(Arc::clone(&file), None, &options).await.unwrap();
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        ..OpenOptions::default()
    };
    let image = Image::open(file, options, &NoFiles).await.unwrap();
    let data = Buf::zeroed(FILL_BYTES);
    for offset in (0..DISK_BYTES).step_by(FILL_BYTES) {
        let written = image.write(offset, data.clone(), Durability::Cached);
        written.await.unwrap();
    }
    image.flush().await.unwrap();
    image
}

/// Requests of one thread until the time is over.
async fn work(image: &Image, thread: u64, writes: bool, until: Instant) -> u64 {
    let mut state = thread + 1;
    let mut requests = 0;
    let data = Buf::zeroed(REQUEST_BYTES);
    let mut target = BufMut::zeroed(REQUEST_BYTES);
    while Instant::now() < until {
        for _ in 0..64 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let offset = (state >> 33) % (DISK_BYTES / 4096) * 4096;
            match writes {
                true => {
                    let written = image.write(offset, data.clone(), Durability::Cached);
                    written.await.unwrap();
                }
                false => target = image.read(offset, target).await.unwrap(),
            }
            requests += 1;
        }
    }
    requests
}

/// Requests a second of a number of threads.
fn run(image: &Image, threads: u64, writes: bool, time: Duration) -> f64 {
    let (begun, until) = (Instant::now(), Instant::now() + time);
    let requests: u64 = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    let queue = Queue::new(Backend::Threads).unwrap();
                    queue.block_on(work(image, thread, writes, until))
                })
            })
            .collect();
        running.into_iter().map(|one| one.join().unwrap()).sum()
    });
    requests as f64 / begun.elapsed().as_secs_f64()
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [op, threads, seconds] = &args[..] else {
        panic!("read|write THREADS SECONDS");
    };
    let (writes, threads) = (op == "write", threads.parse().unwrap());
    let time = Duration::from_secs_f64(seconds.parse().unwrap());
    let image = Queue::new(Backend::Threads).unwrap().block_on(image());
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        alone.push(run(&image, 1, writes, time));
        together.push(run(&image, threads, writes, time));
    }
    let (alone, together) = (median(alone), median(together));
    println!(
        "{op}: {:.0} ns a request on one thread, {:.2} times as many a second on {threads}",
        1e9 / alone,
        together / alone
    );
}
