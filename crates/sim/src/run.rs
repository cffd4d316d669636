//! One run: build the chain, then sessions of concurrent requests, each ended by a close, a dead
//! process or a power failure, and after each the proof that nothing was lost that was promised.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::Future;
use std::rc::Rc;

use cowslip::image::{WriteOptions, WritePolicy, ZeroOptions};
use cowslip_queue::BufMut;

use crate::config::{Config, Ending, Kind, Part, Round};
use crate::disk::SimDisk;
use crate::executor::{Executor, Kind as TaskKind};
use crate::model::{self, Model, Outcome, Survival, Until, WriteId, ZERO};
use crate::prepare;
use crate::rng::Rng;
use crate::subject::Subject;
use crate::trace::Trace;
use crate::workload::{self, Request, Verb};

/// What is changed of a run, to make it smaller or to break it.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// Requests that are left out.
    pub skip: BTreeSet<WriteId>,
    /// Another order of events.
    pub salt: u64,
    /// Changes the drawn configuration.
    pub edit: Option<fn(&mut Config)>,
    /// Parts that are left out, to tell findings apart.
    pub without: BTreeSet<Part>,
}

/// What a run has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Runs.
    pub runs: u64,
    /// Requests that were answered.
    pub requests: u64,
    /// Operations of the disk.
    pub operations: u64,
    /// Power failures, dead processes and what came back from them.
    pub crashes: u64,
    /// Crashes with eight requests or more in flight.
    pub busy_crashes: u64,
    /// Sessions that were closed in order.
    pub closes: u64,
    /// Operations that failed as asked.
    pub faults: u64,
}

impl Totals {
    /// Adds those of another run.
    pub fn add(&mut self, other: &Totals) {
        self.runs += other.runs;
        self.requests += other.requests;
        self.operations += other.operations;
        self.crashes += other.crashes;
        self.busy_crashes += other.busy_crashes;
        self.closes += other.closes;
        self.faults += other.faults;
    }
}

/// A run's end.
#[derive(Debug)]
pub struct Report {
    /// What it did.
    pub totals: Totals,
    /// What went wrong, if anything did.
    pub failure: Option<String>,
    /// Requests that were begun, for shrinking.
    pub begun: Vec<WriteId>,
    /// The record.
    pub trace: Trace,
}

/// What the tasks of a session share.
pub(crate) struct Session {
    pub model: RefCell<Model>,
    pub disk: SimDisk,
    pub trace: Trace,
    pub failure: RefCell<Option<String>>,
    pub answered: Cell<u64>,
    resizing: Cell<Resizing>,
    write_policy: WritePolicy,
    discards: bool,
}

/// Whether the disk is changing its size; a guest keeps away from it meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resizing {
    Yes,
    No,
}

impl Session {
    pub fn fail(&self, what: String) {
        self.trace.line(|| format!("FAILED: {what}"));
        let mut failure = self.failure.borrow_mut();
        if failure.is_none() {
            *failure = Some(what);
        }
    }

    /// A request failed: that is a finding unless the disk was told to fail.
    fn failed(&self, what: &str, error: &cowslip::Error) {
        self.trace.line(|| format!("{what} failed: {error}"));
        if self.disk.faults().delivered == 0 {
            self.fail(format!("{what} failed although the disk did not: {error}"));
        }
    }
}

/// How the waiting for tasks ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// All foreground tasks have ended.
    Idle,
    /// The moment of the crash has come.
    Moment,
    /// Something went wrong.
    Failure,
}

/// More moves than any session needs.
const MOVES_MAX: u64 = 3_000_000;

/// Moves tasks and the disk on until `done` says so.
fn drive(
    executor: &mut Executor,
    disk: &SimDisk,
    rng: &mut Rng,
    mut each: impl FnMut(&mut Executor, &mut Rng) -> Option<Stop>,
) -> Result<Stop, String> {
    for _ in 0..MOVES_MAX {
        if let Some(stop) = each(executor, rng) {
            return Ok(stop);
        }
        if rng.chance(60) {
            if executor.poll_one(rng, |name| disk.set_caller(name)) || disk.step() {
                continue;
            }
        } else if disk.step() || executor.poll_one(rng, |name| disk.set_caller(name)) {
            continue;
        }
        if executor.unfinished() > 0 {
            let names = executor.unfinished_names().join(", ");
            return Err(format!("nothing moves any more; waiting: {names}"));
        }
    }
    Err(format!("no end after {MOVES_MAX} moves"))
}

