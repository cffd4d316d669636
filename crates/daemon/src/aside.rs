//! [`Aside`]: threads on which jobs copy.
//!
//! A copy of some 100 KiB keeps a processor busy with the page cache. On the thread that serves
//! clients their requests would wait for that; beside it the kernel runs that thread as soon as a
//! request comes.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cowslip::job::Moment;
use cowslip_queue::Threads;

/// The most threads; one that copies moves more than most disks do.
const THREADS_MAX: usize = 4;

/// Threads for jobs, one a processor up to a limit. Each starts with the first job that gets it.
pub struct Aside {
    threads: Mutex<Threads>,
    next: AtomicUsize,
}

/// The thread of a job.
#[derive(Clone)]
pub struct Place {
    aside: Arc<Aside>,
    index: usize,
}

impl Aside {
    /// Threads that have not started; their rings are made here, before a sandbox forbids that.
    ///
    /// # Errors
    /// The system's refusal of a ring.
    pub fn new() -> io::Result<Arc<Aside>> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let count = processors.min(THREADS_MAX);
        Ok(Arc::new(Aside {
            threads: Mutex::new(Threads::new("copy", count, Duration::ZERO)?),
            next: AtomicUsize::new(0),
        }))
    }

    /// The thread of a new job; `None` if the system refuses one.
    pub fn place(self: &Arc<Aside>) -> Option<Place> {
        let place = Place {
            aside: Arc::clone(self),
            index: self.next.fetch_add(1, Ordering::Relaxed),
        };
        let started = self.threads().run(place.index, || std::future::ready(()));
        started.ok().map(|()| place)
    }

    fn threads(&self) -> MutexGuard<'_, Threads> {
        // Nothing that holds the lock panics.
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Runs a part of the job's work.
    pub fn run(&self, work: Moment) {
        // The thread has started, and its event can always be signalled.
        drop(self.aside.threads().run(self.index, || work));
    }
}
