//! Recovery from one ending to the next session: the image is opened again, its content is checked,
//! and the first requests are served, on a disk whose power may fail again at any point of it, or
//! whose operations fail. Each of these endings is checked like any other.

use cowslip::qcow2::probe::Stage;
use cowslip_queue::BufMut;

use crate::anatomy;
use crate::config::{Ending, Kind, Part, Round, draw_faults};
use crate::disk::Losses;
use crate::disk::fault::{Duration, EIO, Fault, Verb};
use crate::drive::{Stop, attempt, attempt_watched, block_on};
use crate::goals::Goal;
use crate::inspect::inspect;
use crate::matrix::{Phase, Situation, Target};
use crate::model::{Model, Survival};
use crate::names::TOP;
use crate::places;
use crate::possible::{adopt_snapshot, keep_possible};
use crate::prepare;
use crate::profile::Profile;
use crate::rng::Rng;
use crate::run::{Run, Work};
use crate::second_reader::Layer;
use crate::subject::Subject;

/// Numbers of requests from here on belong to recoveries.
const FIRST_NUMBER: u64 = 9000;
/// Numbers of one recovery.
const NUMBERS: u64 = 40;

/// How one attempt to recover goes.
#[derive(Clone, Debug, Default)]
struct Plan {
    /// Number of events after which the power fails.
    power: Option<u64>,
    /// Or there.
    target: Option<Target>,
    /// The other faults.
    faults: Vec<Fault>,
    /// Requests before the session proper.
    requests: u64,
}

/// A failure of something that openings do.
fn opening_fault(rng: &mut Rng) -> Fault {
    Fault {
        verb: rng.pick(&[
            Verb::Read,
            Verb::Read,
            Verb::Query,
            Verb::Write,
            Verb::Flush,
        ]),
        after: rng.below(6),
        errno: EIO,
        duration: rng.pick(&[Duration::Once, Duration::Once, Duration::Forever]),
        file: None,
    }
}

/// Outcome of an attempt.
enum Attempt {
    /// The image is open.
    Open(Subject),
    /// The disk has crashed again.
    Crashed,
}

