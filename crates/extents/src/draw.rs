//! The picture: the same bytes twice, above in the guest's (or the file's) order, below in the
//! order of the device. Pure; `svg.rs` and the terminal draw what is made here.
//!
//! Each half is a grid of cells of as many bytes each. The shade of a cell shows where its bytes
//! are in the *other* half: where both halves go smoothly from the first shade to the last, the
//! disk keeps the guest's order; where they are motley it does not. A cell shows the state of most
//! of its bytes, and the shade of its largest piece. On the device, what lies between is drawn one
//! cell wide at most, however wide it is, and all of it together no wider than the pieces.

use crate::interleave::Neighbours;

/// Shades from the first place to the last.
pub const SHADES: usize = 16;
/// Pieces that a picture is made of, at most: 160 MiB of memory.
pub const PIECES_MAX: usize = 1 << 22;

/// State of a piece, as far as the picture shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Data, or compressed data.
    Data,
    /// Space that reads as zeroes.
    Unwritten,
    /// The image's metadata.
    Metadata,
    /// Data without a place: delayed, inline.
    Unplaced,
}

const STATES: [State; 4] = [
    State::Data,
    State::Unwritten,
    State::Metadata,
    State::Unplaced,
];

/// Bytes that lie together in both orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where they are above; metadata is only below.
    pub above: Option<u64>,
    /// Bytes above.
    pub above_len: u64,
    /// Where they are on the device.
    pub physical: Option<u64>,
    /// Bytes there.
    pub len: u64,
    /// State of the pieces.
    pub state: State,
}

impl Piece {
    fn is_continued_by(&self, next: &Piece) -> bool {
        let follows = |a: Option<u64>, len: u64, b: Option<u64>| match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => a + len == b,
            (Some(_), None) | (None, Some(_)) => false,
        };
        self.state == next.state
            && follows(self.above, self.above_len, next.above)
            && follows(self.physical, self.len, next.physical)
    }
}

/// Pieces on their way into a picture.
#[derive(Clone, Debug, Default)]
pub struct Pieces {
    list: Vec<Piece>,
    /// Whether there are more pieces than a picture is made of.
    pub overflowed: bool,
}

impl Pieces {
    /// The next piece; what goes on from the last one is joined with it.
    pub fn push(&mut self, piece: Piece) {
        if let Some(last) = self.list.last_mut()
            && last.is_continued_by(&piece)
        {
            last.len += piece.len;
            last.above_len += piece.above_len;
        } else if self.list.len() < PIECES_MAX {
            self.list.push(piece);
        } else {
            self.overflowed = true;
        }
    }
}

/// Content of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {
    /// No extent: a hole above, no known file below.
    Empty,
    /// Data, at this shade of the other half.
    Data(u8),
    /// Unwritten space, at this shade.
    Unwritten(u8),
    /// Metadata.
    Metadata,
    /// Data without a place.
    Unplaced,
    /// Extents of another of the named files.
    Other,
}

/// Both halves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Cells in the guest's order.
    pub above: Vec<Cell>,
    /// Cells in the order of the device.
    pub below: Vec<Cell>,
    /// Bytes that all cells above stand for.
    pub above_bytes: u64,
    /// Bytes that all cells below stand for, wide gaps left out.
    pub below_bytes: u64,
    /// The first byte on the device and the one behind the last.
    pub device: (u64, u64),
}

/// Bytes by state in a cell, and its largest piece.
#[derive(Clone, Copy, Default)]
struct Tally {
    bytes: [u64; STATES.len()],
    other: u64,
    largest: u64,
    shade: u8,
}

impl Tally {
    fn cell(&self) -> Cell {
        let most = STATES
            .iter()
            .zip(self.bytes)
            .max_by_key(|(_, bytes)| *bytes);
        match most {
            Some((state, bytes)) if bytes > 0 && bytes >= self.other => match state {
                State::Data => Cell::Data(self.shade),
                State::Unwritten => Cell::Unwritten(self.shade),
                State::Metadata => Cell::Metadata,
                State::Unplaced => Cell::Unplaced,
            },
            _ if self.other > 0 => Cell::Other,
            _ => Cell::Empty,
        }
    }
}

/// A half while it is filled.
struct Grid {
    cells: Vec<Tally>,
    bytes: u64,
}

impl Grid {
    fn new(cells: usize, bytes: u64) -> Grid {
        let cells = vec![Tally::default(); cells];
        Grid { cells, bytes }
    }

    /// The cell that a byte falls into.
    fn index(&self, at: u64) -> usize {
        let cells = self.cells.len() as u128;
        let index = u128::from(at) * cells / u128::from(self.bytes.max(1));
        (index as usize).min(self.cells.len() - 1)
    }

