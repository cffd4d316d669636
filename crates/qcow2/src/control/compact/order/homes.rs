//! Homes of the disk's clusters. Pure.
//!
//! The places that data may have are numbered from the beginning of the file on, and so are the
//! clusters of the disk in its order. The *shift* of a cluster is the number of its place less its
//! own. Homes that keep the order have shifts that never fall; a part of the disk has one shift
//! throughout, so that it stays whole. So the parts choose shifts that do not fall, for which most
//! clusters are at home, less the places that stay free, which are as many as the last shift: a
//! heaviest chain, found by the best chain up to each shift.

use std::ops::Range;

use super::layout::{Cell, Layout};
use super::{NONE, is_close};
use crate::Result;
use crate::control::compact::pace::{Pace, pieces_of};

/// Beginnings of the file that are tried: behind tables that lie near it.
const STARTS_MAX: usize = 8;
/// Work for a shift of a part: a way through a tree.
const SHIFT_UNITS: u64 = 8;

/// Where the clusters of the disk go.
#[derive(Clone, Debug)]
pub(super) struct Homes {
    /// In the order of the disk, which is that of the file.
    pub homes: Vec<u32>,
    /// Runs that there are then.
    pub runs: u64,
    /// Clusters that are there now.
    pub kept: u64,
}

impl Homes {
    async fn of(layout: &Layout, homes: Vec<u32>, pace: &mut Pace<'_>) -> Result<Homes> {
        let mut found = Homes {
            homes,
            runs: 0,
            kept: 0,
        };
        for piece in pieces_of(0..layout.len()) {
            for k in piece.clone() {
                found.runs += u64::from(!layout.continues(&found.homes, k));
                found.kept += u64::from(found.homes[k] == layout.places[k]);
            }
            pace.spend_on(&piece).await?;
        }
        Ok(found)
    }
}

/// A shift that a part of the disk may have, and the one before it in the best chain, or [`NONE`].
struct Node {
    part: u32,
    shift: u32,
    before: u32,
}

/// The best chains by the shift that they end with, above that of the beginning.
struct Best {
    /// A binary indexed tree of maxima: what the chain is worth with its own shift for nothing, and
    /// the node.
    tree: Vec<(i64, u32)>,
}

impl Best {
    /// The best chain that ends with this shift or a lower one.
    fn up_to(&self, shift: u32) -> (i64, u32) {
        let (mut at, mut best) = (shift as usize + 1, (0, NONE));
        while at > 0 {
            if self.tree[at].0 > best.0 {
                best = self.tree[at];
            }
            at &= at - 1;
        }
        best
    }

    fn note(&mut self, shift: u32, chain: (i64, u32)) {
        let mut at = shift as usize + 1;
        while at < self.tree.len() {
            if chain.0 > self.tree[at].0 {
                self.tree[at] = chain;
            }
            at += at & at.wrapping_neg();
        }
    }
}

/// All chains, and the part of the disk that is added to them.
struct Chains {
    nodes: Vec<Node>,
    best: Best,
    /// The chain that is worth most, with a place for each shift.
    last: (i64, u32),
    /// Clusters of this part by their shift, and the shifts that there are.
    counts: Vec<u32>,
    shifts: Vec<u32>,
    part: u32,
}

impl Chains {
    async fn new(shifts: usize, pace: &mut Pace<'_>) -> Result<Chains> {
        let mut chains = Chains {
            nodes: Vec::new(),
            best: Best { tree: Vec::new() },
            last: (0, NONE),
            counts: Vec::new(),
            shifts: Vec::new(),
            part: 0,
        };
        for piece in pieces_of(0..shifts + 1) {
            chains.best.tree.resize(piece.end, (0, NONE));
            chains.counts.resize(piece.end, 0);
            pace.spend_on(&piece).await?;
        }
        Ok(chains)
    }

    fn note(&mut self, shift: u32) {
        let count = &mut self.counts[shift as usize];
        if *count == 0 {
            self.shifts.push(shift);
        }
        *count += 1;
    }

    /// All of a part is noted.
    async fn end_part(&mut self, pace: &mut Pace<'_>) -> Result<()> {
        let first = self.nodes.len() as u32;
        for &shift in &self.shifts {
            let count = &mut self.counts[shift as usize];
            let (worth, before) = self.best.up_to(shift);
            let worth = worth + i64::from(std::mem::take(count));
            // A cluster that stays free has to be worth one at home.
            if worth - i64::from(shift) > self.last.0 {
                self.last = (worth - i64::from(shift), self.nodes.len() as u32);
            }
            self.nodes.push(Node {
                part: self.part,
                shift,
                before,
            });
            // So much is the chain that ends with this part worth.
            *count = worth as u32;
            pace.spend(SHIFT_UNITS).await?;
        }
        for (node, &shift) in (first..).zip(&self.shifts) {
            let worth = std::mem::take(&mut self.counts[shift as usize]);
            self.best.note(shift, (i64::from(worth), node));
            pace.spend(SHIFT_UNITS).await?;
        }
        self.shifts.clear();
        self.part += 1;
        Ok(())
    }
}

