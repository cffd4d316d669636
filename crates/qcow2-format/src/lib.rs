//! The qcow2 format without I/O: addresses, the header, table entries, the runs that they say, the
//! plan of what a request does to a cluster, and the codecs of compressed ones. All of it is pure:
//! values come in, values go out.
//!
//! | module | what it knows |
//! | --- | --- |
//! | [`geometry`] | addresses, clusters, subclusters, slices |
//! | [`header`] | the header and its extensions, read from untrusted bytes, and written |
//! | [`entry`] | entries of all tables; nothing else has their masks |
//! | [`map`] | runs of the disk that entries make |
//! | [`plan`] | in place, filled, or moved: what a request does to a cluster |
//! | [`compress`] | the codecs of compressed clusters |
//! | [`count_growth`] | refcount structures that a longer file needs, and an image in all |
//! | [`changed`] | the sectors of a table that have to be written again |
//!
//! This crate has no stable API. Programs use the crate `cowslip`.
//!
//! May not know: files, locks, futures, and all that `cowslip-qcow2` may not.

pub mod changed;
pub mod compress;
pub mod count_growth;
pub mod entry;
pub mod geometry;
pub mod header;
pub mod map;
pub mod plan;

#[cfg(test)]
use cowslip_block::random;
use cowslip_block::{Error, Result, error, foreign, policy, run, units};