    /// The first byte of a cell.
    fn start(&self, index: usize) -> u64 {
        let start = (index as u128 * u128::from(self.bytes)).div_ceil(self.cells.len() as u128);
        start as u64
    }

    /// Calls `each` for the cells of a range with how far into the range they begin and the bytes
    /// of it that each has.
    fn fill(&mut self, start: u64, len: u64, mut each: impl FnMut(&mut Tally, u64, u64)) {
        let end = start.saturating_add(len).min(self.bytes);
        let mut at = start;
        while at < end {
            let index = self.index(at);
            let next = self.start(index + 1).clamp(at + 1, end);
            each(&mut self.cells[index], at - start, next - at);
            at = next;
        }
    }

    /// Fills a piece in; its shades are its places in the other half, from `other` on.
    fn fill_piece(&mut self, (start, len): (u64, u64), state: State, other: &Other) {
        let slot = STATES.iter().position(|&known| known == state);
        self.fill(start, len, |tally, into, bytes| {
            if let Some(slot) = slot {
                tally.bytes[slot] += bytes;
            }
            if bytes > tally.largest && state != State::Metadata {
                tally.largest = bytes;
                tally.shade = other.shade(into, len);
            }
        });
    }

    fn cells(&self) -> Vec<Cell> {
        self.cells.iter().map(Tally::cell).collect()
    }
}

/// Where a piece is in the other half.
struct Other {
    start: u64,
    len: u64,
    /// Bytes of that half.
    bytes: u64,
}

impl Other {
    /// The shade of what begins so far into a piece of `len` bytes.
    fn shade(&self, into: u64, len: u64) -> u8 {
        let into = u128::from(into) * u128::from(self.len) / u128::from(len.max(1));
        let at = u128::from(self.start) + into;
        let shade = at * SHADES as u128 / u128::from(self.bytes.max(1));
        shade.min(SHADES as u128 - 1) as u8
    }
}

