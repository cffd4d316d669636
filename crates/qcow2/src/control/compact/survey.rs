//! One walk over all tables of an image, as they are on disk: what each cluster of the file holds,
//! and which words refer to it. The image was checked before, so the tables are sound.

use cowslip_boxed::boxed;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::check::counts::{Memory, OutOfMemory};
use crate::check::reader::Reader;
use crate::control::bitmap::read_directory;
use crate::control::snapshot::read_list;
use crate::entry::big_endian;
use crate::entry::bitmap::TableEntry;
use crate::entry::inspect::{ClaimedSpace, inspect_l1, inspect_refcount_table};
use crate::file::AlignedFile;
use crate::geometry::{Geometry, GuestCluster};
use crate::header::Header;
use crate::job::Job;
use crate::space::refcount::Changes;
use crate::{Error, Result};

/// Bytes of memory for what grows with the image; as a check may use by default.
pub(super) const MEMORY_BYTES_MAX: u64 = 1 << 30;
/// Long tables are read in pieces of this size.
const PIECE_BYTES: u64 = 256 << 10;
/// Bytes that a refcount block takes in the collections of them.
const BLOCK_MEMORY_BYTES: u64 = 32;
/// Bytes that an L2 table takes in the collection of them.
const TABLE_MEMORY_BYTES: u64 = 96;

/// Content of a cluster of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// Nothing refers to it, and there is a block for its count.
    Free,
    /// Nothing, and no block counts it: it cannot be taken.
    Uncounted,
    /// A cluster of the disk that one entry of the active tables refers to, with COPIED.
    Data,
    /// A cluster that several entries refer to, or a snapshot's.
    Shared,
    /// Compressed clusters, none of which ends elsewhere.
    Compressed,
    /// Compressed clusters, one of which lies in another cluster, too.
    Spanned,
    /// An L2 table.
    Table,
    /// The L1 table of a snapshot, in one cluster.
    SnapshotL1,
    /// A refcount block.
    Block,
    /// Bits of a bitmap.
    Bits,
    /// The L1 table of the disk, in one cluster.
    ActiveL1,
    /// The table of snapshots, in one cluster.
    Snapshots,
    /// The refcount table, in one cluster.
    Counts,
    /// The table of a bitmap, in one cluster.
    BitmapTable,
    /// The directory of bitmaps, in one cluster.
    Directory,
    /// A part of one of these where it has several clusters.
    Structure,
    /// Clusters that never move: the header, and the header of the keys.
    Fixed,
}

impl Kind {
    /// Returns whether something refers to it.
    pub fn is_used(self) -> bool {
        self > Kind::Uncounted
    }

    /// Returns whether it may be taken, once leaks are freed and no request is under way.
    pub fn is_room(self) -> bool {
        self == Kind::Free
    }

    /// Returns whether something else is found by it.
    pub fn is_table(self) -> bool {
        self.is_used()
            && !matches!(
                self,
                Kind::Data | Kind::Shared | Kind::Compressed | Kind::Spanned | Kind::Bits
            )
    }
}

/// A word of a table, or of the header, that refers to clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Their content.
    pub kind: Kind,
    /// The clusters of the file.
    pub clusters: Range<u64>,
    /// Where the word is, of an entry the first one; 0 for what the header refers to.
    pub at: u64,
    /// How often it counts: a table that several L1 entries share has its references several times.
    pub times: u64,
    /// The cluster of the disk that the entry maps, if it is in one of the disk's own tables, which
    /// it has once: a cluster of its own, or one that snapshots share with it.
    pub guest: Option<GuestCluster>,
}

/// Content of the file.
#[derive(Debug)]
pub struct Survey {
    /// The sizes of the image's structures.
    pub geometry: Geometry,
    /// One for each cluster of the file.
    pub kinds: Vec<Kind>,
    /// The refcount blocks: what they count by their index, and where they are.
    pub blocks: Vec<(u64, u64)>,
    /// Runs of clusters of the disk, with their places.
    pub runs: Runs,
    /// Clusters of the disk that have space of their own.
    pub data_clusters: u64,
    /// L2 tables, in the order of the file, and the last cluster that each refers to.
    pub reach: Vec<(u64, u64)>,
}

