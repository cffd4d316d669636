//! Buffers, completions and a small executor, one queue a thread.
//!
//! Everything that talks to the kernel goes through here, so `unsafe` is found in this crate alone:
//! aligned memory ([`buf`]), the io_uring ring and the raw system calls. What an operation needs is
//! owned by the operation until the kernel has let go of it: dropping a future frees nothing that
//! is still in use.
//!
//! A [`Queue`] runs futures on the thread that made it. While it runs, the file operations
//! ([`mod@file`]) and the sockets ([`Listener`], [`Stream`]) of that thread go through its ring, or
//! through epoll and a pool of threads where io_uring is not to be had. File operations also work
//! on threads without a queue: the pool takes them, or, within [`block_here`], the thread itself.
//! Where the program has an event loop already, that loop drives a [`Reactor`].
//!
//! # Memory of others
//!
//! Requests take scatter lists ([`IoVec`] to write from, [`IoVecMut`] to read into). Their segments
//! are parts of buffers, or of memory that a guest or an embedder owns and may change at any time;
//! a list keeps the owner until the kernel has let go of the memory. For tests and safe code there
//! is [`SharedMemory`]:
//!
//! ```
//! use cowslip_queue::{Buf, BufMut, IoVec, IoVecMut, SharedMemory};
//!
//! let guest = SharedMemory::new(4096);
//! guest.write(100, b"from a guest");
//! let mut data = IoVec::from(Buf::copy_of(b"bytes "));
//! data.append(IoVec::shared(&guest, 100..112));
//! assert_eq!(data.to_vec(), b"bytes from a guest");
//!
//! let mut target = IoVecMut::shared(&guest, 0..512);
//! target.append(BufMut::zeroed(512).into());
//! assert_eq!((target.len(), target.segment_count()), (1024, 2));
//! ```
//!
//! [`Buf`] and [`BufMut`] are slices of bytes, lists are not: what others may change is copied, by
//! atomic operations on words ([`shared`] says why). [`IoVec::foreign`] says what the owner of such
//! memory promises. A copy is made where bytes are looked at or changed on the way (ciphers,
//! compression, blocks that a write covers in part, the guarded first sector of a disk whose format
//! was guessed), and where direct I/O refuses the address or length of a segment: `AlignedFile` of
//! the crate `cowslip-block` sees to that, for all requests. All others go to the kernel as they
//! are.
//!
//! May not know: any image format, any protocol, the command line.

mod anchored;
pub mod attributes;
mod beside;
pub mod buf;
pub mod cut;
mod driver;
mod epoll;
mod event;
mod executor;
pub mod fibmap;
pub mod fiemap;
pub mod file;
mod fixed;
mod fuse_device;
mod fuse_slot;
pub mod iovec;
pub mod lease;
mod lent;
mod line;
pub mod lock;
pub mod loop_device;
mod mailbox;
mod mapping;
mod memory;
mod names;
pub mod passing;
mod patience;
pub mod pending;
mod pool;
pub mod primitives;
mod reactor;
pub mod release;
mod ring;
mod runs;
mod scatter;
pub mod shared;
mod shared_cell;
mod signal;
mod socket;
pub mod space;
mod spin;
mod sys;
mod threads;
mod timer;
mod timers;
mod turns;
mod uring;
mod watch;
mod watched;
#[doc(hidden)]
pub mod zero;

pub use beside::{has_queue, spawn_anywhere};
pub use names::*;
