//! [`Image`]: a disk, whatever its format; the verbs and their validation.
//!
//! ```
//! # use std::sync::Arc;
//! # use cowslip::file::{host::NoFiles, memory::MemoryFile};
//! # use cowslip::image::{Durability, OpenOptions};
//! # use cowslip::qcow2::create::{CreateOptions, create};
//! # use cowslip::{Buf, BufMut, Image, Job};
//! # async fn image(bytes: u64) -> cowslip::Result<Image> {
//! #     let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
//! #     create(file.clone(), None, &CreateOptions::new(bytes)).await?;
//! #     let options = OpenOptions { writable: true, ..OpenOptions::default() };
//! #     Image::open(file, options, &NoFiles).await
//! # }
//! # fn main() -> cowslip::Result<()> {
//! # cowslip::blocking::wait(async {
//! use cowslip::image::{DiscardPolicy, Space, ZeroOptions};
//! # use cowslip::file::BlockFile;
//! # let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
//! # create(file.clone(), None, &CreateOptions::new(1 << 30)).await?;
//!
//! let options = OpenOptions {
//!     writable: true,
//!     discard: DiscardPolicy::Unmap, // a guest's discards give space back
//!     ..OpenOptions::default()
//! };
//! let image = Image::open(file, options, &NoFiles).await?; // no backing file, no data file
//! image.write(1 << 20, Buf::copy_of(b"a guest's bytes"), Durability::Cached).await?;
//! let zeroes = ZeroOptions {
//!     space: Space::Release,
//!     durability: Durability::Cached,
//!     fast_only: false,
//! };
//! image.write_zeroes(0, 1 << 20, zeroes).await?;
//! image.discard(1 << 20, 1 << 20).await?;
//! image.flush().await?; // durable, also when the power fails
//!
//! for extent in image.extents(0, image.size(), 1000).await? {
//!     println!("{} bytes from {} on", extent.len, extent.start);
//! }
//! image.resize(2 << 30).await?;
//! image.close().await?;
//! # Ok(())
//! # })
//! # }
//! ```

use cowslip_boxed::boxed;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cowslip_block::disk::within;
use cowslip_queue::{Buf, IoVec, IoVecMut};

use crate::backing::Backing;
use crate::chain::{self, Below, Layer, Namings};
use crate::file::{AlignedFile, BlockFile, Claim, ContentId, Event, FileId, Gate, Sharing};
use crate::files::Files;
use crate::job::Job;
use crate::limits::Limits;
use crate::policy::Preallocation;
use crate::qcow2::amend::Amendment;
use crate::qcow2::header::Header;
use crate::qcow2::probe::{Observation, Stage};
use crate::sync::Turn;
use crate::{Error, Result, extents};
use cowslip_qcow2::{OnAllocated, Packed, Qcow2};

mod beside;
mod bitmaps;
mod compact;
mod cut;
mod disk;
mod identity;
mod keys;
mod options;
mod snapshots;
mod stack;
mod unfinished;
mod vm_state;
mod whole_clusters;

use whole_clusters::{WholeClusters, WriteContent};

pub use crate::statistics::CacheStatistics;
#[doc(hidden)]
pub use crate::statistics::{SpaceStatistics, WriteStatistics};
#[doc(no_inline)]
pub use cowslip_block::disk::{Extent, ZeroOptions};
pub use cowslip_block::file::{Durability, Space};
pub use options::{
    AllocPolicy, BackingChoice, CopyOnRead, DetectZeroes, DirtyImage, DiscardPolicy, Format,
    OpenOptions, RepairAtOpen, WritePolicy,
};
#[doc(hidden)]
pub use options::{RepairWatch, ZeroMethod};
#[doc(hidden)]
pub use stack::Stack;

/// A layer of the chain, for reports.
#[derive(Clone, Debug)]
pub struct LayerInfo {
    /// The file, by the name that it was opened by.
    pub name: String,
    /// Format of the layer.
    pub format: Format,
    /// Bytes of the disk that it holds.
    pub size: u64,
    /// The header of a qcow2 layer.
    pub header: Option<Arc<Header>>,
    /// The file that guest data is in: the image's own, or its external data file.
    pub data_name: String,
    /// Identity of the file, where it is known.
    pub id: Option<FileId>,
    /// Identity of the bytes that the file shows, where it is known.
    pub content: Option<ContentId>,
}

