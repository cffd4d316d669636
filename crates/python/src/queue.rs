//! Requests of an event loop: submitted without waiting, completed when the loop sees the queue's
//! descriptor readable.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cowslip::requests::{Completion, Operation, Request, RequestQueue};
use cowslip::{BufMut, Disk, Error};
use cowslip_queue::{Backend, PreparedQueue};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::handle::{Kind, Use};
use crate::image::{NativeImage, durability, within, zero_options};
use crate::memory::Hold;
use crate::{error, memory};

/// A read of more bytes into memory of its own is refused: the loop's thread makes it.
const READ_BYTES_MAX: usize = 64 << 20;

/// The queue of one thread's event loop, for any number of images.
#[pyclass(frozen, name = "Queue", module = "cowslip._cowslip")]
pub struct NativeQueue {
    /// The process that has made it.
    process: u32,
    fileno: i32,
    /// Held with Python's lock alone, and never for long.
    inner: Mutex<Option<Inner>>,
}

struct Inner {
    queue: RequestQueue,
    next: u64,
    /// The images of requests in flight.
    uses: HashMap<u64, Flight>,
    /// Kept between calls, for its memory.
    batch: Vec<Completion>,
}

/// A request that goes on.
struct Flight {
    _image: Use,
    _hold: Option<Hold>,
    returns: Returns,
}

/// Result of a request that has succeeded.
enum Returns {
    Nothing,
    Count(usize),
    Bytes,
}

/// A token, the value of its request, and the exception that it has failed with.
type Done<'py> = (u64, Bound<'py, PyAny>, Option<PyErr>);

impl NativeQueue {
    fn inner(&self) -> PyResult<MutexGuard<'_, Option<Inner>>> {
        match self.process == std::process::id() {
            true => Ok(self.inner.lock().unwrap_or_else(PoisonError::into_inner)),
            false => Err(error::of_another_process(self.process)),
        }
    }

    /// Takes what has completed, with what was kept for it.
    fn take_completed(&self) -> PyResult<Vec<(Completion, Option<Flight>)>> {
        let mut inner = self.inner()?;
        let Some(inner) = inner.as_mut() else {
            return Ok(Vec::new());
        };
        let Inner {
            queue, uses, batch, ..
        } = inner;
        queue.complete(batch)?;
        let with_flight = |completion: Completion| {
            let flight = uses.remove(&completion.token);
            (completion, flight)
        };
        Ok(batch.drain(..).map(with_flight).collect())
    }

    fn submit(
        &self,
        image: &NativeImage,
        operation: impl FnOnce(&Use) -> PyResult<Operation>,
        (returns, hold): (Returns, Option<Hold>),
    ) -> PyResult<u64> {
        let image = image.handle.begin(Kind::Request)?;
        let operation = operation(&image)?;
        let disk: Arc<dyn Disk> = Arc::clone(&image) as _;
        let mut inner = self.inner()?;
        let inner = inner.as_mut().ok_or_else(error::closed)?;
        let token = inner.next;
        inner.next += 1;
        let request = Request::new(token, operation);
        inner.queue.submit(&disk, [request]).map_err(PyErr::from)?;
        let flight = Flight {
            _image: image,
            _hold: hold,
            returns,
        };
        inner.uses.insert(token, flight);
        Ok(token)
    }
}

#[pymethods]
impl NativeQueue {
    #[new]
    fn new() -> PyResult<NativeQueue> {
        // Where there is no ring, threads make the calls that block: a loop must not.
        let prepared = PreparedQueue::new(Backend::Auto)?;
        let queue = RequestQueue::with(prepared)?;
        Ok(NativeQueue {
            process: std::process::id(),
            fileno: queue.as_fd().as_raw_fd(),
            inner: Mutex::new(Some(Inner {
                queue,
                next: 1,
                uses: HashMap::new(),
                batch: Vec::new(),
            })),
        })
    }

    /// The descriptor that is readable when `complete` is to be called.
    fn fileno(&self) -> i32 {
        self.fileno
    }

    /// Requests that have not completed.
    #[getter]
    fn in_flight(&self) -> PyResult<usize> {
        Ok(self.inner()?.as_ref().map_or(0, |inner| inner.uses.len()))
    }

    fn pread(&self, image: &NativeImage, length: usize, offset: u64) -> PyResult<u64> {
        let operation = |image: &Use| {
            within(image, offset, length as u64)?;
            if length > READ_BYTES_MAX {
                return Err(error::to_python(Error::Invalid(format!(
                    "a read of {length} bytes goes into a buffer of the caller's; \
                     without one, {READ_BYTES_MAX} are the most"
                ))));
            }
            Ok(Operation::read(offset, BufMut::for_overwrite(length)))
        };
        self.submit(image, operation, (Returns::Bytes, None))
    }

