//! Replies as a client gets them: matched with their requests, checked, and delivered.
//!
//! A request occupies a slot until its reply is complete. Its cookie is the slot's index and a
//! number that is never used twice, so that a reply to something that is not in flight is
//! recognised.

use std::rc::Rc;

use cowslip_queue::{BufMut, Completer};

use super::{ClientError, Headers, Shared, State};
use crate::export::ExportError;
use crate::inbox::Inbox;
use crate::protocol::transmission::{
    BlockStatus, ChunkHeader, EXTENDED_CHUNK_BYTES, ErrorChunk, ExtendedChunkHeader,
    OFFSET_DATA_BYTES, OFFSET_HOLE_BYTES, OffsetHole, ReplyHeader, Request, StatusDescriptor,
    decode_offset_data,
};
use crate::protocol::{ChunkCode, ChunkFlags, Command, ErrorCode, Malformed};

type To<T> = Completer<Result<T, ClientError>>;

/// The waiter of a reply, and the parts of it that have come so far.
pub(super) enum PendingReply {
    Read {
        /// Absent while a part of it is received.
        buf: Option<BufMut>,
        filled: Filled,
        to: To<BufMut>,
    },
    Done(To<()>),
    Status {
        descriptors: Vec<StatusDescriptor>,
        to: To<Vec<StatusDescriptor>>,
    },
}

impl PendingReply {
    pub(super) fn read(buf: BufMut, to: To<BufMut>) -> PendingReply {
        PendingReply::Read {
            buf: Some(buf),
            filled: Filled::default(),
            to,
        }
    }

    pub(super) fn status(to: To<Vec<StatusDescriptor>>) -> PendingReply {
        PendingReply::Status {
            descriptors: Vec::new(),
            to,
        }
    }

    pub(super) fn fail(self, error: ClientError) {
        match self {
            PendingReply::Read { to, .. } => to.complete(Err(error)),
            PendingReply::Done(to) => to.complete(Err(error)),
            PendingReply::Status { to, .. } => to.complete(Err(error)),
        }
    }

    /// Delivers the result, if it is complete.
    fn succeed(self) -> Result<(), Malformed> {
        match self {
            PendingReply::Read { buf, filled, to } => {
                let buf = buf.expect("nothing is being received");
                if !filled.covers(buf.len()) {
                    to.complete(Err(SHORT_READ.into()));
                    return Err(SHORT_READ);
                }
                to.complete(Ok(buf));
            }
            PendingReply::Done(to) => to.complete(Ok(())),
            PendingReply::Status { descriptors, to } => {
                if descriptors.is_empty() {
                    to.complete(Err(NO_STATUS.into()));
                    return Err(NO_STATUS);
                }
                to.complete(Ok(descriptors));
            }
        }
        Ok(())
    }
}

const SHORT_READ: Malformed = Malformed("a read was answered without all of its data");
const NO_STATUS: Malformed = Malformed("a block status was answered without any status");
const STRANGE_CHUNK: Malformed = Malformed("a chunk that does not fit the request");

/// The parts of a read that have arrived: disjoint, in order, neighbours joined.
#[derive(Default)]
pub(super) struct Filled {
    parts: Vec<(usize, usize)>,
}

impl Filled {
    /// Separate parts at a time. A server that needs more than this for one read is up to no good.
    const PARTS_MAX: usize = 65_536;

    /// Adds the part `[start, end)`, which must be new.
    fn add(&mut self, start: usize, end: usize) -> Result<(), Malformed> {
        let at = self.parts.partition_point(|part| part.0 < start);
        let overlaps_before = at > 0 && self.parts[at - 1].1 > start;
        let overlaps_after = self.parts.get(at).is_some_and(|next| next.0 < end);
        if overlaps_before || overlaps_after {
            return Err(Malformed("chunks of a read overlap"));
        }
        let joins_before = at > 0 && self.parts[at - 1].1 == start;
        let joins_after = self.parts.get(at).is_some_and(|next| next.0 == end);
        match (joins_before, joins_after) {
            (true, true) => self.parts[at - 1].1 = self.parts.remove(at).1,
            (true, false) => self.parts[at - 1].1 = end,
            (false, true) => self.parts[at].0 = start,
            (false, false) if self.parts.len() == Filled::PARTS_MAX => {
                return Err(Malformed("a read came in too many pieces"));
            }
            (false, false) => self.parts.insert(at, (start, end)),
        }
        Ok(())
    }

    fn covers(&self, len: usize) -> bool {
        self.parts == [(0, len)]
    }
}

