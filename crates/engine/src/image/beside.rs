//! An image that is opened again while it answers reads: those who use it wait for the change from
//! one to the other alone, and not for the opening.

use std::sync::Arc;

use super::{Image, OpenOptions};
use crate::file::{BlockFile, Gate};
use crate::{Error, Result};

impl Image {
    /// Whether [`Image::open_beside`] can open it again: it is only read, and no repair is due that
    /// would change what this one knows of the file.
    #[doc(hidden)]
    pub fn can_be_opened_beside(&self) -> bool {
        let header = self.own_layer().header;
        !self.writable && header.is_none_or(|header| !header.is_dirty())
    }

    /// Opens the image once more, through another handle of its file and with other options, to
    /// take the place of this one, which answers reads until then; [`Image::give_way`] ends it.
    /// Nothing may be written by the new one before. No other process can claim the files in
    /// between: the claims are handed over.
    ///
    /// # Errors
    /// As [`Image::open`]: this one may have greater claims then, until it is reopened. It cannot
    /// be opened beside.
    #[doc(hidden)]
    pub async fn open_beside(
        &self,
        file: Arc<dyn BlockFile>,
        options: OpenOptions,
        gate: &dyn Gate,
    ) -> Result<Image> {
        if !self.can_be_opened_beside() {
            let text = "an image that is written, or was not closed in order, is not opened twice";
            return Err(Error::Invalid(text.to_string()));
        }
        let files = self.files().cloned().collect();
        Image::open_after(file, options, gate, files).await
    }

    /// Ends an image whose place another one has taken. No request is under way.
    ///
    /// # Errors
    /// A file could not be closed.
    #[doc(hidden)]
    pub async fn give_way(&self) -> Result<()> {
        self.finish().await?;
        self.end_files().await?;
        self.release();
        Ok(())
    }
}
