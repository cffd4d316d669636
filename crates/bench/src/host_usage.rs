//! Space of a file in its file system, and the requests that its device has got.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use cowslip_console::error::CommandError;

/// Space of a file.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct HostUsage {
    /// Bytes of space.
    pub bytes: u64,
    /// Runs of it; `None` if the file system does not list them.
    pub extents: Option<u64>,
}

impl HostUsage {
    /// Returns the usage of this file.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn of(path: &Path) -> Result<HostUsage, CommandError> {
        let failed = |e: std::io::Error| {
            let words = cowslip::error::system_words(&e);
            CommandError::new(format!("Could not open '{}': {words}", path.display()))
        };
        let blocks = fs::metadata(path).map_err(failed)?.blocks();
        let file = File::open(path).map_err(failed)?;
        let extents = cowslip_queue::fiemap::extents(&file).ok();
        Ok(HostUsage {
            bytes: blocks * 512,
            extents: extents.map(|extents| extents.len() as u64),
        })
    }
}

/// Flushes that the device under `path` has completed so far, by anyone; `None` where the system
/// does not say, as for file systems on several devices.
pub fn device_flushes(path: &Path) -> Option<u64> {
    let device = fs::metadata(path).ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let stat = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok()?;
    // The sixteenth field, Documentation/block/stat.rst.
    stat.split_whitespace().nth(15)?.parse().ok()
}
