//! A run: build the chain, then sessions of concurrent requests, each ended by a close, a dead
//! process or a power failure, and after each the proof that nothing was lost that was promised.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::qcow2::probe::Stage;

use crate::bitmaps::Bitmaps;
use crate::chains;
use crate::compactions;
use crate::config::{Config, Data, Ending, Kind, Part, Round};
use crate::coverage::{Coverage, Sight, contradiction};
use crate::disk::{self, SimDisk};
use crate::drive::{Stop, drive};
use crate::executor::{Executor, Kind as TaskKind};
use crate::goals::Goal;
use crate::inspect;
use crate::look::{Known, Looker, Looks};
use crate::matrix::{Phase, Situation, Target, stage_name};
use crate::model::{Model, Survival, WriteId, ZERO};
use crate::names;
use crate::prepare;
use crate::profile::Profile;
use crate::remembered::Snapshots;
use crate::rng::Rng;
use crate::seeds;
use crate::session::{Compacting, Resizing, Session, perform};
use crate::subject::Subject;
use crate::totals::Totals;
use crate::trace::Trace;
use crate::workload::{self, Request, Verb};

/// Changes of a run, to make it smaller or to break it.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// Requests that are left out.
    pub skip: BTreeSet<WriteId>,
    /// Number that selects another order of events.
    pub salt: u64,
    /// Changes the drawn configuration.
    pub edit: Option<fn(&mut Config)>,
    /// Parts that are left out, to separate findings.
    pub without: BTreeSet<Part>,
    /// Rounds that are kept; all if none.
    pub rounds: Option<usize>,
    /// Number of issues and completions after which the last round ends with a crash.
    pub moment: Option<u64>,
}

impl Changes {
    /// The configuration as changed.
    fn apply(&self, mut config: Config) -> Config {
        self.without.iter().for_each(|part| config.leave_out(*part));
        if let Some(edit) = self.edit {
            edit(&mut config);
        }
        if let Some(rounds) = self.rounds {
            config.rounds.truncate(rounds.max(1));
        }
        if let (Some(moment), Some(last)) = (self.moment, config.rounds.last_mut()) {
            last.barrier = None;
            last.ending = match last.ending {
                Ending::Kill(_) => Ending::Kill(moment),
                Ending::Close | Ending::Crash(_) => Ending::Crash(moment),
            };
        }
        config
    }
}

/// A run's end.
#[derive(Debug)]
pub struct Report {
    /// Its totals.
    pub totals: Totals,
    /// The failure, if it failed.
    pub failure: Option<String>,
    /// Requests that were begun, for shrinking.
    pub begun: Vec<WriteId>,
    /// Where its crashes and faults fell.
    pub coverage: Coverage,
    /// Rounds that were begun.
    pub rounds: usize,
    /// Issues and completions of the disk in the session that was served last.
    pub events: u64,
    /// The record.
    pub trace: Trace,
}

/// Performs the run of a seed. A panic of the engine is a finding like any other.
pub fn run(seed: u64, kind: Kind, changes: &Changes, trace: Trace) -> Report {
    let totals = Rc::new(Cell::new(Totals::default()));
    let begun = Rc::new(RefCell::new(Vec::new()));
    let coverage = Rc::new(RefCell::new(Coverage::default()));
    let progress = Rc::new(Cell::new((0, 0)));
    let attempt = || {
        if (seeds::CHAINS..seeds::RAW).contains(&seed) && kind == Kind::Qcow2 {
            let mut done = Totals::default();
            let outcome = chains::run(seed, &trace, &mut done);
            totals.set(done);
            return outcome;
        }
        let mut run = Run::new(seed, kind, changes, &trace)?;
        run.begun = Rc::clone(&begun);
        run.coverage = Rc::clone(&coverage);
        coverage.borrow_mut().draw(&run.config);
        run.progress = Rc::clone(&progress);
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
    trace.set_watch(None);
    let begun = begun.borrow().clone();
    let coverage = coverage.borrow().clone();
    Report {
        totals,
        failure,
        begun,
        coverage,
        rounds: progress.get().0,
        events: progress.get().1,
        trace,
    }
}

pub(crate) struct Run<'a> {
    pub seed: u64,
    pub changes: &'a Changes,
    pub config: Config,
    baseline: prepare::Baseline,
    /// Clusters that were leaked when the files were last looked at.
    leaks: u64,
    pub disk: SimDisk,
    pub model: Model,
    pub snapshots: Snapshots,
    pub bitmaps: Bitmaps,
    /// Structures of the files that may lag.
    pub lag: prepare::Lag,
    pub looks: Looks,
    pub rng: Rng,
    pub trace: Trace,
    pub totals: Totals,
    begun: Rc<RefCell<Vec<WriteId>>>,
    pub coverage: Rc<RefCell<Coverage>>,
    /// Rounds that were begun, and events of the last session.
    progress: Rc<Cell<(usize, u64)>>,
    /// Trust in the bytes that were found after the last ending.
    pub survival: Option<Survival>,
}

