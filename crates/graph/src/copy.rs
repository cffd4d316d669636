//! [`Copier`]: copies chunks of a disk in use, each once at a time.
//!
//! A chunk is taken out of the map of what is to be copied before it is read. Of two writes of one
//! chunk to the target the older could come last; so what is being copied is not taken again.

use std::ops::Range;
use std::sync::Arc;

use cowslip_block::disk::{Disk, Extent, ZeroOptions};
use cowslip_block::file::{Durability, Space};
use cowslip_block::job::{Cost, Job, PIECE_BYTES, Pieces, Side, Verdict};
use cowslip_block::sync::{Mutex, Waiters, lock};
use cowslip_block::{BufMut, Error, Result};
use cowslip_queue::Pending;

use crate::dirty::DirtyMap;
use crate::live::LiveDisk;

/// Chunks that are copied at a time: 256 KiB of the usual ones. A request that needs one of them
/// waits for the whole piece; so do all others while the thread that serves them makes the copy.
const PIECE_CHUNKS: u64 = 4;
/// Extents that are looked at at a time.
const EXTENTS_AT_ONCE: usize = 256;

/// Chunks of a disk on their way to another one.
#[derive(Debug)]
pub struct Copier {
    source: Arc<LiveDisk>,
    target: Arc<dyn Disk>,
    /// Chunks that are to be copied.
    pub todo: Arc<DirtyMap>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Ranges whose copies are under way.
    copying: Vec<Range<u64>>,
    /// Woken when a copy ends, something is to be copied, or a user asks for something.
    changed: Waiters,
    /// The first error of a copy that no job has made, and that cannot be made again.
    failure: Option<Error>,
    /// Bytes whose copies have failed, and that are to be copied again.
    again_bytes: u64,
}

/// An error of a copy, with the disk that it is of.
type Failed = (Side, Error);

/// The next step for a range.
enum Step {
    Copy(Range<u64>),
    Wait(Pending<()>),
    Nothing,
}

/// A copy under way; it ends when this is dropped.
struct Copying<'a> {
    copier: &'a Copier,
    range: Range<u64>,
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.copier.state);
        state.copying.retain(|range| *range != self.range);
        state.changed.wake();
    }
}

impl Copier {
    /// A copier that has nothing to copy yet.
    pub fn new(source: Arc<LiveDisk>, target: Arc<dyn Disk>, chunk_bytes: u64) -> Copier {
        let todo = DirtyMap::new(source.size(), chunk_bytes);
        Copier {
            source,
            target,
            todo,
            state: Mutex::default(),
        }
    }

    /// The disk that is copied.
    pub fn source(&self) -> &Arc<LiveDisk> {
        &self.source
    }

    /// The disk that is written.
    pub fn target(&self) -> &Arc<dyn Disk> {
        &self.target
    }

    /// Wakes those that wait for a change.
    pub fn wake(&self) {
        lock(&self.state).changed.wake();
    }

    /// Returns the wait for a change, unless a copy has failed or `is_due` says that there was one;
    /// it gets whether no copy is under way.
    pub fn unless(&self, is_due: impl FnOnce(bool) -> bool) -> Option<Pending<()>> {
        let mut state = lock(&self.state);
        let waits = state.failure.is_none() && !is_due(state.copying.is_empty());
        waits.then(|| state.changed.wait())
    }

    /// Whether all is copied.
    pub fn is_done(&self) -> bool {
        let state = lock(&self.state);
        state.copying.is_empty() && self.todo.dirty_bytes() == 0
    }

    /// Marks what the copy shall have at first: the extents that `is_wanted` accepts.
    ///
    /// # Errors
    /// Of the source; [`Error::Cancelled`].
    pub async fn mark(&self, job: &Job, is_wanted: impl Fn(&Extent) -> bool) -> Result<()> {
        let source = self.source.behind();
        let (mut at, size) = (0, source.size());
        while at < size {
            job.check()?;
            let extents = source.extents(at, size - at, EXTENTS_AT_ONCE).await?;
            for extent in extents {
                at = extent.start + extent.len;
                if is_wanted(&extent) {
                    self.todo.mark(extent.start..at);
                }
            }
        }
        Ok(())
    }