/// A request in flight.
struct Slot {
    request: Request,
    wanted: PendingReply,
    /// The first error chunk of the reply; it fails the request once the reply is complete.
    error: Option<ExportError>,
}

/// All requests in flight.
#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    started: u32,
}

/// Bits of a cookie that are the index of its slot.
const INDEX_BITS: u32 = 32;

fn cookie_index(cookie: u64) -> usize {
    let index = cookie & u64::from(u32::MAX);
    usize::try_from(index).unwrap_or(usize::MAX)
}

impl Slots {
    /// Gives a request its cookie and keeps it.
    pub(super) fn insert(&mut self, mut request: Request, wanted: PendingReply) -> Request {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.started = self.started.wrapping_add(1);
        request.cookie = u64::from(self.started) << INDEX_BITS | index as u64;
        self.slots[index] = Some(Slot {
            request,
            wanted,
            error: None,
        });
        request
    }

    fn get(&mut self, cookie: u64) -> Result<&mut Slot, Malformed> {
        self.slots
            .get_mut(cookie_index(cookie))
            .and_then(Option::as_mut)
            .filter(|slot| slot.request.cookie == cookie)
            .ok_or(Malformed("a reply to a request that is not in flight"))
    }

    fn remove(&mut self, cookie: u64) -> Result<Slot, Malformed> {
        self.get(cookie)?;
        let index = cookie_index(cookie);
        self.free.push(index);
        Ok(self.slots[index].take().expect("it was just there"))
    }

    fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }

    /// Takes out all that wait.
    pub(super) fn drain(&mut self) -> Vec<PendingReply> {
        self.free.clear();
        let slots = std::mem::take(&mut self.slots);
        slots
            .into_iter()
            .flatten()
            .map(|slot| slot.wanted)
            .collect()
    }
}

/// Takes replies until the connection ends.
pub(super) async fn receive(shared: Rc<Shared>, inbox: Inbox) {
    let mut receiver = Receiver {
        shared: Rc::clone(&shared),
        inbox,
    };
    let error = loop {
        if let Err(error) = receiver.reply().await {
            break error;
        }
    };
    let leaving = matches!(&*shared.state.borrow(), State::Leaving);
    let answered = shared.slots.borrow_mut().is_empty();
    shared.end(match leaving && answered {
        true => ClientError::Disconnected,
        false => error,
    });
    shared.task_ended();
}

struct Receiver {
    shared: Rc<Shared>,
    inbox: Inbox,
}

impl Receiver {
    /// Takes one simple reply or one chunk.
    async fn reply(&mut self) -> Result<(), ClientError> {
        if self.shared.headers == Headers::Extended {
            let header = self.inbox.take(EXTENDED_CHUNK_BYTES).await?;
            let header = ExtendedChunkHeader::decode(&header)?;
            let request = self
                .shared
                .slots
                .borrow_mut()
                .get(header.chunk.cookie)?
                .request;
            if request.offset != header.offset {
                return Err(Malformed("a reply with another offset than its request").into());
            }
            return self.chunk(header.chunk).await;
        }
        let header = loop {
            if let Some((len, header)) = ReplyHeader::decode_front(self.inbox.arrived())? {
                self.inbox.consume(len);
                break header;
            }
            self.inbox.receive().await?;
        };
        let structured = self.shared.headers == Headers::Structured;
        match header {
            ReplyHeader::Simple { cookie, error } => self.simple(cookie, error).await,
            ReplyHeader::Chunk(header) if structured => self.chunk(header).await,
            ReplyHeader::Chunk(_) => {
                Err(Malformed("a structured reply that was not agreed on").into())
            }
        }
    }

    async fn simple(&mut self, cookie: u64, error: Option<ErrorCode>) -> Result<(), ClientError> {
        let request = self.shared.slots.borrow_mut().get(cookie)?.request;
        if request.command == Command::Read {
            if self.shared.headers == Headers::Structured {
                return Err(Malformed("a simple reply to a read").into());
            }
            if error.is_none() {
                let len = usize::try_from(request.len).expect("reads are at most 32 MiB");
                self.receive_part(cookie, 0, len).await?;
            }
        }
        if request.command == Command::BlockStatus && error.is_none() {
            return Err(NO_STATUS.into());
        }
        let error = error.map(|code| ExportError::new(code, "the server reported an error"));
        self.complete(cookie, error)
    }

