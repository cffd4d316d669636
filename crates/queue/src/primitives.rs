//! Mutexes, atomics and shared cells of the modules whose concurrency is model-checked, under one
//! name: `crates/models` builds those modules with checked ones in place of these.

use std::cell::UnsafeCell;

pub use std::hint::spin_loop;
pub use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
pub use std::sync::{Mutex, MutexGuard};
pub use std::thread::yield_now;

/// A value that threads use in turns that they agree on by other means.
#[derive(Debug, Default)]
pub struct SharedCell<T>(UnsafeCell<T>);

impl<T> SharedCell<T> {
    /// A cell with a value.
    pub fn new(value: T) -> SharedCell<T> {
        SharedCell(UnsafeCell::new(value))
    }

    /// Hands out the address for as long as `f` runs; code that dereferences it knows that it is
    /// its turn.
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
