//! The server: accepts clients, hands their commands to a handler, and sends events to all.
//!
//! Clients are served side by side; QEMU's monitor of a socket serves one, and lets others wait
//! until it has left. The commands of one client are executed one after the other, in order; a
//! client is not read while its command runs or while it does not read its replies.
//!
//! Events go to all clients that have negotiated. One that lets more than
//! [`ServerOptions::events_max`] of them wait is cut off: if some were left out, it would wait for
//! ever for what it has missed, while one that is cut off connects again and asks. Events that the
//! schema limits are sent at most once a second for each object that they are about, the last of
//! them at the end of that second.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cowslip_queue::{Buf, Listener, Stream, sleep, spawn};
use futures_util::future::{Either, select};
use serde_json::{Map, Value, json};

use crate::descriptors::{Descriptors, FdSets};
use crate::error::QmpError;
use crate::json::{Limits, to_line};
use crate::notify::Notify;
use crate::schema::Schema;

mod outbox;
mod session;

use session::Session;

/// A command, with arguments that the schema has found right.
pub struct Call<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its arguments.
    pub arguments: Map<String, Value>,
    /// Descriptors that the client has passed.
    pub descriptors: Descriptors<'a>,
}

/// A command that is being executed.
pub type Executing<'a> = Pin<Box<dyn Future<Output = Result<Value, QmpError>> + 'a>>;

/// Executes commands. The server itself answers those of the protocol: `qmp_capabilities`,
/// `query-version`, `query-commands`, `query-qmp-schema`, and those that keep descriptors.
pub trait Handler {
    /// Executes a command of the schema. Without a result it returns an empty object. The client
    /// may leave meanwhile; the command runs to its end nevertheless.
    fn execute<'a>(&'a self, call: Call<'a>) -> Executing<'a>;
}

/// An event for all clients.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    name: &'static str,
    data: Map<String, Value>,
}

impl Event {
    /// An event with data, which is an object.
    ///
    /// # Panics
    /// The data are no object.
    pub fn new(name: &'static str, data: Value) -> Event {
        match data {
            Value::Object(data) => Event { name, data },
            _ => panic!("the data of an event are an object"),
        }
    }
}

/// Limits and words of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The version of QEMU whose protocol the server claims: major, minor, micro. Clients decide by
    /// it.
    pub version: [u32; 3],
    /// The server's own name and version.
    pub package: String,
    /// Clients at a time; others wait to be accepted.
    pub clients_max: usize,
    /// Limits of a command.
    pub limits: Limits,
    /// Events that may wait for a client that does not read.
    pub events_max: usize,
    /// How long replies may take to be sent after the server was stopped.
    pub drain_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            version: [10, 0, 2],
            package: concat!("Cowslip ", env!("CARGO_PKG_VERSION")).to_string(),
            clients_max: 64,
            limits: Limits::default(),
            // A thousand disks that each end a job: some 100 bytes each.
            events_max: 8192,
            drain_timeout: Duration::from_secs(5),
        }
    }
}

/// Events of a server, for logs. Clients are numbered from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent<'a> {
    /// A client has connected.
    Connected {
        /// Number of the client.
        client: u64,
    },
    /// A command was executed, or refused.
    Executed {
        /// Number of the client.
        client: u64,
        /// Name of the command.
        command: &'a str,
        /// The reason, if it failed.
        error: Option<&'a QmpError>,
    },
    /// A client has left, or was cut off.
    Disconnected {
        /// Number of the client.
        client: u64,
        /// Why, unless it took its leave.
        reason: Option<String>,
    },
    /// No client could be accepted; the server goes on.
    AcceptFailed {
        /// The system's reason.
        reason: String,
    },
}

