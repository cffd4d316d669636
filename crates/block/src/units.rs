//! Arithmetic of offsets and lengths: rounding and splitting at powers of two.

use std::ops::Range;

/// Sector size in bytes, the unit of disk sizes.
pub const SECTOR_BYTES: u64 = 512;

/// Splits `[offset, offset + len)` at multiples of `unit` (a power of two), without allocating.
pub fn pieces(offset: u64, len: u64, unit: u64) -> impl Iterator<Item = Range<u64>> {
    debug_assert!(unit.is_power_of_two());
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let next = ((at | (unit - 1)).saturating_add(1)).min(end);
        let piece = at..next;
        at = next;
        Some(piece)
    })
}

/// The largest multiple of `unit` (a power of two) that is not above `value`.
pub fn round_down(value: u64, unit: u64) -> u64 {
    debug_assert!(unit.is_power_of_two());
    value & !(unit - 1)
}

/// The smallest multiple of `unit` (a power of two) that is not below `value`.
///
/// # Panics
/// On overflow in debug builds: callers validate sizes first.
pub fn round_up(value: u64, unit: u64) -> u64 {
    debug_assert!(unit.is_power_of_two());
    (value + (unit - 1)) & !(unit - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_and_end_at_the_unit() {
        for start in 0..20 {
            for len in 0..20 {
                let mut at = start;
                for piece in pieces(start, len, 8) {
                    assert_eq!(piece.start, at);
                    assert!(piece.end > piece.start && (piece.end - 1) / 8 == piece.start / 8);
                    at = piece.end;
                }
                assert_eq!(at, start + len);
            }
        }
        assert_eq!(pieces(u64::MAX - 1, 1, 8).count(), 1);
    }
}
