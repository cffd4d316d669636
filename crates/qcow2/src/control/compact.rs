//! Compaction in place: its steps, beside requests.
//!
//! Nothing here has an order of its own. A cluster of the disk moves as a guest's write moves one
//! (`moves.rs`): an exclusive lease, a copy, an entry that is published, the old place in the
//! quarantine; the cycles of write-back do the rest. A guest's write that comes first, or between,
//! wins: what moves is looked up again under the lease.
//!
//! | step | requests | a crash in it leaves |
//! | --- | --- | --- |
//! | the image is checked, leaks are freed (`leaks.rs`) | go on; changes wait while pending ones are written | leaks, and COPIED bits beside them that are not set yet |
//! | redundant clusters lose their entries (`redundant.rs`), if that is asked for | go on | leaks; each entry refers to its space, or to nothing |
//! | subclusters that hold nothing lose their space (`subclusters.rs`) | go on | fewer holes |
//! | a survey of all tables; moves by it, in batches of at most the budget, each with a cycle | go on, but for moves of what several words refer to (`still.rs`) | leaks; each entry refers to the old place or the new one |
//! | refcount blocks that count nothing go, the file is cut | changes wait | a longer file |
//! | what is free becomes holes, some at a time | go on | fewer holes |
//!
//! Cancelled, failed for want of space, or done, it ends with the last step, so that what has moved
//! by then is given back. One that failed for want of space begins again, with less at a time.

mod data;
mod defragment;
mod ends;
mod leaks;
mod order;
mod pace;
mod parts;
mod plan;
mod redundant;
mod roots;
mod still;
mod subclusters;
mod survey;
mod units;
mod without;

use cowslip_boxed::boxed;

use crate::Qcow2;
use crate::backing::Backing;
use crate::commit::writeback::is_no_space;
use crate::geometry::{Geometry, HostCluster};
use crate::job::{Job, Stage};
use crate::{Error, Result};

use data::Destination;
use leaks::LOOKS_MAX;
use order::is_close;
use plan::{Move, Outline, Owners, Room, outline};
use survey::{Kind, Survey, walk_behind};
use units::{Unit, Units, moves_later};

/// Additional space that a compaction may take, unless it is said otherwise.
#[doc(hidden)]
pub const BUDGET_BYTES: u64 = 64 << 20;
/// Clusters that one round moves at most, since the list of them is kept.
const ROUND_CLUSTERS_MAX: u64 = 1 << 22;
/// Clusters that one batch moves at most, whatever the budget: each has a count to raise, an entry
/// and a place in the quarantine until the batch is durable, and a guest's flush waits for all.
const BATCH_CLUSTERS_MAX: u64 = 1 << 12;
/// Rounds that move what requests have put behind the end meanwhile: a busy guest goes on to.
const FURTHER_ROUNDS_MAX: usize = 8;
/// Times that the disk's clusters are put in order once more, if it was not enough.
const ORDERS_AGAIN_MAX: usize = 2;

/// Attempts after one that has found no space, but has moved something or given space back; each
/// with half of the budget.
const ATTEMPTS_MAX: usize = 16;

/// Options of a compaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompactOptions {
    /// Additional space in bytes that it may take for a time.
    pub budget_bytes: u64,
    /// Length of the file in bytes that suffices; `None` for the shortest.
    pub target_bytes: Option<u64>,
    /// Clusters that hold zeroes lose their space.
    pub zeroes: bool,
    /// Clusters that hold what the layers below show there lose their space.
    pub dedupe_backing: bool,
    /// Subclusters that hold nothing lose their space, in clusters that hold something.
    pub subclusters: bool,
    /// The clusters of the disk get the guest's order, until their runs are within 1.2 of as few as
    /// there can be.
    pub defragment: bool,
    /// Where the file system frees extents only as a whole, the rest of those that holes are in is
    /// written elsewhere at the end, so that the space of the holes comes back.
    pub whole_extents: bool,
}

impl Default for CompactOptions {
    fn default() -> CompactOptions {
        CompactOptions {
            budget_bytes: BUDGET_BYTES,
            target_bytes: None,
            zeroes: false,
            dedupe_backing: false,
            subclusters: true,
            defragment: false,
            whole_extents: true,
        }
    }
}

