//! The knowledge of an image: which structure has which space, and how often each cluster is
//! referenced once the broken entries are corrected. No I/O.

use std::collections::{BTreeMap, HashMap};

use super::snapshot_entry::Snapshot;
use super::step::{Change, Step};
use crate::check::Structure;
use crate::check::counts::{Copied, Counts, Memory, OutOfMemory};
use crate::check::reader::read_bytes_max;
use crate::entry::EntryFormat;
use crate::entry::mend::Mend;
use crate::geometry::Geometry;
use crate::header::{CryptMethod, Header};
use crate::{Error, Result};

/// More host clusters than this are not repaired, as they are not checked.
const CLUSTERS_MAX: u64 = i32::MAX as u64;
/// Memory of an L2 table, or of an owned cluster, in its collections.
const TABLE_MEMORY_BYTES: u64 = 160;
const OWNED_MEMORY_BYTES: u64 = 64;

/// Whose L1 table it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The L1 table of the disk.
    Active,
    /// That of the snapshot with this position in the list.
    Snapshot(usize),
}

/// An L1 table that the repair walks.
#[derive(Clone, Debug)]
pub(super) struct L1 {
    pub offset: u64,
    pub entries: u64,
    pub owner: Owner,
    /// Something else has its place, which is left to that.
    pub shared: bool,
    /// It moves, so it is changed in its copy only; where, once that is known.
    pub moves: Option<u64>,
    /// Changes of a table that is changed in its copy only.
    pub changes: Vec<Change>,
}

impl L1 {
    pub fn bytes(&self) -> u64 {
        self.entries * 8
    }
}

/// An L2 table that the repair walks.
#[derive(Clone, Copy, Debug)]
pub(super) struct L2Table {
    pub offset: u64,
    /// Entries of the active L1 table that point to it, and of snapshots'.
    pub active: u64,
    pub snapshots: u64,
    /// The first L1 entry that points to it.
    pub l1_index: u64,
}

impl L2Table {
    pub fn times(&self) -> u64 {
        self.active + self.snapshots
    }
}

/// An L1 entry that may have meant the table at `candidate`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LostTable {
    /// The L1 table's position in the list, and the entry's index in it.
    pub l1: usize,
    pub index: u64,
    pub entry: u64,
    pub mend: Mend,
}

/// An L2 entry that may have meant the cluster at `candidate`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LostCluster {
    pub table: L2Table,
    pub l2_index: u64,
    pub entry: u64,
    pub bitmap: u64,
    pub mend: Mend,
}

/// Guest data that gets space of its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    /// Offset of the L2 entry in the file.
    pub at: u64,
    pub entry: u64,
    pub from: u64,
    pub bytes: u64,
    pub times: u64,
    pub active: bool,
    pub structure: Option<Structure>,
    /// The entry once it refers to the copy, and the copy's place.
    pub new_entry: u64,
    pub to: u64,
}

impl Copy {
    pub fn step(&self) -> Step {
        Step::Copy {
            change: Change {
                at: self.at,
                from: self.entry,
                to: self.new_entry,
            },
            bytes: self.bytes,
            structure: self.structure,
        }
    }
}

