//! The client: requests that return futures, many in flight, answered in any order.
//!
//! A [`Client`] belongs to the queue that it was connected on. One task sends what is queued, all
//! of it at once; one task takes replies apart. The server is not trusted: cookies, ranges, the
//! rules of chunks and every length are checked, and a server that breaks the protocol loses the
//! connection, which fails all requests in flight. Requests that the export does not offer or that
//! lie beyond its end fail without being sent.
//!
//! Left out: reconnecting.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use cowslip_queue::{BufMut, Completer, IoVec, Pending, Stream, pending, spawn};

use crate::event::Event;
use crate::export::{Durability, ExportError, Space, ZeroOptions};
use crate::inbox::Ended;
use crate::outbox::Outbox;
use crate::protocol::handshake::BlockSizes;
use crate::protocol::transmission::{Request, StatusDescriptor};
use crate::protocol::{
    Command, CommandFlags, Malformed, OptionReplyCode, PAYLOAD_BYTES_MAX, TransmissionFlags,
};
use crate::tls::ClientTls;
use crate::wire::Wire;

mod negotiate;
mod replies;

use replies::{PendingReply, Slots};

/// Why a connection or a request failed.
#[derive(Clone, Debug)]
pub enum ClientError {
    /// The connection failed.
    Io(Arc<io::Error>),
    /// The server broke the protocol.
    Protocol(Malformed),
    /// The server refused an option of the handshake.
    Refused {
        /// The server's reply to the option.
        reply: OptionReplyCode,
        /// Its words, or nothing.
        message: String,
    },
    /// TLS is unavailable, or not with this server: why, in whole lines.
    Tls(String),
    /// The server, or this client in its stead, refused the request.
    Request(ExportError),
    /// The connection was ended by this side.
    Disconnected,
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("the server closed the connection")
            }
            ClientError::Io(error) => f.write_str(&cowslip_block::error::system_words(error)),
            ClientError::Protocol(malformed) => write!(f, "NBD protocol: {malformed}"),
            ClientError::Refused { reply, message } if message.is_empty() => {
                write!(f, "the server refused: {reply:?}")
            }
            ClientError::Refused { message, .. } => write!(f, "the server refused: {message}"),
            ClientError::Tls(why) => f.write_str(why),
            ClientError::Request(error) => write!(f, "{error} ({:?})", error.code),
            ClientError::Disconnected => f.write_str("the connection was ended"),
        }
    }
}

impl std::error::Error for ClientError {}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> ClientError {
        ClientError::Io(Arc::new(error))
    }
}

impl From<Malformed> for ClientError {
    fn from(malformed: Malformed) -> ClientError {
        ClientError::Protocol(malformed)
    }
}

impl From<Ended> for ClientError {
    fn from(ended: Ended) -> ClientError {
        io::Error::from(ended).into()
    }
}

/// Requests of a client for the handshake. The server may lack any of it but TLS.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// The export; empty for the default one.
    pub export: String,
    /// Structured replies: reads of holes without their zeroes, errors with messages.
    pub structured_replies: bool,
    /// Extended headers, which are structured replies with lengths of 64 bits; needs those.
    pub extended_headers: bool,
    /// `block_status`; needs structured replies.
    pub block_status: bool,
    /// Speak over TLS, or not at all. `None` is a connection in the clear.
    pub tls: Option<ClientTls>,
}

impl ConnectOptions {
    /// All there is but TLS, on the named export.
    pub fn new(export: impl Into<String>) -> ConnectOptions {
        ConnectOptions {
            export: export.into(),
            structured_replies: true,
            extended_headers: true,
            block_status: true,
            tls: None,
        }
    }
}

/// A server's description of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportDescription {
    /// The name by which clients choose the export.
    pub name: String,
    /// Its description, or nothing.
    pub description: String,
    /// Its size in bytes.
    pub size: u64,
    /// Abilities of the export.
    pub flags: TransmissionFlags,
    /// The sizes of requests that it takes, if it said so.
    pub block_sizes: Option<BlockSizes>,
    /// Requests without payload may be longer than 32 bits can say (extended headers).
    pub extended_headers: bool,
    /// Its metadata contexts: when listing all that it has, else those that are selected.
    pub contexts: Vec<String>,
}

