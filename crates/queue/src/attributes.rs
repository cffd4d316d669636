//! File attributes that are set while a file has no data: the extent size hint of XFS, and no
//! copy-on-write on btrfs.
#![allow(unsafe_code)] // One system call, in two directions, that rustix lacks.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::IFlags;

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Attributes {
    flags: u32,
    extent_bytes: u32,
    extents: u32,
    project: u32,
    cow_extent_bytes: u32,
    padding: [u8; 8],
}

const FS_IOC_FSGETXATTR: libc::Ioctl = libc::_IOR::<Attributes>(b'X' as u32, 31);
const FS_IOC_FSSETXATTR: libc::Ioctl = libc::_IOW::<Attributes>(b'X' as u32, 32);
/// The hint for extents counts.
const FS_XFLAG_EXTSIZE: u32 = 0x800;

fn attributes(file: &impl AsFd) -> io::Result<Attributes> {
    let mut out = Attributes::default();
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the call writes one structure, laid out as the kernel's, to the address given: `out`.
    match unsafe { libc::ioctl(fd, FS_IOC_FSGETXATTR, &raw mut out) } {
        0 => Ok(out),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The extent size hint in bytes; 0 if none is set.
///
/// # Errors
/// The file system has no such attribute.
pub fn extent_hint_bytes(file: impl AsFd) -> io::Result<u32> {
    let attributes = attributes(&file)?;
    Ok(match attributes.flags & FS_XFLAG_EXTSIZE {
        0 => 0,
        _ => attributes.extent_bytes,
    })
}

/// Sets the extent size hint in bytes, or removes it with 0.
///
/// # Errors
/// The file system has no such attribute, cannot have this unit, or the file has data already. Some
/// accept the attribute and ignore the unit, as ext4 does: that is [`io::ErrorKind::Unsupported`].
pub fn set_extent_hint(file: impl AsFd, bytes: u32) -> io::Result<()> {
    let mut wanted = attributes(&file)?;
    wanted.extent_bytes = bytes;
    match bytes {
        0 => wanted.flags &= !FS_XFLAG_EXTSIZE,
        _ => wanted.flags |= FS_XFLAG_EXTSIZE,
    }
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the call reads one structure from the address given, which is `wanted`.
    if unsafe { libc::ioctl(fd, FS_IOC_FSSETXATTR, &raw const wanted) } != 0 {
        return Err(io::Error::last_os_error());
    }
    match extent_hint_bytes(&file)? {
        taken if taken == bytes => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
    }
}

/// Makes writes to the file overwrite its data in place. A file without data only.
///
/// # Errors
/// The file system always does so, or never, or the file has data already.
pub fn set_nocow(file: impl AsFd) -> io::Result<()> {
    let flags = rustix::fs::ioctl_getflags(&file)?;
    Ok(rustix::fs::ioctl_setflags(&file, flags | IFlags::NOCOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_file_has_no_hint_and_takes_one_where_there_are_hints() {
        let file = tempfile::tempfile().expect("a scratch file");
        match extent_hint_bytes(&file) {
            Ok(before) => {
                assert_eq!(before, 0);
                let set = set_extent_hint(&file, 1 << 20);
                let after = extent_hint_bytes(&file).expect("it was known before");
                assert_eq!(after, if set.is_ok() { 1 << 20 } else { 0 });
            }
            Err(error) => assert!(error.raw_os_error().is_some()),
        }
    }
}
