//! Requests that are submitted and completed by any thread of a program with an event loop.
//!
//! They are those of [`cowslip::requests`], whose queue belongs to one thread. A program in another
//! language has no such bounds, so here a thread of its own carries them out.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use cowslip::requests::{Completion, Request};
use cowslip::{Error, Image, Result};
use cowslip_queue::{Backend, Event, Queue, spawn};

/// A way to an image for one thread of an event loop: [`Submitter::submit`] and
/// [`Submitter::complete`] do not block. One thread of its own, with an I/O queue of its own, has
/// the requests carried out; any number of them are under way together.
#[derive(Debug)]
pub struct Submitter {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Signalled when there are completions.
    completed: Event,
    /// Signalled when there are submissions, or the end.
    submitted: Event,
    state: Mutex<State>,
    /// Notified when the last request has ended.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    submissions: Vec<Request>,
    completions: Vec<Completion>,
    /// Requests that were submitted and have not ended.
    in_flight: usize,
    is_ending: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self, completion: Completion) {
        let was_empty = {
            let mut state = self.state();
            state.in_flight -= 1;
            if state.in_flight == 0 {
                self.idle.notify_all();
            }
            state.completions.push(completion);
            state.completions.len() == 1
        };
        if was_empty {
            // An event of this process takes what it is given.
            drop(self.completed.signal());
        }
    }
}

impl Submitter {
    /// A submitter for an image.
    ///
    /// # Errors
    /// The system refuses the thread or its descriptors.
    pub fn new(image: Arc<Image>) -> Result<Submitter> {
        let failed = |error: io::Error| Error::io("Could not make a queue for I/O", error);
        let shared = Arc::new(Shared {
            completed: Event::new().map_err(failed)?,
            submitted: Event::new().map_err(failed)?,
            state: Mutex::default(),
            idle: Condvar::new(),
        });
        let prepared = cowslip_queue::PreparedQueue::new(Backend::Auto).map_err(failed)?;
        let theirs = Arc::clone(&shared);
        let (started, outcome) = std::sync::mpsc::channel();
        let work = move || {
            let queue = match prepared.start() {
                Ok(queue) => queue,
                Err(error) => return drop(started.send(Err(error))),
            };
            drop(started.send(Ok(())));
            serve(&queue, &theirs, &image);
        };
        let thread = std::thread::Builder::new().name("cowslip-queue".to_string());
        let thread = thread.spawn(work).map_err(failed)?;
        let outcome = outcome.recv();
        outcome
            .map_err(|_| failed(io::ErrorKind::BrokenPipe.into()))?
            .map_err(failed)?;
        Ok(Submitter {
            shared,
            thread: Some(thread),
        })
    }

    /// Has requests carried out, in any order.
    pub fn submit(&self, requests: impl IntoIterator<Item = Request>) {
        let was_empty = {
            let mut state = self.shared.state();
            let was_empty = state.submissions.is_empty();
            let before = state.submissions.len();
            state.submissions.extend(requests);
            state.in_flight += state.submissions.len() - before;
            was_empty && !state.submissions.is_empty()
        };
        if was_empty {
            // As above.
            drop(self.shared.submitted.signal());
        }
    }

    /// Takes at most `max` completions, in the order in which they came.
    pub fn complete(&self, max: usize) -> Vec<Completion> {
        let (taken, is_more) = {
            let mut state = self.shared.state();
            let count = max.min(state.completions.len());
            let taken = state.completions.drain(..count).collect();
            (taken, !state.completions.is_empty())
        };
        if is_more {
            // The event that the caller has read was for these, too.
            drop(self.shared.completed.signal());
        }
        taken
    }

    /// Requests that have not ended.
    pub fn in_flight(&self) -> usize {
        self.shared.state().in_flight
    }

    /// Waits until no request is under way.
    pub fn drain(&self) {
        let mut state = self.shared.state();
        while state.in_flight > 0 {
            let waited = self.shared.idle.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl AsFd for Submitter {
    /// An eventfd, which is readable when there may be completions. It is read (8 bytes) before
    /// [`Submitter::complete`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.completed.as_fd()
    }
}

impl Drop for Submitter {
    /// Waits until no request is under way.
    fn drop(&mut self) {
        self.drain();
        self.shared.state().is_ending = true;
        // As above.
        drop(self.shared.submitted.signal());
        if let Some(thread) = self.thread.take() {
            // It has nothing to say.
            drop(thread.join());
        }
    }
}

/// Carries out requests until the submitter ends.
fn serve(queue: &Queue, shared: &Arc<Shared>, image: &Arc<Image>) {
    queue.block_on(async {
        loop {
            let (requests, is_ending) = {
                let mut state = shared.state();
                (std::mem::take(&mut state.submissions), state.is_ending)
            };
            for request in requests {
                let (shared, image) = (Arc::clone(shared), Arc::clone(image));
                spawn(async move {
                    shared.ended(request.run(&*image).await);
                });
            }
            if is_ending || shared.submitted.wait().await.is_err() {
                return;
            }
        }
    });
}