/// A request that waits to be sent.
struct Outgoing {
    request: Request,
    payload: Option<IoVec>,
}

/// Format of the headers, agreed on with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Headers {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests, simple and structured replies.
    Structured,
    /// Extended requests and replies, with lengths of 64 bits.
    Extended,
}

/// How far the connection has come.
enum State {
    Open,
    /// `DISC` is to be sent once all that is queued has been.
    Leaving,
    /// The connection has ended: no request will be sent or answered any more.
    Ended(ClientError),
}

struct Shared {
    wire: Wire,
    export: ExportDescription,
    /// The identifier of `base:allocation`, if it was selected.
    status_context: Option<u32>,
    headers: Headers,
    state: RefCell<State>,
    outgoing: RefCell<VecDeque<Outgoing>>,
    /// Event: there is something to send, or the state has changed.
    sending: Event,
    /// Event: a task has ended.
    ended: Event,
    tasks: Cell<usize>,
    slots: RefCell<Slots>,
}

/// A connection to an export. Ends when dropped; [`Client::disconnect`] ends it politely.
pub struct Client {
    shared: Rc<Shared>,
}

/// The result of a request, to be awaited; the request is sent in any case.
pub type ClientPending<T> = Pending<Result<T, ClientError>>;

impl Client {
    /// Greets the server at the other end of `stream` and chooses an export.
    ///
    /// # Errors
    /// If there is no such export, the connection fails or the server breaks the protocol.
    pub async fn connect(stream: Stream, options: &ConnectOptions) -> Result<Client, ClientError> {
        let negotiated = negotiate::choose(stream.clone(), options).await;
        let (agreed, inbox) = match negotiated {
            Ok(negotiated) => negotiated,
            Err(error) => {
                stream.shutdown();
                return Err(error);
            }
        };
        let shared = Rc::new(Shared {
            wire: inbox.wire().clone(),
            export: agreed.export,
            status_context: agreed.status_context,
            headers: agreed.headers,
            state: RefCell::new(State::Open),
            outgoing: RefCell::default(),
            sending: Event::default(),
            ended: Event::default(),
            tasks: Cell::new(2),
            slots: RefCell::default(),
        });
        spawn(send_requests(Rc::clone(&shared)));
        spawn(replies::receive(Rc::clone(&shared), inbox));
        Ok(Client { shared })
    }

    /// Lists the exports of the server at the other end of `stream`, with all that it says about
    /// them, and takes leave. With `tls` it speaks to the server over TLS, or not at all.
    ///
    /// # Errors
    /// If the server does not list its exports, the connection fails or the server breaks the
    /// protocol.
    pub async fn list(
        stream: Stream,
        tls: Option<&ClientTls>,
    ) -> Result<Vec<ExportDescription>, ClientError> {
        let listed = negotiate::list(stream.clone(), tls).await;
        stream.shutdown();
        listed
    }

    /// The description of the export that was chosen.
    pub fn export(&self) -> &ExportDescription {
        &self.shared.export
    }

    /// The size of the export in bytes.
    pub fn size(&self) -> u64 {
        self.shared.export.size
    }

    /// Reads `buf.len()` bytes at `offset`; the buffer comes back filled.
    pub fn read(&self, offset: u64, buf: BufMut) -> ClientPending<BufMut> {
        let len = buf.len() as u64;
        self.start(Command::Read, CommandFlags::empty(), (offset, len), |to| {
            (PendingReply::read(buf, to), None)
        })
    }

    /// Writes a buffer or a scatter list at `offset`, as one request.
    pub fn write(
        &self,
        offset: u64,
        data: impl Into<IoVec>,
        durability: Durability,
    ) -> ClientPending<()> {
        let data = data.into();
        let range = (offset, data.len() as u64);
        self.start(Command::Write, fua(durability), range, |to| {
            (PendingReply::Done(to), Some(data))
        })
    }

    /// Makes durable all writes that had completed when it was called.
    pub fn flush(&self) -> ClientPending<()> {
        self.start(Command::Flush, CommandFlags::empty(), (0, 0), |to| {
            (PendingReply::Done(to), None)
        })
    }

