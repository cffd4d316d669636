//! A FUSE server: a disk as one regular file, for programs that take files only.
//!
//! The kernel hands the requests of programs that use the file to a device, `/dev/fuse`; the server
//! takes them from there, carries them out on the disk, and answers. The protocol is the kernel's,
//! for a file system that has no names: its root is the file.
//!
//! | file | subject |
//! | --- | --- |
//! | `wire.rs` | numbers and layouts of the protocol |
//! | `request.rs` | a request, taken apart and checked |
//! | `export.rs` | the file: requests carried out on the disk, its attributes |
//! | `channel.rs` | a channel at work: takes requests, answers them |
//! | `ring.rs` | the same by way of the kernel's ring |
//! | `server.rs` | the channels, their threads, stopping |
//! | `mount.rs` | mounting on a file, unmounting, states of mount points |
//!
//! Source: `include/uapi/linux/fuse.h` of Linux, which is the protocol's definition.
//!
//! # Page cache
//!
//! The file is opened for direct I/O, whatever the flags of open(2): reads and writes reach the
//! server as programs make them, several at a time, and nothing is kept twice. Maps of the file are
//! the exception; the kernel writes their pages back, and drops them before a direct request to the
//! same range.
//!
//! # Bounds
//!
//! A channel has at most [`REQUESTS_MAX`](channel::REQUESTS_MAX) requests in flight,
//! [`READ_BYTES_MAX`](channel::READ_BYTES_MAX) bytes of reads, and
//! [`BUFFERS_MAX`](channel::BUFFERS_MAX) buffers of writes; what comes beyond that waits in the
//! kernel. By way of the ring a request has a slot, of which there are 128, or 4 for each processor
//! where that is more; it has room for 1 MiB, of which it takes what was used.
//!
//! # Interrupts
//!
//! A request takes as long as the disk does, and cannot be taken back once it has begun. So the
//! kernel is answered that interrupts are not supported; it then does not send further ones.
//!
//! May not know: any image format.

pub mod channel;
mod export;
pub mod mount;
mod request;
mod ring;
mod server;
mod wire;

pub use export::{Grow, Growth, Options};
pub use mount::{MountOptions, Standing, Unmount, mount, unmount};
pub use server::{Server, ServerEvent, ServerHandle};
