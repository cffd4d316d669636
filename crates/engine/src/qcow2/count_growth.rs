//! Where the refcount structures go that a longer file needs: at the beginning of the new space, which
//! they count with themselves; and how many of them an image needs. Pure.

use super::geometry::{Geometry, HostOffset};

/// Bytes of an entry of the L1 table or the refcount table.
const ENTRY_BYTES: u64 = 8;

/// Entries in a sector, the unit that a write does not tear.
const ENTRIES_IN_SECTOR: u64 = 512 / ENTRY_BYTES;

/// Refcount blocks, and clusters of the refcount table, that count so many clusters and themselves.
pub fn structures_for(geometry: &Geometry, clusters: u64) -> (u64, u64) {
    let entries = geometry.refcount_table_entries_per_cluster();
    let (mut blocks, mut table) = (0, 0);
    loop {
        let counted = clusters + blocks + table;
        let more_blocks = counted.div_ceil(geometry.refcounts_per_block());
        let more_table = more_blocks.div_ceil(entries);
        if (more_blocks, more_table) == (blocks, table) {
            return (blocks, table);
        }
        // Both only grow, and slower than what they count.
        (blocks, table) = (more_blocks, more_table);
    }
}

/// Clusters of the header and of all tables that map a disk of so many bytes, but for those that count.
pub fn mapping_clusters(geometry: &Geometry, disk_bytes: u64) -> u64 {
    let clusters = geometry.clusters_for(disk_bytes);
    let l2_tables = geometry.clusters_for(clusters * geometry.l2_entry_bytes());
    1 + l2_tables + geometry.clusters_for(l2_tables * ENTRY_BYTES)
}

/// Refcount blocks of an image of a disk of so many bytes, all of it allocated.
fn blocks_for_disk(geometry: &Geometry, disk_bytes: u64) -> u64 {
    let clusters = mapping_clusters(geometry, disk_bytes) + geometry.clusters_for(disk_bytes);
    structures_for(geometry, clusters).0
}

/// Entries of the refcount table that takes the place of one of `entries`, for block `last`: enough for the disk when all of it
/// is allocated, so that no second move is paid for by an image that has just the space that it needs. Beyond that half as many
/// again, so that it moves rarely; and no more than `entries_max` unless it must.
pub fn table_entries(
    geometry: &Geometry,
    disk_bytes: u64,
    (entries, last, entries_max): (u64, u64, u64),
) -> u64 {
    let whole = blocks_for_disk(geometry, disk_bytes);
    let ample = if last < whole {
        whole
    } else {
        entries + entries / 2
    };
    ample.min(entries_max).max(last + 1)
}

/// New space and the refcount structures that count it.
#[derive(Debug)]
pub struct CountGrowth {
    /// The first new cluster that is used: the metadata comes first.
    pub start: u64,
    /// The end of the new space, in clusters.
    pub end: u64,
    /// Indices of new refcount blocks.
    pub blocks: Vec<u64>,
    /// Clusters of a new refcount table; 0 if the old one does.
    pub table_clusters: u64,
}

impl CountGrowth {
    /// The first cluster after the metadata.
    pub fn first_free(&self) -> u64 {
        self.start + self.table_clusters + self.blocks.len() as u64
    }

    /// Bytes of the refcount table up to the last of the blocks.
    pub fn table_bytes(&self) -> u64 {
        self.blocks.last().map_or(0, |index| (index + 1) * 8)
    }

    /// Index, cluster and empty bytes of each new block.
    pub fn placed_blocks(&self, cluster_bytes: u64) -> impl Iterator<Item = (u64, u64, Vec<u8>)> {
        let first = self.start + self.table_clusters;
        let empty = vec![0; cluster_bytes as usize];
        self.blocks
            .iter()
            .zip(first..)
            .map(move |(&index, at)| (index, at, empty.clone()))
    }
}

/// Entries of the refcount table for new blocks, as pairs of index and offset, split into writes
/// with a barrier after each. A torn write leaves some of its sectors: no entry reaches the medium
/// before that of the block which counts the block it refers to, or in the same sector.
///
/// Blocks lie where they or blocks before them count, so each write has at least one sector.
pub fn ordered_entries(geometry: &Geometry, entries: &[(u64, u64)]) -> Vec<Vec<(u64, u64)>> {
    let sector_of = |index: u64| index / ENTRIES_IN_SECTOR;
    let mut writes: Vec<Vec<(u64, u64)>> = Vec::new();
    for &(index, offset) in entries {
        let cluster = geometry.host_cluster(HostOffset(offset));
        let counted_by = geometry.refcount_block_index(cluster);
        let first = writes.last().and_then(|write| write.first());
        let needs_barrier = first.is_some_and(|(first, _)| {
            (*first..index).contains(&counted_by) && sector_of(counted_by) != sector_of(index)
        });
        match writes.last_mut() {
            Some(write) if !needs_barrier => write.push((index, offset)),
            _ => writes.push(vec![(index, offset)]),
        }
    }
    writes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::geometry::HostCluster;
    use std::collections::BTreeSet;

    /// Every set of sectors that a torn write may leave, where there are few; all but one, and one
    /// alone, where there are many.
    fn torn(sectors: &[u64]) -> Vec<BTreeSet<u64>> {
        let all: BTreeSet<u64> = sectors.iter().copied().collect();
        let mut outcomes = vec![all.clone()];
        for sector in &all {
            outcomes.push(BTreeSet::from([*sector]));
            outcomes.push(
                all.iter()
                    .copied()
                    .filter(|other| other != sector)
                    .collect(),
            );
        }
        outcomes
    }

    #[test]
    fn a_block_is_reachable_only_with_the_block_that_counts_it() {
        for (cluster_bits, order) in [(9, 6), (9, 4), (9, 0), (12, 6), (16, 4)] {
            let geometry = Geometry::new(cluster_bits, order, false).expect("it is valid");
            for (first, count) in [(0, 1), (1, 63), (1, 64), (60, 700), (63, 129), (127, 9000)] {
                let start = geometry.first_counted(first).0;
                let entries: Vec<(u64, u64)> = (0..count)
                    .map(|n| (first + n, (start + n) << cluster_bits))
                    .collect();
                let writes = ordered_entries(&geometry, &entries);
                assert_eq!(writes.concat(), entries);
                let mut durable: BTreeSet<u64> = (0..first).collect();
                for write in &writes {
                    let sectors: Vec<u64> = write.iter().map(|entry| entry.0 / 64).collect();
                    for left in torn(&sectors) {
                        let written = write.iter().filter(|entry| left.contains(&(entry.0 / 64)));
                        let written: Vec<_> = written.copied().collect();
                        let there: BTreeSet<u64> = written.iter().map(|entry| entry.0).collect();
                        for (index, offset) in written {
                            let by =
                                geometry.refcount_block_index(HostCluster(offset >> cluster_bits));
                            assert!(
                                durable.contains(&by) || there.contains(&by),
                                "{index} by {by}"
                            );
                        }
                    }
                    durable.extend(write.iter().map(|entry| entry.0));
                }
                assert!(
                    writes.len() <= 4,
                    "{} writes of {count} entries",
                    writes.len()
                );
            }
        }
    }
}
