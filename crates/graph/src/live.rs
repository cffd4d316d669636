//! [`LiveDisk`]: a disk that passes requests on to another one, which can be exchanged.
//!
//! A request takes the disk, and the taps, that are there when it begins, and keeps them to its
//! end. An exchange holds new requests back and waits for those under way, so that no request of
//! the old disk is under way when one of the new disk begins.

use std::fmt;
use std::future::{Future, ready};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use cowslip_block::disk::{Disk, DiskFuture, Extent, Features, ZeroOptions};
use cowslip_block::file::Durability;
use cowslip_block::sync::{Mutex, Waiters, lock};
use cowslip_block::{IoVec, IoVecMut, Result};

use crate::statistics::{Counters, Kind, Statistics};

/// Work that a request waits for.
pub type Wait<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// An observer of what changes on a disk.
pub trait Tap: Send + Sync + fmt::Debug {
    /// Called before a range changes; the change begins when the future has ended.
    fn before(&self, range: Range<u64>) -> Wait<'_> {
        let _nothing_to_do = range;
        Box::pin(ready(()))
    }

    /// Called when the change of a range has ended, well or not, or was broken off.
    fn changed(&self, range: Range<u64>);

    /// Called after [`Tap::changed`]; the request is answered when the future has ended.
    fn after(&self, range: Range<u64>) -> Wait<'_> {
        let _nothing_to_do = range;
        Box::pin(ready(()))
    }

    /// Called when the disk has another size.
    fn resized(&self, size: u64) {
        let _no_matter = size;
    }
}

/// A disk that passes requests on.
#[derive(Debug)]
pub struct LiveDisk {
    name: String,
    counters: Counters,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    behind: Behind,
    /// Requests that have begun and not ended.
    in_flight: usize,
    /// New requests wait.
    is_held: bool,
    changed: Waiters,
}

/// The disk that requests go to, and what observes them.
#[derive(Clone, Debug)]
struct Behind {
    disk: Arc<dyn Disk>,
    taps: Arc<[Arc<dyn Tap>]>,
}

/// A request's stay.
struct Visit<'a> {
    live: &'a LiveDisk,
    behind: Behind,
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.live.state);
        state.in_flight -= 1;
        if state.in_flight == 0 && state.is_held {
            state.changed.wake();
        }
    }
}

/// Reports a change to taps when it ends, however that happens.
struct Change<'a> {
    taps: &'a [Arc<dyn Tap>],
    range: Range<u64>,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        for tap in self.taps {
            tap.changed(self.range.clone());
        }
    }
}

/// A disk without requests: none is under way, and none begins until this is dropped.
#[derive(Debug)]
pub struct Drained(Arc<LiveDisk>);

impl Drop for Drained {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.is_held = false;
        state.changed.wake();
    }
}

impl Drained {
    /// The disk that is held.
    pub fn live(&self) -> &Arc<LiveDisk> {
        &self.0
    }

    /// Lets requests go to another disk from now on. Taps stay, and are informed of its size.
    pub fn exchange(&self, disk: Arc<dyn Disk>) {
        let (size, taps) = (disk.size(), self.0.taps());
        lock(&self.0.state).behind.disk = disk;
        for tap in &*taps {
            tap.resized(size);
        }
    }

    /// Adds a tap: it sees every request that begins from now on.
    pub fn add(&self, tap: Arc<dyn Tap>) {
        let mut state = lock(&self.0.state);
        let taps = state.behind.taps.iter().cloned().chain([tap]);
        state.behind.taps = taps.collect();
    }
}

impl LiveDisk {
    /// A disk in front of another one.
    pub fn new(name: impl Into<String>, disk: Arc<dyn Disk>) -> Arc<LiveDisk> {
        Arc::new(LiveDisk {
            name: name.into(),
            counters: Counters::default(),
            state: Mutex::new(State {
                behind: Behind {
                    disk,
                    taps: Arc::new([]),
                },
                in_flight: 0,
                is_held: false,
                changed: Waiters::default(),
            }),
        })
    }

    /// The disk that requests go to now. Requests to it directly are not held back, and seen by no
    /// tap: that is for jobs, which read.
    pub fn behind(&self) -> Arc<dyn Disk> {
        Arc::clone(&lock(&self.state).behind.disk)
    }

    /// Figures of the requests so far.
    pub fn statistics(&self) -> Statistics {
        self.counters.statistics()
    }

    /// Requests that have begun and not ended.
    pub fn in_flight(&self) -> usize {
        lock(&self.state).in_flight
    }

    fn taps(&self) -> Arc<[Arc<dyn Tap>]> {
        Arc::clone(&lock(&self.state).behind.taps)
    }

