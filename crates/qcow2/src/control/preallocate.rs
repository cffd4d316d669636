//! Preallocation of what a resize adds, beyond the end of the disk, where no guest's request goes.
//! `allocate.rs` does the same within the disk.
//!
//! Two phases. In the first, which takes the time, space is taken and filled, and nothing refers to
//! it: not even its counts are raised, so a crash leaves free space and nothing else. In the second
//! the entries are made, in memory, and go down in cycles of write-back like those of any write
//! (D1). The size, which makes them visible, comes last, in `resize.rs`. Until the second phase
//! begins the job may be cancelled.
//!
//! | the power fails, or the process is killed | what is left |
//! | --- | --- |
//! | in the first phase | a longer file, whose space is free |
//! | in the second | entries beyond the end of the disk, which the next resize discards first |
//!
//! A failure undoes the work. Only the refcount blocks for the longer file stay, which
//! count themselves, and after a failure in the second phase empty tables; a later growth uses
//! them.
//!
//! Memory: refcount blocks are made for a part of the range at a time, entries live in the cache of
//! tables, and what is taken is a few runs.

use cowslip_boxed::boxed;
use std::collections::VecDeque;
use std::ops::Range;

use crate::backing::Backing;
use crate::create::Preallocation;
use crate::entry::{L2Entry, Standard};
use crate::file::Space;
use crate::geometry::{GuestOffset, HostCluster, HostOffset};
use crate::job::{Job, Stage};
use crate::mapping::inflight::{LeaseKind, LeaseRequest};
use crate::plan::{EntryRequest, Preallocated, Unref, WriteOrdering, preallocated};
use crate::space::alloc::SpaceContent;
use crate::space::growth::{Method, Step};
use crate::units::{round_down, round_up};
use crate::{Error, Result};
use crate::{Qcow2, State};
use cowslip_hostfile::space::{self, Fill};

/// Bytes of refcount blocks that one step of growth makes, all of them in memory.
const COUNTS_BYTES_MAX: u64 = 16 << 20;
/// Clusters whose counts wait to be raised before a cycle writes them: 16 MiB of them.
const RAISED_MAX: usize = 1 << 19;

/// Host clusters that are taken, have their space, and are not referenced yet.
#[derive(Debug, Default)]
pub(super) struct Stock {
    runs: VecDeque<(u64, u64, SpaceContent)>,
}

/// Clusters of a piece of the disk that have not got their space from the stock.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Those that show a layer below: they have to be written.
    pub writes: Vec<Range<u64>>,
    /// Places in the data file of those that have had theirs, and of all if the file is external.
    pub placed: Vec<Range<u64>>,
    /// The number of those for which the stock had none.
    pub missing: u64,
}

impl Left {
    fn write(&mut self, range: Range<u64>) {
        join(&mut self.writes, range);
    }

    fn place(&mut self, range: Range<u64>) {
        join(&mut self.placed, range);
    }
}

