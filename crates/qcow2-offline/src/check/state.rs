//! The limits of a check, its result, and its knowledge of the image so far: references of all
//! kinds are counted here.

use std::collections::HashMap;

use super::counts::{Copied, Counts, Memory, OutOfMemory};
use super::findings::{Finding, Severity, Structure};
use super::reader::{Reader, is_zero};
use crate::entry::inspect::{self, ClaimedSpace, Flaw};
use crate::entry::{EntryFormat, big_endian};
use crate::geometry::Geometry;
use crate::header::Header;
use crate::{Error, Result};

/// More host clusters than this are not checked, nor does QEMU: it bounds the time that a sparse,
/// hostile file can take.
pub(super) const CLUSTERS_MAX: u64 = i32::MAX as u64;
/// Long tables are read in pieces of this size.
pub(super) const PIECE_BYTES: u64 = 256 << 10;

/// Entries of an L2 table are looked at in groups of this size, and skipped where none is set.
pub(super) const GROUP_BYTES: usize = 256;

/// Limits of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckOptions {
    /// Bytes of memory for what grows with the image. An image of 8 TiB with clusters of 64 KiB
    /// takes 35 MiB, or 130 MiB if it has snapshots.
    pub memory_bytes_max: u64,
}

impl Default for CheckOptions {
    fn default() -> CheckOptions {
        CheckOptions {
            memory_bytes_max: 1 << 30,
        }
    }
}

/// Receives the findings of a check while it runs. A broken image may have millions of them.
pub trait Observer: Send {
    /// Called for each finding. A flaw in an L2 table that several L1 entries share is reported
    /// once and counted as often as the table is referenced.
    fn finding(&mut self, finding: &Finding);

    /// Called when `done_bytes` of `total_bytes` of metadata are read.
    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        let _ = (done_bytes, total_bytes);
    }
}

/// Keeps all findings: for images that are known to be small.
impl Observer for Vec<Finding> {
    fn finding(&mut self, finding: &Finding) {
        self.push(finding.clone());
    }
}

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CheckResult {
    /// Number of findings of [`Severity::Corruption`].
    pub corruptions: u64,
    /// Number of findings of [`Severity::Leak`].
    pub leaks: u64,
    /// Number of findings of [`Severity::Unchecked`].
    pub check_errors: u64,
    /// The end of the last cluster that is in use.
    pub image_end_offset: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Clusters of the disk that have space.
    pub allocated_clusters: u64,
    /// Allocated clusters that do not follow their predecessor in the file.
    pub fragmented_clusters: u64,
    /// Allocated clusters that are compressed.
    pub compressed_clusters: u64,
}

impl CheckResult {
    /// Returns whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.corruptions == 0 && self.leaks == 0 && self.check_errors == 0
    }
}

/// Whose L1 table it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The L1 table of the disk.
    Active,
    /// The L1 table of a snapshot.
    Snapshot,
}

/// An L1 table whose references are counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct L1 {
    pub(super) offset: u64,
    pub(super) entries: u64,
    pub(super) owner: Owner,
}

/// An L2 table that some L1 entry points to.
#[derive(Clone, Copy, Debug)]
pub(super) struct L2Table {
    /// Where it is; it may be unaligned.
    pub(super) offset: u64,
    /// Entries of the active L1 table that point to it.
    pub(super) active: u64,
    /// Entries of snapshots' L1 tables that point to it.
    pub(super) snapshots: u64,
    /// The index of the first L1 entry that points to it.
    pub(super) l1_index: u64,
}

/// The L2 tables in the order in which they were met, each once.
#[derive(Debug, Default)]
pub(super) struct L2Tables {
    pub(super) list: Vec<L2Table>,
    pub(super) by_offset: HashMap<u64, u32>,
}

/// Memory that an L2 table takes in both collections, growth included, and in the order of reading.
pub(super) const L2_TABLE_MEMORY_BYTES: u64 = 144;

