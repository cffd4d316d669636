//! Threads with a queue each, for work that is spread over several cores.
//!
//! Work is a future that is made on its thread and stays there: what it submits goes through that
//! thread's ring. The rings are made at once. A thread starts when work comes first, without the
//! privileges that its owner has given up until then, and ends when the owner is dropped and the
//! work that it has is done.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::driver::Backend;
use crate::event::Event;
use crate::executor::{PreparedQueue, spawn};

/// A future of a thread.
type LocalFuture = Pin<Box<dyn Future<Output = ()>>>;
/// A function that makes a future on its thread.
type Make = Box<dyn FnOnce() -> LocalFuture + Send>;

/// Work for a thread, shared with the owner.
struct Inbox {
    work: Mutex<State>,
    event: Event,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Make>,
    is_closed: bool,
}

impl Inbox {
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        // Nothing that holds the lock panics.
        change(&mut self.work.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A thread, or what it will begin with.
// A few, and all of them start soon.
#[allow(clippy::large_enum_variant)]
enum Slot {
    Prepared(Option<(PreparedQueue, Event)>),
    Started(Arc<Inbox>),
}

/// Threads that run futures, each with a queue of its own.
pub struct Threads {
    name: String,
    slots: Vec<Slot>,
}

impl Threads {
    /// `count` threads (at least one) of this name, none of which runs yet. They poll as
    /// [`Queue::poll_before_sleep`](crate::Queue::poll_before_sleep) has it.
    ///
    /// # Errors
    /// The system's refusal of a queue.
    pub fn new(name: &str, count: usize, poll: Duration) -> io::Result<Threads> {
        Threads::of(name, count, || {
            Ok(PreparedQueue::new(Backend::Auto)?.polling(poll))
        })
    }

    /// The same, with rings that take commands of devices too
    /// ([`PreparedQueue::with_commands`]).
    ///
    /// # Errors
    /// As there.
    pub fn with_commands(name: &str, count: usize, poll: Duration) -> io::Result<Threads> {
        Threads::of(name, count, || {
            Ok(PreparedQueue::with_commands()?.polling(poll))
        })
    }

    fn of(
        name: &str,
        count: usize,
        queue: impl Fn() -> io::Result<PreparedQueue>,
    ) -> io::Result<Threads> {
        let prepare = |_| Ok(Slot::Prepared(Some((queue()?, Event::new()?))));
        let slots: io::Result<Vec<Slot>> = (0..count.max(1)).map(prepare).collect();
        Ok(Threads {
            name: name.to_string(),
            slots: slots?,
        })
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.slots.len()
    }

    /// Runs a future on the thread `index`, counted around the number of threads.
    ///
    /// # Errors
    /// The system's refusal of a thread, or of its queue's start.
    pub fn run<F: Future<Output = ()> + 'static>(
        &mut self,
        index: usize,
        make: impl FnOnce() -> F + Send + 'static,
    ) -> io::Result<()> {
        let index = index % self.slots.len();
        let slot = &mut self.slots[index];
        if let Slot::Prepared(parts) = slot {
            let parts = parts.take();
            let parts = parts.ok_or_else(|| io::Error::other("a thread could not be started"))?;
            *slot = Slot::Started(start(format!("{}-{index}", self.name), parts)?);
        }
        let Slot::Started(inbox) = slot else {
            return Err(io::Error::other("a thread could not be started"));
        };
        inbox.change(|state| state.waiting.push_back(Box::new(move || Box::pin(make()))));
        inbox.event.signal()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        for slot in &self.slots {
            let Slot::Started(inbox) = slot else {
                continue;
            };
            inbox.change(|state| state.is_closed = true);
            // An event of ours can always be signalled.
            drop(inbox.event.signal());
        }
    }
}

fn start(name: String, (queue, event): (PreparedQueue, Event)) -> io::Result<Arc<Inbox>> {
    let inbox = Arc::new(Inbox {
        work: Mutex::default(),
        event,
    });
    let shared = Arc::clone(&inbox);
    let (ready, is_ready) = std::sync::mpsc::channel();
    thread::Builder::new().name(name).spawn(move || {
        let queue = match queue.start() {
            Ok(queue) => queue,
            Err(error) => {
                // The owner waits for it.
                drop(ready.send(Err(error)));
                return;
            }
        };
        drop(ready.send(Ok(())));
        queue.block_on(serve(&shared));
    })?;
    match is_ready.recv() {
        Ok(started) => started.map(|()| inbox),
        Err(_) => Err(io::Error::other("a thread ended before it had a queue")),
    }
}

/// Starts all work that comes, and returns when the owner is gone and all of it is done.
async fn serve(inbox: &Inbox) {
    let running = std::rc::Rc::new(());
    loop {
        let (work, is_closed) =
            inbox.change(|state| (std::mem::take(&mut state.waiting), state.is_closed));
        for make in work {
            let (running, event) = (std::rc::Rc::clone(&running), inbox.event.clone());
            spawn(async move {
                make().await;
                drop(running);
                // The thread looks whether that was the last.
                drop(event.signal());
            });
        }
        if is_closed && std::rc::Rc::strong_count(&running) == 1 {
            return;
        }
        if inbox.event.wait().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn work_runs_on_its_thread_and_is_finished_after_the_owner_has_left() {
        let mut threads = Threads::new("test", 2, Duration::ZERO).unwrap();
        assert_eq!(threads.count(), 2);
        let (to, from) = mpsc::channel();
        for index in 0..6 {
            let to = to.clone();
            threads
                .run(index, move || async move {
                    crate::sleep(Duration::from_millis(5)).await;
                    let name = thread::current().name().map(ToOwned::to_owned);
                    to.send((index, name)).unwrap();
                })
                .unwrap();
        }
        drop((threads, to));
        let mut all: Vec<(usize, Option<String>)> = from.iter().collect();
        all.sort();
        let expected = (0..6).map(|index| (index, Some(format!("test-{}", index % 2))));
        assert_eq!(all, expected.collect::<Vec<_>>());
    }
}
