//! Doing it: pieces are read together and written in their order; nothing here decides what.
//!
//! One task drives all of it. A piece is under way from the beginning of its read to the end of its
//! write, and no more of them than [`Options::in_flight`]; those that are read wait for their turn,
//! and until those before them have their space, so that it is taken in the order of the guest.
//! Compressed pieces are stored one after the other for the same reason; the work is in
//! compressing, which the workers do for all pieces at once.

use std::collections::BTreeMap;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};

use cowslip_block::joins::{Set, join_all};
use cowslip_queue::{Buf, BufMut};

use super::line::Line;
use super::pieces::{CutOptions, Cutter, Piece, Work};
use super::survey::{Feed, SourcePlace, Span};
use super::zeroes::{Sieve, between};
use super::{
    Converted, Failure, Form, OnReadError, Options, Order, Outcome, PIECE_BYTES, SECTOR_BYTES,
    Sources, TargetContent, Watch, go_on,
};
use crate::file::host::copy_range;
use crate::image::{Image, Space, ZeroOptions};
use crate::job::Job;
use crate::units::{pieces, round_down, round_up};
use crate::{Error, Result};
use cowslip_qcow2::{OnAllocated, Packed};

/// A target's cluster is taken apart from this size on: writing zeroes around a little data costs
/// more than a request.
const UNIT_BYTES_MAX: u64 = 64 << 10;
/// Extents are asked for while fewer than this are known.
const KNOWN_MIN: usize = 1024;

/// A conversion under way.
pub struct Run<'a> {
    sources: &'a Sources<'a>,
    target: &'a Image,
    options: Options,
    job: &'a Job,
    watch: &'a Watch<'a>,
    /// Units of the target that are written as wholes.
    unit_bytes: u64,
    sieve: Option<Sieve>,
    line: Line,
}

/// A piece that is ready to be written.
enum Ready {
    Plain {
        data: Buf,
        start: u64,
        ranges: Vec<Range<u64>>,
        zeroes: Vec<Range<u64>>,
    },
    Packed {
        runs: Vec<Vec<Packed>>,
        len: u64,
        zeroes: Vec<Range<u64>>,
    },
    Zero(Range<u64>),
    Offload(Range<u64>, SourcePlace),
}

enum Event {
    Asked(Outcome<(Vec<Span>, u64)>),
    Read(u64, Outcome<(Ready, Converted)>),
    Written(Outcome<Converted>),
}

type Task<'a> = dyn Future<Output = Event> + Send + 'a;

/// The pieces in flight, and those that wait.
struct Flow<'a> {
    feed: Feed<'a>,
    cutter: Cutter,
    asking: bool,
    tasks: Set<Task<'a>>,
    /// Pieces that are being read, wait or are being written.
    live: usize,
    /// The number of the next piece, and of the next one to be written.
    begun: u64,
    turn: u64,
    read: BTreeMap<u64, Ready>,
    /// Compressed pieces that are being stored: one at a time.
    storing: usize,
    outcome: Outcome<Converted>,
}

impl Converted {
    fn add(&mut self, other: Converted) {
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.compressed_bytes += other.compressed_bytes;
        self.zeroed_bytes += other.zeroed_bytes;
        self.offloaded_bytes += other.offloaded_bytes;
        self.lost_bytes += other.lost_bytes;
    }
}

