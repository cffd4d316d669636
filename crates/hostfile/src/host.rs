//! Files of the host: regular files and block devices; character devices where the caller says that
//! it is a device.
//!
//! Promises what [`BlockFile`] asks for. I/O goes through the queue of the calling thread, or
//! through the pool of threads; the page cache is used or bypassed (`O_DIRECT`) as the caller says,
//! and with it comes the alignment that requests must have. Also the ordinary gate: files that
//! images name, looked up beside the image.
//!
//! Leaves out: anything with a protocol in its name.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use cowslip_queue::cut::{self, Cut};
use cowslip_queue::file::{File, MemoryAlignment, Persistence, Route, Shape, ring_available};
use cowslip_queue::{IoVec, IoVecMut, Pending, attributes, blocking};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;

use crate::file::{
    BlockFile, Calls, Capabilities, ChosenBy, Claim, Durability, FileExtent, FileId, FileRequest,
    FillMethod, Gate, Holes, Protection, Space, Storage, unsupported,
};
use crate::lock::{Ask, Claims};
use crate::policy::Beneath;
use crate::{Error, Result};
use crate::{geometry, room, storage};

pub use crate::lock::Locking;
pub use crate::name::resolve_name;
pub use crate::policy::BackingPolicy;
pub use crate::probe::{probe_space, takes_length};

/// Driver of the I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aio {
    /// The ring where the calling thread's queue has one, else threads.
    #[default]
    Auto,
    /// The same, but opening fails where the kernel gives no ring.
    Uring,
    /// Threads.
    Threads,
}

/// Whether I/O goes through the host's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageCache {
    /// Reads and writes go through the page cache.
    #[default]
    Use,
    /// Reads and writes bypass the page cache: `O_DIRECT`.
    Bypass,
}

/// Effect of a flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlushPolicy {
    /// A flush makes earlier writes durable.
    #[default]
    Honour,
    /// A flush has no effect: fast, and all writes are lost with the host (`cache=unsafe`).
    Ignore,
}

/// Treatment of the file's existence at opening.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CreateMode {
    /// The file must exist.
    #[default]
    OpenExisting,
    /// The file is made, and must not exist.
    CreateNew,
    /// The file is made, or truncated to nothing if it exists.
    Truncate,
}

/// Kind of file that the caller asks for, by QEMU's names of drivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Driver {
    /// Any kind: a regular file or a block device.
    #[default]
    Unsaid,
    /// `file`: a regular file.
    File,
    /// `host_device`: a device.
    HostDevice,
    /// `host_cdrom`: the same here.
    HostCdrom,
}

impl Driver {
    /// The driver of a name.
    pub fn from_name(name: &str) -> Option<Driver> {
        [Driver::File, Driver::HostDevice, Driver::HostCdrom]
            .into_iter()
            .find(|driver| driver.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            // By their names alone, QEMU takes files for those of this driver.
            Driver::Unsaid | Driver::File => "file",
            Driver::HostDevice => "host_device",
            Driver::HostCdrom => "host_cdrom",
        }
    }

    fn takes(self, kind: FileType) -> bool {
        match self {
            Driver::Unsaid => matches!(kind, FileType::RegularFile | FileType::BlockDevice),
            Driver::File => kind == FileType::RegularFile,
            Driver::HostDevice | Driver::HostCdrom => {
                matches!(kind, FileType::BlockDevice | FileType::CharacterDevice)
            }
        }
    }

    /// Returns the error for a file of another kind, in QEMU's words.
    fn refused(self, name: &str) -> Error {
        let wanted = match self {
            Driver::Unsaid | Driver::File => "a regular file",
            Driver::HostDevice | Driver::HostCdrom => "either a character or block device",
        };
        let driver = self.name();
        Error::Invalid(format!(
            "'{driver}' driver requires '{name}' to be {wanted}"
        ))
    }
}

/// How to open a file of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostOptions {
    /// Whether it will be written.
    pub writable: bool,
    /// Whether it must, may or must not exist.
    pub create: CreateMode,
    /// Use of the page cache.
    pub page_cache: PageCache,
    /// Whether flushes count.
    pub flush: FlushPolicy,
    /// The driver.
    pub aio: Aio,
    /// Whether claims on the file are made known to other processes.
    pub locking: Locking,
    /// Kind that the file has to have.
    pub driver: Driver,
}

/// A gate for images that may name no other file: those whose files the caller passes, or whose
/// names are not trusted at all.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFiles;

impl Gate for NoFiles {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        Err(Error::Forbidden(format!(
            "'{}' names the file '{}', and the caller opens no other files",
            request.named_by, request.name
        )))
    }
}

