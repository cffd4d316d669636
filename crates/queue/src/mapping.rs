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
        // Huge pages are mapped and unmapped as a whole: the file system's blocks are of their
        // size.
        let page = u64::try_from(stat.st_blksize).unwrap_or(1).max(1);
        let whole = end.checked_next_multiple_of(page);
        let mapped_len = whole.and_then(|len| usize::try_from(len).ok());
        let mapped_len = mapped_len.ok_or_else(|| invalid("too large for an address"))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses an address that is free, so no memory of ours is replaced.
        let base = unsafe { mmap(std::ptr::null_mut(), mapped_len, protection, flags, file, 0) }?;
        let base = NonNull::new(base.cast::<u8>()).expect("no mapping is at address 0");
        // Both are less than the length that was mapped.
        let (offset, len) = (offset as usize, len as usize);
        Ok(Mapping {
            base,
            mapped_len,
            offset,
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn a_part_of_a_huge_page_is_mapped_and_unmapped() {
        let huge = match memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) {
            Ok(file) => file,
            Err(error) => {
                eprintln!("SKIPPED: no huge pages here: {error}");
                return;
            }
        };
        ftruncate(&huge, 4 << 20).unwrap();
        // The memory of a guest below the frame buffer, as QEMU passes it.
        let mapping = Mapping::of(huge.as_fd(), 0, 0xA_0000).unwrap();
        let address = format!("{:x}-", mapping.base.as_ptr().addr());
        let is_mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().any(|line| line.starts_with(&address))
        };
        assert!(is_mapped());
        drop(mapping);
        assert!(!is_mapped());
    }
}
