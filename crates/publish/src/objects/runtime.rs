//! The runtime of the clients of object stores: one thread for all of them, which starts with the
//! first request.

use std::future::Future;
use std::sync::LazyLock;
use std::thread;

use cowslip_queue::{Pending, pending};
use tokio::runtime::{Builder, Handle};

static RUNTIME: LazyLock<Handle> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("the system has descriptors for a runtime");
    let handle = runtime.handle().clone();
    let started = thread::Builder::new()
        .name("object-store".into())
        .spawn(move || runtime.block_on(std::future::pending::<()>()));
    started.expect("the system has a thread for object stores");
    handle
});

/// Runs a future on the runtime's thread. It runs to its end even if nobody awaits it.
pub fn run<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> Pending<T> {
    let (completer, result) = pending();
    drop(RUNTIME.spawn(async move { completer.complete(future.await) }));
    result
}
