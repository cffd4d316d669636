//! Frees the structures that a shrink has emptied: L2 tables behind the end, refcount blocks that
//! count nothing, and the end of the file. The refcount table ceases to refer to a block, durably,
//! before the block's space is free.
//!
//! Tables behind the end that snapshots share go as they are, before the others are emptied entry
//! by entry: that takes no space, which a copy of the table would.
//!
//! | step | a crash after it leaves |
//! | --- | --- |
//! | L1 entries of shared tables behind the end are cleared, in a cycle; each table, and all that it refers to, loses a reference by the quarantine (D2) | leaks |
//! | a barrier over all counts; a check finds nothing but leaks | leaks |
//! | L1 entries of empty tables behind the end are cleared, in a cycle; the tables lose their counts by the quarantine (D2) | the same |
//! | entries of the refcount table become 0, each for a block that counts nothing, or itself alone; barrier | leaks: blocks that others count |
//! | these blocks' counts are lowered | the same, fewer |
//! | the last two steps again, for blocks that have counted these blocks alone | the same |
//! | the file is cut behind the last cluster that has a count; barrier | a longer file |
//! | what no block counts any more, before the end, is punched | the same, fewer holes |
//!
//! Entries of one round depend on no other, so a write of the table that tears is harmless. A block
//! that counts another one goes in a later round: without its count, an entry that is still there
//! would refer to free space.
//!
//! An image in which the check finds more than leaks keeps its tables, its blocks and its length:
//! space that it does not count may be in use.

use cowslip_boxed::boxed;
use cowslip_queue::yield_now;
use std::collections::BTreeSet;
use std::ops::Range;

use super::{SCAN_CLUSTERS, entry_writes};
use crate::commit::probe::Stage;
use crate::commit::roots::Flush;
use crate::count_growth::{BlockUse, CountGrowth};
use crate::entry::L2Entry;
use crate::geometry::HostOffset;
use crate::plan::Freed;
use crate::{Counts, Qcow2};
use crate::{Job, Result};

/// Rounds of dropping blocks, each of which takes a flush. Blocks that an even longer chain of
/// blocks has counted stay until the next shrink: a hostile image has a million of them.
const ROUNDS_MAX: usize = 1024;

/// Blocks that are looked at in one turn.
const BLOCKS_AT_ONCE: u64 = 64;

/// Entries whose space waits to be released, at most and but for those of one table.
const GIVEN_UP_MAX: usize = 1 << 16;

impl Qcow2 {
    /// Frees the structures that a shrink to `size` has left empty. No request that changes
    /// something is under way meanwhile. Cancelling the job before the check has ended leaves all
    /// of it as it is.
    pub(crate) async fn give_up_emptied(&self, size: u64, job: &Job) -> Result<()> {
        let _nothing_is_kept = self.kept_space.take().await;
        let _drained = self.drain().await;
        let tables = self.empty_tables_behind(size).await?;
        let mut counts = self.turn.take().await;
        self.latch_if_cancelled(async {
            if !self.is_settled_and_known(&mut counts).await? {
                return Ok(());
            }
            // The check reads the counts from the file.
            counts.refcounts.write_dirty().await?;
            self.barrier().await?;
            let spared = "the file keeps its length";
            if self.refuse_unsound(spared, job).await.is_err() {
                return Ok(());
            }
            let blocks = (0..counts.refcounts.table().len() as u64).collect();
            self.give_up_in_turn(&mut counts, &tables, blocks).await
        })
        .await
    }

    /// The same in an image that this session has checked before. Requests wait for the changes
    /// alone, not while it is looked for what is empty.
    pub(crate) async fn give_up_emptied_of_sound(&self, size: u64) -> Result<()> {
        let blocks = self.find_empty_blocks().await?;
        let _nothing_is_kept = self.kept_space.take().await;
        let _drained = self.drain().await;
        let tables = self.empty_tables_behind(size).await?;
        let mut counts = self.turn.take().await;
        self.latch_if_cancelled(async {
            match self.is_settled_and_known(&mut counts).await? {
                true => self.give_up_in_turn(&mut counts, &tables, blocks).await,
                false => Ok(()),
            }
        })
        .await
    }

