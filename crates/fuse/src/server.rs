//! The server: a connection to the kernel, and the threads that its requests are spread over.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Waker};

use cowslip_block::Disk;
use cowslip_queue::{FuseDevice, Threads, pending};

use crate::channel::Channel;
use crate::export::{Export, Options};

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
    channels: Vec<FuseDevice>,
    threads: Option<Threads>,
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
        let further = options.threads.max(1) - 1;
        let mut channels = vec![];
        for _ in 0..further {
            channels.push(device.another()?);
        }
        channels.push(device);
        let threads = match further {
            0 => None,
            count => Some(Threads::new("fuse", count, options.poll)?),
        };
        Ok(Server {
            channels,
            threads,
            export: Arc::new(Export::new(disk, options)),
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
        let mut ends = Vec::new();
        let mut outcome = Ok(());
        let own = self.channels.pop();
        for (index, device) in self.channels.drain(..).enumerate() {
            let Some(threads) = &mut self.threads else {
                break;
            };
            let export = Arc::clone(&self.export);
            let (stop, observer) = (Arc::clone(&self.stop), Arc::clone(&self.observer));
            let (done, end) = pending();
            let started = threads.run(index, move || async move {
                let channel = Channel {
                    device,
                    export,
                    stop,
                    observer,
                    index: index + 1,
                };
                channel.run().await;
                done.complete(());
            });
            match started {
                Ok(()) => ends.push(end),
                Err(error) => {
                    self.stop.set();
                    outcome = Err(error);
                }
            }
        }
        if let Some(device) = own {
            let channel = Channel {
                device,
                export: self.export,
                stop: self.stop,
                observer: self.observer,
                index: 0,
            };
            channel.run().await;
        }
        for end in ends {
            end.await;
        }
        outcome
    }
}
