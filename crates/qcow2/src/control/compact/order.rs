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
//!
//! All of it is done in short steps, between which others go on ([`Pace`]).

use std::collections::BinaryHeap;
use std::ops::Range;

use super::pace::{Pace, pieces_of};
use super::plan::{Move, joined};
use super::survey::{Kind, Survey};
use crate::Result;
use crate::geometry::{GuestCluster, HostCluster};

mod homes;
mod layout;
mod spared;

pub use layout::Places;

use homes::homes;
use layout::{Cell, Figures, Layout};
use spared::Spared;

/// The part of the places of the data that stays free, at most, so that fewer clusters move.
pub const SLACK_FRACTION: u64 = 64;
/// The part of the places of the data that may be free before the last one without a move, where
/// the order is near enough: holes cost length alone, and to fill them, most of the disk moves.
const HOLES_FRACTION: u64 = 8;
/// No cluster.
const NONE: u32 = u32::MAX;
/// Clusters of the file among which free ones are looked for at a time.
const LOOKED_AT: usize = 1 << 10;
/// Work for a cluster that moves, in units of a [`Pace`].
const MOVE_UNITS: u64 = 8;

/// Returns whether a number of runs is within 1.2 of the perfect one.
pub fn is_close(runs: u64, perfect: u64) -> bool {
    u128::from(runs) * 5 <= u128::from(perfect) * 6
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
    /// Where each cluster is, and where it goes.
    pub fn pairs(&self) -> impl Iterator<Item = (HostCluster, HostCluster)> + '_ {
        let own = self.moves.iter();
        let own = own.flat_map(|run| (0..run.clusters).map(|n| (run.from.plus(n), run.to.plus(n))));
        own.chain(self.shared.iter().copied())
    }

    /// How many clusters move.
    pub fn clusters(&self) -> u64 {
        let moves = self.moves.iter().map(|run| run.clusters);
        moves.sum::<u64>() + self.shared.len() as u64
    }

    /// Where they go, in order.
    pub fn destinations(&self) -> Vec<HostCluster> {
        let mut all: Vec<_> = self.pairs().map(|(_, to)| to).collect();
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

/// The order, and how far it has come.
#[derive(Debug)]
pub struct Order {
    layout: Layout,
    /// By clusters of the disk: those that snapshots share.
    shared: Vec<bool>,
    todo: Todo,
    /// Where the clusters of the disk go, if they are to be arranged.
    homes: Vec<u32>,
    /// By clusters of the file: whether it is a home.
    is_home: Vec<bool>,
    /// Where the next window begins.
    at: usize,
    /// Free places that are not spared, and perhaps some that are not any more: those from a
    /// cluster on. The others have not been looked for yet.
    heap: BinaryHeap<u32>,
    heap_from: usize,
    spared: Spared,
    free: u64,
    runs: u64,
    perfect: u64,
    /// Clusters that were not at home at first.
    away: u64,
    /// The cluster behind the last home, or of the last cluster if nothing is to be arranged.
    end: u64,
}

impl Order {
    /// The order for a file that has some more free clusters behind its end.
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`], as those of all that takes a pace.
    pub async fn of(
        survey: &Survey,
        places: Places,
        added: u64,
        pace: &mut Pace<'_>,
    ) -> Result<Order> {
        let layout = Layout::of(survey, places, added, pace).await?;
        let mut shared = Vec::with_capacity(layout.len());
        for piece in pieces_of(0..layout.len()) {
            let places = layout.places[piece.clone()].iter();
            shared.extend(places.map(|&place| survey.kinds[place as usize] == Kind::Shared));
            pace.spend_on(&piece).await?;
        }
        Order::by(layout, shared, pace).await
    }

    async fn by(layout: Layout, shared: Vec<bool>, pace: &mut Pace<'_>) -> Result<Order> {
        let figures = layout.figures(pace).await?;
        let is_short = figures.holes <= layout.len() as u64 / HOLES_FRACTION;
        let decided = match is_short && is_close(figures.runs, figures.perfect) {
            true => Decided::nothing(),
            false => decide(&layout, &figures, pace).await?,
        };
        let mut is_home = Vec::new();
        let mut away = 0;
        for piece in pieces_of(0..layout.cells.len()) {
            is_home.resize(piece.end, false);
            pace.spend_on(&piece).await?;
        }
        for piece in pieces_of(0..decided.homes.len()) {
            for k in piece.clone() {
                is_home[decided.homes[k] as usize] = true;
                away += u64::from(decided.homes[k] != layout.places[k]);
            }
            pace.spend_on(&piece).await?;
        }
        let last = decided.homes.last().map(|&last| u64::from(last) + 1);
        Ok(Order {
            free: figures.free,
            heap: BinaryHeap::new(),
            heap_from: layout.cells.len(),
            layout,
            shared,
            todo: decided.todo,
            homes: decided.homes,
            is_home,
            at: 0,
            spared: Spared::default(),
            runs: figures.runs,
            perfect: figures.perfect,
            away,
            end: last.unwrap_or(figures.end),
        })
    }

    /// Has places without a cluster keep their space: of at most this number of clusters, with what
    /// the clusters of a step take beside it. A window is no larger.
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
        self.end
    }

    /// Clusters of the disk that were not at home at first.
    pub fn away(&self) -> u64 {
        self.away
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
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`].
    pub async fn moves_any_shared(&self, pace: &mut Pace<'_>) -> Result<bool> {
        for piece in pieces_of(0..self.layout.len()) {
            let mut places = self.layout.places[piece.clone()].iter();
            if places.any(|&place| self.moves_shared(u64::from(place))) {
                return Ok(true);
            }
            pace.spend_on(&piece).await?;
        }
        Ok(false)
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

    /// Places are free that may be found again.
    fn note_free(&mut self, place: u32) {
        // Those before are found when they are looked for.
        if place as usize >= self.heap_from {
            self.heap.push(place);
        }
    }

    /// The step of these moves; the places that they leave are free. Those that are homes from one
    /// on are filled later.
    async fn step(
        &mut self,
        mut each: Vec<(u32, u32, u32)>,
        filled_from: u32,
        pace: &mut Pace<'_>,
    ) -> Result<Step> {
        let mut spared = Vec::new();
        for &(_, from, _) in &each {
            self.layout.cells[from as usize] = Cell::Free;
            self.layout.owners[from as usize] = NONE;
            let is_filled = from >= filled_from && self.is_home[from as usize];
            match is_filled && self.spared.spare(from) {
                true => spared.push(HostCluster(u64::from(from))),
                false => self.note_free(from),
            }
            pace.spend(MOVE_UNITS).await?;
        }
        spared.sort_unstable();
        let released = self.spared.end_step();
        for &place in &released {
            self.note_free(place);
        }
        each.sort_unstable();
        let place = |at: u32| HostCluster(u64::from(at));
        let (shared, own): (Vec<_>, Vec<_>) = each
            .into_iter()
            .partition(|(k, ..)| self.shared[*k as usize]);
        let guests = &self.layout.guests;
        let own = own
            .iter()
            .map(|&(k, from, to)| (GuestCluster(guests[k as usize]), place(from), place(to)));
        Ok(Step {
            moves: joined(&self.layout.geometry, own),
            shared: shared
                .iter()
                .map(|&(_, from, to)| (place(from), place(to)))
                .collect(),
            released: released.into_iter().map(place).collect(),
            spared,
        })
    }

    /// Notes that a cluster of the last steps has not moved, as a guest has written it, or another
    /// has taken its place. It stays where it is; no other goes there, or where it was to go.
    pub fn stays(&mut self, from: HostCluster, to: HostCluster) {
        let (from, to) = (from.0 as u32, to.0 as u32);
        let k = std::mem::replace(&mut self.layout.owners[to as usize], NONE);
        self.layout.cells[to as usize] = Cell::Fixed;
        self.spared.forget(from);
        // Where another was to go there, that one stays, too.
        let cell = &mut self.layout.cells[from as usize];
        if *cell == Cell::Free {
            *cell = Cell::Fixed;
            self.free -= 1;
        }
        if k != NONE {
            self.set_place(k as usize, from);
            if let Some(home) = self.homes.get_mut(k as usize) {
                *home = from;
            }
        }
    }

    /// The highest free place that is not within a range; those that are there are noted. One that
    /// is spared, if others would take too much space.
    async fn highest_free(
        &mut self,
        but: &Range<u32>,
        within: &mut Vec<u32>,
        pace: &mut Pace<'_>,
    ) -> Result<Option<u32>> {
        let spared = self.spared.highest(but);
        if self.spared.is_full() && spared.is_some() {
            return Ok(spared);
        }
        loop {
            match self.heap.pop() {
                Some(at) if self.layout.cells[at as usize] != Cell::Free => {}
                Some(at) if self.spared.has(at) => {}
                Some(at) if but.contains(&at) => within.push(at),
                Some(at) if spared.is_some_and(|spared| at < spared) => {
                    self.heap.push(at);
                    return Ok(spared);
                }
                Some(at) => return Ok(Some(at)),
                None if self.look_further(pace).await? => {}
                None => return Ok(spared),
            }
            pace.spend(1).await?;
        }
    }

    /// Looks for free places before those that are known. Returns whether there may be some.
    async fn look_further(&mut self, pace: &mut Pace<'_>) -> Result<bool> {
        let start = self.heap_from.saturating_sub(LOOKED_AT);
        let cells = &self.layout.cells;
        let free = (start..self.heap_from).filter(|&at| cells[at] == Cell::Free);
        self.heap.extend(free.map(|at| at as u32));
        let was = std::mem::replace(&mut self.heap_from, start);
        pace.spend((was - start) as u64).await?;
        Ok(was > start)
    }

    /// Returns whether all is near enough to what was wanted.
    async fn is_enough(&self, pace: &mut Pace<'_>) -> Result<bool> {
        if !is_close(self.runs, self.perfect) {
            return Ok(false);
        }
        Ok(self.holes(pace).await? <= self.layout.slack())
    }

    /// Free clusters before the last one of the disk.
    async fn holes(&self, pace: &mut Pace<'_>) -> Result<u64> {
        let cells = &self.layout.cells;
        let (mut at, mut behind) = (cells.len(), 0);
        while at > 0 {
            let start = at.saturating_sub(LOOKED_AT);
            for cell in cells[start..at].iter().rev() {
                match cell {
                    // Those that are taken are as many as those that are left.
                    Cell::Disk => return Ok(self.free - behind),
                    Cell::Free => behind += 1,
                    Cell::Other | Cell::Fixed => {}
                }
            }
            at = start;
            pace.spend(LOOKED_AT as u64 / 16).await?;
        }
        Ok(0)
    }

    /// The next clusters of the disk that go home, at most `most`, and those that are in their way.
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`].
    pub async fn next_window(&mut self, most: u64, pace: &mut Pace<'_>) -> Result<Option<Window>> {
        if self.todo != Todo::Arrange || self.is_enough(pace).await? {
            return Ok(None);
        }
        let most = most.min(self.free) as usize;
        let mut window: Vec<u32> = Vec::new();
        while window.len() < most && self.at < self.layout.len() {
            if self.homes[self.at] != self.layout.places[self.at] {
                window.push(self.at as u32);
            }
            self.at += 1;
            pace.spend(1).await?;
        }
        let (Some(&first), Some(&last)) = (window.first(), window.last()) else {
            return Ok(None);
        };
        let range = self.homes[first as usize]..self.homes[last as usize] + 1;
        let evicted = self.evicted(&window, &range, pace).await?;
        let mut each = Vec::new();
        for k in window {
            let to = self.homes[k as usize];
            if self.layout.cells[to as usize] == Cell::Free {
                self.take((k, to), range.end, &mut each);
            }
            pace.spend(MOVE_UNITS).await?;
        }
        let placed = self.step(each, range.end, pace).await?;
        Ok(Some(Window { evicted, placed }))
    }

    /// Empties the homes of a window.
    async fn evicted(
        &mut self,
        window: &[u32],
        range: &Range<u32>,
        pace: &mut Pace<'_>,
    ) -> Result<Step> {
        let (mut each, mut within) = (Vec::new(), Vec::new());
        for &k in window {
            pace.spend(MOVE_UNITS).await?;
            let owner = self.layout.owners[self.homes[k as usize] as usize];
            if owner == NONE || owner == k {
                continue;
            }
            let own = self.homes[owner as usize];
            let to = match self.layout.cells[own as usize] {
                Cell::Free => Some(own),
                _ => self.highest_free(range, &mut within, pace).await?,
            };
            if let Some(to) = to {
                self.take((owner, to), range.end, &mut each);
            }
        }
        self.heap.extend(within);
        self.step(each, range.start, pace).await
    }

    /// Clusters of the disk, at most `most`, that leave the front. None of them goes there.
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`].
    pub async fn next_of_front(
        &mut self,
        front: Front,
        most: u64,
        pace: &mut Pace<'_>,
    ) -> Result<Option<Step>> {
        let most = most.min(self.free) as usize;
        let range = 0..front.end as u32;
        let (mut each, mut within) = (Vec::new(), Vec::new());
        for at in 0..front.end as usize {
            pace.spend(1).await?;
            if self.layout.cells[at] != Cell::Disk || each.len() >= most {
                continue;
            }
            let Some(to) = self.highest_free(&range, &mut within, pace).await? else {
                break;
            };
            self.take((self.layout.owners[at], to), NONE, &mut each);
        }
        self.heap.extend(within);
        let step = self.step(each, NONE, pace).await?;
        Ok((step.clusters() > 0).then_some(step))
    }

    /// Does all of it, with at most `most` clusters in a window.
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`].
    pub async fn forecast(
        mut self,
        kinds: &[Kind],
        most: u64,
        pace: &mut Pace<'_>,
    ) -> Result<Forecast> {
        let mut forecast = Forecast {
            runs: self.runs,
            moved: 0,
            kinds: Vec::new(),
            others: Vec::new(),
            end: 0,
        };
        if let Todo::Clear(front) = self.todo {
            let (layout, others, left) = self.layout.cleared(front, pace).await?;
            forecast.moved = left + others.len() as u64;
            forecast.others = others;
            let spared = self.spared;
            self = Order {
                spared,
                ..Order::by(layout, self.shared, pace).await?
            };
        }
        forecast.end = self.end();
        while let Some(window) = self.next_window(most, pace).await? {
            forecast.moved += window.evicted.clusters() + window.placed.clusters();
        }
        forecast.runs = self.runs;
        for piece in pieces_of(0..self.layout.cells.len()) {
            let kinds = piece.clone().map(|at| self.kind_of(at, kinds));
            forecast.kinds.extend(kinds);
            pace.spend_on(&piece).await?;
        }
        for &(from, to) in &forecast.others {
            forecast.kinds[to as usize] = kinds[from as usize];
            pace.spend(1).await?;
        }
        self.give_back(pace).await?;
        Ok(forecast)
    }

    /// Gives its memory back in short steps.
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`].
    pub async fn give_back(self, pace: &mut Pace<'_>) -> Result<()> {
        self.layout.give_back(pace).await?;
        pace.give_back(self.shared).await?;
        pace.give_back(self.homes).await?;
        pace.give_back(self.is_home).await?;
        pace.give_back(self.heap.into_vec()).await
    }

    /// The content of a cluster of the file, if what is not the disk's holds what it did.
    fn kind_of(&self, at: usize, kinds: &[Kind]) -> Kind {
        match (self.layout.cells[at], self.layout.owners[at]) {
            (Cell::Free, _) => Kind::Free,
            (Cell::Disk, owner) if self.shared[owner as usize] => Kind::Shared,
            (Cell::Disk, _) => Kind::Data,
            (Cell::Other | Cell::Fixed, _) => kinds.get(at).copied().unwrap_or(Kind::Free),
        }
    }
}

