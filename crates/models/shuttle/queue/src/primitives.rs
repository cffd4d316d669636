//! Shuttle's primitives under the names of `crates/queue/src/primitives.rs`.

use std::cell::UnsafeCell;

pub use shuttle::hint::spin_loop;
pub use shuttle::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
pub use shuttle::sync::{Mutex, MutexGuard};
pub use shuttle::thread::yield_now;

/// Shuttle runs one thread at a time, so there is nothing to check about the access itself.
#[derive(Debug, Default)]
pub struct SharedCell<T>(UnsafeCell<T>);

impl<T> SharedCell<T> {
    /// A cell with a value.
    pub fn new(value: T) -> SharedCell<T> {
        SharedCell(UnsafeCell::new(value))
    }

    /// Hands out the address for as long as `f` runs.
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