/// Draws the pieces of a disk or file of `above_bytes` in this many cells per half. With
/// `neighbours`, the other files are shown, without the file of this number.
pub fn picture(
    pieces: &Pieces,
    above_bytes: u64,
    cells: usize,
    neighbours: Option<(&Neighbours, usize)>,
) -> Picture {
    let list = &pieces.list;
    let mut order: Vec<u32> = (0..list.len() as u32).collect();
    order.retain(|&at| list[at as usize].physical.is_some());
    order.sort_by_key(|&at| list[at as usize].physical);
    let place = |at: u32| list[at as usize].physical.unwrap_or_default();
    let total: u64 = order.iter().map(|&at| list[at as usize].len).sum();
    let divisor = (cells as u64).max(order.len() as u64);
    let gap_max = (total / divisor).max(1);

    // Places below, gaps made narrow: of each piece in the device's order.
    let mut positions = vec![0_u64; list.len()];
    let mut gaps = Vec::new();
    let (mut position, mut end) = (0_u64, order.first().map(|&at| place(at)));
    for &at in &order {
        let start = place(at);
        let last_end = end.unwrap_or(start);
        let gap = start.saturating_sub(last_end);
        if gap > 0 {
            let is_other =
                neighbours.is_some_and(|(known, own)| known.has_other((last_end, start), own));
            let width = gap.min(gap_max);
            gaps.push((position, width, is_other));
            position += width;
        }
        // Shared space is drawn for each piece that has it.
        positions[at as usize] = position;
        position += list[at as usize].len;
        end = Some(last_end.max(start.saturating_add(list[at as usize].len)));
    }
    let below_bytes = position;

    let mut above = Grid::new(cells, above_bytes);
    let mut below = Grid::new(cells, below_bytes);
    for (piece, &position) in list.iter().zip(&positions) {
        if let Some(at) = piece.above {
            let other = Other {
                start: position,
                len: piece.len,
                bytes: below_bytes,
            };
            above.fill_piece((at, piece.above_len), piece.state, &other);
        }
        if piece.physical.is_some() {
            let other = Other {
                start: piece.above.unwrap_or_default(),
                len: piece.above_len,
                bytes: above_bytes,
            };
            below.fill_piece((position, piece.len), piece.state, &other);
        }
    }
    for (position, width, is_other) in gaps {
        if is_other {
            below.fill(position, width, |tally, _, bytes| tally.other += bytes);
        }
    }
    Picture {
        above: above.cells(),
        below: below.cells(),
        above_bytes,
        below_bytes,
        device: (
            order.first().map_or(0, |&at| place(at)),
            end.unwrap_or_default(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(above: u64, physical: u64, len: u64) -> Piece {
        Piece {
            above: Some(above),
            above_len: len,
            physical: Some(physical),
            len,
            state: State::Data,
        }
    }

    fn drawn(pieces: &[Piece], bytes: u64, cells: usize) -> Picture {
        let mut all = Pieces::default();
        for &piece in pieces {
            all.push(piece);
        }
        picture(&all, bytes, cells, None)
    }

    #[test]
    fn a_file_in_order_is_smooth_in_both_halves() {
        let picture = drawn(&[data(0, 5000, 1600)], 1600, 16);
        let smooth: Vec<Cell> = (0..16).map(Cell::Data).collect();
        assert_eq!(picture.above, smooth);
        assert_eq!(picture.below, smooth);
        let pieces: Vec<Piece> = (0..16)
            .map(|i| data(i * 100, 5000 + i * 101, 100))
            .collect();
        let picture = drawn(&pieces, 1600, 16);
        let shades: Vec<u8> = picture.above.iter().map(shade_of).collect();
        assert!(shades.is_sorted(), "{shades:?}");
        let shades: Vec<u8> = picture.below.iter().map(shade_of).collect();
        assert!(shades.is_sorted(), "{shades:?}");
        assert_eq!(picture.device, (5000, 5000 + 15 * 101 + 100));
    }

    fn shade_of(cell: &Cell) -> u8 {
        match cell {
            Cell::Data(shade) | Cell::Unwritten(shade) => *shade,
            Cell::Empty | Cell::Metadata | Cell::Unplaced | Cell::Other => {
                panic!("{cell:?} has no shade")
            }
        }
    }

    #[test]
    fn a_file_backwards_has_its_shades_backwards() {
        let pieces: Vec<Piece> = (0..16)
            .map(|i| data(i * 100, 9000 - i * 100, 100))
            .collect();
        let picture = drawn(&pieces, 1600, 16);
        let backwards: Vec<u8> = (0..16).rev().collect();
        assert_eq!(
            picture.above.iter().map(shade_of).collect::<Vec<_>>(),
            backwards
        );
        assert_eq!(
            picture.below.iter().map(shade_of).collect::<Vec<_>>(),
            backwards
        );
    }

    #[test]
    fn holes_are_empty_above_and_wide_gaps_narrow_below() {
        let pieces = [data(0, 0, 400), data(1200, 1 << 40, 400)];
        let picture = drawn(&pieces, 1600, 16);
        assert_eq!(picture.above[4..12], [Cell::Empty; 8]);
        let empty = picture.below.iter().filter(|cell| **cell == Cell::Empty);
        assert!(empty.count() <= 2, "{:?}", picture.below);
        assert_eq!(picture.below_bytes, 800 + 50);
    }

    #[test]
    fn metadata_is_below_only_and_other_files_show() {
        let metadata = Piece {
            above: None,
            above_len: 0,
            state: State::Metadata,
            ..data(0, 400, 400)
        };
        let pieces = [data(0, 0, 400), metadata, data(400, 1200, 400)];
        let picture = drawn(&pieces, 800, 12);
        assert!(picture.below.contains(&Cell::Metadata));
        assert!(!picture.above.contains(&Cell::Metadata));
        let mut all = Pieces::default();
        pieces.iter().for_each(|&piece| all.push(piece));
        let other = [cowslip_queue::fiemap::Record {
            logical: 0,
            physical: 900,
            len: 100,
            flags: Default::default(),
        }];
        let neighbours = Neighbours::of([(1, &other[..])]);
        let picture = super::picture(&all, 800, 12, Some((&neighbours, 0)));
        assert!(picture.below.contains(&Cell::Other));
    }

    /// All bytes fall into some cell, however cells and bytes divide.
    #[test]
    fn every_byte_is_in_one_cell() {
        for bytes in 1..60_u64 {
            for cells in 1..20_usize {
                let mut grid = Grid::new(cells, bytes);
                grid.fill(0, bytes, |tally, _, bytes| tally.other += bytes);
                assert_eq!(
                    grid.cells.iter().map(|tally| tally.other).sum::<u64>(),
                    bytes
                );
                for at in 0..bytes {
                    let index = grid.index(at);
                    assert!(grid.start(index) <= at, "{bytes} {cells} {at}");
                    assert!(at < grid.start(index + 1), "{bytes} {cells} {at}");
                }
            }
        }
    }

    #[test]
    fn gaps_are_together_no_wider_than_the_pieces() {
        let pieces: Vec<Piece> = (0..10_000).map(|i| data(i * 4096, i << 30, 4096)).collect();
        let picture = drawn(&pieces, 10_000 * 4096, 16);
        assert!(picture.below_bytes <= 2 * picture.above_bytes);
        assert!(picture.below.iter().all(|cell| *cell != Cell::Empty));
    }

    #[test]
    fn nothing_is_drawn_as_nothing() {
        let picture = drawn(&[], 0, 8);
        assert_eq!(picture.above, [Cell::Empty; 8]);
        assert_eq!(picture.below, [Cell::Empty; 8]);
    }
}
