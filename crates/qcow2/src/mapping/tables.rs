//! The L1 table and a cache of L2 slices: load, pin, look up, mark dirty. No order of writes and no
//! policy: dirty slices are handed to write-back, which alone writes them.
//!
//! A slice is keyed by the guest range that it maps, counted over the whole disk, so a table that
//! moves keeps its slices. A slot is evicted only when it is clean, unpinned and not being written.
//! Slices of a table that is not on disk yet are zeroes where they are not cached.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use cowslip_queue::{Buf, Pending};

use super::direct::{Access, DirectMap};

use crate::entry::{EntryError, EntryFormat, L2Entry, TableRef};
use crate::geometry::{GuestCluster, HostCluster, HostOffset};
use crate::plan::WriteOrdering;
use crate::statistics::CacheStatistics;
use crate::sync::Waiters;

mod packed;
mod slots;

use slots::Slots;

/// Words of the direct map: at least these, if the disk has as many clusters, and at most (2 MiB).
const DIRECT_WORDS_MIN: u64 = 16;
const DIRECT_WORDS_MAX: u64 = 1 << 18;

/// A table that L1 in memory refers to and L1 on disk does not yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewTable {
    /// Where it will be.
    pub offset: HostOffset,
    /// The content of the disk there.
    pub on_disk: OnDisk,
}

/// The content of the disk where a table will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDisk {
    /// Zeroes: slices without entries need not be written.
    Zeroes,
    /// Anything: the whole table is written.
    Unknown,
    /// The table, but for slices dirty in the cache: a copy of a shared one.
    Table,
}

/// The work that has to precede a look-up in a slice.
pub enum Prepared {
    /// Nothing: it is in memory.
    Ready,
    /// Nothing: there is no table, all is unallocated.
    NoTable,
    /// It is to be read from here, by the caller, who then calls `loaded`.
    Load(HostOffset),
    /// Another request is loading it.
    Wait(Pending<()>),
    /// All slots are in use; dirty ones can be freed by a write-back cycle.
    Full {
        /// Some slot is dirty.
        dirty: bool,
        /// Resolves when a slot may have become free.
        freed: Pending<()>,
    },
}

/// A slice to be written, copied at the cut.
#[derive(Clone, Debug)]
pub struct SliceCopy {
    /// Number of the slice.
    pub slice: u64,
    /// Offset of the slice in the file.
    pub offset: HostOffset,
    /// The slice as it is stored.
    pub bytes: Buf,
}

/// The changes that a write-back cycle takes from the tables.
#[derive(Debug, Default)]
pub struct CycleTables {
    /// Slices of tables that L1 on disk refers to.
    pub slices: Vec<SliceCopy>,
    /// Slices of new tables.
    pub new_slices: Vec<SliceCopy>,
    /// Tables that no L1 entry on disk refers to yet, by index.
    pub new_tables: Vec<(u64, NewTable)>,
    /// L1 entries that change, by index.
    pub l1: BTreeMap<u64, u64>,
    /// Some changed entry promises bytes.
    pub promises_bytes: bool,
}

impl CycleTables {
    /// Returns whether some entry may not be durable before what it refers to is.
    pub fn is_ordered(&self) -> bool {
        let mut tables = self.new_tables.iter();
        self.promises_bytes || tables.any(|(_, table)| table.on_disk != OnDisk::Zeroes)
    }
}

/// L1 and the cached slices of L2, of the active state of the image.
pub struct Tables {
    format: EntryFormat,
    l1: Vec<u64>,
    l1_dirty: BTreeSet<u64>,
    l1_writing: BTreeSet<u64>,
    new_tables: BTreeMap<u64, NewTable>,
    slots: Slots,
    loading: BTreeMap<u64, Waiters>,
    dirty: BTreeSet<u64>,
    /// Some entry that is dirty promises bytes.
    promises_bytes: bool,
    freed: Waiters,
    /// Clusters that requests find without these tables.
    direct: Arc<DirectMap>,
    /// Words that it has at most; 0 if no request looks there.
    direct_words_max: u64,
    /// A bit for each host cluster that it may know, modulo their number.
    direct_hosts: Vec<u64>,
}