/// Tables, references and counts of an image under repair.
pub(super) struct Survey {
    pub format: EntryFormat,
    pub geometry: Geometry,
    pub file_bytes: u64,
    /// Data may be decoded by its place in the file: it is not copied.
    pub encrypted: bool,
    pub memory: Memory,
    /// References as they will be.
    pub counts: Counts,
    owners: HashMap<u64, Structure>,
    /// Host clusters to count: those of the file, and what sticks out of it.
    pub clusters: u64,
    pub l1s: Vec<L1>,
    /// Bytes of L1 tables that may still be read: a hostile image lets them overlap.
    l1_bytes_left: u64,
    pub tables: Vec<L2Table>,
    by_offset: HashMap<u64, u32>,
    pub snapshots: Vec<Snapshot>,
    /// New offset of the snapshot table, once it is known, if the table is rewritten.
    pub moves_snapshots: Option<u64>,
    pub snapshots_bytes: u64,
    /// The clusters of bitmaps' data, until they are counted.
    pub bitmap_data: Vec<u64>,
    pub lost_tables: Vec<LostTable>,
    pub lost_clusters: Vec<LostCluster>,
    /// Words of tables that change in stage A.
    pub changes: Vec<Change>,
    pub copies: Vec<Copy>,
    /// L2 tables that leave their place to guest data, and where they go.
    pub moved_tables: BTreeMap<u64, u64>,
    /// Entries that refer to them, and will refer to the new place.
    pub relinks: Vec<Change>,
    /// References that metadata drops by moving, already counted.
    given_up: HashMap<u64, u64>,
    /// An entry of a data file lacks COPIED.
    pub copied_missing: bool,
    file_name: String,
}

impl Survey {
    pub fn new(header: &Header, file_bytes: u64, memory: Memory, name: &str) -> Result<Survey> {
        let geometry = header.geometry();
        let clusters = geometry.clusters_for(file_bytes);
        if clusters > CLUSTERS_MAX {
            return Err(Error::Unsupported {
                file: name.to_string(),
                feature: format!("repairing a file of {clusters} clusters (2^31 at most)").into(),
            });
        }
        Ok(Survey {
            format: header.entry_format(),
            geometry,
            file_bytes,
            encrypted: header.crypt_method != CryptMethod::None,
            memory,
            counts: Counts::new(geometry.refcount_max()),
            owners: HashMap::new(),
            clusters,
            l1s: Vec::new(),
            l1_bytes_left: read_bytes_max(file_bytes),
            tables: Vec::new(),
            by_offset: HashMap::new(),
            snapshots: Vec::new(),
            moves_snapshots: None,
            snapshots_bytes: 0,
            bitmap_data: Vec::new(),
            lost_tables: Vec::new(),
            lost_clusters: Vec::new(),
            changes: Vec::new(),
            copies: Vec::new(),
            moved_tables: BTreeMap::new(),
            relinks: Vec::new(),
            given_up: HashMap::new(),
            copied_missing: false,
            file_name: name.to_string(),
        })
    }

    pub fn charge(&mut self, bytes: u64) -> Result<()> {
        let charged = self.memory.charge(bytes);
        charged.map_err(|OutOfMemory| out_of_memory(&self.file_name))
    }

    /// Takes from what may be read of L1 tables, and written where they move.
    pub fn spend_on_l1(&mut self, bytes: u64) -> Result<()> {
        let left = self.l1_bytes_left.checked_sub(bytes);
        self.l1_bytes_left = left.ok_or_else(|| Error::Unsupported {
            file: self.file_name.clone(),
            feature: "repairing an image whose L1 tables lie over each other many times".into(),
        })?;
        Ok(())
    }

    pub fn clusters_of(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        let bits = self.geometry.cluster_bits();
        if len == 0 {
            return 0..0;
        }
        offset >> bits..((offset.saturating_add(len) - 1) >> bits) + 1
    }

    /// The metadata that a cluster holds.
    pub fn owner(&self, cluster: u64) -> Option<Structure> {
        self.owners.get(&cluster).copied()
    }

    /// All clusters that metadata has.
    pub fn owned_clusters(&self) -> impl Iterator<Item = u64> {
        self.owners.keys().copied()
    }

    /// Returns whether other metadata has a part of a range.
    pub fn is_owned(&self, offset: u64, len: u64) -> bool {
        self.clusters_of(offset, len)
            .any(|cluster| self.owners.contains_key(&cluster))
    }

