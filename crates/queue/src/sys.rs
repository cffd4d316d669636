//! Safe names for the system calls that rustix lacks, and the queue's event.
#![allow(unsafe_code)] // Calls of libc; each says why it is sound.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

/// The counter by which other threads wake a queue.
pub(crate) fn new_event() -> io::Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(rustix::event::eventfd(0, flags)?)
}

/// Wakes the queue that sleeps on the event.
pub(crate) fn signal_event(event: &OwnedFd) {
    match rustix::io::write(event, &1u64.to_ne_bytes()) {
        // A full counter wakes as well as one that has room.
        Ok(_) | Err(Errno::AGAIN) => {}
        Err(error) => panic!("signalling a queue: {error}"),
    }
}

/// Sets the counter back.
pub(crate) fn clear_event(event: &OwnedFd) {
    match rustix::io::read(event, &mut [0u8; 8]) {
        Ok(_) | Err(Errno::AGAIN) => {}
        Err(error) => panic!("reading a queue's event: {error}"),
    }
}

// From <linux/fs.h>; the numbers are the same on all architectures that Rust's Linux targets share
// but MIPS, PowerPC and SPARC for the one that has a direction.
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKGETSIZE64: libc::Ioctl = libc::_IOR::<usize>(0x12, 114);

/// The size of a block device in bytes.
pub(crate) fn block_device_size(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let mut size = 0u64;
    // SAFETY: the call writes one u64 to the address given, which is `size`.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKGETSIZE64, &raw mut size) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(size)
}

/// Discards a range of a block device that is not needed any more.
pub(crate) fn discard_blocks(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    let range = [offset, len];
    // SAFETY: the call reads two u64 from the address given, which is `range`.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Closes a descriptor, and returns the error that dropping it would not.
pub(crate) fn close(fd: OwnedFd) -> io::Result<()> {
    // SAFETY: nothing else owns the descriptor, and nothing uses it afterwards: on Linux it is gone
    // whatever the outcome.
    match unsafe { libc::close(fd.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reads from an offset of a file into slices of memory, one after the other.
///
/// # Safety
/// The memory of the slices may be written until this returns.
pub(crate) unsafe fn read_at(
    fd: BorrowedFd<'_>,
    slices: &[libc::iovec],
    offset: u64,
) -> io::Result<usize> {
    let (at, count) = (offset_of(offset)?, slices.len() as libc::c_int);
    // SAFETY: the call reads the slices, and writes to what they refer to, as the caller allows.
    let got = unsafe { libc::preadv64(fd.as_raw_fd(), slices.as_ptr(), count, at) };
    transferred(got)
}

/// Writes slices of memory, one after the other, to a file from an offset on.
///
/// # Safety
/// The memory of the slices is there until this returns.
pub(crate) unsafe fn write_at(
    fd: BorrowedFd<'_>,
    slices: &[libc::iovec],
    offset: u64,
    flags: libc::c_int,
) -> io::Result<usize> {
    let (at, count) = (offset_of(offset)?, slices.len() as libc::c_int);
    // The offset comes in two words, of which the kernel looks at as many as it takes.
    let (low, high) = (at as libc::c_long, (at >> 32) as libc::c_long);
    let (fd, slices) = (fd.as_raw_fd(), slices.as_ptr());
    // Its place is on the stack, a word of which all bytes are to be written.
    let flags = libc::c_long::from(flags);
    // SAFETY: the call reads the slices and what they refer to, which the caller keeps.
    let written = unsafe { libc::syscall(libc::SYS_pwritev2, fd, slices, count, low, high, flags) };
    transferred(written as libc::ssize_t)
}

/// Sends slices of memory, one after the other, without waiting for room in the socket.
///
/// # Safety
/// The memory of the slices is there until this returns.
pub(crate) unsafe fn send(fd: BorrowedFd<'_>, slices: &mut [libc::iovec]) -> io::Result<usize> {
    // SAFETY: a plain C structure, for which all zeroes is a value: no address, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = slices.as_mut_ptr();
    message.msg_iovlen = slices.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the call reads the message, its slices, and what they refer to, which the caller
    // keeps.
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) };
    transferred(sent)
}

fn offset_of(offset: u64) -> io::Result<libc::off64_t> {
    offset
        .try_into()
        .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn transferred(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Makes one call about locks that belong to the open file (`F_OFD_*`); `kind` is `F_RDLCK` or its
/// kin. Returns the kernel's answer.
pub(crate) fn file_lock(
    fd: BorrowedFd<'_>,
    command: libc::c_int,
    kind: libc::c_int,
    (start, len): (u64, u64),
) -> io::Result<libc::c_int> {
    let out_of_range = |_| io::Error::from_raw_os_error(libc::EOVERFLOW);
    // SAFETY: `flock` is a plain C structure, for which all zeroes is a value; `l_pid` must be 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start.try_into().map_err(out_of_range)?;
    lock.l_len = len.try_into().map_err(out_of_range)?;
    // SAFETY: the call reads and writes the structure at the address given, which is `lock`.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut lock) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::c_int::from(lock.l_type))
}
