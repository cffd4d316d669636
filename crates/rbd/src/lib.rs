//! Images in Ceph RBD as files, read and written through librbd.
//!
//! Ceph's libraries are loaded when an image is first opened ([`open()`]), so that nothing of Ceph
//! is needed to build, or to run without it. An image is opened on a thread of its own for a
//! bounded time; requests end on librbd's threads and wake who waits; nothing blocks a thread of
//! the caller. When the last request has ended, a thread closes the image; a program waits for that
//! at its end ([`end`]). A program that is asked to end gives up what does not end soon
//! ([`end_soon`]).
//!
//! `unsafe` is in `ffi.rs` alone.
//!
//! May not know: any image format, the command line.

mod closing;
mod ffi;
mod file;
mod name;
mod open;
mod under_way;

pub use closing::{end, is_in_use};
pub use ffi::Ceph;
pub use file::RbdFile;
pub use name::{OPTIONS, RbdName};
pub use open::{Access, LIBRARIES, Settings, open, open_by};
pub use under_way::end_soon;
