//! Loom's primitives under the names of `crates/queue/src/primitives.rs`.

pub use loom::hint::spin_loop;
pub use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
pub use loom::sync::{Mutex, MutexGuard};
pub use loom::thread::yield_now;

/// A cell whose accesses loom checks: two that no order separates fail the model.
#[derive(Debug)]
pub struct SharedCell<T>(loom::cell::UnsafeCell<T>);

impl<T> SharedCell<T> {
    /// A cell with a value.
    pub fn new(value: T) -> SharedCell<T> {
        SharedCell(loom::cell::UnsafeCell::new(value))
    }

    /// Hands out the address for as long as `f` runs.
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        self.0.with_mut(f)
    }
}
