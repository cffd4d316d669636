//! One future that several wait for.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use crate::sync::{Mutex, lock};

/// A handle of a future that goes on as long as one of its handles is polled; each gets a copy of
/// its output. It is dropped with the last handle.
pub struct Shared<T> {
    inner: Arc<Inner<T>>,
    /// Where this handle's waker is: the round of calls, and the place in its list.
    waits: Option<(u64, usize)>,
}

struct Inner<T> {
    stage: Mutex<Stage<T>>,
    calls: Arc<Mutex<Calls>>,
}

enum Stage<T> {
    Idle(Pin<Box<dyn Future<Output = T> + Send>>),
    /// A handle polls it. Others that came by meanwhile.
    Busy(Vec<Waker>),
    Done(T),
    /// It panicked.
    Lost,
}

/// Handles that wait.
#[derive(Default)]
struct Calls {
    wakers: Vec<Waker>,
    /// How often the list was emptied.
    round: u64,
}

impl Calls {
    fn wake_all(this: &Mutex<Calls>) {
        let wakers = {
            let mut calls = lock(this);
            calls.round += 1;
            std::mem::take(&mut calls.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// The waker of the future: all handles look at it, since any of them may have been dropped.
struct Call(Arc<Mutex<Calls>>);

impl Wake for Call {
    fn wake(self: Arc<Self>) {
        Calls::wake_all(&self.0);
    }
}

impl<T: Clone> Shared<T> {
    /// The first handle.
    pub fn new(future: impl Future<Output = T> + Send + 'static) -> Shared<T> {
        let stage = Mutex::new(Stage::Idle(Box::pin(future)));
        let calls = Arc::default();
        Shared {
            inner: Arc::new(Inner { stage, calls }),
            waits: None,
        }
    }

    fn note(&mut self, waker: &Waker) {
        let mut calls = lock(&self.inner.calls);
        match self.waits {
            Some((round, place)) if round == calls.round => calls.wakers[place].clone_from(waker),
            _ => {
                self.waits = Some((calls.round, calls.wakers.len()));
                calls.wakers.push(waker.clone());
            }
        }
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Shared {
            inner: Arc::clone(&self.inner),
            waits: None,
        }
    }
}

/// A poll under way. One that panics makes the others panic too, so that they do not wait for ever.
struct Polling<'a, T>(&'a Inner<T>);

impl<T> Polling<'_, T> {
    /// Returns the others that came by meanwhile.
    fn end(self, stage: Stage<T>) -> Vec<Waker> {
        let before = std::mem::replace(&mut *lock(&self.0.stage), stage);
        std::mem::forget(self);
        match before {
            Stage::Busy(late) => late,
            Stage::Idle(_) | Stage::Done(_) | Stage::Lost => Vec::new(),
        }
    }
}

impl<T> Drop for Polling<'_, T> {
    fn drop(&mut self) {
        *lock(&self.0.stage) = Stage::Lost;
        Calls::wake_all(&self.0.calls);
    }
}

impl<T: Clone> Future for Shared<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        // Before the future is looked at: what is called later than that finds the waker.
        self.note(context.waker());
        let mut stage = lock(&self.inner.stage);
        match &mut *stage {
            Stage::Idle(_) => {}
            Stage::Busy(late) => {
                late.push(context.waker().clone());
                return Poll::Pending;
            }
            Stage::Done(output) => return Poll::Ready(output.clone()),
            Stage::Lost => panic!("a future that several wait for has panicked"),
        }
        let Stage::Idle(mut future) = std::mem::replace(&mut *stage, Stage::Busy(Vec::new()))
        else {
            unreachable!("it is idle");
        };
        drop(stage);
        let polling = Polling(&self.inner);
        let waker = Waker::from(Arc::new(Call(Arc::clone(&self.inner.calls))));
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => {
                polling.end(Stage::Done(output.clone()));
                Calls::wake_all(&self.inner.calls);
                Poll::Ready(output)
            }
            Poll::Pending => {
                // They look for themselves: a call that came before their wakers may have been for
                // this handle alone, which may be dropped before it is polled again.
                let late = polling.end(Stage::Idle(future));
                late.into_iter().for_each(Waker::wake);
                Poll::Pending
            }
        }
    }
}
