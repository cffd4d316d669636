//! The fallback without io_uring: epoll reports when a socket is ready, the pool does the file
//! calls.
//!
//! Interest is registered for one event at a time (EPOLLONESHOT), so nothing needs to be undone
//! when a socket closes: a descriptor that the kernel has forgotten is simply added again.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::task::Waker;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::patience::Patience;
use crate::sys;

/// The tag of the queue's own event; descriptors are never negative, so it is no descriptor's.
const EVENT: u64 = u64::MAX;
const EVENTS_PER_TURN: usize = 64;

/// Sockets and events that a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Readable,
    Writable,
}

#[derive(Default)]
struct Waiters {
    readable: Vec<Waker>,
    writable: Vec<Waker>,
}

impl Waiters {
    fn flags(&self) -> EventFlags {
        let mut flags = EventFlags::ONESHOT;
        flags.set(EventFlags::IN, !self.readable.is_empty());
        flags.set(EventFlags::OUT, !self.writable.is_empty());
        flags
    }
}

pub(crate) struct Epoll {
    epoll: OwnedFd,
    event: Arc<OwnedFd>,
    waiters: RefCell<HashMap<RawFd, Waiters>>,
}

impl Epoll {
    /// Makes the descriptor, on any thread.
    pub(crate) fn prepare() -> io::Result<OwnedFd> {
        Ok(epoll::create(CreateFlags::CLOEXEC)?)
    }

    pub(crate) fn new(epoll: OwnedFd, event: Arc<OwnedFd>) -> io::Result<Epoll> {
        // Edge-triggered: each signal is one wake, and the counter need not be read back.
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, &*event, EventData::new_u64(EVENT), flags)?;
        Ok(Epoll {
            epoll,
            event,
            waiters: RefCell::new(HashMap::new()),
        })
    }

    /// Wakes the task once the descriptor may be ready; sometimes earlier.
    pub(crate) fn wait(
        &self,
        fd: BorrowedFd<'_>,
        interest: Interest,
        waker: &Waker,
    ) -> io::Result<()> {
        let mut waiters = self.waiters.borrow_mut();
        let entry = waiters.entry(fd.as_raw_fd()).or_default();
        match interest {
            Interest::Readable => entry.readable.push(waker.clone()),
            Interest::Writable => entry.writable.push(waker.clone()),
        }
        self.arm(fd, entry.flags())
    }

    fn arm(&self, fd: BorrowedFd<'_>, flags: EventFlags) -> io::Result<()> {
        let data = EventData::new_u64(fd.as_raw_fd() as u64);
        match epoll::modify(&self.epoll, fd, data, flags) {
            Err(Errno::NOENT) => Ok(epoll::add(&self.epoll, fd, data, flags)?),
            result => Ok(result?),
        }
    }

    pub(crate) fn turn(&self, patience: Patience) {
        let timeout = match patience {
            Patience::None => Some(Timespec::default()),
            Patience::AtMost(time) => Timespec::try_from(time).ok(),
            Patience::Forever => None,
        };
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        let space = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&self.epoll, space, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => panic!("waiting for events: {error}"),
        }
        let mut woken = Vec::new();
        for event in &events {
            let tag = event.data.u64();
            if tag == EVENT {
                sys::clear_event(&self.event);
            } else {
                self.take_ready(tag as RawFd, &mut woken);
            }
        }
        woken.into_iter().for_each(Waker::wake);
    }

    /// The shot is spent for both directions, so both are woken; who is early asks again.
    fn take_ready(&self, fd: RawFd, woken: &mut Vec<Waker>) {
        if let Some(mut entry) = self.waiters.borrow_mut().remove(&fd) {
            woken.append(&mut entry.readable);
            woken.append(&mut entry.writable);
        }
    }
}
