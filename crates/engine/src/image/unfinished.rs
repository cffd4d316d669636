//! Images that are being filled, which no other program may take for complete ones.

use super::Image;
use crate::Result;

impl Image {
    /// Marks the image as incomplete, durably: until [`Image::mark_finished`], also after the
    /// process was killed, programs refuse to open it, by an incompatible feature bit (number 63,
    /// which the specification does not assign) and its name. For one that is new and about to be
    /// filled. Images of other formats, and qcow2 of version 2, cannot be marked: nothing is done.
    ///
    /// # Errors
    /// As [`Image::resize`].
    pub async fn mark_unfinished(&self) -> Result<()> {
        self.validate_write(0, 0)?;
        match self.top.qcow2() {
            Some(image) => image.mark_unfinished().await,
            None => Ok(()),
        }
    }

    /// Flushes the image, and then takes away the mark of [`Image::mark_unfinished`], durably.
    ///
    /// # Errors
    /// As [`Image::flush`]; the mark stays then.
    pub async fn mark_finished(&self) -> Result<()> {
        match self.top.qcow2() {
            Some(image) => image.mark_finished().await,
            None => Ok(()),
        }
    }
}
