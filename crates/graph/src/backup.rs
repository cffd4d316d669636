//! [`Backup`]: copies a disk in use as it was at one moment.
//!
//! Before a request changes a chunk that is not copied yet, it is copied. Requests wait for that,
//! and for a copy of their chunk that is under way; nothing else holds them back.

use std::ops::Range;
use std::sync::Arc;

use cowslip_block::Result;
use cowslip_block::disk::{Disk, Extent};
use cowslip_block::job::{Job, Stage};

use crate::copy::Copier;
use crate::dirty::DirtyMap;
use crate::live::{Drained, LiveDisk, Tap, Wait};

/// The copying of a disk as it was when requests were held back.
#[derive(Debug)]
pub struct Backup {
    copier: Arc<Copier>,
    tap: Arc<dyn Tap>,
}

#[derive(Debug)]
struct Guard(Arc<Copier>);

impl Tap for Guard {
    fn before(&self, range: Range<u64>) -> Wait<'_> {
        Box::pin(async move {
            // The request goes on, and overwrites what should have been copied.
            if let Err(error) = self.0.settle(range).await {
                self.0.fail(error);
            }
        })
    }

    fn changed(&self, _range: Range<u64>) {}
}

impl Backup {
    /// Prepares the copy of a disk to `target`, in chunks of `chunk_bytes`. The target is no
    /// smaller, and nothing else writes it. Nothing is copied before [`Backup::freeze`].
    pub fn new(source: Arc<LiveDisk>, target: Arc<dyn Disk>, chunk_bytes: u64) -> Backup {
        let copier = Arc::new(Copier::new(source, target, chunk_bytes));
        Backup {
            tap: Arc::new(Guard(Arc::clone(&copier))),
            copier,
        }
    }

    /// Wants what the map has marked.
    pub fn want(&self, map: &DirtyMap) {
        self.copier.todo.merge(map);
    }

    /// Wants the whole disk.
    pub fn want_all(&self) {
        self.copier.todo.mark(0..u64::MAX);
    }

    /// Wants the extents that `is_wanted` accepts. What requests change meanwhile must be held
    /// back.
    ///
    /// # Errors
    /// Of the disk; [`cowslip_block::Error::Cancelled`].
    pub async fn want_extents(&self, job: &Job, is_wanted: impl Fn(&Extent) -> bool) -> Result<()> {
        self.copier.mark(job, is_wanted).await
    }

    /// Takes the moment: the copy will have what is wanted as it is now.
    pub fn freeze(&self, drained: &Drained) {
        debug_assert!(
            Arc::ptr_eq(drained.live(), self.copier.source()),
            "it is the disk that is held"
        );
        drained.add(Arc::clone(&self.tap));
    }

    /// Copies what is wanted, and flushes the copy. The job decides on errors, but for those of
    /// copies that requests make: they cannot be made again.
    ///
    /// # Errors
    /// Of either disk, also in a copy that a request has made; [`cowslip_block::Error::Cancelled`].
    /// The copy is of no use then.
    pub async fn run(&self, job: &Job) -> Result<()> {
        job.enter(Stage::Copy);
        job.expect(self.copier.todo.dirty_bytes());
        loop {
            self.copier.pass(job).await?;
            // Copies that requests make are waited for.
            match self.copier.unless(|is_idle| is_idle) {
                Some(waiting) => waiting.await,
                None if self.copier.is_done() => break,
                None => {}
            }
        }
        // A copy that a request has made may have failed last.
        self.copier.pass(job).await?;
        job.enter(Stage::Flush);
        self.copier.target().flush().await
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        self.copier.source().remove(&self.tap);
    }
}
