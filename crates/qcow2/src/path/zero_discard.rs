//! Zeroes and discards: requests that change entries instead of moving data.
//!
//! Whole subclusters become a change of entries. In a partial subcluster at either end, a discard
//! releases the blocks of the host, and zeroes are written, unless the rest of the subcluster reads
//! as zeroes too: then its entry marks all of it as zeroes, which holds whatever backing file the
//! image gets later. With a raw data file the zeroes go to that file first, since it is a raw image
//! of the disk in its own right.

use cowslip_boxed::boxed;
use std::ops::Range;

use super::admit::LeaseGuard;
use crate::backing::Backing;
use crate::disk::ZeroOptions;
use crate::entry::L2Entry;
use crate::file::Space;
use crate::geometry::{GuestCluster, GuestOffset};
use crate::map::Source;
use crate::mapping::inflight::{LeaseKind, LeaseRequest};
use crate::plan::{self, EntryChange, EntryRequest, Freed, Unref, WriteOrdering};
use crate::space::punch;
use crate::units::{round_down, round_up};
use crate::{Error, Result};
use crate::{Qcow2, State};

/// The request, and how it treats the space.
type Ask = (EntryRequest, Unref);

/// The state of a piece of such a request.
enum Piece<'a> {
    /// The range has been changed.
    Done,
    /// Done but for these guest ranges, which have to be written.
    Write(Vec<Range<u64>>),
    /// Leased: the data file is to be zeroed first.
    Zero(LeaseGuard<'a>),
}

/// Planned changes of the entries of one slice.
struct Changes {
    entries: Vec<(GuestCluster, L2Entry, Option<Freed>)>,
    writes: Vec<Range<u64>>,
    lease: Option<LeaseRequest>,
    /// The guest may read something else afterwards.
    is_seen: bool,
}

impl Qcow2 {
    /// The whole subclusters in a range. The rest of the last one, beyond the end of the disk, is
    /// not visible. Where there is none, the range may end before it starts.
    fn whole_subclusters(&self, range: &Range<u64>) -> Range<u64> {
        let unit = self.geometry().subcluster_bytes();
        let end = if range.end == self.size() {
            round_up(range.end, unit)
        } else {
            range.end
        };
        round_up(range.start, unit)..round_down(end, unit)
    }

    /// Makes a range of the disk read as zeroes.
    #[boxed]
    pub async fn write_zeroes(
        &self,
        range: Range<u64>,
        below: &dyn Backing,
        options: ZeroOptions,
    ) -> Result<()> {
        self.ready_for_writes().await?;
        let unit = self.geometry().subcluster_bytes();
        let inner = self.whole_subclusters(&range);
        let request = if options.space == Space::Release {
            EntryRequest::ZeroAndUnmap
        } else {
            EntryRequest::Zero
        };
        if inner.start >= inner.end {
            for part in crate::units::pieces(range.start, range.end - range.start, unit) {
                self.zero_part(part, below, options).await?;
            }
        } else {
            let head = range.start..inner.start;
            let tail = inner.end..range.end.max(inner.end);
            for part in [head, tail] {
                self.zero_part(part, below, options).await?;
            }
            for rest in self
                .change_entries(inner, below, (request, self.unref))
                .await?
            {
                let rest = rest.start..rest.end.min(range.end);
                self.zero_by_writing(rest, below, options).await?;
            }
        }
        self.settle(self.effective(options.durability), true).await
    }

    /// Discards the whole subclusters in a range, and the host's blocks within partial ones.
    #[boxed]
    pub async fn discard(&self, range: Range<u64>, below: &dyn Backing) -> Result<()> {
        // A raw data file must stay consistent with the tables: its bytes are discarded first, or
        // kept if that would mean writing zeroes.
        if self.raw_data && !self.data.capabilities().punches_holes {
            return Ok(());
        }
        let request = if self.raw_data {
            EntryRequest::ZeroAndUnmap
        } else {
            EntryRequest::Discard
        };
        self.ready_for_writes().await?;
        let inner = self.whole_subclusters(&range);
        if inner.start < inner.end {
            let ask = (request, self.unref);
            let rest = self.change_entries(inner.clone(), below, ask).await?;
            debug_assert!(rest.is_empty(), "a discard never writes");
        }
        if self.punches_in_place() {
            let head = range.start..inner.start.min(range.end);
            let tail = inner.end.max(head.end)..range.end;
            for part in [head, tail] {
                if part.start < part.end {
                    self.punch_in_place(part, below).await?;
                }
            }
        }
        self.settle_by_policy().await
    }

