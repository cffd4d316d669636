//! Timers of a queue: a sorted map of deadlines, looked at once a turn.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::task::Waker;
use std::time::Instant;

use crate::patience::Patience;

/// A deadline, made unique by the order of arrival: equal deadlines fire in that order.
pub(crate) type Key = (Instant, u64);

#[derive(Default)]
pub(crate) struct Timers {
    waiting: RefCell<BTreeMap<Key, Waker>>,
    next: Cell<u64>,
}

impl Timers {
    pub(crate) fn insert(&self, deadline: Instant, waker: &Waker) -> Key {
        let number = self.next.get();
        self.next.set(number + 1);
        let key = (deadline, number);
        self.waiting.borrow_mut().insert(key, waker.clone());
        key
    }

    pub(crate) fn remove(&self, key: Key) -> Option<Waker> {
        self.waiting.borrow_mut().remove(&key)
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
