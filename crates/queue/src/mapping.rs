//! A part of a file in memory, shared with the other processes that map it.
#![allow(unsafe_code)] // Mapping and unmapping; each says why it is sound.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::fs::{FileType, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The mapped part, from its first byte on.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// The first byte of the mapping, which begins with the file's first byte.
    base: NonNull<u8>,
    mapped_len: usize,
    /// Offset of the part in the mapping.
    offset: usize,
    len: usize,
}

// SAFETY: a mapping is memory of the process; access to it is the business of `SharedMemory`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes at `offset` of a file, readable and writable.
    ///
    /// The mapping begins with the file: an offset need not be a multiple of the pages that the
    /// file has, which may be huge ones.
    ///
    /// # Errors
    /// The file ends before the part does (access would raise SIGBUS); the system's refusal.
    pub(crate) fn of(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<Mapping> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let end = offset.checked_add(len);
        let (Some(end), 1..) = (end, len) else {
            return Err(invalid(
                "a part of a file has at least one byte, and an end",
            ));
        };
        let stat = fstat(file)?;
        let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if is_regular && u64::try_from(stat.st_size).unwrap_or(0) < end {
            return Err(invalid(
                "the file ends before the part that is to be mapped",
            ));
        }
        let mapped_len = usize::try_from(end).map_err(|_| invalid("too large for an address"))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses an address that is free, so no memory of ours is replaced.
        let base = unsafe { mmap(std::ptr::null_mut(), mapped_len, protection, flags, file, 0) }?;
        let base = NonNull::new(base.cast::<u8>()).expect("no mapping is at address 0");
        let len = usize::try_from(len).map_err(|_| invalid("too large for an address"))?;
        Ok(Mapping {
            base,
            mapped_len,
            offset: mapped_len - len,
            len,
        })
    }

    /// The first byte of the part.
    pub(crate) fn start(&self) -> NonNull<u8> {
        // SAFETY: the part lies within the mapping.
        unsafe { self.base.add(self.offset) }
    }

    /// Length of the part in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `of` with this length; those that use the memory keep the mapping.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.mapped_len) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