    /// The blocks that may go, some looked at in each turn.
    async fn find_empty_blocks(&self) -> Result<BTreeSet<u64>> {
        let mut found = BTreeSet::new();
        let mut end = u64::MAX;
        while end > 0 {
            let mut counts = self.turn.take().await;
            end = end.min(counts.refcounts.table().len() as u64);
            let some: BTreeSet<u64> = (end.saturating_sub(BLOCKS_AT_ONCE)..end).collect();
            let looking = self.empty_blocks(&mut counts, &some);
            let empty = self.latch_if_cancelled(looking).await?;
            let is_there =
                |&&index: &&u64| counts.refcounts.block(index).is_ok_and(|at| at.is_some());
            let is_end =
                !self.may_leave_gaps() && empty.len() < some.iter().filter(is_there).count();
            found.extend(empty.iter().map(|block| block.index));
            if is_end {
                break;
            }
            end = end.saturating_sub(BLOCKS_AT_ONCE);
            drop(counts);
            // Where all counts are in memory, nothing else lets requests go on.
            yield_now().await;
        }
        Ok(found)
    }

    /// Makes L1 refer no longer to tables behind a disk of `size` bytes that snapshots share, nor
    /// the disk to what they map. No VM state is in use meanwhile.
    pub(crate) async fn drop_shared_behind(&self, size: u64) -> Result<()> {
        // The clusters of a data file have no counts, and are to be emptied.
        if self.format.data_file {
            return Ok(());
        }
        let first = self.geometry().l1_entries_for(size);
        let _drained = self.drain().await;
        let mut counts = self.turn.take().await;
        self.latch_if_cancelled(self.drop_shared_in_turn(&mut counts, first))
            .await
    }

    async fn drop_shared_in_turn(&self, counts: &mut Counts, first: u64) -> Result<()> {
        let end = self.lock().mapping.tables.l1().len() as u64;
        let mut given_up = 0;
        for index in first..end {
            let shared = self.lock().mapping.shared_table(index);
            let Some(offset) = shared else {
                continue;
            };
            let Some(entries) = self.read_entries(offset).await? else {
                continue;
            };
            {
                let mut state = self.lock();
                for entry in &entries {
                    self.refuse_misplaced(&mut state, entry)?;
                }
                if state.mapping.tables.drop_tables(&[index]).is_empty() {
                    continue;
                }
                state.give_up(self.geometry(), Freed::Cluster(offset));
                for freed in entries.iter().filter_map(Freed::of) {
                    state.give_up(self.geometry(), freed);
                }
            }
            given_up += entries.len();
            if given_up >= GIVEN_UP_MAX {
                self.cycle(counts).await?;
                given_up = 0;
            }
        }
        self.cycle(counts).await
    }

    /// The entries of a table that refer to space; `None` if one of them is damaged.
    async fn read_entries(&self, table: HostOffset) -> Result<Option<Vec<L2Entry>>> {
        let len = self.geometry().cluster_bytes();
        let bytes = self.file.read_new(table.0, len).await?;
        let words = bytes.chunks_exact(self.geometry().l2_entry_bytes() as usize);
        let entries: Option<Vec<L2Entry>> =
            words.map(|words| self.format.l2_entry(words)).collect();
        let refers = |entry: &L2Entry| Freed::of(entry).is_some();
        Ok(entries.map(|entries| entries.into_iter().filter(refers).collect()))
    }

    /// All that has changed is written, and what is counted is known; `false` if it cannot be.
    async fn is_settled_and_known(&self, counts: &mut Counts) -> Result<bool> {
        self.cycle(counts).await?;
        {
            let mut state = self.lock();
            // A request that was dropped may still reach some of them.
            if state.mapping.epochs.any_abandoned() || state.mapping.has_bad_tables() {
                return Ok(false);
            }
            state.space.release_table_space();
        }
        counts.compressed_tail = None;
        self.release_counted_ahead(counts).await?;
        Ok(true)
    }

    #[boxed]
    async fn give_up_in_turn(
        &self,
        counts: &mut Counts,
        tables: &[u64],
        blocks: BTreeSet<u64>,
    ) -> Result<()> {
        counts.refcounts.write_dirty().await?;
        self.barrier().await?;
        self.drop_tables(counts, tables).await?;
        let dropped = self.drop_empty_blocks(counts, blocks).await?;
        self.cut_behind_last_use(counts).await?;
        self.punch_uncounted(&dropped).await;
        Ok(())
    }

    /// Makes L1 refer to these tables no longer, durably; then they lose their counts.
    async fn drop_tables(&self, counts: &mut Counts, tables: &[u64]) -> Result<()> {
        if tables.is_empty() {
            return Ok(());
        }
        {
            let mut state = self.lock();
            for table in state.mapping.tables.drop_tables(tables) {
                state.give_up(self.geometry(), Freed::Cluster(table.offset));
            }
        }
        self.cycle(counts).await?;
        // A block that goes has no count that is still to be written.
        counts.refcounts.write_dirty().await?;
        self.sync(&self.file).await
    }

