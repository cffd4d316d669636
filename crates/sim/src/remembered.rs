//! What internal snapshots hold: the oracle beside the guest's ([`model`](crate::model)).
//!
//! A snapshot is taken, applied or deleted with nothing else in flight. Taken, it holds what the guest might have
//! read at that moment, granule by granule; where that was not certain, a later read of it decides. It never
//! changes. An operation that did not end well leaves the state before it or the state after it, as a whole: which
//! of them is seen when the image is opened again, by the list of snapshots, and by the disk if one was applied.

use crate::model::{Granules, Model, WriteId};

/// What each granule of a window may hold.
pub type Content = Vec<(Granules, Vec<Vec<WriteId>>)>;

/// A snapshot.
#[derive(Clone, Debug)]
pub struct Remembered {
    /// Its ID.
    pub id: String,
    /// Bytes of the disk in it.
    pub size: u64,
    /// What it holds.
    pub content: Content,
    /// Its VM state.
    pub vm_state: Content,
}

/// What is done with snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// One is taken.
    Take,
    /// The disk becomes what it was.
    Apply,
    /// One is deleted.
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

/// The state after an operation that may have happened.
#[derive(Clone, Debug)]
struct Pending {
    known: Vec<Remembered>,
    /// What the disk is, if the operation changes it.
    disk: Option<Model>,
}

/// All snapshots of an image.
#[derive(Clone, Debug, Default)]
pub struct Snapshots {
    known: Vec<Remembered>,
    pending: Option<Pending>,
}

/// Snapshots that an image has at most: each of them is read after each ending.
const KEPT_MAX: usize = 4;

impl Snapshots {
    /// An image with so many snapshots of what it holds, as `snapshots.rs` makes them.
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
            self.pending = Some(Pending { known, disk: None });
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
        self.pending = Some(Pending { known, disk });
        Some(match what {
            What::Delete => Change::Delete(chosen.id),
            _ => Change::Apply(chosen.id),
        })
    }

    /// It has ended well; what the disk is now, if it has changed.
    pub fn end(&mut self) -> Option<Model> {
        let pending = self.pending.take()?;
        self.known = pending.known;
        pending.disk
    }

    /// It was refused, or taken back: nothing has changed.
    pub fn taken_back(&mut self) {
        self.pending = None;
    }

    /// Whether an operation may have happened or not.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// What the disk may be after an ending.
    pub fn disks(&self, before: &Model) -> Vec<Model> {
        let after = self
            .pending
            .iter()
            .filter_map(|pending| pending.disk.clone());
        std::iter::once(before.clone()).chain(after).collect()
    }

    /// After an ending: the image has these snapshots.
    ///
    /// # Errors
    /// If it may not have.
    pub fn adopt(&mut self, ids: &[String]) -> Result<(), String> {
        let of = |known: &[Remembered]| -> Vec<String> {
            known.iter().map(|snapshot| snapshot.id.clone()).collect()
        };
        let (before, pending) = (of(&self.known), self.pending.take());
        if ids == before {
            return Ok(());
        }
        match pending {
            Some(after) if of(&after.known) == ids => {
                self.known = after.known;
                Ok(())
            }
            after => {
                let after = after.map(|after| of(&after.known));
                Err(format!(
                    "the image has the snapshots {ids:?}: {before:?} or {after:?}"
                ))
            }
        }
    }

    /// All of them.
    pub fn known_mut(&mut self) -> &mut [Remembered] {
        &mut self.known
    }
}
