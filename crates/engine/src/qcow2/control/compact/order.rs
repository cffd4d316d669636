//! The order of the disk's clusters in the file, and the moves that make it the guest's. Pure.
//!
//! A *run* is a number of clusters that follow on each other on the disk and in the file. There are
//! at least as many as the disk has parts with space of their own: that is *perfect*. A file within
//! 1.2 of it is left alone.
//!
//! Else each cluster gets a *home*: the clusters of the disk in their order, one behind the other
//! from the beginning of the file on, around what stays in the way. So that few move, a part of the
//! disk may begin some clusters further behind: of all homes in this order that leave no more than
//! one in [`SLACK_FRACTION`] of them free before the last, those are taken at which most clusters
//! are. Where the way is too full of tables for 1.2, these move before the data first ([`Front`]).
//!
//! The moves are in *windows*, from the beginning of the disk on. What lies in the homes of a
//! window goes to its own home if that is free, or to the highest free place, then the clusters of
//! the window go home: about 1.5 to 2 moves for each that is not at home, and what is done is in
//! order whenever it ends.
//!
//! A place that is left, and that is the home of a cluster that moves later, is *spared*: it keeps
//! its space on the host, so that it is not allocated once more, elsewhere (`spared.rs`).

use std::collections::BinaryHeap;
use std::ops::Range;

use super::plan::{Move, joined};
use super::survey::{Kind, Survey, is_data};
use super::units::moves_later;
use crate::qcow2::geometry::{Geometry, GuestCluster, HostCluster};

mod homes;
mod spared;

use homes::{Homes, homes};
use spared::Spared;

/// The part of the places of the data that stays free, at most, so that fewer clusters move.
pub const SLACK_FRACTION: u64 = 64;
/// No cluster.
const NONE: u32 = u32::MAX;

/// Returns whether a number of runs is within 1.2 of the perfect one.
pub fn is_close(runs: u64, perfect: u64) -> bool {
    u128::from(runs) * 5 <= u128::from(perfect) * 6
}

/// A cluster of the file, for the order of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Free,
    /// A cluster of the disk, that may move.
    Disk,
    /// Something else that moves.
    Other,
    Fixed,
}

/// Where the disk's clusters are.
#[derive(Clone, Debug, Default)]
pub struct Places {
    found: Vec<(u64, u32)>,
}

impl Places {
    /// Bytes of memory that each takes here and in an [`Order`], and each cluster of the file.
    pub const BYTES: u64 = 32;

    /// How many are known.
    pub fn clusters(&self) -> u64 {
        self.found.len() as u64
    }

    /// Notes where a cluster is.
    pub fn note(&mut self, guest: GuestCluster, host: HostCluster) {
        // There is a byte of memory for each cluster of the file: they are fewer.
        if let Ok(host) = u32::try_from(host.0) {
            self.found.push((guest.0, host));
        }
    }
}

/// Clusters that move at one time: each to a place that is free before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Clusters that the disk has alone.
    pub moves: Vec<Move>,
    /// Those that snapshots share: where each is, and where it goes.
    pub shared: Vec<(HostCluster, HostCluster)>,
    /// Places without a cluster whose space goes back to the host before, in order.
    pub released: Vec<HostCluster>,
    /// Places that are left and that keep their space, in order.
    pub spared: Vec<HostCluster>,
}

impl Step {
    /// How many clusters move.
    pub fn clusters(&self) -> u64 {
        let moves = self.moves.iter().map(|run| run.clusters);
        moves.sum::<u64>() + self.shared.len() as u64
    }

    /// Where they go, in order.
    pub fn destinations(&self) -> Vec<HostCluster> {
        let moves = self.moves.iter();
        let own = moves.flat_map(|run| (0..run.clusters).map(|at| run.to.plus(at)));
        let mut all: Vec<_> = own.chain(self.shared.iter().map(|&(_, to)| to)).collect();
        all.sort_unstable();
        all
    }
}

/// A part of the disk that goes home.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Those that are in its way.
    pub evicted: Step,
    /// Its own.
    pub placed: Step,
}

/// The beginning of the file up to a cluster, which tables and all else but the disk's clusters go
/// to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Front {
    /// The cluster behind it.
    pub end: u64,
    /// Clusters that go there.
    pub clusters: u64,
}

