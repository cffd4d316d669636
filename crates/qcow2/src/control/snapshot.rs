//! Internal snapshots: the stages of their changes.
//!
//! A snapshot is an L1 table of its own; what two L1 tables reach is counted twice and has no
//! COPIED bit, so that the next write copies it. All three changes have one shape: what the new
//! state needs is made first, while nothing refers to it; one write of the header is the change
//! (invariant D6); what only the old state needed goes last. Nothing else is under way meanwhile,
//! reads neither. The image is checked before anything changes, since a count that is too low would
//! free clusters in use.
//!
//! | stage, with a barrier after each | create | apply | delete |
//! | --- | --- | --- | --- |
//! | mark | the dirty bit (version 3) | | |
//! | prepare | counts go up; a copy of L1, a longer snapshot table; COPIED is cleared in the active tables | counts go up; a new L1 table; COPIED is cleared in the snapshot's tables | a shorter snapshot table |
//! | switch | snapshot table, without the dirty bit | L1 table and size | snapshot table, with the dirty bit |
//! | settle | the old snapshot table goes | counts go down | counts go down |
//! | flags | | | COPIED is set where the count is 1; then the dirty bit is cleared |
//!
//! A crash before the switch leaves the old state, one after it the new state. What it may leave
//! besides is leaks and, while a snapshot is made or deleted, COPIED bits that differ from the
//! counts: under the dirty bit, or in version 2, which has none, where they are harmless
//! (docs/durability.md, "Snapshots"). Until the switch the job may be cancelled: counts and flags
//! are set back.

mod flags;
mod list;
mod steps;
mod tree;
mod unflag;

use crate::errno::ENOENT;
use crate::header::incompatible;
use crate::inspect::{SnapshotInfo, inspect};
use crate::job::Job;
use crate::{Counts, Qcow2};
use crate::{Error, Result};

pub use list::{NAME_BYTES_MAX, NewSnapshot, SnapshotChoice};
pub(crate) use steps::{read_list, root_of};

use list::{Entry, Root, SnapshotList};
use steps::{Preparation, l1_bytes};
use tree::Balance;

