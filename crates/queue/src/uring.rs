//! The ring: one io_uring for the thread of its queue.
//!
//! An operation lies in the slab with everything that the kernel may touch (buffers, lists of
//! buffers, descriptors) from its submission until its completion entry has been taken. Nothing
//! else frees it: a dropped future only asks for cancellation.
//!
//! Preparing an operation is no system call: [`Uring::turn`] submits all of them with one, which
//! also waits and lets the kernel finish its part of the completions.
#![allow(unsafe_code)] // Submission entries hold raw pointers; the one push says why they live.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::squeue::Entry;
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{cqueue, opcode};
use slab::Slab;

use crate::buf::BufMut;
use crate::driver::Waking;
use crate::epoll::Interest;
use crate::file::{Call, Next, Read, Write};
use crate::fixed::Fixed;
use crate::fuse_slot::FuseSlot;
use crate::iovec::Segments;
use crate::patience::Patience;
use crate::pending::{Completer, Pending, pending};
use crate::pool;
use crate::ring::{Ring, Submission, Width};
use crate::scatter::Scatter;
use crate::spin::Spin;
use crate::sys;
use crate::watched::{Tag, Watched};

/// Reads and writes in flight up to which a queue looks for completions before it sleeps. With more
/// it is awake most of the time anyhow, and its sleep lets completions gather.
const SPINNING_TRANSFERS_MAX: usize = 7;

/// Tags of entries that belong to no operation in the slab.
const CANCEL: u64 = u64::MAX;

/// Result of a receive.
pub(crate) type Received = Pending<(io::Result<usize>, BufMut)>;

/// An operation, with all that the kernel may touch.
enum Op {
    Read(Read, Vec<libc::iovec>),
    Write(Write, Vec<libc::iovec>),
    Call(Call),
    Poll {
        fd: Arc<OwnedFd>,
        interest: Interest,
        completer: Completer<io::Result<()>>,
    },
    Recv {
        fd: Arc<OwnedFd>,
        buf: BufMut,
        completer: Completer<(io::Result<usize>, BufMut)>,
    },
    /// Completes at each event, until it is cancelled.
    Watch {
        fd: Arc<OwnedFd>,
        watched: Rc<Watched>,
    },
    /// The kernel has a slot of a FUSE connection.
    Exchange {
        device: Arc<OwnedFd>,
        slot: FuseSlot,
        completer: Completer<io::Result<FuseSlot>>,
    },
    /// The queue's own event; the counter is read to here.
    Event(Box<[u8; 8]>),
    Nop(Completer<()>),
}

impl Op {
    /// The submission entry. Its pointers go into `self`'s heap memory, which does not move with
    /// it.
    fn submission(&mut self, event: &OwnedFd, fixed: Fixed) -> Submission {
        Submission::Narrow(match self {
            Op::Exchange { device, slot, .. } => return Submission::Wide(slot.entry(device)),
            Op::Read(read, iovecs) => read_entry(read, iovecs, fixed),
            Op::Write(write, iovecs) => write_entry(write, iovecs, fixed),
            Op::Call(call) => {
                let fd = Fd(call.fd().as_raw_fd());
                match call.shape() {
                    None => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
                    Some((mode, offset, len)) => opcode::Fallocate::new(fd, len)
                        .offset(offset)
                        .mode(mode)
                        .build(),
                }
            }
            Op::Poll { fd, interest, .. } => {
                let flags = match interest {
                    Interest::Readable => libc::POLLIN,
                    Interest::Writable => libc::POLLOUT,
                };
                opcode::PollAdd::new(Fd(fd.as_raw_fd()), flags as u32).build()
            }
            Op::Recv { fd, buf, .. } => {
                let len = u32::try_from(buf.len()).unwrap_or(u32::MAX);
                opcode::Recv::new(Fd(fd.as_raw_fd()), buf.as_mut_ptr(), len).build()
            }
            Op::Watch { fd, .. } => {
                let flags = libc::POLLIN as u32;
                opcode::PollAdd::new(Fd(fd.as_raw_fd()), flags)
                    .multi(true)
                    .build()
            }
            Op::Event(counter) => {
                opcode::Read::new(Fd(event.as_raw_fd()), counter.as_mut_ptr(), 8).build()
            }
            Op::Nop(_) => opcode::Nop::new().build(),
        })
    }