    /// Receives a part of a read straight into its buffer.
    async fn receive_part(
        &mut self,
        cookie: u64,
        start: usize,
        len: usize,
    ) -> Result<(), ClientError> {
        let mut head = self.take_part(cookie, start, len)?;
        let mut part = head.split_off(start);
        let tail = part.split_off(len);
        let mut part = self.inbox.take_into(part).await?;
        part.unsplit(tail);
        head.unsplit(part);
        // Gone if this side ended the connection in the meantime.
        if let Ok(slot) = self.shared.slots.borrow_mut().get(cookie)
            && let PendingReply::Read { buf, .. } = &mut slot.wanted
        {
            *buf = Some(head);
        }
        Ok(())
    }

    /// Marks a part of a read as arrived and takes its whole buffer out.
    fn take_part(&self, cookie: u64, start: usize, len: usize) -> Result<BufMut, Malformed> {
        let mut slots = self.shared.slots.borrow_mut();
        let PendingReply::Read { buf, filled, .. } = &mut slots.get(cookie)?.wanted else {
            return Err(STRANGE_CHUNK);
        };
        filled.add(start, start + len)?;
        Ok(buf.take().expect("one part is received at a time"))
    }

    /// Where a chunk's range lies within the buffer of its read.
    fn place(&self, cookie: u64, offset: u64, len: u64) -> Result<usize, Malformed> {
        let request = self.shared.slots.borrow_mut().get(cookie)?.request;
        if request.command != Command::Read {
            return Err(STRANGE_CHUNK);
        }
        let start = offset.checked_sub(request.offset);
        start
            .filter(|start| {
                let end = start.checked_add(len);
                end.is_some_and(|end| end <= request.len)
            })
            .and_then(|start| usize::try_from(start).ok())
            .ok_or(Malformed("a chunk lies outside the range of its read"))
    }

    async fn chunk(&mut self, header: ChunkHeader) -> Result<(), ClientError> {
        let cookie = header.cookie;
        let len = usize::try_from(header.len).map_err(|_| STRANGE_CHUNK)?;
        match header.code {
            ChunkCode::None => {
                let done = header.flags.contains(ChunkFlags::DONE);
                if len != 0 || !done {
                    return Err(Malformed("an empty chunk that is not empty or not last").into());
                }
            }
            ChunkCode::OffsetData => self.data_chunk(cookie, len).await?,
            ChunkCode::OffsetHole => self.hole_chunk(cookie, len).await?,
            ChunkCode::BlockStatus | ChunkCode::ExtendedStatus => {
                self.status_chunk(header, len).await?;
            }
            code if code.is_error() => self.error_chunk(header, len).await?,
            _ => return Err(Malformed("a chunk of an unknown type").into()),
        }
        if !header.flags.contains(ChunkFlags::DONE) {
            // The reply goes on; that it belongs to something is checked all the same.
            self.shared.slots.borrow_mut().get(cookie)?;
            return Ok(());
        }
        let error = self.shared.slots.borrow_mut().get(cookie)?.error.take();
        self.complete(cookie, error)
    }

    async fn data_chunk(&mut self, cookie: u64, len: usize) -> Result<(), ClientError> {
        if len <= OFFSET_DATA_BYTES {
            return Err(Malformed("a data chunk without data").into());
        }
        let prefix = self.inbox.take(OFFSET_DATA_BYTES).await?;
        let offset = decode_offset_data(&prefix)?;
        let len = len - OFFSET_DATA_BYTES;
        let start = self.place(cookie, offset, len as u64)?;
        self.receive_part(cookie, start, len).await
    }

    async fn hole_chunk(&mut self, cookie: u64, len: usize) -> Result<(), ClientError> {
        if len != OFFSET_HOLE_BYTES {
            return Err(Malformed("a hole chunk of a wrong length").into());
        }
        let payload = self.inbox.take(OFFSET_HOLE_BYTES).await?;
        let hole = OffsetHole::decode(&payload)?;
        let start = self.place(cookie, hole.offset, u64::from(hole.len))?;
        let len = usize::try_from(hole.len).map_err(|_| STRANGE_CHUNK)?;
        let mut slots = self.shared.slots.borrow_mut();
        let PendingReply::Read { buf, filled, .. } = &mut slots.get(cookie)?.wanted else {
            return Err(STRANGE_CHUNK.into());
        };
        filled.add(start, start + len)?;
        let buf = buf.as_mut().expect("one part is received at a time");
        buf[start..start + len].fill(0);
        Ok(())
    }

