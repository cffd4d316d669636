//! Operations on qcow2 images that nobody has open: create, stream, check, repair, inspect.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`create`] | makes images in files: their options and rules, places of their structures |
//! | [`stream`] | writes images in the order of their file, once |
//! | [`check`] | compares references with counts, and changes nothing |
//! | [`repair`] | plans what mends an image, and does it in stages |
//! | [`inspect`] | describes an image by its header and lists |
//! | [`layout`] | lists where everything is in the file |
//!
//! The engine of images that are open, `cowslip-qcow2`, does some of this as well: it repairs a
//! dirty image before it opens it, and looks for leaks. This crate has no stable API. Programs use
//! the crate `cowslip`, which shows these chapters in `cowslip::qcow2`.
//!
//! May not know: requests, leases, write-back, and all that `cowslip-qcow2` may not.

pub mod check;
pub mod create;
pub mod inspect;
#[doc(hidden)]
pub mod layout;
#[cfg(not(feature = "luks"))]
#[path = "without_luks.rs"]
pub mod luks;
pub mod repair;
pub mod stream;

#[cfg(feature = "luks")]
#[doc(no_inline)]
pub use cowslip_luks as luks;

#[cfg(test)]
use cowslip_block::random;
use cowslip_block::{
    Buf, BufMut, Error, Job, Result, Workers, disk, error, file, foreign, job, policy, sync, units,
    zero,
};
use cowslip_qcow2_format::header::CompressionType;
use cowslip_qcow2_format::{changed, compress, count_growth, entry, geometry, header, map};