/// Forecast of a compaction.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompactionPlan {
    /// Length of the file now.
    pub file_bytes: u64,
    /// Length of the file afterwards.
    pub file_bytes_after: u64,
    /// Bytes that will be copied.
    pub moved_bytes: u64,
    /// Bytes of the file that something refers to.
    pub used_bytes: u64,
    /// Bytes that are counted and that nothing refers to: leaks, which will be freed.
    pub leaked_bytes: u64,
    /// Bytes of the file that are free.
    pub free_bytes: u64,
    /// The structure at the end that cannot move, in a word or two, if that keeps the file from
    /// being shorter.
    pub held_by: Option<&'static str>,
    /// Runs of clusters of the disk that follow on each other in the file, too, also of those that
    /// snapshots share.
    pub extents: u64,
    /// As few of them as there can be: one for each part of the disk with space of its own.
    pub extents_perfect: u64,
    /// The runs that there will be, if the clusters get the guest's order.
    pub extents_after: Option<u64>,
    /// Clusters of the disk with space of their own, in bytes.
    pub data_bytes: u64,
    /// Bytes of the disk that need no space of their own, and will lose it, if the options say so.
    pub redundant_bytes: u64,
    /// Bytes of the file that the host has allocated for subclusters that hold nothing, and that
    /// will come back; of [`CompactionPlan::redundant_bytes`] it has none.
    pub subcluster_bytes: u64,
}

/// Figures of a compaction that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compaction {
    /// Length of the file before.
    pub file_bytes_before: u64,
    /// Length of the file now.
    pub file_bytes: u64,
    /// Bytes that were copied.
    pub moved_bytes: u64,
    /// Bytes of leaks that were freed.
    pub leaked_bytes: u64,
    /// Bytes of the disk that needed no space of their own, and have lost it.
    pub redundant_bytes: u64,
    /// Bytes of the file that the host had allocated for subclusters that hold nothing.
    pub subcluster_bytes: u64,
    /// Bytes that the file system has written elsewhere, so that the space of holes comes back.
    pub rewritten_bytes: u64,
    /// The order of the disk's clusters, if that was to change.
    #[doc(hidden)]
    pub defragmentation: Option<Defragmentation>,
}

/// Runs of clusters of the disk that follow on each other in the file, too.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Defragmentation {
    /// How many there were.
    pub extents_before: u64,
    /// How many there are now.
    pub extents: u64,
    /// One for each part of the disk with space of its own: as few as there can be.
    pub extents_perfect: u64,
}

/// The work of one round.
struct Round {
    outline: Outline,
    /// Clusters of the disk that move, beside its requests.
    owners: Owners,
    room: Room,
    /// Clusters of the disk that one batch moves at most.
    batch: u64,
    /// Clusters that move after these, while nothing else is under way, or in the turn.
    later: Vec<Vec<Unit>>,
    /// It moves as many clusters as a round may: more may be left.
    is_full: bool,
}

impl Round {
    fn next_batch(&mut self, geometry: &Geometry) -> Option<Vec<Move>> {
        self.owners.next_batch(geometry, &mut self.room, self.batch)
    }
}

/// Has the space of freed clusters go back to the host until it is dropped.
struct GivesBack<'a>(&'a Qcow2);

impl<'a> GivesBack<'a> {
    fn begin(image: &'a Qcow2) -> GivesBack<'a> {
        image.lock().space.gives_back = true;
        GivesBack(image)
    }
}

impl Drop for GivesBack<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.space.gives_back = false;
        state.space.spare(Vec::new());
    }
}

fn moves(kind: Kind) -> bool {
    kind == Kind::Data || moves_later(kind)
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Free | Kind::Uncounted => "nothing",
        Kind::Data => "data",
        Kind::Shared => "snapshots",
        Kind::Compressed | Kind::Spanned => "compressed clusters",
        Kind::Table => "L2 tables",
        Kind::Block => "refcount blocks",
        Kind::Bits | Kind::BitmapTable | Kind::Directory => "bitmaps",
        Kind::SnapshotL1 | Kind::ActiveL1 | Kind::Snapshots | Kind::Counts | Kind::Structure => {
            "tables"
        }
        Kind::Fixed => "headers",
    }
}

