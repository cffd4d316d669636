//! Another width of refcounts: the same counts once more, in blocks behind all that is in use.
//!
//! | stage, with a barrier after each | what a crash after it leaves |
//! | --- | --- |
//! | the new blocks and their table | the old counts, and bytes that nothing refers to |
//! | sector 0, which names table and width at once | the new counts; the old structure is counted, a leak |
//! | 0 for the old structure | the new counts |
//!
//! Blocks are read and written one by one, so memory does not grow with the image but for the
//! tables.

use std::collections::BTreeSet;
use std::ops::Range;

use cowslip_queue::Buf;

use crate::entry::{refcount_at, set_refcount};
use crate::file::Durability;
use crate::geometry::{Geometry, HostCluster};
use crate::header::{Header, REFCOUNT_TABLE_BYTES_MAX};
use crate::job::{Job, Stage};
use crate::{Counts, Qcow2};
use crate::{Error, Result};

/// Where a refcount structure is that nothing refers to yet.
#[derive(Debug)]
pub(super) struct NewCounts {
    geometry: Geometry,
    /// Indexes of its blocks, in the order of their places.
    blocks: Vec<u64>,
    table_clusters: u64,
    /// First of the table's clusters, then of the blocks'.
    first: u64,
    /// Clusters of the structure that it replaces.
    replaced: BTreeSet<u64>,
}

impl NewCounts {
    /// Lets a header name it.
    pub fn name_in(&self, header: &mut Header) {
        header.refcount_order = self.geometry.refcount_order();
        header.refcount_table_offset = self.first << self.geometry.cluster_bits();
        header.refcount_table_clusters = self.table_clusters as u32;
    }

    fn clusters(&self) -> Range<u64> {
        self.first..self.first + self.table_clusters + self.blocks.len() as u64
    }

    fn block_offset(&self, position: usize) -> u64 {
        (self.first + self.table_clusters + position as u64) << self.geometry.cluster_bits()
    }

    fn table(&self) -> Vec<u8> {
        let mut bytes = vec![0; (self.table_clusters << self.geometry.cluster_bits()) as usize];
        for (position, &index) in self.blocks.iter().enumerate() {
            let at = index as usize * 8;
            bytes[at..at + 8].copy_from_slice(&self.block_offset(position).to_be_bytes());
        }
        bytes
    }

    /// Finds places for table and blocks from `first` on: blocks for the clusters counted now,
    /// and both themselves.
    fn place(geometry: Geometry, first: u64, counted: &BTreeSet<u64>) -> Option<(Vec<u64>, u64)> {
        let index = |cluster| geometry.refcount_block_index(HostCluster(cluster));
        let mut blocks = counted.clone();
        let mut table_clusters = 1;
        loop {
            let end = first + table_clusters + blocks.len() as u64;
            blocks.extend(index(first)..=index(end - 1));
            let entries = blocks.last().map_or(0, |last| last + 1);
            let needed = geometry.clusters_for(entries * 8);
            if entries * 8 > REFCOUNT_TABLE_BYTES_MAX {
                return None;
            }
            let settled = end == first + needed + blocks.len() as u64;
            table_clusters = needed;
            if settled {
                return Some((blocks.into_iter().collect(), table_clusters));
            }
        }
    }
}

/// The counts as they are, a block at a time.
struct OldCounts<'a> {
    image: &'a Qcow2,
    counts: &'a Counts,
    /// The block that was read last, and its index.
    block: Option<(u64, Vec<u8>)>,
}

