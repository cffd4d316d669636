//! [`Workers`]: where work goes that keeps a processor busy and waits for nothing: packing and
//! unpacking clusters.
//!
//! The engine has no thread; whoever has some passes them in. Without them the work is done where
//! the request is polled, which is what small requests want: handing over costs more than a small
//! cluster.

use std::fmt;
use std::sync::Arc;

use cowslip_queue::pending;

/// A piece of such work.
pub type Work = Box<dyn FnOnce() + Send>;

/// Bytes of clusters that are packed or unpacked in one piece of work: handing one over takes some
/// 20 us, so that a twentieth of the time goes there in the worst case (zstd unpacks 128 KiB in 100
/// us).
pub const GROUP_BYTES: u64 = 128 << 10;

/// Threads for such work, or none.
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
    /// Threads that do whatever they are handed, each piece once and all of it.
    pub fn new(submit: impl Fn(Work) + Send + Sync + 'static) -> Workers {
        Workers(Some(Arc::new(submit)))
    }

    /// Has a piece of work done, and waits for its result.
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
