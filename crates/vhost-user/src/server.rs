//! The server: a socket on which front ends come, one after the other, and the threads that work
//! on their queues.

use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use cowslip_block::Disk;
use cowslip_queue::{Event, Listener, Threads};
use futures_util::future::{Either, select};

use crate::device::{Device, Options};
use crate::session::Session;

/// Events of a server, for a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent<'a> {
    /// A front end has connected.
    Connected,
    /// A front end has left, or was cut off for a reason.
    Disconnected {
        /// The reason, if the front end broke the protocol or the connection failed.
        reason: Option<String>,
    },
    /// A message was answered with a failure.
    Refused {
        /// The reason.
        reason: String,
    },
    /// A ring has an impossible content. Its queue stops until the driver starts it again.
    QueueBroken {
        /// The queue's number.
        queue: u16,
        /// The content, and where it is.
        reason: String,
    },
    /// A request of the guest failed.
    RequestFailed {
        /// The queue's number.
        queue: u16,
        /// The kind of request.
        request: &'a str,
        /// The failure.
        error: String,
    },
    /// No connection could be accepted; the server goes on.
    AcceptFailed {
        /// The system's reason.
        reason: String,
    },
}

/// A function that is called with events, on any of the server's threads.
pub(crate) type Observer = Arc<dyn Fn(&ServerEvent<'_>) + Send + Sync>;

/// State that sessions and queues share.
pub(crate) struct ServerState {
    pub device: Arc<Device>,
    pub observer: Observer,
    threads: Mutex<Threads>,
}

impl ServerState {
    /// Runs a queue's future on the thread for that queue.
    pub fn run<F: Future<Output = ()> + 'static>(
        &self,
        index: usize,
        make: impl FnOnce() -> F + Send + 'static,
    ) -> io::Result<()> {
        // Nothing that holds the lock panics.
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.run(index, make)
    }
}

/// Stops and informs a server from outside.
#[derive(Clone, Debug)]
pub struct ServerHandle {
    stop: Arc<Mutex<bool>>,
    event: Event,
    /// Signalled at the stop alone, so that waiting for that misses no change.
    stop_event: Event,
}

impl ServerHandle {
    /// Ends the server: requests that were taken are completed, the front end is disconnected.
    pub fn stop(&self) {
        *self.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        // An event of ours can always be signalled.
        drop(self.event.signal());
        drop(self.stop_event.signal());
    }

    /// Lets the guest know that the disk has another size.
    pub fn resized(&self) {
        drop(self.event.signal());
    }

    pub(crate) fn is_stopped(&self) -> bool {
        *self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the server is to stop.
    pub(crate) async fn stopped(&self) {
        while !self.is_stopped() {
            // An event of ours can always be waited for.
            drop(self.stop_event.wait().await);
        }
    }

    /// Waits until the server is to stop, or the disk has another size.
    pub(crate) async fn changed(&self) {
        // An event of ours can always be waited for.
        drop(self.event.wait().await);
    }
}

/// A server of one disk.
pub struct Server {
    device: Arc<Device>,
    threads: Threads,
    observer: Observer,
    handle: ServerHandle,
}

impl Server {
    /// A server of a disk.
    ///
    /// # Errors
    /// The system's refusal of a descriptor: all that the server itself needs are made here.
    pub fn new(disk: Arc<dyn Disk>, options: Options) -> io::Result<Server> {
        Ok(Server {
            threads: Threads::new("vhost-user", options.threads, options.poll)?,
            device: Arc::new(Device::new(disk, options)),
            observer: Arc::new(|_| ()),
            handle: ServerHandle {
                stop: Arc::default(),
                event: Event::new()?,
                stop_event: Event::new()?,
            },
        })
    }

    /// Calls a function with all events from now on.
    pub fn observe(&mut self, observer: impl Fn(&ServerEvent<'_>) + Send + Sync + 'static) {
        self.observer = Arc::new(observer);
    }

    /// A handle for other tasks and threads.
    pub fn handle(&self) -> ServerHandle {
        self.handle.clone()
    }

    /// Serves front ends that connect, one after the other, until it is stopped.
    pub async fn serve(self, listener: Listener) {
        let state = Arc::new(ServerState {
            device: self.device,
            observer: self.observer,
            threads: Mutex::new(self.threads),
        });
        let handle = self.handle;
        while !handle.is_stopped() {
            let accepted = {
                let accept = std::pin::pin!(listener.accept());
                let changed = std::pin::pin!(handle.changed());
                match select(accept, changed).await {
                    Either::Left((accepted, _)) => accepted,
                    // Nobody is there to be informed of a new size.
                    Either::Right(_) => continue,
                }
            };
            match accepted {
                Ok(stream) => {
                    (state.observer)(&ServerEvent::Connected);
                    let mut session = Session::new(Arc::clone(&state), stream);
                    let outcome = session.run(&handle).await;
                    session.end().await;
                    (state.observer)(&ServerEvent::Disconnected {
                        reason: outcome.err().map(|error| error.to_string()),
                    });
                }
                Err(error) => {
                    (state.observer)(&ServerEvent::AcceptFailed {
                        reason: error.to_string(),
                    });
                    // Such as too many open files: it may pass.
                    cowslip_queue::sleep(std::time::Duration::from_millis(100)).await;
                }
            }
        }
    }
}
