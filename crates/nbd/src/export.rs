//! [`Export`]: a disk as a server offers it.
//!
//! The server validates every request before the disk sees it: ranges lie within the size, writes
//! come to writable exports only, lengths are not 0 and fit the block sizes. Many requests are in
//! flight at once and complete in any order; once started, a request runs to its end, whatever
//! becomes of the client.

use std::fmt;
use std::io;
use std::sync::Arc;

use cowslip_block::Disk;
use cowslip_block::disk::{DiskFuture, Extent};

pub use cowslip_block::disk::ZeroOptions;
pub use cowslip_block::file::{Durability, Space};

use crate::protocol::handshake::BlockSizes;
use crate::protocol::{AllocationFlags, BASE_ALLOCATION, ErrorCode, PAYLOAD_BYTES_MAX};

/// Preferred block size at least: a page, below which no client gains anything.
const PREFERRED_BYTES_MIN: u64 = 4096;

/// A failed request, as the client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportError {
    /// The reason, in the protocol's words.
    pub code: ErrorCode,
    /// The reason for humans; clients with structured replies get it.
    pub message: String,
}

impl ExportError {
    /// An error with a message.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> ExportError {
        ExportError {
            code,
            message: message.into(),
        }
    }

    /// An error by its Linux `errno`.
    pub fn from_errno(errno: i32, message: impl Into<String>) -> ExportError {
        ExportError::new(ErrorCode::from_errno(errno), message)
    }
}

impl From<io::Error> for ExportError {
    fn from(error: io::Error) -> ExportError {
        let code = match (error.raw_os_error(), error.kind()) {
            (Some(errno), _) => ErrorCode::from_errno(errno),
            (None, io::ErrorKind::Unsupported) => ErrorCode::NotSup,
            (None, _) => ErrorCode::Io,
        };
        ExportError::new(code, error.to_string())
    }
}

impl From<cowslip_block::Error> for ExportError {
    fn from(error: cowslip_block::Error) -> ExportError {
        ExportError::from_errno(error.errno(), error.to_string())
    }
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ExportError {}

/// A run of an export with one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// Length in bytes; never 0.
    pub len: u64,
    /// Its state in the context `base:allocation`; in others the bits mean something else.
    pub flags: AllocationFlags,
}

/// Access of clients to an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Reads only: the server refuses writes.
    ReadOnly,
    /// Reads and writes.
    #[default]
    ReadWrite,
}

/// The properties of an export that the server announces. A connection reads them once, when the
/// client chooses the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size in bytes.
    pub size: u64,
    /// Access of clients.
    pub access: Access,
    /// Sizes of requests. The maximum is lowered to what the server takes.
    pub block_sizes: BlockSizes,
    /// Description for humans; may be empty.
    pub description: String,
    /// The medium rotates.
    pub rotational: bool,
    /// A flush on one connection covers the completed writes of all of them.
    pub shared_cache: bool,
    /// Names of the metadata contexts, `base:allocation` first, in the order in which clients see
    /// them.
    pub contexts: Vec<String>,
}

impl ExportInfo {
    /// A writable export of `size` bytes that takes requests of any alignment.
    pub fn new(size: u64) -> ExportInfo {
        ExportInfo {
            size,
            access: Access::ReadWrite,
            block_sizes: BlockSizes {
                minimum: 1,
                preferred: PREFERRED_BYTES_MIN as u32,
                maximum: PAYLOAD_BYTES_MAX,
            },
            description: String::new(),
            rotational: false,
            shared_cache: true,
            contexts: vec![BASE_ALLOCATION.to_owned()],
        }
    }
}

/// A metadata context beyond `base:allocation`: a view of a disk that clients may ask for by name.
pub trait MetadataContext: Send + Sync {
    /// Its name, such as `qemu:dirty-bitmap:NAME`.
    fn name(&self) -> &str;

