//! Disks of a running host: what stands behind a name changes while requests are under way, and
//! jobs copy a disk that is in use.
//!
//! A [`LiveDisk`] passes requests on to another disk, which is exchanged when nothing is under way
//! ([`LiveDisk::drain`]); taps see what changes: a [`DirtyMap`] notes it, a [`Backup`] copies old
//! bytes before they are overwritten, and a [`View`] shows them. A [`Mirror`] copies a disk until
//! the copy is equal. A [`Marks`] is a bitmap of changes wherever it is, which backups rotate
//! ([`Rotation`]), and which a [`Checkpoint`] of several disks exchanges for another one.
//!
//! Changes of a graph are steps of a [`Host`], which has the images: [`transact`], [`shorten`],
//! [`resize`], and the jobs [`stream`], [`commit`] and [`mirror()`]. The order of their durable
//! steps is here, for every host.
//!
//! May not know: image formats, nodes by name, protocols, threads.

mod backup;
mod checkpoint;
mod copy;
mod dirty;
mod host;
mod jobs;
mod live;
mod marks;
mod mirror;
mod quiet;
mod statistics;
mod steps;
mod succession;
mod view;

pub use backup::Backup;
pub use checkpoint::{Checkpoint, Use, join, noted_changes};
#[doc(no_inline)]
pub use cowslip_block::sync::{Turn, TurnGuard};
pub use dirty::DirtyMap;
pub use host::{Attended, Held, Host};
pub use jobs::{CHUNK_BYTES, Committed, Mirroring, commit, mirror, stream};
pub use live::{Drained, LiveDisk, Tap};
pub use marks::{Marks, Rotates, Rotation};
pub use mirror::{CopyMode, Mirror};
pub use quiet::Quiet;
pub use statistics::{Counted, LATENCY_BOUNDS, Latencies, Statistics};
pub use steps::{Action, NotDone, resize, shorten, transact};
pub use succession::{Link, complete_from, removed_with};
pub use view::View;

#[cfg(test)]
mod tests;
