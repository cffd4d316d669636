//! The cache: blocks of remote objects in files of the host, for all processes there.
//!
//! A directory has two files for each version of an object: `KEY.data`, sparse, with the bytes at
//! their offsets in the object; and `KEY.index` ([`index`]), which says which blocks are there,
//! with a checksum of each. The index is also what processes lock: a byte for its use, and one for
//! each block, which only the process has that fetches the block.

mod directory;
mod file;
pub(crate) mod index;
#[cfg(test)]
mod tests;

pub(crate) use directory::PATIENCE;
pub use directory::{CacheDirectory, Cached, Verified};
pub(crate) use file::{CacheFile, Look};
