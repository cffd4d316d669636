//! Where clusters go when a file is compacted. Pure.
//!
//! The file ends, afterwards, at the lowest place for which all that lies behind has room before:
//! so nothing before that end moves, and each cluster behind it moves once. What moves is split
//! into batches, the highest clusters first, so that a compaction that is cut short has emptied the
//! end of the file. Within a batch the clusters of the disk are in their order, and so are their
//! places.

use std::collections::BTreeMap;
use std::ops::Range;

use super::survey::{Kind, Survey};
use crate::geometry::{Geometry, GuestCluster, HostCluster};

/// Clusters of the disk that follow on each other move together: bytes of them at most.
const RUN_BYTES_MAX: u64 = 1 << 20;

/// Clusters in a row that move together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The first cluster of the disk.
    pub guest: GuestCluster,
    /// Where it is.
    pub from: HostCluster,
    /// Where it goes.
    pub to: HostCluster,
    /// How many there are.
    pub clusters: u64,
}

/// Where the file will end, and what that takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Clusters of the file afterwards.
    pub end: u64,
    /// Clusters that move.
    pub moving: u64,
    /// The kind of the cluster before the end, if it cannot move and keeps the end there.
    pub held_by: Option<Kind>,
}

/// Refcount blocks that go with the clusters that they count.
struct Blocks {
    /// Where each is, and the first cluster that it counts.
    by_place: BTreeMap<u64, u64>,
    /// The same, the other way round.
    by_counted: BTreeMap<u64, u64>,
}

impl Blocks {
    fn of(survey: &Survey) -> Blocks {
        let per_block = survey.geometry.refcounts_per_block();
        let place = |&(index, cluster): &(u64, u64)| (cluster, index.saturating_mul(per_block));
        let by_place: BTreeMap<u64, u64> = survey.blocks.iter().map(place).collect();
        let by_counted = by_place.iter().map(|(&at, &first)| (first, at)).collect();
        Blocks {
            by_place,
            by_counted,
        }
    }

    /// Returns whether a cluster is needed by a file that ends at `end`: a block is not if it
    /// counts nothing before that.
    fn needs(&self, kind: Kind, cluster: u64, end: u64) -> bool {
        match self.by_place.get(&cluster) {
            Some(&counted) if kind == Kind::Block => counted < end,
            Some(_) | None => kind.is_used(),
        }
    }
}

/// Finds the lowest end of the file, if clusters of which `moves` is true can move, but none below
/// `least` clusters.
pub fn outline(survey: &Survey, moves: impl Fn(Kind) -> bool, least: u64) -> Outline {
    let kinds = &survey.kinds;
    let blocks = Blocks::of(survey);
    let per_block = survey.geometry.refcounts_per_block();
    let stays = |kind: &Kind| kind.is_used() && *kind != Kind::Block && !moves(*kind);
    let fixed = kinds.iter().rposition(stays);
    let fixed_end = fixed.map_or(0, |last| last as u64 + 1);
    let least = fixed_end.max(least).min(kinds.len() as u64);
    let mut room = kinds.iter().filter(|kind| kind.is_room()).count() as u64;
    // Of what lies behind the end: what has to move, and blocks that are needed.
    let (mut behind, mut held) = (0, 0);
    let mut found = Outline {
        end: kinds.len() as u64,
        moving: 0,
        held_by: None,
    };
    for end in (least..kinds.len() as u64).rev() {
        // With an even lower end there is more behind it, and less room.
        if behind > room {
            break;
        }
        let kind = kinds[end as usize];
        room -= u64::from(kind.is_room());
        match kind {
            Kind::Block => held += u64::from(blocks.needs(kind, end, end)),
            kind => behind += u64::from(kind.is_used()),
        }
        // With a lower end, the block that counts from there on is not needed any more.
        let counted = end.is_multiple_of(per_block);
        let counted = counted.then(|| blocks.by_counted.get(&end)).flatten();
        let dropped = counted.filter(|&&at| at > end);
        if dropped.is_some_and(|&at| kinds.get(at as usize) == Some(&Kind::Block)) {
            held -= 1;
        }
        if behind + held <= room && (held == 0 || moves(Kind::Block)) {
            found.end = end;
            found.moving = behind + held;
        }
    }
    found.held_by = fixed
        .map(|last| kinds[last])
        .filter(|_| found.end == fixed_end);
    found
}

