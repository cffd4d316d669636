//! Stores to fields in shared memory, in a process that dies before one that is chosen.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local! {
    /// Stores that this thread may still make; `None` is any number.
    static STORES_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    static STORES: Cell<u64> = const { Cell::new(0) };
}

/// The end of the process.
struct Died;

pub(crate) fn before_store() {
    STORES.set(STORES.get() + 1);
    match STORES_LEFT.get() {
        None => {}
        Some(0) => resume_unwind(Box::new(Died)),
        Some(left) => STORES_LEFT.set(Some(left - 1)),
    }
}

/// Stores that this thread has made.
pub fn stores() -> u64 {
    STORES.get()
}

/// Calls `f` in a process that makes at most this number of stores. `None` if it died.
pub fn live_for<T>(stores: Option<u64>, f: impl FnOnce() -> T) -> (Option<T>, Option<u64>) {
    STORES_LEFT.set(stores);
    let result = catch_unwind(AssertUnwindSafe(f));
    let left = STORES_LEFT.take();
    match result {
        Ok(value) => (Some(value), left),
        Err(payload) if payload.is::<Died>() => (None, None),
        Err(payload) => resume_unwind(payload),
    }
}