    /// Zeroes a part of one subcluster: its entry says so of the whole of it, if that reads as
    /// zeroes then and nothing before was lost; else they are written.
    async fn zero_part(
        &self,
        part: Range<u64>,
        below: &dyn Backing,
        options: ZeroOptions,
    ) -> Result<()> {
        if part.start >= part.end {
            return Ok(());
        }
        let unit = self.geometry().subcluster_bytes();
        let whole = round_down(part.start, unit)..round_up(part.end, unit);
        let around = [whole.start..part.start, part.end..whole.end];
        if self.reads_zero_below(around, below).await? {
            let ask = (EntryRequest::ZeroUnwritten, self.unref);
            let rest = self.change_within_slice((whole, &part), below, ask).await?;
            if rest.is_empty() {
                return Ok(());
            }
        }
        self.zero_by_writing(part, below, options).await
    }

    /// Returns whether the layers below have nothing but zeroes in these parts of the disk.
    async fn reads_zero_below(&self, parts: [Range<u64>; 2], below: &dyn Backing) -> Result<bool> {
        for part in parts {
            // Beyond the end of the disk nothing is visible.
            let part = part.start..part.end.min(self.size());
            if part.start < part.end && !below.is_zero(part).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes zeroes over a range that entries cannot say it of.
    #[boxed]
    async fn zero_by_writing(
        &self,
        range: Range<u64>,
        below: &dyn Backing,
        options: ZeroOptions,
    ) -> Result<()> {
        const CHUNK_BYTES: u64 = 2 << 20;
        if range.start >= range.end {
            return Ok(());
        }
        // Version 2 has no flag; a whole cluster of zeroes that says what could be read anyway is
        // no gain there.
        if self.format.version < 3 && self.is_zero(range.clone(), below).await? {
            return Ok(());
        }
        if options.fast_only {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "zeroing this range without writing zeroes".into(),
            });
        }
        for piece in crate::units::pieces(range.start, range.end - range.start, CHUNK_BYTES) {
            let zeroes = super::cow::zeroes((piece.end - piece.start) as usize);
            self.write(piece.start, zeroes, below).await?;
        }
        Ok(())
    }

