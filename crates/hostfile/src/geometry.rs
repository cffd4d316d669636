//! Abilities of a file of the host, asked of the kernel when the file is opened.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use cowslip_queue::BufMut;
use rustix::fs::{AtFlags, FileType, Stat, StatxFlags};
use rustix::io::Errno;

/// Demands of direct I/O, in powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectAlignment {
    /// Alignment of memory.
    pub(super) memory_bytes: u32,
    /// Alignment of offsets and lengths.
    pub(super) offset_bytes: u32,
}

/// Block size that file systems allocate in, as a rule; finer ranges are not left to their calls.
pub(super) const BLOCK_BYTES: u64 = 4096;
/// Alignment that satisfies every known file system; it is kept where nothing can be found out.
const SAFE_BYTES: u32 = 4096;

/// Returns the alignment that direct I/O on this file demands.
pub(super) fn direct_alignment(fd: &OwnedFd) -> io::Result<DirectAlignment> {
    let found = reported_alignment(fd)?;
    // Where blocks are smaller than pages, file systems write some of what is direct through the
    // cache (XFS a shared block, ext4 a hole of a file without extents). Another direct write
    // within that page then fails the next flush, as its page cannot be dropped.
    let page = u32::try_from(rustix::param::page_size()).unwrap_or(SAFE_BYTES);
    let has_small_blocks = rustix::fs::fstatfs(fd)
        .is_ok_and(|system| u32::try_from(system.f_bsize).is_ok_and(|bytes| bytes < page));
    let is_file = FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::RegularFile;
    Ok(match has_small_blocks && is_file {
        true => DirectAlignment {
            offset_bytes: found.offset_bytes.max(page),
            ..found
        },
        false => found,
    })
}

fn reported_alignment(fd: &OwnedFd) -> io::Result<DirectAlignment> {
    let answer = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(answer) = answer
        && StatxFlags::from_bits_retain(answer.stx_mask).contains(StatxFlags::DIOALIGN)
        && answer.stx_dio_offset_align.is_power_of_two()
        && answer.stx_dio_mem_align.is_power_of_two()
    {
        return Ok(DirectAlignment {
            // Slices of buffers start at guest sectors, so a finer demand gains nothing.
            memory_bytes: answer.stx_dio_mem_align.min(SAFE_BYTES),
            offset_bytes: answer.stx_dio_offset_align,
        });
    }
    probe_alignment(fd)
}

/// Kernels before 6.1 and some file systems do not report it; then the shortest read that works
/// does.
fn probe_alignment(fd: &OwnedFd) -> io::Result<DirectAlignment> {
    let mut buf = BufMut::zeroed(SAFE_BYTES as usize);
    for len in [1, 512, 1024, 2048, 4096] {
        match rustix::io::pread(fd, &mut buf[..len as usize], 0) {
            // A single byte: the file is empty or the file system does not mind and reads through
            // the cache, so this says nothing about what is best.
            Ok(_) if len == 1 => break,
            Ok(_) => {
                return Ok(DirectAlignment {
                    memory_bytes: len,
                    offset_bytes: len,
                });
            }
            Err(Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(DirectAlignment {
        memory_bytes: SAFE_BYTES,
        offset_bytes: SAFE_BYTES,
    })
}

/// Abilities of the file system or the device for space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpaceCalls {
    /// Alignment of offsets and lengths, whether or not the page cache is used.
    pub(super) alignment_bytes: u32,
    pub(super) zeroes_fast: bool,
    pub(super) punches_holes: bool,
}

/// File systems by what `statfs` calls them. Known rather than tried: trying would change the
/// modification time of a file that is only being opened.
const ZERO_AND_PUNCH: [u32; 6] = [
    0xEF53,      // ext4
    0x5846_5342, // XFS
    0x9123_683E, // btrfs
    0xF2F5_2010, // F2FS
    0xCA45_1A4E, // bcachefs
    0x7461_636F, // OCFS2
];
const PUNCH: [u32; 3] = [
    0x0102_1994, // tmpfs
    0x6969,      // NFS, from 4.2 on
    0x0116_1970, // GFS2
];

pub(super) fn space_calls(fd: &OwnedFd, stat: &Stat) -> SpaceCalls {
    let kind = FileType::from_raw_mode(stat.st_mode);
    if matches!(kind, FileType::BlockDevice | FileType::CharacterDevice) {
        return SpaceCalls {
            alignment_bytes: logical_block_bytes(fd, kind),
            zeroes_fast: kind == FileType::BlockDevice && device_zeroes_fast(stat),
            // Discarded blocks may read as anything.
            punches_holes: false,
        };
    }
    let magic = rustix::fs::fstatfs(fd.as_fd()).map_or(0, |answer| answer.f_type as u32);
    SpaceCalls {
        // A file system zeroes parts of its blocks.
        alignment_bytes: 1,
        zeroes_fast: ZERO_AND_PUNCH.contains(&magic),
        punches_holes: ZERO_AND_PUNCH.contains(&magic) || PUNCH.contains(&magic),
    }
}

/// The unit that a block device is addressed by. Its calls for space take nothing finer.
fn logical_block_bytes(fd: &OwnedFd, kind: FileType) -> u32 {
    if kind != FileType::BlockDevice {
        return 1;
    }
    match rustix::fs::ioctl_blksszget(fd) {
        Ok(bytes) if bytes.is_power_of_two() => bytes,
        Ok(_) | Err(_) => SAFE_BYTES,
    }
}

/// Whether the device has a command for zeroes, by the entries of the kernel's file system.
fn device_zeroes_fast(stat: &Stat) -> bool {
    has_queue_limit(stat.st_rdev, "write_zeroes_max_bytes")
}

/// Whether the device below can zero blocks and keep them allocated, so that
/// `FALLOC_FL_WRITE_ZEROES` works on its files (Documentation/ABI/stable/sysfs-block, Linux 6.17).
pub(super) fn allocates_written(stat: &Stat) -> bool {
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    let device = if is_device { stat.st_rdev } else { stat.st_dev };
    has_queue_limit(device, "write_zeroes_unmap_max_bytes")
}

/// Whether a limit of the device's queue is more than 0.
fn has_queue_limit(device: u64, name: &str) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition has no queue of its own, its disk is the directory above.
    ["queue", "../queue"].iter().any(|queue| {
        let limit = fs::read_to_string(device.join(queue).join(name));
        limit.is_ok_and(|text| text.trim().parse::<u64>().is_ok_and(|bytes| bytes > 0))
    })
}
