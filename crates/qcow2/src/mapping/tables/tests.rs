//! Random operations on a cache of four slots against a map of all entries and a disk of bytes.

use std::collections::BTreeMap;

use super::*;
use crate::entry::Standard;
use crate::geometry::Geometry;
use crate::random::Random;

/// L1 entries at first, and at most.
const TABLES: u64 = 6;
const TABLES_MAX: u64 = 8;

/// A cycle under way: what it took, and all entries as they were.
struct Cycle {
    cut: CycleTables,
    entries: BTreeMap<u64, L2Entry>,
    slices: BTreeSet<u64>,
}

/// The expected state.
struct Model {
    format: EntryFormat,
    random: Random,
    tables: Tables,
    /// All entries that are not unallocated, by guest cluster.
    entries: BTreeMap<u64, L2Entry>,
    /// The image file, tables only, and L1 as it is in it.
    disk: Vec<u8>,
    disk_l1: Vec<u64>,
    pins: BTreeMap<u64, u32>,
    dirty: BTreeSet<u64>,
    /// Tables that no cycle has made durable, and which of them cycles under way have taken.
    new_tables: BTreeMap<u64, OnDisk>,
    /// Tables that L1 on disk may refer to, after a failure.
    reached: BTreeSet<u64>,
    /// Some entry that is dirty promises bytes.
    promises_bytes: bool,
    loading: BTreeMap<u64, (Vec<u8>, Vec<Pending<()>>)>,
    cycle: Option<Cycle>,
    wait_for_cycle: Vec<Pending<()>>,
    seen: BTreeMap<&'static str, u32>,
}

