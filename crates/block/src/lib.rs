//! What disks and files are, whatever is in them: the trait [`file::BlockFile`] and the adaptor
//! that makes requests of any alignment fit it, errors, jobs, lists of options, and the words
//! for what a request means.
//!
//! May not know: formats of images but for their first bytes, files of the host, encryption, NBD,
//! command lines, printing, sockets, time.

pub mod disk;
pub mod error;
pub mod file;
pub mod foreign;
pub mod job;
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
