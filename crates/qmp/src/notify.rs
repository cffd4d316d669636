//! Waiting for a condition that another task of the thread brings about.

use std::cell::RefCell;
use std::task::{Poll, Waker};

/// Wakes the tasks that wait for a condition, which lives with its owner and is looked at again
/// after every notification.
#[derive(Default)]
pub(crate) struct Notify {
    waiting: RefCell<Vec<Waker>>,
}

impl Notify {
    /// Makes all who wait look at their condition again.
    pub fn notify(&self) {
        for waker in self.waiting.take() {
            waker.wake();
        }
    }

    /// Waits until `condition` holds.
    pub async fn until(&self, mut condition: impl FnMut() -> bool) {
        std::future::poll_fn(|cx| {
            if condition() {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}
