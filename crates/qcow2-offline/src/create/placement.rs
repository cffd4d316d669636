//! Which cluster of a fresh image holds what: the first-fit placement that QEMU's creation shows.
//!
//! Programs parse and patch fresh images by these places, so they are part of the contract. The
//! rules, all observable in images that `qemu-img create` makes:
//!
//! - Header, one cluster of refcount table, one refcount block come first.
//! - An allocation is the first free run of its length at or behind a cursor, which then stands
//!   behind it; freeing moves the cursor back.
//! - A cluster whose refcount block does not exist yet makes one at the cursor, behind what it was
//!   needed for; then the allocation starts over from where it began.
//! - A refcount table that is too small is replaced by one that is half again as large as needed,
//!   behind its own new refcount blocks at the first cluster that no block so far counts; the old
//!   table's clusters become free.
//!
//! Every count of a fresh image is 0 or 1, so counts are kept as bits. Pure; encodes nothing.

use crate::geometry::Geometry;
use crate::header::REFCOUNT_TABLE_BYTES_MAX;
use crate::{Error, Result};

/// The result of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    Done,
    /// Refcount structures were added, perhaps just where the allocation was meant to be.
    StructuresAdded,
}

/// How much larger than needed a new refcount table becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TableSize {
    HalfAgain,
    Exact,
}

/// Used clusters and refcount structures of an image that is being laid out.
#[derive(Clone, Debug)]
pub struct Placement {
    geometry: Geometry,
    used: Vec<u64>,
    /// Cluster of each refcount block; 0 where there is none. As long as the table has entries.
    blocks: Vec<u64>,
    table_cluster: u64,
    cursor: u64,
}

impl Placement {
    /// Header, refcount table and first refcount block.
    pub fn new(geometry: Geometry) -> Placement {
        let entries = geometry.refcount_table_entries_per_cluster();
        let mut placement = Placement {
            geometry,
            used: Vec::new(),
            blocks: vec![0; entries as usize],
            table_cluster: 1,
            cursor: 0,
        };
        placement.blocks[0] = 2;
        placement.mark(0, 3);
        placement.cursor = 3;
        placement
    }

    /// The refcount table: its first cluster and its clusters.
    pub fn refcount_table(&self) -> (u64, u64) {
        let per_cluster = self.geometry.refcount_table_entries_per_cluster();
        (self.table_cluster, self.blocks.len() as u64 / per_cluster)
    }

    /// The cluster of each refcount block, 0 where there is none.
    pub fn refcount_blocks(&self) -> &[u64] {
        &self.blocks
    }

    /// Returns whether a cluster is in use.
    pub fn is_used(&self, cluster: u64) -> bool {
        let word = self.used.get((cluster / 64) as usize);
        word.is_some_and(|word| word >> (cluster % 64) & 1 == 1)
    }

    /// One past the last cluster in use.
    pub fn end(&self) -> u64 {
        let last = self.used.iter().rposition(|&word| word != 0);
        last.map_or(0, |at| {
            (at as u64 + 1) * 64 - u64::from(self.used[at].leading_zeros())
        })
    }

    /// Takes the first free run of `count` clusters.
    ///
    /// # Errors
    /// If the refcount table would become too large.
    pub fn allocate(&mut self, count: u64) -> Result<u64> {
        loop {
            let first = self.find_free(count);
            if self.claim(first, count)? == Attempt::Done {
                return Ok(first);
            }
        }
    }

    /// Takes the free ones of the `count` clusters from `first` on, without gaps; returns how many.
    ///
    /// # Errors
    /// As [`Placement::allocate`].
    pub fn allocate_at(&mut self, first: u64, count: u64) -> Result<u64> {
        loop {
            let free = (first..first + count)
                .take_while(|&cluster| !self.is_used(cluster))
                .count() as u64;
            if self.claim(first, free)? == Attempt::Done {
                return Ok(free);
            }
        }
    }

    /// Replaces the refcount table by one that just covers itself and `additional` clusters behind
    /// it, and says where those begin.
    ///
    /// # Errors
    /// As [`Placement::allocate`].
    pub fn make_room_behind_end(&mut self, additional: u64) -> Result<u64> {
        self.replace_table(self.end(), additional, TableSize::Exact, None)
    }

    fn mark(&mut self, first: u64, count: u64) {
        let end = first + count;
        if self.used.len() as u64 * 64 < end {
            self.used.resize(end.div_ceil(64) as usize, 0);
        }
        for cluster in first..end {
            self.used[(cluster / 64) as usize] |= 1 << (cluster % 64);
        }
    }

    fn release(&mut self, first: u64, count: u64) {
        for cluster in first..first + count {
            self.used[(cluster / 64) as usize] &= !(1 << (cluster % 64));
        }
        if count > 0 {
            self.cursor = self.cursor.min(first);
        }
    }

    fn find_free(&mut self, count: u64) -> u64 {
        let mut run = 0;
        while run < count {
            run = if self.is_used(self.cursor) {
                0
            } else {
                run + 1
            };
            self.cursor += 1;
        }
        self.cursor - count
    }

    fn block_index(&self, cluster: u64) -> usize {
        (cluster / self.geometry.refcounts_per_block()) as usize
    }

    fn has_block(&self, cluster: u64) -> bool {
        let block = self.blocks.get(self.block_index(cluster));
        block.is_some_and(|&block| block != 0)
    }

