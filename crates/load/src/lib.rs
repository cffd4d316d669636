//! The load on one image: requests of one size at a fixed queue depth, and when they are flushed.
//!
//! The pace is qemu-img's, so that both engines do the same operations: one request is started for
//! each that completes, and a flush falls due whenever the number of requests not yet started is a
//! multiple of the interval. With `Drain` nothing is started until all requests in flight, and then
//! the flush, have completed. Without it, flushes run beside the requests, one at a time.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use cowslip::image::{Durability, WriteStatistics};
use cowslip::{Buf, BufMut, Image};
use cowslip_console::output;
use cowslip_queue::{Completer, pending};
use futures_util::future::try_join;
use futures_util::stream::{FuturesUnordered, StreamExt};

pub use latency::Histogram;

mod latency;

/// Width of a step of the series in milliseconds.
pub const SERIES_STEP_MS: u64 = 100;

/// Direction of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Reads.
    Read,
    /// Writes of this byte throughout.
    Write(u8),
}

/// Where requests go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Places from an offset on, each a fixed distance after the last, wrapping at the end of the
    /// disk.
    Steps {
        /// The first one's offset in bytes.
        start: u64,
        /// Distance from one to the next in bytes.
        step: u64,
    },
    /// Random places, each once before any is visited again, in an order that follows from a seed.
    Random(u64),
}

/// Wait before a due flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// All requests end first.
    Drain,
    /// None: the flush runs beside the requests.
    None,
}

/// Messages printed while requests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    /// No messages.
    Nothing,
    /// For each flush that has ended, the number of requests that had ended before it began.
    Flushes,
}

/// Requests to one image.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// How many.
    pub count: u64,
    /// Size of each.
    pub request_bytes: usize,
    /// Number of requests in flight.
    pub depth: usize,
    /// Direction of the requests.
    pub direction: Direction,
    /// Places of the requests.
    pub order: Order,
    /// Requests to a flush; 0 for none.
    pub flush_interval: u64,
    /// Wait before a flush.
    pub pause: Pause,
    /// Messages printed meanwhile.
    pub verbosity: Verbosity,
    /// Number of places of the order that it leaves out at the start: others' share.
    pub skipped: u64,
}

/// Figures of a run.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Time until the last request had ended, without later flushes and the close.
    pub elapsed: Duration,
    /// Latencies of the requests.
    pub latency: Histogram,
    /// Flushes that were asked for.
    pub flushes: u64,
    /// Requests that ended in each step of the run.
    pub series: Vec<u64>,
    /// Statistics of the writes that were admitted in each step; empty where they are not known.
    pub writes: Vec<WriteStatistics>,
}

/// A run, as its workers share it. Each worker has one request in flight; they live as long as the
/// run, so that a request costs no allocation here.
struct Run<'a> {
    load: &'a Load,
    image: &'a Image,
    data: Buf,
    start: Instant,
    places: RefCell<Places>,
    figures: RefCell<Figures>,
    /// Statistics of the writes when the last step but one ended; `None` where they are not known.
    counted: Cell<Option<WriteStatistics>>,
    /// Requests that have not begun.
    unsent: Cell<u64>,
    /// Requests that have begun and not ended.
    in_flight: Cell<usize>,
    /// Workers that wait for a flush, or the task that flushes beside them.
    waiting: RefCell<Vec<Completer<()>>>,
    /// Flushes that are due and have not started, if no worker waits for them.
    due: Cell<u64>,
}

impl Load {
    /// The part of this number when the load is cut into `parts` that run at the same time.
    pub fn part(&self, index: u64, parts: u64) -> Load {
        let before = |index: u64| (u128::from(self.count) * u128::from(index)) / u128::from(parts);
        let before = |index| u64::try_from(before(index)).unwrap_or(u64::MAX);
        Load {
            count: before(index + 1) - before(index),
            skipped: before(index),
            ..*self
        }
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// The first failure of a request or flush; the others are dropped.
    pub async fn run(&self, image: &Image) -> cowslip::Result<Figures> {
        let data = match self.direction {
            Direction::Read => Buf::zeroed(0),
            Direction::Write(pattern) => {
                let mut data = BufMut::for_overwrite(self.request_bytes);
                data.fill(pattern);
                data.freeze()
            }
        };
        let places = Places::new(self, image.size());
        let run = Run {
            load: self,
            image,
            data,
            start: Instant::now(),
            places: RefCell::new(places),
            figures: RefCell::default(),
            counted: Cell::new(match (self.direction, self.skipped) {
                (Direction::Write(_), 0) => image.write_statistics(),
                // The statistics are the image's, so one of those who share it takes them.
                _ => None,
            }),
            unsent: Cell::new(self.count),
            in_flight: Cell::new(0),
            waiting: RefCell::default(),
            due: Cell::new(0),
        };
        try_join(run.all_requests(), run.flushes_beside()).await?;
        let steps = run.figures.borrow().series.len();
        run.count_writes(steps);
        Ok(run.figures.into_inner())
    }
}

impl Run<'_> {
    async fn all_requests(&self) -> cowslip::Result<()> {
        let workers = (self.load.depth as u64).min(self.load.count);
        let mut workers: FuturesUnordered<_> = (0..workers).map(|_| self.work()).collect();
        while let Some(done) = workers.next().await {
            done?;
        }
        self.wake();
        Ok(())
    }

