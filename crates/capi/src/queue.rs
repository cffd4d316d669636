//! Requests that are submitted and completed.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use cowslip::Error;
use cowslip::image::{Durability, Space, ZeroOptions};
use cowslip::requests::{Operation, Request};
use cowslip_embed::Submitter;

use crate::constants::{DISCARD, FLUSH, FUA, MAY_UNMAP, READ, WRITE, ZERO};
use crate::error::{cowslip_error, guarded, quiet};
use crate::image::cowslip_image;
use crate::io::check_flags;
use crate::memory::{self, cowslip_iovec};
use crate::pointer;

/// A queue of requests; C knows its address alone.
#[allow(non_camel_case_types)] // Its name in C.
#[derive(Debug)]
pub struct cowslip_queue {
    submitter: Submitter,
}

/// A request; see the header.
#[allow(non_camel_case_types)] // Its name in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cowslip_request {
    /// `COWSLIP_READ` and others.
    pub operation: u32,
    /// `COWSLIP_FUA`, `COWSLIP_MAY_UNMAP`.
    pub flags: u32,
    /// Offset on the disk, in bytes.
    pub offset: u64,
    /// Bytes of a discard or of zeroes.
    pub length: u64,
    /// Memory of a read or a write.
    pub iov: *const cowslip_iovec,
    /// Number of its pieces.
    pub iov_count: usize,
    /// The caller's name for it.
    pub cookie: u64,
}

impl cowslip_request {
    /// The request, with its memory.
    ///
    /// # Errors
    /// No such operation, flags that it does not have, memory that cannot be.
    ///
    /// # Safety
    /// The memory is as the header has it, until the request has completed.
    pub(crate) unsafe fn to_request(self) -> Result<Request, Error> {
        let durability = Durability::of_fua(self.flags & FUA != 0);
        let (offset, len) = (self.offset, self.length);
        let operation = match self.operation {
            READ => {
                check_flags(self.flags, 0)?;
                // SAFETY: the caller's promise.
                let target = unsafe { memory::list_to_fill(self.iov, self.iov_count) }?;
                Operation::read(offset, target)
            }
            WRITE => {
                check_flags(self.flags, FUA)?;
                // SAFETY: the caller's promise.
                let data = unsafe { memory::list_to_write(self.iov, self.iov_count) }?;
                Operation::write(offset, data, durability)
            }
            FLUSH => {
                check_flags(self.flags, 0)?;
                Operation::Flush
            }
            DISCARD => {
                check_flags(self.flags, 0)?;
                Operation::Discard { offset, len }
            }
            ZERO => {
                check_flags(self.flags, FUA | MAY_UNMAP)?;
                let options = ZeroOptions {
                    space: Space::of_unmap(self.flags & MAY_UNMAP != 0),
                    durability,
                    fast_only: false,
                };
                Operation::Zero {
                    offset,
                    len,
                    options,
                }
            }
            other => return Err(Error::Invalid(format!("no operation {other}"))),
        };
        Ok(Request::new(self.cookie, operation))
    }
}

/// A request that has ended; see the header.
#[allow(non_camel_case_types)] // Its name in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cowslip_completion {
    /// The caller's name for it.
    pub cookie: u64,
    /// 0 or a negative errno.
    pub result: c_int,
    /// Zero.
    pub reserved: u32,
}

/// Makes a queue for an image.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_queue_new(
    image: *const cowslip_image,
    queue: *mut *mut cowslip_queue,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let image = unsafe { pointer::needed(image, "image") }?;
        let submitter = Submitter::new(Arc::clone(&image.image))?;
        // SAFETY: the caller's promise.
        unsafe { pointer::give_handle(queue, cowslip_queue { submitter }, "queue") }
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// The eventfd that is readable when there may be completions; -1 for null.
///
/// # Safety
/// `queue` is null or a queue that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_queue_fd(queue: *const cowslip_queue) -> c_int {
    // SAFETY: the caller's promise.
    let queue = unsafe { pointer::reference(queue) };
    queue.map_or(-1, |queue| queue.submitter.as_fd().as_raw_fd())
}

/// Submits requests: all, or after an error none.
///
/// # Safety
/// Pointers are null or as the header has them; the memory of requests is, until they complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_queue_submit(
    queue: *const cowslip_queue,
    requests: *const cowslip_request,
    count: usize,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let queue = unsafe { pointer::needed(queue, "queue") }?;
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { pointer::needed(requests, "requests") }?;
        // SAFETY: the caller's promise; it is not null.
        let requests = unsafe { std::slice::from_raw_parts(requests, count) };
        // SAFETY: the caller's promise.
        let requests = requests
            .iter()
            .map(|request| unsafe { request.to_request() });
        let requests: Vec<Request> = requests.collect::<Result<_, _>>()?;
        queue.submitter.submit(requests);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Takes completions, `max` at most; their number.
///
/// # Safety
/// `queue` is null or a queue that was not freed, `completions` valid for `max` writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_queue_complete(
    queue: *const cowslip_queue,
    completions: *mut cowslip_completion,
    max: usize,
) -> usize {
    // SAFETY: the caller's promise.
    let queue = unsafe { pointer::reference(queue) };
    let (Some(queue), false) = (queue, completions.is_null()) else {
        return 0;
    };
    let taken = quiet(Vec::new(), || queue.submitter.complete(max));
    for (index, completion) in taken.iter().enumerate() {
        let value = cowslip_completion {
            cookie: completion.token,
            result: match &completion.result {
                Ok(()) => 0,
                Err(error) => -error.errno(),
            },
            reserved: 0,
        };
        // SAFETY: fewer than `max` were taken before it, and the caller's promise.
        unsafe { completions.add(index).write(value) };
    }
    taken.len()
}

/// Waits until no request is under way, and frees the queue.
///
/// # Safety
/// `queue` is null or a queue that was not freed; it is freed now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_queue_free(queue: *mut cowslip_queue) {
    // SAFETY: the caller's promise.
    unsafe { pointer::free(queue) };
}
