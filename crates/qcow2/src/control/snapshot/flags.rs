//! COPIED in tables on disk: cleared where a tree becomes shared, set where a count is 1.
//!
//! Bits change in place: each sector of a table is the old or the new one after a crash, and either
//! is as good (docs/durability.md, "Snapshots").

use super::steps::l1_bytes;
use crate::changed::changed_sectors;
use crate::check::reader::Reader;
use crate::entry::big_endian;
use crate::entry::inspect::{ClaimedSpace, inspect_l1};
use crate::file::Durability;
use crate::geometry::HostCluster;
use crate::job::Job;
use crate::space::refcount::Refcounts;
use crate::{Buf, Result};
use crate::{Counts, Qcow2};

/// The new state of COPIED.
enum Flags<'a> {
    /// COPIED is cleared in every entry.
    Clear,
    /// Set exactly where the count is 1.
    AsCounted(&'a mut Refcounts),
}

impl Flags<'_> {
    async fn of(&mut self, cluster: HostCluster) -> Result<bool> {
        match self {
            Flags::Clear => Ok(false),
            Flags::AsCounted(refcounts) => Ok(refcounts.get(cluster).await? == 1),
        }
    }
}

impl Qcow2 {
    /// Clears COPIED in these L2 tables.
    pub(super) async fn clear_flags(&self, tables: &[u64], job: &Job) -> Result<()> {
        self.rewrite(tables, Flags::Clear, job).await
    }

    /// Clears COPIED in the disk's L1 table.
    pub(super) async fn clear_l1_flags(&self) -> Result<()> {
        let old = self.lock().mapping.tables.l1().to_vec();
        let new = self.without_copied(&old);
        self.write_l1_flags(&old, &new).await
    }

    /// Sets COPIED in the disk's tables where the count is 1, and clears it elsewhere; returns the
    /// L1 table.
    pub(super) async fn set_flags(&self, counts: &mut Counts, job: &Job) -> Result<Vec<u64>> {
        let old = self.disk_l1().await?;
        let mut tables: Vec<u64> = old.iter().map(|&entry| inspect_l1(entry).offset).collect();
        tables.retain(|&offset| offset != 0);
        tables.sort_unstable();
        tables.dedup();
        let flags = Flags::AsCounted(&mut counts.refcounts);
        self.rewrite(&tables, flags, job).await?;
        let mut flags = Flags::AsCounted(&mut counts.refcounts);
        let mut new = old.clone();
        for entry in new.iter_mut().filter(|entry| **entry != 0) {
            let offset = inspect_l1(*entry).offset;
            let cluster = HostCluster(offset >> self.geometry().cluster_bits());
            *entry = self.format.with_copied(*entry, flags.of(cluster).await?);
        }
        self.write_l1_flags(&old, &new).await?;
        Ok(new)
    }

    /// The disk's L1 table as it is on disk: a preparation that is taken back has changed its
    /// flags.
    async fn disk_l1(&self) -> Result<Vec<u64>> {
        let header = self.header();
        let bytes = self
            .file
            .read_new(header.l1_table_offset, header.l1_bytes())
            .await?;
        Ok(bytes.chunks_exact(8).map(big_endian).collect())
    }

    async fn write_l1_flags(&self, old: &[u64], new: &[u64]) -> Result<()> {
        let offset = self.lock().committed.header.l1_table_offset;
        self.write_changes(offset, &l1_bytes(old), &l1_bytes(new))
            .await
    }

    async fn rewrite(&self, tables: &[u64], mut flags: Flags<'_>, job: &Job) -> Result<()> {
        let cluster_bytes = self.geometry().cluster_bytes();
        job.expect(tables.len() as u64 * cluster_bytes);
        let reader = Reader::new(self.file.block_file()).await?;
        let offsets: Vec<(u64, u64)> = tables.iter().map(|&offset| (offset, offset)).collect();
        let mut reads = reader.tables(offsets.into_iter(), cluster_bytes);
        while let Some(read) = reads.next().await {
            // The work after the switch is not cancelled.
            if matches!(flags, Flags::Clear) {
                job.begin(cluster_bytes).await?;
            }
            let (offset, old) = read?;
            let mut new = old.to_vec();
            for words in new.chunks_exact_mut(self.geometry().l2_entry_bytes() as usize) {
                let entry = big_endian(&words[..8]);
                let claim = self.format.inspect_l2(entry, 0).claim;
                let ClaimedSpace::Cluster { offset, .. } = claim else {
                    continue;
                };
                let cluster = HostCluster(offset >> self.geometry().cluster_bits());
                let copied = flags.of(cluster).await?;
                let entry = self.format.with_copied(entry, copied);
                words[..8].copy_from_slice(&entry.to_be_bytes());
            }
            self.write_changes(offset, &old, &new).await?;
            reader.recycle(old);
            job.done(cluster_bytes);
        }
        Ok(())
    }

    /// Writes the sectors of a structure that change.
    pub(in crate::control) async fn write_changes(
        &self,
        offset: u64,
        old: &[u8],
        new: &[u8],
    ) -> Result<()> {
        for run in changed_sectors(old, new) {
            let data = vec![Buf::copy_of(&new[run.clone()])];
            let at = offset + run.start as u64;
            self.file.write(at, data, Durability::Cached).await?;
        }
        Ok(())
    }
}