    /// Holds new requests back, and waits until none is under way. Another one that has done so is
    /// waited for.
    pub async fn drain(self: &Arc<LiveDisk>) -> Drained {
        loop {
            let waiting = {
                let mut state = lock(&self.state);
                match state.is_held {
                    true => state.changed.wait(),
                    false => {
                        state.is_held = true;
                        break;
                    }
                }
            };
            waiting.await;
        }
        let drained = Drained(Arc::clone(self));
        loop {
            let waiting = {
                let mut state = lock(&self.state);
                match state.in_flight {
                    0 => return drained,
                    _ => state.changed.wait(),
                }
            };
            waiting.await;
        }
    }

    /// Removes a tap. Requests under way may still report to it.
    pub fn remove(&self, tap: &Arc<dyn Tap>) {
        let mut state = lock(&self.state);
        let others = |other: &&Arc<dyn Tap>| !Arc::ptr_eq(other, tap);
        let taps = state.behind.taps.iter().filter(others).cloned();
        state.behind.taps = taps.collect();
    }

    /// Informs the taps of the size that the disk has now.
    pub fn announce_size(&self) {
        let size = self.size();
        self.taps().iter().for_each(|tap| tap.resized(size));
    }

    async fn enter(&self) -> Visit<'_> {
        loop {
            let waiting = {
                let mut state = lock(&self.state);
                if !state.is_held {
                    state.in_flight += 1;
                    return Visit {
                        live: self,
                        behind: state.behind.clone(),
                    };
                }
                state.changed.wait()
            };
            waiting.await;
        }
    }

    /// Passes a request on that changes a range, and counts it.
    async fn change<F: Future<Output = Result<()>>>(
        &self,
        (range, kind): (Range<u64>, Kind),
        request: impl FnOnce(Arc<dyn Disk>) -> F,
    ) -> Result<()> {
        let begun = Instant::now();
        let visit = self.enter().await;
        let Behind { disk, taps } = &visit.behind;
        let request = request(Arc::clone(disk));
        let outcome = match taps.is_empty() || range.is_empty() {
            true => request.await,
            false => Self::observed(taps, range.clone(), request).await,
        };
        self.counters
            .count(kind, &outcome, (begun, range.end - range.start));
        outcome
    }

    /// A change that taps observe.
    async fn observed(
        taps: &[Arc<dyn Tap>],
        range: Range<u64>,
        request: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        for tap in taps {
            tap.before(range.clone()).await;
        }
        let change = Change {
            taps,
            range: range.clone(),
        };
        let outcome = request.await;
        drop(change);
        for tap in taps {
            tap.after(range.clone()).await;
        }
        outcome
    }
}

/// The range of a request; one that the disk will refuse may reach beyond all offsets.
fn range(offset: u64, len: u64) -> Range<u64> {
    offset..offset.saturating_add(len)
}

impl Disk for LiveDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.behind().size()
    }

    fn features(&self) -> Features {
        self.behind().features()
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        let (begun, bytes) = (Instant::now(), buf.len() as u64);
        Box::pin(async move {
            let visit = self.enter().await;
            let read = visit.behind.disk.read(offset, buf).await;
            self.counters.count(Kind::Read, &read, (begun, bytes));
            read
        })
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> DiskFuture<'_, ()> {
        let range = range(offset, data.len() as u64);
        Box::pin(self.change((range, Kind::Write), move |disk| async move {
            disk.write(offset, data, durability).await
        }))
    }

    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        let counted = (range(offset, len), Kind::Write);
        Box::pin(self.change(counted, move |disk| async move {
            disk.zero(offset, len, options).await
        }))
    }

    fn discard(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        let counted = (range(offset, len), Kind::Discard);
        Box::pin(self.change(counted, move |disk| async move {
            disk.discard(offset, len).await
        }))
    }

    fn allocate(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        // No byte changes.
        Box::pin(async move {
            let visit = self.enter().await;
            visit.behind.disk.allocate(offset, len).await
        })
    }

    fn flush(&self) -> DiskFuture<'_, ()> {
        let begun = Instant::now();
        Box::pin(async move {
            let visit = self.enter().await;
            let flushed = visit.behind.disk.flush().await;
            self.counters.count(Kind::Flush, &flushed, (begun, 0));
            flushed
        })
    }

    fn write_back(&self) -> DiskFuture<'_, ()> {
        Box::pin(async move { self.enter().await.behind.disk.write_back().await })
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            let visit = self.enter().await;
            visit.behind.disk.extents(offset, len, max).await
        })
    }
}
