//! Cowslip: a qcow2 storage engine that allocates well and loses nothing.
//!
//! An [`Image`] is opened over a [`file::BlockFile`] and answers reads, writes, zeroes, discards,
//! flushes and questions about extents, concurrently and from several threads. The engine has no
//! thread, no clock and no executor of its own: its futures are `Send` and run wherever the caller
//! polls them. Files of the host come with one, in the crate `cowslip-queue`.
//!
//! # Create, open, write and read an image
//!
//! [`qcow2::create`] makes images, [`image::OpenOptions`] says how one is opened, and what an image
//! names is opened through a [`file::Gate`] only, which may refuse. For files of the host these are
//! [`file::host::open_host_file`] and [`file::host::HostGate`].
//!
//! ```
//! # fn main() -> cowslip::Result<()> {
//! # use cowslip_queue::{Backend, Queue};
//! use cowslip::file::host::{CreateMode, HostGate, HostOptions, open_host_file};
//! use cowslip::image::{Durability, OpenOptions};
//! use cowslip::qcow2::create::{CreateOptions, create};
//! use cowslip::{Buf, BufMut, Image};
//!
//! # let dir = tempfile::tempdir().expect("a scratch directory");
//! # let path = dir.path().join("disk.qcow2");
//! # Queue::new(Backend::Threads).expect("threads are there").block_on(async {
//! let host = HostOptions {
//!     writable: true,
//!     create: CreateMode::CreateNew,
//!     ..HostOptions::default()
//! };
//! create(open_host_file(&path, &host)?, None, &CreateOptions::new(1 << 30)).await?;
//!
//! let host = HostOptions { create: CreateMode::OpenExisting, ..host };
//! let gate = HostGate { options: host, ..HostGate::default() };
//! let options = OpenOptions { writable: true, ..OpenOptions::default() };
//! let image = Image::open(open_host_file(&path, &host)?, options, &gate).await?;
//! image.write(1 << 20, Buf::copy_of(b"a guest's bytes"), Durability::Cached).await?;
//! image.flush().await?;
//! let read = image.read(1 << 20, BufMut::zeroed(15)).await?;
//! assert_eq!(&read[..], b"a guest's bytes");
//! image.close().await
//! # })
//! # }
//! ```
//!
//! Memory that a guest or an embedder owns is passed as it is, by [`IoVec`] and [`IoVecMut`].
//!
//! # Chapters
//!
//! | task | chapter |
//! | --- | --- |
//! | make an image | [`qcow2::create`]: qcow2 and raw |
//! | open one, read, write, zero, discard, resize, close | [`image`] |
//! | files: of the host, in memory, of one's own; which ones an image may name | [`mod@file`] |
//! | requests of an event loop, by *submit and complete* | [`requests`] |
//! | calls that block | [`blocking`] |
//! | executors whose tasks move between threads | [`threaded`] |
//! | long operations: progress, cancellation | [`job`] |
//! | copy a disk into another image | [`convert`] |
//! | compute how much space an image will need | [`measure`](mod@measure) |
//! | chains: merge an image into its backing file, give it another one | [`commit`], [`rebase`] |
//! | compare two disks | [`compare`](mod@compare) |
//! | internal snapshots | [`qcow2::snapshot`] |
//! | dirty bitmaps, for incremental backups | [`qcow2::bitmap`] |
//! | write an image to a pipe or an object store | [`qcow2::stream`](mod@qcow2::stream) |
//! | describe an image without opening it for requests | [`qcow2::inspect`](mod@qcow2::inspect) |
//! | check and repair | [`qcow2::check`](mod@qcow2::check), [`qcow2::repair`](mod@qcow2::repair) |
//! | make a file shorter, change a header | [`qcow2::compact`], [`qcow2::amend`] |
//! | passphrases of encrypted images | [`luks`] |
//! | serve a disk, or put something between a guest and an image | [`disk`] |
//! | a further image format | [`formats`] |
//!
//! The three ways to call the engine, by futures, by *submit and complete* and by calls that block,
//! work on one [`Image`] at the same time. None starts a thread that the caller has not asked for.
//!
//! These names are what programs need. The crates `cowslip-block`, `cowslip-hostfile` and
//! `cowslip-queue` document the vocabulary below them, for those who implement disks, files or
//! formats. Names that no page shows are shared among Cowslip's own crates, and may change at any
//! time.
//!
//! May not know: NBD, command lines, printing, sockets, time.

pub mod blocking;
mod chain;
pub mod commit;
pub mod compare;
pub mod convert;
mod extents;
pub mod formats;
pub mod image;
#[cfg(not(feature = "luks"))]
pub use cowslip_qcow2::luks;
pub mod measure;
mod pairs;
pub mod qcow2;
mod raw;
pub mod rebase;
pub mod requests;
pub mod threaded;

pub use cowslip_block::{
    Buf, BufMut, Disk, Error, IoVec, IoVecMut, Job, Result, SharedMemory, Workers,
};
// Errors are matched at the root; limits of requests are for tests of callers; runs are the
// vocabulary of formats (documented in `cowslip-block`).
#[doc(hidden)]
pub use cowslip_block::{errno, error, foreign, limits, run, workers};
#[doc(hidden)]
pub use cowslip_hostfile::{allocate, growth, space};
#[doc(no_inline)]
pub use image::Image;

use cowslip_block::{durable, files, policy, sync, units, zero};
use cowslip_qcow2::{backing, statistics};

