//! The pending operations of a simulated disk, what completes when, and what is durable.
//!
//! An operation passes three moments: issue, effect, completion. The effect of a write lies
//! anywhere between the other two, and the effect of a large one may come in parts. Which operation
//! moves next is drawn from the seed. The volatile content is what reads see; every effect is also
//! logged until a flush covers it. A flush covers what had completed when it was issued.

use std::io;
use std::ops::Range;

use cowslip::errno::ENOTSUP;
use cowslip::file::{Capabilities, FileExtent, Holes, HolesBy};
use cowslip_queue::{Completer, IoVecMut};

use crate::anatomy;
use crate::rng::Rng;
use crate::trace::{About, Line, Trace};

use super::content::{Content, PAGE_BYTES};
use super::crash::{Crash, Fate};
use super::effect::{Effect, SPACE_ATOM_BYTES};
use super::fault::{Faults, Verb};
use super::structure::{Map, Structure, Structures};
use super::terms::{Lie, Losses, Pace};

/// An effect that is in the volatile content and that no flush has covered.
#[derive(Debug)]
struct Logged {
    op: u64,
    effect: Effect,
    /// When its operation completed.
    completed: Option<u64>,
    /// Whether it was a durable write and has completed.
    durable: bool,
    /// The process that made it has died.
    outlived: bool,
}

/// A file: what reads see, what is on the medium, and the difference.
#[derive(Debug)]
pub(super) struct FileState {
    pub name: String,
    pub capabilities: Capabilities,
    pub volatile: Content,
    durable: Content,
    log: Vec<Logged>,
    /// A failed flush has lost effects of a process that has died: they are seen, and no later
    /// flush writes them.
    outlived_lost: bool,
}

impl FileState {
    pub fn new(name: &str, capabilities: Capabilities, content: Content) -> FileState {
        FileState {
            name: name.to_string(),
            capabilities,
            volatile: content.clone(),
            durable: content,
            log: Vec::new(),
            outlived_lost: false,
        }
    }

    /// Changes what is on the medium, where nothing is at risk.
    pub fn edit(&mut self, change: impl FnOnce(&mut Content)) {
        assert!(self.log.is_empty(), "'{}' is at rest", self.name);
        change(&mut self.volatile);
        self.durable = self.volatile.clone();
    }

    /// Returns the structures whose writes are at risk.
    fn at_risk(&self) -> Structures {
        let mut at_risk = Structures::NONE;
        if self.log.is_empty() {
            return at_risk;
        }
        let map = Map::of(&self.volatile);
        for entry in self.log.iter().filter(|entry| !entry.durable) {
            at_risk.add(structure(&map, &entry.effect));
        }
        at_risk
    }

    fn has_outlived_at_risk(&self) -> bool {
        self.outlived_lost || self.log.iter().any(|entry| entry.outlived)
    }

    /// The unit that a crash never tears in a write.
    fn sector_bytes(&self) -> u64 {
        u64::from(self.capabilities.alignment_bytes).max(512)
    }

    /// Puts on the medium what had completed by `moment`, and what lies under it: effects that were
    /// applied earlier and overlap it, since nothing older may come over it later.
    fn persist(&mut self, moment: u64, mut lost: impl FnMut() -> bool) {
        let mut covered: Vec<bool> = self
            .log
            .iter()
            .map(|entry| entry.durable || entry.completed.is_some_and(|at| at < moment))
            .collect();
        for under in (0..self.log.len()).rev() {
            covered[under] = covered[under]
                || (under + 1..self.log.len()).any(|over| {
                    covered[over] && self.log[under].effect.overlaps(&self.log[over].effect)
                });
        }
        let mut covered = covered.into_iter();
        let (durable, outlived_lost) = (&mut self.durable, &mut self.outlived_lost);
        self.log.retain(|entry| {
            let covered = covered.next().unwrap_or(false);
            if covered && (entry.durable || !lost()) {
                entry.effect.apply(durable);
            } else if covered {
                *outlived_lost |= entry.outlived;
            }
            !covered
        });
    }

