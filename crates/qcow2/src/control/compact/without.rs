//! Entries without the space that is redundant. Pure.

use crate::entry::{EntryFormat, L2Entry, Standard};
use crate::geometry::SubclusterMask;
use crate::plan::Freed;

/// The way in which clusters that hold zeroes lose their space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Zeroes {
    /// Not at all.
    Stay,
    /// There is no layer below: without an entry they read as zeroes.
    Unmapped,
    /// Their entries say that they read as zeroes.
    Flagged,
}

/// The way in which redundant clusters lose their space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ways {
    pub zeroes: Zeroes,
    /// Data that equals that of the layers below is left to them.
    pub like_below: bool,
    /// Subclusters can lose their space alone.
    pub in_parts: bool,
}

/// Subclusters of a cluster that were compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Redundant {
    pub zero: SubclusterMask,
    pub like_below: SubclusterMask,
}

/// The entry of a cluster without what is redundant, and the space that it frees; `None` if that is
/// none.
pub(super) fn without(
    format: &EntryFormat,
    entry: &L2Entry,
    found: Redundant,
    ways: Ways,
) -> Option<(L2Entry, Freed)> {
    let all = format.geometry.all_subclusters();
    let flagged = match ways.zeroes {
        Zeroes::Flagged => found.zero & !found.like_below,
        Zeroes::Stay | Zeroes::Unmapped => 0,
    };
    let redundant = found.zero | found.like_below;
    let entry = match entry {
        L2Entry::Standard(entry) => entry,
        L2Entry::Compressed(place) => {
            let new = Standard {
                zeroes: flagged,
                ..Standard::UNALLOCATED
            };
            // What lies beyond the end of the disk was not compared.
            return (redundant == all)
                .then_some((L2Entry::Standard(new), Freed::Compressed(*place)));
        }
    };
    let host = entry.host?;
    let new = Standard {
        allocated: entry.allocated & !redundant,
        zeroes: entry.zeroes | (flagged & entry.allocated),
        ..*entry
    };
    if new.allocated == 0 {
        let new = Standard {
            host: None,
            copied: false,
            ..new
        };
        return Some((L2Entry::Standard(new), Freed::Cluster(host)));
    }
    let dropped = entry.allocated & redundant;
    (dropped != 0 && ways.in_parts)
        .then_some((L2Entry::Standard(new), Freed::Subclusters(host, dropped)))
}

#[cfg(test)]
mod tests;
