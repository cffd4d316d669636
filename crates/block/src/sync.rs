//! Synchronisation of tasks: a FIFO lock that may be held across I/O, and an event.
//!
//! Both hand their waiters to the executor that polls them. The metadata lock is a plain mutex,
//! held for CPU work only, and is not here.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};

pub use cowslip_queue::primitives::{AtomicBool, AtomicU8, AtomicU64, Mutex, MutexGuard, Ordering};
use cowslip_queue::{Completer, Pending, pending};

/// Locks a mutex whose holders cannot leave an inconsistent state behind by panicking.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A FIFO lock around a value that a task may hold across I/O.
#[derive(Debug)]
pub struct Turn<T> {
    queue: Mutex<TurnQueue>,
    value: Mutex<Option<T>>,
}

struct TurnQueue {
    taken: bool,
    waiting: VecDeque<Completer<()>>,
}

impl std::fmt::Debug for TurnQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "TurnQueue(taken: {}, waiting: {})",
            self.taken,
            self.waiting.len()
        )
    }
}

impl<T> Turn<T> {
    /// A value that nobody holds.
    pub fn new(value: T) -> Turn<T> {
        let queue = Mutex::new(TurnQueue {
            taken: false,
            waiting: VecDeque::new(),
        });
        Turn {
            queue,
            value: Mutex::new(Some(value)),
        }
    }

    /// Waits for the lock.
    pub async fn take(&self) -> TurnGuard<'_, T> {
        let waiting = {
            let mut queue = lock(&self.queue);
            if queue.taken {
                let (completer, waiting) = pending();
                queue.waiting.push_back(completer);
                Some(waiting)
            } else {
                queue.taken = true;
                None
            }
        };
        if let Some(waiting) = waiting {
            // Passed on by the guard that was dropped: `taken` stayed set for us.
            Handover {
                turn: self,
                waiting: Some(waiting),
            }
            .receive()
            .await;
        }
        let value = lock(&self.value).take();
        TurnGuard {
            turn: self,
            value: Some(value.expect("the turn's value is with its holder")),
        }
    }

    fn pass_on(&self) {
        let mut queue = lock(&self.queue);
        while let Some(next) = queue.waiting.pop_front() {
            if next.deliver(()).is_ok() {
                return;
            }
        }
        queue.taken = false;
    }
}

/// A waiting task; passes the lock on if it arrives after the task has been dropped.
struct Handover<'a, T> {
    turn: &'a Turn<T>,
    waiting: Option<Pending<()>>,
}

impl<T> Handover<'_, T> {
    async fn receive(mut self) {
        if let Some(waiting) = self.waiting.as_mut() {
            waiting.await;
        }
        self.waiting = None;
    }
}

impl<T> Drop for Handover<'_, T> {
    fn drop(&mut self) {
        if self.waiting.take().is_some_and(Pending::give_up) {
            self.turn.pass_on();
        }
    }
}

/// A guard of the lock, which it passes on when dropped.
#[derive(Debug)]
pub struct TurnGuard<'a, T> {
    turn: &'a Turn<T>,
    value: Option<T>,
}

impl<T> Deref for TurnGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value
            .as_ref()
            .expect("the value stays until the guard is dropped")
    }
}

impl<T> DerefMut for TurnGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value
            .as_mut()
            .expect("the value stays until the guard is dropped")
    }
}

impl<T> Drop for TurnGuard<'_, T> {
    fn drop(&mut self) {
        *lock(&self.turn.value) = self.value.take();
        self.turn.pass_on();
    }
}

/// Tasks that wait for a change; kept inside the state that changes.
#[derive(Default)]
pub struct Waiters(Vec<Completer<()>>);

impl std::fmt::Debug for Waiters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Waiters({})", self.0.len())
    }
}

impl Waiters {
    /// A future to await after the state's lock is released.
    pub fn wait(&mut self) -> Pending<()> {
        let (completer, waiting) = pending();
        self.0.push(completer);
        waiting
    }

    /// Wakes all tasks; each examines the state again.
    pub fn wake(&mut self) {
        for waiter in self.0.drain(..) {
            waiter.complete(());
        }
    }

    /// Whether no task waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Drop for Waiters {
    fn drop(&mut self) {
        self.wake();
    }
}
