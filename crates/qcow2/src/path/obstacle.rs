//! Obstacles of requests that change something, and the one loop that waits for them and looks
//! again.
//!
//! Such a request is decided in one hold of the metadata lock. If something is missing, the look
//! ends with what that is; the request lets go of all but a place in line, waits for that one
//! thing, and looks again from the start, since anything may have changed meanwhile.
//!
//! | missing | who changes that | what the wait does |
//! | --- | --- | --- |
//! | a slice in memory | this request, or another that loads the slice | loads, and pins it for the next look |
//! | a lease | those that hold leases in the range, or stand before it in line | keeps the place in line |
//! | space, for data or tables | the holder of the write-back turn | takes the turn, and makes room |
//! | a table of its own | this request | copies the table that a snapshot shares |
//! | other: a drain, a copied table, a hole | the operation that has begun it | nothing |
//!
//! Fairness is that of the leases (`inflight.rs`): a place in line lasts from one look to the next,
//! whatever is waited for between them, and ends with the look that succeeds, with an error, or
//! when the request is dropped. A request that waits holds no lease, and no pin but that of the
//! slice that it will look at, so it is in nobody's way.

use cowslip_queue::Pending;

use crate::mapping::inflight::{LeaseRequest, Ticket};
use crate::mapping::lookup::SlicePin;
use crate::{Error, Result};
use crate::{Qcow2, State};

/// The obstacle that a request has to wait for.
pub enum Blocked {
    Slice(u64),
    Lease(Ticket, Pending<()>),
    Space(u64),
    TableSpace,
    OwnTable(u64),
    Other(Pending<()>),
}

/// Why a look has decided nothing.
pub enum NotYet {
    /// It is worth looking again when this is out of the way.
    Blocked(Blocked),
    /// The request fails.
    Failed(Error),
}

impl From<Blocked> for NotYet {
    fn from(blocked: Blocked) -> NotYet {
        NotYet::Blocked(blocked)
    }
}

impl From<Error> for NotYet {
    fn from(error: Error) -> NotYet {
        NotYet::Failed(error)
    }
}

/// The outcome of a look.
pub type Look<T> = std::result::Result<T, NotYet>;

/// A place in the queue for a lease, released when dropped.
pub struct QueuePlace<'a> {
    pub image: &'a Qcow2,
    pub ticket: Option<Ticket>,
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.image.lock().mapping.leases.release(ticket);
        }
    }
}

impl State {
    /// Nothing is in the way of these leases in a slice, seen from `place` in line. Else the
    /// request joins the line, or keeps its place.
    pub fn expect_no_obstacle(
        &mut self,
        slice: u64,
        wants: &[LeaseRequest],
        place: Option<Ticket>,
    ) -> std::result::Result<(), Blocked> {
        match self.mapping.obstacle(slice, wants, place).cloned() {
            None => Ok(()),
            Some(want) => {
                let (ticket, waiting) = self.mapping.leases.wait(slice, want, place);
                Err(Blocked::Lease(ticket, waiting))
            }
        }
    }
}

impl Qcow2 {
    /// Looks until `look` decides: with the lock held, on an image that is not latched and that
    /// does not hold changes back. It is given the place in line, which it may release.
    ///
    /// # Errors
    /// The image is latched; or those of `look`, and of what was waited for.
    pub(crate) async fn when_clear<T>(
        &self,
        mut look: impl FnMut(&mut State, &mut Option<Ticket>) -> Look<T>,
    ) -> Result<T> {
        let mut place = QueuePlace {
            image: self,
            ticket: None,
        };
        let mut pinned: Option<SlicePin<'_>> = None;
        loop {
            let blocked = match self.look_once(&mut place, &mut look) {
                Ok(decided) => return Ok(decided),
                Err(NotYet::Failed(error)) => return Err(error),
                Err(NotYet::Blocked(blocked)) => blocked,
            };
            drop(pinned.take());
            pinned = self.satisfy(blocked, &mut place).await?;
        }
    }

    /// One look, in one hold of the lock. The place in line ends if it succeeds.
    fn look_once<T>(
        &self,
        place: &mut QueuePlace<'_>,
        look: &mut impl FnMut(&mut State, &mut Option<Ticket>) -> Look<T>,
    ) -> Look<T> {
        let mut state = self.lock();
        self.unlatched(&state)?;
        if let Some(waiting) = state.health.changes_held_back() {
            return Err(Blocked::Other(waiting).into());
        }
        let decided = look(&mut state, &mut place.ticket)?;
        if let Some(ticket) = place.ticket.take() {
            state.mapping.leases.release(ticket);
        }
        Ok(decided)
    }

    /// Waits for the obstacle to go away, holding nothing but a place in line.
    pub(crate) async fn satisfy<'a>(
        &'a self,
        need: Blocked,
        place: &mut QueuePlace<'a>,
    ) -> Result<Option<SlicePin<'a>>> {
        match need {
            Blocked::Slice(slice) => return Ok(Some(self.load(slice).await?)),
            Blocked::Lease(ticket, waiting) => {
                place.ticket = Some(ticket);
                waiting.await;
            }
            Blocked::Space(clusters) => self.make_room(clusters).await?,
            Blocked::TableSpace => self.make_table_space().await?,
            Blocked::OwnTable(l1_index) => self.unshare_table(l1_index).await?,
            Blocked::Other(waiting) => waiting.await,
        }
        Ok(None)
    }
}
