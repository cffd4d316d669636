//! Refcount blocks that count nothing any more, after a shrink: the refcount table ceases to refer to them, durably, and only
//! then is their space free. The file ends behind the last cluster in use then.
//!
//! | step | a crash after it leaves |
//! | --- | --- |
//! | L1 entries of empty tables behind the end are cleared, in a cycle; the tables lose their counts by the quarantine (D2) | leaks |
//! | a barrier over all counts; a check finds nothing but leaks | the same |
//! | entries of the refcount table become 0, each for a block that counts nothing, or itself alone; barrier | leaks: blocks that others count |
//! | these blocks' counts are lowered | the same, fewer |
//! | the last two steps again, for blocks that have counted these blocks alone | the same |
//! | the file is cut behind the last cluster that has a count | the same |
//!
//! Entries of one round depend on no other, so a write of the table that tears is harmless. A block that counts another one goes
//! in a later round: without its count, an entry that is still there would refer to free space.
//!
//! An image in which the check finds more than leaks keeps its blocks and its length: what it does not count may be in use.

use std::collections::BTreeSet;

use super::{SCAN_CLUSTERS, entry_writes};
use crate::qcow2::alloc::Content;
use crate::qcow2::count_growth::{BlockUse, CountGrowth};
use crate::qcow2::geometry::HostCluster;
use crate::qcow2::latch::Flush;
use crate::qcow2::plan::Freed;
use crate::qcow2::{Counts, Qcow2};
use crate::{Job, Result};

impl Qcow2 {
    /// Gives up what a shrink to `size` has left empty: L2 tables behind the end, refcount blocks, and the end of
    /// the file. No request that changes something is under way meanwhile.
    pub(in crate::qcow2) async fn give_up_emptied(&self, size: u64) -> Result<()> {
        let _drained = self.drain().await;
        let tables = self.empty_tables_behind(size).await?;
        let mut counts = self.turn.take().await;
        self.to_the_end(self.give_up_in_turn(&mut counts, &tables))
            .await
    }

    async fn give_up_in_turn(&self, counts: &mut Counts, tables: &[u64]) -> Result<()> {
        self.cycle(counts).await?;
        {
            let mut state = self.lock();
            let state = &mut *state;
            // Nobody knows what a request that was broken off still reaches.
            if state.epochs.any_abandoned() || !state.bad_tables.is_empty() {
                return Ok(());
            }
            let now = state.epochs.current();
            for table in state.tables.drop_tables(tables) {
                state.quarantine.push((Freed::Cluster(table.offset), now));
            }
            self.release_table_space(state);
        }
        counts.compressed_tail = None;
        self.release_counted_ahead(counts).await?;
        self.cycle(counts).await?;
        counts.refcounts.write_dirty().await?;
        self.barrier().await?;
        let spared = "the file keeps its length";
        if self.refuse_unsound(spared, &Job::default()).await.is_err() {
            return Ok(());
        }
        self.drop_empty_blocks(counts).await?;
        self.cut_behind_last_use(counts).await
    }

