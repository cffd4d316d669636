//! Places without a cluster that keep their space on the host, since a cluster goes home there
//! later. Pure.
//!
//! They, and the places without space that are filled while the old ones are not free yet, are what
//! a defragmentation takes of the host beyond what the file had. So both together are limited.
//! Where that is short, what would be filled last gives its space back.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::geometry::HostCluster;

/// Places that are remembered, whatever the budget.
const PLACES_MAX: u64 = 1 << 20;

/// Places that keep their space.
#[derive(Clone, Debug, Default)]
pub(super) struct Spared {
    places: BTreeSet<u32>,
    /// Clusters of space that may be taken.
    most: u64,
    /// Places that are filled in this step, while the old ones have their space.
    taken: u64,
    /// Places that lose their space before it.
    released: Vec<u32>,
}

impl Spared {
    pub fn at_most(most: u64) -> Spared {
        Spared {
            most: most.min(PLACES_MAX),
            ..Spared::default()
        }
    }

    pub fn has(&self, place: u32) -> bool {
        self.places.contains(&place)
    }

    pub fn all(&self) -> impl Iterator<Item = HostCluster> + '_ {
        let places = self.places.iter();
        places.map(|&at| HostCluster(u64::from(at)))
    }

    /// Returns whether a place without space would take too much.
    pub fn is_full(&self) -> bool {
        self.places.len() as u64 + self.taken >= self.most
    }

    /// The highest one that is not within a range.
    pub fn highest(&self, but: &Range<u32>) -> Option<u32> {
        let above = self.places.range(but.end..).next_back();
        above
            .or_else(|| self.places.range(..but.start).next_back())
            .copied()
    }

    /// A place gets a cluster in this step. If that takes too much space, the last of those from
    /// `end` on gives its own back.
    pub fn fill(&mut self, place: u32, end: u32) {
        let is_without = !self.places.remove(&place);
        if is_without && self.is_full() && self.places.last().is_some_and(|&last| last >= end) {
            self.released.extend(self.places.pop_last());
        }
        self.taken += 1;
    }

    /// A place is left that is filled later. Returns whether it keeps its space.
    pub fn spare(&mut self, place: u32) -> bool {
        (self.places.len() as u64) < self.most && self.places.insert(place)
    }

    /// A place is not filled after all, as the cluster that has left it has not.
    pub fn forget(&mut self, place: u32) {
        self.places.remove(&place);
    }

    /// All of the step is known: returns the places that lose their space before it, in order.
    pub fn end_step(&mut self) -> Vec<u32> {
        self.taken = 0;
        self.released.sort_unstable();
        std::mem::take(&mut self.released)
    }
}
