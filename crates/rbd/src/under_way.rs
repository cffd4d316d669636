//! Requests that are under way, so that a program which is asked to end does not wait for a cluster
//! that is gone: who waits gets an error then, and librbd keeps what it has.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::ffi::{self, Code};

/// Time that each request has left when a program is asked to end.
pub(crate) const GRACE: Duration = Duration::from_secs(2);
/// Time between two looks at what is under way then.
const LOOK: Duration = Duration::from_millis(100);

static ENDING: AtomicBool = AtomicBool::new(false);
static TABLE: Mutex<Table> = Mutex::new(Table {
    next: 0,
    requests: BTreeMap::new(),
});

struct Table {
    next: u64,
    requests: BTreeMap<u64, UnderWay>,
}

/// A request.
struct UnderWay {
    since: Instant,
    give_up: Box<dyn FnOnce() + Send>,
}

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

type End<T> = Box<dyn FnOnce(Result<T, Code>) + Send>;

/// The end of a request, which comes once: with its outcome, or when it is given up.
pub(crate) struct Finish<T> {
    number: u64,
    end: Arc<Mutex<Option<End<T>>>>,
}

fn take<T>(end: &Mutex<Option<End<T>>>) -> Option<End<T>> {
    end.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl<T: 'static> Finish<T> {
    /// Notes a request that ends with this.
    pub(crate) fn new(end: impl FnOnce(Result<T, Code>) + Send + 'static) -> Finish<T> {
        let end: Arc<Mutex<Option<End<T>>>> = Arc::new(Mutex::new(Some(Box::new(end))));
        let given_up = Arc::clone(&end);
        let give_up = move || {
            if let Some(end) = take(&given_up) {
                end(Err(Code::TIMED_OUT));
            }
        };
        let mut table = table();
        let number = table.next;
        table.next += 1;
        let request = UnderWay {
            since: Instant::now(),
            give_up: Box::new(give_up),
        };
        table.requests.insert(number, request);
        Finish { number, end }
    }

    /// Ends it, unless it was given up.
    pub(crate) fn end(self, outcome: Result<T, Code>) {
        let noted = table().requests.remove(&self.number);
        drop(noted);
        if let Some(end) = take(&self.end) {
            end(outcome);
        }
    }
}

/// Whether the program was asked to end.
pub(crate) fn is_ending() -> bool {
    ENDING.load(Ordering::Acquire)
}

/// Says that the program was asked to end: from now on requests, and images that are being opened,
/// are given up after two seconds.
pub fn end_soon() {
    if ENDING.swap(true, Ordering::AcqRel) || !crate::is_in_use() {
        return;
    }
    let thread = thread::Builder::new().name("cowslip-rbd".to_string());
    // Without one, requests end when the cluster answers.
    drop(thread.spawn(|| {
        ffi::block_signals();
        loop {
            thread::sleep(LOOK);
            give_up_old();
        }
    }));
}

fn give_up_old() {
    let old: Vec<UnderWay> = {
        let mut table = table();
        let (old, young) = std::mem::take(&mut table.requests)
            .into_iter()
            .partition(|(_, request)| request.since.elapsed() >= GRACE);
        table.requests = young;
        BTreeMap::into_values(old).collect()
    };
    for request in old {
        (request.give_up)();
    }
}
