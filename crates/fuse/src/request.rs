//! A request of the kernel, taken apart: nothing of it is used that was not checked here.

use std::fmt;

use crate::wire::{
    DATA_BYTES_MAX, IN_HEADER_BYTES, ROOT, Reader, TooShort, WRITE_BYTES, opcode, set,
};

/// A request: which answer it waits for, and what it asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The number that the answer carries.
    pub unique: u64,
    pub operation: Operation,
}

/// Operations on the file. Offsets and lengths are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Init(Init),
    GetAttributes,
    SetAttributes(Attributes),
    /// Open, with the flags of open(2).
    Open {
        flags: u32,
    },
    Read {
        offset: u64,
        len: usize,
    },
    /// Write of the data that follows the argument, through a file with these flags.
    Write {
        offset: u64,
        len: usize,
        flags: u32,
    },
    StatFs,
    /// A descriptor is closed.
    Flush,
    Fsync,
    Fallocate {
        offset: u64,
        len: u64,
        mode: u32,
    },
    Seek {
        offset: u64,
        whence: u32,
    },
    /// Nothing has to be done; success is the answer.
    Nothing,
    /// The kernel expects no answer.
    Forget,
    /// A kind that a single file does not need, or that is not supported.
    Unsupported {
        opcode: u32,
    },
    /// An impossible message.
    Malformed(&'static str),
}

impl fmt::Display for Operation {
    /// The request in words, for reports.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Init(_) => f.write_str("the first message"),
            Operation::GetAttributes => f.write_str("a question for attributes"),
            Operation::SetAttributes(_) => f.write_str("a change of attributes"),
            Operation::Open { .. } => f.write_str("an open"),
            Operation::Read { offset, len } => write!(f, "a read of {len} bytes at {offset}"),
            Operation::Write { offset, len, .. } => {
                write!(f, "a write of {len} bytes at {offset}")
            }
            Operation::StatFs => f.write_str("a question for space"),
            Operation::Flush => f.write_str("a close"),
            Operation::Fsync => f.write_str("a flush"),
            Operation::Fallocate { offset, len, .. } => {
                write!(f, "a change of space of {len} bytes at {offset}")
            }
            Operation::Seek { offset, .. } => write!(f, "a search from {offset} on"),
            Operation::Nothing | Operation::Forget => f.write_str("a message"),
            Operation::Unsupported { opcode } => write!(f, "a request of kind {opcode}"),
            Operation::Malformed(why) => write!(f, "an impossible message ({why})"),
        }
    }
}

/// The kernel's offer at the begin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Init {
    pub major: u32,
    pub minor: u32,
    pub readahead_max: u32,
    pub flags: u64,
}

/// Attributes to change; those that are `None` stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Attributes {
    pub size: Option<u64>,
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub accessed: Option<Time>,
    pub modified: Option<Time>,
    pub changed: Option<Time>,
}

/// A point in time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Time {
    Now,
    /// Seconds and nanoseconds since 1970.
    At(u64, u32),
}

impl Request {
    /// Takes a message apart. `head` has the header and the argument, and may have more; `len` is
    /// the length of the whole message.
    ///
    /// # Errors
    /// Not even a header.
    pub fn parse(head: &[u8], len: usize) -> Result<Request, TooShort> {
        let mut reader = Reader(head);
        let claimed = reader.u32()?;
        let kind = reader.u32()?;
        let unique = reader.u64()?;
        let node = reader.u64()?;
        // Who asks, and lengths of extensions, which are for requests that make files.
        reader.skip(16)?;
        let request = |operation| Ok(Request { unique, operation });
        if usize::try_from(claimed) != Ok(len) {
            return request(Operation::Malformed("a length that is not the message's"));
        }
        let is_of_connection = matches!(
            kind,
            opcode::INIT
                | opcode::INTERRUPT
                | opcode::DESTROY
                | opcode::FORGET
                | opcode::BATCH_FORGET
        );
        if node != ROOT && !is_of_connection {
            return request(Operation::Malformed("a file that does not exist"));
        }
        let operation = Operation::parse(kind, &mut reader, len);
        request(operation.unwrap_or(Operation::Malformed("shorter than its kind demands")))
    }
}

