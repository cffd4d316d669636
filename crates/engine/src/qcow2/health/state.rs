//! Which requests an open image takes: whether it is latched, closed, or holds some of them back.

use super::hold::Hold;
use super::latch::Latch;
use crate::sync::Waiters;

/// What may be done with an open image.
#[derive(Debug)]
pub(in crate::qcow2) struct Health {
    /// Why writes and flushes are refused (invariant D4).
    pub(in crate::qcow2) latch: Latch,
    /// Guest data is mapped to metadata: the image is to be marked corrupt.
    pub(in crate::qcow2) damaged: bool,
    /// No request may begin: an operation waits for all to end.
    pub(in crate::qcow2) draining: Option<Waiters>,
    /// No read may begin either.
    pub(in crate::qcow2) hold: Option<Hold>,
    pub(in crate::qcow2) closed: bool,
}

impl Health {
    /// The health of an image just opened.
    pub fn new(latch: Latch) -> Health {
        Health {
            latch,
            damaged: false,
            draining: None,
            hold: None,
            closed: false,
        }
    }
}