    /// Whether it may wait for ever for another party.
    fn may_wait(&self) -> bool {
        matches!(
            self,
            Op::Poll { .. } | Op::Recv { .. } | Op::Watch { .. } | Op::Event(_)
        )
    }

    /// Whether nothing but its device ends it: it cannot be cancelled.
    fn is_exchange(&self) -> bool {
        matches!(self, Op::Exchange { .. })
    }

    fn is_transfer(&self) -> bool {
        matches!(self, Op::Read(..) | Op::Write(..))
    }

    /// Takes the kernel's answer; what is not finished comes back to be submitted again.
    fn finish(self, result: i32) -> Option<Op> {
        let result = match result {
            0.. => Ok(result as usize),
            _ => Err(io::Error::from_raw_os_error(-result)),
        };
        match self {
            Op::Read(read, iovecs) => match read.advance(result) {
                Next::Done => None,
                Next::Again(read) => Some(Op::Read(read, iovecs)),
                Next::Block(read) => {
                    pool::submit(Box::new(move || read.run()));
                    None
                }
            },
            Op::Write(write, iovecs) => match write.advance(result) {
                Next::Done => None,
                Next::Again(write) => Some(Op::Write(write, iovecs)),
                Next::Block(write) => {
                    pool::submit(Box::new(move || write.run()));
                    None
                }
            },
            Op::Call(call) => match call.finish_on_ring(result.map(drop)) {
                Next::Done => None,
                Next::Again(call) => Some(Op::Call(call)),
                Next::Block(call) => {
                    pool::submit(Box::new(move || call.run()));
                    None
                }
            },
            Op::Poll { completer, .. } => {
                completer.complete(result.map(drop));
                None
            }
            Op::Recv { buf, completer, .. } => {
                completer.complete((result, buf));
                None
            }
            Op::Watch { fd, watched } => {
                // The kernel may end a watch on its own, as when completions overflow.
                let goes_on = watched.note(result.map(|events| events as u32));
                goes_on.then_some(Op::Watch { fd, watched })
            }
            Op::Exchange {
                mut slot,
                completer,
                ..
            } => {
                slot.returned();
                completer.complete(result.map(|_| slot));
                None
            }
            Op::Event(counter) => Some(Op::Event(counter)),
            Op::Nop(completer) => {
                completer.complete(());
                None
            }
        }
    }
}

fn read_entry(read: &Read, iovecs: &mut Vec<libc::iovec>, fixed: Fixed) -> Entry {
    let fd = Fd(read.fd().as_raw_fd());
    if let Some((start, len)) = single(read.target()) {
        if fixed.has(start, len) {
            return opcode::ReadFixed::new(fd, start, len, Fixed::INDEX)
                .offset(read.offset())
                .build();
        }
        return opcode::Read::new(fd, start, len)
            .offset(read.offset())
            .build();
    }
    iovecs.clear();
    iovecs.extend(read.target().rest());
    opcode::Readv::new(fd, iovecs.as_ptr(), iovecs.len() as u32)
        .offset(read.offset())
        .build()
}

fn write_entry(write: &Write, iovecs: &mut Vec<libc::iovec>, fixed: Fixed) -> Entry {
    let fd = Fd(write.fd().as_raw_fd());
    let flags = write.flags().bits() as i32;
    if let Some((start, len)) = single(write.data()) {
        if fixed.has(start, len) {
            return opcode::WriteFixed::new(fd, start, len, Fixed::INDEX)
                .offset(write.offset())
                .rw_flags(flags)
                .build();
        }
        return opcode::Write::new(fd, start, len)
            .offset(write.offset())
            .rw_flags(flags)
            .build();
    }
    iovecs.clear();
    iovecs.extend(write.data().rest());
    opcode::Writev::new(fd, iovecs.as_ptr(), iovecs.len() as u32)
        .offset(write.offset())
        .rw_flags(flags)
        .build()
}

