//! The file that a disk is shown as, and the requests to it.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cowslip_block::disk::{DiskFuture, Extent, ZeroOptions};
use cowslip_block::errno::{EFBIG, EINVAL, EIO, ENOSPC, ENOTSUP, EPERM, EROFS};
use cowslip_block::file::{Durability, Space};
use cowslip_block::{Disk, Error};
use cowslip_queue::{IoVec, IoVecMut};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::time::{ClockId, clock_gettime};

use crate::request::{Attributes, Init, Operation, Time};
use crate::wire::{
    DATA_BYTES_MAX, DATA_BYTES_MAX_OLD, Fields, MAJOR, MINOR, MINOR_MIN, ROOT, init, open,
};

/// ENOSYS: the kernel does not ask again for what has been answered so.
const ENOSYS: i32 = 38;
/// EPROTO.
const EPROTO: i32 = 71;
/// ENXIO: there is no data, or hole, at or after an offset.
const ENXIO: i32 = 6;

/// Requests that the kernel may have outstanding which nobody waits for at once, such as those of
/// asynchronous I/O; above the second number it slows down writers of its page cache.
const BACKGROUND_MAX: u16 = 256;
const CONGESTION: u16 = 192;

/// How long the kernel may keep attributes, in seconds. All changes of the size come by way of the
/// mount itself, or last that long to be seen.
const ATTRIBUTES_SECONDS: u64 = 1;

/// Extents that are asked for at a time when data or a hole is looked for.
const EXTENTS: usize = 256;

/// Bytes that a block of `st_blocks` stands for.
const BLOCK_BYTES: u64 = 512;
/// The unit of I/O that is recommended to programs, at most.
const IO_BYTES_MAX: u64 = 1 << 20;

/// Growth of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// The least new size in bytes; the disk may round it up.
    pub size: u64,
    /// Whether the added range gets its space at once, so that writes to it cannot run out of it.
    pub is_allocated: bool,
}

/// Grows a disk.
pub type Grow = Arc<dyn Fn(Growth) -> DiskFuture<'static, ()> + Send + Sync>;

/// Options of a file.
#[derive(Clone, Default)]
pub struct Options {
    /// The way to grow the disk, if writes beyond its end and truncate(2) may do that.
    pub grow: Option<Grow>,
    /// The image's file: its allocated space is shown as that of the file, and its file system as
    /// the file's.
    pub host: Option<Arc<OwnedFd>>,
    /// Whether the file may be given to other users: without, only its mode may be changed.
    pub allows_others: bool,
    /// Threads that requests are spread over; at least one.
    pub threads: usize,
    /// Longest time for which further threads poll before they sleep; zero is never. As
    /// [`Queue::poll_before_sleep`](cowslip_queue::Queue::poll_before_sleep) has it.
    pub poll: Duration,
    /// Whether requests come by way of the kernel's ring, where it has one for that; then all
    /// requests go to further threads, as many as [`Options::threads`] says.
    pub uses_ring: bool,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("is_growable", &self.grow.is_some())
            .field("host", &self.host)
            .field("allows_others", &self.allows_others)
            .field("threads", &self.threads)
            .field("uses_ring", &self.uses_ring)
            .finish()
    }
}

/// A point in time: seconds and nanoseconds since 1970.
type Moment = (u64, u32);

/// Attributes that are kept for as long as the file is mounted.
#[derive(Clone, Copy, Debug)]
struct Meta {
    mode: u32,
    uid: u32,
    gid: u32,
    accessed: Moment,
    modified: Moment,
    changed: Moment,
}

/// Answer to a request.
#[derive(Debug)]
pub(crate) enum Answer {
    /// None is expected.
    None,
    Done,
    Fields(Fields),
    Data(IoVecMut),
    Failed(Failure),
}

impl fmt::Debug for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fields({:?})", self.bytes())
    }
}

/// The reason why a request was not carried out.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The request is one that this file refuses, with this error number.
    Refused(i32),
    /// The message is impossible.
    Malformed(&'static str),
    /// The disk's failure.
    Disk(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Disk(error)
    }
}

impl Failure {
    /// The error number for the kernel.
    pub fn errno(&self) -> i32 {
        match self {
            Failure::Refused(errno) => *errno,
            Failure::Malformed(_) => EINVAL,
            // What users see as a file is writable or it is not; "try again" would be taken for an
            // invitation.
            Failure::Disk(Error::ReadOnly(_)) => EROFS,
            Failure::Disk(Error::Locked(_)) => EIO,
            Failure::Disk(error) => error.errno(),
        }
    }

