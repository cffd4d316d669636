//! Figures of the requests to a disk.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

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

/// The counter of one kind.
#[derive(Debug, Default)]
pub struct Counter {
    requests: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
    failed: AtomicU64,
}

impl Counter {
    /// Counts a request that began at a moment and has ended now.
    pub fn count<T, E>(&self, outcome: &Result<T, E>, begun: Instant, bytes: u64) {
        if outcome.is_err() {
            self.failed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let nanoseconds = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// The figures now.
    pub fn counted(&self) -> Counted {
        Counted {
            requests: self.requests.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            nanoseconds: self.nanoseconds.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }
}

/// Counters of all kinds.
#[derive(Debug, Default)]
pub struct Counters {
    /// Reads.
    pub reads: Counter,
    /// Writes and zeroes.
    pub writes: Counter,
    /// Discards.
    pub discards: Counter,
    /// Flushes.
    pub flushes: Counter,
}

impl Counters {
    /// The figures now.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            reads: self.reads.counted(),
            writes: self.writes.counted(),
            discards: self.discards.counted(),
            flushes: self.flushes.counted(),
        }
    }
}