/// Returns the rest of a transfer, if a call without a list takes it.
fn single<L: Segments>(data: &Scatter<L>) -> Option<(*mut u8, u32)> {
    let only = data.only()?;
    Some((only.iov_base.cast(), u32::try_from(only.iov_len).ok()?))
}

struct State {
    ring: Ring,
    ops: Slab<(Tag, Op)>,
    generation: u32,
    /// Entries that found the submission queue full; they go first.
    backlog: VecDeque<Submission>,
    /// Reads and writes in flight.
    transfers: usize,
    spin: Spin,
    /// The beginning of the turn's wait, if it is measured.
    slept: Option<Instant>,
}

impl State {
    fn push(&mut self, submission: Submission) {
        if !self.backlog.is_empty() {
            self.backlog.push_back(submission);
            return;
        }
        // SAFETY: the entry was built by `Op::submission` of an operation in the slab, or names one
        // by its tag only. What it points to is heap memory and a descriptor that the operation
        // owns, and the operation leaves the slab only when its completion was taken: `turn`
        // removes nothing else, and `drain` waits for all before the slab is dropped, but for those
        // that it leaves to the kernel, with all that they own.
        if !unsafe { self.ring.push(&submission) } {
            self.backlog.push_back(submission);
        }
    }

    fn refill(&mut self) {
        while let Some(submission) = self.backlog.pop_front() {
            // SAFETY: as in `push`.
            if !unsafe { self.ring.push(&submission) } {
                self.backlog.push_front(submission);
                return;
            }
        }
    }
}

pub(crate) struct Uring {
    state: RefCell<State>,
    event: Arc<OwnedFd>,
    /// Completions of a turn, taken out before any is acted on: acting may prepare new operations.
    arrived: RefCell<Vec<cqueue::Entry>>,
    /// Whether the kernel has polls that complete again and again.
    watches: bool,
    draining: Cell<bool>,
}

impl Uring {
    /// Has a ring work from here on, for this thread.
    pub(crate) fn start_ring(ring: Ring, event: Arc<OwnedFd>, waking: Waking) -> io::Result<Uring> {
        if waking == Waking::Other {
            // Before the ring works: its restrictions forbid it afterwards.
            ring.submitter().register_eventfd(event.as_raw_fd())?;
        }
        ring.submitter().register_enable_rings()?;
        // A later feature, which can be asked for.
        let watches = ring.params().is_feature_skip_cqe_on_success();
        let uring = Uring {
            state: RefCell::new(State {
                ring,
                ops: Slab::new(),
                generation: 0,
                backlog: VecDeque::new(),
                transfers: 0,
                spin: Spin::default(),
                slept: None,
            }),
            event,
            watches,
            arrived: RefCell::new(Vec::new()),
            draining: Cell::new(false),
        };
        if waking == Waking::Itself {
            uring.start(Op::Event(Box::new([0; 8])));
        }
        Ok(uring)
    }

    fn start(&self, op: Op) -> Tag {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        state.generation = state.generation.wrapping_add(1);
        state.transfers += usize::from(op.is_transfer());
        let fixed = state.ring.fixed();
        let vacant = state.ops.vacant_entry();
        let tag = Tag::new(vacant.key(), state.generation);
        if let Op::Watch { watched, .. } = &op {
            watched.tag.set(Some(tag));
        }
        let (_, op) = vacant.insert((tag, op));
        let submission = op.submission(&self.event, fixed).user_data(tag.0);
        state.push(submission);
        tag
    }

    pub(crate) fn read(&self, read: Read) {
        self.start(Op::Read(read, Vec::new()));
    }

    pub(crate) fn write(&self, write: Write) {
        self.start(Op::Write(write, Vec::new()));
    }