    /// Loses some of the writes in flight of operations other than `kept`.
    fn forget_in_flight(&mut self, kept: u64, mut lost: impl FnMut() -> bool) {
        self.log.retain(|entry| {
            let may_go = entry.completed.is_none() && entry.op != kept;
            !(may_go && matches!(entry.effect, Effect::Write { .. }) && lost())
        });
    }

    /// Marks the effects of a durable write; puts them on the medium at once if nothing lies under
    /// them.
    fn make_durable(&mut self, op: u64) {
        for index in 0..self.log.len() {
            if self.log[index].op == op {
                self.log[index].durable = true;
            }
        }
        let independent = |entry: &Logged| entry.durable;
        if self.log.iter().all(independent) {
            for entry in self.log.drain(..) {
                entry.effect.apply(&mut self.durable);
            }
        }
    }
}

/// Returns the structure that an effect changes.
fn structure(map: &Map, effect: &Effect) -> Structure {
    match effect {
        Effect::Write { offset, .. } | Effect::Zero { offset, .. } => map.at(*offset),
        // Space, which no structure has yet, or any more.
        Effect::Punch { .. } | Effect::Allocate { .. } | Effect::SetLen(_) => map.at(u64::MAX),
    }
}

/// Result of an operation.
pub(super) enum Answer {
    Read {
        offset: u64,
        buf: IoVecMut,
        to: Completer<(io::Result<()>, IoVecMut)>,
    },
    Done(Completer<io::Result<()>>),
    Flush(Completer<io::Result<()>>),
    Len(Completer<io::Result<u64>>),
    Extents {
        offset: u64,
        len: u64,
        to: Completer<io::Result<Vec<FileExtent>>>,
    },
    Holes {
        range: Range<u64>,
        most: usize,
        to: Completer<io::Result<Holes>>,
    },
}

/// An operation that has not completed.
pub(super) struct Op {
    id: u64,
    file: usize,
    verb: Verb,
    /// The bytes of the file that it is about; empty if none.
    range: (u64, u64),
    issued: u64,
    /// Number of the disk's moves before which it does not move.
    not_before: u64,
    /// Effects that are still to come.
    effects: Vec<Effect>,
    durable: bool,
    errno: Option<i32>,
    answer: Answer,
}

/// An operation as a file asks for it.
pub(super) struct Asked {
    pub file: usize,
    pub verb: Verb,
    pub effects: Vec<Effect>,
    pub durable: bool,
    pub unsupported: bool,
    pub answer: Answer,
}

/// An end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moment {
    /// Issue of an operation.
    Issue,
    /// Completion of an operation.
    Completion,
}

/// How much a disk has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations issued.
    pub issued: u64,
    /// Operations completed.
    pub completed: u64,
    /// Flushes among the completed ones.
    pub flushes: u64,
}

/// The disk.
pub(super) struct State {
    pub files: Vec<FileState>,
    pub pending: Vec<Op>,
    pub counters: Counters,
    pub faults: Faults,
    pub pace: Pace,
    pub lie: Lie,
    pub losses: Losses,
    pub rng: Rng,
    pub trace: Trace,
    /// The task that runs now, for traces.
    pub caller: String,
    /// Issues and completions until the power fails; 0 when it has.
    pub power_left: Option<u64>,
    /// Issues and completions of flushes, and of anything after them, until the power fails.
    pub power_flushes: Option<(u64, u64)>,
    /// Number of such events with which the power fails.
    pub power_at: Option<(Verb, Moment, u64)>,
    /// The last event.
    pub last_event: Option<(Verb, Moment)>,
    /// The flush that has been issued since this was last asked.
    pub flush_issued: Option<Structures>,
    /// Issues and completions from the next failure on until the power fails.
    pub power_after_fault: Option<u64>,
    /// Results of operations issued after that, which are never delivered.
    undelivered: Vec<Answer>,
    clock: u64,
    moves: u64,
}

