//! Durable writes and flushes of the same file beside each other.
//!
//! The system tells of bytes that it could not write back once: to a flush, or to a durable write,
//! which flushes as it ends. Of two that are under way together one hears it and the other succeeds.
//! So whichever succeeds waits for the others that were under way, and for what they say.

use std::collections::BTreeSet;

use crate::sync::{Mutex, Waiters, lock};

/// The durable writes and flushes of an image that are under way.
#[derive(Debug, Default)]
pub struct DurableWrites(Mutex<Writes>);

#[derive(Debug, Default)]
struct Writes {
    next: u64,
    under_way: BTreeSet<u64>,
    ended: Waiters,
}

/// A durable write or flush that is under way, until this is dropped: after its outcome was noted.
#[derive(Debug)]
pub struct DurableWrite<'a> {
    writes: &'a DurableWrites,
    number: u64,
}

impl Drop for DurableWrite<'_> {
    fn drop(&mut self) {
        let mut writes = lock(&self.writes.0);
        writes.under_way.remove(&self.number);
        writes.ended.wake();
    }
}

impl DurableWrites {
    /// A durable write or flush begins.
    pub fn begin(&self) -> DurableWrite<'_> {
        let mut writes = lock(&self.0);
        let number = writes.next;
        writes.next += 1;
        writes.under_way.insert(number);
        DurableWrite {
            writes: self,
            number,
        }
    }

    /// Waits until all that have begun by now have ended.
    pub async fn settle(&self) {
        let end = lock(&self.0).next;
        loop {
            let waiting = {
                let mut writes = lock(&self.0);
                if writes.under_way.range(..end).next().is_none() {
                    return;
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
    use std::task::{Context, Waker};

    #[test]
    fn a_flush_waits_for_the_writes_before_it_and_for_no_others() {
        let writes = DurableWrites::default();
        let mut context = Context::from_waker(Waker::noop());
        let (first, second) = (writes.begin(), writes.begin());
        let mut settled = pin!(writes.settle());
        assert!(settled.as_mut().poll(&mut context).is_pending());
        let later = writes.begin();
        drop(first);
        assert!(settled.as_mut().poll(&mut context).is_pending());
        drop(second);
        assert!(settled.as_mut().poll(&mut context).is_ready());
        drop(later);
        assert!(pin!(writes.settle()).poll(&mut context).is_ready());
    }
}