impl std::fmt::Debug for Tables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Tables({} L1 entries, {} slices, {} dirty)",
            self.l1.len(),
            self.slots.len(),
            self.dirty.len()
        )
    }
}

impl Tables {
    /// Slices that the cache holds at least, whatever the budget.
    pub const SLOTS_MIN: usize = 4;

    /// The tables of an image with this L1, and a budget for a few slices.
    pub fn new(format: EntryFormat, l1: Vec<u64>) -> Tables {
        Tables {
            format,
            l1,
            l1_dirty: BTreeSet::new(),
            l1_writing: BTreeSet::new(),
            new_tables: BTreeMap::new(),
            slots: Slots::new(format.geometry, Tables::SLOTS_MIN as u64),
            loading: BTreeMap::new(),
            dirty: BTreeSet::new(),
            promises_bytes: false,
            freed: Waiters::default(),
            direct: Arc::new(DirectMap::new(format.geometry.cluster_bits())),
            direct_words_max: 0,
            direct_hosts: Vec::new(),
        }
    }

    /// Whether requests look into the direct map.
    pub fn uses_direct(&self) -> bool {
        self.direct_words_max > 0
    }

    /// Lets the direct map take some memory beside the slices, unless it has some already.
    pub fn set_direct_bytes(&mut self, bytes: u64) {
        self.direct_words_max = (bytes / 8).clamp(DIRECT_WORDS_MIN, DIRECT_WORDS_MAX);
    }

    /// The map of clusters for requests that do not look here.
    pub fn direct(&self) -> &Arc<DirectMap> {
        &self.direct
    }

    /// Words of the direct map: one for each cluster of the disk, within its memory.
    fn direct_words(&self) -> usize {
        let clusters = self.l1.len() as u64 * self.format.geometry.l2_entries();
        1 << clusters.clamp(1, self.direct_words_max).ilog2()
    }

    /// Has the direct map know a cluster, whose entry says so.
    pub fn direct_to(&mut self, place: (GuestCluster, HostCluster), access: Access) {
        if self.direct_hosts.is_empty() {
            self.direct_hosts = vec![0; self.direct_words().div_ceil(8)];
        }
        let words = self.direct_words();
        if !self.direct.has(place, access) && self.direct.fill_in(place, access, words) {
            let (at, bit) = self.direct_host(place.1);
            self.direct_hosts[at] |= bit;
        }
    }

    /// The direct map knows this host cluster no longer: it holds metadata from now on. (Only an
    /// image whose counts are wrong has a reference to it.)
    pub fn forget_host(&mut self, host: HostCluster) {
        if self.direct_hosts.is_empty() {
            return;
        }
        let (at, bit) = self.direct_host(host);
        if self.direct_hosts[at] & bit != 0 {
            self.direct.forget_all();
            self.direct_hosts.fill(0);
        }
    }

    fn direct_host(&self, host: HostCluster) -> (usize, u64) {
        let at = host.0 / 64 % self.direct_hosts.len() as u64;
        (at as usize, 1 << (host.0 % 64))
    }

    /// Bytes that all tables there are would take, or those of the whole disk if it may be written;
    /// of one at least, since a disk can grow.
    pub fn bytes_wanted(&self, writable: bool) -> u64 {
        let tables = match writable {
            true => self.l1.len(),
            false => self.l1.iter().filter(|&&entry| entry != 0).count(),
        };
        let slices = tables.max(1) as u64 * self.format.geometry.slices_per_table();
        slices.saturating_mul(self.slots.whole_bytes())
    }

    /// Sets what slices may take from now on.
    pub fn set_budget(&mut self, bytes: u64) {
        self.slots.set_budget(bytes);
    }

    /// Returns the statistics of the cache.
    pub fn statistics(&self) -> CacheStatistics {
        self.slots.statistics()
    }

    fn slice_bytes(&self) -> usize {
        self.format.geometry.slice_bytes() as usize
    }

