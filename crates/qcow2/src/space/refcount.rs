//! Reference counts: the refcount table, and a cache of slices of refcount blocks.
//!
//! The holder of the write-back turn owns this; requests never look at counts. Counts are raised
//! and lowered here in memory, and written by write-back, which alone knows the order. A cluster
//! without a refcount block has the count 0.

use cowslip_boxed::boxed;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use cowslip_block::joins::join_all;

use crate::entry::{EntryFormat, refcount_at, set_refcount};
use crate::file::{AlignedFile, Durability, Event};
use crate::geometry::{Geometry, HostCluster, HostOffset};
use crate::{Buf, Error, Result};

/// Slices that are kept, but for those that are dirty.
const SLICES_MAX: usize = 512;
/// Slices that are kept however small the budget.
const SLICES_MIN: usize = 4;

/// Changes that are noted at most.
const CHANGES_MAX: usize = 1 << 20;

/// How clusters without a refcount block are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Uncounted {
    AreZero,
    AreSkipped,
}

/// The counts of an image.
#[derive(Debug)]
pub struct Refcounts {
    file: AlignedFile,
    format: EntryFormat,
    /// Entries of the refcount table, as on disk.
    table: Vec<u64>,
    table_offset: HostOffset,
    slices: BTreeMap<u64, Vec<u8>>,
    slices_max: usize,
    dirty: BTreeSet<u64>,
    /// Something was written that no barrier covers yet.
    unsettled: bool,
    /// Clusters whose counts change, while something watches them, and the number of that watch.
    watched: Option<(u64, Changes)>,
}

/// Clusters whose counts have changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    changed: BTreeSet<u64>,
    freed: BTreeSet<u64>,
    /// There were too many to note.
    is_partial: bool,
}

impl Changes {
    /// Notes a new count.
    pub fn note(&mut self, cluster: HostCluster, count: u64) {
        self.is_partial |= self.changed.len() >= CHANGES_MAX;
        if self.is_partial {
            (self.changed, self.freed) = Default::default();
            return;
        }
        self.changed.insert(cluster.0);
        if count == 0 {
            self.freed.insert(cluster.0);
        }
    }

    /// Returns whether there were more than are known.
    pub fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// The clusters whose counts have changed.
    pub fn changed(&self) -> &BTreeSet<u64> {
        &self.changed
    }

    /// The clusters whose counts were 0 for a time, or are: each may hold something else now.
    pub fn freed(&self) -> &BTreeSet<u64> {
        &self.freed
    }
}

impl Refcounts {
    /// The counts that the refcount table at `table_offset` reaches.
    pub fn new(
        file: AlignedFile,
        format: EntryFormat,
        table: Vec<u64>,
        table_offset: HostOffset,
    ) -> Refcounts {
        Refcounts {
            file,
            format,
            table,
            table_offset,
            slices: BTreeMap::new(),
            slices_max: SLICES_MAX,
            dirty: BTreeSet::new(),
            unsettled: false,
            watched: None,
        }
    }

    /// Notes from now on which counts change; the number of this watch. An earlier one has ended.
    pub fn watch(&mut self) -> u64 {
        // Counts that take the place of these have other numbers.
        static WATCHES: AtomicU64 = AtomicU64::new(0);
        let watch = WATCHES.fetch_add(1, Ordering::Relaxed);
        self.watched = Some((watch, Changes::default()));
        watch
    }

    /// Ends a watch. `None` if it has ended before, or other counts have taken the place of these.
    pub fn watched(&mut self, watch: u64) -> Option<Changes> {
        let ended = self.watched.take_if(|(number, _)| *number == watch);
        ended.map(|(_, changes)| changes)
    }

    /// A count has changed, here or in a block that was not made here.
    pub fn note_change(&mut self, cluster: HostCluster, count: u64) {
        if let Some((_, changes)) = &mut self.watched {
            changes.note(cluster, count);
        }
    }

    /// Keeps no more than a budget of bytes, if that is less than usual.
    pub fn within(mut self, cache_bytes: u64) -> Refcounts {
        let slices = cache_bytes / self.geometry().slice_bytes();
        self.slices_max = (slices as usize).clamp(SLICES_MIN, SLICES_MAX);
        self
    }

    fn geometry(&self) -> &Geometry {
        &self.format.geometry
    }

    fn counts_per_slice(&self) -> u64 {
        (self.geometry().slice_bytes() * 8) >> self.geometry().refcount_order()
    }

