//! [`Image`]: a disk, whatever its format; the verbs and their validation.

use std::sync::Arc;

use cowslip_queue::{Buf, BufMut};

use crate::Result;
use crate::file::{BlockFile, Gate};
use crate::qcow2::header::Header;

/// An image's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Bytes as they are.
    Raw,
    /// qcow2, version 2 or 3.
    Qcow2,
}

/// Where reads of what the image does not hold come from.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum BackingChoice {
    /// The file that the image names.
    #[default]
    AsNamed,
    /// Nothing: the image alone, what it lacks reads as zeroes.
    None,
    /// Another file than the image names.
    Override {
        /// Its name, relative to the image.
        name: String,
        /// Its format; probed if unknown.
        format: Option<Format>,
    },
}

/// What a guest's discard does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DiscardPolicy {
    /// Nothing.
    #[default]
    Ignore,
    /// Frees clusters and gives their space back to the host.
    Unmap,
}

/// When a write is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WritePolicy {
    /// At the next flush.
    #[default]
    Writeback,
    /// At its completion: FUA on everything.
    Writethrough,
}

/// How an image is opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The format; `None` probes (and then a raw image's first sector may not become a qcow2 header).
    pub format: Option<Format>,
    /// The image will be written.
    pub writable: bool,
    /// When a write is durable.
    pub write_policy: WritePolicy,
    /// What a discard does.
    pub discard: DiscardPolicy,
    /// Where unallocated data comes from.
    pub backing: BackingChoice,
    /// Opens the image although its data file or backing file cannot be opened: for `info` and
    /// `check`, which need the metadata only. Guest data cannot be read then.
    pub metadata_only: bool,
    /// Bytes of metadata kept in memory for the whole chain; 0 chooses by the size of the disk.
    pub cache_bytes: u64,
}

/// Options of one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct WriteOptions {
    /// Durable, mapping included, when it completes.
    pub fua: bool,
}

/// Options of one write of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ZeroOptions {
    /// The space may be given back (NBD: not `NO_HOLE`; qemu-io: `-u`).
    pub may_unmap: bool,
    /// Durable when it completes.
    pub fua: bool,
    /// Fail with `Unsupported` rather than write zeroes out (NBD: `FAST_ZERO`).
    pub fast_only: bool,
}

/// A run of the disk with one state, as `qemu-img map` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte on the disk.
    pub start: u64,
    /// Length in bytes; never 0.
    pub len: u64,
    /// The layer of the chain that decides it: 0 is the image itself.
    pub depth: u32,
    /// Some layer holds it (QEMU: `present`).
    pub present: bool,
    /// It reads as zeroes.
    pub zero: bool,
    /// It is stored as data.
    pub data: bool,
    /// It is stored compressed.
    pub compressed: bool,
    /// Where the bytes are in the file of that layer (in its data file, if it has one).
    pub host_offset: Option<u64>,
}

/// A layer of the chain, for reports.
#[derive(Clone, Debug)]
pub struct LayerInfo {
    /// The file, by the name that it was opened by.
    pub name: String,
    /// Its format.
    pub format: Format,
    /// Bytes of the disk that it holds.
    pub size: u64,
    /// The header of a qcow2 layer.
    pub header: Option<Arc<Header>>,
    /// The file that guest data is in: the image's own, or its external data file.
    pub data_name: String,
}

/// A disk, open.
#[derive(Debug)]
pub struct Image {}

impl Image {
    /// Opens the image in `file`, and through `gate` the files that it names.
    ///
    /// # Errors
    /// If the file is no valid image of its format, needs what is not supported, or one of the files
    /// that it needs cannot be opened. The image is not changed by opening it.
    pub async fn open(
        file: Arc<dyn BlockFile>,
        options: OpenOptions,
        gate: &dyn Gate,
    ) -> Result<Image> {
        let _ = (file, options, gate);
        todo!()
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        todo!()
    }

    /// The image's layers, its own first.
    pub fn layers(&self) -> Vec<LayerInfo> {
        todo!()
    }

    /// Whether it may be written.
    pub fn is_writable(&self) -> bool {
        todo!()
    }

    /// The unit of allocation in bytes: the subcluster, or the cluster, or the block of a raw file.
    pub fn preferred_block_bytes(&self) -> u64 {
        todo!()
    }

    /// Reads `buf.len()` bytes of the disk at `offset`.
    ///
    /// # Errors
    /// Out of range, I/O, or a corrupt table entry.
    pub async fn read(&self, offset: u64, buf: BufMut) -> Result<BufMut> {
        let _ = (offset, buf);
        todo!()
    }

    /// Writes `data` to the disk at `offset`.
    ///
    /// # Errors
    /// Out of range, read-only, latched, no space, I/O, or a corrupt table entry. The mapping is as
    /// it was before.
    pub async fn write(&self, offset: u64, data: Buf, options: WriteOptions) -> Result<()> {
        let _ = (offset, data, options);
        todo!()
    }

    /// Compresses `data`, a whole cluster (or what the disk's last one holds), and stores it so.
    ///
    /// # Errors
    /// As `write`; also where the format cannot.
    pub async fn write_compressed(&self, offset: u64, data: Buf) -> Result<()> {
        let _ = (offset, data);
        todo!()
    }

    /// Makes a range of the disk read as zeroes.
    ///
    /// # Errors
    /// As `write`; `Unsupported` if `fast_only` and zeroes would have to be written.
    pub async fn write_zeroes(&self, offset: u64, len: u64, options: ZeroOptions) -> Result<()> {
        let _ = (offset, len, options);
        todo!()
    }

    /// Says that the guest needs a range no longer. What it reads as afterwards is unspecified, but
    /// never another's bytes; whole clusters read as zeroes where the format can say so.
    ///
    /// # Errors
    /// As `write`.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let _ = (offset, len);
        todo!()
    }

    /// Makes durable all writes that had completed when it was called, mapping included.
    ///
    /// # Errors
    /// I/O. After a failed flush the image takes no more writes (invariant D4).
    pub async fn flush(&self) -> Result<()> {
        todo!()
    }

    /// The state of a range of the disk, in order, covering it; neighbours of one state are one
    /// extent where their host offsets are contiguous. At most about `max_extents` are returned; if
    /// that cuts the range short, what follows is asked for with another call.
    ///
    /// # Errors
    /// Out of range, I/O, or a corrupt table entry.
    pub async fn extents(&self, offset: u64, len: u64, max_extents: usize) -> Result<Vec<Extent>> {
        let _ = (offset, len, max_extents);
        todo!()
    }

    /// Changes the size of the disk; what it adds reads as zeroes.
    ///
    /// # Errors
    /// As `write`; `Unsupported` where the format cannot.
    pub async fn resize(&self, size: u64) -> Result<()> {
        let _ = size;
        todo!()
    }

    /// Flushes, gives back what was allocated ahead, and ends the session.
    ///
    /// # Errors
    /// I/O. The image is closed in any case, and `check` finds no corruption.
    pub async fn close(&self) -> Result<()> {
        todo!()
    }

    /// What keeps requests from waiting: grows the file ahead of need and writes metadata back when
    /// much of it is dirty. Runs until the image is closed; a server spawns it beside its requests.
    /// Without it the image works as well, and requests do this work when they must.
    pub async fn maintain(&self) {
        todo!()
    }
}