/// An issue or a completion, by its number among those of its kind.
type Event = (disk::fault::Verb, disk::Moment, u64);

/// Requests to be served.
pub(crate) struct Work<'a> {
    /// The round that they are drawn for.
    pub round_index: usize,
    /// Numbers of the requests in it.
    pub numbers: std::ops::Range<u64>,
    /// The round's rules, which may be changed ones.
    pub round: &'a Round,
    /// Where the power fails, if it has not before.
    pub target: Option<Target>,
}

/// Outcome of serving.
pub(crate) struct Served {
    pub stop: Stop,
    /// Foreground tasks that have not ended.
    pub in_flight: usize,
    /// The disk was changing its size.
    pub resizing: bool,
    /// The file was being compacted.
    pub compacting: Option<Compacting>,
    executor: Executor,
}

impl<'a> Run<'a> {
    fn new(seed: u64, kind: Kind, changes: &'a Changes, trace: &Trace) -> Result<Run<'a>, String> {
        let config = changes.apply(compactions::config_of(seed, kind));
        trace.line(|| format!("seed {seed}: {}", config.describe()));
        let mut rng = Rng::derived(seed, "order", changes.salt);
        let mut disk = SimDisk::new(Rng::derived(seed, "disk", changes.salt), trace.clone());
        disk.set_allocates(config.allocates);
        let initial = prepare::build(&config, seed, &disk, &mut rng)?;
        disk.persist_all();
        prepare::cram(&config, &disk);
        let baseline = prepare::change(&config.prepared, &disk);
        let grain = &config.grain;
        let created = config.created_bytes;
        let model = Model::new(grain.clone(), &config.windows, |granule| {
            if grain.start(granule) < created {
                initial.at(granule)
            } else {
                ZERO
            }
        });
        let model = model.with_size(created);
        let raw = config.data == Data::ExternalRaw;
        let model = match config.vm_state.is_empty() {
            true => model,
            false => model.with_vm_state(&config.vm_state, (config.table_bytes(), raw)),
        };
        let snapshots = Snapshots::new(prepare::snapshots(&config, &disk), &model);
        Ok(Run {
            seed,
            changes,
            config,
            baseline,
            leaks: 0,
            disk,
            model,
            snapshots,
            bitmaps: Bitmaps::default(),
            lag: prepare::Lag::default(),
            looks: Looks::new(),
            rng,
            trace: trace.clone(),
            totals: Totals::default(),
            begun: Rc::default(),
            coverage: Rc::default(),
            progress: Rc::default(),
            survival: None,
        })
    }

    fn rounds(&mut self) -> Result<(), String> {
        if self.config.crammed.is_some() {
            // The clusters that were taken away are leaks from the start.
            self.check("as prepared")?;
        }
        for index in 0..self.config.rounds.len() {
            let round = self.config.rounds[index].clone();
            self.trace.line(|| format!("ROUND {index}: {round:?}"));
            self.session(index, &round)?;
        }
        // The state that the last round left is checked too.
        let round = Round {
            requests: 0,
            ending: Ending::Close,
            faults: Vec::new(),
            maintained: false,
            ..self.config.rounds[0].clone()
        };
        self.session(self.config.rounds.len(), &round)
    }

    fn session(&mut self, index: usize, round: &Round) -> Result<(), String> {
        self.looks.begin(&self.config, (self.seed, index as u64));
        let subject = self.recover(index, round)?;
        self.progress
            .set(((index + 1).min(self.config.rounds.len()), 0));
        self.disk.set_faults(&round.faults);
        let target = self.target(index, round);
        if let (None, Ending::Kill(moment) | Ending::Crash(moment)) = (target, round.ending) {
            match round.barrier {
                None => self.disk.fail_power_after(moment),
                Some(then) => self.disk.fail_power_at_flush(moment, then),
            }
        }
        if let (Some(events), Ending::Kill(_) | Ending::Crash(_)) =
            (round.after_fault, round.ending)
        {
            self.disk.fail_power_after_fault(events);
        }
        let work = Work {
            round_index: index,
            numbers: 0..round.requests,
            round,
            target,
        };
        self.aim_at(Phase::Requests, index);
        let before = self.disk.counters();
        let served = self.serve(&work, &subject)?;
        let after = self.disk.counters();
        let events = after.issued + after.completed - before.issued - before.completed;
        self.progress.set((self.progress.get().0, events));
        self.totals.faults += self.disk.delivered().0;
        let ended = self.end(round, served, subject);
        if let Some((barrier, looks)) = self.looks.at_barrier() {
            self.coverage.borrow_mut().barrier(barrier, looks);
        }
        ended
    }

    /// The event in this phase with which the run is made to lose power, if it is.
    fn event_in(&self, phase: Phase, index: usize) -> Option<Event> {
        if let Profile::Story(story) = self.config.profile {
            let rng = &mut Rng::derived(self.seed, "event", index as u64);
            let event = story.event(phase, index, rng);
            return event.filter(|_| self.changes.moment.is_none());
        }
        let Profile::Directed(Goal::Point((wanted, verb, moment))) = self.config.profile else {
            return None;
        };
        let rng = &mut Rng::derived(self.seed, "point", index as u64);
        let number = match phase {
            _ if matches!(
                verb,
                disk::fault::Verb::Allocate | disk::fault::Verb::SetLen
            ) =>
            {
                1
            }
            Phase::Requests => rng.between(1, 12),
            _ => rng.between(1, 3),
        };
        let wanted = phase == wanted && self.changes.moment.is_none();
        wanted.then_some((verb, moment, number))
    }

    /// Lets the power fail with that event.
    pub fn aim_at(&self, phase: Phase, index: usize) {
        if let Some(event) = self.event_in(phase, index) {
            self.disk.fail_power_at(event);
        }
    }

    /// Half of the crashes of images are aimed at a place, rather than at a moment.
    fn target(&self, index: usize, round: &Round) -> Option<Target> {
        let rng = &mut Rng::derived(self.seed, "target", index as u64);
        if let Profile::Directed(goal) = self.config.profile {
            let in_recovery = matches!(goal, Goal::Cell(_, Situation::Recovery, _));
            let crashes = matches!(round.ending, Ending::Crash(_)) && self.changes.moment.is_none();
            let target = Target::of(&self.config, rng);
            return target.filter(|_| crashes && !in_recovery);
        }
        if let Profile::Story(story) = self.config.profile {
            let crashes = matches!(round.ending, Ending::Crash(_)) && self.changes.moment.is_none();
            return story.target(rng).filter(|_| crashes);
        }
        let aimed = matches!(round.ending, Ending::Crash(_))
            && self.config.kind == Kind::Qcow2
            && self.changes.moment.is_none()
            && self.changes.edit.is_none()
            // Such a crash falls where a compaction is.
            && round.cut_short.is_none();
        let grows = self.config.profile == Profile::TightMetadata || self.config.crammed.is_some();
        if aimed && grows && rng.chance(40) {
            // Counts grow once or twice in such a run: no other crash would fall there.
            return Some(Target {
                stage: Stage::CountTable,
                situation: Situation::Any,
                skip: 0,
                events: rng.between(1, 6),
            });
        }
        (aimed && rng.chance(60)).then(|| Target::draw(&self.config, rng))
    }

    /// Serves requests until they have ended, or the power has.
    pub fn serve(&mut self, work: &Work<'_>, subject: &Subject) -> Result<Served, String> {
        let known = (
            self.model.clone(),
            self.snapshots.clone(),
            self.bitmaps.clone(),
        );
        let rules = (work.round, &self.config);
        let session = Session::new(known, (&self.disk, &self.trace), rules);
        let session = Rc::new(session);
        let mut executor = Executor::default();
        executor.set_slow(work.round.slow_tasks);
        if work.round.maintained {
            let subject = subject.clone();
            let work = async move { subject.maintain().await };
            executor.spawn("maintain".to_string(), TaskKind::Background, work);
        }
        let before = self.disk.counters();
        let stopped = self.issue(work, (subject, &session), &mut executor);
        let after = self.disk.counters();
        self.totals.operations += after.completed - before.completed;
        self.totals.requests += session.answered.get();
        let stop = stopped?;
        self.model = session.model.borrow().clone();
        self.snapshots = session.snapshots.borrow().clone();
        self.bitmaps = session.bitmaps.borrow().clone();
        self.lag.flags |= self.snapshots.is_pending() && self.config.layout.version == 2;
        match session.failure.borrow_mut().take() {
            Some(what) => Err(what),
            None => Ok(Served {
                stop,
                in_flight: executor.unfinished(),
                resizing: session.resizing.get() == Resizing::Yes,
                compacting: session.compacting(),
                executor,
            }),
        }
    }

    fn issue(
        &mut self,
        work: &Work<'_>,
        (subject, session): (&Subject, &Rc<Session>),
        executor: &mut Executor,
    ) -> Result<Stop, String> {
        let mut numbers = work.numbers.clone();
        let mut alone: Option<Request> = None;
        let (seed, config, changes) = (self.seed, &self.config, self.changes);
        let (begun, coverage) = (Rc::clone(&self.begun), Rc::clone(&self.coverage));
        let mut at_resize = self.event_in(Phase::Resize, work.round_index);
        let disk = self.disk.clone();
        let mut delivered = disk.delivered().0;
        let mut aim = Aim {
            target: work.target,
            seen: 0,
        };
        let watch = Watch {
            looker: self.looker(),
            subject,
            session,
            is_directed: matches!(config.profile, Profile::Directed(_)),
        };
        let spawn = |executor: &mut Executor, request: Request| {
            begun.borrow_mut().push(request.id);
            let name = format!("request {}", request.id);
            let task = perform(subject.clone(), Rc::clone(session), request);
            executor.spawn(name, TaskKind::Foreground, task);
        };
        let mut order = self.rng.clone();
        let stopped = drive(executor, &self.disk, &mut order, |executor, rng| {
            if session.failure.borrow().is_some() {
                return Some(Stop::Failure);
            }
            if session.is_over.get() {
                return (executor.unfinished() == 0).then_some(Stop::Idle);
            }
            if let (now, Some(last)) = disk.delivered()
                && now > delivered
            {
                delivered = now;
                let file = work.round.faults.first().and_then(|fault| fault.file);
                coverage.borrow_mut().fault(stage(subject), last, file);
            }
            aim.follow(subject, &disk);
            session.cut_short();
            if let Err(what) = watch.watch(executor, &disk) {
                session.fail(what);
            }
            while session.resizing.get() == Resizing::No
                && alone.is_none()
                && !numbers.is_empty()
                && executor.unfinished() < work.round.depth
                && rng.chance(70)
            {
                let number = numbers.next().expect("some are left");
                let request = workload::draw(seed, config, work.round_index, number);
                if changes.skip.contains(&request.id) {
                    continue;
                }
                match request.verb.wants_to_be_alone() {
                    true => alone = Some(request),
                    false => spawn(executor, request),
                }
            }
            if executor.unfinished() == 0
                && let Some(request) = alone.take()
            {
                let resizes = matches!(request.verb, Verb::Resize(_));
                session.resizing.set(match resizes {
                    true => Resizing::Yes,
                    false => Resizing::Snapshots,
                });
                if let Some(event) = at_resize.take_if(|_| resizes) {
                    disk.fail_power_at(event);
                }
                spawn(executor, request);
            }
            (numbers.is_empty() && executor.unfinished() == 0).then_some(Stop::Idle)
        });
        self.rng = order;
        stopped
    }

    /// The run as looks need it.
    pub fn looker(&self) -> Looker<'_> {
        Looker {
            looks: &self.looks,
            config: &self.config,
            baseline: &self.baseline,
            lag: self.lag,
            trace: &self.trace,
        }
    }

