//! The progress of write-back: what of an open image is on the medium, and what is not yet.

use crate::qcow2::header::Header;

/// The header as on the medium, and which changes are durable.
#[derive(Debug)]
pub(in crate::qcow2) struct Committed {
    /// The header as on disk.
    pub(in crate::qcow2) header: Header,
    /// Cuts made so far; a flush needs one made after it arrived.
    pub(in crate::qcow2) cuts: u64,
    /// The last cut whose cycle ended well.
    pub(in crate::qcow2) durable_cut: u64,
    /// Something was written since the last barrier that covers it.
    pub(in crate::qcow2) unflushed: bool,
    /// Changes of space of the image file that a barrier covers.
    pub(in crate::qcow2) settled_space_changes: u64,
    /// The header is fit for changes of the image (invariant D5).
    pub(in crate::qcow2) ready_for_changes: bool,
    /// It is, and bitmaps follow writes of the guest.
    pub(in crate::qcow2) ready_for_writes: bool,
}

impl Committed {
    /// The progress at open.
    pub fn new(header: Header) -> Committed {
        Committed {
            header,
            cuts: 0,
            durable_cut: 0,
            // A process that died may have left unflushed writes: the first flush covers them.
            unflushed: true,
            settled_space_changes: 0,
            ready_for_changes: false,
            ready_for_writes: false,
        }
    }
}
