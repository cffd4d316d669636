//! Waiting for a condition that another task brings about, and waiting for the first of two things.
//!
//! An [`Event`] holds no state but who waits: the condition lives with its owner, is looked at
//! again after every notification, and so cannot be missed. It may be notified from any thread.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

/// Wakes the tasks that wait for a condition.
#[derive(Default)]
pub(crate) struct Event {
    waiting: Mutex<Vec<Waker>>,
}

impl Event {
    fn waiting(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.waiting
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Makes all who wait look at their condition again.
    pub(crate) fn notify(&self) {
        // Taken out first: a waker may run code that comes back here.
        let waiting = std::mem::take(&mut *self.waiting());
        for waker in waiting {
            waker.wake();
        }
    }

    /// Waits until `condition` holds.
    pub(crate) async fn until(&self, mut condition: impl FnMut() -> bool) {
        std::future::poll_fn(|cx| self.poll_until(cx, &mut condition)).await;
    }

    fn poll_until(&self, cx: &Context<'_>, condition: &mut impl FnMut() -> bool) -> Poll<()> {
        if condition() {
            return Poll::Ready(());
        }
        {
            let mut waiting = self.waiting();
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
        }
        // Another thread may have notified between the look and the registration.
        if condition() {
            return Poll::Ready(());
        }
        Poll::Pending
    }
}

/// The first of two results.
pub(crate) enum First<A, B> {
    Left(A),
    Right(B),
}

/// Waits for the first of two futures and drops the other; the left one wins a tie.
pub(crate) async fn first<A: Future, B: Future>(left: A, right: B) -> First<A::Output, B::Output> {
    let mut left = pin!(left);
    let mut right = pin!(right);
    std::future::poll_fn(move |cx| {
        if let Poll::Ready(value) = Pin::as_mut(&mut left).poll(cx) {
            return Poll::Ready(First::Left(value));
        }
        if let Poll::Ready(value) = Pin::as_mut(&mut right).poll(cx) {
            return Poll::Ready(First::Right(value));
        }
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notification_makes_the_condition_be_looked_at_again() {
        let event = Event::default();
        let done = std::cell::Cell::new(false);
        let mut waiting = pin!(event.until(|| done.get()));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        event.notify();
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        done.set(true);
        event.notify();
        assert!(waiting.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn waiting_twice_registers_once() {
        let event = Event::default();
        let mut waiting = pin!(event.until(|| false));
        // Whether two wakers are one is seen by their tables, and clones of a clone have one.
        let waker = Waker::noop().clone();
        let mut cx = Context::from_waker(&waker);
        for _ in 0..3 {
            assert!(waiting.as_mut().poll(&mut cx).is_pending());
        }
        assert_eq!(event.waiting().len(), 1);
    }

    #[test]
    fn the_left_one_wins_a_tie() {
        let mut both = pin!(first(std::future::ready(1), std::future::ready(2)));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(matches!(
            both.as_mut().poll(&mut cx),
            Poll::Ready(First::Left(1))
        ));
    }
}