/// Runs of clusters of the disk with space of their own, also of those that snapshots share, but
/// not of compressed ones: where a run ends, the next cluster of the disk has none, or lies
/// elsewhere.
#[derive(Clone, Debug, Default)]
pub struct Runs {
    tables: Vec<TableRuns>,
}

/// The same of one L2 table. Tables come in the order of the file.
#[derive(Clone, Copy, Debug)]
struct TableRuns {
    table: u64,
    /// The first cluster, of the disk and of the file, and the ones behind the last.
    first: (u64, u64),
    next: (u64, u64),
    extents: u64,
    perfect: u64,
}

impl Runs {
    fn note(&mut self, table: u64, place: (u64, u64)) {
        let next = (place.0 + 1, place.1 + 1);
        match self.tables.last_mut() {
            Some(last) if last.table == table => {
                last.extents += u64::from(last.next != place);
                last.perfect += u64::from(last.next.0 != place.0);
                last.next = next;
            }
            _ => self.tables.push(TableRuns {
                table,
                first: place,
                next,
                extents: 1,
                perfect: 1,
            }),
        }
    }

    /// How many there are, and how many there would be if all that follows on each other on the
    /// disk did so in the file.
    pub fn count(mut self) -> (u64, u64) {
        self.tables.sort_unstable_by_key(|table| table.first);
        let extents: u64 = self.tables.iter().map(|table| table.extents).sum();
        let perfect: u64 = self.tables.iter().map(|table| table.perfect).sum();
        let pairs = || self.tables.iter().zip(self.tables.iter().skip(1));
        let joined = pairs().filter(|(one, other)| one.next == other.first);
        let adjoining = pairs().filter(|(one, other)| one.next.0 == other.first.0);
        (
            extents - joined.count() as u64,
            perfect - adjoining.count() as u64,
        )
    }
}

/// The references to an L2 table.
#[derive(Clone, Copy, Debug, Default)]
struct Table {
    active: u64,
    snapshots: u64,
    l1_index: u64,
}

/// Whose L1 table it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Active,
    Snapshot,
}

/// Receives each reference.
pub type Visit<'a> = dyn FnMut(&Reference) -> Result<()> + Send + 'a;

pub(super) fn is_data(kind: Kind) -> bool {
    matches!(kind, Kind::Data | Kind::Shared)
}

fn is_compressed(kind: Kind) -> bool {
    matches!(kind, Kind::Compressed | Kind::Spanned)
}

pub(super) fn too_large(name: &str) -> Error {
    Error::Unsupported {
        file: name.to_string(),
        feature: "compaction of an image whose references take more memory than is allowed".into(),
    }
}

/// The tables of an image on disk.
struct Walk<'a> {
    header: &'a Header,
    geometry: Geometry,
    reader: Reader<'a>,
    job: &'a Job,
    tables: BTreeMap<u64, Table>,
    memory: Memory,
    /// Of L2 tables only those are read that refer to clusters behind an end.
    behind: Option<(&'a Survey, u64)>,
}

/// Visits all references, tables before what they refer to.
///
/// # Errors
/// I/O, too little memory, [`Error::Cancelled`], or an error of `visit`.
#[boxed]
pub async fn walk(
    file: &AlignedFile,
    header: &Header,
    job: &Job,
    visit: &mut Visit<'_>,
) -> Result<()> {
    walk_behind(file, header, (None, job), visit).await
}

