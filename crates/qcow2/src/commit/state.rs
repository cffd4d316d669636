//! The progress of write-back: what of an open image is on the medium, and what is not yet.

use std::sync::Arc;

use crate::header::{Header, autoclear};
use crate::sync::{AtomicU64, Ordering};

/// The header as on the medium, and which changes are durable.
#[derive(Debug)]
pub(crate) struct Committed {
    /// The header as on the medium.
    pub(crate) header: Header,
    /// Its size of the disk, for requests that take no lock.
    size: Arc<AtomicU64>,
    /// Cuts made so far; a flush needs one made after it arrived.
    cuts: u64,
    /// The last cut whose cycle ended well.
    durable_cut: u64,
    /// Something was written since the last barrier that covers it.
    unflushed: bool,
    /// Changes of space of the image file that a barrier covers.
    settled_space_changes: u64,
    ready: Ready,
}

/// The changes that the header on the medium is fit for (invariant D5), each including those
/// before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ready {
    /// Nothing waits for a cycle.
    Nothing,
    /// Changes that the guest does not see.
    Changes,
    /// Writes of the guest: the bitmaps follow them.
    Writes,
}

impl Committed {
    /// The progress at open.
    pub fn new(header: Header) -> Committed {
        Committed {
            size: Arc::new(AtomicU64::new(header.size)),
            header,
            cuts: 0,
            durable_cut: 0,
            // A process that died may have left unflushed writes: the first flush covers them.
            unflushed: true,
            settled_space_changes: 0,
            ready: Ready::Nothing,
        }
    }

    /// The medium has another header.
    pub fn set_header(&mut self, header: Header) {
        self.size.store(header.size, Ordering::Release);
        self.header = header;
    }

    /// The size of the disk in bytes, as it is at any moment.
    pub fn size(&self) -> &Arc<AtomicU64> {
        &self.size
    }

    /// The first cut that covers all that has completed by now.
    pub fn next_cut(&self) -> u64 {
        self.cuts + 1
    }

    /// Counts a cut. Returns its number, and whether something waits for a barrier, which has to
    /// come with the cut.
    pub fn cut(&mut self) -> (u64, bool) {
        self.cuts += 1;
        (self.cuts, std::mem::take(&mut self.unflushed))
    }

    /// The cycle of this cut has ended well.
    pub fn cut_is_durable(&mut self, cut: u64) {
        debug_assert!(
            self.durable_cut < cut && cut <= self.cuts,
            "cycles are serial"
        );
        self.durable_cut = cut;
    }

    /// Returns whether a cut, or a later one, is durable.
    pub fn is_durable(&self, cut: u64) -> bool {
        self.durable_cut >= cut
    }

    /// Returns whether the last cut is durable: no cycle is under way, or has failed.
    pub fn is_settled(&self) -> bool {
        self.is_durable(self.cuts)
    }

    /// Something was written, or may have been: it needs a barrier.
    pub fn note_unflushed(&mut self) {
        self.unflushed = true;
    }

    /// A barrier covers this many changes of the image file's space.
    pub fn settle_space(&mut self, changes: u64) {
        self.settled_space_changes = changes;
    }

    /// Returns whether a barrier covers this many changes of space, so that what reads as zeroes
    /// does so durably.
    pub fn is_space_settled(&self, changes: u64) -> bool {
        self.settled_space_changes == changes
    }

    /// Returns whether the header is fit for such changes.
    pub fn is_ready_for(&self, changes: Ready) -> bool {
        self.ready >= changes
    }

    /// The header is fit for such changes, durably.
    pub fn now_ready_for(&mut self, changes: Ready) {
        self.ready = self.ready.max(changes);
    }

    /// The bitmaps no longer follow writes of the guest.
    pub fn end_tracking(&mut self) {
        self.ready = self.ready.min(Ready::Changes);
    }

    /// Returns whether no autoclear bit is set that a change of the data file would have to clear
    /// (D5).
    pub fn may_change_data_file(&self) -> bool {
        self.is_ready_for(Ready::Changes) || self.header.autoclear_features & !autoclear::KNOWN == 0
    }
}
