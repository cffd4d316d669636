//! OpenVMM: `DiskIo` of its crate `disk_backend`. Its futures are `Send` and run on its executor,
//! whose threads have no ring of ours. So the disk that they ask is a
//! [`Threaded`](cowslip::threaded::Threaded) one: its requests run on threads that the virtual
//! machine monitor has asked for, with a ring each.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use cowslip::image::{Durability, Space, ZeroOptions};
use cowslip::{Disk, Error, IoVec, IoVecMut, SharedMemory};

/// Bytes of a sector.
const SECTOR_BYTES: u32 = 512;

/// The errors of `DiskIo` that occur here.
#[derive(Debug)]
pub enum DiskError {
    /// A range that is not all on the disk.
    IllegalBlock,
    /// A failure of the system or of the image.
    Io(io::Error),
    /// A write to a disk that is only read.
    ReadOnly,
}

/// Parts of a guest's memory: a reference to it and a range of its pages.
#[derive(Clone, Debug)]
pub struct RequestBuffers<'a> {
    /// The memory.
    pub memory: &'a Arc<SharedMemory>,
    /// Its parts, one after the other.
    pub ranges: &'a [Range<usize>],
}

impl RequestBuffers<'_> {
    fn byte_count(&self) -> u64 {
        self.ranges.iter().map(|range| range.len() as u64).sum()
    }

    fn to_write(&self) -> IoVec {
        let parts = self.ranges.iter().cloned();
        parts
            .map(|range| IoVec::shared(self.memory, range))
            .collect()
    }

    fn to_read(&self) -> IoVecMut {
        let parts = self.ranges.iter().cloned();
        parts
            .map(|range| IoVecMut::shared(self.memory, range))
            .collect()
    }
}

/// The content of sectors after `unmap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmapBehavior {
    /// Zeroes.
    Zeroes,
}

/// A disk of OpenVMM.
#[allow(missing_docs)] // OpenVMM's own.
pub trait DiskIo: 'static + Send + Sync {
    fn disk_type(&self) -> &str;
    fn sector_count(&self) -> u64;
    fn sector_size(&self) -> u32;
    fn disk_id(&self) -> Option<[u8; 16]>;
    fn physical_sector_size(&self) -> u32;
    fn is_fua_respected(&self) -> bool;
    fn is_read_only(&self) -> bool;
    fn unmap(
        &self,
        sector: u64,
        count: u64,
        block_level_only: bool,
    ) -> impl Future<Output = Result<(), DiskError>> + Send;
    fn unmap_behavior(&self) -> UnmapBehavior;
    fn optimal_unmap_sectors(&self) -> u32;
    fn read_vectored(
        &self,
        buffers: &RequestBuffers<'_>,
        sector: u64,
    ) -> impl Future<Output = Result<(), DiskError>> + Send;
    fn write_vectored(
        &self,
        buffers: &RequestBuffers<'_>,
        sector: u64,
        fua: bool,
    ) -> impl Future<Output = Result<(), DiskError>> + Send;
    fn sync_cache(&self) -> impl Future<Output = Result<(), DiskError>> + Send;
}

/// A disk of ours for OpenVMM.
#[derive(Debug)]
pub struct CowslipDisk {
    disk: Arc<dyn Disk>,
}

impl CowslipDisk {
    /// A disk, such as a [`Threaded`](cowslip::threaded::Threaded) one.
    pub fn new(disk: Arc<dyn Disk>) -> CowslipDisk {
        CowslipDisk { disk }
    }

    /// The first byte of a range of sectors, if all of them are on the disk.
    fn place(&self, sector: u64, bytes: u64) -> Result<u64, DiskError> {
        let start = sector.checked_mul(u64::from(SECTOR_BYTES));
        let end = start.and_then(|start| start.checked_add(bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.disk.size() => Ok(start),
            _ => Err(DiskError::IllegalBlock),
        }
    }
}

fn failed(error: Error) -> DiskError {
    match error {
        Error::ReadOnly(_) => DiskError::ReadOnly,
        error => DiskError::Io(error.into()),
    }
}

impl DiskIo for CowslipDisk {
    fn disk_type(&self) -> &str {
        "qcow2"
    }

    fn sector_count(&self) -> u64 {
        self.disk.size() / u64::from(SECTOR_BYTES)
    }

    fn sector_size(&self) -> u32 {
        SECTOR_BYTES
    }

    fn disk_id(&self) -> Option<[u8; 16]> {
        None
    }