/// Visits all references as [`walk`] does, but those of L2 tables that refer, by a survey of what
/// has not changed since, to nothing behind an end in clusters.
///
/// # Errors
/// As [`walk`].
#[boxed]
pub async fn walk_behind(
    file: &AlignedFile,
    header: &Header,
    (behind, job): (Option<(&Survey, u64)>, &Job),
    visit: &mut Visit<'_>,
) -> Result<()> {
    let mut walk = Walk {
        header,
        geometry: header.geometry(),
        reader: Reader::new(file.block_file()).await?,
        job,
        tables: BTreeMap::new(),
        memory: Memory::new(MEMORY_BYTES_MAX),
        behind,
    };
    walk.region(Kind::Fixed, (0, walk.geometry.cluster_bytes()), 0, visit)?;
    if let Some(keys) = header.extensions.crypto_header {
        walk.region(Kind::Fixed, (keys.offset, keys.length), 0, visit)?;
    }
    let l1 = (header.l1_table_offset, header.l1_bytes());
    walk.region(walk.if_in_one(Kind::ActiveL1, l1), l1, 0, visit)?;
    walk.l1(l1, Owner::Active, visit).await?;
    let list = read_list(file, header).await?;
    let list_bytes = list.encode().len() as u64;
    let table = (header.snapshots_offset, list_bytes);
    walk.region(walk.if_in_one(Kind::Snapshots, table), table, 0, visit)?;
    let mut at = header.snapshots_offset;
    for position in 0..list.len() as usize {
        let entry = &list.entry(position).fixed;
        let l1 = (entry.l1_offset, u64::from(entry.l1_size) * 8);
        walk.region(walk.if_in_one(Kind::SnapshotL1, l1), l1, at, visit)?;
        walk.l1(l1, Owner::Snapshot, visit).await?;
        at += entry.entry_bytes();
    }
    walk.l2_tables(visit).await?;
    walk.bitmaps(file, visit).await?;
    let table = (header.refcount_table_offset, header.refcount_table_bytes());
    walk.region(walk.if_in_one(Kind::Counts, table), table, 0, visit)
}

