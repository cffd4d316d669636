//! The file grows, and the counts with it: new refcount blocks, and tables, are durable before
//! anything refers to them, and they cover space before it is handed out.

use super::{REFCOUNT_TABLE_BYTES_MAX, SCAN_CLUSTERS, entry_writes, is_no_space};
use crate::commit::probe::Stage;
use crate::commit::roots::Flush;
use crate::count_growth::{CountGrowth, Way, metadata_bytes, table_entries};
use crate::entry::set_refcount;
use crate::file::Event;
use crate::geometry::{HOST_OFFSET_END, HostCluster, HostOffset};
use crate::growth::Situation;
use crate::space::alloc::SpaceContent;
use crate::space::growth::{self, Method, Step};
use crate::space::refcount::Refcounts;
use crate::{Buf, Error, Result};
use crate::{Counts, Qcow2};
use cowslip_boxed::boxed;

impl Qcow2 {
    /// Finds room that is not free yet: in what no count covers, where the file has its length;
    /// else by extending the file, as the policy says, or by less if there is no space for that.
    pub(super) async fn grow(&self, counts: &mut Counts, clusters: u64) -> Result<()> {
        if self.fixed_end.is_some() {
            return self.grow_ahead(counts, clusters).await;
        }
        let needed_bytes = clusters << self.geometry().cluster_bits();
        loop {
            let step = self.next_step(counts, clusters);
            match self.grow_by(counts, clusters, step).await {
                Err(error) if is_no_space(&error) && !self.is_latched() && !counts.stepped_over => {
                }
                outcome => return outcome,
            }
            counts.step_bytes_max = step.bytes / 2;
            if step.bytes == needed_bytes {
                return self.use_up(counts, clusters, step.method).await;
            }
        }
    }

    /// Extends the file as the policy says, or not at all.
    pub(super) async fn grow_ahead(&self, counts: &mut Counts, clusters: u64) -> Result<()> {
        let step = self.next_step(counts, clusters);
        self.grow_by(counts, clusters, step).await
    }

    /// The policy's next step, no longer than those that have found space.
    fn next_step(&self, counts: &Counts, clusters: u64) -> Step {
        let bits = self.geometry().cluster_bits();
        let now = Situation {
            file_bytes: self.lock().space.claimed() << bits,
            grown_bytes: counts.grown_bytes,
            free_bytes: self.file.block_file().free_bytes(),
            needed_bytes: clusters << bits,
        };
        let step = growth::next_step(self.policy, &now, self.full_bytes());
        Step {
            bytes: step.bytes.min(counts.step_bytes_max).max(now.needed_bytes),
            ..step
        }
    }

    /// Clusters by which the file is shorter than it will be once all of the disk is allocated:
    /// beyond that it grows for a need alone.
    pub(super) fn clusters_left(&self) -> u64 {
        let full = self.full_bytes().filter(|_| self.fixed_end.is_none());
        full.map_or(u64::MAX, |full| {
            let end = self.geometry().clusters_for(full);
            end.saturating_sub(self.lock().space.claimed())
        })
    }

    /// The length that the file has once all of the disk is allocated; `None` if snapshots may
    /// make it longer.
    pub(super) fn full_bytes(&self) -> Option<u64> {
        let has_snapshots = self.lock().committed.header.nb_snapshots > 0;
        let geometry = self.geometry();
        let disk = geometry.clusters_for(self.size()) << geometry.cluster_bits();
        let tables = metadata_bytes(geometry, disk, 0);
        let data = if self.format.data_file { 0 } else { disk };
        (!has_snapshots).then(|| tables.saturating_add(data))
    }

