//! [`Job`]: a long operation as its caller sees it: progress, pace and cancellation.
//!
//! The caller passes a job to the operation and keeps a handle of it. The operation waits for
//! permission before each piece of work ([`Job::begin`]) and reports it when done ([`Job::done`]);
//! the result is the operation's own. A job has no thread and no clock: the caller's [`Attendant`]
//! shows the progress, sets the pace, and may have parts of the work done on a thread of its own.
//! Cancellation is a flag; the operation fails with [`Error::Cancelled`] and leaves a sound state,
//! which its documentation names.

use std::fmt;
use std::future::{Future, poll_fn};
use std::ops::{ControlFlow, Range};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::Poll;

use cowslip_queue::pending;

use crate::joins::Set;
use crate::{Error, Result};

/// Bytes of one write of a job.
#[doc(hidden)]
pub const PIECE_BYTES: u64 = 2 << 20;
/// Number of a job's writes that are in flight at the same time.
const IN_FLIGHT: usize = 4;

/// Stage of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Preparation: nothing has been written.
    Begin,
    /// Allocation of space.
    Allocate,
    /// Writing of zeroes.
    WriteZeroes,
    /// Writing of tables.
    Tables,
    /// Rewriting of reference counts.
    Counts,
    /// Derivation of keys from passphrases.
    Keys,
    /// Copying of data.
    Copy,
    /// Flushing of the results.
    Flush,
    /// Undoing of the work done.
    Undo,
}

impl Stage {
    const ALL: [Stage; 9] = [
        Stage::Begin,
        Stage::Allocate,
        Stage::WriteZeroes,
        Stage::Tables,
        Stage::Counts,
        Stage::Keys,
        Stage::Copy,
        Stage::Flush,
        Stage::Undo,
    ];

    /// The stage's name in one word, for machine-readable output.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Begin => "begin",
            Stage::Allocate => "allocate",
            Stage::WriteZeroes => "write-zeroes",
            Stage::Tables => "tables",
            Stage::Counts => "refcounts",
            Stage::Keys => "keys",
            Stage::Copy => "copy",
            Stage::Flush => "flush",
            Stage::Undo => "undo",
        }
    }
}

/// Progress of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The stage that the job is in.
    pub stage: Stage,
    /// Bytes that are done, out of `total_bytes`.
    pub done_bytes: u64,
    /// Bytes of the whole job, as far as known.
    pub total_bytes: u64,
}

/// A delay to await, or a part of a job's work.
#[doc(hidden)]
pub type Moment = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The disk of a copy that an error is of.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The disk that is read.
    Source,
    /// The disk that is written.
    Target,
}

/// Answer to an error of a disk.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The job fails.
    Report,
    /// The job goes on without what has failed, or tries it again later.
    Ignore,
    /// The same piece of work is tried again when its user lets the job go on.
    Stop,
}

/// Observer of a job, which shows its progress, sets its pace, decides on errors and may have a
/// place for parts of its work.
#[doc(hidden)]
pub trait Attendant: Send + Sync {
    /// Reports the progress after each piece of work.
    fn progress(&self, _progress: Progress) {}

    /// Returns `None` if the job may move `bytes` more bytes now, and counts them. Otherwise
    /// returns a delay after which the job asks again; it must be short, since the job may be
    /// cancelled.
    fn pace(&self, _bytes: u64) -> Option<Moment> {
        None
    }

    /// Runs a part of the work on another thread, to its end; returns it where there is none.
    fn run_aside(&self, work: Moment) -> Option<Moment> {
        Some(work)
    }

    /// Decides what an error of a disk means. After [`Verdict::Stop`] no piece of work may begin
    /// ([`Attendant::pace`]) until the user lets the job go on.
    fn failed(&self, _side: Side, _error: &Error) -> Verdict {
        Verdict::Report
    }
}

/// A long operation. Clones share its state.
#[derive(Clone, Default)]
pub struct Job(Arc<Shared>);

