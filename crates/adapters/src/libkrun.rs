//! libkrun: a worker that reads and writes volatile memory of a guest, and blocks.
//!
//! Its block device wants positioned vectored reads and writes (`FileReadWriteAtVolatile`), a
//! flush, and zeroes. It keeps its disk behind a mutex; this one needs none, so several workers may
//! share it. Its own slices have a lifetime and no owner: `cowslip::blocking::lend_foreign` makes
//! lists of them.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use cowslip::blocking::BlockingDisk;
use cowslip::image::{Durability, Space, ZeroOptions};
use cowslip::{Disk, IoVec, IoVecMut, SharedMemory};

/// A part of a guest's memory.
#[derive(Clone, Debug)]
pub struct VolatileSlice {
    /// The memory.
    pub memory: Arc<SharedMemory>,
    /// Its part.
    pub range: Range<usize>,
}

/// Positioned reads and writes of volatile memory.
#[allow(missing_docs)] // libkrun's own.
pub trait FileReadWriteAtVolatile {
    fn read_vectored_at_volatile(&self, bufs: &[VolatileSlice], offset: u64) -> io::Result<usize>;
    fn write_vectored_at_volatile(&self, bufs: &[VolatileSlice], offset: u64) -> io::Result<usize>;
}

/// A disk for workers.
#[derive(Clone, Debug)]
pub struct WorkerDisk {
    disk: BlockingDisk,
}

impl WorkerDisk {
    /// A disk for workers.
    pub fn new(disk: Arc<dyn Disk>) -> WorkerDisk {
        WorkerDisk { disk: disk.into() }
    }

    /// Sectors of the disk, as the guest is to know them.
    pub fn nsectors(&self) -> u64 {
        self.disk.size() / 512
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// As [`Disk::flush`].
    pub fn flush(&self) -> io::Result<()> {
        Ok(self.disk.flush()?)
    }

    /// Makes a range read as zeroes, by a hole if it may have one.
    ///
    /// # Errors
    /// As [`Disk::zero`].
    pub fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        let options = ZeroOptions {
            space: Space::of_unmap(unmap),
            ..ZeroOptions::default()
        };
        Ok(self.disk.zero(offset, len, options)?)
    }
}

impl FileReadWriteAtVolatile for WorkerDisk {
    fn read_vectored_at_volatile(&self, bufs: &[VolatileSlice], offset: u64) -> io::Result<usize> {
        let part = |buf: &VolatileSlice| IoVecMut::shared(&buf.memory, buf.range.clone());
        let target: IoVecMut = bufs.iter().map(part).collect();
        Ok(self.disk.read_list_at(target, offset)?.len())
    }

    fn write_vectored_at_volatile(&self, bufs: &[VolatileSlice], offset: u64) -> io::Result<usize> {
        let part = |buf: &VolatileSlice| IoVec::shared(&buf.memory, buf.range.clone());
        let data: IoVec = bufs.iter().map(part).collect();
        let len = data.len();
        self.disk.write_list_at(data, offset, Durability::Cached)?;
        Ok(len)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // Failing a test is a panic.
mod tests {
    use super::*;
    use crate::testing::{Ask, Model, SIZE, Scratch};

    #[test]
    fn a_worker_reads_and_writes_the_image() {
        let scratch = Scratch::new();
        let disk = WorkerDisk::new(Arc::clone(&scratch.image) as _);
        assert_eq!(disk.nsectors(), SIZE / 512);
        let memory = SharedMemory::new(1 << 18);
        let slices = |len: usize| {
            let slice = |range| VolatileSlice {
                memory: Arc::clone(&memory),
                range,
            };
            [
                slice(8..8 + len / 2),
                slice(1 << 17..(1 << 17) + len - len / 2),
            ]
        };
        let mut model = Model::new(2, 512);
        for round in 0..300 {
            match model.next() {
                Ask::Read(offset, len) => {
                    let read = disk.read_vectored_at_volatile(&slices(len), offset);
                    assert_eq!(read.unwrap(), len);
                    let mut bytes = vec![0; len];
                    let (head, tail) = bytes.split_at_mut(len / 2);
                    memory.read(8, head);
                    memory.read(1 << 17, tail);
                    model.check(offset, &bytes);
                }
                Ask::Write(offset, bytes) => {
                    let (head, tail) = bytes.split_at(bytes.len() / 2);
                    memory.write(8, head);
                    memory.write(1 << 17, tail);
                    let written = disk.write_vectored_at_volatile(&slices(bytes.len()), offset);
                    assert_eq!(written.unwrap(), bytes.len());
                }
                Ask::Zero(offset, len) => {
                    disk.write_zeroes(offset, len, round % 2 == 0).unwrap();
                }
                Ask::Flush => disk.flush().unwrap(),
            }
        }
        assert!(disk.read_vectored_at_volatile(&slices(512), SIZE).is_err());
        drop(disk);
        scratch.end(&model.bytes);
    }
}
