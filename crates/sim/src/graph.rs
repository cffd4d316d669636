//! Graphs of disks that change under their guests: snapshots, streams, commits, mirrors, backups,
//! checkpoints, resizes and transactions, and the power fails meanwhile.
//!
//! Runs of their own, with seeds from 6 * 2^40 on. There are two disks, each with a chain of
//! images and a client's disk in front of it ([`world`]). In a session guests read, write, zero,
//! discard and flush ([`guest`]) while a script for each disk changes its chain ([`script`]), by
//! the steps that a daemon takes too (`cowslip_graph`); the world does what those ask for. Looks
//! show what the power would leave at a flush, and each session ends with a close, a dead process
//! or a power failure ([`ending`]). Then the disk is read through each image that may show it.

mod attending;
mod checkpoint;
mod ending;
mod figures;
mod guest;
mod images;
mod kept;
mod marks;
mod opinions;
mod script;
mod transaction;
mod world;

use std::cell::RefCell;
use std::rc::Rc;

use cowslip::image::Format;

use crate::disk::fault::{Duration, EIO, ENOSPC, Fault, Verb};
use crate::disk::{Losses, Pace, SimDisk};
use crate::drive::{Stop, drive};
use crate::executor::{Executor, Kind};
use crate::model::{Grain, Model, SECTOR_BYTES, ZERO};
use crate::rng::Rng;
use crate::seeds;
use crate::trace::Trace;

use images::Files;
use kept::{Kept, Past};
use world::World;

pub use figures::Figures;

/// Seeds from here on are about graphs.
pub const FIRST_SEED: u64 = seeds::GRAPHS;
/// Runs in a soak that demands coverage.
const RUNS: u64 = 40;
/// Percent of the flushes at which it is looked what the power would leave, beside those of steps.
const LOOKS_PERCENT: u64 = 10;
/// Looks in a session beside those at steps.
const LOOKS_MAX: u64 = 25;
/// The largest disk.
const SIZE_MAX: u64 = 160 << 10;

/// Seeds for some runs.
pub(crate) fn seeds(attempt: u64) -> Vec<u64> {
    (0..RUNS)
        .map(|run| FIRST_SEED + attempt * RUNS + run)
        .collect()
}

/// A disk of a guest, between sessions.
#[derive(Debug)]
pub(crate) struct Drive {
    /// The image that a restarted host opens.
    file: (String, Format),
    model: Rc<RefCell<Model>>,
    kept: Rc<RefCell<Vec<Kept>>>,
    pasts: Rc<RefCell<Vec<Past>>>,
    alive: Rc<RefCell<Vec<(String, String)>>>,
}

struct Run {
    seed: u64,
    disk: SimDisk,
    files: Files,
    drives: Vec<Drive>,
    rng: Rng,
    trace: Trace,
    figures: Rc<RefCell<Figures>>,
    /// The number of the next request.
    next: Rc<RefCell<u32>>,
    /// Operations of this disk that the figures have.
    counted: u64,
}

/// Performs the run of a seed.
///
/// # Errors
/// What went wrong.
pub(crate) fn run(seed: u64, trace: &Trace, figures: &Rc<RefCell<Figures>>) -> Result<(), String> {
    let disk = SimDisk::new(Rng::derived(seed, "disk", 0), trace.clone());
    let mut run = Run {
        seed,
        files: Files::new(disk.clone()),
        disk,
        drives: Vec::new(),
        rng: Rng::derived(seed, "graph", 0),
        trace: trace.clone(),
        figures: Rc::clone(figures),
        next: Rc::new(RefCell::new(1)),
        counted: 0,
    };
    run.build()?;
    for session in 0..run.rng.between(1, 3) {
        run.session(session)?;
    }
    Ok(())
}

/// How a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Close,
    Kill,
    Crash,
}

impl Run {
    /// Two disks, of one image to three each.
    fn build(&mut self) -> Result<(), String> {
        for number in 0..2 {
            let size = self.rng.between(8, SIZE_MAX / SECTOR_BYTES) * SECTOR_BYTES;
            let format = match self.rng.chance(20) {
                true => Format::Raw,
                false => Format::Qcow2,
            };
            let mut top: Option<(String, Format)> = None;
            for depth in 0..self.rng.between(1, 3) {
                let format = if depth == 0 { format } else { Format::Qcow2 };
                let name = format!("disk{number}-{depth}.img");
                let style = images::Style::draw(&mut self.rng);
                let below = top.as_ref().map(|(name, format)| (&**name, *format));
                let making = self.files.make((&name, format), (size, style), below);
                let made = crate::drive::block_on(&self.disk, &mut self.rng, "create", making)?;
                made.map_err(|error| format!("creating {name}: {error}"))?;
                top = Some((name, format));
            }
            let granules = 0..SIZE_MAX / SECTOR_BYTES;
            let windows = std::slice::from_ref(&granules);
            let model = Model::new(Grain::new(vec![0]), windows, |_| ZERO);
            self.drives.push(Drive {
                file: top.expect("there is an image"),
                model: Rc::new(RefCell::new(model.with_size(size))),
                kept: Rc::default(),
                pasts: Rc::default(),
                alive: Rc::default(),
            });
        }
        self.disk.persist_all();
        Ok(())
    }

