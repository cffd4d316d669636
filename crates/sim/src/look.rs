//! Looks: checks of the files that a power failure at this moment would leave; then the run goes
//! on.
//!
//! A run ends few of its sessions with a power failure, and a barrier that is missing shows only in
//! the moment before the next one is issued. So at some of the moments at which a flush is issued
//! the bytes that might survive are drawn, on a copy, and checked as those of a real ending: by the
//! second opinion on the file, and by the second reader's bytes, which the model must allow. The
//! engine is not asked, and nothing of the run changes, so a seed is the same run with and without.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::barriers::Barrier;
use crate::bitmaps::Bitmaps;
use crate::config::{Config, Kind};
use crate::disk::structure::Structures;
use crate::disk::{Losses, SimDisk};
use crate::goals::Goal;
use crate::inspect::{self, inspect};
use crate::model::{Granules, Model, Survival, Violation};
use crate::names::TOP;
use crate::places;
use crate::possible::{adopt_snapshot, keep_possible};
use crate::prepare::{self, Baseline, Keys, Lag};
use crate::profile::Profile;
use crate::remembered::Snapshots;
use crate::rng::Rng;
use crate::second_reader::Layer;
use crate::trace::Trace;

/// Granules that the looks of a session read, about.
const GRANULES_LOOKED_AT: u64 = 12_000;

/// Outcomes that are drawn where the header or the refcount table is at risk.
const LOOKS_AT_A_ROOT: usize = 2;

/// Flushes of a session that cover the same kinds of structure, and at which it is looked what the
/// loss of one of these kinds, or of all others, would leave.
const LOOKS_AT_A_KIND: u64 = 1;

/// Number of outcomes that are drawn of each structure, unless the run is aimed at a barrier.
const OUTCOMES_BY_STRUCTURE: usize = 2;

/// The expectations of a look.
#[derive(Clone, Copy)]
pub(crate) struct Known<'a> {
    pub model: &'a Model,
    pub snapshots: &'a Snapshots,
    pub bitmaps: &'a Bitmaps,
}

/// When a session is looked at.
#[derive(Debug)]
struct Plan {
    rng: Rng,
    /// Percent of the flushes.
    percent: u64,
    left: u64,
    /// Number of looks left at flushes that cover a root.
    roots_left: u64,
    /// Number of looks left at which each kind of structure is lost.
    kinds_left: u64,
    /// How often the flushes covered these.
    seen: BTreeMap<Structures, u64>,
    /// The barrier that the run is aimed at, and the looks at it.
    barrier: Option<(Barrier, u64)>,
}

/// A copy that a look draws.
type Draw = (Rng, Losses);

/// The looks of a run.
#[derive(Debug)]
pub(crate) struct Looks {
    keys: Keys,
    plan: RefCell<Plan>,
}

/// A run as a look needs it.
#[derive(Clone, Copy)]
pub(crate) struct Looker<'a> {
    pub looks: &'a Looks,
    pub config: &'a Config,
    pub baseline: &'a Baseline,
    pub lag: Lag,
    pub trace: &'a Trace,
}

impl Looks {
    /// None before the first session begins.
    pub fn new() -> Looks {
        Looks {
            keys: Keys::default(),
            plan: RefCell::new(Plan {
                rng: Rng::new(0),
                percent: 0,
                left: 0,
                roots_left: 0,
                kinds_left: 0,
                seen: BTreeMap::new(),
                barrier: None,
            }),
        }
    }

    /// The keys of the image under test.
    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// A session begins.
    pub fn begin(&self, config: &Config, (seed, session): (u64, u64)) {
        let rng = Rng::derived(seed, "looks", session);
        let (percent, left) = match config.profile {
            Profile::Story(story) => story.looks(),
            Profile::Directed(Goal::Barrier(_)) => (15, 60),
            Profile::Directed(_) => (25, 8),
            _ => (20, 6),
        };
        let is_asked = config.kind != Kind::Plain && config.looks;
        // Each look reads all of it.
        let granules: u64 = config.windows.iter().map(|w| w.end - w.start).sum();
        let left = left.min(GRANULES_LOOKED_AT / granules.max(1) + 2);
        let left = if is_asked { left } else { 0 };
        *self.plan.borrow_mut() = Plan {
            rng,
            percent,
            left,
            roots_left: left.div_ceil(2),
            kinds_left: left.div_ceil(3),
            seen: BTreeMap::new(),
            barrier: match config.profile {
                Profile::Directed(Goal::Barrier(barrier)) => Some((barrier, 0)),
                _ => None,
            },
        };
    }

    /// The barrier that the session was aimed at, and how often it was looked at.
    pub fn at_barrier(&self) -> Option<(Barrier, u64)> {
        self.plan.borrow().barrier
    }

