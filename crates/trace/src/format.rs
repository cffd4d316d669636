//! Bytes of a trace: headers, chunks, requests. Pure.

/// Length of the header that this version writes.
pub const HEADER_BYTES: usize = 48;
/// Length of the beginning of a chunk.
pub const CHUNK_BYTES: usize = 32;
/// Longest requests of a chunk, in bytes.
pub const PAYLOAD_MAX: usize = 1 << 20;
/// Longest request, in bytes.
pub const REQUEST_MAX: usize = 1 + 3 * 10;
/// Magic numbers.
pub const MAGIC: &[u8; 8] = b"cowtrace";
pub const CHUNK_MAGIC: &[u8; 4] = b"chnk";
/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// The end of the last range, and the last time.
const LAST: u64 = i64::MAX as u64;

const FUA: u8 = 1 << 3;
const UNMAP: u8 = 1 << 4;
const FOLLOWS: u8 = 1 << 5;
const SAME_LENGTH: u8 = 1 << 6;
const RESERVED: u8 = 1 << 7;

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A read.
    Read,
    /// A write of data.
    Write,
    /// A range that is to read as zeroes.
    Zero,
    /// A discard.
    Discard,
    /// Space for a range.
    Allocate,
    /// A flush of all.
    Flush,
}

impl Kind {
    /// All kinds, by their numbers.
    pub const ALL: [Kind; 6] = [
        Kind::Read,
        Kind::Write,
        Kind::Zero,
        Kind::Discard,
        Kind::Allocate,
        Kind::Flush,
    ];

    /// The name in output.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Zero => "zero",
            Kind::Discard => "discard",
            Kind::Allocate => "allocate",
            Kind::Flush => "flush",
        }
    }
}

/// A request that a disk got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Microseconds since the recording began.
    pub at_us: u64,
    /// The kind.
    pub kind: Kind,
    /// First byte on the disk; 0 for a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
    /// It is durable when it completes (FUA).
    pub is_durable: bool,
    /// Zeroes may give the space back.
    pub may_unmap: bool,
}

impl Request {
    /// A request of a kind for a range, without flags, at the time 0.
    pub fn new(kind: Kind, offset: u64, len: u64) -> Request {
        Request {
            at_us: 0,
            kind,
            offset,
            len,
            is_durable: false,
            may_unmap: false,
        }
    }

    /// Whether the trace can express it.
    fn is_valid(&self) -> bool {
        let is_range = self
            .offset
            .checked_add(self.len)
            .is_some_and(|end| end <= LAST);
        is_range && self.at_us <= LAST
    }
}

/// The beginning of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Size of the disk when the recording began, in bytes.
    pub disk_bytes: u64,
    /// Preferred block of the disk in bytes.
    pub block_bytes: u64,
    /// When the recording began, in microseconds since 1970 (UTC).
    pub began_us: u64,
}

impl Header {
    /// Its bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(HEADER_BYTES as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.disk_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.block_bytes.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.began_us.to_le_bytes());
        bytes
    }

    /// The header of these bytes, whose magic and version were looked at.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Header {
        Header {
            disk_bytes: u64_at(bytes, 16),
            block_bytes: u64_at(bytes, 24),
            began_us: u64_at(bytes, 32),
        }
    }
}

/// The beginning of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ChunkHead {
    /// Length of its requests in bytes.
    pub payload_bytes: u32,
    /// Number of its requests.
    pub count: u32,
    /// Requests that were dropped before its first.
    pub dropped: u64,
    /// Time from which its first request counts.
    pub base_us: u64,
}

