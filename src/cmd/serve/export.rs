//! [`Disk`]: an image, or what follows an offset in it, as an NBD export.
//!
//! | context | what it tells | from |
//! | --- | --- | --- |
//! | `base:allocation` | data, zeroes, holes | the whole chain |
//! | `qemu:allocation-depth` | which image of the chain holds it | the whole chain |
//! | `qemu:dirty-bitmap:NAME` | what has changed | a persistent bitmap of the uppermost image that has one of the name |

use std::ops::Range;
use std::sync::Arc;

use cowslip::image::{Extent, WriteOptions, ZeroOptions};
use cowslip::qcow2::bitmap::{DirtyBits, DirtyRun};
use cowslip::{Buf, BufMut, Error, Image};
use cowslip_nbd::export::{Access, Durability, StatusExtent, ZeroRequest};
use cowslip_nbd::protocol::{
    ALLOCATION_DEPTH, AllocationFlags, BASE_ALLOCATION, DIRTY_BITMAP_NAMESPACE,
};
use cowslip_nbd::{Export, ExportError, ExportFuture, ExportInfo};

use super::Service;
use crate::error::CommandError;

/// The served part of an image.
pub struct Disk {
    image: Arc<Image>,
    /// The first byte that is served.
    offset: u64,
    description: String,
    /// Whether several clients may share it: then what one flushes, the others wrote.
    shared: bool,
    /// What clients may ask for, `base:allocation` first.
    contexts: Vec<Context>,
}

/// A metadata context.
enum Context {
    Allocation,
    Depth,
    /// A bitmap, with its name.
    Bitmap(String, Bits),
}

/// What a bitmap says.
enum Bits {
    /// This, for good: it follows no writes, or there are none.
    Fixed(DirtyBits),
    /// What the image says whenever it is asked.
    Following,
}

/// The state of what has changed.
const DIRTY: AllocationFlags = AllocationFlags(1);

impl Context {
    fn name(&self) -> String {
        match self {
            Context::Allocation => BASE_ALLOCATION.to_owned(),
            Context::Depth => ALLOCATION_DEPTH.to_owned(),
            Context::Bitmap(name, _) => format!("{DIRTY_BITMAP_NAMESPACE}{name}"),
        }
    }

    /// The bitmap that a name means.
    ///
    /// # Errors
    /// There is none, it was not saved properly, or it cannot be read.
    async fn of_bitmap(image: &Image, name: &str) -> Result<Context, CommandError> {
        let failed = |error: Error| CommandError::new(error.to_string());
        let found = image.find_bitmap(name).await.map_err(failed)?;
        let Some((depth, info)) = found else {
            return Err(CommandError::new(format!("Bitmap '{name}' is not found")));
        };
        if info.in_use {
            let text = format!("Bitmap '{name}' is inconsistent and cannot be used");
            return Err(CommandError::new(text));
        }
        let follows = depth == 0 && info.auto && image.is_writable();
        let bits = match follows {
            true => Bits::Following,
            false => Bits::Fixed(image.dirty_bits_below(depth, name).await.map_err(failed)?),
        };
        Ok(Context::Bitmap(name.to_owned(), bits))
    }
}

impl Disk {
    /// What the service serves of its image.
    ///
    /// # Errors
    /// A bitmap that it is to tell of is not there, or cannot be used.
    pub async fn new(image: Arc<Image>, service: &Service) -> Result<Disk, CommandError> {
        let mut contexts = vec![Context::Allocation];
        if service.tells_depth {
            contexts.push(Context::Depth);
        }
        // As qemu-nbd lists them: the last one of the command line first.
        for name in service.bitmaps.iter().rev() {
            if service.offset > 0 {
                // A bitmap is one of a whole disk, and this is another one.
                let text = format!("Bitmap '{name}' is not found");
                return Err(CommandError::new(text));
            }
            contexts.push(Context::of_bitmap(&image, name).await?);
        }
        Ok(Disk {
            image,
            offset: service.offset,
            description: service.description.clone(),
            shared: service.clients_max != Some(1),
            contexts,
        })
    }

