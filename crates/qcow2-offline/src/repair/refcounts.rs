//! The refcounts: their present and future values, and a new place for them where the old cannot
//! count all.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::copied::apply;
use super::plan::{Plan, Scope};
use super::step::{Change, Step};
use super::tables::read_each;
use crate::check::counts::Copied;
use crate::check::{Finding, Structure};
use crate::entry::{big_endian, inspect, refcount_at, set_refcount};
use crate::geometry::HostCluster;
use crate::header::REFCOUNT_TABLE_BYTES_MAX;
use crate::units::{pieces, round_up};
use crate::{Error, Result};

/// A refcount block that is to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewBlock {
    pub index: u64,
    pub offset: u64,
}

/// Refcount table and blocks, as the repair finds and rebuilds them.
#[derive(Debug, Default)]
pub(super) struct Refcounts {
    /// Offsets of the blocks on disk that can be read; 0 where there is none.
    blocks: Vec<u64>,
    /// Entries that point where no block can be: their refcounts are not known.
    unreadable: HashSet<u64>,
    /// All refcounts are rebuilt.
    pub rebuild: bool,
    pub new_blocks: Vec<NewBlock>,
    pub new_table: u64,
    pub new_table_clusters: u64,
    /// Clusters of the structure that is replaced, and how often.
    replaced: HashMap<u64, u64>,
    /// Clusters that are in use until stage C is over, and not after it.
    pub held: HashMap<u64, u64>,
    /// Blocks with counts that are too low, or too high.
    pub low: BTreeSet<u64>,
    pub high: BTreeSet<u64>,
    /// New space: its first cluster, and the end; 0 if there is none.
    pub first_new: u64,
    pub end: u64,
}

impl Refcounts {
    /// Returns whether a cluster is a part of the structure that is replaced.
    pub fn is_replaced(&self, cluster: u64) -> bool {
        self.replaced.contains_key(&cluster)
    }
}

