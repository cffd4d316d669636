//! Checkpoints: one moment of several disks, from which each has a bitmap of its own for what
//! changes.
//!
//! The bitmaps of a disk follow each other in time, and the last one notes what changes. So what
//! has changed since a checkpoint is in its bitmap and those behind it.
//!
//! | step of [`Checkpoint::take`], with requests to all disks held back | a failure leaves |
//! | --- | --- |
//! | for each disk: the last bitmap is added to what has changed since the parent, and ends; the new one begins, clean | the disks as they were: bitmaps that were exchanged are exchanged back |
//! | for each disk: its view, or its copy, begins | |

use std::sync::Arc;

use crate::backup::Backup;
use crate::dirty::DirtyMap;
use crate::host::Held;
use crate::live::LiveDisk;
use crate::marks::Marks;
use crate::view::View;

/// The use of the moment.
#[derive(Debug)]
pub enum Use {
    /// The disk is shown as it was.
    View(Arc<View>),
    /// The changes, or the whole disk, are copied.
    Backup(Backup),
}

/// A disk that is ready for the moment.
#[derive(Debug)]
pub struct Checkpoint<B> {
    /// The disk.
    pub live: Arc<LiveDisk>,
    /// The bitmap that notes what changes until then, if there is one.
    pub last: Option<B>,
    /// The bitmap that notes what changes from then on. It notes nothing yet.
    pub next: B,
    /// The changes since the parent, but for those of the last bitmap. `None` without a parent:
    /// a copy is of the whole disk.
    pub changed: Option<Arc<DirtyMap>>,
    /// The use of the moment.
    pub copy: Use,
}

impl<B: Marks> Checkpoint<B> {
    /// Takes the moment of several disks, whose requests are held back.
    ///
    /// # Errors
    /// Of an image that keeps a bitmap. No disk has the checkpoint, and the last bitmaps go on.
    ///
    /// # Panics
    /// If the requests of a disk are not held back.
    pub async fn take(disks: &[Checkpoint<B>], held: &Held) -> Result<(), B::Error> {
        for (index, disk) in disks.iter().enumerate() {
            if let Err(error) = disk.exchange().await {
                for exchanged in &disks[..=index] {
                    // What fails here has failed before: the image takes no change any more.
                    drop(exchanged.exchange_back().await);
                }
                return Err(error);
            }
        }
        for disk in disks {
            let drained = held.of(&disk.live).expect("its requests are held back");
            match (&disk.copy, &disk.changed) {
                (Use::View(view), _) => view.freeze(drained),
                (Use::Backup(backup), Some(changed)) => {
                    backup.want(changed);
                    backup.freeze(drained);
                }
                (Use::Backup(backup), None) => {
                    backup.want_all();
                    backup.freeze(drained);
                }
            }
        }
        Ok(())
    }

    async fn exchange(&self) -> Result<(), B::Error> {
        if let Some(last) = &self.last {
            if let Some(changed) = &self.changed {
                changed.merge(&*last.marks().await?);
            }
            last.enable(false).await?;
        }
        self.next.clear().await?;
        self.next.enable(true).await
    }

    async fn exchange_back(&self) -> Result<(), B::Error> {
        let ended = self.next.enable(false).await;
        match &self.last {
            Some(last) => last.enable(true).await.and(ended),
            None => ended,
        }
    }
}

/// The changes that bitmaps have noted, but for one that still notes them. The map has `size`
/// bytes in chunks of `chunk_bytes`, and follows nothing.
///
/// # Errors
/// Of the image that keeps the bitmaps.
pub async fn noted_changes<B: Marks>(
    bitmaps: &[B],
    (size, chunk_bytes): (u64, u64),
) -> Result<Arc<DirtyMap>, B::Error> {
    let changed = DirtyMap::new(size, chunk_bytes);
    changed.enable(false);
    for bitmap in bitmaps.iter().filter(|bitmap| !bitmap.is_enabled()) {
        changed.merge(&*bitmap.marks().await?);
    }
    Ok(changed)
}

/// Has the bitmap of a checkpoint go on from where that of the next one does, which is to be
/// removed: what has changed since the earlier one is still known.
///
/// # Errors
/// Of the image that keeps the bitmaps. The earlier one may have more marks than before, and
/// notes what changes if the other one does.
pub async fn join<B: Marks>(earlier: &B, gone: &B) -> Result<(), B::Error> {
    if gone.is_enabled() {
        // Both note what changes meanwhile.
        earlier.enable(true).await?;
    }
    earlier.merge(&*gone.marks().await?).await
}
