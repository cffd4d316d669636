//! Measures the cost of an operation apart from the I/O itself, at depth 32 on one thread.
//!
//! Two null devices: io_uring's NOP, and 4 KiB reads of a file that is in the page cache. Each is
//! driven by a bare loop on the ring (the lower bound: no tasks, no futures), by this project's
//! queue, by compio, and by the queue's thread pool. A contender does the same amount of work in
//! every round; rounds alternate between contenders, and the median round is reported.
//!
//! Sockets too: 32 local connections that each send a small request and wait for its echo, served
//! and driven by one queue, on its ring and on epoll.
//!
//! Usage: `cargo run --release [-- ROUNDS [PART-OF-A-NAME]]`

mod bare;
mod on_compio;
mod on_queue;

use std::io::Write as _;
use std::time::{Duration, Instant};

use cowslip_queue::Backend;

pub const DEPTH: usize = 32;
pub const BLOCK_BYTES: usize = 4096;
/// Small enough for every cache but the nearest, so that copying is not what is measured.
pub const FILE_BLOCKS: u64 = 64;

/// A share of the operations of a task.
pub fn operations_of(task: usize, operations: usize) -> usize {
    operations / DEPTH + usize::from(task < operations % DEPTH)
}

struct Contender<'a> {
    name: &'static str,
    operations: usize,
    run: Box<dyn FnMut(usize) + 'a>,
    rounds: Vec<(Duration, Duration)>,
}

impl<'a> Contender<'a> {
    fn new(name: &'static str, operations: usize, run: impl FnMut(usize) + 'a) -> Contender<'a> {
        Contender {
            name,
            operations,
            run: Box::new(run),
            rounds: Vec::new(),
        }
    }

    fn round(&mut self) {
        let (start, cpu) = (Instant::now(), cpu_time());
        (self.run)(self.operations);
        self.rounds.push((start.elapsed(), cpu_time() - cpu));
    }

    fn report(&mut self) {
        let operations = self.operations as f64;
        let middle = self.rounds.len() / 2;
        self.rounds.sort_unstable_by_key(|round| round.0);
        let wall = self.rounds[middle].0.as_secs_f64();
        self.rounds.sort_unstable_by_key(|round| round.1);
        let cpu = self.rounds[middle].1.as_secs_f64();
        println!(
            "| {:<38} | {:>12.0} | {:>10.0} |",
            self.name,
            operations / wall,
            cpu * 1e9 / operations
        );
    }
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() {
    let rounds = std::env::args()
        .nth(1)
        .map_or(7, |text| text.parse().expect("ROUNDS is a number"));
    let mut file = tempfile::NamedTempFile::new_in(scratch()).expect("a scratch file");
    let content = vec![0x5A; BLOCK_BYTES * FILE_BLOCKS as usize];
    file.write_all(&content).expect("room for it");
    let path = file.path();
    let mut on_disk = tempfile::NamedTempFile::new().expect("a scratch file");
    on_disk.write_all(&content).expect("room for it");
    let disk_path = on_disk.path();
    const MANY: usize = 400_000;
    const FEW: usize = 40_000;
    let mut contenders = vec![
        Contender::new("NOP, bare ring", MANY, bare::nops),
        Contender::new("NOP, our queue", MANY, |n| {
            on_queue::nops(Backend::Uring, n)
        }),
        Contender::new("NOP, compio tuned", MANY, |n| {
            on_compio::nops(on_compio::tuned(), n)
        }),
        Contender::new("NOP, compio as it comes", MANY, |n| {
            on_compio::nops(on_compio::plain(), n)
        }),
        Contender::new("empty job, our pool of threads", FEW, |n| {
            on_queue::nops(Backend::Threads, n)
        }),
        Contender::new("4 KiB read, bare ring", MANY, |n| bare::reads(path, n)),
        Contender::new("4 KiB read, our queue", MANY, |n| {
            on_queue::reads(Backend::Uring, path, n)
        }),
        Contender::new("4 KiB read, compio tuned", MANY, |n| {
            on_compio::reads(on_compio::tuned(), path, n)
        }),
        Contender::new("4 KiB read, compio as it comes", MANY, |n| {
            on_compio::reads(on_compio::plain(), path, n)
        }),
        Contender::new("4 KiB read, our pool of threads", FEW, |n| {
            on_queue::reads(Backend::Threads, path, n)
        }),
        Contender::new("4 KiB cached write, our queue", FEW, |n| {
            on_queue::writes(Backend::Uring, disk_path, n)
        }),
        Contender::new("4 KiB cached write, our pool of threads", FEW, |n| {
            on_queue::writes(Backend::Threads, disk_path, n)
        }),
        Contender::new("64 B echo, our queue, ring", FEW, |n| {
            on_queue::echoes(Backend::Uring, n)
        }),
        Contender::new("4 KiB requests, our queue, ring", FEW, |n| {
            on_queue::pipelined(Backend::Uring, n)
        }),
        Contender::new("4 KiB requests, our queue, epoll", FEW, |n| {
            on_queue::pipelined(Backend::Threads, n)
        }),
        Contender::new("64 B echo, our queue, epoll", FEW, |n| {
            on_queue::echoes(Backend::Threads, n)
        }),
    ];
    if let Some(part) = std::env::args().nth(2) {
        contenders.retain(|contender| contender.name.contains(&part));
    }
    for _ in 0..rounds {
        contenders.iter_mut().for_each(Contender::round);
    }
    println!(
        "| {:<38} | {:>12} | {:>10} |",
        "depth 32, one thread", "operations/s", "CPU ns/op"
    );
    println!("| {:-<38} | {:->11}: | {:->9}: |", "", "", "");
    contenders.iter_mut().for_each(Contender::report);
}

/// Memory if there is such a place, so that no device is involved.
fn scratch() -> &'static str {
    let memory = "/dev/shm";
    if std::path::Path::new(memory).is_dir() {
        memory
    } else {
        "/tmp"
    }
}
