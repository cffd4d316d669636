//! Cowslip: a qcow2 storage engine that allocates well.
//!
//! An [`Image`] is opened over a [`file::BlockFile`] and answers reads, writes, zeroes, discards,
//! flushes and questions about extents, concurrently and from several threads. It has no thread, no
//! clock and no executor of its own: its futures run wherever the caller polls them.
//!
//! May not know: NBD, command lines, printing, sockets, time.

mod chain;
pub mod commit;
pub mod compare;
pub mod convert;
mod durable;
mod extents;
pub mod formats;
pub mod image;
pub mod measure;
mod pairs;
pub mod qcow2;
mod raw;
pub mod rebase;

pub use cowslip_block::{
    Buf, BufMut, Disk, Error, IoVec, IoVecMut, Job, Result, SharedMemory, Workers, disk, error,
    foreign, job, limits, run, workers,
};
pub use cowslip_hostfile::{allocate, growth, space};
pub use cowslip_luks as luks;
pub use image::Image;

#[cfg(test)]
use cowslip_block::random;
use cowslip_block::{policy, sync, units, zero};

/// Files: the trait [`BlockFile`](file::BlockFile) and those of the host.
pub mod file {
    pub use cowslip_block::file::*;
    pub use cowslip_hostfile::host;
}

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
