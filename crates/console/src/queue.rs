//! Asynchronous work of one verb, run to its end: on which engine, and on a queue of its own.

use std::future::Future;

use cowslip::file::host::Aio;
use cowslip_queue::{Backend, Queue};

use crate::error::CommandError;

/// `--aio`: the engine of this name. QEMU's `native` is the ring here.
pub fn parse_aio(name: &str) -> Option<Aio> {
    Some(match name {
        "threads" => Aio::Threads,
        "native" | "io_uring" => Aio::Uring,
        _ => return None,
    })
}

/// Runs a verb's work on a queue of its own.
///
/// # Errors
/// The queue cannot be made, or the work fails.
pub fn block_on<T>(
    aio: Aio,
    work: impl Future<Output = Result<T, CommandError>>,
) -> Result<T, CommandError> {
    let backend = match aio {
        Aio::Auto => Backend::Auto,
        Aio::Uring => Backend::Uring,
        Aio::Threads => Backend::Threads,
    };
    let queue = Queue::new(backend).map_err(|error| {
        let words = cowslip::error::system_words(&error);
        CommandError::new(format!("Could not set up the I/O queue: {words}"))
    })?;
    queue.block_on(work)
}
