//! [`Ranges`]: many ranges of a file in little memory. Pure.
//!
//! Each range is the distance from the one before it and its length, in as few bytes as they need;
//! multiples of 512 are counted as such. Holes of a file take 4 to 8 bytes each.

use std::ops::Range;

use crate::units::SECTOR_BYTES;

/// The most memory for ranges: ten million of the usual kind.
pub const RANGES_BYTES_MAX: usize = 64 << 20;

/// Error of a list without room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Ranges in ascending order, apart from each other.
#[derive(Clone, Debug, Default)]
pub struct Ranges {
    packed: Vec<u8>,
    end: u64,
    count: u64,
    bytes: u64,
}

impl Ranges {
    /// Returns the list of one range.
    pub fn of(range: Range<u64>) -> Ranges {
        let mut ranges = Ranges::default();
        ranges.push(range).expect("there is room for one");
        ranges
    }

    /// Adds the next range; an empty one is none.
    ///
    /// # Errors
    /// There is no more room.
    pub fn push(&mut self, range: Range<u64>) -> Result<(), Full> {
        if range.is_empty() {
            return Ok(());
        }
        assert!(range.start >= self.end, "ranges come in order");
        if self.packed.len() >= RANGES_BYTES_MAX {
            return Err(Full);
        }
        self.put(range.start - self.end);
        self.put(range.end - range.start);
        self.count += 1;
        self.bytes += range.end - range.start;
        self.end = range.end;
        Ok(())
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the bytes of all ranges.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut packed = self.packed.as_slice();
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = at + take(&mut packed)?;
            at = start + take(&mut packed)?;
            Some(start..at)
        })
    }

    /// Seven bits a byte, the lowest first; the lowest of all says whether it counts sectors.
    fn put(&mut self, number: u64) {
        let is_whole = number.is_multiple_of(SECTOR_BYTES);
        let mut rest = match is_whole {
            true => u128::from(number / SECTOR_BYTES) << 1,
            false => (u128::from(number) << 1) | 1,
        };
        while rest >= 0x80 {
            self.packed.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        self.packed.push(rest as u8);
    }
}

fn take(packed: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u128;
    for shift in (0..).step_by(7) {
        let (&byte, rest) = packed.split_first()?;
        *packed = rest;
        number |= u128::from(byte & 0x7F) << shift;
        if byte < 0x80 {
            break;
        }
    }
    let unit = if number & 1 == 0 { SECTOR_BYTES } else { 1 };
    Some((number >> 1) as u64 * unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn what_was_put_in_comes_out() {
        let mut random = Random(3);
        for _ in 0..50 {
            let mut ranges = Ranges::default();
            let mut expected = Vec::new();
            let mut at = 0;
            for _ in 0..random.below(200) {
                let unit = [1, 512, 4096][random.below(3) as usize];
                let (apart, long) = (1 << random.below(40), 1 << random.below(30));
                let start = at + random.below(apart) * unit;
                let end = start + (1 + random.below(long)) * unit;
                at = end;
                ranges.push(start..end).unwrap();
                expected.push(start..end);
            }
            assert_eq!(ranges.iter().collect::<Vec<_>>(), expected);
            assert_eq!(ranges.count(), expected.len() as u64);
            assert_eq!(
                ranges.bytes(),
                expected.iter().map(|r| r.end - r.start).sum::<u64>()
            );
        }
    }

    #[test]
    fn the_ends_of_what_there_is_fit() {
        let mut ranges = Ranges::default();
        ranges.push(0..1).unwrap();
        ranges.push(7..7).unwrap();
        ranges.push(u64::MAX - 1..u64::MAX).unwrap();
        let all: Vec<_> = ranges.iter().collect();
        assert_eq!(all, [0..1, u64::MAX - 1..u64::MAX]);
    }

    #[test]
    fn many_holes_of_blocks_take_little_and_too_many_are_refused() {
        let mut ranges = Ranges::default();
        let hole = |index: u64| (2 * index) * 4096..(2 * index + 1) * 4096;
        let full = (0..).find(|index| ranges.push(hole(*index)).is_err());
        assert!(full.unwrap() > 30_000_000, "{full:?}");
        assert!(ranges.packed.len() < RANGES_BYTES_MAX + 32);
    }
}