    /// Finds some room where there is not enough for the need in one piece at the end of the file:
    /// the space kept for tables, the clusters missing besides free ones, a single cluster, or
    /// those of a refcount table that moves.
    async fn use_up(&self, counts: &mut Counts, clusters: u64, method: Method) -> Result<()> {
        let missing = {
            let mut state = self.lock();
            if state.space.release_table_space() {
                return Ok(());
            }
            clusters.saturating_sub(state.space.free.clusters())
        };
        let bits = self.geometry().cluster_bits();
        let mut outcome = Err(self.no_space());
        for fewer in [missing, 1, 0] {
            let step = Step {
                bytes: fewer.max(1) << bits,
                method,
            };
            outcome = match fewer < clusters {
                true => self.grow_by(counts, fewer, step).await,
                false => continue,
            };
            match &outcome {
                Err(error) if is_no_space(error) && !self.is_latched() => {}
                _ => return outcome,
            }
        }
        outcome
    }

    /// Extends the file by a step with room for `clusters` clusters.
    #[boxed]
    pub(crate) async fn grow_by(
        &self,
        counts: &mut Counts,
        clusters: u64,
        step: Step,
    ) -> Result<()> {
        if let Some(end) = self.fixed_end {
            return self.count_fixed_space(counts, end).await;
        }
        let bits = self.geometry().cluster_bits();
        let claimed = self.lock().space.claimed();
        let ahead = self.geometry().clusters_for(step.bytes).max(clusters);
        let growth = self.plan_counts(counts, claimed, (ahead, clusters)).await?;
        let is_too_long =
            growth.end > HOST_OFFSET_END >> bits || growth.table_bytes() > REFCOUNT_TABLE_BYTES_MAX;
        // Without a need only a table that moves is worth it: it leaves the clusters of the old
        // one.
        counts.stepped_over = growth.start > claimed;
        if is_too_long || (clusters == 0 && growth.table_clusters == 0) {
            return Err(self.no_space());
        }
        self.refuse_growth_over_tables(growth.end)?;
        // Nothing fails between new blocks that are reachable and the end behind them: a close
        // would cut them off. All their counts are 0 before and after.
        let runs = counts
            .refcounts
            .zero_runs(growth.first_free()..growth.end)
            .await?;
        // The space that is skipped becomes a hole.
        self.extend_file(
            counts,
            growth.start << bits,
            (growth.end << bits, step.method),
        )
        .await?;
        counts.grown_bytes += (growth.end - growth.start) << bits;
        self.write_counts(counts, &growth).await?;
        let content = match step.method {
            Method::Allocate if !counts.cannot_allocate => SpaceContent::Reserved,
            Method::Allocate | Method::Extend => SpaceContent::Zeroes,
        };
        let mut state = self.lock();
        let low_water = match counts.grown_bytes >= GROW_AHEAD_FROM_BYTES {
            true => ahead / 2,
            false => 0,
        };
        state.space.extend_to(growth.end, low_water);
        for run in runs {
            state
                .space
                .free
                .add(HostCluster(run.start), run.end - run.start, content);
        }
        Ok(())
    }

    /// A damaged L1 table may refer to the space that the file would grow into (invariant S3).
    fn refuse_growth_over_tables(&self, end: u64) -> Result<()> {
        match self.lock().space.table_before(end) {
            Some(table) => Err(Error::Corrupt {
                file: self.name().to_string(),
                structure: "L2 table",
                offset: self.geometry().host_offset(table).0,
                detail: "it is beyond the end of the file, which cannot grow over it".to_string(),
            }),
            None => Ok(()),
        }
    }

    async fn extend_file(
        &self,
        counts: &mut Counts,
        from: u64,
        (to, method): (u64, Method),
    ) -> Result<()> {
        if method == Method::Allocate && !counts.cannot_allocate {
            match self.file.allocate(from, to - from).await {
                Err(Error::Io { source, .. })
                    if source.kind() == std::io::ErrorKind::Unsupported =>
                {
                    counts.cannot_allocate = true;
                }
                other => return other,
            }
        }
        self.file.set_len(to).await
    }