    /// L1 indices of tables behind the end of the disk that map nothing. A VM state there keeps its
    /// tables.
    async fn empty_tables_behind(&self, size: u64) -> Result<Vec<u64>> {
        let first = self.geometry().l1_entries_for(size);
        let candidates: Vec<u64> = {
            let state = self.lock();
            let entries = (0..).zip(state.mapping.tables.l1());
            let present = entries.filter(|(index, entry)| *index >= first && **entry != 0);
            present.map(|(index, _)| index).collect()
        };
        let mut empty = Vec::new();
        for index in candidates {
            if self.is_table_empty(index).await? {
                empty.push(index);
            }
        }
        Ok(empty)
    }

    async fn is_table_empty(&self, l1_index: u64) -> Result<bool> {
        let per_table = self.geometry().slices_per_table();
        for slice in l1_index * per_table..(l1_index + 1) * per_table {
            let pin = self.load(slice).await?;
            if pin.slice.is_none() || !self.lock().mapping.tables.maps_nothing(slice) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Drops those of these blocks that count nothing, and what that leaves empty, round by round.
    /// Returns their indices.
    async fn drop_empty_blocks(
        &self,
        counts: &mut Counts,
        mut candidates: BTreeSet<u64>,
    ) -> Result<Vec<u64>> {
        let mut dropped = Vec::new();
        for _ in 0..ROUNDS_MAX {
            let empty = self.empty_blocks(counts, &candidates).await?;
            let Some(lowest) = empty.first().map(|block| block.index) else {
                break;
            };
            self.drop_blocks(counts, &empty).await?;
            dropped.extend(empty.iter().map(|block| block.index));
            candidates = match self.may_leave_gaps() {
                // Only blocks that have counted these blocks may have become empty.
                true => empty
                    .iter()
                    .filter(|block| !block.counts_itself())
                    .map(|block| self.geometry().refcount_block_index(block.cluster))
                    .collect(),
                false => (0..lowest).collect(),
            };
        }
        Ok(dropped)
    }

    /// Those of these blocks that may go now, the lowest first.
    async fn empty_blocks(
        &self,
        counts: &mut Counts,
        candidates: &BTreeSet<u64>,
    ) -> Result<Vec<BlockUse>> {
        let mut empty = Vec::new();
        for &index in candidates.iter().rev() {
            match self.block_use(counts, index).await? {
                Some(block) if block.may_go() => empty.push(block),
                Some(_) if !self.may_leave_gaps() => break,
                Some(_) | None => {}
            }
        }
        empty.reverse();
        Ok(empty)
    }

    /// Returns whether a block may go before another one that stays. In a file only this session
    /// reuses the space that the block has counted, so it has to be released to the host: where
    /// there are no holes, only blocks behind the last one that stays are dropped.
    fn may_leave_gaps(&self) -> bool {
        self.fixed_end.is_some() || self.file.capabilities().punches_holes
    }

    /// Returns the clusters that a refcount block counts, as far as they matter. `None` if there is
    /// no block.
    async fn block_use(&self, counts: &mut Counts, index: u64) -> Result<Option<BlockUse>> {
        let geometry = *self.geometry();
        let Some(offset) = counts.refcounts.block(index)? else {
            return Ok(None);
        };
        let cluster = geometry.host_cluster(offset);
        let range = geometry.first_counted(index).0..geometry.first_counted(index + 1).0;
        // Two suffice to know whether there is one besides the block.
        let counted = counts.refcounts.counted(range.clone(), 2).await?;
        let own_count = counts.refcounts.get(cluster).await?;
        let holds_metadata = counted.len() < 2 && {
            let state = self.lock();
            let existing = range.start..range.end.min(state.space.claimed());
            state.space.protected.has_other(existing, cluster)
        };
        Ok(Some(BlockUse {
            index,
            cluster,
            own_count,
            counted,
            holds_metadata,
        }))
    }

    /// Makes the refcount table refer to these blocks no longer, then frees them.
    async fn drop_blocks(&self, counts: &mut Counts, blocks: &[BlockUse]) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let geometry = *self.geometry();
        {
            let mut state = self.lock();
            for block in blocks {
                let first = geometry.first_counted(block.index).0;
                let end = geometry.first_counted(block.index + 1).0;
                state.space.free.remove(first..end);
            }
        }
        let indices: Vec<u64> = blocks.iter().map(|block| block.index).collect();
        let entries: Vec<(u64, u64)> = indices.iter().map(|&index| (index, 0)).collect();
        let table = counts.refcounts.table_offset();
        let stage = self.probe.stage(Stage::CountTable);
        self.write_root(entry_writes(table.0, &entries), Flush::File)
            .await?;
        drop(stage);
        counts.refcounts.forget_blocks(&indices);
        for block in blocks {
            if block.counts_itself() {
                self.lock().space.protected.remove(block.cluster);
                continue;
            }
            let own = block.cluster.0..block.cluster.0 + 1;
            self.free_metadata(counts, own).await?;
        }
        match self.fixed_end {
            Some(_) => {
                let lowest = indices.iter().min().copied().unwrap_or(u64::MAX);
                counts.blocks_there = counts.blocks_there.min(lowest);
            }
            None => counts.dropped.extend(indices),
        }
        counts.refcounts.write_dirty().await
    }

    /// Cuts the file behind the last cluster that has a count, or holds metadata (invariant S3). A
    /// device keeps its length.
    async fn cut_behind_last_use(&self, counts: &mut Counts) -> Result<()> {
        if self.fixed_end.is_some() {
            return Ok(());
        }
        let (claimed, protected_end) = {
            let state = self.lock();
            (state.space.claimed(), state.space.protected.end())
        };
        let mut used_to = claimed;
        while used_to > 0 {
            let from = used_to.saturating_sub(SCAN_CLUSTERS);
            let runs = counts.refcounts.zero_runs(from..used_to).await?;
            match runs.last() {
                Some(run) if run.end == used_to => used_to = run.start,
                Some(_) | None => break,
            }
            if used_to > from {
                break;
            }
        }
        used_to = used_to.max(protected_end);
        if used_to >= claimed {
            return Ok(());
        }
        let geometry = *self.geometry();
        let cut_bytes = (claimed - used_to) << geometry.cluster_bits();
        counts.scanned = counts.scanned.min(used_to);
        // The session's growth is what the policy of further growth goes by.
        counts.grown_bytes = counts.grown_bytes.saturating_sub(cut_bytes);
        // Of a range that the file ends in, growth makes the block again.
        counts
            .dropped
            .retain(|&index| geometry.first_counted(index + 1).0 <= used_to);
        {
            let mut state = self.lock();
            state.space.cut_to(used_to);
            state.space.stop_growing_ahead();
        }
        // Growth depends on the length, and a truncation that failed may have been made or not.
        self.or_latched(self.file.set_len(used_to << geometry.cluster_bits()).await)?;
        self.sync(&self.file).await
    }

    /// Gives the space back to the host that these blocks have counted, whatever is done with
    /// discards: nothing refers to it, and another session does not take it.
    async fn punch_uncounted(&self, dropped: &[u64]) {
        if self.fixed_end.is_some() {
            return;
        }
        let geometry = *self.geometry();
        let claimed = self.lock().space.claimed();
        let dropped: BTreeSet<u64> = dropped.iter().copied().collect();
        let mut gaps: Vec<Range<u64>> = Vec::new();
        for index in dropped {
            let first = geometry.first_counted(index).0;
            let end = geometry.first_counted(index + 1).0.min(claimed);
            match gaps.last_mut() {
                _ if first >= end => {}
                Some(gap) if gap.end == first => gap.end = end,
                Some(_) | None => gaps.push(first..end),
            }
        }
        let bits = geometry.cluster_bits();
        for gap in gaps {
            let bytes = (gap.end - gap.start) << bits;
            // A discard is advice: where it fails, the space merely stays allocated.
            drop(self.file.discard(gap.start << bits, bytes).await);
        }
    }

    /// Recreates a block that this session has dropped, which frees the space it counts; `false` if
    /// there is none. The block lies at the beginning of that space and counts itself. Where an
    /// earlier session, or damage, has left an entry of the table empty, none is made: the space
    /// it would count may be in use.
    pub(super) async fn recount_dropped(&self, counts: &mut Counts) -> Result<bool> {
        let geometry = *self.geometry();
        while let Some(index) = counts.dropped.pop_first() {
            let growth = CountGrowth {
                start: geometry.first_counted(index).0,
                end: geometry.first_counted(index + 1).0,
                blocks: vec![index],
                table_clusters: 0,
            };
            if counts.refcounts.block(index)?.is_some() || growth.end > self.lock().space.claimed()
            {
                continue;
            }
            self.count_as_free(counts, growth).await?;
            return Ok(true);
        }
        Ok(false)
    }
}
