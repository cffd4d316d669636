//! Checks a qcow2 image without changing it: every structure, every reference, every refcount.
//!
//! Promises: finds what QEMU's check finds, counts it as QEMU does and tells it in QEMU's words, and
//! looks for three things more ([`Finding::is_known_to_qemu`]). A hostile image costs a bounded
//! amount of memory and no panic. Leaves out: repair, and what guest data means.
//!
//! 1. What may be referenced is counted in memory ([`counts`]): header, L1 tables of the disk and of
//!    its snapshots, L2 tables, data and compressed clusters, the other tables. A table that several
//!    L1 entries share is read once, and what it references counts as often as it is referenced.
//! 2. The counts are compared with the refcounts on disk.
//! 3. COPIED is compared with the refcounts on disk. The first two steps tell whether any flag can be
//!    wrong at all, so the L2 tables of a sound image are read once only.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::StreamExt;

use super::entry::inspect::{self, Claim, Flaw};
use super::entry::{EntryFormat, big_endian};
use super::geometry::Geometry;
use super::header::Header;
use crate::file::BlockFile;
use crate::{Error, Result};

mod bitmaps;
mod copied;
pub mod counts;
mod findings;
pub(super) mod reader;
mod refcounts;
mod snapshots;
#[cfg(test)]
mod tests;

pub use findings::{Finding, Severity, SnapshotL1Flaw, Structure};

use counts::{Copied, Counts, Memory, OutOfMemory};
use reader::{Reader, is_zero};

/// More host clusters than this are not checked, nor does QEMU: it bounds the time that a sparse,
/// hostile file can take.
const CLUSTERS_MAX: u64 = i32::MAX as u64;
/// Long tables are read in pieces of this size.
const PIECE_BYTES: u64 = 256 << 10;

/// Entries of an L2 table are looked at in groups of this size, and skipped where none is set.
const GROUP_BYTES: usize = 256;

/// What a check may use.
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

/// Who is told what a check finds while it runs. A broken image may have millions of findings.
pub trait Observer: Send {
    /// Something is wrong. A flaw in an L2 table that several L1 entries share is told once and
    /// counted as often as it is referenced.
    fn finding(&mut self, finding: &Finding);

    /// So many bytes of metadata are read of so many.
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
    /// Findings of [`Severity::Corruption`].
    pub corruptions: u64,
    /// Findings of [`Severity::Leak`].
    pub leaks: u64,
    /// Findings of [`Severity::Unchecked`].
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
    /// Nothing was found.
    pub fn is_clean(&self) -> bool {
        self.corruptions == 0 && self.leaks == 0 && self.check_errors == 0
    }
}

/// Checks the image in `file`, whose header is `header`. For structures that lie beyond the end of
/// the file to be findings, the header must be parsed as that of an endless file (`u64::MAX`).
///
/// # Errors
/// If the file cannot be read, the snapshot table cannot be made sense of, or the image needs more
/// memory than it may have. What is wrong with the image otherwise is a finding.
pub async fn check(
    file: &Arc<dyn BlockFile>,
    header: &Header,
    options: &CheckOptions,
    observer: &mut dyn Observer,
) -> Result<CheckResult> {
    let reader = Reader::new(file).await?;
    let mut state = State::new(&reader, header, options, observer)?;
    let snapshots = snapshots::read(&reader, &mut state).await?;
    state.region(0, state.cluster_bytes, Structure::Header)?;
    let active = L1 {
        offset: header.l1_table_offset,
        entries: u64::from(header.l1_size),
        owner: Owner::Active,
    };
    count_l1(&reader, &mut state, active).await?;
    snapshots.count(&reader, &mut state).await?;
    count_l2_tables(&reader, &mut state).await?;
    state.region(
        header.snapshots_offset,
        snapshots.bytes,
        Structure::SnapshotTable,
    )?;
    let offset = header.refcount_table_offset;
    state.region(
        offset,
        header.refcount_table_bytes(),
        Structure::RefcountTable,
    )?;
    if let Some(crypto) = header.extensions.crypto_header {
        state.region(crypto.offset, crypto.length, Structure::CryptoHeader)?;
    }
    bitmaps::count(&reader, &mut state).await?;
    let mut refcounts = refcounts::Refcounts::read(&reader, &mut state).await?;
    refcounts.count_blocks(&mut state)?;
    let highest = refcounts.compare(&mut state).await?;
    state.result.image_end_offset = (highest + 1) * state.cluster_bytes;
    copied::compare(&reader, &mut state, &mut refcounts).await?;
    refcounts.find_overlaps(&mut state).await?;
    Ok(state.result)
}