    /// Looks at what would be left with no session, or none any more.
    pub fn look(&self, disk: &SimDisk) -> Result<(), String> {
        let known = Known {
            model: &self.model,
            snapshots: &self.snapshots,
            bitmaps: &self.bitmaps,
        };
        self.looker().look(disk, known)
    }

    /// Ends a session as the round says.
    fn end(&mut self, round: &Round, mut served: Served, subject: Subject) -> Result<(), String> {
        let flush_failed = self.disk.faults().flush_failed;
        let mut ending = match (round.ending, served.stop) {
            // The loss of a failed flush is seen on the medium only.
            _ if flush_failed => Ending::Crash(0),
            (ending, Stop::PowerOff) => ending,
            _ if self.rng.chance(50) => Ending::Close,
            (ending, _) => ending,
        };
        let resizing = served.resizing;
        let mut phase = if resizing {
            Phase::Resize
        } else {
            Phase::Requests
        };
        if ending == Ending::Close {
            phase = Phase::Closing;
            self.disk.hold_power();
            self.aim_at(Phase::Closing, 0);
            if round.ending != Ending::Close && self.rng.chance(25) {
                let events = self.rng.between(1, 60);
                self.disk.fail_power_after(events);
            }
            self.bitmaps.begin_close();
            // The background task sees the close, as it would in a server.
            match self.close(&subject, &mut served.executor)? {
                Some(Ok(())) => {
                    unprotected(&subject, &self.disk)?;
                    return self.closed();
                }
                Some(Err(error)) if self.disk.delivered().0 > 0 => {
                    self.trace.line(|| format!("close failed: {error}"));
                }
                Some(Err(error)) => return Err(format!("close failed without a fault: {error}")),
                None => {}
            }
            ending = Ending::Crash(0);
        }
        self.see(Some(&subject), served.in_flight, phase)?;
        self.totals.cut_short(served.compacting);
        drop(served);
        self.stop(ending, Some(subject))
    }

