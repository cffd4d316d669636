//! *Submit and complete*: requests of an event loop, such as that of a virtual machine monitor.
//!
//! A [`RequestQueue`] belongs to one thread. Requests go in with a token each ([`submit`]), its
//! eventfd becomes readable, and [`complete`] returns the tokens with their results, in the order
//! in which they ended. Requests of one call are submitted to the kernel together. The queue has no
//! loop and starts no thread; the loop that watches the descriptor calls `complete`.
//!
//! [`submit`]: RequestQueue::submit
//! [`complete`]: RequestQueue::complete
//!
//! ```
//! # fn main() -> cowslip::Result<()> {
//! # use std::sync::Arc;
//! use cowslip::requests::{Operation, Request, RequestQueue};
//! use cowslip::{Disk, SharedMemory, IoVec, IoVecMut, image::Durability};
//!
//! # let disk: Arc<dyn Disk> = Arc::new(cowslip::disk::MemoryDisk::new("disk", 1 << 20));
//! # let guest = SharedMemory::new(8192);
//! # let failed = |error| cowslip::Error::io("requests", error);
//! // `guest` is memory that a virtual machine changes meanwhile.
//! let mut queue = RequestQueue::new().map_err(failed)?;
//! guest.write(0, b"a guest's bytes");
//! let data = IoVec::shared(&guest, 0..4096);
//! let write = Operation::write(65536, data, Durability::Cached);
//! let read = Operation::read(0, IoVecMut::shared(&guest, 4096..8192));
//! queue.submit(&disk, [Request::new(1, write), Request::new(2, read)]).map_err(failed)?;
//!
//! let mut batch = Vec::new();
//! while queue.in_flight() > 0 {
//!     queue.wait(None).map_err(failed)?; // or the caller's own epoll, with `queue.as_fd()`
//!     queue.complete(&mut batch).map_err(failed)?;
//! }
//! for completion in &batch {
//!     assert!(completion.result.is_ok(), "request {}", completion.token);
//! }
//! # assert_eq!(batch.len(), 2);
//! # Ok(())
//! # }
//! ```

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use cowslip_block::disk::{Disk, ZeroOptions};
use cowslip_block::file::Durability;
use cowslip_queue::{Anchored, Backend, IoVec, IoVecMut, PreparedQueue, Reactor, TaskId};

use crate::{Error, Result};

/// The work that a request asks of a disk.
#[derive(Debug)]
pub enum Operation {
    /// Fills the list from `offset` of the disk on.
    Read {
        /// First byte on the disk.
        offset: u64,
        /// Memory to fill; the completion returns it.
        target: IoVecMut,
    },
    /// Writes the list at `offset`.
    Write {
        /// First byte on the disk.
        offset: u64,
        /// Memory that is written from; it may change meanwhile.
        data: IoVec,
        /// Durability at the completion.
        durability: Durability,
    },
    /// Makes a range read as zeroes.
    Zero {
        /// First byte on the disk.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// How.
        options: ZeroOptions,
    },
    /// Discards a range.
    Discard {
        /// First byte on the disk.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Allocates the space of a range.
    Allocate {
        /// First byte on the disk.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Makes durable all writes that had completed when it was submitted.
    Flush,
}

impl Operation {
    /// A read into a buffer or a list.
    pub fn read(offset: u64, target: impl Into<IoVecMut>) -> Operation {
        let target = target.into();
        Operation::Read { offset, target }
    }

    /// A write of a buffer or a list.
    pub fn write(offset: u64, data: impl Into<IoVec>, durability: Durability) -> Operation {
        Operation::Write {
            offset,
            data: data.into(),
            durability,
        }
    }

    /// Bytes that it transfers, or that its range has.
    fn byte_count(&self) -> u64 {
        match self {
            Operation::Read { target, .. } => target.len() as u64,
            Operation::Write { data, .. } => data.len() as u64,
            Operation::Zero { len, .. }
            | Operation::Discard { len, .. }
            | Operation::Allocate { len, .. } => *len,
            Operation::Flush => 0,
        }
    }

    /// Whether it changes nothing, so that its future may be dropped at any moment.
    fn only_reads(&self) -> bool {
        matches!(self, Operation::Read { .. })
    }

    pub(crate) async fn run(self, disk: &dyn Disk) -> Result<Option<IoVecMut>> {
        match self {
            Operation::Read { offset, target } => disk.read(offset, target).await.map(Some),
            Operation::Write {
                offset,
                data,
                durability,
            } => disk.write(offset, data, durability).await.map(|()| None),
            Operation::Zero {
                offset,
                len,
                options,
            } => disk.zero(offset, len, options).await.map(|()| None),
            Operation::Discard { offset, len } => disk.discard(offset, len).await.map(|()| None),
            Operation::Allocate { offset, len } => disk.allocate(offset, len).await.map(|()| None),
            Operation::Flush => disk.flush().await.map(|()| None),
        }
    }
}

/// A request and the token by which its completion is known.
#[derive(Debug)]
pub struct Request {
    /// Returned with the completion. No two requests in flight have the same.
    pub token: u64,
    /// Its work.
    pub operation: Operation,
}

impl Request {
    /// A request.
    pub fn new(token: u64, operation: Operation) -> Request {
        Request { token, operation }
    }

    /// Has a disk do its work, without a queue: for executors, and for calls that wait. It ends as
    /// one in a queue does.
    pub async fn run(self, disk: &dyn Disk) -> Completion {
        let Request { token, operation } = self;
        let byte_count = operation.byte_count();
        Completion::of(token, byte_count, operation.run(disk).await)
    }
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The token of the request.
    pub token: u64,
    /// How it ended: [`Error::errno`] is a number for guests.
    pub result: Result<()>,
    /// The list of a read that has succeeded.
    pub target: Option<IoVecMut>,
    /// Bytes of the request: those that were transferred, if it has succeeded.
    pub byte_count: u64,
}

impl Completion {
    fn of(token: u64, byte_count: u64, ended: Result<Option<IoVecMut>>) -> Completion {
        let (result, target) = match ended {
            Ok(target) => (Ok(()), target),
            Err(error) => (Err(error), None),
        };
        Completion {
            token,
            result,
            target,
            byte_count,
        }
    }
}

/// Requests of one thread, for disks that may be shared with other threads and their queues.
///
/// It belongs to the thread that submits first, and may move between threads before that. Another
/// thread's calls fail. To be dropped on its thread: reads in flight are dropped then, and what may
/// have begun to change a disk is waited for. Dropped elsewhere, it leaves its requests in memory
/// for good.
#[derive(Debug)]
pub struct RequestQueue {
    place: Place,
    event: OwnedFd,
}

// One per queue.
#[allow(clippy::large_enum_variant)]
enum Place {
    Prepared(PreparedQueue),
    Started(Anchored<Started>),
    /// Starting has failed.
    Failed,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Place::Prepared(_) => "Prepared",
            Place::Started(_) => "Started",
            Place::Failed => "Failed",
        })
    }
}

