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
//! on threads without a queue: the pool takes them.
//!
//! May not know: any image format, any protocol, the command line.

pub mod attributes;
pub mod buf;
pub mod cut;
mod driver;
mod epoll;
mod executor;
pub mod fibmap;
pub mod fiemap;
pub mod file;
pub mod lease;
mod line;
pub mod lock;
pub mod loop_device;
mod mailbox;
mod memory;
pub mod pending;
mod pool;
pub mod primitives;
mod scatter;
mod signal;
mod socket;
pub mod space;
mod sys;
mod timer;
mod uring;

pub use buf::{Buf, BufMut};
pub use driver::Backend;
pub use executor::{Queue, spawn, yield_now};
pub use file::File;
pub use pending::{Completer, Pending, pending};
pub use pool::{blocking, retire_idle_threads};
pub use signal::{Asked, Signals};
pub use socket::{Listener, Stream};
pub use timer::{Sleep, sleep};