/// Opens a regular file or a device. Blocks, but not for long.
///
/// Nothing is claimed of a file that exists (see [`BlockFile::claim`]); one that is made is claimed
/// as QEMU does, before it is cut to nothing.
///
/// # Errors
/// The system's refusal; another process that uses a file which shall be cut; something else than
/// the driver takes; a file system without direct I/O if that was asked for; a kernel without
/// io_uring if that was.
pub fn open_host_file(path: &Path, options: &HostOptions) -> Result<Arc<dyn BlockFile>> {
    let name = path.to_string_lossy().into_owned();
    let open = |flags, mode| rustix::fs::open(path, flags, mode);
    let file = HostBlockFile::open(&open, name, options)?;
    Ok(Arc::new(file))
}

/// Makes a file of a descriptor that is open already, by a name for messages. Its access is that of
/// the options.
///
/// # Errors
/// As [`open_host_file`], without those of opening.
pub fn host_file_of(fd: OwnedFd, name: &str, options: &HostOptions) -> Result<Arc<dyn BlockFile>> {
    let fd = std::cell::Cell::new(Some(fd));
    let open = |_, _| fd.take().ok_or(Errno::BADF);
    let file = HostBlockFile::open(&open, name.to_string(), options)?;
    Ok(Arc::new(file))
}

/// Makes a file in a directory that nobody else can open, and that vanishes when it is closed.
/// Blocks, but not for long.
///
/// # Errors
/// As [`open_host_file`].
#[doc(hidden)]
pub fn open_unnamed_file(directory: &Path, options: &HostOptions) -> Result<Arc<dyn BlockFile>> {
    let options = HostOptions {
        writable: true,
        create: CreateMode::CreateNew,
        ..*options
    };
    let open = |_, _| crate::scratch::unnamed(directory);
    let name = directory.join("(unnamed)").to_string_lossy().into_owned();
    let file = HostBlockFile::open(&open, name, &options)?;
    Ok(Arc::new(file))
}

fn open_flags(options: &HostOptions) -> OFlags {
    // Opening a FIFO would wait for its other end; its type is checked after opening.
    let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    flags |= match options.writable {
        true => OFlags::RDWR,
        false => OFlags::RDONLY,
    };
    flags |= match options.create {
        CreateMode::OpenExisting => OFlags::empty(),
        CreateMode::CreateNew => OFlags::CREATE | OFlags::EXCL,
        // It is cut when it is claimed.
        CreateMode::Truncate => OFlags::CREATE,
    };
    if options.page_cache == PageCache::Bypass {
        flags |= OFlags::DIRECT;
    }
    flags
}

/// A way to open a file.
type Opener<'a> = &'a dyn Fn(OFlags, Mode) -> rustix::io::Result<OwnedFd>;

/// Opens, and asks what it is; no file if it is not what the driver takes.
fn open_checked(
    open: Opener<'_>,
    options: &HostOptions,
) -> rustix::io::Result<(Option<OwnedFd>, Stat)> {
    // As every program that makes files: the user's mask takes away what it wants.
    let mode = Mode::from_raw_mode(0o644);
    let flags = open_flags(options);
    let fd = open(flags, mode)?;
    let stat = rustix::fs::fstat(&fd)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if !options.driver.takes(kind) {
        return match (options.driver, kind) {
            (Driver::Unsaid, FileType::Fifo | FileType::Socket) => Err(Errno::SPIPE),
            (Driver::Unsaid, FileType::CharacterDevice) => Err(Errno::NOTBLK),
            _ => Ok((None, stat)),
        };
    }
    rustix::fs::fcntl_setfl(&fd, flags & OFlags::DIRECT)?;
    Ok((Some(fd), stat))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Regular,
    /// A block device with its size, which is fixed while it is open.
    BlockDevice(u64),
    /// Likewise; most have none.
    CharacterDevice(u64),
}

#[derive(Debug)]
struct HostBlockFile {
    name: String,
    capabilities: Capabilities,
    id: FileId,
    kind: Kind,
    flush: FlushPolicy,
    claims: Claims,
    file: Arc<File>,
}

