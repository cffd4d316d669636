//! Changing the size of the disk, and the L1 table with it.

use cowslip_boxed::boxed;
use std::ops::Range;

use cowslip_queue::Buf;

use crate::backing::{Backing, NoBacking};
use crate::commit::writeback::is_no_space;
use crate::create::Preallocation;
use crate::disk::ZeroOptions;
use crate::file::{Durability, Event, Space};
use crate::geometry::HostCluster;
use crate::job::Job;
use crate::plan::{EntryRequest, Unref};
use crate::units::round_up;
use crate::{Counts, Qcow2};
use crate::{Error, Result};

impl Qcow2 {
    /// Changes the size of the disk; an added range gets its space as the plan says. Where the size
    /// changes at which the area of the VM state begins, that is empty afterwards.
    #[boxed]
    pub async fn resize(
        &self,
        size: u64,
        below: &dyn Backing,
        plan: (Preallocation, &Job),
    ) -> Result<()> {
        if !size.is_multiple_of(512) {
            return Err(Error::Invalid(
                "The new size must be a multiple of 512".to_string(),
            ));
        }
        let _nobody_uses_vm_state = self.vm_state.take().await;
        let old = self.size();
        let header = self.header();
        if header.nb_snapshots > 0 && header.version < 3 {
            let text = "Can't resize a v2 image which has snapshots";
            return Err(Error::Invalid(text.to_string()));
        }
        self.lock().bitmaps.refuse_resize(size)?;
        self.ready_for_writes().await?;
        self.ready_bitmaps_for_resize(size).await?;
        if size > old {
            self.grow_disk(old..size, below, plan).await
        } else {
            self.shrink_disk(size..old, plan.1).await
        }
    }

    /// Grows the disk. The range beyond the old end may hold stale bytes, in the last cluster and
    /// in the layer below: it is zeroed before it can be read.
    async fn grow_disk(
        &self,
        added: Range<u64>,
        below: &dyn Backing,
        plan: (Preallocation, &Job),
    ) -> Result<()> {
        let entries = self.geometry().l1_entries_for(added.end);
        self.refuse_l1(entries)?;
        let unit = self.geometry().cluster_bytes();
        let visible = round_up(added.start.max(below.size()), unit);
        let mut stale = added.start..visible.min(round_up(added.end, unit));
        let part = stale.start..round_up(stale.start, self.geometry().subcluster_bytes());
        // No guest has written here: what reads as zeroes is left alone.
        if part.end <= stale.end && self.is_zero(part.clone(), below).await? {
            stale.start = part.end;
        }
        let mut _growth = None;
        if entries > self.lock().mapping.tables.l1().len() as u64 {
            _growth = Some(self.probe.l1_table_grows());
            self.lengthen_l1(entries).await?;
        }
        if stale.start < stale.end {
            let options = ZeroOptions {
                space: Space::Keep,
                ..ZeroOptions::default()
            };
            self.write_zeroes(stale, below, options).await?;
            self.write_back().await?;
        }
        // A shrinking that a crash cut short has left entries beyond the end, or a VM state is
        // there.
        let whole = round_up(added.start, unit)..round_up(added.end, unit);
        if whole.start < whole.end {
            let rest = self
                .change_entries(whole.clone(), below, (EntryRequest::Discard, Unref::Free))
                .await?;
            debug_assert!(rest.is_empty(), "a discard never writes");
            self.write_back().await?;
        }
        if self.loses_vm_state(added.start, added.end) {
            self.free_behind(whole.end).await?;
            self.write_back().await?;
        }
        // A raw data file is read through the tables, so they are complete, as QEMU makes them.
        let how = match plan.0 {
            Preallocation::Off if self.raw_data => Preallocation::Metadata,
            how => how,
        };
        if how != Preallocation::Off {
            self.preallocate(added.clone(), below, (how, plan.1))
                .await?;
        }
        self.set_size(added.end).await
    }

    /// The size first, then the space (invariant D6).
    async fn shrink_disk(&self, removed: Range<u64>, job: &Job) -> Result<()> {
        self.set_size(removed.start).await?;
        // The disk is smaller, durably. If its space cannot be released for lack of space, nothing
        // has failed, unless a root or a flush has: then nothing can follow in this session. The
        // change of entries stays in memory for a later cycle, or the entries stay as they are, if
        // their table is shared and there is no space for a copy.
        let freed = async {
            self.free_beyond_end(removed.clone()).await?;
            self.give_up_emptied(removed.start, job).await
        };
        match freed.await {
            Err(error) if is_no_space(&error) && !self.is_latched() => Ok(()),
            freed => freed,
        }
    }

