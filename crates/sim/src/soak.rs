//! Many runs on several threads, and the campaign that leaves no cell of the coverage empty.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::chains;
use crate::config::Kind;
use crate::directed;
use crate::goals::Goal;
use crate::graph;
use crate::mixture::Mixture;
use crate::perform::run;
use crate::run::Changes;
use crate::stories;
use crate::summary::Summary;
use crate::trace::Trace;

/// Attempts at each goal of a campaign.
const ATTEMPTS: u64 = 400;
/// Goals that are tried before it is looked which of them are still open: few, since the runs of
/// one goal reach others too, and the same number on every machine.
const BATCH: usize = 16;

type ReportProgress<'a> = dyn Fn(&Summary, Duration) + Sync + 'a;

/// Reports of a soak under way.
struct Progress<'a> {
    report: Box<ReportProgress<'a>>,
    interval: Duration,
    /// When the next one is due, after the soak has begun.
    due: Mutex<Duration>,
}

/// Runs under way, and what they came to.
pub struct Soak<'a> {
    /// The subject of the runs.
    pub kind: Kind,
    /// Changes of each run.
    pub changes: &'a Changes,
    /// Threads.
    pub jobs: usize,
    /// Whether to go on after a run that fails.
    pub keep_going: bool,
    begun: Instant,
    /// Time after the first run from which on no run begins.
    limit: Duration,
    stop: AtomicBool,
    interrupted: Arc<AtomicBool>,
    progress: Option<Progress<'a>>,
    summary: Mutex<Summary>,
    failures: Mutex<Vec<(u64, String)>>,
}

impl Progress<'_> {
    /// Reports, if it is time.
    fn show(&self, summary: &Summary, elapsed: Duration) {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        if elapsed >= *due {
            *due = elapsed + self.interval;
            (self.report)(summary, elapsed);
        }
    }
}

impl<'a> Soak<'a> {
    /// Returns a soak before its first run.
    pub fn new(kind: Kind, changes: &'a Changes, jobs: usize) -> Soak<'a> {
        Soak {
            kind,
            changes,
            jobs,
            keep_going: false,
            begun: Instant::now(),
            limit: Duration::MAX,
            stop: AtomicBool::new(false),
            interrupted: Arc::default(),
            progress: None,
            summary: Mutex::default(),
            failures: Mutex::default(),
        }
    }

    /// Begins no run later than this after the soak has begun.
    pub fn limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Calls `report` with the sum of the runs once an interval, from the thread whose run ends.
    pub fn report_progress(
        &mut self,
        interval: Duration,
        report: impl Fn(&Summary, Duration) + Sync + 'a,
    ) {
        self.progress = Some(Progress {
            report: Box::new(report),
            interval,
            due: Mutex::new(interval),
        });
    }

    /// A flag that ends the soak once it is set: runs under way end, none begins.
    pub fn interruption(&self) -> Arc<AtomicBool> {
        self.interrupted.clone()
    }

    /// Whether the flag was set.
    pub fn was_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Whether no further run begins.
    fn has_ended(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
            || self.was_interrupted()
            || self.begun.elapsed() >= self.limit
    }

    /// Runs a seed; `on_failure` is called if it fails.
    fn one(&self, seed: u64, on_failure: &(impl Fn(u64, &str) + Sync)) {
        let report = run(seed, self.kind, self.changes, Trace::off());
        let mut summary = self.summary.lock().unwrap_or_else(PoisonError::into_inner);
        summary.add(&report);
        if let Some(progress) = &self.progress {
            progress.show(&summary, self.begun.elapsed());
        }
        if let Some(what) = report.failure {
            on_failure(seed, &what);
            self.stop.fetch_or(!self.keep_going, Ordering::Relaxed);
            let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.push((seed, what));
        }
    }

    /// Runs successive seeds.
    pub fn range(&self, seeds: std::ops::Range<u64>, on_failure: impl Fn(u64, &str) + Sync) {
        let next = AtomicU64::new(seeds.start);
        self.on_threads(|| {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let more = seed < seeds.end;
            if more {
                self.one(seed, &on_failure);
            }
            more
        });
    }

    /// Makes these runs of the mixture.
    pub fn mixture(&self, runs: std::ops::Range<u64>, on_failure: impl Fn(u64, &str) + Sync) {
        let (mixture, next) = (Mixture::default(), AtomicU64::new(runs.start));
        self.on_threads(|| {
            let run = next.fetch_add(1, Ordering::Relaxed);
            let more = run < runs.end;
            if more {
                mixture
                    .seeds(run)
                    .for_each(|seed| self.one(seed, &on_failure));
            }
            more
        });
    }

    /// Runs these seeds.
    fn list(&self, seeds: &[u64], on_failure: &(impl Fn(u64, &str) + Sync)) {
        let next = AtomicUsize::new(0);
        self.on_threads(|| {
            let seed = seeds.get(next.fetch_add(1, Ordering::Relaxed));
            if let Some(seed) = seed {
                self.one(*seed, on_failure);
            }
            seed.is_some()
        });
    }

    /// Calls `work` on all threads until it says that there is no more, or the soak ends.
    fn on_threads(&self, work: impl Fn() -> bool + Sync) {
        std::thread::scope(|scope| {
            for _ in 0..self.jobs {
                scope.spawn(|| while !self.has_ended() && work() {});
            }
        });
    }

    /// Directed runs until nothing is left open, or each goal has had its attempts; `thorough` ones
    /// aim at every goal once at least, whether it was reached by chance or not. What runs depends
    /// on `start` only, not on the number of threads.
    pub fn campaign(&self, start: u64, thorough: bool, on_failure: impl Fn(u64, &str) + Sync) {
        for attempt in start..start + ATTEMPTS {
            let all = thorough && attempt == start;
            let seeds = directed::seeds(&self.coverage(), attempt, all);
            for batch in seeds.chunks(BATCH) {
                let coverage = self.coverage();
                let open = |seed: &&u64| {
                    let goal = Goal::of(**seed);
                    all || goal.is_some_and(|goal| !coverage.has_reached(goal))
                };
                let open: Vec<u64> = batch.iter().filter(open).copied().collect();
                self.list(&open, &on_failure);
            }
            if all {
                self.list(&stories::seeds(attempt), &on_failure);
                self.list(&chains::seeds(attempt), &on_failure);
                self.list(&graph::seeds(attempt), &on_failure);
            }
            let drawing = directed::drawing(&self.coverage(), attempt);
            self.list(&drawing, &on_failure);
            if self.has_ended() || self.summary().coverage.gaps().is_empty() {
                return;
            }
        }
    }

    fn coverage(&self) -> crate::coverage::Coverage {
        self.summary().coverage
    }

    /// Returns the summary of the runs so far.
    pub fn summary(&self) -> Summary {
        let summary = self.summary.lock().unwrap_or_else(PoisonError::into_inner);
        summary.clone()
    }

    /// The seeds of runs that failed, and why.
    pub fn failures(&self) -> Vec<(u64, String)> {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.clone()
    }

    /// Since the soak has begun.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}
