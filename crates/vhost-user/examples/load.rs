//! A load on a vhost-user-blk server, ours or another one: requests a second, latency, and the
//! server's CPU time for each request. `cowslip bench vhost-user` makes a whole table so.
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

use cowslip_front::load::Load;
use cowslip_front::{EVENT_IDX, FLUSH, Front, FrontQueue, VERSION_1};

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

/// Offsets at random, from a seed, until the time is over.
fn random(seed: u64, bytes: usize, until: Instant) -> Box<dyn Iterator<Item = u64> + Send> {
    let places = AREA_BYTES / bytes as u64;
    let states = std::iter::successors(Some(seed), |state: &u64| {
        let next = state.wrapping_mul(6_364_136_223_846_793_005);
        Some(next.wrapping_add(1))
    });
    let offsets = states.map(move |state| (state >> 33) % places * bytes as u64);
    Box::new(offsets.take_while(move |_| Instant::now() < until))
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [socket, pid, op, bytes, depth, queues, seconds] = &args[..] else {
        panic!("SOCKET PID read|write|fill BYTES DEPTH QUEUES SECONDS");
    };
    let (bytes, depth): (usize, usize) = (bytes.parse().unwrap(), depth.parse().unwrap());
    let mut front = Front::connect(Path::new(socket), VERSION_1 | EVENT_IDX | FLUSH).unwrap();
    let count: u32 = queues.parse().unwrap();
    let queues = (0..count).map(|index| front.queue(index, 128).unwrap());
    let mut queues: Vec<FrontQueue> = queues.collect();
    let (cpu_before, begun) = (cpu(pid), Instant::now());
    let until = begun + Duration::from_secs_f64(seconds.parse().unwrap());
    let run = |queue: &mut FrontQueue| {
        let places = match op.as_str() {
            "fill" => Box::new((0..AREA_BYTES).step_by(bytes)),
            _ => random(u64::from(queue.index) + 1, bytes, until),
        };
        let kind = (u32::from(op != "read"), bytes);
        let mut latencies = Vec::with_capacity(1 << 20);
        let mut load = Load::new(queue.index, kind, depth, places).unwrap();
        let note = |latency: Duration| latencies.push(latency);
        load.run(queue, note).unwrap();
        latencies
    };
    let mut all: Vec<Duration> = std::thread::scope(|scope| {
        let threads = queues.iter_mut().map(|queue| scope.spawn(|| run(queue)));
        let threads: Vec<_> = threads.collect();
        let latencies = threads.into_iter().map(|thread| thread.join().unwrap());
        latencies.flatten().collect()
    });
    let (seconds, cpu) = (begun.elapsed().as_secs_f64(), cpu(pid) - cpu_before);
    all.sort_unstable();
    let requests = all.len() as f64;
    let microseconds = |latency: Duration| latency.as_secs_f64() * 1e6;
    println!(
        "{op} {bytes} depth {depth} queues {count}: {:.0} IOPS, p50 {:.1} us, p99 {:.1} us, \
         server CPU {:.2} us a request",
        requests / seconds,
        microseconds(all[all.len() / 2]),
        microseconds(all[all.len() * 99 / 100]),
        microseconds(cpu) / requests
    );
}