    pub(crate) fn call(&self, call: Call) {
        self.start(Op::Call(call));
    }

    pub(crate) fn nop(&self) -> Pending<()> {
        let (completer, result) = pending();
        self.start(Op::Nop(completer));
        result
    }

    /// Waits for a descriptor to be ready.
    pub(crate) fn poll(
        &self,
        fd: Arc<OwnedFd>,
        interest: Interest,
    ) -> (Tag, Pending<io::Result<()>>) {
        let (completer, result) = pending();
        let tag = self.start(Op::Poll {
            fd,
            interest,
            completer,
        });
        (tag, result)
    }

    /// Receives some bytes once there are any.
    pub(crate) fn recv(&self, fd: Arc<OwnedFd>, buf: BufMut) -> (Tag, Received) {
        let (completer, result) = pending();
        let op = Op::Recv { fd, buf, completer };
        (self.start(op), result)
    }

    /// Watches a descriptor until cancelled; returns whether the kernel can.
    pub(crate) fn watch(&self, fd: Arc<OwnedFd>, watched: Rc<Watched>) -> bool {
        if self.watches {
            self.start(Op::Watch { fd, watched });
        }
        self.watches
    }

    /// Gives a slot to the kernel, until it has a request in it; `None` if the ring takes no such
    /// operations.
    pub(crate) fn exchange(
        &self,
        device: &Arc<OwnedFd>,
        slot: FuseSlot,
    ) -> Option<Pending<io::Result<FuseSlot>>> {
        let is_wide = self.state.borrow().ring.width() == Width::Wide;
        is_wide.then(|| {
            let (completer, result) = pending();
            let device = Arc::clone(device);
            self.start(Op::Exchange {
                device,
                slot,
                completer,
            });
            result
        })
    }

    /// Whether the kernel has all that was prepared, and nothing for this thread.
    pub(crate) fn is_settled(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let (prepared, taskrun) = state.ring.prepared();
        let nothing_arrived = state.ring.completion().is_empty();
        state.backlog.is_empty() && prepared == 0 && !taskrun && nothing_arrived
    }

    /// Has turns look for completions for some time before they sleep.
    pub(crate) fn spin(&self, max: Duration) {
        self.state.borrow_mut().spin = Spin::new(max);
    }

    /// Ends an operation early, if it is still there.
    pub(crate) fn cancel(&self, tag: Tag) {
        let mut state = self.state.borrow_mut();
        let waits = state.ops.get(tag.index()).is_some_and(|op| op.0 == tag);
        if waits {
            let entry = opcode::AsyncCancel::new(tag.0).build().user_data(CANCEL);
            state.push(Submission::Narrow(entry));
        }
    }

    /// Enters the kernel once, and makes the deliveries that follow.
    ///
    /// Before it sleeps, it looks for completions for a while, and whether `is_woken`.
    pub(crate) fn turn(&self, patience: Patience, is_woken: impl Fn() -> bool) {
        let mut arrived = std::mem::take(&mut *self.arrived.borrow_mut());
        {
            let mut state = self.state.borrow_mut();
            let patience = state.look_around(patience, is_woken);
            state.enter(patience);
            arrived.extend(state.ring.completion());
            if let Some(begun) = state.slept.take() {
                state.spin.note(begun.elapsed());
            }
        }
        for completion in arrived.drain(..) {
            self.deliver(&completion);
        }
        *self.arrived.borrow_mut() = arrived;
    }

    fn deliver(&self, completion: &cqueue::Entry) {
        let (tag, result) = (Tag(completion.user_data()), completion.result());
        if tag.0 == CANCEL {
            return;
        }
        let op = {
            let mut state = self.state.borrow_mut();
            let (known, op) = &state.ops[tag.index()];
            assert!(*known == tag, "a completion belongs to one operation");
            if let (Op::Watch { watched, .. }, true) = (op, cqueue::more(completion.flags())) {
                let watched = Rc::clone(watched);
                drop(state);
                watched.note(Ok(result as u32));
                return;
            }
            let (_, op) = state.ops.remove(tag.index());
            state.transfers -= usize::from(op.is_transfer());
            op
        };
        match op.finish(result) {
            Some(Op::Event(_) | Op::Watch { .. }) if self.draining.get() => {}
            Some(op) => {
                self.start(op);
            }
            None => {}
        }
    }

