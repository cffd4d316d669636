//! The server: accepts connections, limits and counts them, ends them.
//!
//! A connection is a task of one thread, of [`Workers`] or of the one that serves; it can harm no
//! other. It ends when its client leaves or breaks the protocol, and at the latest when the server
//! stops: then no further requests are read, those that were started run to their end, and their
//! replies are sent for as long as [`ServerOptions::drain_timeout`] allows.
//!
//! With [`ServerOptions::tls`] it serves over TLS only. Left out: other ways of authentication.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use cowslip_queue::{Listener, Stream, sleep};

use crate::event::{Event, First, first};
use crate::export::{Export, ExportError};
use crate::inbox::Inbox;
use crate::protocol::OptionCode;
use crate::protocol::transmission::Request;
use crate::tls::ServerTls;
use crate::wire::Wire;

mod exports;
mod handshake;
mod transmission;
mod workers;

use exports::Exports;
pub use exports::Offered;
pub use workers::Workers;

/// When a server stops by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lifetime {
    /// The server stops only when it is asked to.
    #[default]
    UntilStopped,
    /// When a client that had chosen an export has left, and no other is connected.
    UntilLastClient,
}

/// Limits of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Connections at a time; others wait to be accepted. `None` is no limit.
    pub connections_max: Option<usize>,
    /// When it stops by itself.
    pub lifetime: Lifetime,
    /// How long a client may take to choose an export.
    pub handshake_timeout: Duration,
    /// How long replies may take to be sent after the server was stopped.
    pub drain_timeout: Duration,
    /// Requests of one connection that are worked on or whose replies are not sent. Beyond that the
    /// connection is not read.
    pub requests_in_flight_max: usize,
    /// Payload of these requests, in bytes. A single request may exceed it.
    pub bytes_in_flight_max: usize,
    /// Serve over TLS, and nobody without it. `None` is a server in the clear.
    pub tls: Option<ServerTls>,
    /// Threads that connections are spread over, besides the one that serves.
    pub workers: Workers,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            connections_max: None,
            lifetime: Lifetime::UntilStopped,
            // QEMU's default; a client needs milliseconds.
            handshake_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(10),
            // Twice the depth that the deepest usual client reaches (nbdcopy: 64, Linux: 128).
            requests_in_flight_max: 256,
            // Two payloads of the maximum size, or 256 requests of 256 KiB.
            bytes_in_flight_max: 64 << 20,
            tls: None,
            workers: Workers::default(),
        }
    }
}

/// Events of a server, for logs. Connections are numbered from 1.
#[derive(Clone, Debug)]
pub enum ServerEvent {
    /// A client has connected.
    Connected {
        /// Number of the connection.
        connection: u64,
    },
    /// A client has sent an option during the handshake.
    Option {
        /// Number of the connection.
        connection: u64,
        /// The option that the client has sent.
        option: OptionCode,
    },
    /// A client has begun TLS, and may be served.
    Secured {
        /// Number of the connection.
        connection: u64,
    },
    /// A client has chosen an export.
    Chosen {
        /// Number of the connection.
        connection: u64,
        /// The name of the export.
        export: String,
    },
    /// A request was answered with an error.
    RequestFailed {
        /// Number of the connection.
        connection: u64,
        /// The request that failed, without its payload.
        request: Request,
        /// The error that the client was sent.
        error: ExportError,
    },
    /// A connection has ended.
    Disconnected {
        /// Number of the connection.
        connection: u64,
        /// Why, unless the client took its leave.
        reason: Option<String>,
    },
    /// A connection could not be accepted; the server goes on.
    AcceptFailed {
        /// The reason, in the system's words.
        reason: String,
    },
}

type Observer = Box<dyn Fn(&ServerEvent) + Send + Sync>;

/// Whether the server runs; it only moves forward.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Phase {
    Running,
    /// Requests are not read any more.
    Draining,
    /// Replies are not sent any more.
    Aborting,
}

struct Shared {
    options: ServerOptions,
    observer: Option<Observer>,
    control: Arc<Control>,
}

/// State shared with handles on other threads.
struct Control {
    exports: Exports,
    phase: AtomicU8,
    connections: AtomicUsize,
    acceptors: AtomicUsize,
    connections_ever: AtomicU64,
    /// Event: a value above has changed.
    changed: Event,
}

impl Control {
    fn new() -> Control {
        Control {
            exports: Exports::default(),
            phase: AtomicU8::new(Phase::Running as u8),
            connections: AtomicUsize::new(0),
            acceptors: AtomicUsize::new(0),
            connections_ever: AtomicU64::new(0),
            changed: Event::default(),
        }
    }

