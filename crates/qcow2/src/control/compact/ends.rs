//! The beginning and the end of a compaction: what is pending is written, blocks that count nothing
//! go, the file is cut, and what is free becomes holes.

use cowslip_boxed::boxed;
use cowslip_queue::yield_now;
use std::ops::Range;

use super::CompactOptions;
use crate::Result;
use crate::geometry::HostCluster;
use crate::job::{Job, Stage};
use crate::space::alloc::SpaceContent;
use crate::{Counts, Qcow2};

/// Bytes whose extents are asked for at a time, which bounds their number.
const LOOK_BYTES: u64 = 256 << 20;
/// Bytes, and runs of clusters, that become holes in one turn.
const PUNCHED_BYTES: u64 = 64 << 20;
const PUNCHED_RUNS: usize = 64;
/// Bytes of the file whose extents are released at a time: as many as the longest of btrfs.
const RELEASED_BYTES: u64 = 128 << 20;

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
        {
            let mut counts = self.turn.take().await;
            self.latch_if_cancelled(self.settle_space(&mut counts))
                .await?;
        }
        {
            // The VM state has tables behind the end of the disk, which may be empty while it is
            // written.
            let _size_stays = self.vm_state.take().await;
            self.give_up_emptied_of_sound(self.size()).await?;
        }
        self.punch_free().await
    }

    /// Makes all that is free a hole, whatever is done with discards, some of it at a time.
    #[boxed]
    pub(super) async fn punch_free(&self) -> Result<()> {
        if !self.file.capabilities().punches_holes {
            return Ok(());
        }
        self.find_all_free(&Job::default()).await?;
        // What is not free for a moment has no count, and no reference.
        let _kept = self.kept_space.take().await;
        self.lock().space.release_table_space();
        let mut next = Some(0);
        while let Some(at) = next {
            {
                let _counts = self.turn.take().await;
                let some = self.punch_some(at..u64::MAX);
                next = self.latch_if_cancelled(some).await?;
            }
            yield_now().await;
        }
        Ok(())
    }

    /// Has a file system that frees extents only as a whole free the space of holes, some of the
    /// file at a time. Returns how many bytes it has written elsewhere for that. It is advice:
    /// where it fails, or the job is cancelled, the rest merely stays as it is.
    #[boxed]
    pub(super) async fn release_extents(&self, (options, job): (&CompactOptions, &Job)) -> u64 {
        let mut sum = 0;
        if !options.whole_extents || !self.file.capabilities().punches_holes {
            return sum;
        }
        let Ok(len) = self.file.len().await else {
            return sum;
        };
        for start in (0..len).step_by(RELEASED_BYTES as usize) {
            let range = start..len.min(start + RELEASED_BYTES);
            if job.check().is_err() {
                break;
            }
            let Ok(bytes) = self.file.release_extents(range).await else {
                break;
            };
            job.enter(Stage::Copy);
            job.done(bytes);
            sum += bytes;
            // How much it would be was not known before.
            if job.begin(bytes).await.is_err() {
                break;
            }
        }
        sum
    }

    /// Makes those of these clusters holes that are free, some of them at a time.
    #[boxed]
    pub(super) async fn punch_places(&self, places: &[HostCluster]) -> Result<()> {
        if !self.file.capabilities().punches_holes {
            return Ok(());
        }
        for some in places.chunks(PUNCHED_RUNS) {
            {
                let _counts = self.turn.take().await;
                self.latch_if_cancelled(self.punch_free_of(some)).await?;
            }
            yield_now().await;
        }
        Ok(())
    }

    async fn punch_free_of(&self, places: &[HostCluster]) -> Result<()> {
        for run in places.chunk_by(|one, other| one.plus(1) == *other) {
            let mut next = Some(run[0].0);
            let end = run[0].0 + run.len() as u64;
            while let Some(at) = next {
                next = self.punch_some(at..end).await?;
            }
        }
        Ok(())
    }

    /// Looks through all counts that existed at open for free clusters.
    pub(super) async fn find_all_free(&self, job: &Job) -> Result<()> {
        loop {
            job.check()?;
            {
                let mut counts = self.turn.take().await;
                if !self.latch_if_cancelled(self.scan(&mut counts)).await? {
                    return Ok(());
                }
            }
            // Where all counts are in memory, nothing else lets requests go on.
            yield_now().await;
        }
    }

    /// Makes some of what is free in a range a hole, in the turn; where the rest begins, if there
    /// is any. No request takes it meanwhile.
    async fn punch_some(&self, range: Range<u64>) -> Result<Option<u64>> {
        let bits = self.geometry().cluster_bits();
        let most = (PUNCHED_BYTES >> bits).max(1);
        let (mut at, mut left) = (range.start, most);
        for _ in 0..PUNCHED_RUNS {
            let (start, len, content) = {
                let mut state = self.lock();
                self.unlatched(&state)?;
                let run = state.space.free.run_from(at);
                let Some((start, len, content)) = run.filter(|run| run.0 < range.end) else {
                    return Ok(None);
                };
                let len = len.min(left).min(range.end - start);
                state.space.free.remove(start..start + len);
                (start, len, content)
            };
            let content = match self.punch_run((start, len, content)).await {
                true => SpaceContent::Zeroes,
                false if content.may_be_hole() => content,
                false => SpaceContent::Unknown,
            };
            self.lock().space.free.add(HostCluster(start), len, content);
            at = start + len;
            left -= len;
            if left == 0 {
                break;
            }
        }
        Ok(Some(at))
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
            let whole =
                |punched: &Range<u64>| punched.start <= offset && offset + bytes <= punched.end;
            is_zero &= punched.as_ref().is_ok_and(whole);
        }
        is_zero
    }
}
