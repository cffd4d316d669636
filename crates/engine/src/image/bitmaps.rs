//! The persistent dirty bitmaps of an image, and of the images below it.

use std::ops::Range;

use super::Image;
use crate::qcow2::bitmap::{BitmapChange, DirtyBits, DirtyRun};
use crate::qcow2::inspect::BitmapInfo;
use crate::{Error, Result};

fn no_such_bitmap(name: &str) -> Error {
    Error::Invalid(format!("Dirty bitmap '{name}' not found"))
}

impl Image {
    /// The persistent dirty bitmaps, in the order of the image's directory, with the changes of
    /// this session; a raw image has none.
    ///
    /// # Errors
    /// I/O, or a directory that is corrupt.
    pub async fn bitmaps(&self) -> Result<Vec<BitmapInfo>> {
        match self.top.qcow2() {
            None => Ok(Vec::new()),
            Some(image) => image.bitmaps().await,
        }
    }

    /// Returns the bits of a persistent bitmap at this moment: at least all changes that were made
    /// while it was enabled.
    ///
    /// # Errors
    /// `Invalid` if there is none of this name, or it was not saved properly; I/O, or a table that
    /// is corrupt.
    pub async fn dirty_bits(&self, name: &str) -> Result<DirtyBits> {
        self.dirty_bits_below(0, name).await
    }

    /// The bitmap that is meant by a name where the disk is what counts, as for clients of a
    /// server: that of the uppermost image of the chain that has one; and how many images lie above
    /// that.
    ///
    /// # Errors
    /// As [`Image::bitmaps`].
    #[doc(hidden)]
    pub async fn find_bitmap(&self, name: &str) -> Result<Option<(usize, BitmapInfo)>> {
        let below = self.below.layers().iter().map(|layer| &**layer);
        for (depth, layer) in std::iter::once(&*self.top).chain(below).enumerate() {
            let Some(image) = layer.qcow2() else {
                continue;
            };
            let bitmaps = image.bitmaps().await?;
            let mut found = bitmaps.into_iter().filter(|bitmap| bitmap.name == name);
            if let Some(bitmap) = found.next() {
                return Ok(Some((depth, bitmap)));
            }
        }
        Ok(None)
    }

    /// As [`Image::dirty_bits`], of the image at this depth of the chain; 0 is the image on top.
    ///
    /// # Errors
    /// As [`Image::dirty_bits`].
    #[doc(hidden)]
    pub async fn dirty_bits_below(&self, depth: usize, name: &str) -> Result<DirtyBits> {
        let layer = match depth.checked_sub(1) {
            None => &self.top,
            Some(at) => &self.below.layers()[at],
        };
        let image = layer.qcow2().ok_or_else(|| no_such_bitmap(name))?;
        image.dirty_bits(name).await
    }

    /// Returns the first `most` runs, alternately dirty and clean, of a range in a persistent
    /// bitmap of an image that is open for writing. A write that is under way counts already.
    ///
    /// # Errors
    /// As [`Image::dirty_bits`]; `ReadOnly` if it is not open for writing.
    #[doc(hidden)]
    pub async fn dirty_runs(
        &self,
        name: &str,
        range: Range<u64>,
        most: usize,
    ) -> Result<Vec<DirtyRun>> {
        self.validate_write(0, 0)?;
        let image = self.top.qcow2().ok_or_else(|| no_such_bitmap(name))?;
        image.dirty_runs(name, &range, most).await
    }

    /// Changes a persistent bitmap, with writes held back for that moment. The image has it when it
    /// is closed: a session that ends otherwise leaves the bitmaps of the one before, marked as
    /// inconsistent if anything that they should have followed may have happened since.
    ///
    /// # Errors
    /// `Invalid` for what cannot be, in QEMU's words; `Unsupported` where the format cannot; I/O.
    pub async fn change_bitmap(&self, name: &str, change: &BitmapChange) -> Result<()> {
        self.validate_write(0, 0)?;
        let image = self.qcow2_for("a persistent bitmap of")?;
        image.change_bitmap(name, change).await
    }
}