    /// Performs one request after the other, until none is left. Reads go into one buffer.
    async fn work(&self) -> cowslip::Result<()> {
        let mut target = BufMut::for_overwrite(match self.load.direction {
            Direction::Read => self.load.request_bytes,
            Direction::Write(_) => 0,
        });
        let mut begun = Instant::now();
        while let Some(unsent) = self.unsent.get().checked_sub(1) {
            self.unsent.set(unsent);
            self.in_flight.set(self.in_flight.get() + 1);
            let place = self.places.borrow_mut().advance();
            target = self.request(place, target).await?;
            self.in_flight.set(self.in_flight.get() - 1);
            // The next request begins as this one ends: one look at the clock serves both.
            begun = self.note(begun);
            if self.is_flush_due() {
                self.flush_in_turn().await?;
                begun = Instant::now();
            }
        }
        Ok(())
    }

    /// A request that began then has ended. Returns when.
    fn note(&self, begun: Instant) -> Instant {
        let now = Instant::now();
        let steps = self.figures.borrow().series.len();
        self.figures.borrow_mut().note(begun, now, self.start);
        if self.figures.borrow().series.len() > steps {
            self.count_writes(steps);
        }
        now
    }

    /// Adds the write statistics since the last call to the last of the `steps` steps so far.
    fn count_writes(&self, steps: usize) {
        let (Some(before), Some(last)) = (self.counted.get(), steps.checked_sub(1)) else {
            return;
        };
        let now = self.image.write_statistics().unwrap_or(before);
        self.counted.set(Some(now));
        let writes = &mut self.figures.borrow_mut().writes;
        writes.resize(last, WriteStatistics::default());
        writes.push(now.since(before));
    }

    /// One request; gives the memory of a read back.
    async fn request(&self, offset: u64, target: BufMut) -> cowslip::Result<BufMut> {
        match self.load.direction {
            Direction::Read => self.image.read(offset, target).await,
            Direction::Write(_) => {
                let data = self.data.clone();
                let durability = Durability::Cached;
                let written = self.image.write(offset, data, durability).await;
                written.map(|()| target)
            }
        }
    }

    fn is_flush_due(&self) -> bool {
        let interval = self.load.flush_interval;
        interval > 0 && self.unsent.get().is_multiple_of(interval)
    }

    /// Flushes when it is due. With `Drain` the last of those in flight flushes, and the others
    /// wait for it.
    async fn flush_in_turn(&self) -> cowslip::Result<()> {
        if self.load.pause == Pause::None {
            self.due.set(self.due.get() + 1);
            self.wake();
            return Ok(());
        }
        if self.in_flight.get() > 0 {
            self.sleep().await;
            return Ok(());
        }
        self.flush().await?;
        self.wake();
        Ok(())
    }

    /// The flushes that run beside the requests, until no request is left.
    async fn flushes_beside(&self) -> cowslip::Result<()> {
        if self.load.pause == Pause::Drain {
            return Ok(());
        }
        loop {
            if let Some(due) = self.due.get().checked_sub(1) {
                self.due.set(due);
                self.flush().await?;
            } else if self.unsent.get() > 0 || self.in_flight.get() > 0 {
                self.sleep().await;
            } else {
                return Ok(());
            }
        }
    }

    async fn flush(&self) -> cowslip::Result<()> {
        self.figures.borrow_mut().flushes += 1;
        let ended = self.load.count - self.unsent.get() - self.in_flight.get() as u64;
        self.image.flush().await?;
        if self.load.verbosity == Verbosity::Flushes {
            output::note(&format!("Flushed after {ended} requests\n"));
        }
        Ok(())
    }

    /// Waits for the next [`Run::wake`].
    async fn sleep(&self) {
        let (completer, woken) = pending();
        self.waiting.borrow_mut().push(completer);
        woken.await;
    }

    fn wake(&self) {
        for waiting in self.waiting.take() {
            waiting.complete(());
        }
    }
}

