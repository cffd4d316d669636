//! The check before a job that moves counts: it makes a damaged image worse.

use std::pin::pin;
use std::task::Poll;

use crate::Qcow2;
use crate::check::{self, CheckOptions, Finding, Severity};
use crate::job::Job;
use crate::{Error, Result};

/// Watches a check for the first finding that forbids the change.
struct Judge<'a> {
    job: &'a Job,
    reported_bytes: Option<u64>,
    first: Option<Finding>,
}

/// Returns whether a finding is more than a leak, a wrong COPIED bit, or a short snapshot entry.
pub(super) fn is_forbidding(finding: &Finding) -> bool {
    // Flags are set right by what follows, or stay as they are; what an entry of the snapshot table
    // lacks is added when the table is written.
    let is_spared = matches!(
        finding,
        Finding::CopiedL2 { .. } | Finding::CopiedData { .. } | Finding::SnapshotIncomplete { .. }
    );
    finding.severity() != Severity::Leak && !is_spared
}

impl check::Observer for Judge<'_> {
    fn finding(&mut self, finding: &Finding) {
        if is_forbidding(finding) {
            self.first.get_or_insert_with(|| finding.clone());
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

/// Work that only reads, dropped where it stands when the job is cancelled.
pub(super) async fn or_cancelled<T>(job: &Job, work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut work = pin!(work);
    std::future::poll_fn(|context| match job.check() {
        Err(error) => Poll::Ready(Err(error)),
        Ok(()) => work.as_mut().poll(context),
    })
    .await
}

impl Qcow2 {
    /// Refuses an image in which a check finds more than leaks, wrong COPIED bits and short
    /// snapshot entries: the counts have to be right, and nothing may lie over anything else.
    /// `spared` names the objects left unchanged.
    ///
    /// # Errors
    /// `Corrupt`, `Cancelled`, or I/O.
    pub(crate) async fn refuse_unsound(&self, spared: &str, job: &Job) -> Result<()> {
        let header = self.header();
        let mut judge = Judge {
            job,
            reported_bytes: None,
            first: None,
        };
        let options = CheckOptions::default();
        let checking =
            check::check_with_header(self.file.block_file(), &header, &options, &mut judge);
        or_cancelled(job, checking).await?;
        match judge.first {
            None => Ok(()),
            Some(finding) => Err(self.unsound(&finding, spared)),
        }
    }

    /// The error of an image in which a check has found something.
    pub(super) fn unsound(&self, finding: &Finding, spared: &str) -> Error {
        Error::Corrupt {
            file: self.name().to_string(),
            structure: "image",
            offset: 0,
            detail: format!("{finding}; {spared} (check -r all repairs it)"),
        }
    }
}