    /// Copies each chunk that is to be copied and is not under way, from the first to the last,
    /// once. Returns whether there was one. What has failed is to be copied again, unless the
    /// job's user has errors reported.
    ///
    /// # Errors
    /// Of either disk; [`Error::Cancelled`].
    pub async fn pass(&self, job: &Job) -> Result<bool> {
        self.pass_with(job, |side, error| job.verdict(side, error))
            .await
    }

    /// The same, with all errors reported.
    ///
    /// # Errors
    /// Of either disk; [`Error::Cancelled`].
    pub async fn last_pass(&self, job: &Job) -> Result<bool> {
        self.pass_with(job, |_, _| Verdict::Report).await
    }

    async fn pass_with(
        &self,
        job: &Job,
        verdict: impl Fn(Side, &Error) -> Verdict,
    ) -> Result<bool> {
        let mut chunks = Chunks {
            copier: self,
            job,
            at: 0,
        };
        let verdict = &verdict;
        job.run_each(&mut chunks, |copying| async move {
            let range = copying.range.clone();
            let copied = self.copy(range.clone(), Some(job)).await;
            let outcome = match copied {
                Ok(()) => {
                    job.done(range.end - range.start);
                    Ok(())
                }
                Err((side, error)) => match verdict(side, &error) {
                    Verdict::Report => Err(error),
                    Verdict::Ignore | Verdict::Stop => {
                        self.todo.mark(range.clone());
                        lock(&self.state).again_bytes += range.end - range.start;
                        Ok(())
                    }
                },
            };
            drop(copying);
            outcome
        })
        .await?;
        match lock(&self.state).failure.take() {
            Some(error) => Err(error),
            None => Ok(chunks.at > 0),
        }
    }

    /// Takes the number of bytes whose copies have failed since this was last called; the job
    /// expects them already.
    pub fn take_again_bytes(&self) -> u64 {
        std::mem::take(&mut lock(&self.state).again_bytes)
    }

    /// Has the next [`Copier::pass`] fail: what was to be copied cannot be copied any more.
    pub fn fail(&self, error: Error) {
        lock(&self.state).failure.get_or_insert(error);
        self.wake();
    }

    /// Whether nothing has failed for good.
    ///
    /// # Errors
    /// The error that [`Copier::fail`] was called with.
    pub fn check(&self) -> Result<()> {
        match &lock(&self.state).failure {
            None => Ok(()),
            Some(error) => Err(error.duplicate()),
        }
    }

    /// The first part of a range that is copied, or is not, and whether it is not.
    pub fn first_run(&self, range: Range<u64>) -> (Range<u64>, bool) {
        let state = lock(&self.state);
        let mut runs = self.todo.runs(range.clone(), 1);
        let Some((mut run, is_original)) = runs.pop() else {
            return (range, false);
        };
        let inside = |other: &&Range<u64>| other.contains(&run.start);
        if let Some(copying) = state.copying.iter().find(inside) {
            return (run.start..copying.end.min(range.end), true);
        }
        for other in &state.copying {
            if run.start < other.start {
                run.end = run.end.min(other.start);
            }
        }
        (run, is_original)
    }

    /// Copies what of a range is to be copied, and waits for copies of it that are under way.
    ///
    /// # Errors
    /// Of either disk: what could not be copied is still to be copied.
    pub async fn settle(&self, range: Range<u64>) -> Result<()> {
        loop {
            match self.step(&range) {
                Step::Nothing => return Ok(()),
                Step::Wait(waiting) => waiting.await,
                Step::Copy(part) => {
                    let copying = Copying {
                        copier: self,
                        range: part.clone(),
                    };
                    if let Err((_, error)) = self.copy(part.clone(), None).await {
                        self.todo.mark(part);
                        drop(copying);
                        return Err(error);
                    }
                    drop(copying);
                }
            }
        }
    }

    fn piece_bytes(&self) -> u64 {
        self.todo
            .chunk_bytes()
            .saturating_mul(PIECE_CHUNKS)
            .min(PIECE_BYTES)
    }