    /// Discards everything behind the end. Nothing below shows through there, so nothing has to
    /// read as zeroes: else version 2, which cannot say that of a cluster, would keep them, and
    /// they would be taken for VM state.
    async fn free_beyond_end(&self, removed: Range<u64>) -> Result<()> {
        let nothing = NoBacking;
        let unit = self.geometry().cluster_bytes();
        let mut whole = round_up(removed.start, unit)..round_up(removed.end, unit);
        // What will be VM state first: that is emptied even where the rest finds no space.
        if self.loses_vm_state(removed.end, removed.start) {
            let vm_state = self.geometry().vm_state_offset(removed.start);
            self.drop_shared_behind(removed.start).await?;
            self.free_behind(vm_state).await?;
            whole.end = whole.end.min(vm_state);
        }
        if whole.start < whole.end {
            let ask = (EntryRequest::Discard, Unref::Free);
            let rest = self.change_entries(whole, &nothing, ask).await?;
            debug_assert!(rest.is_empty(), "a discard never writes");
        }
        if self.raw_data {
            self.data.set_len(removed.start).await?;
        }
        self.write_back().await?;
        // An image that is shrunk should not keep space ahead.
        let hint = self.lock().committed.header.extensions.allocation;
        if let Some(hint) = hint {
            let _turn = self.turn.take().await;
            let written = self.write_allocation_hint(hint.with_closes(0));
            self.latch_if_cancelled(written).await?;
        }
        Ok(())
    }

    async fn set_size(&self, size: u64) -> Result<()> {
        let _drained = self.drain().await;
        let mut turn = self.turn.take().await;
        self.latch_if_cancelled(async {
            self.cycle(&mut turn).await?;
            let mut header = self.header();
            header.size = size;
            // A raw data file is as long as the disk: never shorter, so it grows before.
            if self.raw_data && size > self.size() {
                self.data.set_len(size).await?;
            }
            self.write_header(&header).await?;
            self.lock().bitmaps.resize(size);
            Ok(())
        })
        .await
    }

    /// Extends the L1 table to `entries` entries, while no request that changes something is under
    /// way.
    pub(crate) async fn lengthen_l1(&self, entries: u64) -> Result<()> {
        let _drained = self.drain().await;
        let mut turn = self.turn.take().await;
        self.latch_if_cancelled(self.move_l1(&mut turn, entries))
            .await
    }

    /// A longer L1 table, elsewhere; then the header; then the old one is freed.
    async fn move_l1(&self, counts: &mut Counts, entries: u64) -> Result<()> {
        self.cycle(counts).await?;
        let geometry = *self.geometry();
        let clusters = geometry.clusters_for(entries * 8);
        self.file.reach(Event::L1GrowAllocTable).await;
        let first = self.take_run(counts, clusters).await?;
        let mut l1 = self.lock().mapping.tables.l1().to_vec();
        l1.resize(entries as usize, 0);
        let mut bytes: Vec<u8> = l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        bytes.resize((clusters << geometry.cluster_bits()) as usize, 0);
        let (old, old_clusters) = {
            let state = self.lock();
            let clusters = geometry.clusters_for(state.committed.header.l1_bytes());
            (
                state.committed.header.l1_table_offset >> geometry.cluster_bits(),
                clusters,
            )
        };
        let offset = first << geometry.cluster_bits();
        self.file.reach(Event::L1GrowWriteTable).await;
        let written = self.write_new_l1(counts, first..first + clusters, Buf::from(bytes));
        written.await?;
        self.file.reach(Event::L1GrowActivateTable).await;
        let mut header = self.header();
        header.l1_table_offset = offset;
        header.l1_size = entries as u32;
        self.write_header(&header).await?;
        {
            let mut state = self.lock();
            state.mapping.tables.set_l1(l1);
            for cluster in first..first + clusters {
                state.protect_cluster(HostCluster(cluster));
            }
        }
        self.free_metadata(counts, old..old + old_clusters).await?;
        // Not with the next cycle: one that fails would leave the old place counted.
        counts.refcounts.write_dirty().await
    }

    /// Writes a table that nothing refers to yet, and its counts. After a failure its space is free
    /// again.
    pub(crate) async fn write_new_l1(
        &self,
        counts: &mut Counts,
        clusters: Range<u64>,
        table: Buf,
    ) -> Result<()> {
        let mut raised = clusters.start..clusters.start;
        let written = async {
            for cluster in clusters.clone() {
                counts.refcounts.add(HostCluster(cluster), 1).await?;
                raised.end += 1;
            }
            counts.refcounts.write_dirty().await?;
            let offset = clusters.start << self.geometry().cluster_bits();
            self.file
                .write(offset, vec![table], Durability::Cached)
                .await?;
            self.barrier().await
        };
        let outcome = written.await;
        if outcome.is_err() {
            // A later cycle writes these counts. The failure that led here is the one to report.
            drop(self.free_metadata(counts, raised).await);
        }
        outcome
    }

    /// Takes neighbouring clusters for a structure that has to be in one piece.
    pub(crate) async fn take_run(&self, counts: &mut Counts, clusters: u64) -> Result<u64> {
        // The caller counts them itself.
        self.release_counted_ahead(counts).await?;
        loop {
            {
                let mut state = self.lock();
                if state.space.free.has_run(clusters) {
                    let (start, taken, _) = state
                        .space
                        .free
                        .take(clusters)
                        .expect("there is such a run");
                    debug_assert_eq!(taken, clusters);
                    return Ok(start.0);
                }
            }
            self.find_room(counts, clusters).await?;
        }
    }
}
