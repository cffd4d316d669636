//! Concurrent durable writes and flushes of one file.
//!
//! The system reports bytes that it could not write back only once: to a flush, or to a durable
//! write, which flushes as it ends. Of two that run concurrently one fails and the other succeeds.
//! So one that succeeds waits for the others that were under way, and for their outcomes. If the
//! future of one is dropped, its error may be lost: from then on nothing counts as durable.

use std::collections::BTreeSet;

use crate::sync::{Mutex, Waiters, lock};

/// The durable writes and flushes of an image that are under way.
#[derive(Debug, Default)]
pub struct DurableWrites(Mutex<Writes>);

#[derive(Debug, Default)]
struct Writes {
    next: u64,
    under_way: BTreeSet<u64>,
    /// One was dropped before its outcome was noted.
    lost: bool,
    ended: Waiters,
}

/// The error of a durable write or flush may have been lost with its future.
#[derive(Debug, PartialEq, Eq)]
pub struct LostFlush;

/// A durable write or flush that is under way.
#[derive(Debug)]
pub struct DurableWrite<'a> {
    writes: &'a DurableWrites,
    number: u64,
    noted: bool,
}

impl DurableWrite<'_> {
    /// Marks it as ended, with its outcome noted.
    pub fn end(mut self) {
        self.noted = true;
    }
}

impl Drop for DurableWrite<'_> {
    fn drop(&mut self) {
        let mut writes = lock(&self.writes.0);
        writes.under_way.remove(&self.number);
        writes.lost |= !self.noted;
        writes.ended.wake();
    }
}

impl DurableWrites {
    /// Registers a durable write or flush that begins.
    pub fn begin(&self) -> DurableWrite<'_> {
        let mut writes = lock(&self.0);
        let number = writes.next;
        writes.next += 1;
        writes.under_way.insert(number);
        DurableWrite {
            writes: self,
            number,
            noted: false,
        }
    }

    /// Waits until all that have begun by now have ended.
    ///
    /// # Errors
    /// One was dropped before its outcome was noted.
    pub async fn settle(&self) -> Result<(), LostFlush> {
        let end = lock(&self.0).next;
        loop {
            let waiting = {
                let mut writes = lock(&self.0);
                if writes.under_way.range(..end).next().is_none() {
                    return if writes.lost { Err(LostFlush) } else { Ok(()) };
                }
                writes.ended.wait()
            };
            waiting.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn a_flush_waits_for_the_writes_before_it_and_for_no_others() {
        let writes = DurableWrites::default();
        let mut context = Context::from_waker(Waker::noop());
        let (first, second) = (writes.begin(), writes.begin());
        let mut settled = pin!(writes.settle());
        assert!(settled.as_mut().poll(&mut context).is_pending());
        let later = writes.begin();
        first.end();
        assert!(settled.as_mut().poll(&mut context).is_pending());
        second.end();
        assert_eq!(settled.as_mut().poll(&mut context), Poll::Ready(Ok(())));
        later.end();
        assert_eq!(
            pin!(writes.settle()).poll(&mut context),
            Poll::Ready(Ok(()))
        );
    }

    #[test]
    fn the_outcome_of_a_dropped_write_is_lost_for_good() {
        let writes = DurableWrites::default();
        let mut context = Context::from_waker(Waker::noop());
        drop(writes.begin());
        for _ in 0..2 {
            let settled = pin!(writes.settle());
            assert_eq!(settled.poll(&mut context), Poll::Ready(Err(LostFlush)));
            writes.begin().end();
        }
    }
}
