//! Finds the sectors of a table that have to be written again. Pure.

use std::ops::Range;

/// Bytes that the media write as a whole or not at all.
pub const SECTOR_BYTES: usize = 512;

/// Returns the runs of sectors in which a table differs from its old state, as ranges of its bytes.
///
/// # Panics
/// If the lengths differ.
pub fn changed_sectors(old: &[u8], new: &[u8]) -> Vec<Range<usize>> {
    assert_eq!(old.len(), new.len(), "a table keeps its length");
    let mut runs: Vec<Range<usize>> = Vec::new();
    let sectors = old.chunks(SECTOR_BYTES).zip(new.chunks(SECTOR_BYTES));
    for (index, (before, after)) in sectors.enumerate() {
        let start = index * SECTOR_BYTES;
        let end = start + after.len();
        match runs.last_mut() {
            _ if before == after => {}
            Some(last) if last.end == start => last.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_run() {
        let old = vec![0; 4 * SECTOR_BYTES + 8];
        assert_eq!(changed_sectors(&old, &old), []);
        let mut new = old.clone();
        for at in [3, SECTOR_BYTES, 3 * SECTOR_BYTES - 1, 4 * SECTOR_BYTES + 7] {
            new[at] = 1;
        }
        let runs = [0..3 * SECTOR_BYTES, 4 * SECTOR_BYTES..4 * SECTOR_BYTES + 8];
        assert_eq!(changed_sectors(&old, &new), runs);
    }
}