    /// Runs of a range of the image in one context.
    async fn runs(
        &self,
        context: &Context,
        range: Range<u64>,
        most: usize,
    ) -> Result<Vec<StatusExtent>, Error> {
        let dirty = match context {
            Context::Bitmap(_, Bits::Fixed(bits)) => bits.runs(&range, most),
            Context::Bitmap(name, Bits::Following) => {
                self.image.dirty_runs(name, range, most).await?
            }
            Context::Allocation | Context::Depth => {
                let (start, len) = (range.start, range.end - range.start);
                let extents = self.image.extents(start, len, most).await?;
                let layers = self.image.layers().len() as u32;
                let state = |run: &Extent| match context {
                    Context::Depth => depth(run, layers),
                    _ => allocation(run),
                };
                return Ok(joined(extents.iter().map(|run| (run.len, state(run)))));
            }
        };
        let state = |run: &DirtyRun| AllocationFlags::empty().with_if(DIRTY, run.dirty);
        Ok(joined(dirty.iter().map(|run| (run.len, state(run)))))
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

/// A run's state as qemu-nbd tells it: a hole is what nobody has allocated.
fn allocation(extent: &Extent) -> AllocationFlags {
    AllocationFlags::empty()
        .with_if(AllocationFlags::HOLE, !extent.data)
        .with_if(AllocationFlags::ZERO, extent.zero)
}

/// Which image of a chain of so many holds a run: the one on top is 1, and 0 is none. As in QEMU,
/// an image that is shorter than the one above it holds what is beyond its end.
fn depth(extent: &Extent, layers: u32) -> AllocationFlags {
    AllocationFlags(match extent.present {
        true => extent.depth + 1,
        false if extent.depth + 1 < layers => extent.depth + 2,
        false => 0,
    })
}

/// Joins neighbours of one state.
fn joined(runs: impl Iterator<Item = (u64, AllocationFlags)>) -> Vec<StatusExtent> {
    let mut joined: Vec<StatusExtent> = Vec::new();
    for (len, flags) in runs {
        match joined.last_mut() {
            Some(last) if last.flags == flags => last.len += len,
            _ => joined.push(StatusExtent { len, flags }),
        }
    }
    joined
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
        info.contexts = self.contexts.iter().map(Context::name).collect();
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
        context: usize,
        offset: u64,
        len: u64,
        max_extents: usize,
    ) -> ExportFuture<'_, Vec<StatusExtent>> {
        Box::pin(async move {
            let start = self.offset + offset;
            let runs = self.runs(&self.contexts[context], start..start + len, max_extents);
            runs.await.map_err(refused)
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
    fn clients_see_layers_only_where_they_ask_for_them() {
        let extents = [
            extent(0, 10, 0, true, false),
            extent(10, 20, 1, true, false),
            extent(30, 5, 1, false, true),
            extent(35, 5, 0, false, true),
            extent(40, 1, 0, true, true),
        ];
        let seen = |state: &dyn Fn(&Extent) -> AllocationFlags| {
            let runs = joined(extents.iter().map(|run| (run.len, state(run))));
            let seen = runs.iter().map(|run| (run.len, run.flags.0));
            seen.collect::<Vec<_>>()
        };
        let hole = AllocationFlags::HOLE.with(AllocationFlags::ZERO).0;
        let expected = [(30, 0), (10, hole), (1, AllocationFlags::ZERO.0)];
        assert_eq!(seen(&allocation), expected);
        let of_two = |extent: &Extent| depth(extent, 2);
        // Behind the end of the backing file it is the one that answers.
        let expected = [(10, 1), (20, 2), (5, 0), (5, 2), (1, 1)];
        assert_eq!(seen(&of_two), expected);
    }
}