/// Whose L1 table it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The disk's.
    Active,
    /// A snapshot's.
    Snapshot,
}

/// An L1 table.
#[derive(Clone, Copy, Debug)]
struct L1 {
    offset: u64,
    entries: u64,
    owner: Owner,
}

/// An L2 table that some L1 entry points to.
#[derive(Clone, Copy, Debug)]
struct L2Table {
    /// Where it is; it may be unaligned.
    offset: u64,
    /// Entries of the active L1 table that point to it.
    active: u64,
    /// Entries of snapshots' L1 tables that point to it.
    snapshots: u64,
    /// The index of the first L1 entry that points to it.
    l1_index: u64,
}

/// The L2 tables in the order in which they were met, each once.
#[derive(Debug, Default)]
struct L2Tables {
    list: Vec<L2Table>,
    by_offset: HashMap<u64, u32>,
}

/// Memory that an L2 table takes in both collections, growth included, and in the order of reading.
const L2_TABLE_MEMORY_BYTES: u64 = 144;

/// A part of the file that is one structure's.
#[derive(Clone, Copy, Debug)]
struct Region {
    first_cluster: u64,
    clusters: u64,
    structure: Structure,
}

/// What is known so far.
struct State<'a> {
    header: &'a Header,
    file_name: &'a str,
    format: EntryFormat,
    geometry: Geometry,
    cluster_bytes: u64,
    file_bytes: u64,
    /// Host clusters to compare: those of the file, and one that sticks out of it where something
    /// references that.
    clusters: u64,
    counts: Counts,
    memory: Memory,
    l2_tables: L2Tables,
    /// Metadata but L2 tables and refcount blocks.
    regions: Vec<Region>,
    /// Some COPIED flag may be wrong: which one is worth a second look at the L2 tables.
    copied_suspect: bool,
    observer: &'a mut dyn Observer,
    result: CheckResult,
}

