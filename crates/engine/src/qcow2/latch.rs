//! The latch of an image (invariant D4). Once nobody can say what the medium holds, the session
//! changes nothing any more: no data, no metadata, not the length of a file. Reads go
//! on from memory's mapping, and opening the image again finds out.
//!
//! A write that has failed may have been done, as a whole or in part. After the failed write of a
//! root, memory and medium may therefore name different structures, and whatever is written by what
//! memory says may land in a live one. So [`Qcow2::write_root`] is the only way to write a root,
//! and it latches on any failure, for want of space too. The latch pulls the brake that all handles
//! of the image's files share, so a step that does not ask for the latch is stopped at the file.

use super::Qcow2;
use crate::file::Brake;
use crate::{Buf, Error, Result};

/// Why an image takes no more writes, if it does not.
#[derive(Debug)]
pub(super) struct Latch {
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

    /// Whether the image is latched.
    pub fn is_set(&self) -> bool {
        self.reason.is_some()
    }

    /// The first failure.
    pub fn reason(&self) -> Option<&Error> {
        self.reason.as_ref()
    }

    /// Whether the header in memory is the one on the medium.
    pub fn knows_roots(&self) -> bool {
        !self.root_unknown
    }
}

/// What is flushed after a root is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flush {
    /// The image file.
    File,
    /// The data file, then the image file.
    All,
}

/// Writes at offsets in the image file.
pub(super) type RootWrites = Vec<(u64, Vec<Buf>)>;

impl Qcow2 {
    /// Writes parts of a root, all at once, and flushes. Roots are the header with its extensions,
    /// the refcount table that the header names, the bitmap directory and the key slots. The
    /// entries of L1 go down in cycles, which know that a failed one may have been written.
    ///
    /// # Errors
    /// Any failure latches the image: the write may have been done, and the flush may have covered
    /// it.
    pub(super) async fn write_root(&self, writes: RootWrites, flush: Flush) -> Result<()> {
        self.unlatched(&self.lock())?;
        let written = async {
            self.write_all(writes).await?;
            match flush {
                Flush::File => self.sync(&self.file).await,
                Flush::All => self.barrier().await,
            }
        };
        let outcome = written.await;
        if let Err(error) = &outcome {
            self.lock().latch.set_for_root(error.duplicate());
        }
        outcome
    }

    /// Whether an earlier failure keeps everybody from writing.
    pub(super) fn is_latched(&self) -> bool {
        self.lock().latch.is_set()
    }

    /// Latches the image.
    pub(super) fn latch(&self, reason: &Error) {
        self.lock().latch.set(reason.duplicate());
    }

    /// Nothing may follow but closing: what is in memory is the image of before.
    pub(super) fn end_session(&self) {
        self.latch(&Error::Latched(self.name().to_string()));
    }

    /// The outcome of work that cannot be taken back: a failure latches the image.
    pub(super) fn or_latched<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome {
            self.latch(error);
        }
        outcome
    }
}
