//! How often each host cluster is referenced: counters in pages, only where something is.
//!
//! A cell holds a count and which COPIED flags the active table's references had. In most images a
//! cluster is referenced once at most, so cells have 2 bits as long as that holds throughout their
//! page, then 8, 16 and 64: data looked up at random should be small. An image of 8 TiB with 64
//! KiB clusters takes 32 MiB, or 128 MiB with snapshots. What the image makes the caller ask for is
//! charged to a [`Memory`] with a limit, so that a hostile image fails instead of filling the host.
//!
//! | bits of a cell | meaning |
//! | --- | --- |
//! | 0 | a reference with COPIED set was seen |
//! | 1 | a reference with COPIED clear was seen |
//! | 2.. | references |
//!
//! A cell of 2 bits is the index of one of the four cells in `LONE`.

use std::ops::Range;

/// Cells of a page. Small enough that a lone reference costs little, large enough that the list of
/// pages is small.
const PAGE_CELLS: usize = 16384;
const FLAG_BITS: u32 = 2;
/// Bytes of a page with cells of 2 bits.
const QUARTERS_BYTES: usize = PAGE_CELLS / 4;

/// The cells of no reference, and of one: with COPIED set, clear, and without such a flag.
const LONE: [u64; 4] = [0, 0b101, 0b110, 0b100];

/// Memory that an image may make us use.
#[derive(Debug)]
pub struct Memory {
    left_bytes: u64,
}

/// The image needs more memory than it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

impl Memory {
    /// Returns a budget of `limit_bytes` bytes.
    pub fn new(limit_bytes: u64) -> Memory {
        let left_bytes = limit_bytes;
        Memory { left_bytes }
    }

    /// Takes some for good.
    ///
    /// # Errors
    /// If that is more than is left.
    pub fn charge(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        self.left_bytes = self.left_bytes.checked_sub(bytes).ok_or(OutOfMemory)?;
        Ok(())
    }
}

/// COPIED as the references from the active tables have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// Set: the count should be 1.
    Set,
    /// Clear: the count should not be 1.
    Clear,
    /// The reference has no such flag, or it means nothing.
    Ignored,
}

impl Copied {
    /// The flag of a reference, if it means something.
    pub fn of(is_set: bool, is_meant: bool) -> Copied {
        match (is_meant, is_set) {
            (false, _) => Copied::Ignored,
            (true, true) => Copied::Set,
            (true, false) => Copied::Clear,
        }
    }

    fn bit(self) -> u64 {
        match self {
            Copied::Set => 1,
            Copied::Clear => 2,
            Copied::Ignored => 0,
        }
    }
}

/// The facts known about a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Cell {
    /// References, at most what the image's refcounts can express.
    pub references: u64,
    seen: u64,
}

impl Cell {
    /// Returns whether some reference's COPIED flag contradicts this count.
    pub fn contradicts_copied(self, refcount: u64) -> bool {
        let wrong = if refcount == 1 {
            Copied::Clear
        } else {
            Copied::Set
        };
        self.seen & wrong.bit() != 0
    }

    fn unpack(cell: u64) -> Cell {
        Cell {
            references: cell >> FLAG_BITS,
            seen: cell & ((1 << FLAG_BITS) - 1),
        }
    }
}

#[derive(Debug, Default)]
enum Page {
    #[default]
    Empty,
    Quarters(Box<[u8; QUARTERS_BYTES]>),
    Bytes(Box<[u8]>),
    Shorts(Box<[u16]>),
    Longs(Box<[u64]>),
}

impl Page {
    fn get(&self, index: usize) -> u64 {
        match self {
            Page::Empty => 0,
            Page::Quarters(cells) => LONE[usize::from(cells[index / 4] >> (index % 4 * 2) & 3)],
            Page::Bytes(cells) => u64::from(cells[index]),
            Page::Shorts(cells) => u64::from(cells[index]),
            Page::Longs(cells) => cells[index],
        }
    }

