//! The oracle of internal snapshots, beside the guest's ([`model`](crate::model)).
//!
//! A snapshot is taken, applied or deleted with nothing else in flight. Taken, it holds what the
//! guest might have read at that moment, granule by granule; where that was not certain, a later
//! read of it decides. It never changes. An operation that did not end well leaves the state before
//! it or the state after it, as a whole: which of them is seen when the image is opened again, by
//! the list of snapshots, and by the disk if one was applied. After the death of a process that is
//! what the system holds: until a flush covers it, a power failure may still leave the other state.

use crate::model::{Granules, Model, Survival, WriteId};

/// The possible contents of each granule of a window.
pub type Content = Vec<(Granules, Vec<Vec<WriteId>>)>;

/// A snapshot.
#[derive(Clone, Debug)]
pub struct Remembered {
    /// Its ID.
    pub id: String,
    /// Bytes of the disk in it.
    pub size: u64,
    /// Its content.
    pub content: Content,
    /// Its VM state.
    pub vm_state: Content,
}

/// An operation on snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Takes a snapshot.
    Take,
    /// The disk becomes what it was.
    Apply,
    /// Deletes a snapshot.
    Delete,
}

/// An operation for the subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Take one; it will have this ID.
    Take(String),
    /// Apply the one with this ID.
    Apply(String),
    /// Delete the one with this ID.
    Delete(String),
}

/// A state that an ending may leave.
#[derive(Clone, Debug)]
struct State {
    known: Vec<Remembered>,
    /// The disk, if it is another than the one before the ending.
    disk: Option<Model>,
}

/// All snapshots of an image.
#[derive(Clone, Debug, Default)]
pub struct Snapshots {
    known: Vec<Remembered>,
    /// The state after an operation that may have happened.
    pending: Option<State>,
    /// The states that a power failure may leave besides, until a flush has covered what the
    /// process that died had written. A session changes nothing before such a flush.
    uncovered: Vec<State>,
    /// The power has failed meanwhile, and nothing has read yet which of these it left.
    is_undecided: bool,
}

/// Snapshots that an image has at most: each of them is read after each ending.
const KEPT_MAX: usize = 4;

impl Snapshots {
    /// Returns the snapshots of an image with `count` of them, as `snapshots.rs` makes it.
    pub fn new(count: u64, model: &Model) -> Snapshots {
        let known = (1..=count).map(|number| Remembered {
            id: number.to_string(),
            size: model.size(),
            content: model.possible(),
            vm_state: model.possible_vm_state(),
        });
        Snapshots {
            known: known.collect(),
            pending: None,
            uncovered: Vec::new(),
            is_undecided: false,
        }
    }

    /// Begins an operation, on a snapshot that `pick` chooses. `None` if there is none, or enough.
    pub fn begin(&mut self, what: What, pick: u64, model: &Model) -> Option<Change> {
        let mut known = self.known.clone();
        if what == What::Take {
            if known.len() >= KEPT_MAX {
                return None;
            }
            let ids = known
                .iter()
                .filter_map(|snapshot| snapshot.id.parse::<u64>().ok());
            let id = (ids.max().unwrap_or(0) + 1).to_string();
            known.push(Remembered {
                id: id.clone(),
                size: model.size(),
                content: model.possible(),
                vm_state: model.possible_vm_state(),
            });
            self.pending = Some(State { known, disk: None });
            return Some(Change::Take(id));
        }
        let position = usize::try_from(pick % known.len().max(1) as u64).ok()?;
        let chosen = known.get(position)?.clone();
        let disk = (what == What::Apply).then(|| {
            let content = (&chosen.content, &chosen.vm_state);
            model.holding(content, chosen.size)
        });
        if what == What::Delete {
            known.remove(position);
        }
        self.pending = Some(State { known, disk });
        Some(match what {
            What::Delete => Change::Delete(chosen.id),
            _ => Change::Apply(chosen.id),
        })
    }

    /// Ends an operation that has succeeded. Returns the disk's content if it has changed.
    pub fn end(&mut self) -> Option<Model> {
        let pending = self.pending.take()?;
        self.known = pending.known;
        pending.disk
    }

    /// Ends an operation that was refused, or taken back: nothing has changed.
    pub fn taken_back(&mut self) {
        self.pending = None;
    }

    /// Whether an operation may have happened or not.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// A flush has covered what processes wrote that died, unless the power failed before it.
    pub fn covered(&mut self) {
        if !self.is_undecided {
            self.uncovered.clear();
        }
    }

    /// The power has failed.
    pub fn power_failed(&mut self) {
        self.is_undecided |= !self.uncovered.is_empty();
    }

    fn may_be_uncovered(&self, survival: Survival) -> bool {
        survival == Survival::Durable || self.is_undecided
    }

    /// The disks that an ending may leave.
    pub fn disks(&self, before: &Model, survival: Survival) -> Vec<Model> {
        let uncovered = self.uncovered.iter();
        let others = uncovered.filter(|_| self.may_be_uncovered(survival));
        let others = others.chain(&self.pending);
        let others = others.filter_map(|state| state.disk.clone());
        std::iter::once(before.clone()).chain(others).collect()
    }

    /// Takes these snapshots for those of the image after an ending, with `before` as the disk
    /// before it.
    ///
    /// # Errors
    /// If no state that may be left has them.
    pub fn adopt(
        &mut self,
        ids: &[String],
        (before, survival): (&Model, Survival),
    ) -> Result<(), String> {
        let known = State {
            known: std::mem::take(&mut self.known),
            disk: None,
        };
        let uncovered = std::mem::take(&mut self.uncovered);
        let mut states = vec![known];
        // Nothing that came after them is on the medium yet.
        if self.may_be_uncovered(survival) {
            states.extend(uncovered.iter().cloned());
        }
        states.extend(self.pending.take());
        let Some(found) = states.iter().find(|state| state.ids() == ids) else {
            let states: Vec<_> = states.iter().map(State::ids).collect();
            return Err(format!(
                "the image has the snapshots {ids:?}; possible: {states:?}"
            ));
        };
        self.known.clone_from(&found.known);
        if !self.may_be_uncovered(survival) {
            self.uncovered = uncovered;
            if states.iter().any(|state| state.disk.is_some()) {
                states[0].disk = Some(before.clone());
            }
            if states.len() > 1 {
                self.uncovered.extend(states);
            }
        }
        self.is_undecided = false;
        Ok(())
    }

    /// All of them.
    pub fn known_mut(&mut self) -> &mut [Remembered] {
        &mut self.known
    }
}

impl State {
    fn ids(&self) -> Vec<String> {
        self.known
            .iter()
            .map(|snapshot| snapshot.id.clone())
            .collect()
    }
}
