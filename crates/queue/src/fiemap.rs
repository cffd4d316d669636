//! Where the host's file system has put a file: its extents, as `FS_IOC_FIEMAP` tells them.
//!
//! For reports on fragmentation. Leaves out what each extent's flags mean but for the one that ends
//! the list.
#![allow(unsafe_code)] // One system call that rustix lacks.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// A run of a file in one place of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostExtent {
    /// Offset in the file in bytes.
    pub logical: u64,
    /// Offset on the device in bytes.
    pub physical: u64,
    /// Length in bytes.
    pub len: u64,
}

impl HostExtent {
    /// Whether `next` goes on where this ends, in the file and on the device.
    fn continues_in(&self, next: &HostExtent) -> bool {
        self.logical + self.len == next.logical && self.physical + self.len == next.physical
    }
}

/// `struct fiemap_extent` of linux/fiemap.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// Extents asked for with one call.
const BATCH: usize = 128;

/// `struct fiemap` of linux/fiemap.h with room for a batch.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [RawExtent; BATCH],
}

/// `_IOWR('f', 11, struct fiemap)`: the size in it is that of the structure without extents.
const FS_IOC_FIEMAP: u32 = 0xC020_660B;
/// Write dirty pages out first, so that delayed allocation has happened.
const FIEMAP_FLAG_SYNC: u32 = 1;
/// The file's last extent.
const FIEMAP_EXTENT_LAST: u32 = 1;

/// The extents of a file, those that follow on from another joined with it, whatever their state:
/// the boundary between written and unwritten space costs no seek.
///
/// # Errors
/// `Unsupported` (`EOPNOTSUPP`) where the file system cannot tell, or the system's failure.
pub fn extents(file: impl AsFd) -> io::Result<Vec<HostExtent>> {
    let mut found: Vec<HostExtent> = Vec::new();
    let mut start = 0;
    loop {
        let mut request = Request {
            start,
            length: u64::MAX - start,
            flags: FIEMAP_FLAG_SYNC,
            mapped_extents: 0,
            extent_count: BATCH as u32,
            reserved: 0,
            extents: [RawExtent::default(); BATCH],
        };
        // SAFETY: the request is laid out as the kernel's structure and has room for as many extents
        // as it says; the kernel writes nowhere else.
        let result = unsafe {
            libc::ioctl(
                file.as_fd().as_raw_fd(),
                FS_IOC_FIEMAP as libc::Ioctl,
                &raw mut request,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let count = (request.mapped_extents as usize).min(BATCH);
        for raw in &request.extents[..count] {
            let extent = HostExtent {
                logical: raw.logical,
                physical: raw.physical,
                len: raw.length,
            };
            match found.last_mut() {
                Some(last) if last.continues_in(&extent) => last.len += extent.len,
                _ => found.push(extent),
            }
        }
        let Some(last) = request.extents[..count].last() else {
            return Ok(found);
        };
        let next = last.logical.saturating_add(last.length);
        // A file system that answers with what was before would keep us here for ever.
        if last.flags & FIEMAP_EXTENT_LAST != 0 || next <= start {
            return Ok(found);
        }
        start = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    /// A file on a file system that can tell; the target directory is on one as a rule.
    fn scratch(name: &str) -> (std::path::PathBuf, File) {
        let path =
            std::env::temp_dir().join(format!("cowslip-fiemap-{name}-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        (path, file)
    }

    fn told(file: &File) -> Option<Vec<HostExtent>> {
        match extents(file) {
            Ok(extents) => Some(extents),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                eprintln!("SKIPPED: the file system tells no extents");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn an_empty_file_has_no_extents() {
        let (path, file) = scratch("empty");
        if let Some(found) = told(&file) {
            assert_eq!(found, []);
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn islands_in_a_sparse_file_are_told_in_order_across_batches() {
        let (path, mut file) = scratch("islands");
        let islands = BATCH as u64 + 20;
        for island in 0..islands {
            file.write_all_at(&[1; 4096], island * (1 << 20)).unwrap();
        }
        file.flush().unwrap();
        if let Some(found) = told(&file) {
            let starts: Vec<u64> = found.iter().map(|e| e.logical).collect();
            let expected: Vec<u64> = (0..islands).map(|i| i << 20).collect();
            assert_eq!(starts, expected);
        }
        std::fs::remove_file(path).unwrap();
    }
}