impl State {
    pub fn new(rng: Rng, trace: Trace) -> State {
        State {
            files: Vec::new(),
            pending: Vec::new(),
            counters: Counters::default(),
            faults: Faults::default(),
            pace: Pace::Mixed,
            lie: Lie::None,
            losses: Losses::Any,
            rng,
            trace,
            caller: String::new(),
            power_left: None,
            power_flushes: None,
            power_at: None,
            last_event: None,
            flush_issued: None,
            power_after_fault: None,
            undelivered: Vec::new(),
            clock: 0,
            moves: 0,
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.trace.set_now(self.clock);
        self.clock
    }

    pub fn has_power(&self) -> bool {
        self.power_left != Some(0)
    }

    /// An issue or a completion has happened: the power may fail now.
    fn event(&mut self, verb: Verb, moment: Moment) {
        self.last_event = Some((verb, moment));
        if let Some((_, _, left)) = self
            .power_at
            .as_mut()
            .filter(|at| (at.0, at.1) == (verb, moment))
        {
            *left -= 1;
            if *left == 0 {
                self.power_left = Some(1);
                self.power_at = None;
            }
        }
        if let Some(left) = &mut self.power_left {
            *left -= 1;
        }
        if let (Verb::Flush, Some((flushes, then))) = (verb, &mut self.power_flushes) {
            *flushes -= 1;
            if *flushes == 0 {
                self.power_left = Some(*then);
                self.power_flushes = None;
            }
        }
    }

    /// An operation has failed: the power may be about to.
    fn failed(&mut self) {
        if let (true, Some(events)) = (self.has_power(), self.power_after_fault.take()) {
            let sooner = self.power_left.map_or(events, |left| left.min(events));
            self.power_left = Some(sooner.max(1));
        }
    }

    pub fn issue(&mut self, asked: Asked) {
        if !self.has_power() {
            return self.undelivered.push(asked.answer);
        }
        let issued = self.tick();
        let id = self.counters.issued;
        self.counters.issued += 1;
        let errno = if asked.unsupported {
            Some(ENOTSUP)
        } else {
            let file = &self.files[asked.file].name;
            self.faults.strike(asked.verb, self.special(&asked), file)
        };
        let not_before = self.moves + self.pace.delay(asked.verb, &mut self.rng);
        let op = Op {
            id,
            file: asked.file,
            verb: asked.verb,
            range: asked.range(),
            issued,
            not_before,
            effects: if asked.unsupported {
                Vec::new()
            } else {
                asked.effects
            },
            durable: asked.durable,
            errno,
            answer: asked.answer,
        };
        self.trace.mark(op.fingerprint());
        self.trace.about(|| {
            let fault = op
                .errno
                .map_or(String::new(), |errno| format!(" (will fail: {errno})"));
            Line {
                about: self.touches(&op),
                who: self.caller.clone(),
                io: Some(id),
                text: format!("issues {}{fault}", self.place(&op)),
            }
        });
        let verb = op.verb;
        if verb == Verb::Flush {
            let mut at_risk = Structures::NONE;
            self.files
                .iter()
                .for_each(|file| at_risk.add_all(file.at_risk()));
            self.flush_issued = Some(at_risk);
        }
        self.pending.push(op);
        self.event(verb, Moment::Issue);
    }

    /// Returns the operation's kind if it is one that is failed apart from others.
    fn special(&self, asked: &Asked) -> Option<Verb> {
        let (start, end) = asked.range();
        let content = &self.files[asked.file].volatile;
        let is_of = |verb, structure| {
            self.faults.has(verb) && anatomy::name(content, &(start..end)).starts_with(structure)
        };
        match asked.verb {
            Verb::Write if asked.durable => Some(Verb::DurableWrite),
            Verb::Write if is_of(Verb::CountWrite, "refcount block") => Some(Verb::CountWrite),
            Verb::Write if is_of(Verb::L1Write, "L1 table") => Some(Verb::L1Write),
            _ => None,
        }
    }

    /// Describes an operation and its place, with the name of the structure there.
    fn place(&self, op: &Op) -> String {
        let file = &self.files[op.file];
        let (start, end) = op.range;
        let name = match op.verb {
            Verb::Query | Verb::SetLen | Verb::Flush => String::new(),
            _ => anatomy::name(&file.volatile, &(start..end)),
        };
        let name = if name.is_empty() {
            name
        } else {
            format!(" ({name})")
        };
        format!("{} {}{name}", file.name, op.describe())
    }

    fn touches(&self, op: &Op) -> About {
        let (start, end) = op.range;
        match op.verb {
            Verb::Flush => About::Run,
            _ if start == end => About::Detail,
            _ => About::Host(self.files[op.file].name.clone(), start..end),
        }
    }

    /// Moves one operation on; false if there is none.
    pub fn step(&mut self) -> bool {
        if self.pending.is_empty() || !self.has_power() {
            return false;
        }
        self.moves += 1;
        let due = |op: &Op| op.not_before <= self.moves;
        let due_count = self.pending.iter().filter(|op| due(op)).count();
        let index = if due_count == 0 {
            let earliest = self.pending.iter().map(|op| op.not_before).min();
            let earliest = earliest.expect("there are pending operations");
            self.moves = earliest;
            self.pending.iter().position(|op| op.not_before == earliest)
        } else {
            let chosen = self.rng.index(due_count);
            let mut due_indexes = (0..self.pending.len()).filter(|i| due(&self.pending[*i]));
            due_indexes.nth(chosen)
        };
        let index = index.expect("an operation was counted");
        // In parts, or some time before completion: both happen on real disks.
        if !self.pending[index].effects.is_empty() && self.rng.chance(30) {
            self.apply_some(index);
        } else {
            self.complete(index);
        }
        true
    }

    /// [`State::step`], but if none is due only time passes.
    pub fn step_if_due(&mut self) -> bool {
        let due = self
            .pending
            .iter()
            .any(|op| op.not_before <= self.moves + 1);
        if !due {
            self.moves += 1;
            return false;
        }
        self.step()
    }

    /// Applies some part of the effects of an operation, and leaves it pending.
    fn apply_some(&mut self, index: usize) {
        let sector = self.files[self.pending[index].file].sector_bytes();
        let effect = self.pending[index].effects.remove(0);
        let (start, end) = effect.range();
        let unit = match effect {
            Effect::Write { .. } => sector,
            Effect::Zero { .. } | Effect::Punch { .. } => SPACE_ATOM_BYTES,
            Effect::Allocate { .. } | Effect::SetLen(_) => return self.apply(index, effect),
        };
        let cuts = (end - 1) / unit - start / unit;
        if cuts == 0 || self.rng.chance(70) {
            return self.apply(index, effect);
        }
        let cut = (start / unit + self.rng.between(1, cuts)) * unit;
        let mut halves = [effect.part(start, cut - start), effect.part(cut, end - cut)];
        self.rng.shuffle(&mut halves);
        let [now, later] = halves;
        self.pending[index].effects.insert(0, later);
        self.apply(index, now);
    }

    fn apply(&mut self, index: usize, effect: Effect) {
        let op = &self.pending[index];
        self.trace.about(|| {
            let file = &self.files[op.file].name;
            let (start, end) = effect.range();
            Line {
                about: About::Host(file.clone(), start..end),
                who: "disk".to_string(),
                io: Some(op.id),
                text: format!("takes effect: {file} {}", effect.describe()),
            }
        });
        let file = &mut self.files[op.file];
        effect.apply(&mut file.volatile);
        file.log.push(Logged {
            op: op.id,
            effect,
            completed: None,
            durable: false,
            outlived: false,
        });
    }

    fn complete(&mut self, index: usize) {
        self.finish_effects(index);
        let mut op = self.pending.remove(index);
        let now = self.tick();
        self.counters.completed += 1;
        self.counters.flushes += u64::from(op.verb == Verb::Flush);
        self.trace.mark(op.id << 8 | 1);
        self.trace.about(|| {
            let how = match op.errno {
                None => "completes".to_string(),
                Some(errno) => format!("fails with error {errno}"),
            };
            let file = &self.files[op.file].name;
            Line {
                about: self.touches(&op),
                who: "disk".to_string(),
                io: Some(op.id),
                text: format!("{how}: {file} {}", op.describe()),
            }
        });
        let file = &mut self.files[op.file];
        for entry in file.log.iter_mut().filter(|entry| entry.op == op.id) {
            entry.completed = Some(now);
        }
        if op.durable && op.errno.is_none() && self.lie != Lie::DurableWritesAreNot {
            file.make_durable(op.id);
        }
        if op.verb == Verb::Flush || (op.durable && op.errno.is_some()) {
            self.flush(&op);
        }
        self.event(op.verb, Moment::Completion);
        if op.errno.is_some_and(|errno| errno != ENOTSUP) {
            self.failed();
        }
        let outcome = op.errno.map_or(Ok(()), |errno| {
            Err(if errno == ENOTSUP {
                io::Error::from(io::ErrorKind::Unsupported)
            } else {
                io::Error::from_raw_os_error(errno)
            })
        });
        let file = &self.files[op.file];
        match op.answer {
            Answer::Read {
                offset,
                mut buf,
                to,
            } => {
                match outcome {
                    Ok(()) => {
                        let mut bytes = vec![0; buf.len()];
                        file.volatile.read(offset, &mut bytes);
                        buf.copy_from_slice(0, &bytes);
                    }
                    // The buffer of a failed read may hold anything.
                    Err(_) => buf.fill(0xe1),
                }
                to.complete((outcome, buf));
            }
            Answer::Done(to) | Answer::Flush(to) => to.complete(outcome),
            Answer::Len(to) => to.complete(outcome.map(|()| file.volatile.len())),
            Answer::Extents { offset, len, to } => {
                to.complete(outcome.map(|()| extents(&file.volatile, offset, len)));
            }
            Answer::Holes { range, most, to } => {
                let len = range.end - range.start;
                let unwritten = extents(&file.volatile, range.start, len).into_iter();
                // The others have space that was never written.
                let holes = unwritten.filter(|run| run.hole && self.rng.chance(30));
                let holes = holes.map(|run| run.start..run.start + run.len);
                let holes = Holes {
                    ranges: holes.take(most).collect(),
                    looked_until: range.end,
                    by: HolesBy::Extents,
                };
                to.complete(outcome.map(|()| holes));
            }
        }
        op.effects = Vec::new();
    }

    /// The effects that are left when an operation completes: all of them, or if it fails any.
    fn finish_effects(&mut self, index: usize) {
        let effects = std::mem::take(&mut self.pending[index].effects);
        let failed = self.pending[index].errno.is_some();
        let sector = self.files[self.pending[index].file].sector_bytes();
        for effect in effects {
            if !failed {
                self.apply(index, effect);
                continue;
            }
            // A transfer that stops short, or anything.
            let atoms = effect.atoms(sector);
            let short = self.rng.chance(50).then(|| self.rng.index(atoms.len() + 1));
            for (at, atom) in atoms.into_iter().enumerate() {
                let is_length = matches!(atom, Effect::SetLen(_) | Effect::Allocate { .. });
                let happens = match short {
                    Some(end) => at < end,
                    None => self.rng.chance(30),
                };
                if !is_length && happens {
                    self.apply(index, atom);
                }
            }
        }
    }

    fn flush(&mut self, op: &Op) {
        let file = &mut self.files[op.file];
        let rng = &mut self.rng;
        if op.errno.is_some() {
            // The kernel has dropped some of the dirty pages' marks: their bytes are still read
            // from memory, and no later flush writes them, nor reports it. A durable write that
            // fails reports, and so hides from later flushes, the failures of all pages of the
            // file.
            let kept = rng.pick(&[0, 50, 100]);
            file.persist(op.issued, || !rng.chance(kept));
            // So it goes with pages of writes that are still under way: a durable one among them
            // then finds nothing to write, and no error.
            return file.forget_in_flight(op.id, || !rng.chance(kept));
        }
        match self.lie {
            Lie::None | Lie::DurableWritesAreNot => file.persist(op.issued, || false),
            Lie::FlushDoesNothing => {}
            Lie::FlushForgetsSome => file.persist(op.issued, || rng.chance(20)),
        }
    }

    pub fn has_outlived_at_risk(&self, name: &str) -> bool {
        let mut files = self.files.iter().filter(|file| file.name == name);
        files.any(FileState::has_outlived_at_risk)
    }

    pub fn has_hole_at_risk(&self, name: &str) -> bool {
        let is_hole = |effect: &Effect| matches!(effect, Effect::Punch { .. });
        let mut in_flight = self
            .pending
            .iter()
            .filter(|op| self.files[op.file].name == name);
        in_flight.any(|op| op.effects.iter().any(is_hole))
            || self
                .files
                .iter()
                .filter(|file| file.name == name)
                .any(|file| file.log.iter().any(|entry| is_hole(&entry.effect)))
    }

    /// How many effects a crash would have to decide.
    pub fn undecided(&self) -> usize {
        let logged: usize = self.files.iter().map(|file| file.log.len()).sum();
        let in_flight: usize = self.pending.iter().map(|op| op.effects.len()).sum();
        logged + in_flight
    }

    /// The power fails: what is left of each file.
    pub fn crash(mut self, rng: Rng) -> Vec<FileState> {
        let crash = Crash::draw(rng, self.losses, self.undecided());
        let mut order: Vec<usize> = (0..self.pending.len()).collect();
        self.rng.shuffle(&mut order);
        self.outcome(crash, &order, &self.trace)
    }

    /// Returns each file as a power failure at this moment would leave it.
    pub fn if_power_failed(
        &self,
        mut rng: Rng,
        (losses, trace): (Losses, &Trace),
    ) -> Vec<FileState> {
        let mut order: Vec<usize> = (0..self.pending.len()).collect();
        rng.shuffle(&mut order);
        let crash = Crash::draw(rng, losses, self.undecided());
        self.outcome(crash, &order, trace)
    }

    /// Returns each file as a crash leaves it, if operations under way would have taken effect in
    /// this order.
    fn outcome(&self, mut crash: Crash, order: &[usize], trace: &Trace) -> Vec<FileState> {
        trace.line(|| {
            let (effects, pending) = (self.undecided(), self.pending.len());
            format!(
                "POWER FAILS with {effects} effects at risk, {pending} operations in flight ({})",
                crash.describe()
            )
        });
        let mut survivors = Vec::new();
        for (index, file) in self.files.iter().enumerate() {
            let (sector, mut left) = (file.sector_bytes(), file.durable.clone());
            let map = crash.goes_by_structure().then(|| Map::of(&file.volatile));
            let logged = file.log.iter();
            let mut effects: Vec<(u64, &Effect, bool)> = logged
                .map(|entry| (entry.op, &entry.effect, entry.durable))
                .collect();
            let pending = order.iter().map(|&at| &self.pending[at]);
            for op in pending.filter(|op| op.file == index) {
                effects.extend(op.effects.iter().map(|effect| (op.id, effect, false)));
            }
            for (op, effect, durable) in effects {
                let fate = if durable {
                    effect.apply(&mut left);
                    Fate::Applied
                } else {
                    let place = map.as_ref().map(|map| structure(map, effect));
                    crash.decide((effect, place), sector, &mut left)
                };
                trace.about(|| {
                    let (start, end) = effect.range();
                    let flushed = if durable { ", a durable write" } else { "" };
                    let what = format!("{} {}{flushed}", file.name, effect.describe());
                    Line {
                        about: About::Host(file.name.clone(), start..end),
                        who: "crash".to_string(),
                        io: Some(op),
                        text: format!("{fate}: {what}"),
                    }
                });
            }
            survivors.push(FileState::new(&file.name, file.capabilities.clone(), left));
        }
        survivors
    }

    /// The process dies and the system lives: operations in flight take effect or not, and what was
    /// not flushed stays unflushed.
    pub fn kill(&mut self, mut rng: Rng) {
        self.trace.line(|| {
            let pending = self.pending.len();
            format!("PROCESS DIES with {pending} operations in flight")
        });
        let now = self.tick();
        self.power_left = None;
        self.power_flushes = None;
        self.power_after_fault = None;
        self.undelivered.clear();
        while !self.pending.is_empty() {
            let effects = std::mem::take(&mut self.pending[0].effects);
            for effect in effects {
                if rng.chance(50) {
                    self.apply(0, effect);
                }
            }
            let op = self.pending.remove(0);
            let log = self.files[op.file].log.iter_mut();
            for entry in log.filter(|entry| entry.op == op.id) {
                entry.completed = Some(now);
            }
        }
        let logs = self.files.iter_mut().map(|file| &mut file.log);
        for entry in logs.flatten() {
            entry.outlived = true;
        }
    }

    /// Puts all effects so far on the medium.
    pub fn persist_all(&mut self) {
        for file in &mut self.files {
            file.durable = file.volatile.clone();
            file.log.clear();
            file.outlived_lost = false;
        }
    }
}

impl Op {
    fn fingerprint(&self) -> u64 {
        let (start, end) = self.range;
        start ^ (end << 20) ^ ((self.file as u64) << 56) ^ ((self.verb as u64) << 48)
    }