impl Qcow2 {
    /// Forecasts [`Qcow2::compact`]. Writes nothing that a flush would not.
    #[boxed]
    pub async fn compaction_plan(
        &self,
        below: &dyn Backing,
        options: &CompactOptions,
        job: &Job,
    ) -> Result<CompactionPlan> {
        job.enter(Stage::Begin);
        self.refuse_redundant(below, options)?;
        self.refuse_defragmentation(options)?;
        let file_bytes = self.file.len().await?;
        let leaks = self.find_leaks("nothing was planned", job).await?;
        let redundant = self.count_redundant(below, options, job).await?;
        let mut survey = self.survey(job).await?;
        let kinds = (0..).zip(&mut survey.kinds);
        kinds
            .filter(|(cluster, kind)| **kind == Kind::Data && redundant.has(*cluster))
            .for_each(|(_, kind)| *kind = Kind::Free);
        let geometry = self.geometry();
        let bits = geometry.cluster_bits();
        let (extents, extents_perfect) = survey.runs.clone().count();
        let mut plan = CompactionPlan {
            file_bytes,
            file_bytes_after: file_bytes,
            moved_bytes: 0,
            used_bytes: survey.bytes_of(Kind::is_used),
            leaked_bytes: leaks.clusters << bits,
            free_bytes: survey
                .bytes_of(|kind| !kind.is_used())
                .saturating_sub(leaks.clusters << bits),
            held_by: None,
            extents,
            extents_perfect,
            extents_after: None,
            data_bytes: survey.data_clusters << bits,
            redundant_bytes: redundant.bytes,
            subcluster_bytes: match self.has_subclusters_to_release(options) {
                true => self.count_subclusters(job).await?,
                false => 0,
            },
        };
        let outline = match options.defragment {
            true => {
                let is_left = |cluster| !redundant.has(cluster);
                let expected = self.expect_defragmentation(&mut survey, &is_left, (options, job));
                let expected = expected.await?;
                plan.extents_after = Some(expected.figures.extents);
                plan.moved_bytes = expected.moved << bits;
                expected.outline
            }
            false => self.outline_of(&survey, options, 0),
        };
        // The last cluster of the file may end with it.
        if outline.end != geometry.clusters_for(file_bytes) {
            plan.file_bytes_after = outline.end << bits;
        }
        plan.moved_bytes += outline.moving << bits;
        plan.held_by = outline.held_by.map(word);
        Ok(plan)
    }

    /// The outline of a file that keeps at least `least` clusters.
    fn outline_of(&self, survey: &Survey, options: &CompactOptions, least: u64) -> Outline {
        let target = options.target_bytes.unwrap_or(0);
        let least = self.geometry().clusters_for(target).max(least);
        outline(survey, moves, least)
    }

    /// Surveys the file while requests go on: what moves by it is looked at once more. If tables
    /// have become something else meanwhile it is read again, at last with changes held back.
    #[boxed]
    async fn survey(&self, job: &Job) -> Result<Survey> {
        if !self.writable {
            return Survey::read(&self.file, &self.header(), job).await;
        }
        let mut survey = self.survey_beside_requests(job).await?;
        // Where blocks are larger than clusters, the last one of the file may have more of them
        // than this session takes.
        survey.cut(self.lock().space.claimed());
        Ok(survey)
    }

    #[boxed]
    async fn survey_beside_requests(&self, job: &Job) -> Result<Survey> {
        for _ in 0..LOOKS_MAX {
            // While a job waits for its user, or for the guest, nothing is held back.
            job.begin(0).await?;
            let watch = {
                let mut counts = self.turn.take().await;
                self.latch_if_cancelled(self.settle_space(&mut counts))
                    .await?;
                counts.refcounts.watch()
            };
            let read = Survey::read(&self.file, &self.header(), job).await;
            let changes = self.turn.take().await.refcounts.watched(watch);
            match (read, changes) {
                (Err(Error::Cancelled), _) => return Err(Error::Cancelled),
                (Ok(survey), Some(changes)) if !survey.is_disturbed(&changes) => return Ok(survey),
                _ => {}
            }
        }
        let _drained = self.drain().await;
        let mut counts = self.turn.take().await;
        self.latch_if_cancelled(async {
            self.settle_space(&mut counts).await?;
            Survey::read(&self.file, &self.header(), job).await
        })
        .await
    }

