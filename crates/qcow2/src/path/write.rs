//! A write of guest data: the numbered steps, in their order.

use cowslip_boxed::boxed;
use cowslip_queue::IoVec;

use super::admit::{Batch, Origin, Request};
use crate::backing::Backing;
use crate::errno::EIO;
use crate::file::{Durability, Space};
use crate::geometry::GuestCluster;
use crate::plan;
use crate::policy::WritePolicy;
use crate::{Error, Result};
use crate::{InlineVec, Qcow2};

/// Called by a write that has all its space.
pub type OnAllocated<'a> = dyn Fn() + Sync + 'a;

impl Qcow2 {
    /// Writes guest data; the numbered steps. Durable at the next flush, if the image is no
    /// write-through one.
    pub async fn write(
        &self,
        offset: u64,
        data: impl Into<IoVec>,
        below: &dyn Backing,
    ) -> Result<()> {
        let context = (below, Durability::Cached);
        self.write_notify(offset, data.into(), context, &|| ())
            .await
    }

    /// The same; calls back when all of it is admitted.
    pub async fn write_notify(
        &self,
        offset: u64,
        data: IoVec,
        (below, durability): (&dyn Backing, Durability),
        admitted: &OnAllocated<'_>,
    ) -> Result<()> {
        let durability = self.effective(durability);
        if durability == Durability::Cached
            && let Some(written) = self.write_directly(offset, &data, admitted).await
        {
            return written;
        }
        let request = Request::new(offset, data, Origin::Guest);
        self.write_by_tables(request, (below, durability), admitted)
            .await
    }

    /// Apart, since a future is moved with all that it may need.
    #[boxed]
    async fn write_by_tables(
        &self,
        request: Request,
        (below, durability): (&dyn Backing, Durability),
        admitted: &OnAllocated<'_>,
    ) -> Result<()> {
        let needs_cycle = self.perform(request, (below, durability), admitted).await?; // 1-8
        self.settle(durability, needs_cycle).await //          9
    }

    /// Steps 1 to 8 of a write that is durable at the next flush.
    pub(crate) async fn perform_cached(
        &self,
        request: Request,
        below: &dyn Backing,
    ) -> Result<bool> {
        let context = (below, Durability::Cached);
        self.perform(request, context, &|| ()).await
    }

    /// Steps 1 to 8 of a write. Whether it takes a write-back cycle to make it durable.
    async fn perform(
        &self,
        mut request: Request,
        (below, durability): (&dyn Backing, Durability),
        admitted: &OnAllocated<'_>,
    ) -> Result<bool> {
        let mut needs_cycle = false;
        while !request.is_admitted() {
            match request.origin() {
                Origin::Guest => self.ready_for_writes().await?, // 1
                Origin::Below => self.ready_for_changes().await?,
            }
            let mut batch = self.admit(&mut request, below, durability).await?; // 2-6
            if request.is_admitted() {
                admitted();
            }
            if batch.durability == Durability::Durable && !self.have_space(&batch).await {
                batch.flush_apart();
            }
            needs_cycle |= batch.needs_cycle();
            let durable = batch.durability == Durability::Durable;
            let under_way = durable.then(|| self.durable_writes.begin());
            let mut outcome = self.carry_out(&batch, below).await; // 7
            self.erase_failed(&batch, &outcome).await;
            self.publish(batch, &mut outcome); //       8
            if let Some(under_way) = under_way {
                under_way.end();
            }
            outcome.into_iter().collect::<Result<()>>()?;
            if durable {
                self.check_concurrent_flushes().await?;
            }
        }
        Ok(needs_cycle)
    }

    /// Whether all that a batch writes in place has its space in the file. It is leased, so nothing
    /// takes that away meanwhile.
    async fn have_space(&self, batch: &Batch<'_>) -> bool {
        for step in &batch.steps {
            let start = step.write.host.0 + step.write.bytes.start;
            let end = start + step.data.len() as u64;
            if !self.data.has_space(start..end).await {
                return false;
            }
        }
        true
    }