    fn step(&self, range: &Range<u64>) -> Step {
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            return Step::Nothing;
        }
        let chunk = self.todo.chunk_bytes();
        let start = range.start & !(chunk - 1);
        let most = (range.end - start).next_multiple_of(chunk);
        let most = most.min(self.piece_bytes());
        match self.take(&mut state, start, most) {
            Some(part) if part.start < range.end => Step::Copy(part),
            taken => {
                if let Some(part) = taken {
                    // It lies behind the range.
                    self.todo.mark(part.clone());
                    state.copying.retain(|other| *other != part);
                }
                let meets = |other: &Range<u64>| other.start < range.end && start < other.end;
                match state.copying.iter().any(meets) {
                    true => Step::Wait(state.changed.wait()),
                    false => Step::Nothing,
                }
            }
        }
    }

    /// Takes the next chunks that are to be copied, and that nobody copies.
    fn take(&self, state: &mut State, from: u64, most: u64) -> Option<Range<u64>> {
        let mut at = from;
        loop {
            let mut run = self.todo.next(at, most)?;
            let inside = |other: &&Range<u64>| other.contains(&run.start);
            if let Some(other) = state.copying.iter().find(inside) {
                at = other.end;
                continue;
            }
            for other in &state.copying {
                if run.start < other.start {
                    run.end = run.end.min(other.start);
                }
            }
            self.todo.unmark(run.clone());
            state.copying.push(run.clone());
            return Some(run);
        }
    }

    /// Copies a range: in the place that the job has for that, or here, if a request waits for it.
    async fn copy(&self, range: Range<u64>, job: Option<&Job>) -> std::result::Result<(), Failed> {
        let source = self.source.behind();
        let end = range.end.min(source.size());
        let mut at = range.start;
        while at < end {
            let extents = source.extents(at, end - at, EXTENTS_AT_ONCE).await;
            let extents = extents.map_err(|error| (Side::Source, error))?;
            for extent in extents {
                let to = (extent.start + extent.len).min(end);
                let target = Arc::clone(&self.target);
                match (extent.zero, job) {
                    (true, _) => zero(&*target, at..to).await?,
                    (false, None) => copy_data(&*source, &*target, at..to).await?,
                    (false, Some(job)) => {
                        let source = Arc::clone(&source);
                        let copying = async move { copy_data(&*source, &*target, at..to).await };
                        job.aside(copying).await?;
                    }
                }
                at = to;
            }
        }
        Ok(())
    }
}

async fn zero(target: &dyn Disk, range: Range<u64>) -> std::result::Result<(), Failed> {
    let options = ZeroOptions {
        space: Space::Release,
        ..ZeroOptions::default()
    };
    let zeroed = target.zero(range.start, range.end - range.start, options);
    zeroed.await.map_err(|error| (Side::Target, error))
}

async fn copy_data(
    source: &dyn Disk,
    target: &dyn Disk,
    range: Range<u64>,
) -> std::result::Result<(), Failed> {
    let buf = BufMut::for_overwrite((range.end - range.start) as usize);
    let data = source.read(range.start, buf.into()).await;
    let data = BufMut::from(data.map_err(|error| (Side::Source, error))?).freeze();
    let written = target.write(range.start, data.into(), Durability::Cached);
    written.await.map_err(|error| (Side::Target, error))
}

/// The chunks of a pass.
struct Chunks<'a> {
    copier: &'a Copier,
    job: &'a Job,
    at: u64,
}

impl<'a> Pieces for Chunks<'a> {
    type Piece = Copying<'a>;

    async fn next(&mut self) -> Result<Option<(Copying<'a>, Cost)>> {
        let copier = self.copier;
        let most = copier.piece_bytes();
        let Some(first) = copier.todo.next(self.at, most) else {
            return Ok(None);
        };
        // A request would have to wait for a chunk that is taken and waits for the job's pace.
        self.job.begin(first.end - first.start).await?;
        let taken = copier.take(&mut lock(&copier.state), self.at, most);
        Ok(taken.map(|range| {
            self.at = range.end;
            // It is done when it is copied.
            let cost = Cost {
                moved_bytes: 0,
                done_bytes: 0,
            };
            (Copying { copier, range }, cost)
        }))
    }
}