/// A part of the file that is one structure's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) first_cluster: u64,
    pub(super) clusters: u64,
    pub(super) structure: Structure,
}

/// The state of a check.
pub(super) struct State<'a> {
    pub(super) header: &'a Header,
    pub(super) file_name: &'a str,
    pub(super) format: EntryFormat,
    pub(super) geometry: Geometry,
    pub(super) cluster_bytes: u64,
    pub(super) file_bytes: u64,
    /// Host clusters to compare: those of the file, and one that sticks out of it where something
    /// references that.
    pub(super) clusters: u64,
    pub(super) counts: Counts,
    pub(super) memory: Memory,
    pub(super) l2_tables: L2Tables,
    /// Metadata but L2 tables and refcount blocks.
    pub(super) regions: Vec<Region>,
    /// Some COPIED flag may be wrong: which one is worth a second look at the L2 tables.
    pub(super) copied_suspect: bool,
    pub(super) observer: &'a mut dyn Observer,
    pub(super) result: CheckResult,
}

impl<'a> State<'a> {
    pub(super) fn new(
        reader: &'a Reader<'a>,
        header: &'a Header,
        options: &CheckOptions,
        observer: &'a mut dyn Observer,
    ) -> Result<State<'a>> {
        let geometry = header.geometry();
        let clusters = geometry.clusters_for(reader.len());
        if clusters > CLUSTERS_MAX {
            return Err(Error::Unsupported {
                file: reader.name().to_string(),
                feature: format!("checking a file of {clusters} clusters (2^31 at most)").into(),
            });
        }
        let result = CheckResult {
            total_clusters: geometry.clusters_for(header.size),
            ..CheckResult::default()
        };
        Ok(State {
            header,
            file_name: reader.name(),
            format: header.entry_format(),
            geometry,
            cluster_bytes: geometry.cluster_bytes(),
            file_bytes: reader.len(),
            clusters,
            counts: Counts::new(geometry.refcount_max()),
            memory: Memory::new(options.memory_bytes_max),
            l2_tables: L2Tables::default(),
            regions: Vec::new(),
            copied_suspect: false,
            observer,
            result,
        })
    }

    pub(super) fn emit(&mut self, finding: &Finding) {
        self.emit_times(finding, 1);
    }

    pub(super) fn emit_times(&mut self, finding: &Finding, times: u64) {
        match finding.severity() {
            Severity::Corruption => self.result.corruptions += times,
            Severity::Leak => self.result.leaks += times,
            Severity::Unchecked => self.result.check_errors += times,
        }
        self.observer.finding(finding);
    }

    pub(super) fn out_of_memory(&self) -> Error {
        Error::Unsupported {
            file: self.file_name.to_string(),
            feature: "checking an image whose references take more memory than is allowed".into(),
        }
    }

    pub(super) fn charge(&mut self, bytes: u64) -> Result<()> {
        let charged = self.memory.charge(bytes);
        charged.map_err(|OutOfMemory| self.out_of_memory())
    }

    /// Counts the clusters of a structure, and remembers that they are its own.
    pub(super) fn region(&mut self, offset: u64, len: u64, structure: Structure) -> Result<()> {
        self.reference(offset, len, 1, Copied::Ignored)?;
        if len > 0 && offset < self.file_bytes {
            self.charge(std::mem::size_of::<Region>() as u64)?;
            let first_cluster = offset / self.cluster_bytes;
            let end = self.geometry.clusters_for(offset.saturating_add(len));
            self.regions.push(Region {
                first_cluster,
                clusters: end.min(self.clusters).saturating_sub(first_cluster),
                structure,
            });
        }
        Ok(())
    }

    /// Counts the clusters that a range touches, `times` times each.
    pub(super) fn reference(
        &mut self,
        offset: u64,
        len: u64,
        times: u64,
        copied: Copied,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let end = offset.saturating_add(len);
        // The last cluster of a file may be cut short by its end.
        if end.saturating_sub(self.file_bytes) >= self.cluster_bytes {
            self.copied_suspect |= copied != Copied::Ignored;
            self.emit_times(&Finding::BeyondEnd { offset, len }, times);
            return Ok(());
        }
        let bits = self.geometry.cluster_bits();
        let clusters = offset >> bits..((end - 1) >> bits) + 1;
        self.clusters = self.clusters.max(clusters.end);
        for cluster in clusters {
            let added = self.counts.add(cluster, times, copied, &mut self.memory);
            let overflowed = added.map_err(|OutOfMemory| self.out_of_memory())?;
            if overflowed > 0 {
                let offset = cluster << bits;
                self.emit_times(&Finding::Overflow { offset }, overflowed);
            }
        }
        Ok(())
    }

    /// Counts what an L1 entry points to, and notes the table.
    pub(super) fn l1_entry(&mut self, entry: u64, l1_index: u64, owner: Owner) -> Result<()> {
        if entry == 0 {
            return Ok(());
        }
        let table = inspect::inspect_l1(entry);
        if table.reserved {
            self.emit(&Finding::L1Reserved { entry });
        }
        let copied = match owner {
            Owner::Active if table.copied => Copied::Set,
            Owner::Active => Copied::Clear,
            Owner::Snapshot => Copied::Ignored,
        };
        let offset = table.offset;
        self.reference(offset, self.cluster_bytes, 1, copied)?;
        if !self.geometry.is_cluster_aligned(offset) {
            self.copied_suspect = true;
            self.emit(&Finding::L2TableUnaligned { offset });
        }
        self.note_l2_table(offset, l1_index, owner)
    }

    pub(super) fn note_l2_table(&mut self, offset: u64, l1_index: u64, owner: Owner) -> Result<()> {
        let tables = &mut self.l2_tables;
        let position = match tables.by_offset.get(&offset) {
            Some(&position) => {
                let first_index = tables.list[position as usize].l1_index;
                if self.format.data_file && first_index != l1_index {
                    self.emit(&Finding::DataFileTable {
                        offset,
                        first_index,
                        l1_index,
                    });
                }
                position
            }
            None => {
                let position = u32::try_from(tables.list.len());
                self.charge(L2_TABLE_MEMORY_BYTES)?;
                let position = position.map_err(|_| self.out_of_memory())?;
                self.l2_tables.by_offset.insert(offset, position);
                self.l2_tables.list.push(L2Table {
                    offset,
                    active: 0,
                    snapshots: 0,
                    l1_index,
                });
                position
            }
        };
        let table = &mut self.l2_tables.list[position as usize];
        match owner {
            Owner::Active => table.active += 1,
            Owner::Snapshot => table.snapshots += 1,
        }
        Ok(())
    }

    /// Counts what the entries of an L2 table reference.
    pub(super) fn l2_table(&mut self, table: &L2Table, bytes: &[u8]) -> Result<()> {
        match self.geometry.extended_l2() {
            false => self.l2_entries::<8>(table, bytes),
            true => self.l2_entries::<16>(table, bytes),
        }
    }

    pub(super) fn l2_entries<const ENTRY_BYTES: usize>(
        &mut self,
        table: &L2Table,
        bytes: &[u8],
    ) -> Result<()> {
        let plain_clusters = self.format.plain_clusters();
        // A plain cluster from here on would end beyond the file.
        let offset_end = self.file_bytes.saturating_sub(self.cluster_bytes - 1);
        let is_lone = table.active + table.snapshots == 1;
        let has_copied = table.active > 0;
        // Each table is looked at alone: a gap between tables is no fragmentation.
        let mut next_offset = None;
        for (group_index, group) in bytes.chunks(GROUP_BYTES).enumerate() {
            if is_zero(group) {
                continue;
            }
            self.warm_counts::<ENTRY_BYTES>(group);
            for (index, words) in group.chunks_exact(ENTRY_BYTES).enumerate() {
                let entry = big_endian(&words[..8]);
                let bitmap = if ENTRY_BYTES > 8 {
                    big_endian(&words[8..])
                } else {
                    0
                };
                // Most entries of most images, in a hurry; all others, and the first in a page of
                // the counts, at leisure.
                if is_lone
                    && let Some((offset, copied)) = plain_clusters.of(entry, bitmap)
                    && offset < offset_end
                {
                    let copied = Copied::of(copied, has_copied);
                    let cluster = offset >> self.geometry.cluster_bits();
                    if self.counts.add_first(cluster, copied) {
                        self.tally_cluster(table, offset, &mut next_offset);
                        continue;
                    }
                }
                let l2_index = group_index * (GROUP_BYTES / ENTRY_BYTES) + index;
                let entry = (l2_index as u64, entry, bitmap);
                self.l2_entry(table, entry, &mut next_offset)?;
            }
        }
        Ok(())
    }

    /// Brings the counts of all entries of a group into the processor's cache together: one after
    /// the other, each would wait for memory.
    pub(super) fn warm_counts<const ENTRY_BYTES: usize>(&self, group: &[u8]) {
        let bits = self.geometry.cluster_bits();
        let cells = group.chunks_exact(ENTRY_BYTES).fold(0, |cells, words| {
            let offset = inspect::offset_of(big_endian(&words[..8]));
            cells | self.counts.glance(offset >> bits)
        });
        // The loads are the point.
        std::hint::black_box(cells);
    }

    /// Counts what an entry references, given as index, entry and bitmap.
    pub(super) fn l2_entry(
        &mut self,
        table: &L2Table,
        (l2_index, entry, bitmap): (u64, u64, u64),
        next_offset: &mut Option<u64>,
    ) -> Result<()> {
        if entry == 0 && bitmap == 0 {
            return Ok(());
        }
        let inspected = self.format.inspect_l2(entry, bitmap);
        let place = EntryPlace {
            table,
            l2_index,
            entry,
            offset: inspected.offset,
        };
        for &flaw in &inspected.flaws {
            self.flaw(flaw, &place);
        }
        match inspected.claim {
            ClaimedSpace::Nothing => Ok(()),
            ClaimedSpace::Cluster { offset, copied } => {
                self.tally_cluster(table, offset, next_offset);
                self.claim_cluster(offset, copied, &place)
            }
            ClaimedSpace::Compressed { start, len } => {
                self.result.allocated_clusters += table.active;
                self.result.fragmented_clusters += table.active;
                self.result.compressed_clusters += table.active;
                self.reference(start, len, place.times(), Copied::Ignored)
            }
        }
    }

    pub(super) fn tally_cluster(
        &mut self,
        table: &L2Table,
        offset: u64,
        next_offset: &mut Option<u64>,
    ) {
        self.result.allocated_clusters += table.active;
        if next_offset.is_some_and(|next| next != offset) {
            self.result.fragmented_clusters += table.active;
        }
        *next_offset = Some(offset + self.cluster_bytes);
    }

    pub(super) fn claim_cluster(
        &mut self,
        offset: u64,
        copied: bool,
        place: &EntryPlace<'_>,
    ) -> Result<()> {
        let active = place.table.active > 0;
        if self.format.data_file {
            // Clusters of the data file have no refcounts; COPIED is always set.
            self.copied_suspect |= active && !copied;
            let cluster = place.table.l1_index * self.geometry.l2_entries() + place.l2_index;
            let guest_offset = cluster << self.geometry.cluster_bits();
            if offset != guest_offset {
                let finding = Finding::DataFileOffset {
                    offset,
                    guest_offset,
                };
                self.emit_times(&finding, place.times());
            }
            return Ok(());
        }
        // An unaligned cluster touches two, whose counts say nothing of its flag alone.
        self.copied_suspect |= !self.geometry.is_cluster_aligned(offset);
        let copied = Copied::of(copied, active);
        self.reference(offset, self.cluster_bytes, place.times(), copied)
    }

    pub(super) fn flaw(&mut self, flaw: Flaw, place: &EntryPlace<'_>) {
        let EntryPlace {
            l2_index,
            entry,
            offset,
            ..
        } = *place;
        let finding = match flaw {
            Flaw::Reserved => Finding::L2Reserved { entry },
            Flaw::ZeroFlag => Finding::ZeroFlag { entry },
            Flaw::CompressedCopied => Finding::CompressedCopied { offset },
            Flaw::CompressedWithDataFile => Finding::CompressedWithDataFile {
                l2_index,
                entry: inspect::without_copied(entry),
            },
            Flaw::CompressedWithBitmap => Finding::CompressedWithBitmap {
                l2_index,
                entry: inspect::without_copied(entry),
            },
            Flaw::AllocatedAndZero => Finding::AllocatedAndZero { offset },
            Flaw::DataUnaligned => Finding::DataUnaligned { offset },
            Flaw::PreallocatedUnaligned => Finding::PreallocatedUnaligned { offset },
            Flaw::AllocatedWithoutOffset => Finding::AllocatedWithoutOffset,
        };
        self.emit_times(&finding, place.times());
    }
}