    fn pread_into(
        &self,
        image: &NativeImage,
        buffer: &Bound<'_, PyAny>,
        offset: u64,
    ) -> PyResult<u64> {
        let (target, hold) = memory::to_fill(buffer)?;
        let count = Returns::Count(target.len());
        let operation = |image: &Use| {
            within(image, offset, target.len() as u64)?;
            Ok(Operation::read(offset, target))
        };
        self.submit(image, operation, (count, Some(hold)))
    }

    fn pwrite(
        &self,
        image: &NativeImage,
        data: &Bound<'_, PyAny>,
        offset: u64,
        fua: bool,
    ) -> PyResult<u64> {
        let (data, hold) = memory::to_write(data)?;
        let count = Returns::Count(data.len());
        let operation = |image: &Use| {
            within(image, offset, data.len() as u64)?;
            Ok(Operation::write(offset, data, durability(fua)))
        };
        self.submit(image, operation, (count, Some(hold)))
    }

    fn flush(&self, image: &NativeImage) -> PyResult<u64> {
        self.submit(image, |_| Ok(Operation::Flush), (Returns::Nothing, None))
    }

    fn discard(&self, image: &NativeImage, length: u64, offset: u64) -> PyResult<u64> {
        let operation = Operation::Discard {
            offset,
            len: length,
        };
        let within = |image: &Use| within(image, offset, length).map(|()| operation);
        self.submit(image, within, (Returns::Nothing, None))
    }

    fn zero(
        &self,
        image: &NativeImage,
        length: u64,
        offset: u64,
        flags: (bool, bool),
    ) -> PyResult<u64> {
        let operation = Operation::Zero {
            offset,
            len: length,
            options: zero_options(flags.0, flags.1),
        };
        let within = |image: &Use| within(image, offset, length).map(|()| operation);
        self.submit(image, within, (Returns::Nothing, None))
    }

    /// Takes what has completed.
    fn complete<'py>(&self, py: Python<'py>) -> PyResult<Vec<Done<'py>>> {
        // A buffer whose last hold goes may run code of Python, which may ask this queue: so they
        // go when it is not locked any more.
        let ended = self.take_completed()?;
        let mut done = Vec::with_capacity(ended.len());
        for (completion, flight) in ended {
            let token = completion.token;
            let returns = flight
                .as_ref()
                .map_or(&Returns::Nothing, |flight| &flight.returns);
            done.push(match value(py, completion, returns) {
                Ok(value) => (token, value, None),
                Err(raised) => (token, py.None().into_bound(py), Some(raised)),
            });
        }
        Ok(done)
    }

    /// Gives up a read; other requests go on. Returns whether it was given up.
    fn cancel(&self, token: u64) -> PyResult<bool> {
        match self.inner()?.as_mut() {
            Some(inner) => Ok(inner.queue.cancel(token)?),
            None => Ok(false),
        }
    }

    /// Gives up reads, waits for what changes disks, and ends the queue.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner()?.take();
        let moved = Moved(inner);
        py.detach(move || drop(moved));
        Ok(())
    }
}

/// A queue on its way out: waiting for its requests, other threads may need Python's lock.
struct Moved(#[allow(dead_code)] Option<Inner>); // Dropped, never read.

/// The value of a request.
fn value<'py>(
    py: Python<'py>,
    completion: Completion,
    returns: &Returns,
) -> PyResult<Bound<'py, PyAny>> {
    if let Err(failed) = completion.result {
        return Err(error::exception(py, &failed));
    }
    match (returns, completion.target) {
        (Returns::Bytes, Some(target)) => {
            let buf = BufMut::from(target);
            let bytes = PyBytes::new_with(py, buf.len(), |bytes| {
                bytes.copy_from_slice(&buf);
                Ok(())
            });
            Ok(bytes?.into_any())
        }
        (Returns::Count(count), _) => Ok(count.into_pyobject(py)?.into_any()),
        (Returns::Bytes, None) => Err(PyOSError::new_err("a read has lost its memory")),
        (Returns::Nothing, _) => Ok(py.None().into_bound(py)),
    }
}

impl Drop for NativeQueue {
    fn drop(&mut self) {
        let inner = self.inner.get_mut();
        let inner = inner.unwrap_or_else(PoisonError::into_inner).take();
        if self.process != std::process::id() {
            // Its ring is its parent's.
            std::mem::forget(inner);
            return;
        }
        let moved = Moved(inner);
        // Python's lock is held where objects are dropped.
        Python::attach(|py| py.detach(move || drop(moved)));
    }
}
