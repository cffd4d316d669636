//! Space that holes keep: btrfs frees an extent when none of its bytes is used any more, so a hole
//! that is punched into one gives nothing back, nor does what is written to a new place for it.
//! Only what is left of the extent can be written elsewhere (`BTRFS_IOC_DEFRAG_RANGE`).
#![allow(unsafe_code)] // One system call that rustix lacks.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use crate::fiemap::{self, Flags};

/// btrfs, as `statfs` calls it.
const BTRFS: u32 = 0x9123_683e;
/// A range whose extents have at least this many bytes stays as it is.
const WHOLE_BYTES: u64 = 64 << 20;
/// `BTRFS_DEFRAG_RANGE_START_IO`: what is rewritten is on its way to the device afterwards.
const START_IO: u64 = 2;

/// `struct btrfs_ioctl_defrag_range_args` of linux/btrfs.h.
#[repr(C)]
#[derive(Default)]
struct Arguments {
    start: u64,
    len: u64,
    flags: u64,
    extent_bytes: u32,
    compression: u32,
    unused: [u32; 4],
}

const BTRFS_IOC_DEFRAG_RANGE: libc::Ioctl = libc::_IOW::<Arguments>(0x94, 16);

/// Has the file system free what holes of a range keep, by having it write the range elsewhere if
/// it lies in several extents, of which one has less than 64 MiB. Returns when that space is free,
/// with the number of bytes that were written; 0 if there is nothing to gain.
///
/// The file's last extent stays: the kernel joins none that has no other behind it, and would
/// leave an end of it, which keeps all of it.
///
/// Nothing is done to a range of which copies share some space, since they would keep all of it,
/// nor for compressed extents, which are short.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`] where holes keep nothing; the file system's.
pub fn release(file: impl AsFd, range: Range<u64>) -> io::Result<u64> {
    let fd = file.as_fd();
    if rustix::fs::fstatfs(fd)?.f_type as u32 != BTRFS {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let (bytes, end) = in_pieces(fd, &range)?;
    if bytes == 0 {
        return Ok(0);
    }
    let arguments = Arguments {
        start: range.start,
        len: end - range.start,
        flags: START_IO,
        // Which extents are short has been looked at: those of one range go together.
        extent_bytes: u32::MAX,
        ..Arguments::default()
    };
    // SAFETY: the call reads one structure, laid out as the kernel's, from the address given.
    let result =
        unsafe { libc::ioctl(fd.as_raw_fd(), BTRFS_IOC_DEFRAG_RANGE, &raw const arguments) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // What nothing refers to any more is free with the next commit.
    rustix::fs::syncfs(fd)?;
    Ok(bytes)
}

/// Bytes of a range in several extents, of which some are short, and its end without the file's
/// last extent; else 0 bytes.
fn in_pieces(fd: impl AsFd, range: &Range<u64>) -> io::Result<(u64, u64)> {
    let (mut bytes, mut pieces, mut some_short) = (0, 0_u64, false);
    let mut end = range.end;
    for record in fiemap::records_from(&fd, range.start, fiemap::Sync::No) {
        let record = record?;
        if record.logical >= range.end {
            break;
        }
        if record.flags.has(Flags::SHARED.with(Flags::ENCODED)) {
            return Ok((0, end));
        }
        pieces += 1;
        if record.flags.has(Flags::LAST) {
            end = record.logical;
            break;
        }
        some_short |= record.len < WHOLE_BYTES;
        bytes += record.len.min(range.end - record.logical);
    }
    Ok(match pieces > 1 && some_short {
        true => (bytes, end),
        false => (0, end),
    })
}