/// Where an L2 entry is.
pub(super) struct EntryPlace<'a> {
    pub(super) table: &'a L2Table,
    pub(super) l2_index: u64,
    pub(super) entry: u64,
    /// The offset that the entry names.
    pub(super) offset: u64,
}

impl EntryPlace<'_> {
    /// Returns how often the entry counts.
    pub(super) fn times(&self) -> u64 {
        self.table.active + self.table.snapshots
    }
}

/// Counts an L1 table and the L2 tables that it points to, and notes those.
pub(super) async fn count_l1(reader: &Reader<'_>, state: &mut State<'_>, l1: L1) -> Result<()> {
    let structure = match l1.owner {
        Owner::Active => Structure::ActiveL1,
        Owner::Snapshot => Structure::SnapshotL1,
    };
    state.region(l1.offset, l1.entries * 8, structure)?;
    let mut pieces = reader.pieces(l1.offset, l1.entries * 8, PIECE_BYTES);
    let mut l1_index = 0;
    while let Some(bytes) = pieces.next().await {
        for entry in bytes?.words() {
            state.l1_entry(entry, l1_index, l1.owner)?;
            l1_index += 1;
        }
    }
    Ok(())
}

/// Counts what all L2 tables reference.
pub(super) async fn count_l2_tables(reader: &Reader<'_>, state: &mut State<'_>) -> Result<()> {
    // Out of the way of the borrow; counting adds no tables.
    let list = std::mem::take(&mut state.l2_tables.list);
    count_each(reader, state, &list).await?;
    state.l2_tables.list = list;
    Ok(())
}

pub(super) async fn count_each(
    reader: &Reader<'_>,
    state: &mut State<'_>,
    list: &[L2Table],
) -> Result<()> {
    // Tables beyond the end read as zeroes: nothing to count, however many there are.
    let end = reader.len();
    let wanted: Vec<(u64, u64)> = (0..list.len())
        .map(|index| (list[index].offset, index as u64))
        .filter(|&(offset, _)| offset < end)
        .collect();
    let total_bytes = wanted.len() as u64 * state.cluster_bytes;
    let mut done_bytes = 0;
    let wanted = wanted.into_iter();
    let mut tables = reader.tables(wanted, state.cluster_bytes);
    while let Some(read) = tables.next().await {
        let (index, bytes) = read?;
        state.l2_table(&list[index as usize], &bytes)?;
        reader.recycle(bytes);
        done_bytes += state.cluster_bytes;
        state.observer.progress(done_bytes, total_bytes);
    }
    Ok(())
}
