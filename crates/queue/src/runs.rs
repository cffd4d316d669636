//! Runs of a file: data and holes, and what of it a write changes in place, so that it needs no new
//! space.
//!
//! A write to a hole needs space, and one to an extent that copies of the file share. A file system
//! that writes to new places needs it for each write; btrfs spares files without copy-on-write,
//! which is not asked for here.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::fiemap::{self, Flags};

/// A run of a file with one state, as `lseek` finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First byte.
    pub start: u64,
    /// First byte after it.
    pub end: u64,
    /// Whether it reads as zeroes and takes no space.
    pub hole: bool,
}

/// File systems that write to new places: btrfs, bcachefs and ZFS, by their numbers in statfs(2).
const MOVE_WRITES: [u32; 3] = [0x9123_683e, 0xca45_1a4e, 0x2fc1_2fc1];

/// File systems by what `statfs` calls them, whose `lseek` finds data that is in the page cache
/// alone: ext2 to ext4, XFS, btrfs, f2fs, tmpfs, bcachefs, NFS.
const FIND_CACHED_DATA: [u32; 7] = [
    0xEF53,
    0x5846_5342,
    0x9123_683E,
    0xF2F5_2010,
    0x0102_1994,
    0xCA45_1A4E,
    0x6969,
];

/// Whether what `lseek` calls a hole is one. FUSE with a cache for writes calls data a hole that
/// it has not written back. So that is done first through a descriptor that only reads; through one
/// that writes the error of it would be reported here and not to the next flush.
fn finds_all_data(fd: &OwnedFd) -> bool {
    use rustix::fs::OFlags;
    let (Ok(system), Ok(flags)) = (rustix::fs::fstatfs(fd), rustix::fs::fcntl_getfl(fd)) else {
        return false;
    };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // A number of 32 bits.
    let kind = system.f_type as u32;
    FIND_CACHED_DATA.contains(&kind)
        || flags.contains(OFlags::DIRECT)
        || (flags & OFlags::RWMODE == OFlags::RDONLY && rustix::fs::fdatasync(fd).is_ok())
}

/// Data and holes of `[start, end)`, in order, covering it.
pub(crate) fn find_runs(fd: &OwnedFd, start: u64, end: u64) -> io::Result<Vec<Run>> {
    if start < end && !finds_all_data(fd) {
        let hole = false;
        return Ok(vec![Run { start, end, hole }]);
    }
    // Beyond what an offset can be there is nothing.
    const OFFSET_MAX: u64 = i64::MAX as u64;
    let mut runs: Vec<Run> = Vec::new();
    let mut at = start;
    while at < end {
        let data = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(data) => data.clamp(at, end),
            // No data from here on.
            Err(Errno::NXIO) => end,
            Err(_) if at > OFFSET_MAX => end,
            Err(error) => return Err(error.into()),
        };
        if data > at {
            runs.push(Run {
                start: at,
                end: data,
                hole: true,
            });
        }
        if data == end {
            break;
        }
        let hole = match rustix::fs::seek(fd, SeekFrom::Hole(data)) {
            // The file may have been cut in between: then this is the end.
            Err(Errno::NXIO) => end,
            Ok(hole) if hole > data => hole.min(end),
            Ok(_) => end,
            Err(error) => return Err(error.into()),
        };
        runs.push(Run {
            start: data,
            end: hole,
            hole: false,
        });
        at = hole;
    }
    Ok(runs)
}

/// Data and holes of `[start, end)`, in order, where what a write may need space for is a hole.
pub(crate) fn find_own(fd: &OwnedFd, start: u64, end: u64) -> io::Result<Vec<Run>> {
    if start >= end {
        return Ok(Vec::new());
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // A number of 32 bits.
    let kind = rustix::fs::fstatfs(fd)?.f_type as u32;
    if MOVE_WRITES.contains(&kind) {
        let hole = true;
        return Ok(vec![Run { start, end, hole }]);
    }
    let runs = find_runs(fd, start, end)?;
    let mut own = Vec::with_capacity(runs.len());
    let mut shared = shared_runs(fd, start, end).into_iter().peekable();
    for run in runs {
        let mut at = run.start;
        while let Some(other) = shared.peek().cloned()
            && (at < run.end && other.start < run.end)
        {
            let cut = other.start.max(at)..other.end.min(run.end);
            if other.end <= run.end {
                shared.next();
            }
            push(&mut own, (at, cut.start), run.hole);
            push(&mut own, (cut.start, cut.end), true);
            at = at.max(cut.end);
        }
        push(&mut own, (at, run.end), run.hole);
    }
    Ok(own)
}

fn push(runs: &mut Vec<Run>, (start, end): (u64, u64), hole: bool) {
    match runs.last_mut() {
        _ if start >= end => {}
        Some(last) if last.hole == hole => last.end = end,
        _ => runs.push(Run { start, end, hole }),
    }
}

/// The runs that copies share; none where the file system does not list extents.
fn shared_runs(fd: &OwnedFd, start: u64, end: u64) -> Vec<std::ops::Range<u64>> {
    let fd = fd.as_fd();
    fiemap::records_from(&fd, start, fiemap::Sync::No)
        .map_while(Result::ok)
        .take_while(|record| record.logical < end)
        .filter(|record| record.flags.has(Flags::SHARED))
        .map(|record| record.logical..record.logical + record.len)
        .collect()
}
