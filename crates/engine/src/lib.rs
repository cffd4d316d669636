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
//! # Three faces
//!
//! Beside futures, which any executor polls, there are requests with tokens and an eventfd for
//! event loops ([`requests`]), and calls that block ([`blocking`]). None starts a thread that the
//! caller has not asked for. Executors whose tasks move between threads have [`threaded`] disks.
//!
//! # Long operations
//!
//! [`convert`], [`commit`], [`rebase`], [`compare`], resizing, snapshots and changes of the header
//! take a [`Job`], which has a stage, progress and a way to cancel; cancelling takes back what was
//! done. [`measure`] says before a copy how much space it needs.
//!
//! # Snapshots, bitmaps, keys
//!
//! [`Image::create_snapshot`], [`Image::apply_snapshot`] and [`Image::delete_snapshot`];
//! [`Image::bitmaps`] and [`Image::change_bitmap`]; [`Image::change_keys`] of encrypted images.
//!
//! ```
//! # fn main() -> cowslip::Result<()> {
//! # use std::sync::Arc;
//! # use cowslip::file::memory::MemoryFile;
//! # use cowslip::file::host::HostGate;
//! # use cowslip::image::{Durability, OpenOptions};
//! # use cowslip::qcow2::create::{CreateOptions, create};
//! # use cowslip::{Buf, BufMut, Image, Job};
//! # use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
//! # cowslip_queue::Queue::new(cowslip_queue::Backend::Threads).expect("threads").block_on(async {
//! # let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
//! # create(file.clone(), None, &CreateOptions::new(1 << 20)).await?;
//! # let options = OpenOptions { writable: true, ..OpenOptions::default() };
//! # let image = Image::open(file, options, &HostGate::default()).await?;
//! let job = Job::default();
//! let new = NewSnapshot { name: "before".to_string(), ..NewSnapshot::default() };
//! let id = image.create_snapshot(&new, &job).await?;
//! image.write(0, Buf::copy_of(b"a mistake"), Durability::Cached).await?;
//! image.apply_snapshot(&SnapshotChoice::Id(id), &job).await?;
//! assert_eq!(image.read(0, BufMut::zeroed(9)).await?[..], [0; 9]);
//! image.close().await
//! # })
//! # }
//! ```
//!
//! # Check and repair
//!
//! [`qcow2::check::check`] reports findings to an observer and changes nothing;
//! [`qcow2::repair::repair`] repairs as much as possible, may stop after any write, and may be run
//! again. [`qcow2::inspect`] shows what an image says of itself.
//!
//! # Serve a disk, or put something between
//!
//! [`Image`] is a [`Disk`]: object-safe, with one vocabulary for extents, zeroes and durability.
//! The crate `cowslip-nbd` serves any of them; [`disk::DiskPart`] is one over another.
//!
//! # Files and formats of your own
//!
//! Bytes may come from anywhere: implement [`file::BlockFile`]. A further format is a
//! [`formats::FormatDriver`], passed in [`image::OpenOptions::formats`]; chains, conversion,
//! comparison and servers take its images like others, for writing too if it says so.
//!
//! May not know: NBD, command lines, printing, sockets, time.

mod backing;
pub mod blocking;
mod chain;
pub mod commit;
pub mod compare;
pub mod convert;
mod durable;
mod extents;
pub mod formats;
pub mod image;
#[cfg(not(feature = "luks"))]
#[path = "without_luks.rs"]
pub mod luks;
pub mod measure;
mod pairs;
pub mod qcow2;
mod raw;
pub mod rebase;
pub mod requests;
mod statistics;
pub mod threaded;

pub use cowslip_block::{
    Buf, BufMut, Disk, Error, IoVec, IoVecMut, Job, Result, SharedMemory, Workers, disk, error,
    job, limits, run,
};
#[doc(hidden)]
pub use cowslip_block::{errno, foreign, workers};
#[doc(hidden)]
pub use cowslip_hostfile::{allocate, growth, space};
#[cfg(feature = "luks")]
pub use cowslip_luks as luks;
pub use image::Image;

#[cfg(test)]
use cowslip_block::random;
use cowslip_block::{policy, sync, units, zero};

/// Files: the trait [`BlockFile`](file::BlockFile) and those of the host.
pub mod file {
    pub use cowslip_block::file::{
        AlignedFile, BlockFile, Capabilities, ContentId, FileExtent, FileId, FileRequest,
        OpenFuture, OpenedFile, Storage, memory,
    };
    #[doc(hidden)]
    pub use cowslip_block::file::{
        Brake, Calls, Cipher, Claim, Conflict, Event, FillMethod, Holes, HolesBy, Numbering,
        Observer, Permission, Permissions, PreparedWrite, Protection, ReadAs, ReadSet, Sharing,
        Side,
    };
    pub use cowslip_block::file::{ChosenBy, Gate, Role};
    #[doc(no_inline)]
    pub use cowslip_block::file::{Durability, Space};
    pub use cowslip_hostfile::host;
    #[cfg(feature = "portable")]
    pub use cowslip_hostfile::portable;
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
