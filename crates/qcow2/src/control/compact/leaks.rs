//! The counts of an image before its clusters move: none is too low, and those that are too high go
//! down.
//!
//! All tables are read while requests go on. What keeps the outcome exact is that counts belong to
//! the holder of the turn, which notes each that changes (`Refcounts::watch`):
//!
//! | step | changes |
//! | --- | --- |
//! | all that has changed is written, nothing is in the quarantine or counted ahead; from here on each count that changes is noted | wait, for as long as that takes |
//! | a check reads all tables and all counts | go on |
//! | all that has changed is written; nothing is noted any more | wait, likewise |
//! | counts that are too high go down, some at a time | go on |
//!
//! A cluster whose count has not changed has, from the first step to the third, had the same
//! references: one that comes, or goes, changes the count by the third. So what the check says of
//! it is true, if each table that was read has been that table all the time. If one was freed
//! meanwhile, nothing is known, and the check is made once more. What it says of other clusters is
//! not looked at.

use std::ops::Range;

use cowslip_boxed::boxed;

use super::survey::too_large;
use crate::check::{self, Finding, TablesRead};
use crate::control::sound::{is_forbidding, or_cancelled};
use crate::geometry::{Geometry, HostCluster};
use crate::job::{Job, Stage};
use crate::space::refcount::Changes;
use crate::{Counts, Qcow2};
use crate::{Error, Result};

/// Looks beside requests; then they wait for one.
pub(super) const LOOKS_MAX: usize = 3;
/// Counts that go down in one turn.
const LOWERED_AT_ONCE: usize = 1 << 12;
/// Runs of clusters with a wrong count that are kept.
const RUNS_MAX: usize = 1 << 22;

/// Clusters in a row whose counts are too high by the same number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Excess {
    /// The clusters of the file.
    clusters: Range<u64>,
    /// References that are counted and not there.
    by: u64,
}

/// Counts that are too high.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Leaks {
    /// In the order of the file.
    excess: Vec<Excess>,
    /// Clusters that nothing refers to.
    pub(super) clusters: u64,
    /// Some are of clusters that one reference is left to: COPIED will be wrong there.
    flags_behind: bool,
}

impl Leaks {
    /// Each cluster, and by how much its count is too high.
    fn each(&self) -> impl Iterator<Item = (HostCluster, u64)> + Send + '_ {
        let excess = self.excess.iter();
        excess.flat_map(|run| run.clusters.clone().map(|at| (HostCluster(at), run.by)))
    }
}

/// A look at all counts.
#[derive(Debug, PartialEq)]
enum Looked {
    /// Nothing is wrong but these.
    Sound(Leaks),
    /// Something that was read as a table may be something else.
    Disturbed,
    /// A finding that forbids a compaction, if it is one.
    Unsound(Finding),
}

/// Clusters in a row with the same count and the same number of references.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mismatch {
    clusters: Range<u64>,
    count: u64,
    references: u64,
}

/// The findings of a check, as it makes them.
struct Findings<'a> {
    job: &'a Job,
    geometry: Geometry,
    reported_bytes: Option<u64>,
    mismatches: Vec<Mismatch>,
    /// There are more of them.
    is_partial: bool,
    /// Parts of the file that lie beyond its end.
    beyond: Option<(Range<u64>, Finding)>,
    other: Option<Finding>,
}

impl check::Observer for Findings<'_> {
    fn finding(&mut self, finding: &Finding) {
        match *finding {
            Finding::Refcount {
                cluster,
                refcount,
                references,
            } => self.mismatch(cluster, refcount, references),
            Finding::BeyondEnd { offset, len } => {
                let bits = self.geometry.cluster_bits();
                let clusters = offset >> bits..(offset.saturating_add(len - 1) >> bits) + 1;
                match &mut self.beyond {
                    // The first finding says it; what lies between is no reason for another look.
                    Some((all, _)) => {
                        all.start = all.start.min(clusters.start);
                        all.end = all.end.max(clusters.end);
                    }
                    None => self.beyond = Some((clusters, finding.clone())),
                }
            }
            _ if is_forbidding(finding) => {
                self.other.get_or_insert_with(|| finding.clone());
            }
            _ => {}
        }
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        let reported = self.reported_bytes.unwrap_or_else(|| {
            self.job.expect(total_bytes);
            0
        });
        self.job.done(done_bytes - reported);
        self.reported_bytes = Some(done_bytes);
    }
}

