//! The transmission phase as a server: requests in, replies out, in any order.
//!
//! One task reads requests, validates them and starts each as a task of its own; one task sends the
//! replies, all that are ready at once. What a client can make us hold is bounded by the requests
//! and bytes in flight: both count until the reply has been sent, and beyond them the connection is
//! not read. A request that was started runs to its end and is counted out, whatever becomes of its
//! client.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use cowslip_queue::{IoVec, spawn};

use super::handshake::{Chosen, Context, ReplyStyle};
use super::{ServerEvent, Shared, describe};
use crate::event::{Event, First, first};
use crate::export::{Access, Durability, ExportError, Space, StatusExtent, ZeroOptions};
use crate::inbox::{Ended, Inbox};
use crate::outbox::Outbox;
use crate::protocol::transmission::{
    BlockStatus, ChunkHeader, EXTENDED_REQUEST_BYTES, ErrorChunk, ExtendedChunkHeader,
    OFFSET_DATA_BYTES, OffsetHole, REQUEST_BYTES, Request, StatusDescriptor, StatusQuery,
    encode_simple_reply, last_chunk,
};
use crate::protocol::{
    ChunkCode, ChunkFlags, Command, CommandFlags, ErrorCode, Malformed, PAYLOAD_BYTES_MAX,
    length_u32,
};
use crate::slab::Slab;
use crate::wire::Wire;

/// Extents in one reply to `BLOCK_STATUS`: 64 KiB of descriptors.
const EXTENTS_MAX: usize = 8192;
/// Payload of a request that names contexts: four thousand of them.
const QUERY_BYTES_MAX: u64 = 16 << 10;
/// Replies that are sent with one call; two buffers each stay well below what the system gathers.
const REPLIES_SENT_AT_ONCE: usize = 256;
/// Reads from this length on are looked through for being all zeroes, which are sent as a hole.
const HOLE_BYTES_MIN: usize = 4096;

/// Result of a request.
enum Outcome {
    Done,
    Data(IoVec),
    Status(Vec<BlockStatus>),
    Failed(ExportError),
}

/// Payload behind the header of a valid request.
enum Payload {
    Nothing,
    Data(IoVec),
    /// Contexts of a request for status.
    Contexts(Vec<Context>),
}

/// A reply that waits to be sent.
struct Reply {
    request: Request,
    outcome: Outcome,
}

/// A connection whose client has chosen an export.
pub(super) struct Connection {
    shared: Arc<Shared>,
    number: u64,
    wire: Wire,
    chosen: Chosen,
    /// Requests started or refused whose replies are not sent yet. The reader adds, the sender
    /// subtracts.
    requests_in_flight: Cell<usize>,
    /// Bytes of their payload.
    bytes_in_flight: Cell<usize>,
    /// Event: one of the two has gone down.
    room: Event,
    replies: RefCell<VecDeque<Reply>>,
    /// Event: there are replies to send, or there will be none any more.
    sending: Event,
    /// Whether no further requests will be read. Set once, by the reader.
    read_all: Cell<bool>,
    /// Why nothing can be sent any more. Set once, by the sender.
    failed: RefCell<Option<String>>,
    memory: RefCell<Slab>,
}

impl Connection {
    pub(super) fn new(shared: &Arc<Shared>, number: u64, wire: Wire, chosen: Chosen) -> Connection {
        Connection {
            shared: Arc::clone(shared),
            number,
            wire,
            chosen,
            requests_in_flight: Cell::new(0),
            bytes_in_flight: Cell::new(0),
            room: Event::default(),
            replies: RefCell::default(),
            sending: Event::default(),
            read_all: Cell::new(false),
            failed: RefCell::default(),
            memory: RefCell::default(),
        }
    }

    /// Serves the client until it leaves and all its requests are done; the error is for the log.
    pub(super) async fn serve(self, inbox: Inbox) -> Result<(), String> {
        let connection = Rc::new(self);
        spawn(send_replies(Rc::clone(&connection)));
        let outcome = read_requests(&connection, inbox).await;
        connection.read_all.set(true);
        connection.sending.notify();
        let done = || connection.requests_in_flight.get() == 0;
        connection.room.until(done).await;
        let handed_over = connection.hand_over().await;
        let outcome = outcome.and(handed_over);
        match connection.failed.take() {
            Some(reason) => Err(reason),
            None => outcome,
        }
    }

