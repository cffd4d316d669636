//! Concurrent durable writes and flushes of one file, and what follows from one that fails.
//!
//! The system reports bytes that it could not write back only once: to a flush, or to a durable
//! write, which flushes as it ends. Of two that run concurrently one fails and the other succeeds.
//! So one that succeeds waits for the others that were under way, and for their outcomes. If the
//! future of one is dropped, its error may be lost: from then on nothing counts as durable.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sync::{Mutex, Turn, Waiters, lock};
use crate::{Error, Result};

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
    pub async fn settle(&self) -> std::result::Result<(), LostFlush> {
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

/// The flushes and durable writes of a disk whose bytes are in one file (invariant D4).
#[derive(Debug)]
pub struct Flushes {
    /// One flush at a time, and the outcome of an earlier one: of two that are in flight together
    /// the system reports to only one that bytes were lost. `true` after a failure.
    turn: Turn<bool>,
    durable_writes: DurableWrites,
    /// A flush or a durable write has failed.
    lost: AtomicBool,
    /// Something was asked for that changes the file.
    changed: AtomicBool,
}

impl Default for Flushes {
    fn default() -> Flushes {
        Flushes {
            turn: Turn::new(false),
            durable_writes: DurableWrites::default(),
            lost: AtomicBool::new(false),
            changed: AtomicBool::new(false),
        }
    }
}

impl Flushes {
    /// From here on there is something to be flushed.
    pub fn will_change(&self) {
        self.changed.store(true, Ordering::Release);
    }

    /// Returns whether anything was asked for that changes the file.
    pub fn any_change(&self) -> bool {
        self.changed.load(Ordering::Acquire)
    }

    /// Flushes the disk of this name by `flushing`, when no other flush is under way.
    ///
    /// # Errors
    /// That of `flushing`; `Latched` if that, or a durable write, has failed before or meanwhile.
    pub async fn flush(
        &self,
        name: &str,
        flushing: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let mut failed = self.turn.take().await;
        if *failed {
            return Err(Error::Latched(name.to_string()));
        }
        let flushed = self.watch(flushing).await;
        *failed = flushed.is_err();
        flushed?;
        let checked = self.check_concurrent_flushes(name).await;
        *failed = checked.is_err();
        checked
    }

    /// Writes durably to the disk of this name by `writing`.
    ///
    /// # Errors
    /// As for [`Flushes::flush`].
    pub async fn write(&self, name: &str, writing: impl Future<Output = Result<()>>) -> Result<()> {
        self.watch(writing).await?;
        self.check_concurrent_flushes(name).await
    }

    /// Awaits a flush or a durable write, and notes its outcome for those beside it.
    async fn watch(&self, working: impl Future<Output = Result<()>>) -> Result<()> {
        let under_way = self.durable_writes.begin();
        let done = working.await;
        if done.is_err() {
            self.lost.store(true, Ordering::Release);
        }
        under_way.end();
        done
    }

    /// Checks, after a flush or a durable write has succeeded, that nothing it should have covered
    /// was lost: the system may have reported that to a concurrent one instead.
    async fn check_concurrent_flushes(&self, name: &str) -> Result<()> {
        let all_noted = self.durable_writes.settle().await.is_ok();
        match self.lost.load(Ordering::Acquire) || !all_noted {
            true => Err(Error::Latched(name.to_string())),
            false => Ok(()),
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