/// Runs one future to its end on the simulated disk.
///
/// # Errors
/// If it hangs.
pub(crate) fn block_on<T: 'static>(
    disk: &SimDisk,
    rng: &mut Rng,
    name: &str,
    future: impl Future<Output = T> + 'static,
) -> Result<T, String> {
    let result = Rc::new(RefCell::new(None));
    let slot = Rc::clone(&result);
    let mut executor = Executor::default();
    executor.spawn(name.to_string(), TaskKind::Foreground, async move {
        let value = future.await;
        *slot.borrow_mut() = Some(value);
    });
    let stop =
        |executor: &mut Executor, _: &mut Rng| (executor.unfinished() == 0).then_some(Stop::Idle);
    drive(&mut executor, disk, rng, stop)?;
    let value = result.borrow_mut().take();
    Ok(value.expect("the task has ended"))
}

/// Performs the run of a seed. A panic of the engine is a finding like any other.
pub fn run(seed: u64, kind: Kind, changes: &Changes, trace: Trace) -> Report {
    let totals = Rc::new(Cell::new(Totals::default()));
    let begun = Rc::new(RefCell::new(Vec::new()));
    let attempt = || {
        let mut run = Run::new(seed, kind, changes, &trace)?;
        run.begun = Rc::clone(&begun);
        let outcome = run.rounds();
        totals.set(run.totals);
        outcome
    };
    let failure = match crate::panics::catch(attempt) {
        Ok(Ok(())) => None,
        Ok(Err(what)) => Some(what),
        Err(panic) => Some(panic),
    };
    if let Some(what) = &failure {
        trace.line(|| format!("FAILED: {what}"));
    }
    let totals = Totals {
        runs: 1,
        ..totals.get()
    };
    let begun = begun.borrow().clone();
    Report {
        totals,
        failure,
        begun,
        trace,
    }
}

struct Run<'a> {
    seed: u64,
    changes: &'a Changes,
    config: Config,
    disk: SimDisk,
    model: Model,
    rng: Rng,
    trace: Trace,
    totals: Totals,
    begun: Rc<RefCell<Vec<WriteId>>>,
    /// What the bytes that were found after the last ending are worth.
    survival: Option<Survival>,
}

