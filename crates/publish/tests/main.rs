//! Published disks on a simulated store, in memory and in a directory.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod changes;
mod crashes;
mod directory;
mod hostile;
mod model;
mod shared;
mod simulated;
mod standstill;
mod versions;
