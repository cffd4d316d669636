//! [`Flag`]: something that happens once, and tasks of the thread that wait for it.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Something that has happened, or will.
#[derive(Default)]
pub struct Flag {
    is_set: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl Flag {
    /// It has happened.
    pub fn set(&self) {
        self.is_set.set(true);
        for waker in self.waiting.take() {
            waker.wake();
        }
    }

    /// Waits until it has happened.
    pub async fn wait(&self) {
        poll_fn(|context| match self.is_set.get() {
            true => Poll::Ready(()),
            false => {
                self.waiting.borrow_mut().push(context.waker().clone());
                Poll::Pending
            }
        })
        .await;
    }
}
