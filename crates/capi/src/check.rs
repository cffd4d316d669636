//! Operations on whole images: check and convert.

use std::ffi::{c_char, c_int};

use cowslip_embed::{ConvertOptions, block_on};

use crate::constants::{CONVERT_COMPRESSED, CONVERT_TARGET_IS_ZERO};
use crate::description::{self, cowslip_open_options};
use crate::error::{cowslip_error, guarded};
use crate::image::cowslip_image;
use crate::io::check_flags;
use crate::job::{cowslip_job, job_of};
use crate::pointer;

/// Findings of a check, by their number.
#[allow(non_camel_case_types)] // Its name in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cowslip_check_result {
    /// Findings that lose data, or may.
    pub corruptions: u64,
    /// Clusters that are counted, and not used.
    pub leaks: u64,
    /// Structures that could not be checked.
    pub errors: u64,
    /// Clusters of the disk that have space.
    pub allocated_clusters: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
}

/// Checks the structures of an image; changes nothing.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_check(
    name: *const c_char,
    options: *const cowslip_open_options,
    job: *const cowslip_job,
    result: *mut cowslip_check_result,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let name = unsafe { pointer::text(name, "name") }?;
        // SAFETY: the caller's promise.
        let request = unsafe { description::open_request(options) }?;
        // SAFETY: the caller's promise.
        let job = unsafe { job_of(job) };
        let mut unnamed = |_: &_| {};
        let checked = cowslip_embed::check(name, &request, (&mut unnamed, &job));
        let checked = block_on(checked)?;
        let value = cowslip_check_result {
            corruptions: checked.corruptions,
            leaks: checked.leaks,
            errors: checked.check_errors,
            allocated_clusters: checked.allocated_clusters,
            total_clusters: checked.total_clusters,
        };
        // SAFETY: the caller's promise.
        unsafe { pointer::give(result, value, "result") }
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Copies a disk to another.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_convert(
    source: *const cowslip_image,
    target: *const cowslip_image,
    flags: u32,
    job: *const cowslip_job,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        check_flags(flags, CONVERT_COMPRESSED | CONVERT_TARGET_IS_ZERO)?;
        // SAFETY: the caller's promise.
        let source = unsafe { pointer::needed(source, "source") }?;
        // SAFETY: the caller's promise.
        let target = unsafe { pointer::needed(target, "target") }?;
        // SAFETY: the caller's promise.
        let job = unsafe { job_of(job) };
        let options = ConvertOptions {
            compressed: flags & CONVERT_COMPRESSED != 0,
            target_is_zero: flags & CONVERT_TARGET_IS_ZERO != 0,
        };
        let images = (&*source.image, &*target.image);
        block_on(cowslip_embed::convert(images, options, &job)).map(drop)
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}
