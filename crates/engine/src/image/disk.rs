//! [`Image`] as a [`Disk`], for servers and for filters between them and it.

use cowslip_block::disk::{Disk, DiskFuture, Features};
use cowslip_queue::{IoVec, IoVecMut};

use super::{Extent, Image, ZeroOptions};
use crate::file::Durability;

impl Disk for Image {
    fn name(&self) -> &str {
        Image::name(self)
    }

    fn size(&self) -> u64 {
        Image::size(self)
    }

    fn features(&self) -> Features {
        Features {
            writable: self.is_writable(),
            preferred_block_bytes: self.preferred_block_bytes(),
        }
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        Box::pin(self.read_list(offset, buf))
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> DiskFuture<'_, ()> {
        Box::pin(Image::write(self, offset, data, durability))
    }

    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        Box::pin(self.write_zeroes(offset, len, options))
    }

    fn allocate(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        Box::pin(Image::allocate(self, offset, len))
    }

    fn discard(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        Box::pin(Image::discard(self, offset, len))
    }

    fn flush(&self) -> DiskFuture<'_, ()> {
        Box::pin(Image::flush(self))
    }

    fn write_back(&self) -> DiskFuture<'_, ()> {
        Box::pin(Image::write_back(self))
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<Extent>> {
        Box::pin(Image::extents(self, offset, len, max))
    }
}
