//! Identity of an image: which disk each layer shows, and where its files are stored.

use super::{Format, Image};
use crate::Result;
use crate::chain::Layer;
use crate::file::{AlignedFile, ContentId, ReadAs, ReadSet, Storage};
use crate::qcow2::header::CryptMethod;

/// Identity of what a layer shows: its format and the bytes of its files. See [`Image::origin`].
#[derive(PartialEq, Eq)]
pub(crate) struct Origin(Format, Vec<ContentId>);

impl Image {
    /// Identity of what the layer at this depth shows, whatever its name: equal ones hold the same.
    /// Unknown for a snapshot, which shows other clusters of its files, for an image whose password
    /// is its key, and where a file's bytes are.
    pub(crate) fn origin(&self, depth: u32) -> Option<Origin> {
        let layer = match depth {
            0 => &self.top,
            depth => self.below.layers().get(depth as usize - 1)?,
        };
        let is_view = depth == 0 && self.is_snapshot;
        if is_view || layer.depends_on_password() {
            return None;
        }
        let contents: Option<Vec<ContentId>> = layer.files().map(|f| f.content_id()).collect();
        Some(Origin(layer.format(), contents?))
    }

    /// Returns whether an image that has just been made reads as zeroes everywhere: it refers to
    /// nothing, or to space that did not exist before. A device, an export or a data file on one
    /// keeps the bytes that it had.
    pub fn is_zero_when_new(&self) -> bool {
        if !self.below.layers().is_empty() {
            return false;
        }
        let extends = |file: &AlignedFile| file.capabilities().extends_with_zeroes;
        match &*self.top {
            Layer::Other(..) => false,
            Layer::Raw(raw) => raw.format() == Format::Raw && extends(raw.file()),
            Layer::Qcow2(image) => {
                let is_plain = image.header().crypt_method == CryptMethod::None;
                image.maps_nothing() || (is_plain && extends(image.data_file()))
            }
        }
    }

    /// Adds the files of all layers to those that must not be overwritten.
    #[doc(hidden)]
    pub fn add_to(&self, set: &mut ReadSet, read_as: ReadAs) {
        for file in self.files() {
            set.add(file.as_ref(), read_as);
        }
    }

    /// Checks that the image's own files, which are those that it writes, store nothing of the set.
    ///
    /// # Errors
    /// [`crate::Error::Overwrites`]
    #[doc(hidden)]
    pub fn check_overwrites(&self, set: &ReadSet) -> Result<()> {
        self.top
            .files()
            .try_for_each(|file| set.check(file.as_ref()))
    }

    /// Returns where the files of all layers are stored.
    #[doc(hidden)]
    pub fn storage(&self) -> Storage {
        let mut storage = Storage::default();
        self.files().for_each(|file| storage.extend(file.storage()));
        storage
    }
}