impl<'a> Run<'a> {
    /// A conversion that has not begun.
    pub fn new(
        (sources, target): (&'a Sources<'a>, &'a Image),
        options: Options,
        (job, watch): (&'a Job, &'a Watch<'a>),
    ) -> Run<'a> {
        let fine = target.preferred_block_bytes().min(UNIT_BYTES_MAX);
        let unit_bytes = match (options.form, options.unwritten) {
            (Form::Compressed, _) => target.cluster_bytes(),
            // Ranges around data read as zeroes in source and target, and may be written too.
            (Form::Plain, TargetContent::Zeroes) => fine,
            (Form::Plain, TargetContent::Unknown | TargetContent::Backing(_)) => SECTOR_BYTES,
        };
        let sieve = (options.sparse_bytes > 0).then(|| match options.form {
            Form::Plain => Sieve::new(options.sparse_bytes, unit_bytes),
            // A cluster is compressed as a whole.
            Form::Compressed => Sieve::new(1, unit_bytes),
        });
        Run {
            sources,
            target,
            options,
            job,
            watch,
            unit_bytes,
            sieve,
            line: Line::default(),
        }
    }

    /// Copies all that `feed` names; returns totals, or the first failure when all I/O has ended.
    pub async fn run(&'a self, feed: Feed<'a>) -> Outcome<Converted> {
        let size = self.sources.size();
        let mut flow = Flow {
            feed,
            cutter: Cutter::new(CutOptions {
                piece_bytes: PIECE_BYTES,
                unit_bytes: self.unit_bytes,
                size: self.sources.written_end(self.options.last_sector),
            }),
            asking: false,
            tasks: Set::default(),
            live: 0,
            begun: 0,
            turn: 0,
            read: BTreeMap::new(),
            storing: 0,
            outcome: Ok(Converted {
                size,
                ..Converted::default()
            }),
        };
        loop {
            self.begin(&mut flow);
            let Some(event) = flow.tasks.next().await else {
                return flow.outcome;
            };
            match event {
                Event::Asked(asked) => {
                    flow.asking = false;
                    match asked {
                        Ok(spans) => flow.feed.add(spans),
                        Err(failure) => flow.fail(failure),
                    }
                }
                Event::Read(number, Ok((ready, lost))) => {
                    flow.tally(lost);
                    flow.read.insert(number, ready);
                }
                Event::Read(_, Err(failure)) => {
                    flow.live -= 1;
                    flow.fail(failure);
                }
                Event::Written(written) => {
                    flow.live -= 1;
                    flow.storing = 0;
                    match written {
                        Ok(done) => flow.tally(done),
                        Err(failure) => flow.fail(failure),
                    }
                }
            }
            self.write_ready(&mut flow);
        }
    }

    /// Begins as much as may be under way.
    fn begin(&'a self, flow: &mut Flow<'a>) {
        while flow.outcome.is_ok() && flow.live < self.options.in_flight {
            let Some(work) = flow.next_work() else { break };
            let number = flow.begun;
            flow.begun += 1;
            flow.live += 1;
            match work {
                Work::Copy(piece) => flow.add(Box::pin(async move {
                    Event::Read(number, self.read_piece(piece).await)
                })),
                Work::Zero(range) => drop(flow.read.insert(number, Ready::Zero(range))),
                Work::Offload(range, place) => {
                    drop(flow.read.insert(number, Ready::Offload(range, place)));
                }
            }
        }
        self.write_ready(flow);
        if flow.outcome.is_ok()
            && !flow.asking
            && flow.feed.known() < KNOWN_MIN
            && let Some((asker, at)) = flow.feed.to_ask()
        {
            flow.asking = true;
            flow.add(Box::pin(async move { Event::Asked(asker.ask(at).await) }));
        }
    }

    /// Begins the writes of pieces that are read and next in order.
    fn write_ready(&'a self, flow: &mut Flow<'a>) {
        loop {
            if self.options.form == Form::Compressed && flow.storing > 0 {
                return;
            }
            let next = match self.options.order {
                Order::Guest => flow.read.remove(&flow.turn),
                Order::Any => flow.read.pop_first().map(|(_, ready)| ready),
            };
            let Some(ready) = next else { return };
            let number = flow.turn;
            flow.turn += 1;
            if flow.outcome.is_err() {
                flow.live -= 1;
                continue;
            }
            flow.storing += 1;
            flow.add(Box::pin(async move {
                Event::Written(self.write_in_turn(number, ready).await)
            }));
        }
    }

    /// Reads a piece, and finds out what of it is to be written; compresses that.
    async fn read_piece(&self, piece: Piece) -> Outcome<(Ready, Converted)> {
        let Range { start, end } = piece.range;
        go_on(self.job.begin(end - start).await)?;
        let (data, lost_bytes) = self.read_salvaging(start, end - start).await?;
        let mut done = Converted {
            read_bytes: end - start,
            lost_bytes,
            ..Converted::default()
        };
        let data = data.freeze();
        let (mut ranges, mut zeroes) = (Vec::new(), Vec::new());
        for part in &piece.data {
            let bytes = &data[(part.start - start) as usize..(part.end - start) as usize];
            match &self.sieve {
                None => ranges.push(part.clone()),
                Some(sieve) => {
                    let found = sieve.data(part.start, bytes);
                    if self.options.unwritten != TargetContent::Zeroes {
                        zeroes.extend(between(part.clone(), &found));
                    }
                    ranges.extend(found);
                }
            }
        }
        let len = |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
        // The bytes that need no writing are done.
        let read_only = len(&piece.data) - len(&ranges) - len(&zeroes);
        self.job.done(read_only);
        if self.options.form == Form::Plain {
            let ready = Ready::Plain {
                data,
                start,
                ranges,
                zeroes,
            };
            return Ok((ready, done));
        }
        let packed = ranges.iter().map(|range| {
            let len = (range.end - range.start) as usize;
            let part = data.slice((range.start - start) as usize, len);
            self.target.pack(range.start, part)
        });
        let runs: Result<Vec<_>> = join_all(packed).await.into_iter().collect();
        let runs = runs.map_err(|error| Failure::Writing(start, error))?;
        done.compressed_bytes = runs.iter().flatten().map(Packed::host_bytes).sum();
        let len = len(&ranges);
        Ok((Ready::Packed { runs, len, zeroes }, done))
    }

    /// Reads a range; with [`OnReadError::BecomesZero`] what cannot be read, sector by sector,
    /// becomes zeroes. How much that was.
    async fn read_salvaging(&self, start: u64, len: u64) -> Outcome<(BufMut, u64)> {
        let first = match self.read(start, len).await {
            Ok(data) => return Ok((data, 0)),
            Err(error) => error,
        };
        if self.options.unreadable == OnReadError::Fails {
            return Err(Failure::Reading(start, first));
        }
        let mut buf = BufMut::zeroed(len as usize);
        let mut lost = 0;
        // Halves of what cannot be read, the lower ones on top.
        let mut rest = Vec::from([(start, start + len)]);
        while let Some((from, to)) = rest.pop() {
            let (at, len) = ((from - start) as usize, to - from);
            let target = &mut buf[at..at + len as usize];
            match self.read(from, len).await {
                Ok(data) => target.copy_from_slice(&data),
                Err(_) if len > SECTOR_BYTES => {
                    let middle = round_down(from + round_up(len / 2, SECTOR_BYTES), SECTOR_BYTES);
                    rest.push((middle, to));
                    rest.push((from, middle));
                }
                Err(error) => {
                    lost += len;
                    (self.watch)(&Failure::Reading(from, error));
                }
            }
        }
        Ok((buf, lost))
    }

    /// Reads a range of all sources; the rest of the last sector of one is zeroes.
    async fn read(&self, start: u64, len: u64) -> Result<BufMut> {
        let mut rest = BufMut::for_overwrite(len as usize);
        let mut parts = Vec::new();
        for source in &self.sources.0 {
            let from = start.max(source.start);
            let to = (start + len).min(source.start + source.len());
            if from >= to {
                continue;
            }
            let mut part = rest.split_to((to - from) as usize);
            let local = source.range.start + (from - source.start);
            parts.push(async move {
                let there = source.range.end.saturating_sub(local).min(to - from);
                let mut missing = part.split_off(there as usize);
                missing.fill(0);
                let mut part = source.image.read(local, part).await?;
                part.unsplit(missing);
                Ok(part)
            });
        }
        assert!(rest.is_empty(), "the sources cover what is read");
        let mut parts = join_all(parts).await.into_iter();
        let mut whole = parts.next().unwrap_or_else(|| Ok(BufMut::zeroed(0)))?;
        for part in parts {
            whole.unsplit(part?);
        }
        Ok(whole)
    }

    /// Writes a ready piece, once those before it have their space.
    async fn write_in_turn(&self, number: u64, ready: Ready) -> Outcome<Converted> {
        let takes_space = matches!(ready, Ready::Plain { .. } | Ready::Packed { .. });
        if takes_space && self.options.order == Order::Guest {
            self.line.wait(number).await;
        } else {
            self.line.pass(number);
        }
        let written = self.write(number, ready).await;
        self.line.pass(number);
        written
    }

    async fn write(&self, number: u64, ready: Ready) -> Outcome<Converted> {
        let mut done = Converted::default();
        match ready {
            Ready::Plain {
                data,
                start,
                ranges,
                zeroes,
            } => {
                let waiting = AtomicUsize::new(ranges.len());
                let admitted = || {
                    if waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
                        self.line.pass(number);
                    }
                };
                let writes = ranges.iter().map(|range| {
                    let len = range.end - range.start;
                    let part = data.slice((range.start - start) as usize, len as usize);
                    self.write_part(range.start, part, &admitted)
                });
                done.written_bytes = join_all(writes).await.into_iter().sum::<Outcome<u64>>()?;
                done.zeroed_bytes = self.write_zeroes(&zeroes).await?;
            }
            Ready::Packed { runs, len, zeroes } => {
                for run in runs {
                    let at = run.first().map_or(0, Packed::offset);
                    let written = self.target.write_packed(run).await;
                    written.map_err(|error| Failure::Writing(at, error))?;
                }
                done.written_bytes = len;
                done.zeroed_bytes = self.write_zeroes(&zeroes).await?;
            }
            Ready::Zero(range) => {
                go_on(self.job.check())?;
                done.zeroed_bytes = self.write_zeroes(&[range]).await?;
            }
            Ready::Offload(range, place) => {
                done = self.offload(range, place).await?;
            }
        }
        self.job
            .done(done.written_bytes + done.zeroed_bytes + done.offloaded_bytes);
        Ok(done)
    }