    fn claim(&mut self, first: u64, count: u64) -> Result<Attempt> {
        let end = first + count;
        let per_block = self.geometry.refcounts_per_block();
        let mut at = first;
        while at < end {
            if !self.has_block(at) {
                self.add_block_for(at)?;
                self.release(first, at - first);
                self.cursor = self.cursor.min(first);
                return Ok(Attempt::StructuresAdded);
            }
            let stop = end.min((at / per_block + 1) * per_block);
            self.mark(at, stop - at);
            at = stop;
        }
        Ok(Attempt::Done)
    }

    /// Adds a refcount block for `cluster`; or, if the block's own cluster has none, for that one
    /// first, and leaves it at that: the caller starts over.
    fn add_block_for(&mut self, cluster: u64) -> Result<()> {
        let mut cluster = cluster;
        let mut block = self.find_free(1);
        let first = block;
        while self.block_index(block) != self.block_index(cluster) && !self.has_block(block) {
            cluster = block;
            block = self.find_free(1);
        }
        if block != first {
            self.cursor = self.cursor.min(first);
        }
        self.mark(block, 1);
        let index = self.block_index(cluster);
        if index < self.blocks.len() {
            self.blocks[index] = block;
            return Ok(());
        }
        let per_block = self.geometry.refcounts_per_block();
        let start = (cluster.max(block) + 1).next_multiple_of(per_block);
        self.replace_table(start, 0, TableSize::HalfAgain, Some((index, block)))?;
        Ok(())
    }

    fn replace_table(
        &mut self,
        start: u64,
        additional: u64,
        size: TableSize,
        new_block: Option<(usize, u64)>,
    ) -> Result<u64> {
        let needed = blocks_needed(&self.geometry, start + additional, size);
        let entries = match size {
            TableSize::Exact => needed,
            TableSize::HalfAgain => needed + needed.div_ceil(2),
        };
        let per_cluster = self.geometry.refcount_table_entries_per_cluster();
        let entries = entries.next_multiple_of(per_cluster);
        if entries * 8 > REFCOUNT_TABLE_BYTES_MAX {
            return Err(Error::Invalid(
                "The refcount table would be too large".into(),
            ));
        }
        let (old_table, old_clusters) = self.refcount_table();
        self.blocks.resize(entries as usize, 0);
        if let Some((index, block)) = new_block {
            self.blocks[index] = block;
        }
        let mut next = start;
        for index in self.block_index(start)..needed as usize {
            if self.blocks[index] == 0 {
                self.blocks[index] = next;
                next += 1;
            }
        }
        self.table_cluster = next;
        let end = next + entries / per_cluster;
        self.mark(start, end - start);
        self.release(old_table, old_clusters);
        Ok(end)
    }
}

/// Refcount blocks that count `clusters` clusters, themselves, and the table that reaches them.
fn blocks_needed(geometry: &Geometry, clusters: u64, size: TableSize) -> u64 {
    let per_cluster = geometry.refcount_table_entries_per_cluster();
    let settle = |clusters: u64| {
        let (mut blocks, mut table) = (0, 0);
        // Grows by less at each turn, because a block counts at least 64 clusters.
        loop {
            let all = clusters + table + blocks;
            blocks = (clusters + table + blocks).div_ceil(geometry.refcounts_per_block());
            table = u64::div_ceil(blocks, per_cluster);
            if clusters + table + blocks == all {
                return (blocks, table);
            }
        }
    };
    let (blocks, table) = settle(clusters);
    match size {
        TableSize::Exact => blocks,
        TableSize::HalfAgain => settle(clusters + table.div_ceil(2)).0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn placement(cluster_bits: u32, refcount_order: u32) -> Placement {
        Placement::new(Geometry::new(cluster_bits, refcount_order, false).unwrap())
    }

    /// Every used cluster has a block, every block and the table are used.
    fn self_check(placement: &Placement) {
        for cluster in 0..placement.end() {
            assert!(!placement.is_used(cluster) || placement.has_block(cluster));
        }
        for &block in placement.refcount_blocks().iter().filter(|&&b| b != 0) {
            assert!(placement.is_used(block), "block {block}");
        }
        let (table, clusters) = placement.refcount_table();
        assert!((table..table + clusters).all(|cluster| placement.is_used(cluster)));
    }

    #[test]
    fn a_small_image_has_its_l1_table_behind_the_first_block() {
        assert_eq!(placement(16, 4).allocate(1).unwrap(), 3);
    }

    #[test]
    fn structures_cover_themselves_whatever_is_allocated() {
        let mut random = Random(88172645463325252);
        for (bits, order) in [(9, 4), (9, 6), (9, 0), (12, 6), (16, 4)] {
            let mut placement = placement(bits, order);
            let mut seen = std::collections::HashSet::new();
            for _ in 0..300 {
                let state = random.next();
                let count = 1 + state % 200;
                let first = placement.allocate(count).unwrap();
                assert!((first..first + count).all(|cluster| seen.insert(cluster)));
                if state.is_multiple_of(50) {
                    let at = placement.make_room_behind_end(count).unwrap();
                    assert_eq!(placement.allocate_at(at, count).unwrap(), count);
                    assert!((at..at + count).all(|cluster| seen.insert(cluster)));
                }
            }
            self_check(&placement);
            let (table, clusters) = placement.refcount_table();
            assert!((table..table + clusters).all(|cluster| !seen.contains(&cluster)));
        }
    }
}
