//! Threads that the connections of a server are spread over.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cowslip_queue::{Threads, spawn};

/// Threads for connections, besides the one that serves; by default none. Clones are the same
/// threads, which end with the last of them.
#[derive(Clone, Default)]
pub struct Workers {
    threads: Option<Arc<Mutex<Threads>>>,
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workers({})", self.count())
    }
}

impl Workers {
    /// `count` threads, which may be none. None of them runs before it has a connection; their
    /// queues are made here, so that a process may give up the right to make them. They poll for
    /// `poll` before they sleep.
    ///
    /// # Errors
    /// The system's refusal of a queue.
    pub fn new(count: usize, poll: Duration) -> io::Result<Workers> {
        let threads = match count {
            0 => None,
            _ => Some(Arc::new(Mutex::new(Threads::new("nbd", count, poll)?))),
        };
        Ok(Workers { threads })
    }

    fn count(&self) -> usize {
        // Nothing that holds the lock panics.
        let count = |threads: &Arc<Mutex<Threads>>| {
            threads
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .count()
        };
        self.threads.as_ref().map_or(0, count)
    }

    /// Runs the task of a connection: the first on the thread that calls, the next ones on these
    /// in turn, and so on.
    ///
    /// # Errors
    /// The system's refusal of a thread.
    pub(super) fn run<F: Future<Output = ()> + 'static>(
        &self,
        connection: u64,
        make: impl FnOnce() -> F + Send + 'static,
    ) -> io::Result<()> {
        let Some(threads) = &self.threads else {
            spawn(make());
            return Ok(());
        };
        let mut threads = threads.lock().unwrap_or_else(PoisonError::into_inner);
        let places = threads.count() as u64 + 1;
        // Connections are numbered from 1.
        match usize::try_from((connection - 1) % places) {
            Ok(place) if place > 0 => threads.run(place - 1, make),
            _ => {
                spawn(make());
                Ok(())
            }
        }
    }
}
