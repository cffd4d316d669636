//! Which requests an open image takes: whether it is latched, closed, or holds some of them back.

use std::sync::Arc;

use cowslip_queue::Pending;

use super::latch::Latch;
use crate::file::Brake;
use crate::mapping::visits::{Closed, Visits};
use crate::sync::Waiters;
use crate::{Error, Result};

/// Whether requests may begin. Invariants: an image that is damaged is latched, and reads are held
/// back only while changes are.
#[derive(Debug)]
pub(crate) struct Health {
    /// Why writes and flushes are refused (invariant D4).
    latch: Latch,
    /// Guest data is mapped to metadata: the image is to be marked corrupt.
    damaged: bool,
    /// No request that changes something may begin: an operation waits for all to end.
    draining: Option<Waiters>,
    /// No read may begin either.
    hold: Option<Hold>,
    closed: bool,
    /// Their gate is closed where a request has to look here.
    visits: Arc<Visits>,
}

/// The requests that are held back, besides those that change something.
#[derive(Debug, Default)]
struct Hold {
    /// Tasks that wait for the drain.
    waiting: Waiters,
    /// No request is left that needs a slice to end: no slice is loaded or pinned either.
    is_complete: bool,
}

impl Health {
    /// The health of an image just opened, whose files have this brake, and whose requests that
    /// take no lock are these.
    pub fn new(brake: Brake, visits: Arc<Visits>) -> Health {
        Health {
            latch: Latch::new(brake),
            damaged: false,
            draining: None,
            hold: None,
            closed: false,
            visits,
        }
    }

    /// Latches the image. The first reason stays.
    pub fn latch(&mut self, reason: Error) {
        self.visits.close(Closed::Latched);
        self.latch.set(reason);
    }

    /// Latches the image because a root could not be written.
    pub fn latch_for_root(&mut self, reason: Error) {
        self.visits.close(Closed::Latched);
        self.latch.set_for_root(reason);
    }

    /// Latches the image because guest data is mapped to metadata: it is to be marked corrupt.
    pub fn latch_for_damage(&mut self, reason: Error) {
        self.latch(reason);
        self.damaged = true;
    }

    /// Returns whether an earlier failure keeps everybody from writing.
    pub fn is_latched(&self) -> bool {
        self.latch.is_set()
    }

    /// Returns whether a failure has latched it, and not the end of its session.
    pub fn has_failed(&self) -> bool {
        let reason = self.latch.reason();
        reason.is_some_and(|reason| !matches!(reason, Error::Latched(_)))
    }

    /// The latch of the image of this name, for requests that write or flush.
    pub fn unlatched(&self, name: &str) -> Result<()> {
        match self.latch.reason() {
            None => Ok(()),
            Some(error @ Error::Corrupt { .. }) => Err(error.duplicate()),
            Some(_) => Err(Error::Latched(name.to_string())),
        }
    }

    /// Returns whether damage was met and may be noted in the header: the one in memory is the one
    /// on the medium.
    pub fn may_mark_damage(&self) -> bool {
        self.damaged && self.latch.knows_roots()
    }

    /// Returns the wait of a request that changes something and has not begun, if those are held
    /// back.
    pub fn changes_held_back(&mut self) -> Option<Pending<()>> {
        self.draining.as_mut().map(Waiters::wait)
    }

    /// Returns whether requests that change something are held back.
    pub fn holds_changes_back(&self) -> bool {
        self.draining.is_some()
    }

    /// Holds back requests that change something; returns the wait for another operation, if that
    /// does already.
    pub fn hold_changes_back(&mut self) -> Option<Pending<()>> {
        let waiting = self.changes_held_back();
        if waiting.is_none() {
            self.draining = Some(Waiters::default());
            self.visits.close(Closed::Changes);
        }
        waiting
    }

    /// Lets requests that change something begin again.
    pub fn let_changes_begin(&mut self) {
        self.visits.open(Closed::Changes);
        // Dropping the waiters wakes them.
        self.draining = None;
    }

    /// Holds reads back, too.
    pub fn hold_reads_back(&mut self) {
        debug_assert!(self.holds_changes_back(), "a hold is part of a drain");
        self.hold = Some(Hold::default());
        self.visits.close(Closed::Reads);
    }

    /// Holds back all that needs a slice: nothing is under way, and no slice in use.
    ///
    /// # Panics
    /// Unless reads are held back.
    pub fn hold_slices_back(&mut self) {
        let hold = self.hold.as_mut();
        hold.expect("only the end of this ends it").is_complete = true;
    }

    /// Lets reads begin again.
    pub fn let_reads_begin(&mut self) {
        self.visits.open(Closed::Reads);
        self.hold = None;
    }

    /// Returns the wait of a request that has not begun, if reads are held back.
    pub fn reads_held_back(&mut self) -> Option<Pending<()>> {
        self.hold.as_mut().map(|hold| hold.waiting.wait())
    }

    /// Returns the wait of a request that needs a slice, if slices are held back.
    pub fn slices_held_back(&mut self) -> Option<Pending<()>> {
        let hold = self.hold.as_mut().filter(|hold| hold.is_complete)?;
        Some(hold.waiting.wait())
    }

    /// Ends the session: nothing is admitted afterwards.
    pub fn close(&mut self) {
        self.visits.close(Closed::Latched);
        self.closed = true;
    }

    /// Returns whether the session was closed.
    pub fn is_closed(&self) -> bool {
        self.closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health() -> Health {
        Health::new(Brake::default(), Arc::default())
    }

    fn damage() -> Error {
        Error::Corrupt {
            file: "a".to_string(),
            structure: "cluster",
            offset: 0,
            detail: "guest data is mapped to metadata".to_string(),
        }
    }

    #[test]
    fn one_operation_at_a_time_holds_changes_back() {
        let mut health = health();
        assert!(health.changes_held_back().is_none());
        assert!(health.hold_changes_back().is_none());
        assert!(health.hold_changes_back().is_some() && health.changes_held_back().is_some());
        health.hold_reads_back();
        assert!(health.reads_held_back().is_some() && health.slices_held_back().is_none());
        health.hold_slices_back();
        assert!(health.slices_held_back().is_some());
        health.let_reads_begin();
        assert!(health.reads_held_back().is_none() && health.slices_held_back().is_none());
        health.let_changes_begin();
        assert!(!health.holds_changes_back() && health.changes_held_back().is_none());
    }

    #[test]
    fn damage_is_marked_unless_the_root_on_the_medium_is_unknown() {
        let mut sound = health();
        sound.latch(Error::Invalid("no damage".to_string()));
        assert!(sound.is_latched() && !sound.may_mark_damage());
        let mut damaged = health();
        assert!(damaged.unlatched("a").is_ok());
        damaged.latch_for_damage(damage());
        assert!(damaged.is_latched() && damaged.may_mark_damage());
        assert!(matches!(damaged.unlatched("a"), Err(Error::Corrupt { .. })));
        damaged.latch_for_root(Error::Invalid("a failed write".to_string()));
        assert!(!damaged.may_mark_damage());
        assert!(matches!(sound.unlatched("a"), Err(Error::Latched(name)) if name == "a"));
    }
}
