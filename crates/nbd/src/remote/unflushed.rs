//! Acknowledged writes that no flush has made durable yet, and their fate when the connection is
//! lost.
//!
//! A server that ends loses the data it held in memory, and a flush that its successor completes
//! does not cover that data. The same applies if the server has survived: a flush covers other
//! connections only if the server says so, and the client does not know which server it has
//! reached. So the next flush after such a loss fails, once, whatever the server replies. The
//! decision needs only counts; nothing here does I/O.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use cowslip_queue::Completer;

/// Acknowledged changes of one connection, numbered in the order of their acknowledgements.
#[derive(Debug, Default)]
pub(super) struct Unflushed {
    acknowledged: u64,
    /// Number up to which writes are durable, or their loss has been reported.
    settled: u64,
    /// Number up to which writes may be lost.
    lost: u64,
    /// Number up to which a loss has been reported.
    reported: u64,
}

/// A flush that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlushBegun {
    acknowledged: u64,
    reported: u64,
}

impl Unflushed {
    /// Counts a change that the server has acknowledged and that is not durable by itself.
    pub(super) fn acknowledge(&mut self) {
        self.acknowledged += 1;
    }

    /// Notes that the connection over which all changes so far were acknowledged is lost.
    pub(super) fn connection_lost(&mut self) {
        if !self.is_empty() {
            self.lost = self.acknowledged;
        }
    }

    /// Whether every acknowledged change is durable, or reported as lost.
    pub(super) fn is_empty(&self) -> bool {
        self.acknowledged == self.settled
    }

    /// Begins a flush of all changes so far.
    pub(super) fn begin_flush(&self) -> FlushBegun {
        FlushBegun {
            acknowledged: self.acknowledged,
            reported: self.reported,
        }
    }

    /// Ends a flush that the server has answered with success.
    ///
    /// # Errors
    /// Some of the changes that it stands for may be lost. Every flush that had begun before the
    /// first report says so; later ones do not.
    pub(super) fn end_flush(&mut self, begun: FlushBegun) -> io::Result<()> {
        self.settled = self.settled.max(begun.acknowledged);
        if self.lost <= begun.reported {
            return Ok(());
        }
        self.settled = self.settled.max(self.lost);
        self.reported = self.lost;
        Err(io::Error::other(
            "the connection was lost, and with it perhaps writes that the server had acknowledged \
             and nobody had flushed",
        ))
    }
}

/// A part of several flushes that answer one request together: the first error, or success of all.
pub(super) struct FlushPart(Arc<Mutex<JointFlush>>);

struct JointFlush {
    left: usize,
    outcome: io::Result<()>,
    to: Option<Completer<io::Result<()>>>,
}

impl FlushPart {
    /// Parts of a flush, `count` of them; `to` completes with their joint outcome.
    pub(super) fn split(to: Completer<io::Result<()>>, count: usize) -> Vec<FlushPart> {
        let together = Arc::new(Mutex::new(JointFlush {
            left: count,
            outcome: Ok(()),
            to: Some(to),
        }));
        (0..count)
            .map(|_| FlushPart(Arc::clone(&together)))
            .collect()
    }

    /// Takes the outcome of this one; the last one answers the request.
    pub(super) fn complete(self, outcome: io::Result<()>) {
        let mut together = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        together.left -= 1;
        if together.outcome.is_ok() {
            together.outcome = outcome;
        }
        if together.left > 0 {
            return;
        }
        let outcome = std::mem::replace(&mut together.outcome, Ok(()));
        let to = together.to.take();
        drop(together);
        if let Some(to) = to {
            to.complete(outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowslip_queue::pending;

    fn flush(unflushed: &mut Unflushed) -> bool {
        let begun = unflushed.begin_flush();
        unflushed.end_flush(begun).is_ok()
    }

    #[test]
    fn the_first_flush_after_a_loss_fails_if_something_was_at_stake() {
        let mut writes = Unflushed::default();
        writes.connection_lost();
        assert!(flush(&mut writes), "nothing was written");
        writes.acknowledge();
        assert!(!writes.is_empty());
        assert!(flush(&mut writes));
        assert!(writes.is_empty());
        writes.connection_lost();
        assert!(flush(&mut writes), "all was flushed");
        writes.acknowledge();
        writes.connection_lost();
        writes.acknowledge();
        assert!(!flush(&mut writes));
        assert!(flush(&mut writes), "it has been reported");
        writes.connection_lost();
        assert!(flush(&mut writes), "nothing was written since");
    }

    #[test]
    fn a_write_beside_a_flush_is_not_covered_by_it() {
        let mut writes = Unflushed::default();
        writes.acknowledge();
        let begun = writes.begin_flush();
        writes.acknowledge();
        assert!(writes.end_flush(begun).is_ok());
        assert!(!writes.is_empty());
        writes.connection_lost();
        assert!(!flush(&mut writes));
    }

    #[test]
    fn every_flush_that_had_begun_reports_the_loss() {
        let mut writes = Unflushed::default();
        writes.acknowledge();
        let begun = [writes.begin_flush(), writes.begin_flush()];
        writes.connection_lost();
        for begun in begun {
            assert!(writes.end_flush(begun).is_err());
        }
        assert!(flush(&mut writes));
        assert!(writes.is_empty());
    }

    #[test]
    fn flushes_together_succeed_only_if_all_do() {
        for failing in [None, Some(0), Some(1), Some(2)] {
            let (to, outcome) = pending();
            for (index, part) in FlushPart::split(to, 3).into_iter().enumerate() {
                assert!(!outcome.has_value());
                part.complete(match failing == Some(index) {
                    true => Err(io::ErrorKind::BrokenPipe.into()),
                    false => Ok(()),
                });
            }
            assert!(outcome.has_value());
            let outcome = futures_util::FutureExt::now_or_never(outcome).unwrap();
            assert_eq!(outcome.is_ok(), failing.is_none());
        }
    }
}