    /// L1 indices of tables behind the end of the disk that map nothing. A VM state there keeps its tables.
    async fn empty_tables_behind(&self, size: u64) -> Result<Vec<u64>> {
        let first = self.geometry().l1_entries_for(size);
        let candidates: Vec<u64> = {
            let state = self.lock();
            let entries = (0..).zip(state.tables.l1());
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
            if pin.slice.is_none() || !self.lock().tables.maps_nothing(slice) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn drop_empty_blocks(&self, counts: &mut Counts) -> Result<()> {
        let mut candidates: BTreeSet<u64> = (0..counts.refcounts.table().len() as u64).collect();
        while !candidates.is_empty() {
            let mut empty = Vec::new();
            for index in candidates {
                if let Some(block) = self.block_use(counts, index).await?
                    && block.may_go()
                {
                    empty.push(block);
                }
            }
            self.drop_blocks(counts, &empty).await?;
            // Only what has counted these blocks may have become empty.
            candidates = empty
                .iter()
                .filter(|block| !block.counts_itself())
                .map(|block| self.geometry().refcount_block_index(block.cluster))
                .collect();
        }
        Ok(())
    }

    /// What a refcount block counts, as far as it matters. `None` if there is no block.
    async fn block_use(&self, counts: &mut Counts, index: u64) -> Result<Option<BlockUse>> {
        let geometry = *self.geometry();
        let Some(offset) = counts.refcounts.block(index)? else {
            return Ok(None);
        };
        let cluster = geometry.host_cluster(offset);
        let range = geometry.first_counted(index).0..geometry.first_counted(index + 1).0;
        // Two tell whether there is another one than the block.
        let counted = counts.refcounts.counted(range.clone(), 2).await?;
        let own_count = counts.refcounts.get(cluster).await?;
        let holds_metadata = counted.len() < 2 && {
            let state = self.lock();
            let existing = range.start..range.end.min(state.claimed);
            let mut others = existing.map(HostCluster).filter(|other| *other != cluster);
            others.any(|other| state.protected.contains(other))
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
                state.free.remove(first..end);
            }
        }
        let indices: Vec<u64> = blocks.iter().map(|block| block.index).collect();
        let entries: Vec<(u64, u64)> = indices.iter().map(|&index| (index, 0)).collect();
        let table = counts.refcounts.table_offset();
        self.write_root(entry_writes(table.0, &entries), Flush::File)
            .await?;
        counts.refcounts.forget_blocks(&indices);
        for block in blocks {
            if block.counts_itself() {
                self.lock().protected.remove(block.cluster);
                continue;
            }
            let own = block.cluster.0..block.cluster.0 + 1;
            self.free_metadata(counts, own).await?;
        }
        match self.fixed_end {
            Some(_) => counts.blocks_there = counts.blocks_there.min(indices[0]),
            None => counts.dropped.extend(indices),
        }
        counts.refcounts.write_dirty().await
    }

    /// Cuts the file behind the last cluster that has a count, or holds metadata (invariant S3). A device keeps its length.
    async fn cut_behind_last_use(&self, counts: &mut Counts) -> Result<()> {
        if self.fixed_end.is_some() {
            return Ok(());
        }
        let (claimed, protected_end) = {
            let state = self.lock();
            (state.claimed, state.protected.end())
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
            state.free.cut_at(used_to);
            state.claimed = used_to;
            state.claimed_at_open = state.claimed_at_open.min(used_to);
            state.low_water = 0;
        }
        // Growth builds on the length: whether a cut that failed has been made, nobody knows.
        self.or_latched(self.file.set_len(used_to << geometry.cluster_bits()).await)?;
        self.sync(&self.file).await
    }

    /// Makes a block again that this session has dropped, which frees what it counts; `false` if there is none. The block
    /// lies at the beginning of that space and counts itself. Where an earlier session, or damage, has left an
    /// entry of the table empty, nothing is made: what it would count may be in use.
    pub(super) async fn recount_dropped(&self, counts: &mut Counts) -> Result<bool> {
        let geometry = *self.geometry();
        while let Some(index) = counts.dropped.pop_first() {
            let growth = CountGrowth {
                start: geometry.first_counted(index).0,
                end: geometry.first_counted(index + 1).0,
                blocks: vec![index],
                table_clusters: 0,
            };
            if counts.refcounts.block(index)?.is_some() || growth.end > self.lock().claimed {
                continue;
            }
            self.refuse_free_metadata(std::slice::from_ref(&(growth.start..growth.end)))?;
            self.write_counts(counts, &growth).await?;
            let (first, free) = (growth.first_free(), growth.end - growth.first_free());
            let mut state = self.lock();
            state.free.add(HostCluster(first), free, Content::Unknown);
            return Ok(true);
        }
        Ok(false)
    }
}
