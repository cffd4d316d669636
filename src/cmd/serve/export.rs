//! [`Disk`]: an image, or what follows an offset in it, as an NBD export.

use std::sync::Arc;

use cowslip::image::{Extent, WriteOptions, ZeroOptions};
use cowslip::{Buf, BufMut, Error, Image};
use cowslip_nbd::export::{Access, Durability, StatusExtent, ZeroRequest};
use cowslip_nbd::protocol::AllocationFlags;
use cowslip_nbd::{Export, ExportError, ExportFuture, ExportInfo};

use super::Service;

/// The served part of an image.
pub struct Disk {
    image: Arc<Image>,
    /// The first byte that is served.
    offset: u64,
    description: String,
    /// Whether several clients may share it: then what one flushes, the others wrote.
    shared: bool,
    /// Whether clients may ask which layers data is in.
    tells_depth: bool,
}

impl Disk {
    /// What the service serves of its image.
    pub fn new(image: Arc<Image>, service: &Service) -> Disk {
        Disk {
            image,
            offset: service.offset,
            description: service.description.clone(),
            shared: service.clients_max != Some(1),
            tells_depth: service.tells_depth,
        }
    }
}

/// What the client is told of an engine's failure.
fn refused(error: Error) -> ExportError {
    ExportError::from_errno(error.errno(), error.to_string())
}

fn write_options(durability: Durability) -> WriteOptions {
    WriteOptions {
        fua: durability == Durability::Durable,
    }
}

/// A run's state as qemu-nbd tells it: a hole is what nobody has allocated, and the image on top is layer 1.
fn status(extent: &Extent) -> StatusExtent {
    let flags = AllocationFlags::empty()
        .with_if(AllocationFlags::HOLE, !extent.data)
        .with_if(AllocationFlags::ZERO, extent.zero);
    StatusExtent {
        len: extent.len,
        flags,
        depth: match extent.present {
            true => extent.depth + 1,
            false => 0,
        },
    }
}

/// Joins neighbours of one state: clients see no host offsets, and no layers unless they may ask for them.
fn joined(extents: &[Extent], tells_depth: bool) -> Vec<StatusExtent> {
    let mut runs: Vec<StatusExtent> = Vec::with_capacity(extents.len());
    for run in extents.iter().map(status) {
        let same = |last: &StatusExtent| {
            last.flags == run.flags && (!tells_depth || last.depth == run.depth)
        };
        match runs.last_mut() {
            Some(last) if same(last) => last.len += run.len,
            _ => runs.push(run),
        }
    }
    runs
}

impl Export for Disk {
    fn info(&self) -> ExportInfo {
        let mut info = ExportInfo::new(self.image.size().saturating_sub(self.offset));
        info.access = match self.image.is_writable() {
            true => Access::ReadWrite,
            false => Access::ReadOnly,
        };
        let preferred = self.image.preferred_block_bytes().clamp(4096, 32 << 20);
        info.block_sizes.preferred = u32::try_from(preferred).expect("it was limited to what fits");
        info.description.clone_from(&self.description);
        info.shared_cache = self.shared;
        info.tells_depth = self.tells_depth;
        info
    }

    fn read(&self, offset: u64, buf: BufMut) -> ExportFuture<'_, BufMut> {
        Box::pin(async move {
            let read = self.image.read(self.offset + offset, buf).await;
            read.map_err(refused)
        })
    }

    fn write(&self, offset: u64, data: Buf, durability: Durability) -> ExportFuture<'_, ()> {
        Box::pin(async move {
            let options = write_options(durability);
            let written = self.image.write(self.offset + offset, data, options).await;
            written.map_err(refused)
        })
    }

    fn flush(&self) -> ExportFuture<'_, ()> {
        Box::pin(async move { self.image.flush().await.map_err(refused) })
    }

    fn trim(&self, offset: u64, len: u64, durability: Durability) -> ExportFuture<'_, ()> {
        Box::pin(async move {
            let discarded = self.image.discard(self.offset + offset, len).await;
            discarded.map_err(refused)?;
            match durability {
                Durability::Cached => Ok(()),
                Durability::Durable => self.image.flush().await.map_err(refused),
            }
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, how: ZeroRequest) -> ExportFuture<'_, ()> {
        Box::pin(async move {
            let options = ZeroOptions {
                may_unmap: how.may_unmap,
                fua: how.durability == Durability::Durable,
                fast_only: how.fast_only,
            };
            let zeroed = self.image.write_zeroes(self.offset + offset, len, options);
            zeroed.await.map_err(refused)
        })
    }

    fn block_status(
        &self,
        offset: u64,
        len: u64,
        max_extents: usize,
    ) -> ExportFuture<'_, Vec<StatusExtent>> {
        Box::pin(async move {
            let extents = self.image.extents(self.offset + offset, len, max_extents);
            let mut runs = joined(&extents.await.map_err(refused)?, self.tells_depth);
            runs.truncate(max_extents);
            Ok(runs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, len: u64, depth: u32, data: bool, zero: bool) -> Extent {
        Extent {
            start,
            len,
            depth,
            present: data,
            zero,
            data,
            compressed: false,
            host_offset: data.then_some(start + 7),
        }
    }

    #[test]
    fn clients_see_no_layers_unless_they_may_ask_for_them() {
        let extents = [
            extent(0, 10, 0, true, false),
            extent(10, 20, 1, true, false),
            extent(30, 5, 1, false, true),
            extent(35, 5, 0, false, true),
            extent(40, 1, 0, true, true),
        ];
        let runs = joined(&extents, false);
        let hole = AllocationFlags::HOLE.with(AllocationFlags::ZERO);
        let expected = [
            (30, AllocationFlags::empty()),
            (10, hole),
            (1, AllocationFlags::ZERO),
        ];
        let seen: Vec<_> = runs.iter().map(|run| (run.len, run.flags)).collect();
        assert_eq!(seen, expected);
        let runs = joined(&extents, true);
        let seen: Vec<_> = runs.iter().map(|run| (run.len, run.depth)).collect();
        assert_eq!(seen, [(10, 1), (20, 2), (10, 0), (1, 1)]);
    }
}
