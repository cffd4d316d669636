//! Buffers, completions and a small executor, one queue a thread.
//!
//! Everything that talks to the kernel goes through here, so `unsafe` is found in this crate alone:
//! aligned memory ([`buf`]), the io_uring ring and the raw system calls. What an operation needs is
//! owned by the operation until the kernel has let go of it: dropping a future frees nothing that is
//! still in use.
//!
//! May not know: any image format, any protocol, the command line.

pub mod buf;
pub mod pending;

pub use buf::{Buf, BufMut};
pub use pending::{Completer, Pending, pending};