impl Findings<'_> {
    fn mismatch(&mut self, cluster: u64, count: u64, references: u64) {
        let is_full = self.mismatches.len() >= RUNS_MAX;
        match self.mismatches.last_mut() {
            Some(last)
                if last.clusters.end == cluster
                    && (last.count, last.references) == (count, references) =>
            {
                last.clusters.end += 1;
            }
            Some(_) if is_full => self.is_partial = true,
            _ => self.mismatches.push(Mismatch {
                clusters: cluster..cluster + 1,
                count,
                references,
            }),
        }
    }

    /// Decides by the counts that have changed meanwhile.
    fn outcome(self, tables: &TablesRead, changes: &Changes) -> Looked {
        let is_disturbed = changes
            .freed()
            .iter()
            .any(|&cluster| tables.contain(cluster));
        if is_disturbed || changes.is_partial() {
            return Looked::Disturbed;
        }
        if let Some(finding) = self.other {
            return Looked::Unsound(finding);
        }
        if let Some((clusters, finding)) = self.beyond
            && unchanged(clusters, changes).next().is_some()
        {
            return Looked::Unsound(finding);
        }
        let mut leaks = Leaks::default();
        for found in self.mismatches {
            for clusters in unchanged(found.clusters, changes) {
                if found.count < found.references {
                    return Looked::Unsound(Finding::Refcount {
                        cluster: clusters.start,
                        refcount: found.count,
                        references: found.references,
                    });
                }
                if found.references == 0 {
                    leaks.clusters += clusters.end - clusters.start;
                }
                leaks.flags_behind |= found.references == 1;
                leaks.excess.push(Excess {
                    clusters,
                    by: found.count - found.references,
                });
            }
        }
        Looked::Sound(leaks)
    }
}

/// The parts of a run of clusters whose counts have not changed.
fn unchanged(clusters: Range<u64>, changes: &Changes) -> impl Iterator<Item = Range<u64>> {
    let (start, end) = (clusters.start, clusters.end);
    let changed = changes.changed().range(clusters).copied();
    let mut at = start;
    let parts = changed.chain([end]).map(move |cluster| {
        let part = at..cluster;
        at = cluster + 1;
        part
    });
    parts.filter(|part| !part.is_empty())
}

impl Qcow2 {
    /// The counts that are too high, as long as nothing else is wrong with the image: it is refused
    /// then, and `spared` says what of it is as it was.
    ///
    /// # Errors
    /// `Corrupt`, `Cancelled`, or I/O.
    #[boxed]
    pub(super) async fn find_leaks(&self, spared: &str, job: &Job) -> Result<Leaks> {
        job.enter(Stage::Begin);
        if !self.writable {
            // Nothing changes.
            return self.exact_leaks(spared, job).await;
        }
        for _ in 0..LOOKS_MAX {
            // While a job waits for its user, or for the guest, nothing is held back.
            job.begin(0).await?;
            match self.look_beside(job).await? {
                Looked::Sound(leaks) => return Ok(leaks),
                Looked::Disturbed => {}
                Looked::Unsound(_) => break,
            }
        }
        let _drained = self.drain().await;
        let mut counts = self.turn.take().await;
        self.latch_if_cancelled(async {
            self.settle_space(&mut counts).await?;
            self.exact_leaks(spared, job).await
        })
        .await
    }

    /// The same while nothing changes.
    async fn exact_leaks(&self, spared: &str, job: &Job) -> Result<Leaks> {
        let (findings, tables) = self.look(job).await?;
        let tables = tables?;
        if findings.is_partial {
            return Err(too_large(self.name()));
        }
        match findings.outcome(&tables, &Changes::default()) {
            Looked::Sound(_) if self.may_be_reached() => Ok(Leaks::default()),
            Looked::Sound(leaks) => Ok(leaks),
            Looked::Unsound(finding) => Err(self.unsound(&finding, spared)),
            Looked::Disturbed => Ok(Leaks::default()),
        }
    }

