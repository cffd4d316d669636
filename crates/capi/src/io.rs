//! Blocking requests, and what is where.

use std::ffi::{c_int, c_void};

use cowslip::image::{Durability, Space, ZeroOptions};
use cowslip::{Error, Image};
use cowslip_embed::block_on;

use crate::constants::{
    EXTENT_COMPRESSED, EXTENT_DATA, EXTENT_MAPPED, EXTENT_PRESENT, EXTENT_ZERO, FUA, MAY_UNMAP,
};
use crate::error::{cowslip_error, guarded};
use crate::image::cowslip_image;
use crate::memory::{self, cowslip_iovec};
use crate::pointer;
use crate::queue::cowslip_request;

/// Whether flags are of those.
pub(crate) fn check_flags(flags: u32, known: u32) -> Result<(), Error> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Error::Invalid(format!("unknown flags {unknown:#x}"))),
    }
}

/// # Safety
/// Pointers are null or as the header has them.
unsafe fn of<'a>(image: *const cowslip_image) -> Result<&'a Image, Error> {
    // SAFETY: the caller's promise.
    let image = unsafe { pointer::needed(image, "image") }?;
    Ok(&image.image)
}

/// Reads.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_read(
    image: *const cowslip_image,
    offset: u64,
    buffer: *mut c_void,
    length: usize,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        let piece = cowslip_iovec {
            start: buffer,
            len: length,
        };
        // SAFETY: the caller's promise; the call returns when the request has completed.
        let (image, target) = unsafe { (of(image)?, memory::list_to_fill(&raw const piece, 1)?) };
        block_on(image.read(offset, target)).map(drop)
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Writes.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_write(
    image: *const cowslip_image,
    offset: u64,
    buffer: *const c_void,
    length: usize,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        let piece = cowslip_iovec {
            start: buffer.cast_mut(),
            len: length,
        };
        // SAFETY: the caller's promise; the call returns when the request has completed.
        let (image, data) = unsafe { (of(image)?, memory::list_to_write(&raw const piece, 1)?) };
        block_on(image.write(offset, data, Durability::Cached))
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Carries out a request as a queue would, and waits for it.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_request_run(
    image: *const cowslip_image,
    request: *const cowslip_request,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let (image, request) = unsafe { (of(image)?, pointer::needed(request, "request")?) };
        // SAFETY: the caller's promise; the call returns when the request has completed.
        let request = unsafe { request.to_request() }?;
        block_on(async { request.run(image).await.result })
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Makes all requests durable that had completed.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_flush(
    image: *const cowslip_image,
    error: *mut *mut cowslip_error,
) -> c_int {
    // SAFETY: the caller's promise.
    let work = || block_on(unsafe { of(image) }?.flush());
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Gives up a range.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_discard(
    image: *const cowslip_image,
    offset: u64,
    length: u64,
    error: *mut *mut cowslip_error,
) -> c_int {
    // SAFETY: the caller's promise.
    let work = || block_on(unsafe { of(image) }?.discard(offset, length));
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Makes a range read as zeroes.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_write_zeroes(
    image: *const cowslip_image,
    offset: u64,
    length: u64,
    flags: u32,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        check_flags(flags, FUA | MAY_UNMAP)?;
        let options = ZeroOptions {
            space: Space::of_unmap(flags & MAY_UNMAP != 0),
            durability: Durability::of_fua(flags & FUA != 0),
            fast_only: false,
        };
        // SAFETY: the caller's promise.
        block_on(unsafe { of(image) }?.write_zeroes(offset, length, options))
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// A run of the disk with one state; see the header.
#[allow(non_camel_case_types)] // Its name in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cowslip_extent {
    /// First byte on the disk.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Offset in the layer's file, if it is mapped.
    pub host_offset: u64,
    /// `COWSLIP_EXTENT_…`.
    pub flags: u32,
    /// Layer that has it; 0 is the image itself.
    pub depth: u32,
}

/// The run that begins at `offset`, to the end of the disk at most.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_next_extent(
    image: *const cowslip_image,
    offset: u64,
    extent: *mut cowslip_extent,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let image = unsafe { of(image) }?;
        let len = image.size().saturating_sub(offset);
        let found = match len {
            0 => Vec::new(),
            len => block_on(image.extents(offset, len, 1))?,
        };
        let found = found
            .first()
            .ok_or_else(|| Error::Invalid(format!("the disk has no byte at offset {offset}")))?;
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let value = cowslip_extent {
            start: found.start,
            length: found.len,
            host_offset: found.host_offset.unwrap_or_default(),
            flags: flag(found.data, EXTENT_DATA)
                | flag(found.zero, EXTENT_ZERO)
                | flag(found.present, EXTENT_PRESENT)
                | flag(found.compressed, EXTENT_COMPRESSED)
                | flag(found.host_offset.is_some(), EXTENT_MAPPED),
            depth: found.depth,
        };
        // SAFETY: the caller's promise.
        unsafe { pointer::give(extent, value, "extent") }
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}