impl Model {
    fn new(bits: u32, extended: bool, seed: u64) -> Model {
        let format = EntryFormat {
            geometry: Geometry::new(bits, 4, extended).unwrap(),
            version: 3,
            data_file: false,
        };
        let mut model = Model {
            format,
            random: Random(seed),
            tables: Tables::new(format, Vec::new()),
            entries: BTreeMap::new(),
            // Unwritten space may hold anything.
            disk: vec![0xa5; 64 << bits],
            disk_l1: Vec::new(),
            pins: BTreeMap::new(),
            dirty: BTreeSet::new(),
            new_tables: BTreeMap::new(),
            reached: BTreeSet::new(),
            promises_bytes: false,
            loading: BTreeMap::new(),
            cycle: None,
            wait_for_cycle: Vec::new(),
            seen: BTreeMap::new(),
        };
        // A third of the tables does not exist, a third is shared with a snapshot, a third is ours.
        for index in 0..TABLES {
            let offset = HostOffset((index + 1) << bits);
            let copied = index % 3 == 2;
            let entry = TableRef { offset, copied }.encode();
            model.disk_l1.push(if index % 3 == 0 { 0 } else { entry });
            if index % 3 == 0 {
                continue;
            }
            model.disk[(offset.0) as usize..][..1 << bits].fill(0);
            for entry in 0..model.format.geometry.l2_entries() {
                if model.random.below(3) == 0 {
                    let cluster = index * model.format.geometry.l2_entries() + entry;
                    let entry = model.random_entry();
                    model.entries.insert(cluster, entry);
                }
            }
            for slice in 0..model.format.geometry.slices_per_table() {
                let slice = index * model.format.geometry.slices_per_table() + slice;
                let bytes = encoded(&model.format, &model.entries, slice);
                let at = model.slice_at(offset.0, slice);
                model.disk[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        model.tables = Tables::new(format, model.disk_l1.clone());
        model
    }

    fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn random_entry(&mut self) -> L2Entry {
        let geometry = &self.format.geometry;
        let host = Some(HostOffset(
            (1 + self.random.below(1 << 20)) << geometry.cluster_bits(),
        ));
        let zeroes = self.random.next() as u32 & geometry.all_subclusters();
        L2Entry::Standard(match self.random.below(4) {
            0 => Standard::UNALLOCATED,
            1 => Standard {
                zeroes: geometry.all_subclusters(),
                ..Standard::UNALLOCATED
            },
            _ => Standard {
                host,
                copied: true,
                allocated: !zeroes & geometry.all_subclusters(),
                zeroes,
            },
        })
    }

    fn slice_at(&self, table: u64, slice: u64) -> usize {
        let geometry = &self.format.geometry;
        let within = slice % geometry.slices_per_table();
        (table + within * geometry.slice_bytes()) as usize
    }

    fn slices(&self) -> u64 {
        self.tables.l1().len() as u64 * self.format.geometry.slices_per_table()
    }

    fn any_slice(&mut self) -> u64 {
        let end = self.slices();
        self.random.below(end)
    }

    fn is_writing(&self, slice: u64) -> bool {
        self.cycle
            .as_ref()
            .is_some_and(|cycle| cycle.slices.contains(&slice))
    }

    fn may_be_evicted(&self, slice: u64) -> bool {
        !self.pins.contains_key(&slice) && !self.dirty.contains(&slice) && !self.is_writing(slice)
    }

    fn cached(&self) -> Vec<u64> {
        (0..self.slices())
            .filter(|&slice| self.tables.slots.contains(slice))
            .collect()
    }

    fn table(&self, slice: u64) -> Option<TableRef> {
        let index = slice / self.format.geometry.slices_per_table();
        self.tables.table(index).unwrap()
    }

    /// Returns the bytes that slices take, including those being loaded and `more` others.
    fn reserved_bytes(&self, more: u64) -> u64 {
        let whole = self.format.geometry.slice_bytes() + slots::SLOT_BYTES;
        self.tables.statistics().used_bytes + (self.loading.len() as u64 + more) * whole
    }

    fn prepare(&mut self) {
        let slice = self.any_slice();
        let before = self.cached();
        let index = slice / self.format.geometry.slices_per_table();
        match self.tables.prepare(slice).unwrap() {
            Prepared::Ready if before.contains(&slice) => self.count("hit"),
            Prepared::Ready => {
                let on_disk = self.new_tables.get(&index);
                assert!(matches!(on_disk, Some(OnDisk::Zeroes | OnDisk::Unknown)));
                self.count("made");
            }
            Prepared::NoTable => {
                assert!(self.table(slice).is_none());
                self.count("no table");
            }
            Prepared::Load(offset) => {
                let table = self.table(slice).unwrap();
                assert_eq!(offset.0 as usize, self.slice_at(table.offset.0, slice));
                let len = self.format.geometry.slice_bytes() as usize;
                let bytes = self.disk[offset.0 as usize..][..len].to_vec();
                assert!(self.loading.insert(slice, (bytes, Vec::new())).is_none());
                self.count("load");
            }
            Prepared::Wait(waiting) => {
                self.loading.get_mut(&slice).unwrap().1.push(waiting);
                self.count("wait");
            }
            Prepared::Full { dirty, freed } => {
                assert!(self.reserved_bytes(1) > self.tables.statistics().budget_bytes);
                let left = self.cached();
                assert!(left.iter().all(|&slice| !self.may_be_evicted(slice)));
                assert_eq!(dirty, !self.dirty.is_empty());
                self.wait_for_cycle.push(freed);
                self.count("full");
            }
        }
        let after = self.cached();
        let mut gone = before.iter().filter(|slice| !after.contains(slice));
        assert!(gone.all(|&slice| self.may_be_evicted(slice)));
        if after.len() > before.len() {
            let statistics = self.tables.statistics();
            assert!(self.reserved_bytes(0) <= statistics.budget_bytes);
        }
    }

    /// Ends a load, well or badly.
    fn load(&mut self) {
        let Some((slice, (bytes, waiting))) = self.loading.pop_first() else {
            return;
        };
        let failed = self.random.below(4) == 0;
        self.tables.loaded(slice, (!failed).then_some(&bytes[..]));
        assert_eq!(self.tables.slots.contains(slice), !failed);
        assert!(waiting.iter().all(Pending::has_value));
    }

    fn pin_or_unpin(&mut self) {
        let cached = self.cached();
        if cached.is_empty() {
            return;
        }
        let slice = cached[self.random.below(cached.len() as u64) as usize];
        match self.pins.get_mut(&slice) {
            Some(pins) if self.random.below(4) != 0 => {
                *pins -= 1;
                if *pins == 0 {
                    self.pins.remove(&slice);
                }
                self.tables.unpin(slice);
            }
            _ => {
                *self.pins.entry(slice).or_default() += 1;
                self.tables.pin(slice);
            }
        }
    }

    /// Makes L1 refer to a table of our own, as admission and unsharing do.
    fn set_table(&mut self) {
        let index = self.random.below(self.tables.l1().len() as u64);
        let bits = self.format.geometry.cluster_bits();
        let cluster = 16 + 2 * index + self.random.below(2);
        let offset = HostOffset(cluster << bits);
        let on_disk = match self.tables.table(index).unwrap() {
            Some(TableRef { copied: true, .. }) => return,
            Some(table) => {
                let old = table.offset.0 as usize;
                self.disk
                    .copy_within(old..old + (1 << bits), offset.0 as usize);
                OnDisk::Table
            }
            None if self.random.below(4) != 0 => {
                self.disk[offset.0 as usize..][..1 << bits].fill(0);
                OnDisk::Zeroes
            }
            None => OnDisk::Unknown,
        };
        self.tables.set_table(index, NewTable { offset, on_disk });
        self.new_tables.insert(index, on_disk);
        self.count("new table");
    }

    fn set_entry(&mut self) {
        let cached = self.cached();
        let own = |slice: &u64| self.table(*slice).is_some_and(|table| table.copied);
        let own: Vec<u64> = cached.into_iter().filter(own).collect();
        if own.is_empty() {
            return;
        }
        let slice = own[self.random.below(own.len() as u64) as usize];
        let entries = self.format.geometry.slice_entries();
        let cluster = slice * entries + self.random.below(entries);
        let entry = self.random_entry();
        let promise = match self.random.below(64) {
            0 => WriteOrdering::Bytes,
            _ => WriteOrdering::Nothing,
        };
        self.tables
            .set_entry(GuestCluster(cluster), &entry, promise);
        self.promises_bytes |= promise == WriteOrdering::Bytes;
        self.entries.insert(cluster, entry);
        self.dirty.insert(slice);
    }

    fn cut(&mut self) {
        if self.cycle.is_some() {
            return;
        }
        let cut = self.tables.cut();
        let slices = std::mem::take(&mut self.dirty);
        let copies = cut.slices.iter().chain(&cut.new_slices);
        let mut cut_slices: Vec<u64> = copies.clone().map(|copy| copy.slice).collect();
        cut_slices.sort_unstable();
        assert!(cut_slices.iter().eq(&slices), "what is dirty is cut, once");
        for copy in copies {
            let table = self.table(copy.slice).unwrap();
            let at = self.slice_at(table.offset.0, copy.slice);
            assert_eq!(copy.offset.0 as usize, at);
            assert!(copy.bytes[..] == encoded(&self.format, &self.entries, copy.slice)[..]);
        }
        let is_new = |copy: &SliceCopy| {
            let index = copy.slice / self.format.geometry.slices_per_table();
            self.new_tables.contains_key(&index)
        };
        assert!(cut.new_slices.iter().all(is_new));
        assert!(!cut.slices.iter().any(is_new));
        let new_tables = cut.new_tables.iter();
        let new_tables = new_tables.map(|(index, table)| (index, &table.on_disk));
        assert!(new_tables.eq(&self.new_tables));
        // L1 changes when there is a new table, or one that it may refer to already, and only then.
        let mut changed: BTreeSet<u64> = std::mem::take(&mut self.reached);
        changed.extend(self.new_tables.keys());
        assert!(cut.l1.keys().eq(&changed));
        assert_eq!(cut.promises_bytes, std::mem::take(&mut self.promises_bytes));
        for (&index, &entry) in &cut.l1 {
            assert_eq!(entry, self.tables.l1()[index as usize]);
        }
        self.cycle = Some(Cycle {
            cut,
            entries: self.entries.clone(),
            slices,
        });
    }

    /// Writes what a cycle writes, in its order, up to `writes` writes; whether L1 was among them.
    fn write(&mut self, cut: &CycleTables, writes: u64) -> bool {
        let table_bytes = self.format.geometry.cluster_bytes() as usize;
        let unknown = cut.new_tables.iter();
        let unknown = unknown.filter(|(_, table)| table.on_disk == OnDisk::Unknown);
        let zeroes = unknown.map(|(_, table)| (table.offset.0, vec![0; table_bytes]));
        let copies = cut.new_slices.iter().chain(&cut.slices);
        let copies = copies.map(|copy| (copy.offset.0, copy.bytes.to_vec()));
        let all: Vec<_> = zeroes.chain(copies).collect();
        for (offset, bytes) in all.iter().take(writes as usize) {
            self.disk[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        let left = writes.saturating_sub(all.len() as u64);
        for (&index, &entry) in cut.l1.iter().take(left as usize) {
            self.disk_l1.resize(self.tables.l1().len(), 0);
            self.disk_l1[index as usize] = entry;
        }
        left > 0
    }

    fn end_cycle(&mut self) {
        let Some(cycle) = self.cycle.take() else {
            return;
        };
        if self.random.below(3) == 0 {
            let writes = self.random.below(16);
            let reached = self.write(&cycle.cut, writes);
            self.tables.cut_failed(&cycle.cut, reached);
            self.promises_bytes = true;
            self.dirty.extend(cycle.slices);
            if reached {
                self.reached.extend(cycle.cut.l1.keys());
                for (index, _) in &cycle.cut.new_tables {
                    self.new_tables.remove(index);
                    self.count("reached table");
                }
                return self.cycle_has_ended("failed cycle");
            }
            self.reached.extend(cycle.cut.l1.keys());
            for (index, _) in &cycle.cut.new_tables {
                self.reached.remove(index);
            }
            for (index, _) in &cycle.cut.new_tables {
                let on_disk = self.new_tables.get_mut(index).unwrap();
                if *on_disk == OnDisk::Zeroes {
                    *on_disk = OnDisk::Unknown;
                }
            }
            self.cycle_has_ended("failed cycle");
        } else {
            self.write(&cycle.cut, u64::MAX);
            self.tables.cut_is_durable(&cycle.cut);
            for (index, _) in &cycle.cut.new_tables {
                self.new_tables.remove(index);
            }
            self.assert_on_disk(&cycle.entries);
            self.cycle_has_ended("durable cycle");
        }
    }

    fn cycle_has_ended(&mut self, how: &'static str) {
        self.count(how);
        assert!(self.wait_for_cycle.drain(..).all(|freed| freed.has_value()));
    }

    /// Asserts that an image opened now has these entries.
    fn assert_on_disk(&self, entries: &BTreeMap<u64, L2Entry>) {
        let geometry = &self.format.geometry;
        for slice in 0..self.slices() {
            let index = slice / geometry.slices_per_table();
            let expected = encoded(&self.format, entries, slice);
            let l1 = self.disk_l1.get(index as usize).copied().unwrap_or(0);
            match self.format.decode_l1(l1).unwrap() {
                Some(table) => {
                    let at = self.slice_at(table.offset.0, slice);
                    assert!(self.disk[at..at + expected.len()] == expected[..]);
                }
                None => assert!(expected.iter().all(|&byte| byte == 0)),
            }
        }
    }

    fn grow(&mut self) {
        let mut l1 = self.tables.l1().to_vec();
        if l1.len() < TABLES_MAX as usize {
            l1.push(0);
            self.tables.set_l1(l1);
        }
    }

    /// Asserts that reads return the entries that were set, and that pinned slices are there.
    fn assert_sound(&mut self) {
        let cached = self.cached();
        assert_eq!(self.tables.statistics().slices, cached.len() as u64);
        for slice in 0..self.slices() {
            assert!(cached.contains(&slice) || self.may_be_evicted(slice));
        }
        let entries = self.format.geometry.slice_entries();
        for slice in cached {
            for _ in 0..8 {
                let cluster = slice * entries + self.random.below(entries);
                let read = self.tables.entry(GuestCluster(cluster)).unwrap();
                assert_eq!(read, entry(&self.entries, cluster));
            }
            let index = slice / self.format.geometry.slices_per_table();
            let settled = !self.dirty.contains(&slice)
                && !self.is_writing(slice)
                && !self.new_tables.contains_key(&index)
                && !self.reached.contains(&index)
                && (self.cycle.iter()).all(|cycle| !cycle.cut.l1.contains_key(&index));
            assert_eq!(self.tables.is_durable(slice), settled);
            let on_disk = self.new_tables.get(&index);
            let in_memory = on_disk.is_some_and(|&on_disk| on_disk != OnDisk::Table);
            assert_eq!(self.tables.is_in_memory(index), in_memory);
        }
        if self.tables.statistics().packed > 0 {
            self.count("packed");
        }
        let wants = self.dirty.len() > Tables::SLOTS_MIN / 2;
        assert_eq!(self.tables.wants_writeback(), wants);
    }
}

fn entry(entries: &BTreeMap<u64, L2Entry>, cluster: u64) -> L2Entry {
    let unallocated = L2Entry::Standard(Standard::UNALLOCATED);
    entries.get(&cluster).copied().unwrap_or(unallocated)
}

/// A slice as it is on disk.
fn encoded(format: &EntryFormat, entries: &BTreeMap<u64, L2Entry>, slice: u64) -> Vec<u8> {
    let count = format.geometry.slice_entries();
    let mut bytes = Vec::new();
    for cluster in slice * count..(slice + 1) * count {
        let (word, bitmap) = format.encode_l2(&entry(entries, cluster));
        bytes.extend(word.to_be_bytes());
        if format.geometry.extended_l2() {
            bytes.extend(bitmap.to_be_bytes());
        }
    }
    bytes
}

#[test]
fn a_small_cache_agrees_with_a_map_of_all_entries() {
    for (bits, extended) in [(13, false), (14, true), (12, false)] {
        let mut seen: BTreeMap<&'static str, u32> = BTreeMap::new();
        for seed in 1..=80 {
            let mut model = Model::new(bits, extended, 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed));
            for _ in 0..400 {
                match model.random.below(32) {
                    0 => model.set_table(),
                    1 => model.cut(),
                    2 => model.end_cycle(),
                    3 if model.random.below(8) == 0 => model.grow(),
                    3..=12 => model.set_entry(),
                    13..=17 => model.pin_or_unpin(),
                    18..=24 => model.load(),
                    _ => model.prepare(),
                }
                model.assert_sound();
            }
            loop {
                model.end_cycle();
                let l1_is_clean = model.new_tables.is_empty() && model.reached.is_empty();
                if model.dirty.is_empty() && l1_is_clean {
                    break;
                }
                model.cut();
            }
            let entries = model.entries.clone();
            model.assert_on_disk(&entries);
            for (what, count) in model.seen {
                *seen.entry(what).or_default() += count;
            }
        }
        // The walk goes everywhere.
        for what in [
            "hit",
            "made",
            "no table",
            "load",
            "wait",
            "full",
            "new table",
            "failed cycle",
            "reached table",
            "durable cycle",
            "packed",
        ] {
            assert!(
                seen.get(what).is_some_and(|&count| count > 10),
                "{what}: {seen:?}"
            );
        }
    }
}

#[test]
fn a_disk_of_no_bytes_has_a_share_of_the_budget() {
    let geometry = Geometry::new(16, 4, false).unwrap();
    let format = EntryFormat {
        geometry,
        version: 3,
        data_file: false,
    };
    let tables = Tables::new(format, Vec::new());
    assert!(tables.bytes_wanted(true) > 0);
}

/// Entries may go down beside what they refer to only if no crash can show anything else there than
/// zeroes or what is being written.
#[test]
fn a_cut_is_ordered_by_promises_and_by_tables_on_used_space() {
    let table = |on_disk| {
        let offset = HostOffset(1 << 16);
        (3, NewTable { offset, on_disk })
    };
    let cut = |promises_bytes, on_disk: &[OnDisk]| CycleTables {
        new_tables: on_disk.iter().copied().map(table).collect(),
        promises_bytes,
        ..CycleTables::default()
    };
    use OnDisk::{Table, Unknown, Zeroes};
    assert!(!cut(false, &[]).is_ordered());
    assert!(!cut(false, &[Zeroes, Zeroes]).is_ordered());
    assert!(cut(true, &[]).is_ordered());
    assert!(cut(true, &[Zeroes]).is_ordered());
    for used in [Unknown, Table] {
        assert!(cut(false, &[used]).is_ordered(), "{used:?}");
        assert!(cut(false, &[Zeroes, used]).is_ordered(), "{used:?}");
        assert!(cut(false, &[used, Zeroes]).is_ordered(), "{used:?}");
    }
}
