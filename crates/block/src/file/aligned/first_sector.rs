//! The first sector of a raw disk whose format was guessed.
//!
//! Whoever opens the disk next without naming its format guesses again, from this sector. A guest
//! that writes an image's header there would choose that format, and with it a backing file. So
//! every change to the sector is examined before it is made: writes, zeroes, discards, cuts. The
//! sector is read, changed in memory, and examined as a whole, while no other change to it is under
//! way; a change keeps the sector until it has ended, also if nobody waits for it any more. So it
//! makes no difference how many requests a header is split into, of which kinds, in which order, or
//! how they overlap.

use std::ops::Range;
use std::sync::Arc;

use cowslip_queue::IoVec;

use super::AlignedFile;
use crate::foreign::Signature;
use crate::{Result, foreign};

/// Bytes that a format is guessed from.
pub(super) const BYTES: u64 = foreign::PROBED_BYTES;

/// What a request makes of the file.
pub(super) enum Change<'a> {
    /// It writes these bytes, which do not change any more, at an offset.
    Bytes(u64, &'a IoVec),
    /// It zeroes a range.
    Zeroes(Range<u64>),
}

impl Change<'_> {
    /// The bytes of the first sector that it changes.
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
    /// The same file; what would make its first sector look like that of an image is refused. The
    /// caller names the formats that it knows beside the built-in ones.
    pub fn guarded(self, others: Arc<[Signature]>) -> AlignedFile {
        AlignedFile {
            guarded: Some(others),
            ..self
        }
    }

    /// Whether its first sector is guarded.
    pub fn is_guarded(&self) -> bool {
        self.guarded.is_some()
    }

    /// Whether the first sector is guarded and a range has a part of it: then the range may be
    /// changed through this file only.
    pub fn guards(&self, range: &Range<u64>) -> bool {
        self.is_guarded() && range.start < BYTES && !range.is_empty()
    }

    /// What may be discarded of a range: of the first sector all or nothing, if it is guarded. What
    /// a discarded part reads as is known of few files, so it could not be examined.
    pub(super) fn spare_first_sector(&self, range: Range<u64>) -> Range<u64> {
        match self.guards(&range) && (range.start > 0 || range.end < BYTES) {
            true => BYTES.min(range.end)..range.end,
            false => range,
        }
    }

    /// Examines the first sector as a change would leave it.
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