impl OldCounts<'_> {
    /// The bytes of a block; `None` where there is none, so that all its counts are 0.
    async fn block(&mut self, index: u64) -> Result<Option<&[u8]>> {
        let Some(offset) = self.counts.refcounts.block(index)? else {
            return Ok(None);
        };
        if self.block.as_ref().is_none_or(|(at, _)| *at != index) {
            let len = self.image.geometry().cluster_bytes();
            let bytes = self.image.file.read_new(offset.0, len).await?;
            self.block = Some((index, bytes.to_vec()));
        }
        Ok(self.block.as_ref().map(|(_, bytes)| &bytes[..]))
    }

    /// Calls `each` with the clusters of a range that are in use, and their counts.
    async fn each(
        &mut self,
        range: Range<u64>,
        mut each: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let geometry = *self.image.geometry();
        let per_block = geometry.refcounts_per_block();
        let mut at = range.start;
        while at < range.end {
            let index = geometry.refcount_block_index(HostCluster(at));
            let end = range.end.min((index + 1) * per_block);
            if let Some(bytes) = self.block(index).await? {
                for cluster in at..end {
                    let within = (cluster % per_block) as usize;
                    match refcount_at(bytes, within, geometry.refcount_order()) {
                        0 => {}
                        count => each(cluster, count)?,
                    }
                }
            }
            at = end;
        }
        Ok(())
    }
}

impl Qcow2 {
    /// Writes the counts once more, in another width, durably. Nothing refers to them. What is
    /// there is read from the file: the session is over, and all is written.
    ///
    /// # Errors
    /// `Invalid` for a count that the width cannot hold; `Corrupt` for an image that is not sound;
    /// `Cancelled`; I/O. The image is as it was.
    pub(super) async fn write_new_counts(
        &self,
        counts: &Counts,
        refcount_order: u32,
        job: &Job,
    ) -> Result<NewCounts> {
        self.refuse_unsound("nothing was changed", job).await?;
        let new = self.place_new_counts(counts, refcount_order, job).await?;
        let file_bytes = self.file.len().await?;
        let written = self.write_blocks(counts, &new, job).await;
        if written.is_err() && self.file.capabilities().extends_with_zeroes {
            // Nothing refers to the new structures. If that fails too, it stays behind the end of
            // the image.
            drop(self.file.set_len(file_bytes).await);
        }
        written.map(|()| new)
    }

    async fn place_new_counts(
        &self,
        counts: &Counts,
        refcount_order: u32,
        job: &Job,
    ) -> Result<NewCounts> {
        let old = *self.geometry();
        let geometry = Geometry::new(old.cluster_bits(), refcount_order, old.extended_l2());
        let geometry = geometry.expect("the width is one of those that there are");
        let table_len = counts.refcounts.table().len() as u64;
        let mut reader = OldCounts {
            image: self,
            counts,
            block: None,
        };
        let mut counted = BTreeSet::new();
        let mut first = 0;
        let mut replaced: BTreeSet<u64> = self
            .geometry()
            .clusters_at(counts.refcounts.table_offset().0, table_len * 8)
            .collect();
        for index in 0..table_len {
            job.check()?;
            if let Some(block) = counts.refcounts.block(index)? {
                replaced.insert(old.host_cluster(block).0);
            }
            let start = old.first_counted(index).0;
            let note = |cluster: u64, count| {
                if count > geometry.refcount_max() {
                    return Err(Error::Invalid(format!(
                        "Cannot decrease refcount entry width to {} bits: Cluster at offset {:#x} has a refcount of {count}",
                        geometry.refcount_bits(),
                        cluster << geometry.cluster_bits()
                    )));
                }
                counted.insert(geometry.refcount_block_index(HostCluster(cluster)));
                first = cluster + 1;
                Ok(())
            };
            let range = start..start + old.refcounts_per_block();
            reader.each(range, note).await?;
        }
        let placed = NewCounts::place(geometry, first, &counted);
        let (blocks, table_clusters) = placed.ok_or_else(|| {
            Error::Invalid(format!(
                "refcounts of {} bits for a file of this length need a refcount table of more than \
                 {REFCOUNT_TABLE_BYTES_MAX} bytes",
                geometry.refcount_bits()
            ))
        })?;
        Ok(NewCounts {
            geometry,
            blocks,
            table_clusters,
            first,
            replaced,
        })
    }

