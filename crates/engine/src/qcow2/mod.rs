//! The qcow2 format: `docs/interop/qcow2.rst` of QEMU, versions 2 and 3.
//!
//! The path of a guest write, one call into one file each:
//!
//! 1. `image.rs` has validated it; here the latch is consulted, and the header made ready for
//!    writes
//! 2. `tables.rs`: the slices that it needs are loaded
//! 3. `map.rs`, 4. `plan.rs`: what is there, and what to do
//! 5. `inflight.rs`: leases; if one is taken, wait and look again
//! 6. `alloc.rs`: clusters are taken
//! 7. `cow.rs`: data moves, without the metadata lock
//! 8. `tables.rs`: the new mapping is published in memory
//! 9. `writeback.rs`: on flush, FUA, or when much is dirty, metadata becomes durable in order
//!
//! Steps 3 to 6 are one hold of the metadata lock (`admit.rs`), 8 is another. The guard of that
//! lock is not `Send` and the futures here are, so the compiler proves that it is never held across
//! I/O.

mod admit;
mod ahead;
mod alloc;
pub mod amend;
pub mod bitmap;
mod changed;
pub mod check;
pub mod compress;
mod compressed_read;
mod compressed_tail;
mod compressed_write;
mod copy_on_read;
pub(crate) mod count_growth;
mod cow;
pub mod create;
mod drain;
mod empty;
mod entries;
pub mod entry;
mod gather;
pub mod geometry;
mod growth;
pub mod header;
mod hold;
pub(crate) mod inflight;
pub mod inspect;
mod keys;
mod latch;
pub mod layout;
mod lookup;
pub mod map;
mod observe;
mod open;
pub mod plan;
mod preallocate;
pub mod probe;
mod properties;
mod punch;
mod punches;
mod quarantine;
pub(crate) mod read;
mod refcount;
mod refuse;
pub mod repair;
mod resize;
mod room;
mod roots;
pub mod snapshot;
mod sound;
mod sparse;
mod state;
mod tables;
mod turn;
mod vm_state;
mod write;
mod writeback;

pub(crate) use self::compressed_read::Wanted;
pub(crate) use self::compressed_write::Packed;
pub use self::open::{Opening, open};
pub use self::state::Qcow2;
pub(crate) use self::write::Admitted;

use self::state::{Counts, Few, State};