    /// Words for a log; `None` for what programs are simply refused.
    pub fn words(&self) -> Option<String> {
        match self {
            Failure::Refused(_) => None,
            Failure::Malformed(why) => Some(format!("impossible message: {why}")),
            Failure::Disk(error) => Some(error.to_string()),
        }
    }
}

type Outcome<T = Answer> = std::result::Result<T, Failure>;

/// A disk as a file.
pub(crate) struct Export {
    pub disk: Arc<dyn Disk>,
    options: Options,
    meta: Mutex<Meta>,
    /// Whether the content has been changed since the time of change was looked at.
    is_modified: AtomicBool,
    /// Held while the disk grows.
    growing: futures_util::lock::Mutex<()>,
    /// Whether requests may come by way of the ring, and whether the kernel has agreed.
    ring: Ring,
}

#[derive(Debug)]
struct Ring {
    is_offered: bool,
    is_agreed: AtomicBool,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({})", self.disk.name())
    }
}

fn now() -> Moment {
    let time = clock_gettime(ClockId::RealtimeCoarse);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    (seconds, time.tv_nsec as u32)
}

impl Export {
    /// A disk as a file. `has_ring` says whether there is a ring for requests.
    pub fn new(disk: Arc<dyn Disk>, options: Options, has_ring: bool) -> Export {
        let time = now();
        let mode = match disk.features().writable {
            true => 0o600,
            false => 0o400,
        };
        Export {
            disk,
            options,
            meta: Mutex::new(Meta {
                mode,
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
                accessed: time,
                modified: time,
                changed: time,
            }),
            is_modified: AtomicBool::new(false),
            growing: futures_util::lock::Mutex::new(()),
            ring: Ring {
                is_offered: has_ring,
                is_agreed: AtomicBool::new(false),
            },
        }
    }

    fn meta(&self) -> MutexGuard<'_, Meta> {
        // Nothing that holds the lock panics.
        self.meta.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the kernel sends requests by way of the ring.
    pub fn uses_ring(&self) -> bool {
        self.ring.is_agreed.load(Ordering::Relaxed)
    }

    fn negotiate(&self, offer: Init) -> Outcome {
        let accepted = match self.ring.is_offered {
            true => init::ACCEPTED | init::OVER_IO_URING,
            false => init::ACCEPTED,
        };
        let answer = negotiate(offer, accepted)?;
        let is_agreed = offer.flags & accepted & init::OVER_IO_URING != 0;
        self.ring.is_agreed.store(is_agreed, Ordering::Relaxed);
        Ok(answer)
    }

    fn is_writable(&self) -> bool {
        self.disk.features().writable
    }

    /// Carries a request out. `data` is that of a write; a read goes to the target of its length.
    pub async fn perform(
        &self,
        operation: Operation,
        (data, target): (IoVec, impl FnOnce(usize) -> IoVecMut),
    ) -> Answer {
        let outcome = match operation {
            Operation::Read { offset, len } => self.read((offset, len), target).await,
            Operation::Write { offset, flags, .. } => self.write(offset, data, flags).await,
            Operation::Init(offer) => self.negotiate(offer),
            Operation::GetAttributes => Ok(self.attributes().await),
            Operation::SetAttributes(wanted) => self.set_attributes(wanted).await,
            Operation::Open { flags } => self.open(flags),
            Operation::StatFs => self.file_system().await,
            Operation::Flush => self.hand_over().await,
            Operation::Fsync => self.flush().await,
            Operation::Fallocate { offset, len, mode } => self.fallocate((offset, len), mode).await,
            Operation::Seek { offset, whence } => self.seek(offset, whence).await,
            Operation::Nothing => Ok(Answer::Done),
            Operation::Forget => Ok(Answer::None),
            Operation::Unsupported { .. } => Err(Failure::Refused(ENOSYS)),
            Operation::Malformed(why) => Err(Failure::Malformed(why)),
        };
        outcome.unwrap_or_else(Answer::Failed)
    }