/// A queue on its thread.
struct Started {
    reactor: Reactor,
    state: Rc<RefCell<State>>,
}

#[derive(Default)]
struct State {
    in_flight: HashMap<u64, InFlight, foldhash::fast::RandomState>,
    done: VecDeque<Completion>,
}

/// Ends a request whose future is dropped before its end: it was given up, or has panicked.
struct Unfinished {
    state: Rc<RefCell<State>>,
    token: u64,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let ended = match std::thread::panicking() {
            true => Err(Error::invalid("the request has panicked")),
            false => Err(Error::Cancelled),
        };
        self.state.borrow_mut().end(self.token, ended);
    }
}

struct InFlight {
    task: TaskId,
    only_reads: bool,
    byte_count: u64,
}

impl State {
    /// Ends a request; one that has ended stays so.
    fn end(&mut self, token: u64, ended: Result<Option<IoVecMut>>) {
        let Some(request) = self.in_flight.remove(&token) else {
            return;
        };
        let completion = Completion::of(token, request.byte_count, ended);
        self.done.push_back(completion);
    }
}

impl RequestQueue {
    /// A queue on io_uring where the kernel gives it, else with calls that block its thread: no
    /// thread is started either way.
    ///
    /// # Errors
    /// The system's refusal of a descriptor.
    pub fn new() -> io::Result<RequestQueue> {
        RequestQueue::with(PreparedQueue::new(Backend::Auto)?.without_threads())
    }

    /// A queue whose backend, and use of the pool of threads, the caller has chosen.
    ///
    /// # Errors
    /// As [`RequestQueue::new`].
    pub fn with(queue: PreparedQueue) -> io::Result<RequestQueue> {
        Ok(RequestQueue {
            event: queue.as_fd().try_clone_to_owned()?,
            place: Place::Prepared(queue),
        })
    }

    /// Has the queue belong to this thread, if it belongs to none.
    fn started(&mut self) -> io::Result<&Started> {
        if let Place::Prepared(_) = self.place
            && let Place::Prepared(queue) = std::mem::replace(&mut self.place, Place::Failed)
        {
            self.place = Place::Started(Anchored::new(Started {
                reactor: queue.start_reactor()?,
                state: Rc::default(),
            }));
        }
        match &self.place {
            Place::Started(started) => started.get().map_err(io::Error::other),
            _ => Err(io::Error::other("the queue could not be started")),
        }
    }

    /// Begins requests, with one call of the kernel for all of them. Each ends with a completion,
    /// whatever happens.
    ///
    /// # Errors
    /// Another thread's queue; a token that is in flight already (`AlreadyExists`): this request
    /// and those behind it are not begun.
    pub fn submit(
        &mut self,
        disk: &Arc<dyn Disk>,
        requests: impl IntoIterator<Item = Request>,
    ) -> io::Result<()> {
        let started = self.started()?;
        let begun = requests
            .into_iter()
            .try_for_each(|request| started.begin(disk, request));
        started.proceed();
        begun
    }