    /// Hands what the client has written to the system: a client that has left, `nbdcopy` say, may
    /// have flushed nothing, and the writes that were answered outlive this process.
    async fn hand_over(&self) -> Result<(), String> {
        if self.chosen.info.access == Access::ReadOnly {
            return Ok(());
        }
        let handed_over = self.chosen.offered.export.disk.write_back().await;
        handed_over.map_err(|error| error.to_string())
    }

    /// Counts a request in, once there is room for it. Returns `false` if the server stops instead.
    async fn admit(&self, request: &Request) -> bool {
        let options = &self.shared.options;
        let cost = payload_bytes(request);
        let has_room = || {
            let requests = self.requests_in_flight.get();
            requests == 0
                || requests < options.requests_in_flight_max
                    && self.bytes_in_flight.get() + cost <= options.bytes_in_flight_max
        };
        if !has_room() {
            let stopped = self.shared.control.until_unread(&self.chosen.offered);
            if let First::Left(()) = first(stopped, self.room.until(has_room)).await {
                return false;
            }
        }
        self.requests_in_flight
            .set(self.requests_in_flight.get() + 1);
        self.bytes_in_flight.set(self.bytes_in_flight.get() + cost);
        true
    }

    /// Counts requests out whose replies were sent, or never will be.
    fn release(&self, requests: usize, bytes: usize) {
        self.requests_in_flight
            .set(self.requests_in_flight.get() - requests);
        self.bytes_in_flight.set(self.bytes_in_flight.get() - bytes);
        self.room.notify();
    }

    fn reply(&self, request: Request, outcome: Outcome) {
        if let Outcome::Failed(error) = &outcome {
            self.shared.notify(|| ServerEvent::RequestFailed {
                connection: self.number,
                request,
                error: error.clone(),
            });
        }
        let mut replies = self.replies.borrow_mut();
        replies.push_back(Reply { request, outcome });
        if replies.len() == 1 {
            self.sending.notify();
        }
    }

    /// Checks what the export may rely on. One flat list of refusals.
    fn validate(&self, request: &Request) -> Result<(), ExportError> {
        let info = &self.chosen.info;
        let refuse = |code, message: &str| Err(ExportError::new(code, message));
        let Some(known) = known_flags(request.command, self.chosen.replies) else {
            return refuse(ErrorCode::Inval, "unknown command");
        };
        if request.flags.has_other_than(known) {
            return refuse(ErrorCode::Inval, "a flag that the command does not have");
        }
        if request.command == Command::Flush {
            return Ok(());
        }
        if request.command == Command::BlockStatus && self.chosen.contexts.is_empty() {
            return refuse(ErrorCode::Inval, "no metadata context was selected");
        }
        if request.command == Command::BlockStatus && self.payload_len(request).is_some() {
            // Its range is in its payload.
            let most = 8 + 4 * self.chosen.contexts.len() as u64;
            return match request.len <= most.min(QUERY_BYTES_MAX) {
                true => Ok(()),
                false => refuse(ErrorCode::Inval, "more contexts than were selected"),
            };
        }
        let writes = is_write(request.command);
        if writes && info.access == Access::ReadOnly {
            return refuse(ErrorCode::Perm, "the export is read-only");
        }
        let end = request.offset.checked_add(request.len);
        if end.is_none_or(|end| end > info.size) {
            let code = match request.command {
                Command::Write | Command::WriteZeroes => ErrorCode::NoSpc,
                _ => ErrorCode::Inval,
            };
            return refuse(code, "beyond the end of the export");
        }
        let minimum = u64::from(info.block_sizes.minimum);
        if !request.offset.is_multiple_of(minimum) || !request.len.is_multiple_of(minimum) {
            return refuse(
                ErrorCode::Inval,
                "not aligned to the export's minimum block size",
            );
        }
        let carries_data = matches!(request.command, Command::Read | Command::Write);
        if carries_data && request.len > u64::from(info.block_sizes.maximum) {
            return refuse(
                ErrorCode::Inval,
                "longer than the export's maximum block size",
            );
        }
        if request.command == Command::BlockStatus && request.len == 0 {
            return refuse(ErrorCode::Inval, "the status of nothing was asked for");
        }
        Ok(())
    }