    async fn read(
        &self,
        (offset, len): (u64, usize),
        target: impl FnOnce(usize) -> IoVecMut,
    ) -> Outcome {
        let left = self.disk.size().saturating_sub(offset);
        let len = usize::try_from(left).map_or(len, |left| left.min(len));
        if len == 0 {
            return Ok(Answer::Data(IoVecMut::default()));
        }
        Ok(Answer::Data(self.disk.read(offset, target(len)).await?))
    }

    async fn write(&self, offset: u64, mut data: IoVec, flags: u32) -> Outcome {
        if !self.is_writable() {
            return Err(Failure::Refused(EROFS));
        }
        let end = offset.checked_add(data.len() as u64);
        let end = end.filter(|end| i64::try_from(*end).is_ok());
        let end = end.ok_or(Failure::Refused(EFBIG))?;
        if end > self.disk.size() && !data.is_empty() {
            self.grow_for_write(end).await?;
            // What lies beyond the end of a disk that does not grow is not written, as on a device.
            let left = self.disk.size().saturating_sub(offset);
            match usize::try_from(left) {
                Ok(0) => return Err(Failure::Refused(ENOSPC)),
                Ok(left) if left < data.len() => drop(data.split_off(left)),
                _ => {}
            }
        }
        let len = data.len() as u32;
        if len > 0 {
            let is_durable = OFlags::from_bits_retain(flags).contains(OFlags::DSYNC);
            let durability = Durability::of_fua(is_durable);
            self.disk.write(offset, data, durability).await?;
            self.is_modified.store(true, Ordering::Relaxed);
        }
        Ok(Answer::Fields(Fields::new().u32(len).u32(0)))
    }

    async fn grow_for_write(&self, end: u64) -> Outcome<()> {
        match self.options.grow {
            Some(_) => self.grow(end, false).await,
            None => Ok(()),
        }
    }

    /// Grows the disk to at least this size.
    async fn grow(&self, size: u64, is_allocated: bool) -> Outcome<()> {
        let Some(grow) = &self.options.grow else {
            return Err(Failure::Refused(EFBIG));
        };
        if !self.is_writable() {
            return Err(Failure::Refused(EROFS));
        }
        let _alone = self.growing.lock().await;
        if self.disk.size() >= size {
            return Ok(());
        }
        match grow(Growth { size, is_allocated }).await {
            Ok(()) => {
                self.is_modified.store(true, Ordering::Relaxed);
                Ok(())
            }
            // More than the format can describe.
            Err(Error::Invalid(_) | Error::Unsupported { .. }) => Err(Failure::Refused(EFBIG)),
            Err(error) => Err(Failure::Disk(error)),
        }
    }

    async fn attributes(&self) -> Answer {
        let size = self.disk.size();
        let blocks = self.on_host(|host| rustix::fs::fstat(host)).await;
        let blocks = blocks.and_then(|stat| u64::try_from(stat.st_blocks).ok());
        // A file that takes more space than its length would look odd; tables take some.
        let all = size.div_ceil(BLOCK_BYTES);
        let blocks = blocks.map_or(all, |blocks| blocks.min(all));
        let meta = {
            let mut meta = self.meta();
            if self.is_modified.swap(false, Ordering::Relaxed) {
                meta.modified = now();
                meta.changed = meta.modified;
            }
            *meta
        };
        let block = self.disk.features().preferred_block_bytes;
        const REGULAR: u32 = 0o100_000;
        let fields = Fields::new()
            .u64(ATTRIBUTES_SECONDS)
            .zeroes(8)
            .u64(ROOT)
            .u64(size)
            .u64(blocks)
            .u64(meta.accessed.0)
            .u64(meta.modified.0)
            .u64(meta.changed.0)
            .u32(meta.accessed.1)
            .u32(meta.modified.1)
            .u32(meta.changed.1)
            .u32(REGULAR | meta.mode)
            // One name; the owner; no device.
            .u32(1)
            .u32(meta.uid)
            .u32(meta.gid)
            .u32(0)
            .u32(block.clamp(4096, IO_BYTES_MAX) as u32)
            .u32(0);
        Answer::Fields(fields)
    }