    /// Checks the files after a close.
    fn closed(&mut self) -> Result<(), String> {
        self.disk.hold_power();
        self.trace.set_watch(None);
        let begun = self.model.begin_flush();
        self.model.end_flush(begun);
        self.bitmaps.end_close();
        self.snapshots.covered();
        self.totals.closes += 1;
        self.survival = Some(Survival::Cached);
        self.disk.set_faults(&[]);
        let leaks = self.leaks;
        self.check("after a close")?;
        // A crash and a crammed file leave counts of clusters beyond the end, which growth
        // uncovers.
        let hidden = self.totals.crashes > 0 || self.config.crammed.is_some();
        if self.leaks > leaks && !hidden {
            let more = self.leaks - leaks;
            return Err(format!("{more} clusters are leaked after a close"));
        }
        // A crash, or a write that fails, leaves bytes in the data file that no entry of the image
        // knows.
        if self.totals.crashes == 0 && self.totals.faults == 0 {
            prepare::check_data(&self.config, &self.disk, &mut self.model)?;
        }
        self.model.crash();
        Ok(())
    }

    /// Notes where a crash falls.
    ///
    /// # Errors
    /// If nothing can fall there.
    pub fn see(
        &mut self,
        subject: Option<&Subject>,
        in_flight: usize,
        phase: Phase,
    ) -> Result<(), String> {
        let recovering = matches!(phase, Phase::Opening | Phase::Recovery);
        if let (false, Some((verb, moment))) = (self.disk.has_power(), self.disk.last_event()) {
            self.coverage.borrow_mut().point((phase, verb, moment));
        }
        // Stories and runs with a goal go where few requests are under way, on purpose.
        if !matches!(
            self.config.profile,
            Profile::Directed(_) | Profile::Story(_)
        ) {
            self.totals.drawn_crashes += 1;
            self.totals.busy_crashes += u64::from(in_flight >= 8);
        }
        self.totals.recovery_crashes += u64::from(recovering);
        if let Some(sight) = subject.and_then(|subject| sight(subject, &self.disk, recovering)) {
            self.trace
                .line(|| format!("the crash falls on {:?}", sight.observed));
            self.coverage.borrow_mut().crash(&self.config, &sight);
            return contradiction(&self.config, &sight).map_or(Ok(()), Err);
        }
        Ok(())
    }

