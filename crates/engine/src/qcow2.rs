//! The qcow2 format, a chapter for each task; the crate `cowslip-qcow2` has it.

/// Changing what the header of an existing image says: version, flags, the names of the data file
/// and of the backing file, the hint on allocation.
///
/// ```
/// # use std::sync::Arc;
/// # use cowslip::file::{host::NoFiles, memory::MemoryFile};
/// # use cowslip::image::{Durability, OpenOptions};
/// # use cowslip::qcow2::create::{CreateOptions, create};
/// # use cowslip::{Buf, BufMut, Image, Job};
/// # async fn image(bytes: u64) -> cowslip::Result<Image> {
/// #     let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
/// #     create(file.clone(), None, &CreateOptions::new(bytes)).await?;
/// #     let options = OpenOptions { writable: true, ..OpenOptions::default() };
/// #     Image::open(file, options, &NoFiles).await
/// # }
/// # fn main() -> cowslip::Result<()> {
/// # cowslip::blocking::wait(async {
/// use cowslip::qcow2::amend::Amendment;
///
/// # let image = image(1 << 30).await?;
/// let amendment = Amendment { lazy_refcounts: Some(true), ..Amendment::default() };
/// image.amend(&amendment, &Job::default()).await?;
/// image.close().await?; // to be opened again for requests
/// # Ok(())
/// # })
/// # }
/// ```
#[doc(inline)]
pub use cowslip_qcow2::amend;

/// Persistent dirty bitmaps: which parts of the disk have changed since each of them was added or
/// cleared.
///
/// ```
/// # use std::sync::Arc;
/// # use cowslip::file::{host::NoFiles, memory::MemoryFile};
/// # use cowslip::image::{Durability, OpenOptions};
/// # use cowslip::qcow2::create::{CreateOptions, create};
/// # use cowslip::{Buf, BufMut, Image, Job};
/// # async fn image(bytes: u64) -> cowslip::Result<Image> {
/// #     let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
/// #     create(file.clone(), None, &CreateOptions::new(bytes)).await?;
/// #     let options = OpenOptions { writable: true, ..OpenOptions::default() };
/// #     Image::open(file, options, &NoFiles).await
/// # }
/// # fn main() -> cowslip::Result<()> {
/// # cowslip::blocking::wait(async {
/// use cowslip::qcow2::bitmap::BitmapChange;
///
/// # let image = image(1 << 30).await?;
/// image.change_bitmap("backup", &BitmapChange::Add { granularity: None }).await?;
/// image.write(1 << 20, Buf::copy_of(&[7; 512]), Durability::Cached).await?;
///
/// let dirty = image.dirty_bits("backup").await?;
/// let changed: Vec<_> = dirty.dirty_ranges().collect(); // what a backup copies now
/// assert_eq!(changed, [1 << 20..(1 << 20) + (64 << 10)]);
/// image.change_bitmap("backup", &BitmapChange::Clear).await?;
/// # Ok(())
/// # })
/// # }
/// ```
#[doc(inline)]
pub use cowslip_qcow2::bitmap;

/// Checks a qcow2 image without changing it: every structure, every reference, every refcount.
///
/// ```
/// # use std::sync::Arc;
/// # use cowslip::file::{BlockFile, memory::MemoryFile};
/// # use cowslip::qcow2::create::{CreateOptions, create};
/// # fn main() -> cowslip::Result<()> {
/// # cowslip::blocking::wait(async {
/// use cowslip::qcow2::check::{CheckOptions, Finding, Severity, check};
///
/// # let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
/// # create(file.clone(), None, &CreateOptions::new(1 << 30)).await?;
/// let mut findings: Vec<Finding> = Vec::new(); // or an observer of one's own, for large images
/// let result = check(&file, &CheckOptions::default(), &mut findings).await?;
/// for finding in findings.iter().filter(|found| found.severity() == Severity::Corruption) {
///     eprintln!("{finding}");
/// }
/// assert!(result.is_clean());
/// # Ok(())
/// # })
/// # }
/// ```
#[doc(inline)]
pub use cowslip_qcow2::check;

/// Compaction in place: clusters move from the end of the file into free ones before it, leaks are
/// freed, the file is cut, and what is free in it becomes holes.
///
/// ```
/// # use std::sync::Arc;
/// # use cowslip::file::{host::NoFiles, memory::MemoryFile};
/// # use cowslip::image::{Durability, OpenOptions};
/// # use cowslip::qcow2::create::{CreateOptions, create};
/// # use cowslip::{Buf, BufMut, Image, Job};
/// # async fn image(bytes: u64) -> cowslip::Result<Image> {
/// #     let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
/// #     create(file.clone(), None, &CreateOptions::new(bytes)).await?;
/// #     let options = OpenOptions { writable: true, ..OpenOptions::default() };
/// #     Image::open(file, options, &NoFiles).await
/// # }
/// # fn main() -> cowslip::Result<()> {
/// # cowslip::blocking::wait(async {
/// use cowslip::qcow2::compact::CompactOptions;
///
/// # let image = image(1 << 30).await?;
/// let options = CompactOptions { zeroes: true, ..CompactOptions::default() };
/// let done = image.compact(&options, &Job::default()).await?; // requests go on meanwhile
/// assert!(done.file_bytes <= done.file_bytes_before);
/// # Ok(())
/// # })
/// # }
/// ```
#[doc(inline)]
pub use cowslip_qcow2::compact;

