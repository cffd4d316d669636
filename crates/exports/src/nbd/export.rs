//! An image, or what follows an offset in it, as an NBD export.
//!
//! | context | what it shows | from |
//! | --- | --- | --- |
//! | `base:allocation` | data, zeroes, holes | the whole chain |
//! | `qemu:allocation-depth` | the image of the chain that holds it | the whole chain |
//! | `qemu:dirty-bitmap:NAME` | what has changed | a persistent bitmap of the uppermost image that has one of the name |

use std::sync::Arc;

use cowslip::disk::DiskFuture;
use cowslip::image::Extent;
use cowslip::qcow2::bitmap::{DirtyBits, DirtyRun};
use cowslip::{Disk, Error, Image};
use cowslip_console::error::CommandError;
use cowslip_nbd::export::{Export, MetadataContext, StatusExtent, joined};
use cowslip_nbd::protocol::{ALLOCATION_DEPTH, AllocationFlags, DIRTY_BITMAP_NAMESPACE};

use super::{Nbd, Served};

/// The state of what has changed.
const DIRTY: AllocationFlags = AllocationFlags(1);

/// `qemu:allocation-depth` of a disk.
struct Depth {
    disk: Arc<dyn Disk>,
    /// Images of the chain.
    layers: u32,
}

/// `qemu:dirty-bitmap:NAME` of an image.
struct Bitmap {
    name: String,
    bits: Bits,
}

/// The state of a bitmap.
enum Bits {
    /// Constant bits: the bitmap follows no writes, or there are none.
    Fixed(DirtyBits),
    /// The bits of the image's bitmap of this name, whenever they are asked for.
    Following(Arc<Image>, String),
}

impl MetadataContext for Depth {
    fn name(&self) -> &str {
        ALLOCATION_DEPTH
    }

    fn runs(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<StatusExtent>> {
        Box::pin(async move {
            let extents = self.disk.extents(offset, len, max).await?;
            Ok(joined(extents.iter().map(|extent| StatusExtent {
                len: extent.len,
                flags: depth(extent, self.layers),
            })))
        })
    }
}

impl MetadataContext for Bitmap {
    fn name(&self) -> &str {
        &self.name
    }

    fn runs(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<StatusExtent>> {
        Box::pin(async move {
            let range = offset..offset + len;
            let runs = match &self.bits {
                Bits::Fixed(bits) => bits.runs(&range, max),
                Bits::Following(image, name) => image.dirty_runs(name, range, max).await?,
            };
            let state = |run: &DirtyRun| StatusExtent {
                len: run.len,
                flags: AllocationFlags::empty().with_if(DIRTY, run.dirty),
            };
            Ok(joined(runs.iter().map(state)))
        })
    }
}

impl Bitmap {
    /// The bitmap that a name means.
    ///
    /// # Errors
    /// There is none, it was not saved properly, or it cannot be read.
    async fn find(image: &Arc<Image>, name: &str) -> Result<Bitmap, CommandError> {
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
            true => Bits::Following(Arc::clone(image), name.to_owned()),
            false => Bits::Fixed(image.dirty_bits_below(depth, name).await.map_err(failed)?),
        };
        Ok(Bitmap {
            name: format!("{DIRTY_BITMAP_NAMESPACE}{name}"),
            bits,
        })
    }
}

/// The export of a disk.
///
/// # Errors
/// A bitmap that it is to show is not there, or cannot be used.
pub async fn export_of(served: &Served, nbd: &Nbd) -> Result<Export, CommandError> {
    let (image, disk) = (&served.image, &served.disk);
    let mut export = Export::new(Arc::clone(disk));
    export.description.clone_from(&nbd.description);
    // Where several clients may share it, one's flush covers what the others wrote.
    export.shared_cache = nbd.clients_max != Some(1);
    if nbd.has_depth_context {
        export.contexts.push(Arc::new(Depth {
            disk: Arc::clone(disk),
            layers: image.layers().len() as u32,
        }));
    }
    // As qemu-nbd lists them: the last one of the command line first.
    for name in nbd.bitmaps.iter().rev() {
        if served.offset > 0 {
            // A bitmap is one of a whole disk, and this is another one.
            let text = format!("Bitmap '{name}' is not found");
            return Err(CommandError::new(text));
        }
        export
            .contexts
            .push(Arc::new(Bitmap::find(image, name).await?));
    }
    Ok(export)
}

/// The image of a chain of `layers` that holds a run: the one on top is 1, and 0 is none. As in
/// QEMU, an image that is shorter than the one above it holds what is beyond its end.
pub fn depth(extent: &Extent, layers: u32) -> AllocationFlags {
    AllocationFlags(match extent.present {
        true => extent.depth + 1,
        false if extent.depth + 1 < layers => extent.depth + 2,
        false => 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_numbered_from_the_top() {
        let extent = |len: u64, depth: u32, present: bool| Extent {
            start: 0,
            len,
            depth,
            present,
            zero: !present,
            data: present,
            compressed: false,
            host_offset: None,
        };
        let extents = [
            extent(10, 0, true),
            extent(20, 1, true),
            extent(5, 1, false),
            extent(5, 0, false),
            extent(1, 0, true),
        ];
        let of_two = extents.map(|extent| (extent.len, depth(&extent, 2).0));
        // Behind the end of the backing file it is the one that answers.
        assert_eq!(of_two, [(10, 1), (20, 2), (5, 0), (5, 2), (1, 1)]);
    }
}
