//! One-shot completions: what an I/O operation returns before it is done.
//!
//! The two halves may live on different threads. The value arrives exactly once; a [`Completer`]
//! that is dropped without a value is a bug of its driver and panics in the waiting task.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

enum State<T> {
    Waiting(Option<Waker>),
    Done(T),
    Abandoned,
    Taken,
}

struct Slot<T> {
    state: Mutex<State<T>>,
}

impl<T> Slot<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A value that will arrive; a future.
#[must_use = "an operation that nobody awaits loses its result"]
pub struct Pending<T>(Inner<T>);

enum Inner<T> {
    Ready(Option<T>),
    Slot(Arc<Slot<T>>),
}

/// The other half of [`Pending`]: delivers the value.
pub struct Completer<T> {
    slot: Option<Arc<Slot<T>>>,
}

/// A pair of a value to wait for and the right to deliver it.
pub fn pending<T>() -> (Completer<T>, Pending<T>) {
    let slot = Arc::new(Slot {
        state: Mutex::new(State::Waiting(None)),
    });
    (
        Completer {
            slot: Some(Arc::clone(&slot)),
        },
        Pending(Inner::Slot(slot)),
    )
}

impl<T> Pending<T> {
    /// A value that is there already.
    pub fn ready(value: T) -> Pending<T> {
        Pending(Inner::Ready(Some(value)))
    }

    /// Whether the value has arrived.
    pub fn has_value(self) -> bool {
        match self.0 {
            Inner::Ready(value) => value.is_some(),
            Inner::Slot(slot) => matches!(*slot.lock(), State::Done(_)),
        }
    }
}

impl<T> Completer<T> {
    /// Delivers the value and wakes whoever waits.
    pub fn complete(mut self, value: T) {
        self.finish(State::Done(value));
    }

    /// Whether the waiting half still exists.
    pub fn is_awaited(&self) -> bool {
        self.slot
            .as_ref()
            .is_some_and(|slot| Arc::strong_count(slot) > 1)
    }

    fn finish(&mut self, outcome: State<T>) {
        let Some(slot) = self.slot.take() else { return };
        let before = std::mem::replace(&mut *slot.lock(), outcome);
        if let State::Waiting(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        self.finish(State::Abandoned);
    }
}

// A `Pending` never holds a pinned value: it moves its result out.
impl<T> Unpin for Pending<T> {}

impl<T> Future for Pending<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match &mut self.0 {
            Inner::Ready(value) => Poll::Ready(
                value
                    .take()
                    .expect("a completed future is not polled again"),
            ),
            Inner::Slot(slot) => {
                let mut state = slot.lock();
                match std::mem::replace(&mut *state, State::Taken) {
                    State::Done(value) => Poll::Ready(value),
                    State::Waiting(_) => {
                        *state = State::Waiting(Some(cx.waker().clone()));
                        Poll::Pending
                    }
                    State::Abandoned => panic!("an I/O driver dropped an operation"),
                    State::Taken => panic!("a completed future is not polled again"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Wake;

    struct Flag(std::sync::atomic::AtomicBool);
    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, std::sync::atomic::Ordering::SeqCst);
        }
    }

    #[test]
    fn a_value_wakes_its_waiter_and_arrives_once() {
        let flag = Arc::new(Flag(false.into()));
        let waker = Waker::from(Arc::clone(&flag));
        let mut cx = Context::from_waker(&waker);
        let (completer, mut waiting) = pending();
        assert!(Pin::new(&mut waiting).poll(&mut cx).is_pending());
        completer.complete(7);
        assert!(flag.0.load(std::sync::atomic::Ordering::SeqCst));
        assert_eq!(Pin::new(&mut waiting).poll(&mut cx), Poll::Ready(7));
    }

    #[test]
    #[should_panic(expected = "dropped an operation")]
    fn an_abandoned_operation_is_loud() {
        let (completer, mut waiting) = pending::<()>();
        drop(completer);
        let waker = Waker::noop();
        let _ready = Pin::new(&mut waiting).poll(&mut Context::from_waker(waker));
    }
}