    /// Entries of the refcount table.
    pub fn table(&self) -> &[u64] {
        &self.table
    }

    /// Returns where the refcount table is.
    pub fn table_offset(&self) -> HostOffset {
        self.table_offset
    }

    /// Records new blocks, or a table that has moved, once they are durable.
    pub fn set_table(&mut self, table: Vec<u64>, offset: HostOffset) {
        self.table = table;
        self.table_offset = offset;
    }

    /// The block at a table index, if there is one.
    ///
    /// # Errors
    /// A corrupt entry.
    pub fn block(&self, index: u64) -> Result<Option<HostOffset>> {
        let entry = self.table.get(index as usize).copied().unwrap_or(0);
        self.format
            .decode_refcount_table(entry)
            .map_err(|error| Error::Corrupt {
                file: self.file.name().to_string(),
                structure: "refcount table entry",
                offset: self.table_offset.0 + 8 * index,
                detail: error.to_string(),
            })
    }

    /// Returns where a slice of counts is, if its block exists.
    fn slice_offset(&self, slice: u64) -> Result<Option<HostOffset>> {
        let per_block = self.geometry().slices_per_table();
        let within = slice % per_block * self.geometry().slice_bytes();
        Ok(self
            .block(slice / per_block)?
            .map(|block| block.plus(within)))
    }

    /// Brings a slice into memory; `false` if its block does not exist.
    async fn load(&mut self, slice: u64) -> Result<bool> {
        if self.slices.contains_key(&slice) {
            return Ok(true);
        }
        let Some(offset) = self.slice_offset(slice)? else {
            return Ok(false);
        };
        if self.slices.len() >= self.slices_max {
            let dirty = &self.dirty;
            self.slices.retain(|slice, _| dirty.contains(slice));
        }
        self.file.reach(Event::RefblockLoad).await;
        let bytes = self
            .file
            .read_new(offset.0, self.geometry().slice_bytes())
            .await?;
        self.slices.insert(slice, bytes.to_vec());
        Ok(true)
    }

    /// A cluster's count.
    ///
    /// # Errors
    /// I/O, or a corrupt table entry.
    pub async fn get(&mut self, cluster: HostCluster) -> Result<u64> {
        let slice = cluster.0 / self.counts_per_slice();
        if !self.load(slice).await? {
            return Ok(0);
        }
        let index = (cluster.0 % self.counts_per_slice()) as usize;
        Ok(refcount_at(
            &self.slices[&slice],
            index,
            self.geometry().refcount_order(),
        ))
    }

    /// Changes a cluster's count by `delta`, in memory, and returns the new one.
    ///
    /// # Errors
    /// I/O, a corrupt table entry, or a count that would leave its range: then nothing changes.
    pub async fn add(&mut self, cluster: HostCluster, delta: i64) -> Result<u64> {
        let slice = cluster.0 / self.counts_per_slice();
        let order = self.geometry().refcount_order();
        let (max, per_slice) = (self.geometry().refcount_max(), self.counts_per_slice());
        let old = self.get(cluster).await?;
        let new = old.checked_add_signed(delta).filter(|&new| new <= max);
        let (Some(new), Some(bytes)) = (new, self.slices.get_mut(&slice)) else {
            return Err(Error::Corrupt {
                file: self.file.name().to_string(),
                structure: "reference count of the cluster",
                offset: self.geometry().host_offset(cluster).0,
                detail: format!("it is {old} and would have to change by {delta}"),
            });
        };
        set_refcount(bytes, (cluster.0 % per_slice) as usize, order, new);
        self.dirty.insert(slice);
        self.note_change(cluster, new);
        Ok(new)
    }

    /// The first clusters within `range` whose count is not 0, `most` of them.
    ///
    /// # Errors
    /// I/O, or a corrupt table entry.
    pub async fn counted(&mut self, range: Range<u64>, most: usize) -> Result<Vec<HostCluster>> {
        let per_slice = self.counts_per_slice();
        let order = self.geometry().refcount_order();
        let mut found = Vec::new();
        let mut at = range.start;
        while at < range.end && found.len() < most {
            let slice = at / per_slice;
            let end = range.end.min((slice + 1) * per_slice);
            if self.load(slice).await? {
                let bytes = &self.slices[&slice];
                let is_counted =
                    |cluster: &u64| refcount_at(bytes, (cluster % per_slice) as usize, order) != 0;
                let left = most - found.len();
                found.extend((at..end).filter(is_counted).take(left).map(HostCluster));
            }
            at = end;
        }
        Ok(found)
    }

