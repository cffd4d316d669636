//! Places of files on file systems that lack `FS_IOC_FIEMAP`: one block after the other, by
//! `FIBMAP`; and the sizes of a file system.
#![allow(unsafe_code)] // Three system calls that rustix lacks.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

// From <linux/fs.h>: `_IO(0x00, 1)` and `_IO(0x00, 2)`.
const FIBMAP: libc::Ioctl = 1;
const FIGETBSZ: libc::Ioctl = 2;

/// Blocks of a file from here on cannot be asked for: the call takes an `int`.
pub const BLOCKS_MAX: u64 = i32::MAX as u64;

/// The bytes of a block, as [`block`] counts them.
///
/// # Errors
/// The file system has no such unit.
pub fn block_bytes(file: impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the call writes one int to the address given, which is `bytes`.
    match unsafe { libc::ioctl(fd, FIGETBSZ, &raw mut bytes) } {
        0 => u64::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The device's block that a block of the file is in; 0 for none.
///
/// # Errors
/// `EPERM` without `CAP_SYS_RAWIO`; the file system has no answer (`EINVAL`, `ENOTTY`), or the
/// block's number is beyond what the call can say.
pub fn block(file: impl AsFd, index: u64) -> io::Result<u64> {
    let beyond = || io::Error::from_raw_os_error(libc::ERANGE);
    let mut block = libc::c_int::try_from(index).map_err(|_| beyond())?;
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the call reads and writes one int at the address given, which is `block`.
    match unsafe { libc::ioctl(fd, FIBMAP, &raw mut block) } {
        0 => u64::try_from(block).map_err(|_| beyond()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `struct xfs_fsop_geom_v1` of xfs_fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct XfsGeometry {
    block_bytes: u32,
    realtime_extent_blocks: u32,
    group_blocks: u32,
    groups: u32,
    rest: [u32; 4],
    blocks: [u64; 4],
    uuid: [u8; 16],
    more: [u32; 7],
}

const XFS_IOC_FSGEOMETRY_V1: libc::Ioctl = libc::_IOR::<XfsGeometry>(b'X' as u32, 100);

/// The bytes of an allocation group of the XFS that the file is on.
///
/// # Errors
/// It is no XFS.
pub fn xfs_group_bytes(file: impl AsFd) -> io::Result<u64> {
    let mut geometry = XfsGeometry::default();
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the call writes one structure, laid out as the kernel's, to the address given:
    // `geometry`.
    match unsafe { libc::ioctl(fd, XFS_IOC_FSGEOMETRY_V1, &raw mut geometry) } {
        0 => Ok(u64::from(geometry.group_blocks) * u64::from(geometry.block_bytes)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_a_power_of_two_and_blocks_beyond_an_int_are_refused() {
        let file = tempfile::tempfile().expect("a scratch file");
        if let Ok(bytes) = block_bytes(&file) {
            assert!(bytes.is_power_of_two(), "{bytes}");
        }
        let refused = block(&file, BLOCKS_MAX + 1).expect_err("an int holds no such number");
        assert_eq!(refused.raw_os_error(), Some(libc::ERANGE));
    }

    #[test]
    fn the_structure_is_as_long_as_the_kernel_says() {
        assert_eq!(size_of::<XfsGeometry>(), 112);
    }
}