    /// Compacts the file; requests go on. The layers below are durable.
    #[boxed]
    pub async fn compact(
        &self,
        below: &dyn Backing,
        options: &CompactOptions,
        job: &Job,
    ) -> Result<Compaction> {
        self.ready_for_changes().await?;
        let _alone = self.compaction.take().await;
        let mut done = Compaction {
            file_bytes_before: self.file.len().await?,
            ..Compaction::default()
        };
        self.refuse_redundant(below, options)?;
        self.refuse_defragmentation(options)?;
        let gives_back = GivesBack::begin(self);
        // One that is cancelled before it has changed anything has nothing to give back.
        let mut begun = false;
        let mut moved_before = None;
        let outcome = async {
            let leaks = self.find_leaks("nothing was moved", job).await?;
            begun = true;
            done.leaked_bytes =
                self.free_leaks(&leaks, job).await? << self.geometry().cluster_bits();
            done.redundant_bytes = self.drop_redundant(below, options, job).await?;
            if self.has_subclusters_to_release(options) {
                done.subcluster_bytes = self.release_subclusters(job).await?;
            }
            moved_before = Some(done.moved_bytes);
            self.work((options, job), &mut done).await
        };
        let mut outcome = outcome.await;
        let mut options = options.clone();
        for _ in 0..ATTEMPTS_MAX {
            let without_space = outcome.as_ref().is_err_and(is_no_space);
            if !without_space || self.is_latched() {
                break;
            }
            let Ok(has_given_back) = self.has_given_back().await else {
                break;
            };
            let rewritten = self.release_extents((&options, job)).await;
            done.rewritten_bytes += rewritten;
            if !has_given_back && rewritten == 0 && moved_before == Some(done.moved_bytes) {
                // Another attempt would find what this one has found.
                break;
            }
            moved_before = Some(done.moved_bytes);
            // Less is kept for later.
            let batch = self.clusters_at_a_time(&options) / 2;
            options.budget_bytes = batch.max(1) << self.geometry().cluster_bits();
            outcome = self.work((&options, job), &mut done).await;
        }
        let ended = match &outcome {
            _ if self.is_latched() || !begun => Ok(()),
            Err(error) if !matches!(error, Error::Cancelled) && !is_no_space(error) => {
                // Whatever has failed: what was spared is not needed any more.
                self.punch_free().await
            }
            _ => {
                job.enter(Stage::Flush);
                self.end_compaction().await
            }
        };
        drop(gives_back);
        outcome.and(ended)?;
        done.rewritten_bytes += self.release_extents((&options, job)).await;
        done.file_bytes = self.file.len().await?;
        Ok(done)
    }

    /// Ends a compaction that finds no space. Returns whether space has come back by that, which
    /// another attempt can move into.
    async fn has_given_back(&self) -> Result<bool> {
        let before = self.file.block_file().allocated_bytes();
        self.end_compaction().await?;
        let after = self.file.block_file().allocated_bytes();
        Ok(after < before)
    }

    /// Moves, in the guest's order if that is wanted, until nothing is left to move.
    #[boxed]
    async fn work(
        &self,
        (options, job): (&CompactOptions, &Job),
        done: &mut Compaction,
    ) -> Result<()> {
        match options.defragment {
            true => self.in_order(options, job, done).await,
            false => self.rounds((options, 0), job, done).await,
        }
    }

    /// Puts the disk's clusters in order, and moves what lies behind them then.
    #[boxed]
    async fn in_order(
        &self,
        options: &CompactOptions,
        job: &Job,
        done: &mut Compaction,
    ) -> Result<()> {
        let (extents_before, _) = self.count_runs(job).await?;
        // Another attempt goes on where one has found no space.
        let extents_before = done
            .defragmentation
            .get_or_insert(Defragmentation {
                extents_before,
                ..Defragmentation::default()
            })
            .extents_before;
        for _ in 0..=ORDERS_AGAIN_MAX {
            let before = done.moved_bytes;
            let end = self.defragment(options, job, done).await?;
            self.rounds((options, end), job, done).await?;
            let (extents, extents_perfect) = self.count_runs(job).await?;
            done.defragmentation = Some(Defragmentation {
                extents_before,
                extents,
                extents_perfect,
            });
            if is_close(extents, extents_perfect) || done.moved_bytes == before {
                break;
            }
        }
        Ok(())
    }

