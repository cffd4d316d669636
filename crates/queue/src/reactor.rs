//! Queues without a loop of their own: another event loop drives a [`Reactor`], or the calling
//! thread makes all calls itself ([`block_here`]).
//!
//! A queue that runs a loop sleeps in the kernel. A reactor never sleeps: it has a descriptor that
//! becomes readable when there is something to do, for the loop of a virtual machine monitor or the
//! reactor of another executor, and [`Reactor::turn`] does it. The descriptor is an eventfd that
//! the kernel counts completions in, and other threads their wakes.

use std::future::{Future, poll_fn};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::driver::{Backend, Waking};
use crate::executor::{Core, Entered, PreparedQueue, Task};
use crate::patience::Patience;
use crate::sys;

/// Times that one turn goes round before the caller's other work has its turn.
const ROUNDS_PER_TURN: usize = 64;

/// An I/O queue of one thread that another event loop drives.
///
/// While a future is polled by [`Reactor::within`], or runs as a task of [`Reactor::spawn`], the
/// file operations that it begins go down the reactor's ring. They are submitted at the end of the
/// poll, together. Wakers are those of the executor that polls the future, so any will do that
/// polls it on this thread.
///
/// Without a ring the pool's threads take the operations, or, [without
/// threads](PreparedQueue::without_threads), the poll itself; and sockets cannot be waited for.
///
/// Dropping it drops its tasks and waits for the kernel to let go of their memory.
pub struct Reactor {
    core: Rc<Core>,
    /// Ties the ring to one thread.
    _local: PhantomData<*const ()>,
}

/// A task of a reactor.
#[derive(Clone)]
pub struct TaskId(Arc<Task>);

impl Reactor {
    /// A reactor of this thread.
    ///
    /// # Errors
    /// As of [`Queue::new`](crate::Queue::new).
    pub fn new(backend: Backend) -> io::Result<Reactor> {
        PreparedQueue::new(backend)?.start_reactor()
    }

    /// The backend that was chosen; never [`Backend::Auto`].
    pub fn backend(&self) -> Backend {
        self.core.driver.backend()
    }

    /// Does all that can be done now, and waits for nothing: polls tasks, submits, takes
    /// completions and wakes who waits for them. To be called when the descriptor is readable, and
    /// when the time that the last call returned has passed, if it returned one; more calls do no
    /// harm.
    ///
    /// # Panics
    /// If a task panics, or the kernel refuses to serve the ring.
    pub fn turn(&self) -> Option<Duration> {
        // Before anything is looked at: what comes later is counted again.
        sys::clear_event(&self.core.shared.event);
        self.proceed()
    }

    /// As [`Reactor::turn`], but leaves the descriptor readable if it is: for callers that have
    /// spawned tasks between two turns.
    ///
    /// # Panics
    /// As there.
    pub fn proceed(&self) -> Option<Duration> {
        let core = &self.core;
        let _entered = Entered::new(core);
        core.shared.inbox.wake_up();
        for _ in 0..ROUNDS_PER_TURN {
            core.driver.turn(Patience::None, || true);
            core.collect_inbox();
            core.timers.fire();
            if !core.has_ready() {
                core.shared.inbox.fall_asleep();
                core.collect_inbox();
            }
            if !core.has_ready() {
                self.come_back_if_needed();
                return match core.timers.patience() {
                    Patience::Forever => None,
                    Patience::None => Some(Duration::ZERO),
                    Patience::AtMost(time) => Some(time),
                };
            }
            core.shared.inbox.wake_up();
            core.poll_some();
        }
        core.shared.inbox.fall_asleep();
        sys::signal_event(&core.shared.event);
        None
    }

    /// Has the caller's loop call again at once if something is left to do.
    fn come_back_if_needed(&self) {
        if self.core.has_ready() || !self.core.driver.is_settled() {
            sys::signal_event(&self.core.shared.event);
        }
    }

    /// Waits until the descriptor is readable, or for `max`; `None` is without end.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn wait(&self, max: Option<Duration>) -> io::Result<()> {
        wait_readable(self.as_fd(), max)
    }

    /// Calls `f` with this queue as the current one of the thread, and submits what it began.
    pub fn enter<R>(&self, f: impl FnOnce() -> R) -> R {
        let _entered = Entered::new(&self.core);
        let result = f();
        self.core.driver.turn(Patience::None, || true);
        self.come_back_if_needed();
        result
    }

    /// A future whose file operations go down this reactor's ring, whichever executor polls it on
    /// this thread.
    pub async fn within<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|cx| self.enter(|| future.as_mut().poll(cx))).await
    }

    /// Has [`Reactor::turn`] poll a future until it is done.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) -> TaskId {
        TaskId(self.core.spawn(Box::pin(future)))
    }

    /// Drops the future of a task, unless it is done.
    pub fn abort(&self, task: &TaskId) {
        let _entered = Entered::new(&self.core);
        self.core.abort(&task.0);
    }

    /// Adds an event: the descriptor becomes readable.
    pub fn signal(&self) {
        sys::signal_event(&self.core.shared.event);
    }

    /// Runs a future on this thread, and the reactor's tasks meanwhile, until the future is done.
    ///
    /// # Errors
    /// The system's refusal of a wait; the future is dropped then.
    pub fn block_on<F: Future>(&self, future: F) -> io::Result<F::Output> {
        let mut future = pin!(future);
        let root = Arc::new(Root {
            woken: AtomicBool::new(true),
            event: Arc::clone(&self.core.shared.event),
        });
        let waker = Waker::from(Arc::clone(&root));
        loop {
            while root.woken.swap(false, Ordering::AcqRel) {
                let mut cx = Context::from_waker(&waker);
                if let Poll::Ready(output) = self.enter(|| future.as_mut().poll(&mut cx)) {
                    return Ok(output);
                }
            }
            let left = self.turn();
            // The turn has reset the event of a wake that came before it.
            if !root.woken.load(Ordering::Acquire) {
                self.wait(left)?;
            }
        }
    }
}

impl AsFd for Reactor {
    /// The eventfd. Whether the loop reads it before it calls [`Reactor::turn`] makes no
    /// difference.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.core.shared.event.as_fd()
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.core.close();
    }
}

impl PreparedQueue {
    /// Has the queue belong to this thread, for a loop of others.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn start_reactor(self) -> io::Result<Reactor> {
        Ok(Reactor {
            core: self.start_core(Waking::Other)?,
            _local: PhantomData,
        })
    }
}

impl AsFd for PreparedQueue {
    /// The eventfd that the reactor will have.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event().as_fd()
    }
}

/// The future that a reactor waits for.
struct Root {
    woken: AtomicBool,
    event: Arc<OwnedFd>,
}

impl Wake for Root {
    fn wake(self: Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            sys::signal_event(&self.event);
        }
    }
}

/// Waits until a descriptor is readable, or for `max`.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, max: Option<Duration>) -> io::Result<()> {
    let timeout = max.and_then(|max| Timespec::try_from(max).ok());
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    match rustix::event::poll(&mut fds, timeout.as_ref()) {
        // Who waits looks again.
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Runs a future on this thread, without a queue and without other threads: operations of files are
/// system calls that this thread makes when the future begins them. The thread sleeps only where
/// the future waits for another thread's.
///
/// That holds for operations that begin while the future is polled, as those of an `async` block
/// do, not for one that was begun before and is waited for here. Sockets and timers need a queue.
pub fn block_here<F: Future>(future: F) -> F::Output {
    let _entered = Entered::nothing();
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut cx = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
        thread::park();
    }
}

/// Wakes a thread that has parked.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
