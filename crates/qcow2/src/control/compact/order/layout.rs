//! The clusters of the disk, in its order, and the clusters of the file. Pure.

use std::collections::BTreeMap;

use super::{Front, NONE, SLACK_FRACTION};
use crate::Result;
use crate::control::compact::pace::{Pace, pieces_of};
use crate::control::compact::survey::{Kind, Survey, is_data};
use crate::control::compact::units::moves_later;
use crate::geometry::{Geometry, GuestCluster, HostCluster};

/// A cluster of the file, for the order of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cell {
    Free,
    /// A cluster of the disk, that may move.
    Disk,
    /// Something else that moves.
    Other,
    Fixed,
}

/// Where the disk's clusters are.
#[derive(Clone, Debug)]
pub struct Places {
    /// Those of each L2 table in their order.
    found: Vec<(u64, u32)>,
    /// The tables by their place on the disk: where theirs begin, and how many there are.
    tables: BTreeMap<u64, (u32, u32)>,
    /// Clusters of the disk that a table has.
    l2_entries: u64,
    /// The table that comes now, and where its clusters begin.
    now: Option<(u64, u32)>,
}

impl Places {
    /// Bytes of memory that each takes here and in an [`super::Order`] while that is planned.
    pub const BYTES: u64 = 56;
    /// The same, of each cluster of the file.
    pub const CLUSTER_BYTES: u64 = 24;
    /// Bytes of memory that each L2 table takes.
    pub const TABLE_BYTES: u64 = 48;

    /// No places yet, of `most`, of a disk whose L2 tables have this number of entries.
    #[must_use]
    pub fn of_tables_with(l2_entries: u64, most: u64) -> Places {
        Places {
            // It grows at once: a copy of all that is known would take a long step.
            found: Vec::with_capacity(most as usize),
            tables: BTreeMap::new(),
            l2_entries,
            now: None,
        }
    }

    /// How many are known.
    #[must_use]
    pub fn clusters(&self) -> u64 {
        self.found.len() as u64
    }

    /// Notes where a cluster is. Those of a table come one after the other, in their order. Returns
    /// whether it is the first one of its table.
    pub fn note(&mut self, guest: GuestCluster, host: HostCluster) -> bool {
        // There is some memory for each cluster of the file: they are fewer.
        let Ok(host) = u32::try_from(host.0) else {
            return false;
        };
        let table = guest.0 / self.l2_entries;
        let is_first = self.now.is_none_or(|(now, _)| now != table);
        if is_first {
            self.end_table();
            self.now = Some((table, self.found.len() as u32));
        }
        self.found.push((guest.0, host));
        is_first
    }

    fn end_table(&mut self) {
        if let Some((table, start)) = self.now.take() {
            let len = self.found.len() as u32 - start;
            self.tables.insert(table, (start, len));
        }
    }

    /// All of them, in the order of the disk, in pieces.
    fn pieces(&self) -> impl Iterator<Item = &[(u64, u32)]> + Send {
        let tables = self.tables.values();
        tables.flat_map(|&(start, len)| {
            let (start, len) = (start as usize, len as usize);
            pieces_of(start..start + len).map(|piece| &self.found[piece])
        })
    }
}

/// Figures of a layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    /// Runs there are.
    pub runs: u64,
    /// As few as there can be.
    pub perfect: u64,
    /// Free clusters.
    pub free: u64,
    /// Those before the last cluster of the disk.
    pub holes: u64,
    /// The cluster behind that.
    pub end: u64,
}

/// The clusters of the disk, in its order, and the clusters of the file.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub guests: Vec<u64>,
    pub places: Vec<u32>,
    pub cells: Vec<Cell>,
    pub owners: Vec<u32>,
    pub geometry: Geometry,
}

