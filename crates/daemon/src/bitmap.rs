//! [`Bitmap`]: what has changed on a disk since a moment, by a name.
//!
//! It is in memory, and follows the requests of the node ([`DirtyMap`]), or is kept by the image,
//! which follows its own writes, marks it while it is open for writing, and has it in its file when
//! it is closed. The image is asked whenever such a bitmap is named: there is no copy of the list.

use std::rc::Rc;
use std::sync::Arc;

use cowslip::Image;
use cowslip::qcow2::bitmap::{BitmapChange, DirtyBits};
use cowslip::qcow2::inspect::BitmapInfo;
use cowslip_graph::{DirtyMap, Marks};
use cowslip_qmp::QmpError;

use super::nodes::Node;
use super::words::failed;

/// A bitmap of a node.
#[derive(Clone)]
pub struct Bitmap {
    /// Its node.
    pub node: Rc<Node>,
    /// Its name.
    pub name: String,
    /// Where it is.
    pub bits: Bits,
}

/// The place of a bitmap.
#[derive(Clone)]
pub enum Bits {
    /// In memory.
    Memory(Arc<DirtyMap>),
    /// Kept by the node's image, as it said when it was asked.
    Kept(BitmapInfo),
}

/// A bitmap that an operation uses, until this is dropped.
pub struct InUse {
    node: Rc<Node>,
    name: String,
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut busy = self.node.busy_bitmaps.borrow_mut();
        if let Some(at) = busy.iter().position(|name| *name == self.name) {
            busy.swap_remove(at);
        }
    }
}

impl Node {
    /// Its bitmaps, the oldest first: those of its image, then those in memory.
    ///
    /// # Errors
    /// The image's list cannot be read.
    pub async fn bitmaps(self: &Rc<Node>) -> Result<Vec<Bitmap>, QmpError> {
        let kept = self.image().bitmaps().await.map_err(failed)?;
        let kept = kept
            .into_iter()
            .map(|info| (info.name.clone(), Bits::Kept(info)));
        let in_memory = self.memory_bitmaps.borrow();
        let in_memory = in_memory
            .iter()
            .map(|(name, map)| (name.clone(), Bits::Memory(Arc::clone(map))));
        let bitmap = |(name, bits)| Bitmap {
            node: Rc::clone(self),
            name,
            bits,
        };
        Ok(kept.chain(in_memory).map(bitmap).collect())
    }

    /// The bitmap of this name, if there is one.
    ///
    /// # Errors
    /// The image's list cannot be read.
    pub async fn find_bitmap(self: &Rc<Node>, name: &str) -> Result<Option<Bitmap>, QmpError> {
        let bitmaps = self.bitmaps().await?;
        Ok(bitmaps.into_iter().find(|bitmap| bitmap.name == name))
    }

    /// The same.
    ///
    /// # Errors
    /// There is none.
    pub async fn bitmap(self: &Rc<Node>, name: &str) -> Result<Bitmap, QmpError> {
        let found = self.find_bitmap(name).await?;
        found.ok_or_else(|| QmpError::generic(format!("Dirty bitmap '{name}' not found")))
    }

    /// Bytes of a bit of a bitmap, if nothing else is asked for: a cluster, within limits.
    pub fn default_granularity(&self) -> u64 {
        let header = self.image().own_layer().header;
        let cluster = header.map_or(64 << 10, |header| 1_u64 << header.cluster_bits);
        cluster.clamp(4 << 10, 64 << 10)
    }
}

impl Bitmap {
    /// Whether the image keeps it.
    pub fn is_kept(&self) -> bool {
        matches!(self.bits, Bits::Kept(_))
    }

    /// Whether it was not saved properly, so that its bits mean nothing.
    pub fn is_inconsistent(&self) -> bool {
        matches!(&self.bits, Bits::Kept(info) if info.in_use)
    }

    /// Bytes of the disk that a bit stands for.
    pub fn granularity(&self) -> u64 {
        match &self.bits {
            Bits::Memory(map) => map.chunk_bytes(),
            Bits::Kept(info) => info.granularity,
        }
    }

    /// Whether an operation uses it.
    pub fn is_busy(&self) -> bool {
        self.node.busy_bitmaps.borrow().contains(&self.name)
    }