impl Walk<'_> {
    /// A part of the file that is one structure's.
    fn region(
        &self,
        kind: Kind,
        (offset, bytes): (u64, u64),
        at: u64,
        visit: &mut Visit<'_>,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        visit(&Reference {
            kind,
            clusters: self.touched(offset, bytes),
            at,
            times: 1,
            guest: None,
        })
    }

    /// The kind of a structure that may move if it lies in one cluster.
    fn if_in_one(&self, kind: Kind, (_, bytes): (u64, u64)) -> Kind {
        match bytes <= self.geometry.cluster_bytes() {
            true => kind,
            false => Kind::Structure,
        }
    }

    /// The clusters that hold these bytes.
    fn touched(&self, offset: u64, bytes: u64) -> Range<u64> {
        let bits = self.geometry.cluster_bits();
        offset >> bits..((offset + bytes - 1) >> bits) + 1
    }

    async fn l1(
        &mut self,
        (offset, bytes): (u64, u64),
        owner: Owner,
        visit: &mut Visit<'_>,
    ) -> Result<()> {
        let mut l1_index = 0;
        let mut pieces = self.reader.pieces(offset, bytes, PIECE_BYTES);
        while let Some(piece) = pieces.next().await {
            self.job.check()?;
            for entry in piece?.words() {
                let at = offset + 8 * l1_index;
                let table = inspect_l1(entry).offset;
                if table != 0 {
                    let known = self.tables.entry(table);
                    if matches!(known, std::collections::btree_map::Entry::Vacant(_)) {
                        let charged = self.memory.charge(TABLE_MEMORY_BYTES);
                        charged.map_err(|OutOfMemory| too_large(self.reader.name()))?;
                    }
                    let known = known.or_default();
                    match owner {
                        Owner::Active => {
                            (known.active, known.l1_index) = (known.active + 1, l1_index)
                        }
                        Owner::Snapshot => known.snapshots += 1,
                    }
                    let cluster = table >> self.geometry.cluster_bits();
                    visit(&Reference {
                        kind: Kind::Table,
                        clusters: cluster..cluster + 1,
                        at,
                        times: 1,
                        guest: None,
                    })?;
                }
                l1_index += 1;
            }
        }
        Ok(())
    }

    /// Visits what the entries of all L2 tables refer to: nothing in an image with a data file.
    async fn l2_tables(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        let tables = std::mem::take(&mut self.tables);
        let format = self.header.entry_format();
        if format.data_file {
            return Ok(());
        }
        let entry_bytes = self.geometry.l2_entry_bytes();
        let is_wanted = |offset: &&u64| match self.behind {
            Some((survey, end)) => survey.reaches(**offset, end),
            None => true,
        };
        let wanted = tables.keys().filter(is_wanted);
        let wanted: Vec<(u64, u64)> = wanted.map(|&offset| (offset, offset)).collect();
        let wanted = wanted.into_iter();
        let mut reads = self.reader.tables(wanted, self.geometry.cluster_bytes());
        while let Some(read) = reads.next().await {
            self.job.check()?;
            let (offset, bytes) = read?;
            let table = tables[&offset];
            let is_own = table.active == 1 && table.snapshots == 0;
            let words = bytes.chunks_exact(entry_bytes as usize);
            for (index, words) in (0..).zip(words) {
                let (kind, (start, len)) = match format.inspect_l2(big_endian(&words[..8]), 0).claim
                {
                    ClaimedSpace::Nothing => continue,
                    ClaimedSpace::Cluster { offset, copied } => {
                        let kind = match copied && is_own {
                            true => Kind::Data,
                            false => Kind::Shared,
                        };
                        (kind, (offset, 1))
                    }
                    ClaimedSpace::Compressed { start, len } => (Kind::Compressed, (start, len)),
                };
                let clusters = self.touched(start, len);
                let kind = match clusters.end - clusters.start {
                    1 => kind,
                    _ => Kind::Spanned,
                };
                let guest = table.l1_index * self.geometry.l2_entries() + index;
                let is_disk = table.active == 1;
                visit(&Reference {
                    kind,
                    clusters,
                    at: offset + index * entry_bytes,
                    times: table.active + table.snapshots,
                    guest: is_disk.then_some(GuestCluster(guest)),
                })?;
            }
            self.reader.recycle(bytes);
        }
        Ok(())
    }

    async fn bitmaps(&self, file: &AlignedFile, visit: &mut Visit<'_>) -> Result<()> {
        let Some(extension) = self.header.consistent_bitmaps() else {
            return Ok(());
        };
        let directory = extension.bitmap_directory_offset;
        let place = (directory, extension.bitmap_directory_size);
        self.region(self.if_in_one(Kind::Directory, place), place, 0, visit)?;
        let mut at = directory;
        for bitmap in read_directory(file, self.header).await? {
            let (offset, bytes) = (bitmap.fixed.table_offset, bitmap.fixed.table_bytes());
            let is_sound = bitmap
                .fixed
                .table_flaw(&self.geometry, self.header.size)
                .is_none();
            if is_sound {
                let kind = self.if_in_one(Kind::BitmapTable, (offset, bytes));
                self.region(kind, (offset, bytes), at, visit)?;
                self.bitmap_table((offset, bytes), visit).await?;
            }
            at += bitmap.fixed.entry_bytes();
        }
        Ok(())
    }

    async fn bitmap_table(&self, (offset, bytes): (u64, u64), visit: &mut Visit<'_>) -> Result<()> {
        let mut at = offset;
        let mut pieces = self.reader.pieces(offset, bytes, PIECE_BYTES);
        while let Some(piece) = pieces.next().await {
            self.job.check()?;
            for entry in piece?.words() {
                if let TableEntry::At(bits) = TableEntry::decode(entry, &self.geometry) {
                    self.region(Kind::Bits, (bits, 1), at, visit)?;
                }
                at += 8;
            }
        }
        Ok(())
    }
}

impl Survey {
    /// Looks at the whole file. Nothing changes meanwhile, and all of it is written.
    ///
    /// # Errors
    /// As [`walk`].
    #[boxed]
    pub async fn read(file: &AlignedFile, header: &Header, job: &Job) -> Result<Survey> {
        let geometry = header.geometry();
        let clusters = geometry.clusters_for(file.len().await?);
        let mut memory = Memory::new(MEMORY_BYTES_MAX);
        let too_large = |OutOfMemory| too_large(file.name());
        memory.charge(clusters).map_err(too_large)?;
        let mut survey = Survey {
            geometry,
            kinds: vec![Kind::Free; clusters as usize],
            blocks: Vec::new(),
            runs: Runs::default(),
            data_clusters: 0,
            reach: Vec::new(),
        };
        walk(file, header, job, &mut |found| {
            survey.note(found);
            survey.data_clusters += u64::from(found.kind == Kind::Data);
            if let Some(guest) = found.guest.filter(|_| is_data(found.kind)) {
                let table = found.at & !(geometry.cluster_bytes() - 1);
                survey.runs.note(table, (guest.0, found.clusters.start));
            }
            Ok(())
        })
        .await?;
        survey.note_blocks((file, header), &mut memory).await?;
        Ok(survey)
    }