/// The next thing to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Todo {
    /// The order is as good as it is to be, or as it can be.
    Nothing,
    /// The front is cleared of the disk's clusters, all else goes there.
    Clear(Front),
    /// Clusters go home.
    Arrange,
}

/// Forecast of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// Runs afterwards.
    pub runs: u64,
    /// Clusters that are copied.
    pub moved: u64,
    /// Content of the clusters of the file.
    pub kinds: Vec<Kind>,
    /// Where what is not the disk's has gone.
    pub others: Vec<(u64, u64)>,
    /// The cluster behind the last home.
    pub end: u64,
}

/// The clusters of the disk, in its order, and the clusters of the file.
#[derive(Clone, Debug)]
struct Layout {
    guests: Vec<u64>,
    places: Vec<u32>,
    cells: Vec<Cell>,
    owners: Vec<u32>,
    geometry: Geometry,
}

impl Layout {
    fn of(survey: &Survey, places: Places, added: u64) -> Layout {
        let mut found = places.found;
        found.sort_unstable();
        let len = survey.kinds.len() + added as usize;
        let mut layout = Layout {
            guests: Vec::with_capacity(found.len()),
            places: Vec::with_capacity(found.len()),
            cells: vec![Cell::Free; len],
            owners: vec![NONE; len],
            geometry: survey.geometry,
        };
        for (cell, &kind) in layout.cells.iter_mut().zip(&survey.kinds) {
            *cell = match kind {
                Kind::Free => Cell::Free,
                Kind::Data => Cell::Fixed,
                kind if moves_later(kind) => Cell::Other,
                _ => Cell::Fixed,
            };
        }
        for (guest, host) in found {
            let at = host as usize;
            let is_own = survey.kinds.get(at).is_some_and(|&kind| is_data(kind));
            // Two clusters of the disk that share a place stay there.
            if is_own && layout.owners[at] == NONE {
                layout.owners[at] = layout.guests.len() as u32;
                layout.cells[at] = Cell::Disk;
                layout.guests.push(guest);
                layout.places.push(host);
            }
        }
        layout
    }

    fn len(&self) -> usize {
        self.guests.len()
    }

    /// Returns whether a cluster follows on the one before it on the disk.
    fn adjoins(&self, k: usize) -> bool {
        k > 0 && self.guests[k - 1] + 1 == self.guests[k]
    }

    /// Returns whether it does in the file, too.
    fn continues(&self, places: &[u32], k: usize) -> bool {
        self.adjoins(k) && places[k - 1] + 1 == places[k]
    }

    fn runs(&self, places: &[u32]) -> u64 {
        let begun = (0..self.len()).filter(|&k| !self.continues(places, k));
        begun.count() as u64
    }

    fn perfect(&self) -> u64 {
        (0..self.len()).filter(|&k| !self.adjoins(k)).count() as u64
    }

    /// The parts of the disk, as ranges of its clusters.
    fn parts(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = at;
            (start < self.len()).then(|| {
                at += 1;
                while at < self.len() && self.adjoins(at) {
                    at += 1;
                }
                start..at
            })
        })
    }

    /// The cluster behind the last one of the disk.
    fn end(&self) -> u64 {
        let last = self.cells.iter().rposition(|&cell| cell == Cell::Disk);
        last.map_or(0, |last| last as u64 + 1)
    }

    /// Free clusters before that.
    fn holes(&self) -> u64 {
        let before = self.cells[..self.end() as usize].iter();
        before.filter(|&&cell| cell == Cell::Free).count() as u64
    }

    /// Clusters that stay free at most.
    fn slack(&self) -> u64 {
        self.len() as u64 / SLACK_FRACTION
    }

    /// The beginning of the file that has room for all that moves and is not the disk's.
    fn front(&self) -> Front {
        let others = self.cells.iter().filter(|&&cell| cell == Cell::Other);
        let mut missing = others.count();
        let (mut end, mut within) = (0, 0);
        let all = missing;
        for cell in &self.cells {
            if missing == 0 {
                break;
            }
            end += 1;
            missing -= usize::from(*cell != Cell::Fixed);
            within += usize::from(*cell == Cell::Other);
        }
        Front {
            end,
            clusters: (all - within) as u64,
        }
    }

    /// The layout as it is once the front is cleared; what has gone there, and how many clusters of
    /// the disk have left it.
    fn cleared(mut self, front: Front) -> (Layout, Vec<(u64, u64)>, u64) {
        let end = front.end as usize;
        let behind = (end..self.cells.len()).filter(|&at| self.cells[at] == Cell::Other);
        let behind: Vec<usize> = behind.collect();
        let room = (0..end).filter(|&at| matches!(self.cells[at], Cell::Free | Cell::Disk));
        let room: Vec<usize> = room.collect();
        let (mut others, mut left) = (Vec::new(), 0);
        for (&from, &to) in behind.iter().rev().zip(&room) {
            // Somewhere behind: here where the other one was.
            let owner = std::mem::replace(&mut self.owners[to], NONE);
            self.cells[from] = Cell::Free;
            if owner != NONE {
                self.owners[from] = owner;
                self.places[owner as usize] = from as u32;
                self.cells[from] = Cell::Disk;
                left += 1;
            }
            self.cells[to] = Cell::Other;
            others.push((from as u64, to as u64));
        }
        (self, others, left)
    }
}