impl Plan<'_> {
    /// Reads the refcount table, and sees whether its blocks can stay where they are.
    pub(super) async fn survey_refcount_table(&mut self) -> Result<()> {
        let offset = self.header.refcount_table_offset;
        let bytes = self.header.refcount_table_bytes();
        let end = round_up(self.survey.file_bytes, self.survey.geometry.cluster_bytes());
        let misplaced = bytes == 0
            || offset == 0
            || !self.survey.geometry.is_cluster_aligned(offset)
            || offset.saturating_add(bytes) > end
            || self.survey.is_owned(offset, bytes);
        if misplaced {
            self.refcounts.rebuild = true;
            let beyond = bytes > 0 && offset >= self.survey.file_bytes;
            self.step(&Step::RefcountTable {
                finding: beyond.then_some(Finding::BeyondEnd { offset, len: bytes }),
                at: 48,
            });
        }
        if bytes == 0 || offset >= end {
            return Ok(());
        }
        self.charge(2 * bytes)?;
        let table = self.file.read_new(offset, bytes).await?;
        let entries: Vec<u64> = table.chunks_exact(8).map(big_endian).collect();
        if !misplaced {
            self.survey.own(offset, bytes, Structure::RefcountTable)?;
        }
        let len = bytes;
        for cluster in self.survey.clusters_of(offset, len) {
            *self.refcounts.replaced.entry(cluster).or_default() += 1;
        }
        for (index, entry) in (0..).zip(entries) {
            self.survey_block(index, entry, end)?;
        }
        Ok(())
    }

    fn survey_block(&mut self, index: u64, entry: u64, end: u64) -> Result<()> {
        let cluster_bytes = self.survey.geometry.cluster_bytes();
        let block = inspect::inspect_refcount_table(entry);
        self.refcounts.blocks.push(0);
        if entry == 0 {
            return Ok(());
        }
        let aligned = self.survey.geometry.is_cluster_aligned(block.offset);
        let inside = block.offset < end && block.offset != 0;
        let cluster = block.offset >> self.survey.geometry.cluster_bits();
        let finding = if block.reserved {
            Some(Finding::RefcountTableReserved { index })
        } else if !aligned {
            Some(Finding::RefcountBlockUnaligned { index })
        } else if !inside {
            Some(Finding::RefcountBlockOutside { index })
        } else if self.survey.owner(cluster).is_some() {
            let references = self.survey.references(cluster) + 1;
            Some(Finding::RefcountBlockShared { index, references })
        } else {
            None
        };
        if aligned && inside {
            self.refcounts.blocks[index as usize] = block.offset;
            *self.refcounts.replaced.entry(cluster).or_default() += 1;
        } else if !aligned {
            self.refcounts.unreadable.insert(index);
        }
        if finding.is_some() {
            self.refcounts.rebuild = true;
            self.step(&Step::RefcountTable {
                finding,
                at: self.header.refcount_table_offset + index * 8,
            });
            return Ok(());
        }
        self.charge(64)?;
        let structure = Structure::RefcountBlock;
        self.survey.own(block.offset, cluster_bytes, structure)
    }

    /// Returns whether the refcount of a cluster says that it is in use, or is unknown.
    pub(super) async fn may_be_in_use(&mut self, offset: u64) -> Result<bool> {
        let geometry = self.survey.geometry;
        let cluster = geometry.host_cluster(crate::geometry::HostOffset(offset));
        let index = geometry.refcount_block_index(cluster);
        let block = self.refcounts.blocks.get(index as usize).copied();
        let block = match block {
            Some(block) if block != 0 => block,
            _ => return Ok(self.refcounts.rebuild),
        };
        let order = geometry.refcount_order();
        let in_block = geometry.index_in_refcount_block(cluster);
        // Whole words, so that any width lies in one.
        let at = (in_block << order) / 64 * 8;
        let bytes = self.file.read_new(block + at, 8).await?;
        let in_word = (in_block - ((at * 8) >> order)) as usize;
        Ok(refcount_at(&bytes, in_word, order) != 0)
    }

    /// Finds places for all that moves or is copied, and for the refcounts if they must move:
    /// behind everything, so that the present content stays as it is.
    pub(super) async fn place(&mut self) -> Result<()> {
        let bits = self.survey.geometry.cluster_bits();
        self.survey.sort_changes();
        let mut next = self.first_new_cluster();
        let first = next;
        self.refcounts.first_new = first;
        for position in 0..self.survey.l1s.len() {
            let l1 = &self.survey.l1s[position];
            if l1.moves.is_none() {
                continue;
            }
            let (old, bytes, shared) = (l1.offset, l1.bytes(), l1.shared);
            self.survey.l1s[position].moves = Some(next << bits);
            self.survey.count(next << bits, bytes, 1, Copied::Ignored)?;
            next += self.survey.geometry.clusters_for(bytes);
            if !shared {
                self.hold(old, bytes);
            }
            let changes = &mut self.survey.l1s[position].changes;
            changes.sort_by_key(|change| change.at);
        }
        if self.survey.moves_snapshots.is_some() {
            let bytes = self.snapshot_table().len() as u64;
            self.survey.moves_snapshots = Some(next << bits);
            self.survey.count(next << bits, bytes, 1, Copied::Ignored)?;
            next += self.survey.geometry.clusters_for(bytes);
            self.hold(self.header.snapshots_offset, self.survey.snapshots_bytes);
        }
        self.place_tables(&mut next).await?;
        self.place_copies(&mut next)?;
        let geometry = self.survey.geometry;
        let absent = |index| {
            self.refcounts
                .blocks
                .get(index as usize)
                .is_none_or(|&b| b == 0)
        };
        let counted: BTreeSet<u64> = self.blocks_with_references(next);
        if counted.iter().any(|&index| absent(index)) {
            self.refcounts.rebuild = true;
        }
        if self.refcounts.rebuild {
            next = self.place_refcounts(next, counted)?;
        } else {
            self.refcounts.replaced.clear();
            let offset = self.header.refcount_table_offset;
            let bytes = self.header.refcount_table_bytes();
            self.survey.count(offset, bytes, 1, Copied::Ignored)?;
            for position in 0..self.refcounts.blocks.len() {
                let block = self.refcounts.blocks[position];
                if block != 0 {
                    let len = geometry.cluster_bytes();
                    self.survey.count(block, len, 1, Copied::Ignored)?;
                }
            }
        }
        self.refcounts.end = if next > first { next } else { 0 };
        self.survey.clusters = self.survey.clusters.max(next);
        self.survey.sort_changes();
        Ok(())
    }

    /// Returns where new space begins: behind the file. A device does not grow; there it is behind
    /// all that is in use.
    fn first_new_cluster(&self) -> u64 {
        if self.file.capabilities().extends_with_zeroes {
            return self.survey.clusters;
        }
        let pieces = self
            .survey
            .counts
            .referenced_pieces(0..self.survey.clusters);
        let used = pieces.flatten().filter(|&c| self.survey.references(c) > 0);
        let replaced = self.refcounts.replaced.keys().copied();
        let owned = self.survey.owned_clusters();
        used.chain(replaced)
            .chain(owned)
            .max()
            .map_or(0, |last| last + 1)
    }

    /// The refcount structure is where guest data is, too.
    pub(super) fn move_refcounts(&mut self, offset: u64) {
        self.refcounts.rebuild = true;
        self.survey.disown_refcounts();
        let index = self
            .refcounts
            .blocks
            .iter()
            .position(|&block| block == offset);
        let (finding, at) = match index {
            Some(index) => (
                Some(Finding::RefcountBlockShared {
                    index: index as u64,
                    references: 2,
                }),
                self.header.refcount_table_offset + index as u64 * 8,
            ),
            None => (None, 48),
        };
        self.step(&Step::RefcountTable { finding, at });
    }

    /// Places L2 tables that leave their place to guest data, and finds the entries that refer to
    /// them.
    async fn place_tables(&mut self, next: &mut u64) -> Result<()> {
        let bits = self.survey.geometry.cluster_bits();
        let bytes = self.survey.geometry.cluster_bytes();
        if self.survey.moved_tables.is_empty() {
            return Ok(());
        }
        // Flags of entries that are counted at the old place are looked at once more.
        self.copied_wrong = true;
        for from in self.survey.moved_tables.keys().copied().collect::<Vec<_>>() {
            let times = self.survey.table_at(from).map_or(0, |table| table.times());
            let to = *next << bits;
            self.survey.moved_tables.insert(from, to);
            self.survey.count(to, bytes, times, Copied::Ignored)?;
            *next += 1;
        }
        for position in 0..self.survey.l1s.len() {
            self.relink(position).await?;
        }
        Ok(())
    }

    async fn relink(&mut self, position: usize) -> Result<()> {
        let l1 = self.survey.l1s[position].clone();
        for piece in pieces(0, l1.bytes(), 256 << 10) {
            let start = l1.offset + piece.start;
            let mut table = self.file.read_new(start, piece.end - piece.start).await?;
            if l1.moves.is_none() {
                self.survey.mended(start, &mut table);
            }
            apply(&l1.changes, start, &mut table);
            for (at, entry) in (start..)
                .step_by(8)
                .zip(table.chunks_exact(8).map(big_endian))
            {
                let from = inspect::inspect_l1(entry).offset;
                let Some(&to) = self.survey.moved_tables.get(&from) else {
                    continue;
                };
                self.charge(64)?;
                let change = Change {
                    at,
                    from: entry,
                    to: self.survey.format.moved(entry, from, to),
                };
                if l1.moves.is_some() {
                    self.survey.l1s[position].changes.push(change);
                } else {
                    self.survey.relinks.push(change);
                }
            }
        }
        Ok(())
    }

    fn hold(&mut self, offset: u64, bytes: u64) {
        let end = self.survey.geometry.clusters_for(self.survey.file_bytes);
        for cluster in self.survey.clusters_of(offset, bytes) {
            if cluster < end {
                *self.refcounts.held.entry(cluster).or_default() += 1;
            }
        }
    }

    fn place_copies(&mut self, next: &mut u64) -> Result<()> {
        let geometry = self.survey.geometry;
        let mut copies = std::mem::take(&mut self.survey.copies);
        for copy in &mut copies {
            // Compressed data keeps its place in the sector.
            let within = copy.from % crate::entry::SECTOR_BYTES;
            let to = (*next << geometry.cluster_bits()) + within;
            copy.to = to;
            let copied = copy.active && copy.times == 1;
            let entry = self.survey.format.moved(copy.entry, copy.from, to);
            copy.new_entry = self.survey.format.with_copied_if_standard(entry, copied);
            let seen = if copied { Copied::Set } else { Copied::Ignored };
            self.survey.count(to, copy.bytes, copy.times, seen)?;
            *next += geometry.clusters_for(within + copy.bytes);
            let step = copy.step();
            self.step(&step);
        }
        self.survey.copies = copies;
        Ok(())
    }

    /// The blocks that have anything to count below `end`.
    fn blocks_with_references(&self, end: u64) -> BTreeSet<u64> {
        let geometry = self.survey.geometry;
        let pieces = self.survey.counts.referenced_pieces(0..end);
        let held = self.refcounts.held.keys().copied();
        pieces
            .flatten()
            .filter(|&cluster| self.survey.references(cluster) > 0)
            .chain(held)
            .map(|cluster| geometry.refcount_block_index(HostCluster(cluster)))
            .collect()
    }

    /// Places new refcount blocks and their table, which count themselves; the next free cluster.
    fn place_refcounts(&mut self, start: u64, mut indexes: BTreeSet<u64>) -> Result<u64> {
        let geometry = self.survey.geometry;
        let (table_clusters, end) = loop {
            let entries = indexes.last().map_or(1, |last| last + 1);
            let table_clusters = geometry.clusters_for(entries * 8);
            let end = start + indexes.len() as u64 + table_clusters;
            let before = indexes.len();
            let last = geometry.refcount_block_index(HostCluster(end - 1));
            indexes.extend(geometry.refcount_block_index(HostCluster(start))..=last);
            if indexes.len() == before {
                break (table_clusters, end);
            }
        };
        if table_clusters << geometry.cluster_bits() > REFCOUNT_TABLE_BYTES_MAX {
            return Err(Error::Unsupported {
                file: self.file.name().to_string(),
                feature: "a refcount table as large as this file needs".into(),
            });
        }
        self.charge(indexes.len() as u64 * 64)?;
        let bits = geometry.cluster_bits();
        let blocks = indexes
            .iter()
            .zip(start..)
            .map(|(&index, cluster)| NewBlock {
                index,
                offset: cluster << bits,
            });
        self.refcounts.new_blocks = blocks.collect();
        self.refcounts.new_table = (start + indexes.len() as u64) << bits;
        self.refcounts.new_table_clusters = table_clusters;
        let len = (end - start) << bits;
        self.survey.count(start << bits, len, 1, Copied::Ignored)?;
        Ok(end)
    }

    /// Compares the refcounts on disk with those that will be.
    pub(super) async fn compare_refcounts(&mut self) -> Result<()> {
        let geometry = self.survey.geometry;
        let cluster_bytes = geometry.cluster_bytes();
        let file = self.file.clone();
        let last = self
            .survey
            .clusters
            .div_ceil(geometry.refcounts_per_block());
        let blocks = self.refcounts.blocks.iter().take(last as usize);
        let offsets: Vec<u64> = blocks.copied().filter(|&block| block != 0).collect();
        let mut reads = read_each(&file, offsets, cluster_bytes);
        for index in 0..last {
            let block = self.refcounts.blocks.get(index as usize).copied();
            let first = geometry.first_counted(index).0;
            let end = geometry
                .first_counted(index + 1)
                .0
                .min(self.survey.clusters);
            if block.is_none_or(|block| block == 0) {
                // Refcounts of an unreadable block are not compared.
                let known = !self.refcounts.unreadable.contains(&index);
                let pieces = self.survey.counts.referenced_pieces(first..end);
                for cluster in pieces.collect::<Vec<_>>().into_iter().flatten() {
                    if known {
                        self.compare_refcount(cluster, 0, None);
                    } else {
                        self.compare_flags(cluster);
                    }
                }
                continue;
            }
            let Some(read) = reads.next().await else {
                break;
            };
            let (offset, bytes) = read?;
            for cluster in first..end {
                let at = (cluster - first) as usize;
                let refcount = refcount_at(&bytes, at, geometry.refcount_order());
                let byte = offset + (((at as u64) << geometry.refcount_order()) / 8);
                self.compare_refcount(cluster, refcount, Some(byte));
            }
        }
        self.find_counts_beyond().await?;
        if self.refcounts.rebuild {
            self.step(&Step::RebuildRefcounts {
                blocks: self.refcounts.new_blocks.len() as u64,
                to: self.refcounts.new_blocks[0].offset,
            });
        }
        Ok(())
    }

    /// Whether refcounts beyond the end of the file are cleared: where entries were given up, or an
    /// earlier session or repair was cut short. An image that is otherwise sound keeps them, as
    /// with QEMU; rebuilt refcounts have none.
    fn clears_beyond(&self) -> bool {
        let is_marked = self.header.is_dirty() || self.header.is_corrupt();
        self.options.scope == Scope::All
            && !self.refcounts.rebuild
            && (self.structural > 0 || is_marked)
    }

    /// Finds refcounts beyond the end of the file.
    async fn find_counts_beyond(&mut self) -> Result<()> {
        if !self.clears_beyond() {
            return Ok(());
        }
        let geometry = self.survey.geometry;
        let end = HostCluster(self.survey.clusters);
        let first = geometry.refcount_block_index(end);
        let blocks = self.refcounts.blocks.iter().skip(first as usize);
        let offsets: Vec<u64> = blocks.copied().filter(|&block| block != 0).collect();
        let file = self.file.clone();
        let mut reads = read_each(&file, offsets, geometry.cluster_bytes());
        for index in first..self.refcounts.blocks.len() as u64 {
            if self.refcounts.blocks[index as usize] == 0 {
                continue;
            }
            let Some(read) = reads.next().await else {
                break;
            };
            let (offset, mut bytes) = read?;
            if let Some(step) = self.clear_beyond(index, offset, &mut bytes) {
                self.refcounts.high.insert(index);
                self.step(&step);
            }
        }
        Ok(())
    }

    /// Clears the refcounts beyond the end of the file in the bytes of a block at `offset`. `None`
    /// if they are 0, or stay as they are.
    pub(super) fn clear_beyond(&self, index: u64, offset: u64, block: &mut [u8]) -> Option<Step> {
        if !self.clears_beyond() {
            return None;
        }
        let geometry = self.survey.geometry;
        let order = geometry.refcount_order();
        let entries = geometry.refcounts_per_block();
        let first = geometry.first_counted(index).0;
        let start = self.survey.clusters.saturating_sub(first).min(entries);
        let word_entries = 64 >> order;
        let (mut clusters, mut at) = (0, start);
        while at < entries {
            let byte = ((at << order) / 8) as usize;
            if at.is_multiple_of(word_entries) && block[byte..byte + 8] == [0; 8] {
                at += word_entries;
                continue;
            }
            if refcount_at(block, at as usize, order) != 0 {
                set_refcount(block, at as usize, order, 0);
                clusters += 1;
            }
            at += 1;
        }
        let from = offset + (start << order) / 8;
        (clusters > 0).then(|| Step::CountsBeyondEnd {
            clusters,
            at: from..offset + geometry.cluster_bytes(),
        })
    }

    fn compare_flags(&mut self, cluster: u64) -> u64 {
        let references = self.survey.references(cluster);
        let cell = self.survey.counts.get(cluster);
        self.copied_wrong |= cell.contradicts_copied(references);
        references
    }

    fn compare_refcount(&mut self, cluster: u64, refcount: u64, at: Option<u64>) {
        let counted = self.compare_flags(cluster);
        let rebuild = self.refcounts.rebuild;
        let is_new = self.refcounts.end > 0 && cluster >= self.refcounts.first_new;
        let replaced = self.refcounts.replaced.get(&cluster).copied();
        let references = counted + replaced.unwrap_or(0);
        if refcount == references {
            return;
        }
        if !rebuild {
            let index = self
                .survey
                .geometry
                .refcount_block_index(HostCluster(cluster));
            if refcount < references {
                self.refcounts.low.insert(index);
            } else {
                self.refcounts.high.insert(index);
            }
        }
        // Space that the repair itself takes, or frees, is no finding.
        let held = self.refcounts.held.get(&cluster).copied().unwrap_or(0);
        if (is_new && refcount < references) || refcount == references + held {
            return;
        }
        self.step(&Step::Refcount {
            cluster,
            refcount,
            references,
            at,
            bytes: self.survey.geometry.refcount_bytes(),
        });
    }

    /// The refcounts of a block as they will be; before stage E, of what is held, too.
    pub(super) fn counts_of_block(&self, index: u64, with_held: bool) -> Vec<u8> {
        let geometry = self.survey.geometry;
        let mut bytes = vec![0; geometry.cluster_bytes() as usize];
        let first = geometry.first_counted(index).0;
        let end = geometry
            .first_counted(index + 1)
            .0
            .min(self.survey.clusters);
        for cluster in first..end {
            let held = self.refcounts.held.get(&cluster).filter(|_| with_held);
            let references = self.survey.references(cluster);
            let count = references.saturating_add(held.copied().unwrap_or(0));
            let count = count.min(geometry.refcount_max());
            if count > 0 {
                let at = (cluster - first) as usize;
                set_refcount(&mut bytes, at, geometry.refcount_order(), count);
            }
        }
        bytes
    }

    /// Returns where a block is once counts are raised.
    pub(super) fn block_offset(&self, index: u64) -> Option<u64> {
        if self.refcounts.rebuild {
            let position = self
                .refcounts
                .new_blocks
                .binary_search_by_key(&index, |block| block.index);
            return position.ok().map(|at| self.refcounts.new_blocks[at].offset);
        }
        let block = self.refcounts.blocks.get(index as usize).copied();
        block.filter(|&block| block != 0)
    }
}