    /// The L1 index of the table that a slice is part of.
    pub fn l1_index(&self, slice: u64) -> u64 {
        slice / self.format.geometry.slices_per_table()
    }

    /// Entries of the L1 table, decoded on use.
    pub fn l1(&self) -> &[u64] {
        &self.l1
    }

    /// Replaces L1 when the disk has been resized; entries keep their index.
    pub fn set_l1(&mut self, l1: Vec<u64>) {
        self.direct.forget_all();
        self.l1 = l1;
    }

    /// The table at an L1 index.
    pub fn table(&self, l1_index: u64) -> Result<Option<TableRef>, EntryError> {
        let entry = self.l1.get(l1_index as usize).copied().unwrap_or(0);
        self.format.decode_l1(entry)
    }

    /// Makes L1 refer to a table that write-back has yet to write.
    pub fn set_table(&mut self, l1_index: u64, table: NewTable) {
        let reference = TableRef {
            offset: table.offset,
            copied: true,
        };
        self.l1[l1_index as usize] = reference.encode();
        self.l1_dirty.insert(l1_index);
        self.new_tables.insert(l1_index, table);
    }

    /// Makes L1 refer to these tables no longer, which the next cycle writes, and returns those
    /// that it did refer to. Nothing of them is written; slices in use stay.
    pub fn drop_tables(&mut self, l1_indices: &[u64]) -> Vec<TableRef> {
        self.direct.forget_all();
        let mut gone = BTreeSet::new();
        let mut dropped = Vec::new();
        for &index in l1_indices {
            let per_table = self.format.geometry.slices_per_table();
            let slices = index * per_table..(index + 1) * per_table;
            let is_quiet = !self.new_tables.contains_key(&index)
                && self.loading.range(slices.clone()).next().is_none()
                && slices.clone().all(|slice| self.slots.may_go(slice));
            if let (Ok(Some(table)), true) = (self.table(index), is_quiet) {
                self.l1[index as usize] = 0;
                self.l1_dirty.insert(index);
                gone.insert(index);
                dropped.push(table);
            }
        }
        let per_table = self.format.geometry.slices_per_table();
        self.slots
            .forget(|slice| gone.contains(&(slice / per_table)));
        self.freed.wake();
        dropped
    }

    /// Returns whether no entry of a slice in memory refers to space: all of it is unallocated, or
    /// zeroes.
    pub fn maps_nothing(&self, slice: u64) -> bool {
        let entries = 0..self.format.geometry.slice_entries() as usize;
        let mut words = entries.map(|entry| self.slots.words(slice, entry));
        words.all(|(word, bitmap)| match self.format.decode_l2(word, bitmap) {
            Ok(L2Entry::Standard(entry)) => entry.host.is_none() && entry.allocated == 0,
            Ok(L2Entry::Compressed(_)) | Err(_) => false,
        })
    }

    /// Finds out what a slice needs, and reserves a slot if it has to be loaded.
    pub fn prepare(&mut self, slice: u64) -> Result<Prepared, EntryError> {
        if self.slots.look(slice) {
            return Ok(Prepared::Ready);
        }
        if let Some(waiters) = self.loading.get_mut(&slice) {
            return Ok(Prepared::Wait(waiters.wait()));
        }
        let l1_index = self.l1_index(slice);
        let Some(table) = self.table(l1_index)? else {
            return Ok(Prepared::NoTable);
        };
        if !self.slots.make_room(self.loading.len() as u64 + 1) {
            let dirty = !self.dirty.is_empty();
            return Ok(Prepared::Full {
                dirty,
                freed: self.freed.wait(),
            });
        }
        let on_disk = self
            .new_tables
            .get(&l1_index)
            .map_or(OnDisk::Table, |table| table.on_disk);
        if on_disk != OnDisk::Table {
            let bytes = vec![0; self.slice_bytes()].into_boxed_slice();
            self.slots.insert(slice, bytes);
            return Ok(Prepared::Ready);
        }
        self.loading.insert(slice, Waiters::default());
        Ok(Prepared::Load(self.slice_offset(table.offset, slice)))
    }

