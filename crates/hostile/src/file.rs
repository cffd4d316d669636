//! A file in memory that ends where the test's memory does, and counts what is asked of it.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Durability, FileExtent, Space};
use cowslip_queue::{IoVec, IoVecMut, Pending};

/// No sample needs a longer file.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// No request needs a longer read: an L1 table of 32 MiB is the longest structure.
const READ_BYTES_MAX: usize = 32 << 20;
/// Operations on one small image, far more than any of them needs.
const OPERATIONS_MAX: u64 = 300_000;

/// The file.
#[derive(Debug)]
pub struct Watched {
    file: MemoryFile,
    operations: AtomicU64,
    bytes_read: AtomicU64,
}

impl Watched {
    /// A writable file with these bytes.
    pub fn new(bytes: Vec<u8>) -> Watched {
        Watched {
            file: MemoryFile::new("hostile.qcow2", bytes, 1),
            operations: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
        }
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Bytes that were read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// All bytes.
    pub fn contents(&self) -> Vec<u8> {
        self.file.contents()
    }

    fn count(&self) {
        let operations = self.operations.fetch_add(1, Ordering::Relaxed);
        assert!(operations < OPERATIONS_MAX, "too many operations");
    }

    fn limit(&self, offset: u64, len: u64) -> io::Result<()> {
        self.count();
        match offset.checked_add(len) {
            Some(end) if end <= FILE_BYTES_MAX => Ok(()),
            _ => Err(io::Error::from_raw_os_error(28)),
        }
    }
}

impl BlockFile for Watched {
    cowslip_block::forward_to_file!(file: name, capabilities, len, memory_alignment, allocated_bytes);

    fn read(&self, offset: u64, buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        self.count();
        self.bytes_read
            .fetch_add(buf.len() as u64, Ordering::Relaxed);
        assert!(buf.len() <= READ_BYTES_MAX, "a read of {} bytes", buf.len());
        match offset.checked_add(buf.len() as u64) {
            // As the kernel has it.
            Some(end) if end <= i64::MAX as u64 => self.file.read(offset, buf),
            _ => Pending::ready((Err(io::Error::from_raw_os_error(22)), buf)),
        }
    }

    fn write(&self, offset: u64, data: IoVec, d: Durability) -> Pending<io::Result<()>> {
        match self.limit(offset, data.len() as u64) {
            Ok(()) => self.file.write(offset, data, d),
            Err(error) => Pending::ready(Err(error)),
        }
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        match self.limit(offset, len) {
            Ok(()) => self.file.zero(offset, len, space),
            Err(error) => Pending::ready(Err(error)),
        }
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.count();
        self.file.discard(offset, len)
    }

    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        match self.limit(offset, len) {
            Ok(()) => self.file.allocate(offset, len),
            Err(error) => Pending::ready(Err(error)),
        }
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.count();
        self.file.extents(offset, len)
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.count();
        self.file.flush()
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        match self.limit(len, 0) {
            Ok(()) => self.file.set_len(len),
            Err(error) => Pending::ready(Err(error)),
        }
    }
}
