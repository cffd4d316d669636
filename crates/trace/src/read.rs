//! [`Reader`]: the requests of a trace that anybody may have written.

use std::error::Error;
use std::fmt;
use std::io::{self, Read};

use crate::format::{
    Before, CHUNK_BYTES, ChunkHead, HEADER_BYTES, Header, MAGIC, Request, VERSION, u32_at,
};

/// Longest header of a later version that is passed over.
const HEADER_MAX: u32 = 4096;

/// A trace that cannot be read, or only up to here.
#[derive(Debug)]
pub enum TraceError {
    /// The system's failure.
    Io(io::Error),
    /// It does not begin as a trace does.
    NoTrace,
    /// It is of a version that is not known.
    Version(u32),
    /// It is damaged.
    Damaged {
        /// The place in the file in bytes, of the header or the chunk in which that was found.
        at: u64,
        /// The damage.
        why: &'static str,
    },
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TraceError::Io(error) => write!(f, "{error}"),
            TraceError::NoTrace => f.write_str("it is no trace: it does not begin with 'cowtrace'"),
            TraceError::Version(version) => {
                write!(f, "version {version} of traces is not supported")
            }
            TraceError::Damaged { at, why } => write!(f, "damaged at byte {at}: {why}"),
        }
    }
}

impl Error for TraceError {}

impl From<io::Error> for TraceError {
    fn from(error: io::Error) -> TraceError {
        TraceError::Io(error)
    }
}

/// The requests of a trace, in the order of their times. It ends at the first error.
#[derive(Debug)]
pub struct Reader<R> {
    source: R,
    header: Header,
    /// The place behind what was read.
    at: u64,
    /// The place of the chunk.
    chunk_at: u64,
    payload: Vec<u8>,
    /// Bytes of `payload` that were passed.
    passed: usize,
    /// Requests that are left in it.
    left: u32,
    before: Before,
    last_us: u64,
    dropped: u64,
    is_cut: bool,
    is_over: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header of a trace. The source is read in pieces of up to 1 MiB and a little.
    ///
    /// # Errors
    /// It is no trace, or one of another version; the system's.
    pub fn new(mut source: R) -> Result<Reader<R>, TraceError> {
        let mut bytes = [0; HEADER_BYTES];
        let count = fill(&mut source, &mut bytes)?;
        if count < MAGIC.len() || &bytes[..MAGIC.len()] != MAGIC {
            return Err(TraceError::NoTrace);
        }
        let damaged = |why| TraceError::Damaged { at: 0, why };
        if count < HEADER_BYTES {
            return Err(damaged("the header is cut"));
        }
        let version = u32_at(&bytes, 8);
        if version != VERSION {
            return Err(TraceError::Version(version));
        }
        let len = u32_at(&bytes, 12);
        if len < HEADER_BYTES as u32 || len > HEADER_MAX {
            return Err(damaged("the length of the header is out of range"));
        }
        let mut more = vec![0; len as usize - HEADER_BYTES];
        if fill(&mut source, &mut more)? < more.len() {
            return Err(damaged("the header is cut"));
        }
        Ok(Reader {
            source,
            header: Header::decode(&bytes),
            at: u64::from(len),
            chunk_at: u64::from(len),
            payload: Vec::new(),
            passed: 0,
            left: 0,
            before: Before::default(),
            last_us: 0,
            dropped: 0,
            is_cut: false,
            is_over: false,
        })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Requests that were dropped up to here; of the whole trace once it has ended.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether the trace ended inside a chunk: the server was killed, or the file was cut.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Reads the next chunk; `false` at the end.
    fn chunk(&mut self) -> Result<bool, TraceError> {
        if self.passed < self.payload.len() {
            return Err(self.damaged("a chunk has more requests than it says"));
        }
        self.chunk_at = self.at;
        let mut bytes = [0; CHUNK_BYTES];
        let count = fill(&mut self.source, &mut bytes)?;
        if count < bytes.len() {
            self.is_cut = count > 0;
            return Ok(false);
        }
        let head = ChunkHead::decode(&bytes).map_err(|why| self.damaged(why))?;
        if head.count > head.payload_bytes {
            return Err(self.damaged("a chunk says that it has more requests than bytes"));
        }
        self.payload.resize(head.payload_bytes as usize, 0);
        if fill(&mut self.source, &mut self.payload)? < self.payload.len() {
            self.is_cut = true;
            return Ok(false);
        }
        if head.count > 0 && head.base_us < self.last_us {
            return Err(self.damaged("a chunk begins before the one before it has ended"));
        }
        self.at += (CHUNK_BYTES + self.payload.len()) as u64;
        self.passed = 0;
        self.left = head.count;
        self.before = Before::first(head.base_us);
        self.dropped = self.dropped.saturating_add(head.dropped);
        Ok(true)
    }

    fn damaged(&self, why: &'static str) -> TraceError {
        TraceError::Damaged {
            at: self.chunk_at,
            why,
        }
    }

    fn request(&mut self) -> Result<Option<Request>, TraceError> {
        while self.left == 0 {
            if !self.chunk()? {
                return Ok(None);
            }
        }
        let mut rest = &self.payload[self.passed..];
        let request = self.before.decode(&mut rest);
        self.passed = self.payload.len() - rest.len();
        let request = request.map_err(|why| self.damaged(why))?;
        self.left -= 1;
        self.last_us = request.at_us;
        Ok(Some(request))
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let next = self.request().transpose();
        self.is_over = !matches!(next, Some(Ok(_)));
        next
    }
}

/// Reads until the buffer is full or the source ends. Returns the number of bytes.
fn fill(source: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match source.read(&mut buf[done..]) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