impl HostBlockFile {
    fn open(open: Opener<'_>, name: String, options: &HostOptions) -> Result<HostBlockFile> {
        if options.aio == Aio::Uring && ring_available().is_err() {
            return Err(Error::Unsupported {
                file: name,
                feature: "io_uring on this kernel".into(),
            });
        }
        let verb = match options.create {
            CreateMode::OpenExisting => "open",
            CreateMode::CreateNew | CreateMode::Truncate => "create",
        };
        let failed = |error: io::Error| Error::io(format!("Could not {verb} '{name}'"), error);
        let (fd, stat) = match open_checked(open, options) {
            Ok((Some(fd), stat)) => (fd, stat),
            Ok((None, _)) => return Err(options.driver.refused(&name)),
            // The one meaning of EINVAL here: no direct I/O on this file system.
            Err(Errno::INVAL) if options.page_cache == PageCache::Bypass => {
                return Err(Error::Unsupported {
                    file: name,
                    feature: "O_DIRECT on this file system".into(),
                });
            }
            Err(error) => return Err(failed(error.into())),
        };
        let direct = match options.page_cache {
            PageCache::Use => None,
            PageCache::Bypass => Some(geometry::direct_alignment(&fd).map_err(failed)?),
        };
        let memory = direct.map_or(MemoryAlignment::NONE, |direct| MemoryAlignment {
            start_bytes: direct.memory_bytes as usize,
            len_bytes: direct.offset_bytes as usize,
        });
        let alignment = direct.map_or(1, |direct| direct.offset_bytes);
        let space = geometry::space_calls(&fd, &stat);
        let route = match options.aio {
            Aio::Auto | Aio::Uring => Route::Ring,
            Aio::Threads => Route::Pool,
        };
        let file = File::new(fd, route, memory);
        let (kind, id) = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => {
                let size = file.block_device_size().map_err(failed)?;
                (Kind::BlockDevice(size), FileId(stat.st_rdev, 0))
            }
            FileType::CharacterDevice => {
                let end = rustix::fs::seek(&*file, rustix::fs::SeekFrom::End(0));
                let size = end.map_err(|error| failed(error.into()))?;
                // No file has this number, and a block device may have that of this one.
                (Kind::CharacterDevice(size), FileId(stat.st_rdev, u64::MAX))
            }
            _ => (Kind::Regular, FileId(stat.st_dev, stat.st_ino)),
        };
        let file = HostBlockFile {
            capabilities: Capabilities {
                alignment_bytes: alignment,
                space_alignment_bytes: alignment.max(space.alignment_bytes),
                writable: options.writable,
                extends_with_zeroes: kind == Kind::Regular,
                zeroes_fast: space.zeroes_fast,
                punches_holes: space.punches_holes,
            },
            name,
            id,
            kind,
            flush: options.flush,
            claims: Claims::new(options.locking),
            file,
        };
        if options.create != CreateMode::OpenExisting {
            // The caller that fills the file claims it again, and learns whether it is protected.
            drop(file.claim(Claim::CREATE_RAW)?);
        }
        if options.create == CreateMode::Truncate && kind == Kind::Regular {
            let cut = rustix::fs::ftruncate(&*file.file, 0);
            cut.map_err(|error| {
                Error::io(format!("Could not create '{}'", file.name), error.into())
            })?;
        }
        Ok(file)
    }

    fn check_aligned(&self, offset: u64, len: u64) {
        let alignment = u64::from(self.capabilities.alignment_bytes);
        assert!(
            offset.is_multiple_of(alignment) && len.is_multiple_of(alignment),
            "{offset:#x}+{len:#x} is not aligned to {alignment}"
        );
    }

    fn length(&self) -> io::Result<u64> {
        match self.kind {
            Kind::Regular => Ok(rustix::fs::fstat(&*self.file)?.st_size as u64),
            Kind::BlockDevice(size) | Kind::CharacterDevice(size) => Ok(size),
        }
    }
}

impl BlockFile for HostBlockFile {
    cowslip_block::file_from_fields!(name, capabilities, id, content_id);

    fn storage(&self) -> Storage {
        match self.kind {
            Kind::BlockDevice(_) => storage::of_block_device(&*self.file, self.id.0),
            Kind::Regular | Kind::CharacterDevice(_) => Storage::whole(self.id),
        }
    }

    fn len(&self) -> Pending<io::Result<u64>> {
        // The inode is in memory: this does not block.
        Pending::ready(self.length())
    }

    fn memory_alignment(&self) -> MemoryAlignment {
        self.file.memory_alignment()
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        self.check_aligned(offset, buf.len() as u64);
        self.file.read_at(offset, buf)
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        self.check_aligned(offset, data.len() as u64);
        let persistence = match (durability, self.flush) {
            (Durability::Durable, FlushPolicy::Honour) => Persistence::Durable,
            _ => Persistence::Cached,
        };
        self.file.write_at(offset, data, persistence)
    }