    /// Returns which blocks, and which table, it takes to count `claimed..`, and where they go.
    /// They lie at the beginning of the new space and count themselves.
    pub(super) async fn plan_counts(
        &self,
        counts: &mut Counts,
        claimed: u64,
        (ahead, needed): (u64, u64),
    ) -> Result<CountGrowth> {
        let geometry = self.geometry();
        let mut start = claimed;
        let mut end = claimed + ahead;
        loop {
            let first = geometry.refcount_block_index(HostCluster(start));
            let last = geometry.refcount_block_index(HostCluster(end - 1));
            let mut blocks = Vec::new();
            for index in first..=last {
                if counts.refcounts.block(index)?.is_none() {
                    blocks.push(index);
                }
            }
            let entries = counts.refcounts.table().len() as u64;
            let table_clusters = if last < entries {
                0
            } else {
                // A longer table is rejected at open.
                let most = REFCOUNT_TABLE_BYTES_MAX / 8;
                let wanted = table_entries(geometry, self.size(), (entries, last, most));
                wanted.div_ceil(geometry.refcount_table_entries_per_cluster())
            };
            let growth = CountGrowth {
                start,
                end,
                blocks,
                table_clusters,
            };
            // Counts beyond the end of file that are not 0: a leak, to be skipped.
            let metadata = growth.first_free() - start;
            let gap = gap_from(&mut counts.refcounts, start, metadata + needed).await?;
            if gap > start {
                start = gap;
                end = end.max(start + needed);
                continue;
            }
            if growth.first_free() + needed <= end {
                return Ok(growth);
            }
            end = growth.first_free() + needed;
        }
    }

    /// Writes new refcount blocks and makes them reachable, in order.
    #[boxed]
    pub(super) async fn write_counts(
        &self,
        counts: &mut Counts,
        growth: &CountGrowth,
    ) -> Result<()> {
        if growth.blocks.is_empty() {
            return Ok(());
        }
        self.file.reach(Event::RefblockAlloc).await;
        if growth.table_clusters > 0 {
            self.file.reach(Event::ReftableGrow).await;
        }
        let written = self.write_counts_in_order(counts, growth).await;
        if let Err(error) = &written {
            // Some blocks may be written, none reachable or all: a reopen finds out.
            self.latch(error);
        }
        written
    }

    async fn reach_new_blocks(&self, table_moves: bool) {
        if table_moves {
            self.file.reach(Event::RefblockAllocWriteBlocks).await;
            self.file.reach(Event::RefblockAllocWriteTable).await;
        } else {
            self.file.reach(Event::RefblockAllocWrite).await;
        }
    }

    async fn write_counts_in_order(&self, counts: &mut Counts, growth: &CountGrowth) -> Result<()> {
        let stage = self.probe.stage(Stage::CountBlocks);
        let geometry = *self.geometry();
        let metadata = growth.start..growth.first_free();
        let mut blocks: Vec<(u64, u64, Vec<u8>)> =
            growth.placed_blocks(geometry.cluster_bytes()).collect();
        for cluster in metadata.clone().map(HostCluster) {
            let index = geometry.refcount_block_index(cluster);
            match blocks.iter_mut().find(|(block, ..)| *block == index) {
                Some((_, _, bytes)) => {
                    let at = geometry.index_in_refcount_block(cluster) as usize;
                    set_refcount(bytes, at, geometry.refcount_order(), 1);
                    counts.refcounts.note_change(cluster, 1);
                }
                None => {
                    counts.refcounts.add(cluster, 1).await?;
                }
            }
        }
        let mut table = counts.refcounts.table().to_vec();
        let entries = growth.table_clusters * geometry.refcount_table_entries_per_cluster();
        table.resize(table.len().max(entries as usize), 0);
        let mut writes = Vec::new();
        for (index, at, bytes) in blocks {
            let offset = at << geometry.cluster_bits();
            table[index as usize] = offset;
            writes.push((offset, vec![Buf::from(bytes)]));
        }
        let moved = growth.table_clusters > 0;
        if moved {
            self.probe.refcount_table_moves();
            let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
            writes.push((
                growth.start << geometry.cluster_bits(),
                vec![Buf::from(bytes)],
            ));
        }
        let way = growth.way();
        self.write_new_blocks(counts, writes, (growth, way)).await?;
        drop(stage);
        let _table = self.probe.stage(Stage::CountTable);
        let old = counts.refcounts.table_offset();
        if moved {
            let mut header = self.header();
            let old_clusters = u64::from(header.refcount_table_clusters);
            header.refcount_table_offset = growth.start << geometry.cluster_bits();
            header.refcount_table_clusters = growth.table_clusters as u32;
            self.file.reach(Event::RefblockAllocSwitchTable).await;
            self.write_header(&header).await?;
            counts
                .refcounts
                .set_table(table, HostOffset(header.refcount_table_offset));
            let first = geometry.host_cluster(old).0;
            self.free_metadata(counts, first..first + old_clusters)
                .await?;
        } else {
            self.file.reach(Event::RefblockAllocHookup).await;
            self.write_entries(old, (growth, way)).await?;
            counts.refcounts.set_table(table, old);
        }
        let mut state = self.lock();
        metadata.for_each(|cluster| {
            state.protect_cluster(HostCluster(cluster));
        });
        Ok(())
    }