    /// Leaves out what lies behind a number of clusters, and holds nothing.
    pub fn cut(&mut self, clusters: u64) {
        while self.kinds.len() as u64 > clusters && self.kinds.last() == Some(&Kind::Free) {
            self.kinds.pop();
        }
    }

    /// Returns whether what was read as a table may have been something else.
    pub fn is_disturbed(&self, changes: &Changes) -> bool {
        let is_table = |&cluster: &u64| {
            let kind = self.kinds.get(cluster as usize);
            kind.is_some_and(|kind| kind.is_table())
        };
        changes.is_partial() || changes.freed().iter().any(is_table)
    }

    /// Returns whether an L2 table refers to something behind `end` clusters.
    fn reaches(&self, table: u64, end: u64) -> bool {
        let found = self.reach.binary_search_by_key(&table, |&(table, _)| table);
        found.is_ok_and(|at| self.reach[at].1 >= end)
    }

    fn note(&mut self, found: &Reference) {
        if is_data(found.kind) || is_compressed(found.kind) {
            let table = found.at & !(self.geometry.cluster_bytes() - 1);
            let reached = found.clusters.end - 1;
            match self.reach.last_mut() {
                // The entries of one table come one after the other.
                Some((last, reach)) if *last == table => *reach = reached.max(*reach),
                _ => self.reach.push((table, reached)),
            }
        }
        let end = found.clusters.end.min(self.kinds.len() as u64);
        for cluster in found.clusters.start.min(end)..end {
            let kind = &mut self.kinds[cluster as usize];
            *kind = match *kind {
                Kind::Free => found.kind,
                Kind::Data | Kind::Shared if is_data(found.kind) => Kind::Shared,
                Kind::Compressed if found.kind == Kind::Spanned => Kind::Spanned,
                Kind::Spanned if is_compressed(found.kind) => Kind::Spanned,
                // What is of two kinds stays where it is.
                other if other != found.kind => Kind::Fixed,
                other => other,
            };
        }
    }

    /// Notes the refcount blocks, and what none of them counts.
    async fn note_blocks(
        &mut self,
        (file, header): (&AlignedFile, &Header),
        memory: &mut Memory,
    ) -> Result<()> {
        let reader = Reader::new(file.block_file()).await?;
        let (offset, bytes) = (header.refcount_table_offset, header.refcount_table_bytes());
        let bits = self.geometry.cluster_bits();
        let (mut index, mut next_block) = (0, 0);
        let mut pieces = reader.pieces(offset, bytes, PIECE_BYTES);
        while let Some(piece) = pieces.next().await {
            for entry in piece?.words() {
                let block = inspect_refcount_table(entry).offset;
                if block != 0 {
                    let charged = memory.charge(BLOCK_MEMORY_BYTES);
                    charged.map_err(|OutOfMemory| too_large(file.name()))?;
                    self.blocks.push((index, block >> bits));
                    self.without_block(next_block..index);
                    next_block = index + 1;
                }
                index += 1;
            }
        }
        self.without_block(next_block..u64::MAX);
        for at in 0..self.blocks.len() {
            let cluster = self.blocks[at].1;
            self.note(&Reference {
                kind: Kind::Block,
                clusters: cluster..cluster + 1,
                at: 0,
                times: 1,
                guest: None,
            });
        }
        Ok(())
    }

    /// Clusters that no block counts.
    fn without_block(&mut self, indices: Range<u64>) {
        let len = self.kinds.len() as u64;
        let per_block = self.geometry.refcounts_per_block();
        let first = indices.start.saturating_mul(per_block).min(len);
        let end = indices.end.saturating_mul(per_block).min(len);
        for kind in &mut self.kinds[first as usize..end.max(first) as usize] {
            if *kind == Kind::Free {
                *kind = Kind::Uncounted;
            }
        }
    }

    /// Bytes of clusters of which this is true.
    pub fn bytes_of(&self, is_meant: impl Fn(Kind) -> bool) -> u64 {
        let clusters = self.kinds.iter().filter(|&&kind| is_meant(kind)).count() as u64;
        clusters << self.geometry.cluster_bits()
    }
}