impl ChunkHead {
    /// Its bytes.
    pub fn encode(&self) -> [u8; CHUNK_BYTES] {
        let mut bytes = [0; CHUNK_BYTES];
        bytes[..4].copy_from_slice(CHUNK_MAGIC);
        bytes[4..8].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.count.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.dropped.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.base_us.to_le_bytes());
        bytes
    }

    /// The beginning of a chunk of these bytes.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; CHUNK_BYTES]) -> Result<ChunkHead, &'static str> {
        if &bytes[..4] != CHUNK_MAGIC {
            return Err("a chunk does not begin with 'chnk'");
        }
        if u32_at(bytes, 12) != 0 {
            return Err("a reserved field of a chunk is not 0");
        }
        let head = ChunkHead {
            payload_bytes: u32_at(bytes, 4),
            count: u32_at(bytes, 8),
            dropped: u64_at(bytes, 16),
            base_us: u64_at(bytes, 24),
        };
        if head.payload_bytes as usize > PAYLOAD_MAX {
            return Err("a chunk is longer than 1 MiB");
        }
        Ok(head)
    }
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// The request before the next one, within a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Before {
    at_us: u64,
    end: u64,
    len: u64,
}

impl Before {
    /// The state at the beginning of a chunk.
    pub fn first(base_us: u64) -> Before {
        Before {
            at_us: base_us,
            end: 0,
            len: 0,
        }
    }

    /// Appends a request, and becomes it. A time before that of the last one counts as the same;
    /// `false` for a request that cannot be expressed, which is not appended.
    pub fn encode(&mut self, request: &Request, bytes: &mut Vec<u8>) -> bool {
        if !request.is_valid() {
            return false;
        }
        let at_us = request.at_us.max(self.at_us);
        let mut first = request.kind as u8;
        if request.is_durable {
            first |= FUA;
        }
        if request.may_unmap {
            first |= UNMAP;
        }
        let is_flush = request.kind == Kind::Flush;
        let (follows, is_as_long) = (request.offset == self.end, request.len == self.len);
        if follows && !is_flush {
            first |= FOLLOWS;
        }
        if is_as_long && !is_flush {
            first |= SAME_LENGTH;
        }
        bytes.push(first);
        put(bytes, at_us - self.at_us);
        self.at_us = at_us;
        if is_flush {
            return true;
        }
        if !follows {
            put(bytes, zigzag(request.offset as i64 - self.end as i64));
        }
        if !is_as_long {
            put(bytes, request.len);
        }
        self.end = request.offset + request.len;
        self.len = request.len;
        true
    }

    /// Takes a request from the front of `bytes`, and becomes it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(&mut self, bytes: &mut &[u8]) -> Result<Request, &'static str> {
        let Some((&first, rest)) = bytes.split_first() else {
            return Err("a chunk has fewer requests than it says");
        };
        *bytes = rest;
        let kind = Kind::ALL.get(usize::from(first & 7));
        let kind = *kind.ok_or("a request is of no known kind")?;
        if first & RESERVED != 0 {
            return Err("a reserved bit of a request is set");
        }
        let since = number(bytes)?;
        let mut request = Request {
            at_us: self.at_us.saturating_add(since),
            is_durable: first & FUA != 0,
            may_unmap: first & UNMAP != 0,
            ..Request::new(kind, 0, 0)
        };
        if kind != Kind::Flush {
            request.offset = match first & FOLLOWS {
                0 => {
                    let offset = self.end as i64;
                    let offset = offset.checked_add(unzigzag(number(bytes)?));
                    let offset = offset.and_then(|offset| u64::try_from(offset).ok());
                    offset.ok_or("a request begins before the disk or beyond all limits")?
                }
                _ => self.end,
            };
            request.len = match first & SAME_LENGTH {
                0 => number(bytes)?,
                _ => self.len,
            };
        }
        if !request.is_valid() {
            return Err("a request is beyond all limits");
        }
        self.at_us = request.at_us;
        if kind != Kind::Flush {
            self.end = request.offset + request.len;
            self.len = request.len;
        }
        Ok(request)
    }
}

fn zigzag(number: i64) -> u64 {
    ((number << 1) ^ (number >> 63)) as u64
}

fn unzigzag(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
}

/// Appends a number of variable length.
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Takes a number of variable length from the front of `bytes`.
fn number(bytes: &mut &[u8]) -> Result<u64, &'static str> {
    let mut number = 0_u64;
    for place in 0..10 {
        let Some((&byte, rest)) = bytes.split_first() else {
            return Err("a chunk ends inside a request");
        };
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if place == 9 && bits > 1 {
            break;
        }
        number |= bits << (7 * place);
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err("a number has more than 64 bits")
}
