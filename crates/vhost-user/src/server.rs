//! The server: a socket on which front ends come, one after the other, and the threads that work
//! on their queues.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cowslip_block::Disk;
use cowslip_queue::{Event, Listener, Stream, Threads, spawn};
use futures_util::future::{Either, select};

use crate::device::{Device, Options};
use crate::session::{ConnectionState, Session};

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
    place: WorkPlace,
}

/// Where queues work.
#[derive(Clone)]
enum WorkPlace {
    Threads(Arc<Mutex<Threads>>),
    /// On the thread that serves the connection.
    Here,
}

impl ServerState {
    /// Runs a queue's future on the thread for that queue.
    pub fn run<F: Future<Output = ()> + 'static>(
        &self,
        index: usize,
        make: impl FnOnce() -> F + Send + 'static,
    ) -> io::Result<()> {
        match &self.place {
            WorkPlace::Threads(threads) => {
                // Nothing that holds the lock panics.
                let mut threads = threads.lock().unwrap_or_else(PoisonError::into_inner);
                threads.run(index, make)
            }
            WorkPlace::Here => {
                spawn(make());
                Ok(())
            }
        }
    }
}

/// The work that a server is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Serve,
    /// To come to rest, so that another server, or this one, can go on with the connection.
    Rest,
    Stop,
}

/// How long a front end may take for the rest of a message once a server is to come to rest.
const REST_PATIENCE: Duration = Duration::from_secs(1);

/// Stops and informs a server from outside.
#[derive(Clone, Debug)]
pub struct ServerHandle {
    wanted: Arc<Mutex<Wanted>>,
    event: Event,
    /// Signalled at the end of serving alone, so that waiting for that misses no change.
    end_event: Event,
}

impl ServerHandle {
    /// Ends the server: requests that were taken are completed, the front end is disconnected.
    pub fn stop(&self) {
        self.want(Wanted::Stop);
    }

    /// Has the server come to rest: [`Server::serve_on`] returns when requests that were taken have
    /// completed, with the connection, which stays open.
    pub fn rest(&self) {
        self.want(Wanted::Rest);
    }

    fn want(&self, wanted: Wanted) {
        let mut current = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        // A stop is for good.
        if *current != Wanted::Stop {
            *current = wanted;
        }
        drop(current);
        // An event of ours can always be signalled.
        drop(self.event.signal());
        drop(self.end_event.signal());
    }

    /// Lets the guest know that the disk has another size.
    pub fn resized(&self) {
        drop(self.event.signal());
    }