    /// Makes a call about the image's file, which may have to wait for a network.
    async fn on_host<T: Send + 'static>(
        &self,
        call: impl FnOnce(&OwnedFd) -> rustix::io::Result<T> + Send + 'static,
    ) -> Option<T> {
        let host = Arc::clone(self.options.host.as_ref()?);
        cowslip_queue::blocking(move || call(&host)).await.ok()
    }

    async fn set_attributes(&self, wanted: Attributes) -> Outcome {
        if wanted.uid.or(wanted.gid).is_some() && !self.options.allows_others {
            return Err(Failure::Refused(ENOTSUP));
        }
        const WRITABLE: u32 = 0o222;
        let mode = wanted.mode.map(|mode| mode & 0o7777);
        if mode.is_some_and(|mode| mode & WRITABLE != 0) && !self.is_writable() {
            return Err(Failure::Refused(EROFS));
        }
        if let Some(size) = wanted.size {
            self.set_size(size).await?;
        }
        {
            let mut meta = self.meta();
            let at = |time| match time {
                Time::Now => now(),
                Time::At(seconds, nanoseconds) => (seconds, nanoseconds),
            };
            meta.mode = mode.unwrap_or(meta.mode);
            meta.uid = wanted.uid.unwrap_or(meta.uid);
            meta.gid = wanted.gid.unwrap_or(meta.gid);
            meta.accessed = wanted.accessed.map_or(meta.accessed, at);
            if let Some(time) = wanted.modified {
                self.is_modified.store(false, Ordering::Relaxed);
                meta.modified = at(time);
            }
            meta.changed = wanted.changed.map_or_else(now, at);
        }
        Ok(self.attributes().await)
    }

    async fn set_size(&self, size: u64) -> Outcome<()> {
        match size.cmp(&self.disk.size()) {
            std::cmp::Ordering::Equal => Ok(()),
            // A guest's data is not thrown away by a program that means well, such as `cp`.
            std::cmp::Ordering::Less => Err(Failure::Refused(EPERM)),
            _ if i64::try_from(size).is_err() => Err(Failure::Refused(EFBIG)),
            std::cmp::Ordering::Greater => self.grow(size, false).await,
        }
    }

    fn open(&self, flags: u32) -> Outcome {
        let flags = OFlags::from_bits_retain(flags);
        let writes = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        if writes && !self.is_writable() {
            return Err(Failure::Refused(EROFS));
        }
        let flags = open::DIRECT_IO | open::PARALLEL_DIRECT_WRITES;
        Ok(Answer::Fields(Fields::new().u64(0).u32(flags).u32(0)))
    }

    async fn file_system(&self) -> Outcome {
        let stat = self.on_host(|host| rustix::fs::fstatfs(host)).await;
        let fields = match stat {
            Some(stat) => Fields::new()
                .u64(stat.f_blocks)
                .u64(stat.f_bfree)
                .u64(stat.f_bavail)
                .u64(stat.f_files)
                .u64(stat.f_ffree)
                .u32(u32::try_from(stat.f_bsize).unwrap_or(4096))
                .u32(255)
                .u32(u32::try_from(stat.f_frsize).unwrap_or(4096)),
            None => Fields::new().zeroes(40).u32(4096).u32(255).u32(4096),
        };
        Ok(Answer::Fields(fields.zeroes(28)))
    }

    async fn flush(&self) -> Outcome {
        if self.is_writable() {
            self.disk.flush().await?;
        }
        Ok(Answer::Done)
    }

    /// Hands what completed to the system: what a program has closed outlives this process.
    async fn hand_over(&self) -> Outcome {
        if self.is_writable() {
            self.disk.write_back().await?;
        }
        Ok(Answer::Done)
    }

    async fn fallocate(&self, (offset, len): (u64, u64), mode: u32) -> Outcome {
        if !self.is_writable() {
            return Err(Failure::Refused(EROFS));
        }
        let end = offset.checked_add(len);
        let end = end.filter(|end| i64::try_from(*end).is_ok());
        let end = end.ok_or(Failure::Refused(EFBIG))?;
        let keeps_size = FallocateFlags::KEEP_SIZE;
        let mode = FallocateFlags::from_bits_retain(mode);
        let kind = mode.difference(keeps_size);
        let zeroes = FallocateFlags::ZERO_RANGE;
        let punches = FallocateFlags::PUNCH_HOLE;
        let is_known = kind == FallocateFlags::empty() || kind == zeroes;
        // The system demands that a hole leaves the size alone.
        if !is_known && mode != punches | keeps_size {
            return Err(Failure::Refused(ENOTSUP));
        }
        let before = self.disk.size();
        let grows = !mode.contains(keeps_size) && end > before;
        // What is added reads as zeroes.
        let old_end = end.min(before);
        let allocates = kind == FallocateFlags::empty();
        if allocates && offset < old_end {
            self.allocate(offset, old_end).await?;
        }
        if grows && self.options.grow.is_none() {
            return Err(Failure::Refused(ENOSPC));
        }
        if grows {
            self.grow(end, allocates).await?;
        }
        if !allocates && offset < old_end {
            let options = ZeroOptions {
                space: Space::of_unmap(kind == punches),
                ..ZeroOptions::default()
            };
            self.disk.zero(offset, old_end - offset, options).await?;
            self.is_modified.store(true, Ordering::Relaxed);
        }
        Ok(Answer::Done)
    }

    /// Allocates a range. Where the disk cannot, it succeeds if the range has its space already;
    /// else it is said to be unsupported, and the C library writes instead.
    async fn allocate(&self, offset: u64, end: u64) -> Outcome {
        let outcome = self.disk.allocate(offset, end - offset).await;
        match outcome {
            Ok(()) => return Ok(Answer::Done),
            Err(error) if !is_unsupported(&error) => return Err(error.into()),
            Err(_) => {}
        }
        let is_own = |extent: &Extent| extent.data && extent.depth == 0 && !extent.compressed;
        match self.find((offset, end), |extent| !is_own(extent)).await? {
            None => Ok(Answer::Done),
            Some(_) => Err(Failure::Refused(ENOTSUP)),
        }
    }

    /// The first byte of a range that is in an extent looked for.
    async fn find(
        &self,
        (offset, end): (u64, u64),
        is_wanted: impl Fn(&Extent) -> bool,
    ) -> Outcome<Option<u64>> {
        let mut at = offset;
        while at < end {
            let extents = self.disk.extents(at, end - at, EXTENTS).await?;
            for extent in &extents {
                if is_wanted(extent) {
                    return Ok(Some(extent.start.max(at)));
                }
            }
            let reached = extents.last().map(|extent| extent.start + extent.len);
            match reached {
                Some(reached) if reached > at => at = reached,
                // A disk answers with at least one extent.
                _ => return Err(Failure::Refused(EIO)),
            }
        }
        Ok(None)
    }

    async fn seek(&self, offset: u64, whence: u32) -> Outcome {
        const SEEK_DATA: u32 = 3;
        const SEEK_HOLE: u32 = 4;
        let size = self.disk.size();
        if !matches!(whence, SEEK_DATA | SEEK_HOLE) {
            return Err(Failure::Refused(EINVAL));
        }
        if offset >= size {
            return Err(Failure::Refused(ENXIO));
        }
        let range = (offset, size);
        let found = match whence {
            SEEK_DATA => self.find(range, |extent| !extent.zero).await?,
            _ => self.find(range, |extent| extent.zero).await?.or(Some(size)),
        };
        let found = found.ok_or(Failure::Refused(ENXIO))?;
        Ok(Answer::Fields(Fields::new().u64(found)))
    }
}

