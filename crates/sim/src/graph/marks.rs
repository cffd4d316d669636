//! [`Bitmap`]: what has changed on a disk of a simulated host, in memory or kept by its image.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::image::Format;
use cowslip::qcow2::bitmap::{BitmapChange, DirtyBits};
use cowslip::qcow2::inspect::BitmapInfo;
use cowslip::{Error, Result};
use cowslip_graph::{DirtyMap, Drained, Marks};

use crate::rng::Rng;

use super::world::{Node, World, size_of};

/// A bitmap of a disk.
#[derive(Clone)]
pub(crate) enum Bitmap {
    Memory(Arc<DirtyMap>),
    /// Kept by the image of a node, as that said when it was asked.
    Kept(Rc<Node>, BitmapInfo),
}

impl fmt::Debug for Bitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bitmap::Memory(map) => write!(f, "{map:?}"),
            Bitmap::Kept(node, info) => write!(f, "{info:?} of {}", node.file),
        }
    }
}

/// A bitmap that is to be added.
#[derive(Debug)]
pub(crate) enum NewBitmap {
    Memory(u64),
    Kept(String, u64),
}

impl NewBitmap {
    pub fn draw((world, node): (&World, &Node), rng: &mut Rng) -> NewBitmap {
        let granularity = rng.pick(&[512, 4096, 65536]);
        match node.format == Format::Qcow2 && rng.chance(50) {
            true => NewBitmap::Kept(format!("backup{}", world.request_id()), granularity),
            false => NewBitmap::Memory(granularity),
        }
    }

    /// Adds it to a disk that is held.
    ///
    /// # Errors
    /// Of the image that keeps it.
    pub async fn begin(&self, node: &Rc<Node>) -> Result<Bitmap> {
        match self {
            NewBitmap::Memory(granularity) => {
                Ok(Bitmap::Memory(DirtyMap::new(size_of(node), *granularity)))
            }
            NewBitmap::Kept(name, granularity) => Bitmap::keep(node, name, *granularity).await,
        }
    }
}

impl Bitmap {
    /// Has the image keep a new bitmap, which follows writes from now on.
    ///
    /// # Errors
    /// Of the image.
    pub async fn keep(node: &Rc<Node>, name: &str, granularity: u64) -> Result<Bitmap> {
        let granularity = Some(granularity);
        let add = BitmapChange::Add { granularity };
        node.image().change_bitmap(name, &add).await?;
        Bitmap::find(node, name).await
    }

    /// The bitmap of this name that the image keeps.
    ///
    /// # Errors
    /// There is none; I/O.
    pub async fn find(node: &Rc<Node>, name: &str) -> Result<Bitmap> {
        let kept = node.image().bitmaps().await?;
        let found = kept.into_iter().find(|info| info.name == name);
        let found = found.ok_or_else(|| Error::Invalid(format!("there is no bitmap {name}")))?;
        Ok(Bitmap::Kept(Rc::clone(node), found))
    }

    /// Has it follow the changes of its disk, which is held.
    pub fn follow(&self, drained: &Drained) {
        if let Bitmap::Memory(map) = self {
            drained.add(Arc::clone(map) as _);
        }
    }

    /// The image's description of it, if an image keeps it.
    pub fn info(&self) -> Option<&BitmapInfo> {
        match self {
            Bitmap::Memory(_) => None,
            Bitmap::Kept(_, info) => Some(info),
        }
    }

    /// Whether it was not saved in order.
    pub fn is_lost(&self) -> bool {
        self.info().is_some_and(|info| info.in_use)
    }

    /// Makes an end of it.
    ///
    /// # Errors
    /// Of the image.
    pub async fn remove(&self, node: &Node) -> Result<()> {
        match self {
            Bitmap::Memory(map) => {
                node.live.remove(&(Arc::clone(map) as _));
                Ok(())
            }
            Bitmap::Kept(..) => self.change(&BitmapChange::Remove).await,
        }
    }

    async fn change(&self, change: &BitmapChange) -> Result<()> {
        match self {
            Bitmap::Memory(_) => Ok(()),
            Bitmap::Kept(node, info) => node.image().change_bitmap(&info.name, change).await,
        }
    }
}

/// Removes the bitmaps of an image that were not saved in order.
///
/// # Errors
/// Of the image.
pub(super) async fn remove_lost(node: &Rc<Node>) -> Result<()> {
    for info in node.image().bitmaps().await? {
        if info.in_use {
            Bitmap::Kept(Rc::clone(node), info).remove(node).await?;
        }
    }
    Ok(())
}

impl Marks for Bitmap {
    type Error = Error;

    fn is_enabled(&self) -> bool {
        match self {
            Bitmap::Memory(map) => map.is_enabled(),
            Bitmap::Kept(_, info) => info.auto && !info.in_use,
        }
    }

    async fn marks(&self) -> Result<Arc<DirtyMap>> {
        let (copy, bits) = match self {
            Bitmap::Memory(map) => {
                let copy = DirtyMap::new(map.size(), map.chunk_bytes());
                copy.merge(map);
                (copy, None)
            }
            Bitmap::Kept(node, info) => {
                let bits = node.image().dirty_bits(&info.name).await?;
                (DirtyMap::new(size_of(node), info.granularity), Some(bits))
            }
        };
        copy.enable(false);
        for range in bits.iter().flat_map(DirtyBits::dirty_ranges) {
            copy.mark(range);
        }
        Ok(copy)
    }

    async fn clear(&self) -> Result<()> {
        if let Bitmap::Memory(map) = self {
            map.clear();
        }
        self.change(&BitmapChange::Clear).await
    }

    async fn merge(&self, marks: &DirtyMap) -> Result<()> {
        match self {
            Bitmap::Memory(map) => {
                map.merge(marks);
                Ok(())
            }
            Bitmap::Kept(node, info) => {
                let mut bits = DirtyBits::clean(info.granularity.ilog2() as u8, size_of(node));
                for (run, is_dirty) in marks.runs(0..marks.size(), usize::MAX) {
                    if is_dirty {
                        bits.mark(&run);
                    }
                }
                self.change(&BitmapChange::MergeBits(bits)).await
            }
        }
    }

    async fn enable(&self, is_enabled: bool) -> Result<()> {
        if let Bitmap::Memory(map) = self {
            map.enable(is_enabled);
        }
        let change = match is_enabled {
            true => BitmapChange::Enable,
            false => BitmapChange::Disable,
        };
        self.change(&change).await
    }
}
