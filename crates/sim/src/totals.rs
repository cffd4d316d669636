//! Numbers of the things that runs were made of.

use crate::session::Compacting;

/// Totals of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Runs.
    pub runs: u64,
    /// Requests that were answered.
    pub requests: u64,
    /// Operations of the disk.
    pub operations: u64,
    /// Power failures, dead processes and what came back from them.
    pub crashes: u64,
    /// Crashes beside a guest in drawn runs, which are as busy as guests can be: those of stories
    /// and goals, of jobs that copy disks and of chains that change are not among them.
    pub drawn_crashes: u64,
    /// Of these, crashes with eight requests or more in flight.
    pub busy_crashes: u64,
    /// Crashes while the image recovered from the one before.
    pub recovery_crashes: u64,
    /// Crashes while the file was being compacted.
    pub compaction_crashes: u64,
    /// Of these, crashes while it moved clusters or gave space back.
    pub changing_crashes: u64,
    /// Sessions that were closed in order.
    pub closes: u64,
    /// Operations that failed as asked.
    pub faults: u64,
}

impl Totals {
    /// A crash has fallen, into a compaction if there was one.
    pub(crate) fn cut_short(&mut self, compacting: Option<Compacting>) {
        self.compaction_crashes += u64::from(compacting.is_some());
        self.changing_crashes += u64::from(compacting == Some(Compacting::Changes));
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &Totals) {
        self.runs += other.runs;
        self.requests += other.requests;
        self.operations += other.operations;
        self.crashes += other.crashes;
        self.drawn_crashes += other.drawn_crashes;
        self.busy_crashes += other.busy_crashes;
        self.recovery_crashes += other.recovery_crashes;
        self.compaction_crashes += other.compaction_crashes;
        self.changing_crashes += other.changing_crashes;
        self.closes += other.closes;
        self.faults += other.faults;
    }
}
