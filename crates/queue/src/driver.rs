//! The two ways to the kernel behind one name: a ring, or epoll and threads.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::epoll::Epoll;
use crate::patience::Patience;
use crate::ring::{Ring, Width};
use crate::uring::Uring;

/// How a queue talks to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The ring if the kernel gives one, else threads.
    Auto,
    /// io_uring, or an error.
    Uring,
    /// epoll for sockets, a pool of threads for files.
    Threads,
}

/// The sleeper, until a queue has something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waking {
    /// The queue, in the kernel.
    Itself,
    /// Another loop, which watches the queue's event: the kernel counts completions there.
    Other,
}

// One per queue: the difference in size costs nothing.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Driver {
    Uring(Uring),
    Epoll(Epoll),
}

/// The descriptors of a driver that does not work yet. Any thread may start it.
// One per queue, and not for long.
#[allow(clippy::large_enum_variant)]
pub(crate) enum PreparedDriver {
    Uring(Ring),
    Epoll(OwnedFd),
}

impl PreparedDriver {
    pub(crate) fn new(backend: Backend) -> io::Result<PreparedDriver> {
        match backend {
            Backend::Uring => Ring::prepare(Width::Narrow).map(PreparedDriver::Uring),
            Backend::Threads => Epoll::prepare().map(PreparedDriver::Epoll),
            Backend::Auto => match Ring::prepare(Width::Narrow) {
                Ok(ring) => Ok(PreparedDriver::Uring(ring)),
                // Containers forbid it, old kernels lack it: both are ordinary.
                Err(_) => Epoll::prepare().map(PreparedDriver::Epoll),
            },
        }
    }

    /// A ring that takes commands of devices too.
    pub(crate) fn with_commands() -> io::Result<PreparedDriver> {
        Ring::prepare(Width::Wide).map(PreparedDriver::Uring)
    }

    /// Has the driver work for this thread.
    pub(crate) fn start(self, event: Arc<OwnedFd>, waking: Waking) -> io::Result<Driver> {
        match self {
            PreparedDriver::Uring(ring) => {
                Uring::start_ring(ring, event, waking).map(Driver::Uring)
            }
            PreparedDriver::Epoll(epoll) => Epoll::new(epoll, event).map(Driver::Epoll),
        }
    }
}

impl Driver {
    pub(crate) fn backend(&self) -> Backend {
        match self {
            Driver::Uring(_) => Backend::Uring,
            Driver::Epoll(_) => Backend::Threads,
        }
    }

    /// Submits what is prepared, waits, and delivers what has completed.
    pub(crate) fn turn(&self, patience: Patience, is_woken: impl Fn() -> bool) {
        match self {
            Driver::Uring(ring) => ring.turn(patience, is_woken),
            Driver::Epoll(epoll) => epoll.turn(patience),
        }
    }

    /// Whether the kernel has all that was prepared, and nothing for this thread.
    pub(crate) fn is_settled(&self) -> bool {
        match self {
            Driver::Uring(ring) => ring.is_settled(),
            Driver::Epoll(_) => true,
        }
    }

    /// Ends everything that is in flight.
    pub(crate) fn drain(&self) {
        match self {
            Driver::Uring(ring) => ring.drain(),
            Driver::Epoll(_) => {}
        }
    }
}
