//! Compaction of an image in place.

use super::Image;
use crate::Result;
use crate::job::Job;
use crate::qcow2::Qcow2;
use crate::qcow2::compact::{CompactOptions, Compaction, CompactionPlan};

impl Image {
    /// Forecasts what [`Image::compact`] does to the file as it is now. If the image is open for
    /// writing, changes are flushed first; else nothing is written. Requests go on.
    ///
    /// # Errors
    /// `Unsupported` where the format cannot; `Corrupt` if a check finds more than leaks and wrong
    /// COPIED bits; I/O, [`Error::Cancelled`](crate::Error::Cancelled).
    #[doc(hidden)]
    pub async fn compaction_plan(
        &self,
        options: &CompactOptions,
        job: &Job,
    ) -> Result<CompactionPlan> {
        let image = self.with_space()?;
        image.compaction_plan(&self.below, options, job).await
    }

    /// Gives back the space of the file that holds nothing: moves clusters from its end into free
    /// ones before it, frees leaks, cuts the file and punches what is free in it; before that, what
    /// is redundant loses its space, if the options say so: the guest reads what it did. Requests
    /// go on; those that change something wait for moments while it begins and ends, and while what
    /// several entries refer to, or a table, moves.
    /// There is one compaction at a time, another one waits.
    ///
    /// # Errors
    /// As [`Image::compaction_plan`], no space, and [`Error::Latched`](crate::Error::Latched) after
    /// an earlier failure. Cancelled or without space, the file is cut as far as it has come by
    /// then. After a crash the image is sound but for leaks.
    pub async fn compact(&self, options: &CompactOptions, job: &Job) -> Result<Compaction> {
        self.validate_write(0, 0)?;
        let image = self.with_space()?;
        if options.dedupe_backing {
            // What they hold takes the place of bytes that may be durable here.
            self.below.flush_what_was_left().await?;
        }
        let compacted = image.compact(&self.below, options, job).await;
        image.mark_corrupt_on_error(compacted).await
    }

    fn with_space(&self) -> Result<&Qcow2> {
        self.qcow2_for("compacting")
    }
}