/// The name of the feature in errors of [`Image::qcow2_for`] about compressed writes.
const COMPRESSION: &str = "compression of";

/// An open image, with its backing chain.
#[derive(Debug)]
pub struct Image {
    pub(crate) top: Arc<Layer>,
    pub(crate) below: Below,
    /// How the layers below were named, the uppermost first.
    pub(crate) namings: Namings,
    writable: bool,
    write_policy: WritePolicy,
    discard: DiscardPolicy,
    detect_zeroes: DetectZeroes,
    copy_on_read: CopyOnRead,
    /// Writes store whole clusters, compressed.
    whole_clusters: Option<WholeClusters>,
    /// Larger requests are cut by these.
    limits: Limits,
    /// Bytes of L2 slices kept in memory for all layers.
    cache_bytes: u64,
    unprotected: Vec<String>,
    /// It is only read from now on ([`Image::freeze`]).
    is_frozen: AtomicBool,
    /// It shows an internal snapshot.
    is_snapshot: bool,
    /// One change of keys at a time.
    keys: Turn<()>,
}

impl Image {
    /// Opens the image in `file`, and through `gate` the files that it names. All of them are
    /// claimed ([`BlockFile::claim`]) before anything is read of them but the bytes that identify
    /// the format.
    ///
    /// # Errors
    /// If the file is no valid image of its format, needs what is not supported, one of the files
    /// that it needs cannot be opened, another process uses one of them in a way that does not
    /// go together with this one, or it is marked corrupt and shall be written. The image is not
    /// changed by opening it, but for its repair ([`OpenOptions::dirty`]).
    pub async fn open(
        file: Arc<dyn BlockFile>,
        options: OpenOptions,
        gate: &dyn Gate,
    ) -> Result<Image> {
        Image::open_after(file, options, gate, Vec::new()).await
    }

    /// Closes the image and reopens it, through another handle of its file and with other options.
    /// No other process can claim its files in between: the claims are handed over.
    ///
    /// # Errors
    /// As [`Image::flush`], and `Latched` after a failure: the image stays open as it is, since the
    /// next session would know nothing of what this one has lost. As [`Image::close`] and
    /// [`Image::open`]: it is closed, but keeps its claims, so that it can be reopened in another
    /// way; they end with it.
    pub async fn reopen(
        &self,
        file: Arc<dyn BlockFile>,
        options: OpenOptions,
        gate: &dyn Gate,
    ) -> Result<Image> {
        if self.top.qcow2().is_some_and(Qcow2::has_failed) {
            return Err(Error::Latched(self.name().to_string()));
        }
        if self.writable && !self.top.qcow2().is_some_and(Qcow2::is_closed) {
            self.flush().await?;
        }
        self.finish().await?;
        let files = self.files().cloned().collect();
        let image = Image::open_after(file, options, gate, files).await?;
        self.end_files().await?;
        self.release();
        Ok(image)
    }

