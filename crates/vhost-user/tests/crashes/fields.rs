//! Fields in shared memory, as in `src/fields.rs`, in a process that dies before a store that is
//! chosen.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use cowslip_queue::SharedMemory;

thread_local! {
    /// Stores that this thread may still make; `None` is any number.
    static STORES_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    static STORES: Cell<u64> = const { Cell::new(0) };
}

/// The end of the process.
struct Died;

fn before_store() {
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

#[derive(Clone, Debug)]
pub(crate) struct Fields {
    memory: Arc<SharedMemory>,
    start: usize,
}

macro_rules! accessors {
    ($($load:ident, $store:ident: $word:ty;)+) => {$(
        pub fn $load(&self, at: usize) -> $word {
            self.memory.$load(self.start + at)
        }

        pub fn $store(&self, at: usize, value: $word) {
            before_store();
            self.memory.$store(self.start + at, value);
        }
    )+};
}

impl Fields {
    pub fn new(memory: &Arc<SharedMemory>, start: usize) -> Fields {
        Fields {
            memory: Arc::clone(memory),
            start,
        }
    }

    accessors! {
        load_u8, store_u8: u8;
        load_u16, store_u16: u16;
        load_u32, store_u32: u32;
        load_u64, store_u64: u64;
    }

    pub fn load_bytes(&self, at: usize) -> [u8; 16] {
        let mut bytes = [0; 16];
        self.memory.read(self.start + at, &mut bytes);
        bytes
    }
}
