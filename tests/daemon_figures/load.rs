//! Guests of measurements, over NBD.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cowslip_nbd::client::{Client, ConnectOptions};
use cowslip_nbd::export::Durability;
use cowslip_queue::{Backend, Buf, BufMut, Queue, Stream};

use crate::support::rng::Rng;

const BLOCK: u64 = 4096;
/// Requests in flight.
const DEPTH: usize = 4;
/// A guest in bursts: busy for the first part of each period.
const BURST: Duration = Duration::from_millis(200);
const PERIOD: Duration = Duration::from_millis(700);

/// When a guest has requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rhythm {
    Steady,
    InBursts,
    /// Requests a second that are due whether earlier ones are late or not.
    Even(u32),
}

impl Rhythm {
    /// Waits until the guest has its next request, which is number `index` of one of its `DEPTH`
    /// tasks.
    async fn wait(self, started: Instant, index: u32) {
        match self {
            Rhythm::Steady => {}
            Rhythm::InBursts => {
                let millis = started.elapsed().as_millis() % PERIOD.as_millis();
                if millis >= BURST.as_millis() {
                    let left = (PERIOD.as_millis() - millis) as u64;
                    cowslip_queue::sleep(Duration::from_millis(left)).await;
                }
            }
            Rhythm::Even(rate) => {
                let due = Duration::from_secs(1) * DEPTH as u32 / rate * index;
                if let Some(left) = due.checked_sub(started.elapsed()) {
                    cowslip_queue::sleep(left).await;
                }
            }
        }
    }
}

async fn connect(socket: &Path, export: &str) -> Client {
    let stream = Stream::connect_unix(socket).await.unwrap();
    let client = Client::connect(stream, &ConnectOptions::new(export)).await;
    client.unwrap()
}

/// The time of random reads, one after the other.
pub fn reads(socket: &Path, export: &str, count: usize) -> Duration {
    let queue = Queue::new(Backend::Auto).unwrap();
    queue.block_on(async {
        let client = connect(socket, export).await;
        let mut rng = Rng::new(1);
        // The first half of them loads tables.
        let mut begun = Instant::now();
        for at in 0..2 * count {
            if at == count {
                begun = Instant::now();
            }
            let block = rng.below(client.size() / BLOCK);
            let buf = BufMut::zeroed(BLOCK as usize);
            client.read(block * BLOCK, buf).await.unwrap();
        }
        let took = begun.elapsed();
        client.disconnect().await.unwrap();
        took
    })
}

/// A guest that reads and writes until it is stopped.
pub struct Load {
    stops: Arc<AtomicBool>,
    begun: Instant,
    thread: JoinHandle<Vec<Duration>>,
}

/// The latencies of a guest.
pub struct Latencies {
    pub p50: Duration,
    pub p99: Duration,
    longest: Duration,
    per_second: f64,
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let (p50, p99, longest) = (us(self.p50), us(self.p99), us(self.longest) / 1000.0);
        let rate = self.per_second;
        write!(f, "{rate:.0}/s, {p50:.0}, {p99:.0} us, {longest:.0} ms")
    }
}

impl Load {
    /// Starts one, on that many bytes of a disk.
    pub fn start(socket: &Path, export: &'static str, way: (u64, Rhythm)) -> Load {
        let stops = Arc::new(AtomicBool::new(false));
        let (socket, stopped) = (socket.to_path_buf(), Arc::clone(&stops));
        let thread = std::thread::spawn(move || load(socket, export, way, &stopped));
        Load {
            stops,
            begun: Instant::now(),
            thread,
        }
    }

    /// Stops it.
    pub fn stop(self) -> Latencies {
        self.stops.store(true, Ordering::Release);
        let took = self.begun.elapsed();
        let mut times = self.thread.join().unwrap();
        times.sort();
        let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
        Latencies {
            p50: at(0.5),
            p99: at(0.99),
            longest: at(1.0),
            per_second: times.len() as f64 / took.as_secs_f64(),
        }
    }
}

fn load(
    socket: PathBuf,
    export: &'static str,
    (bytes, rhythm): (u64, Rhythm),
    stopped: &AtomicBool,
) -> Vec<Duration> {
    let started = Instant::now();
    let queue = Queue::new(Backend::Auto).unwrap();
    queue.block_on(async {
        let client = connect(&socket, export).await;
        let one = async |seed: u64| {
            let mut rng = Rng::new(seed);
            let mut times = Vec::new();
            while !stopped.load(Ordering::Acquire) {
                rhythm.wait(started, times.len() as u32).await;
                let offset = rng.below(bytes / BLOCK) * BLOCK;
                let begun = Instant::now();
                match rng.below(2) {
                    0 => drop(
                        client
                            .read(offset, BufMut::zeroed(BLOCK as usize))
                            .await
                            .unwrap(),
                    ),
                    _ => {
                        let data = Buf::copy_of(&[7; BLOCK as usize]);
                        let written = client.write(offset, data, Durability::Cached).await;
                        written.unwrap();
                    }
                }
                times.push(begun.elapsed());
            }
            times
        };
        let all = (0..DEPTH as u64).map(|seed| one(seed + 1));
        let all = futures_util::future::join_all(all).await;
        all.concat()
    })
}
