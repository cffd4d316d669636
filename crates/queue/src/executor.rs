//! The executor: local tasks on one thread, woken from any.
//!
//! A turn of the loop polls what is ready, then goes to the driver once: one system call submits
//! everything that the polls asked for, waits if nothing is ready, and brings back all completions.
//!
//! Wakes from the queue's own thread append to the ready list. Wakes from other threads go to the
//! queue's mailbox, and write its eventfd only if the queue sleeps.
//!
//! Leaves out: priorities, work stealing, join handles; loops of others ([`crate::Reactor`]).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use slab::Slab;

use crate::driver::{Backend, Driver, PreparedDriver, Waking};
use crate::mailbox::{Mailbox, Scheduled};
use crate::patience::Patience;
use crate::pool;
use crate::sys;
use crate::timers::Timers;

/// Polls in one turn before the driver is visited although tasks are ready: tasks that wake each
/// other for ever may not starve the I/O. Large enough that a full ring of completions is one turn.
const POLLS_PER_TURN: usize = 512;

/// The index of the future that `block_on` runs; it lives on the stack, not in the slab.
const ROOT: usize = usize::MAX;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Core>>> = const { RefCell::new(None) };
}

/// Part of a queue that other threads share.
pub(crate) struct Shared {
    pub(crate) inbox: Mailbox<Arc<Task>>,
    pub(crate) event: Arc<OwnedFd>,
}

impl Shared {
    fn post(&self, task: Arc<Task>) {
        if self.inbox.post(task) {
            sys::signal_event(&self.event);
        }
    }
}

/// The part of a task that wakers hold.
pub(crate) struct Task {
    queue: Arc<Shared>,
    index: usize,
    /// Whether it is in the ready list or in the inbox.
    scheduled: Scheduled,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        if !self.scheduled.set() {
            return;
        }
        let mut task = Some(self);
        // The thread's storage may be gone when a thread ends; then the wake is a foreign one.
        let _gone = CURRENT.try_with(|current| {
            let current = current.borrow();
            let Some(core) = current.as_ref() else { return };
            if let Some(own) = task.take_if(|task| Arc::ptr_eq(&task.queue, &core.shared)) {
                core.ready.borrow_mut().push_back(own);
            }
        });
        if let Some(task) = task {
            let queue = Arc::clone(&task.queue);
            queue.post(task);
        }
    }
}

type LocalFuture = Pin<Box<dyn Future<Output = ()>>>;

struct Slot {
    task: Arc<Task>,
    /// Absent while it is being polled.
    future: Option<LocalFuture>,
}

/// The state of a queue on its own thread.
pub(crate) struct Core {
    pub(crate) shared: Arc<Shared>,
    ready: RefCell<VecDeque<Arc<Task>>>,
    slots: RefCell<Slab<Slot>>,
    pub(crate) timers: Timers,
    pub(crate) driver: Driver,
    /// Calls that block, and that the ring does not take, are made by this thread.
    blocks: bool,
    /// Transfers on sockets since one last gave way to the other tasks.
    pub(crate) transfers: Cell<u32>,
    running: Cell<bool>,
}

impl Core {
    /// Calls `f` with the queue that runs on this thread, if one does.
    pub(crate) fn with_current<R>(f: impl FnOnce(&Rc<Core>) -> R) -> Option<R> {
        let call = |current: &RefCell<Option<Rc<Core>>>| current.borrow().as_ref().map(f);
        CURRENT.try_with(call).ok().flatten()
    }

    pub(crate) fn spawn(&self, future: LocalFuture) -> Arc<Task> {
        let mut slots = self.slots.borrow_mut();
        let entry = slots.vacant_entry();
        let task = Arc::new(Task {
            queue: Arc::clone(&self.shared),
            index: entry.key(),
            scheduled: Scheduled::new(true),
        });
        entry.insert(Slot {
            task: Arc::clone(&task),
            future: Some(future),
        });
        self.ready.borrow_mut().push_back(Arc::clone(&task));
        task
    }

    /// Drops the future of a task, unless it is done.
    pub(crate) fn abort(&self, task: &Arc<Task>) {
        let future = match self.slots.borrow_mut().get_mut(task.index) {
            Some(slot) if Arc::ptr_eq(&slot.task, task) => slot.future.take(),
            _ => None,
        };
        // One that is being polled is not here, and stays.
        if let Some(future) = future {
            let slot = self.slots.borrow_mut().remove(task.index);
            // Destructors may spawn and wake, so they run outside the borrow.
            drop((slot, future));
        }
    }

