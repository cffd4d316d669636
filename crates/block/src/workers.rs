//! [`Workers`]: an executor for work that keeps a processor busy and never waits: compression and
//! decompression of clusters.
//!
//! The engine has no threads of its own; the caller passes them in. Without them the work runs
//! where the request is polled. That suits small requests: passing work to a thread costs more than
//! a small cluster.

use std::fmt;
use std::sync::Arc;

use cowslip_queue::pending;

/// A unit of work.
pub type Work = Box<dyn FnOnce() + Send>;

/// Bytes of clusters that are compressed or decompressed in one unit of work. Passing a unit to a
/// thread takes some 20 us, and zstd decompresses 128 KiB in 100 us, so smaller units would waste
/// time.
pub const GROUP_BYTES: u64 = 128 << 10;

/// A pool of threads, or none.
#[derive(Clone, Default)]
pub struct Workers(Option<Arc<dyn Fn(Work) + Send + Sync>>);

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Some(_) => "Workers(threads)",
            None => "Workers(none)",
        })
    }
}

impl Workers {
    /// Workers that pass each unit to `submit`, which must run it exactly once and to its end.
    pub fn new(submit: impl Fn(Work) + Send + Sync + 'static) -> Workers {
        Workers(Some(Arc::new(submit)))
    }

    /// Runs a unit of work and waits for its result.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let Some(submit) = &self.0 else {
            return work();
        };
        let (completer, result) = pending();
        submit(Box::new(move || completer.complete(work())));
        result.await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::thread::{self, ThreadId};

    #[test]
    fn work_is_done_by_the_threads_or_on_the_spot() {
        let here = thread::current().id();
        let whose = |workers: Workers| async move { workers.run(|| thread::current().id()).await };
        let alone = whose(Workers::default()).now_or_never();
        assert_eq!(alone, Some(here));
        let threads = Workers::new(|work| thread::spawn(work).join().unwrap());
        let other: Option<ThreadId> = whose(threads).now_or_never();
        assert!(other.is_some_and(|other| other != here), "{other:?}");
    }
}
