//! The messages of the transmission phase: request, simple reply, chunks of structured replies; the
//! same with extended headers.
//!
//! Extended headers (`NBD_OPT_EXTENDED_HEADERS`) have lengths of 64 bits, and say with a flag
//! whether payload follows a request. Where they were agreed on, all messages have them, and there
//! are no simple replies.
//!
//! Headers are of fixed length and become arrays, since they are made and read once a request.
//! Payload of reads and writes never passes through here.

use std::fmt;

use super::{
    AllocationFlags, ChunkCode, ChunkFlags, Command, CommandFlags, EXTENDED_REPLY_MAGIC,
    EXTENDED_REQUEST_MAGIC, ErrorCode, Malformed, REQUEST_MAGIC, Reader, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, length_u32, string,
};

/// Bytes of a request before its payload.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a simple reply before its payload.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a chunk before its payload.
pub const CHUNK_HEADER_BYTES: usize = 20;
/// Bytes of a request with extended headers before its payload.
pub const EXTENDED_REQUEST_BYTES: usize = 32;
/// Bytes of a chunk with extended headers before its payload.
pub const EXTENDED_CHUNK_BYTES: usize = 32;
/// Bytes of a data chunk's payload before the data.
pub const OFFSET_DATA_BYTES: usize = 8;
/// Bytes of a hole chunk's payload.
pub const OFFSET_HOLE_BYTES: usize = 12;

/// Fills an array from its parts, in order.
fn join<const N: usize>(parts: &[&[u8]]) -> [u8; N] {
    let mut message = [0; N];
    let mut at = 0;
    for part in parts {
        message[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    debug_assert_eq!(at, N, "the parts fill the message");
    message
}

/// A request, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Modifiers of the operation, such as FUA.
    pub flags: CommandFlags,
    /// The operation.
    pub command: Command,
    /// The client's name for the request, which comes back in the reply.
    pub cookie: u64,
    /// Offset of the first byte, in bytes.
    pub offset: u64,
    /// Length of the range in bytes; for `WRITE` that of the payload too, and with `PAYLOAD_LEN`
    /// that of the payload only. 32 bits without extended headers.
    pub len: u64,
}

impl fmt::Display for Request {
    /// The request in words, for reports.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.command {
            Command::Read => "a read",
            Command::Write => "a write",
            Command::Disconnect => return f.write_str("the end of the session"),
            Command::Flush => return f.write_str("a flush"),
            Command::Trim => "a discard",
            Command::Cache => "a request to cache",
            Command::WriteZeroes => "a write of zeroes",
            Command::BlockStatus => "a question for the status",
            Command::Resize => return write!(f, "a change of the size to {}", self.len),
            Command::Unknown(code) => return write!(f, "a request of kind {code}"),
        };
        write!(f, "{what} of {} bytes at {}", self.len, self.offset)
    }
}

impl Request {
    /// The end of the session, to which there is no reply.
    pub fn disconnect() -> Request {
        Request {
            flags: CommandFlags::empty(),
            command: Command::Disconnect,
            cookie: 0,
            offset: 0,
            len: 0,
        }
    }

    /// The message without extended headers.
    ///
    /// # Panics
    /// If the length needs them.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let len = u32::try_from(self.len).expect("a length of 32 bits");
        join(&[
            &REQUEST_MAGIC.to_be_bytes(),
            &self.flags.0.to_be_bytes(),
            &u16::from(self.command).to_be_bytes(),
            &self.cookie.to_be_bytes(),
            &self.offset.to_be_bytes(),
            &len.to_be_bytes(),
        ])
    }

    /// The message with extended headers.
    pub fn encode_extended(&self) -> [u8; EXTENDED_REQUEST_BYTES] {
        join(&[
            &EXTENDED_REQUEST_MAGIC.to_be_bytes(),
            &self.flags.0.to_be_bytes(),
            &u16::from(self.command).to_be_bytes(),
            &self.cookie.to_be_bytes(),
            &self.offset.to_be_bytes(),
            &self.len.to_be_bytes(),
        ])
    }

    /// Takes a message without extended headers apart.
    ///
    /// # Errors
    /// If the magic number is wrong.
    pub fn decode(message: &[u8]) -> Result<Request, Malformed> {
        Request::decode_with(message, REQUEST_MAGIC, |reader| reader.u32().map(u64::from))
    }

    /// Takes a message with extended headers apart.
    ///
    /// # Errors
    /// If the magic number is wrong.
    pub fn decode_extended(message: &[u8]) -> Result<Request, Malformed> {
        Request::decode_with(message, EXTENDED_REQUEST_MAGIC, Reader::u64)
    }

    fn decode_with<'a>(
        message: &'a [u8],
        magic: u32,
        len: impl FnOnce(&mut Reader<'a>) -> Result<u64, Malformed>,
    ) -> Result<Request, Malformed> {
        let mut reader = Reader::new(message);
        if reader.u32()? != magic {
            return Err(Malformed("a request does not begin with its magic number"));
        }
        let request = Request {
            flags: CommandFlags(reader.u16()?),
            command: reader.u16()?.into(),
            cookie: reader.u64()?,
            offset: reader.u64()?,
            len: len(&mut reader)?,
        };
        reader.end()?;
        Ok(request)
    }
}

