//! *Blocking* calls: a disk for code that waits, such as a worker thread or a tool.
//!
//! Each call makes its system calls on the calling thread and returns when it is done. There is no
//! ring, no queue and no other thread; calls of several threads go on beside each other. Bytes move
//! between the file and the caller's slices without a copy.
//!
//! Everything else that the library does is a future; [`wait`] runs one on the calling thread.
//!
//! ```
//! # fn main() -> cowslip::Result<()> {
//! use std::io::{Read, Seek, SeekFrom, Write};
//! use cowslip::Image;
//! use cowslip::blocking::{BlockingDisk, wait};
//! use cowslip::file::host::{HostGate, HostOptions, open_host_file};
//! use cowslip::image::OpenOptions;
//! # use cowslip::file::host::CreateMode;
//! # use cowslip::qcow2::create::{CreateOptions, create};
//!
//! # let dir = tempfile::tempdir().expect("a scratch directory");
//! # let path = dir.path().join("disk.qcow2");
//! let host = HostOptions { writable: true, ..HostOptions::default() };
//! # let new = HostOptions { create: CreateMode::CreateNew, ..host };
//! # wait(create(open_host_file(&path, &new)?, None, &CreateOptions::new(1 << 30)))?;
//! let options = OpenOptions { writable: true, ..OpenOptions::default() };
//! let gate = HostGate { options: host, ..HostGate::default() };
//! let image = wait(Image::open(open_host_file(&path, &host)?, options, &gate))?;
//! let disk = BlockingDisk::new(image);
//!
//! disk.write_at(b"a guest's bytes", 1 << 20)?;
//! disk.flush()?;
//! let mut bytes = [0; 15];
//! disk.read_at(&mut bytes, 1 << 20)?;
//! assert_eq!(&bytes, b"a guest's bytes");
//!
//! let mut file = disk.cursor(); // Read, Write and Seek
//! file.seek(SeekFrom::Start((1 << 20) + 2)).expect("within the disk");
//! file.write_all(b"host").expect("it has room");
//! wait(disk.disk().close())
//! # }
//! ```