/// The order, and how far it has come.
#[derive(Clone, Debug)]
pub struct Order {
    layout: Layout,
    /// By clusters of the file: those that snapshots share.
    shared: Vec<bool>,
    todo: Todo,
    /// Where the clusters of the disk go.
    homes: Vec<u32>,
    /// Where the next window begins.
    at: usize,
    /// Free places that are not spared, and perhaps some that are not any more.
    heap: BinaryHeap<u32>,
    spared: Spared,
    free: u64,
    runs: u64,
    perfect: u64,
}

impl Order {
    /// The order for a file that has some more free clusters behind its end.
    pub fn of(survey: &Survey, places: Places, added: u64) -> Order {
        let layout = Layout::of(survey, places, added);
        let mut shared: Vec<bool> = vec![false; layout.len()];
        for (shared, &place) in shared.iter_mut().zip(&layout.places) {
            *shared = survey.kinds[place as usize] == Kind::Shared;
        }
        Order::by(layout, shared)
    }

    fn by(layout: Layout, shared: Vec<bool>) -> Order {
        let runs = layout.runs(&layout.places);
        let perfect = layout.perfect();
        let is_short = layout.holes() <= layout.slack();
        let (todo, Homes { homes, .. }) = match is_short && is_close(runs, perfect) {
            true => (Todo::Nothing, Homes::stay(&layout)),
            false => decide(&layout, (runs, is_short)),
        };
        let free_cells = (0..).zip(&layout.cells);
        let free_cells = free_cells.filter(|(_, cell)| **cell == Cell::Free);
        let heap: BinaryHeap<u32> = free_cells.map(|(at, _)| at).collect();
        Order {
            free: heap.len() as u64,
            layout,
            shared,
            todo,
            homes,
            at: 0,
            heap,
            spared: Spared::default(),
            runs,
            perfect,
        }
    }

    /// Has places without a cluster keep their space, this many clusters at most, with what the
    /// clusters of a step take beside it. A window is no larger.
    #[must_use]
    pub fn sparing(self, most: u64) -> Order {
        Order {
            spared: Spared::at_most(most),
            ..self
        }
    }

    /// Places without a cluster that keep their space, in order.
    pub fn spared(&self) -> Vec<HostCluster> {
        self.spared.all().collect()
    }

    /// The next thing to be done.
    pub fn todo(&self) -> Todo {
        self.todo
    }

    /// Runs there are now, and as few as there could be.
    pub fn runs(&self) -> (u64, u64) {
        (self.runs, self.perfect)
    }

    /// The cluster behind the last home, or of the last cluster if nothing is to be done.
    pub fn end(&self) -> u64 {
        match self.todo {
            Todo::Arrange => self.homes.last().map_or(0, |&last| u64::from(last) + 1),
            Todo::Nothing | Todo::Clear(_) => self.layout.end(),
        }
    }

    /// Clusters of the disk that are not at home.
    pub fn away(&self) -> u64 {
        let pairs = self.homes.iter().zip(&self.layout.places);
        pairs.filter(|(home, place)| home != place).count() as u64
    }

    /// Returns whether a cluster of the file is the disk's.
    pub fn is_disk(&self, cluster: u64) -> bool {
        self.layout.cells.get(cluster as usize) == Some(&Cell::Disk)
    }

