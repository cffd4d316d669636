//! The guard of the first sector of a raw disk whose format was guessed.
//!
//! The next program that opens the disk without naming its format guesses again, from this sector.
//! A guest that writes an image header there would choose that format, and with it a backing file.
//! So every change to the sector is examined before it is made: writes, zeroes, discards,
//! truncation. The sector is read, changed in memory and examined as a whole, while no other change
//! to it is under way; a change holds the sector until it has ended, even if its future has been
//! dropped. So a header is recognised no matter how many requests it is split into, of which kinds,
//! in which order, and how they overlap.

use std::ops::Range;
use std::sync::Arc;

use cowslip_queue::IoVec;

use super::AlignedFile;
use crate::foreign::Signature;
use crate::{Result, foreign};

/// Bytes from which a format is guessed.
pub(super) const BYTES: u64 = foreign::PROBED_BYTES;

/// Effect of a request on the file's bytes.
pub(super) enum Change<'a> {
    /// Writes these bytes at an offset; they do not change any more.
    Bytes(u64, &'a IoVec),
    /// A range becomes zeroes.
    Zeroes(Range<u64>),
}

impl Change<'_> {
    /// The bytes of the first sector that the request changes.
    fn range(&self) -> Range<usize> {
        let whole = match self {
            Change::Bytes(offset, data) => *offset..offset.saturating_add(data.len() as u64),
            Change::Zeroes(range) => range.clone(),
        };
        whole.start.min(BYTES) as usize..whole.end.min(BYTES) as usize
    }

    fn apply(&self, sector: &mut [u8]) {
        let changed = &mut sector[self.range()];
        match self {
            Change::Zeroes(_) => changed.fill(0),
            Change::Bytes(_, data) => data.copy_to_slice(0, changed),
        }
    }
}

impl AlignedFile {
    /// The same file, which refuses changes that would make its first sector look like that of an
    /// image. `others` are formats known to the caller beside the built-in ones.
    pub fn guarded(self, others: Arc<[Signature]>) -> AlignedFile {
        AlignedFile {
            guarded: Some(others),
            ..self
        }
    }

    /// Whether the first sector is guarded.
    pub fn is_guarded(&self) -> bool {
        self.guarded.is_some()
    }

    /// Whether the range contains part of a guarded first sector; such a range may be changed
    /// through this file only.
    pub fn guards(&self, range: &Range<u64>) -> bool {
        self.is_guarded() && range.start < BYTES && !range.is_empty()
    }

    /// The part of a range that may be discarded: of a guarded first sector, all or nothing. Few
    /// files promise the contents of a discarded part, so a partly discarded sector could not be
    /// examined.
    pub(super) fn spare_first_sector(&self, range: Range<u64>) -> Range<u64> {
        match self.guards(&range) && (range.start > 0 || range.end < BYTES) {
            true => BYTES.min(range.end)..range.end,
            false => range,
        }
    }

    /// Examines the first sector as it would be after the change.
    pub(super) async fn examine(&self, change: Change<'_>) -> Result<()> {
        let mut sector = [0; BYTES as usize];
        let changed = change.range();
        if changed.is_empty() {
            return Ok(());
        }
        if changed != (0..sector.len()) {
            let there = self.len().await?.min(BYTES);
            let old = self.read_new(0, there).await?;
            sector[..old.len()].copy_from_slice(&old);
        }
        change.apply(&mut sector);
        let others = self.guarded.as_deref().unwrap_or_default();
        foreign::check_stays_raw(&sector, self.name(), others)
    }
}