    /// Whether a task waits for its turn.
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.borrow().is_empty()
    }

    /// Polls tasks that are ready, up to a number.
    pub(crate) fn poll_some(&self) {
        for _ in 0..POLLS_PER_TURN {
            let Some(task) = self.next_ready() else { break };
            // Cleared before the poll, so that a wake during the poll schedules another.
            task.scheduled.clear();
            self.poll(task);
        }
    }

    /// Drops all tasks, and ends all that is in flight.
    pub(crate) fn close(self: &Rc<Self>) {
        let _entered = Entered::new(self);
        loop {
            let slots = std::mem::take(&mut *self.slots.borrow_mut());
            if slots.is_empty() {
                break;
            }
            drop(slots);
        }
        self.driver.drain();
        // Tasks hold the mailbox that they lie in: a late wake would keep both, and the event, for
        // ever.
        self.shared.inbox.close();
        self.ready.borrow_mut().clear();
    }

    fn next_ready(&self) -> Option<Arc<Task>> {
        self.ready.borrow_mut().pop_front()
    }

    fn poll(&self, task: Arc<Task>) {
        let index = task.index;
        // A late wake of a finished task finds its slot empty or in the hands of another.
        let future = match self.slots.borrow_mut().get_mut(index) {
            Some(slot) if Arc::ptr_eq(&slot.task, &task) => slot.future.take(),
            _ => None,
        };
        let Some(mut future) = future else { return };
        let waker = Waker::from(task);
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => self.slots.borrow_mut()[index].future = Some(future),
            Poll::Ready(()) => {
                let slot = self.slots.borrow_mut().remove(index);
                // Destructors may spawn and wake, so they run outside the borrow.
                drop((slot, future));
            }
        }
    }

    pub(crate) fn collect_inbox(&self) {
        let mut ready = self.ready.borrow_mut();
        self.shared.inbox.collect(|task| ready.push_back(task));
    }

    /// Submits, sleeps if nothing is ready, and takes in what has arrived.
    fn turn(&self) {
        self.collect_inbox();
        self.timers.fire();
        let mut patience = Patience::None;
        if self.ready.borrow().is_empty() {
            self.shared.inbox.fall_asleep();
            self.collect_inbox();
            if self.ready.borrow().is_empty() {
                patience = self.timers.patience();
            }
        }
        self.driver.turn(patience, || self.shared.inbox.is_woken());
        self.shared.inbox.wake_up();
        self.collect_inbox();
        self.timers.fire();
    }
}

/// Makes a queue the current one of its thread, until dropped.
pub(crate) struct Entered {
    before: Option<Rc<Core>>,
    blocked: bool,
}

impl Entered {
    pub(crate) fn new(core: &Rc<Core>) -> Entered {
        Entered::with(Some(Rc::clone(core)), core.blocks)
    }

    /// No queue: the thread makes all calls itself.
    pub(crate) fn nothing() -> Entered {
        Entered::with(None, true)
    }

    fn with(core: Option<Rc<Core>>, blocks: bool) -> Entered {
        let before = CURRENT.with(|current| std::mem::replace(&mut *current.borrow_mut(), core));
        let blocked = pool::make_calls_here(blocks);
        Entered { before, blocked }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        pool::make_calls_here(self.blocked);
        let before = self.before.take();
        let own = CURRENT.with(|current| std::mem::replace(&mut *current.borrow_mut(), before));
        drop(own);
    }
}

/// A queue that has its descriptors and no thread yet: made where making them is still allowed,
/// such as before a sandbox closes, and started on the thread that it is for.
pub struct PreparedQueue {
    event: Arc<OwnedFd>,
    driver: PreparedDriver,
    poll: Duration,
    blocks: bool,
}

impl PreparedQueue {
    /// A queue for any thread.
    ///
    /// # Errors
    /// As of [`Queue::new`].
    pub fn new(backend: Backend) -> io::Result<PreparedQueue> {
        Ok(PreparedQueue {
            event: Arc::new(sys::new_event()?),
            driver: PreparedDriver::new(backend)?,
            poll: Duration::ZERO,
            blocks: false,
        })
    }

    /// A queue whose ring takes commands of devices too, as [`FuseDevice::exchange`] needs.
    ///
    /// # Errors
    /// The system's refusal; `Unsupported` where its rings have no such commands.
    ///
    /// [`FuseDevice::exchange`]: crate::FuseDevice::exchange
    pub fn with_commands() -> io::Result<PreparedQueue> {
        Ok(PreparedQueue {
            event: Arc::new(sys::new_event()?),
            driver: PreparedDriver::with_commands()?,
            poll: Duration::ZERO,
            blocks: false,
        })
    }

