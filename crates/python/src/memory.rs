//! Memory of Python objects that have the protocol of buffers, as scatter lists: read and written
//! in place, also while other threads run Python.
#![allow(unsafe_code)] // A list has no lifetime: its owner keeps the memory, as stated below.

use std::ptr::NonNull;
use std::sync::Arc;

use cowslip::{IoVec, IoVecMut};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

/// A buffer that an object lends, for the caller of the engine to hold until its request has ended.
/// Releasing it needs Python's lock: if the engine had the last hold on it, it would wait for that
/// lock with one of its own, which a thread with Python's lock may be waiting for.
pub type Hold = Arc<PyUntypedBuffer>;

/// A buffer of an object, of contiguous memory, and where it begins; `None` if it is empty.
struct Exported {
    buffer: Hold,
    start: Option<NonNull<u8>>,
}

impl Exported {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Exported> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the buffer is not contiguous"));
        }
        let start = NonNull::new(buffer.buf_ptr().cast());
        Ok(Exported {
            start: start.filter(|_| buffer.len_bytes() > 0),
            buffer: Arc::new(buffer),
        })
    }
}

/// The memory of an object, to be written to a disk.
///
/// # Errors
/// `TypeError` or `BufferError`: it has no buffer, or one in pieces.
pub fn to_write(object: &Bound<'_, PyAny>) -> PyResult<(IoVec, Hold)> {
    let Exported { buffer, start } = Exported::of(object)?;
    let (len, owner) = (buffer.len_bytes(), Arc::clone(&buffer));
    let list = start.map_or_else(IoVec::default, |start| {
        // SAFETY: an exported buffer stays where it is until it is released, which is when its
        // owner is dropped; pages have whole words, so those at its ends are mapped too. The engine
        // reads words and never takes the memory for a slice: code in Python that changes it
        // meanwhile, outside of Rust, changes what reaches the disk and nothing else.
        unsafe { IoVec::foreign(start, len, owner) }
    });
    Ok((list, buffer))
}

/// The memory of an object, to be filled from a disk.
///
/// # Errors
/// As [`to_write`]; it is read-only.
pub fn to_fill(object: &Bound<'_, PyAny>) -> PyResult<(IoVecMut, Hold)> {
    let Exported { buffer, start } = Exported::of(object)?;
    if buffer.readonly() {
        return Err(PyBufferError::new_err("the buffer is read-only"));
    }
    let (len, owner) = (buffer.len_bytes(), Arc::clone(&buffer));
    let list = start.map_or_else(IoVecMut::default, |start| {
        // SAFETY: as above, and the exporter says that it may be written. Words at the ends that
        // are of others in part are changed by compare and exchange, which keeps what is theirs.
        unsafe { IoVecMut::foreign(start, len, owner) }
    });
    Ok((list, buffer))
}
