//! [`RecordingDisk`]: a disk whose requests are noted.

use std::sync::Arc;

use cowslip_block::Disk;
use cowslip_block::disk::{DiskFuture, ZeroOptions};
use cowslip_block::file::{Durability, Space};
use cowslip_queue::{IoVec, IoVecMut};

use crate::format::{Kind, Request};
use crate::record::Recorder;

/// A disk that notes each request when it comes, and passes it on. Questions about the state of a
/// range, and requests that no guest makes ([`Disk::write_back`]), are not noted.
#[derive(Debug)]
pub struct RecordingDisk {
    disk: Arc<dyn Disk>,
    recorder: Arc<Recorder>,
}

impl RecordingDisk {
    /// A disk that is recorded.
    pub fn new(disk: Arc<dyn Disk>, recorder: Arc<Recorder>) -> RecordingDisk {
        RecordingDisk { disk, recorder }
    }

    fn note(&self, kind: Kind, offset: u64, len: u64) {
        self.recorder.note(Request::new(kind, offset, len));
    }
}

impl Disk for RecordingDisk {
    cowslip_block::forward_to_disk!(disk: name, size, features, write_back, extents);

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        self.note(Kind::Read, offset, buf.len() as u64);
        self.disk.read(offset, buf)
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> DiskFuture<'_, ()> {
        self.recorder.note(Request {
            is_durable: durability == Durability::Durable,
            ..Request::new(Kind::Write, offset, data.len() as u64)
        });
        self.disk.write(offset, data, durability)
    }

    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        self.recorder.note(Request {
            is_durable: options.durability == Durability::Durable,
            may_unmap: options.space == Space::Release,
            ..Request::new(Kind::Zero, offset, len)
        });
        self.disk.zero(offset, len, options)
    }

    fn discard(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        self.note(Kind::Discard, offset, len);
        self.disk.discard(offset, len)
    }

    fn allocate(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        self.note(Kind::Allocate, offset, len);
        self.disk.allocate(offset, len)
    }

    fn flush(&self) -> DiskFuture<'_, ()> {
        self.note(Kind::Flush, 0, 0);
        self.disk.flush()
    }
}