    /// Erases the remains of a failed write in space that other writes fill too, before the failure
    /// is reported: the others may publish the subcluster, and the guest must still see zeroes in
    /// the failed range. A range that the write changed in place stays partly old, partly new, as
    /// after any failed write.
    async fn erase_failed(&self, batch: &Batch<'_>, outcome: &[Result<()>]) {
        for (step, outcome) in batch.steps.iter().zip(outcome) {
            let plan::Change::Fill(filled) = step.write.change else {
                continue;
            };
            if outcome.is_ok() {
                continue;
            }
            let attempted = step.write.attempted(self.geometry());
            {
                let mut state = self.lock();
                // A write that joins from now on fills its subclusters completely, so nothing has
                // to be erased for it.
                state.mapping.joint.no_longer_fresh(step.cluster, attempted);
                if !state.mapping.joint.is_shared(step.cluster) {
                    continue;
                }
            }
            let guest = self.geometry().guest_offset(step.cluster).0;
            let file = self.data.for_guest(step.write.host.0, guest);
            for left in self.geometry().parts_in(&step.write.lease, filled) {
                let start = step.write.host.0 + left.start;
                let erased = file.zero(start, left.end - left.start, Space::Release);
                if erased.await.is_err() {
                    self.lock().mapping.joint.taint(step.cluster, attempted);
                }
            }
        }
    }

    /// Step 8: steps that were written change the mapping; failed ones leave it as it was.
    fn publish(&self, batch: Batch<'_>, outcome: &mut [Result<()>]) {
        let mut state = self.lock();
        let state = &mut *state;
        if batch.durability == Durability::Durable
            && let Some(error) = outcome.iter().find_map(|outcome| outcome.as_ref().err())
        {
            // It is a flush of the file, and one that failed: see `sync`.
            state.health.latch(error.duplicate());
        }
        for (step, outcome) in batch.steps.iter().zip(outcome) {
            let attempted = step.write.attempted(self.geometry());
            let changes = step.write.change != plan::Change::None;
            if changes && outcome.is_ok() && state.mapping.joint.has_failed(step.cluster, attempted)
            {
                let neighbour = std::io::Error::from_raw_os_error(EIO);
                let text = format!("A write beside this one failed in '{}'", self.name());
                *outcome = Err(Error::io(text, neighbour));
                // The remains of this write in shared space stay there, so the others fail in turn.
                state.mapping.joint.taint(step.cluster, attempted);
            }
            if changes && outcome.is_ok() {
                let before = state
                    .mapping
                    .tables
                    .entry(step.cluster)
                    .expect("it was decoded at admission, and leased");
                let (entry, freed) = plan::publish(&self.format, &before, &step.write);
                let promise = step.write.promise;
                state
                    .mapping
                    .tables
                    .set_entry(step.cluster, &entry, promise);
                state.mapping.joint.published(step.cluster);
                if let Some(freed) = freed {
                    state.give_up(self.geometry(), freed);
                }
            }
            if changes {
                if outcome.is_err() {
                    state.mapping.joint.no_longer_fresh(step.cluster, attempted);
                }
                state.leave_joint(&self.format, step.cluster);
            }
        }
        let clusters = batch.steps.iter().map(|step| step.cluster);
        let clusters: InlineVec<GuestCluster> = clusters.collect();
        batch.end(state);
        for cluster in clusters {
            // Its slice was pinned until now.
            if let Ok(entry) = state.mapping.tables.entry(cluster) {
                self.show_directly(state, cluster, &entry);
            }
        }
        state.wake_maintenance_if_dirty();
    }

    /// Step 9 for a request that asks for nothing: the image's policy decides.
    pub(crate) async fn settle_by_policy(&self) -> Result<()> {
        self.settle(self.effective(Durability::Cached), true).await
    }

    /// Step 9 for a request: a cycle if it is to be durable. Where much is dirty, publishing has
    /// woken `maintain`.
    pub(crate) async fn settle(&self, durability: Durability, needs_cycle: bool) -> Result<()> {
        if durability == Durability::Durable && needs_cycle {
            return self.write_back().await;
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn effective(&self, durability: Durability) -> Durability {
        if self.write_policy == WritePolicy::Writethrough {
            Durability::Durable
        } else {
            durability
        }
    }

    /// Writes to the file what has completed and is known to this process alone: changed entries
    /// of tables. Data is in the file when its request completes.
    pub async fn write_back_tables(&self) -> Result<()> {
        let is_written = {
            let state = self.lock();
            !state.mapping.tables.has_dirty() && state.committed.is_settled()
        };
        match is_written || !self.writable {
            true => Ok(()),
            false => self.write_back().await,
        }
    }

    /// Makes durable all that had completed.
    pub async fn flush(&self) -> Result<()> {
        if !self.writable {
            return Ok(());
        }
        self.write_back().await
    }
}