    /// Refuses one that an operation uses.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn refuse_busy(&self) -> Result<(), QmpError> {
        match self.is_busy() {
            false => Ok(()),
            true => Err(QmpError::generic(format!(
                "Bitmap '{}' is currently in use by another operation and cannot be used",
                self.name
            ))),
        }
    }

    /// Refuses one that cannot be read.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn refuse_unreadable(&self) -> Result<(), QmpError> {
        self.refuse_busy()?;
        match self.is_inconsistent() {
            false => Ok(()),
            true => Err(QmpError::generic(format!(
                "Bitmap '{}' is inconsistent and cannot be used",
                self.name
            ))),
        }
    }

    /// Keeps others from changing it.
    pub fn use_it(&self) -> InUse {
        let mut busy = self.node.busy_bitmaps.borrow_mut();
        busy.push(self.name.clone());
        InUse {
            node: Rc::clone(&self.node),
            name: self.name.clone(),
        }
    }

    /// Bytes of the disk that are dirty, the last chunk counted whole.
    ///
    /// # Errors
    /// The image cannot be read.
    pub async fn dirty_bytes(&self) -> Result<u64, QmpError> {
        match &self.bits {
            Bits::Memory(map) => Ok(map.dirty_bytes()),
            Bits::Kept(info) if info.in_use => Ok(0),
            Bits::Kept(_) => Ok(self.marks().await?.dirty_bytes()),
        }
    }

    /// Makes an end of it.
    ///
    /// # Errors
    /// Of the image, which is open for writing.
    pub async fn remove(&self) -> Result<(), QmpError> {
        match &self.bits {
            Bits::Memory(map) => {
                let tap = Arc::clone(map) as _;
                self.node.live.remove(&tap);
                let mut in_memory = self.node.memory_bitmaps.borrow_mut();
                in_memory.retain(|(_, other)| !Arc::ptr_eq(other, map));
                Ok(())
            }
            Bits::Kept(_) => self.change(&BitmapChange::Remove).await,
        }
    }

    fn image(&self) -> Arc<Image> {
        self.node.image()
    }

    async fn change(&self, change: &BitmapChange) -> Result<(), QmpError> {
        let changed = self.image().change_bitmap(&self.name, change).await;
        changed.map_err(failed)
    }
}

impl Marks for Bitmap {
    type Error = QmpError;

    fn is_enabled(&self) -> bool {
        match &self.bits {
            Bits::Memory(map) => map.is_enabled(),
            Bits::Kept(info) => info.auto && !info.in_use,
        }
    }

    async fn marks(&self) -> Result<Arc<DirtyMap>, QmpError> {
        let copy = DirtyMap::new(self.node.live_size(), self.granularity());
        copy.enable(false);
        match &self.bits {
            Bits::Memory(map) => copy.merge(map),
            Bits::Kept(_) => {
                let bits = self.image().dirty_bits(&self.name).await.map_err(failed)?;
                bits.dirty_ranges().for_each(|range| copy.mark(range));
            }
        }
        Ok(copy)
    }

    async fn clear(&self) -> Result<(), QmpError> {
        match &self.bits {
            Bits::Memory(map) => {
                map.clear();
                Ok(())
            }
            Bits::Kept(_) => self.change(&BitmapChange::Clear).await,
        }
    }

    async fn enable(&self, is_enabled: bool) -> Result<(), QmpError> {
        match (&self.bits, is_enabled) {
            (Bits::Memory(map), _) => {
                map.enable(is_enabled);
                Ok(())
            }
            (Bits::Kept(_), true) => self.change(&BitmapChange::Enable).await,
            (Bits::Kept(_), false) => self.change(&BitmapChange::Disable).await,
        }
    }

    async fn merge(&self, marks: &DirtyMap) -> Result<(), QmpError> {
        match &self.bits {
            Bits::Memory(map) => {
                map.merge(marks);
                Ok(())
            }
            Bits::Kept(_) => {
                let granularity_bits = self.granularity().ilog2() as u8;
                let mut bits = DirtyBits::clean(granularity_bits, self.image().size());
                let (mut at, size) = (0, marks.size());
                while let Some(run) = marks.next(at, size) {
                    at = run.end;
                    bits.mark(&run);
                }
                self.change(&BitmapChange::MergeBits(bits)).await
            }
        }
    }
}