    /// Bytes of payload that follow the request's header, if there is any.
    fn payload_len(&self, request: &Request) -> Option<u64> {
        // A write has one in any case: QEMU's client (10.0) does not say so.
        let has_payload = request.command == Command::Write
            || self.chosen.replies == ReplyStyle::Extended
                && request.flags.contains(CommandFlags::PAYLOAD_LEN);
        has_payload.then_some(request.len)
    }

    /// A request for the status of some of the contexts: what it would be without its payload, and
    /// which they are.
    fn narrowed(
        &self,
        request: &Request,
        payload: &[u8],
    ) -> Result<(Request, Vec<Context>), ExportError> {
        let invalid = |why: &str| ExportError::new(ErrorCode::Inval, why);
        let query = StatusQuery::decode(payload).map_err(|malformed| invalid(malformed.0))?;
        let mut contexts: Vec<Context> = Vec::new();
        for id in query.context_ids {
            let mut selected = self.chosen.contexts.iter();
            let context = selected.find(|context| context.id() == id);
            let context = context.ok_or_else(|| invalid("a context that was not selected"))?;
            if contexts.contains(context) {
                return Err(invalid("a context twice"));
            }
            contexts.push(*context);
        }
        if contexts.is_empty() {
            return Err(invalid("the status of no context was asked for"));
        }
        let mut narrowed = *request;
        narrowed.flags.0 &= !CommandFlags::PAYLOAD_LEN.0;
        narrowed.len = query.len;
        self.validate(&narrowed)?;
        Ok((narrowed, contexts))
    }

    /// Performs a valid request on the export.
    async fn perform(&self, request: &Request, payload: Payload) -> Outcome {
        match self.call_export(request, payload).await {
            Ok(outcome) => outcome,
            Err(mut error) => {
                // The one place where the protocol has this code.
                let may_say_so = request.flags.contains(CommandFlags::FAST_ZERO);
                if error.code == ErrorCode::NotSup && !may_say_so {
                    error.code = ErrorCode::Inval;
                }
                Outcome::Failed(error)
            }
        }
    }

    async fn call_export(
        &self,
        request: &Request,
        payload: Payload,
    ) -> Result<Outcome, ExportError> {
        let export = &self.chosen.offered.export;
        let disk = &export.disk;
        let (offset, len) = (request.offset, request.len);
        let durability = match request.flags.contains(CommandFlags::FUA) {
            true => Durability::Durable,
            false => Durability::Cached,
        };
        if len == 0 && request.command != Command::Flush {
            return Ok(Outcome::Done);
        }
        match request.command {
            Command::Read => {
                let buf = self.memory.borrow_mut().take(payload_bytes(request));
                let data = disk.read(offset, buf.into()).await?;
                assert_eq!(data.len() as u64, len, "a disk fills the whole buffer");
                return Ok(Outcome::Data(data.freeze()));
            }
            Command::Write => {
                let Payload::Data(data) = payload else {
                    unreachable!("a valid write has its payload");
                };
                disk.write(offset, data, durability).await?;
            }
            Command::Flush => disk.flush().await?,
            Command::Trim => {
                disk.discard(offset, len).await?;
                if durability == Durability::Durable {
                    disk.flush().await?;
                }
            }
            // A hint that costs nothing to ignore.
            Command::Cache => {}
            Command::WriteZeroes => {
                let options = ZeroOptions {
                    space: match request.flags.contains(CommandFlags::NO_HOLE) {
                        true => Space::Keep,
                        false => Space::Release,
                    },
                    durability,
                    fast_only: request.flags.contains(CommandFlags::FAST_ZERO),
                };
                disk.zero(offset, len, options).await?;
            }
            Command::BlockStatus => {
                let max = match request.flags.contains(CommandFlags::REQ_ONE) {
                    true => 1,
                    false => EXTENTS_MAX,
                };
                let contexts = match &payload {
                    Payload::Contexts(contexts) => contexts,
                    Payload::Nothing | Payload::Data(_) => &self.chosen.contexts,
                };
                let mut statuses = Vec::new();
                for &context in contexts {
                    let extents = export.block_status(context.index, (offset, len), max);
                    statuses.push(status(context, &extents.await?, len, max)?);
                }
                return Ok(Outcome::Status(statuses));
            }
            Command::Disconnect | Command::Resize | Command::Unknown(_) => {
                unreachable!("validated before")
            }
        }
        Ok(Outcome::Done)
    }