    fn physical_sector_size(&self) -> u32 {
        4096
    }

    fn is_fua_respected(&self) -> bool {
        true
    }

    fn is_read_only(&self) -> bool {
        !self.disk.features().writable
    }

    async fn unmap(&self, sector: u64, count: u64, _block_level: bool) -> Result<(), DiskError> {
        let bytes = count.saturating_mul(u64::from(SECTOR_BYTES));
        let offset = self.place(sector, bytes)?;
        let options = ZeroOptions {
            space: Space::Release,
            ..ZeroOptions::default()
        };
        let zeroed = self.disk.zero(offset, bytes, options).await;
        zeroed.map_err(failed)
    }

    fn unmap_behavior(&self) -> UnmapBehavior {
        UnmapBehavior::Zeroes
    }

    fn optimal_unmap_sectors(&self) -> u32 {
        let bytes = self.disk.features().preferred_block_bytes;
        u32::try_from(bytes / u64::from(SECTOR_BYTES)).unwrap_or(1)
    }

    async fn read_vectored(
        &self,
        buffers: &RequestBuffers<'_>,
        sector: u64,
    ) -> Result<(), DiskError> {
        let offset = self.place(sector, buffers.byte_count())?;
        let read = self.disk.read(offset, buffers.to_read()).await;
        read.map(drop).map_err(failed)
    }

    async fn write_vectored(
        &self,
        buffers: &RequestBuffers<'_>,
        sector: u64,
        fua: bool,
    ) -> Result<(), DiskError> {
        let offset = self.place(sector, buffers.byte_count())?;
        let durability = Durability::of_fua(fua);
        let written = self.disk.write(offset, buffers.to_write(), durability);
        written.await.map_err(failed)
    }

    async fn sync_cache(&self) -> Result<(), DiskError> {
        self.disk.flush().await.map_err(failed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // Failing a test is a panic.
mod tests {
    use super::*;
    use crate::testing::{Ask, Model, SIZE, Scratch, read_halves};
    use cowslip::threaded::Threaded;
    use cowslip_queue::Threads;
    use std::time::Duration;

    async fn machine(disk: CowslipDisk) -> Vec<u8> {
        let memory = SharedMemory::new(1 << 18);
        let mut model = Model::new(3, 512);
        for round in 0..300 {
            let ask = model.next();
            let len = match &ask {
                &Ask::Read(_, len) => len,
                Ask::Write(_, bytes) => bytes.len(),
                Ask::Zero(..) | Ask::Flush => 0,
            };
            let ranges = [0..len / 2, 1 << 17..(1 << 17) + len - len / 2];
            let buffers = RequestBuffers {
                memory: &memory,
                ranges: &ranges,
            };
            match ask {
                Ask::Read(offset, len) => {
                    disk.read_vectored(&buffers, offset / 512).await.unwrap();
                    model.check(offset, &read_halves(&memory, len));
                }
                Ask::Write(offset, bytes) => {
                    let (head, tail) = bytes.split_at(len / 2);
                    memory.write(0, head);
                    memory.write(1 << 17, tail);
                    let fua = round % 7 == 0;
                    let written = disk.write_vectored(&buffers, offset / 512, fua);
                    written.await.unwrap();
                }
                Ask::Zero(offset, len) => {
                    disk.unmap(offset / 512, len / 512, false).await.unwrap();
                }
                Ask::Flush => disk.sync_cache().await.unwrap(),
            }
        }
        for (sector, count) in [(SIZE / 512, 1), (u64::MAX, 1), (0, u64::MAX)] {
            let beyond = disk.unmap(sector, count, false).await;
            assert!(matches!(beyond, Err(DiskError::IllegalBlock)));
        }
        model.bytes
    }

    #[test]
    fn an_executor_of_several_threads_reads_and_writes_the_image() {
        let scratch = Scratch::new();
        let threads = Threads::new("disk", 2, Duration::ZERO).unwrap();
        let disk = Threaded::new(Arc::clone(&scratch.image) as _, threads);
        let disk = CowslipDisk::new(Arc::new(disk));
        assert_eq!((disk.sector_count(), disk.sector_size()), (SIZE / 512, 512));
        assert!(!disk.is_read_only() && disk.is_fua_respected());
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(2).build().unwrap();
        let model = runtime.block_on(async { tokio::spawn(machine(disk)).await.unwrap() });
        drop(runtime);
        scratch.end(&model);
    }
}
