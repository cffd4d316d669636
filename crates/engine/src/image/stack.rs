//! Images over layers that others have open: chains that change while a guest uses them.
//!
//! A host that keeps the layers of a chain apart opens each of them alone
//! ([`BackingChoice::None`](super::BackingChoice)) and puts one over the others with
//! [`Image::above`]. An overlay over a disk in use, a chain without some of its layers, and a layer
//! that is committed into while those above it are read, are such images. None of this writes
//! anything; the order is the caller's:
//!
//! 1. no request is under way, and none begins;
//! 2. what becomes immutable is frozen ([`Image::freeze`]): its session ends as at a close;
//! 3. what the new chain needs of headers is written, durably;
//! 4. requests go to the new image.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{
    CopyOnRead, DetectZeroes, DiscardPolicy, Image, OpenOptions, WholeClusters, WritePolicy,
};
use crate::chain::{Below, Layer, Naming, Namings, share_memory};
use crate::file::{ChosenBy, Claim, Sharing};
use crate::limits::Limits;
use crate::policy::Format;
use crate::sync::Turn;
use crate::{Error, Result};

/// Layers that an image can be put over, the uppermost first. The default has none.
#[derive(Clone, Debug, Default)]
pub struct Stack {
    layers: Vec<Arc<Layer>>,
    /// How each but the first was named.
    namings: Namings,
}

impl Stack {
    /// The layers from this depth on; none if there are no more.
    #[must_use]
    pub fn from(&self, depth: usize) -> Stack {
        Stack {
            layers: self.layers[depth.min(self.layers.len())..].to_vec(),
            namings: self.namings.from(depth),
        }
    }

    /// Number of layers.
    pub fn depth(&self) -> usize {
        self.layers.len()
    }

    /// The image that consists of these layers, for reading; `None` without any.
    pub fn to_image(&self) -> Option<Image> {
        let (top, below) = self.layers.split_first()?;
        Some(Image {
            top: Arc::clone(top),
            below: Below::new(below.to_vec()),
            namings: self.namings.clone(),
            writable: false,
            write_policy: WritePolicy::default(),
            discard: DiscardPolicy::default(),
            detect_zeroes: DetectZeroes::default(),
            copy_on_read: CopyOnRead::Off,
            whole_clusters: None,
            limits: Limits::default(),
            cache_bytes: OpenOptions::default().cache_bytes_or_default(),
            unprotected: Vec::new(),
            is_frozen: AtomicBool::new(true),
            is_snapshot: false,
            keys: Turn::new(()),
        })
    }
}

impl Image {
    /// The layers of the image, its own first.
    #[doc(hidden)]
    pub fn stack(&self) -> Stack {
        let layers = std::iter::once(&self.top).chain(self.below.layers());
        Stack {
            layers: layers.cloned().collect(),
            namings: self.namings.clone(),
        }
    }

    /// The image with these layers in the place of its backing chain. It shares its own layer with
    /// this image, and the others with those that the stack is from: closing it closes all of them.
    /// One of the two is used from then on.
    ///
    /// # Errors
    /// `Invalid` if the image itself is among the layers, or is no qcow2 image and there are any.
    #[doc(hidden)]
    pub fn above(&self, stack: &Stack) -> Result<Image> {
        if stack.depth() > 0 {
            self.qcow2_for("a backing file of")?;
        }
        let content = |layer: &Layer| layer.files().next().and_then(|file| file.content_id());
        let own = content(&self.top);
        let is_own = |layer: &Arc<Layer>| {
            Arc::ptr_eq(layer, &self.top) || (own.is_some() && content(layer) == own)
        };
        if stack.layers.iter().any(is_own) {
            let text = format!("'{}' would be its own backing file", self.name());
            return Err(Error::Invalid(text));
        }
        let naming = stack.layers.first().map(|first| Naming {
            named_by: self.name().to_string(),
            name: first.file().name().to_string(),
            chosen_by: ChosenBy::Caller,
        });
        let below = Below::new(stack.layers.clone());
        share_memory(&self.top, &below, self.cache_bytes);
        Ok(Image {
            top: Arc::clone(&self.top),
            below,
            namings: match naming {
                Some(naming) => stack.namings.clone().below(naming),
                None => stack.namings.clone(),
            },
            writable: self.writable,
            write_policy: self.write_policy,
            discard: self.discard,
            detect_zeroes: self.detect_zeroes,
            copy_on_read: self.copy_on_read,
            whole_clusters: self
                .whole_clusters
                .as_ref()
                .map(|_| WholeClusters::default()),
            limits: self.limits,
            cache_bytes: self.cache_bytes,
            unprotected: self.unprotected.clone(),
            is_frozen: AtomicBool::new(!self.is_writable()),
            is_snapshot: self.is_snapshot,
            keys: Turn::new(()),
        })
    }

    /// Copies data of the layers below into the image, for a range of the disk: what a read of it
    /// with this setting would store. Requests go on meanwhile; what they write is kept.
    ///
    /// # Errors
    /// As [`Image::write`].
    #[doc(hidden)]
    pub async fn populate(&self, range: Range<u64>, what: CopyOnRead) -> Result<()> {
        self.validate_write(range.start, range.end.saturating_sub(range.start))?;
        let image = self.qcow2_for("copying backing data into")?;
        let copied = image.copy_on_read(range, (&self.below, what)).await;
        image.mark_corrupt_on_error(copied).await
    }

    /// Discards all that the image itself holds, durably, so that its disk is that of its backing
    /// file. The session ends with it, well or not: only [`Image::close`] may follow.
    ///
    /// # Errors
    /// As [`Image::commit`]. After each, as after a crash, the image is full or empty.
    #[doc(hidden)]
    pub async fn empty(&self) -> Result<()> {
        self.validate_write(0, 0)?;
        self.qcow2_for("emptying")?.make_empty().await
    }

    /// Ends the session of the image's own layer as [`Image::close`] does, but keeps it open to be
    /// read, as a layer below others: its files are claimed as those of a backing file are. What
    /// would change it fails from now on.
    ///
    /// # Errors
    /// I/O: the session has ended in any case.
    #[doc(hidden)]
    pub async fn freeze(&self) -> Result<()> {
        self.is_frozen.store(true, Ordering::Release);
        let finished = self.finish().await;
        if let Some(image) = self.top.qcow2() {
            image.end_session();
        }
        let claim = match self.top.format() {
            Format::Raw => Claim::raw(false, Sharing::AsFormat),
            Format::Qcow2 | Format::Luks | Format::Other(_) => Claim::qcow2(false),
        };
        for (index, file) in self.top.files().enumerate() {
            let claim = match index {
                0 => claim,
                _ => Claim::data_file(false),
            };
            // It asks for less than is held.
            drop(file.claim(claim)?);
        }
        finished
    }
}