    fn encode(&self, outbox: &mut Outbox, reply: Reply) {
        let (style, request) = (self.chosen.replies, &reply.request);
        let cookie = request.cookie;
        match (style, reply.outcome) {
            (ReplyStyle::Simple, Outcome::Data(data)) => {
                outbox.push(&encode_simple_reply(cookie, None));
                outbox.push_payload(data);
            }
            (ReplyStyle::Simple, Outcome::Failed(error)) => {
                outbox.push(&encode_simple_reply(cookie, Some(error.code)));
            }
            (_, Outcome::Data(data)) => self.encode_data(outbox, request, data),
            (_, Outcome::Failed(error)) => {
                let payload = ErrorChunk {
                    error: error.code,
                    message: error.message,
                    offset: None,
                }
                .encode();
                let chunk = last_chunk(ChunkCode::Error, cookie, payload.len());
                self.push_chunk(outbox, request, chunk);
                outbox.push(&payload);
            }
            (ReplyStyle::Extended, Outcome::Done) => {
                self.push_chunk(outbox, request, last_chunk(ChunkCode::None, cookie, 0));
            }
            (ReplyStyle::Structured, Outcome::Done) if request.command == Command::Read => {
                self.push_chunk(outbox, request, last_chunk(ChunkCode::None, cookie, 0));
            }
            (_, Outcome::Done) => outbox.push(&encode_simple_reply(cookie, None)),
            (style, Outcome::Status(statuses)) => {
                let last = statuses.len() - 1;
                for (nth, status) in statuses.iter().enumerate() {
                    let (code, payload) = match style {
                        ReplyStyle::Extended => {
                            (ChunkCode::ExtendedStatus, status.encode_extended())
                        }
                        _ => (ChunkCode::BlockStatus, status.encode()),
                    };
                    let mut chunk = last_chunk(code, cookie, payload.len());
                    if nth < last {
                        chunk.flags = ChunkFlags::empty();
                    }
                    self.push_chunk(outbox, request, chunk);
                    outbox.push(&payload);
                }
            }
        }
    }

    /// The data of a read as a single chunk.
    fn encode_data(&self, outbox: &mut Outbox, request: &Request, data: IoVec) {
        let may_be_hole = !request.flags.contains(CommandFlags::DF);
        if may_be_hole && data.len() >= HOLE_BYTES_MIN && data.is_zero() {
            let hole = OffsetHole {
                offset: request.offset,
                len: length_u32(data.len()),
            }
            .encode();
            let chunk = last_chunk(ChunkCode::OffsetHole, request.cookie, hole.len());
            self.push_chunk(outbox, request, chunk);
            outbox.push(&hole);
            return;
        }
        let len = OFFSET_DATA_BYTES + data.len();
        let chunk = last_chunk(ChunkCode::OffsetData, request.cookie, len);
        self.push_chunk(outbox, request, chunk);
        outbox.push(&request.offset.to_be_bytes());
        outbox.push_payload(data);
    }

    /// The header of a chunk of the reply to a request.
    fn push_chunk(&self, outbox: &mut Outbox, request: &Request, chunk: ChunkHeader) {
        let offset = request.offset;
        match self.chosen.replies {
            ReplyStyle::Extended => outbox.push(&ExtendedChunkHeader { chunk, offset }.encode()),
            ReplyStyle::Simple | ReplyStyle::Structured => outbox.push(&chunk.encode()),
        }
    }
}

