//! Mutexes, atomics and shared cells of the modules whose concurrency is model-checked, under one
//! name: `crates/models` builds those modules with checked ones in place of these.

pub use crate::shared_cell::SharedCell;
pub use std::hint::spin_loop;
pub use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
pub use std::sync::{Mutex, MutexGuard};
pub use std::thread::yield_now;
