//! The runtime of the clients of object stores: one thread for all of them, which starts with a
//! request, and ends when it is asked to and nothing is under way.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use cowslip_queue::{Pending, pending};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

struct Running {
    handle: Handle,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

static RUNNING: Mutex<Option<Running>> = Mutex::new(None);
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

fn running() -> MutexGuard<'static, Option<Running>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start() -> Running {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("the system has descriptors for a runtime");
    let handle = runtime.handle().clone();
    let (stop, stopped) = oneshot::channel();
    let thread = thread::Builder::new().name("object-store".into());
    let thread = thread.spawn(move || {
        // Either way it is over.
        drop(runtime.block_on(stopped));
    });
    Running {
        handle,
        stop,
        thread: thread.expect("the system has a thread for object stores"),
    }
}

/// Runs a future on the runtime's thread. It runs to its end even if nobody awaits it.
pub fn run<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> Pending<T> {
    let (completer, result) = pending();
    let mut running = running();
    UNDER_WAY.fetch_add(1, Ordering::AcqRel);
    drop(running.get_or_insert_with(start).handle.spawn(async move {
        let value = future.await;
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
        completer.complete(value);
    }));
    result
}

/// Ends the thread if nothing is under way; the next request starts another one. For callers that
/// are about to give up rights that threads inherit.
pub fn retire() {
    let mut running = running();
    if UNDER_WAY.load(Ordering::Acquire) == 0
        && let Some(here) = running.take()
    {
        // Where nobody receives it, the thread has ended.
        let _stopped = here.stop.send(());
        drop(here.thread.join());
    }
}