    /// States of consecutive runs from `offset` on, at least one and at most `max`. They may cover
    /// less than `len`, and the last one may reach beyond.
    ///
    /// # Errors
    /// As for [`Disk::extents`].
    fn runs(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<StatusExtent>>;
}

/// A disk as a server offers it.
#[derive(Clone)]
pub struct Export {
    /// The disk that is served.
    pub disk: Arc<dyn Disk>,
    /// A description for humans; may be empty.
    pub description: String,
    /// The medium rotates.
    pub rotational: bool,
    /// A flush on one connection covers the completed writes of all of them.
    pub shared_cache: bool,
    /// Contexts beside `base:allocation`, which each disk has. Of several of one name clients can
    /// select the first.
    pub contexts: Vec<Arc<dyn MetadataContext>>,
}

impl<D: Disk + 'static> From<Arc<D>> for Export {
    fn from(disk: Arc<D>) -> Export {
        Export::new(disk)
    }
}

impl Export {
    /// A disk with nothing said about it.
    pub fn new(disk: Arc<dyn Disk>) -> Export {
        Export {
            disk,
            description: String::new(),
            rotational: false,
            shared_cache: true,
            contexts: Vec::new(),
        }
    }

    /// Properties of the export, now.
    pub fn info(&self) -> ExportInfo {
        let features = self.disk.features();
        let mut info = ExportInfo::new(self.disk.size());
        info.access = match features.writable {
            true => Access::ReadWrite,
            false => Access::ReadOnly,
        };
        let preferred = features.preferred_block_bytes;
        let preferred = preferred.clamp(PREFERRED_BYTES_MIN, PAYLOAD_BYTES_MAX.into());
        info.block_sizes.preferred = u32::try_from(preferred).expect("it was limited to what fits");
        info.description.clone_from(&self.description);
        info.rotational = self.rotational;
        info.shared_cache = self.shared_cache;
        let others = self.contexts.iter().map(|context| context.name());
        info.contexts.extend(others.map(str::to_owned));
        info
    }

    /// States of consecutive runs in the context of this index in [`ExportInfo::contexts`].
    pub(crate) async fn block_status(
        &self,
        context: usize,
        (offset, len): (u64, u64),
        max: usize,
    ) -> Result<Vec<StatusExtent>, ExportError> {
        let runs = match context.checked_sub(1) {
            Some(other) => self.contexts[other].runs(offset, len, max).await?,
            None => {
                let extents = self.disk.extents(offset, len, max).await?;
                let state = |extent: &Extent| StatusExtent {
                    len: extent.len,
                    flags: allocation(extent),
                };
                joined(extents.iter().map(state))
            }
        };
        Ok(runs)
    }
}

/// The state of a run in `base:allocation` as qemu-nbd has it: a hole is what nobody has allocated.
fn allocation(extent: &Extent) -> AllocationFlags {
    AllocationFlags::empty()
        .with_if(AllocationFlags::HOLE, !extent.data)
        .with_if(AllocationFlags::ZERO, extent.zero)
}

/// Joins neighbours of one state.
pub fn joined(runs: impl Iterator<Item = StatusExtent>) -> Vec<StatusExtent> {
    let mut joined: Vec<StatusExtent> = Vec::new();
    for run in runs {
        match joined.last_mut() {
            Some(last) if last.flags == run.flags => last.len += run.len,
            _ => joined.push(run),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, len: u64, depth: u32, data: bool, zero: bool) -> Extent {
        Extent {
            start,
            len,
            depth,
            present: data,
            zero,
            data,
            compressed: false,
            host_offset: data.then_some(start + 7),
        }
    }

    #[test]
    fn allocation_shows_no_layers() {
        let extents = [
            extent(0, 10, 0, true, false),
            extent(10, 20, 1, true, false),
            extent(30, 5, 1, false, true),
            extent(35, 5, 0, false, true),
            extent(40, 1, 0, true, true),
        ];
        let states = extents.iter().map(|extent| StatusExtent {
            len: extent.len,
            flags: allocation(extent),
        });
        let seen: Vec<_> = joined(states)
            .iter()
            .map(|run| (run.len, run.flags.0))
            .collect();
        let hole = AllocationFlags::HOLE.with(AllocationFlags::ZERO).0;
        assert_eq!(seen, [(30, 0), (10, hole), (1, AllocationFlags::ZERO.0)]);
    }
}
