//! Moves that put the disk's clusters into the guest's order: what is planned (`order.rs`) is done
//! by the moves of any compaction.
//!
//! Each place that a cluster goes to is free by then: what lay there has moved, and the cycles that
//! free its place have ended (`release_moved`), before anything is copied over it. What is not as
//! it was planned, because a guest has written it or has taken the place, stays where it is, and
//! nothing else of the round goes to either place; the next round plans once more.

use std::collections::{BTreeMap, HashSet};

use cowslip_boxed::boxed;
use smallvec::SmallVec;

use super::data::Destination;
use super::order::{Front, Order, Places, Step, Todo, Window};
use super::pace::Pace;
use super::plan::Outline;
use super::survey::{Kind, Survey, is_data, too_large, walk, walk_behind};
use super::units::{Unit, Units, in_batches};
use super::{CompactOptions, Compaction, Defragmentation, FURTHER_ROUNDS_MAX, ROUND_CLUSTERS_MAX};
use crate::Qcow2;
use crate::check::counts::{Memory, OutOfMemory};
use crate::commit::writeback::is_no_space;
use crate::geometry::HostCluster;
use crate::job::{Job, Stage};
use crate::space::growth::{Method, Step as Growth};
use crate::{Error, Result};

/// Bytes of memory for the order of the disk's clusters.
const MEMORY_BYTES_MAX: u64 = 2 << 30;

/// Where the words are that refer to clusters, by the places of these.
type Words = BTreeMap<u64, SmallVec<[u64; 2]>>;

/// Whether the cluster at a place is meant.
type IsMeant<'a> = &'a (dyn Fn(u64) -> bool + Sync);

/// The work of one round.
struct Round {
    order: Order,
    /// Of the disk's clusters that snapshots share and that move.
    words: Words,
    /// Those that go to the front, if that is cleared.
    others: Vec<Vec<Unit>>,
    /// Clusters that move at a time, at most.
    batch: u64,
    /// Whether subclusters that hold nothing take no space where they go.
    without_gaps: bool,
}

/// Forecast of a defragmentation.
pub(super) struct Expected {
    pub figures: Defragmentation,
    /// Clusters that it moves.
    pub moved: u64,
    /// The end of the file afterwards, and what else moves.
    pub outline: Outline,
}

