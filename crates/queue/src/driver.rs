//! The two ways to the kernel behind one name: a ring, or epoll and threads.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::epoll::Epoll;
use crate::patience::Patience;
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

// One per queue: the difference in size costs nothing.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Driver {
    Uring(Uring),
    Epoll(Epoll),
}

impl Driver {
    pub(crate) fn new(backend: Backend, event: Arc<OwnedFd>) -> io::Result<Driver> {
        match backend {
            Backend::Uring => Uring::new(event).map(Driver::Uring),
            Backend::Threads => Epoll::new(event).map(Driver::Epoll),
            Backend::Auto => match Uring::new(Arc::clone(&event)) {
                Ok(ring) => Ok(Driver::Uring(ring)),
                // Containers forbid it, old kernels lack it: both are ordinary.
                Err(_) => Epoll::new(event).map(Driver::Epoll),
            },
        }
    }

    pub(crate) fn backend(&self) -> Backend {
        match self {
            Driver::Uring(_) => Backend::Uring,
            Driver::Epoll(_) => Backend::Threads,
        }
    }

    /// Submits what is prepared, waits, and delivers what has completed.
    pub(crate) fn turn(&self, patience: Patience) {
        match self {
            Driver::Uring(ring) => ring.turn(patience),
            Driver::Epoll(epoll) => epoll.turn(patience),
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