    /// Returns whether what is not cached of a table is zeroes, since it is not on disk yet.
    pub fn is_in_memory(&self, l1_index: u64) -> bool {
        self.new_tables
            .get(&l1_index)
            .is_some_and(|table| table.on_disk != OnDisk::Table)
    }

    /// Returns whether a slice is pinned or being loaded.
    pub fn is_in_use(&self) -> bool {
        !self.loading.is_empty() || self.slots.is_any_pinned()
    }

    /// Resolves when a slice may be in use no longer.
    pub fn wait_for_use(&mut self) -> Pending<()> {
        self.freed.wait()
    }

    /// The tables that this L1 refers to, in place of those that there were.
    ///
    /// # Panics
    /// If something is in use or dirty: it would be lost.
    pub fn replace(&mut self, l1: Vec<u64>) {
        assert!(!self.is_in_use(), "nobody looks at a table that goes");
        self.direct.forget_all();
        let dirty = self.dirty.len() + self.l1_dirty.len() + self.new_tables.len();
        assert_eq!(dirty, 0, "all tables are written");
        self.slots.clear();
        self.l1 = l1;
    }

    /// Notes that a slice is looked at; whether it is in memory.
    pub fn look(&mut self, slice: u64) -> bool {
        self.slots.look(slice)
    }

    fn slice_offset(&self, table: HostOffset, slice: u64) -> HostOffset {
        let geometry = &self.format.geometry;
        table.plus(slice % geometry.slices_per_table() * geometry.slice_bytes())
    }

    /// Ends a load; `None` if it failed.
    pub fn loaded(&mut self, slice: u64, bytes: Option<&[u8]>) {
        if let Some(bytes) = bytes {
            self.slots.insert(slice, bytes.into());
        }
        if let Some(mut waiters) = self.loading.remove(&slice) {
            waiters.wake();
        }
        if bytes.is_none() {
            self.freed.wake();
        }
    }

    /// Slices evicted so far.
    pub fn evicted(&self) -> usize {
        self.slots.statistics().evicted as usize
    }

    /// Keeps a slice in memory until it is unpinned.
    pub fn pin(&mut self, slice: u64) {
        self.slots.slot_mut(slice).pins += 1;
    }

    /// Ends a pin: the slice may be evicted when it has no other.
    pub fn unpin(&mut self, slice: u64) {
        let slot = self.slots.slot_mut(slice);
        slot.pins -= 1;
        if slot.pins == 0 && !self.freed.is_empty() {
            self.freed.wake();
        }
    }

    /// Lets slices of a range go that nobody uses.
    pub fn release(&mut self, slices: Range<u64>) {
        self.slots.release(slices);
    }

    /// The entry of a cluster whose slice is in memory.
    pub fn entry(&self, cluster: GuestCluster) -> Result<L2Entry, EntryError> {
        let geometry = &self.format.geometry;
        let slice = geometry.slice_of(cluster);
        let entry = (cluster.0 % geometry.slice_entries()) as usize;
        let (word, bitmap) = self.slots.words(slice, entry);
        self.format.decode_l2(word, bitmap)
    }

    /// Changes the entry of a cluster whose slice is pinned or was prepared under this lock.
    pub fn set_entry(&mut self, cluster: GuestCluster, entry: &L2Entry, promise: WriteOrdering) {
        self.direct.forget(cluster);
        let geometry = self.format.geometry;
        let slice = geometry.slice_of(cluster);
        let at = ((cluster.0 % geometry.slice_entries()) * geometry.l2_entry_bytes()) as usize;
        let (word, bitmap) = self.format.encode_l2(entry);
        let bytes = self.slots.bytes_mut(slice);
        bytes[at..at + 8].copy_from_slice(&word.to_be_bytes());
        if geometry.extended_l2() {
            bytes[at + 8..at + 16].copy_from_slice(&bitmap.to_be_bytes());
        }
        self.slots.slot_mut(slice).dirty = true;
        self.dirty.insert(slice);
        self.promises_bytes |= promise == WriteOrdering::Bytes;
    }

