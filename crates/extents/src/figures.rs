//! Figures of one file.

use cowslip_console::error::CommandError;
use cowslip_queue::fiemap::{self, Flags};

use crate::host::AlignedFile;
use crate::look::Subject;
use crate::summary;

/// Figures of one file, in short.
#[derive(Clone, Debug)]
pub struct Figures {
    /// `xfs`, `ext4` …
    pub file_system: String,
    /// Extents, as `perfect` counts them; `None` where the file system does not list places.
    pub extents: Option<u64>,
    /// The fewest that there could be.
    pub perfect: u64,
    /// Bytes that were never written.
    pub unwritten_bytes: u64,
    /// Bytes that are stored in another form than they read.
    pub encoded_bytes: u64,
}

/// Sums up one file, once what is dirty has been written back.
///
/// # Errors
/// It is no regular file, or the system's.
pub fn figures(name: &str) -> Result<Figures, CommandError> {
    let mut subject = Subject::new(AlignedFile::open(name, None)?, None, None);
    let summary = subject.sum_up(fiemap::Sync::First)?;
    let bytes_of = |wanted: Flags| {
        let at = summary::MARKS.iter().position(|(flag, _)| *flag == wanted);
        at.map_or(0, |at| summary.marked[at].bytes)
    };
    Ok(Figures {
        extents: subject.host.has_places().then_some(summary.expressed()),
        perfect: summary.perfect(),
        unwritten_bytes: bytes_of(Flags::UNWRITTEN),
        encoded_bytes: bytes_of(Flags::ENCODED),
        file_system: subject.host.on.kind,
    })
}