impl Qcow2 {
    pub(super) fn refuse_defragmentation(&self, options: &CompactOptions) -> Result<()> {
        if options.defragment && self.format.data_file {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "defragmentation of an image whose data is in a data file, where each \
                          cluster has the guest's place"
                    .into(),
            });
        }
        Ok(())
    }

    /// Forecasts a defragmentation, and the compaction that follows. `is_left` says of which
    /// clusters of the file that the disk has anything is left by then.
    #[boxed]
    pub(super) async fn expect_defragmentation(
        &self,
        survey: &mut Survey,
        is_left: IsMeant<'_>,
        (options, job): (&CompactOptions, &Job),
    ) -> Result<Expected> {
        let batch = self.clusters_at_a_time(options);
        let places = self.places(survey, (is_left, job)).await?;
        let added = places.clusters() / super::order::SLACK_FRACTION + batch;
        let pace = &mut Pace::of(job);
        let order = Order::of(survey, places, added, pace).await?;
        let order = order.sparing(self.clusters_spared(options));
        let (extents, perfect) = order.runs();
        let forecast = order.forecast(&survey.kinds, batch, pace).await?;
        survey.kinds = forecast.kinds;
        let others: BTreeMap<u64, u64> = forecast.others.into_iter().collect();
        for (_, at) in &mut survey.blocks {
            *at = others.get(at).copied().unwrap_or(*at);
        }
        let outline = self.outline_of(survey, options, forecast.end);
        Ok(Expected {
            figures: Defragmentation {
                extents_before: extents,
                extents: forecast.runs,
                extents_perfect: perfect,
            },
            moved: forecast.moved,
            outline,
        })
    }

    /// Counts the runs of the disk: how many there are, and the perfect number.
    pub(super) async fn count_runs(&self, job: &Job) -> Result<(u64, u64)> {
        Ok(self.survey(job).await?.runs.count())
    }

    /// Puts the disk's clusters into the guest's order, until they are near enough to it, or no
    /// round comes nearer. Returns the cluster behind the last one of the disk, if all has moved.
    #[boxed]
    pub(super) async fn defragment(
        &self,
        options: &CompactOptions,
        job: &Job,
        done: &mut Compaction,
    ) -> Result<u64> {
        let (mut further, mut left_before) = (0, u64::MAX);
        loop {
            job.enter(Stage::Begin);
            let mut round = self.begin_order(options, job).await?;
            let before = done.moved_bytes;
            let end = round.order.end();
            let left = match round.order.todo() {
                Todo::Nothing => {
                    round.order.give_back(&mut Pace::of(job)).await?;
                    return Ok(end);
                }
                Todo::Clear(front) => {
                    self.clear_front(&mut round, front, (job, done)).await?;
                    front.clusters
                }
                Todo::Arrange => {
                    let left = round.order.away();
                    // Each goes home, and some stand in the way before.
                    job.expect((left + left / 2) << self.geometry().cluster_bits());
                    let (batch, pace) = (round.batch, &mut Pace::of(job));
                    while let Some(window) = round.order.next_window(batch, pace).await? {
                        self.move_window(&window, &mut round, (job, done)).await?;
                    }
                    self.punch_places(&round.order.spared()).await?;
                    left
                }
            };
            // Requests have taken places, or write all the time.
            round.order.give_back(&mut Pace::of(job)).await?;
            further += usize::from(left >= left_before);
            left_before = left;
            if done.moved_bytes == before || further > FURTHER_ROUNDS_MAX {
                return Ok(end);
            }
        }
    }

    /// Plans a round, with as much free space as its moves need, if there can be.
    #[boxed]
    async fn begin_order(&self, options: &CompactOptions, job: &Job) -> Result<Round> {
        // All that is free can be taken.
        self.find_all_free(job).await?;
        let batch = self.clusters_at_a_time(options);
        let mut survey = self.survey(job).await?;
        let places = self.places(&survey, (&|_| true, job)).await?;
        let free = survey.kinds.iter().filter(|kind| kind.is_room()).count() as u64;
        let wanted = places.clusters() / super::order::SLACK_FRACTION + batch;
        let added = wanted.saturating_sub(free);
        let pace = &mut Pace::of(job);
        let mut order = Order::of(&survey, places, added, pace).await?;
        if added > 0 && order.todo() != Todo::Nothing {
            self.add_free(added).await?;
            survey = self.survey(job).await?;
            let places = self.places(&survey, (&|_| true, job)).await?;
            order.give_back(pace).await?;
            order = Order::of(&survey, places, 0, pace).await?;
        }
        order = order.sparing(self.clusters_spared(options));
        let (mut words, mut others) = (Words::new(), Vec::new());
        if order.moves_any_shared(pace).await? {
            let is_meant = |at| order.moves_shared(at);
            let units = self.find_units(&survey, (&is_meant, 0), job).await?;
            words = units.into_words();
        }
        if let Todo::Clear(front) = order.todo() {
            let is_meant = |at| at >= front.end && !order.is_disk(at);
            let units = self.find_units(&survey, (&is_meant, front.end), job);
            let mut units = units.await?;
            // Also one that counts nothing yet.
            units.note_blocks(&survey, u64::MAX);
            others = units.batches(self.geometry(), batch);
        }
        Ok(Round {
            order,
            words,
            others,
            batch,
            without_gaps: options.subclusters,
        })
    }

    /// Clusters of space that places without one may keep, at most.
    fn clusters_spared(&self, options: &CompactOptions) -> u64 {
        (options.budget_bytes >> self.geometry().cluster_bits()).max(1)
    }

    /// Has the file grow by free clusters, if there is space.
    async fn add_free(&self, clusters: u64) -> Result<()> {
        let mut counts = self.turn.take().await;
        let step = Growth {
            bytes: clusters << self.geometry().cluster_bits(),
            method: Method::Extend,
        };
        let grown = self.grow_by(&mut counts, clusters, step);
        match self.latch_if_cancelled(grown).await {
            // Then it goes by what is free.
            Err(error) if is_no_space(&error) && !self.is_latched() => Ok(()),
            grown => grown,
        }
    }

    /// Where the disk's clusters are, of which something is left. If tables have become something
    /// else since the survey, they are read with changes held back.
    #[boxed]
    async fn places(&self, survey: &Survey, (is_left, job): (IsMeant<'_>, &Job)) -> Result<Places> {
        match self.read_places(survey, (is_left, job)).await {
            Err(error) if self.may_read_again(&error) => {
                let _drained = self.drain().await;
                let _counts = self.turn.take().await;
                self.read_places(survey, (is_left, job)).await
            }
            places => places,
        }
    }

    fn may_read_again(&self, error: &Error) -> bool {
        self.writable && !matches!(error, Error::Cancelled) && !self.is_latched()
    }

    #[boxed]
    async fn read_places(
        &self,
        survey: &Survey,
        (is_left, job): (IsMeant<'_>, &Job),
    ) -> Result<Places> {
        let name = self.name();
        let too_large = |OutOfMemory| too_large(name);
        let mut memory = Memory::new(MEMORY_BYTES_MAX);
        let clusters = survey.kinds.len() as u64;
        let data = survey.kinds.iter().filter(|&&kind| is_data(kind)).count() as u64;
        let bytes = Places::CLUSTER_BYTES.saturating_mul(clusters);
        let bytes = bytes.saturating_add(Places::BYTES.saturating_mul(data));
        memory.charge(bytes).map_err(too_large)?;
        let mut places = Places::of_tables_with(self.geometry().l2_entries(), data);
        walk(&self.file, &self.header(), job, &mut |found| {
            let place = found.clusters.start;
            let guest = found
                .guest
                .filter(|_| is_data(found.kind) && is_left(place));
            if let Some(guest) = guest {
                // Two may share a place, or requests have changed something.
                let more = match places.clusters() >= data {
                    true => Places::BYTES,
                    false => 0,
                };
                let table = match places.note(guest, HostCluster(place)) {
                    true => Places::TABLE_BYTES,
                    false => 0,
                };
                memory.charge(more + table).map_err(too_large)?;
            }
            Ok(())
        })
        .await?;
        Ok(places)
    }

    /// Finds the words that refer to clusters that move, at places of which `is_meant` is true, of
    /// tables that refer to something behind `end` clusters.
    #[boxed]
    async fn find_units<'a>(
        &self,
        survey: &Survey,
        (is_meant, end): (IsMeant<'a>, u64),
        job: &Job,
    ) -> Result<Units<'a>> {
        match self.read_units(survey, (is_meant, end), job).await {
            Err(error) if self.may_read_again(&error) => {
                let _drained = self.drain().await;
                let _counts = self.turn.take().await;
                self.read_units(survey, (is_meant, end), job).await
            }
            found => found,
        }
    }

    #[boxed]
    async fn read_units<'a>(
        &self,
        survey: &Survey,
        (is_meant, end): (IsMeant<'a>, u64),
        job: &Job,
    ) -> Result<Units<'a>> {
        let mut units = Units::at(is_meant, ROUND_CLUSTERS_MAX as usize);
        let behind = Some((survey, end));
        walk_behind(&self.file, &self.header(), (behind, job), &mut |found| {
            units.note(survey, found);
            Ok(())
        })
        .await?;
        Ok(units)
    }

    /// Moves what is in the way of a part of the disk, then that part.
    #[boxed]
    async fn move_window(
        &self,
        window: &Window,
        round: &mut Round,
        (job, done): (&Job, &mut Compaction),
    ) -> Result<()> {
        self.move_step(&window.evicted, round, (job, done)).await?;
        self.move_step(&window.placed, round, (job, done)).await
    }

    /// Moves clusters, and gives their places up. Those that are spared keep their space.
    #[boxed]
    async fn move_step(
        &self,
        step: &Step,
        round: &mut Round,
        (job, done): (&Job, &mut Compaction),
    ) -> Result<()> {
        self.punch_places(&step.released).await?;
        self.lock().space.spare(step.spared.clone());
        let left = self.move_clusters(step, round, (job, done)).await;
        self.lock().space.spare(Vec::new());
        let left = left?;
        if left.len() as u64 == step.clusters() {
            return Ok(());
        }
        let left: HashSet<_> = left.into_iter().collect();
        let stay = step.pairs().filter(|(from, _)| !left.contains(from));
        stay.for_each(|(from, to)| round.order.stays(from, to));
        // Some places have space that nothing was to have.
        self.punch_places(&step.destinations()).await
    }

    /// Returns the places that are left.
    async fn move_clusters(
        &self,
        step: &Step,
        round: &mut Round,
        (job, done): (&Job, &mut Compaction),
    ) -> Result<Vec<HostCluster>> {
        let mut left = Vec::new();
        if !step.moves.is_empty() {
            job.enter(Stage::Copy);
            let destination = Destination {
                end: 0,
                without_gaps: round.without_gaps,
            };
            // What has moved is given up before anything takes its place.
            left = self
                .move_runs(&step.moves, destination, (job, done))
                .await?;
        }
        if step.shared.is_empty() {
            return Ok(left);
        }
        job.enter(Stage::Tables);
        let mut units = Vec::with_capacity(step.shared.len());
        for &(from, to) in &step.shared {
            if let Some(words) = round.words.remove(&from.0) {
                // If it stays where it is, it is not moved again.
                round.words.insert(to.0, words.clone());
                units.push(Unit {
                    kind: Kind::Shared,
                    from,
                    words,
                    to: Some(to),
                });
            }
        }
        for batch in in_batches(units, self.geometry(), round.batch) {
            left.extend(self.move_units(&batch, 0, (job, done)).await?);
        }
        Ok(left)
    }

    /// Empties the front of the disk's clusters as all else is moved there, in batches: so that the
    /// tables are read once for many of them. Tables that have moved are not where the words of
    /// clusters were that snapshots share; such a cluster stays for the next round.
    #[boxed]
    async fn clear_front(
        &self,
        round: &mut Round,
        front: Front,
        (job, done): (&Job, &mut Compaction),
    ) -> Result<()> {
        job.expect((2 * front.clusters) << self.geometry().cluster_bits());
        for batch in std::mem::take(&mut round.others) {
            self.empty_front((round, front), batch.len() as u64, (job, done))
                .await?;
            if self.room_before(front.end) == 0 {
                return Ok(());
            }
            job.enter(Stage::Tables);
            self.move_units(&batch, front.end, (job, done)).await?;
        }
        Ok(())
    }

    /// Moves the disk's clusters out of the front until it has as many free ones, or none left that
    /// can move.
    #[boxed]
    async fn empty_front(
        &self,
        (round, front): (&mut Round, Front),
        clusters: u64,
        (job, done): (&Job, &mut Compaction),
    ) -> Result<()> {
        while self.room_before(front.end) < clusters {
            let pace = &mut Pace::of(job);
            let step = round.order.next_of_front(front, round.batch, pace);
            let Some(step) = step.await? else {
                return Ok(());
            };
            self.move_step(&step, round, (job, done)).await?;
        }
        Ok(())
    }

    /// Free clusters before a cluster.
    fn room_before(&self, end: u64) -> u64 {
        self.lock().space.free.clusters_to(end)
    }
}