type Observer = Box<dyn Fn(&ServerEvent<'_>)>;

/// State that sessions and handles share.
struct Shared {
    schema: &'static Schema,
    options: ServerOptions,
    observer: RefCell<Option<Observer>>,
    sessions: RefCell<Vec<Weak<Session>>>,
    sets: Arc<FdSets>,
    clients: Cell<usize>,
    clients_ever: Cell<u64>,
    acceptors: Cell<usize>,
    stopped: Cell<bool>,
    /// A value above has changed.
    changed: Notify,
    /// Events that are limited, and were sent within the last second: the last one since.
    limited: RefCell<HashMap<String, Option<Buf>>>,
}

impl Shared {
    fn notify(&self, event: &ServerEvent<'_>) {
        if let Some(observer) = &*self.observer.borrow() {
            observer(event);
        }
    }

    fn send_to_all(&self, line: &Buf) {
        let mut sessions = self.sessions.borrow_mut();
        sessions.retain(|session| match session.upgrade() {
            Some(session) => {
                session.send_event(line.clone());
                true
            }
            None => false,
        });
    }
}

/// Informs clients, stops and watches the server. Its methods are called on the thread of the
/// server's queue.
#[derive(Clone)]
pub struct ServerHandle {
    shared: Rc<Shared>,
}

impl ServerHandle {
    /// Makes the server stop accepting and reading; it ends when the commands that run are done and
    /// their replies are sent.
    pub fn stop(&self) {
        self.shared.stopped.set(true);
        self.shared.changed.notify();
    }

    /// Sends an event to all clients that have negotiated.
    ///
    /// # Panics
    /// In builds with debug assertions, if the schema has no such event.
    pub fn emit(&self, mut event: Event) {
        let shared = &self.shared;
        let kind = shared.schema.event(event.name);
        if cfg!(debug_assertions) {
            let Some(kind) = kind else {
                panic!("the schema has no event '{}'", event.name);
            };
            if let Err(error) = shared.schema.check_event(kind, &mut event.data) {
                panic!("the data of {}: {error}", event.name);
            }
        }
        let limited_by = kind.and_then(|kind| kind.rate_limited_by.as_deref());
        let key = limited_by.map(|members| key_of(&event, members));
        let line = Buf::copy_of(&to_line(&timed(event)));
        let Some(key) = key else {
            return shared.send_to_all(&line);
        };
        if let Some(last) = shared.limited.borrow_mut().get_mut(&key) {
            *last = Some(line);
            return;
        }
        shared.limited.borrow_mut().insert(key.clone(), None);
        shared.send_to_all(&line);
        spawn(send_last(Rc::downgrade(shared), key));
    }

    /// Clients that are connected.
    pub fn clients(&self) -> usize {
        self.shared.clients.get()
    }

    /// Whether the server was stopped.
    pub fn is_stopped(&self) -> bool {
        self.shared.stopped.get()
    }

    /// Sets of descriptors that clients have passed.
    pub fn sets(&self) -> &Arc<FdSets> {
        &self.shared.sets
    }
}

/// Tells events apart that are limited one by one.
fn key_of(event: &Event, members: &[String]) -> String {
    let values = members.iter().map(|name| event.data.get(name));
    format!("{} {:?}", event.name, values.collect::<Vec<_>>())
}

/// Sends the last event of each second, until none has come in one.
async fn send_last(shared: Weak<Shared>, key: String) {
    loop {
        sleep(Duration::from_secs(1)).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let mut limited = shared.limited.borrow_mut();
        let last = limited.get_mut(&key).and_then(Option::take);
        let Some(line) = last else {
            limited.remove(&key);
            return;
        };
        drop(limited);
        shared.send_to_all(&line);
    }
}

fn timed(event: Event) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    let mut message = Map::new();
    let timestamp = json!({"seconds": now.as_secs(), "microseconds": now.subsec_micros()});
    message.insert("timestamp".into(), timestamp);
    message.insert("event".into(), event.name.into());
    if !event.data.is_empty() {
        message.insert("data".into(), event.data.into());
    }
    message.into()
}

