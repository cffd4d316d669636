//! Where the refcount structures go that a longer file needs: at the beginning of the new space, which
//! they count with themselves; and how many of them an image needs. Pure.

use std::collections::BTreeSet;

use super::geometry::{Geometry, HostCluster};

/// Bytes of an entry of the L1 table or the refcount table.
const ENTRY_BYTES: u64 = 8;

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

/// A refcount block, and what it counts.
#[derive(Debug)]
pub struct BlockUse {
    /// Its index in the refcount table.
    pub index: u64,
    /// Where it is.
    pub cluster: HostCluster,
    /// How often it is counted, by itself or by another block.
    pub own_count: u64,
    /// The first two clusters that it counts.
    pub counted: Vec<HostCluster>,
    /// Other metadata is in its range, whatever its counts say.
    pub holds_metadata: bool,
}

impl BlockUse {
    /// Whether the count of the block is in the block.
    pub fn counts_itself(&self) -> bool {
        self.counted.contains(&self.cluster)
    }

    /// Whether the image is the same without the block: it counts nothing but itself, and nothing shares it.
    pub fn may_go(&self) -> bool {
        let only_itself = self.counted.iter().all(|&counted| counted == self.cluster);
        only_itself && self.own_count == 1 && !self.holds_metadata
    }
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

    /// Index and cluster of each new block, in rounds: what counts a block is itself, or is there
    /// before its round. The entries of one round depend on no other, so their write may tear.
    pub fn rounds(&self, geometry: &Geometry) -> Vec<Vec<(u64, u64)>> {
        let first = self.start + self.table_clusters;
        let mut left: Vec<(u64, u64)> = self.blocks.iter().copied().zip(first..).collect();
        let mut rounds = Vec::new();
        while !left.is_empty() {
            let missing: BTreeSet<u64> = left.iter().map(|(index, _)| *index).collect();
            // The lowest that is missing is always ready: blocks lie before what they count, or in it.
            let (ready, waiting) = left.into_iter().partition(|&(index, at)| {
                let counted_by = geometry.refcount_block_index(HostCluster(at));
                counted_by >= index || !missing.contains(&counted_by)
            });
            rounds.push(ready);
            left = waiting;
        }
        rounds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_reachable_after_what_counts_it() {
        // Sixty-four counts to a block.
        let geometry = Geometry::new(9, 6, false).unwrap();
        for (start, blocks, rounds) in [
            // A block of the file counts all of them.
            (10, 1..50, 1),
            // The first one counts itself, and the others.
            (64, 1..2, 1),
            (64, 1..50, 2),
            (100, 1..20, 2),
            // It counts some, and the second one others, which count the rest.
            (100, 1..80, 3),
            (64, 1..6000, 4),
        ] {
            let growth = CountGrowth {
                start,
                end: 64 * blocks.end,
                blocks: blocks.clone().collect(),
                table_clusters: 0,
            };
            let found = growth.rounds(&geometry);
            let counts: Vec<usize> = found.iter().map(Vec::len).collect();
            assert_eq!(found.len(), rounds, "{start} {blocks:?} {counts:?}");
            let mut there: BTreeSet<u64> = (0..blocks.start).collect();
            for round in &found {
                for &(index, at) in round {
                    assert!(
                        at / 64 == index || there.contains(&(at / 64)),
                        "{index} at {at}"
                    );
                }
                there.extend(round.iter().map(|(index, _)| *index));
            }
            let placed: BTreeSet<_> = found.into_iter().flatten().collect();
            assert!(placed.into_iter().eq(blocks.zip(start..)));
        }
    }

    #[test]
    fn a_block_goes_that_counts_nothing_or_itself_alone() {
        let block = |counted: &[u64], own_count, holds_metadata| BlockUse {
            index: 3,
            cluster: HostCluster(7),
            own_count,
            counted: counted.iter().copied().map(HostCluster).collect(),
            holds_metadata,
        };
        assert!(block(&[], 1, false).may_go() && !block(&[], 1, false).counts_itself());
        assert!(block(&[7], 1, false).may_go() && block(&[7], 1, false).counts_itself());
        // Another cluster is in use, or another block is.
        assert!(!block(&[8], 1, false).may_go());
        assert!(!block(&[6, 7], 1, false).may_go() && !block(&[7, 8], 1, false).may_go());
        // Another entry of the table refers to it, or nothing counts it: damage.
        assert!(!block(&[], 2, false).may_go() && !block(&[7], 2, false).may_go());
        assert!(!block(&[], 0, false).may_go());
        assert!(!block(&[], 1, true).may_go());
    }
}
