//! Futures that come and go, each polled when it was woken.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use crate::sync::{Mutex, lock};

/// Futures in flight, of which any may end first.
///
/// Each has a place while it is in flight, the lowest that is free: a number for what the caller
/// keeps of it.
pub struct Set<F: Future + ?Sized> {
    slots: Vec<Slot<F>>,
    free: Vec<usize>,
    len: usize,
    /// Places to poll before those that were woken since.
    due: VecDeque<usize>,
    calls: Arc<Mutex<Calls>>,
}

struct Slot<F: ?Sized> {
    /// `None` while the place is free.
    future: Option<Pin<Box<F>>>,
    waker: Waker,
}

/// Places that were woken.
#[derive(Default)]
struct Calls {
    woken: Vec<usize>,
    /// Whether a place is among them.
    is_woken: Vec<bool>,
    /// The waker of the task that polls the set.
    waker: Option<Waker>,
}

impl Calls {
    fn note(&mut self, place: usize) {
        if self.is_woken.len() <= place {
            self.is_woken.resize(place + 1, false);
        }
        if !std::mem::replace(&mut self.is_woken[place], true) {
            self.woken.push(place);
        }
    }
}

/// The waker of one place.
struct Call {
    place: usize,
    calls: Arc<Mutex<Calls>>,
}

impl Wake for Call {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let waker = {
            let mut calls = lock(&self.calls);
            calls.note(self.place);
            calls.waker.take()
        };
        // An executor may poll within this call, so no lock is held.
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<F: Future + ?Sized> Default for Set<F> {
    fn default() -> Self {
        Set {
            slots: Vec::new(),
            free: Vec::new(),
            len: 0,
            due: VecDeque::new(),
            calls: Arc::default(),
        }
    }
}

impl<F: Future + ?Sized> FromIterator<Pin<Box<F>>> for Set<F> {
    fn from_iter<I: IntoIterator<Item = Pin<Box<F>>>>(futures: I) -> Self {
        let mut set = Set::default();
        futures.into_iter().for_each(|future| {
            set.insert(future);
        });
        set
    }
}

impl<F: Future + ?Sized> Set<F> {
    /// Futures in flight.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a future, which is polled with the set.
    pub fn push(&mut self, future: F)
    where
        F: Sized,
    {
        self.insert(Box::pin(future));
    }

    /// Adds a future that is behind a pointer already; returns its place.
    pub fn insert(&mut self, future: Pin<Box<F>>) -> usize {
        let place = self.free.pop().unwrap_or_else(|| {
            let place = self.slots.len();
            let calls = Arc::clone(&self.calls);
            let waker = Waker::from(Arc::new(Call { place, calls }));
            self.slots.push(Slot {
                future: None,
                waker,
            });
            place
        });
        self.slots[place].future = Some(future);
        self.len += 1;
        lock(&self.calls).note(place);
        place
    }

    /// Waits for the next to end, whichever it is. `None` if nothing is in flight.
    pub async fn next(&mut self) -> Option<F::Output> {
        let ended = poll_fn(|context| self.poll_next(context)).await;
        ended.map(|(_, output)| output)
    }

    /// Polls those that were woken until one has ended: its place, which is free then, and its
    /// output. Ready with `None` if nothing is in flight.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, F::Output)>> {
        if self.len == 0 {
            return Poll::Ready(None);
        }
        {
            let mut calls = lock(&self.calls);
            match &mut calls.waker {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            // Those that are woken from here on are polled next time: a future that wakes itself
            // gives way to others of its executor.
            let woken = std::mem::take(&mut calls.woken);
            for &place in &woken {
                calls.is_woken[place] = false;
            }
            self.due.extend(woken);
        }
        while let Some(place) = self.due.pop_front() {
            let slot = &mut self.slots[place];
            // A late call, to a future that has ended.
            let Some(future) = &mut slot.future else {
                continue;
            };
            let mut context = Context::from_waker(&slot.waker);
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                slot.future = None;
                self.free.push(place);
                self.len -= 1;
                return Poll::Ready(Some((place, output)));
            }
        }
        Poll::Pending
    }
}
