//! Waiting for a moment, on the queue of this thread.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::executor::Core;
use crate::timers::Key;

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
            let waker = Core::with_current(|core| core.timers.remove(key));
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
