//! Futures of the engine, run to their end on the thread that calls.

use std::cell::{Cell, RefCell};
use std::future::Future;

use cowslip::{Error, Result};
use cowslip_queue::{Backend, Queue};

/// A queue and the process that has made it.
struct Own {
    queue: Queue,
    process: u32,
}

thread_local! {
    /// The queue of this thread, made by its first call. It is empty while a call runs. First used
    /// when the queue has run: values of a thread are dropped in the reverse of that order, and a
    /// queue that is dropped needs those that it has used.
    static QUEUE: RefCell<Option<Own>> = const { RefCell::new(None) };
    static HAS_QUEUE: Cell<bool> = const { Cell::new(false) };
    static IS_RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// Marks the thread as one that runs a future, until it is dropped.
struct Running;

impl Drop for Running {
    fn drop(&mut self) {
        IS_RUNNING.set(false);
    }
}

/// The queue that this thread has kept, if this process has made it. A ring is memory that is
/// shared with the kernel, and a process that was forked has the same: what it took from there
/// would be its parent's.
fn kept(process: u32) -> Option<Queue> {
    let own = match HAS_QUEUE.get() {
        true => QUEUE.take()?,
        false => return None,
    };
    if own.process == process {
        return Some(own.queue);
    }
    // Not dropped either, which would tidy up in the ring.
    std::mem::forget(own.queue);
    None
}

/// Runs a future of the engine to its end, on the queue of this thread. In a process that was
/// forked the thread begins with a queue of its own.
///
/// # Errors
/// The future's; the system refuses the descriptors that a queue needs; the thread runs one
/// already: the call comes from a callback.
pub fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    if IS_RUNNING.replace(true) {
        let text = "a callback may not call back: another call of this thread is under way";
        return Err(Error::Invalid(text.to_string()));
    }
    let _running = Running;
    let process = std::process::id();
    let queue = match kept(process) {
        Some(queue) => queue,
        None => Queue::new(Backend::Auto)
            .map_err(|error| Error::io("Could not make a queue for I/O", error))?,
    };
    let outcome = queue.block_on(future);
    QUEUE.set(Some(Own { queue, process }));
    HAS_QUEUE.set(true);
    outcome
}
