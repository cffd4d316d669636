//! Files: reads and writes at offsets, and the calls that shape a file.
//!
//! Every operation owns its buffers and a share of the file until it is done. On a thread whose
//! queue has a ring it goes down the ring; on every other thread the pool takes it. Short transfers
//! are carried on, a read beyond the end of file yields zeroes, an interrupted call is repeated.
//!
//! Leaves out: which requests a file allows (the engine's drivers know), locks
//! ([`mod@crate::lock`]) but that they end with the file, opening.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};

pub use crate::buf::MemoryAlignment;
use crate::cut;
use crate::driver::Driver;
use crate::executor::Core;
use crate::iovec::{IoVec, IoVecMut};
use crate::line::Line;
use crate::lock;
use crate::pending::{Completer, Pending, pending};
use crate::pool::{self, blocking};
use crate::release;
pub use crate::runs::Run;
use crate::runs::{find_own, find_runs};
use crate::scatter::Scatter;
use crate::space;
use crate::sys;
use crate::uring::Uring;

/// Where the operations of a file go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The ring of the calling thread's queue; the pool where there is none.
    Ring,
    /// Always the pool.
    Pool,
}

/// Whether a write is durable when it completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// Data may linger in volatile caches.
    Cached,
    /// Data is durable, as if a data sync of these bytes had followed (`RWF_DSYNC`).
    Durable,
}

/// Operation on the space of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Allocate it; the end of file moves up to its end.
    Allocate,
    /// Allocate it; the end of file stays.
    AllocateKeepingEnd,
    /// Make it read as zeroes and keep it allocated; the end of file moves up to its end.
    Zero,
    /// Give it back; it reads as zeroes. The end of file stays.
    Punch,
    /// Allocate it as zeroes that count as written (Linux 6.17, where the device can zero by
    /// itself); the end of file moves up to its end.
    AllocateWritten,
}

/// `FALLOC_FL_WRITE_ZEROES` of linux/falloc.h, which the library does not name yet.
const WRITE_ZEROES: u32 = 0x80;

impl Shape {
    fn mode(self) -> FallocateFlags {
        match self {
            Shape::Allocate => FallocateFlags::empty(),
            Shape::AllocateKeepingEnd => FallocateFlags::KEEP_SIZE,
            Shape::Zero => FallocateFlags::ZERO_RANGE,
            Shape::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Shape::AllocateWritten => FallocateFlags::from_bits_retain(WRITE_ZEROES),
        }
    }

    fn apply(self, fd: &OwnedFd, offset: u64, len: u64) -> rustix::io::Result<()> {
        use rustix::fs::fallocate;
        match fallocate(fd, self.mode(), offset, len) {
            // Not all that punch and allocate can zero in place, tmpfs for one.
            Err(Errno::OPNOTSUPP) if self == Shape::Zero => {
                fallocate(fd, Shape::Punch.mode(), offset, len)?;
                fallocate(fd, Shape::Allocate.mode(), offset, len)
            }
            result => result,
        }
    }
}

/// An open regular file or block device.
pub struct File {
    fd: OwnedFd,
    route: Route,
    memory: MemoryAlignment,
    /// Where writes queue up that the file's lock would let through one by one.
    line: Option<Arc<Line<Write>>>,
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "File({:?}, {:?})", self.fd, self.route)
    }
}

