//! Figures of the requests to a disk.
//!
//! Counters are kept apart for a few groups of threads ([`SHARDS`]), so that queues that are served
//! by threads of their own do not pass cache lines to each other, and added up when they are asked
//! for. A request costs three additions without a lock. What is read while requests end may miss
//! the last of them, and have some of a request's figures before the others.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Groups of threads with counters of their own.
const SHARDS: usize = 4;

/// The upper bounds of the classes of latency, in nanoseconds: a request that took exactly as long
/// is in the class. Slower ones are in a class without a bound, the last.
pub const LATENCY_BOUNDS: [u64; 18] = [
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    2_000_000_000,
    5_000_000_000,
];

const CLASSES: usize = LATENCY_BOUNDS.len() + 1;

/// Requests in each class of latency.
pub type Latencies = [u64; CLASSES];

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Requests that have ended well.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The time from their beginnings to their ends.
    pub nanoseconds: u64,
    /// Requests that have failed.
    pub failed: u64,
    /// Requests that have ended well, by the time that they took ([`LATENCY_BOUNDS`]).
    pub latencies: Latencies,
}

/// Requests of all kinds. Zeroes are writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Reads.
    pub reads: Counted,
    /// Writes.
    pub writes: Counted,
    /// Discards.
    pub discards: Counted,
    /// Flushes; they have no bytes.
    pub flushes: Counted,
}

impl Statistics {
    /// Requests of all kinds that have ended.
    pub fn requests(&self) -> u64 {
        let kinds = [&self.reads, &self.writes, &self.discards, &self.flushes];
        kinds.iter().map(|kind| kind.requests + kind.failed).sum()
    }
}

/// A kind of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes and zeroes.
    Write,
    /// Discards.
    Discard,
    /// Flushes.
    Flush,
}

/// The counters of one kind.
#[derive(Debug, Default)]
struct Counter {
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
    failed: AtomicU64,
    latencies: [AtomicU64; CLASSES],
}

/// The counters of a group of threads, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard([Counter; 4]);

/// Counters of all kinds. They take memory once a request has ended.
#[derive(Debug, Default)]
pub struct Counters([OnceLock<Box<Shard>>; SHARDS]);

/// The group of this thread.
fn shard_of_thread() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: Cell<Option<usize>> = const { Cell::new(None) };
    }
    SHARD.with(|shard| match shard.get() {
        Some(number) => number,
        None => {
            let number = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS;
            shard.set(Some(number));
            number
        }
    })
}

impl Counters {
    /// Counts a request that began at a moment and has ended now.
    pub fn count<T, E>(&self, kind: Kind, outcome: &Result<T, E>, (begun, bytes): (Instant, u64)) {
        let took = outcome.is_ok().then(|| begun.elapsed().as_nanos());
        let took = took.map(|it| u64::try_from(it).unwrap_or(u64::MAX));
        self.count_as(kind, took, bytes);
    }

    /// Counts a request by the time that it took, or one that has failed.
    fn count_as(&self, kind: Kind, nanoseconds: Option<u64>, bytes: u64) {
        let shard = self.0[shard_of_thread()].get_or_init(Box::default);
        let counter = &shard.0[kind as usize];
        let Some(nanoseconds) = nanoseconds else {
            counter.failed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let class = LATENCY_BOUNDS.partition_point(|bound| *bound < nanoseconds);
        counter.latencies[class].fetch_add(1, Ordering::Relaxed);
        counter.bytes.fetch_add(bytes, Ordering::Relaxed);
        counter
            .nanoseconds
            .fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn counted(&self, kind: Kind) -> Counted {
        let mut sum = Counted::default();
        for shard in self.0.iter().filter_map(OnceLock::get) {
            let counter = &shard.0[kind as usize];
            sum.bytes += counter.bytes.load(Ordering::Relaxed);
            sum.nanoseconds += counter.nanoseconds.load(Ordering::Relaxed);
            sum.failed += counter.failed.load(Ordering::Relaxed);
            for (sum, count) in sum.latencies.iter_mut().zip(&counter.latencies) {
                *sum += count.load(Ordering::Relaxed);
            }
        }
        sum.requests = sum.latencies.iter().sum();
        sum
    }

    /// The figures now.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            reads: self.counted(Kind::Read),
            writes: self.counted(Kind::Write),
            discards: self.counted(Kind::Discard),
            flushes: self.counted(Kind::Flush),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_in_the_class_whose_bound_it_does_not_exceed() {
        let counters = Counters::default();
        for (nanoseconds, class) in [
            (0, 0),
            (10_000, 0),
            (10_001, 1),
            (999_999, 6),
            (1_000_000, 6),
            (5_000_000_000, 17),
            (5_000_000_001, 18),
            (u64::MAX / 8, 18),
        ] {
            let before = counters.statistics().writes.latencies;
            counters.count_as(Kind::Write, Some(nanoseconds), 1);
            let after = counters.statistics().writes.latencies;
            let changed: Vec<usize> = (0..CLASSES)
                .filter(|it| before[*it] != after[*it])
                .collect();
            assert_eq!(changed, [class], "{nanoseconds}");
        }
        let writes = counters.statistics().writes;
        assert_eq!((writes.requests, writes.bytes), (8, 8));
        assert_eq!(counters.statistics().reads, Counted::default());
    }

    #[test]
    fn a_failed_request_is_counted_apart() {
        let counters = Counters::default();
        let failed: Result<(), ()> = Err(());
        counters.count(Kind::Flush, &failed, (Instant::now(), 0));
        let flushes = counters.statistics().flushes;
        assert_eq!((flushes.failed, flushes.requests), (1, 0));
    }

    #[test]
    fn requests_of_many_threads_are_added_up() {
        let counters = Counters::default();
        std::thread::scope(|scope| {
            for _ in 0..3 * SHARDS {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        counters.count_as(Kind::Read, Some(30_000), 512);
                    }
                });
            }
        });
        let reads = counters.statistics().reads;
        let all = 3000 * SHARDS as u64;
        assert_eq!(reads.requests, all);
        assert_eq!(reads.latencies[2], all);
        assert_eq!(reads.bytes, 512 * all);
        assert_eq!(reads.nanoseconds, 30_000 * all);
    }
}