    async fn write_part(&self, at: u64, data: Buf, admitted: &OnAllocated<'_>) -> Outcome<u64> {
        let len = data.len() as u64;
        let written = self.target.write_in_line(at, data, admitted).await;
        written.map_err(|error| Failure::Writing(at, error))?;
        Ok(len)
    }

    async fn write_zeroes(&self, ranges: &[Range<u64>]) -> Outcome<u64> {
        let options = ZeroOptions {
            space: Space::Release,
            ..ZeroOptions::default()
        };
        let mut done = 0;
        for range in ranges {
            let len = range.end - range.start;
            let zeroed = self.target.write_zeroes(range.start, len, options).await;
            zeroed.map_err(|error| Failure::Writing(range.start, error))?;
            done += len;
        }
        Ok(done)
    }

    /// Has the system copy, into a raw image; into others, and where it cannot, the data is read
    /// and written.
    async fn offload(&self, range: Range<u64>, place: SourcePlace) -> Outcome<Converted> {
        let len = range.end - range.start;
        go_on(self.job.begin(len).await)?;
        if let Some(target) = self.target.raw_file(&range) {
            let source = self.sources.0[place.source].image.data_file(place.depth);
            let (from, to) = (source.block_file(), target.block_file());
            let copied = copy_range((from, place.offset), (to, range.start), len).await;
            match copied {
                Ok(()) => {
                    return Ok(Converted {
                        offloaded_bytes: len,
                        ..Converted::default()
                    });
                }
                Err(error) if error.kind() == std::io::ErrorKind::Unsupported => {}
                Err(error) => {
                    let error =
                        Error::io(format!("Could not copy into '{}'", target.name()), error);
                    return Err(Failure::Writing(range.start, error));
                }
            }
        }
        let mut done = Converted::default();
        for piece in pieces(range.start, len, PIECE_BYTES) {
            go_on(self.job.check())?;
            let (data, _) = self
                .read_salvaging(piece.start, piece.end - piece.start)
                .await?;
            done.read_bytes += data.len() as u64;
            done.written_bytes += self.write_part(piece.start, data.freeze(), &|| ()).await?;
        }
        Ok(done)
    }
}

impl<'a> Flow<'a> {
    fn add(&mut self, task: Pin<Box<Task<'a>>>) {
        self.tasks.insert(task);
    }

    fn next_work(&mut self) -> Option<Work> {
        loop {
            if let Some(work) = self.cutter.take() {
                return Some(work);
            }
            match self.feed.next_known() {
                Some(span) => self.cutter.push(&span),
                None if self.asking || self.feed.to_ask().is_some() => return None,
                None => {
                    self.cutter.end();
                    return self.cutter.take();
                }
            }
        }
    }

    fn tally(&mut self, done: Converted) {
        if let Ok(sum) = &mut self.outcome {
            sum.add(done);
        }
    }

    fn fail(&mut self, failure: Failure) {
        if self.outcome.is_ok() {
            self.outcome = Err(failure);
        }
    }
}
