//! [`Disk`]: a disk as a guest sees it, whatever stores it; the one interface between images,
//! servers and the layers between them.
//!
//! A disk validates requests where they come in: it refuses ranges beyond its end and writes that
//! it does not accept, so callers need not check. Many requests are under way at a time; they
//! complete in any order, and overlapping ones take effect in any order.

use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use cowslip_queue::{IoVec, IoVecMut};

use crate::errno::EIO;
use crate::file::{Durability, Space};
use crate::{Error, Result};

mod holding;
mod memory;

#[doc(hidden)]
pub use holding::HoldingDisk;
pub use memory::MemoryDisk;

/// A request under way. Boxed once, because disks are used as objects.
pub type DiskFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// Options of a request for zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ZeroOptions {
    /// Whether the space may be deallocated (NBD: not `NO_HOLE`; qemu-io: `-u`).
    pub space: Space,
    /// Durability of the zeroes at completion.
    pub durability: Durability,
    /// Fail at once with [`Error::Unsupported`] rather than write zeroes out (NBD: `FAST_ZERO`).
    pub fast_only: bool,
}

/// A run of a disk with one state, as `qemu-img map` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte on the disk.
    pub start: u64,
    /// Length in bytes; never 0.
    pub len: u64,
    /// Depth in the backing chain of the layer that provides the run; 0 is the image itself.
    pub depth: u32,
    /// Some layer contains the run (QEMU: `present`).
    pub present: bool,
    /// The run reads as zeroes.
    pub zero: bool,
    /// The run is stored as data.
    pub data: bool,
    /// The run is stored compressed.
    pub compressed: bool,
    /// Offset of the bytes, in bytes, in that layer's file (in its data file, if it has one).
    pub host_offset: Option<u64>,
}

/// Properties of a disk that are fixed while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The disk accepts writes.
    pub writable: bool,
    /// Allocation unit in bytes, a power of two; requests are best aligned to it.
    pub preferred_block_bytes: u64,
}

/// A disk: a range of bytes that a guest reads and writes.
pub trait Disk: Send + Sync + fmt::Debug {
    /// The name for messages, as users know the disk.
    fn name(&self) -> &str;

    /// Current size in bytes.
    fn size(&self) -> u64;

    /// Properties that are fixed while the disk is open.
    fn features(&self) -> Features;

    /// Reads at `offset` into a scatter list, and returns the list.
    ///
    /// # Errors
    /// A range beyond the end; I/O; a damaged image.
    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut>;

    /// Writes all of `data` at `offset`, or fails.
    ///
    /// # Errors
    /// As for [`Disk::read`]; [`Error::ReadOnly`], as by default.
    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> DiskFuture<'_, ()> {
        drop((offset, data, durability));
        read_only(self.name())
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As for [`Disk::write`]; [`Error::Unsupported`] if `fast_only` is set and zeroes would have
    /// to be written out.
    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        let _unused = (offset, len, options);
        read_only(self.name())
    }

    /// Discards a range. Its bytes are unspecified afterwards, but never those of another guest.
    ///
    /// # Errors
    /// As for [`Disk::write`].
    fn discard(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        let _unused = (offset, len);
        read_only(self.name())
    }

    /// Allocates the space of a range, so that writes to it find theirs; its bytes stay.
    ///
    /// # Errors
    /// As for [`Disk::write`]; [`Error::Unsupported`] or I/O of kind `Unsupported` where there is
    /// no way, as by default.
    fn allocate(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        let _unused = (offset, len);
        Box::pin(std::future::ready(Err(Error::Unsupported {
            file: self.name().to_string(),
            feature: "allocation in advance".into(),
        })))
    }

    /// Makes all writes durable that had completed when it was called.
    ///
    /// # Errors
    /// I/O. By default there is nothing to flush.
    fn flush(&self) -> DiskFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Hands to the system what has completed and is known to this process alone: afterwards the
    /// end of the process loses none of it, though a power failure may. Costs nothing where there
    /// is nothing, as by default.
    ///
    /// # Errors
    /// As for [`Disk::flush`].
    fn write_back(&self) -> DiskFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// States of a range, in order from its first byte on: at least one extent and about `max` at
    /// most, so they may end before the range does.
    ///
    /// # Errors
    /// As for [`Disk::read`].
    fn extents(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<Extent>>;
}

fn read_only<T: Send + 'static>(name: &str) -> DiskFuture<'static, T> {
    Box::pin(std::future::ready(Err(Error::ReadOnly(name.to_string()))))
}

/// Checks that a range lies within a disk of `size` bytes.
///
/// # Errors
/// EIO, as in QEMU.
#[doc(hidden)]
pub fn within(size: u64, offset: u64, len: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::io(
            format!("{len} bytes at {offset} are beyond the end of the disk"),
            std::io::Error::from_raw_os_error(EIO),
        )),
    }
}

