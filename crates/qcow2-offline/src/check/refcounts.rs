//! The refcounts on disk: their table, their blocks, and how they compare with the references.

use std::collections::{BTreeMap, HashMap};

use super::counts::{Copied, FOURS};
use super::findings::{Finding, Structure};
use super::reader::{Bytes, Reader};
use super::state::{PIECE_BYTES, State};
use crate::Result;
use crate::entry::{big_endian, inspect, refcount_at};
use crate::geometry::{Geometry, HostCluster, HostOffset};

/// Slices of blocks that single lookups keep; only broken images need any.
const SLICES_MAX: usize = 4096;

/// log2 of the bits of the usual refcounts, which are compared four at a time.
const ORDER_16_BITS: u32 = 4;

/// No file has an offset beyond this: reading there fails, where reading beyond an end yields
/// zeroes.
const OFFSET_MAX: u64 = i64::MAX as u64;

/// The refcount table, and single refcounts on demand.
pub(super) struct Refcounts<'a> {
    reader: &'a Reader<'a>,
    geometry: Geometry,
    table: Vec<u64>,
    slices: HashMap<u64, Bytes>,
}

/// Where the refcounts of a refcount table entry are.
enum Block {
    /// Nowhere: all are 0.
    Absent,
    /// Where no block can be.
    Unreadable,
    /// In the block at this offset.
    At(u64),
}

