//! Runs the asynchronous work of a verb on a queue of its own, with the chosen I/O engine.

use std::future::Future;

use cowslip::file::host::Aio;
use cowslip_queue::{Backend, Queue};

use crate::error::CommandError;

/// The I/O engine that `--aio` names. QEMU's `native` is io_uring here.
pub fn parse_aio(name: &str) -> Option<Aio> {
    Some(match name {
        "threads" => Aio::Threads,
        "native" | "io_uring" => Aio::Uring,
        _ => return None,
    })
}

/// Runs a verb's work on a new queue, and waits for it.
///
/// # Errors
/// The queue cannot be created, or the work fails.
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
