//! [`Mirror`]: copies a disk in use to another one, until both are equal.
//!
//! What is to be copied is at first what the copy shall hold, then what requests change: they mark
//! it when they end. So a copy that a request has overtaken is made again.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cowslip_block::Result;
use cowslip_block::disk::{Disk, Extent};
use cowslip_block::job::{Job, Stage};

use crate::copy::Copier;
use crate::live::{Drained, LiveDisk, Tap, Wait};

/// Requests are held back for what is left once it is no more than this.
const REST_BYTES: u64 = 16 << 20;
/// They are held back for more if it has not become less in this number of passes.
const PASSES_MAX: usize = 8;

/// When a change of the disk reaches the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CopyMode {
    /// Some time later.
    #[default]
    Background,
    /// Before the request is answered.
    WriteBlocking,
}

/// The copying of a disk in use.
#[derive(Debug)]
pub struct Mirror {
    copier: Arc<Copier>,
    tap: Arc<dyn Tap>,
    mode: Arc<Mode>,
    is_ready: AtomicBool,
    completes: AtomicBool,
}

/// Whether requests wait for their copies.
#[derive(Debug, Default)]
struct Mode {
    /// Changes reach the copy before their requests are answered.
    blocks: AtomicBool,
    /// It was so, and the copy was equal.
    was_synced: AtomicBool,
}

#[derive(Debug)]
struct Follower {
    copier: Arc<Copier>,
    mode: Arc<Mode>,
}

impl Tap for Follower {
    fn changed(&self, range: Range<u64>) {
        self.copier.todo.changed(range);
        self.copier.wake();
    }

    fn after(&self, range: Range<u64>) -> Wait<'_> {
        if !self.mode.blocks.load(Ordering::Acquire) {
            return Box::pin(std::future::ready(()));
        }
        Box::pin(async move {
            if self.copier.settle(range).await.is_err() {
                // The job copies it, and meets the error if it lasts.
                self.mode.was_synced.store(false, Ordering::Release);
                self.copier.wake();
            }
        })
    }

    fn resized(&self, size: u64) {
        self.copier.todo.resize(size);
    }
}

impl Mirror {
    /// Begins to note the changes of a disk, in chunks of `chunk_bytes`, for a copy on `target`.
    /// The target is no smaller, and nothing else writes it.
    pub async fn begin(
        source: Arc<LiveDisk>,
        target: Arc<dyn Disk>,
        (chunk_bytes, mode): (u64, CopyMode),
    ) -> Mirror {
        let drained = source.drain().await;
        let copier = Arc::new(Copier::new(source, target, chunk_bytes));
        let mode = Arc::new(Mode {
            blocks: AtomicBool::new(mode == CopyMode::WriteBlocking),
            ..Mode::default()
        });
        let tap: Arc<dyn Tap> = Arc::new(Follower {
            copier: Arc::clone(&copier),
            mode: Arc::clone(&mode),
        });
        drained.add(Arc::clone(&tap));
        Mirror {
            copier,
            tap,
            mode,
            is_ready: AtomicBool::new(false),
            completes: AtomicBool::new(false),
        }
    }

    /// Marks what the copy shall have, whatever changes: the extents that `is_wanted` accepts.
    ///
    /// # Errors
    /// Of the disk; [`cowslip_block::Error::Cancelled`].
    pub async fn mark(&self, job: &Job, is_wanted: impl Fn(&Extent) -> bool) -> Result<()> {
        self.copier.mark(job, is_wanted).await
    }

    /// Whether the copy was equal to the disk once, and follows it.
    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Acquire)
    }

    /// Whether requests have been copied before they are answered since the copy was equal.
    pub fn is_synced(&self) -> bool {
        if !self.mode.blocks.load(Ordering::Acquire) || !self.is_ready() {
            return false;
        }
        // Once so, the rest is that of requests that have not been answered.
        if self.rest_bytes() == 0 {
            self.mode.was_synced.store(true, Ordering::Release);
        }
        self.mode.was_synced.load(Ordering::Acquire)
    }

    /// When changes reach the copy.
    pub fn mode(&self) -> CopyMode {
        match self.mode.blocks.load(Ordering::Acquire) {
            false => CopyMode::Background,
            true => CopyMode::WriteBlocking,
        }
    }

    /// Has changes reach the copy before their requests are answered, from now on.
    pub fn block_writes(&self) {
        self.mode.blocks.store(true, Ordering::Release);
        self.copier.wake();
    }

    /// Bytes that are still to be copied.
    pub fn rest_bytes(&self) -> u64 {
        self.copier.todo.dirty_bytes()
    }

    /// Asks [`Mirror::follow`] to end with a copy that is equal.
    pub fn complete(&self) {
        self.completes.store(true, Ordering::Release);
        self.copier.wake();
    }

    /// Lets [`Mirror::follow`] look at whether its job was cancelled.
    pub fn wake(&self) {
        self.copier.wake();
    }

    /// Copies until the copy is equal, calls `ready` then, and follows the disk until
    /// [`Mirror::complete`]. The job decides on errors.
    ///
    /// # Errors
    /// Of either disk; [`cowslip_block::Error::Cancelled`]. The copy is of no use then.
    pub async fn follow(&self, job: &Job, ready: impl FnOnce()) -> Result<()> {
        job.enter(Stage::Copy);
        let mut ready = Some(ready);
        let mut passes = 0;
        loop {
            job.check()?;
            let rest = self.rest_bytes();
            let completes = self.completes.load(Ordering::Acquire);
            if completes && self.is_ready() && (rest <= REST_BYTES || passes >= PASSES_MAX) {
                return Ok(());
            }
            job.expect(rest.saturating_sub(self.copier.take_again_bytes()));
            // Copies that requests make may be under way, and may have failed.
            if self.copier.pass(job).await? {
                passes += usize::from(completes);
                continue;
            }
            if self.copier.is_done()
                && let Some(ready) = ready.take()
            {
                self.is_ready.store(true, Ordering::Release);
                ready();
                continue;
            }
            // What is to be copied and is under way already is copied again when that has ended.
            let is_due = |is_idle| {
                let goes_on = match self.is_ready() {
                    true => self.completes.load(Ordering::Acquire) || self.rest_bytes() > 0,
                    false => true,
                };
                is_idle && goes_on || job.is_cancelled()
            };
            if let Some(waiting) = self.copier.unless(is_due) {
                waiting.await;
            }
        }
    }

    /// Holds requests back, copies the rest and flushes the copy, which is equal then. Requests
    /// wait meanwhile, so no error is tried again.
    ///
    /// # Errors
    /// As for [`Mirror::follow`].
    pub async fn finish(&self, job: &Job) -> Result<Drained> {
        let drained = self.copier.source().drain().await;
        // Also if all is copied: a copy that a request has made may have failed.
        loop {
            job.expect(self.rest_bytes());
            self.copier.last_pass(job).await?;
            if self.copier.is_done() {
                break;
            }
        }
        job.enter(Stage::Flush);
        self.copier.target().flush().await?;
        // Cancelled until here, it has no effect.
        job.check()?;
        Ok(drained)
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.copier.source().remove(&self.tap);
    }
}