    fn reached(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::Acquire) >= phase as u8
    }

    fn advance(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::AcqRel);
        self.changed.notify();
    }

    /// Waits until nothing more is read from clients of an export.
    async fn until_unread(&self, offered: &Offered) {
        let is_unread = || offered.is_withdrawn() || self.reached(Phase::Draining);
        self.changed.until(is_unread).await;
    }

    /// Waits until nothing more is sent to clients of an export.
    async fn until_unsent(&self, offered: &Offered) {
        let is_unsent = || offered.is_cut_off() || self.reached(Phase::Aborting);
        self.changed.until(is_unsent).await;
    }

    /// Waits until the server is in `phase` or beyond.
    async fn until(&self, phase: Phase) {
        self.changed.until(|| self.reached(phase)).await;
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Acquire)
    }
}

impl Shared {
    fn notify(&self, event: impl FnOnce() -> ServerEvent) {
        if let Some(observer) = &self.observer {
            observer(&event());
        }
    }
}

/// Stops and watches a server, from any thread.
#[derive(Clone)]
pub struct ServerHandle {
    control: Arc<Control>,
}

impl ServerHandle {
    /// Makes the server stop accepting and reading; it ends when all that was started is done.
    pub fn stop(&self) {
        self.control.advance(Phase::Draining);
    }

    /// Cuts off clients that have not taken their replies; after [`ServerHandle::stop`].
    pub fn abort(&self) {
        self.control.advance(Phase::Aborting);
    }

    /// Offers a further export, as [`Server::add_export`] does. Returns whether its name was free.
    pub fn add_export(&self, name: impl Into<String>, export: impl Into<Export>) -> bool {
        self.control.exports.add(name.into(), export.into())
    }

    /// The export of this name.
    pub fn export(&self, name: &str) -> Option<Arc<Offered>> {
        self.control.exports.find(name)
    }

    /// Offers an export no longer. Nothing more is read from its clients; they are disconnected
    /// when what they had asked for is done ([`ServerHandle::gone`]). Returns `None` if there is no
    /// such export.
    pub fn withdraw(&self, name: &str) -> Option<Arc<Offered>> {
        let offered = self.control.exports.withdraw(name);
        self.control.changed.notify();
        offered
    }

    /// Waits until an export that was withdrawn has no client any more: then no request uses its
    /// disk. Clients that do not take their replies within `patience` are cut off. Runs on a queue.
    pub async fn gone(&self, offered: &Offered, patience: Duration) {
        let is_gone = || offered.clients() == 0;
        if let First::Right(()) = first(self.control.changed.until(is_gone), sleep(patience)).await
        {
            offered.cut_off();
            self.control.changed.notify();
            self.control.changed.until(is_gone).await;
        }
    }

    /// Connections that are open now.
    pub fn connections(&self) -> usize {
        self.control.connections()
    }

    /// Connections that were accepted since the server began.
    pub fn connections_ever(&self) -> u64 {
        self.control.connections_ever.load(Ordering::Acquire)
    }

    /// Waits until no connection is open and at least one has been.
    pub async fn idle(&self) {
        let idle = || self.connections_ever() > 0 && self.connections() == 0;
        self.control.changed.until(idle).await;
    }
}

/// Serves exports by name.
pub struct Server {
    shared: Shared,
}

impl Server {
    /// A server without exports.
    pub fn new(options: ServerOptions) -> Server {
        assert!(
            options.requests_in_flight_max > 0,
            "a server takes requests"
        );
        Server {
            shared: Shared {
                options,
                observer: None,
                control: Arc::new(Control::new()),
            },
        }
    }

    /// Adds an export. The one with the empty name is what clients get that ask for none.
    ///
    /// # Panics
    /// If there is one of this name already.
    pub fn add_export(&mut self, name: impl Into<String>, export: impl Into<Export>) {
        let is_free = self.shared.control.exports.add(name.into(), export.into());
        assert!(is_free, "export names differ from each other");
    }

    /// Calls `observer` at every event.
    pub fn observe(&mut self, observer: impl Fn(&ServerEvent) + Send + Sync + 'static) {
        self.shared.observer = Some(Box::new(observer));
    }

    /// Returns a handle that stops and watches this server.
    pub fn handle(&self) -> ServerHandle {
        ServerHandle {
            control: Arc::clone(&self.shared.control),
        }
    }

    /// Serves until the server is stopped and all connections have ended. Runs on a queue.
    pub async fn serve(self, listeners: Vec<Listener>) {
        let shared = Arc::new(self.shared);
        let control = &shared.control;
        for listener in listeners {
            control.acceptors.fetch_add(1, Ordering::AcqRel);
            cowslip_queue::spawn(accept(Arc::clone(&shared), listener));
        }
        control.until(Phase::Draining).await;
        let drained = control
            .changed
            .until(|| control.connections() == 0 && control.acceptors.load(Ordering::Acquire) == 0);
        let timeout = async {
            sleep(shared.options.drain_timeout).await;
            control.advance(Phase::Aborting);
            // Tasks that were started still run to their ends.
            std::future::pending::<()>().await;
        };
        first(drained, timeout).await;
    }

