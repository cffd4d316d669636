//! The files of one image that is being opened: each is used once, and claimed before it is read.

use std::sync::Arc;

use crate::Result;
use crate::file::{
    BlockFile, Claim, ContentId, FileId, Protection, ReadSet, Role, Sharing, Storage,
};
use crate::policy::Format;
use crate::sync::{Mutex, lock};

/// The files that were opened so far.
#[derive(Debug)]
pub struct Files {
    sharing: Sharing,
    /// The files of the image that is reopened.
    predecessors: Vec<Arc<dyn BlockFile>>,
    /// Claims that another process holds for this one.
    handed_over: Vec<(FileId, Claim)>,
    /// Files that the caller reads besides those of the image.
    read: ReadSet,
    entered: Mutex<Entered>,
}

#[derive(Debug, Default)]
struct Entered {
    uses: Vec<Use>,
    unprotected: Vec<String>,
}

/// A file and what it is used for.
#[derive(Debug)]
struct Use {
    role: Role,
    written: bool,
    content: Option<ContentId>,
    storage: Storage,
}

impl Use {
    /// How a further use goes together with this one. It does not if the chain comes to the same
    /// bytes again, if one would write what the other reads, or if guest data had two owners.
    fn beside(&self, new: &Use) -> Entry {
        if self.content.is_some() && self.content == new.content {
            return Entry::Again(self.role);
        }
        let is_exclusive = |one: &Use| one.written || one.role == Role::Data;
        let meets = || self.storage.overlaps(&new.storage);
        match (is_exclusive(self) || is_exclusive(new)) && meets() {
            true => Entry::Overlaps,
            false => Entry::New,
        }
    }
}

/// Whether a file has a use already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The file was not in the chain before.
    New,
    /// It has this one. (An image has the role of a backing file, the uppermost too.)
    Again(Role),
    /// Another file, of which one is written or has guest data, is stored in the same place.
    Overlaps,
}

impl Files {
    /// No files yet; of an image that takes the place of one that has `predecessors`.
    pub fn new(sharing: Sharing, predecessors: Vec<Arc<dyn BlockFile>>, read: ReadSet) -> Files {
        Files {
            sharing,
            predecessors,
            handed_over: Vec::new(),
            read,
            entered: Mutex::default(),
        }
    }

    /// The same, while another process holds these claims for this one.
    pub fn with_claims(mut self, handed_over: &[(FileId, Claim)]) -> Files {
        self.handed_over = handed_over.to_vec();
        self
    }

    /// Adds a file, which is `written` or only read.
    ///
    /// # Errors
    /// [`crate::Error::Overwrites`]: it is to be written, and is read for something else.
    pub fn enter(&self, file: &Arc<dyn BlockFile>, role: Role, written: bool) -> Result<Entry> {
        if written {
            self.read.check(file.as_ref())?;
        }
        let new = Use {
            role,
            written,
            content: file.content_id(),
            storage: file.storage(),
        };
        let mut entered = lock(&self.entered);
        let mut beside = entered.uses.iter().map(|other| other.beside(&new));
        if let Some(conflict) = beside.find(|entry| *entry != Entry::New) {
            return Ok(conflict);
        }
        entered.uses.push(new);
        Ok(Entry::New)
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
            Format::Qcow2 | Format::Luks | Format::Other(_) => Claim::qcow2(writable),
            Format::Raw if is_top => Claim::raw(writable, self.sharing),
            Format::Raw if self.sharing == Sharing::Frozen => Claim::raw(false, Sharing::Frozen),
            Format::Raw => Claim::raw(false, Sharing::AsFormat),
        };
        self.claim(file, claim)
    }

    /// Claims an external data file.
    ///
    /// # Errors
    /// As [`BlockFile::claim`].
    pub fn claim_data_file(&self, file: &Arc<dyn BlockFile>, writable: bool) -> Result<()> {
        let claim = match self.sharing {
            Sharing::Frozen => Claim::raw(writable, Sharing::Frozen),
            Sharing::AsFormat | Sharing::FixedLength | Sharing::Forced => {
                Claim::data_file(writable)
            }
        };
        self.claim(file, claim)
    }

    fn claim(&self, file: &Arc<dyn BlockFile>, claim: Claim) -> Result<()> {
        let claim = match self.sharing {
            Sharing::Forced => Claim::FORCED,
            Sharing::AsFormat | Sharing::FixedLength | Sharing::Frozen => claim,
        };
        let same = |other: &&Arc<dyn BlockFile>| other.id().is_some() && other.id() == file.id();
        let is_held =
            |(id, held): &(FileId, Claim)| file.id() == Some(*id) && held.joined(claim) == *held;
        let protection = match self.predecessors.iter().find(same) {
            Some(predecessor) => file.claim_after(claim, predecessor.as_ref())?,
            None if self.handed_over.iter().any(is_held) => file.claim_handed_over(claim)?,
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