/// Creating images: qcow2 with its options and their rules, raw disks, LUKS volumes.
///
/// ```
/// # use std::sync::Arc;
/// # use cowslip::file::{host::NoFiles, memory::MemoryFile};
/// # use cowslip::image::{Durability, OpenOptions};
/// # use cowslip::qcow2::create::{CreateOptions, create};
/// # use cowslip::{Buf, BufMut, Image, Job};
/// # async fn image(bytes: u64) -> cowslip::Result<Image> {
/// #     let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
/// #     create(file.clone(), None, &CreateOptions::new(bytes)).await?;
/// #     let options = OpenOptions { writable: true, ..OpenOptions::default() };
/// #     Image::open(file, options, &NoFiles).await
/// # }
/// # fn main() -> cowslip::Result<()> {
/// # cowslip::blocking::wait(async {
/// use cowslip::qcow2::create::Preallocation;
///
/// let file = Arc::new(MemoryFile::new("overlay", Vec::new(), 1));
/// let options = CreateOptions {
///     cluster_size: 128 << 10,
///     extended_l2: true, // subclusters of 4 KiB
///     backing_file: Some("golden.qcow2".to_string()),
///     backing_format: Some("qcow2".to_string()),
///     ..CreateOptions::new(10 << 30)
/// };
/// options.validate()?;
/// create(file, None, &options).await?;
///
/// let file = Arc::new(MemoryFile::new("disk.raw", Vec::new(), 1));
/// cowslip::qcow2::create::create_raw(file, 1 << 20, Preallocation::Off, &Job::default()).await?;
/// # Ok(())
/// # })
/// # }
/// ```
#[doc(inline)]
pub use cowslip_qcow2::create;

/// An image's description of itself, for reports: header, snapshot list, bitmap list.
///
/// ```
/// # use std::sync::Arc;
/// # use cowslip::file::{BlockFile, memory::MemoryFile};
/// # use cowslip::qcow2::create::{CreateOptions, create};
/// # fn main() -> cowslip::Result<()> {
/// # cowslip::blocking::wait(async {
/// use cowslip::qcow2::inspect::inspect;
///
/// # let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
/// # create(file.clone(), None, &CreateOptions::new(1 << 30)).await?;
/// let inspection = inspect(&file).await?;
/// assert_eq!((inspection.header.size, inspection.header.backing_file), (1 << 30, None));
/// assert!(inspection.snapshots.is_empty());
/// # Ok(())
/// # })
/// # }
/// ```
#[doc(inline)]
pub use cowslip_qcow2::inspect;

/// Repairs a qcow2 image: a plan first, then its run.
///
/// ```
/// # use std::sync::Arc;
/// # use cowslip::file::{BlockFile, memory::MemoryFile};
/// # use cowslip::qcow2::create::{CreateOptions, create};
/// # fn main() -> cowslip::Result<()> {
/// # cowslip::blocking::wait(async {
/// use cowslip::qcow2::repair::{RepairOptions, Scope, plan, repair};
///
/// # let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
/// # create(file.clone(), None, &CreateOptions::new(1 << 30)).await?;
/// let options = RepairOptions::new(Scope::All);
/// if !plan(&file, &options, &mut ()).await?.is_empty() {
///     let outcome = repair(&file, &options, &mut ()).await?;
///     assert_eq!(outcome.check.corruptions, 0);
/// }
/// # Ok(())
/// # })
/// # }
/// ```
#[doc(inline)]
pub use cowslip_qcow2::repair;

/// Internal snapshots: made, applied, deleted and listed, by methods of
/// [`Image`](crate::Image).
///
/// ```
/// # use std::sync::Arc;
/// # use cowslip::file::{host::NoFiles, memory::MemoryFile};
/// # use cowslip::image::{Durability, OpenOptions};
/// # use cowslip::qcow2::create::{CreateOptions, create};
/// # use cowslip::{Buf, BufMut, Image, Job};
/// # async fn image(bytes: u64) -> cowslip::Result<Image> {
/// #     let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
/// #     create(file.clone(), None, &CreateOptions::new(bytes)).await?;
/// #     let options = OpenOptions { writable: true, ..OpenOptions::default() };
/// #     Image::open(file, options, &NoFiles).await
/// # }
/// # fn main() -> cowslip::Result<()> {
/// # cowslip::blocking::wait(async {
/// use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
///
/// # let image = image(1 << 20).await?;
/// let job = Job::default();
/// let new = NewSnapshot { name: "before".to_string(), ..NewSnapshot::default() };
/// let id = image.create_snapshot(&new, &job).await?;
/// image.write(0, Buf::copy_of(b"a mistake"), Durability::Cached).await?;
/// image.apply_snapshot(&SnapshotChoice::Id(id.clone()), &job).await?;
/// assert_eq!(image.read(0, BufMut::zeroed(9)).await?[..], [0; 9]);
/// image.delete_snapshot(&SnapshotChoice::Id(id), &job).await?;
/// # Ok(())
/// # })
/// # }
/// ```
#[doc(inline)]
pub use cowslip_qcow2::snapshot;

#[doc(inline)]
pub use cowslip_qcow2::{CompressionType, Header, stream};
// For tools and tests, and for Cowslip's other crates.
#[doc(hidden)]
pub use cowslip_qcow2::{
    CryptMethod, OpenParameters, Qcow2, compress, entry, geometry, header, layout, map, open, plan,
    probe,
};