    /// Gives a range up.
    pub fn trim(&self, offset: u64, len: u64, durability: Durability) -> ClientPending<()> {
        self.start(Command::Trim, fua(durability), (offset, len), |to| {
            (PendingReply::Done(to), None)
        })
    }

    /// Makes a range read as zeroes.
    pub fn write_zeroes(&self, offset: u64, len: u64, options: ZeroOptions) -> ClientPending<()> {
        let flags = fua(options.durability)
            .with_if(CommandFlags::NO_HOLE, options.space == Space::Keep)
            .with_if(CommandFlags::FAST_ZERO, options.fast_only);
        self.start(Command::WriteZeroes, flags, (offset, len), |to| {
            (PendingReply::Done(to), None)
        })
    }

    /// Makes the server load a range into its cache.
    pub fn cache(&self, offset: u64, len: u64) -> ClientPending<()> {
        self.start(Command::Cache, CommandFlags::empty(), (offset, len), |to| {
            (PendingReply::Done(to), None)
        })
    }

    /// States of consecutive runs from `offset` on, at least one; they may cover less than `len`.
    pub fn block_status(&self, offset: u64, len: u64) -> ClientPending<Vec<StatusDescriptor>> {
        let range = (offset, len);
        self.start(Command::BlockStatus, CommandFlags::empty(), range, |to| {
            (PendingReply::status(to), None)
        })
    }

    /// Takes leave: sends what is queued, then `DISC`, and waits until the server has answered what
    /// was asked and closed the connection.
    ///
    /// # Errors
    /// If the connection had failed before, or fails now.
    pub async fn disconnect(self) -> Result<(), ClientError> {
        let shared = Rc::clone(&self.shared);
        if matches!(&*shared.state.borrow(), State::Open) {
            shared.state.replace(State::Leaving);
        }
        shared.sending.notify();
        shared.ended.until(|| shared.tasks.get() == 0).await;
        match &*shared.state.borrow() {
            State::Ended(ClientError::Disconnected) => Ok(()),
            State::Ended(error) => Err(error.clone()),
            State::Open | State::Leaving => unreachable!("both tasks have ended"),
        }
    }

    /// Queues a request, or refuses it. `parts` makes what waits for the reply, and the payload.
    fn start<T>(
        &self,
        command: Command,
        flags: CommandFlags,
        (offset, len): (u64, u64),
        parts: impl FnOnce(Completer<Result<T, ClientError>>) -> (PendingReply, Option<IoVec>),
    ) -> ClientPending<T> {
        let shared = &*self.shared;
        let request = match shared.validate(command, flags, offset, len) {
            Ok(request) => request,
            Err(error) => return Pending::ready(Err(error)),
        };
        let (completer, waiting) = pending();
        let (wanted, payload) = parts(completer);
        let request = shared.slots.borrow_mut().insert(request, wanted);
        let mut outgoing = shared.outgoing.borrow_mut();
        outgoing.push_back(Outgoing { request, payload });
        if outgoing.len() == 1 {
            shared.sending.notify();
        }
        waiting
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if matches!(&*self.shared.state.borrow(), State::Open) {
            self.shared.end(ClientError::Disconnected);
        }
    }
}

fn fua(durability: Durability) -> CommandFlags {
    CommandFlags::empty().with_if(CommandFlags::FUA, durability == Durability::Durable)
}