    fn session(&mut self, number: u64) -> Result<(), String> {
        self.disk.set_pace(self.rng.pick(&[
            Pace::Prompt,
            Pace::Mixed,
            Pace::Stragglers,
            Pace::SlowReads,
            Pace::SlowWrites,
        ]));
        let world = self.open()?;
        let mut executor = Executor::default();
        executor.set_slow(self.rng.chance(50));
        for port in &world.ports {
            for guest in 0..self.rng.between(1, 4) {
                let rng = Rng::derived(self.seed, "guest", number * 16 + port.number * 8 + guest);
                let serving = guest::serve(Rc::clone(&world), Rc::clone(port), rng);
                executor.spawn(format!("guest {guest}"), Kind::Foreground, serving);
            }
            let rng = Rng::derived(self.seed, "script", number * 16 + port.number);
            let script = script::follow(Rc::clone(&world), Rc::clone(port), rng);
            executor.spawn(format!("script {}", port.number), Kind::Foreground, script);
        }
        let ending = self.draw_ending();
        self.trace.line(|| format!("session {number} {ending:?}"));
        let stop = self.drive(&mut executor, &world)?;
        self.end(world, (executor, stop), ending)
    }

    /// Draws how the session ends, and which operations fail in it.
    fn draw_ending(&mut self) -> Ending {
        let ending = match self.rng.below(10) {
            0..2 => Ending::Close,
            2 => Ending::Kill,
            _ => Ending::Crash,
        };
        if ending != Ending::Close {
            match self.rng.chance(50) {
                true => self
                    .disk
                    .fail_power_at_flush(self.rng.between(1, 40), self.rng.below(5)),
                false => {
                    let most = self.rng.pick(&[60, 300, 1200, 4000]);
                    self.disk.fail_power_after(self.rng.between(1, most));
                }
            }
        }
        let mut faults = Vec::new();
        if self.rng.chance(25) {
            for _ in 0..self.rng.between(1, 3) {
                let verb = self.rng.pick(&[
                    Verb::Write,
                    Verb::Write,
                    Verb::Flush,
                    Verb::Flush,
                    Verb::Read,
                    Verb::SetLen,
                ]);
                let most = if verb == Verb::Flush { 30 } else { 300 };
                faults.push(Fault {
                    verb,
                    after: self.rng.below(most),
                    errno: self.rng.pick(&[ENOSPC, EIO]),
                    duration: Duration::Once,
                    file: None,
                });
            }
        }
        self.disk.set_faults(&faults);
        ending
    }

    /// Moves all on until the guests and scripts have ended, or the power fails.
    fn drive(&mut self, executor: &mut Executor, world: &Rc<World>) -> Result<Stop, String> {
        let mut rng = Rng::new(self.rng.bits());
        let mut looks = Rng::new(self.rng.bits());
        let (mut found, mut left) = (Ok(()), LOOKS_MAX);
        let stop = drive(executor, &self.disk, &mut rng, |executor, _| {
            for (name, task) in world.spawned.borrow_mut().drain(..) {
                executor.spawn(name, Kind::Background, task);
            }
            if let Some(what) = world.failure.borrow_mut().take() {
                found = Err(what);
                return Some(Stop::Failure);
            }
            if let Some(at_risk) = self.disk.issued_flush() {
                let aimed = world.aimed.get();
                world.aimed.set(aimed.saturating_sub(1));
                let by_structure = Losses::by_structure(at_risk).filter(|_| aimed > 0);
                for losses in std::iter::once(Losses::Adverse).chain(by_structure) {
                    let is_drawn = left > 0 && looks.chance(LOOKS_PERCENT);
                    if aimed == 0 && !is_drawn {
                        continue;
                    }
                    left -= u64::from(aimed == 0);
                    self.figures.borrow_mut().crashes += 1;
                    found = self.look(world, (&Rng::new(looks.bits()), losses));
                    if found.is_err() {
                        return Some(Stop::Failure);
                    }
                }
            }
            (executor.unfinished() == 0).then_some(Stop::Idle)
        })?;
        found.map(|()| stop)
    }

    /// Checks what a power failure at this moment would leave of each disk.
    fn look(&self, world: &World, (rng, losses): (&Rng, Losses)) -> Result<(), String> {
        let left = self.disk.if_power_failed(rng, (losses, &Trace::off()));
        for port in &world.ports {
            for file in port.shown_by() {
                let found = opinions::second_opinion(&left, &file, &port.model.borrow());
                found.map_err(|what| {
                    if self.trace.is_kept() {
                        // The same once more, for the record.
                        self.disk.if_power_failed(rng, (losses, &self.trace));
                    }
                    format!("if the power failed now: {what}")
                })?;
            }
            for kept in port.kept.borrow().iter() {
                let held = opinions::kept_opinion(&left, kept, &port.model.borrow());
                held.map_err(|what| format!("if the power failed now: {what}"))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_one_run() {
        let fingerprint = |seed| {
            let trace = Trace::off();
            run(seed, &trace, &Rc::default()).expect("it passes");
            trace.fingerprint()
        };
        let seeds = FIRST_SEED..FIRST_SEED + 4;
        for seed in seeds.clone() {
            assert_eq!(fingerprint(seed), fingerprint(seed));
        }
        assert_ne!(fingerprint(seeds.start), fingerprint(seeds.start + 1));
    }
}
