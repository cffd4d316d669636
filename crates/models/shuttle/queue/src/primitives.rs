//! Shuttle's primitives under the names of `crates/queue/src/primitives.rs`.

// Shuttle runs one thread at a time, so there is nothing to check about the access itself.
pub use crate::shared_cell::SharedCell;
pub use shuttle::hint::spin_loop;
pub use shuttle::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
pub use shuttle::sync::{Mutex, MutexGuard};
pub use shuttle::thread::yield_now;