/// After the last operation. The kernel may refer to the open file a moment longer, from a ring
/// that is being taken down even after the process has ended; its locks go now, so that the next
/// opener is not kept out.
impl Drop for File {
    fn drop(&mut self) {
        // To the end of the file, whatever that is. Where it cannot be done, the locks go with the
        // open file.
        drop(lock::release(self.fd.as_fd(), 0, 0));
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl File {
    /// A file of an open descriptor, which is closed after the last operation.
    pub fn new(fd: OwnedFd, route: Route, memory: MemoryAlignment) -> Arc<File> {
        let line = has_lock_of_writers(&fd, memory).then(Arc::default);
        Arc::new(File {
            fd,
            route,
            memory,
            line,
        })
    }

    /// Returns the file's demands on the memory of reads and writes.
    pub fn memory_alignment(&self) -> MemoryAlignment {
        self.memory
    }

    /// Fills the list from `offset` on, with zeroes beyond the end of file. The list comes back
    /// whatever the outcome.
    pub fn read_at(
        self: &Arc<Self>,
        offset: u64,
        target: impl Into<IoVecMut>,
    ) -> Pending<(io::Result<()>, IoVecMut)> {
        let target = target.into();
        if target.is_empty() {
            return Pending::ready((Ok(()), target));
        }
        let (completer, result) = pending();
        let read = Read {
            file: Arc::clone(self),
            offset,
            target: Scatter::new(target),
            completer,
        };
        match self.on_ring(read, |ring, read| ring.read(read)) {
            None => {}
            Some(read) => pool::submit(Box::new(move || read.run())),
        }
        result
    }

    /// Writes the list at `offset`; all of it or an error.
    pub fn write_at(
        self: &Arc<Self>,
        offset: u64,
        data: impl Into<IoVec>,
        persistence: Persistence,
    ) -> Pending<io::Result<()>> {
        let data = Scatter::new(data.into());
        if data.is_done() {
            return Pending::ready(Ok(()));
        }
        let (completer, result) = pending();
        let write = Write {
            file: Arc::clone(self),
            offset,
            data,
            persistence,
            completer,
        };
        match self.on_ring(write, |ring, write| ring.write(write)) {
            None => {}
            Some(write) => self.write_on_pool(write),
        }
        result
    }

    fn write_on_pool(&self, write: Write) {
        // Operations that wait for the device do so without the lock, and together.
        let line = self
            .line
            .clone()
            .filter(|_| write.persistence == Persistence::Cached);
        let Some(line) = line else {
            return pool::submit(Box::new(move || write.run()));
        };
        if let Some(first) = line.enter(write) {
            pool::submit(Box::new(move || {
                let mut next = Some(first);
                while let Some(write) = next {
                    write.run();
                    next = line.leave();
                }
            }));
        }
    }

    /// Makes all data that was written durable, and the length.
    pub fn sync_data(self: &Arc<Self>) -> Pending<io::Result<()>> {
        self.call(What::SyncData)
    }

    /// Changes the space of a range. `ErrorKind::Unsupported` where the file takes no such call, or
    /// to zero or punch, none of this range.
    pub fn shape(self: &Arc<Self>, offset: u64, len: u64, shape: Shape) -> Pending<io::Result<()>> {
        if len == 0 {
            return Pending::ready(Ok(()));
        }
        self.call(What::Shape { offset, len, shape })
    }

    /// Closes a copy of the descriptor, and returns what the file system has kept for that: NFS,
    /// FUSE and quotas may report only then that bytes which a write has taken found no space.
    ///
    /// # Errors
    /// The report; bytes that were written may be lost. No descriptor is left for the copy.
    pub fn report_at_close(self: &Arc<Self>) -> Pending<io::Result<()>> {
        let file = Arc::clone(self);
        blocking(move || {
            // A signal ends the writing back, not the descriptor: so with another one again.
            loop {
                match sys::close(file.fd.try_clone()?) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    reported => return reported,
                }
            }
        })
    }

    /// Cuts or extends the file.
    pub fn set_len(self: &Arc<Self>, len: u64) -> Pending<io::Result<()>> {
        let file = Arc::clone(self);
        blocking(move || {
            complete_last_block(&file.fd, len)?;
            Ok(rustix::fs::ftruncate(&file.fd, len)?)
        })
    }

    /// Cuts the file if nobody else has it open; see [`cut::cut_alone`].
    pub fn cut_alone(self: &Arc<Self>, cut: cut::Cut) -> Pending<io::Result<cut::Outcome>> {
        let file = Arc::clone(self);
        blocking(move || cut::cut_alone(file.as_fd(), &cut))
    }

    /// Discards a range of a block device that is not needed any more. `ErrorKind::Unsupported`
    /// where the device takes no such call, or none of this range.
    pub fn discard_blocks(self: &Arc<Self>, offset: u64, len: u64) -> Pending<io::Result<()>> {
        let file = Arc::clone(self);
        blocking(move || {
            let discarded = sys::discard_blocks(file.as_fd(), offset, len);
            discarded.map_err(without_such_call)
        })
    }

    /// The size of a block device in bytes.
    ///
    /// # Errors
    /// It is no block device.
    pub fn block_device_size(&self) -> io::Result<u64> {
        sys::block_device_size(self.as_fd())
    }

    /// Data and holes of `[start, end)`, in order, covering it, each converted by `convert`; what
    /// lies beyond the end of file is a hole.
    pub fn runs<T: Send + 'static>(
        self: &Arc<Self>,
        start: u64,
        end: u64,
        convert: impl Fn(Run) -> T + Send + 'static,
    ) -> Pending<io::Result<Vec<T>>> {
        self.found(find_runs, (start, end), convert)
    }

