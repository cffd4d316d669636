//! Disks served over NBD while the program does other things.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cowslip_embed::Serving;
use pyo3::prelude::*;

use crate::error::{of_another_process, to_python};
use crate::handle::{Kind, Use};
use crate::image::NativeImage;

/// A server in a thread of its own.
#[pyclass(frozen, subclass, name = "Server", module = "cowslip._cowslip")]
pub struct NativeServer {
    process: u32,
    /// Held with Python's lock alone, and never for long. The server is dropped first.
    inner: Mutex<Option<(Serving, Use)>>,
}

impl NativeServer {
    fn inner(&self) -> MutexGuard<'_, Option<(Serving, Use)>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl NativeServer {
    #[new]
    fn new(py: Python<'_>, image: &NativeImage, socket: PathBuf) -> PyResult<NativeServer> {
        let image = image.handle.begin(Kind::Server)?;
        let served = Arc::clone(&image);
        let serving = py.detach(|| Serving::start(served, &socket));
        Ok(NativeServer {
            process: std::process::id(),
            inner: Mutex::new(Some((serving.map_err(to_python)?, image))),
        })
    }

    /// Clients that are connected now.
    #[getter]
    fn clients(&self) -> PyResult<usize> {
        match self.process == std::process::id() {
            true => Ok(self.inner().as_ref().map_or(0, |(one, _)| one.clients())),
            false => Err(of_another_process(self.process)),
        }
    }

    /// Ends requests and connections, and removes the socket.
    fn stop(&self, py: Python<'_>) {
        if self.process == std::process::id() {
            let inner = self.inner().take();
            py.detach(move || drop(inner));
        }
    }
}

impl Drop for NativeServer {
    fn drop(&mut self) {
        let inner = self.inner.get_mut();
        let inner = inner.unwrap_or_else(PoisonError::into_inner).take();
        match self.process == std::process::id() {
            // Python's lock is held where objects are dropped.
            true => Python::attach(|py| py.detach(move || drop(inner))),
            // The thread and the socket are its parent's.
            false => std::mem::forget(inner),
        }
    }
}