/// The work that is to be done.
struct Decided {
    todo: Todo,
    /// Where the clusters of the disk go, if they are to be arranged.
    homes: Vec<u32>,
}

impl Decided {
    fn nothing() -> Decided {
        Decided {
            todo: Todo::Nothing,
            homes: Vec::new(),
        }
    }
}

/// Decides whether the clusters are arranged, and whether the front is cleared before. If the file
/// is short enough, they are only if that makes fewer runs.
async fn decide(layout: &Layout, figures: &Figures, pace: &mut Pace<'_>) -> Result<Decided> {
    let perfect = figures.perfect;
    let Some(here) = homes(layout, perfect, pace).await? else {
        return Ok(Decided::nothing());
    };
    let is_short = figures.holes <= layout.slack();
    if !is_close(here.runs, perfect) {
        let front = layout.front(pace).await?;
        if front.clusters > 0 {
            let (cleared, ..) = layout.cleared(front, pace).await?;
            let there = homes(&cleared, perfect, pace).await?;
            cleared.give_back(pace).await?;
            if there.is_some_and(|there| there.runs < here.runs) {
                return Ok(Decided {
                    todo: Todo::Clear(front),
                    homes: Vec::new(),
                });
            }
        }
    }
    Ok(match is_short && here.runs >= figures.runs {
        true => Decided::nothing(),
        false => Decided {
            todo: Todo::Arrange,
            homes: here.homes,
        },
    })
}

#[cfg(test)]
mod tests;