    /// Serves a single connection that the caller has accepted, until it ends.
    pub async fn serve_connection(self, stream: Stream) {
        let shared = Arc::new(self.shared);
        connection(Arc::clone(&shared), stream, open_connection(&shared)).await;
    }
}

/// Accepts connections until the server stops.
async fn accept(shared: Arc<Shared>, listener: Listener) {
    // Long enough for a process that ran out of descriptors not to spin, short enough not to
    // matter.
    const RETRY: Duration = Duration::from_millis(100);
    let control = &shared.control;
    let limit = shared.options.connections_max.unwrap_or(usize::MAX);
    loop {
        let room = control
            .changed
            .until(|| control.connections() < limit || control.reached(Phase::Draining));
        room.await;
        match first(control.until(Phase::Draining), listener.accept()).await {
            First::Left(()) => break,
            First::Right(Ok(stream)) => begin(&shared, stream),
            First::Right(Err(error)) => {
                shared.notify(|| ServerEvent::AcceptFailed {
                    reason: error.to_string(),
                });
                sleep(RETRY).await;
            }
        }
    }
    control.acceptors.fetch_sub(1, Ordering::AcqRel);
    control.changed.notify();
}

/// Starts the task of a connection on the thread whose turn it is.
fn begin(shared: &Arc<Shared>, stream: Stream) {
    let number = open_connection(shared);
    let task = {
        let shared = Arc::clone(shared);
        move || connection(shared, stream, number)
    };
    if let Err(error) = shared.options.workers.run(number, task) {
        close_connection(shared, number, Some(error.to_string()));
    }
}

/// Counts a new connection and returns its number.
fn open_connection(shared: &Shared) -> u64 {
    let control = &shared.control;
    control.connections.fetch_add(1, Ordering::AcqRel);
    let connection = control.connections_ever.fetch_add(1, Ordering::AcqRel) + 1;
    control.changed.notify();
    shared.notify(|| ServerEvent::Connected { connection });
    connection
}

/// A connection from its greeting to its end.
async fn connection(shared: Arc<Shared>, stream: Stream, number: u64) {
    let mut inbox = Inbox::new(Wire::Plain(stream.clone()));
    let negotiation = handshake::negotiate(&shared, number, &stream, &mut inbox);
    let negotiated = match within_handshake(&shared, negotiation).await {
        First::Left(reason) => Err(Some(reason.to_owned())),
        First::Right(outcome) => outcome,
    };
    let wire = inbox.wire().clone();
    let exports = &shared.control.exports;
    let (chosen, reason) = match negotiated {
        Ok(chosen) if !exports.enter(&chosen.offered) => {
            (true, Some("its export was withdrawn".to_owned()))
        }
        Ok(chosen) => {
            shared.notify(|| ServerEvent::Chosen {
                connection: number,
                export: chosen.name.clone(),
            });
            let (wire, offered) = (wire.clone(), Arc::clone(&chosen.offered));
            let connection = transmission::Connection::new(&shared, number, wire, chosen);
            let served = connection.serve(inbox).await;
            offered.leave();
            shared.control.changed.notify();
            (true, served.err())
        }
        Err(reason) => (false, reason),
    };
    first(shared.control.until(Phase::Aborting), wire.farewell()).await;
    stream.shutdown();
    let left = close_connection(&shared, number, reason);
    if chosen && left == 0 && shared.options.lifetime == Lifetime::UntilLastClient {
        shared.control.advance(Phase::Draining);
    }
}

/// Counts a connection that has ended. Returns how many there are yet.
fn close_connection(shared: &Shared, connection: u64, reason: Option<String>) -> usize {
    shared.notify(|| ServerEvent::Disconnected { connection, reason });
    let left = shared.control.connections.fetch_sub(1, Ordering::AcqRel) - 1;
    shared.control.changed.notify();
    left
}

/// Runs the handshake for as long as it may take; else the left side says why it was cut off.
async fn within_handshake<T>(
    shared: &Shared,
    negotiation: impl Future<Output = T>,
) -> First<&'static str, T> {
    let cut_off = async {
        let stopped = shared.control.until(Phase::Draining);
        match first(stopped, sleep(shared.options.handshake_timeout)).await {
            First::Left(()) => "the server is shutting down",
            First::Right(()) => "the client took too long to choose an export",
        }
    };
    first(cut_off, negotiation).await
}

/// Why a connection ended that did not take its leave, for the log.
fn describe(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the client closed the connection".to_owned(),
        _ => error.to_string(),
    }
}
