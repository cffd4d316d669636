//! Extents of a file on its host file system, as reported by `FS_IOC_FIEMAP`.
//!
//! [`records`] iterates over them in batches and keeps one batch in memory. The iteration ends even
//! if the file changes meanwhile: each record begins at or after the end of the one before it, and
//! parts that the kernel reports again are cut off.
#![allow(unsafe_code)] // One system call that rustix lacks.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// A run of a file in one place of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostExtent {
    /// Offset in the file in bytes.
    pub logical: u64,
    /// Offset on the device in bytes.
    pub physical: u64,
    /// Length in bytes.
    pub len: u64,
}

impl HostExtent {
    /// Whether `next` goes on where this ends, in the file and on the device.
    fn continues_in(&self, next: &HostExtent) -> bool {
        self.logical + self.len == next.logical && self.physical + self.len == next.physical
    }
}

/// Flags of a record beside its place (`FIEMAP_EXTENT_*` of linux/fiemap.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Hash, PartialOrd, Ord)]
pub struct Flags(u32);

impl Flags {
    /// The file's last extent.
    pub const LAST: Flags = Flags(0x1);
    /// Its place is not known yet.
    pub const UNKNOWN: Flags = Flags(0x2);
    /// Space is promised, not yet chosen.
    pub const DELAYED: Flags = Flags(0x4);
    /// Stored in another form than it reads: compressed, as a rule.
    pub const ENCODED: Flags = Flags(0x8);
    /// Encrypted by the file system.
    pub const ENCRYPTED: Flags = Flags(0x80);
    /// The extent begins or ends within a block.
    pub const NOT_ALIGNED: Flags = Flags(0x100);
    /// Stored beside metadata.
    pub const INLINE: Flags = Flags(0x200);
    /// Stored together with other files' ends.
    pub const TAIL: Flags = Flags(0x400);
    /// Space that reads as zeroes until it is written.
    pub const UNWRITTEN: Flags = Flags(0x800);
    /// Joined by the kernel for a file system that knows only blocks.
    pub const MERGED: Flags = Flags(0x1000);
    /// The space belongs to another file, too.
    pub const SHARED: Flags = Flags(0x2000);

    /// The flags of these bits.
    pub const fn from_bits(bits: u32) -> Flags {
        Flags(bits)
    }

    /// The kernel's bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether one of `others` is set.
    pub const fn has(self, others: Flags) -> bool {
        self.0 & others.0 != 0
    }

    /// Both.
    #[must_use]
    pub const fn with(self, others: Flags) -> Flags {
        Flags(self.0 | others.0)
    }

    /// Returns these flags without `others`.
    #[must_use]
    pub const fn without(self, others: Flags) -> Flags {
        Flags(self.0 & !others.0)
    }
}

/// A mapping record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Offset in the file in bytes.
    pub logical: u64,
    /// Offset on the device in bytes, where it has one.
    pub physical: u64,
    /// Length in the file in bytes.
    pub len: u64,
    /// Flags of the record.
    pub flags: Flags,
}

/// Whether data that has not been written back is written back first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Sync {
    /// Data is not written out: extents without a place yet are reported as such.
    #[default]
    No,
    /// Yes, with the first batch (`FIEMAP_FLAG_SYNC`).
    First,
}

/// `struct fiemap_extent` of linux/fiemap.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// Extents asked for with one call: 56 KiB, so that a million cost a thousand calls.
const BATCH: usize = 1000;

/// `struct fiemap` of linux/fiemap.h with room for a batch.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [RawExtent; BATCH],
}

/// `_IOWR('f', 11, struct fiemap)`: the size in it is that of the structure without extents.
const FS_IOC_FIEMAP: u32 = 0xC020_660B;
/// Write dirty pages out first, so that delayed allocation has happened.
const FIEMAP_FLAG_SYNC: u32 = 1;

/// The records of a file in the order of the file, read in batches.
pub struct Records<'a> {
    file: BorrowedFd<'a>,
    request: Box<Request>,
    /// The next record of the batch.
    next: usize,
    /// Records in the batch.
    count: usize,
    /// End of the records returned so far.
    at: u64,
    /// Whether there is no further batch.
    ended: bool,
}

/// The mapping records of a file.
pub fn records(file: &impl AsFd, sync: Sync) -> Records<'_> {
    records_from(file, 0, sync)
}

/// The mapping records of what lies at `start` or behind it; the first is cut to that.
pub fn records_from(file: &impl AsFd, start: u64, sync: Sync) -> Records<'_> {
    let request = Box::new(Request {
        start: 0,
        length: 0,
        flags: match sync {
            Sync::No => 0,
            Sync::First => FIEMAP_FLAG_SYNC,
        },
        mapped_extents: 0,
        extent_count: BATCH as u32,
        reserved: 0,
        extents: [RawExtent::default(); BATCH],
    });
    Records {
        file: file.as_fd(),
        request,
        next: 0,
        count: 0,
        at: start,
        ended: false,
    }
}