/// Adds a range, joined with the last one if it continues that.
fn join(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

impl Stock {
    fn next(&mut self) -> Option<HostCluster> {
        let (start, len, _) = self.runs.front_mut()?;
        let cluster = HostCluster(*start);
        (*start, *len) = (*start + 1, *len - 1);
        if *len == 0 {
            self.runs.pop_front();
        }
        Some(cluster)
    }
}

impl Qcow2 {
    /// Allocates the space of guest clusters that are beyond the end of the disk, but for the first
    /// one perhaps, and that show nothing.
    #[boxed]
    pub(crate) async fn preallocate(
        &self,
        added: Range<u64>,
        below: &dyn Backing,
        (how, job): (Preallocation, &Job),
    ) -> Result<()> {
        self.may_preallocate()?;
        let unit = self.geometry().cluster_bytes();
        let range = round_down(added.start, unit)..round_up(added.end, unit);
        let data_len = match self.format.data_file {
            true => Some(self.data.len().await?),
            false => None,
        };
        let _kept = self.kept_space.take().await;
        let mut stock = Stock::default();
        let done = async {
            let clusters = (range.end - range.start) / unit;
            // Announced before the data, so that the progress is not complete too early.
            job.expect(clusters * self.geometry().l2_entry_bytes());
            if data_len.is_some() {
                self.fill_data_file(added.clone(), (how, job)).await?;
            } else {
                self.check_room(clusters, how).await?;
                self.take_stock(clusters, &mut stock, (how, job)).await?;
            }
            job.check()?;
            job.enter(Stage::Tables);
            for piece in crate::units::pieces(
                range.start,
                range.end - range.start,
                self.geometry().slice_coverage_bytes(),
            ) {
                let left = self.give_space(piece.clone(), below, &mut stock).await?;
                assert_eq!(left.missing, 0, "there is a cluster for each of the range");
                for write in left.writes {
                    // Only the cluster that the old end of the disk is in shows anything.
                    let start = write.start.max(added.start);
                    let zeroes = crate::path::cow::zeroes((write.end - start) as usize);
                    self.write(start, zeroes, below).await?;
                }
                job.done((piece.end - piece.start) / unit * self.geometry().l2_entry_bytes());
            }
            self.write_back().await
        };
        let outcome = done.await;
        if outcome.is_err() {
            job.enter(Stage::Undo);
        }
        self.return_stock(&mut stock).await;
        if outcome.is_err() {
            self.take_entries_back(added, below).await;
            if let Some(len) = data_len {
                self.cut_data_file(len).await;
            }
        }
        outcome
    }

    /// Refuses what entries cannot express: that space reads as zeroes, whatever is in it.
    pub(super) fn may_preallocate(&self) -> Result<()> {
        if self.data.is_encrypted() && self.format.version < 3 {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "preallocation in an encrypted image of version 2".into(),
            });
        }
        Ok(())
    }

    /// First phase: takes and fills space for `clusters` clusters.
    pub(super) async fn take_stock(
        &self,
        clusters: u64,
        stock: &mut Stock,
        (how, job): (Preallocation, &Job),
    ) -> Result<()> {
        let bits = self.geometry().cluster_bits();
        job.expect(Fill::of(how).map_or(0, |_| clusters << bits));
        let counted = self.geometry().refcounts_per_block();
        let step = ((COUNTS_BYTES_MAX >> bits).max(1) * counted).max(1);
        let mut missing = clusters;
        while missing > 0 {
            let (start, len, content) = self.take_run_up_to(missing.min(step)).await?;
            stock.runs.push_back((start, len, content));
            missing -= len;
            self.fill_run((start << bits, len << bits, content), (how, job))
                .await?;
        }
        Ok(())
    }

    /// Refuses what the file system has no room for. Free clusters of the file may have their
    /// space.
    async fn check_room(&self, clusters: u64, how: Preallocation) -> Result<()> {
        if Fill::of(how).is_none() {
            return Ok(());
        }
        let mut counts = self.turn.take().await;
        let scanned = async {
            while self.scan(&mut counts).await? {}
            Ok::<_, Error>(())
        };
        self.latch_if_cancelled(scanned).await?;
        let free = self.lock().space.free.clusters();
        let tables = clusters.div_ceil(self.geometry().l2_entries());
        let missing = (clusters + tables).saturating_sub(free);
        let bits = self.geometry().cluster_bits();
        space::check_room(self.file.block_file().as_ref(), missing << bits).await
    }

    /// Takes adjacent clusters: some that are free, or `clusters` of them behind the end of the
    /// file, where there is room for their tables too.
    async fn take_run_up_to(&self, clusters: u64) -> Result<(u64, u64, SpaceContent)> {
        let mut counts = self.turn.take().await;
        let bits = self.geometry().cluster_bits();
        let taken = async {
            loop {
                {
                    let mut state = self.lock();
                    self.unlatched(&state)?;
                    if let Some((start, len, content)) = state.space.free.take(clusters) {
                        return Ok((start.0, len, content));
                    }
                }
                if self.scan(&mut counts).await? {
                    continue;
                }
                let tables = clusters.div_ceil(self.geometry().l2_entries()) + 1;
                let step = Step {
                    bytes: (clusters + tables) << bits,
                    method: Method::Extend,
                };
                self.grow_by(&mut counts, clusters + tables, step).await?;
            }
        };
        self.latch_if_cancelled(taken).await
    }

    async fn fill_run(
        &self,
        (offset, len, content): (u64, u64, SpaceContent),
        (how, job): (Preallocation, &Job),
    ) -> Result<()> {
        job.check()?;
        match Fill::of(how) {
            None if content.is_zero() => Ok(()),
            None => self.file.zero(offset, len, Space::Release).await,
            Some(Fill::Allocate) if !content.is_zero() => {
                self.file.zero(offset, len, Space::Keep).await?;
                job.done(len);
                Ok(())
            }
            Some(fill) => space::fill(&self.file, offset..offset + len, fill, job).await,
        }
    }

    /// The data file has its clusters where the guest has them. Behind the disk's end it may hold
    /// anything.
    async fn fill_data_file(
        &self,
        added: Range<u64>,
        (how, job): (Preallocation, &Job),
    ) -> Result<()> {
        let (start, len) = (added.start, added.end - added.start);
        job.check()?;
        let Some(fill) = Fill::of(how) else {
            let end = self.data.len().await?;
            if end < added.end {
                self.data.set_len(added.end).await?;
            }
            return match start < end {
                true => {
                    self.data
                        .zero(start, end.min(added.end) - start, Space::Release)
                        .await
                }
                false => Ok(()),
            };
        };
        space::check_room(self.data.block_file().as_ref(), len).await?;
        job.expect(len);
        let end = self.data.len().await?.clamp(start, added.end);
        if start < end && fill == Fill::Allocate {
            self.data.zero(start, end - start, Space::Keep).await?;
            job.done(end - start);
            return space::fill(&self.data, end..added.end, fill, job).await;
        }
        space::fill(&self.data, added, fill, job).await
    }

    /// Second phase: gives space to the clusters of a piece of one slice that have none.
    pub(super) async fn give_space(
        &self,
        piece: Range<u64>,
        below: &dyn Backing,
        stock: &mut Stock,
    ) -> Result<Left> {
        let first = self.geometry().guest_cluster(GuestOffset(piece.start));
        let slice = self.geometry().slice_of(first);
        let want = [LeaseRequest {
            range: piece.clone(),
            kind: LeaseKind::Exclusive,
        }];
        let (left, many) = self
            .when_clear(|state, place| {
                self.own_slice(state, slice)?;
                state.expect_no_obstacle(slice, &want, *place)?;
                let left = self.set_space(state, piece.clone(), below, stock)?;
                Ok((left, state.space.raised.clusters() >= RAISED_MAX))
            })
            .await?;
        if many {
            self.write_back().await?;
        }
        Ok(left)
    }

    /// Sets the entries of a piece, as far as the stock goes.
    fn set_space(
        &self,
        state: &mut State,
        piece: Range<u64>,
        below: &dyn Backing,
        stock: &mut Stock,
    ) -> Result<Left> {
        let mut left = Left::default();
        let unit = self.geometry().cluster_bytes();
        for part in crate::units::pieces(piece.start, piece.end - piece.start, unit) {
            let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
            let view = self.view(state, cluster, below)?;
            let size = state.committed.header.size;
            let new = match preallocated(&self.format, &view, size) {
                Preallocated::Nothing => {
                    if let L2Entry::Standard(Standard {
                        host: Some(host), ..
                    }) = view.entry
                    {
                        left.place(host.0..host.0 + unit);
                    }
                    continue;
                }
                Preallocated::Write => {
                    left.write(part);
                    continue;
                }
                Preallocated::Entry(new) => new,
            };
            let host = match self.format.data_file {
                true => {
                    left.place(part.clone());
                    HostOffset(part.start)
                }
                false => {
                    let Some(host) = stock.next() else {
                        left.missing += 1;
                        continue;
                    };
                    state.space.raise(host);
                    self.geometry().host_offset(host)
                }
            };
            // Space that was never written decrypts to anything: the entry says that it reads as
            // zeroes.
            let zeroes = match self.data.is_encrypted() {
                true => new.allocated,
                false => 0,
            };
            let new = Standard {
                host: Some(host),
                copied: true,
                allocated: new.allocated & !zeroes,
                zeroes: new.zeroes | zeroes,
            };
            let entry = L2Entry::Standard(new);
            state
                .mapping
                .tables
                .set_entry(cluster, &entry, WriteOrdering::Bytes);
            state.committed.note_unflushed();
        }
        Ok(left)
    }

    /// Frees the clusters that were taken and not used, without space on the host; no request is
    /// under way there.
    pub(super) async fn return_stock(&self, stock: &mut Stock) {
        let bits = self.geometry().cluster_bits();
        for (start, len, content) in stock.runs.drain(..) {
            let punched = self.file.discard(start << bits, len << bits).await;
            let whole = punched.is_ok_and(|range| range == (start << bits..(start + len) << bits));
            let punches = whole && self.file.capabilities().punches_holes;
            let content = match content {
                _ if punches => SpaceContent::Zeroes,
                // Nothing but zeroes was written.
                SpaceContent::Zeroes | SpaceContent::Reserved => SpaceContent::Zeroes,
                SpaceContent::Unknown => SpaceContent::Unknown,
            };
            self.lock().space.free.add(HostCluster(start), len, content);
        }
    }

    /// Truncates the data file to its old length. The failure that led here is the one to report.
    async fn cut_data_file(&self, len: u64) {
        if self.data.len().await.is_ok_and(|now| now > len) {
            drop(self.data.set_len(len).await);
        }
    }

    /// Undoes the second phase. Where it cannot, the entries stay beyond the end of the disk, and
    /// the next resize discards them.
    async fn take_entries_back(&self, added: Range<u64>, below: &dyn Backing) {
        let unit = self.geometry().cluster_bytes();
        let whole = round_up(added.start, unit)..round_up(added.end, unit);
        let undone = async {
            if whole.start < whole.end {
                let ask = (EntryRequest::Discard, Unref::Free);
                self.change_entries(whole, below, ask).await?;
            }
            // An image whose preallocation failed should not keep space ahead.
            let hint = self.lock().committed.header.extensions.allocation;
            if let Some(hint) = hint {
                let _turn = self.turn.take().await;
                let written = self.write_allocation_hint(hint.with_closes(0));
                self.latch_if_cancelled(written).await?;
            }
            self.write_back().await?;
            // The second cycle frees the clusters whose entries the first one cleared.
            self.write_back().await
        };
        // The failure that led here is the one to report.
        drop(undone.await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stock_hands_out_each_cluster_once() {
        let mut stock = Stock::default();
        stock.runs.push_back((5, 2, SpaceContent::Zeroes));
        stock.runs.push_back((1, 1, SpaceContent::Unknown));
        let all: Vec<_> = std::iter::from_fn(|| stock.next()).collect();
        assert_eq!(all, [5, 6, 1].map(HostCluster));
    }
}
