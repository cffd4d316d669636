//! The end of images: closing one waits for Ceph, so a thread does it; and the end of a process,
//! which waits for those threads.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::ffi::{self, Image};
use crate::under_way;

/// Images that are open, and those that are being opened or closed.
static OPEN: Mutex<usize> = Mutex::new(0);
static CLOSED: Condvar = Condvar::new();

/// Time for the end of a process: a cluster that answers no more does not hold it up for longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same after the program was asked to end.
const PATIENCE_AT_END: Duration = Duration::from_secs(1);

fn open() -> MutexGuard<'static, usize> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether images are open, or being opened or closed.
pub fn is_in_use() -> bool {
    *open() > 0
}

/// An image that is open, about to be, or being closed, as long as this lives.
#[derive(Debug)]
pub(crate) struct Counted(());

impl Counted {
    pub(crate) fn new() -> Counted {
        *open() += 1;
        Counted(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        *open() -= 1;
        CLOSED.notify_all();
    }
}

/// Closes an image on a thread of its own; here, if the system gives none.
pub(crate) fn close(image: Image, counted: Counted) {
    let close = move || {
        ffi::block_signals();
        drop(image);
        drop(counted);
    };
    let thread = thread::Builder::new().name("cowslip-rbd".to_string());
    drop(thread.spawn(close));
}

/// Waits until no image is open any more, for a while; whether that has come.
fn wait_for_all() -> bool {
    let patience = match under_way::is_ending() {
        true => PATIENCE_AT_END,
        false => PATIENCE,
    };
    let deadline = Instant::now() + patience;
    let mut open = open();
    while *open > 0 {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        let waited = CLOSED.wait_timeout(open, left);
        open = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

/// The last call of a program, whose output is written: waits until the images that were open are
/// closed. If one is not within five seconds, since its cluster does not answer, or within one
/// after [`crate::end_soon`], the process ends here with this code.
pub fn end(code: u8) {
    if !wait_for_all() {
        ffi::end_process(code);
    }
}
