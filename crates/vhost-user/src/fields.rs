//! Fields in memory that other processes share: of rings, and of the table of requests in flight.
//!
//! All that a queue stores beside the guest's data goes through here, one field at a time. So
//! `tests/crashes` can end the process before each store: it builds this file, and those above it,
//! over another `stores`.

use std::sync::Arc;

use cowslip_queue::SharedMemory;

use crate::stores::before_store;

/// Fields by their offsets from a place in shared memory.
#[derive(Clone, Debug)]
pub(crate) struct Fields {
    memory: Arc<SharedMemory>,
    start: usize,
}

/// Accessors of a field of one size.
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

    /// A descriptor, which its owner does not change now if it keeps to the rules.
    pub fn load_bytes(&self, at: usize) -> [u8; 16] {
        let mut bytes = [0; 16];
        self.memory.read(self.start + at, &mut bytes);
        bytes
    }
}
