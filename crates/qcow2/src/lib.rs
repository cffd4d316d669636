//! The qcow2 format: `docs/interop/qcow2.rst` of QEMU, versions 2 and 3. One image at a time: what
//! is below it is a [`backing::Backing`].
//!
//! This crate has no stable API. Programs use the crate `cowslip`, which shows the chapters of this
//! one that are for them, as `cowslip::qcow2`, and disks over images.
//!
//! The path of a guest write, called in `path/write.rs`:
//!
//! 1. `image.rs` has validated it; here the latch is consulted, and the header made ready for
//!    writes
//! 2. `mapping/tables.rs`: the slices that it needs are loaded
//! 3. `path/admit.rs`: the entries are viewed
//! 4. `space/alloc.rs`: clusters are taken
//! 5. `plan.rs`: what to do
//! 6. `mapping/inflight.rs`: leases; if one is taken, the clusters go back, wait and look again
//! 7. `path/cow.rs`: data moves, without the metadata lock
//! 8. `mapping/tables.rs`: the new mapping is published in memory
//! 9. `commit/writeback.rs`: on flush, FUA, or when much is dirty, metadata becomes durable in
//!    order
//!
//! Steps 3 to 6 are one hold of the metadata lock (`path/admit.rs`), 8 is another; what waits and
//! looks again is one loop, for writes and other requests (`path/obstacle.rs`). The guard of that
//! lock is not `Send` and the futures here are, so the compiler proves that it is never held
//! across I/O.
//!
//! May not know: chains of images, other formats, NBD, command lines, printing, sockets, time.

pub mod backing;
mod commit;
mod control;
mod health;
mod mapping;
mod open;
mod options;
mod path;
mod properties;
mod space;
mod state;
pub mod statistics;

#[doc(hidden)]
pub use cowslip_qcow2_format::header::CryptMethod;
#[doc(inline)]
pub use cowslip_qcow2_format::header::{CompressionType, Header};
#[doc(hidden)]
pub use cowslip_qcow2_format::{compress, count_growth, entry, geometry, header, map, plan};
#[doc(hidden)]
pub use cowslip_qcow2_offline::layout;
#[doc(no_inline)]
pub use cowslip_qcow2_offline::luks;
#[doc(inline)]
pub use cowslip_qcow2_offline::{check, create, inspect, repair, stream};

#[doc(hidden)]
pub use self::commit::probe;
pub use self::control::{amend, bitmap, compact, snapshot};
#[doc(hidden)]
pub use self::mapping::inflight;
#[doc(hidden)]
pub use self::mapping::lookup::EpochGuard;
#[doc(hidden)]
pub use self::open::{OpenParameters, open};
#[doc(hidden)]
pub use self::options::{CACHE_BYTES_DEFAULT, OpenOptions, RepairWatch};
pub use self::options::{DirtyImage, RepairAtOpen};
#[doc(hidden)]
pub use self::path::compressed_write::Packed;
#[doc(hidden)]
pub use self::path::read;
#[doc(hidden)]
pub use self::path::write::OnAllocated;
#[doc(hidden)]
pub use self::state::Qcow2;

pub(crate) use self::path::compressed_read::CompressedPart;

use self::state::{Counts, InlineVec, State};
#[cfg(test)]
use cowslip_block::random;
use cowslip_block::{
    Buf, Error, Job, Result, Workers, disk, durable, errno, file, files, job, policy, run, sync,
    units, workers, zero,
};
use cowslip_hostfile::growth;
use cowslip_qcow2_format::changed;
