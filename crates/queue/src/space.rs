//! Space for the holes of a file, by the means that programs have beside `fallocate`: libc's call,
//! a mapping, written zeroes; and where a file has holes.
//!
//! All of it blocks; [`crate::File`] runs it on the pool. Each returns how many system calls it
//! made. A full disk is an error here, never a signal: nothing is stored through a mapping by this
//! process, the kernel is asked to do it.
#![allow(unsafe_code)] // libc's call and a mapping; each says why it is sound.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::fiemap;

/// How a hole gets its space; it reads as zeroes before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillMethod {
    /// libc's `posix_fallocate`, which asks the kernel, or else writes by itself where there is a
    /// hole. The end of file moves up to the end of the range.
    Library,
    /// The range is mapped and filled. It must not be beyond the end of file.
    Mapping,
    /// Zeroes are written, one piece of this many bytes after the other. The end of file moves up.
    Writes {
        /// Bytes of one write; above 0.
        chunk_bytes: usize,
    },
}

/// System calls that were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// `fallocate`, whether or not the file system has it.
    pub fallocate: u64,
    /// Writes; `None` if the system does not count those that libc makes.
    pub writes: Option<u64>,
    /// Reads of zeroes into a mapping.
    pub reads: u64,
    /// Mappings made.
    pub mappings: u64,
}

impl Calls {
    /// All of them, as far as they are known.
    pub fn total(&self) -> u64 {
        self.fallocate + self.writes.unwrap_or(0) + self.reads + self.mappings
    }
}

/// Gives `range` its space; what it holds must be a hole throughout. After an error part of it may
/// have space.
///
/// # Errors
/// The file system's; `EFBIG` beyond what an offset can be; `EINVAL` for a mapping of nothing.
pub fn give(file: impl AsFd, range: Range<u64>, way: FillMethod) -> io::Result<Calls> {
    let file = file.as_fd();
    match way {
        FillMethod::Library => by_library(file, range),
        FillMethod::Mapping => by_mapping(file, range),
        FillMethod::Writes { chunk_bytes } => by_writes(file, range, chunk_bytes),
    }
}

fn by_library(file: BorrowedFd<'_>, range: Range<u64>) -> io::Result<Calls> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let offset = libc::off_t::try_from(range.start).map_err(too_large)?;
    let len = libc::off_t::try_from(range.end - range.start).map_err(too_large)?;
    let before = writes_of_this_thread();
    loop {
        // SAFETY: the call takes three numbers and touches no memory of ours.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), offset, len) } {
            0 => break,
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
    let after = writes_of_this_thread();
    Ok(Calls {
        fallocate: 1,
        writes: before.zip(after).map(|(before, after)| after - before),
        ..Calls::default()
    })
}

/// Write calls of this thread so far (`syscw` of proc_pid_io(5)).
fn writes_of_this_thread() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/io").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("syscw:"))?;
    line.trim().parse().ok()
}

fn by_writes(file: BorrowedFd<'_>, range: Range<u64>, chunk_bytes: usize) -> io::Result<Calls> {
    let zeroes = vec![0; chunk_bytes];
    let writes = write_zeroes(file, range, &zeroes)?;
    Ok(Calls {
        writes: Some(writes),
        ..Calls::default()
    })
}

