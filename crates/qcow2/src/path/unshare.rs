//! A step of a write to a table that a snapshot shares: the table is copied first.

use crate::Result;
use crate::file::Durability;
use crate::geometry::HostCluster;
use crate::mapping::tables::{NewTable, OnDisk};
use crate::plan::Freed;
use crate::{Qcow2, State};

/// A table that is being copied.
struct Copying<'a> {
    image: &'a Qcow2,
    l1_index: u64,
    new: HostCluster,
    epoch: u64,
    ended: bool,
}

impl Copying<'_> {
    /// Lets those go on that wait for the copy.
    fn end(mut self, state: &mut State) {
        self.ended = true;
        state.mapping.end_copy(self.l1_index);
    }
}

impl Drop for Copying<'_> {
    /// Dropped with the copy under way: the epoch is never left, so its space is not reused.
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let mut state = self.image.lock();
        let freed = Freed::Cluster(self.image.geometry().host_offset(self.new));
        state.give_up(self.image.geometry(), freed);
        state.mapping.epochs.abandon(self.epoch);
        state.mapping.end_copy(self.l1_index);
    }
}

impl Qcow2 {
    /// Copies a table that a snapshot shares. The entries' COPIED bits already say which
    /// clusters are shared, so the copy is verbatim.
    pub(crate) async fn unshare_table(&self, l1_index: u64) -> Result<()> {
        self.make_room(1).await?;
        let (old, new, epoch) = {
            let mut state = self.lock();
            self.unlatched(&state)?;
            // The operation that holds requests back may be about to move this table.
            if state.health.holds_changes_back() {
                return Ok(());
            }
            let Some(old) = state.mapping.table_to_copy(l1_index) else {
                return Ok(());
            };
            if state.space.free.clusters() == 0 {
                return Ok(());
            }
            let (new, _) = self.take_clusters(&mut state, 1)[0];
            state.space.raise(new);
            state.protect_cluster(new);
            state.mapping.begin_copy(l1_index);
            (old, new, state.mapping.epochs.enter())
        };
        let copying = Copying {
            image: self,
            l1_index,
            new,
            epoch,
            ended: false,
        };
        let offset = self.geometry().host_offset(new);
        let copied = match self
            .file
            .read_new(old.0, self.geometry().cluster_bytes())
            .await
        {
            Ok(table) => {
                self.file
                    .write(offset.0, vec![table.freeze()], Durability::Cached)
                    .await
            }
            Err(error) => Err(error),
        };
        let mut state = self.lock();
        let state = &mut *state;
        let freed = if copied.is_ok() { old } else { offset };
        if copied.is_ok() {
            state.mapping.tables.set_table(
                l1_index,
                NewTable {
                    offset,
                    on_disk: OnDisk::Table,
                },
            );
        }
        state.give_up(self.geometry(), Freed::Cluster(freed));
        state.committed.note_unflushed();
        state.mapping.epochs.leave(epoch);
        copying.end(state);
        copied
    }
}
