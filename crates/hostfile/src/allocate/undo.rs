//! Undoing of an allocation that has failed: the file gets back its length and its holes.
//!
//! Bytes beyond the old end are cut off first, and only under a lease (`cowslip_queue::cut`): a
//! length that was read is stale as soon as another process appends. Where the kernel grants none,
//! or the length is not the one that the allocation has set, the space stays, and the error says
//! so. Then all holes are punched again, whichever of them fails.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cowslip_queue::cut::{Cut, Data, Outcome};

use super::{BLOCK_BYTES, LibraryMakes, Method, Plan};
use crate::file::HolesBy;
use crate::units::{round_down, round_up};
use crate::{Error, Result, space};

/// Reach of a fill beyond its hole: a neighbouring hole may have been filled with it, since
/// mappings are filled by pages.
const NEIGHBOURHOOD_BYTES: u64 = 1 << 20;

/// Number of tries to punch all holes: on a full disk a hole may need room for its own record,
/// which other holes give back.
const PUNCH_TRIES: usize = 3;

/// How far an allocation has come: what its undoing has to know.
#[derive(Debug)]
pub(super) struct Reach {
    /// Offset up to which space may have been allocated.
    reached: AtomicU64,
    /// The length that the last call has left, if nobody else writes.
    len: AtomicU64,
    /// The length was another at some time.
    has_changed: AtomicBool,
}

impl Reach {
    /// Returns the state of a file of this length.
    pub(super) fn new(len: u64) -> Reach {
        Reach {
            reached: AtomicU64::new(0),
            len: AtomicU64::new(len),
            has_changed: AtomicBool::new(false),
        }
    }

    /// The file is this long before the next call; whether that is what the last one has left.
    pub(super) fn is_as_left(&self, now: u64) -> bool {
        let is_same = self.len.load(Ordering::Acquire) == now;
        self.has_changed.fetch_or(!is_same, Ordering::AcqRel);
        is_same
    }

    /// A call up to here begins, which may leave a part of it when it fails; where it was so far.
    pub(super) fn begins(&self, end: u64) -> u64 {
        self.reached.fetch_max(end, Ordering::AcqRel)
    }

    /// The call that began was refused as a whole.
    pub(super) fn was_refused(&self, before: u64) {
        self.reached.store(before, Ordering::Release);
    }

    /// The file is at least so long now, by our own doing.
    pub(super) fn has_moved_end(&self, len: u64) {
        self.len.fetch_max(len, Ordering::AcqRel);
    }

    fn reached(&self) -> u64 {
        self.reached.load(Ordering::Acquire)
    }

    /// The lengths that a file can have by our own doing, if its end moves.
    fn lengths(&self) -> std::ops::RangeInclusive<u64> {
        let len = self.len.load(Ordering::Acquire);
        len..=len.max(self.reached())
    }
}

impl Plan {
    /// Makes the file what it was, where it was filled. Not cancelled itself.
    ///
    /// # Errors
    /// The first of what could not be taken back; all else is.
    pub(super) async fn take_back(&self, method: Method, reach: &Reach) -> Result<()> {
        let knows_holes = !self.has_space_unseen();
        let cut = self.cut(method, reach, knows_holes).await;
        let punched = match knows_holes {
            true => self.punch(reach.reached()).await,
            false => Ok(()),
        };
        let until = self.reached_within(reach.reached());
        let has_filled_within = self.holes.iter().next().is_some_and(|h| h.start < until);
        cut.and(punched)?;
        match reach.reached() == 0 || knows_holes || !has_filled_within {
            true => Ok(()),
            false => Err(self.unsupported("telling holes from space that was never written")),
        }
    }

    fn reached_within(&self, reached: u64) -> u64 {
        match reached {
            0 => 0,
            reached => (round_up(reached, NEIGHBOURHOOD_BYTES) + NEIGHBOURHOOD_BYTES).min(self.len),
        }
    }