    /// Writes new blocks, and a new table, with the counts that older blocks have of them: all
    /// durably. What else was written to the file waits for the next cycle.
    async fn write_new_blocks(
        &self,
        counts: &mut Counts,
        mut writes: Vec<(u64, Vec<Buf>)>,
        (growth, way): (&CountGrowth, Way),
    ) -> Result<()> {
        let moved = growth.table_clusters > 0;
        match way {
            Way::Few => {
                let metadata = growth.start..growth.first_free();
                let of_others = counts.refcounts.take_dirty_of(metadata)?;
                for _ in &of_others {
                    self.file.reach(Event::RefblockUpdatePart).await;
                }
                writes.extend(of_others);
                self.reach_new_blocks(moved).await;
                self.write_durably(writes).await
            }
            Way::Many => {
                counts.refcounts.write_dirty().await?;
                self.reach_new_blocks(moved).await;
                self.write_all(writes).await?;
                self.sync(&self.file).await
            }
        }
    }

    /// Writes the entries of new blocks into the refcount table that there is. A write that tears
    /// must not leave an entry for a block that another one counts, without the entry of that one.
    async fn write_entries(
        &self,
        table: HostOffset,
        (growth, way): (&CountGrowth, Way),
    ) -> Result<()> {
        let flush = match way {
            Way::Few => Flush::Nothing,
            Way::Many => Flush::File,
        };
        let bits = self.geometry().cluster_bits();
        for round in growth.rounds(self.geometry()) {
            let entries = round.into_iter().map(|(index, at)| (index, at << bits));
            let entries: Vec<(u64, u64)> = entries.collect();
            self.write_root(entry_writes(table.0, &entries), flush)
                .await?;
        }
        Ok(())
    }
}

/// Growth is worth doing ahead of need once a session has grown this much.
const GROW_AHEAD_FROM_BYTES: u64 = 1 << 20;

/// Returns where `clusters` successive counts from `start` on are first all 0. Each is looked at
/// once: a hostile image may have millions that are not.
pub(super) async fn gap_from(counts: &mut Refcounts, start: u64, clusters: u64) -> Result<u64> {
    // All from `gap` to `at` are 0.
    let (mut gap, mut at) = (start, start);
    let mut step = clusters;
    // Beyond what the refcount table counts all are 0, so there is an end.
    while at - gap < clusters {
        let end = at + step;
        for run in counts.zero_runs(at..end).await? {
            if run.start > at {
                gap = run.start;
            }
            at = run.end;
            if at - gap >= clusters {
                return Ok(gap);
            }
        }
        if at < end {
            (gap, at) = (end, end);
        }
        step = SCAN_CLUSTERS;
    }
    Ok(gap)
}