    /// Gives the clusters of a range to a structure; no other has them.
    pub fn own(&mut self, offset: u64, len: u64, structure: Structure) -> Result<()> {
        let clusters = self.clusters_of(offset, len);
        self.charge((clusters.end - clusters.start) * OWNED_MEMORY_BYTES)?;
        for cluster in clusters {
            self.owners.insert(cluster, structure);
        }
        Ok(())
    }

    /// Counts the clusters of a range, `times` times each.
    pub fn count(&mut self, offset: u64, len: u64, times: u64, copied: Copied) -> Result<()> {
        for cluster in self.clusters_of(offset, len) {
            self.clusters = self.clusters.max(cluster + 1);
            // A reference that was dropped is counted still: the new one takes it over, also where
            // no further one could be counted.
            let mut more = times;
            if let Some(given_up) = self.given_up.get_mut(&cluster) {
                let taken = more.min(*given_up);
                *given_up -= taken;
                more -= taken;
            }
            let added = self.counts.add(cluster, more, copied, &mut self.memory);
            added.map_err(|OutOfMemory| out_of_memory(&self.file_name))?;
        }
        Ok(())
    }

    /// References to a cluster as they will be.
    pub fn references(&self, cluster: u64) -> u64 {
        let given_up = self.given_up.get(&cluster).copied().unwrap_or(0);
        self.counts.get(cluster).references - given_up
    }

    /// Takes the clusters of a range from the structure that has them: it moves.
    pub fn give_up(&mut self, offset: u64, len: u64, times: u64) {
        for cluster in self.clusters_of(offset, len) {
            self.owners.remove(&cluster);
            // No more than are counted: counts end where the image's do.
            let given_up = times.min(self.references(cluster));
            *self.given_up.entry(cluster).or_default() += given_up;
        }
    }

    /// Takes all clusters from the bitmaps: nothing counts for them any more.
    pub fn disown_bitmaps(&mut self) {
        self.bitmap_data = Vec::new();
        let owners = self.owners.iter();
        let bitmaps = owners.filter(|&(_, structure)| *structure == Structure::Bitmaps);
        for cluster in bitmaps.map(|(&cluster, _)| cluster).collect::<Vec<_>>() {
            self.give_up(cluster << self.geometry.cluster_bits(), 1, 1);
        }
    }

    /// Takes all clusters from the refcount structure: it moves. It is not counted yet.
    pub fn disown_refcounts(&mut self) {
        let moves = [Structure::RefcountTable, Structure::RefcountBlock];
        self.owners
            .retain(|_, structure| !moves.contains(structure));
    }

    /// The L2 table at an offset. Tables are sorted.
    pub fn table_at(&self, offset: u64) -> Option<L2Table> {
        let position = self
            .tables
            .binary_search_by_key(&offset, |table| table.offset);
        position.ok().map(|position| self.tables[position])
    }

    /// Takes the changes of a range out: it is changed in its copy only.
    pub fn take_changes(&mut self, offset: u64, len: u64) -> Vec<Change> {
        let range = offset..offset + len;
        let (taken, left) = std::mem::take(&mut self.changes)
            .into_iter()
            .partition(|change| range.contains(&change.at));
        self.changes = left;
        taken
    }

    /// Returns whether the refcounts of a range can count `times` more references.
    pub fn can_count(&self, offset: u64, len: u64, times: u64) -> bool {
        let room = |cluster| {
            self.references(cluster).saturating_add(times) <= self.geometry.refcount_max()
        };
        self.clusters_of(offset, len).all(room)
    }

    /// Owns and counts a structure that is where it should be.
    pub fn structure(&mut self, offset: u64, len: u64, structure: Structure) -> Result<()> {
        self.own(offset, len, structure)?;
        self.count(offset, len, 1, Copied::Ignored)
    }

    /// Returns whether another L1 entry has this table, where only one can: offsets in a data file
    /// are the guest's.
    pub fn is_of_another_entry(&self, offset: u64, l1_index: u64) -> bool {
        let known = self.by_offset.get(&offset);
        let first = known.map(|&position| self.tables[position as usize].l1_index);
        self.format.data_file && first.is_some_and(|first| first != l1_index)
    }