impl Shared {
    /// Checks that the export offers what is asked for.
    fn validate(
        &self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        len: u64,
    ) -> Result<Request, ClientError> {
        use crate::protocol::ErrorCode::{Inval, NotSup, Overflow, Perm};
        let refuse = |code, message: &str| {
            let error = ExportError::new(code, message);
            Err(ClientError::Request(error))
        };
        match &*self.state.borrow() {
            State::Open => {}
            State::Leaving => return Err(ClientError::Disconnected),
            State::Ended(error) => return Err(error.clone()),
        }
        let offered = self.export.flags;
        let writes = matches!(
            command,
            Command::Write | Command::WriteZeroes | Command::Trim
        );
        if writes && offered.contains(TransmissionFlags::READ_ONLY) {
            return refuse(Perm, "the export is read-only");
        }
        let needed = needed_flags(command, flags);
        if !offered.contains(needed) {
            return refuse(NotSup, "the server does not offer this");
        }
        if command == Command::BlockStatus && self.status_context.is_none() {
            return refuse(NotSup, "the server does not offer block status");
        }
        let longest = match (command, self.headers) {
            (Command::Read | Command::Write, _) => u64::from(PAYLOAD_BYTES_MAX),
            (_, Headers::Extended) => u64::MAX,
            (_, Headers::Simple | Headers::Structured) => u64::from(u32::MAX),
        };
        if len > longest {
            return refuse(Overflow, "longer than the protocol allows");
        }
        let end = offset.checked_add(len);
        if end.is_none_or(|end| end > self.export.size) {
            return refuse(Inval, "beyond the end of the export");
        }
        if len == 0 && command != Command::Flush {
            return refuse(Inval, "an empty range");
        }
        let has_payload = command == Command::Write && self.headers == Headers::Extended;
        Ok(Request {
            flags: flags.with_if(CommandFlags::PAYLOAD_LEN, has_payload),
            command,
            cookie: 0,
            offset,
            len,
        })
    }

    /// Ends the connection and fails all that is in flight. The first reason stands.
    fn end(&self, error: ClientError) {
        let before = std::mem::replace(&mut *self.state.borrow_mut(), State::Open);
        let reason = match before {
            State::Ended(first) => first,
            State::Leaving | State::Open => error,
        };
        self.state.replace(State::Ended(reason.clone()));
        self.wire.shutdown();
        self.outgoing.borrow_mut().clear();
        let waiting = self.slots.borrow_mut().drain();
        for wanted in waiting {
            wanted.fail(reason.clone());
        }
        self.sending.notify();
    }

    fn push(&self, outbox: &mut Outbox, request: &Request) {
        match self.headers {
            Headers::Extended => outbox.push(&request.encode_extended()),
            Headers::Simple | Headers::Structured => outbox.push(&request.encode()),
        }
    }

    /// Called by each of the two tasks as its last act.
    fn task_ended(&self) {
        self.tasks.set(self.tasks.get() - 1);
        self.ended.notify();
    }
}

/// Returns the flags that an export must offer for a request to be allowed.
fn needed_flags(command: Command, flags: CommandFlags) -> TransmissionFlags {
    let for_command = match command {
        Command::Flush => TransmissionFlags::SEND_FLUSH,
        Command::Trim => TransmissionFlags::SEND_TRIM,
        Command::WriteZeroes => TransmissionFlags::SEND_WRITE_ZEROES,
        Command::Cache => TransmissionFlags::SEND_CACHE,
        _ => TransmissionFlags::empty(),
    };
    for_command
        .with_if(
            TransmissionFlags::SEND_FUA,
            flags.contains(CommandFlags::FUA),
        )
        .with_if(
            TransmissionFlags::SEND_FAST_ZERO,
            flags.contains(CommandFlags::FAST_ZERO),
        )
}

/// Sends requests as they come, all that are queued at once, and at last the leave.
async fn send_requests(shared: Rc<Shared>) {
    // Two buffers each stay well below what the system gathers.
    const REQUESTS_SENT_AT_ONCE: usize = 256;
    let mut outbox = Outbox::default();
    loop {
        let ready = || {
            !shared.outgoing.borrow().is_empty() || !matches!(&*shared.state.borrow(), State::Open)
        };
        shared.sending.until(ready).await;
        let mut count = 0;
        while count < REQUESTS_SENT_AT_ONCE {
            let Some(outgoing) = shared.outgoing.borrow_mut().pop_front() else {
                break;
            };
            count += 1;
            shared.push(&mut outbox, &outgoing.request);
            if let Some(payload) = outgoing.payload {
                outbox.push_payload(payload);
            }
        }
        if count == 0 {
            break;
        }
        if let Err(error) = shared.wire.write_all(outbox.take()).await {
            shared.end(error.into());
        }
    }
    if matches!(&*shared.state.borrow(), State::Leaving) {
        shared.push(&mut outbox, &Request::disconnect());
        match shared.wire.write_all(outbox.take()).await {
            Ok(()) => shared.wire.farewell().await,
            Err(error) => shared.end(error.into()),
        }
    }
    shared.task_ended();
}
