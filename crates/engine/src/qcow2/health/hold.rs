//! Requests that are held back, reads too.

use crate::sync::Waiters;

/// The requests that are held back, besides those that change something.
#[derive(Debug, Default)]
pub(in crate::qcow2) struct Hold {
    /// Wakes them.
    pub waiting: Waiters,
    /// Nobody is left who needs a slice to come to an end: no slice is loaded or pinned either.
    pub is_complete: bool,
}