    /// Notes that an L1 entry points to an L2 table, which is where a table can be.
    pub fn note_table(
        &mut self,
        offset: u64,
        copied: bool,
        owner: Owner,
        l1_index: u64,
    ) -> Result<()> {
        let cluster_bytes = self.geometry.cluster_bytes();
        let seen = match (owner, copied) {
            (Owner::Snapshot(_), _) => Copied::Ignored,
            (Owner::Active, true) => Copied::Set,
            (Owner::Active, false) => Copied::Clear,
        };
        self.count(offset, cluster_bytes, 1, seen)?;
        let position = match self.by_offset.get(&offset) {
            Some(&position) => position as usize,
            None => {
                self.charge(TABLE_MEMORY_BYTES)?;
                self.own(offset, cluster_bytes, Structure::L2)?;
                let position = self.tables.len();
                let short = u32::try_from(position);
                let short = short.map_err(|_| out_of_memory(&self.file_name))?;
                self.by_offset.insert(offset, short);
                self.tables.push(L2Table {
                    offset,
                    active: 0,
                    snapshots: 0,
                    l1_index,
                });
                position
            }
        };
        match owner {
            Owner::Active => self.tables[position].active += 1,
            Owner::Snapshot(_) => self.tables[position].snapshots += 1,
        }
        Ok(())
    }

    /// Remembers that a word changes in stage A.
    pub fn change(&mut self, change: Change) -> Result<()> {
        if change.from != change.to {
            self.charge(2 * std::mem::size_of::<Change>() as u64)?;
            self.changes.push(change);
        }
        Ok(())
    }

    /// Changes and copies in the order of the file; of several changes of one word the last.
    pub fn sort_changes(&mut self) {
        self.changes.sort_by_key(|change| change.at);
        self.relinks.sort_by_key(|change| change.at);
        self.copies.sort_by_key(|copy| copy.at);
        self.changes.dedup_by(|later, earlier| {
            let same = later.at == earlier.at;
            if same {
                earlier.to = later.to;
            }
            same
        });
    }

    /// The bytes at a place whose tables may have been changed, as they were. Changes are sorted.
    pub fn unmended(&self, offset: u64, bytes: &mut [u8]) {
        let end = offset + bytes.len() as u64;
        let first = self.changes.partition_point(|change| change.at < offset);
        let changes = self.changes[first..].iter();
        for change in changes.take_while(|change| change.at < end) {
            put(bytes, change.at - offset, change.from);
        }
    }

    /// The bytes of a table as they will be after stage C. Changes are sorted.
    pub fn mended(&self, offset: u64, bytes: &mut [u8]) {
        let end = offset + bytes.len() as u64;
        let first = self.changes.partition_point(|change| change.at < offset);
        let changes = self.changes[first..].iter();
        for change in changes.take_while(|change| change.at < end) {
            put(bytes, change.at - offset, change.to);
        }
        let first = self.copies.partition_point(|copy| copy.at < offset);
        for copy in self.copies[first..].iter().take_while(|copy| copy.at < end) {
            put(bytes, copy.at - offset, copy.new_entry);
        }
        let first = self.relinks.partition_point(|change| change.at < offset);
        let relinks = self.relinks[first..].iter();
        for change in relinks.take_while(|change| change.at < end) {
            put(bytes, change.at - offset, change.to);
        }
    }
}

/// Puts a word into a table.
pub(super) fn put(bytes: &mut [u8], at: u64, word: u64) {
    bytes[at as usize..at as usize + 8].copy_from_slice(&word.to_be_bytes());
}

pub(super) fn out_of_memory(name: &str) -> Error {
    Error::Unsupported {
        file: name.to_string(),
        feature: "repairing an image whose references or damage take more memory than is allowed"
            .into(),
    }
}