impl<'a> State<'a> {
    fn new(
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
                feature: format!("checking a file of {clusters} clusters (2^31 at most)"),
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

    fn emit(&mut self, finding: &Finding) {
        self.emit_times(finding, 1);
    }

    fn emit_times(&mut self, finding: &Finding, times: u64) {
        match finding.severity() {
            Severity::Corruption => self.result.corruptions += times,
            Severity::Leak => self.result.leaks += times,
            Severity::Unchecked => self.result.check_errors += times,
        }
        self.observer.finding(finding);
    }

    fn out_of_memory(&self) -> Error {
        Error::Unsupported {
            file: self.file_name.to_string(),
            feature: "checking an image whose references take more memory than is allowed".into(),
        }
    }

    fn charge(&mut self, bytes: u64) -> Result<()> {
        let charged = self.memory.charge(bytes);
        charged.map_err(|OutOfMemory| self.out_of_memory())
    }

    /// Counts the clusters of a structure, and remembers that they are its own.
    fn region(&mut self, offset: u64, len: u64, structure: Structure) -> Result<()> {
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
    fn reference(&mut self, offset: u64, len: u64, times: u64, copied: Copied) -> Result<()> {
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
    fn l1_entry(&mut self, entry: u64, l1_index: u64, owner: Owner) -> Result<()> {
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

    fn note_l2_table(&mut self, offset: u64, l1_index: u64, owner: Owner) -> Result<()> {
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
    fn l2_table(&mut self, table: &L2Table, bytes: &[u8]) -> Result<()> {
        match self.geometry.extended_l2() {
            false => self.l2_entries::<8>(table, bytes),
            true => self.l2_entries::<16>(table, bytes),
        }
    }

    fn l2_entries<const ENTRY_BYTES: usize>(
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

    /// Brings the counts of all entries of a group into the processor's cache together: one after the
    /// other, each would wait for memory.
    fn warm_counts<const ENTRY_BYTES: usize>(&self, group: &[u8]) {
        let bits = self.geometry.cluster_bits();
        let cells = group.chunks_exact(ENTRY_BYTES).fold(0, |cells, words| {
            let offset = inspect::offset_of(big_endian(&words[..8]));
            cells | self.counts.glance(offset >> bits)
        });
        // The loads are the point.
        std::hint::black_box(cells);
    }

    /// Counts what an entry references, given as index, entry and bitmap.
    fn l2_entry(
        &mut self,
        table: &L2Table,
        (l2_index, entry, bitmap): (u64, u64, u64),
        next_offset: &mut Option<u64>,
    ) -> Result<()> {
        if entry == 0 && bitmap == 0 {
            return Ok(());
        }
        let inspected = self.format.inspect_l2(entry, bitmap);
        let place = Place {
            table,
            l2_index,
            entry,
            offset: inspected.offset,
        };
        for &flaw in &inspected.flaws {
            self.flaw(flaw, &place);
        }
        match inspected.claim {
            Claim::Nothing => Ok(()),
            Claim::Cluster { offset, copied } => {
                self.tally_cluster(table, offset, next_offset);
                self.claim_cluster(offset, copied, &place)
            }
            Claim::Compressed { start, len } => {
                self.result.allocated_clusters += table.active;
                self.result.fragmented_clusters += table.active;
                self.result.compressed_clusters += table.active;
                self.reference(start, len, place.times(), Copied::Ignored)
            }
        }
    }

    fn tally_cluster(&mut self, table: &L2Table, offset: u64, next_offset: &mut Option<u64>) {
        self.result.allocated_clusters += table.active;
        if next_offset.is_some_and(|next| next != offset) {
            self.result.fragmented_clusters += table.active;
        }
        *next_offset = Some(offset + self.cluster_bytes);
    }

    fn claim_cluster(&mut self, offset: u64, copied: bool, place: &Place<'_>) -> Result<()> {
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

    fn flaw(&mut self, flaw: Flaw, place: &Place<'_>) {
        let Place {
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
struct Place<'a> {
    table: &'a L2Table,
    l2_index: u64,
    entry: u64,
    /// The offset that the entry names.
    offset: u64,
}

impl Place<'_> {
    /// How often the entry counts.
    fn times(&self) -> u64 {
        self.table.active + self.table.snapshots
    }
}

/// Counts an L1 table and the L2 tables that it points to, and notes those.
async fn count_l1(reader: &Reader<'_>, state: &mut State<'_>, l1: L1) -> Result<()> {
    let structure = match l1.owner {
        Owner::Active => Structure::ActiveL1,
        Owner::Snapshot => Structure::SnapshotL1,
    };
    state.region(l1.offset, l1.entries * 8, structure)?;
    let mut pieces = std::pin::pin!(reader.pieces(l1.offset, l1.entries * 8, PIECE_BYTES));
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
async fn count_l2_tables(reader: &Reader<'_>, state: &mut State<'_>) -> Result<()> {
    // Out of the way of the borrow; counting adds no tables.
    let list = std::mem::take(&mut state.l2_tables.list);
    count_each(reader, state, &list).await?;
    state.l2_tables.list = list;
    Ok(())
}

async fn count_each(reader: &Reader<'_>, state: &mut State<'_>, list: &[L2Table]) -> Result<()> {
    // What is beyond the end reads as zeroes: nothing to count, however many such tables there are.
    let end = reader.len();
    let wanted: Vec<(u64, u64)> = (0..list.len())
        .map(|index| (list[index].offset, index as u64))
        .filter(|&(offset, _)| offset < end)
        .collect();
    let total_bytes = wanted.len() as u64 * state.cluster_bytes;
    let mut done_bytes = 0;
    let wanted = wanted.into_iter();
    let mut tables = std::pin::pin!(reader.tables(wanted, state.cluster_bytes));
    while let Some(read) = tables.next().await {
        let (index, bytes) = read?;
        state.l2_table(&list[index as usize], &bytes)?;
        reader.recycle(bytes);
        done_bytes += state.cluster_bytes;
        state.observer.progress(done_bytes, total_bytes);
    }
    Ok(())
}
