//! Converts zero clusters of snapshots to what version 2 can express: unallocated clusters if there
//! is no backing file, data otherwise.
//!
//! Table by table, in place. The clusters that a table needs are counted and hold zeroes, durably,
//! before it refers to them; clusters that it no longer refers to are freed when that is durable.
//! Each sector of a table is the old or the new one after a crash, and both read as the same data.
//! So there is nothing to undo, and a crash leaves leaks at most.
//!
//! The disk comes first (`amend::unflag`): none of its tables has a zero cluster then, so tables
//! that have are those of snapshots alone.

use std::collections::BTreeMap;

use super::list::SnapshotList;
use super::steps::read_list;
use super::tree::{MEMORY_BYTES_MAX, TABLE_MEMORY_BYTES, too_large};
use crate::check::counts::Memory;
use crate::entry::inspect::inspect_l1;
use crate::entry::snapshot::Extra;
use crate::entry::{L2Entry, Standard, big_endian};
use crate::file::Space;
use crate::geometry::{HostCluster, HostOffset};
use crate::job::{Job, Stage};
use crate::plan::{self, EntryChange};
use crate::{Counts, Qcow2};
use crate::{Error, Result};

/// The VM state that version 2 has room for, in bytes.
const VM_STATE_BYTES_MAX: u64 = u32::MAX as u64;

/// A table of a snapshot, and where its zero clusters are.
struct Table {
    offset: u64,
    bytes: Vec<u8>,
    zeroes: Vec<(usize, Standard)>,
}

impl Qcow2 {
    /// Refuses what version 2 cannot say of snapshots beside a disk of `size` bytes.
    ///
    /// # Errors
    /// `Invalid` if one has another size than the disk, or too large a VM state.
    pub(crate) async fn refuse_for_version_2(&self, size: u64) -> Result<()> {
        let header = self.header();
        let list = read_list(&self.file, &header).await?;
        for entry in (0..list.len() as usize).map(|position| list.entry(position)) {
            let state = Extra::decode(&entry.extra).vm_state_bytes.unwrap_or(0);
            let disk = entry.disk_bytes().unwrap_or(size);
            if state > VM_STATE_BYTES_MAX || disk != size {
                let text = "Internal snapshots prevent downgrade of image";
                return Err(Error::Invalid(text.to_string()));
            }
        }
        Ok(())
    }

    /// Changes all zero clusters of all snapshots.
    ///
    /// # Errors
    /// `Cancelled`, I/O, no space. Tables changed by then read the same as before.
    pub(crate) async fn unflag_snapshots(&self, job: &Job) -> Result<()> {
        self.while_still(async |counts| self.unflag_in_turn(counts, job).await)
            .await
    }

    async fn unflag_in_turn(&self, counts: &mut Counts, job: &Job) -> Result<()> {
        let list = self.begin_snapshots(counts, job).await?;
        job.enter(Stage::WriteZeroes);
        let references = self.table_references(&list).await?;
        job.expect(references.len() as u64 * self.geometry().cluster_bytes());
        for (offset, times) in references {
            job.begin(0).await?;
            self.unflag_table(counts, offset, times).await?;
            job.done(self.geometry().cluster_bytes());
        }
        self.end_snapshots(counts).await
    }

    /// The L2 tables of all snapshots, with how many L1 entries of snapshots refer to each. A
    /// table's count may be higher: a crash leaves counts of references that are gone.
    async fn table_references(&self, list: &SnapshotList) -> Result<BTreeMap<u64, i64>> {
        let mut memory = Memory::new(MEMORY_BYTES_MAX);
        let mut references = BTreeMap::new();
        for position in 0..list.len() as usize {
            for entry in self.snapshot_l1(list.entry(position)).await? {
                let offset = inspect_l1(entry).offset;
                if offset == 0 {
                    continue;
                }
                if !references.contains_key(&offset) {
                    memory
                        .charge(TABLE_MEMORY_BYTES)
                        .map_err(|_| too_large(self.name()))?;
                }
                *references.entry(offset).or_insert(0) += 1;
            }
        }
        Ok(references)
    }

    /// Changes the zero clusters of a table to which L1 entries refer `times` times.
    async fn unflag_table(&self, counts: &mut Counts, offset: u64, times: i64) -> Result<()> {
        let mut table = self.zeroes_in(offset).await?;
        if table.zeroes.is_empty() {
            return Ok(());
        }
        let bits = self.geometry().cluster_bits();
        let shows_below = self.header().backing_file.is_some();
        let is_written = |(_, entry): &&(usize, Standard)| {
            plan::unflagged(entry, shows_below) == EntryChange::Write
        };
        let wanted = table.zeroes.iter().filter(is_written).count() as u64;
        let first = match wanted {
            0 => 0,
            _ => self.take_run(counts, wanted).await?,
        };
        let changed = async {
            let old = table.bytes.clone();
            let mut next = first;
            for (at, entry) in &table.zeroes {
                let new = match plan::unflagged(entry, shows_below) {
                    EntryChange::None => continue,
                    EntryChange::Set(new, _) => new,
                    EntryChange::Write => {
                        next += 1;
                        L2Entry::Standard(Standard {
                            host: Some(HostOffset((next - 1) << bits)),
                            allocated: self.geometry().all_subclusters(),
                            ..Standard::UNALLOCATED
                        })
                    }
                };
                let (word, _) = self.format.encode_l2(&new);
                table.bytes[*at..][..8].copy_from_slice(&word.to_be_bytes());
            }
            if wanted > 0 {
                for cluster in first..first + wanted {
                    counts.refcounts.add(HostCluster(cluster), times).await?;
                }
                counts.refcounts.write_dirty().await?;
                self.file
                    .zero(first << bits, wanted << bits, Space::Release)
                    .await?;
                self.barrier().await?;
            }
            self.write_changes(table.offset, &old, &table.bytes).await?;
            self.barrier().await?;
            let mut freed = Vec::new();
            for host in table.zeroes.iter().filter_map(|(_, entry)| entry.host) {
                let cluster = HostCluster(host.0 >> bits);
                if counts.refcounts.add(cluster, -times).await? == 0 {
                    freed.push(cluster);
                }
            }
            counts.refcounts.write_dirty().await?;
            self.barrier().await?;
            self.free_clusters(counts, freed).await;
            Ok(())
        };
        self.or_latched(changed.await)
    }

    /// A table, and its zero clusters.
    async fn zeroes_in(&self, offset: u64) -> Result<Table> {
        let bytes = self
            .file
            .read_new(offset, self.geometry().cluster_bytes())
            .await?;
        let mut zeroes = Vec::new();
        for (index, word) in bytes.chunks_exact(8).enumerate() {
            match self.format.decode_l2(big_endian(word), 0) {
                Ok(L2Entry::Standard(entry)) if entry.zeroes != 0 => {
                    zeroes.push((index * 8, entry))
                }
                _ => {}
            }
        }
        Ok(Table {
            offset,
            bytes: bytes.to_vec(),
            zeroes,
        })
    }
}