    /// Moves what lies behind the lowest end of the file, but not before `least` clusters, until
    /// nothing is left to move, or nothing more can.
    #[boxed]
    async fn rounds(
        &self,
        (options, least): (&CompactOptions, u64),
        job: &Job,
        done: &mut Compaction,
    ) -> Result<()> {
        let mut further = 0;
        loop {
            job.enter(Stage::Begin);
            let mut round = self.begin_round((options, least), job).await?;
            job.expect(round.outline.moving << self.geometry().cluster_bits());
            let before = done.moved_bytes;
            while let Some(batch) = round.next_batch(self.geometry()) {
                job.enter(Stage::Copy);
                let destination = Destination {
                    end: round.outline.end,
                    without_gaps: options.subclusters,
                };
                self.move_runs(&batch, destination, (job, done)).await?;
            }
            for batch in &round.later {
                job.enter(Stage::Tables);
                self.move_units(batch, round.outline.end, (job, done))
                    .await?;
            }
            let moved = done.moved_bytes - before;
            let wanted = round.outline.moving << self.geometry().cluster_bits();
            let is_done = moved >= wanted && !self.is_used_behind(round.outline.end);
            if moved == 0 || is_done {
                return Ok(());
            }
            // Requests have taken places: some clusters stay where they are, or new ones lie behind
            // the end.
            further += usize::from(!round.is_full);
            if further > FURTHER_ROUNDS_MAX {
                return Ok(());
            }
        }
    }

    /// Returns whether some of the file behind `end` clusters is not free.
    fn is_used_behind(&self, end: u64) -> bool {
        let state = self.lock();
        let space = &state.space;
        let free = space.free.clusters_from(end) + space.table_space_from(end);
        space.claimed().saturating_sub(end) > free
    }

    /// Clusters that one batch moves at most.
    fn clusters_at_a_time(&self, options: &CompactOptions) -> u64 {
        let budget = options.budget_bytes >> self.geometry().cluster_bits();
        budget.clamp(1, BATCH_CLUSTERS_MAX)
    }

    /// Plans what moves.
    #[boxed]
    async fn begin_round(
        &self,
        (options, least): (&CompactOptions, u64),
        job: &Job,
    ) -> Result<Round> {
        // All that is free can be taken.
        self.find_all_free(job).await?;
        let survey = self.survey(job).await?;
        match self.plan_round(&survey, (options, least), job).await {
            Err(error) if !matches!(error, Error::Cancelled) && !self.is_latched() => {
                // What was a table may be something else by now.
                let _drained = self.drain().await;
                let _counts = self.turn.take().await;
                self.plan_round(&survey, (options, least), job).await
            }
            round => round,
        }
    }

    #[boxed]
    async fn plan_round(
        &self,
        survey: &Survey,
        (options, least): (&CompactOptions, u64),
        job: &Job,
    ) -> Result<Round> {
        let outline = self.outline_of(survey, options, least);
        let file_end = survey.kinds.len() as u64;
        let lowest = file_end.saturating_sub(ROUND_CLUSTERS_MAX);
        let mut owners = Owners::of(outline.end.max(lowest)..file_end);
        let mut units = Units::at(|at| at >= outline.end, ROUND_CLUSTERS_MAX as usize);
        let some = (Some((survey, outline.end)), job);
        walk_behind(&self.file, &self.header(), some, &mut |found| {
            units.note(survey, found);
            let from = HostCluster(found.clusters.start);
            let is_own = survey.kinds.get(from.0 as usize) == Some(&Kind::Data);
            if let Some(guest) = found.guest.filter(|_| found.kind == Kind::Data && is_own) {
                owners.note(guest, from);
            }
            Ok(())
        })
        .await?;
        let geometry = self.geometry();
        let budget = self.clusters_at_a_time(options);
        units.note_blocks(survey, outline.end);
        Ok(Round {
            is_full: outline.end < lowest || units.is_full(),
            owners,
            room: Room::before(survey.kinds.clone(), outline.end),
            batch: budget,
            later: units.batches(geometry, budget),
            outline,
        })
    }
}
