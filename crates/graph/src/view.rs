//! [`View`]: a disk as it was at one moment, to be read while requests change it.
//!
//! Before a request changes a chunk for the first time, the chunk is copied to a store. A read is
//! answered by the store where it has the chunk, else by the disk; a request waits for reads of
//! the disk that meet it. So a view costs one copy of what changes, and no second chain.
//!
//! | | in the store | on the disk |
//! | --- | --- | --- |
//! | a chunk that nothing has changed | | what the view shows |
//! | one that is being copied | a part | the same: its request waits |
//! | one that was copied | what the view shows | anything |

use std::ops::Range;
use std::sync::Arc;

use cowslip_block::disk::{Disk, DiskFuture, Extent, Features, within};
use cowslip_block::job::Job;
use cowslip_block::sync::{Mutex, Waiters, lock};
use cowslip_block::{Error, IoVecMut, Result};

use crate::copy::Copier;
use crate::live::{Drained, LiveDisk, Tap, Wait};

/// Reads of the disk that are under way.
#[derive(Debug, Default)]
struct Reads {
    ranges: Vec<Range<u64>>,
    ended: Waiters,
}

#[derive(Debug)]
struct Shared {
    copier: Copier,
    reads: Mutex<Reads>,
}

/// A disk as it was when requests were held back. Nothing writes it.
#[derive(Debug)]
pub struct View {
    name: String,
    size: u64,
    shared: Arc<Shared>,
    tap: Arc<dyn Tap>,
}

#[derive(Debug)]
struct Guard(Arc<Shared>);

impl Tap for Guard {
    fn before(&self, range: Range<u64>) -> Wait<'_> {
        Box::pin(async move {
            // The request goes on in any case; after a failure nothing can be read any more.
            if let Err(error) = self.0.copier.settle(range.clone()).await {
                self.0.copier.fail(error);
            }
            self.0.wait_for_reads(&range).await;
        })
    }

    fn changed(&self, _range: Range<u64>) {}
}

/// A read of the disk; it ends when this is dropped.
struct Reading<'a> {
    shared: &'a Shared,
    range: Range<u64>,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut reads = lock(&self.shared.reads);
        if let Some(at) = reads.ranges.iter().position(|range| *range == self.range) {
            reads.ranges.swap_remove(at);
        }
        reads.ended.wake();
    }
}

impl Shared {
    async fn wait_for_reads(&self, range: &Range<u64>) {
        loop {
            let waiting = {
                let mut reads = lock(&self.reads);
                let meets = |read: &Range<u64>| read.start < range.end && range.start < read.end;
                match reads.ranges.iter().any(meets) {
                    true => reads.ended.wait(),
                    false => return,
                }
            };
            waiting.await;
        }
    }

    /// The first part of a range that lies in one place, and the read of the disk if it is there.
    fn place(&self, range: Range<u64>) -> Result<(Range<u64>, Option<Reading<'_>>)> {
        // A request looks at the reads after it has copied what it changes.
        let mut reads = lock(&self.reads);
        self.copier.check()?;
        let (run, is_original) = self.copier.first_run(range);
        let reading = is_original.then(|| {
            reads.ranges.push(run.clone());
            Reading {
                shared: self,
                range: run.clone(),
            }
        });
        Ok((run, reading))
    }

    /// The disk that has a part.
    fn disk_of(&self, reading: &Option<Reading<'_>>) -> Arc<dyn Disk> {
        match reading {
            Some(_) => self.copier.source().behind(),
            None => Arc::clone(self.copier.target()),
        }
    }
}

impl View {
    /// Prepares a view of a disk, with a store for chunks of `chunk_bytes` that are changed. The
    /// store is no smaller, and nothing else writes it. It shows the disk as it is at the moment
    /// of [`View::freeze`].
    pub fn new(
        name: impl Into<String>,
        (source, store): (Arc<LiveDisk>, Arc<dyn Disk>),
        chunk_bytes: u64,
    ) -> View {
        let size = source.size();
        let copier = Copier::new(source, store, chunk_bytes);
        copier.todo.mark(0..size);
        let shared = Arc::new(Shared {
            copier,
            reads: Mutex::default(),
        });
        View {
            name: name.into(),
            size,
            tap: Arc::new(Guard(Arc::clone(&shared))),
            shared,
        }
    }

    /// Takes the moment.
    pub fn freeze(&self, drained: &Drained) {
        debug_assert!(
            Arc::ptr_eq(drained.live(), self.shared.copier.source()),
            "it is the disk that is held"
        );
        drained.add(Arc::clone(&self.tap));
    }

    /// Waits until the job is cancelled; [`View::wake`] has it look.
    ///
    /// # Errors
    /// [`Error::Cancelled`]; a chunk could not be copied.
    pub async fn hold(&self, job: &Job) -> Result<()> {
        loop {
            self.shared.copier.check()?;
            job.check()?;
            match self.shared.copier.unless(|_| job.is_cancelled()) {
                Some(waiting) => waiting.await,
                None => continue,
            }
        }
    }

    /// Has [`View::hold`] look at whether its job was cancelled.
    pub fn wake(&self) {
        self.shared.copier.wake();
    }

    /// Bytes that the store has.
    pub fn stored_bytes(&self) -> u64 {
        let left = self.shared.copier.todo.dirty_bytes();
        self.size.saturating_sub(left)
    }

    /// The error that has made it of no use: a chunk could not be copied.
    pub fn failure(&self) -> Option<Error> {
        self.shared.copier.check().err()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.shared.copier.source().remove(&self.tap);
    }
}

impl Disk for View {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn features(&self) -> Features {
        Features {
            writable: false,
            ..self.shared.copier.source().features()
        }
    }

    fn read(&self, offset: u64, mut buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        Box::pin(async move {
            let len = buf.len() as u64;
            within(self.size, offset, len)?;
            let (mut at, end, mut done) = (offset, offset + len, IoVecMut::default());
            while at < end {
                let (run, reading) = self.shared.place(at..end)?;
                let part = buf.split_to((run.end - run.start) as usize);
                let read = self.shared.disk_of(&reading).read(run.start, part).await?;
                drop(reading);
                done.append(read);
                at = run.end;
            }
            Ok(done)
        })
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            within(self.size, offset, len)?;
            let (run, reading) = self.shared.place(offset..offset.saturating_add(len))?;
            let disk = self.shared.disk_of(&reading);
            let mut extents = disk.extents(run.start, run.end - run.start, max).await?;
            drop(reading);
            // What lies behind may be elsewhere.
            extents.retain(|extent| extent.start < run.end);
            if let Some(last) = extents.last_mut() {
                last.len = last.len.min(run.end - last.start);
            }
            Ok(extents)
        })
    }
}
