//! Zero clusters become what version 2 can say: unallocated clusters where nothing lies below, data
//! elsewhere.
//!
//! The guest sees the same data, however many of them have been changed, so nothing has to be
//! undone.

use std::ops::Range;

use crate::Qcow2;
use crate::Result;
use crate::backing::{Backing, NoBacking};
use crate::job::{Job, Stage};
use crate::map::Source;
use crate::path::cow;
use crate::plan::{EntryRequest, Unref};
use crate::units::{pieces, round_up};

/// Zeroes are written in pieces of this size.
const PIECE_BYTES: u64 = 2 << 20;

impl Qcow2 {
    /// Changes all zero clusters, those beyond the end of the disk too.
    ///
    /// # Errors
    /// `Cancelled`, I/O.
    pub(super) async fn unflag_zero_clusters(&self, below: &dyn Backing, job: &Job) -> Result<()> {
        job.enter(Stage::WriteZeroes);
        let unit = self.geometry().cluster_bytes();
        let disk_end = round_up(self.size(), unit);
        let tables = self.lock().mapping.tables.l1().len() as u64;
        let end = tables * self.geometry().l2_coverage_bytes();
        job.expect(end);
        // Beyond the end there is nothing but a VM state, which nothing lies below.
        let nothing = NoBacking;
        for (part, below) in [
            (0..disk_end, below),
            (disk_end..end.max(disk_end), &nothing),
        ] {
            let step = self.geometry().l2_coverage_bytes();
            for range in pieces(part.start, part.end - part.start, step) {
                job.begin(0).await?;
                let len = range.end - range.start;
                self.unflag_range(range, below, job).await?;
                job.done(len);
            }
        }
        Ok(())
    }

    async fn unflag_range(&self, range: Range<u64>, below: &dyn Backing, job: &Job) -> Result<()> {
        for run in self.map(range).await? {
            if !matches!(run.source, Source::Zero(_)) {
                continue;
            }
            let ask = (EntryRequest::Unflag, Unref::Free);
            for write in self.change_entries(run.range, below, ask).await? {
                let end = write.end.min(self.size());
                for piece in pieces(write.start, end - write.start, PIECE_BYTES) {
                    job.begin(0).await?;
                    let zeroes = cow::zeroes((piece.end - piece.start) as usize);
                    self.write(piece.start, zeroes, below).await?;
                }
            }
        }
        Ok(())
    }
}
