//! The current activity of write-back and requests, for observers: tests that crash the engine want
//! to know at which point they do. Nothing here changes the engine's behaviour.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

/// Activity of the holder of the write-back turn. The order is that of `writeback.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// No cycle is under way.
    Idle,
    /// Growth: new refcount blocks, and a new refcount table if need be, which nothing refers to
    /// yet.
    CountBlocks,
    /// Growth: the entries of the refcount table, or the header, that make them reachable.
    CountTable,
    /// A: raised counts and new L2 tables, and the barrier for them and for guest data.
    Raise,
    /// B: slices of L2 tables.
    Slices,
    /// B: entries of L1; elsewhere: changes of the header. With the barrier after them.
    Roots,
    /// Stage C: counts of freed clusters go down.
    Lower,
    /// C: holes are punched; the clusters become free.
    Release,
}

impl Stage {
    /// All stages, in the order of a cycle.
    pub const ALL: [Stage; 8] = [
        Stage::Idle,
        Stage::CountBlocks,
        Stage::CountTable,
        Stage::Raise,
        Stage::Slices,
        Stage::Roots,
        Stage::Lower,
        Stage::Release,
    ];
}

/// A look at an image in operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The stage of write-back.
    pub stage: Stage,
    /// References that were dropped and whose clusters are not free yet.
    pub quarantined: usize,
    /// Clusters that more than one request fills at this moment.
    pub joined: usize,
    /// Slices that were evicted from the cache since the last cycle ended.
    pub evicted: usize,
    /// The refcount table is moving, or has moved since the last cycle ended.
    pub refcount_table_moved: bool,
    /// The disk is growing and its L1 table moves, or has moved, for that.
    pub l1_table_moved: bool,
    /// A snapshot is being made, applied or deleted.
    pub snapshots_change: bool,
}

/// The facts that no other structure holds.
#[derive(Debug, Default)]
pub(crate) struct Probe {
    pub(crate) stage: AtomicU8,
    /// References that the running cycle took from the quarantine.
    pub(crate) in_cycle: AtomicUsize,
    pub(crate) refcount_table_moves: AtomicUsize,
    /// Slices that had been evicted when the last cycle ended.
    pub(crate) evicted: AtomicUsize,
    pub(crate) l1_table_moves: AtomicUsize,
    pub(crate) snapshots_change: AtomicUsize,
}

/// Something that lasts until this is dropped.
pub(crate) struct During<'a> {
    probe: &'a Probe,
    what: What,
}

enum What {
    Stage { before: u8 },
    L1Growth,
    Snapshots,
}

impl Drop for During<'_> {
    fn drop(&mut self) {
        match self.what {
            What::Stage { before } => self.probe.stage.store(before, Ordering::Relaxed),
            What::L1Growth => self.probe.l1_table_moves.store(0, Ordering::Relaxed),
            What::Snapshots => {
                self.probe.snapshots_change.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

impl Probe {
    /// The turn's holder is in this stage.
    pub(crate) fn stage(&self, stage: Stage) -> During<'_> {
        During {
            probe: self,
            what: What::Stage {
                before: self.stage.swap(stage as u8, Ordering::Relaxed),
            },
        }
    }

    /// Notes the start of a cycle that will free `freed` references.
    pub(crate) fn cycle_begins(&self, freed: usize) {
        self.in_cycle.store(freed, Ordering::Relaxed);
    }

    /// Notes the end of a cycle; `evicted` slices have been evicted in all by then.
    pub(crate) fn cycle_ends(&self, evicted: usize) {
        self.evicted.store(evicted, Ordering::Relaxed);
        self.in_cycle.store(0, Ordering::Relaxed);
        self.refcount_table_moves.store(0, Ordering::Relaxed);
    }

    /// The refcount table moves.
    pub(crate) fn refcount_table_moves(&self) {
        self.refcount_table_moves.store(1, Ordering::Relaxed);
    }

    /// Marks a change of snapshots as under way until dropped.
    pub(crate) fn snapshots_change(&self) -> During<'_> {
        self.snapshots_change.fetch_add(1, Ordering::Relaxed);
        During {
            probe: self,
            what: What::Snapshots,
        }
    }

    /// The disk grows, and its L1 table with it.
    pub(crate) fn l1_table_grows(&self) -> During<'_> {
        self.l1_table_moves.store(1, Ordering::Relaxed);
        During {
            probe: self,
            what: What::L1Growth,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_numbered_in_their_order_and_end_where_they_began() {
        for (number, stage) in Stage::ALL.iter().enumerate() {
            assert_eq!(*stage as usize, number);
        }
        let probe = Probe::default();
        let now = || Stage::ALL[usize::from(probe.stage.load(Ordering::Relaxed))];
        let outer = probe.stage(Stage::Raise);
        {
            let _inner = probe.stage(Stage::CountBlocks);
            assert_eq!(now(), Stage::CountBlocks);
        }
        assert_eq!(now(), Stage::Raise);
        drop(outer);
        assert_eq!(now(), Stage::Idle);
    }
}
