//! [`Brake`]: keeps a session from changing its files any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Shared by all handles of the files of a session. Once it is pulled, none of them writes, zeroes,
/// discards, allocates or changes a length; what was issued before goes to its end.
#[derive(Clone, Debug, Default)]
pub struct Brake(Arc<AtomicBool>);

impl Brake {
    /// Stops all changes from now on.
    pub fn pull(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether changes are stopped.
    pub fn is_pulled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