    /// Returns whether at a place of the file lies a cluster of the disk that snapshots share and
    /// that is about to move.
    pub fn moves_shared(&self, cluster: u64) -> bool {
        let owner = self.layout.owners.get(cluster as usize);
        let owner = owner.filter(|&&owner| owner != NONE && self.shared[owner as usize]);
        owner.is_some_and(|&owner| match self.todo {
            Todo::Nothing => false,
            Todo::Clear(front) => cluster < front.end,
            Todo::Arrange => u64::from(self.homes[owner as usize]) != cluster,
        })
    }

    /// Returns whether any are.
    pub fn moves_any_shared(&self) -> bool {
        let mut places = self.layout.places.iter();
        places.any(|&place| self.moves_shared(u64::from(place)))
    }

    /// Clusters that are to stay free before the last of the disk, at most.
    pub fn slack(&self) -> u64 {
        self.layout.slack()
    }

    fn set_place(&mut self, k: usize, place: u32) {
        let touched = k..(k + 2).min(self.layout.len());
        let begun = |layout: &Layout| {
            let begun = touched.clone();
            begun
                .filter(|&k| !layout.continues(&layout.places, k))
                .count() as u64
        };
        self.runs -= begun(&self.layout);
        self.layout.places[k] = place;
        self.runs += begun(&self.layout);
    }

    /// Moves a cluster: its old place is to be freed when all others of the step are under way. If
    /// there is too little space, what is spared from `end` on gives some back.
    fn take(&mut self, (k, to): (u32, u32), end: u32, each: &mut Vec<(u32, u32, u32)>) {
        let from = self.layout.places[k as usize];
        debug_assert_eq!(self.layout.cells[to as usize], Cell::Free);
        self.layout.cells[to as usize] = Cell::Disk;
        self.layout.owners[to as usize] = k;
        self.spared.fill(to, end);
        self.set_place(k as usize, to);
        each.push((k, from, to));
    }

    /// The step of these moves; the places that they leave are free. Those that are homes from one
    /// on are filled later.
    fn step(&mut self, mut each: Vec<(u32, u32, u32)>, filled_from: u32) -> Step {
        let mut spared = Vec::new();
        for &(_, from, _) in &each {
            self.layout.cells[from as usize] = Cell::Free;
            self.layout.owners[from as usize] = NONE;
            let is_filled = from >= filled_from && self.homes.binary_search(&from).is_ok();
            match is_filled && self.spared.spare(from) {
                true => spared.push(HostCluster(u64::from(from))),
                false => self.heap.push(from),
            }
        }
        spared.sort_unstable();
        let released = self.spared.end_step();
        self.heap.extend(&released);
        each.sort_unstable();
        let place = |at: u32| HostCluster(u64::from(at));
        let (shared, own): (Vec<_>, Vec<_>) = each
            .into_iter()
            .partition(|(k, ..)| self.shared[*k as usize]);
        let guests = &self.layout.guests;
        let own = own
            .iter()
            .map(|&(k, from, to)| (GuestCluster(guests[k as usize]), place(from), place(to)));
        Step {
            moves: joined(&self.layout.geometry, own),
            shared: shared
                .iter()
                .map(|&(_, from, to)| (place(from), place(to)))
                .collect(),
            released: released.into_iter().map(place).collect(),
            spared,
        }
    }

    /// The highest free place that is not within a range; those that are there are noted. One that
    /// is spared, if others would take too much space.
    fn highest_free(&mut self, but: &Range<u32>, within: &mut Vec<u32>) -> Option<u32> {
        let spared = self.spared.highest(but);
        if self.spared.is_full() && spared.is_some() {
            return spared;
        }
        loop {
            match self.heap.pop() {
                Some(at) if self.layout.cells[at as usize] != Cell::Free => {}
                Some(at) if self.spared.has(at) => {}
                Some(at) if but.contains(&at) => within.push(at),
                Some(at) if spared.is_some_and(|spared| at < spared) => {
                    self.heap.push(at);
                    return spared;
                }
                other => return other.or(spared),
            }
        }
    }

