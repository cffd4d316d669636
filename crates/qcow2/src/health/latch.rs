//! The latch of an image (invariant D4). Once the content of the medium is uncertain, the
//! session changes nothing any more: no data, no metadata, not the length of a file. Reads go
//! on from memory's mapping, and opening the image again finds out. The latch pulls the brake that
//! all handles of the image's files share, so a step that does not ask for the latch is stopped at
//! the file.

use crate::Error;
use crate::file::Brake;

/// Why an image takes no more writes, if it does not.
#[derive(Debug)]
pub(crate) struct Latch {
    reason: Option<Error>,
    brake: Brake,
    /// A root could not be written: the medium may have the old one or the new one.
    root_unknown: bool,
}

impl Latch {
    /// The open latch of an image whose files have this brake.
    pub fn new(brake: Brake) -> Latch {
        Latch {
            reason: None,
            brake,
            root_unknown: false,
        }
    }

    /// Latches the image. The first reason stays.
    pub fn set(&mut self, reason: Error) {
        self.brake.pull();
        self.reason.get_or_insert(reason);
    }

    /// Latches the image because a root could not be written.
    pub fn set_for_root(&mut self, reason: Error) {
        self.root_unknown = true;
        self.set(reason);
    }

    /// Returns whether the image is latched.
    pub fn is_set(&self) -> bool {
        self.reason.is_some()
    }

    /// The failure that latched the image.
    pub fn reason(&self) -> Option<&Error> {
        self.reason.as_ref()
    }

    /// Returns whether the header in memory is the one on the medium.
    pub fn knows_roots(&self) -> bool {
        !self.root_unknown
    }
}