fn is_unsupported(error: &Error) -> bool {
    match error {
        Error::Unsupported { .. } => true,
        Error::Io { source, .. } => source.kind() == std::io::ErrorKind::Unsupported,
        _ => false,
    }
}

/// Answers the kernel's offer.
fn negotiate(offer: Init, accepted: u64) -> Outcome {
    if offer.major > MAJOR {
        // The kernel offers again what we speak.
        let fields = Fields::new().u32(MAJOR).u32(MINOR);
        return Ok(Answer::Fields(fields.zeroes(56)));
    }
    if offer.major < MAJOR || offer.minor < MINOR_MIN {
        return Err(Failure::Refused(EPROTO));
    }
    let flags = offer.flags & accepted;
    let data_max = match flags & init::MAX_PAGES {
        0 => DATA_BYTES_MAX_OLD,
        _ => DATA_BYTES_MAX,
    };
    let fields = Fields::new()
        .u32(MAJOR)
        .u32(MINOR.min(offer.minor))
        .u32(offer.readahead_max)
        .u32(flags as u32)
        .u16(BACKGROUND_MAX)
        .u16(CONGESTION)
        .u32(data_max as u32)
        // Times are in nanoseconds.
        .u32(1)
        .u16((data_max / rustix::param::page_size()) as u16)
        .u16(0)
        .u32((flags >> 32) as u32)
        .zeroes(28);
    Ok(Answer::Fields(fields))
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;