    /// The next clusters of the disk that go home, at most `most`, and those that are in their way.
    pub fn next_window(&mut self, most: u64) -> Option<Window> {
        let is_short = || self.layout.holes() <= self.layout.slack();
        if self.todo != Todo::Arrange || (is_close(self.runs, self.perfect) && is_short()) {
            return None;
        }
        let most = most.min(self.free) as usize;
        let mut window: Vec<u32> = Vec::new();
        while window.len() < most && self.at < self.layout.len() {
            if self.homes[self.at] != self.layout.places[self.at] {
                window.push(self.at as u32);
            }
            self.at += 1;
        }
        let home = |order: &Order, k: u32| order.homes[k as usize];
        let range = home(self, *window.first()?)..home(self, *window.last()?) + 1;
        let (mut each, mut within) = (Vec::new(), Vec::new());
        for &k in &window {
            let owner = self.layout.owners[home(self, k) as usize];
            if owner == NONE || owner == k {
                continue;
            }
            let own = home(self, owner);
            let to = match self.layout.cells[own as usize] {
                Cell::Free => Some(own),
                _ => self.highest_free(&range, &mut within),
            };
            if let Some(to) = to {
                self.take((owner, to), range.end, &mut each);
            }
        }
        self.heap.extend(within);
        let evicted = self.step(each, range.start);
        let is_free = |order: &Order, k: u32| {
            let to = home(order, k);
            order.layout.cells[to as usize] == Cell::Free
        };
        let mut each = Vec::new();
        for &k in &window {
            if is_free(self, k) {
                self.take((k, home(self, k)), range.end, &mut each);
            }
        }
        let placed = self.step(each, range.end);
        Some(Window { evicted, placed })
    }

    /// Clusters of the disk, at most `most`, that leave the front. None of them goes there.
    pub fn next_of_front(&mut self, front: Front, most: u64) -> Option<Step> {
        let most = most.min(self.free) as usize;
        let range = 0..front.end as u32;
        let (mut each, mut within) = (Vec::new(), Vec::new());
        for at in 0..front.end as usize {
            if self.layout.cells[at] != Cell::Disk || each.len() >= most {
                continue;
            }
            let Some(to) = self.highest_free(&range, &mut within) else {
                break;
            };
            self.take((self.layout.owners[at], to), NONE, &mut each);
        }
        self.heap.extend(within);
        let step = self.step(each, NONE);
        (step.clusters() > 0).then_some(step)
    }

    /// Does all of it, with at most `most` clusters in a window.
    pub fn forecast(mut self, kinds: &[Kind], most: u64) -> Forecast {
        let mut forecast = Forecast {
            runs: self.runs,
            moved: 0,
            kinds: Vec::new(),
            others: Vec::new(),
            end: 0,
        };
        if let Todo::Clear(front) = self.todo {
            let (layout, others, left) = self.layout.cleared(front);
            forecast.moved = left + others.len() as u64;
            forecast.others = others;
            let spared = self.spared;
            self = Order {
                spared,
                ..Order::by(layout, self.shared)
            };
        }
        forecast.end = self.end();
        while let Some(window) = self.next_window(most) {
            forecast.moved += window.evicted.clusters() + window.placed.clusters();
        }
        forecast.runs = self.runs;
        let content = |at: usize| match (self.layout.cells[at], self.layout.owners[at]) {
            (Cell::Free, _) => Kind::Free,
            (Cell::Disk, owner) if self.shared[owner as usize] => Kind::Shared,
            (Cell::Disk, _) => Kind::Data,
            (Cell::Other | Cell::Fixed, _) => kinds.get(at).copied().unwrap_or(Kind::Free),
        };
        forecast.kinds = (0..self.layout.cells.len()).map(content).collect();
        for &(from, to) in &forecast.others {
            forecast.kinds[to as usize] = kinds[from as usize];
        }
        forecast
    }
}

/// Decides whether the clusters are arranged, and whether the front is cleared before. If the file
/// is short enough, they are only if that makes fewer runs.
fn decide(layout: &Layout, (runs, is_short): (u64, bool)) -> (Todo, Homes) {
    let perfect = layout.perfect();
    let here = homes(layout);
    let arranged = |homes: Homes| match is_short && homes.runs >= runs {
        true => (Todo::Nothing, homes),
        false => (Todo::Arrange, homes),
    };
    let Some(here) = here else {
        return (Todo::Nothing, Homes::stay(layout));
    };
    if is_close(here.runs, perfect) {
        return arranged(here);
    }
    let front = layout.front();
    if front.clusters == 0 {
        return arranged(here);
    }
    let (cleared, ..) = layout.clone().cleared(front);
    match homes(&cleared) {
        Some(there) if there.runs < here.runs => (Todo::Clear(front), there),
        Some(_) | None => arranged(here),
    }
}

#[cfg(test)]
mod tests;
