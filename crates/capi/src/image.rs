//! Images: making, opening, what they are, closing.

use std::ffi::{CString, c_char, c_int};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use cowslip::{Error, Image, Result};
use cowslip_embed::{OpenRequest, block_on};

use crate::description::{self, cowslip_create_options, cowslip_open_options};
use crate::error::{cowslip_error, guarded, quiet};
use crate::job::{cowslip_job, job_of};
use crate::pointer::{self, texts};

/// An open image; C knows its address alone.
#[allow(non_camel_case_types)] // Its name in C.
#[derive(Debug)]
pub struct cowslip_image {
    pub(crate) image: Arc<Image>,
    /// Names and formats of its layers when it was opened, its own first.
    layers: Vec<(CString, CString)>,
}

impl cowslip_image {
    fn new(image: Image) -> cowslip_image {
        let text = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
        let layers = image.layers();
        let layers = layers.iter();
        let layers = layers.map(|layer| (text(&layer.name), text(layer.format.name())));
        cowslip_image {
            layers: layers.collect(),
            image: Arc::new(image),
        }
    }
}

/// The version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn cowslip_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Opens the image of this name in a way, as described.
///
/// # Safety
/// Pointers are null or as the header has them.
unsafe fn open_by(
    (name, options): (*const c_char, *const cowslip_open_options),
    image: *mut *mut cowslip_image,
    error: *mut *mut cowslip_error,
    open: impl FnOnce(&str, &OpenRequest) -> Result<Image>,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let name = unsafe { pointer::text(name, "name") }?;
        // SAFETY: the caller's promise.
        let request = unsafe { description::open_request(options) }?;
        let opened = open(name, &request)?;
        // SAFETY: the caller's promise.
        unsafe { pointer::give_handle(image, cowslip_image::new(opened), "image") }
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Opens the image of a name.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_open(
    name: *const c_char,
    options: *const cowslip_open_options,
    image: *mut *mut cowslip_image,
    error: *mut *mut cowslip_error,
) -> c_int {
    let open = |name: &str, request: &OpenRequest| block_on(cowslip_embed::open(name, request));
    // SAFETY: the caller's promise.
    unsafe { open_by((name, options), image, error, open) }
}

/// Opens the image in an open file, whose descriptor is duplicated.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_open_fd(
    fd: c_int,
    name: *const c_char,
    options: *const cowslip_open_options,
    image: *mut *mut cowslip_image,
    error: *mut *mut cowslip_error,
) -> c_int {
    let open = |name: &str, request: &OpenRequest| {
        let failed = |error| Error::io(format!("Could not open '{name}'"), error);
        if fd < 0 {
            return Err(Error::Invalid("fd is negative".to_string()));
        }
        // SAFETY: the header demands an open descriptor; a duplicate is made at once.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
        block_on(cowslip_embed::open_file(fd.map_err(failed)?, name, request))
    };
    // SAFETY: the caller's promise.
    unsafe { open_by((name, options), image, error, open) }
}

/// Makes an image.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_create(
    name: *const c_char,
    options: *const cowslip_create_options,
    job: *const cowslip_job,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let name = unsafe { pointer::text(name, "name") }?;
        // SAFETY: the caller's promise.
        let image = unsafe { description::new_image(options) }?;
        // SAFETY: the caller's promise.
        let job = unsafe { job_of(job) };
        block_on(cowslip_embed::create(name, &image, &job))
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Flushes, closes and frees an image, whatever the outcome.
///
/// # Safety
/// `image` is null or an open image that no call uses; it is freed now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_close(
    image: *mut cowslip_image,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        match unsafe { pointer::take(image) } {
            Some(image) => block_on(cowslip_embed::close(&image.image)),
            None => Ok(()),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Bytes of the disk; 0 for null.
///
/// # Safety
/// `image` is null or an open image.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_size(image: *const cowslip_image) -> u64 {
    // SAFETY: the caller's promise.
    let image = unsafe { pointer::reference(image) };
    quiet(0, || image.map_or(0, |image| image.image.size()))
}

/// The unit of allocation in bytes; 0 for null.
///
/// # Safety
/// `image` is null or an open image.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_block_size(image: *const cowslip_image) -> u64 {
    // SAFETY: the caller's promise.
    let image = unsafe { pointer::reference(image) };
    quiet(0, || {
        image.map_or(0, |image| image.image.preferred_block_bytes())
    })
}

/// Whether it may be written; 0 or 1.
///
/// # Safety
/// `image` is null or an open image.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_is_writable(image: *const cowslip_image) -> c_int {
    // SAFETY: the caller's promise.
    let image = unsafe { pointer::reference(image) };
    quiet(0, || {
        image.map_or(0, |image| c_int::from(image.image.is_writable()))
    })
}

/// Number of images of the chain; the image itself is one.
///
/// # Safety
/// `image` is null or an open image.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_layer_count(image: *const cowslip_image) -> usize {
    // SAFETY: the caller's promise.
    unsafe { pointer::reference(image) }.map_or(0, |image| image.layers.len())
}

texts! {
    /// Name of a layer's file until the image is closed; null if there is no such layer.
    cowslip_layer_name: cowslip_image, layers, 0;
    /// Format of a layer until the image is closed; null if there is no such layer.
    cowslip_layer_format: cowslip_image, layers, 1;
}

/// Gives the disk another size; a smaller one is refused.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_resize(
    image: *const cowslip_image,
    size: u64,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        // SAFETY: the caller's promise.
        let image = unsafe { pointer::needed(image, "image") }?;
        if size < image.image.size() {
            let words = "a disk is made smaller by the command alone, as it loses data";
            return Err(Error::Invalid(words.to_string()));
        }
        block_on(image.image.resize(size))
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}
