//! How an image is opened, as far as its format is concerned; chains, formats and limits are the
//! caller's.

use std::sync::Arc;

use crate::file::BlockFile;
use crate::luks::Passphrase;
use crate::policy::{AllocPolicy, DiscardPolicy, WritePolicy, ZeroMethod};
use crate::repair;
use crate::snapshot::SnapshotChoice;
use crate::workers::Workers;

/// Bytes of L2 slices kept where the caller sets no budget.
pub const CACHE_BYTES_DEFAULT: u64 = 32 << 20;
/// Bytes of a bitmap's table that are read at a time where the caller sets none.
const BITMAP_PIECE_BYTES_DEFAULT: u64 = 256 << 10;

/// How an image is opened for writing that was not closed cleanly: its dirty bit is set.
#[derive(Clone, Debug)]
pub enum DirtyImage {
    /// Repairs it first, as QEMU does; nothing is allocated, and no guest data written, before the
    /// repair is durable.
    Repair(RepairAtOpen),
    /// Opening fails.
    Refuse,
}

impl Default for DirtyImage {
    fn default() -> DirtyImage {
        DirtyImage::Repair(RepairAtOpen::default())
    }
}

/// How an image is repaired when it is opened.
#[derive(Clone, Debug)]
pub struct RepairAtOpen {
    /// Bytes of memory for what grows with the image, as
    /// [`repair::RepairOptions::memory_bytes_max`].
    pub memory_bytes_max: u64,
    /// Observer that the repair reports to.
    #[doc(hidden)]
    pub watch: Option<RepairWatch>,
}

impl Default for RepairAtOpen {
    fn default() -> RepairAtOpen {
        RepairAtOpen {
            memory_bytes_max: repair::RepairOptions::new(repair::Scope::All).memory_bytes_max,
            watch: None,
        }
    }
}

/// Called with what happens in a repair.
#[derive(Clone)]
pub struct RepairWatch(pub Arc<dyn Fn(repair::Event<'_>) + Send + Sync>);

cowslip_block::debug_by_name!(RepairWatch);

/// How one image is opened, whatever is below it.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// It will be written.
    pub writable: bool,
    /// When a write is durable.
    pub write_policy: WritePolicy,
    /// The effect of a discard.
    pub discard: DiscardPolicy,
    /// Keeps discarded clusters allocated, without data.
    pub discard_no_unref: bool,
    /// How space that a write does not fill comes to read as zeroes.
    pub zero_method: ZeroMethod,
    /// How space on the host is allocated.
    pub alloc_policy: AllocPolicy,
    /// The file that guest data is in, instead of the one that the image names.
    pub data_file: Option<Arc<dyn BlockFile>>,
    /// How to treat it if it was not closed cleanly and will be written.
    pub dirty: DirtyImage,
    /// Opens it although its data file cannot be opened; guest data cannot be read then.
    pub metadata_only: bool,
    /// Bytes of L2 tables kept in memory; 0 is the default.
    pub cache_bytes: u64,
    /// Bytes of a bitmap's table that are read at a time; 0 is 256 KiB.
    pub bitmap_piece_bytes: u64,
    /// Threads that compress and decompress clusters.
    pub workers: Workers,
    /// The disk as it was when this internal snapshot was taken.
    pub snapshot: Option<SnapshotChoice>,
    /// The method by which it has to be encrypted; `None` takes all.
    pub encrypt_format: Option<String>,
    /// Its passphrase, if it is encrypted.
    pub passphrase: Option<Passphrase>,
}

impl OpenOptions {
    /// The pieces in which bitmaps are read, in whole table entries.
    pub(super) fn bitmap_piece_bytes_or_default(&self) -> u64 {
        match self.bitmap_piece_bytes {
            0 => BITMAP_PIECE_BYTES_DEFAULT,
            bytes => bytes.next_multiple_of(8),
        }
    }

    /// The budget for L2 slices in bytes.
    pub(super) fn cache_bytes_or_default(&self) -> u64 {
        match self.cache_bytes {
            0 => CACHE_BYTES_DEFAULT,
            bytes => bytes,
        }
    }
}
