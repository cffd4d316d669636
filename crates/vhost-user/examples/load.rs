//! A load on a vhost-user-blk server, ours or another one: requests a second, latency, and the
//! server's CPU time for each request. Servers are compared by running it against each in turn.
//!
//! ```text
//! cargo run --release -p cowslip-vhost-user --example load -- SOCKET PID read 4096 32 1 3
//! ```
//!
//! The arguments are the socket, the server's process number, `read` or `write` (random, within the
//! first GiB of the disk), `fill` (once, in order), the bytes of a request, the requests in flight,
//! the queues, and the seconds.
#![allow(clippy::unwrap_used)] // It ends by panicking.

use std::path::Path;
use std::time::{Duration, Instant};

#[path = "../tests/front.rs"]
#[allow(dead_code, reason = "it serves tests")]
mod front;
#[path = "../tests/ring.rs"]
#[allow(dead_code, reason = "it serves tests")]
mod ring;

use front::{DATA_AT, EVENT_IDX, FLUSH, Front, Make, TestQueue, VERSION_1};

const AREA_BYTES: u64 = 1 << 30;

/// CPU time of a process so far.
fn cpu(pid: &str) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

struct Load {
    kind: u32,
    bytes: usize,
    depth: usize,
    in_order: bool,
}

/// Keeps requests in flight on a queue until the time is over, or the area is full. Returns the
/// latency of each in nanoseconds.
fn run(queue: &mut TestQueue, load: &Load, until: Instant) -> Vec<u64> {
    let mut state = u64::from(queue.index) + 1;
    let mut latencies = Vec::with_capacity(1 << 20);
    let mut begun = vec![Instant::now(); load.depth];
    let mut free: Vec<usize> = (0..load.depth).collect();
    let base = DATA_AT + queue.index as usize * load.depth * load.bytes;
    let places = AREA_BYTES / load.bytes as u64;
    let mut next = 0;
    loop {
        let is_over = Instant::now() >= until || (load.in_order && next == places);
        while let Some(slot) = free.pop_if(|_| !is_over) {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let place = match load.in_order {
                true => next,
                false => (state >> 33) % places,
            };
            next += 1;
            begun[slot] = Instant::now();
            queue.submit(&Make {
                kind: load.kind,
                sector: place * (load.bytes as u64 / 512),
                data: &[(base + slot * load.bytes, load.bytes)],
                tag: slot as u64,
                header_cuts: &[],
                is_indirect: false,
            });
            if load.in_order && next == places {
                break;
            }
        }
        if free.len() == load.depth {
            return latencies;
        }
        queue.kick();
        let mut done = Some(queue.complete());
        while let Some((made, status)) = done {
            assert_eq!(status, 0, "a request failed");
            let slot = made.tag as usize;
            latencies.push(begun[slot].elapsed().as_nanos() as u64);
            free.push(slot);
            done = queue.try_complete();
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [socket, pid, op, bytes, depth, queues, seconds] = &args[..] else {
        panic!("SOCKET PID read|write|fill BYTES DEPTH QUEUES SECONDS");
    };
    let load = Load {
        kind: u32::from(op != "read"),
        bytes: bytes.parse().unwrap(),
        depth: depth.parse().unwrap(),
        in_order: op == "fill",
    };
    let mut front = Front::connect(Path::new(socket), VERSION_1 | EVENT_IDX | FLUSH);
    let count: u32 = queues.parse().unwrap();
    let mut queues: Vec<TestQueue> = (0..count).map(|index| front.queue(index, 128)).collect();
    let limit = if load.in_order {
        3600.0
    } else {
        seconds.parse().unwrap()
    };
    let (cpu_before, begun) = (cpu(pid), Instant::now());
    let until = begun + Duration::from_secs_f64(limit);
    let load = &load;
    let mut all: Vec<u64> = std::thread::scope(|scope| {
        let running: Vec<_> = queues
            .iter_mut()
            .map(|queue| scope.spawn(move || run(queue, load, until)))
            .collect();
        running
            .into_iter()
            .flat_map(|one| one.join().unwrap())
            .collect()
    });
    let (seconds, cpu) = (begun.elapsed().as_secs_f64(), cpu(pid) - cpu_before);
    all.sort_unstable();
    let requests = all.len() as f64;
    println!(
        "{op} {bytes} depth {depth} queues {count}: {:.0} IOPS, p50 {:.1} us, p99 {:.1} us, \
         server CPU {:.2} us a request",
        requests / seconds,
        all[all.len() / 2] as f64 / 1e3,
        all[all.len() * 99 / 100] as f64 / 1e3,
        cpu.as_secs_f64() * 1e6 / requests
    );
}