/// Places that are free before the end, in order.
#[derive(Debug)]
pub struct Room {
    kinds: Vec<Kind>,
    at: usize,
}

impl Room {
    /// The room before `end` clusters of a file of these.
    pub fn before(mut kinds: Vec<Kind>, end: u64) -> Room {
        kinds.truncate(end.try_into().unwrap_or(usize::MAX));
        Room { kinds, at: 0 }
    }
}

impl Iterator for Room {
    type Item = HostCluster;

    fn next(&mut self) -> Option<HostCluster> {
        let rest = &self.kinds[self.at..];
        let found = self.at + rest.iter().position(|kind| kind.is_room())?;
        self.at = found + 1;
        Some(HostCluster(found as u64))
    }
}

/// No cluster of the disk.
const NONE: u64 = u64::MAX;

/// The clusters of the disk that lie in a part of the file, by their places.
#[derive(Debug)]
pub struct Owners {
    first: u64,
    guests: Vec<u64>,
}

impl Owners {
    /// Those of some clusters of the file, of which none is known yet.
    pub fn of(clusters: Range<u64>) -> Owners {
        let len = clusters.end.saturating_sub(clusters.start);
        Owners {
            first: clusters.start,
            guests: vec![NONE; len as usize],
        }
    }

    /// Notes which cluster of the disk a place belongs to, if it is one of them.
    pub fn note(&mut self, guest: GuestCluster, place: HostCluster) {
        let at = place.0.checked_sub(self.first);
        if let Some(owner) = at.and_then(|at| self.guests.get_mut(at as usize)) {
            *owner = guest.0;
        }
    }

    /// The next batch: the highest places, at most `most` of them, which are not among them any
    /// more. Each gets another place, as long as there is room; `None` if none is left.
    pub fn next_batch(
        &mut self,
        geometry: &Geometry,
        room: &mut Room,
        most: u64,
    ) -> Option<Vec<Move>> {
        let mut part: Vec<(GuestCluster, HostCluster)> = Vec::new();
        while (part.len() as u64) < most.max(1)
            && let Some(guest) = self.guests.pop()
        {
            if guest != NONE {
                let place = HostCluster(self.first + self.guests.len() as u64);
                part.push((GuestCluster(guest), place));
            }
        }
        part.sort_unstable();
        let placed = part.iter().zip(room.by_ref());
        let moves = joined(
            geometry,
            placed.map(|(&(guest, from), to)| (guest, from, to)),
        );
        (!moves.is_empty()).then_some(moves)
    }
}

/// Clusters of the disk that move, where each is and where it goes, joined to those that move
/// together.
pub(super) fn joined(
    geometry: &Geometry,
    each: impl Iterator<Item = (GuestCluster, HostCluster, HostCluster)>,
) -> Vec<Move> {
    let mut moves: Vec<Move> = Vec::new();
    for (guest, from, to) in each {
        match moves.last_mut() {
            Some(last) if continues(geometry, last, (guest, from, to)) => last.clusters += 1,
            _ => moves.push(Move {
                guest,
                from,
                to,
                clusters: 1,
            }),
        }
    }
    moves
}

/// Returns whether a cluster moves together with those before it: all three follow on, one slice of
/// a table maps them, and they are not too many.
fn continues(
    geometry: &Geometry,
    last: &Move,
    (guest, from, to): (GuestCluster, HostCluster, HostCluster),
) -> bool {
    let n = last.clusters;
    last.guest.plus(n) == guest
        && last.from.plus(n) == from
        && last.to.plus(n) == to
        && geometry.slice_of(last.guest) == geometry.slice_of(guest)
        && (n + 1) << geometry.cluster_bits() <= RUN_BYTES_MAX
}

#[cfg(test)]
mod tests;