#[derive(Default)]
struct Shared {
    cancelled: AtomicBool,
    stage: AtomicU8,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    attendant: Option<Box<dyn Attendant>>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Job({:?})", self.progress())
    }
}

impl Job {
    /// A job with an attendant. [`Job::default`] is a job without one.
    #[doc(hidden)]
    pub fn attended(attendant: impl Attendant + 'static) -> Job {
        Job(Arc::new(Shared {
            attendant: Some(Box::new(attendant)),
            ..Shared::default()
        }))
    }

    /// Requests cancellation. The operation ends at the next piece of its work.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
    }

    /// Whether cancellation was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }

    /// Stage and bytes, now.
    pub fn progress(&self) -> Progress {
        let stage = self.0.stage.load(Ordering::Acquire);
        Progress {
            stage: Stage::ALL[stage as usize],
            done_bytes: self.0.done_bytes.load(Ordering::Acquire),
            total_bytes: self.0.total_bytes.load(Ordering::Acquire),
        }
    }

    fn report(&self) {
        if let Some(attendant) = &self.0.attendant {
            attendant.progress(self.progress());
        }
    }

    /// For the operation: adds `bytes` to the total.
    #[doc(hidden)]
    pub fn expect(&self, bytes: u64) {
        self.0.total_bytes.fetch_add(bytes, Ordering::AcqRel);
    }

    /// For an operation that starts over by another method: resets the total and the bytes done.
    #[doc(hidden)]
    pub fn forget(&self) {
        self.0.total_bytes.store(0, Ordering::Release);
        self.0.done_bytes.store(0, Ordering::Release);
    }

    /// For the operation: enters a stage.
    #[doc(hidden)]
    pub fn enter(&self, stage: Stage) {
        self.0.stage.store(stage as u8, Ordering::Release);
    }

    /// For the operation: waits until `bytes` more bytes may be moved.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    #[doc(hidden)]
    pub async fn begin(&self, bytes: u64) -> Result<()> {
        self.check()?;
        while let Some(moment) = self.0.attendant.as_ref().and_then(|a| a.pace(bytes)) {
            moment.await;
            self.check()?;
        }
        Ok(())
    }

    /// For the operation: runs a part of its work where the attendant has a place for that, else
    /// here. The part goes on to its end if this future is dropped meanwhile.
    #[doc(hidden)]
    pub async fn aside<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> T {
        let Some(attendant) = &self.0.attendant else {
            return work.await;
        };
        let (completer, result) = pending();
        let work = async move { completer.complete(work.await) };
        if let Some(work) = attendant.run_aside(Box::pin(work)) {
            work.await;
        }
        result.await
    }

    /// For the operation: what an error of a disk means. Without an attendant, and after a
    /// cancellation, the operation fails.
    #[doc(hidden)]
    pub fn verdict(&self, side: Side, error: &Error) -> Verdict {
        match &self.0.attendant {
            Some(attendant) if !self.is_cancelled() => attendant.failed(side, error),
            _ => Verdict::Report,
        }
    }

    /// For the operation: fails if cancellation was requested.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    #[doc(hidden)]
    pub fn check(&self) -> Result<()> {
        match self.is_cancelled() {
            true => Err(Error::Cancelled),
            false => Ok(()),
        }
    }

    /// For the operation: reports `bytes` more bytes as done.
    #[doc(hidden)]
    pub fn done(&self, bytes: u64) {
        let done = self.0.done_bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
        // The total was an estimate: it never falls below the bytes done.
        self.0.total_bytes.fetch_max(done, Ordering::AcqRel);
        self.report();
    }

    /// Runs `work` for each piece, several at a time. All pieces that were started have ended when
    /// it returns.
    ///
    /// # Errors
    /// The first error of a piece or of finding one; [`Error::Cancelled`].
    #[doc(hidden)]
    pub async fn run_each<P: Pieces, F: Future<Output = Result<()>>>(
        &self,
        pieces: &mut P,
        work: impl Fn(P::Piece) -> F,
    ) -> Result<()> {
        let mut in_flight = Set::default();
        let (mut outcome, mut is_more) = (Ok(()), true);
        loop {
            while outcome.is_ok() && is_more && in_flight.len() < IN_FLIGHT {
                match self.beside(pieces.next(), &mut in_flight).await {
                    Ok(None) => is_more = false,
                    Ok(Some((piece, cost))) => {
                        let begin = self.begin(cost.moved_bytes);
                        outcome = self.beside(begin, &mut in_flight).await;
                        if outcome.is_ok() {
                            let work = work(piece);
                            in_flight.push(async move { (work.await, cost) });
                        }
                    }
                    Err(error) => outcome = Err(error),
                }
            }
            match in_flight.next().await {
                None => return outcome,
                Some(ended) => outcome = outcome.and(self.ended(ended)),
            }
        }
    }

    /// Waits for what a further piece needs, while the pieces in flight go on and are reported.
    async fn beside<T, F: Future<Output = (Result<()>, Cost)>>(
        &self,
        need: impl Future<Output = Result<T>>,
        in_flight: &mut Set<F>,
    ) -> Result<T> {
        let mut need = pin!(need);
        loop {
            let first = poll_fn(|context| {
                if let Poll::Ready(outcome) = need.as_mut().poll(context) {
                    return Poll::Ready(ControlFlow::Break(outcome));
                }
                match in_flight.poll_next(context) {
                    Poll::Ready(Some((_, ended))) => Poll::Ready(ControlFlow::Continue(ended)),
                    Poll::Ready(None) | Poll::Pending => Poll::Pending,
                }
            });
            match first.await {
                ControlFlow::Break(outcome) => return outcome,
                ControlFlow::Continue(ended) => self.ended(ended)?,
            }
        }
    }

    /// Reports a piece that has ended.
    fn ended(&self, (outcome, cost): (Result<()>, Cost)) -> Result<()> {
        outcome.map(|()| self.done(cost.done_bytes))
    }

    /// Runs `piece` for each [`PIECE_BYTES`] of a range, several at a time, with its offset and
    /// length in bytes. All pieces that were started have ended when it returns.
    ///
    /// # Errors
    /// The first error of a piece; [`Error::Cancelled`].
    #[doc(hidden)]
    pub async fn run_pieces<F: Future<Output = Result<()>>>(
        &self,
        range: Range<u64>,
        piece: impl Fn(u64, u64) -> F,
    ) -> Result<()> {
        let mut pieces = Equal(range);
        self.run_each(&mut pieces, |(at, len)| piece(at, len)).await
    }
}

