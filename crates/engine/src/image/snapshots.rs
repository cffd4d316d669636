//! Internal snapshots of an image.

use super::Image;
use crate::Result;
use crate::job::Job;
use crate::qcow2::Qcow2;
use crate::qcow2::inspect::SnapshotInfo;
use crate::qcow2::snapshot::{NewSnapshot, SnapshotChoice};

impl Image {
    /// The internal snapshots, in the order of the image's table; a raw image has none.
    ///
    /// # Errors
    /// I/O, or a table that is corrupt.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        match self.top.qcow2() {
            None => Ok(Vec::new()),
            Some(image) => image.snapshots().await,
        }
    }

    /// Keeps the disk as it is now as an internal snapshot, durably; returns its ID. Requests wait
    /// meanwhile, reads too.
    ///
    /// # Errors
    /// `Unsupported` where the format cannot (raw, an external data file); `Invalid` for a name
    /// that is too long, too many snapshots, or counts too narrow for one more; `Corrupt` if a
    /// check finds more than leaks and wrong COPIED bits; no space,
    /// [`Error::Cancelled`](crate::Error::Cancelled): then the image is as it was. After any other
    /// error it is latched, and opening it again finds the snapshot made or not.
    pub async fn create_snapshot(&self, new: &NewSnapshot, job: &Job) -> Result<String> {
        let image = self.with_snapshots()?;
        let created = image.create_snapshot(new, job).await;
        image.mark_corrupt_on_error(created).await
    }

    /// Restores the disk to a snapshot, its size too, durably. What it holds
    /// now is lost, unless another snapshot has it.
    ///
    /// # Errors
    /// As [`Image::create_snapshot`]; `Io` with ENOENT for an unknown snapshot; `Invalid` for
    /// another size in version 2.
    pub async fn apply_snapshot(&self, choice: &SnapshotChoice, job: &Job) -> Result<()> {
        let image = self.with_snapshots()?;
        let applied = image.apply_snapshot(choice, job).await;
        image.mark_corrupt_on_error(applied).await
    }

    /// Deletes a snapshot, durably, and frees what only it had.
    ///
    /// # Errors
    /// As [`Image::apply_snapshot`].
    pub async fn delete_snapshot(&self, choice: &SnapshotChoice, job: &Job) -> Result<()> {
        let image = self.with_snapshots()?;
        let deleted = image.delete_snapshot(choice, job).await;
        image.mark_corrupt_on_error(deleted).await
    }

    fn with_snapshots(&self) -> Result<&Qcow2> {
        self.validate_write(0, 0)?;
        self.qcow2_for("an internal snapshot of")
    }
}