    async fn write_blocks(&self, counts: &Counts, new: &NewCounts, job: &Job) -> Result<()> {
        let geometry = new.geometry;
        let (order, per_block) = (geometry.refcount_order(), geometry.refcounts_per_block());
        job.enter(Stage::Counts);
        job.expect(new.blocks.len() as u64 * geometry.cluster_bytes());
        let mut reader = OldCounts {
            image: self,
            counts,
            block: None,
        };
        for (position, &index) in new.blocks.iter().enumerate() {
            job.begin(geometry.cluster_bytes()).await?;
            let mut bytes = vec![0; geometry.cluster_bytes() as usize];
            let start = geometry.first_counted(index).0;
            let range = start..start + per_block;
            let copy = |cluster: u64, count| {
                set_refcount(&mut bytes, (cluster - start) as usize, order, count);
                Ok(())
            };
            reader.each(range.clone(), copy).await?;
            let own = new.clusters();
            for cluster in own.start.max(range.start)..own.end.min(range.end) {
                set_refcount(&mut bytes, (cluster - start) as usize, order, 1);
            }
            self.put(new.block_offset(position), bytes).await?;
            job.done(geometry.cluster_bytes());
        }
        self.put(new.first << geometry.cluster_bits(), new.table())
            .await?;
        job.enter(Stage::Flush);
        self.barrier().await
    }

    /// The new structure is the image's; what the old one took is free.
    pub(super) async fn uncount_replaced(&self, new: &NewCounts) -> Result<()> {
        let geometry = new.geometry;
        let order = geometry.refcount_order();
        for (position, &index) in new.blocks.iter().enumerate() {
            let start = geometry.first_counted(index).0;
            let range = start..start + geometry.refcounts_per_block();
            let mut replaced = new.replaced.range(range).peekable();
            if replaced.peek().is_none() {
                continue;
            }
            let offset = new.block_offset(position);
            let len = geometry.cluster_bytes();
            let mut bytes = self.file.read_new(offset, len).await?.to_vec();
            for cluster in replaced {
                set_refcount(&mut bytes, (cluster - start) as usize, order, 0);
            }
            self.put(offset, bytes).await?;
        }
        self.barrier().await
    }

    async fn put(&self, offset: u64, bytes: Vec<u8>) -> Result<()> {
        let data = vec![Buf::from(bytes)];
        self.file.write(offset, data, Durability::Cached).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_structure_counts_itself_and_no_more() {
        for (cluster_bits, first, counted) in [
            (9, 1, vec![0]),
            (9, 100, vec![0]),
            (9, 1 << 20, vec![0, 7, 300]),
            (16, 5, vec![0]),
            (21, 1 << 30, vec![]),
        ] {
            for order in 0..=6 {
                let geometry = Geometry::new(cluster_bits, order, false).unwrap();
                let counted: BTreeSet<u64> = counted.iter().copied().collect();
                let (blocks, table) = NewCounts::place(geometry, first, &counted).unwrap();
                let end = first + table + blocks.len() as u64;
                let index = |cluster| geometry.refcount_block_index(HostCluster(cluster));
                let own: BTreeSet<u64> = (index(first)..=index(end - 1)).collect();
                assert!(own.iter().all(|index| blocks.binary_search(index).is_ok()));
                let reach = table << cluster_bits >> 3;
                assert!(*blocks.last().unwrap() < reach);
                // A smaller one would do only if a block was taken for what the loop gave up again.
                let needed = own.union(&counted).count();
                assert!(blocks.len() <= needed + 1, "{blocks:?}");
            }
        }
    }

    #[test]
    fn a_table_that_would_be_too_long_is_refused() {
        let geometry = Geometry::new(9, 6, false).unwrap();
        let end = (REFCOUNT_TABLE_BYTES_MAX / 8) * geometry.refcounts_per_block();
        assert!(NewCounts::place(geometry, end, &BTreeSet::new()).is_none());
    }
}