/// Cost of a piece of work.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Bytes that the piece moves; the pace counts them.
    pub moved_bytes: u64,
    /// Bytes that the piece adds to the progress.
    pub done_bytes: u64,
}

impl Cost {
    /// The cost of moving `bytes` bytes.
    pub fn moving(bytes: u64) -> Cost {
        Cost {
            moved_bytes: bytes,
            done_bytes: bytes,
        }
    }
}

/// A source of pieces of work.
#[doc(hidden)]
pub trait Pieces {
    /// Type of a piece.
    type Piece;

    /// Finds the next piece and its cost; `None` after the last one.
    fn next(&mut self) -> impl Future<Output = Result<Option<(Self::Piece, Cost)>>> + Send;
}

/// A range split into pieces of [`PIECE_BYTES`].
struct Equal(Range<u64>);

impl Pieces for Equal {
    type Piece = (u64, u64);

    async fn next(&mut self) -> Result<Option<((u64, u64), Cost)>> {
        let at = self.0.start;
        let len = PIECE_BYTES.min(self.0.end.saturating_sub(at));
        self.0.start += len;
        Ok((len > 0).then_some(((at, len), Cost::moving(len))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use futures_util::task::noop_waker_ref;
    use std::sync::Mutex;
    use std::task::{Context, Poll};

    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<u64>>>, Arc<Mutex<bool>>);

    impl Attendant for Recorder {
        fn progress(&self, progress: Progress) {
            self.0.lock().unwrap().push(progress.done_bytes);
        }

        fn pace(&self, bytes: u64) -> Option<Moment> {
            assert!(bytes <= PIECE_BYTES);
            let mut asked = self.1.lock().unwrap();
            *asked = !*asked;
            // Each piece has to ask twice before it may start.
            asked.then(|| Box::pin(std::future::ready(())) as Moment)
        }
    }

    #[test]
    fn pieces_are_reported_and_cover_the_range() {
        let recorder = Recorder::default();
        let job = Job::attended(recorder.clone());
        let len = 3 * PIECE_BYTES + 5;
        job.expect(len);
        let seen = Mutex::new(Vec::new());
        let work = job.run_pieces(7..7 + len, |at, len| {
            seen.lock().unwrap().push(at..at + len);
            std::future::ready(Ok(()))
        });
        work.now_or_never().unwrap().unwrap();
        let seen = seen.into_inner().unwrap();
        assert_eq!(seen.first().unwrap().start, 7);
        assert!(seen.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert_eq!(seen.last().unwrap().end, 7 + len);
        assert_eq!(recorder.0.lock().unwrap().last(), Some(&len));
        assert_eq!(job.progress().total_bytes, len);
    }

    #[test]
    fn a_cancelled_job_begins_nothing_and_an_error_waits_for_the_others() {
        let job = Job::default();
        let begun = AtomicU64::new(0);
        let work = job.run_pieces(0..100 * PIECE_BYTES, |at, _| {
            begun.fetch_add(1, Ordering::Relaxed);
            if at == 2 * PIECE_BYTES {
                job.cancel();
            }
            std::future::ready(Ok(()))
        });
        let outcome = work.now_or_never().unwrap();
        assert!(matches!(outcome, Err(Error::Cancelled)), "{outcome:?}");
        assert_eq!(begun.load(Ordering::Relaxed), 3);
        assert_eq!(job.progress().done_bytes, 3 * PIECE_BYTES);

        let (job, ended) = (Job::default(), AtomicU64::new(0));
        let work = job.run_pieces(0..9 * PIECE_BYTES, |at, _| {
            let ended = &ended;
            async move {
                ended.fetch_add(1, Ordering::Relaxed);
                match at {
                    0 => Err(Error::Invalid("no".to_string())),
                    _ => Ok(()),
                }
            }
        });
        assert!(work.now_or_never().unwrap().is_err());
        assert_eq!(ended.load(Ordering::Relaxed), IN_FLIGHT as u64);
    }

    /// Lets a piece begin only after the one before it was reported.
    #[derive(Clone, Default)]
    struct OneByOne(Arc<AtomicU64>, Arc<AtomicU64>);

    impl Attendant for OneByOne {
        fn progress(&self, progress: Progress) {
            self.0.store(progress.done_bytes, Ordering::Relaxed);
        }

        fn pace(&self, bytes: u64) -> Option<Moment> {
            let OneByOne(done, begun) = self.clone();
            if begun.load(Ordering::Relaxed) == done.load(Ordering::Relaxed) {
                begun.fetch_add(bytes, Ordering::Relaxed);
                return None;
            }
            let mut polls = 0..3;
            Some(Box::pin(std::future::poll_fn(move |context| {
                context.waker().wake_by_ref();
                let is_reported = begun.load(Ordering::Relaxed) == done.load(Ordering::Relaxed);
                match is_reported || polls.next().is_none() {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            })))
        }
    }

    #[test]
    fn pieces_in_flight_go_on_and_are_reported_while_the_next_waits() {
        let job = Job::attended(OneByOne::default());
        let mut work = pin!(job.run_pieces(0..3 * PIECE_BYTES, |_, _| async { Ok(()) }));
        let mut context = Context::from_waker(noop_waker_ref());
        let outcome = (0..100).find_map(|_| match work.as_mut().poll(&mut context) {
            Poll::Ready(outcome) => Some(outcome),
            Poll::Pending => None,
        });
        outcome
            .expect("the next piece waits for one that nobody polls")
            .unwrap();
        assert_eq!(job.progress().done_bytes, 3 * PIECE_BYTES);
    }
}