    /// The same, where what a write may need new space for is a hole: extents that copies of the
    /// file share, and all of a file whose file system writes to new places.
    pub fn own_runs<T: Send + 'static>(
        self: &Arc<Self>,
        start: u64,
        end: u64,
        convert: impl Fn(Run) -> T + Send + 'static,
    ) -> Pending<io::Result<Vec<T>>> {
        self.found(find_own, (start, end), convert)
    }

    fn found<T: Send + 'static>(
        self: &Arc<Self>,
        find: fn(&OwnedFd, u64, u64) -> io::Result<Vec<Run>>,
        (start, end): (u64, u64),
        convert: impl Fn(Run) -> T + Send + 'static,
    ) -> Pending<io::Result<Vec<T>>> {
        let file = Arc::clone(self);
        blocking(move || {
            let runs = find(&file.fd, start, end)?;
            Ok(runs.into_iter().map(convert).collect())
        })
    }

    /// Gives a hole its space by other means than `fallocate`.
    pub fn give_space(
        self: &Arc<Self>,
        range: Range<u64>,
        way: space::FillMethod,
    ) -> Pending<io::Result<space::Calls>> {
        let file = Arc::clone(self);
        blocking(move || space::give(file.as_fd(), range, way))
    }

    /// The first `most` holes of a range; see [`space::holes`].
    pub fn holes(
        self: &Arc<Self>,
        range: Range<u64>,
        most: usize,
    ) -> Pending<io::Result<space::Holes>> {
        let file = Arc::clone(self);
        blocking(move || space::holes(file.as_fd(), range, most))
    }

    /// Has the file system free what holes of a range keep; see [`release::release`].
    pub fn release_extents(self: &Arc<Self>, range: Range<u64>) -> Pending<io::Result<u64>> {
        let file = Arc::clone(self);
        blocking(move || release::release(file.as_fd(), range))
    }

    fn call(self: &Arc<Self>, what: What) -> Pending<io::Result<()>> {
        let (completer, result) = pending();
        let call = Call {
            file: Arc::clone(self),
            what,
            completer,
        };
        match self.on_ring(call, |ring, call| ring.call(call)) {
            None => {}
            Some(call) => pool::submit(Box::new(move || call.run())),
        }
        result
    }

    /// Hands an operation to the ring of this thread, or gives it back.
    fn on_ring<T>(&self, operation: T, start: impl FnOnce(&Uring, T)) -> Option<T> {
        if self.route == Route::Pool {
            return Some(operation);
        }
        let mut operation = Some(operation);
        Core::with_current(|core| {
            if let Driver::Uring(ring) = &core.driver
                && let Some(operation) = operation.take()
            {
                start(ring, operation);
            }
        });
        operation
    }
}

/// Whether the kernel gives rings to this process.
///
/// # Errors
/// Its refusal.
pub fn ring_available() -> io::Result<()> {
    /// The answer is the same for the life of the process; the error is kept as its number.
    static ANSWER: OnceLock<Option<i32>> = OnceLock::new();
    let refusal = ANSWER.get_or_init(|| {
        let ring = crate::ring::Ring::prepare(crate::ring::Width::Narrow);
        let error = ring.err()?;
        Some(error.raw_os_error().unwrap_or(libc::ENOSYS))
    });
    refusal.map_or(Ok(()), |number| Err(io::Error::from_raw_os_error(number)))
}

/// An operation that does nothing, by the way that the others take: what that way costs.
pub fn nothing() -> Pending<()> {
    let on_ring = Core::with_current(|core| match &core.driver {
        Driver::Uring(ring) => Some(ring.nop()),
        Driver::Epoll(_) => None,
    });
    on_ring.flatten().unwrap_or_else(|| blocking(|| ()))
}

/// Consequence of the kernel's answer to an operation.
pub(crate) enum Next<T> {
    /// The operation is complete; its waiter knows.
    Done,
    /// The operation goes on in the same way.
    Again(T),
    /// The operation would block.
    Block(T),
}

/// How an error is met.
enum Trouble {
    Repeat,
    Block,
    Fail(io::Error),
}

