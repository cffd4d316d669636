//! [`spawn_anywhere`]: futures that run beside their caller, whatever runs the caller.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::thread;

use crate::driver::Backend;
use crate::executor::{Core, Queue, spawn};
use crate::reactor::block_here;

type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The thread for callers without a queue. It starts with the first future and ends with the last.
struct Helper {
    is_running: bool,
    /// Futures that it has not taken.
    jobs: VecDeque<Job>,
    /// Wakes it, if it waits for more.
    waker: Option<Waker>,
}

static HELPER: Mutex<Helper> = Mutex::new(Helper {
    is_running: false,
    jobs: VecDeque::new(),
    waker: None,
});

fn helper() -> MutexGuard<'static, Helper> {
    HELPER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a queue runs on this thread, so that [`spawn`] works.
pub fn has_queue() -> bool {
    Core::with_current(|_| ()).is_some()
}

/// Runs a future beside the caller: on the queue of this thread, if there is one, else on a queue
/// that a thread of its own has while there is something for it to do.
pub fn spawn_anywhere(future: impl Future<Output = ()> + Send + 'static) {
    if has_queue() {
        return spawn(future);
    }
    let (waker, is_running) = {
        let mut helper = helper();
        helper.jobs.push_back(Box::pin(future));
        let before = std::mem::replace(&mut helper.is_running, true);
        (helper.waker.take(), before)
    };
    if let Some(waker) = waker {
        waker.wake();
    }
    if !is_running {
        let thread = thread::Builder::new().name("cowslip-futures".to_string());
        if thread.spawn(run).is_err() {
            // Later than beside, but not never.
            run();
        }
    }
}

fn run() {
    match Queue::new(Backend::Threads) {
        Ok(queue) => queue.block_on(run_all()),
        // Without descriptors for a queue: one after the other.
        Err(_) => {
            while let Some(job) = next_or_end() {
                block_here(guarded(job));
            }
        }
    }
}

fn next_or_end() -> Option<Job> {
    let mut helper = helper();
    let job = helper.jobs.pop_front();
    helper.is_running = job.is_some();
    job
}

/// Runs futures as they come, until all have ended.
async fn run_all() {
    // Each future that is left holds it, too.
    let left = Rc::new(());
    poll_fn(|cx| {
        let taken: VecDeque<Job> = {
            let mut helper = helper();
            if helper.jobs.is_empty() && Rc::strong_count(&left) == 1 {
                (helper.is_running, helper.waker) = (false, None);
                return Poll::Ready(());
            }
            helper.waker = Some(cx.waker().clone());
            std::mem::take(&mut helper.jobs)
        };
        for job in taken {
            let (left, waker) = (Rc::clone(&left), cx.waker().clone());
            spawn(async move {
                guarded(job).await;
                drop(left);
                waker.wake();
            });
        }
        Poll::Pending
    })
    .await;
}

/// A future whose panic is its own: who waits for it learns of it by what it has dropped.
async fn guarded(mut job: Job) {
    poll_fn(|cx| {
        let polled = catch_unwind(AssertUnwindSafe(|| job.as_mut().poll(cx)));
        polled.unwrap_or(Poll::Ready(()))
    })
    .await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use std::thread::ThreadId;
    use std::time::Duration;

    use super::*;
    use crate::pending::pending;
    use crate::pool::blocking;

    /// One test, since there is one helper.
    #[test]
    fn futures_run_on_the_queue_of_their_caller_or_on_one_of_their_own() {
        let here = thread::current().id();
        let ran_on = || {
            let (completer, result) = pending::<ThreadId>();
            spawn_anywhere(async move { completer.complete(thread::current().id()) });
            result
        };
        let queue = Queue::new(Backend::Auto).unwrap();
        assert!(!has_queue() && queue.block_on(async { has_queue() }));
        assert_eq!(queue.block_on(async { ran_on().await }), here);
        assert_ne!(block_here(async { ran_on().await }), here);

        // Futures of several callers run together, and may wait for calls and for each other.
        let (completer, first) = pending();
        let (second_completer, second) = pending();
        spawn_anywhere(async move { second_completer.complete(first.await + 1) });
        spawn_anywhere(async move {
            blocking(|| thread::sleep(Duration::from_millis(1))).await;
            completer.complete(1);
        });
        assert_eq!(block_here(second), 2);

        // A panic ends its future alone.
        let (completer, lost) = pending::<()>();
        spawn_anywhere(async move {
            let _completer = completer;
            panic!("as planned");
        });
        let waited = catch_unwind(AssertUnwindSafe(|| block_here(lost)));
        assert!(waited.is_err(), "who waits for it panics");
        assert_ne!(block_here(async { ran_on().await }), here);
    }

    #[test]
    fn callers_of_many_threads_lose_no_future() {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                thread::spawn(|| {
                    for number in 0..200 {
                        let (completer, result) = pending();
                        spawn_anywhere(async move { completer.complete(number) });
                        assert_eq!(block_here(result), number);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