impl<'a> Run<'a> {
    fn new(seed: u64, kind: Kind, changes: &'a Changes, trace: &Trace) -> Result<Run<'a>, String> {
        let mut config = Config::draw(seed, kind);
        changes
            .without
            .iter()
            .for_each(|part| config.leave_out(*part));
        if let Some(edit) = changes.edit {
            edit(&mut config);
        }
        trace.line(|| format!("seed {seed}: {}", config.describe()));
        let mut rng = Rng::derived(seed, "order", changes.salt);
        let mut disk = SimDisk::new(Rng::derived(seed, "disk", changes.salt), trace.clone());
        disk.set_allocates(config.allocates);
        let initial = prepare::build(&config, seed, &disk, &mut rng)?;
        disk.persist_all();
        let model = Model::new(config.grain.clone(), &config.windows, |g| initial.at(g));
        Ok(Run {
            seed,
            changes,
            config,
            disk,
            model,
            rng,
            trace: trace.clone(),
            totals: Totals::default(),
            begun: Rc::default(),
            survival: None,
        })
    }

    fn rounds(&mut self) -> Result<(), String> {
        for index in 0..self.config.rounds.len() {
            self.round(index)?;
        }
        // What the last round left is judged too.
        let round = Round {
            requests: 0,
            ending: Ending::Close,
            faults: Vec::new(),
            maintained: false,
            ..self.config.rounds[0].clone()
        };
        self.session(usize::MAX, &round)
    }

    fn round(&mut self, index: usize) -> Result<(), String> {
        let round = self.config.rounds[index].clone();
        self.trace.line(|| format!("ROUND {index}: {round:?}"));
        self.session(index, &round)
    }

    fn session(&mut self, index: usize, round: &Round) -> Result<(), String> {
        self.disk.set_pace(self.config.pace);
        self.disk.set_lie(self.config.lie);
        let opening = prepare::open(self.config.clone(), round.clone(), self.disk.clone());
        let opened = block_on(&self.disk, &mut self.rng, "open", opening)?;
        let subject = opened.map_err(|error| format!("the image does not open: {error}"))?;
        self.verify(&subject)?;
        self.settle(&subject)?;
        self.disk.set_faults(&round.faults);
        let session = Rc::new(Session {
            model: RefCell::new(self.model.clone()),
            disk: self.disk.clone(),
            trace: self.trace.clone(),
            failure: RefCell::new(None),
            answered: Cell::new(0),
            resizing: Cell::new(Resizing::No),
            write_policy: round.write_policy,
            discards: round.discard == cowslip::image::DiscardPolicy::Unmap,
        });
        let mut executor = Executor::default();
        let before = self.disk.counters();
        let stopped = self.serve(index, round, (&subject, &session), &mut executor);
        let in_flight = executor.unfinished();
        let ended = stopped.and_then(|stop| {
            self.model = session.model.borrow().clone();
            match session.failure.borrow_mut().take() {
                Some(what) => Err(what),
                None => self.end(round, stop, (subject, executor)),
            }
        });
        let after = self.disk.counters();
        self.totals.operations += after.completed.saturating_sub(before.completed);
        self.totals.requests += session.answered.get();
        self.totals.busy_crashes += u64::from(in_flight >= 8);
        ended
    }

    /// Issues requests until the round's end or the crash.
    fn serve(
        &mut self,
        index: usize,
        round: &Round,
        (subject, session): (&Subject, &Rc<Session>),
        executor: &mut Executor,
    ) -> Result<Stop, String> {
        let start = self.disk.counters();
        let moment = match round.ending {
            Ending::Close => u64::MAX,
            Ending::Kill(moment) | Ending::Crash(moment) => moment,
        };
        if round.maintained {
            let subject = subject.clone();
            let work = async move { subject.maintain().await };
            executor.spawn("maintain".to_string(), TaskKind::Background, work);
        }
        let mut next = 0;
        let mut alone: Option<Request> = None;
        let (seed, config, changes) = (self.seed, &self.config, self.changes);
        let begun = Rc::clone(&self.begun);
        let disk = self.disk.clone();
        drive(executor, &self.disk, &mut self.rng, |executor, rng| {
            if session.failure.borrow().is_some() {
                return Some(Stop::Failure);
            }
            let now = disk.counters();
            if now.issued + now.completed - start.issued - start.completed >= moment {
                return Some(Stop::Moment);
            }
            let spawn = |executor: &mut Executor, request: Request| {
                begun.borrow_mut().push(request.id);
                let name = format!("request {}", request.id);
                let task = perform(subject.clone(), Rc::clone(session), request);
                executor.spawn(name, TaskKind::Foreground, task);
            };
            while session.resizing.get() == Resizing::No
                && alone.is_none()
                && next < round.requests
                && executor.unfinished() < round.depth
                && rng.chance(70)
            {
                let request = workload::draw(seed, config, index, next);
                next += 1;
                if changes.skip.contains(&request.id) {
                    continue;
                }
                match request.verb {
                    Verb::Resize(_) => alone = Some(request),
                    _ => spawn(executor, request),
                }
            }
            if executor.unfinished() == 0
                && let Some(request) = alone.take()
            {
                session.resizing.set(Resizing::Yes);
                spawn(executor, request);
            }
            (next >= round.requests && executor.unfinished() == 0).then_some(Stop::Idle)
        })
    }

    /// Ends a session as the round says.
    fn end(
        &mut self,
        round: &Round,
        stop: Stop,
        (subject, executor): (Subject, Executor),
    ) -> Result<(), String> {
        let faults = self.disk.faults();
        self.totals.faults += faults.delivered;
        let ending = match (round.ending, stop) {
            // What a failed flush has lost is only seen by who looks at the medium.
            _ if faults.flush_failed => Ending::Crash(0),
            (ending, Stop::Moment) => ending,
            (Ending::Close | Ending::Kill(_) | Ending::Crash(_), _) if self.rng.chance(50) => {
                Ending::Close
            }
            (ending, _) => ending,
        };
        if ending == Ending::Close {
            // The background task sees the close, as it would in a server.
            match self.close(&subject, executor)? {
                Ok(()) => {
                    let begun = self.model.begin_flush();
                    self.model.end_flush(begun);
                    self.totals.closes += 1;
                    self.survival = Some(Survival::Cached);
                    self.disk.set_faults(&[]);
                    self.check("after a close")?;
                    // A crash, or a write that fails, leaves bytes in the data file that no entry of
                    // the image knows.
                    if self.totals.crashes == 0 && self.totals.faults == 0 {
                        prepare::judge_data(&self.config, &self.disk, &mut self.model)?;
                    }
                    self.model.crash();
                    return Ok(());
                }
                Err(error) if self.disk.faults().delivered > 0 => {
                    self.trace.line(|| format!("close failed: {error}"));
                }
                Err(error) => return Err(format!("close failed without a fault: {error}")),
            }
        } else {
            drop(executor);
        }
        drop(subject);
        self.model.crash();
        self.totals.crashes += 1;
        let rng = Rng::new(self.rng.bits());
        if let Ending::Kill(_) = ending {
            self.disk.set_faults(&[]);
            self.disk.kill(rng);
            self.survival = Some(Survival::Cached);
        } else {
            let next = Rng::new(self.rng.bits());
            self.disk = self.disk.crash(rng, next);
            self.survival = Some(Survival::Durable);
        }
        self.check("after a crash")
    }

    fn close(
        &mut self,
        subject: &Subject,
        mut executor: Executor,
    ) -> Result<cowslip::Result<()>, String> {
        let result = Rc::new(RefCell::new(None));
        let slot = Rc::clone(&result);
        let subject = subject.clone();
        executor.spawn("close".to_string(), TaskKind::Foreground, async move {
            let closed = subject.close().await;
            *slot.borrow_mut() = Some(closed);
        });
        let stop = |executor: &mut Executor, _: &mut Rng| {
            (executor.unfinished() == 0).then_some(Stop::Idle)
        };
        drive(&mut executor, &self.disk, &mut self.rng, stop)?;
        // Whatever the background task still has in flight comes to an end.
        while self.disk.in_flight() > 0 || executor.has_ready() {
            self.disk.step();
            executor.poll_one(&mut self.rng, |_| ());
        }
        let closed = result.borrow_mut().take();
        Ok(closed.expect("the task has ended"))
    }

    /// Reads everything, and holds it against what may be left.
    fn verify(&mut self, subject: &Subject) -> Result<(), String> {
        let Some(survival) = self.survival.take() else {
            return Ok(());
        };
        // A raw file that asks for aligned writes grows to whole blocks with the first one at its end,
        // and a raw disk with it.
        if let (Some(size), true) = (subject.size(), self.config.kind == Kind::Qcow2) {
            let adopted = self.model.adopt_size(size, survival);
            adopted.map_err(|violation| violation.to_string())?;
        }
        for window in self.model.windows() {
            let window = self.model.on_disk(&window);
            let mut at = window.start;
            while at < window.end {
                let step = self.rng.between(1, 400);
                let granules = at..window.end.min(at + step);
                at = granules.end;
                let grain = self.model.grain();
                let start = grain.start(granules.start);
                let buf = BufMut::zeroed((grain.start(granules.end) - start) as usize);
                let reader = subject.clone();
                let reading = async move { reader.read(start, buf).await };
                let read = block_on(&self.disk, &mut self.rng, "verify", reading)?;
                let buf = read.map_err(|error| format!("unreadable after reopening: {error}"))?;
                let adopted = self.model.adopt(&granules, &buf, survival);
                adopted.map_err(|violation| violation.to_string())?;
            }
        }
        Ok(())
    }

    /// After a crash or a kill the image is checked again once it was opened for writing, as the
    /// engine's repair of a dirty image must have left it.
    fn settle(&mut self, subject: &Subject) -> Result<(), String> {
        if self.rng.chance(50) {
            return Ok(());
        }
        let flusher = subject.clone();
        let flushed = block_on(&self.disk, &mut self.rng, "settle", async move {
            flusher.flush().await
        })?;
        flushed.map_err(|error| format!("flush after reopening: {error}"))?;
        let begun = self.model.begin_flush();
        self.model.end_flush(begun);
        self.check("after reopening")
    }

    /// What the file itself must be, whoever reads it.
    fn check(&mut self, when: &str) -> Result<(), String> {
        let found = prepare::check(&self.config, &self.disk, &mut self.rng);
        let found = found.map_err(|what| format!("{when}: {what}"))?;
        self.trace.line(|| format!("{when}: {found:?}"));
        Ok(())
    }
}

/// One request, from its issue to its answer.
async fn perform(subject: Subject, session: Rc<Session>, mut request: Request) {
    let id = request.id;
    let wanted = request.granules;
    request.granules = session.model.borrow().on_disk(&wanted);
    let cut = request.granules != wanted && request.verb == Verb::Compressed;
    if cut
        || (request.granules.is_empty() && !matches!(request.verb, Verb::Flush | Verb::Resize(_)))
    {
        return;
    }
    session.trace.mark(u64::from(id) << 8 | 2);
    let (start, len) = {
        let model = session.model.borrow();
        let start = model.grain().start(request.granules.start);
        (start, model.grain().start(request.granules.end) - start)
    };
    session
        .trace
        .line(|| format!("request {id}: {:?} {start:#x}+{len:#x}", request.verb));
    match request.verb {
        Verb::Read => read(&subject, &session, &request, (start, len)).await,
        Verb::Flush => flush(&subject, &session, id).await,
        Verb::Resize(size) => resize(&subject, &session, (id, size)).await,
        Verb::Write { .. } | Verb::Compressed | Verb::Zeroes { .. } | Verb::Discard => {
            change(&subject, &session, &request, (start, len)).await;
        }
    }
    session.trace.mark(u64::from(id) << 8 | 3);
    session.answered.set(session.answered.get() + 1);
}

async fn read(subject: &Subject, session: &Session, request: &Request, range: (u64, u64)) {
    let begun = session.model.borrow_mut().begin_read();
    let read = subject
        .read(range.0, BufMut::zeroed(range.1 as usize))
        .await;
    let mut model = session.model.borrow_mut();
    match read {
        Ok(buf) => {
            session
                .trace
                .line(|| format!("request {} done", request.id));
            if let Err(violation) = model.end_read(begun, &request.granules, &buf) {
                session.fail(format!("request {}: {violation}", request.id));
            }
        }
        Err(error) => {
            model.abandon_read(begun);
            session.failed(&format!("request {} (read)", request.id), &error);
        }
    }
}

async fn flush(subject: &Subject, session: &Session, id: WriteId) {
    let begun = session.model.borrow_mut().begin_flush();
    match subject.flush().await {
        Ok(()) => {
            session.trace.line(|| format!("request {id} done"));
            session.model.borrow_mut().end_flush(begun);
        }
        Err(error) => session.failed(&format!("request {id} (flush)"), &error),
    }
}

async fn resize(subject: &Subject, session: &Session, (id, size): (WriteId, u64)) {
    session.model.borrow_mut().begin_resize(id, size);
    let outcome = match subject.resize(size).await {
        Ok(()) => {
            session.trace.line(|| format!("request {id} done"));
            Outcome::Done(Until::Flush)
        }
        Err(error) => {
            session.failed(&format!("request {id} (resize)"), &error);
            Outcome::Perhaps
        }
    };
    let now = subject.size().unwrap_or(size);
    let old = session.model.borrow().size();
    if now != size && (now != old || outcome != Outcome::Perhaps) {
        session.fail(format!(
            "request {id}: the disk has {now:#x} bytes after a resize"
        ));
    }
    session
        .model
        .borrow_mut()
        .end_resize(id, (size, now), outcome);
    session.resizing.set(Resizing::No);
}

async fn change(subject: &Subject, session: &Session, request: &Request, range: (u64, u64)) {
    let id = request.id;
    let granules = &request.granules;
    let (start, len) = range;
    let writethrough = session.write_policy == WritePolicy::Writethrough;
    let done = |fua: bool| {
        Outcome::Done(if fua || writethrough {
            Until::End
        } else {
            Until::Flush
        })
    };
    let stamped = matches!(request.verb, Verb::Write { .. } | Verb::Compressed);
    let written = if stamped { id } else { ZERO };
    if request.verb != Verb::Discard || session.discards {
        session
            .model
            .borrow_mut()
            .begin_write(id, written, granules);
    }
    let stamps = || {
        let mut buf = BufMut::zeroed(len as usize);
        model::fill(
            session.model.borrow().grain(),
            id,
            granules.clone(),
            &mut buf,
        );
        buf.freeze()
    };
    let (answer, outcome) = match request.verb {
        Verb::Write { fua } => {
            let options = WriteOptions { fua };
            (subject.write(start, stamps(), options).await, done(fua))
        }
        Verb::Compressed => (subject.write_compressed(start, stamps()).await, done(false)),
        Verb::Zeroes { may_unmap, fua } => {
            let options = ZeroOptions {
                may_unmap,
                fua,
                fast_only: false,
            };
            (subject.write_zeroes(start, len, options).await, done(fua))
        }
        _ => (subject.discard(start, len).await, Outcome::Perhaps),
    };
    let outcome = match answer {
        Ok(()) => {
            session.trace.line(|| format!("request {id} done"));
            outcome
        }
        Err(error) => {
            session.failed(&format!("request {id} ({:?})", request.verb), &error);
            Outcome::Perhaps
        }
    };
    session.model.borrow_mut().end_write(id, granules, outcome);
}