    /// Waits for the end of all operations; those that could wait for ever are cancelled. The
    /// kernel may write into their buffers until then. What cannot be cancelled is left to the
    /// kernel for good.
    pub(crate) fn drain(&self) {
        self.draining.set(true);
        let waiting: Vec<Tag> = {
            let state = self.state.borrow();
            let waiting = state.ops.iter().filter(|(_, (_, op))| op.may_wait());
            waiting.map(|(_, (tag, _))| *tag).collect()
        };
        waiting.into_iter().for_each(|tag| self.cancel(tag));
        sys::signal_event(&self.event);
        let ends = |(_, (_, op)): (usize, &(Tag, Op))| !op.is_exchange();
        while self.state.borrow().ops.iter().any(ends) {
            self.turn(Patience::Forever, || false);
        }
        for left in self.state.borrow_mut().ops.drain() {
            std::mem::forget(left);
        }
    }
}

impl State {
    /// Submits and looks for completions for a while, if a turn is to wait and few transfers are in
    /// flight. Returns the patience that is left.
    fn look_around(&mut self, patience: Patience, is_woken: impl Fn() -> bool) -> Patience {
        self.slept = None;
        if patience == Patience::None
            || !self.spin.is_on()
            || self.transfers > SPINNING_TRANSFERS_MAX
        {
            return patience;
        }
        let begun = Instant::now();
        self.slept = Some(begun);
        let mut time = self.spin.time(begun);
        if let Patience::AtMost(limit) = patience {
            time = time.min(limit);
        }
        if time.is_zero() {
            return patience;
        }
        self.enter(Patience::None);
        let mut last = begun;
        loop {
            let has_news =
                !self.ring.completion().is_empty() || self.ring.prepared().1 || is_woken();
            let now = Instant::now();
            self.spin.look(now, now - last);
            if has_news {
                return Patience::None;
            }
            if now - begun >= time {
                return patience;
            }
            last = now;
            std::hint::spin_loop();
        }
    }

    fn enter(&mut self, patience: Patience) {
        self.refill();
        while !self.backlog.is_empty() && self.submit_some() {
            self.refill();
        }
        let (prepared, taskrun) = self.ring.prepared();
        // Never to sleep on completions that are here, or on what could not be submitted.
        let waiting = !self.ring.completion().is_empty() || !self.backlog.is_empty();
        let result = match patience {
            Patience::None if prepared == 0 && !taskrun => return,
            Patience::None => self.ring.submitter().submit().map(drop),
            _ if waiting => self.ring.submitter().submit().map(drop),
            Patience::Forever => self.ring.submitter().submit_and_wait(1).map(drop),
            Patience::AtMost(time) => {
                let time = Timespec::from(time);
                let args = SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &args).map(drop)
            }
        };
        accept_failure(result);
    }

    /// Makes room in a full queue; whether it did.
    fn submit_some(&mut self) -> bool {
        let result = self.ring.submitter().submit();
        let submitted = matches!(result, Ok(1..));
        accept_failure(result.map(drop));
        submitted
    }
}

/// Failures that pass: a signal, the end of patience, completions to be taken first, no memory
/// for the moment. Entries that were not submitted stay in the queue for the next turn.
fn accept_failure(result: io::Result<()>) {
    const PASSING: [i32; 5] = [
        libc::EINTR,
        libc::ETIME,
        libc::EBUSY,
        libc::EAGAIN,
        libc::ENOMEM,
    ];
    if let Err(error) = result {
        let passing = error
            .raw_os_error()
            .is_some_and(|code| PASSING.contains(&code));
        assert!(passing, "io_uring_enter: {error}");
    }
}