impl Operation {
    fn parse(kind: u32, reader: &mut Reader<'_>, len: usize) -> Result<Operation, TooShort> {
        Ok(match kind {
            opcode::INIT => Operation::Init(Init::parse(reader)?),
            opcode::GETATTR => Operation::GetAttributes,
            opcode::SETATTR => Operation::SetAttributes(Attributes::parse(reader)?),
            opcode::OPEN => Operation::Open {
                flags: reader.u32()?,
            },
            opcode::READ => {
                reader.skip(8)?;
                let (offset, len) = (reader.u64()?, reader.u32()? as usize);
                match len {
                    0..=DATA_BYTES_MAX => Operation::Read { offset, len },
                    _ => Operation::Malformed("a read longer than was negotiated"),
                }
            }
            opcode::WRITE => Operation::parse_write(reader, len)?,
            opcode::STATFS => Operation::StatFs,
            opcode::FLUSH => Operation::Flush,
            opcode::FSYNC => Operation::Fsync,
            opcode::RELEASE | opcode::ACCESS | opcode::DESTROY => Operation::Nothing,
            opcode::FORGET | opcode::BATCH_FORGET => Operation::Forget,
            opcode::FALLOCATE => {
                reader.skip(8)?;
                Operation::Fallocate {
                    offset: reader.u64()?,
                    len: reader.u64()?,
                    mode: reader.u32()?,
                }
            }
            opcode::LSEEK => {
                reader.skip(8)?;
                Operation::Seek {
                    offset: reader.u64()?,
                    whence: reader.u32()?,
                }
            }
            opcode => Operation::Unsupported { opcode },
        })
    }

    fn parse_write(reader: &mut Reader<'_>, len: usize) -> Result<Operation, TooShort> {
        reader.skip(8)?;
        let (offset, data_len) = (reader.u64()?, reader.u32()? as usize);
        reader.skip(4 + 8)?;
        let flags = reader.u32()?;
        reader.skip(4)?;
        Ok(match len.checked_sub(IN_HEADER_BYTES + WRITE_BYTES) {
            Some(follows) if follows != data_len => {
                Operation::Malformed("a write with more or less data than it says")
            }
            Some(0..=DATA_BYTES_MAX) => Operation::Write {
                offset,
                len: data_len,
                flags,
            },
            _ => Operation::Malformed("a write longer than was negotiated"),
        })
    }
}

impl Init {
    fn parse(reader: &mut Reader<'_>) -> Result<Init, TooShort> {
        let (major, minor) = (reader.u32()?, reader.u32()?);
        // Older kernels send no more than that.
        let readahead_max = reader.u32().unwrap_or(0);
        let low = reader.u32().unwrap_or(0);
        let high = match u64::from(low) & crate::wire::init::INIT_EXT {
            0 => 0,
            _ => reader.u32()?,
        };
        Ok(Init {
            major,
            minor,
            readahead_max,
            flags: u64::from(low) | u64::from(high) << 32,
        })
    }
}

