//! Effects of operations on the bytes of a file, and how a crash may take them apart.

use cowslip_queue::Buf;

use super::content::Content;

/// The unit in which a crash tears changes of space: zero, discard, allocate.
pub const SPACE_ATOM_BYTES: u64 = 4096;

/// A change of a file's bytes or length.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Bytes written.
    Write {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        data: Buf,
    },
    /// A range that reads as zeroes from now on; the end of file moves up to its end.
    Zero {
        /// Offset in the file.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A range that reads as zeroes from now on; the end of file stays.
    Punch {
        /// Offset in the file.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The end of file moves up to this, if it was before.
    Allocate {
        /// Offset in the file.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The end of file is there.
    SetLen(u64),
}

impl Effect {
    /// The bytes that it may change: start and end.
    pub fn range(&self) -> (u64, u64) {
        match self {
            Effect::Write { offset, data } => (*offset, offset + data.len() as u64),
            Effect::Zero { offset, len }
            | Effect::Punch { offset, len }
            | Effect::Allocate { offset, len } => (*offset, offset + len),
            Effect::SetLen(len) => (*len, u64::MAX),
        }
    }

    /// Whether the order of the two matters.
    pub fn overlaps(&self, other: &Effect) -> bool {
        let (start, end) = self.range();
        let (other_start, other_end) = other.range();
        start < other_end && other_start < end
    }

    /// Changes the file.
    pub fn apply(&self, content: &mut Content) {
        match self {
            Effect::Write { offset, data } => content.write(*offset, data),
            Effect::Zero { offset, len } => {
                content.extend_to(offset + len);
                content.zero(*offset, *len);
            }
            Effect::Punch { offset, len } => content.zero(*offset, *len),
            Effect::Allocate { offset, len } => content.extend_to(offset + len),
            Effect::SetLen(len) => content.set_len(*len),
        }
    }

    /// The parts that a crash may apply one without the other: sectors of `sector_bytes` for
    /// writes, 4 KiB for changes of space; a change of length is one.
    pub fn atoms(&self, sector_bytes: u64) -> Vec<Effect> {
        let unit = match self {
            Effect::Write { .. } => sector_bytes,
            Effect::Zero { .. } | Effect::Punch { .. } | Effect::Allocate { .. } => {
                SPACE_ATOM_BYTES
            }
            Effect::SetLen(_) => return vec![self.clone()],
        };
        let (start, end) = self.range();
        let mut atoms = Vec::new();
        let mut at = start;
        while at < end {
            let next = end.min((at / unit + 1) * unit);
            atoms.push(self.part(at, next - at));
            at = next;
        }
        atoms
    }

    /// The part of it that changes this range, which lies within its own.
    pub fn part(&self, at: u64, size: u64) -> Effect {
        match self {
            Effect::Write { offset, data } => Effect::Write {
                offset: at,
                data: data.slice((at - offset) as usize, size as usize),
            },
            Effect::Zero { .. } => Effect::Zero {
                offset: at,
                len: size,
            },
            Effect::Punch { .. } => Effect::Punch {
                offset: at,
                len: size,
            },
            Effect::Allocate { .. } => Effect::Allocate {
                offset: at,
                len: size,
            },
            Effect::SetLen(len) => Effect::SetLen(*len),
        }
    }

    /// A short text for traces.
    pub fn describe(&self) -> String {
        let (start, end) = self.range();
        let verb = match self {
            Effect::Write { .. } => "write",
            Effect::Zero { .. } => "zero",
            Effect::Punch { .. } => "punch",
            Effect::Allocate { .. } => "allocate",
            Effect::SetLen(len) => return format!("set_len {len:#x}"),
        };
        format!("{verb} {start:#x}+{:#x}", end - start)
    }
}