    /// Returns where an entry is on disk, for messages.
    pub fn entry_offset(&self, cluster: GuestCluster) -> u64 {
        let geometry = &self.format.geometry;
        let table = self.table(geometry.l1_index(cluster)).ok().flatten();
        table.map_or(0, |table| {
            table.offset.0 + geometry.l2_index(cluster) * geometry.l2_entry_bytes()
        })
    }

    /// Returns whether all that leads to a slice's entries, and they themselves, are durable.
    pub fn is_durable(&self, slice: u64) -> bool {
        let l1_index = self.l1_index(slice);
        let slot = self.slots.slot(slice);
        !slot.dirty
            && !slot.writing
            && !self.new_tables.contains_key(&l1_index)
            && !self.l1_dirty.contains(&l1_index)
            && !self.l1_writing.contains(&l1_index)
    }

    /// Returns whether more than half of the cache's slices are dirty, so that a cycle should clean
    /// them before evictions have to wait for it.
    pub fn wants_writeback(&self) -> bool {
        self.dirty.len() as u64 > self.slots.capacity() / 2
    }

    /// Returns whether entries have changed that no cut has.
    pub fn has_dirty(&self) -> bool {
        !(self.dirty.is_empty() && self.l1_dirty.is_empty() && self.new_tables.is_empty())
    }

    /// Copies all that is dirty, for one write-back cycle.
    pub fn cut(&mut self) -> CycleTables {
        let mut cut = CycleTables::default();
        for slice in std::mem::take(&mut self.dirty) {
            let l1_index = self.l1_index(slice);
            let table = self
                .table(l1_index)
                .ok()
                .flatten()
                .expect("a dirty slice has a table");
            let offset = self.slice_offset(table.offset, slice);
            let is_new = self.new_tables.contains_key(&l1_index);
            let copy = SliceCopy {
                slice,
                offset,
                bytes: Buf::copy_of(self.slots.bytes_mut(slice)),
            };
            let slot = self.slots.slot_mut(slice);
            slot.dirty = false;
            slot.writing = true;
            if is_new {
                cut.new_slices.push(copy)
            } else {
                cut.slices.push(copy)
            }
        }
        cut.promises_bytes = std::mem::take(&mut self.promises_bytes);
        cut.new_tables = self
            .new_tables
            .iter()
            .map(|(&index, &table)| (index, table))
            .collect();
        self.l1_writing = std::mem::take(&mut self.l1_dirty);
        cut.l1 = self
            .l1_writing
            .iter()
            .map(|&index| (index, self.l1[index as usize]))
            .collect();
        cut
    }

    /// Ends a cycle: its cut is durable.
    pub fn cut_is_durable(&mut self, cut: &CycleTables) {
        for copy in cut.slices.iter().chain(&cut.new_slices) {
            self.slots.is_written(copy.slice);
        }
        for (index, _) in &cut.new_tables {
            self.new_tables.remove(index);
        }
        self.l1_writing.clear();
        self.freed.wake();
    }

    /// Ends a cycle that failed: its cut is dirty again. Where slices of new tables may have
    /// been written, the space is no longer known to be zero; where entries of L1 may have been,
    /// `reached`, the tables are no longer new, and their unwritten slices are zeroes.
    pub fn cut_failed(&mut self, cut: &CycleTables, reached: bool) {
        self.promises_bytes = true;
        for copy in cut.slices.iter().chain(&cut.new_slices) {
            let slot = self.slots.slot_mut(copy.slice);
            slot.writing = false;
            slot.dirty = true;
            self.dirty.insert(copy.slice);
        }
        for (index, _) in &cut.new_tables {
            if reached {
                self.new_tables.remove(index);
            } else if let Some(table) = self.new_tables.get_mut(index)
                && table.on_disk == OnDisk::Zeroes
            {
                table.on_disk = OnDisk::Unknown;
            }
        }
        self.l1_dirty.append(&mut self.l1_writing);
        self.freed.wake();
    }
}

#[cfg(test)]
mod tests;
