//! Disks of a running host: what stands behind a name changes while requests are under way, and
//! jobs copy a disk that is in use.
//!
//! A [`LiveDisk`] passes requests on to another disk, which is exchanged when nothing is under way
//! ([`LiveDisk::drain`]); taps see what changes: a [`DirtyMap`] notes it, a [`Backup`] copies old
//! bytes before they are overwritten. A [`Mirror`] copies a disk until the copy is equal.
//!
//! May not know: image formats, nodes by name, protocols, threads.

mod backup;
mod copy;
mod dirty;
mod live;
mod mirror;
mod statistics;

pub use backup::Backup;
#[doc(no_inline)]
pub use cowslip_block::sync::Turn;
pub use dirty::DirtyMap;
pub use live::{Drained, LiveDisk, Tap};
pub use mirror::{CopyMode, Mirror};
pub use statistics::{Counted, Statistics};

#[cfg(test)]
mod tests;
