//! A pool of threads for calls that block: file operations without a ring or without an opcode,
//! connecting a socket.
//!
//! One pool serves the process. Threads start when a job finds none idle, up to a limit, and end
//! after a while without work. Where the system gives none, the caller makes the call itself. No
//! thread is started for a queue [without
//! threads](crate::PreparedQueue::without_threads), nor within [`crate::block_here`].

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::pending::{Pending, pending};

/// Enough to keep a device of the usual depth busy; QEMU's pool has 64, but its threads fight for
/// the same locks of the file system.
const THREADS_MAX: usize = 16;
/// Long enough that a steady trickle of jobs starts no thread, short enough to leave none behind.
const IDLE: Duration = Duration::from_secs(10);
/// A thread that does not end within this has work to do.
const RETIREMENT: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// The process whose threads they are; 0 before the first.
    process: u32,
    /// Threads end as soon as they have no work.
    retiring: bool,
}

static STATE: Mutex<State> = Mutex::new(State {
    jobs: VecDeque::new(),
    threads: 0,
    idle: 0,
    process: 0,
    retiring: false,
});
static WORK: Condvar = Condvar::new();
static RETIRED: Condvar = Condvar::new();

fn state() -> MutexGuard<'static, State> {
    STATE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The pool of this process. One that was forked has a copy of its parent's numbers and none of the
/// threads, so it begins with none. (A fork while another thread is in here leaves the child with a
/// lock that nobody holds: that is a moment of some ten instructions.)
fn state_of_this_process() -> MutexGuard<'static, State> {
    let (mut state, process) = (state(), std::process::id());
    if state.process != process {
        // Their results are awaited in the parent alone.
        std::mem::forget(std::mem::take(&mut state.jobs));
        (state.threads, state.idle, state.process) = (0, 0, process);
    }
    state
}

/// Runs a call that may block on the pool.
///
/// A panic of a job is passed on to the task that awaits it.
pub fn blocking<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Pending<T> {
    let (completer, result) = pending();
    submit(Box::new(move || completer.complete(job())));
    result
}

thread_local! {
    /// Whether this thread makes calls that block itself, as a queue without threads and
    /// [`crate::block_here`] do.
    static MAKES_CALLS: Cell<bool> = const { Cell::new(false) };
}

/// Says whether this thread makes calls that block itself from now on; returns whether it did.
pub(crate) fn make_calls_here(makes: bool) -> bool {
    MAKES_CALLS.replace(makes)
}

/// Has a thread of the pool run a job; this thread, if it makes calls that block itself.
pub(crate) fn submit(job: Job) {
    if MAKES_CALLS.try_with(Cell::get).unwrap_or(false) {
        return job();
    }
    let mut state = state_of_this_process();
    state.jobs.push_back(job);
    if state.idle >= state.jobs.len() {
        drop(state);
        WORK.notify_one();
        return;
    }
    if state.threads == THREADS_MAX {
        return;
    }
    state.threads += 1;
    drop(state);
    let started = thread::Builder::new()
        .name("cowslip-blocking".to_string())
        .spawn(work);
    if started.is_err() {
        self::state().threads -= 1;
        run_without_threads();
    }
}

/// Runs jobs on this thread, if there is none that will get to them: the system gives no more.
fn run_without_threads() {
    loop {
        let mut state = state();
        if state.threads > 0 {
            return;
        }
        let Some(job) = state.jobs.pop_front() else {
            return;
        };
        drop(state);
        job();
    }
}

/// Waits until the pool has no thread left, if all its work is done; new ones start with new work.
/// For callers that are about to give up rights that threads inherit.
pub fn retire_idle_threads() {
    let mut state = state_of_this_process();
    state.retiring = true;
    WORK.notify_all();
    while state.threads > 0 {
        let (guard, waited) = RETIRED
            .wait_timeout(state, RETIREMENT)
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        state = guard;
        if waited.timed_out() {
            break;
        }
    }
    state.retiring = false;
}

/// Keeps the count right when a job panics.
struct Counted;

impl Drop for Counted {
    fn drop(&mut self) {
        if thread::panicking() {
            state().threads -= 1;
        }
    }
}

fn work() {
    let _counted = Counted;
    let mut state = state();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
            state = self::state();
            continue;
        }
        if state.retiring {
            state.threads -= 1;
            RETIRED.notify_all();
            return;
        }
        state.idle += 1;
        let (guard, waited) = WORK
            .wait_timeout(state, IDLE)
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        state = guard;
        state.idle -= 1;
        if waited.timed_out() && state.jobs.is_empty() {
            state.threads -= 1;
            return;
        }
    }
}