    fn describe(&self) -> String {
        let durable = if self.durable { " durable" } else { "" };
        let verb = match (self.verb, &self.answer) {
            (Verb::Query, Answer::Extents { .. }) => "extents",
            (Verb::Query, Answer::Holes { .. }) => "holes",
            (Verb::Query, _) => "len",
            (Verb::Flush, _) => "flush",
            (Verb::Read, _) => "read",
            (Verb::Write | Verb::DurableWrite | Verb::CountWrite | Verb::L1Write, _) => "write",
            (Verb::Zero, _) => "zero",
            (Verb::Discard, _) => "punch",
            (Verb::Allocate, _) => "allocate",
            (Verb::SetLen, _) => return format!("set_len {:#x}", self.range.0),
        };
        match self.range {
            (start, end) if start == end => verb.to_string(),
            (start, end) => format!("{verb}{durable} {start:#x}+{:#x}", end - start),
        }
    }
}

impl Asked {
    /// The bytes of the file that it is about; empty if none.
    fn range(&self) -> (u64, u64) {
        match (&self.answer, self.effects.first(), self.effects.last()) {
            (Answer::Read { offset, buf, .. }, ..) => (*offset, offset + buf.len() as u64),
            (Answer::Extents { offset, len, .. }, ..) => (*offset, offset + len),
            (Answer::Holes { range, .. }, ..) => (range.start, range.end),
            (_, Some(first), Some(last)) => (first.range().0, last.range().1),
            _ => (0, 0),
        }
    }
}

fn extents(content: &Content, offset: u64, len: u64) -> Vec<FileExtent> {
    let mut runs: Vec<FileExtent> = Vec::new();
    let end = offset + len;
    let mut at = offset;
    while at < end {
        let next = end.min((at / PAGE_BYTES + 1) * PAGE_BYTES);
        let hole = at >= content.len() || !content.has_page_at(at);
        let (start, len) = (at, next - at);
        FileExtent { start, len, hole }.add_to(&mut runs);
        at = next;
    }
    runs
}
