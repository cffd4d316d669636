//! Files and devices of the host as [`BlockFile`](cowslip_block::file::BlockFile)s: `O_DIRECT`,
//! QEMU's lock bytes, the policy for files that images name; how far ahead of need a file that
//! grows is given space; space for the holes of a file.
//!
//! May not know: formats of images, encryption, NBD, command lines, printing, sockets.

#[cfg(test)]
use cowslip_block::random;
use cowslip_block::{Error, Result, error, file, job, sync, units};

pub mod allocate;
mod geometry;
pub mod growth;
pub mod host;
mod lock;
mod name;
mod policy;
#[cfg(feature = "portable")]
pub mod portable;
mod probe;
mod room;
mod scratch;
pub mod space;
mod storage;