impl Run<'_> {
    /// The attempts before the one that succeeds.
    fn plans(&self, index: usize) -> Vec<Plan> {
        let without = |part| self.changes.without.contains(&part);
        if without(Part::Recoveries) {
            return Vec::new();
        }
        if let Profile::Directed(goal) = self.config.profile {
            return self.directed_plans(goal, index);
        }
        if let Profile::Story(story) = self.config.profile {
            let plan = Plan {
                requests: 1,
                ..Plan::default()
            };
            return vec![plan; story.broken_openings()];
        }
        if self.survival.is_none() {
            return self.first_plan().into_iter().collect();
        }
        let rng = &mut Rng::derived(self.seed, "recoveries", index as u64);
        let count = rng.pick(&[0, 0, 0, 0, 0, 1, 2, 3]);
        let mut plan = || Plan {
            power: match rng.below(10) {
                0 => Some(rng.between(1, 12)),
                1 => Some(rng.between(12, 60)),
                2 | 3 => Some(rng.between(12, 300)),
                _ => None,
            },
            target: (self.config.kind == Kind::Qcow2).then(|| Target::draw(&self.config, rng)),
            faults: match rng.chance(15) && !without(Part::Faults) {
                true => draw_faults(rng),
                false => Vec::new(),
            },
            requests: rng.pick(&[1, 8, 16, 32, 40]),
        };
        (0..count).map(|_| plan()).collect()
    }

    /// The first opening of a run, which now and then meets a failure like those after an ending.
    fn first_plan(&self) -> Option<Plan> {
        let rng = &mut Rng::derived(self.seed, "first opening", 0);
        let without = |part| self.changes.without.contains(&part);
        let plan = Plan {
            power: rng.chance(50).then(|| rng.between(1, 30)),
            target: None,
            faults: match rng.chance(50) && !without(Part::Faults) {
                true => vec![opening_fault(rng)],
                false => Vec::new(),
            },
            requests: rng.pick(&[1, 8, 16]),
        };
        (rng.chance(8) && self.changes.edit.is_none()).then_some(plan)
    }

    /// Returns the plans of a directed run before a session.
    fn directed_plans(&self, goal: Goal, index: usize) -> Vec<Plan> {
        let rng = &mut Rng::derived(self.seed, "recoveries", index as u64);
        let later = self.survival.is_some();
        let mut plan = |faults: Vec<Fault>| Plan {
            target: Target::of(&self.config, rng),
            requests: NUMBERS,
            faults,
            ..Plan::default()
        };
        match goal {
            Goal::Cell(_, Situation::Recovery, _) if later => {
                (0..3).map(|_| plan(vec![])).collect()
            }
            Goal::Point((Phase::Recovery, ..)) if later => vec![plan(vec![])],
            Goal::Point((Phase::Opening, ..)) => vec![plan(vec![])],
            Goal::Fault(Verb::Query, errno) => {
                let faults = (0..2).map(|after| Fault {
                    verb: Verb::Query,
                    after,
                    errno,
                    duration: Duration::Once,
                    file: None,
                });
                faults.map(|fault| plan(vec![fault])).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Opens the image and checks it.
    pub fn recover(&mut self, index: usize, round: &Round) -> Result<Subject, String> {
        if self.survival == Some(Survival::Durable) {
            self.soil(index);
        }
        let plans = self.plans(index);
        for (number, plan) in plans.iter().enumerate() {
            self.trace.line(|| format!("RECOVERY {number}: {plan:?}"));
            match self.attempt_recovery((index, number as u64), round, plan)? {
                Attempt::Open(subject) => return Ok(subject),
                Attempt::Crashed => {}
            }
        }
        match self.attempt_recovery((index, plans.len() as u64), round, &Plan::default())? {
            Attempt::Open(subject) => Ok(subject),
            Attempt::Crashed => Err("the power failed, though nobody asked for it".to_string()),
        }
    }

    /// Attempts a recovery: open, check, first requests.
    fn attempt_recovery(
        &mut self,
        (index, number): (usize, u64),
        round: &Round,
        plan: &Plan,
    ) -> Result<Attempt, String> {
        self.disk.set_pace(self.config.pace);
        self.disk.set_lie(self.config.lie);
        if let Profile::Story(_) = self.config.profile {
            self.disk.set_losses(Losses::Adverse);
        }
        self.disk.set_faults(&plan.faults);
        if let Some(events) = plan.power {
            self.disk.fail_power_after(events);
        }
        self.aim_at_plan(Phase::Opening, plan, (index, number));
        let opening = prepare::open(&self.config, round, &self.disk);
        let (mut rng, mut found) = (self.rng.clone(), Ok(()));
        let opened = attempt_watched((&self.disk, &mut rng), "open", opening, || {
            if found.is_ok() {
                found = self.look(&self.disk);
            }
        })?;
        self.rng = rng;
        found.map_err(|what| format!("while the image is opened, {what}"))?;
        if let Some(failed) = self.disk.delivered().1 {
            let file = plan.faults.first().and_then(|fault| fault.file);
            let mut coverage = self.coverage.borrow_mut();
            coverage.fault(Stage::Idle, failed, file);
        }
        let subject = match opened {
            None => return self.crash_again(None, 0),
            Some(Err(error)) if self.disk.delivered().0 > 0 => {
                self.trace
                    .line(|| format!("the image does not open: {error}"));
                return self.crash_again(None, 0);
            }
            Some(Err(error)) => return Err(format!("the image does not open: {error}")),
            Some(Ok(subject)) => subject,
        };
        // Lagging structures were repaired first.
        self.lag.counts = false;
        self.watch(&subject);
        // The reads of the check are no part of the recovery: nothing happens to them.
        let left = self.disk.hold_power();
        let faults = self.disk.faults();
        self.disk.set_faults(&[]);
        self.verify(&subject)?;
        self.disk.put_faults(faults);
        if let Some(left) = left {
            self.disk.fail_power_after(left);
        }
        self.first_requests((index, number), round, plan, subject)
    }

    /// The attempt after all plans is spared.
    fn aim_at_plan(&self, phase: Phase, plan: &Plan, (index, number): (usize, u64)) {
        if plan.requests > 0 {
            self.aim_at(phase, index + number as usize * 100);
        }
    }

    fn first_requests(
        &mut self,
        (index, number): (usize, u64),
        round: &Round,
        plan: &Plan,
        subject: Subject,
    ) -> Result<Attempt, String> {
        let rounds = self.config.rounds.len();
        let first = FIRST_NUMBER + NUMBERS * number + if index < rounds { 0 } else { 10 * NUMBERS };
        let round = Round {
            faults: plan.faults.clone(),
            depth: 16,
            // The image outlives these tasks: one of its cycles would be broken off, and latch it.
            maintained: false,
            ..round.clone()
        };
        let work = Work {
            round_index: index.min(rounds - 1),
            numbers: first..first + plan.requests,
            round: &round,
            target: plan.target,
        };
        self.aim_at_plan(Phase::Recovery, plan, (index, number));
        let served = self.serve(&work, &subject)?;
        let failed = self.disk.delivered().0;
        self.totals.faults += failed;
        if served.stop == Stop::PowerOff || failed > 0 {
            // Tasks that are gone are in no stage: look before they are.
            self.see(Some(&subject), served.in_flight, Phase::Recovery)?;
            self.totals.cut_short(served.compacting);
            drop(served);
            return self.end_attempt(Some(subject));
        }
        drop(served);
        if self.rng.chance(50) {
            let flusher = subject.clone();
            let flushing = async move { flusher.flush().await };
            let begun = self.model.begin_flush();
            match attempt(&self.disk, &mut self.rng, "settle", flushing)? {
                None => return self.crash_again(Some(subject), 1),
                Some(Ok(())) => self.model.end_flush(begun),
                Some(Err(_)) if self.disk.delivered().0 > 0 => {
                    return self.crash_again(Some(subject), 1);
                }
                Some(Err(error)) => return Err(format!("flush after reopening: {error}")),
            }
            // A flush that succeeded may still have met a failure, lowering counts.
            if self.disk.delivered().0 > 0 {
                return self.crash_again(Some(subject), 1);
            }
            self.disk.hold_power();
            self.disk.set_faults(&[]);
            self.check("after reopening")?;
        }
        self.disk.hold_power();
        Ok(Attempt::Open(subject))
    }

    fn crash_again(&mut self, subject: Option<Subject>, busy: usize) -> Result<Attempt, String> {
        let phase = match subject {
            Some(_) => Phase::Recovery,
            None => Phase::Opening,
        };
        self.see(subject.as_ref(), busy, phase)?;
        self.end_attempt(subject)
    }

    fn end_attempt(&mut self, subject: Option<Subject>) -> Result<Attempt, String> {
        // The loss of a failed flush is seen on the medium only.
        let flush_failed = self.disk.faults().flush_failed;
        let how = match self.rng.chance(10) && !flush_failed {
            true => Ending::Kill(0),
            false => Ending::Crash(0),
        };
        self.stop(how, subject)?;
        Ok(Attempt::Crashed)
    }

    /// Makes the image dirty now and then, with counts that lag, as another program would leave it.
    fn soil(&mut self, index: usize) {
        let rng = &mut Rng::derived(self.seed, "dirty", index as u64);
        let percent = match self.config.profile {
            Profile::Story(_) => 100,
            _ => 40,
        };
        let lazy = self.config.kind == Kind::Qcow2 && self.config.layout.lazy_refcounts;
        if lazy && !self.changes.without.contains(&Part::Dirty) && rng.chance(percent) {
            self.trace.line(|| "the image is made dirty".to_string());
            self.lag.counts = true;
            self.disk.edit(TOP, |content| anatomy::soil(content, rng));
        }
    }

    /// Reads everything, and holds it against what may be left.
    fn verify(&mut self, subject: &Subject) -> Result<(), String> {
        let Some(survival) = self.survival.take() else {
            return Ok(());
        };
        let mut disks = self.snapshots.disks(&self.model, survival);
        self.verify_list(subject, survival)?;
        // A raw file that asks for aligned writes grows to whole blocks with the first one at its
        // end, and a raw disk with it.
        if let (Some(size), true) = (subject.size(), self.config.kind == Kind::Qcow2) {
            keep_possible(&mut disks, |disk| disk.adopt_size(size, survival))
                .map_err(|violation| violation.to_string())?;
        }
        let second = match self.config.kind {
            Kind::Qcow2 | Kind::Raw => prepare::second(&self.disk, self.looks.keys())?,
            Kind::Plain => None,
        };
        for window in self.model.windows() {
            let window = disks[0].on_disk(&window);
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
                second
                    .as_ref()
                    .map_or(Ok(()), |layer| prepare::compare(layer, start, &buf))?;
                let adopted =
                    keep_possible(&mut disks, |disk| disk.adopt(&granules, &buf, survival));
                adopted.map_err(|violation| {
                    self.trace
                        .focus(|| places::of(&self.disk, violation.offset));
                    violation.to_string()
                })?;
            }
        }
        self.verify_vm_state(subject, (&mut disks, survival), second.as_ref())?;
        self.model = disks.swap_remove(0);
        self.verify_snapshots()?;
        self.verify_bitmaps(subject, survival)
    }

    /// The file has the bitmaps that it may have, and the engine reads them as the second opinion
    /// does.
    fn verify_bitmaps(&mut self, subject: &Subject, survival: Survival) -> Result<(), String> {
        if self.config.kind != Kind::Qcow2 {
            return Ok(());
        }
        let content = self.disk.content(TOP).expect("the run has made it");
        let found = inspect(&content).bitmaps;
        let reader = subject.clone();
        let reading = async move { reader.bitmaps().await };
        let read = block_on(&self.disk, &mut self.rng, "read bitmaps", reading)?;
        let read =
            read.map_err(|error| format!("after reopening bitmaps are unreadable: {error}"))?;
        if read != found {
            return Err(format!(
                "the engine reads the bitmaps {read:x?}, the second opinion {found:x?}"
            ));
        }
        self.bitmaps.adopt(&found, (&self.model, survival))
    }

    /// Reads the VM state, and holds it against what may be left.
    fn verify_vm_state(
        &mut self,
        subject: &Subject,
        (disks, survival): (&mut Vec<Model>, Survival),
        second: Option<&Layer>,
    ) -> Result<(), String> {
        for granules in self.model.vm_state_windows() {
            let grain = self.model.grain();
            let start = grain.start(granules.start);
            let buf = BufMut::zeroed((grain.start(granules.end) - start) as usize);
            let reader = subject.clone();
            let reading = async move { reader.read_vm_state(start, buf).await };
            let read = block_on(&self.disk, &mut self.rng, "verify the VM state", reading)?;
            let buf = read.map_err(|error| format!("unreadable VM state: {error}"))?;
            if let Some(layer) = second {
                prepare::compare_vm_state(layer, start, &buf)?;
            }
            let adopted = keep_possible(disks, |disk| {
                let adopted = disk.vm_state(|state| state.adopt(&granules, &buf, survival));
                adopted.expect("the others have it too")
            });
            adopted.map_err(|violation| format!("VM state: {violation}"))?;
        }
        Ok(())
    }

    /// The image has the snapshots that it may have.
    fn verify_list(&mut self, subject: &Subject, survival: Survival) -> Result<(), String> {
        let Subject::Image(image) = subject else {
            return Ok(());
        };
        let image = std::sync::Arc::clone(image);
        let listing = async move { image.snapshots().await };
        let list = block_on(&self.disk, &mut self.rng, "list snapshots", listing)?;
        let list = list.map_err(|error| format!("the snapshots are not listed: {error}"))?;
        let ids: Vec<String> = list.into_iter().map(|snapshot| snapshot.id).collect();
        self.snapshots.adopt(&ids, (&self.model, survival))
    }

    /// Checks that every snapshot has its content. Uncertain parts are certain from now on.
    fn verify_snapshots(&mut self) -> Result<(), String> {
        let grain = self.model.grain().clone();
        let mut snapshots = std::mem::take(&mut self.snapshots);
        for snapshot in snapshots.known_mut() {
            let id = snapshot.id.clone();
            let opening = prepare::open_at(&self.config, &self.disk, &id);
            let opened = block_on(&self.disk, &mut self.rng, "open at a snapshot", opening)?;
            let subject =
                opened.map_err(|error| format!("snapshot {id} does not open: {error}"))?;
            if subject.size() != Some(snapshot.size) {
                return Err(format!("snapshot {id} has {:?} bytes", subject.size()));
            }
            let disk = snapshot.content.iter_mut().map(|part| (part, Place::Disk));
            let vm_state = snapshot.vm_state.iter_mut();
            let vm_state = vm_state.map(|part| (part, Place::VmState));
            for ((window, contents), place) in disk.chain(vm_state) {
                let end = match place {
                    Place::Disk => window.end.min(grain.index_of(snapshot.size)),
                    Place::VmState => window.end,
                };
                if end <= window.start {
                    continue;
                }
                let start = grain.start(window.start);
                let reader = subject.clone();
                let buf = BufMut::zeroed((grain.start(end) - start) as usize);
                let reading = async move {
                    match place {
                        Place::Disk => reader.read(start, buf).await,
                        Place::VmState => reader.read_vm_state(start, buf).await,
                    }
                };
                let read = block_on(&self.disk, &mut self.rng, "read a snapshot", reading)?;
                let buf = read.map_err(|error| format!("snapshot {id} is unreadable: {error}"))?;
                adopt_snapshot(&grain, (window.start..end, contents), &buf)
                    .map_err(|found| format!("snapshot {id} ({place:?}) has {found}"))?;
            }
        }
        self.snapshots = snapshots;
        Ok(())
    }
}

/// A place in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Disk,
    VmState,
}
