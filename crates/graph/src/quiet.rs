//! [`Quiet`]: whether the clients of a disk have left it alone for a while, for work that waits
//! until they have.
//!
//! Nothing is added to the way of a request: a look at the disk compares the number of requests
//! that have ended with that of the look before.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip_block::sync::{Mutex, lock};

use crate::live::LiveDisk;

/// Watches disks that are used together.
#[derive(Debug)]
pub struct Quiet {
    disks: Vec<Arc<LiveDisk>>,
    span: Duration,
    last: Mutex<Last>,
}

/// The last look that has found requests.
#[derive(Debug)]
struct Last {
    requests: u64,
    at: Instant,
}

impl Quiet {
    /// Watches disks. They are quiet once no client has used any of them for `span`.
    pub fn new(disks: Vec<Arc<LiveDisk>>, span: Duration) -> Quiet {
        let requests = requests_of(&disks);
        Quiet {
            disks,
            span,
            last: Mutex::new(Last {
                requests,
                at: Instant::now(),
            }),
        }
    }

    /// Returns how long the disks have to be left alone from now on until they are quiet; `None` if
    /// they are.
    pub fn wait(&self) -> Option<Duration> {
        self.wait_at(Instant::now())
    }

    fn wait_at(&self, now: Instant) -> Option<Duration> {
        let requests = requests_of(&self.disks);
        let is_used = self.disks.iter().any(|disk| disk.in_flight() > 0);
        let mut last = lock(&self.last);
        if is_used || requests != last.requests {
            *last = Last { requests, at: now };
        }
        let over = last.at + self.span;
        (over > now).then(|| over - now)
    }
}

/// Requests to disks that have ended.
fn requests_of(disks: &[Arc<LiveDisk>]) -> u64 {
    let ended = disks.iter().map(|disk| disk.statistics().requests());
    ended.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // In a test a panic is the report.

    use std::pin::pin;
    use std::task::{Context, Waker};

    use cowslip_block::disk::{Disk, MemoryDisk};
    use futures_util::FutureExt;

    use super::*;

    fn in_memory() -> Arc<LiveDisk> {
        LiveDisk::new("disk", Arc::new(MemoryDisk::new("disk", 4096)))
    }

    const SPAN: Duration = Duration::from_millis(500);

    #[test]
    fn a_disk_is_quiet_once_it_was_left_alone_for_the_span() {
        let live = in_memory();
        let quiet = Quiet::new(vec![Arc::clone(&live)], SPAN);
        let begun = lock(&quiet.last).at;
        assert_eq!(quiet.wait_at(begun), Some(SPAN));
        assert_eq!(quiet.wait_at(begun + SPAN), None);
        live.flush().now_or_never().unwrap().unwrap();
        let later = begun + 3 * SPAN;
        assert_eq!(quiet.wait_at(later), Some(SPAN), "a request has ended");
        assert_eq!(quiet.wait_at(later + SPAN / 2), Some(SPAN / 2));
        assert_eq!(quiet.wait_at(later + SPAN), None);
    }

    #[test]
    fn a_request_under_way_is_use() {
        let below = in_memory();
        let live = LiveDisk::new("above", below.clone());
        let quiet = Quiet::new(vec![Arc::clone(&live)], SPAN);
        let begun = lock(&quiet.last).at;
        let held = below.drain().now_or_never().unwrap();
        let mut flush = pin!(live.flush());
        let mut context = Context::from_waker(Waker::noop());
        assert!(flush.as_mut().poll(&mut context).is_pending());
        assert_eq!(quiet.wait_at(begun + SPAN), Some(SPAN));
        assert_eq!(quiet.wait_at(begun + 9 * SPAN), Some(SPAN));
        drop(held);
        assert!(flush.as_mut().poll(&mut context).is_ready());
        assert_eq!(quiet.wait_at(begun + 10 * SPAN), Some(SPAN), "it has ended");
        assert_eq!(quiet.wait_at(begun + 11 * SPAN), None);
    }
}
