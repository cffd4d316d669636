//! Operations that change an open image as a whole: its size, snapshots, bitmaps, options, keys.

pub(super) mod allocate;
pub mod amend;
pub mod bitmap;
pub(super) mod close;
pub mod compact;
pub(super) mod empty;
pub(super) mod keys;
pub(super) mod preallocate;
pub(super) mod resize;
pub mod snapshot;
pub(super) mod sound;
pub(super) mod unfinished;
pub(super) mod vm_state;
