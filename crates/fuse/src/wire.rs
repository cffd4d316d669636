//! Messages of the protocol as bytes: `include/uapi/linux/fuse.h` of Linux, version 7.45 and older.
//!
//! All numbers are in the byte order of the machine. A message from the kernel is a header, an
//! argument, and data; a message to it is a header and a result.

/// The major version that is spoken.
pub(crate) const MAJOR: u32 = 7;
/// The newest minor version that is spoken.
pub(crate) const MINOR: u32 = 42;
/// The oldest: Linux 3.15. Older kernels expect shorter results.
pub(crate) const MINOR_MIN: u32 = 23;

/// Bytes of the header of a request.
pub(crate) const IN_HEADER_BYTES: usize = 40;
/// Bytes of the header of an answer.
pub(crate) const OUT_HEADER_BYTES: usize = 16;
/// Bytes of the argument of a write, which its data follows.
pub(crate) const WRITE_BYTES: usize = 40;

/// The number of the root, which is the file.
pub(crate) const ROOT: u64 = 1;

/// Longest data of a read or write, in bytes.
pub(crate) const DATA_BYTES_MAX: usize = 1 << 20;
/// The same for kernels that do not negotiate it.
pub(crate) const DATA_BYTES_MAX_OLD: usize = 128 << 10;

/// Kinds of requests.
pub(crate) mod opcode {
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const ACCESS: u32 = 34;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
}

/// Flags of the negotiation.
pub(crate) mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const MAX_PAGES: u64 = 1 << 22;
    /// The flags have 64 bits.
    pub const INIT_EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const OVER_IO_URING: u64 = 1 << 41;

    /// All that are accepted where they are offered.
    pub const ACCEPTED: u64 = ASYNC_READ
        | BIG_WRITES
        | ASYNC_DIO
        | PARALLEL_DIROPS
        | MAX_PAGES
        | INIT_EXT
        | DIRECT_IO_ALLOW_MMAP;
}

/// Flags of an opened file: no page cache but for maps, and writes beside each other.
pub(crate) mod open {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Attributes that a request changes.
pub(crate) mod set {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
}

/// Sequential reader of numbers; what is beyond the end is an error.
pub(crate) struct Reader<'a>(pub &'a [u8]);

/// A message is shorter than its kind demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooShort;

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], TooShort> {
        let (first, rest) = self.0.split_first_chunk().ok_or(TooShort)?;
        self.0 = rest;
        Ok(*first)
    }

    pub fn u32(&mut self) -> Result<u32, TooShort> {
        Ok(u32::from_ne_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, TooShort> {
        Ok(u64::from_ne_bytes(self.array()?))
    }

    pub fn skip(&mut self, bytes: usize) -> Result<(), TooShort> {
        self.0 = self.0.get(bytes..).ok_or(TooShort)?;
        Ok(())
    }
}

/// Bytes of the longest result, but for the data of a read.
const RESULT_BYTES_MAX: usize = 104;

/// The result of a request: numbers, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Fields {
    bytes: [u8; RESULT_BYTES_MAX],
    len: usize,
}

impl Fields {
    pub fn new() -> Fields {
        Fields {
            bytes: [0; RESULT_BYTES_MAX],
            len: 0,
        }
    }

    fn put(mut self, bytes: &[u8]) -> Fields {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
        self
    }

    pub fn u16(self, value: u16) -> Fields {
        self.put(&value.to_ne_bytes())
    }

    pub fn u32(self, value: u32) -> Fields {
        self.put(&value.to_ne_bytes())
    }

    pub fn u64(self, value: u64) -> Fields {
        self.put(&value.to_ne_bytes())
    }

    /// Adds bytes of zeroes.
    pub fn zeroes(mut self, count: usize) -> Fields {
        self.len += count;
        assert!(self.len <= RESULT_BYTES_MAX, "results have known lengths");
        self
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The header of an answer. `error` is a positive error number, or 0.
pub(crate) fn out_header(unique: u64, error: i32, result_len: usize) -> [u8; OUT_HEADER_BYTES] {
    let len = (OUT_HEADER_BYTES + result_len) as u32;
    let mut header = [0; OUT_HEADER_BYTES];
    header[..4].copy_from_slice(&len.to_ne_bytes());
    header[4..8].copy_from_slice(&(-error).to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}
