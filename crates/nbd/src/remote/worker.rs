//! A connection to an export, and the thread that has it: requests go there through a [`Mailbox`],
//! their results come back as completions.

use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::ExportDescription;
use cowslip_queue::{Backend, Completer, Pending, Queue, pending, spawn};
use futures_util::future::{self, Either};

use super::link::{ExportAddress, Link};
use super::requests::{Request, answer, limits};
use super::unflushed::Unflushed;
use cowslip_block::{Error, Result};

/// A connection. When this is dropped, all that was asked is answered, and the connection ends.
pub(super) struct Worker {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

/// The outcome of an attempt to connect.
type Connected = Result<ExportDescription>;

/// Role of a connection of a file.
enum Role {
    /// The one that describes the file, with the completion of its opening.
    First(Completer<Connected>),
    /// A further connection, which helps if it leads to the same export.
    Another(ExportDescription),
}

impl Worker {
    /// Connects. The second value completes with the server's description of the export, or with
    /// the error; until then nothing may be asked.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(super) fn first(way: &ExportAddress) -> Result<(Worker, Pending<Connected>)> {
        let (opened, connected) = pending();
        let worker = Worker::start(way.clone(), Role::First(opened))?;
        Ok((worker, connected))
    }

    /// Connects, as long as it takes, to the export that is known already. A
    /// failure is not reported.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(super) fn another(way: &ExportAddress, known: &ExportDescription) -> Result<Worker> {
        Worker::start(way.clone(), Role::Another(known.clone()))
    }

    fn start(way: ExportAddress, role: Role) -> Result<Worker> {
        let mailbox = Arc::new(Mailbox::default());
        let thread = {
            let mailbox = Arc::clone(&mailbox);
            std::thread::Builder::new()
                .name("nbd".to_string())
                .spawn(move || work(way, &mailbox, role))
        };
        let thread = thread.map_err(|error| {
            let words = cowslip_block::error::system_words(&error);
            Error::invalid(format!("Could not start a thread: {words}"))
        })?;
        Ok(Worker {
            mailbox,
            thread: Some(thread),
        })
    }

    /// Whether there is a connection, so that something can be asked.
    pub(super) fn is_ready(&self) -> bool {
        self.mailbox.ready.load(Ordering::Acquire)
    }

    /// Number of requests without an answer.
    pub(super) fn under_way(&self) -> usize {
        self.mailbox.under_way.load(Ordering::Relaxed)
    }

    /// Whether something was written over it that no flush has made durable.
    pub(super) fn has_unflushed(&self) -> bool {
        let unflushed = self.mailbox.unflushed.lock();
        !unflushed.unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Sends a request to the worker's thread; its completion comes through the request.
    pub(super) fn post(&self, request: Request) {
        self.mailbox.post(request);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.mailbox.close();
        if let Some(thread) = self.thread.take() {
            // It has said all it had to say by results.
            drop(thread.join());
        }
    }
}

/// Requests on their way to the thread.
#[derive(Default)]
struct Mailbox {
    letters: Mutex<Letters>,
    /// Whether there is a connection.
    ready: AtomicBool,
    /// Requests that were posted and are not answered.
    under_way: AtomicUsize,
    /// Writes that the server has acknowledged and not made durable.
    unflushed: Arc<Mutex<Unflushed>>,
}

#[derive(Default)]
struct Letters {
    waiting: VecDeque<Request>,
    /// The thread waits for the next one.
    awaited: Option<Completer<()>>,
    is_closed: bool,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Letters> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, request: Request) {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        let awaited = {
            let mut letters = self.lock();
            letters.waiting.push_back(request);
            letters.awaited.take()
        };
        if let Some(awaited) = awaited {
            awaited.complete(());
        }
    }

    fn close(&self) {
        let awaited = {
            let mut letters = self.lock();
            letters.is_closed = true;
            letters.awaited.take()
        };
        if let Some(awaited) = awaited {
            awaited.complete(());
        }
    }

    /// The next request; `None` when the file is dropped.
    async fn next(&self) -> Option<Request> {
        loop {
            let comes = {
                let mut letters = self.lock();
                if let Some(request) = letters.waiting.pop_front() {
                    return Some(request);
                }
                if letters.is_closed {
                    return None;
                }
                let (awaited, comes) = pending();
                letters.awaited = Some(awaited);
                comes
            };
            comes.await;
        }
    }
}

/// The thread, from its start to its end.
fn work(way: ExportAddress, mailbox: &Arc<Mailbox>, role: Role) {
    let queue = match Queue::new(Backend::Auto) {
        Ok(queue) => queue,
        Err(error) => {
            let words = cowslip_block::error::system_words(&error);
            let text = format!("Could not set up the I/O queue: {words}");
            return role.failed(Error::invalid(text));
        }
    };
    queue.block_on(async {
        // Nothing is asked before there is a connection, so what comes first can only be the end.
        let unflushed = Arc::clone(&mailbox.unflushed);
        let (connecting, ended) = (pin!(Link::open(way, unflushed)), pin!(mailbox.next()));
        let link = match future::select(connecting, ended).await {
            Either::Left((Ok(link), _)) => Rc::new(link),
            Either::Left((Err(error), _)) => return role.failed(error),
            Either::Right(_) => return,
        };
        if !role.takes(&link) {
            return leave(link).await;
        }
        mailbox.ready.store(true, Ordering::Release);
        role.succeeded(&link);
        let limits = limits(link.description());
        while let Some(request) = mailbox.next().await {
            let (link, mailbox) = (Rc::clone(&link), Arc::clone(mailbox));
            spawn(async move {
                answer(&link, limits, request).await;
                mailbox.under_way.fetch_sub(1, Ordering::Relaxed);
            });
        }
        leave(link).await;
    });
}

async fn leave(link: Rc<Link>) {
    if let Ok(link) = Rc::try_unwrap(link) {
        link.leave().await;
    }
}

impl Role {
    /// Whether the connection is of use.
    fn takes(&self, link: &Link) -> bool {
        match self {
            Role::First(_) => true,
            Role::Another(known) => link.stands_for(known),
        }
    }

    fn succeeded(self, link: &Link) {
        if let Role::First(opened) = self {
            opened.complete(Ok(link.description().clone()));
        }
    }

    fn failed(self, error: Error) {
        if let Role::First(opened) = self {
            opened.complete(Err(error));
        }
    }
}