/// A server of the protocol.
pub struct Server {
    shared: Rc<Shared>,
}

impl Server {
    /// A server of the commands of a schema.
    pub fn new(schema: &'static Schema, options: ServerOptions) -> Server {
        Server {
            shared: Rc::new(Shared {
                schema,
                options,
                observer: RefCell::new(None),
                sessions: RefCell::new(Vec::new()),
                sets: Arc::default(),
                clients: Cell::new(0),
                clients_ever: Cell::new(0),
                acceptors: Cell::new(0),
                stopped: Cell::new(false),
                changed: Notify::default(),
                limited: RefCell::new(HashMap::new()),
            }),
        }
    }

    /// Calls a function with all events of the server from now on.
    pub fn observe(&mut self, observer: impl Fn(&ServerEvent<'_>) + 'static) {
        self.shared.observer.replace(Some(Box::new(observer)));
    }

    /// A handle for other tasks of the thread.
    pub fn handle(&self) -> ServerHandle {
        ServerHandle {
            shared: Rc::clone(&self.shared),
        }
    }

    /// Serves clients that connect, and those that are connected already, until the server is
    /// stopped and all have left. Runs on a queue.
    pub async fn serve(
        self,
        handler: Rc<dyn Handler>,
        listeners: Vec<Listener>,
        connected: Vec<Stream>,
    ) {
        let shared = self.shared;
        for stream in connected {
            begin(&shared, &handler, stream);
        }
        for listener in listeners {
            shared.acceptors.set(shared.acceptors.get() + 1);
            spawn(accept(Rc::clone(&shared), Rc::clone(&handler), listener));
        }
        let ended = || {
            let working = shared.acceptors.get() + shared.clients.get();
            shared.stopped.get() && working == 0
        };
        shared.changed.until(ended).await;
    }

    /// Serves a single client that is connected, until it leaves or the server is stopped.
    pub async fn serve_client(self, handler: Rc<dyn Handler>, stream: Stream) {
        let shared = self.shared;
        begin(&shared, &handler, stream);
        shared.changed.until(|| shared.clients.get() == 0).await;
    }
}

/// Accepts clients until the server stops.
async fn accept(shared: Rc<Shared>, handler: Rc<dyn Handler>, listener: Listener) {
    // Long enough for a process that ran out of descriptors not to spin, short enough not to
    // matter.
    const RETRY: Duration = Duration::from_millis(100);
    let changed = &shared.changed;
    loop {
        let room = || shared.clients.get() < shared.options.clients_max;
        changed.until(|| shared.stopped.get() || room()).await;
        let stopped = pin!(changed.until(|| shared.stopped.get()));
        let accepted = pin!(listener.accept());
        match select(stopped, accepted).await {
            Either::Left(_) => break,
            Either::Right((Ok(stream), _)) => begin(&shared, &handler, stream),
            Either::Right((Err(error), _)) => {
                let reason = error.to_string();
                shared.notify(&ServerEvent::AcceptFailed { reason });
                sleep(RETRY).await;
            }
        }
    }
    shared.acceptors.set(shared.acceptors.get() - 1);
    changed.notify();
}

/// Starts the session of a client.
fn begin(shared: &Rc<Shared>, handler: &Rc<dyn Handler>, stream: Stream) {
    shared.clients.set(shared.clients.get() + 1);
    let client = shared.clients_ever.get() + 1;
    shared.clients_ever.set(client);
    shared.notify(&ServerEvent::Connected { client });
    let session = Session::new(Rc::clone(shared), client, stream);
    shared.sessions.borrow_mut().push(Rc::downgrade(&session));
    let (shared, handler) = (Rc::clone(shared), Rc::clone(handler));
    spawn(async move {
        let reason = session.run(&*handler).await.err();
        shared.notify(&ServerEvent::Disconnected { client, reason });
        shared.clients.set(shared.clients.get() - 1);
        shared.changed.notify();
    });
}
