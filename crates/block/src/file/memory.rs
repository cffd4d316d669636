//! A file in memory: for tests, benches and images that are built before they are stored.

use std::io;

use cowslip_queue::{IoVec, IoVecMut, Pending};

use super::{BlockFile, Capabilities, Durability, FileExtent, Space};
use crate::sync::{Mutex, MutexGuard, lock};

/// Bytes in memory behind the interface of a file. Every operation completes at once.
#[derive(Debug)]
pub struct MemoryFile {
    name: String,
    capabilities: Capabilities,
    bytes: Mutex<Vec<u8>>,
}

impl MemoryFile {
    /// A writable file with these bytes, which asks for requests aligned to `alignment_bytes`.
    pub fn new(name: &str, bytes: Vec<u8>, alignment_bytes: u32) -> MemoryFile {
        MemoryFile {
            name: name.to_string(),
            capabilities: Capabilities::of_regular_file(alignment_bytes),
            bytes: Mutex::new(bytes),
        }
    }

    /// A file with these bytes that may not be written.
    pub fn read_only(name: &str, bytes: Vec<u8>) -> MemoryFile {
        let mut file = MemoryFile::new(name, bytes, 1);
        file.capabilities.writable = false;
        file
    }

    /// A copy of all bytes.
    pub fn contents(&self) -> Vec<u8> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        lock(&self.bytes)
    }

    fn check(&self, offset: u64, len: u64) {
        let alignment = u64::from(self.capabilities.alignment_bytes);
        assert!(
            offset.is_multiple_of(alignment) && len.is_multiple_of(alignment),
            "{offset:#x}+{len:#x} is not aligned to {alignment}"
        );
    }

    fn fill(&self, offset: u64, len: u64) {
        let mut bytes = self.lock();
        let end = (bytes.len() as u64).min(offset.saturating_add(len));
        if offset < end {
            bytes[offset as usize..end as usize].fill(0);
        }
    }

    fn grow(&self, end: u64) -> io::Result<()> {
        const LIMIT: u64 = 1 << 34;
        if end > LIMIT {
            return Err(io::Error::from_raw_os_error(28));
        }
        let mut bytes = self.lock();
        if end > bytes.len() as u64 {
            bytes.resize(end as usize, 0);
        }
        Ok(())
    }
}

impl BlockFile for MemoryFile {
    crate::file_from_fields!(name, capabilities);

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.lock().len() as u64))
    }

    fn read(&self, offset: u64, mut target: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let len = target.len();
        self.check(offset, len as u64);
        let bytes = self.lock();
        let start = offset.min(bytes.len() as u64) as usize;
        let present = len.min(bytes.len() - start);
        target.copy_from_slice(0, &bytes[start..start + present]);
        target.fill_range(present..len, 0);
        Pending::ready((Ok(()), target))
    }

    fn write(&self, offset: u64, data: IoVec, _: Durability) -> Pending<io::Result<()>> {
        let len = data.len();
        self.check(offset, len as u64);
        if let Err(error) = self.grow(offset + len as u64) {
            return Pending::ready(Err(error));
        }
        let at = offset as usize;
        data.copy_to_slice(0, &mut self.lock()[at..at + len]);
        Pending::ready(Ok(()))
    }

    fn zero(&self, offset: u64, len: u64, _: Space) -> Pending<io::Result<()>> {
        let grown = self.grow(offset + len);
        self.fill(offset, len);
        Pending::ready(grown)
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.fill(offset, len);
        Pending::ready(Ok(()))
    }

    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        Pending::ready(self.grow(offset + len))
    }

    fn allocate_keeping_end(&self, _: u64, _: u64) -> Pending<io::Result<()>> {
        Pending::ready(Ok(()))
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let size = self.lock().len() as u64;
        Pending::ready(Ok(FileExtent::split_at_end(offset, len, size)))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        Pending::ready(Ok(()))
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        let grown = self.grow(len);
        if grown.is_ok() {
            self.lock().truncate(len as usize);
        }
        Pending::ready(grown)
    }

    fn allocated_bytes(&self) -> Option<u64> {
        Some(self.lock().len() as u64)
    }
}