    /// The copies that are drawn now, if it is time for any.
    fn next(&self, disk: &SimDisk) -> Vec<Draw> {
        let Some(at_risk) = disk.issued_flush() else {
            return Vec::new();
        };
        let plan = &mut *self.plan.borrow_mut();
        let count = if at_risk.has_root() && plan.roots_left > 0 {
            plan.roots_left -= 1;
            LOOKS_AT_A_ROOT
        } else {
            let due = plan.left > 0 && plan.rng.chance(plan.percent);
            plan.left -= u64::from(due);
            usize::from(due)
        };
        let mut losses = vec![Losses::Adverse; count];
        if plan.kinds_are_due(at_risk) {
            let mut by_structure: Vec<Losses> = Losses::by_structure(at_risk).collect();
            if plan.barrier.is_none() {
                plan.rng.shuffle(&mut by_structure);
                by_structure.truncate(OUTCOMES_BY_STRUCTURE);
            }
            losses.extend(by_structure);
        }
        let draw = |losses| (Rng::new(plan.rng.bits()), losses);
        losses.into_iter().map(draw).collect()
    }
}

impl Plan {
    /// Whether it is to be looked what the loss of each of these kinds would leave: at the first
    /// flushes that cover them, and wherever the barrier is that the run is aimed at.
    fn kinds_are_due(&mut self, at_risk: Structures) -> bool {
        let seen = self.seen.entry(at_risk).or_default();
        *seen += 1;
        let is_wanted = match self.barrier {
            Some((barrier, _)) => barrier.is_at(at_risk),
            None => *seen <= LOOKS_AT_A_KIND,
        };
        let is_due = is_wanted && self.kinds_left > 0;
        self.kinds_left -= u64::from(is_due);
        if let Some((_, looks)) = &mut self.barrier {
            *looks += u64::from(is_due);
        }
        is_due
    }
}

impl Looker<'_> {
    /// Looks, if it is time to.
    ///
    /// # Errors
    /// What must not be left.
    pub fn look(&self, disk: &SimDisk, known: Known<'_>) -> Result<(), String> {
        for (rng, losses) in self.looks.next(disk) {
            let left = disk.if_power_failed(&rng, (losses, &Trace::off()));
            let is_covered = !disk.has_outlived_at_risk(TOP);
            self.check(&left, (known, is_covered)).map_err(|what| {
                if self.trace.is_kept() {
                    // The same once more, for the record.
                    disk.if_power_failed(&rng, (losses, self.trace));
                }
                format!("if the power failed now: {what}")
            })?;
        }
        Ok(())
    }

    fn check(&self, left: &SimDisk, (known, is_covered): (Known<'_>, bool)) -> Result<(), String> {
        if self.config.kind != Kind::Qcow2 {
            let mut disks = vec![known.model.clone()];
            disks[0].crash();
            return self.check_disk(left, known.model, &mut disks).map(drop);
        }
        let content = left.content(TOP).expect("the run has made it");
        let findings = inspect(&content);
        if let [first, ..] = &findings.corruptions[..] {
            return Err(format!("corrupt: {first}"));
        }
        let flags_lag =
            self.lag.flags || known.snapshots.is_pending() && self.config.layout.version == 2;
        if let ([first, ..], false) = (&findings.flags[..], flags_lag) {
            return Err(format!("corrupt: {first}"));
        }
        if let ([first, ..], false) = (&findings.low_counts[..], self.lag.counts) {
            return Err(format!(
                "dirty by a change of snapshots, and corrupt: {first}"
            ));
        }
        self.baseline.check(left, &findings)?;
        let (mut model, mut snapshots) = (known.model.clone(), known.snapshots.clone());
        let mut bitmaps = known.bitmaps.clone();
        model.crash();
        bitmaps.crash();
        if is_covered {
            snapshots.covered();
        }
        let mut disks = snapshots.disks(&model, Survival::Durable);
        let ids = inspect::snapshot_ids(&content);
        snapshots.adopt(&ids, (&model, Survival::Durable))?;
        let size = content.number(24, 8);
        keep_possible(&mut disks, |disk| disk.adopt_size(size, Survival::Durable))
            .map_err(|violation| violation.to_string())?;
        let layer = self.check_disk(left, &model, &mut disks)?;
        for window in model.vm_state_windows() {
            let bytes = Seen::vm_state(&layer, (&model, &window));
            for (granules, bytes) in bytes.parts() {
                keep_possible(&mut disks, |disk| {
                    let adopted =
                        disk.vm_state(|state| state.adopt(&granules, bytes, Survival::Durable));
                    adopted.expect("the others have it too")
                })
                .map_err(|violation| format!("VM state: {violation}"))?;
            }
        }
        self.check_snapshots(&layer, (&mut snapshots, &model))?;
        bitmaps.adopt(&findings.bitmaps, (&disks[0], Survival::Durable))
    }

    /// The second reader finds what the disk may hold.
    fn check_disk(
        &self,
        left: &SimDisk,
        model: &Model,
        disks: &mut Vec<Model>,
    ) -> Result<Layer, String> {
        let layer = prepare::second(left, self.looks.keys())?.expect("no file is missing");
        for window in model.windows() {
            let window = disks[0].on_disk(&window);
            let bytes = Seen::disk(&layer, (model, &window));
            self.adopt(left, &bytes, disks)?;
        }
        Ok(layer)
    }

    fn adopt(&self, left: &SimDisk, seen: &Seen, disks: &mut Vec<Model>) -> Result<(), String> {
        for (granules, bytes) in seen.parts() {
            let adopted = keep_possible(disks, |disk| {
                disk.adopt(&granules, bytes, Survival::Durable)
            });
            adopted.map_err(|violation: Violation| {
                let at = violation.offset;
                self.trace.focus(|| places::of(left, at));
                violation.to_string()
            })?;
        }
        Ok(())
    }

    /// Checks that every snapshot has its content.
    fn check_snapshots(
        &self,
        layer: &Layer,
        (snapshots, model): (&mut Snapshots, &Model),
    ) -> Result<(), String> {
        for (number, snapshot) in snapshots.known_mut().iter_mut().enumerate() {
            let id = &snapshot.id;
            let layer = layer.at_snapshot(number).expect("the image is qcow2");
            if layer.size() != snapshot.size {
                return Err(format!("snapshot {id} has {} bytes", layer.size()));
            }
            let end = model.grain().index_of(snapshot.size);
            for (window, contents) in &mut snapshot.content {
                let window = window.start..window.end.min(end).max(window.start);
                let seen = Seen::disk(&layer, (model, &window));
                check_part(model, &seen, contents)
                    .map_err(|found| format!("snapshot {id} (Disk) has {found}"))?;
            }
            for (window, contents) in &mut snapshot.vm_state {
                let seen = Seen::vm_state(&layer, (model, window));
                check_part(model, &seen, contents)
                    .map_err(|found| format!("snapshot {id} (VmState) has {found}"))?;
            }
        }
        Ok(())
    }
}