/// A part of another disk: a range, or everything from an offset to an end that may move.
#[derive(Debug)]
pub struct DiskPart {
    disk: Arc<dyn Disk>,
    start: u64,
    /// End in bytes; `None` is the end of the disk, wherever it moves.
    end: Option<u64>,
}

impl DiskPart {
    /// The bytes of a disk from `start` to its end.
    pub fn after(disk: Arc<dyn Disk>, start: u64) -> DiskPart {
        DiskPart {
            disk,
            start,
            end: None,
        }
    }

    /// The bytes of a range. The part is shorter where the disk is.
    pub fn of(disk: Arc<dyn Disk>, range: Range<u64>) -> DiskPart {
        DiskPart {
            disk,
            start: range.start,
            end: Some(range.end),
        }
    }

    /// The offset on the whole disk.
    fn outer(&self, offset: u64, len: u64) -> Result<u64> {
        within(self.size(), offset, len)?;
        Ok(self.start + offset)
    }

    /// Passes a request on at its offset on the whole disk.
    fn pass<'a, T: Send + 'a>(
        &'a self,
        (offset, len): (u64, u64),
        request: impl FnOnce(&'a dyn Disk, u64) -> DiskFuture<'a, T>,
    ) -> DiskFuture<'a, T> {
        match self.outer(offset, len) {
            Ok(outer) => request(&*self.disk, outer),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }
}

impl Disk for DiskPart {
    crate::forward_to_disk!(disk: name, features, flush, write_back);

    fn size(&self) -> u64 {
        let size = self.disk.size();
        let end = self.end.map_or(size, |end| end.min(size));
        end.saturating_sub(self.start)
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        let range = (offset, buf.len() as u64);
        self.pass(range, |disk, offset| disk.read(offset, buf))
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> DiskFuture<'_, ()> {
        let range = (offset, data.len() as u64);
        self.pass(range, |disk, offset| disk.write(offset, data, durability))
    }

    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        let range = (offset, len);
        self.pass(range, |disk, offset| disk.zero(offset, len, options))
    }

    fn allocate(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        self.pass((offset, len), |disk, offset| disk.allocate(offset, len))
    }

    fn discard(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        self.pass((offset, len), |disk, offset| disk.discard(offset, len))
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            let outer = self.outer(offset, len)?;
            let mut extents = self.disk.extents(outer, len, max).await?;
            for extent in &mut extents {
                extent.start -= self.start;
            }
            Ok(extents)
        })
    }
}

/// A disk that refuses what would change it.
#[derive(Debug)]
pub struct ReadOnlyDisk(pub Arc<dyn Disk>);

impl Disk for ReadOnlyDisk {
    crate::forward_to_disk!(0: name, size, read, extents);

    fn features(&self) -> Features {
        Features {
            writable: false,
            ..self.0.features()
        }
    }
}

#[cfg(test)]
mod tests {
    use cowslip_queue::{Buf, BufMut};

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        futures_util::FutureExt::now_or_never(future).expect("memory answers at once")
    }

    #[test]
    fn a_part_shows_its_range_and_nothing_else() {
        let disk = Arc::new(MemoryDisk::new("disk", 10_000));
        let part = DiskPart::of(disk.clone(), 1000..5000);
        assert_eq!(part.size(), 4000);
        let data = Buf::copy_of(&[7; 100]);
        block_on(part.write(3900, data.clone().into(), Durability::Cached)).unwrap();
        for (offset, is_refused) in [(3901, true), (u64::MAX, true), (0, false)] {
            let written = block_on(part.write(offset, data.clone().into(), Durability::Cached));
            assert_eq!(written.is_err(), is_refused, "{offset}");
        }
        let read = block_on(disk.read(4890, BufMut::zeroed(120).into())).unwrap();
        let expected: Vec<u8> = (0..120)
            .map(|i| if (10..110).contains(&i) { 7 } else { 0 })
            .collect();
        assert_eq!(read.to_vec(), expected);
        let options = ZeroOptions::default();
        block_on(part.zero(3950, 50, options)).unwrap();
        assert!(block_on(part.zero(3950, 51, options)).is_err());
        assert!(block_on(part.discard(3999, 2)).is_err());
        let read = block_on(part.read(3900, BufMut::zeroed(100).into())).unwrap();
        let read = read.to_vec();
        assert_eq!((&read[..50], &read[50..]), (&[7; 50][..], &[0; 50][..]));
        let extents = block_on(part.extents(0, 4000, 10)).unwrap();
        assert_eq!(extents[0].start, 0);
        assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), 4000);
    }

    #[test]
    fn what_follows_an_offset_ends_with_the_disk() {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("disk", 10_000));
        assert_eq!(DiskPart::after(Arc::clone(&disk), 9_000).size(), 1000);
        assert_eq!(DiskPart::after(Arc::clone(&disk), 11_000).size(), 0);
        assert_eq!(DiskPart::of(disk, 9_000..20_000).size(), 1000);
    }
}
