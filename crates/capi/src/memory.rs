//! Memory of C as scatter lists.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use cowslip::{Error, IoVec, IoVecMut};

use crate::pointer;

/// A piece of memory; `struct iovec` of `<sys/uio.h>`.
#[allow(non_camel_case_types)] // It has no name of its own in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cowslip_iovec {
    /// Its first byte.
    pub start: *mut c_void,
    /// Its length in bytes.
    pub len: usize,
}

/// The pieces of a request.
///
/// # Errors
/// A piece is null and not empty, or their bytes are more than fit.
///
/// # Safety
/// `pieces` is null or `count` of them, which are memory as [`list_to_write`] has it.
unsafe fn pieces<'a>(
    pieces: *const cowslip_iovec,
    count: usize,
) -> Result<&'a [cowslip_iovec], Error> {
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller's promise.
    unsafe { pointer::needed(pieces, "iov") }?;
    // SAFETY: the caller's promise; it is not null.
    let pieces = unsafe { std::slice::from_raw_parts(pieces, count) };
    let mut total = 0usize;
    for piece in pieces {
        if piece.start.is_null() && piece.len > 0 {
            return Err(Error::Invalid("a piece of memory is NULL".to_string()));
        }
        let sum = total.checked_add(piece.len);
        total = sum
            .filter(|sum| isize::try_from(*sum).is_ok())
            .ok_or_else(|| {
                Error::Invalid("the pieces of memory are too long together".to_string())
            })?;
    }
    Ok(pieces)
}

fn nobody() -> Arc<dyn Any + Send + Sync> {
    // C keeps the memory until the request has completed, so nothing has to be held.
    Arc::new(())
}

/// Memory to be written to the disk.
///
/// # Errors
/// As of [`pieces`].
///
/// # Safety
/// The pieces stay as they are until the request has completed: mapped, and changed by atomic
/// operations or other processes at most.
pub unsafe fn list_to_write(iov: *const cowslip_iovec, count: usize) -> Result<IoVec, Error> {
    let mut list = IoVec::default();
    // SAFETY: the caller's promise.
    for piece in unsafe { pieces(iov, count) }? {
        if let (Some(start), 1..) = (NonNull::new(piece.start.cast()), piece.len) {
            // SAFETY: mapped until the request has completed. A page has whole words, so that those
            // at the ends are mapped too; the engine reads them alone.
            list.append(unsafe { IoVec::foreign(start, piece.len, nobody()) });
        }
    }
    Ok(list)
}

/// Memory to be filled from the disk.
///
/// # Errors
/// As of [`pieces`].
///
/// # Safety
/// As of [`list_to_write`]; the pieces are writable, and nothing else reads or writes them.
pub unsafe fn list_to_fill(iov: *const cowslip_iovec, count: usize) -> Result<IoVecMut, Error> {
    let mut list = IoVecMut::default();
    // SAFETY: the caller's promise.
    for piece in unsafe { pieces(iov, count) }? {
        if let (Some(start), 1..) = (NonNull::new(piece.start.cast()), piece.len) {
            // SAFETY: as of a list to write. Words at the ends that are of others in part are
            // changed by compare and exchange, which keeps what is theirs.
            list.append(unsafe { IoVecMut::foreign(start, piece.len, nobody()) });
        }
    }
    Ok(list)
}
