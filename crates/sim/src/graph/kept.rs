//! Copies of a disk that were reported complete, and what they have to hold.

use cowslip::image::Format;

use crate::model::{Found, Granules, SECTOR_BYTES, recognise};
use crate::remembered::Content;

/// A backup that was reported complete, and what it has to hold.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub file: String,
    pub format: Format,
    pub size: u64,
    pub content: Content,
}

/// A checkpoint whose copy is complete.
#[derive(Clone, Debug)]
pub(crate) struct Past {
    /// The image that keeps its bitmap.
    pub image: String,
    /// The bitmap.
    pub name: String,
    /// The copy.
    pub copy: (String, Format),
}

impl Kept {
    /// Checks some bytes of a backup, or of a view.
    ///
    /// # Errors
    /// Bytes that are not those of its moment.
    pub fn check(&self, granules: &Granules, bytes: &[u8]) -> Result<(), String> {
        let sectors = bytes.chunks(SECTOR_BYTES as usize);
        for (granule, bytes) in granules.clone().zip(sectors) {
            let possible = self
                .content
                .iter()
                .find(|(window, _)| window.contains(&granule))
                .map(|(window, contents)| &contents[(granule - window.start) as usize]);
            let possible = possible.expect("the disk lies within the windows");
            let found = recognise(granule, bytes);
            if !matches!(found, Found::Own(write) if possible.contains(&write)) {
                return Err(format!(
                    "{}: {found:?} was found in a backup at {:#x}; possible: {possible:?}",
                    self.file,
                    granule * SECTOR_BYTES
                ));
            }
        }
        Ok(())
    }

    /// Checks all bytes of a backup.
    ///
    /// # Errors
    /// Bytes that are not those of its moment.
    pub fn check_whole(&self, bytes: &[u8]) -> Result<(), String> {
        if bytes.len() as u64 != self.size {
            let len = bytes.len();
            return Err(format!("{len} bytes of backup {} were found", self.file));
        }
        self.check(&(0..self.size / SECTOR_BYTES), bytes)
    }
}