/// Writes zeroes, at most as many at once as there are; how many calls that took.
fn write_zeroes(file: BorrowedFd<'_>, range: Range<u64>, zeroes: &[u8]) -> io::Result<u64> {
    let (mut at, mut calls) = (range.start, 0);
    while at < range.end {
        let len = zeroes.len().min(usize_of(range.end - at));
        calls += 1;
        match rustix::io::pwrite(file, &zeroes[..len], at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => at += written as u64,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(calls)
}

fn usize_of(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// A part of a file in memory, shared with it.
struct Mapping {
    start: *mut libc::c_void,
    len: usize,
}

impl Mapping {
    fn new(file: BorrowedFd<'_>, range: Range<u64>) -> io::Result<Mapping> {
        let len = usize_of(range.end - range.start);
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses a place where nothing else is. Nothing in this process ever
        // reads or stores through the address, so neither other processes' changes nor a file that
        // is cut matter.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                flags,
                file,
                range.start,
            )
        }?;
        Ok(Mapping { start, len })
    }

    /// Makes the kernel read zeroes into a part of it; returns how many arrived. Where a store of
    /// ours would be answered by SIGBUS, the call is short or fails with `EFAULT`.
    fn read_zeroes(&self, source: &OwnedFd, part: Range<usize>) -> io::Result<usize> {
        assert!(part.start < part.end && part.end <= self.len);
        // SAFETY: the part lies within the mapping, as asserted, and nobody has a reference into
        // it.
        let got = unsafe {
            libc::read(
                source.as_raw_fd(),
                self.start.byte_add(part.start),
                part.end - part.start,
            )
        };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the whole of a mapping that was made here, and nothing refers to it any
        // more.
        let unmapped = unsafe { rustix::mm::munmap(self.start, self.len) };
        debug_assert_eq!(unmapped, Ok(()), "a mapping of ours can be taken down");
    }
}

fn by_mapping(file: BorrowedFd<'_>, range: Range<u64>) -> io::Result<Calls> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let source = rustix::fs::open("/dev/zero", flags, Mode::empty())?;
    let page = rustix::param::page_size() as u64;
    let first = range.start - range.start % page;
    let mapping = Mapping::new(file, first..range.end)?;
    let mut calls = Calls {
        mappings: 1,
        writes: Some(0),
        ..Calls::default()
    };
    let mut at = range.start;
    while at < range.end {
        let part = usize_of(at - first)..mapping.len;
        calls.reads += 1;
        match mapping.read_zeroes(&source, part) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => at += got as u64,
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                // A page cannot be had, for an unknown reason. A write to it fails with the reason;
                // or it works, and the page is done.
                let end = (at - at % page + page).min(range.end);
                let zeroes = vec![0; usize_of(end - at)];
                let writes = write_zeroes(file, at..end, &zeroes)?;
                calls.writes = calls.writes.map(|before| before + writes);
                at = end;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(calls)
}

/// How holes are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HolesBy {
    /// `FS_IOC_FIEMAP`: space that was never written is distinguished from holes.
    Extents,
    /// `SEEK_HOLE`: ranges that read as holes may have space; where the file system does not know
    /// holes, there are none.
    Seeking,
}

/// Parts of a file without space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holes {
    /// Ranges in the order of the file.
    pub ranges: Vec<Range<u64>>,
    /// Offset up to which the file has been looked at.
    pub looked_until: u64,
    /// How they are known.
    pub by: HolesBy,
}

/// The holes of a range of a file, the first `most` of them; beyond the end of file too, unless the
/// space there is known. Dirty data is written out first, so that all places are known: FUSE with a
/// cache for writes calls it a hole before.
///
/// # Errors
/// The system's; [`io::ErrorKind::InvalidData`] if its answer leads nowhere, since ranges outside
/// of the answer may be data.
pub fn holes(file: impl AsFd, range: Range<u64>, most: usize) -> io::Result<Holes> {
    let file = file.as_fd();
    match holes_by_extents(file, range.clone(), most) {
        Err(error) if lacks_extents(&error) => {
            rustix::fs::fdatasync(file)?;
            let ask = |from| Ok(rustix::fs::seek(file, from)?);
            holes_by_seeking(ask, range, most)
        }
        result => result,
    }
}

/// Whether an error says that the file system does not list extents.
fn lacks_extents(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS | libc::EINVAL)
    )
}

/// Holes on their way into a list of bounded length.
struct Found {
    ranges: Vec<Range<u64>>,
    at: u64,
    end: u64,
    most: usize,
}

impl Found {
    /// Space; whether to go on.
    fn space(&mut self, start: u64, end: u64) -> bool {
        let start = start.clamp(self.at, self.end);
        if start > self.at {
            self.ranges.push(self.at..start);
        }
        self.at = end.clamp(start, self.end);
        self.at < self.end && self.ranges.len() < self.most
    }

    fn finish(mut self, by: HolesBy) -> Holes {
        // The list may have become full where the range has not ended.
        let is_full = self.ranges.len() >= self.most;
        if self.at < self.end && !is_full {
            self.ranges.push(self.at..self.end);
            self.at = self.end;
        }
        Holes {
            ranges: self.ranges,
            looked_until: self.at,
            by,
        }
    }
}

fn holes_by_extents(file: BorrowedFd<'_>, range: Range<u64>, most: usize) -> io::Result<Holes> {
    let mut found = Found {
        ranges: Vec::new(),
        at: range.start,
        end: range.end,
        most,
    };
    for record in fiemap::records_from(&file, range.start, fiemap::Sync::First) {
        let record = record?;
        if !found.space(record.logical, record.logical + record.len) {
            break;
        }
    }
    Ok(found.finish(HolesBy::Extents))
}