    fn wanted(&self) -> Wanted {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_serving(&self) -> bool {
        self.wanted() == Wanted::Serve
    }

    /// Waits until the server is to stop, or has been to come to rest for a while.
    pub(crate) async fn out_of_patience(&self) {
        loop {
            match self.wanted() {
                Wanted::Serve => {}
                Wanted::Rest => return cowslip_queue::sleep(REST_PATIENCE).await,
                Wanted::Stop => return,
            }
            // An event of ours can always be waited for.
            drop(self.end_event.wait().await);
        }
    }

    /// Waits until the server is to end its work, or the disk has another size.
    pub(crate) async fn changed(&self) {
        // An event of ours can always be waited for.
        drop(self.event.wait().await);
    }
}

/// A server of one disk.
pub struct Server {
    device: Arc<Device>,
    place: WorkPlace,
    observer: Observer,
    handle: ServerHandle,
}

/// A connection that no queue works on at the moment: one that [`ServerHandle::rest`] has brought
/// to rest, or one of another process ([`Server::connection_of`]).
pub struct Connection {
    session: Session,
}

impl Connection {
    /// State for another process, with the descriptors that it refers to by their numbers.
    ///
    /// # Errors
    /// The system's refusal of a copy of a descriptor.
    pub fn state(&self) -> io::Result<(ConnectionState, Vec<OwnedFd>)> {
        self.session.state()
    }
}

/// A server that has come to rest, its socket, and the connection that it had.
pub struct AtRest {
    server: Server,
    /// The socket that front ends connect to.
    pub listener: Listener,
    /// The connection, if there is a front end.
    pub connection: Option<Connection>,
}

impl AtRest {
    /// The server, over a disk that has the same content and size, and the parts that it goes on
    /// with ([`Server::serve_on`]).
    pub fn over(self, disk: Arc<dyn Disk>) -> (Server, Listener, Option<Connection>) {
        let (mut server, mut connection) = (self.server, self.connection);
        server.device = Arc::new(server.device.over(disk));
        if let Some(connection) = &mut connection {
            connection.session.set_server(server.state());
        }
        server.handle.want(Wanted::Serve);
        (server, self.listener, connection)
    }
}

impl Server {
    /// A server of a disk.
    ///
    /// # Errors
    /// The system's refusal of a descriptor: all that the server itself needs are made here.
    pub fn new(disk: Arc<dyn Disk>, options: Options) -> io::Result<Server> {
        let place = match options.threads {
            0 => WorkPlace::Here,
            count => {
                let threads = Threads::new("vhost-user", count, options.poll)?;
                WorkPlace::Threads(Arc::new(Mutex::new(threads)))
            }
        };
        Ok(Server {
            place,
            device: Arc::new(Device::new(disk, options)),
            observer: Arc::new(|_| ()),
            handle: ServerHandle {
                wanted: Arc::new(Mutex::new(Wanted::Serve)),
                event: Event::new()?,
                end_event: Event::new()?,
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

    fn state(&self) -> Arc<ServerState> {
        Arc::new(ServerState {
            device: Arc::clone(&self.device),
            observer: Arc::clone(&self.observer),
            place: self.place.clone(),
        })
    }

    /// Takes over a connection of another process, which is at rest there. Its memory is mapped
    /// and checked here; its queues start when it is served.
    ///
    /// # Errors
    /// The connection has features or queues that this server does not have; its memory, table or
    /// log cannot be mapped; a ring is not in the memory.
    pub fn connection_of(
        &self,
        state: &ConnectionState,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<Connection> {
        let session = Session::of_state(self.state(), state, descriptors)?;
        Ok(Connection { session })
    }

    /// Serves front ends that connect, one after the other, until it is stopped.
    pub async fn serve(self, listener: Listener) {
        // At rest, it ends as if it was stopped.
        drop(self.serve_on(listener, None).await);
    }

    /// Serves front ends that connect, one after the other, beginning with one that is connected,
    /// until it is stopped or has come to rest.
    pub async fn serve_on(
        self,
        listener: Listener,
        mut connection: Option<Connection>,
    ) -> Option<AtRest> {
        let handle = self.handle.clone();
        while handle.is_serving() {
            let session = match connection.take() {
                Some(connection) => self.go_on(connection.session).await,
                None => self.accept(&listener).await,
            };
            let Some(mut session) = session else { continue };
            let outcome = session.run(&handle).await;
            if outcome.is_ok() && handle.wanted() == Wanted::Rest {
                session.rest().await;
                connection = Some(Connection { session });
                break;
            }
            session.end().await;
            (self.observer)(&ServerEvent::Disconnected {
                reason: outcome.err().map(|error| error.to_string()),
            });
        }
        (handle.wanted() == Wanted::Rest).then(|| AtRest {
            server: self,
            listener,
            connection,
        })
    }

    /// Serves a front end that is connected by other means, until it leaves or the server is
    /// stopped.
    pub async fn serve_connection(&self, stream: Stream) {
        (self.observer)(&ServerEvent::Connected);
        let mut session = Session::new(self.state(), stream);
        let outcome = session.run(&self.handle).await;
        session.end().await;
        (self.observer)(&ServerEvent::Disconnected {
            reason: outcome.err().map(|error| error.to_string()),
        });
    }

    /// Starts the queues of a connection that was at rest.
    async fn go_on(&self, mut session: Session) -> Option<Session> {
        match session.go_on() {
            Ok(()) => Some(session),
            Err(error) => {
                session.end().await;
                (self.observer)(&ServerEvent::Disconnected {
                    reason: Some(error.to_string()),
                });
                None
            }
        }
    }

    /// Waits for a front end; none if the server is to end its work, or none could be accepted.
    async fn accept(&self, listener: &Listener) -> Option<Session> {
        let accepted = {
            let accept = std::pin::pin!(listener.accept());
            let changed = std::pin::pin!(self.handle.changed());
            match select(accept, changed).await {
                Either::Left((accepted, _)) => accepted,
                // Nobody is there to be informed of a new size.
                Either::Right(_) => return None,
            }
        };
        match accepted {
            Ok(stream) => {
                (self.observer)(&ServerEvent::Connected);
                Some(Session::new(self.state(), stream))
            }
            Err(error) => {
                (self.observer)(&ServerEvent::AcceptFailed {
                    reason: error.to_string(),
                });
                // Such as too many open files: it may pass.
                cowslip_queue::sleep(Duration::from_millis(100)).await;
                None
            }
        }
    }
}
