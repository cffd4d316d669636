//! Disks and files as traits, independent of image formats: [`Disk`], [`file::BlockFile`] and the
//! adaptor that accepts requests of any alignment, together with errors, jobs, buffers, lists of
//! options and the types that describe requests.
//!
//! May not know: image formats beyond their first bytes, files of the host, encryption, NBD,
//! command lines, printing, sockets, time.

pub mod disk;
#[doc(hidden)]
pub mod durable;
#[doc(hidden)]
pub mod errno;
pub mod error;
pub mod file;
#[doc(hidden)]
pub mod files;
pub mod foreign;
mod forward;
pub mod job;
#[doc(hidden)]
pub mod joins;
pub mod limits;
pub mod options;
pub mod policy;
#[doc(hidden)]
pub mod random;
pub mod run;
pub mod size;
#[doc(hidden)]
pub mod sync;
pub mod units;
pub mod workers;

#[doc(hidden)]
pub use cowslip_queue::zero;
pub use cowslip_queue::{Buf, BufMut, IoVec, IoVecMut, SharedMemory};
pub use disk::Disk;
pub use error::{Error, Result};
pub use job::Job;
pub use workers::Workers;