    /// Cuts off what lies beyond the old end, if something does.
    async fn cut(&self, method: Method, reach: &Reach, knows_holes: bool) -> Result<()> {
        let now = self.file.len().await?;
        let last_block = match knows_holes {
            true => self.last_block(),
            false => 0..0,
        };
        let has_filled_last = !last_block.is_empty() && reach.reached() > last_block.start;
        if now == self.len && reach.reached() <= self.len && !has_filled_last {
            return Ok(());
        }
        let mut lengths = self.len..=self.len;
        if now != self.len {
            // An end that stays was moved by another process.
            lengths = reach.lengths();
            if self.end == super::End::Stays || reach.has_changed.load(Ordering::Acquire) {
                return Err(self.left_as_changed());
            }
        }
        let cut = Cut {
            expected: lengths,
            to: self.len,
            punch: last_block,
            data: match method {
                Method::Fallocate | Method::PosixFallocate(LibraryMakes::KernelCall) => {
                    Data::Others
                }
                Method::PosixFallocate(_) | Method::Mmap | Method::Write { .. } => Data::Ours,
            },
        };
        match self.file.cut_alone(cut).await {
            Ok(Outcome::Cut) => self.allocate_beyond_again().await,
            Ok(Outcome::Changed) => Err(self.left_as_changed()),
            Ok(Outcome::Unknown) => Err(self
                .left("its file system does not distinguish written from unwritten space there")),
            Ok(Outcome::InUse) => Err(self.left("another program has the file open")),
            Ok(Outcome::Late) => Err(Error::Invalid(format!(
                "'{}' was truncated to its {} bytes, but so late that another program may have opened \
                 it (/proc/sys/fs/lease-break-time): data that this has appended may be lost",
                self.file.name(),
                self.len
            ))),
            Err(error) => {
                let why = match &error {
                    Error::Io { source, .. } => crate::error::system_words(source),
                    other => other.to_string(),
                };
                Err(self.left(&format!("the system grants no lease on it ({why})")))
            }
        }
    }

    fn left_as_changed(&self) -> Error {
        self.left("another process has written to its end meanwhile")
    }

    fn left(&self, why: &str) -> Error {
        Error::Invalid(format!(
            "the space beyond the first {} bytes of '{}' stays allocated, because {why}",
            self.len,
            self.file.name()
        ))
    }

    /// Allocates again the space beyond the end that was there before.
    async fn allocate_beyond_again(&self) -> Result<()> {
        for space in self.beyond.iter() {
            let len = space.end - space.start;
            match self.file.allocate_keeping_end(space.start, len).await {
                // Then nobody had asked for it: it was the file system's own foresight.
                Err(error) if !space::is_unsupported(&error) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes holes of the filled ranges, up to the last whole block of the old length: bytes beyond
    /// it may belong to another writer by now.
    async fn punch(&self, reached: u64) -> Result<()> {
        let end = match self.reached_within(reached) {
            until if until == self.len => round_down(self.len, BLOCK_BYTES),
            until => until,
        };
        let mut outcome = Ok(());
        for _ in 0..PUNCH_TRIES {
            outcome = Ok(());
            for hole in self.holes.iter().take_while(|hole| hole.start < end) {
                let len = hole.end.min(end) - hole.start;
                outcome = outcome.and(self.file.discard(hole.start, len).await.map(drop));
            }
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    /// The block that the file ends in, with what lies before it, if a hole reaches its end: it
    /// gets space when the end moves (btrfs), and only as a whole it becomes a hole again.
    fn last_block(&self) -> Range<u64> {
        let around = round_down(self.len, NEIGHBOURHOOD_BYTES)..round_up(self.len, BLOCK_BYTES);
        let ends_in = |hole: &Range<u64>| hole.start < self.len && self.len <= hole.end;
        match self.holes.iter().find(ends_in) {
            Some(hole) if around.end > self.len => hole.start.max(around.start)..around.end,
            _ => 0..0,
        }
    }

    /// Whether the file had space that looked like holes: punching those would take it.
    fn has_space_unseen(&self) -> bool {
        if self.by == HolesBy::Extents || self.hides_holes {
            return self.hides_holes;
        }
        let holes = self.holes.iter().take_while(|hole| hole.start < self.len);
        let holes: u64 = holes.map(|hole| hole.end.min(self.len) - hole.start).sum();
        let seen = self.len - holes;
        // Ends of blocks, and what a file system needs to find them.
        let slack = (self.holes.count() + 16) * 4096 + seen / 64;
        self.allocated_bytes
            .is_some_and(|bytes| bytes > seen + slack)
    }
}
