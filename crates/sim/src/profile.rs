//! Kinds of workloads that bring rare meetings about: a read under way while its cluster is freed
//! and taken again, several writes in one cluster, tables and counts that do not fit into their
//! cache, and clusters that snapshots share. Uniformly drawn runs almost never see these.

use crate::goals::Goal;
use crate::rng::Rng;
use crate::stories::Story;

mod shape;

pub(crate) use shape::shape;

/// The conditions that a run is made to meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Anything.
    Usual,
    /// A full disk of few clusters that are discarded, written and read all the time, with slow
    /// operations: early reuse is seen.
    Churn,
    /// Many requests in the subclusters of very few clusters, some of which fail.
    Crowded,
    /// The smallest tables, a cache of four slices, narrow counts, tables that grow.
    TightMetadata,
    /// Snapshots share what is there.
    Shared,
    /// A goal that the seed names.
    Directed(Goal),
    /// A story that the seed names.
    Story(Story),
}

impl Profile {
    pub(crate) fn draw(seed: u64) -> Profile {
        if let Some(story) = Story::of(seed) {
            return Profile::Story(story);
        }
        if let Some(goal) = Goal::of(seed) {
            return Profile::Directed(goal);
        }
        match Rng::derived(seed, "profile", 0).below(20) {
            0..=5 => Profile::Usual,
            6..=10 => Profile::Churn,
            11..=13 => Profile::Crowded,
            14..=16 => Profile::TightMetadata,
            _ => Profile::Shared,
        }
    }
}