impl Records<'_> {
    fn fill(&mut self) -> io::Result<()> {
        let request = &mut *self.request;
        request.start = self.at;
        request.length = u64::MAX - self.at;
        request.mapped_extents = 0;
        // SAFETY: the request is laid out as the kernel's structure and has room for as many
        // extents as it says; the kernel writes nowhere else.
        let result = unsafe {
            libc::ioctl(
                self.file.as_raw_fd(),
                FS_IOC_FIEMAP as libc::Ioctl,
                std::ptr::from_mut(request),
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        request.flags = 0;
        self.next = 0;
        self.count = (request.mapped_extents as usize).min(BATCH);
        self.ended = self.count == 0;
        Ok(())
    }
}

/// Returns the part of a record at `at` or behind it.
fn behind(record: Record, at: u64) -> Option<Record> {
    let end = record.logical.saturating_add(record.len);
    let cut = at.saturating_sub(record.logical);
    (end > at).then(|| Record {
        logical: record.logical + cut,
        physical: record.physical.saturating_add(cut),
        len: end - record.logical - cut,
        ..record
    })
}

impl Iterator for Records<'_> {
    type Item = io::Result<Record>;

    fn next(&mut self) -> Option<io::Result<Record>> {
        loop {
            if self.ended {
                return None;
            }
            if self.next == self.count {
                if let Err(error) = self.fill() {
                    self.ended = true;
                    return Some(Err(error));
                }
                continue;
            }
            let raw = self.request.extents[self.next];
            self.next += 1;
            let record = Record {
                logical: raw.logical,
                physical: raw.physical,
                len: raw.length,
                flags: Flags(raw.flags),
            };
            self.ended = record.flags.has(Flags::LAST);
            if let Some(record) = behind(record, self.at) {
                self.at = record.logical + record.len;
                return Some(Ok(record));
            }
            // A whole batch of records returned before: the iteration might never end, and is
            // perhaps incomplete.
            if self.next == self.count && self.request.start == self.at {
                self.ended = true;
                let why = "the file system returns the same extents again";
                return Some(Err(io::Error::new(io::ErrorKind::InvalidData, why)));
            }
        }
    }
}

/// The extents of a file, those that follow on from another joined with it, whatever their state:
/// the boundary between written and unwritten space costs no seek. What was not yet written back is
/// first.
///
/// # Errors
/// `Unsupported` (`EOPNOTSUPP`) where the file system does not list extents, or the system's
/// failure.
pub fn extents(file: impl AsFd) -> io::Result<Vec<HostExtent>> {
    let mut found: Vec<HostExtent> = Vec::new();
    for record in records(&file, Sync::First) {
        let record = record?;
        let extent = HostExtent {
            logical: record.logical,
            physical: record.physical,
            len: record.len,
        };
        match found.last_mut() {
            Some(last) if last.continues_in(&extent) => last.len += extent.len,
            _ => found.push(extent),
        }
    }
    Ok(found)
}

/// Bytes of space behind the block that the file ends in; `None` where the file system does not
/// say.
///
/// # Errors
/// The system's.
pub fn beyond_end_bytes(file: impl AsFd) -> io::Result<Option<u64>> {
    let stat = rustix::fs::fstat(&file)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let block = u64::try_from(stat.st_blksize).unwrap_or(4096).max(1);
    let mut beyond = 0;
    for record in records_from(&file, size.next_multiple_of(block), Sync::No) {
        let record = match record {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(None),
            record => record?,
        };
        if !record.flags.has(Flags::INLINE) {
            beyond += record.len;
        }
    }
    Ok(Some(beyond))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    /// A file on a file system that lists extents; the target directory is on one as a rule.
    fn scratch(name: &str) -> (std::path::PathBuf, File) {
        let path =
            std::env::temp_dir().join(format!("cowslip-fiemap-{name}-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        (path, file)
    }

    fn supported(file: &File) -> Option<Vec<HostExtent>> {
        match extents(file) {
            Ok(extents) => Some(extents),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                eprintln!("SKIPPED: the file system knows no extents");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn an_empty_file_has_no_extents() {
        let (path, file) = scratch("empty");
        if let Some(found) = supported(&file) {
            assert_eq!(found, []);
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn islands_in_a_sparse_file_are_listed_in_order_across_batches() {
        let (path, mut file) = scratch("islands");
        let islands = BATCH as u64 + 20;
        for island in 0..islands {
            file.write_all_at(&[1; 4096], island * (1 << 20)).unwrap();
        }
        file.flush().unwrap();
        if let Some(found) = supported(&file) {
            let starts: Vec<u64> = found.iter().map(|e| e.logical).collect();
            let expected: Vec<u64> = (0..islands).map(|i| i << 20).collect();
            assert_eq!(starts, expected);
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn records_are_in_order_and_apart() {
        let (path, file) = scratch("records");
        for (index, len) in [(9_u64, 3_usize), (2, 1), (5, 2)] {
            file.write_all_at(&vec![1; len << 16], index << 20).unwrap();
        }
        let mut end = 0;
        for record in records(&file, Sync::First) {
            let Ok(record) = record else { break };
            assert!(record.logical >= end && record.len > 0);
            end = record.logical + record.len;
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_batch_that_was_returned_before_is_an_error_and_no_end() {
        let (path, file) = scratch("again");
        let mut records = records_from(&file, 150, Sync::No);
        (records.request.start, records.count) = (150, 1);
        records.request.extents[0] = RawExtent {
            logical: 100,
            length: 50,
            ..RawExtent::default()
        };
        let error = records.next().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(records.next().is_none());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn parts_that_were_returned_before_are_cut_off() {
        let record = Record {
            logical: 100,
            physical: 1000,
            len: 50,
            flags: Flags::SHARED,
        };
        assert_eq!(behind(record, 100), Some(record));
        assert_eq!(behind(record, 40), Some(record));
        let rest = Record {
            logical: 120,
            physical: 1020,
            len: 30,
            ..record
        };
        assert_eq!(behind(record, 120), Some(rest));
        assert_eq!(behind(record, 150), None);
        assert_eq!(behind(Record { len: 0, ..record }, 100), None);
    }
}
