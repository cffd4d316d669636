//! The names that the crate shows at its root, and `crates/models` of the queue that it builds.

pub use crate::anchored::{Anchored, WrongThread};
pub use crate::buf::{Buf, BufMut};
pub use crate::driver::Backend;
pub use crate::event::Event;
pub use crate::executor::{PreparedQueue, Queue, spawn, yield_now};
pub use crate::file::{File, Run};
pub use crate::fixed::fix_buffers;
pub use crate::fuse_device::FuseDevice;
pub use crate::fuse_slot::{FUSE_HEAD_BYTES, FuseSlot};
pub use crate::iovec::{IoVec, IoVecMut};
pub use crate::lent::{lend, lend_all, lend_all_mut, lend_foreign, lend_foreign_mut, lend_mut};
pub use crate::pending::{Completer, Pending, pending};
pub use crate::pool::{blocking, retire_idle_threads};
pub use crate::reactor::{Reactor, TaskId, block_here};
pub use crate::shared::SharedMemory;
pub use crate::signal::{Signal, Signals};
pub use crate::socket::{Listener, Stream};
pub use crate::threads::Threads;
pub use crate::timer::{Sleep, sleep};
pub use crate::turns::take_short_turns;
pub use crate::watch::Watch;