    /// Makes the power fail, or the process die, and checks the files that are left.
    pub fn stop(&mut self, how: Ending, subject: Option<Subject>) -> Result<(), String> {
        self.trace.set_watch(None);
        drop(subject);
        self.model.crash();
        self.bitmaps.crash();
        self.totals.crashes += 1;
        if !self.disk.has_outlived_at_risk(names::TOP) {
            self.snapshots.covered();
        }
        let rng = Rng::new(self.rng.bits());
        if let Ending::Kill(_) = how {
            self.disk.set_faults(&[]);
            self.disk.kill(rng);
            self.survival = Some(Survival::Cached);
        } else {
            let next = Rng::new(self.rng.bits());
            self.disk = self.disk.crash(rng, next);
            self.snapshots.power_failed();
            self.survival = Some(Survival::Durable);
        }
        self.check("after a crash")
    }

    /// Closes the image; `None` if the power fails before it is.
    fn close(
        &mut self,
        subject: &Subject,
        executor: &mut Executor,
    ) -> Result<Option<cowslip::Result<()>>, String> {
        let result = Rc::new(RefCell::new(None));
        let slot = Rc::clone(&result);
        let subject = subject.clone();
        executor.spawn("close".to_string(), TaskKind::Foreground, async move {
            let closed = subject.close().await;
            *slot.borrow_mut() = Some(closed);
        });
        let found = RefCell::new(None);
        let mut rng = self.rng.clone();
        let stop = |executor: &mut Executor, _: &mut Rng| {
            if let Err(what) = self.look(&self.disk) {
                found.borrow_mut().get_or_insert(what);
            }
            (executor.unfinished() == 0).then_some(Stop::Idle)
        };
        let stop = drive(executor, &self.disk, &mut rng, stop)?;
        if let Some(what) = found.take() {
            return Err(format!("while the image is closed, {what}"));
        }
        self.rng = rng;
        // Whatever the background task still has in flight comes to an end.
        while self.disk.has_power() && (self.disk.in_flight() > 0 || executor.has_ready()) {
            self.disk.step();
            executor.poll_one(&mut self.rng, |_| ());
        }
        if stop == Stop::PowerOff || !self.disk.has_power() {
            return Ok(None);
        }
        Ok(result.borrow_mut().take())
    }