    /// Takes what has completed since the last call, and goes on with requests of several steps:
    /// to be called whenever the descriptor is readable. Appends to `batch` and returns how many.
    ///
    /// # Errors
    /// Another thread's queue.
    pub fn complete(&mut self, batch: &mut Vec<Completion>) -> io::Result<usize> {
        let started = self.started()?;
        started.reactor.turn();
        let done = std::mem::take(&mut started.state.borrow_mut().done);
        let count = done.len();
        batch.extend(done);
        Ok(count)
    }

    /// Takes one completion, if there is one. The descriptor stays readable while there are more.
    ///
    /// # Errors
    /// Another thread's queue.
    pub fn next_completion(&mut self) -> io::Result<Option<Completion>> {
        let started = self.started()?;
        if started.state.borrow().done.is_empty() {
            started.reactor.turn();
        }
        let next = started.state.borrow_mut().done.pop_front();
        started.announce();
        Ok(next)
    }

    /// Gives up a read: it completes with [`Error::Cancelled`], and its memory is released when the
    /// kernel has let go of it. Returns whether it was given up. Requests that may change the disk
    /// are not: half of a write or a flush cannot be taken back, so they run to their end.
    ///
    /// # Errors
    /// Another thread's queue.
    pub fn cancel(&mut self, token: u64) -> io::Result<bool> {
        let started = self.started()?;
        let task = match started.state.borrow().in_flight.get(&token) {
            Some(request) if request.only_reads => Some(request.task.clone()),
            _ => None,
        };
        let Some(task) = task else { return Ok(false) };
        started.reactor.abort(&task);
        let ended = Err(Error::Cancelled);
        started.state.borrow_mut().end(token, ended);
        started.proceed();
        Ok(true)
    }

    /// Number of requests that have not completed; those that `complete` has not returned yet
    /// included.
    pub fn in_flight(&self) -> usize {
        match &self.place {
            Place::Started(started) => started.get().map_or(0, |started| {
                let state = started.state.borrow();
                state.in_flight.len() + state.done.len()
            }),
            Place::Prepared(_) | Place::Failed => 0,
        }
    }

    /// Waits until the descriptor is readable, or for `max`, without another loop.
    ///
    /// # Errors
    /// Another thread's queue; the system's refusal.
    pub fn wait(&mut self, max: Option<Duration>) -> io::Result<()> {
        self.started()?.reactor.wait(max)
    }

    /// Waits for a future, such as that of [`Image::close`](crate::Image::close) or of a job, while
    /// requests go on; their completions are kept.
    ///
    /// # Errors
    /// Another thread's queue; the system's refusal.
    pub fn wait_for<F: Future>(&mut self, future: F) -> io::Result<F::Output> {
        let started = self.started()?;
        let output = started.reactor.block_on(future);
        started.announce();
        output
    }
}

impl AsFd for RequestQueue {
    /// The eventfd that becomes readable when [`RequestQueue::complete`] is to be called. Whether
    /// it is read before makes no difference.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Started {
    fn begin(&self, disk: &Arc<dyn Disk>, request: Request) -> io::Result<()> {
        let Request { token, operation } = request;
        let (only_reads, byte_count) = (operation.only_reads(), operation.byte_count());
        let (disk, state) = (Arc::clone(disk), Rc::clone(&self.state));
        if self.state.borrow().in_flight.contains_key(&token) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let unfinished = Unfinished { state, token };
        let task = self.reactor.spawn(async move {
            let ended = operation.run(&*disk).await;
            unfinished.state.borrow_mut().end(token, ended);
        });
        let request = InFlight {
            task,
            only_reads,
            byte_count,
        };
        self.state.borrow_mut().in_flight.insert(token, request);
        Ok(())
    }

    fn proceed(&self) {
        self.reactor.proceed();
        self.announce();
    }

    /// Has the descriptor be readable if a completion waits.
    fn announce(&self) {
        if !self.state.borrow().done.is_empty() {
            self.reactor.signal();
        }
    }

    /// Waits for what may have begun to change a disk.
    fn finish(&self) {
        let reads: Vec<TaskId> = {
            let state = self.state.borrow();
            let reads = state.in_flight.values().filter(|one| one.only_reads);
            reads.map(|one| one.task.clone()).collect()
        };
        reads.iter().for_each(|task| self.reactor.abort(task));
        let mut state = self.state.borrow_mut();
        state.in_flight.retain(|_, request| !request.only_reads);
        drop(state);
        while !self.state.borrow().in_flight.is_empty() {
            let left = self.reactor.turn();
            if self.state.borrow().in_flight.is_empty() || self.reactor.wait(left).is_err() {
                break;
            }
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.finish();
    }
}