    /// Bits of a cell.
    fn cell_bits(&self) -> u64 {
        match self {
            Page::Empty => 0,
            Page::Quarters(_) => 2,
            Page::Bytes(_) => 8,
            Page::Shorts(_) => 16,
            Page::Longs(_) => 64,
        }
    }

    fn holds(&self, cell: u64) -> bool {
        match self {
            Page::Empty => cell == 0,
            Page::Quarters(_) => LONE.contains(&cell),
            _ => cell <= u64::MAX >> (64 - self.cell_bits()),
        }
    }

    fn widened(&self) -> Page {
        match self {
            Page::Empty => Page::Quarters(Box::new([0; QUARTERS_BYTES])),
            Page::Quarters(_) => {
                // The four cells have 3 bits at most.
                Page::Bytes((0..PAGE_CELLS).map(|i| self.get(i) as u8).collect())
            }
            Page::Bytes(cells) => Page::Shorts(cells.iter().map(|&cell| cell.into()).collect()),
            Page::Shorts(cells) => Page::Longs(cells.iter().map(|&cell| cell.into()).collect()),
            Page::Longs(cells) => Page::Longs(cells.clone()),
        }
    }

    fn set(&mut self, index: usize, cell: u64, memory: &mut Memory) -> Result<(), OutOfMemory> {
        while !self.holds(cell) {
            let wider = self.widened();
            let more_bits = wider.cell_bits() - self.cell_bits();
            memory.charge(more_bits * PAGE_CELLS as u64 / 8)?;
            *self = wider;
        }
        // The loop above made the cell wide enough, so no conversion cuts.
        match self {
            Page::Empty => debug_assert_eq!(cell, 0, "an empty page was widened"),
            Page::Quarters(cells) => {
                let quarter = LONE.iter().position(|&lone| lone == cell);
                let quarter = quarter.expect("the page holds the cell") as u8;
                let shift = index % 4 * 2;
                cells[index / 4] = cells[index / 4] & !(3 << shift) | quarter << shift;
            }
            Page::Bytes(cells) => cells[index] = cell as u8,
            Page::Shorts(cells) => cells[index] = cell as u16,
            Page::Longs(cells) => cells[index] = cell,
        }
        Ok(())
    }
}

/// The counters of an image.
#[derive(Debug)]
pub struct Counts {
    pages: Vec<Page>,
    references_max: u64,
}

impl Counts {
    /// No references; counts stop at `references_max`.
    pub fn new(references_max: u64) -> Counts {
        Counts {
            pages: Vec::new(),
            references_max: references_max.min(u64::MAX >> FLAG_BITS),
        }
    }

    /// Adds `times` references to a cluster; returns how many of them did not fit.
    ///
    /// # Errors
    /// If the page does not fit in memory.
    pub fn add(
        &mut self,
        cluster: u64,
        times: u64,
        copied: Copied,
        memory: &mut Memory,
    ) -> Result<u64, OutOfMemory> {
        let references_max = self.references_max;
        let (page, index) = self.page_mut(cluster, memory)?;
        let cell = page.get(index);
        let references = cell >> FLAG_BITS;
        let room = references_max - references;
        let added = times.min(room);
        let seen = cell & ((1 << FLAG_BITS) - 1) | copied.bit();
        page.set(index, (references + added) << FLAG_BITS | seen, memory)?;
        Ok(times - added)
    }

    /// Adds a reference to a cluster that has none, in a page that is there. Otherwise nothing is
    /// done, and the answer is no: [`Counts::add`] does it.
    #[inline]
    pub fn add_first(&mut self, cluster: u64, copied: Copied) -> bool {
        let (page, index) = place(cluster);
        let Some(Page::Quarters(cells)) = self.pages.get_mut(page) else {
            return false;
        };
        let quarter = match copied {
            Copied::Set => 1,
            Copied::Clear => 2,
            Copied::Ignored => 3,
        };
        let cells = &mut cells[index / 4];
        let shift = index % 4 * 2;
        let is_first = *cells >> shift & 3 == 0;
        if is_first {
            *cells |= quarter << shift;
        }
        is_first
    }