    /// Returns whether the tables, here and below, say that a range reads as zeroes.
    pub(crate) async fn is_zero(&self, range: Range<u64>, below: &dyn Backing) -> Result<bool> {
        for run in self.map(range).await? {
            let zero = match run.source {
                Source::Zero(_) => true,
                Source::Below => below.is_zero(run.range).await?,
                Source::Data(_) | Source::Compressed(..) => false,
            };
            if !zero {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Changes the entries of a range of whole subclusters; returns the ranges that have to be
    /// written instead.
    pub(crate) async fn change_entries(
        &self,
        range: Range<u64>,
        below: &dyn Backing,
        ask: Ask,
    ) -> Result<Vec<Range<u64>>> {
        let mut writes = Vec::new();
        let coverage = self.geometry().slice_coverage_bytes();
        for piece in crate::units::pieces(range.start, range.end - range.start, coverage) {
            let guest = piece.clone();
            writes.extend(
                self.change_within_slice((piece, &guest), below, ask)
                    .await?,
            );
        }
        Ok(writes)
    }

    /// The same for a range within one slice, of which the guest asked for the second one.
    async fn change_within_slice(
        &self,
        (piece, guest): (Range<u64>, &Range<u64>),
        below: &dyn Backing,
        ask: Ask,
    ) -> Result<Vec<Range<u64>>> {
        match self
            .change_piece((piece.clone(), guest), below, ask)
            .await?
        {
            Piece::Done => Ok(Vec::new()),
            Piece::Write(ranges) => Ok(ranges),
            Piece::Zero(stay) => {
                let zeroed = self.zero_data_file(piece.clone(), ask).await;
                let mut state = self.lock();
                let applied = zeroed.and_then(|()| {
                    let changes = self.changes(&mut state, piece, below, ask)?;
                    Ok(self.apply(&mut state, changes))
                });
                stay.end(&mut state);
                applied
            }
        }
    }

    async fn zero_data_file(&self, range: Range<u64>, ask: Ask) -> Result<()> {
        let space = match ask.0 {
            EntryRequest::Zero | EntryRequest::ZeroUnwritten => Space::Keep,
            _ => Space::Release,
        };
        // The raw file has the length of the disk; what growing adds to it reads as zeroes, unless
        // the file was longer than it should have been.
        let end = range.end.min(self.size().max(self.data.len().await?));
        if range.start >= end {
            return Ok(());
        }
        self.data.zero(range.start, end - range.start, space).await
    }

    /// Steps 3 to 6 and 8 for one slice; or up to 6, if the data file has to be zeroed before 8.
    async fn change_piece(
        &self,
        (piece, guest): (Range<u64>, &Range<u64>),
        below: &dyn Backing,
        ask: Ask,
    ) -> Result<Piece<'_>> {
        let cluster = self.geometry().guest_cluster(GuestOffset(piece.start));
        let slice = self.geometry().slice_of(cluster);
        let nothing_below = below.size() <= piece.start;
        self.when_clear(|state, place| {
            if ask.0 == EntryRequest::Discard && nothing_below && !self.has_table(state, cluster)? {
                // No table is made to say that there is nothing.
                return Ok(Piece::Done);
            }
            self.own_slice(state, slice)?;
            let changes = self.changes(state, piece.clone(), below, ask)?;
            state.expect_no_obstacle(slice, changes.lease.as_slice(), *place)?;
            Ok(self.conclude(state, (slice, piece.clone(), guest), changes))
        })
        .await
    }

    /// Applies changes at once, or leases the range if the data file has to be zeroed before.
    fn conclude(
        &self,
        state: &mut State,
        (slice, piece, guest): (u64, Range<u64>, &Range<u64>),
        changes: Changes,
    ) -> Piece<'_> {
        if !changes.entries.is_empty() && changes.is_seen {
            state.bitmaps.mark(guest);
        }
        // A range that is not visible in the disk is zeroes in a raw data file already.
        if self.raw_data && changes.is_seen && !changes.entries.is_empty() {
            let want = LeaseRequest {
                range: piece,
                kind: LeaseKind::Exclusive,
            };
            return Piece::Zero(LeaseGuard::new(self, state, (slice, want)));
        }
        let writes = self.apply(state, changes);
        if writes.is_empty() {
            Piece::Done
        } else {
            Piece::Write(writes)
        }
    }

    fn changes(
        &self,
        state: &mut State,
        piece: Range<u64>,
        below: &dyn Backing,
        ask: Ask,
    ) -> Result<Changes> {
        let mut changes = Changes {
            entries: Vec::new(),
            writes: Vec::new(),
            lease: None,
            is_seen: ask.0 != EntryRequest::Flag,
        };
        for part in crate::units::pieces(
            piece.start,
            piece.end - piece.start,
            self.geometry().cluster_bytes(),
        ) {
            let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
            let view = self.view(state, cluster, below)?;
            let bytes = part.start - view.start..part.end - view.start;
            match plan::change_entry(&self.format, &view, &bytes, ask) {
                EntryChange::None => continue,
                EntryChange::Write => changes.writes.push(part),
                EntryChange::Set(entry, freed) => {
                    let range = match &mut changes.lease {
                        Some(want) => want.range.start..part.end,
                        None => part.clone(),
                    };
                    changes.lease = Some(LeaseRequest {
                        range,
                        kind: LeaseKind::Exclusive,
                    });
                    changes.entries.push((cluster, entry, freed));
                }
            }
        }
        if self.raw_data && changes.is_seen && !changes.entries.is_empty() {
            changes.lease = Some(LeaseRequest {
                range: piece,
                kind: LeaseKind::Exclusive,
            });
        }
        Ok(changes)
    }

    fn apply(&self, state: &mut State, changes: Changes) -> Vec<Range<u64>> {
        for (cluster, entry, freed) in changes.entries {
            state
                .mapping
                .tables
                .set_entry(cluster, &entry, WriteOrdering::Nothing);
            let mut unused = 0;
            if let L2Entry::Standard(entry) = entry {
                // Data written there under an earlier mapping must not become visible again.
                state.mapping.joint.no_longer_fresh(cluster, entry.zeroes);
                unused = !(entry.allocated | state.mapping.joint.attempted(cluster));
            }
            match freed {
                Some(Freed::Subclusters(..)) if !self.punches_subclusters() => {}
                Some(Freed::Subclusters(host, given_up)) => {
                    let geometry = self.geometry();
                    let hole = punch::with_neighbours(geometry, given_up, unused);
                    state.give_up(self.geometry(), Freed::Subclusters(host, hole));
                }
                Some(freed) => {
                    freed
                        .clusters(self.geometry())
                        .for_each(|host| state.space.fresh.set(host, 0));
                    state.give_up(self.geometry(), freed);
                }
                None => {}
            }
            state.committed.note_unflushed();
        }
        state.wake_maintenance_if_dirty();
        changes.writes
    }
}