impl Figures {
    /// Adds those of a part that ran at the same time.
    pub fn add(&mut self, other: &Figures) {
        self.elapsed = self.elapsed.max(other.elapsed);
        self.latency.merge(&other.latency);
        self.flushes += other.flushes;
        let steps = self.series.len().max(other.series.len());
        self.series.resize(steps, 0);
        for (sum, more) in self.series.iter_mut().zip(&other.series) {
            *sum += more;
        }
    }

    fn note(&mut self, begun: Instant, now: Instant, start: Instant) {
        self.latency.add(now - begun);
        self.elapsed = now - start;
        let step = self.elapsed.as_micros() as u64 / (1000 * SERIES_STEP_MS);
        let step = usize::try_from(step).unwrap_or(usize::MAX);
        if self.series.len() <= step {
            self.series.resize(step + 1, 0);
        }
        self.series[step] += 1;
    }
}

/// The offsets of the requests, one after the other.
struct Places {
    order: Order,
    request_bytes: u64,
    disk_bytes: u64,
    /// The next offset, or how many were random.
    next: u64,
}

impl Places {
    fn new(load: &Load, disk_bytes: u64) -> Places {
        let request_bytes = load.request_bytes as u64;
        let skipped = u128::from(load.skipped);
        let next = match load.order {
            Order::Steps { start, .. } if skipped == 0 => u128::from(start),
            Order::Steps { start, step } => {
                let at = u128::from(start) + skipped * u128::from(step);
                at.checked_rem(disk_bytes.into()).unwrap_or(0)
            }
            Order::Random(_) => skipped % u128::from((disk_bytes / request_bytes).max(1)),
        };
        Places {
            order: load.order,
            request_bytes,
            disk_bytes,
            next: u64::try_from(next).unwrap_or(0),
        }
    }

    fn advance(&mut self) -> u64 {
        let at = self.next;
        match self.order {
            Order::Steps { step, .. } => {
                self.next = at
                    .wrapping_add(step)
                    .checked_rem(self.disk_bytes)
                    .unwrap_or(0);
                at
            }
            Order::Random(seed) => {
                let blocks = (self.disk_bytes / self.request_bytes).max(1);
                self.next = (at + 1) % blocks;
                permuted(seed, at, blocks) * self.request_bytes
            }
        }
    }
}

/// Where `index` goes in a shuffle of `0..count` that follows from the seed. Rounds of a bijection
/// on the next power of two, repeated until the result is within bounds; an expected two times at
/// most.
pub fn permuted(seed: u64, index: u64, count: u64) -> u64 {
    let bits = u64::BITS - (count - 1).leading_zeros();
    let mask = if bits == 0 {
        0
    } else {
        u64::MAX >> (u64::BITS - bits)
    };
    let shift = bits / 2 + 1;
    let mut at = index;
    loop {
        for round in 0..3 {
            let word = seed.wrapping_add(round).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            at = at.wrapping_add(word).wrapping_mul(word | 1) & mask;
            at ^= at >> shift;
        }
        if at < count {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(count: u64, request_bytes: usize, order: Order) -> Load {
        Load {
            count,
            request_bytes,
            depth: 1,
            direction: Direction::Read,
            order,
            flush_interval: 0,
            pause: Pause::None,
            verbosity: Verbosity::Nothing,
            skipped: 0,
        }
    }

    #[test]
    fn parts_visit_together_what_the_whole_visits() {
        let steps = Order::Steps {
            start: 3 << 10,
            step: 3 << 10,
        };
        for order in [steps, Order::Random(7)] {
            let whole = load(10, 1 << 10, order);
            let visited = |load: &Load| -> Vec<u64> {
                let mut places = Places::new(load, 16 << 10);
                (0..load.count).map(|_| places.advance()).collect()
            };
            let parts: Vec<u64> = (0..3)
                .flat_map(|part| visited(&whole.part(part, 3)))
                .collect();
            assert_eq!(parts, visited(&whole));
        }
    }

    #[test]
    fn random_places_are_each_visited_once() {
        for count in [1, 2, 3, 100, 1024, 1025] {
            let mut places = Places::new(&load(count, 512, Order::Random(7)), count * 512);
            let mut seen: Vec<u64> = (0..count).map(|_| places.advance() / 512).collect();
            let in_order = seen.is_sorted();
            seen.sort_unstable();
            assert!(seen.iter().copied().eq(0..count), "{count}");
            assert!(count < 100 || !in_order);
        }
    }

    #[test]
    fn steps_go_round_the_disk() {
        let order = Order::Steps {
            start: 3 << 10,
            step: 3 << 10,
        };
        let mut places = Places::new(&load(5, 1 << 10, order), 8 << 10);
        let seen: Vec<u64> = (0..5).map(|_| places.advance() >> 10).collect();
        assert_eq!(seen, [3, 6, 1, 4, 7]);
    }
}
