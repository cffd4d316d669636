//! The kernel's FUSE device: each read takes one request of the kernel, each write answers one.
//!
//! Descriptors are non-blocking. On a ring the task waits for the descriptor to be ready, by an
//! operation that shares the ring's system call with everything else; requests themselves are taken
//! and answered by direct calls, which the kernel finishes at once: the ring would have to ask
//! whether the descriptor is ready for each of them. Newer kernels have operations of the ring that
//! do better (`fuse_slot.rs`).
#![allow(unsafe_code)] // One system call that rustix lacks.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::driver::Driver;
use crate::epoll::Interest;
use crate::executor::Core;
use crate::fuse_slot::FuseSlot;
use crate::pending::Pending;
use crate::socket::wait_ready;

/// The device node.
const NODE: &str = "/dev/fuse";

/// `FUSE_DEV_IOC_CLONE` of linux/fuse.h: makes a new descriptor a further channel of a connection.
const CLONE: libc::Ioctl = libc::_IOR::<u32>(229, 0);

/// A channel of a connection to the kernel.
#[derive(Debug)]
pub struct FuseDevice {
    fd: Arc<OwnedFd>,
}

impl FuseDevice {
    /// Opens the device, for a connection that a mount will make.
    ///
    /// # Errors
    /// The system's refusal, as where there is no such device.
    pub fn open() -> io::Result<FuseDevice> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open(Path::new(NODE), flags, Mode::empty())?;
        Ok(FuseDevice { fd: Arc::new(fd) })
    }

    /// Takes over a descriptor, such as one that another process has mounted.
    ///
    /// # Errors
    /// It cannot be made non-blocking.
    pub fn from_fd(fd: OwnedFd) -> io::Result<FuseDevice> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(FuseDevice { fd: Arc::new(fd) })
    }

    /// Opens a further channel of the same connection, which is mounted. A request is answered on
    /// the channel that it came by.
    ///
    /// # Errors
    /// The system's refusal; this is no connection.
    pub fn another(&self) -> io::Result<FuseDevice> {
        let channel = FuseDevice::open()?;
        let connection = self.fd.as_raw_fd() as u32;
        // SAFETY: the call reads one u32 from the address given, which is `connection`.
        let result = unsafe { libc::ioctl(channel.fd.as_raw_fd(), CLONE, &raw const connection) };
        match result {
            0.. => Ok(channel),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Another owner of the same channel.
    pub fn share(&self) -> FuseDevice {
        FuseDevice {
            fd: Arc::clone(&self.fd),
        }
    }

    /// Takes a request, if there is one: its first bytes are in `head`, and what does not fit there
    /// is in `tail`. Returns its length in bytes.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; ENODEV when the file system is unmounted; others of the
    /// system.
    pub fn receive(&self, head: &mut [u8], tail: &mut [u8]) -> io::Result<usize> {
        let mut parts = [IoSliceMut::new(head), IoSliceMut::new(tail)];
        loop {
            match rustix::io::readv(&*self.fd, &mut parts) {
                // ENOENT: the request was withdrawn while it was being read.
                Err(Errno::INTR | Errno::NOENT) => {}
                result => return Ok(result?),
            }
        }
    }

    /// Answers a request with the bytes of all parts.
    ///
    /// # Errors
    /// ENOENT if the request is not waited for any more; EINVAL for an answer that does not fit it;
    /// others of the system.
    pub fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        loop {
            match rustix::io::writev(&*self.fd, parts) {
                Err(Errno::INTR) => {}
                result => return Ok(result.map(drop)?),
            }
        }
    }

    /// Gives a slot to the kernel, with the answer to the request that is in it if it had one, and
    /// returns it with the next request. The operation has begun when this returns.
    ///
    /// It cannot be taken back: what the kernel has when the queue is dropped is left to it, with
    /// its memory, until the process ends.
    ///
    /// # Errors
    /// `Unsupported` where the queue takes no commands of devices. Those of the result are the
    /// system's: ENOTCONN when the file system is unmounted, or what it says of a slot that it does
    /// not take.
    ///
    /// # Panics
    /// Outside a queue.
    pub fn exchange(&self, slot: FuseSlot) -> io::Result<Pending<io::Result<FuseSlot>>> {
        let started = Core::with_current(|core| match &core.driver {
            Driver::Uring(ring) => ring.exchange(&self.fd, slot),
            Driver::Epoll(_) => None,
        });
        let started = started.expect("slots are exchanged on a running queue");
        started.ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Waits until there may be a request, or the file system is unmounted.
    ///
    /// # Errors
    /// The system's.
    ///
    /// # Panics
    /// Outside a queue.
    pub async fn readable(&self) -> io::Result<()> {
        wait_ready(&self.fd, Interest::Readable).await
    }
}

impl AsFd for FuseDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
