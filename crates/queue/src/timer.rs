//! Timers of a queue: a sorted map of deadlines, looked at once a turn.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::executor::Core;
use crate::patience::Patience;

/// A deadline, made unique by the order of arrival: equal deadlines fire in that order.
type Key = (Instant, u64);

#[derive(Default)]
pub(crate) struct Timers {
    waiting: RefCell<BTreeMap<Key, Waker>>,
    next: Cell<u64>,
}

impl Timers {
    fn insert(&self, deadline: Instant, waker: &Waker) -> Key {
        let number = self.next.get();
        self.next.set(number + 1);
        let key = (deadline, number);
        self.waiting.borrow_mut().insert(key, waker.clone());
        key
    }

    /// Wakes everything whose time has come.
    pub(crate) fn fire(&self) {
        if self.waiting.borrow().is_empty() {
            return;
        }
        let now = Instant::now();
        loop {
            let due = match self.waiting.borrow_mut().first_entry() {
                Some(first) if first.key().0 <= now => first.remove(),
                _ => return,
            };
            due.wake();
        }
    }

    /// How long the queue may sleep.
    pub(crate) fn patience(&self) -> Patience {
        match self.waiting.borrow().first_key_value() {
            None => Patience::Forever,
            Some((key, _)) => {
                let left = key.0.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    Patience::None
                } else {
                    Patience::AtMost(left)
                }
            }
        }
    }
}

/// A future that is ready once its time has come; made by [`sleep`].
#[must_use = "a sleep that nobody awaits passes no time"]
pub struct Sleep {
    deadline: Instant,
    key: Option<Key>,
    /// Its timer is with the queue of one thread.
    _local: PhantomData<*const ()>,
}

/// Waits for `duration`, on the queue of this thread.
///
/// # Panics
/// When polled outside a queue.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep {
        deadline: Instant::now() + duration,
        key: None,
        _local: PhantomData,
    }
}

impl Sleep {
    fn forget(&mut self) {
        if let Some(key) = self.key.take() {
            let waker = Core::with_current(|core| core.timers.waiting.borrow_mut().remove(&key));
            drop(waker);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.forget();
        if Instant::now() >= self.deadline {
            return Poll::Ready(());
        }
        let key = Core::with_current(|core| core.timers.insert(self.deadline, cx.waker()));
        assert!(key.is_some(), "timers need a running queue");
        self.key = key;
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.forget();
    }
}
