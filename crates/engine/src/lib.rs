//! Cowslip: a qcow2 storage engine that allocates well.
//!
//! An [`Image`] is opened over a [`file::BlockFile`] and answers reads, writes, zeroes, discards,
//! flushes and questions about extents, concurrently and from several threads. It has no thread, no
//! clock and no executor of its own: its futures run wherever the caller polls them.
//!
//! May not know: NBD, command lines, printing, sockets, time.

pub mod allocate;
mod chain;
pub mod commit;
pub mod compare;
pub mod convert;
mod durable;
pub mod error;
mod extents;
pub mod file;
pub mod foreign;
pub mod growth;
pub mod image;
pub mod job;
pub mod limits;
pub mod luks;
pub mod measure;
mod pairs;
pub mod qcow2;
#[cfg(test)]
mod random;
mod raw;
pub mod rebase;
pub mod space;
mod sync;
pub mod workers;
mod zero;

pub use cowslip_queue::{Buf, BufMut};
pub use error::{Error, Result};
pub use image::Image;
pub use job::Job;
pub use workers::Workers;

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