    /// Records that the table on disk refers to these blocks no longer. All that they count is 0,
    /// and written.
    pub fn forget_blocks(&mut self, indices: &[u64]) {
        let per_block = self.geometry().slices_per_table();
        for &index in indices {
            self.table[index as usize] = 0;
            let slices = index * per_block..(index + 1) * per_block;
            debug_assert!(self.dirty.range(slices.clone()).next().is_none());
            for slice in slices {
                self.slices.remove(&slice);
                self.dirty.remove(&slice);
            }
        }
    }

    /// Runs of clusters with count 0 within `range`.
    ///
    /// # Errors
    /// I/O, or a corrupt table entry.
    pub async fn zero_runs(&mut self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        self.runs(range, Uncounted::AreZero).await
    }

    /// Runs of clusters with count 0 within `range` that a block exists for: those that can be
    /// taken as they are. A file may be longer than its counts reach, after a crash or by padding.
    ///
    /// # Errors
    /// I/O, or a corrupt table entry.
    pub async fn countable_zero_runs(&mut self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        self.runs(range, Uncounted::AreSkipped).await
    }

    async fn runs(&mut self, range: Range<u64>, uncounted: Uncounted) -> Result<Vec<Range<u64>>> {
        let per_slice = self.counts_per_slice();
        let order = self.geometry().refcount_order();
        let mut runs: Vec<Range<u64>> = Vec::new();
        let mut add = |run: Range<u64>| match runs.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => runs.push(run),
        };
        let mut at = range.start;
        while at < range.end {
            let slice = at / per_slice;
            let end = range.end.min((slice + 1) * per_slice);
            if self.load(slice).await? {
                let bytes = &self.slices[&slice];
                for cluster in at..end {
                    if refcount_at(bytes, (cluster % per_slice) as usize, order) == 0 {
                        add(cluster..cluster + 1);
                    }
                }
            } else if uncounted == Uncounted::AreZero {
                add(at..end);
            }
            at = end;
        }
        Ok(runs)
    }

    /// Returns whether anything is to be written.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Slices that are to be written.
    pub fn dirty_slices(&self) -> usize {
        self.dirty.len()
    }

    /// Returns whether all counts are durable as they are here.
    pub fn is_settled(&self) -> bool {
        !self.is_dirty() && !self.unsettled
    }

    /// A barrier covers all that was written.
    pub fn settle(&mut self) {
        self.unsettled = false;
    }

    /// Takes the changed slices that hold the counts of these clusters, with their places: they are
    /// for a write that is durable when it completes, and is not repeated if it fails.
    ///
    /// # Errors
    /// A corrupt table entry.
    pub fn take_dirty_of(&mut self, clusters: Range<u64>) -> Result<Vec<(u64, Vec<Buf>)>> {
        let per_slice = self.counts_per_slice();
        let slices = clusters.start / per_slice..clusters.end.div_ceil(per_slice);
        let changed: Vec<u64> = self.dirty.range(slices).copied().collect();
        let mut writes = Vec::new();
        for slice in changed {
            let offset = self
                .slice_offset(slice)?
                .expect("a slice with counts has its block");
            writes.push((offset.0, vec![Buf::copy_of(&self.slices[&slice])]));
            self.dirty.remove(&slice);
        }
        Ok(writes)
    }

    /// Writes all changed slices. Only write-back calls this, at its stages. After a failure
    /// they stay dirty.
    ///
    /// # Errors
    /// I/O.
    #[boxed]
    pub async fn write_dirty(&mut self) -> Result<()> {
        self.unsettled |= self.is_dirty();
        let mut writes = Vec::new();
        for &slice in &self.dirty {
            let offset = self
                .slice_offset(slice)?
                .expect("a slice with counts has its block");
            let bytes = Buf::copy_of(&self.slices[&slice]);
            let file = self.file.clone();
            writes.push(async move {
                file.reach(Event::RefblockUpdatePart).await;
                file.write(offset.0, vec![bytes], Durability::Cached).await
            });
        }
        // All of them end before a retry: a sector never has two writes in flight.
        join_all(writes).await.into_iter().collect::<Result<()>>()?;
        self.dirty.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