    /// Reads the memory where a cluster's cell is, if that is one of the usual; what it holds means
    /// nothing to others.
    #[inline]
    pub fn glance(&self, cluster: u64) -> u8 {
        let (page, index) = place(cluster);
        match self.pages.get(page) {
            Some(Page::Quarters(cells)) => cells[index / 4],
            Some(Page::Bytes(cells)) => cells[index],
            _ => 0,
        }
    }

    /// Returns the facts about the four clusters from `cluster` on, a multiple of four, as an index
    /// of [`FOURS`]; `None` if they do not fit in one.
    #[inline]
    pub fn four(&self, cluster: u64) -> Option<u8> {
        let (page, index) = place(cluster);
        match self.pages.get(page) {
            None | Some(Page::Empty) => Some(0),
            Some(Page::Quarters(cells)) => Some(cells[index / 4]),
            Some(_) => None,
        }
    }

    /// Returns the facts about a cluster.
    pub fn get(&self, cluster: u64) -> Cell {
        let (page, index) = place(cluster);
        Cell::unpack(self.pages.get(page).map_or(0, |page| page.get(index)))
    }

    /// The clusters of `range` in pieces that are in one page each, without the pieces that are
    /// known to be without references.
    pub fn referenced_pieces(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let pages = (range.start / PAGE_CELLS as u64)..range.end.div_ceil(PAGE_CELLS as u64);
        let known = pages.start..pages.end.min(self.pages.len() as u64);
        known
            .filter(|&page| !matches!(self.pages[page as usize], Page::Empty))
            .map(move |page| {
                let first = page * PAGE_CELLS as u64;
                first.max(range.start)..(first + PAGE_CELLS as u64).min(range.end)
            })
            .filter(|piece| !piece.is_empty())
    }

    fn page_mut(
        &mut self,
        cluster: u64,
        memory: &mut Memory,
    ) -> Result<(&mut Page, usize), OutOfMemory> {
        let (page, index) = place(cluster);
        if page >= self.pages.len() {
            // Doubling keeps the copying linear; the budget is charged with the new size of the
            // list.
            let len = (page + 1).max(self.pages.len() * 2);
            let more = (len - self.pages.len()) * std::mem::size_of::<Page>();
            memory.charge(more as u64)?;
            self.pages.resize_with(len, Page::default);
        }
        Ok((&mut self.pages[page], index))
    }
}

/// Four clusters that are referenced once at most.
#[derive(Clone, Copy, Debug)]
pub struct Four {
    /// Their refcounts as four big-endian numbers of 16 bits, if they are right.
    pub refcounts: u64,
    /// Whether no COPIED flag contradicts these refcounts.
    pub copied_is_right: bool,
}

/// The meanings of the indexes that [`Counts::four`] returns.
pub static FOURS: [Four; 256] = fours();

const fn fours() -> [Four; 256] {
    let none = Four {
        refcounts: 0,
        copied_is_right: true,
    };
    let mut fours = [none; 256];
    let mut cells = 0;
    while cells < fours.len() {
        let mut index = 0;
        while index < 4 {
            let quarter = cells >> (index * 2) & 3;
            let references = LONE[quarter] >> FLAG_BITS;
            fours[cells].refcounts |= references << (48 - index * 16);
            if LONE[quarter] & 0b10 != 0 {
                fours[cells].copied_is_right = false;
            }
            index += 1;
        }
        cells += 1;
    }
    fours
}

