//! Bytes that processes before this one have written, and that may be in the system's caches alone.
//!
//! A process that is killed leaves its writes to the system, which still has them when the next one
//! opens the file. If the power fails then they are gone, although they were there: so a flush of a
//! disk has to cover them, in the files that this process does not write as well.

use super::AlignedFile;
use crate::sync::{AtomicU8, Ordering};
use crate::{Error, Result};

/// The state of a file with respect to bytes in caches.
#[derive(Debug, Default)]
pub(super) struct LeftBehind(AtomicU8);

const FLUSHED: u8 = 1;
const LOST: u8 = 2;

impl AlignedFile {
    /// Makes durable what other processes have left in the system's caches, once. Files that have
    /// no identity on this host have none there.
    ///
    /// # Errors
    /// I/O. The system reports that once, and what was lost stays so: later calls fail, too.
    pub async fn flush_what_was_left(&self) -> Result<()> {
        let state = &self.left_behind.0;
        match state.load(Ordering::Acquire) {
            FLUSHED => Ok(()),
            LOST => Err(Error::io(
                format!("Could not flush '{}' before", self.file.name()),
                std::io::Error::from_raw_os_error(crate::errno::EIO),
            )),
            _ if self.file.id().is_none() => Ok(()),
            _ => {
                let flushed = self.file.flush().await;
                let now = if flushed.is_ok() { FLUSHED } else { LOST };
                // Of two at a time the one that has failed counts.
                state.fetch_max(now, Ordering::AcqRel);
                flushed.map_err(|error| self.failed("flush", error))
            }
        }
    }
}