/// Places that data may have, by their numbers, and the numbers of all places.
struct Rooms {
    places: Vec<u32>,
    numbers: Vec<u32>,
}

impl Rooms {
    async fn of(layout: &Layout, pace: &mut Pace<'_>) -> Result<Rooms> {
        let mut rooms = Rooms {
            places: Vec::new(),
            numbers: Vec::with_capacity(layout.cells.len()),
        };
        for piece in pieces_of(0..layout.cells.len()) {
            for at in piece.clone() {
                rooms.numbers.push(rooms.places.len() as u32);
                if matches!(layout.cells[at], Cell::Free | Cell::Disk) {
                    rooms.places.push(at as u32);
                }
            }
            pace.spend_on(&piece).await?;
        }
        Ok(rooms)
    }
}

/// The best homes; `None` if the file has no room for all. `perfect` is the number of runs that
/// there can be.
pub(super) async fn homes(
    layout: &Layout,
    perfect: u64,
    pace: &mut Pace<'_>,
) -> Result<Option<Homes>> {
    let rooms = Rooms::of(layout, pace).await?;
    let Some(left) = rooms.places.len().checked_sub(layout.len()) else {
        return Ok(None);
    };
    let slack = left.min(layout.slack() as usize) as u32;
    let behind_others = (1..=slack).filter(|&shift| {
        let (room, at) = (&rooms.places, shift as usize);
        at < room.len() && room[at - 1] + 1 < room[at]
    });
    let starts = std::iter::once(0).chain(behind_others).take(STARTS_MAX);
    let starts: Vec<u32> = starts.collect();
    let mut best: Option<Homes> = None;
    for start in starts {
        let Some(found) = from(layout, &rooms, start..slack + 1, pace).await? else {
            continue;
        };
        let rank = |homes: &Homes| match is_close(homes.runs, perfect) {
            true => (0, u64::MAX - homes.kept),
            false => (homes.runs, u64::MAX - homes.kept),
        };
        let is_close = is_close(found.runs, perfect);
        if best.as_ref().is_none_or(|best| rank(&found) < rank(best)) {
            best = Some(found);
        }
        if is_close {
            break;
        }
    }
    Ok(best)
}

/// The homes for shifts within a range.
async fn from(
    layout: &Layout,
    rooms: &Rooms,
    shifts: Range<u32>,
    pace: &mut Pace<'_>,
) -> Result<Option<Homes>> {
    let mut chains = Chains::new(shifts.len(), pace).await?;
    for piece in pieces_of(0..layout.len()) {
        for k in piece.clone() {
            if k > 0 && !layout.adjoins(k) {
                chains.end_part(pace).await?;
            }
            let number = rooms.numbers[layout.places[k] as usize];
            let shift = number.checked_sub(k as u32);
            if let Some(shift) = shift.filter(|shift| shifts.contains(shift)) {
                chains.note(shift - shifts.start);
            }
        }
        pace.spend_on(&piece).await?;
    }
    chains.end_part(pace).await?;
    let chosen = chosen(&chains, pace).await?;
    drop(chains);
    places_of(layout, rooms, (chosen, shifts.start), pace).await
}

/// The parts of the best chain from the last one on, with their shifts above the first.
async fn chosen(chains: &Chains, pace: &mut Pace<'_>) -> Result<Vec<(u32, u32)>> {
    let mut chosen = Vec::new();
    let mut last = chains.last.1;
    while last != NONE {
        let node = &chains.nodes[last as usize];
        chosen.push((node.part, node.shift));
        last = node.before;
        pace.spend(1).await?;
    }
    Ok(chosen)
}

/// The homes by the shifts that were chosen.
async fn places_of(
    layout: &Layout,
    rooms: &Rooms,
    (mut chosen, start): (Vec<(u32, u32)>, u32),
    pace: &mut Pace<'_>,
) -> Result<Option<Homes>> {
    let mut homes = Vec::with_capacity(layout.len());
    let (mut part, mut shift) = (0, start);
    for piece in pieces_of(0..layout.len()) {
        for k in piece.clone() {
            part += u32::from(k > 0 && !layout.adjoins(k));
            if let Some(&(_, above)) = chosen.last().filter(|(of, _)| *of == part) {
                shift = start + above;
                chosen.pop();
            }
            match rooms.places.get(k + shift as usize) {
                Some(&place) => homes.push(place),
                None => return Ok(None),
            }
        }
        pace.spend_on(&piece).await?;
    }
    Ok(Some(Homes::of(layout, homes, pace).await?))
}
