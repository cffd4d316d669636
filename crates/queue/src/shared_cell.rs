//! [`SharedCell`], as it is where no model checks the accesses.

use std::cell::UnsafeCell;

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