impl Trouble {
    fn of(error: io::Error) -> Trouble {
        match error.raw_os_error() {
            Some(libc::EINTR) => Trouble::Repeat,
            Some(libc::EAGAIN) => Trouble::Block,
            _ => Trouble::Fail(error),
        }
    }
}

/// A read, in progress.
pub(crate) struct Read {
    file: Arc<File>,
    offset: u64,
    target: Scatter<IoVecMut>,
    completer: Completer<(io::Result<()>, IoVecMut)>,
}

impl Read {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset + self.target.done()
    }

    pub(crate) fn target(&self) -> &Scatter<IoVecMut> {
        &self.target
    }

    pub(crate) fn advance(mut self, result: io::Result<usize>) -> Next<Read> {
        let got = match result.map_err(Trouble::of) {
            Ok(got) => got,
            Err(Trouble::Repeat) => return Next::Again(self),
            Err(Trouble::Block) => return Next::Block(self),
            Err(Trouble::Fail(error)) => return self.finish(Err(error)),
        };
        self.target.advance(got);
        if self.target.is_done() {
            return self.finish(Ok(()));
        }
        if got > 0 && !self.is_at_end() {
            return Next::Again(self);
        }
        self.target.fill_rest();
        self.finish(Ok(()))
    }

    /// Whether the file ended here. Asked rather than found out by another read, because direct I/O
    /// cannot read on from the middle of a block, where a file may end, even if it has grown since.
    fn is_at_end(&self) -> bool {
        let block = self.file.memory.len_bytes.max(1) as u64;
        let len = regular_len(&self.file.fd);
        len.is_some_and(|len| len <= self.offset() || !self.offset().is_multiple_of(block))
    }

    fn finish(self, result: io::Result<()>) -> Next<Read> {
        // A waiter may rely on it that nothing here keeps the file open.
        drop(self.file);
        self.completer.complete((result, self.target.into_list()));
        Next::Done
    }

    pub(crate) fn run(mut self) {
        loop {
            let offset = self.offset();
            let result = self.target.read_at(self.file.as_fd(), offset);
            match self.advance(result) {
                Next::Done => return,
                Next::Again(read) => self = read,
                Next::Block(read) => {
                    read.finish(Err(io::Error::from_raw_os_error(libc::EAGAIN)));
                    return;
                }
            }
        }
    }
}

/// A write, in progress.
pub(crate) struct Write {
    file: Arc<File>,
    offset: u64,
    data: Scatter<IoVec>,
    persistence: Persistence,
    completer: Completer<io::Result<()>>,
}

impl Write {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset + self.data.done()
    }

    pub(crate) fn data(&self) -> &Scatter<IoVec> {
        &self.data
    }

    pub(crate) fn flags(&self) -> ReadWriteFlags {
        match self.persistence {
            Persistence::Cached => ReadWriteFlags::empty(),
            Persistence::Durable => ReadWriteFlags::DSYNC,
        }
    }

    pub(crate) fn advance(mut self, result: io::Result<usize>) -> Next<Write> {
        match result.map_err(Trouble::of) {
            Ok(0) => self.finish(Err(io::ErrorKind::WriteZero.into())),
            Ok(written) => {
                self.data.advance(written);
                if self.data.is_done() {
                    self.finish(Ok(()))
                } else {
                    Next::Again(self)
                }
            }
            Err(Trouble::Repeat) => Next::Again(self),
            Err(Trouble::Block) => Next::Block(self),
            Err(Trouble::Fail(error)) => self.finish(Err(error)),
        }
    }

    fn finish(self, result: io::Result<()>) -> Next<Write> {
        // A waiter may rely on it that nothing here keeps the file open, or has its memory.
        drop(self.file);
        drop(self.data);
        self.completer.complete(result);
        Next::Done
    }

    pub(crate) fn run(mut self) {
        loop {
            let flags = self.flags().bits() as i32;
            let result = self.data.write_at(self.fd(), self.offset(), flags);
            match self.advance(result) {
                Next::Done => return,
                Next::Again(write) => self = write,
                Next::Block(write) => {
                    write.finish(Err(io::Error::from_raw_os_error(libc::EAGAIN)));
                    return;
                }
            }
        }
    }
}

/// A call that moves no data.
pub(crate) struct Call {
    file: Arc<File>,
    what: What,
    completer: Completer<io::Result<()>>,
}

