//! [`Brake`]: stops a session from changing its files.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag shared by all handles of the files of a session. Once it is set, none of them writes,
/// zeroes, discards, allocates or changes a length; requests issued before run to their end.
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
