//! A process that was asked to end: requests that fail are not repeated any more, and those that
//! are not answered are given up after a moment.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::Notify;

/// Time for an answer after the process was asked to end, long enough for what is on its way.
const GRACE: Duration = Duration::from_secs(2);

static ENDING: AtomicBool = AtomicBool::new(false);
static ASKED: Notify = Notify::const_new();

/// The reason of a request that was given up.
pub(crate) const WHY: &str = "given up, since the program was asked to end";

/// Says that the process was asked to end, by a signal for example. It holds for all requests, also
/// for those that begin later: each has two seconds.
pub fn end_soon() {
    ENDING.store(true, Ordering::Release);
    ASKED.notify_waiters();
}

/// Waits until the process is asked to end.
async fn asked() {
    let mut asked = pin!(ASKED.notified());
    // Noted before the look, so that none is missed.
    asked.as_mut().enable();
    if !ENDING.load(Ordering::Acquire) {
        asked.await;
    }
}

/// Does work, which is given up a moment after the process was asked to end; then `None`.
pub(crate) async fn within<T>(work: impl Future<Output = T>) -> Option<T> {
    let too_late = async {
        asked().await;
        tokio::time::sleep(GRACE).await;
    };
    match select(pin!(work), pin!(too_late)).await {
        Either::Left((done, _)) => Some(done),
        Either::Right(_) => None,
    }
}

/// Waits for a time before another attempt; `false` if there is to be none, since the process was
/// asked to end.
pub(crate) async fn pause(time: Duration) -> bool {
    let slept = pin!(tokio::time::sleep(time));
    matches!(select(slept, pin!(asked())).await, Either::Left(_))
}