    /// The end of file moves up with zeroes that stay allocated, not with those that take no space.
    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        let shape = match space {
            Space::Keep => Shape::Zero,
            Space::Release => Shape::Punch,
        };
        self.file.shape(offset, len, shape)
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        match self.kind {
            Kind::Regular => self.file.shape(offset, len, Shape::Punch),
            Kind::BlockDevice(_) => self.file.discard_blocks(offset, len),
            Kind::CharacterDevice(_) => unsupported(),
        }
    }

    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.file.shape(offset, len, Shape::Allocate)
    }

    fn allocate_keeping_end(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.file.shape(offset, len, Shape::AllocateKeepingEnd)
    }

    fn give_space(&self, range: Range<u64>, way: FillMethod) -> Pending<io::Result<Calls>> {
        self.file.give_space(range, way)
    }

    fn holes(&self, range: Range<u64>, most: usize) -> Pending<io::Result<Holes>> {
        self.file.holes(range, most)
    }

    fn release_extents(&self, range: Range<u64>) -> Pending<io::Result<u64>> {
        match self.kind {
            Kind::Regular => self.file.release_extents(range),
            Kind::BlockDevice(_) | Kind::CharacterDevice(_) => unsupported(),
        }
    }

    fn allocate_written(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.file.shape(offset, len, Shape::AllocateWritten)
    }

    fn allocates_written(&self) -> bool {
        rustix::fs::fstat(&*self.file).is_ok_and(|stat| geometry::allocates_written(&stat))
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        match self.kind {
            Kind::Regular => {
                let end = offset.saturating_add(len);
                self.file.runs(offset, end, file_extent)
            }
            // A device reports nothing about its blocks.
            Kind::BlockDevice(size) | Kind::CharacterDevice(size) => {
                Pending::ready(Ok(FileExtent::split_at_end(offset, len, size)))
            }
        }
    }

    fn own_space(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        match self.kind {
            Kind::Regular => {
                let end = offset.saturating_add(len);
                self.file.own_runs(offset, end, file_extent)
            }
            _ => self.extents(offset, len),
        }
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        match self.flush {
            FlushPolicy::Honour => self.file.sync_data(),
            FlushPolicy::Ignore => Pending::ready(Ok(())),
        }
    }

    /// Without a flush, as with [`FlushPolicy::Ignore`], this is where a loss of bytes shows.
    fn close(&self) -> Pending<io::Result<()>> {
        match self.capabilities.writable {
            true => self.file.report_at_close(),
            false => Pending::ready(Ok(())),
        }
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        match self.kind {
            Kind::Regular => self.file.set_len(len),
            Kind::BlockDevice(size) | Kind::CharacterDevice(size) if size == len => {
                Pending::ready(Ok(()))
            }
            Kind::BlockDevice(size) | Kind::CharacterDevice(size) => {
                let what = match len > size {
                    true => "Cannot grow device files",
                    false => "Cannot resize device files",
                };
                Pending::ready(Err(io::Error::new(io::ErrorKind::Unsupported, what)))
            }
        }
    }

    fn cut_alone(&self, cut: Cut) -> Pending<io::Result<cut::Outcome>> {
        match self.kind {
            Kind::Regular => self.file.cut_alone(cut),
            Kind::BlockDevice(_) | Kind::CharacterDevice(_) => {
                Pending::ready(Err(Errno::OPNOTSUPP.into()))
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }

    fn allocated_bytes(&self) -> Option<u64> {
        // The unit of `st_blocks`, whatever the file system's block size.
        const STAT_BLOCK_BYTES: u64 = 512;
        match self.kind {
            Kind::Regular => {
                // FUSE and NFS would answer with values of a second ago.
                let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
                let answer = rustix::fs::statx(&*self.file, "", flags, StatxFlags::BLOCKS);
                let blocks = match answer {
                    Ok(answer) => answer.stx_blocks,
                    Err(_) => rustix::fs::fstat(&*self.file).ok()?.st_blocks as u64,
                };
                Some(blocks * STAT_BLOCK_BYTES)
            }
            Kind::BlockDevice(_) | Kind::CharacterDevice(_) => None,
        }
    }

    fn free_bytes(&self) -> Option<u64> {
        match self.kind {
            Kind::Regular => room::free_bytes(&*self.file),
            Kind::BlockDevice(_) | Kind::CharacterDevice(_) => None,
        }
    }

    fn free_bytes_in_the_end(&self, needed_bytes: u64) -> Pending<Option<u64>> {
        match self.free_bytes() {
            Some(free) if free < needed_bytes => {
                let file = Arc::clone(&self.file);
                blocking(move || room::wait_for_free_bytes(&*file, needed_bytes))
            }
            known => Pending::ready(known),
        }
    }

    fn extent_hint_bytes(&self) -> Option<u64> {
        let answer = attributes::extent_hint_bytes(&*self.file).ok()?;
        (answer > 0).then_some(u64::from(answer))
    }

    fn set_extent_hint(&self, bytes: u64) -> io::Result<()> {
        let bytes = u32::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        attributes::set_extent_hint(&*self.file, bytes)
    }

    fn set_nocow(&self) -> io::Result<()> {
        attributes::set_nocow(&*self.file)
    }

    fn claim(&self, wanted: Claim) -> Result<Protection> {
        let wanted = (wanted, Ask::Others);
        self.claims.change(&self.file.as_fd(), &self.name, wanted)
    }

    fn claim_after(&self, wanted: Claim, predecessor: &dyn BlockFile) -> Result<Protection> {
        if predecessor.id() != Some(self.id) {
            return self.claim(wanted);
        }
        // Others are asked through the predecessor, whose own locks are no obstacle to it.
        let before = predecessor.claimed();
        drop(predecessor.claim(before.joined(wanted))?);
        let wanted = (wanted, Ask::Nobody);
        let changed = self.claims.change(&self.file.as_fd(), &self.name, wanted);
        if changed.is_err() {
            // A smaller claim is in no one's way, so that this succeeds but for the system's sake.
            drop(predecessor.claim(before)?);
        }
        changed
    }

    fn claim_handed_over(&self, wanted: Claim) -> Result<Protection> {
        let wanted = (wanted, Ask::Later);
        self.claims.change(&self.file.as_fd(), &self.name, wanted)
    }

    fn claimed(&self) -> Claim {
        self.claims.current()
    }
}

/// Makes the bytes of `target` those of `source`, shared until one of them changes. Blocks.
///
/// # Errors
/// `EOPNOTSUPP` or its like where the file system has no reflinks, `EXDEV` between two file
/// systems.
#[doc(hidden)]
pub fn reflink(source: &dyn BlockFile, target: &dyn BlockFile) -> io::Result<()> {
    match (source.descriptor(), target.descriptor()) {
        (Some(source), Some(target)) => Ok(rustix::fs::ioctl_ficlone(target, source)?),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// Copies bytes from file to file by the system; it may share them, where the file system can.
///
/// `ErrorKind::Unsupported` where it cannot; part of it may be copied then. A source that ends too
/// early is followed by zeroes, which the target has to have there already.
#[doc(hidden)]
pub fn copy_range(
    (source, source_offset): (&Arc<dyn BlockFile>, u64),
    (target, target_offset): (&Arc<dyn BlockFile>, u64),
    len: u64,
) -> Pending<io::Result<()>> {
    let (source, target) = (Arc::clone(source), Arc::clone(target));
    blocking(move || {
        let (Some(from), Some(to)) = (source.descriptor(), target.descriptor()) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let (mut from_at, mut to_at, mut rest) = (source_offset, target_offset, len);
        while rest > 0 {
            let most = usize::try_from(rest).unwrap_or(usize::MAX);
            match rustix::fs::copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), most)
            {
                Ok(0) => return Ok(()),
                Ok(copied) => rest -= copied as u64,
                Err(Errno::INTR) => {}
                Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::BADF) => {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    })
}

fn file_extent(run: cowslip_queue::Run) -> FileExtent {
    FileExtent {
        start: run.start,
        len: run.end - run.start,
        hole: run.hole,
    }
}

/// The ordinary gate: opens the files that images name on the host, all with the same options but
/// for whether they are written, as far as the policy allows.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostGate {
    /// How to open them; `writable` and `create` are overridden by each request.
    pub options: HostOptions,
    /// Policy on them.
    pub policy: BackingPolicy,
}

impl Gate for HostGate {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        let policy = match request.chosen_by {
            ChosenBy::Image => self.policy,
            ChosenBy::Caller => BackingPolicy::Any,
        };
        if policy == BackingPolicy::None {
            return Err(policy.forbidden(request, ""));
        }
        let path = crate::name::local_path(request.named_by, request.name)?;
        let options = HostOptions {
            writable: request.writable,
            create: CreateMode::OpenExisting,
            ..self.options
        };
        if policy == BackingPolicy::Any {
            return open_host_file(Path::new(&path), &options);
        }
        let beneath = Beneath::find(request, &path)?;
        let open = |flags, _| beneath.open(flags);
        let file = HostBlockFile::open(&open, path.clone(), &options);
        let file = file.map_err(|error| match error {
            Error::Io { source, .. } => {
                let errno = Errno::from_io_error(&source).unwrap_or(Errno::IO);
                Beneath::refused(request, &path, errno)
            }
            other => other,
        })?;
        Ok(Arc::new(file))
    }
}