impl<'a> Refcounts<'a> {
    /// Reads the refcount table.
    pub(super) async fn read(
        reader: &'a Reader<'a>,
        state: &mut State<'_>,
    ) -> Result<Refcounts<'a>> {
        let bytes = state.header.refcount_table_bytes();
        state.charge(bytes)?;
        let offset = state.header.refcount_table_offset;
        let mut table = Vec::new();
        let mut pieces = reader.pieces(offset, bytes, PIECE_BYTES);
        while let Some(piece) = pieces.next().await {
            table.extend(piece?.words());
        }
        Ok(Refcounts {
            reader,
            geometry: state.geometry,
            table,
            slices: HashMap::new(),
        })
    }

    /// Counts the refcount blocks themselves.
    pub(super) fn count_blocks(&self, state: &mut State<'_>) -> Result<()> {
        for (index, &entry) in self.table.iter().enumerate() {
            if entry == 0 {
                continue;
            }
            let index = index as u64;
            let block = inspect::inspect_refcount_table(entry);
            let cluster = self.geometry.host_cluster(HostOffset(block.offset)).0;
            if block.reserved {
                state.emit(&Finding::RefcountTableReserved { index });
            } else if !self.geometry.is_cluster_aligned(block.offset) {
                state.emit(&Finding::RefcountBlockUnaligned { index });
            } else if cluster >= state.clusters {
                state.emit(&Finding::RefcountBlockOutside { index });
            } else {
                state.reference(block.offset, state.cluster_bytes, 1, Copied::Ignored)?;
                let references = state.counts.get(cluster).references;
                if references != 1 {
                    state.emit(&Finding::RefcountBlockShared { index, references });
                }
            }
        }
        Ok(())
    }

    /// The clusters of all blocks that can be read.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u64> + '_ {
        let indices = 0..self.table.len() as u64;
        indices.filter_map(|index| match self.block(index) {
            Block::At(offset) => Some(offset >> self.geometry.cluster_bits()),
            Block::Absent | Block::Unreadable => None,
        })
    }

    fn block(&self, index: u64) -> Block {
        let entry = usize::try_from(index)
            .ok()
            .and_then(|index| self.table.get(index))
            .map_or(0, |&entry| inspect::inspect_refcount_table(entry).offset);
        match entry {
            0 => Block::Absent,
            offset if !self.geometry.is_cluster_aligned(offset) || offset > OFFSET_MAX => {
                Block::Unreadable
            }
            offset => Block::At(offset),
        }
    }

    /// Compares all refcounts with the references; returns the last cluster that is in use.
    pub(super) async fn compare(&self, state: &mut State<'_>) -> Result<u64> {
        let blocks = state.clusters.div_ceil(self.geometry.refcounts_per_block());
        let wanted =
            (0..blocks.min(self.table.len() as u64)).filter_map(|index| match self.block(index) {
                Block::At(offset) => Some((offset, index)),
                Block::Absent | Block::Unreadable => None,
            });
        let mut read = self.reader.tables(wanted, state.cluster_bytes);
        let mut comparison = Comparison::default();
        let mut next_index = 0;
        while let Some(block) = read.next().await {
            let (index, bytes) = block?;
            self.compare_without_blocks(next_index..index, &mut comparison, state);
            self.compare_block(index, &bytes, &mut comparison, state);
            self.reader.recycle(bytes);
            next_index = index + 1;
        }
        self.compare_without_blocks(next_index..blocks, &mut comparison, state);
        Ok(comparison.highest)
    }

    fn compare_block(
        &self,
        index: u64,
        bytes: &[u8],
        comparison: &mut Comparison,
        state: &mut State<'_>,
    ) {
        let order = self.geometry.refcount_order();
        let first = self.geometry.first_counted(index).0;
        let end = self.geometry.first_counted(index + 1).0.min(state.clusters);
        let mut cluster = first;
        while cluster < end {
            let four_end = (cluster + 4).min(end);
            if order == ORDER_16_BITS && four_end - cluster == 4 {
                let at = (cluster - first) as usize * 2;
                if comparison.four(cluster, big_endian(&bytes[at..at + 8]), state) {
                    cluster = four_end;
                    continue;
                }
            }
            for cluster in cluster..four_end {
                let refcount = refcount_at(bytes, (cluster - first) as usize, order);
                comparison.cluster(cluster, refcount, state);
            }
            cluster = four_end;
        }
    }

    fn compare_without_blocks(
        &self,
        indexes: std::ops::Range<u64>,
        comparison: &mut Comparison,
        state: &mut State<'_>,
    ) {
        // Beyond the refcount table nothing differs from one entry to the next.
        let in_table = indexes.start..indexes.end.min(self.table.len() as u64);
        let mut absent_from = indexes.start;
        for index in in_table {
            if let Block::Unreadable = self.block(index) {
                self.compare_absent(absent_from..index, comparison, state);
                self.tell_unreadable(index, state);
                absent_from = index + 1;
            }
        }
        self.compare_absent(absent_from..indexes.end, comparison, state);
    }

    fn compare_absent(
        &self,
        indexes: std::ops::Range<u64>,
        comparison: &mut Comparison,
        state: &mut State<'_>,
    ) {
        let first = self.geometry.first_counted(indexes.start).0;
        let end = self.geometry.first_counted(indexes.end).0;
        let clusters = first..end.min(state.clusters);
        let pieces: Vec<_> = state.counts.referenced_pieces(clusters).collect();
        for cluster in pieces.into_iter().flatten() {
            comparison.cluster(cluster, 0, state);
        }
    }

    fn tell_unreadable(&self, index: u64, state: &mut State<'_>) {
        let first = self.geometry.first_counted(index).0;
        let end = self.geometry.first_counted(index + 1).0.min(state.clusters);
        for cluster in first..end {
            state.emit(&Finding::RefcountUnreadable { cluster });
        }
    }

    /// The refcount of a cluster, if its block can be read.
    pub(super) async fn get(&mut self, cluster: u64) -> Result<Option<u64>> {
        let cluster = HostCluster(cluster);
        let offset = match self.block(self.geometry.refcount_block_index(cluster)) {
            Block::Absent => return Ok(Some(0)),
            Block::Unreadable => return Ok(None),
            Block::At(offset) => offset,
        };
        let order = self.geometry.refcount_order();
        let index = self.geometry.index_in_refcount_block(cluster);
        let slice_bytes = self.geometry.slice_bytes();
        let per_slice = (slice_bytes * 8) >> order;
        let at = offset + index / per_slice * slice_bytes;
        if !self.slices.contains_key(&at) {
            if self.slices.len() >= SLICES_MAX {
                self.slices.clear();
            }
            let bytes = self.reader.read(at, slice_bytes).await?;
            self.slices.insert(at, bytes);
        }
        let bytes = &self.slices[&at];
        Ok(Some(refcount_at(
            bytes,
            (index % per_slice) as usize,
            order,
        )))
    }

    /// Finds metadata that something else uses, too, although the refcounts cover both, or more:
    /// all other overlaps are refcounts that are too low, and reported already.
    pub(super) async fn find_overlaps(&mut self, state: &mut State<'_>) -> Result<()> {
        let mut found: BTreeMap<u64, Structure> = BTreeMap::new();
        for region in &state.regions {
            for cluster in region.first_cluster..region.first_cluster + region.clusters {
                if state.counts.get(cluster).references > 1 {
                    found.insert(cluster, region.structure);
                }
            }
        }
        for table in &state.l2_tables.list {
            let cluster = self.geometry.host_cluster(HostOffset(table.offset)).0;
            let own = table.active + table.snapshots;
            if self.geometry.is_cluster_aligned(table.offset)
                && state.counts.get(cluster).references > own
            {
                found.insert(cluster, Structure::L2);
            }
        }
        for (cluster, structure) in found {
            let references = state.counts.get(cluster).references;
            let count = self.get(cluster).await?;
            if count.is_some_and(|count| count >= references) {
                state.emit(&Finding::Overlap {
                    cluster,
                    structure,
                    references,
                });
            }
        }
        Ok(())
    }
}

/// Results of the comparison so far.
#[derive(Default)]
struct Comparison {
    highest: u64,
}

impl Comparison {
    /// Compares the refcounts of four clusters of 16 bits each, if they are right and the
    /// references of the usual kind; whether it did.
    #[inline]
    fn four(&mut self, cluster: u64, refcounts: u64, state: &State<'_>) -> bool {
        let Some(cells) = state.counts.four(cluster) else {
            return false;
        };
        let expected = &FOURS[usize::from(cells)];
        if refcounts != expected.refcounts || !expected.copied_is_right {
            return false;
        }
        if refcounts != 0 {
            self.highest = cluster + 3 - u64::from(refcounts.trailing_zeros() / 16);
        }
        true
    }

    fn cluster(&mut self, cluster: u64, refcount: u64, state: &mut State<'_>) {
        let cell = state.counts.get(cluster);
        if refcount > 0 || cell.references > 0 {
            self.highest = cluster;
        }
        state.copied_suspect |= cell.contradicts_copied(refcount);
        if refcount != cell.references {
            state.emit(&Finding::Refcount {
                cluster,
                refcount,
                references: cell.references,
            });
        }
    }
}