/// The payload of a `BLOCK_STATUS` with `PAYLOAD_LEN`: only some of the contexts that were selected
/// are asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusQuery {
    /// Length of the range in bytes.
    pub len: u64,
    /// The identifiers of the contexts.
    pub context_ids: Vec<u32>,
}

impl StatusQuery {
    /// The payload as it is sent.
    pub fn encode(&self) -> Vec<u8> {
        let mut payload = self.len.to_be_bytes().to_vec();
        for id in &self.context_ids {
            payload.extend_from_slice(&id.to_be_bytes());
        }
        payload
    }

    /// Takes the payload apart.
    ///
    /// # Errors
    /// If it is too short, or ends within an identifier.
    pub fn decode(payload: &[u8]) -> Result<StatusQuery, Malformed> {
        let mut reader = Reader::new(payload);
        let len = reader.u64()?;
        let mut context_ids = Vec::new();
        while !reader.rest.is_empty() {
            context_ids.push(reader.u32()?);
        }
        Ok(StatusQuery { len, context_ids })
    }
}

/// A simple reply, without its payload. No error is `None`.
pub fn encode_simple_reply(cookie: u64, error: Option<ErrorCode>) -> [u8; SIMPLE_REPLY_BYTES] {
    join(&[
        &SIMPLE_REPLY_MAGIC.to_be_bytes(),
        &error.map_or(0, u32::from).to_be_bytes(),
        &cookie.to_be_bytes(),
    ])
}

/// Header of a chunk, before its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Whether it is the last of its reply.
    pub flags: ChunkFlags,
    /// Type of the payload.
    pub code: ChunkCode,
    /// Cookie of the request that it belongs to.
    pub cookie: u64,
    /// Length of the payload in bytes.
    pub len: u32,
}

impl ChunkHeader {
    /// The header as it is sent.
    pub fn encode(&self) -> [u8; CHUNK_HEADER_BYTES] {
        join(&[
            &STRUCTURED_REPLY_MAGIC.to_be_bytes(),
            &self.flags.0.to_be_bytes(),
            &u16::from(self.code).to_be_bytes(),
            &self.cookie.to_be_bytes(),
            &self.len.to_be_bytes(),
        ])
    }
}

/// Extended header of a chunk, before its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtendedChunkHeader {
    /// Header common to all chunks. Its length is one of payload, which never needs 64 bits.
    pub chunk: ChunkHeader,
    /// The offset of the request.
    pub offset: u64,
}

impl ExtendedChunkHeader {
    /// The header as it is sent.
    pub fn encode(&self) -> [u8; EXTENDED_CHUNK_BYTES] {
        join(&[
            &EXTENDED_REPLY_MAGIC.to_be_bytes(),
            &self.chunk.flags.0.to_be_bytes(),
            &u16::from(self.chunk.code).to_be_bytes(),
            &self.chunk.cookie.to_be_bytes(),
            &self.offset.to_be_bytes(),
            &u64::from(self.chunk.len).to_be_bytes(),
        ])
    }

    /// Takes the message apart.
    ///
    /// # Errors
    /// If the magic number is wrong, or the payload longer than any may be.
    pub fn decode(message: &[u8]) -> Result<ExtendedChunkHeader, Malformed> {
        let mut reader = Reader::new(message);
        if reader.u32()? != EXTENDED_REPLY_MAGIC {
            return Err(Malformed("a reply does not begin with the magic number"));
        }
        let flags = ChunkFlags(reader.u16()?);
        let code = reader.u16()?.into();
        let cookie = reader.u64()?;
        let offset = reader.u64()?;
        let len = u32::try_from(reader.u64()?).map_err(|_| Malformed("an endless chunk"))?;
        reader.end()?;
        let chunk = ChunkHeader {
            flags,
            code,
            cookie,
            len,
        };
        Ok(ExtendedChunkHeader { chunk, offset })
    }
}

