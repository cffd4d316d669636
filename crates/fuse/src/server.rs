//! The server: a connection to the kernel, and the threads that its requests are spread over.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Waker};

use cowslip_block::Disk;
use cowslip_queue::{FuseDevice, FuseSlot, Pending, Threads, pending};

use crate::channel::Channel;
use crate::export::{Export, Options};
use crate::ring::{self, RingChannel};

/// Events of a server, for a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent {
    /// A request failed.
    RequestFailed {
        /// The request, as it was understood.
        request: String,
        /// The failure.
        error: String,
    },
    /// The kernel refused an answer.
    AnswerRefused {
        /// The request, as it was understood.
        request: String,
        /// The system's reason.
        error: String,
    },
    /// The connection to the kernel failed, for another reason than that the file system was
    /// unmounted.
    ConnectionFailed {
        /// The reason.
        reason: String,
    },
}

/// A function that is called with events, on any of the server's threads.
pub(crate) type Observer = Arc<dyn Fn(&ServerEvent) + Send + Sync>;

/// The request that a server stops, and the tasks that wait for it.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    is_set: AtomicBool,
    /// By channel.
    waiting: Mutex<Vec<Option<Waker>>>,
}

impl Stop {
    pub fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// Has the task of a channel woken when the stop is set. Returns whether it is set already.
    pub fn register(&self, index: usize, context: &Context<'_>) -> bool {
        // Nothing that holds the lock panics.
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() <= index {
            waiting.resize(index + 1, None);
        }
        match &mut waiting[index] {
            Some(waker) => waker.clone_from(context.waker()),
            empty => *empty = Some(context.waker().clone()),
        }
        self.is_set()
    }

    fn set(&self) {
        self.is_set.store(true, Ordering::SeqCst);
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let wakers = std::mem::take(&mut *waiting);
        drop(waiting);
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Stops a server from outside.
#[derive(Clone, Debug)]
pub struct ServerHandle {
    stop: Arc<Stop>,
}

impl ServerHandle {
    /// Ends the server: requests that were taken are completed, others fail.
    pub fn stop(&self) {
        self.stop.set();
    }
}

/// A server of one disk.
pub struct Server {
    device: FuseDevice,
    further: Vec<FuseDevice>,
    threads: Option<Threads>,
    /// Slots of the ring by thread, if requests may come by way of it.
    slots: Option<Vec<Vec<FuseSlot>>>,
    export: Arc<Export>,
    observer: Observer,
    stop: Arc<Stop>,
}

impl Server {
    /// A server of a disk to a connection that is mounted.
    ///
    /// # Errors
    /// The system's refusal of a descriptor: all that are needed are made here.
    pub fn new(disk: Arc<dyn Disk>, device: FuseDevice, options: Options) -> io::Result<Server> {
        let count = options.threads.max(1);
        let mut further = vec![];
        for _ in 1..count {
            further.push(device.another()?);
        }
        // Where the kernel has no such ring, the device serves as well.
        let ring = options
            .uses_ring
            .then(|| ring::Prepared::new(count, options.poll).ok())
            .flatten();
        let (threads, slots) = match ring {
            Some(ring) => (Some(ring.threads), Some(ring.slots)),
            None if count == 1 => (None, None),
            None => (Some(Threads::new("fuse", count - 1, options.poll)?), None),
        };
        Ok(Server {
            device,
            further,
            threads,
            export: Arc::new(Export::new(disk, options, slots.is_some())),
            slots,
            observer: Arc::new(|_| ()),
            stop: Arc::default(),
        })
    }

    /// Calls a function with all events from now on.
    pub fn observe(&mut self, observer: impl Fn(&ServerEvent) + Send + Sync + 'static) {
        self.observer = Arc::new(observer);
    }

    /// A handle for other tasks and threads.
    pub fn handle(&self) -> ServerHandle {
        ServerHandle {
            stop: Arc::clone(&self.stop),
        }
    }

    /// Serves on this thread and on its own until the file system is unmounted or the server is
    /// stopped. What was acknowledged is not flushed yet.
    ///
    /// # Errors
    /// The system's refusal of a thread.
    pub async fn serve(mut self) -> io::Result<()> {
        let (told, mut negotiated) = pending();
        let channel = Channel {
            device: self.device.share(),
            export: Arc::clone(&self.export),
            stop: Arc::clone(&self.stop),
            observer: Arc::clone(&self.observer),
            index: 0,
            negotiated: Cell::new(Some(told)),
        };
        let waits = self.slots.is_some();
        let others = async {
            // `None` if there was no negotiation: then there is nothing to serve.
            let begins = !waits
                || std::future::poll_fn(|context| negotiated.poll_ended(context))
                    .await
                    .is_some();
            match begins {
                true => self.serve_on_threads().await,
                false => Ok(()),
            }
        };
        let ((), outcome) = futures_util::future::join(channel.run(), others).await;
        outcome
    }

    async fn serve_on_threads(&mut self) -> io::Result<()> {
        let slots = self.slots.take().filter(|_| self.export.uses_ring());
        let further = match &slots {
            Some(_) => Vec::new(),
            None => std::mem::take(&mut self.further),
        };
        let mut ends = Vec::new();
        let mut outcome = Ok(());
        let mut note = |started: io::Result<Pending<()>>| match started {
            Ok(end) => ends.push(end),
            Err(error) => {
                self.stop.set();
                outcome = Err(error);
            }
        };
        let (export, stop, observer) = (&self.export, &self.stop, &self.observer);
        if let Some(threads) = &mut self.threads {
            for (index, device) in further.into_iter().enumerate() {
                let (export, stop) = (Arc::clone(export), Arc::clone(stop));
                let observer = Arc::clone(observer);
                note(start(threads, index, move || {
                    Channel {
                        device,
                        export,
                        stop,
                        observer,
                        index: index + 1,
                        negotiated: Cell::default(),
                    }
                    .run()
                }));
            }
            for (index, slots) in slots.into_iter().flatten().enumerate() {
                let (export, stop) = (Arc::clone(export), Arc::clone(stop));
                let (device, observer) = (self.device.share(), Arc::clone(observer));
                note(start(threads, index, move || {
                    RingChannel {
                        device,
                        slots,
                        export,
                        stop,
                        observer,
                        index: index + 1,
                    }
                    .run()
                }));
            }
        }
        for end in ends {
            end.await;
        }
        outcome
    }
}

/// Runs a channel on a thread; the result says when it has ended.
fn start<F: Future<Output = ()> + 'static>(
    threads: &mut Threads,
    index: usize,
    run: impl FnOnce() -> F + Send + 'static,
) -> io::Result<Pending<()>> {
    let (done, end) = pending();
    threads.run(index, move || async move {
        run().await;
        done.complete(());
    })?;
    Ok(end)
}