    async fn status_chunk(&mut self, header: ChunkHeader, len: usize) -> Result<(), ClientError> {
        // QEMU sends up to 128 Ki extents, of 8 bytes or with extended headers of 16.
        const EXTENTS_MAX: usize = 128 << 10;
        type Decode = fn(&[u8]) -> Result<BlockStatus, Malformed>;
        let (code, len_max, decode): (_, _, Decode) = match self.shared.headers {
            Headers::Extended => {
                let code = ChunkCode::ExtendedStatus;
                (code, 8 + 16 * EXTENTS_MAX, BlockStatus::decode_extended)
            }
            Headers::Simple | Headers::Structured => {
                let code = ChunkCode::BlockStatus;
                (code, 4 + 8 * EXTENTS_MAX, BlockStatus::decode)
            }
        };
        if header.code != code {
            return Err(Malformed("a block status of the other width").into());
        }
        if len > len_max {
            return Err(Malformed("a block status is too long").into());
        }
        let payload = self.inbox.take_into(BufMut::zeroed(len)).await?;
        let status = decode(&payload)?;
        let mut slots = self.shared.slots.borrow_mut();
        let slot = slots.get(header.cookie)?;
        let PendingReply::Status { descriptors, .. } = &mut slot.wanted else {
            return Err(STRANGE_CHUNK.into());
        };
        if self.shared.status_context != Some(status.context_id) {
            return Err(Malformed("a status of a context that was not selected").into());
        }
        if !descriptors.is_empty() {
            return Err(Malformed("a second status of the same context").into());
        }
        *descriptors = cut_to_range(status.descriptors, slot.request.len);
        Ok(())
    }

    async fn error_chunk(&mut self, header: ChunkHeader, len: usize) -> Result<(), ClientError> {
        // The message is at most 64 KiB by its own length field; nobody sends more than a line.
        const ERROR_BYTES_MAX: usize = 8 << 10;
        if len > ERROR_BYTES_MAX {
            return Err(Malformed("an error chunk is too long").into());
        }
        let payload = self.inbox.take(len).await?;
        let chunk = ErrorChunk::decode(header.code, &payload)?;
        let mut slots = self.shared.slots.borrow_mut();
        let slot = slots.get(header.cookie)?;
        let message = match chunk.message.is_empty() {
            true => "the server reported an error".to_owned(),
            false => chunk.message,
        };
        slot.error
            .get_or_insert(ExportError::new(chunk.error, message));
        Ok(())
    }

    /// The reply is complete: its request fails with `error` or gets its result.
    fn complete(&self, cookie: u64, error: Option<ExportError>) -> Result<(), ClientError> {
        let slot = self.shared.slots.borrow_mut().remove(cookie)?;
        match error {
            Some(error) => slot.wanted.fail(ClientError::Request(error)),
            None => slot.wanted.succeed()?,
        }
        Ok(())
    }
}

/// A server may describe more than it was asked about with its last extent; the rest is dropped.
fn cut_to_range(descriptors: Vec<StatusDescriptor>, len: u64) -> Vec<StatusDescriptor> {
    let mut left = len;
    let mut cut = Vec::with_capacity(descriptors.len());
    for mut descriptor in descriptors {
        if left == 0 {
            break;
        }
        descriptor.len = descriptor.len.min(left);
        left -= descriptor.len;
        cut.push(descriptor);
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_any_order_cover_a_read() {
        let orders = [
            [0, 1, 2],
            [0, 2, 1],
            [1, 0, 2],
            [1, 2, 0],
            [2, 0, 1],
            [2, 1, 0],
        ];
        for order in orders {
            let mut filled = Filled::default();
            for (nth, part) in order.into_iter().enumerate() {
                assert!(!filled.covers(30), "{order:?} is complete after {nth}");
                filled.add(part * 10, part * 10 + 10).unwrap();
            }
            assert!(filled.covers(30), "{order:?}");
        }
    }

    #[test]
    fn parts_that_overlap_are_refused() {
        for (start, end) in [(5, 6), (0, 11), (10, 20), (19, 25), (12, 13), (0, 30)] {
            let mut filled = Filled::default();
            filled.add(10, 20).unwrap();
            let overlaps = start < 20 && end > 10;
            assert_eq!(filled.add(start, end).is_err(), overlaps, "{start}..{end}");
        }
    }

    #[test]
    fn a_read_in_too_many_pieces_is_refused() {
        let mut filled = Filled::default();
        for part in 0..Filled::PARTS_MAX {
            filled.add(2 * part, 2 * part + 1).unwrap();
        }
        let beyond = 2 * Filled::PARTS_MAX;
        assert!(filled.add(beyond, beyond + 1).is_err());
    }
}
