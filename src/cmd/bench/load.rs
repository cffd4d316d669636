//! The load on one image: requests of one size, so many in flight, and when they are flushed.
//!
//! Its pace is qemu-img's, so that both engines do the same operations: one request is begun for each
//! that ends, and a flush falls due whenever the number of requests not yet begun is a multiple of the
//! interval. With `Drain` nothing is begun until all that is in flight, and then the flush, has ended.

use std::time::{Duration, Instant};

use cowslip::image::WriteOptions;
use cowslip::{Buf, BufMut, Image};
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::latency::Histogram;

/// Width of a step of the series in milliseconds.
pub const SERIES_STEP_MS: u64 = 100;

/// What requests do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// They read.
    Read,
    /// They write this byte throughout.
    Write(u8),
}

/// Where requests go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// From an offset on, each so many bytes after the last, round the disk.
    Steps {
        /// The first one's offset in bytes.
        start: u64,
        /// From one to the next in bytes.
        step: u64,
    },
    /// Each place once before any is visited again, in an order that follows from a seed.
    Random(u64),
}

/// What a due flush waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// All requests end first.
    Drain,
    /// It runs beside them.
    None,
}

/// Requests to one image.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// How many.
    pub count: u64,
    /// Size of each.
    pub request_bytes: usize,
    /// So many are in flight.
    pub depth: usize,
    /// What they do.
    pub direction: Direction,
    /// Where.
    pub order: Order,
    /// Requests to a flush; 0 for none.
    pub flush_interval: u64,
    /// What flushes wait for.
    pub pause: Pause,
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Until the last request had ended. What flushes and the close took after that is not in it.
    pub elapsed: Duration,
    /// Of each request.
    pub latency: Histogram,
    /// Flushes that were asked for.
    pub flushes: u64,
    /// Requests that ended in each step of the run.
    pub series: Vec<u64>,
}

enum Done {
    Request(Instant),
    Flush,
}

enum Action {
    Request(u64),
    Flush,
}

impl Load {
    /// Runs it to its end.
    ///
    /// # Errors
    /// The first failure of a request or flush; the others are dropped.
    pub async fn run(&self, image: &Image) -> cowslip::Result<Figures> {
        let data = match self.direction {
            Direction::Read => Buf::zeroed(0),
            Direction::Write(pattern) => {
                let mut data = BufMut::zeroed(self.request_bytes);
                data.fill(pattern);
                data.freeze()
            }
        };
        let mut places = Places::new(self.order, self.request_bytes as u64, image.size());
        let act = |action| self.act(image, data.clone(), action);
        let mut under_way = FuturesUnordered::new();
        let mut figures = Figures::default();
        let (mut unsent, mut in_flight) = (self.count, 0);
        let start = Instant::now();
        loop {
            while in_flight < self.depth && unsent > 0 {
                under_way.push(act(Action::Request(places.advance())));
                unsent -= 1;
                in_flight += 1;
            }
            let Some(done) = under_way.next().await else {
                return Ok(figures);
            };
            let Done::Request(begun) = done? else {
                continue;
            };
            figures.note(begun, start);
            in_flight -= 1;
            if self.flush_interval == 0 || !unsent.is_multiple_of(self.flush_interval) {
                continue;
            }
            if self.pause == Pause::Drain {
                while let Some(done) = under_way.next().await {
                    if let Done::Request(begun) = done? {
                        figures.note(begun, start);
                    }
                }
                in_flight = 0;
            }
            figures.flushes += 1;
            under_way.push(act(Action::Flush));
            if self.pause == Pause::Drain
                && let Some(done) = under_way.next().await
            {
                done?;
            }
        }
    }

    async fn act(&self, image: &Image, data: Buf, action: Action) -> cowslip::Result<Done> {
        let begun = Instant::now();
        let offset = match action {
            Action::Request(offset) => offset,
            Action::Flush => return image.flush().await.map(|()| Done::Flush),
        };
        match self.direction {
            Direction::Read => {
                let buf = BufMut::zeroed(self.request_bytes);
                image.read(offset, buf).await.map(drop)?;
            }
            Direction::Write(_) => image.write(offset, data, WriteOptions::default()).await?,
        }
        Ok(Done::Request(begun))
    }
}

impl Figures {
    fn note(&mut self, begun: Instant, start: Instant) {
        let now = Instant::now();
        self.latency.add(now - begun);
        self.elapsed = now - start;
        let step = self.elapsed.as_millis() / u128::from(SERIES_STEP_MS);
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
    fn new(order: Order, request_bytes: u64, disk_bytes: u64) -> Places {
        let next = match order {
            Order::Steps { start, .. } => start,
            Order::Random(_) => 0,
        };
        Places {
            order,
            request_bytes,
            disk_bytes,
            next,
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

/// Where `index` goes in a shuffle of `0..count` that follows from the seed. Rounds of a bijection on
/// the next power of two, repeated until the result is within bounds; an expected two times at most.
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

    #[test]
    fn random_places_are_each_visited_once() {
        for count in [1, 2, 3, 100, 1024, 1025] {
            let mut places = Places::new(Order::Random(7), 512, count * 512);
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
        let mut places = Places::new(order, 1 << 10, 8 << 10);
        let seen: Vec<u64> = (0..5).map(|_| places.advance() >> 10).collect();
        assert_eq!(seen, [3, 6, 1, 4, 7]);
    }
}
