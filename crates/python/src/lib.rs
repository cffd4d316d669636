//! The extension module of the Python package `cowslip`: images, jobs and queues of requests, as
//! the package's own files (`../cowslip`) use them. They have the words and the types for people.
//!
//! Calls that block let go of Python's lock first. Queues keep it, since they do not wait but for
//! the engine's own locks, which are held for moments; a thread that has one of those must not wait
//! for Python's (`memory::Hold`). Python is never called from within a call. Memory of Python
//! objects is read and written in place (`memory.rs`, the one file with `unsafe`).
//!
//! May not know: table entries, files.

use pyo3::prelude::*;

mod error;
mod handle;
mod image;
mod job;
mod memory;
mod options;
mod queue;
mod server;
mod whole;

/// The native part of the package `cowslip`.
#[pymodule]
mod _cowslip {
    #[pymodule_export]
    use super::image::NativeImage;
    #[pymodule_export]
    use super::job::NativeJob;
    #[pymodule_export]
    use super::queue::NativeQueue;
    #[pymodule_export]
    use super::server::NativeServer;
    #[pymodule_export]
    use super::whole::{check, commit, convert, create};

    /// The version of the engine.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}

/// Runs a future of the engine to its end without Python's lock.
fn run<T: Send>(
    py: Python<'_>,
    future: impl Future<Output = cowslip::Result<T>> + Send,
) -> PyResult<T> {
    let outcome = py.detach(|| cowslip_embed::block_on(future));
    outcome.map_err(error::to_python)
}
