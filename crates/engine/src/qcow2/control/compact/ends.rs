//! The beginning and the end of a compaction: counts that nothing needs go down, blocks that count
//! nothing go, the file is cut, and what is free becomes holes. Requests that change something wait
//! meanwhile.

use cowslip_boxed::boxed;

use super::survey::{Excess, Kind, Survey};
use crate::Result;
use crate::job::{Job, Stage};
use crate::qcow2::geometry::HostCluster;
use crate::qcow2::space::alloc::SpaceContent;
use crate::qcow2::{Counts, Qcow2};

/// Clusters whose counts go down before they are written.
const LOWERED_AT_ONCE: usize = 1 << 16;
/// Bytes whose extents are asked for at a time, which bounds their number.
const LOOK_BYTES: u64 = 256 << 20;

impl Qcow2 {
    /// All that has changed is written, nothing is in the quarantine but what a request that was
    /// dropped may reach, and no count is raised for a cluster that nothing refers to.
    #[boxed]
    pub(super) async fn settle_space(&self, counts: &mut Counts) -> Result<()> {
        self.cycle(counts).await?;
        // The space of compressed data may get further references, of which a survey knows nothing.
        counts.compressed_tail = None;
        self.lock().space.release_table_space();
        self.release_counted_ahead(counts).await?;
        // Clusters that the first cycle cleared have no readers left: the second lowers their
        // counts.
        self.cycle(counts).await?;
        counts.refcounts.write_dirty().await?;
        self.barrier().await
    }

    /// Lowers the counts that are higher than the references. Nothing at all is under way.
    #[boxed]
    pub(super) async fn free_leaks(&self, counts: &mut Counts, survey: &mut Survey) -> Result<()> {
        // What a request that was dropped may still reach is no leak.
        let waits = {
            let state = self.lock();
            state.mapping.epochs.any_abandoned() || !state.space.quarantine.is_empty()
        };
        if waits || survey.excess.is_empty() {
            return Ok(());
        }
        if survey.flags_behind {
            self.mark_dirty(true).await?;
        }
        let mut freed = Vec::new();
        for Excess { clusters, by } in std::mem::take(&mut survey.excess) {
            for cluster in clusters {
                if self.lower_leak(counts, HostCluster(cluster), by).await? == 0 {
                    survey.kinds[cluster as usize] = Kind::Free;
                    freed.push(HostCluster(cluster));
                }
                if freed.len() >= LOWERED_AT_ONCE {
                    counts.refcounts.write_dirty().await?;
                    self.free_clusters(counts, std::mem::take(&mut freed)).await;
                }
            }
        }
        counts.refcounts.write_dirty().await?;
        self.barrier().await?;
        self.free_clusters(counts, freed).await;
        if survey.flags_behind {
            self.right_flags(counts, &Job::default()).await?;
            self.mark_dirty(false).await?;
        }
        Ok(())
    }

    /// Lowers a count by more than a change of it can say, if need be; the new count.
    async fn lower_leak(&self, counts: &mut Counts, cluster: HostCluster, by: u64) -> Result<u64> {
        let (mut left, mut count) = (by, 0);
        while left > 0 {
            let step = left.min(i64::MAX as u64);
            count = counts.refcounts.add(cluster, -(step as i64)).await?;
            left -= step;
        }
        Ok(count)
    }

    /// The cycles that give up what has moved, and the space of it.
    pub(super) async fn release_moved(&self, job: &Job) -> Result<()> {
        job.enter(Stage::Flush);
        self.write_back().await?;
        let waits = !self.lock().space.quarantine.is_empty();
        match waits {
            // Requests of before had not ended.
            true => self.write_back().await,
            false => Ok(()),
        }
    }

    /// Gives the end of the file back, and all that is free in it. What was moved is given up by
    /// now, or will be by a later cycle.
    #[boxed]
    pub(super) async fn end_compaction(&self) -> Result<()> {
        self.release_moved(&Job::default()).await?;
        // The VM state has tables behind the end of the disk, which may be empty while it is
        // written.
        let _size_stays = self.vm_state.take().await;
        self.give_up_emptied(self.size(), &Job::default()).await?;
        let _kept = self.kept_space.take().await;
        let _drained = self.drain().await;
        let mut counts = self.turn.take().await;
        self.latch_if_cancelled(self.punch_free(&mut counts)).await
    }

    /// Makes all that is free a hole, whatever is done with discards.
    #[boxed]
    async fn punch_free(&self, counts: &mut Counts) -> Result<()> {
        if !self.file.capabilities().punches_holes {
            return Ok(());
        }
        while self.scan(counts).await? {}
        let free = {
            let mut state = self.lock();
            self.unlatched(&state)?;
            state.space.release_table_space();
            std::mem::take(&mut state.space.free)
        };
        let runs: Vec<_> = free.runs().collect();
        for (start, len, content) in runs {
            let content = match self.punch_run((start, len, content)).await {
                true => SpaceContent::Zeroes,
                false if content.may_be_hole() => content,
                false => SpaceContent::Unknown,
            };
            self.lock().space.free.add(HostCluster(start), len, content);
        }
        Ok(())
    }

    /// Punches clusters in a row, where the host has space for them; whether all of them are known
    /// to read as zeroes now.
    async fn punch_run(&self, (start, len, content): (u64, u64, SpaceContent)) -> bool {
        let bits = self.geometry().cluster_bits();
        let step = (LOOK_BYTES >> bits).max(1);
        let mut is_zero = true;
        let mut at = start;
        while at < start + len {
            let end = (start + len).min(at + step);
            let (offset, bytes) = (at << bits, (end - at) << bits);
            at = end;
            let extents = self.file.extents(offset, bytes).await;
            let is_hole = extents.is_ok_and(|found| found.iter().all(|extent| extent.hole));
            if is_hole {
                is_zero &= content.is_zero();
                continue;
            }
            // A discard is advice: where it fails, the space merely stays allocated.
            let punched = self.file.discard(offset, bytes).await;
            let whole = |punched: &std::ops::Range<u64>| {
                punched.start <= offset && offset + bytes <= punched.end
            };
            is_zero &= punched.as_ref().is_ok_and(whole);
        }
        is_zero
    }
}