impl Layout {
    /// The layout of a file that has some more free clusters behind its end.
    pub async fn of(
        survey: &Survey,
        mut places: Places,
        added: u64,
        pace: &mut Pace<'_>,
    ) -> Result<Layout> {
        places.end_table();
        let len = survey.kinds.len() + added as usize;
        let mut layout = Layout {
            guests: Vec::with_capacity(places.found.len()),
            places: Vec::with_capacity(places.found.len()),
            cells: Vec::with_capacity(len),
            owners: Vec::with_capacity(len),
            geometry: survey.geometry,
        };
        let cell = |at: usize| match survey.kinds.get(at) {
            None | Some(Kind::Free) => Cell::Free,
            Some(Kind::Data) => Cell::Fixed,
            Some(&kind) if moves_later(kind) => Cell::Other,
            Some(_) => Cell::Fixed,
        };
        for piece in pieces_of(0..len) {
            layout.owners.resize(piece.end, NONE);
            layout.cells.extend(piece.clone().map(cell));
            pace.spend_on(&piece).await?;
        }
        for piece in places.pieces() {
            for &(guest, host) in piece {
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
            pace.spend(piece.len() as u64).await?;
        }
        pace.give_back(places.found).await?;
        Ok(layout)
    }

    /// Gives its memory back.
    pub async fn give_back(self, pace: &mut Pace<'_>) -> Result<()> {
        pace.give_back(self.guests).await?;
        pace.give_back(self.places).await?;
        pace.give_back(self.cells).await?;
        pace.give_back(self.owners).await
    }

    pub fn len(&self) -> usize {
        self.guests.len()
    }

    /// Returns whether a cluster follows on the one before it on the disk.
    pub fn adjoins(&self, k: usize) -> bool {
        k > 0 && self.guests[k - 1] + 1 == self.guests[k]
    }

    /// Returns whether it does in the file, too.
    pub fn continues(&self, places: &[u32], k: usize) -> bool {
        self.adjoins(k) && places[k - 1] + 1 == places[k]
    }

    /// Looks through all of it.
    pub async fn figures(&self, pace: &mut Pace<'_>) -> Result<Figures> {
        let mut figures = Figures {
            runs: 0,
            perfect: 0,
            free: 0,
            holes: 0,
            end: 0,
        };
        for piece in pieces_of(0..self.len()) {
            for k in piece.clone() {
                figures.runs += u64::from(!self.continues(&self.places, k));
                figures.perfect += u64::from(!self.adjoins(k));
            }
            pace.spend_on(&piece).await?;
        }
        for piece in pieces_of(0..self.cells.len()) {
            for at in piece.clone() {
                match self.cells[at] {
                    Cell::Free => figures.free += 1,
                    Cell::Disk => (figures.holes, figures.end) = (figures.free, at as u64 + 1),
                    Cell::Other | Cell::Fixed => {}
                }
            }
            pace.spend_on(&piece).await?;
        }
        Ok(figures)
    }

    /// Clusters that stay free at most.
    pub fn slack(&self) -> u64 {
        self.len() as u64 / SLACK_FRACTION
    }

    /// The beginning of the file that has room for all that moves and is not the disk's.
    pub async fn front(&self, pace: &mut Pace<'_>) -> Result<Front> {
        let is_other = |at: &usize| self.cells[*at] == Cell::Other;
        let mut all = 0;
        for piece in pieces_of(0..self.cells.len()) {
            all += piece.clone().filter(is_other).count();
            pace.spend_on(&piece).await?;
        }
        let (mut missing, mut within) = (all, 0);
        let mut end = 0;
        'looked: for piece in pieces_of(0..self.cells.len()) {
            for at in piece.clone() {
                if missing == 0 {
                    break 'looked;
                }
                end += 1;
                missing -= usize::from(self.cells[at] != Cell::Fixed);
                within += usize::from(is_other(&at));
            }
            pace.spend_on(&piece).await?;
        }
        Ok(Front {
            end,
            clusters: (all - within) as u64,
        })
    }

    /// A copy as it is once the front is cleared; what has gone there, and how many clusters of the
    /// disk have left it.
    pub async fn cleared(
        &self,
        front: Front,
        pace: &mut Pace<'_>,
    ) -> Result<(Layout, Vec<(u64, u64)>, u64)> {
        let mut cleared = Layout {
            guests: copied(&self.guests, pace).await?,
            places: copied(&self.places, pace).await?,
            cells: copied(&self.cells, pace).await?,
            owners: copied(&self.owners, pace).await?,
            geometry: self.geometry,
        };
        let end = front.end as usize;
        let (mut behind, mut others) = (Vec::new(), Vec::new());
        for piece in pieces_of(end..self.cells.len()) {
            let some = piece.clone().filter(|&at| self.cells[at] == Cell::Other);
            behind.extend(some.map(|at| at as u32));
            pace.spend_on(&piece).await?;
        }
        let mut left = 0;
        for piece in pieces_of(0..end) {
            for to in piece.clone() {
                if !matches!(self.cells[to], Cell::Free | Cell::Disk) {
                    continue;
                }
                let Some(from) = behind.pop() else { break };
                // Somewhere behind: here where the other one was.
                let at = from as usize;
                let owner = std::mem::replace(&mut cleared.owners[to], NONE);
                cleared.cells[at] = Cell::Free;
                if owner != NONE {
                    cleared.owners[at] = owner;
                    cleared.places[owner as usize] = from;
                    cleared.cells[at] = Cell::Disk;
                    left += 1;
                }
                cleared.cells[to] = Cell::Other;
                others.push((u64::from(from), to as u64));
            }
            pace.spend_on(&piece).await?;
        }
        Ok((cleared, others, left))
    }
}

async fn copied<T: Copy>(all: &[T], pace: &mut Pace<'_>) -> Result<Vec<T>> {
    let mut copy = Vec::with_capacity(all.len());
    for piece in pieces_of(0..all.len()) {
        copy.extend_from_slice(&all[piece.clone()]);
        pace.spend_on(&piece).await?;
    }
    Ok(copy)
}