impl Attributes {
    fn parse(reader: &mut Reader<'_>) -> Result<Attributes, TooShort> {
        let valid = reader.u32()?;
        // Padding and the number of the open file.
        reader.skip(4 + 8)?;
        let size = reader.u64()?;
        reader.skip(8)?;
        let seconds = [reader.u64()?, reader.u64()?, reader.u64()?];
        let nanoseconds = [reader.u32()?, reader.u32()?, reader.u32()?];
        let mode = reader.u32()?;
        reader.skip(4)?;
        let (uid, gid) = (reader.u32()?, reader.u32()?);
        let has = |flag| valid & flag != 0;
        let time = |index: usize, flag, now| match (has(flag), has(now)) {
            (false, _) => None,
            (true, true) => Some(Time::Now),
            (true, false) => Some(Time::At(seconds[index], nanoseconds[index])),
        };
        Ok(Attributes {
            size: has(set::SIZE).then_some(size),
            mode: has(set::MODE).then_some(mode),
            uid: has(set::UID).then_some(uid),
            gid: has(set::GID).then_some(gid),
            accessed: time(0, set::ATIME, set::ATIME_NOW),
            modified: time(1, set::MTIME, set::MTIME_NOW),
            changed: time(2, set::CTIME, 0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message of this kind about this file, with the argument and data given.
    fn message(kind: u32, node: u64, rest: &[u8]) -> Vec<u8> {
        let len = (IN_HEADER_BYTES + rest.len()) as u32;
        let mut bytes = Vec::new();
        bytes.extend(len.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(77u64.to_ne_bytes());
        bytes.extend(node.to_ne_bytes());
        bytes.extend([0; 16]);
        bytes.extend(rest);
        bytes
    }

    fn parsed(bytes: &[u8]) -> Operation {
        let request = Request::parse(bytes, bytes.len()).unwrap();
        assert_eq!(request.unique, 77);
        request.operation
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// Two halves of a word in the order of memory.
    fn halves(first: u32, second: u32) -> u64 {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&first.to_ne_bytes());
        bytes[4..].copy_from_slice(&second.to_ne_bytes());
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn arguments_are_where_the_header_has_them() {
        let read = words(&[1, 4096, halves(512, 0), 0, 0]);
        let expected = Operation::Read {
            offset: 4096,
            len: 512,
        };
        assert_eq!(parsed(&message(opcode::READ, ROOT, &read)), expected);
        let mut write = words(&[1, 4096, halves(3, 0), 0, halves(0o2, 0)]);
        write.extend(b"abc");
        let expected = Operation::Write {
            offset: 4096,
            len: 3,
            flags: 0o2,
        };
        assert_eq!(parsed(&message(opcode::WRITE, ROOT, &write)), expected);
        let fallocate = words(&[1, 10, 20, halves(3, 0)]);
        let expected = Operation::Fallocate {
            offset: 10,
            len: 20,
            mode: 3,
        };
        assert_eq!(
            parsed(&message(opcode::FALLOCATE, ROOT, &fallocate)),
            expected
        );
        let seek = words(&[1, 10, halves(4, 0)]);
        let expected = Operation::Seek {
            offset: 10,
            whence: 4,
        };
        assert_eq!(parsed(&message(opcode::LSEEK, ROOT, &seek)), expected);
        let valid = set::SIZE | set::MODE | set::MTIME | set::ATIME | set::ATIME_NOW;
        let set = words(&[
            halves(valid, 0),
            1,
            1 << 20,
            0,
            5,
            6,
            7,
            halves(50, 60),
            halves(70, 0o600),
            halves(0, 1000),
            halves(1001, 0),
        ]);
        let expected = Operation::SetAttributes(Attributes {
            size: Some(1 << 20),
            mode: Some(0o600),
            accessed: Some(Time::Now),
            modified: Some(Time::At(6, 60)),
            ..Attributes::default()
        });
        assert_eq!(parsed(&message(opcode::SETATTR, ROOT, &set)), expected);
    }

    #[test]
    fn a_negotiation_has_32_or_64_flags() {
        let offer = |low: u32| {
            let mut bytes = words(&[halves(7, 45), halves(1 << 17, low), halves(1 << 4, 0)]);
            bytes.extend([0; 40]);
            match parsed(&message(opcode::INIT, 0, &bytes)) {
                Operation::Init(init) => init,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(offer(1).flags, 1);
        assert_eq!(offer(1).minor, 45);
        let extended = 1 << 30 | 1;
        assert_eq!(offer(extended).flags, u64::from(extended) | 1 << 36);
    }

    #[test]
    fn impossible_messages_are_refused() {
        let is_malformed = |bytes: &[u8]| matches!(parsed(bytes), Operation::Malformed(_));
        // Every kind, cut short at every length; nothing panics, and what has an argument says so.
        let argument = [0xff; 128];
        for kind in 0..64 {
            for len in 0..argument.len() {
                let operation = parsed(&message(kind, ROOT, &argument[..len]));
                let needs = match kind {
                    opcode::INIT => 8,
                    opcode::SETATTR => 84,
                    opcode::OPEN => 4,
                    opcode::READ => 20,
                    opcode::WRITE => 40,
                    opcode::FALLOCATE => 28,
                    opcode::LSEEK => 20,
                    _ => 0,
                };
                let refused = matches!(operation, Operation::Malformed(_));
                assert!(refused || len >= needs, "{kind} {len}: {operation:?}");
            }
        }
        let read = |len| message(opcode::READ, ROOT, &words(&[1, 0, halves(len, 0), 0, 0]));
        assert!(!is_malformed(&read(1 << 20)));
        assert!(is_malformed(&read((1 << 20) + 1)));
        let write = |claimed, data| {
            let mut bytes = words(&[1, 0, halves(claimed, 0), 0, 0]);
            bytes.extend(vec![0; data]);
            message(opcode::WRITE, ROOT, &bytes)
        };
        assert!(!is_malformed(&write(4, 4)));
        for (claimed, data) in [
            (4, 3),
            (3, 4),
            (u32::MAX, 4),
            ((1 << 20) + 1, (1 << 20) + 1),
        ] {
            assert!(is_malformed(&write(claimed, data)), "{claimed} {data}");
        }
        assert!(is_malformed(&message(opcode::GETATTR, 2, &[0; 16])));
        let mut bytes = read(512);
        bytes[0] ^= 1;
        assert!(is_malformed(&bytes));
        assert_eq!(Request::parse(&bytes[..39], 39), Err(TooShort));
    }
}
