//! Homes of the disk's clusters. Pure.
//!
//! The places that data may have are numbered from the beginning of the file on, and so are the
//! clusters of the disk in its order. The *shift* of a cluster is the number of its place less its
//! own. Homes that keep the order have shifts that never fall; a part of the disk has one shift
//! throughout, so that it stays whole. So the parts choose shifts that do not fall, for which most
//! clusters are at home, less the places that stay free, which are as many as the last shift: a
//! heaviest chain, found by the best chain up to each shift.

use super::{Cell, Layout};

/// Beginnings of the file that are tried: behind tables that lie near it.
const STARTS_MAX: usize = 8;

/// Where the clusters of the disk go.
#[derive(Clone, Debug)]
pub(super) struct Homes {
    pub homes: Vec<u32>,
    /// Runs that there are then.
    pub runs: u64,
    /// Clusters that are there now.
    pub kept: u64,
}

impl Homes {
    /// All stay.
    pub fn stay(layout: &Layout) -> Homes {
        Homes {
            homes: layout.places.clone(),
            runs: layout.runs(&layout.places),
            kept: layout.len() as u64,
        }
    }
}

/// A shift that a part of the disk may have, and the one before it in the best chain.
struct Node {
    part: u32,
    shift: u32,
    before: Option<u32>,
}

/// The best chains by the shift that they end with, above that of the beginning.
struct Best {
    /// A binary indexed tree of maxima: what the chain is worth with its own shift for nothing, and
    /// the node.
    tree: Vec<(i64, Option<u32>)>,
}

impl Best {
    fn new(shifts: usize) -> Best {
        Best {
            tree: vec![(0, None); shifts + 1],
        }
    }

    /// The best chain that ends with this shift or a lower one.
    fn up_to(&self, shift: u32) -> (i64, Option<u32>) {
        let (mut at, mut best) = (shift as usize + 1, (0, None));
        while at > 0 {
            if self.tree[at].0 > best.0 {
                best = self.tree[at];
            }
            at &= at - 1;
        }
        best
    }

    fn note(&mut self, shift: u32, (worth, node): (i64, u32)) {
        let mut at = shift as usize + 1;
        while at < self.tree.len() {
            if worth > self.tree[at].0 {
                self.tree[at] = (worth, Some(node));
            }
            at += at & at.wrapping_neg();
        }
    }
}

/// The best homes; `None` if the file has no room for all.
pub(super) fn homes(layout: &Layout) -> Option<Homes> {
    let is_room = |cell: &Cell| matches!(cell, Cell::Free | Cell::Disk);
    let mut numbers = Vec::with_capacity(layout.cells.len());
    let mut room = Vec::new();
    for (at, cell) in (0..).zip(&layout.cells) {
        numbers.push(room.len() as u32);
        if is_room(cell) {
            room.push(at);
        }
    }
    let left = room.len().checked_sub(layout.len())?;
    let slack = left.min(layout.slack() as usize) as u32;
    let behind_others = (1..=slack).filter(|&shift| {
        let at = shift as usize;
        at < room.len() && room[at - 1] + 1 < room[at]
    });
    let starts = std::iter::once(0).chain(behind_others).take(STARTS_MAX);
    let mut best: Option<Homes> = None;
    let perfect = layout.perfect();
    for start in starts {
        let Some(found) = from(layout, (&room, &numbers), start..slack + 1) else {
            continue;
        };
        let is_close = super::is_close(found.runs, perfect);
        let rank = |homes: &Homes| match super::is_close(homes.runs, perfect) {
            true => (0, u64::MAX - homes.kept),
            false => (homes.runs, u64::MAX - homes.kept),
        };
        if best.as_ref().is_none_or(|best| rank(&found) < rank(best)) {
            best = Some(found);
        }
        if is_close {
            break;
        }
    }
    best
}

/// The homes for shifts within a range.
fn from(
    layout: &Layout,
    (room, numbers): (&[u32], &[u32]),
    shifts: std::ops::Range<u32>,
) -> Option<Homes> {
    let mut nodes: Vec<Node> = Vec::new();
    let mut best = Best::new(shifts.len());
    let (mut found, mut chains) = (Vec::new(), Vec::new());
    // A cluster that stays free has to be worth one at home.
    let mut last: (i64, Option<u32>) = (0, None);
    for (part, clusters) in (0..).zip(layout.parts()) {
        found.clear();
        for k in clusters {
            let number = numbers[layout.places[k] as usize];
            let shift = number.checked_sub(k as u32);
            found.extend(shift.filter(|shift| shifts.contains(shift)));
        }
        found.sort_unstable();
        chains.clear();
        for same in found.chunk_by(|one, other| one == other) {
            let shift = same[0];
            let above = shift - shifts.start;
            let (worth, before) = best.up_to(above);
            let (worth, node) = (worth + same.len() as i64, nodes.len() as u32);
            nodes.push(Node {
                part,
                shift,
                before,
            });
            chains.push((above, (worth, node)));
            if worth - i64::from(above) > last.0 {
                last = (worth - i64::from(above), Some(node));
            }
        }
        for &(above, chain) in &chains {
            best.note(above, chain);
        }
    }
    let homes = places_of(layout, room, (&nodes, last.1, shifts.start))?;
    let pairs = homes.iter().zip(&layout.places);
    Some(Homes {
        runs: layout.runs(&homes),
        kept: pairs.filter(|(home, place)| home == place).count() as u64,
        homes,
    })
}

/// The homes by the chain that ends with a node.
fn places_of(
    layout: &Layout,
    room: &[u32],
    (nodes, mut last, start): (&[Node], Option<u32>, u32),
) -> Option<Vec<u32>> {
    let mut chosen = Vec::new();
    while let Some(node) = last.map(|at| &nodes[at as usize]) {
        chosen.push((node.part, node.shift));
        last = node.before;
    }
    let mut homes = Vec::with_capacity(layout.len());
    let mut shift = start;
    for (part, clusters) in (0..).zip(layout.parts()) {
        if let Some(&(_, own)) = chosen.last().filter(|(of, _)| *of == part) {
            shift = own;
            chosen.pop();
        }
        for k in clusters {
            homes.push(*room.get(k + shift as usize)?);
        }
    }
    Some(homes)
}