/// The header of either kind of reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHeader {
    /// A simple reply.
    Simple {
        /// Cookie of the request that it answers.
        cookie: u64,
        /// The reason of a failure; `None` is success.
        error: Option<ErrorCode>,
    },
    /// A chunk of a structured reply.
    Chunk(ChunkHeader),
}

impl ReplyHeader {
    /// Reads a header from the front of what has arrived: its length and content, or `None` if more
    /// bytes are needed.
    ///
    /// # Errors
    /// If the magic number is of neither kind.
    pub fn decode_front(arrived: &[u8]) -> Result<Option<(usize, ReplyHeader)>, Malformed> {
        let mut reader = Reader::new(arrived);
        let Ok(magic) = reader.u32() else {
            return Ok(None);
        };
        match magic {
            SIMPLE_REPLY_MAGIC if arrived.len() >= SIMPLE_REPLY_BYTES => {
                let error = match reader.u32()? {
                    0 => None,
                    code => Some(ErrorCode::from(code)),
                };
                let cookie = reader.u64()?;
                Ok(Some((
                    SIMPLE_REPLY_BYTES,
                    ReplyHeader::Simple { cookie, error },
                )))
            }
            STRUCTURED_REPLY_MAGIC if arrived.len() >= CHUNK_HEADER_BYTES => {
                let header = ChunkHeader {
                    flags: ChunkFlags(reader.u16()?),
                    code: reader.u16()?.into(),
                    cookie: reader.u64()?,
                    len: reader.u32()?,
                };
                Ok(Some((CHUNK_HEADER_BYTES, ReplyHeader::Chunk(header))))
            }
            SIMPLE_REPLY_MAGIC | STRUCTURED_REPLY_MAGIC => Ok(None),
            _ => Err(Malformed("a reply does not begin with a magic number")),
        }
    }
}

/// The payload of a data chunk before the data: where the data belongs.
pub fn decode_offset_data(payload: &[u8]) -> Result<u64, Malformed> {
    Reader::new(payload).u64()
}

/// The payload of a hole chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetHole {
    /// Offset of the first byte, in bytes.
    pub offset: u64,
    /// Length in bytes; never 0.
    pub len: u32,
}

impl OffsetHole {
    /// The payload as it is sent.
    pub fn encode(&self) -> [u8; OFFSET_HOLE_BYTES] {
        join(&[&self.offset.to_be_bytes(), &self.len.to_be_bytes()])
    }

    /// Takes the payload apart.
    ///
    /// # Errors
    /// If its length is wrong or the hole is empty.
    pub fn decode(payload: &[u8]) -> Result<OffsetHole, Malformed> {
        let mut reader = Reader::new(payload);
        let hole = OffsetHole {
            offset: reader.u64()?,
            len: reader.u32()?,
        };
        reader.end()?;
        if hole.len == 0 {
            return Err(Malformed("a hole is empty"));
        }
        Ok(hole)
    }
}

/// A run with one state, in a reply to `BLOCK_STATUS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusDescriptor {
    /// Length in bytes; never 0. 32 bits without extended headers.
    pub len: u64,
    /// Its state; in other contexts than `base:allocation` the bits mean something else.
    pub flags: AllocationFlags,
}

/// The payload of a status chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    /// Identifier of the metadata context.
    pub context_id: u32,
    /// Consecutive runs from the offset of the request.
    pub descriptors: Vec<StatusDescriptor>,
}

impl BlockStatus {
    /// The payload without extended headers.
    ///
    /// # Panics
    /// If a length needs them.
    pub fn encode(&self) -> Vec<u8> {
        let mut payload = self.context_id.to_be_bytes().to_vec();
        for descriptor in &self.descriptors {
            let len = u32::try_from(descriptor.len).expect("a length of 32 bits");
            payload.extend_from_slice(&len.to_be_bytes());
            payload.extend_from_slice(&descriptor.flags.0.to_be_bytes());
        }
        payload
    }

    /// The payload with extended headers ([`ChunkCode::ExtendedStatus`]).
    pub fn encode_extended(&self) -> Vec<u8> {
        let mut payload = self.context_id.to_be_bytes().to_vec();
        payload.extend_from_slice(&length_u32(self.descriptors.len()).to_be_bytes());
        for descriptor in &self.descriptors {
            payload.extend_from_slice(&descriptor.len.to_be_bytes());
            payload.extend_from_slice(&u64::from(descriptor.flags.0).to_be_bytes());
        }
        payload
    }

