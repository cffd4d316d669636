//! Summary of many runs, in words and as JSON.

use std::time::Duration;

use crate::coverage::Coverage;
use crate::run::Report;
use crate::totals::Totals;

/// The sum of many runs.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Totals of the runs.
    pub totals: Totals,
    /// Where their crashes and faults fell.
    pub coverage: Coverage,
    /// Runs that failed.
    pub failed: u64,
}

impl Summary {
    /// Adds a run.
    pub fn add(&mut self, report: &Report) {
        self.totals.add(&report.totals);
        self.coverage.add(&report.coverage);
        self.failed += u64::from(report.failure.is_some());
    }

    /// Adds other runs.
    pub fn merge(&mut self, other: &Summary) {
        self.totals.add(&other.totals);
        self.coverage.add(&other.coverage);
        self.failed += other.failed;
    }

    /// The figures, in a few lines.
    pub fn figures(&self, took: Duration) -> String {
        let totals = &self.totals;
        let seconds = took.as_secs_f64().max(1e-6);
        let mut text = format!(
            "{} runs, {} requests, {} disk operations ({:.0}/s) in {seconds:.1} s\n",
            totals.runs,
            totals.requests,
            totals.operations,
            totals.operations as f64 / seconds,
        );
        text += &format!(
            "{} crashes ({:.1}/s; {:.0} crash-recovery checks an hour), {} beside guests in drawn runs, \
             {} % of them with 8 or more requests in flight, {} in a recovery\n",
            totals.crashes,
            totals.crashes as f64 / seconds,
            totals.crashes as f64 / seconds * 3600.0,
            totals.drawn_crashes,
            self.busy_percent(),
            totals.recovery_crashes,
        );
        if totals.compaction_crashes > 0 {
            text += &format!(
                "{} crashes fell into a compaction, {} of them while it moved clusters or gave space back\n",
                totals.compaction_crashes, totals.changing_crashes,
            );
        }
        text += &format!(
            "{} closes, {} faults; {} failed",
            totals.closes, totals.faults, self.failed
        );
        text
    }

    /// The share of crashes beside guests, in drawn runs, with eight requests or more in flight.
    pub fn busy_percent(&self) -> u64 {
        self.totals.busy_crashes * 100 / self.totals.drawn_crashes.max(1)
    }

    /// Lists gaps that a run of sufficient size must not have.
    pub fn gaps(&self) -> Vec<String> {
        let mut gaps = self.coverage.gaps();
        if self.busy_percent() < 33 {
            gaps.push(format!(
                "only {} % of the crashes beside guests in drawn runs had 8 or more requests in flight",
                self.busy_percent()
            ));
        }
        gaps
    }

    /// All of it as a JSON object.
    pub fn json(&self, took: Duration) -> String {
        let totals = &self.totals;
        let seconds = took.as_secs_f64().max(1e-6);
        format!(
            "{{\"runs\":{},\"requests\":{},\"operations\":{},\"crashes\":{},\"drawn_crashes\":{},\
             \"busy_crashes\":{},\"recovery_crashes\":{},\"compaction_crashes\":{},\"changing_crashes\":{},\"closes\":{},\"faults\":{},\"failed\":{},\"seconds\":{seconds:.3},\
             \"operations_per_second\":{:.0},\"checks_per_hour\":{:.0},{}}}",
            totals.runs,
            totals.requests,
            totals.operations,
            totals.crashes,
            totals.drawn_crashes,
            totals.busy_crashes,
            totals.recovery_crashes,
            totals.compaction_crashes,
            totals.changing_crashes,
            totals.closes,
            totals.faults,
            self.failed,
            totals.operations as f64 / seconds,
            totals.crashes as f64 / seconds * 3600.0,
            self.coverage.json(),
        )
    }
}
