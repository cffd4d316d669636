//! Where the refcount structures go that a longer file needs: at the beginning of the new space,
//! which they count with themselves; and how many of them an image needs. Pure.

use crate::geometry::{Geometry, HostCluster};

/// Bytes of an entry of the L1 table or the refcount table.
const ENTRY_BYTES: u64 = 8;

/// Entries in a sector, the unit that a write does not tear.
const ENTRIES_IN_SECTOR: u64 = 512 / ENTRY_BYTES;

/// Returns the number of refcount blocks, and of refcount table clusters, that `clusters` clusters
/// need, and these blocks and table clusters themselves.
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
        // Both only grow, and slower than the clusters they count.
        (blocks, table) = (more_blocks, more_table);
    }
}

/// Returns the clusters of the header and of all tables that map a disk of `disk_bytes`, without
/// the refcount structures.
pub fn mapping_clusters(geometry: &Geometry, disk_bytes: u64) -> u64 {
    let clusters = geometry.clusters_for(disk_bytes);
    let l2_tables = geometry.clusters_for(clusters * geometry.l2_entry_bytes());
    1 + l2_tables + geometry.clusters_for(l2_tables * ENTRY_BYTES)
}

/// Returns the bytes of the header, the tables, the keys and the refcounts of an image whose disk
/// has `disk` bytes in whole clusters. The clusters of the keys have refcounts like all others,
/// which qemu-img does not account for.
pub fn metadata_bytes(geometry: &Geometry, disk: u64, keys: u64) -> u64 {
    let tables = mapping_clusters(geometry, disk) + geometry.clusters_for(keys);
    let (blocks, table) = structures_for(geometry, tables + geometry.clusters_for(disk));
    (tables + blocks + table) * geometry.cluster_bytes()
}

/// Returns the refcount blocks of an image with a disk of `disk_bytes`, all of it allocated.
fn blocks_for_disk(geometry: &Geometry, disk_bytes: u64) -> u64 {
    let clusters = mapping_clusters(geometry, disk_bytes) + geometry.clusters_for(disk_bytes);
    structures_for(geometry, clusters).0
}

/// Entries of the refcount table that takes the place of one of `entries`, for block `last`: enough
/// for the disk when all of it is allocated, so that no second move is paid for by an image that
/// has just the space that it needs. Beyond that half as many again, so that it moves rarely; and
/// no more than `entries_max` unless it must.
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

/// A refcount block, and the clusters it counts.
#[derive(Debug)]
pub struct BlockUse {
    /// Its index in the refcount table.
    pub index: u64,
    /// The cluster that the new block takes.
    pub cluster: HostCluster,
    /// Its refcount, stored in itself or in another block.
    pub own_count: u64,
    /// The first two clusters that it counts.
    pub counted: Vec<HostCluster>,
    /// Other metadata is in its range, whatever its counts say.
    pub holds_metadata: bool,
}

impl BlockUse {
    /// Returns whether the count of the block is in the block.
    pub fn counts_itself(&self) -> bool {
        self.counted.contains(&self.cluster)
    }

    /// Returns whether the image is the same without the block: it counts nothing but itself, and
    /// nothing shares it.
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

/// The way in which new blocks become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each by itself: guests wait for them, and not for what they have written to the file.
    Few,
    /// All by one flush of the file, which costs more than a few writes, and less than many.
    Many,
}

/// Blocks that become durable each by itself.
const FEW_BLOCKS: usize = 4;

impl CountGrowth {
    /// The way that costs less. A few have their entries in one sector, which a crash does not
    /// tear.
    pub fn way(&self) -> Way {
        let sectors = [self.blocks.first(), self.blocks.last()];
        let [first, last] = sectors.map(|index| index.map(|index| index / ENTRIES_IN_SECTOR));
        let are_few = self.blocks.len() <= FEW_BLOCKS && first == last;
        match self.table_clusters == 0 && are_few {
            true => Way::Few,
            false => Way::Many,
        }
    }

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

    /// Index and cluster of each new block, in rounds with a barrier after each. A torn write
    /// leaves some of its sectors: no entry reaches the medium before the entry of the block that
    /// counts its block, unless both lie in one sector that is written at once.
    pub fn rounds(&self, geometry: &Geometry) -> Vec<Vec<(u64, u64)>> {
        let mut rounds: Vec<Vec<(u64, u64)>> = Vec::new();
        let first = self.start + self.table_clusters;
        // Blocks lie before what they count, or in it: what counts them comes first.
        for (&index, at) in self.blocks.iter().zip(first..) {
            let counted_by = geometry.refcount_block_index(HostCluster(at));
            match rounds.last_mut() {
                Some(round) if !is_apart(round, (counted_by, index)) => round.push((index, at)),
                _ => rounds.push(vec![(index, at)]),
            }
        }
        rounds
    }
}

/// Returns whether a round has the entry `counted_by`, but would not write it in one sector, and at
/// once, with entry `index` at its end.
fn is_apart(round: &[(u64, u64)], (counted_by, index): (u64, u64)) -> bool {
    let Ok(position) = round.binary_search_by_key(&counted_by, |entry| entry.0) else {
        return false;
    };
    let is_one_write = index - counted_by == (round.len() - position) as u64;
    !is_one_write || counted_by / ENTRIES_IN_SECTOR != index / ENTRIES_IN_SECTOR
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of a round that a crash leaves as a whole or not at all: entries in one sector
    /// without a gap.
    fn pieces(round: &[(u64, u64)]) -> impl Iterator<Item = &[(u64, u64)]> {
        round.chunk_by(|one, next| one.0 + 1 == next.0 && one.0 / 64 == next.0 / 64)
    }

    #[test]
    fn a_block_is_reachable_only_with_what_counts_it() {
        // Sixty-four counts to a block.
        let geometry = Geometry::new(9, 6, false).unwrap();
        let gaps = |blocks: Vec<u64>, step: usize| blocks.into_iter().step_by(step).collect();
        let cases: [(u64, Vec<u64>, usize); 9] = [
            // A block of the file counts all of them.
            (10, (1..50).collect(), 1),
            // The first one counts itself, and the others.
            (64, (1..2).collect(), 1),
            (64, (1..50).collect(), 1),
            (100, (1..20).collect(), 1),
            (64, (1..65).collect(), 2),
            // It counts some, and the second one others, which count the rest.
            (100, (1..180).collect(), 2),
            (64, (1..6000).collect(), 3),
            (63 * 64, (63..6000).collect(), 4),
            // Another block lies between.
            (64, gaps((1..50).collect(), 2), 2),
        ];
        for (start, blocks, rounds) in cases {
            let growth = CountGrowth {
                start,
                end: 64 * (blocks[blocks.len() - 1] + 1),
                blocks: blocks.clone(),
                table_clusters: 0,
            };
            let found = growth.rounds(&geometry);
            let counts: Vec<usize> = found.iter().map(Vec::len).collect();
            assert_eq!(found.len(), rounds, "{start} {} {counts:?}", blocks.len());
            let new = |index: u64| blocks.contains(&index);
            let mut there = Vec::new();
            for round in &found {
                for piece in pieces(round) {
                    for &(index, at) in piece {
                        let by = at / 64;
                        let is_there = !new(by) || there.contains(&by);
                        let is_beside = piece.iter().any(|entry| entry.0 == by);
                        assert!(is_there || is_beside, "{index} at {at}");
                    }
                }
                there.extend(round.iter().map(|(index, _)| *index));
            }
            let placed: Vec<_> = found.into_iter().flatten().collect();
            assert!(placed.into_iter().eq(blocks.into_iter().zip(start..)));
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