    /// Takes a payload without extended headers apart.
    ///
    /// # Errors
    /// If there is no descriptor, an empty one, or half of one.
    pub fn decode(payload: &[u8]) -> Result<BlockStatus, Malformed> {
        let mut reader = Reader::new(payload);
        let context_id = reader.u32()?;
        let descriptors = descriptors(&mut reader, |reader| {
            Ok((u64::from(reader.u32()?), reader.u32()?))
        })?;
        Ok(BlockStatus {
            context_id,
            descriptors,
        })
    }

    /// Takes a payload with extended headers apart, of a context whose states have 32 bits.
    ///
    /// # Errors
    /// If there is no descriptor, an empty one, or half of one, or not as many as it says; or a
    /// state has more bits.
    pub fn decode_extended(payload: &[u8]) -> Result<BlockStatus, Malformed> {
        let mut reader = Reader::new(payload);
        let context_id = reader.u32()?;
        let count = reader.u32()?;
        let descriptors = descriptors(&mut reader, |reader| {
            let (len, flags) = (reader.u64()?, reader.u64()?);
            let flags = u32::try_from(flags).map_err(|_| Malformed("a state of 64 bits"))?;
            Ok((len, flags))
        })?;
        if u32::try_from(descriptors.len()) != Ok(count) {
            return Err(Malformed("not as many descriptors as it says"));
        }
        Ok(BlockStatus {
            context_id,
            descriptors,
        })
    }
}

/// All descriptors that there are, each taken apart by `next` into length and state.
fn descriptors<'a>(
    reader: &mut Reader<'a>,
    next: impl Fn(&mut Reader<'a>) -> Result<(u64, u32), Malformed>,
) -> Result<Vec<StatusDescriptor>, Malformed> {
    let mut descriptors = Vec::new();
    while descriptors.is_empty() || !reader.rest.is_empty() {
        let (len, flags) = next(reader)?;
        if len == 0 {
            return Err(Malformed("a block status descriptor is empty"));
        }
        let flags = AllocationFlags(flags);
        descriptors.push(StatusDescriptor { len, flags });
    }
    Ok(descriptors)
}

/// The payload of an error chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorChunk {
    /// Why the request failed.
    pub error: ErrorCode,
    /// The reason in words for humans; may be empty.
    pub message: String,
    /// Where it failed: present in `ErrorOffset` chunks only.
    pub offset: Option<u64>,
}

impl ErrorChunk {
    /// The payload. A message that is too long is cut at a character.
    pub fn encode(&self) -> Vec<u8> {
        // Far below the 4096 bytes that are allowed: nobody shows more to a human.
        const MESSAGE_BYTES_MAX: usize = 1024;
        let mut end = self.message.len().min(MESSAGE_BYTES_MAX);
        while !self.message.is_char_boundary(end) {
            end -= 1;
        }
        let message = &self.message.as_bytes()[..end];
        let mut payload = u32::from(self.error).to_be_bytes().to_vec();
        let len = u16::try_from(message.len()).expect("the message was cut to 1024 bytes");
        payload.extend_from_slice(&len.to_be_bytes());
        payload.extend_from_slice(message);
        if let Some(offset) = self.offset {
            payload.extend_from_slice(&offset.to_be_bytes());
        }
        payload
    }

    /// Takes the payload of a chunk of type `code` apart, which is an error type, known or not.
    ///
    /// # Errors
    /// If the message is longer than the payload, or the error is 0. What follows the known fields
    /// is ignored: types that are not known yet may have further ones.
    pub fn decode(code: ChunkCode, payload: &[u8]) -> Result<ErrorChunk, Malformed> {
        let mut reader = Reader::new(payload);
        let error = reader.u32()?;
        if error == 0 {
            return Err(Malformed("an error chunk says that there is no error"));
        }
        let len = reader.u16()?;
        let message = reader.bytes(usize::from(len))?;
        let offset = match code {
            ChunkCode::ErrorOffset => Some(reader.u64()?),
            _ => None,
        };
        Ok(ErrorChunk {
            error: error.into(),
            // The message is decoration: what is wrong with it does not make the reply invalid.
            message: string(message).unwrap_or_default().to_owned(),
            offset,
        })
    }
}

/// The header of a chunk with a payload of `len` bytes that ends its reply.
pub fn last_chunk(code: ChunkCode, cookie: u64, len: usize) -> ChunkHeader {
    ChunkHeader {
        flags: ChunkFlags::DONE,
        code,
        cookie,
        len: length_u32(len),
    }
}