    #[boxed]
    pub(crate) async fn open_after(
        file: Arc<dyn BlockFile>,
        options: OpenOptions,
        gate: &dyn Gate,
        predecessors: Vec<Arc<dyn BlockFile>>,
    ) -> Result<Image> {
        if options.writable && options.sharing == Sharing::Forced {
            let text = "force-share=on can only be used with read-only images";
            return Err(Error::Invalid(text.to_string()));
        }
        if options.detect_zeroes == DetectZeroes::Unmap && options.discard != DiscardPolicy::Unmap {
            let text = "setting detect-zeroes to unmap is not allowed without setting discard \
                        operation to unmap";
            return Err(Error::Invalid(text.to_string()));
        }
        if options.writable && !file.capabilities().writable {
            return Err(Error::ReadOnly(file.name().to_string()));
        }
        if options.writable && options.snapshot.is_some() {
            let text = "an internal snapshot can only be read";
            return Err(Error::Invalid(text.to_string()));
        }
        if !options.writable && options.copy_on_read != CopyOnRead::Off {
            let text = "Can't use copy-on-read on read-only device";
            return Err(Error::Invalid(text.to_string()));
        }
        let files = Files::new(options.sharing, predecessors, options.read_besides.clone())
            .with_claims(&options.handed_over);
        let is_snapshot = options.snapshot.is_some();
        let limits = options.limits.over(file.limits());
        let cache_bytes = options.cache_bytes_or_default();
        let (top, below, namings) = chain::open(file, &options, gate, &files).await?;
        let OpenOptions {
            writable,
            write_policy,
            discard,
            detect_zeroes,
            copy_on_read,
            compress,
            ..
        } = options;
        if compress && top.qcow2().is_none() {
            let format = top.format().name();
            return Err(Error::Invalid(format!(
                "Compression is not supported for underlying format: {format}"
            )));
        }
        Ok(Image {
            top: Arc::new(top),
            below,
            namings,
            writable,
            write_policy,
            discard,
            detect_zeroes,
            copy_on_read,
            whole_clusters: compress.then(WholeClusters::default),
            limits,
            cache_bytes,
            unprotected: files.into_unprotected(),
            is_frozen: AtomicBool::new(false),
            is_snapshot,
            keys: Turn::new(()),
        })
    }

