//! The files of one image that is being opened: each is used once, and claimed before it is read.

use std::sync::Arc;

use crate::Result;
use crate::file::{BlockFile, Claim, FileId, Protection, Role, Sharing};
use crate::image::Format;
use crate::sync::{Mutex, lock};

/// The files that were opened so far.
#[derive(Debug)]
pub struct Files {
    sharing: Sharing,
    /// The files of the image that is reopened.
    predecessors: Vec<Arc<dyn BlockFile>>,
    entered: Mutex<Entered>,
}

#[derive(Debug, Default)]
struct Entered {
    ids: Vec<(FileId, Role)>,
    unprotected: Vec<String>,
}

/// Whether a file has a use already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It has none.
    New,
    /// It has this one. (An image has the role of a backing file, the uppermost too.)
    Again(Role),
}

impl Files {
    /// No files yet; of an image that takes the place of one that has `predecessors`.
    pub fn new(sharing: Sharing, predecessors: Vec<Arc<dyn BlockFile>>) -> Files {
        Files {
            sharing,
            predecessors,
            entered: Mutex::default(),
        }
    }

    /// Adds a file.
    pub fn enter(&self, file: &Arc<dyn BlockFile>, role: Role) -> Entry {
        let Some(id) = file.id() else {
            return Entry::New;
        };
        let mut entered = lock(&self.entered);
        match entered.ids.iter().find(|(other, _)| *other == id) {
            Some((_, role)) => Entry::Again(*role),
            None => {
                entered.ids.push((id, role));
                Entry::New
            }
        }
    }

    /// Claims the file of an image; `writable` is only true of the uppermost.
    ///
    /// # Errors
    /// As [`BlockFile::claim`].
    pub fn claim_image(
        &self,
        file: &Arc<dyn BlockFile>,
        (format, is_top, writable): (Format, bool, bool),
    ) -> Result<()> {
        let claim = match format {
            Format::Qcow2 | Format::Luks => Claim::qcow2(writable),
            Format::Raw if is_top => Claim::raw(writable, self.sharing),
            Format::Raw => Claim::raw(false, Sharing::AsFormat),
        };
        self.claim(file, claim)
    }

    /// Claims an external data file.
    ///
    /// # Errors
    /// As [`BlockFile::claim`].
    pub fn claim_data_file(&self, file: &Arc<dyn BlockFile>, writable: bool) -> Result<()> {
        self.claim(file, Claim::data_file(writable))
    }

    fn claim(&self, file: &Arc<dyn BlockFile>, claim: Claim) -> Result<()> {
        let claim = match self.sharing {
            Sharing::Forced => Claim::FORCED,
            Sharing::AsFormat | Sharing::FixedLength => claim,
        };
        let same = |other: &&Arc<dyn BlockFile>| other.id().is_some() && other.id() == file.id();
        let protection = match self.predecessors.iter().find(same) {
            Some(predecessor) => file.claim_after(claim, predecessor.as_ref())?,
            None => file.claim(claim)?,
        };
        if let Protection::Unprotected(why) = protection {
            let unprotected = format!("'{}' ({why})", file.name());
            lock(&self.entered).unprotected.push(unprotected);
        }
        Ok(())
    }

    /// The files whose file systems have no locks, each with the system's reason.
    pub fn into_unprotected(self) -> Vec<String> {
        let entered = self.entered.into_inner();
        entered
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .unprotected
    }
}
