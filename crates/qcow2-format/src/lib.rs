//! The qcow2 format without I/O: addresses, the header, table entries, the runs that they say, and
//! the plan of what a request does to a cluster. All of it is pure: values come in, values go out.
//!
//! | module | what it knows |
//! | --- | --- |
//! | [`geometry`] | addresses, clusters, subclusters, slices |
//! | [`header`] | the header and its extensions, read from untrusted bytes, and written |
//! | [`entry`] | entries of all tables; nothing else has their masks |
//! | [`map`] | runs of the disk that entries make |
//! | [`plan`] | in place, filled, or moved: what a request does to a cluster |
//!
//! This crate has no stable API. Programs use the crate `cowslip`.
//!
//! May not know: files, locks, futures, and all that `cowslip-qcow2` may not.

pub mod entry;
pub mod geometry;
pub mod header;
pub mod map;
pub mod plan;

#[cfg(test)]
use cowslip_block::random;
use cowslip_block::{Error, Result, error, foreign, policy, run, units};
