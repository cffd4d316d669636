//! Discards all data of an image, as a commit does: the backing file shows then.
//!
//! An empty L1 table is written elsewhere, and the header changes to it (invariant D6): that one
//! write of sector 0 is the moment. The clusters of the old table are found through it, and
//! freed afterwards.
//!
//! | stage, with a barrier after each | what a crash after it leaves |
//! | --- | --- |
//! | an empty L1 table, and its counts, in free space | a full image, leaks |
//! | the header refers to it | an empty image, leaks |
//! | the counts of all that the old table reached go down | the same, fewer leaks |
//! | the table's old place is an empty table, and the header refers to it | the same |
//!
//! The last stage is for the file's length: the table lies where it did, in front of what became
//! free, and the file is cut behind the last cluster in use. Its holes are punched. Internal
//! snapshots keep what they refer to.
//!
//! The session ends with it: nothing but closing may follow, and reads see the backing file.

use cowslip_boxed::boxed;
use std::ops::Range;

use cowslip_queue::Buf;

use crate::file::Event;
use crate::geometry::{HostCluster, HostOffset};
use crate::plan::Freed;
use crate::{Counts, Qcow2};
use crate::{Error, Result};

/// Clusters whose counts are looked through at a time.
const SCAN_CLUSTERS: u64 = 1 << 15;
/// Slices of counts that wait to be written, at most.
const DIRTY_SLICES_MAX: usize = 256;

impl Qcow2 {
    /// Empties the image, and ends the session: nothing but closing may follow.
    #[boxed]
    pub async fn make_empty(&self) -> Result<()> {
        self.ready_for_changes().await?;
        self.close().await?;
        let _still = self.stand_still().await?;
        let mut counts = self.turn.take().await;
        let emptied = self
            .latch_if_cancelled(self.empty_in_turn(&mut counts))
            .await;
        self.end_session();
        emptied
    }

    async fn empty_in_turn(&self, counts: &mut Counts) -> Result<()> {
        // Writes back the changes made since the close.
        self.cycle(counts).await?;
        let old_l1 = self.lock().mapping.tables.l1().to_vec();
        if old_l1.iter().all(|&entry| entry == 0) {
            return Ok(());
        }
        let bits = self.geometry().cluster_bits();
        let clusters = self.geometry().clusters_for(old_l1.len() as u64 * 8);
        let first = self.take_run(counts, clusters).await?;
        let old_first = self.lock().committed.header.l1_table_offset >> bits;
        let old_tables = self.lock().mapping.sound_tables();
        self.move_to_empty_l1(counts, first..first + clusters)
            .await?;
        // The image is empty, durably, and in memory: no request reads the clusters freed now. A
        // failure from here on leaves leaks.
        self.lock().forget_tables(vec![0; old_l1.len()]);
        let freed_all = self.free_reached(counts, &old_tables).await;
        let left = match first < old_first {
            true => old_first,
            false => {
                // The old place is still counted.
                self.move_l1_within(old_first..old_first + clusters).await?;
                first
            }
        };
        self.free_metadata(counts, left..left + clusters).await?;
        counts.refcounts.write_dirty().await?;
        self.barrier().await?;
        self.cut_and_punch(counts).await?;
        freed_all
    }

    /// An empty L1 table in space that was taken for it, and the header that refers to it.
    async fn move_to_empty_l1(&self, counts: &mut Counts, clusters: Range<u64>) -> Result<()> {
        self.file.reach(Event::EmptyImagePrepare).await;
        let zeroes = self.empty_table(&clusters);
        self.write_new_l1(counts, clusters.clone(), zeroes).await?;
        self.refer_to_l1(clusters.start).await
    }

    /// The same in space that nothing refers to any more but its count.
    async fn move_l1_within(&self, clusters: Range<u64>) -> Result<()> {
        let offset = clusters.start << self.geometry().cluster_bits();
        let zeroes = vec![self.empty_table(&clusters)];
        self.file
            .write(offset, zeroes, crate::file::Durability::Cached)
            .await?;
        self.barrier().await?;
        self.refer_to_l1(clusters.start).await
    }