    /// The same, as [`Queue::poll_before_sleep`] has it.
    pub fn polling(mut self, max: Duration) -> PreparedQueue {
        self.poll = max;
        self
    }

    /// Has the queue start no thread, nor use the pool: calls that block, and that the ring does
    /// not take, are made by the queue's own thread. With [`Backend::Threads`] these are all
    /// operations of files.
    pub fn without_threads(mut self) -> PreparedQueue {
        self.blocks = true;
        self
    }

    /// Has the queue belong to this thread.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn start(self) -> io::Result<Queue> {
        let poll = self.poll;
        let queue = Queue {
            core: self.start_core(Waking::Itself)?,
            _local: PhantomData,
        };
        queue.poll_before_sleep(poll);
        Ok(queue)
    }

    /// The counter by which others learn that there is something to do.
    pub(crate) fn event(&self) -> &Arc<OwnedFd> {
        &self.event
    }

    pub(crate) fn start_core(self, waking: Waking) -> io::Result<Rc<Core>> {
        Ok(Rc::new(Core {
            shared: Arc::new(Shared {
                inbox: Mailbox::new(),
                event: Arc::clone(&self.event),
            }),
            ready: RefCell::new(VecDeque::new()),
            slots: RefCell::new(Slab::new()),
            timers: Timers::default(),
            driver: self.driver.start(self.event, waking)?,
            blocks: self.blocks,
            transfers: Cell::new(0),
            running: Cell::new(false),
        }))
    }
}

/// An executor and its I/O queue; it belongs to the thread that made it.
///
/// Operations that are in flight make progress only while [`Queue::block_on`] runs. Dropping the
/// queue drops its tasks, cancels what could wait for ever (sockets) and waits for the rest.
pub struct Queue {
    core: Rc<Core>,
    /// Ties the queue to one thread: the ring takes submissions from one thread only.
    _local: PhantomData<*const ()>,
}

impl Queue {
    /// A queue for this thread.
    ///
    /// # Errors
    /// The system refuses the ring (with [`Backend::Uring`]) or the descriptors.
    pub fn new(backend: Backend) -> io::Result<Queue> {
        PreparedQueue::new(backend)?.start()
    }

    /// The backend that was chosen; never [`Backend::Auto`].
    pub fn backend(&self) -> Backend {
        self.core.driver.backend()
    }

    /// Has the queue poll for completions for up to `max` before it sleeps, as long as that finds
    /// some, few transfers are in flight, and nothing else wants the processor. For threads that
    /// others wait for: they get their answers earlier for CPU time here. Zero, as for a new queue,
    /// is never. Without a ring it does nothing.
    pub fn poll_before_sleep(&self, max: Duration) {
        if let Driver::Uring(ring) = &self.core.driver {
            ring.spin(max);
        }
    }

    /// Runs the future and all spawned tasks until the future is done. Tasks that are not done then
    /// wait for the next call.
    ///
    /// # Panics
    /// If the queue is running already, or the kernel refuses to serve the ring.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let core = &self.core;
        assert!(!core.running.replace(true), "a queue does not run itself");
        let _entered = Entered::new(core);
        let _running = Running(&core.running);
        let mut future = pin!(future);
        let root = Arc::new(Task {
            queue: Arc::clone(&core.shared),
            index: ROOT,
            scheduled: Scheduled::new(true),
        });
        let waker = Waker::from(Arc::clone(&root));
        core.collect_inbox();
        core.ready.borrow_mut().push_back(Arc::clone(&root));
        loop {
            for _ in 0..POLLS_PER_TURN {
                let Some(task) = core.next_ready() else { break };
                // Cleared before the poll, so that a wake during the poll schedules another.
                task.scheduled.clear();
                if task.index != ROOT {
                    core.poll(task);
                } else if Arc::ptr_eq(&task, &root) {
                    let mut cx = Context::from_waker(&waker);
                    if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
                        core.driver.turn(Patience::None, || true);
                        return output;
                    }
                }
            }
            core.turn();
        }
    }
}

struct Running<'a>(&'a Cell<bool>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.core.close();
    }
}

/// Runs a future on the queue of this thread, beside the caller.
///
/// # Panics
/// Outside [`Queue::block_on`].
pub fn spawn<F: Future<Output = ()> + 'static>(future: F) {
    let spawned = Core::with_current(|core| drop(core.spawn(Box::pin(future))));
    assert!(spawned.is_some(), "tasks are spawned on a running queue");
}

/// Lets every task that is ready now have its turn first.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
