//! The thread on which requests are made: one tokio runtime for all remote files of the process,
//! and for others that talk to object stores ([`run`]).
//!
//! It starts with the first request, and [`retire`] ends it when nothing is under way, so that a
//! process can confine itself: the next request starts it again, under the confinement.

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use cowslip_queue::{Pending, pending};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::ending;

/// Threads for calls that wait: names that are looked up, files of a cache.
const BLOCKING_THREADS: usize = 8;
/// Time for which such a thread waits for more.
const THREAD_KEPT: Duration = Duration::from_secs(10);

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

/// Counts a future while it lives.
struct Counted;

impl Counted {
    fn new() -> Counted {
        UNDER_WAY.fetch_add(1, Ordering::AcqRel);
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The thread, which does not end meanwhile.
pub(crate) struct Entered(MutexGuard<'static, Option<Running>>);

/// Holds the thread, which is started if need be.
///
/// # Errors
/// There is no thread.
pub(crate) fn enter() -> io::Result<Entered> {
    let mut running = running();
    if running.is_none() {
        *running = Some(start()?);
    }
    Ok(Entered(running))
}

impl Entered {
    /// Runs a future on the thread.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        if let Some(here) = &*self.0 {
            here.handle.spawn(counted(future));
        }
    }
}

/// Runs a future on the thread. It runs to its end even if nobody waits; its panic is passed on to
/// who does.
///
/// # Errors
/// There is no thread.
pub fn run<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> io::Result<Pending<T>> {
    let (completer, result) = pending();
    enter()?.spawn(async move { completer.complete(future.await) });
    Ok(result)
}

/// Runs a future as [`run`] does. It is given up, with the reason, a moment after the process was
/// asked to end ([`crate::end_soon`]).
///
/// # Errors
/// There is no thread.
pub fn run_until_the_end<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> io::Result<Pending<Result<T, &'static str>>> {
    run(async { ending::within(future).await.ok_or(ending::WHY) })
}

/// Runs a future on the thread, from a future that runs there.
pub(crate) fn spawn_here(future: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(counted(future));
}

fn counted(future: impl Future<Output = ()> + Send) -> impl Future<Output = ()> + Send {
    let counted = Counted::new();
    async move {
        let _counted = counted;
        future.await;
    }
}

fn start() -> io::Result<Running> {
    let runtime = Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(THREAD_KEPT)
        .thread_name("remote-wait")
        .build()?;
    let handle = runtime.handle().clone();
    let (stop, stopped) = oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("remote".to_string())
        .spawn(move || {
            // Either way it is over.
            drop(runtime.block_on(stopped));
        })?;
    Ok(Running {
        handle,
        stop,
        thread,
    })
}

/// Ends the thread once nothing is under way, if that comes within `patience`; the next request
/// starts another one. Connections that are open end with it.
pub fn retire(patience: Duration) {
    let pause = Duration::from_millis(1);
    let mut waited = Duration::ZERO;
    while waited < patience {
        {
            let mut running = running();
            if UNDER_WAY.load(Ordering::Acquire) == 0 {
                let Some(here) = running.take() else {
                    return;
                };
                // Where nobody receives it, the thread has ended.
                let _stopped = here.stop.send(());
                drop(here.thread.join());
                return;
            }
        }
        std::thread::sleep(pause);
        waited += pause;
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::Instant;

    use cowslip_queue::block_here;

    use super::*;

    #[test]
    fn a_panic_ends_its_request_and_the_thread_still_ends_when_asked() {
        assert_eq!(block_here(run(async { 7 }).unwrap()), 7);
        let lost: Pending<u32> = run(async { panic!("as planned") }).unwrap();
        let waited = catch_unwind(AssertUnwindSafe(|| block_here(lost)));
        assert!(waited.is_err(), "who waits for it panics");
        let begun = Instant::now();
        retire(Duration::from_secs(20));
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "nothing is under way"
        );
        assert_eq!(block_here(run(async { 8 }).unwrap()), 8, "it starts again");
    }
}
