//! Requests that take no lock, as the holders of the metadata lock see them.
//!
//! A request that finds all it needs in the direct map (`direct.rs`) enters and leaves by one step
//! each, on a counter that few other threads use. The counters are of two *generations*. All
//! requests that are there may be of the epoch in which their generation began, or of a later one;
//! the next generation begins only when nothing of the one before the last is left. So what was
//! freed in an epoch is out of reach when both generations are empty or began later
//! (`inflight.rs`).
//!
//! A request enters, then looks whether the *gate* is open, and then where its data is. An
//! operation that waits for requests closes the gate, or changes the mapping, and then reads the
//! counters.
//! The counters are read by steps that change them (by nothing): of two such steps one is first. If
//! the request's was, it is seen, and waited for. If it was not, it sees all that was done before.
//! No order between different places in memory is needed.

use crate::sync::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// Counters of an image: more threads than these share some.
pub const SHARDS: usize = 16;
/// A counter has the requests under way in its lower bits, and the slices that they found above.
const UNDER_WAY_BITS: u32 = 20;
const UNDER_WAY: u64 = (1 << UNDER_WAY_BITS) - 1;

/// Reasons for which requests take the metadata lock: the gate is open where none of them is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Closed {
    /// Reads are held back.
    Reads = 1,
    /// Changes are held back.
    Changes = 2,
    /// The image is latched, or its session has ended.
    Latched = 4,
    /// The header is not fit for writes, or bitmaps follow them.
    Unready = 8,
}

/// The counters of some threads, on a cache line of their own.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    /// By generation.
    visits: [AtomicU64; 2],
    /// Clusters that were written in place.
    written: AtomicU64,
}

/// A request that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a visit has to be left"]
pub struct Visit {
    shard: u8,
    generation: u8,
}

impl Visit {
    /// Its generation.
    pub fn generation(self) -> u8 {
        self.generation
    }
}

/// The requests of an image that take no lock.
#[derive(Debug)]
pub struct Visits {
    shards: Box<[Shard]>,
    closed: AtomicU8,
    /// The generation that requests enter.
    generation: AtomicU8,
    /// An operation waits for requests to end.
    is_watched: AtomicBool,
}

impl Default for Visits {
    fn default() -> Visits {
        Visits::new(SHARDS)
    }
}

impl Visits {
    /// No requests, and an image that is not ready for writes.
    pub fn new(shards: usize) -> Visits {
        let shard = |_| Shard {
            visits: [AtomicU64::new(0), AtomicU64::new(0)],
            written: AtomicU64::new(0),
        };
        Visits {
            shards: (0..shards).map(shard).collect(),
            closed: AtomicU8::new(Closed::Unready as u8),
            generation: AtomicU8::new(0),
            is_watched: AtomicBool::new(false),
        }
    }

    /// A request enters; `thread` spreads threads over the counters.
    #[inline]
    pub fn enter(&self, thread: usize) -> Visit {
        let generation = self.generation.load(Ordering::Acquire);
        let shard = thread % self.shards.len();
        self.counter(shard, generation)
            .fetch_add(1, Ordering::AcqRel);
        Visit {
            shard: shard as u8,
            generation,
        }
    }

    /// A request leaves that has found `hits` slices. Returns whether an operation waits for it:
    /// then [`Epochs::visit_left`](super::inflight::Epochs::visit_left) has to follow.
    #[must_use]
    #[inline]
    pub fn leave(&self, visit: Visit, hits: u64) -> bool {
        let change = (hits << UNDER_WAY_BITS).wrapping_sub(1);
        let counter = self.counter(usize::from(visit.shard), visit.generation);
        let before = counter.fetch_add(change, Ordering::AcqRel);
        before & UNDER_WAY == 1 && self.is_watched.load(Ordering::Acquire)
    }

    #[inline]
    fn counter(&self, shard: usize, generation: u8) -> &AtomicU64 {
        &self.shards[shard].visits[usize::from(generation)]
    }

    /// Notes that a request has written, or may have, before it leaves.
    #[inline]
    pub fn note_written(&self, visit: Visit, clusters: u64) {
        let shard = &self.shards[usize::from(visit.shard)];
        shard.written.fetch_add(clusters, Ordering::AcqRel);
    }

    /// Returns how many clusters requests have written that have left.
    pub fn written(&self) -> u64 {
        let shards = self.shards.iter();
        shards.fold(0, |sum, shard| {
            sum.wrapping_add(shard.written.fetch_add(0, Ordering::AcqRel))
        })
    }

    /// Returns how many slices requests have found that have left.
    pub fn hits(&self) -> u64 {
        let counters = self.shards.iter().flat_map(|shard| &shard.visits);
        counters.fold(0, |sum, counter| {
            sum.wrapping_add(counter.load(Ordering::Relaxed) >> UNDER_WAY_BITS)
        })
    }

    /// Returns whether a request that has entered may read.
    #[inline]
    pub fn admits_reads(&self) -> bool {
        self.closed.load(Ordering::Acquire) & Closed::Reads as u8 == 0
    }

    /// Returns whether a request that has entered may write in place.
    #[inline]
    pub fn admits_writes(&self) -> bool {
        self.closed.load(Ordering::Acquire) == 0
    }

    /// Closes the gate. Under the metadata lock, as all below.
    pub fn close(&self, reason: Closed) {
        self.closed.fetch_or(reason as u8, Ordering::AcqRel);
    }

    /// Opens the gate, as far as this reason goes.
    pub fn open(&self, reason: Closed) {
        self.closed.fetch_and(!(reason as u8), Ordering::AcqRel);
    }

    /// Returns whether no request of a generation is left that entered before now.
    pub fn is_empty(&self, generation: u8) -> bool {
        let shards = 0..self.shards.len();
        shards.into_iter().all(|shard| {
            let counter = self.counter(shard, generation);
            counter.fetch_add(0, Ordering::AcqRel) & UNDER_WAY == 0
        })
    }

    /// The generation that requests enter now.
    pub fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// Begins the other generation, of which nothing is left.
    pub fn begin(&self, generation: u8) {
        self.generation.store(generation, Ordering::Release);
    }

    /// Has requests say when they leave, from now on or no longer. An operation reads the counters
    /// after it has asked for that.
    pub fn watch(&self, is_watched: bool) {
        self.is_watched.store(is_watched, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_have_requests_and_hits_apart() {
        let visits = Visits::new(2);
        let (first, second) = (visits.enter(0), visits.enter(3));
        assert!(!visits.is_empty(0) && visits.is_empty(1));
        visits.note_written(first, 3);
        assert!(!visits.leave(first, 2) && !visits.leave(second, 1));
        assert!(visits.is_empty(0));
        assert_eq!((visits.hits(), visits.written()), (3, 3));
    }

    #[test]
    fn the_last_of_a_counter_wakes_who_watches() {
        let visits = Visits::new(1);
        let (first, second) = (visits.enter(0), visits.enter(0));
        visits.watch(true);
        assert!(!visits.leave(first, 0) && visits.leave(second, 0));
        let third = visits.enter(0);
        visits.watch(false);
        assert!(!visits.leave(third, 0));
    }

    #[test]
    fn the_gate_is_open_when_no_reason_is_left() {
        let visits = Visits::new(1);
        assert!(visits.admits_reads() && !visits.admits_writes());
        visits.open(Closed::Unready);
        assert!(visits.admits_writes());
        visits.close(Closed::Changes);
        visits.close(Closed::Reads);
        assert!(!visits.admits_reads() && !visits.admits_writes());
        visits.open(Closed::Reads);
        assert!(visits.admits_reads() && !visits.admits_writes());
    }
}