/// Disks: the trait [`Disk`], its vocabulary, and a disk in memory.
///
/// [`Image`] is a [`Disk`]: object-safe, with one vocabulary for extents, zeroes and durability.
/// The crates `cowslip-nbd`, `cowslip-vhost-user` and `cowslip-fuse` serve any of them; what comes
/// between a guest and an image is another one over it.
///
/// ```
/// use std::sync::Arc;
/// use cowslip::disk::MemoryDisk;
/// use cowslip::image::Durability;
/// use cowslip::{BufMut, Buf, Disk};
///
/// async fn first_sector(disk: &dyn Disk) -> cowslip::Result<Vec<u8>> {
///     Ok(disk.read(0, BufMut::zeroed(512).into()).await?.to_vec())
/// }
/// # fn main() -> cowslip::Result<()> {
/// let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("disk", 1 << 20));
/// # cowslip::blocking::wait(async {
/// disk.write(0, Buf::copy_of(&[7; 512]).into(), Durability::Cached).await?;
/// assert_eq!(first_sector(&*disk).await?, [7; 512]);
/// # Ok(())
/// # })
/// # }
/// ```
pub mod disk {
    #[doc(no_inline)]
    pub use cowslip_block::disk::Disk;
    pub use cowslip_block::disk::{Extent, MemoryDisk, ZeroOptions};
    // For those who implement disks, documented in `cowslip-block`.
    #[doc(hidden)]
    pub use cowslip_block::disk::{DiskFuture, DiskPart, Features, ReadOnlyDisk, within};
}

/// Files: the trait [`BlockFile`](file::BlockFile), those of the host, and files in memory.
///
/// All bytes of an image come through a `BlockFile`, which may be implemented over anything, and
/// every file that an image names through a [`Gate`](file::Gate), which may refuse.
/// [`HostGate`](file::host::HostGate) opens files of the host within a policy;
/// [`NoFiles`](file::host::NoFiles) refuses all. A gate of one's own:
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Arc;
/// use cowslip::file::{BlockFile, FileRequest, Gate};
/// use cowslip::{Error, Result};
///
/// /// The files that a program has opened, or has been passed, beforehand.
/// struct Prepared(HashMap<String, Arc<dyn BlockFile>>);
///
/// impl Gate for Prepared {
///     fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
///         let file = self.0.get(request.name).filter(|_| !request.writable);
///         file.cloned().ok_or_else(|| Error::invalid(format!("no file '{}'", request.name)))
///     }
/// }
/// ```
pub mod file {
    pub use cowslip_block::file::{BlockFile, FileRequest, Gate, Sharing, memory};
    // For those who implement files and formats, documented in `cowslip-block`; claims are between
    // Cowslip's own crates.
    #[doc(hidden)]
    pub use cowslip_block::file::{
        AlignedFile, Brake, Calls, Capabilities, ChosenBy, Cipher, Claim, Conflict, ContentId,
        Event, FileExtent, FileId, FillMethod, Holes, HolesBy, Numbering, Observer, OpenFuture,
        OpenedFile, Permission, Permissions, PreparedWrite, Protection, ReadAs, ReadSet, Role,
        Side, Storage,
    };
    #[doc(no_inline)]
    pub use cowslip_block::file::{Durability, Space};
    #[cfg(feature = "portable")]
    pub use cowslip_hostfile::portable;

    /// Files and block devices of the host, by io_uring or by threads.
    pub mod host {
        pub use cowslip_hostfile::host::{
            Aio, BackingPolicy, CreateMode, FlushPolicy, HostGate, HostOptions, NoFiles, PageCache,
            host_file_of, open_host_file,
        };
        // Which driver serves a file and how it is locked is for tools.
        #[doc(hidden)]
        pub use cowslip_hostfile::host::*;
    }
}

/// Long operations: a [`Job`] has a stage, progress and a way to cancel.
///
/// The caller keeps a clone; cancelling takes back what was done, or leaves what the
/// operation's documentation says.
///
/// ```
/// use cowslip::Job;
///
/// let job = Job::default();
/// let shown = job.clone(); // for another thread: `shown.progress()`, `shown.cancel()`
/// assert_eq!(shown.progress().done_bytes, 0);
/// shown.cancel();
/// assert!(job.is_cancelled());
/// ```
pub mod job {
    #[doc(no_inline)]
    pub use cowslip_block::job::Job;
    pub use cowslip_block::job::{Progress, Stage};
    // The side of those who carry out a job, or pace it.
    #[doc(hidden)]
    pub use cowslip_block::job::*;
}

/// Encrypted images: the passphrase that opens one
/// ([`OpenOptions::passphrase`](image::OpenOptions::passphrase)).
///
/// The crate `cowslip-luks` documents new volumes, which
/// [`Encryption`](qcow2::create::Encryption) takes, and changes of keys
/// ([`Image::change_keys`]).
#[cfg(feature = "luks")]
pub mod luks {
    pub use cowslip_luks::Passphrase;
    // Volumes, key slots and ciphers, documented in `cowslip-luks`.
    #[doc(hidden)]
    pub use cowslip_luks::*;
}

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The manual's example compiles, and works.
#[cfg(doctest)]
#[doc = include_str!("../../../manual/quick-vmm.md")]
struct Manual;
/// So do those of the chapter on programs, and of the package's own README.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/embedding.md")]
#[doc = include_str!("../README.md")]
struct Embedding;