fn check_part(
    model: &Model,
    seen: &Seen,
    contents: &mut [Vec<crate::model::WriteId>],
) -> Result<(), String> {
    for (granules, bytes) in seen.parts() {
        let first = (granules.start - seen.granules.start) as usize;
        let count = (granules.end - granules.start) as usize;
        let part = &mut contents[first..first + count];
        adopt_snapshot(model.grain(), (granules, part), bytes)?;
    }
    Ok(())
}

/// Content that the second reader has found in a run of granules, where it can say.
struct Seen {
    granules: Granules,
    starts: Vec<usize>,
    bytes: Vec<u8>,
    /// Whether the content is known, by granule.
    known: Vec<bool>,
}

impl Seen {
    fn disk(layer: &Layer, range: (&Model, &Granules)) -> Seen {
        Seen::with(range, |at, bytes, known| layer.read(at, bytes, known))
    }

    fn vm_state(layer: &Layer, range: (&Model, &Granules)) -> Seen {
        Seen::with(range, |at, bytes, known| {
            layer.read_vm_state(at, bytes, known);
        })
    }

    fn with(
        (model, granules): (&Model, &Granules),
        read: impl FnOnce(u64, &mut [u8], &mut [bool]),
    ) -> Seen {
        let grain = model.grain();
        let base = grain.start(granules.start);
        let starts = (granules.start..=granules.end).map(|granule| grain.start(granule) - base);
        let starts: Vec<usize> = starts.map(|start| start as usize).collect();
        let len = *starts.last().expect("there is an end");
        let (mut bytes, mut known) = (vec![0; len], vec![false; len]);
        read(base, &mut bytes, &mut known);
        let ends = starts.windows(2);
        // Without a branch a byte, which most of a look would be spent on.
        let is_known = |bytes: &[bool]| bytes.iter().fold(true, |all, known| all & known);
        let known = ends.map(|ends| is_known(&known[ends[0]..ends[1]]));
        let known = known.collect();
        Seen {
            granules: granules.clone(),
            starts,
            bytes,
            known,
        }
    }

    /// The runs of granules that are known as wholes, with their bytes.
    fn parts(&self) -> impl Iterator<Item = (Granules, &[u8])> {
        let count = self.starts.len() - 1;
        let is_known = |index: usize| self.known[index];
        let mut at = 0;
        std::iter::from_fn(move || {
            let first = (at..count).find(|&index| is_known(index))?;
            let end = (first..count)
                .find(|&index| !is_known(index))
                .unwrap_or(count);
            at = end;
            let granules = self.granules.start + first as u64..self.granules.start + end as u64;
            Some((granules, &self.bytes[self.starts[first]..self.starts[end]]))
        })
    }
}