use std::io::{self, IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::sync::Arc;

use cowslip_block::disk::{Disk, Extent, ZeroOptions};
use cowslip_block::file::Durability;
pub use cowslip_queue::block_here as wait;
use cowslip_queue::{IoVec, IoVecMut, lend_all, lend_all_mut};
pub use cowslip_queue::{lend_foreign, lend_foreign_mut};

use crate::Result;

/// A disk whose calls block. Clones are the same disk; each has its errors from the methods of
/// [`Disk`].
#[derive(Debug)]
pub struct BlockingDisk<D: ?Sized = dyn Disk> {
    disk: Arc<D>,
}

impl<D: ?Sized> Clone for BlockingDisk<D> {
    fn clone(&self) -> BlockingDisk<D> {
        let disk = Arc::clone(&self.disk);
        BlockingDisk { disk }
    }
}

impl<D: ?Sized> From<Arc<D>> for BlockingDisk<D> {
    fn from(disk: Arc<D>) -> BlockingDisk<D> {
        BlockingDisk { disk }
    }
}

impl<D> BlockingDisk<D> {
    /// A disk over an image, or over another disk.
    pub fn new(disk: D) -> BlockingDisk<D> {
        BlockingDisk::from(Arc::new(disk))
    }
}

impl<D: Disk + ?Sized> BlockingDisk<D> {
    /// The disk itself, for its futures.
    pub fn disk(&self) -> &Arc<D> {
        &self.disk
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.disk.size()
    }

    /// Fills a slice from `offset` on.
    ///
    /// # Errors
    /// As [`Disk::read`].
    pub fn read_at(&self, target: &mut [u8], offset: u64) -> Result<()> {
        self.read_vectored_at(&mut [IoSliceMut::new(target)], offset)
    }

    /// Fills slices, one after the other.
    ///
    /// # Errors
    /// As [`Disk::read`].
    pub fn read_vectored_at(&self, targets: &mut [IoSliceMut<'_>], offset: u64) -> Result<()> {
        lend_all_mut(targets, |list| self.read_list_at(list, offset).map(drop))
    }

    /// Fills a list, of memory that others may change, and returns it. [`lend_foreign_mut`] makes
    /// one of a guest's memory that the caller has by pointers, for the length of the call.
    ///
    /// # Errors
    /// As [`Disk::read`].
    pub fn read_list_at(&self, target: IoVecMut, offset: u64) -> Result<IoVecMut> {
        wait(self.disk.read(offset, target))
    }

    /// Writes a slice at `offset`.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.write_vectored_at(&[IoSlice::new(data)], offset)
    }

    /// Writes slices, one after the other.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub fn write_vectored_at(&self, data: &[IoSlice<'_>], offset: u64) -> Result<()> {
        lend_all(data, |list| {
            self.write_list_at(list, offset, Durability::Cached)
        })
    }

    /// Writes a list, of memory that others may change, such as one of [`lend_foreign`].
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub fn write_list_at(&self, data: IoVec, offset: u64, durability: Durability) -> Result<()> {
        wait(self.disk.write(offset, data, durability))
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As [`Disk::zero`].
    pub fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> Result<()> {
        wait(self.disk.zero(offset, len, options))
    }

    /// Discards a range.
    ///
    /// # Errors
    /// As [`Disk::discard`].
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        wait(self.disk.discard(offset, len))
    }

    /// Makes durable all writes that have completed.
    ///
    /// # Errors
    /// As [`Disk::flush`].
    pub fn flush(&self) -> Result<()> {
        wait(self.disk.flush())
    }

    /// Hands to the system what has completed and is known to this process alone, so that its end
    /// loses nothing; a power failure may.
    ///
    /// # Errors
    /// As [`Disk::write_back`].
    pub fn write_back(&self) -> Result<()> {
        wait(self.disk.write_back())
    }

    /// Allocates the space of a range; its bytes stay.
    ///
    /// # Errors
    /// As [`Disk::allocate`].
    pub fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        wait(self.disk.allocate(offset, len))
    }

    /// States of a range; about `max` at most.
    ///
    /// # Errors
    /// As [`Disk::extents`].
    pub fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        wait(self.disk.extents(offset, len, max))
    }

    /// The disk as a file with a position, which begins at 0.
    pub fn cursor(&self) -> DiskCursor<D> {
        DiskCursor {
            disk: self.clone(),
            position: 0,
        }
    }
}

/// A disk as a file with a position: [`Read`], [`Write`] and [`Seek`]. The end of the file is that
/// of the disk, which writes do not move: at the end they write nothing, and `write_all` fails.
#[derive(Debug)]
pub struct DiskCursor<D: ?Sized = dyn Disk> {
    disk: BlockingDisk<D>,
    position: u64,
}

impl<D: ?Sized> Clone for DiskCursor<D> {
    fn clone(&self) -> DiskCursor<D> {
        DiskCursor {
            disk: self.disk.clone(),
            position: self.position,
        }
    }
}

impl<D: Disk + ?Sized> DiskCursor<D> {
    /// The disk.
    pub fn disk(&self) -> &BlockingDisk<D> {
        &self.disk
    }

    /// Returns what is left of a request before the end of the disk.
    fn room(&self, len: usize) -> usize {
        let left = self.disk.size().saturating_sub(self.position);
        usize::try_from(left).map_or(len, |left| left.min(len))
    }
}

impl<D: Disk + ?Sized> Read for DiskCursor<D> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let len = self.room(target.len());
        if len == 0 {
            // The position may be beyond the end, where no request is.
            return Ok(0);
        }
        self.disk.read_at(&mut target[..len], self.position)?;
        self.position += len as u64;
        Ok(len)
    }
}

impl<D: Disk + ?Sized> Write for DiskCursor<D> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = self.room(data.len());
        if len == 0 {
            return Ok(0);
        }
        self.disk.write_at(&data[..len], self.position)?;
        self.position += len as u64;
        Ok(len)
    }

    /// Makes durable what was written, as [`BlockingDisk::flush`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(self.disk.flush()?)
    }
}

impl<D: Disk + ?Sized> Seek for DiskCursor<D> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(by) => self.disk.size().checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}