/// Returns the status in a context: extents cut to the range of `len` bytes, equal neighbours
/// joined.
fn status(
    context: Context,
    extents: &[StatusExtent],
    len: u64,
    max: usize,
) -> Result<BlockStatus, ExportError> {
    let mut left = len;
    let mut descriptors: Vec<StatusDescriptor> = Vec::new();
    for extent in extents {
        let here = extent.len.min(left);
        if here == 0 {
            break;
        }
        let flags = extent.flags;
        let full = descriptors.len() == max;
        match descriptors.last_mut() {
            Some(last) if last.flags == flags => last.len += here,
            _ if full => break,
            _ => descriptors.push(StatusDescriptor { len: here, flags }),
        }
        left -= here;
    }
    if descriptors.is_empty() {
        return Err(ExportError::new(
            ErrorCode::Io,
            "the export does not know its status",
        ));
    }
    Ok(BlockStatus {
        context_id: context.id(),
        descriptors,
    })
}

/// Memory that a request occupies for what is read or written.
fn payload_bytes(request: &Request) -> usize {
    match request.command {
        // Longer requests are refused and need none.
        Command::Read | Command::Write if request.len <= u64::from(PAYLOAD_BYTES_MAX) => {
            usize::try_from(request.len).expect("payload is at most 32 MiB")
        }
        _ => 0,
    }
}

fn is_write(command: Command) -> bool {
    matches!(
        command,
        Command::Write | Command::WriteZeroes | Command::Trim
    )
}

/// The flags that a command has, or `None` if the command is unknown. `FUA` is allowed everywhere.
fn known_flags(command: Command, replies: ReplyStyle) -> Option<CommandFlags> {
    let fua = CommandFlags::FUA;
    let payload = fua.with_if(CommandFlags::PAYLOAD_LEN, replies == ReplyStyle::Extended);
    match command {
        Command::Write => Some(payload),
        Command::Flush | Command::Trim | Command::Cache => Some(fua),
        Command::Read => Some(fua.with_if(CommandFlags::DF, replies != ReplyStyle::Simple)),
        Command::WriteZeroes => Some(
            fua.with(CommandFlags::NO_HOLE)
                .with(CommandFlags::FAST_ZERO),
        ),
        Command::BlockStatus => Some(payload.with(CommandFlags::REQ_ONE)),
        Command::Disconnect | Command::Resize | Command::Unknown(_) => None,
    }
}

/// Reads requests and starts them until the client leaves, breaks the protocol or the server stops.
async fn read_requests(connection: &Rc<Connection>, mut inbox: Inbox) -> Result<(), String> {
    let (header_bytes, decode): (_, fn(&[u8]) -> _) = match connection.chosen.replies {
        ReplyStyle::Extended => (EXTENDED_REQUEST_BYTES, Request::decode_extended),
        ReplyStyle::Simple | ReplyStyle::Structured => (REQUEST_BYTES, Request::decode),
    };
    loop {
        while inbox.arrived().len() < header_bytes {
            let at_a_boundary = inbox.arrived().is_empty();
            let control = &connection.shared.control;
            let stopped = control.until_unread(&connection.chosen.offered);
            match first(stopped, inbox.receive()).await {
                First::Left(()) => return Err(STOPPED.to_owned()),
                First::Right(Ok(())) => {}
                First::Right(Err(Ended::Closed)) if at_a_boundary => {
                    return Err("the client closed the connection".to_owned());
                }
                First::Right(Err(ended)) => return Err(describe(&ended.into())),
            }
        }
        if connection.failed.borrow().is_some() {
            // Received bytes have no reader any more.
            return Ok(());
        }
        let request = decode(&inbox.arrived()[..header_bytes])
            .map_err(|malformed: Malformed| malformed.to_string())?;
        inbox.consume(header_bytes);
        if request.command == Command::Disconnect {
            return Ok(());
        }
        let payload = connection.payload_len(&request);
        if payload.is_some_and(|len| len > u64::from(PAYLOAD_BYTES_MAX)) {
            let (command, len) = (request.command, request.len);
            return Err(format!(
                "the client sent a payload of {len} bytes ({command:?})"
            ));
        }
        if !connection.admit(&request).await {
            return Err(STOPPED.to_owned());
        }
        if let Err(reason) = start(connection, &mut inbox, request).await {
            // The request was counted in, but there is nobody to reply to.
            connection.release(1, payload_bytes(&request));
            return Err(reason);
        }
    }
}