    /// Makes the record show the activity of write-back from now on.
    pub fn watch(&self, subject: &Subject) {
        if let (true, Subject::Image(image)) = (self.trace.is_kept(), subject) {
            let image = Arc::downgrade(image);
            self.trace.set_watch(Some(Arc::new(move || {
                let stage = image.upgrade().and_then(|image| image.stage());
                stage.map_or(String::new(), |stage| stage_name(stage).to_string())
            })));
        }
    }

    /// Checks the file itself, independently of any reader.
    pub fn check(&mut self, when: &str) -> Result<(), String> {
        let context = (&self.config, &self.baseline, self.lag);
        let found = prepare::check(context, &self.disk, &mut self.rng);
        let found = found.map_err(|what| format!("{when}: {what}"))?;
        self.trace.line(|| format!("{when}: {found:?}"));
        self.leaks = found.leaks;
        Ok(())
    }
}

fn sight(subject: &Subject, disk: &SimDisk, recovering: bool) -> Option<Sight> {
    let Subject::Image(image) = subject else {
        return None;
    };
    Some(Sight {
        observed: image.observe()?,
        hole_at_risk: [names::TOP, names::DATA]
            .iter()
            .any(|name| disk.has_hole_at_risk(name)),
        recovering,
    })
}

/// Observers of the requests that are served.
struct Watch<'a> {
    looker: Looker<'a>,
    subject: &'a Subject,
    session: &'a Session,
    is_directed: bool,
}

