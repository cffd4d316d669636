//! Writes of roots: the header, the refcount table, directories, key slots.
//!
//! A write that has failed may have been done, as a whole or in part. After the failed write of a
//! root, memory and medium may therefore name different structures, and whatever is written by what
//! memory says may land in a live one. So [`Qcow2::write_root`] latches on any failure, for want of
//! space too. Roots are written elsewhere by the mark of corruption, which is the last write of a
//! session, and by cycles, which store entries of the L1 table (`commit/writeback.rs`).

use crate::Qcow2;
use crate::{Buf, Result};

/// The way in which a root that is written becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flush {
    /// Each write by itself: a flush of the file would write all that guests have written.
    Nothing,
    /// The image file.
    File,
    /// The data file, then the image file.
    All,
}

/// Writes at offsets in the image file.
pub(crate) type RootWrites = Vec<(u64, Vec<Buf>)>;

impl Qcow2 {
    /// Writes parts of a root, all at once, durably. Roots are the header with its extensions,
    /// the refcount table that the header names, the bitmap directory and the key slots. The
    /// entries of L1 go down in cycles, which know that a failed one may have been written.
    ///
    /// # Errors
    /// Any failure latches the image: the write may have been done, and the flush may have covered
    /// it.
    pub(crate) async fn write_root(&self, writes: RootWrites, flush: Flush) -> Result<()> {
        self.unlatched(&self.lock())?;
        let written = async {
            if flush == Flush::Nothing {
                return self.write_durably(writes).await;
            }
            self.write_all(writes).await?;
            match flush {
                Flush::All => self.barrier().await,
                Flush::File | Flush::Nothing => self.sync(&self.file).await,
            }
        };
        let outcome = written.await;
        if let Err(error) = &outcome {
            self.lock().health.latch_for_root(error.duplicate());
        }
        outcome
    }
}