const STOPPED: &str = "the server is shutting down";

/// Takes the request's payload and starts it, or refuses it.
async fn start(
    connection: &Rc<Connection>,
    inbox: &mut Inbox,
    request: Request,
) -> Result<(), String> {
    let valid = match connection.validate(&request) {
        Ok(()) => receive_payload(connection, inbox, request).await?,
        Err(error) => {
            let len = connection.payload_len(&request).unwrap_or(0);
            let len = usize::try_from(len).expect("payload is at most 32 MiB");
            while_running(connection, inbox.skip(len)).await?;
            Err(error)
        }
    };
    let (request, payload) = match valid {
        Ok(valid) => valid,
        Err(error) => {
            connection.reply(request, Outcome::Failed(error));
            return Ok(());
        }
    };
    let connection = Rc::clone(connection);
    spawn(async move {
        let outcome = connection.perform(&request, payload).await;
        connection.reply(request, outcome);
    });
    Ok(())
}

/// The payload of a request that is valid without it, and what the request is with it.
async fn receive_payload(
    connection: &Rc<Connection>,
    inbox: &mut Inbox,
    request: Request,
) -> Result<Result<(Request, Payload), ExportError>, String> {
    let Some(len) = connection.payload_len(&request) else {
        return Ok(Ok((request, Payload::Nothing)));
    };
    if request.command == Command::BlockStatus {
        let len = usize::try_from(len).expect("a few identifiers");
        let query = while_running(connection, inbox.take(len)).await?;
        let narrowed = connection.narrowed(&request, &query);
        return Ok(narrowed.map(|(request, contexts)| (request, Payload::Contexts(contexts))));
    }
    let mut memory = connection.memory.borrow_mut().take(payload_bytes(&request));
    if !inbox.take_arrived(&mut memory) {
        memory = while_running(connection, inbox.take_into(memory)).await?;
    }
    Ok(Ok((request, Payload::Data(memory.freeze().into()))))
}

/// Waits for bytes of the client unless the server stops.
async fn while_running<T>(
    connection: &Connection,
    arrival: impl Future<Output = Result<T, Ended>>,
) -> Result<T, String> {
    let control = &connection.shared.control;
    match first(control.until_unread(&connection.chosen.offered), arrival).await {
        First::Left(()) => Err(STOPPED.to_owned()),
        First::Right(Ok(value)) => Ok(value),
        First::Right(Err(ended)) => Err(describe(&ended.into())),
    }
}

/// Sends replies as they become ready, all of them at once, until no more can come.
async fn send_replies(connection: Rc<Connection>) {
    let mut outbox = Outbox::default();
    loop {
        let ready = || {
            let done = connection.read_all.get() && connection.requests_in_flight.get() == 0;
            done || !connection.replies.borrow().is_empty()
        };
        connection.sending.until(ready).await;
        let (mut requests, mut bytes) = (0, 0);
        while requests < REPLIES_SENT_AT_ONCE {
            let Some(reply) = connection.replies.borrow_mut().pop_front() else {
                break;
            };
            requests += 1;
            bytes += payload_bytes(&reply.request);
            connection.encode(&mut outbox, reply);
        }
        if requests == 0 {
            return;
        }
        send(&connection, outbox.take()).await;
        connection.release(requests, bytes);
    }
}

/// Sends a batch, unless sending has failed before or the server gives up on its clients.
async fn send(connection: &Connection, batch: IoVec) {
    if connection.failed.borrow().is_some() {
        return;
    }
    let control = &connection.shared.control;
    let aborted = control.until_unsent(&connection.chosen.offered);
    let reason = match first(aborted, connection.wire.write_all(batch)).await {
        First::Right(Ok(())) => return,
        First::Right(Err(error)) => describe(&error),
        First::Left(()) => "the client did not take its replies in time".to_owned(),
    };
    connection.failed.replace(Some(reason));
    // Nothing can be answered any more, so nothing more is read: the reader sees the end.
    connection.wire.shutdown();
}
