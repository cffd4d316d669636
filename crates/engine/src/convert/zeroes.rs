//! Which parts of what was read are to be written. Pure.

use std::ops::Range;

use crate::units::pieces;
use crate::zero::is_zero;

/// By what unit, and from what length on, zeroes are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sieve {
    /// Size in bytes, and alignment, of the blocks that are examined as a whole.
    pub unit_bytes: u64,
    /// Shortest run of zeroes, in bytes, that counts as zeroes; a shorter one is data.
    pub least_bytes: u64,
}

impl Sieve {
    /// The sieve of `-S sparse_bytes` for a target whose smallest part with a state of its own is
    /// `target_bytes`: what is finer would be written all the same, or filled.
    pub fn new(sparse_bytes: u64, target_bytes: u64) -> Sieve {
        let whole = 1 << sparse_bytes.max(1).ilog2();
        Sieve {
            unit_bytes: target_bytes.max(whole),
            least_bytes: sparse_bytes,
        }
    }

    /// The parts of `data`, which begins at `start` of the disk, that are not zero; in order,
    /// neighbours joined.
    pub fn data(&self, start: u64, data: &[u8]) -> Vec<Range<u64>> {
        let end = start + data.len() as u64;
        let mut found: Vec<Range<u64>> = Vec::new();
        for block in pieces(start, end - start, self.unit_bytes) {
            let bytes = &data[(block.start - start) as usize..(block.end - start) as usize];
            if is_zero(bytes) {
                continue;
            }
            match found.last_mut() {
                // So few zeroes are not worth two requests.
                Some(last) if block.start - last.end < self.least_bytes => last.end = block.end,
                _ => found.push(block),
            }
        }
        found
    }
}

/// Returns the gaps between `parts` within `whole`, in order.
pub fn between(whole: Range<u64>, parts: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut gaps = Vec::new();
    let mut at = whole.start;
    for part in parts {
        gaps.push(at..part.start);
        at = part.end;
    }
    gaps.push(at..whole.end);
    gaps.retain(|gap| !gap.is_empty());
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of 512 bytes; a letter is data, a dot is zero.
    fn found(sieve: Sieve, start: u64, picture: &str) -> Vec<(u64, u64)> {
        let byte = |c| if c == '.' { 0 } else { 7 };
        let data: Vec<u8> = picture.chars().flat_map(|c| vec![byte(c); 512]).collect();
        let ranges = sieve.data(start * 512, &data);
        let in_blocks = |range: Range<u64>| (range.start / 512, range.end.div_ceil(512));
        ranges.into_iter().map(in_blocks).collect()
    }

    #[test]
    fn zeroes_are_left_out_from_their_least_length_on() {
        let fine = Sieve::new(512, 1);
        assert_eq!(found(fine, 0, ".xx..x."), [(1, 3), (5, 6)]);
        assert_eq!(found(fine, 0, "..."), []);
        let two = Sieve {
            least_bytes: 1024,
            ..fine
        };
        assert_eq!(found(two, 0, "x.x..x"), [(0, 3), (5, 6)]);
    }

    #[test]
    fn blocks_are_those_of_the_disk_not_of_the_piece() {
        // 4 KiB are 8 letters.
        let sieve = Sieve::new(4096, 512);
        assert_eq!(found(sieve, 0, "x.......\u{2e}......."), [(0, 8)]);
        assert_eq!(found(sieve, 6, "..x......."), [(8, 16)]);
        assert_eq!(found(sieve, 6, ".x........"), [(6, 8)]);
        // 1536 bytes: looked at by 1024, left out from 1536 on, so 2048.
        let odd = Sieve::new(1536, 512);
        assert_eq!((odd.unit_bytes, odd.least_bytes), (1024, 1536));
        assert_eq!(found(odd, 0, "xx..xx....xx"), [(0, 6), (10, 12)]);
    }

    #[test]
    fn a_coarse_target_is_looked_at_coarsely() {
        let sieve = Sieve::new(512, 2048);
        assert_eq!(found(sieve, 0, "x.......x..."), [(0, 4), (8, 12)]);
    }

    #[test]
    fn the_rest_is_what_lies_between() {
        assert_eq!(between(0..10, &[2..4, 4..5, 8..10]), [0..2, 5..8]);
        assert_eq!(between(3..5, &[]).len(), 1);
        assert_eq!(between(3..5, &[])[0], 3..5);
    }
}
