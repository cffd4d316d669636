//! Entries that refer to a cluster which has moved: the same, but for the place.

use super::inspect::ClaimedSpace;
use super::{EntryFormat, OFFSET_MASK};

impl EntryFormat {
    /// The first word of an L2 entry whose cluster moves, from one offset to a lower one. `None` if
    /// the entry does not refer to that cluster, or refers to a further one, too.
    pub fn moved_l2(&self, entry: u64, from: u64, to: u64) -> Option<u64> {
        match self.inspect_l2(entry, 0).claim {
            ClaimedSpace::Nothing => None,
            ClaimedSpace::Cluster { offset, .. } => {
                (offset == from).then_some(entry & !OFFSET_MASK | to)
            }
            ClaimedSpace::Compressed { start, len } => {
                let is_within =
                    from <= start && start + len <= from + self.geometry.cluster_bytes();
                (is_within && to <= from).then(|| entry - (from - to))
            }
        }
    }
}

/// An entry of an L1 table whose L2 table moves. `None` if it refers to another one.
pub fn moved_table(entry: u64, from: u64, to: u64) -> Option<u64> {
    (entry & OFFSET_MASK == from).then_some(entry & !OFFSET_MASK | to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Geometry;

    fn format() -> EntryFormat {
        EntryFormat {
            geometry: Geometry::new(16, 4, false).unwrap(),
            version: 3,
            data_file: false,
        }
    }

    #[test]
    fn entries_keep_their_flags_and_change_their_place() {
        let format = format();
        let moved = |entry| format.moved_l2(entry, 0x50000, 0x20000);
        assert_eq!(moved(1 << 63 | 0x50000), Some(1 << 63 | 0x20000));
        assert_eq!(moved(0x50001), Some(0x20001), "zeroes with space");
        assert_eq!(moved(0x60000), None);
        assert_eq!(moved(0), None);
        assert_eq!(moved(1), None);
        assert_eq!(
            moved_table(1 << 63 | 0x50000, 0x50000, 0x20000),
            Some(1 << 63 | 0x20000)
        );
        assert_eq!(moved_table(0x60000, 0x50000, 0x20000), None);
    }

    #[test]
    fn a_compressed_cluster_moves_within_one_cluster_of_the_file() {
        let format = format();
        let moved = |entry| format.moved_l2(entry, 0x50000, 0x20000);
        // Two sectors from byte 0x50100 on.
        let entry = |start: u64| 1 << 62 | 1 << 54 | start;
        assert_eq!(moved(entry(0x50100)), Some(entry(0x20100)));
        assert_eq!(moved(entry(0x5fc00)), Some(entry(0x2fc00)));
        assert_eq!(
            moved(entry(0x5fe00)),
            None,
            "its end is in the next cluster"
        );
        assert_eq!(moved(entry(0x4fe00)), None, "it begins in the one before");
        assert_eq!(moved(entry(0x60000)), None);
    }
}