fn place(cluster: u64) -> (usize, usize) {
    let cells = PAGE_CELLS as u64;
    let page = usize::try_from(cluster / cells).expect("a host offset has 56 bits at most");
    (page, (cluster % cells) as usize)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::random::Random;

    /// Random additions agree with a map, in every width of a cell and at every maximum.
    #[test]
    fn counters_agree_with_a_map() {
        for (seed, references_max) in [(1, 1), (2, 3), (3, 255), (4, 65535), (5, u64::MAX)] {
            let mut random = Random(seed);
            let mut memory = Memory::new(1 << 30);
            let mut counts = Counts::new(references_max);
            let mut model: BTreeMap<u64, (u64, bool, bool)> = BTreeMap::new();
            for _ in 0..20_000 {
                let cluster = random.next() % 97 * 613;
                let times = match random.next() % 50 {
                    0 => 1 << 40,
                    1..5 => 300,
                    _ => 1,
                };
                let copied = match random.next() % 3 {
                    0 => Copied::Set,
                    1 => Copied::Clear,
                    _ => Copied::Ignored,
                };
                // Both ways of adding have the same effect, where the quick one has any.
                let overflowed = match times == 1 && counts.add_first(cluster, copied) {
                    true => 0,
                    false => counts.add(cluster, times, copied, &mut memory).unwrap(),
                };
                let entry = model.entry(cluster).or_default();
                let sum = entry.0 + times;
                assert_eq!(overflowed, sum.saturating_sub(references_max));
                entry.0 = sum.min(references_max);
                entry.1 |= copied == Copied::Set;
                entry.2 |= copied == Copied::Clear;
            }
            for (&cluster, &(references, set, clear)) in &model {
                let cell = counts.get(cluster);
                assert_eq!(cell.references, references);
                assert_eq!(cell.contradicts_copied(1), clear);
                assert_eq!(cell.contradicts_copied(2), set);
                assert_eq!(counts.get(cluster + 1), Cell::default());
            }
            let pieces: Vec<_> = counts.referenced_pieces(5..60_000).collect();
            assert!(pieces.iter().all(|p| p.start >= 5 && p.end <= 60_000));
            for &cluster in model.keys().filter(|&&c| (5..60_000).contains(&c)) {
                assert_eq!(pieces.iter().filter(|p| p.contains(&cluster)).count(), 1);
            }
        }
    }

    /// Every four that can be, against the cells one by one.
    #[test]
    fn fours_agree_with_their_cells() {
        let flags = [Copied::Set, Copied::Clear, Copied::Ignored];
        for wanted in 0..=u8::MAX {
            let mut memory = Memory::new(1 << 20);
            let mut counts = Counts::new(65535);
            for cluster in 0..4_u64 {
                let quarter = usize::from(wanted >> (cluster * 2) & 3);
                if let Some(&copied) = quarter.checked_sub(1).and_then(|at| flags.get(at)) {
                    counts.add(8 + cluster, 1, copied, &mut memory).unwrap();
                }
            }
            assert_eq!(counts.four(8), Some(wanted));
            let cells: Vec<Cell> = (8..12).map(|cluster| counts.get(cluster)).collect();
            let four = FOURS[usize::from(wanted)];
            let refcounts = cells
                .iter()
                .fold(0, |all, cell| all << 16 | cell.references);
            assert_eq!(four.refcounts, refcounts);
            let wrong = |cell: &Cell| cell.contradicts_copied(cell.references);
            assert_eq!(four.copied_is_right, !cells.iter().any(wrong));
        }
        let mut memory = Memory::new(1 << 20);
        let mut counts = Counts::new(65535);
        assert_eq!(counts.four(0), Some(0));
        counts.add(1, 2, Copied::Ignored, &mut memory).unwrap();
        assert_eq!(counts.four(0), None, "two references need a wider cell");
    }

    /// Cells of 8 bits, as snapshots make them, in an image of 8 TiB.
    #[test]
    fn eight_tebibytes_of_clusters_fit_in_an_eighth_of_a_gibibyte() {
        let mut memory = Memory::new(129 << 20);
        let mut counts = Counts::new(65535);
        let clusters = (8u64 << 40) >> 16;
        // One cluster a page is what costs memory; the others are free.
        for cluster in (0..clusters).step_by(PAGE_CELLS) {
            counts.add(cluster, 2, Copied::Set, &mut memory).unwrap();
        }
        assert_eq!(counts.get(clusters - PAGE_CELLS as u64).references, 2);
    }

    #[test]
    fn far_clusters_run_into_the_limit() {
        let mut memory = Memory::new(1 << 20);
        let mut counts = Counts::new(1);
        let far = counts.add(1 << 46, 1, Copied::Set, &mut memory);
        assert_eq!(far, Err(OutOfMemory));
    }
}