    /// The files that nothing protects from other processes, because their file systems have no
    /// locks; each with the system's reason.
    pub fn unprotected(&self) -> &[String] {
        &self.unprotected
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &Arc<dyn BlockFile>> {
        let below = self.below.layers().iter().map(|layer| &**layer);
        std::iter::once(&*self.top)
            .chain(below)
            .flat_map(Layer::files)
    }

    /// Lets others have the files.
    fn release(&self) {
        for file in self.files() {
            // Giving up a claim meets no conflict; what the system still holds ends with the file.
            drop(file.claim(Claim::NONE));
        }
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.top.size()
    }

    /// The image's own layer.
    pub fn own_layer(&self) -> LayerInfo {
        LayerInfo::of(&self.top)
    }

    /// The image's layers, its own first.
    pub fn layers(&self) -> Vec<LayerInfo> {
        let below = self.below.layers().iter().map(|layer| &**layer);
        std::iter::once(&*self.top)
            .chain(below)
            .map(LayerInfo::of)
            .collect()
    }

    /// Returns what the top layer is doing at this moment, if it is qcow2: for tests and tools.
    #[doc(hidden)]
    pub fn observe(&self) -> Option<Observation> {
        self.top.qcow2().map(Qcow2::observe)
    }

    /// The part of [`Image::observe`] that takes no lock.
    #[doc(hidden)]
    pub fn stage(&self) -> Option<Stage> {
        self.top.qcow2().map(Qcow2::stage)
    }

    /// Whether the top layer, if it is qcow2 and open for writing, protects this byte of its file
    /// from guest data: it is part of a cluster that holds metadata.
    #[doc(hidden)]
    pub fn is_protected(&self, host_offset: u64) -> Option<bool> {
        let image = self.top.qcow2()?;
        Some(image.is_protected(host_offset))
    }

    /// Returns the statistics of the chain's metadata caches, added up.
    pub fn cache_statistics(&self) -> CacheStatistics {
        let below = self.below.layers().iter().map(|layer| &**layer);
        let layers = std::iter::once(&*self.top).chain(below);
        let images = layers.filter_map(Layer::qcow2);
        images.fold(CacheStatistics::default(), |sum, image| {
            sum.plus(image.cache_statistics())
        })
    }

    /// Returns the statistics of the top layer's metadata cache.
    #[doc(hidden)]
    pub fn own_cache_statistics(&self) -> CacheStatistics {
        let image = self.top.qcow2();
        image.map_or_else(Default::default, Qcow2::cache_statistics)
    }

    /// Returns the statistics of writes to the top layer, if it is qcow2; writes of compressed
    /// clusters are not counted.
    #[doc(hidden)]
    pub fn write_statistics(&self) -> Option<WriteStatistics> {
        self.top.qcow2().map(Qcow2::write_statistics)
    }

    /// Returns the statistics of the space in the top layer's file, if it is qcow2.
    #[doc(hidden)]
    pub fn space_statistics(&self) -> Option<SpaceStatistics> {
        self.top.qcow2().map(Qcow2::space_statistics)
    }

    /// Returns whether it may be written.
    pub fn is_writable(&self) -> bool {
        self.writable && !self.is_frozen.load(Ordering::Acquire)
    }

    /// The unit of allocation in bytes: the subcluster, or the cluster, or the block of a raw file.
    pub fn preferred_block_bytes(&self) -> u64 {
        match &*self.top {
            Layer::Raw(raw) => u64::from(raw.file().capabilities().alignment_bytes.max(4096)),
            Layer::Qcow2(image) => image.subcluster_bytes(),
            Layer::Other(added) => added.preferred_block_bytes(),
        }
    }

    /// The cluster, or the block of a raw file.
    pub(crate) fn cluster_bytes(&self) -> u64 {
        match self.top.qcow2() {
            None => self.preferred_block_bytes(),
            Some(image) => image.cluster_bytes(),
        }
    }

    /// The file of a raw image, which holds the bytes of the disk at their offsets, if this range
    /// of it may be changed directly: not if the image encrypts or examines writes.
    pub(crate) fn raw_file(&self, range: &Range<u64>) -> Option<&AlignedFile> {
        match &*self.top {
            Layer::Raw(raw) if raw.file().is_encrypted() || raw.file().guards(range) => None,
            Layer::Raw(raw) => Some(raw.file_to_change()),
            Layer::Qcow2(_) | Layer::Other(..) => None,
        }
    }

    /// The file that holds the data of a layer; 0 is the image itself.
    pub(crate) fn data_file(&self, depth: usize) -> &AlignedFile {
        match depth {
            0 => self.top.data_file(),
            depth => self.below.layers()[depth - 1].data_file(),
        }
    }

    /// Compresses whole clusters, to be written by [`Image::write_packed`]. Changes nothing.
    pub(crate) async fn pack(&self, offset: u64, data: Buf) -> Result<Vec<Packed>> {
        self.validate_write(offset, data.len() as u64)?;
        self.qcow2_for(COMPRESSION)?.pack(offset, data).await
    }

    /// Stores clusters that were compressed beforehand, as one allocation.
    pub(crate) async fn write_packed(&self, packed: Vec<Packed>) -> Result<()> {
        let image = self.qcow2_for(COMPRESSION)?;
        let written = image.write_packed(packed, &self.below).await;
        image.mark_corrupt_on_error(written).await
    }

    /// The top layer, for what qcow2 alone can do: "amending" it, say.
    pub(crate) fn qcow2_for(&self, what: &str) -> Result<&Qcow2> {
        self.top.qcow2().ok_or_else(|| Error::Unsupported {
            file: self.name().to_string(),
            feature: format!("{what} a {} image", self.top.format().name()).into(),
        })
    }

    fn validate(&self, offset: u64, len: u64) -> Result<()> {
        within(self.size(), offset, len)
    }

    fn validate_write(&self, offset: u64, len: u64) -> Result<()> {
        if !self.is_writable() {
            return Err(self.read_only());
        }
        self.validate(offset, len)
    }

    fn read_only(&self) -> Error {
        Error::ReadOnly(self.name().to_string())
    }

    fn no_allocation_of(&self, what: &str) -> Error {
        Error::Unsupported {
            file: self.name().to_string(),
            feature: format!("allocation in advance of {what}").into(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.top.file().name()
    }

    /// Fills a buffer or a scatter list from `offset` of the disk on; keeps the bytes as
    /// [`OpenOptions::copy_on_read`] has it.
    ///
    /// # Errors
    /// Out of range, I/O, or a corrupt table entry; what of them cannot be kept is an error too.
    pub async fn read<T>(&self, offset: u64, target: T) -> Result<T>
    where
        T: Into<IoVecMut> + From<IoVecMut>,
    {
        Ok(self.read_list(offset, target.into()).await?.into())
    }

    async fn read_list(&self, offset: u64, buf: IoVecMut) -> Result<IoVecMut> {
        self.validate(offset, buf.len() as u64)?;
        match self.is_cut(offset, buf.len()) {
            false => self.read_part(offset, buf).await,
            true => Box::pin(self.read_in_parts(offset, buf)).await,
        }
    }

    async fn read_part(&self, offset: u64, buf: IoVecMut) -> Result<IoVecMut> {
        if let (Some(image), true) = (self.top.qcow2(), self.copy_on_read != CopyOnRead::Off) {
            let range = offset..offset + buf.len() as u64;
            let copying = image.copy_on_read(range, (&self.below, self.copy_on_read));
            image.mark_corrupt_on_error(Box::pin(copying).await).await?;
        }
        match &*self.top {
            Layer::Qcow2(image) => image.read_guest(offset, buf, &self.below).await,
            Layer::Raw(raw) => {
                raw.file().reach(Event::ReadAio).await;
                raw.read(offset, buf).await
            }
            Layer::Other(..) => {
                let read = chain::read(&self.top, &self.below, offset, buf);
                Box::pin(read).await
            }
        }
    }

    /// Writes a buffer or a scatter list to the disk at `offset`; zeroes as
    /// [`OpenOptions::detect_zeroes`] says. If the memory changes during the write, each byte on
    /// disk is one that the memory held at some moment. The future must be polled to completion:
    /// if it is dropped halfway, the range it wrote is undefined until the image is closed.
    ///
    /// # Errors
    /// Out of range, read-only, latched, no space, I/O, or a corrupt table entry. The mapping is as
    /// it was before.
    pub async fn write(
        &self,
        offset: u64,
        data: impl Into<IoVec>,
        durability: Durability,
    ) -> Result<()> {
        self.write_notify(offset, data.into(), (durability, &|| ()))
            .await
    }

    /// Writes, and calls back when the write has all its space, if it gets that far: another one
    /// that begins then takes the space behind. A write that allocates nothing calls back at once.
    ///
    /// # Errors
    /// As [`Image::write`].
    pub(crate) async fn write_in_line(
        &self,
        offset: u64,
        data: Buf,
        admitted: &OnAllocated<'_>,
    ) -> Result<()> {
        self.write_notify(offset, data.into(), (Durability::Cached, admitted))
            .await
    }

    async fn write_notify(
        &self,
        offset: u64,
        data: IoVec,
        (durability, admitted): (Durability, &OnAllocated<'_>),
    ) -> Result<()> {
        self.validate_write(offset, data.len() as u64)?;
        if self.detect_zeroes != DetectZeroes::Off && data.is_zero() {
            let zeroes = ZeroOptions {
                space: Space::of_unmap(self.detect_zeroes == DetectZeroes::Unmap),
                durability,
                fast_only: false,
            };
            return self.write_zeroes(offset, data.len() as u64, zeroes).await;
        }
        match self.is_cut(offset, data.len()) {
            false => self.write_part(offset, data, (durability, admitted)).await,
            true => Box::pin(self.write_in_parts(offset, data, (durability, admitted))).await,
        }
    }

    async fn write_part(
        &self,
        offset: u64,
        data: IoVec,
        (durability, admitted): (Durability, &OnAllocated<'_>),
    ) -> Result<()> {
        match &*self.top {
            Layer::Raw(raw) => {
                admitted();
                raw.write(offset, data, self.durability(durability)).await
            }
            Layer::Other(added) => {
                admitted();
                let writing = added.write(offset, data, self.durability(durability));
                Box::pin(writing).await
            }
            Layer::Qcow2(image) => {
                if let Some(clusters) = &self.whole_clusters {
                    admitted();
                    let range = offset..offset + data.len() as u64;
                    let content = WriteContent::Bytes(data.to_buf());
                    let whole = async {
                        self.write_whole((image, clusters), range, content).await?;
                        self.settle_whole(durability).await
                    };
                    return Box::pin(whole).await;
                }
                let context = (&self.below as &dyn Backing, durability);
                let written = image.write_notify(offset, data, context, admitted);
                image.mark_corrupt_on_error(written.await).await
            }
        }
    }

    /// Returns the durability that a request gets if it asks for `asked`.
    fn durability(&self, asked: Durability) -> Durability {
        match self.write_policy {
            WritePolicy::Writethrough => Durability::Durable,
            WritePolicy::Writeback => asked,
        }
    }

    /// Compresses `data`, whole clusters (or what the disk's last one holds), and stores them so. A
    /// list of several segments, or of memory that may change, is copied first.
    ///
    /// # Errors
    /// As `write`; also where the format cannot.
    pub async fn write_compressed(&self, offset: u64, data: impl Into<IoVec>) -> Result<()> {
        let data = data.into().to_buf();
        self.validate_write(offset, data.len() as u64)?;
        let image = self.qcow2_for(COMPRESSION)?;
        let range = offset..offset + data.len() as u64;
        let writing = image.write_compressed(offset, data, &self.below);
        let written = self.with_clusters(image, range, writing).await;
        image.mark_corrupt_on_error(written).await
    }

    /// Makes a range of the disk read as zeroes.
    ///
    /// # Errors
    /// As `write`; `Unsupported` if `fast_only` and zeroes would have to be written.
    pub async fn write_zeroes(&self, offset: u64, len: u64, options: ZeroOptions) -> Result<()> {
        self.validate_write(offset, len)?;
        match self.limits.are_any() {
            _ if len == 0 => Ok(()),
            false => self.zero_part(offset, len, options).await,
            true => Box::pin(self.zero_in_parts(offset, len, options)).await,
        }
    }

    async fn zero_part(&self, offset: u64, len: u64, options: ZeroOptions) -> Result<()> {
        match &*self.top {
            Layer::Raw(raw) => {
                if options.fast_only && !raw.file().capabilities().zeroes_fast {
                    return Err(Error::Unsupported {
                        file: self.name().to_string(),
                        feature: "zeroing without writing zeroes".into(),
                    });
                }
                raw.write_zeroes(offset, len, options.space).await?;
                match self.durability(options.durability) {
                    Durability::Durable => raw.flush().await,
                    Durability::Cached => Ok(()),
                }
            }
            Layer::Other(added) => {
                let durability = self.durability(options.durability);
                let options = ZeroOptions {
                    durability,
                    ..options
                };
                Box::pin(added.write_zeroes(offset, len, options)).await
            }
            Layer::Qcow2(image) => {
                let range = offset..offset + len;
                if let Some(clusters) = &self.whole_clusters {
                    let content = WriteContent::Zeroes(options);
                    self.write_whole((image, clusters), range, content).await?;
                    return self.settle_whole(options.durability).await;
                }
                let outcome = image.write_zeroes(range, &self.below, options).await;
                image.mark_corrupt_on_error(outcome).await
            }
        }
    }

    /// Allocates the space of a range, so that writes to it find theirs; its bytes stay. Clusters
    /// that are compressed, or shared with an internal snapshot, keep the space that they have.
    ///
    /// # Errors
    /// As [`Image::write`]; `Unsupported` where the format or the host has no way; part of the
    /// range may have its space then.
    pub async fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        self.validate_write(offset, len)?;
        match &*self.top {
            _ if len == 0 => Ok(()),
            Layer::Raw(raw) => raw.allocate(offset, len).await,
            Layer::Other(_) => Err(self.no_allocation_of("another format")),
            Layer::Qcow2(image) => {
                if self.whole_clusters.is_some() {
                    return Err(self.no_allocation_of("compressed clusters"));
                }
                let outcome = image.allocate(offset..offset + len, &self.below).await;
                image.mark_corrupt_on_error(outcome).await
            }
        }
    }

    /// Discards a range. Its content afterwards is unspecified, but never other data of the host;
    /// whole clusters read as zeroes where the format can express it.
    ///
    /// # Errors
    /// As `write`.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.validate_write(offset, len)?;
        if self.discard == DiscardPolicy::Ignore || len == 0 {
            return Ok(());
        }
        match self.limits.are_any() {
            false => self.discard_part(offset, len).await,
            true => Box::pin(self.discard_in_parts(offset, len)).await,
        }
    }

    async fn discard_part(&self, offset: u64, len: u64) -> Result<()> {
        match &*self.top {
            Layer::Raw(raw) => raw.discard(offset, len).await,
            Layer::Other(added) => Box::pin(added.discard(offset, len)).await,
            Layer::Qcow2(image) => {
                let range = offset..offset + len;
                let discarding = image.discard(range.clone(), &self.below);
                let outcome = self.with_clusters(image, range, discarding).await;
                image.mark_corrupt_on_error(outcome).await
            }
        }
    }

    /// Makes durable all writes that had completed when it was called, mapping included. Dropped
    /// while it writes metadata, it latches the image: half of that cannot be taken back.
    ///
    /// # Errors
    /// I/O. After a failed flush the image takes no more writes (invariant D4).
    pub async fn flush(&self) -> Result<()> {
        match &*self.top {
            // What it had was made durable then.
            _ if self.is_frozen.load(Ordering::Acquire) => return Ok(()),
            Layer::Raw(raw) if self.writable => raw.flush().await?,
            Layer::Other(added) if self.writable => added.flush().await?,
            Layer::Raw(_) | Layer::Other(_) => {}
            Layer::Qcow2(image) => image.flush().await?,
        }
        match self.writable {
            true => self.below.flush_what_was_left().await,
            false => Ok(()),
        }
    }

    /// Hands to the system what has completed and is known to this process alone, so that the end
    /// of the process loses none of it; a power failure still may. Waits for nothing if there is
    /// nothing. Dropped, it latches the image as [`Image::flush`] does.
    ///
    /// # Errors
    /// As for [`Image::flush`].
    pub async fn write_back(&self) -> Result<()> {
        match self.top.qcow2() {
            Some(image) if self.is_writable() => image.write_back_tables().await,
            Some(_) | None => Ok(()),
        }
    }

    /// The state of a range of the disk, in order, covering it; neighbours of one state are one
    /// extent where their host offsets are contiguous. At most about `max_extents` are returned; if
    /// that cuts the range short, what follows is asked for with another call.
    ///
    /// # Errors
    /// Out of range, I/O, or a corrupt table entry.
    pub async fn extents(&self, offset: u64, len: u64, max_extents: usize) -> Result<Vec<Extent>> {
        self.validate(offset, len)?;
        let _visit = match self.top.qcow2() {
            Some(image) => Some(image.enter().await),
            None => None,
        };
        let _visits_below = self.below.enter().await;
        extents::extents(
            &self.top,
            &self.below,
            (offset..offset + len, max_extents.max(1)),
        )
        .await
    }

    /// Changes the size of the disk; an added range reads as zeroes.
    ///
    /// # Errors
    /// As `write`; `Unsupported` where the format cannot.
    pub async fn resize(&self, size: u64) -> Result<()> {
        self.resize_as_job(size, Preallocation::Off, &Job::default())
            .await
    }

    /// The same as a job, which allocates the space of the added range.
    ///
    /// # Errors
    /// As [`Image::resize`]; `Invalid` if nothing is added that could be preallocated; no space for
    /// it, and
    /// [`Error::Cancelled`]: then the disk has its old size, and the space allocated is released.
    pub async fn resize_as_job(
        &self,
        size: u64,
        preallocation: Preallocation,
        job: &Job,
    ) -> Result<()> {
        self.validate_write(0, 0)?;
        if preallocation != Preallocation::Off && size <= self.size() {
            let text = "Preallocation can only be used for growing images";
            return Err(Error::Invalid(text.to_string()));
        }
        match &*self.top {
            Layer::Raw(raw) => raw.resize(size, preallocation, job).await,
            Layer::Qcow2(image) => image.resize(size, &self.below, (preallocation, job)).await,
            Layer::Other(added) => added.resize(size, preallocation).await,
        }
    }

    /// Changes what the header says. The session ends with it, well or not: only [`Image::close`]
    /// may follow.
    ///
    /// # Errors
    /// `Invalid` for what an image cannot become, `Unsupported` for a raw one; I/O. After a crash,
    /// too, the header is the old or the new one.
    pub async fn amend(&self, amendment: &Amendment, job: &Job) -> Result<()> {
        self.validate_write(0, 0)?;
        let image = self.qcow2_for("amending")?;
        image.amend(amendment, &self.below, job).await
    }

    /// Refuses what [`Image::amend`] would refuse of the image's header if the disk had `size`
    /// bytes, and changes nothing.
    ///
    /// # Errors
    /// As `amend`.
    #[doc(hidden)]
    pub async fn may_amend(&self, amendment: &Amendment, size: u64) -> Result<()> {
        match self.top.qcow2() {
            None => Ok(()),
            Some(image) => image.may_amend(amendment, size).await,
        }
    }

    /// Flushes, if anything was changed since it was opened, releases space that was allocated
    /// ahead, stores the bitmaps, ends the session, and releases the files.
    ///
    /// # Errors
    /// I/O. The image is closed in any case, and `check` finds no corruption.
    pub async fn close(&self) -> Result<()> {
        let finished = self.finish().await;
        let ended = self.end_files().await;
        self.release();
        finished.and(ended)
    }

    /// Ends the session as [`Image::close`] does, but keeps the files open and claimed: for another
    /// process, which is to open the image next, or for opening it again with the same files.
    /// Returns the claims, for [`OpenOptions::handed_over`].
    ///
    /// # Errors
    /// I/O. The session has ended in any case.
    #[doc(hidden)]
    pub async fn end_session(&self) -> Result<Vec<(FileId, Claim)>> {
        self.finish().await?;
        let files = self.files();
        Ok(files
            .filter_map(|file| Some((file.id()?, file.claimed())))
            .collect())
    }

    /// Asks the other holders of claims on the files about those that were taken without asking, by
    /// [`OpenOptions::handed_over`]: whether the process that has handed the image over has let go.
    ///
    /// # Errors
    /// [`Error::Locked`]: it has not, and may still go on with the image.
    #[doc(hidden)]
    pub fn ask_others(&self) -> Result<()> {
        for file in self.files() {
            // Where there are no locks, opening has said so.
            drop(file.claim(file.claimed())?);
        }
        Ok(())
    }

    /// Whether each file that is written has an identity that another process finds, too.
    #[doc(hidden)]
    pub fn is_on_host_files(&self) -> bool {
        !self.writable || self.top.files().all(|file| file.id().is_some())
    }

    /// Ends what files keep open themselves: all of them, whatever happens to one.
    async fn end_files(&self) -> Result<()> {
        let mut ended = Ok(());
        for file in self.files() {
            let closed = file.close().await;
            let closed = closed.map_err(|error| {
                let text = "Could not close '{}', so bytes that were written to it may be lost";
                Error::io(text.replace("{}", file.name()), error)
            });
            ended = ended.and(closed);
        }
        ended
    }

    async fn finish(&self) -> Result<()> {
        match &*self.top {
            Layer::Raw(raw) if self.writable => raw.close().await,
            Layer::Other(added) if self.writable => added.close().await,
            Layer::Raw(_) | Layer::Other(_) => Ok(()),
            Layer::Qcow2(image) => image.close().await,
        }
    }

    /// Keeps requests from waiting: grows the file ahead of need and writes metadata back when much
    /// of it is dirty. Runs until the image is closed; a server spawns it beside its requests.
    /// Without it the image works too, and requests do this work when they must. To end it, close
    /// the image: dropped while it writes metadata, it latches the image, as a flush does.
    pub async fn maintain(&self) {
        if let Some(image) = self.top.qcow2()
            && self.writable
        {
            image.maintain().await;
        }
    }
}

impl LayerInfo {
    fn of(layer: &Layer) -> LayerInfo {
        LayerInfo {
            name: layer.file().name().to_string(),
            format: layer.format(),
            size: layer.size(),
            header: layer.qcow2().map(|image| Arc::new(image.header())),
            data_name: layer.data_file().name().to_string(),
            id: layer.files().next().and_then(|file| file.id()),
            content: layer.files().next().and_then(|file| file.content_id()),
        }
    }
}
