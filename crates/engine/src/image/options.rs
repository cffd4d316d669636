//! How an image is opened: its format, and what writes, discards, zeroes and faults of it mean.

use std::sync::Arc;

use crate::file::{BlockFile, Claim, FileId, ReadSet, Sharing};
use crate::formats::Formats;
use crate::limits::Limits;
use crate::luks::Passphrase;
use crate::qcow2::snapshot::SnapshotChoice;
use crate::workers::Workers;

pub use cowslip_block::policy::{
    AllocPolicy, CopyOnRead, DetectZeroes, DiscardPolicy, Format, WritePolicy, ZeroMethod,
};
pub use cowslip_qcow2::{DirtyImage, RepairAtOpen, RepairWatch};

/// Where reads of what the image does not hold come from.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum BackingChoice {
    /// The file that the image names.
    #[default]
    AsNamed,
    /// The file that the image names, in this format, whatever the image says.
    InFormat(Format),
    /// Nothing: the image alone; unallocated ranges read as zeroes.
    None,
    /// Another file than the image names.
    Override {
        /// Its name, relative to the image.
        name: String,
        /// Its format; if unknown, that which the image names for its own, and probed if it names
        /// none.
        format: Option<Format>,
    },
}

/// How an image is opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The format; `None` probes.
    pub format: Option<Format>,
    /// The formats that images of the chain may have.
    pub formats: Formats,
    /// The format was guessed when the image was opened before. As where it is guessed now, nothing
    /// may make the first sector of a raw image look like that of an image of another format.
    #[doc(hidden)]
    pub guessed: bool,
    /// The image will be written.
    pub writable: bool,
    /// When a write is durable.
    pub write_policy: WritePolicy,
    /// The effect of a discard.
    pub discard: DiscardPolicy,
    /// Keeps discarded clusters allocated, without data: the image keeps its layout, and their
    /// space on the host is released all the same (QEMU: `discard-no-unref`). Version 3 only.
    pub discard_no_unref: bool,
    /// The effect of a write of nothing but zeroes.
    pub detect_zeroes: DetectZeroes,
    /// How space that a write does not fill comes to read as zeroes.
    #[doc(hidden)]
    pub zero_method: ZeroMethod,
    /// How space on the host is allocated.
    pub alloc_policy: AllocPolicy,
    /// Which data that reads find in the backing chain is copied into the image. Needs an image
    /// that is open for writing.
    pub copy_on_read: CopyOnRead,
    /// Writes store whole clusters, compressed: the parts of a cluster that a write does not cover
    /// are read and stored with it.
    pub compress: bool,
    /// Reads, writes, zeroes and discards of the disk are cut by these, one part after the other:
    /// for tests of the callers, since an image takes requests of any size.
    #[doc(hidden)]
    pub limits: Limits,
    /// Where unallocated data comes from.
    pub backing: BackingChoice,
    /// The file that guest data is in, instead of the one that the image names; only for an image
    /// with a data file.
    pub data_file: Option<Arc<dyn BlockFile>>,
    /// How to treat an image that was not closed cleanly and will be written.
    pub dirty: DirtyImage,
    /// Opens the image although its data file or backing file cannot be opened: for `info` and
    /// `check`, which need the metadata only. Guest data cannot be read then.
    pub metadata_only: bool,
    /// Bytes of L2 tables kept in memory for the whole chain, their index included;
    /// 0 is 32 MiB. A few slices are kept whatever the budget.
    pub cache_bytes: u64,
    /// Bytes of a bitmap's table that are read at a time, and a quarter of the bits that are
    /// written at a time; 0 is 256 KiB. For tests, which cannot have bitmaps of many pieces
    /// otherwise.
    #[doc(hidden)]
    pub bitmap_piece_bytes: u64,
    /// Sharing mode: what other processes may do with the image meanwhile.
    pub sharing: Sharing,
    /// Claims that another process holds for this one until it has its own: it has ended its
    /// session with the image, and no third one can have the files in between.
    #[doc(hidden)]
    pub handed_over: Vec<(FileId, Claim)>,
    /// Files that the caller reads besides those of the image: an image is refused for writing if
    /// it is stored in one of them.
    #[doc(hidden)]
    pub read_besides: ReadSet,
    /// Threads that compress and decompress clusters.
    pub workers: Workers,
    /// The disk as it was when this internal snapshot was taken, its size too; only to be read.
    pub snapshot: Option<SnapshotChoice>,
    /// How the image is encrypted, by the method's name; an image that is not, or otherwise, is
    /// refused. `None` takes all.
    pub encrypt_format: Option<String>,
    /// Passphrase of the image, if it is encrypted.
    pub passphrase: Option<Passphrase>,
    /// Passphrase of the encrypted images in its backing chain.
    pub backing_passphrase: Option<Passphrase>,
}

impl OpenOptions {
    /// Returns the passphrase of the image on top, or of those in its backing chain.
    pub(crate) fn passphrase_for(&self, is_top: bool) -> Option<&Passphrase> {
        match is_top {
            true => self.passphrase.as_ref(),
            false => self.backing_passphrase.as_ref(),
        }
    }

    /// The part that concerns the format of a qcow2 image, on top or in the backing chain.
    pub(crate) fn of_qcow2(&self, is_top: bool) -> cowslip_qcow2::OpenOptions {
        cowslip_qcow2::OpenOptions {
            writable: self.writable,
            write_policy: self.write_policy,
            discard: self.discard,
            discard_no_unref: self.discard_no_unref,
            zero_method: self.zero_method,
            alloc_policy: self.alloc_policy,
            data_file: self.data_file.clone(),
            dirty: self.dirty.clone(),
            metadata_only: self.metadata_only,
            cache_bytes: self.cache_bytes,
            bitmap_piece_bytes: self.bitmap_piece_bytes,
            workers: self.workers.clone(),
            snapshot: self.snapshot.clone(),
            encrypt_format: self.encrypt_format.clone(),
            passphrase: self.passphrase_for(is_top).cloned(),
        }
    }

    /// The budget for L2 slices in bytes.
    pub(crate) fn cache_bytes_or_default(&self) -> u64 {
        match self.cache_bytes {
            0 => cowslip_qcow2::CACHE_BYTES_DEFAULT,
            bytes => bytes,
        }
    }
}
