//! `crates/queue`, module by module and unchanged, but for the primitives that it is built on:
//! every lock and every atomic step is a place where another thread may go on, as a seed decides.

#[path = "../../../../queue/src/anchored.rs"]
mod anchored;
#[path = "../../../../queue/src/attributes.rs"]
pub mod attributes;
#[path = "../../../../queue/src/buf.rs"]
pub mod buf;
#[path = "../../../../queue/src/cut.rs"]
pub mod cut;
#[path = "../../../../queue/src/driver.rs"]
mod driver;
#[path = "../../../../queue/src/epoll.rs"]
mod epoll;
#[path = "../../../../queue/src/event.rs"]
mod event;
#[path = "../../../../queue/src/executor.rs"]
mod executor;
#[path = "../../../../queue/src/fibmap.rs"]
pub mod fibmap;
#[path = "../../../../queue/src/fiemap.rs"]
pub mod fiemap;
#[path = "../../../../queue/src/file.rs"]
pub mod file;
#[path = "../../../../queue/src/fixed.rs"]
mod fixed;
#[path = "../../../../queue/src/fuse_device.rs"]
mod fuse_device;
#[path = "../../../../queue/src/fuse_slot.rs"]
mod fuse_slot;
#[path = "../../../../queue/src/iovec.rs"]
pub mod iovec;
#[path = "../../../../queue/src/lease.rs"]
pub mod lease;
#[path = "../../../../queue/src/lent.rs"]
mod lent;
#[path = "../../../../queue/src/line.rs"]
mod line;
#[path = "../../../../queue/src/lock.rs"]
pub mod lock;
#[path = "../../../../queue/src/loop_device.rs"]
pub mod loop_device;
#[path = "../../../../queue/src/mailbox.rs"]
mod mailbox;
#[path = "../../../../queue/src/mapping.rs"]
mod mapping;
#[path = "../../../../queue/src/memory.rs"]
mod memory;
#[path = "../../../../queue/src/names.rs"]
mod names;
#[path = "../../../../queue/src/passing.rs"]
pub mod passing;
#[path = "../../../../queue/src/patience.rs"]
mod patience;
#[path = "../../../../queue/src/pending.rs"]
pub mod pending;
#[path = "../../../../queue/src/pool.rs"]
mod pool;
pub mod primitives;
#[path = "../../../../queue/src/reactor.rs"]
mod reactor;
#[path = "../../../../queue/src/release.rs"]
pub mod release;
#[path = "../../../../queue/src/ring.rs"]
mod ring;
#[path = "../../../../queue/src/runs.rs"]
mod runs;
#[path = "../../../../queue/src/scatter.rs"]
mod scatter;
#[path = "../../../../queue/src/shared.rs"]
pub mod shared;
#[path = "../../../../queue/src/shared_cell.rs"]
mod shared_cell;
#[path = "../../../../queue/src/signal.rs"]
mod signal;
#[path = "../../../../queue/src/socket.rs"]
mod socket;
#[path = "../../../../queue/src/space.rs"]
pub mod space;
#[path = "../../../../queue/src/spin.rs"]
mod spin;
#[path = "../../../../queue/src/sys.rs"]
mod sys;
#[path = "../../../../queue/src/threads.rs"]
mod threads;
#[path = "../../../../queue/src/timer.rs"]
mod timer;
#[path = "../../../../queue/src/timers.rs"]
mod timers;
#[path = "../../../../queue/src/turns.rs"]
mod turns;
#[path = "../../../../queue/src/uring.rs"]
mod uring;
#[path = "../../../../queue/src/watch.rs"]
mod watch;
#[path = "../../../../queue/src/watched.rs"]
mod watched;
#[path = "../../../../queue/src/zero.rs"]
pub mod zero;

pub use names::*;