impl Qcow2 {
    /// The snapshots, in the table's order.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        Ok(inspect(self.file.block_file()).await?.snapshots)
    }

    /// Makes a snapshot of the disk as it is; returns its ID.
    pub async fn create_snapshot(&self, new: &NewSnapshot, job: &Job) -> Result<String> {
        self.refuse_data_file()?;
        self.while_still(async |counts| self.create_in_turn(counts, new, job).await)
            .await
    }

    /// Restores the disk to a snapshot.
    pub async fn apply_snapshot(&self, choice: &SnapshotChoice, job: &Job) -> Result<()> {
        if !self.lock().bitmaps.list().is_empty() {
            // They would have to follow a change that no guest has made.
            return Err(Error::Invalid(
                "Device has active dirty bitmaps".to_string(),
            ));
        }
        self.refuse_unknown(choice).await?;
        // Those that this session has removed are on disk yet.
        self.ready_for_writes().await?;
        let _nobody_uses_vm_state = self.vm_state.take().await;
        self.while_still(async |counts| {
            let list = self.begin_snapshots(counts, job).await?;
            let entry = list.entry(self.find(&list, choice)?);
            self.apply_in_turn(counts, entry, job).await
        })
        .await
    }

    /// Deletes a snapshot.
    pub async fn delete_snapshot(&self, choice: &SnapshotChoice, job: &Job) -> Result<()> {
        self.refuse_unknown(choice).await?;
        self.while_still(async |counts| self.delete_in_turn(counts, choice, job).await)
            .await
    }

    /// Rewrites the snapshot table if entries lack fields that version 3 requires.
    pub(crate) async fn complete_snapshots(&self, job: &Job) -> Result<()> {
        self.while_still(async |counts| self.complete_in_turn(counts, job).await)
            .await
    }

    /// Changes snapshots while nothing else is under way, to the end or to what can be taken back.
    async fn while_still<T>(
        &self,
        change: impl AsyncFnOnce(&mut Counts) -> Result<T>,
    ) -> Result<T> {
        self.ready_for_changes().await?;
        let _still = self.stand_still().await?;
        let mut turn = self.turn.take().await;
        let _change = self.probe.snapshots_change();
        self.latch_if_cancelled(change(&mut turn)).await
    }

    async fn create_in_turn(
        &self,
        counts: &mut Counts,
        new: &NewSnapshot,
        job: &Job,
    ) -> Result<String> {
        let list = self.begin_snapshots(counts, job).await?;
        let header = self.header();
        let old_table = self
            .geometry()
            .clusters_at(header.snapshots_offset, list.encode().len() as u64);
        let mut root = Root {
            l1_offset: 0,
            l1_size: header.l1_size,
            disk_bytes: header.size,
        };
        let list = list.completed(header.size);
        // An impossible request is refused before anything is read.
        list.with(new, root)?;
        let l1 = self.lock().mapping.tables.l1().to_vec();
        let tree = self.read_tree(l1, job).await?;
        let l1 = self.without_copied(&tree.l1);
        let balance = Balance::new(Some(tree.references), None);
        let mut preparation = Preparation::new(balance, tree.tables.into_keys().collect());
        preparation.changes_active = true;
        let prepared = async {
            root.l1_offset = self
                .place_structure(counts, &mut preparation, l1_bytes(&l1))
                .await?;
            let (longer, id) = list.with(new, root)?;
            let table = self
                .place_structure(counts, &mut preparation, longer.encode())
                .await?;
            self.prepare(counts, &mut preparation, job).await?;
            Ok((table, id))
        };
        let prepared = prepared.await;
        let ((table, id), _) = self.or_undo(counts, preparation, prepared, job).await?;
        self.switch(counts, l1, |header| {
            header.nb_snapshots += 1;
            header.snapshots_offset = table;
            // All that it warned of is durable.
            header.incompatible_features &= !incompatible::DIRTY;
        })
        .await?;
        let nothing = Balance::new(None, None);
        self.give_up_old(counts, &nothing, &[old_table], job)
            .await?;
        self.end_snapshots(counts).await?;
        Ok(id)
    }

    async fn apply_in_turn(&self, counts: &mut Counts, entry: &Entry, job: &Job) -> Result<()> {
        let header = self.header();
        let old_l1 = self
            .geometry()
            .clusters_at(header.l1_table_offset, header.l1_bytes());
        let disk_bytes = self.disk_bytes_of(entry, &header)?;
        let l1 = self.lock().mapping.tables.l1().to_vec();
        let lost = self.read_tree(l1, job).await?;
        let tree = self.snapshot_tree(entry, job).await?;
        let mut l1 = self.without_copied(&tree.l1);
        // QEMU's tools write a table as long as the disk needs; the VM's state lies behind that.
        let entries = self.geometry().l1_entries_for(disk_bytes).max(1);
        l1.resize(l1.len().max(entries as usize), 0);
        let balance = Balance::new(Some(tree.references), Some(lost.references));
        let mut preparation = Preparation::new(balance, tree.tables.into_keys().collect());
        let prepared = async {
            let at = self
                .place_structure(counts, &mut preparation, l1_bytes(&l1))
                .await?;
            self.prepare(counts, &mut preparation, job).await?;
            Ok(at)
        };
        let prepared = prepared.await;
        let (l1_offset, balance) = self.or_undo(counts, preparation, prepared, job).await?;
        let l1_size = l1.len() as u32;
        self.switch(counts, l1, |header| {
            header.l1_table_offset = l1_offset;
            header.l1_size = l1_size;
            header.size = disk_bytes;
        })
        .await?;
        self.give_up_old(counts, &balance, &[old_l1], job).await?;
        self.end_snapshots(counts).await
    }

    async fn delete_in_turn(
        &self,
        counts: &mut Counts,
        choice: &SnapshotChoice,
        job: &Job,
    ) -> Result<()> {
        let list = self.begin_snapshots(counts, job).await?;
        let position = self.find(&list, choice)?;
        let entry = list.entry(position);
        let header = self.header();
        let snapshot_l1_bytes = u64::from(entry.fixed.l1_size) * 8;
        let old = [
            self.geometry()
                .clusters_at(header.snapshots_offset, list.encode().len() as u64),
            self.geometry()
                .clusters_at(entry.fixed.l1_offset, snapshot_l1_bytes),
        ];
        let lost = self.snapshot_tree(entry, job).await?;
        let balance = Balance::new(None, Some(lost.references));
        let mut preparation = Preparation::new(balance, Vec::new());
        let shorter: SnapshotList = list.without(position).completed(header.size);
        let prepared = self
            .prepare_table(counts, &mut preparation, &shorter, job)
            .await;
        let (table, balance) = self.or_undo(counts, preparation, prepared, job).await?;
        let l1 = self.lock().mapping.tables.l1().to_vec();
        self.switch(counts, l1, |header| {
            header.nb_snapshots = shorter.len();
            header.snapshots_offset = table;
            if header.version >= 3 {
                header.incompatible_features |= incompatible::DIRTY;
            }
        })
        .await?;
        self.give_up_old(counts, &balance, &old, job).await?;
        self.right_flags(counts, job).await?;
        self.end_snapshots(counts).await
    }

    /// Writes a new table of snapshots to new space, and counts all that refers to something new.
    /// Returns the table's offset.
    async fn prepare_table(
        &self,
        counts: &mut Counts,
        preparation: &mut Preparation,
        list: &SnapshotList,
        job: &Job,
    ) -> Result<u64> {
        let table = self
            .place_structure(counts, preparation, list.encode())
            .await?;
        self.prepare(counts, preparation, job).await?;
        Ok(table)
    }

    async fn complete_in_turn(&self, counts: &mut Counts, job: &Job) -> Result<()> {
        let list = self.begin_snapshots(counts, job).await?;
        let header = self.header();
        let complete = list.completed(header.size);
        if complete == list {
            return self.end_snapshots(counts).await;
        }
        let old_table = self
            .geometry()
            .clusters_at(header.snapshots_offset, list.encode().len() as u64);
        let nothing = Balance::new(None, None);
        let mut preparation = Preparation::new(Balance::new(None, None), Vec::new());
        let prepared = self
            .prepare_table(counts, &mut preparation, &complete, job)
            .await;
        let (table, _) = self.or_undo(counts, preparation, prepared, job).await?;
        let l1 = self.lock().mapping.tables.l1().to_vec();
        self.switch(counts, l1, |header| header.snapshots_offset = table)
            .await?;
        self.give_up_old(counts, &nothing, &[old_table], job)
            .await?;
        self.end_snapshots(counts).await
    }
}

/// Returns the error for a snapshot that does not exist.
fn not_found(name: &str, choice: &SnapshotChoice) -> Error {
    Error::io(
        format!("Can't find snapshot {choice} in '{name}'"),
        std::io::Error::from_raw_os_error(ENOENT),
    )
}