#[derive(Clone, Copy)]
enum What {
    SyncData,
    Shape { offset: u64, len: u64, shape: Shape },
}

impl What {
    /// Whether it says nothing about the data if the file refuses it: the caller can do without.
    fn may_be_refused(self) -> bool {
        match self {
            What::Shape { shape, .. } => matches!(shape, Shape::Zero | Shape::Punch),
            What::SyncData => false,
        }
    }
}

impl Call {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The arguments of `fallocate`: mode, offset and length; none for a sync.
    pub(crate) fn shape(&self) -> Option<(i32, u64, u64)> {
        match self.what {
            What::SyncData => None,
            What::Shape { offset, len, shape } => Some((shape.mode().bits() as i32, offset, len)),
        }
    }

    /// Takes the answer of the ring, which knows one way only; where there is another, the pool
    /// goes it.
    pub(crate) fn finish_on_ring(self, result: io::Result<()>) -> Next<Call> {
        let zero = matches!(self.what, What::Shape { shape, .. } if shape == Shape::Zero);
        match &result {
            Err(error) if zero && error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                Next::Block(self)
            }
            _ => self.finish(result),
        }
    }

    fn finish(self, result: io::Result<()>) -> Next<Call> {
        match result.map_err(Trouble::of) {
            Err(Trouble::Repeat) => return Next::Again(self),
            Err(Trouble::Block) => return Next::Block(self),
            Err(Trouble::Fail(error)) if self.what.may_be_refused() => {
                self.complete(Err(without_such_call(error)));
            }
            Err(Trouble::Fail(error)) => self.complete(Err(error)),
            Ok(()) => self.complete(Ok(())),
        }
        Next::Done
    }

    fn complete(self, result: io::Result<()>) {
        drop(self.file);
        self.completer.complete(result);
    }

    pub(crate) fn run(mut self) {
        loop {
            let fd = &self.file.fd;
            let result = match self.what {
                What::SyncData => rustix::fs::fdatasync(fd),
                What::Shape { offset, len, shape } => shape.apply(fd, offset, len),
            };
            match self.finish(result.map_err(io::Error::from)) {
                Next::Done => return,
                Next::Again(call) => self = call,
                Next::Block(call) => {
                    let error = io::Error::from_raw_os_error(libc::EAGAIN);
                    call.complete(Err(error));
                    return;
                }
            }
        }
    }
}

/// A refusal of a call that zeroes or gives back space: `EINVAL`, too, says that the file takes
/// none of this range, as where it begins within a block of a device.
fn without_such_call(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EINVAL) => Errno::OPNOTSUPP.into(),
        _ => error,
    }
}

/// Whether the kernel lets one writer at a time into the file: into a regular one, through the page
/// cache. Several threads would spin on its lock, each on a processor that others need. (io_uring's
/// workers take turns for the same reason.)
fn has_lock_of_writers(fd: &OwnedFd, memory: MemoryAlignment) -> bool {
    memory == MemoryAlignment::NONE && regular_len(fd).is_some()
}

/// The length of a regular file; `None` of anything else.
fn regular_len(fd: &OwnedFd) -> Option<u64> {
    const FORMAT_MASK: u32 = libc::S_IFMT;
    let stat = rustix::fs::fstat(fd).ok()?;
    (stat.st_mode & FORMAT_MASK == libc::S_IFREG).then_some(stat.st_size as u64)
}

/// Moves the end of a file that is about to grow to the end of its last block, and waits for the
/// direct writes in flight meanwhile.
///
/// A file system that extends a file zeroes the rest of its last block, in the page cache. ext4
/// (Linux 6.18) does not wait for direct writes of that block first, when `ftruncate` extends it:
/// they find a page in the cache that they cannot drop, and the next flush fails (`EIO`, "Possible
/// data corruption due to collision with buffered I/O"). `fallocate` waits for them. Files of ext4
/// without extents, as ext2 and ext3 have them, take no such call.
fn complete_last_block(fd: &OwnedFd, len: u64) -> io::Result<()> {
    let stat = rustix::fs::fstat(fd)?;
    let end = u64::try_from(stat.st_size).unwrap_or(0);
    let block = u64::try_from(stat.st_blksize).unwrap_or(0).max(1);
    if end < len && !end.is_multiple_of(block) {
        let rest = (block - end % block).min(len - end);
        // Without such a call, or without space for it, `ftruncate` decides.
        Shape::Allocate.apply(fd, end, rest).unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