    fn empty_table(&self, clusters: &Range<u64>) -> Buf {
        let bytes = (clusters.end - clusters.start) << self.geometry().cluster_bits();
        crate::path::cow::zeroes(bytes as usize)
    }

    async fn refer_to_l1(&self, first: u64) -> Result<()> {
        let mut header = self.header();
        header.l1_table_offset = first << self.geometry().cluster_bits();
        self.write_header(&header).await
    }

    /// Lowers the counts of all that these tables reached, and their own, durably. Clusters that
    /// no sound entry refers to stay counted, and so does metadata.
    async fn free_reached(&self, counts: &mut Counts, tables: &[HostOffset]) -> Result<()> {
        let mut damage = None;
        for &table in tables {
            let lowered = self.free_table(counts, table).await;
            if let Err(error @ Error::Corrupt { .. }) = lowered {
                damage.get_or_insert(error);
            } else {
                lowered?;
            }
        }
        counts.refcounts.write_dirty().await?;
        self.barrier().await?;
        damage.map_or(Ok(()), Err)
    }

    async fn free_table(&self, counts: &mut Counts, table: HostOffset) -> Result<()> {
        let bytes = self
            .file
            .read_new(table.0, self.geometry().cluster_bytes())
            .await?;
        let mut outcome = Ok(());
        for words in bytes.chunks_exact(self.geometry().l2_entry_bytes() as usize) {
            let entry = self
                .format
                .l2_entry(words)
                .filter(|_| !self.format.data_file);
            let Some(freed) = entry.and_then(|entry| Freed::of(&entry)) else {
                continue;
            };
            for cluster in freed.clusters(self.geometry()) {
                let lowered = self.lower(counts, cluster).await;
                outcome = outcome.and(lowered);
            }
        }
        let own = self.geometry().host_cluster(table);
        outcome = outcome.and(counts.refcounts.add(own, -1).await.map(drop));
        if counts.refcounts.dirty_slices() >= DIRTY_SLICES_MAX {
            counts.refcounts.write_dirty().await?;
        }
        outcome
    }

    async fn lower(&self, counts: &mut Counts, cluster: HostCluster) -> Result<()> {
        if self.lock().space.protected.contains(cluster) {
            return Err(Error::Corrupt {
                file: self.name().to_string(),
                structure: "cluster",
                offset: self.geometry().host_offset(cluster).0,
                detail: "guest data is mapped to a cluster that holds metadata".to_string(),
            });
        }
        counts.refcounts.add(cluster, -1).await.map(drop)
    }

    /// Truncates the file behind the last cluster in use, and punches free space before.
    async fn cut_and_punch(&self, counts: &mut Counts) -> Result<()> {
        let bits = self.geometry().cluster_bits();
        let end = self.geometry().clusters_for(self.file.len().await?);
        let (mut at, mut used_to, mut free) = (0, 0, Vec::new());
        while at < end {
            let to = end.min(at + SCAN_CLUSTERS);
            let runs = counts.refcounts.zero_runs(at..to).await?;
            let last_used = match runs.last() {
                Some(run) if run.end == to => (run.start > at).then_some(run.start),
                Some(_) | None => Some(to),
            };
            used_to = last_used.unwrap_or(used_to);
            free.extend(runs);
            at = to;
        }
        if self.file.capabilities().extends_with_zeroes {
            self.file.set_len(used_to << bits).await?;
        }
        for run in free.iter().filter(|run| run.start < used_to) {
            let len = run.end.min(used_to) - run.start;
            // A host that cannot give space back keeps it.
            drop(self.file.discard(run.start << bits, len << bits).await);
        }
        if self.format.data_file {
            // A VM state lies behind the disk.
            let end = self.data.len().await?.max(self.size());
            drop(self.data.discard(0, end).await);
        }
        Ok(())
    }
}