/// Finds holes by the answers of `ask`, which is `lseek` of the file.
fn holes_by_seeking(
    ask: impl Fn(SeekFrom) -> io::Result<u64>,
    range: Range<u64>,
    most: usize,
) -> io::Result<Holes> {
    let mut found = Found {
        ranges: Vec::new(),
        at: range.start,
        end: range.end,
        most,
    };
    // `None`: there is nothing more, or the file was cut meanwhile.
    let next = |from| match ask(from) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        result => result.map(Some),
    };
    let mut at = range.start;
    while let Some(data) = next(SeekFrom::Data(at))? {
        let Some(hole) = next(SeekFrom::Hole(data))? else {
            break;
        };
        if data < at || hole < data || hole <= at {
            let why = "the file system returns data and holes that lead nowhere";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        if !found.space(data, hole) {
            break;
        }
        at = hole;
    }
    Ok(found.finish(HolesBy::Seeking))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};

    const BLOCK: u64 = 4096;

    fn scratch() -> File {
        tempfile::tempfile().expect("a scratch file")
    }

    #[test]
    fn each_way_gives_space_and_keeps_what_is_beside_it() {
        for way in [
            FillMethod::Library,
            FillMethod::Mapping,
            FillMethod::Writes { chunk_bytes: 5000 },
        ] {
            let file = scratch();
            file.write_all_at(&[7; 10], 0).unwrap();
            file.write_all_at(&[8; 10], 64 * BLOCK).unwrap();
            let calls = give(&file, 2 * BLOCK..60 * BLOCK, way).unwrap();
            assert!(calls.total() > 0, "{way:?}: {calls:?}");
            file.sync_all().unwrap();
            let blocks = file.metadata().unwrap().blocks() * 512;
            assert!(blocks >= 60 * BLOCK, "{way:?}: {blocks}");
            let mut bytes = vec![1; 65 * BLOCK as usize];
            let len = file.read_at(&mut bytes, 0).unwrap();
            assert_eq!(len as u64, 64 * BLOCK + 10);
            let expected = |at: usize| match at as u64 {
                0..10 => 7,
                at if at >= 64 * BLOCK => 8,
                _ => 0,
            };
            assert!((0..len).all(|at| bytes[at] == expected(at)), "{way:?}");
        }
    }

    #[test]
    fn calls_are_those_that_were_made() {
        let file = scratch();
        let written = give(
            &file,
            0..10 * BLOCK,
            FillMethod::Writes { chunk_bytes: 4096 },
        )
        .unwrap();
        assert_eq!(written.writes, Some(10));
        assert_eq!(written.total(), 10);
        let file = scratch();
        file.set_len(10 * BLOCK).unwrap();
        let mapped = give(&file, 0..10 * BLOCK, FillMethod::Mapping).unwrap();
        assert_eq!((mapped.mappings, mapped.writes), (1, Some(0)));
        assert!(mapped.reads >= 1);
    }

    #[test]
    fn a_mapping_beyond_the_end_of_file_is_written_instead() {
        // A page that cannot be had: a store would be answered by SIGBUS.
        let file = scratch();
        file.set_len(2 * BLOCK).unwrap();
        let calls = give(&file, 0..4 * BLOCK, FillMethod::Mapping).unwrap();
        assert!(calls.writes.unwrap() > 0, "{calls:?}");
        assert_eq!(file.metadata().unwrap().len(), 4 * BLOCK);
    }

    #[test]
    fn holes_are_listed_in_order_and_in_parts() {
        let file = scratch();
        for island in 0..20 {
            file.write_all_at(&[1; 4096], (2 * island + 1) * 16 * BLOCK)
                .unwrap();
        }
        let end = 50 * 16 * BLOCK;
        let all = holes(&file, 0..end, usize::MAX).unwrap();
        assert_eq!(all.looked_until, end);
        assert_eq!(all.ranges.len(), 21, "{all:?}");
        assert_eq!(all.ranges[0], 0..16 * BLOCK);
        assert_eq!(all.ranges[1], 17 * BLOCK..48 * BLOCK);
        assert_eq!(all.ranges[20].end, end);
        let mut parts = Vec::new();
        let mut at = 0;
        while at < end {
            let part = holes(&file, at..end, 3).unwrap();
            assert!(part.ranges.len() <= 3 && part.looked_until > at);
            parts.extend(part.ranges);
            at = part.looked_until;
        }
        assert_eq!(parts, all.ranges);
    }

    #[test]
    fn a_walk_that_leads_nowhere_is_an_error_and_no_hole() {
        let found = |data: u64, hole: u64| {
            let ask = move |from| match from {
                SeekFrom::Data(0) => Ok(0),
                SeekFrom::Hole(0) => Ok(4096),
                SeekFrom::Data(_) => Ok(data),
                _ => Ok(hole),
            };
            holes_by_seeking(ask, 0..1 << 20, usize::MAX)
        };
        for (data, hole) in [(0, 4096), (8192, 8192), (8192, 4096), (4096, 4096)] {
            let error = found(data, hole).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{data} {hole}");
        }
        let whole = found(8192, 1 << 20).unwrap();
        assert_eq!(whole.ranges.len(), 1);
        assert_eq!(whole.ranges[0], 4096..8192);
    }

    #[test]
    fn space_that_was_never_written_is_no_hole() {
        let file = scratch();
        let Ok(()) = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 1 << 20)
        else {
            eprintln!("SKIPPED: the file system has no fallocate");
            return;
        };
        let found = holes(&file, 0..2 << 20, usize::MAX).unwrap();
        if found.by == HolesBy::Extents {
            assert_eq!(found.ranges.len(), 1);
            assert_eq!(found.ranges[0], 1 << 20..2 << 20);
        }
    }
}
