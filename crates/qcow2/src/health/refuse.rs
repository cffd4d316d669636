//! Requests that are refused: of a latched image, and those that would change metadata as if it
//! were guest data.

use crate::entry::L2Entry;
use crate::geometry::HostOffset;
use crate::plan::Freed;
use crate::{Error, Result};
use crate::{Qcow2, State};

impl Qcow2 {
    /// The latch, for requests that write or flush.
    pub(crate) fn unlatched(&self, state: &State) -> Result<()> {
        state.health.unlatched(self.name())
    }

    /// The outcome of a request that writes. If it met damage, the image is marked, so that it is
    /// not written before its repair.
    pub async fn mark_corrupt_on_error<T>(&self, outcome: Result<T>) -> Result<T> {
        if matches!(outcome, Err(Error::Corrupt { .. })) {
            self.mark_corrupt().await;
        }
        outcome
    }

    /// Refuses what would touch metadata (invariant S3), and remembers that the image is damaged.
    pub(crate) fn protect(&self, state: &mut State, host: HostOffset) -> Result<()> {
        if self.format.data_file
            || !state
                .space
                .protected
                .contains(self.geometry().host_cluster(host))
        {
            return Ok(());
        }
        let error = Error::Corrupt {
            file: self.name().to_string(),
            structure: "cluster",
            offset: host.0,
            detail: "guest data is mapped to a cluster that holds metadata".to_string(),
        };
        state.health.latch_for_damage(error.duplicate());
        Err(error)
    }

    /// Refuses to change what is mapped to metadata, beyond the end of the file, or to what the
    /// file has grown by and is free, be it in place or by giving the old space up (invariant S3):
    /// what is freed is counted down, punched and reused.
    pub(crate) fn refuse_misplaced(&self, state: &mut State, entry: &L2Entry) -> Result<()> {
        let freed = match Freed::of(entry) {
            Some(freed) if !self.format.data_file => freed,
            _ => return Ok(()),
        };
        for cluster in freed.clusters(self.geometry()) {
            let host = self.geometry().host_offset(cluster);
            self.protect(state, host)?;
            let space = &state.space;
            if cluster.0 >= space.claimed() || space.is_free_growth(cluster) {
                return Err(Error::Corrupt {
                    file: self.name().to_string(),
                    structure: "cluster",
                    offset: host.0,
                    detail: "guest data is mapped beyond the end of the file".to_string(),
                });
            }
        }
        Ok(())
    }

    /// Returns whether an earlier failure keeps everybody from writing.
    pub(crate) fn is_latched(&self) -> bool {
        self.lock().health.is_latched()
    }

    /// Returns whether the session has ended.
    pub fn is_closed(&self) -> bool {
        self.lock().health.is_closed()
    }

    /// Returns whether a failure has latched it, so that the medium may have less than the system
    /// shows of its file.
    pub fn has_failed(&self) -> bool {
        self.lock().health.has_failed()
    }

    /// Latches the image: every later change fails with the reason.
    pub(crate) fn latch(&self, reason: &Error) {
        self.lock().health.latch(reason.duplicate());
    }

    /// Refuses everything but a close: the state in memory is that of the image before the change.
    pub fn end_session(&self) {
        self.latch(&Error::Latched(self.name().to_string()));
    }

    /// The outcome of work that cannot be taken back: a failure latches the image.
    pub(crate) fn or_latched<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome {
            self.latch(error);
        }
        outcome
    }
}