impl Watch<'_> {
    /// Observes one moment of the run.
    ///
    /// # Errors
    /// What must not be.
    fn watch(&self, executor: &Executor, disk: &SimDisk) -> Result<(), String> {
        let (config, session) = (self.looker.config, self.session);
        if self.is_directed
            && let Some(what) = refuted(config, self.subject, disk)
        {
            return Err(what);
        }
        let known = Known {
            model: &session.model.borrow(),
            snapshots: &session.snapshots.borrow(),
            bitmaps: &session.bitmaps.borrow(),
        };
        self.looker.look(disk, known)?;
        let is_idle = executor.unfinished() == 0 && disk.in_flight() == 0;
        match is_idle && stage(self.subject) == Stage::Idle && disk.has_power() {
            true => unprotected(self.subject, disk),
            false => Ok(()),
        }
    }
}

/// Checks that every cluster with metadata is protected from the guest's data, with nothing under
/// way. After a failure it is unknown which metadata the file has.
///
/// # Errors
/// What is not protected.
fn unprotected(subject: &Subject, disk: &SimDisk) -> Result<(), String> {
    let (Subject::Image(image), 0) = (subject, disk.delivered().0) else {
        return Ok(());
    };
    if image.observe().is_none() {
        return Ok(());
    }
    let content = disk.content(names::TOP).expect("the run has made it");
    let cluster = 1 << content.number(20, 4);
    for (what, range) in inspect::metadata(&content) {
        let mut clusters = range.clone().step_by(cluster);
        let open = |at: &u64| image.is_protected(*at) == Some(false);
        if let Some(at) = clusters.find(open) {
            return Err(format!("{what} at {at:#x} is not protected"));
        }
    }
    Ok(())
}

/// Describes an activity that is going on though it cannot be.
fn refuted(config: &Config, subject: &Subject, disk: &SimDisk) -> Option<String> {
    contradiction(config, &sight(subject, disk, false)?)
}

/// Where the power is to fail.
struct Aim {
    target: Option<Target>,
    /// Issues and completions so far.
    seen: u64,
}

impl Aim {
    /// Arms the failure when its place is reached.
    fn follow(&mut self, subject: &Subject, disk: &SimDisk) {
        let counters = disk.counters();
        let events = counters.issued + counters.completed;
        let moved = std::mem::replace(&mut self.seen, events) != events;
        let Some(target) = &mut self.target else {
            return;
        };
        if !reaches(subject, disk, target) {
            return;
        }
        if target.skip == 0 {
            disk.fail_power_after(target.events);
            self.target = None;
        } else if moved {
            target.skip -= 1;
        }
    }
}

/// Whether a crash is to fall now.
fn reaches(subject: &Subject, disk: &SimDisk, target: &Target) -> bool {
    stage(subject) == target.stage
        && sight(subject, disk, false).is_some_and(|sight| sight.is(target.situation))
}

fn stage(subject: &Subject) -> Stage {
    match subject {
        Subject::Image(image) => image.stage().unwrap_or(Stage::Idle),
        Subject::Plain(_) => Stage::Idle,
    }
}