    /// Looks at all counts beside requests.
    async fn look_beside(&self, job: &Job) -> Result<Looked> {
        // So that requests wait for less.
        self.write_back().await?;
        let watch = {
            let _drained = self.drain().await;
            let mut counts = self.turn.take().await;
            self.latch_if_cancelled(self.settle_space(&mut counts))
                .await?;
            counts.refcounts.watch()
        };
        let (findings, tables) = match self.look(job).await {
            Ok((findings, Ok(tables))) => (findings, tables),
            other => {
                self.turn.take().await.refcounts.watched(watch);
                // What was no table any more may be the reason.
                return other.map(|_| Looked::Disturbed);
            }
        };
        self.write_back().await?;
        let _drained = self.drain().await;
        let mut counts = self.turn.take().await;
        self.latch_if_cancelled(self.settle_space(&mut counts))
            .await?;
        let changes = counts.refcounts.watched(watch);
        let Some(changes) = changes.filter(|_| !findings.is_partial) else {
            return Ok(Looked::Disturbed);
        };
        Ok(match findings.outcome(&tables, &changes) {
            Looked::Sound(_) if self.may_be_reached() => Looked::Sound(Leaks::default()),
            looked => looked,
        })
    }

    /// Returns whether a request that was dropped may still reach what nothing refers to: that is
    /// no leak. The image is settled.
    fn may_be_reached(&self) -> bool {
        let state = self.lock();
        state.mapping.epochs.any_abandoned() || !state.space.quarantine.is_empty()
    }

    /// A check, and the tables that it has read, or its error.
    async fn look<'a>(&self, job: &'a Job) -> Result<(Findings<'a>, Result<TablesRead>)> {
        let header = self.header();
        let mut findings = Findings {
            job,
            geometry: *self.geometry(),
            reported_bytes: None,
            mismatches: Vec::new(),
            is_partial: false,
            beyond: None,
            other: None,
        };
        let checking = check::check_counts(self.file.block_file(), &header, &mut findings);
        let outcome = match or_cancelled(job, checking).await {
            Err(Error::Cancelled) => return Err(Error::Cancelled),
            outcome => outcome,
        };
        Ok((findings, outcome))
    }

    /// Lowers the counts that are higher than the references. Nothing refers to, and nothing takes,
    /// a cluster that nothing refers to and that has a count, so requests go on.
    #[boxed]
    pub(super) async fn free_leaks(&self, leaks: &Leaks, job: &Job) -> Result<u64> {
        if leaks.flags_behind {
            return self.free_still(job).await;
        }
        let mut wrong = leaks.each().peekable();
        while wrong.peek().is_some() {
            job.check()?;
            let mut counts = self.turn.take().await;
            let some = wrong.by_ref().take(LOWERED_AT_ONCE);
            self.latch_if_cancelled(self.lower_all(&mut counts, some))
                .await?;
        }
        Ok(leaks.clusters)
    }

    /// The same with nothing at all under way: flags of entries have to change, under the cache.
    async fn free_still(&self, job: &Job) -> Result<u64> {
        let _still = self.stand_still().await?;
        let mut counts = self.turn.take().await;
        let counts = &mut counts;
        self.latch_if_cancelled(async {
            self.settle_space(counts).await?;
            let leaks = self.exact_leaks("nothing was moved", job).await?;
            let mut wrong = leaks.each().peekable();
            if wrong.peek().is_none() {
                return Ok(0);
            }
            // As a change of snapshots ends, which one was that has left this.
            let _change = self.probe.snapshots_change();
            self.mark_dirty(true).await?;
            while wrong.peek().is_some() {
                let some = wrong.by_ref().take(LOWERED_AT_ONCE);
                self.lower_all(counts, some).await?;
            }
            self.right_flags(counts, &Job::default()).await?;
            self.mark_dirty(false).await?;
            Ok(leaks.clusters)
        })
        .await
    }

    /// Lowers counts, durably; clusters whose count is 0 then are free.
    async fn lower_all(
        &self,
        counts: &mut Counts,
        wrong: impl Iterator<Item = (HostCluster, u64)>,
    ) -> Result<()> {
        let mut freed = Vec::new();
        for (cluster, by) in wrong {
            if self.lower_leak(counts, cluster, by).await? == 0 {
                freed.push(cluster);
            }
        }
        counts.refcounts.write_dirty().await?;
        self.barrier().await?;
        self.free_clusters(counts, freed).await;
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
}

#[cfg(test)]
mod tests;
