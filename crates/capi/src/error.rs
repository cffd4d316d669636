//! Errors as values, and the guard around every function.

use std::any::Any;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use cowslip::Error;

use crate::{constants, pointer};

const EIO: c_int = 5;

/// An error; C knows its address alone.
#[allow(non_camel_case_types)] // Its name in C.
#[derive(Debug)]
pub struct cowslip_error {
    kind: u32,
    errno: c_int,
    message: CString,
}

impl From<Error> for cowslip_error {
    fn from(error: Error) -> cowslip_error {
        let kind = match &error {
            Error::Io { .. } => constants::ERROR_IO,
            Error::Corrupt { .. } => constants::ERROR_CORRUPT,
            Error::Unsupported { .. } => constants::ERROR_UNSUPPORTED,
            Error::Opening { .. } => constants::ERROR_OPENING,
            Error::Invalid(_) => constants::ERROR_INVALID,
            Error::ReadOnly(_) => constants::ERROR_READ_ONLY,
            Error::Latched(_) => constants::ERROR_LATCHED,
            Error::Forbidden(_) => constants::ERROR_FORBIDDEN,
            Error::Key(_) => constants::ERROR_KEY,
            Error::Locked(_) => constants::ERROR_LOCKED,
            Error::Overwrites(_) => constants::ERROR_OVERWRITES,
            Error::Cancelled => constants::ERROR_CANCELLED,
        };
        cowslip_error::new(kind, error.errno(), &error.to_string())
    }
}

impl cowslip_error {
    fn new(kind: u32, errno: c_int, message: &str) -> cowslip_error {
        let message = message.replace('\0', " ");
        cowslip_error {
            kind,
            errno,
            message: CString::new(message).unwrap_or_default(),
        }
    }

    fn of_panic(payload: &(dyn Any + Send)) -> cowslip_error {
        let words = payload.downcast_ref::<&str>().copied();
        let words = words.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let message = format!("cowslip panicked: {}", words.unwrap_or("no words"));
        cowslip_error::new(constants::ERROR_PANIC, EIO, &message)
    }
}

/// Runs the work of a function. Returns 0, or the negative errno of its error, which goes to
/// `error` if the caller wants it.
///
/// # Safety
/// `error` is null or valid for a write.
pub(crate) unsafe fn guarded(
    error: *mut *mut cowslip_error,
    work: impl FnOnce() -> Result<(), Error>,
) -> c_int {
    // What the work has changed is an image, whose requests are whole or not, or our own.
    let outcome = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return 0,
        Ok(Err(failure)) => cowslip_error::from(failure),
        Err(payload) => cowslip_error::of_panic(&*payload),
    };
    let errno = outcome.errno;
    if !error.is_null() {
        // SAFETY: the caller's promise.
        unsafe { error.write(Box::into_raw(Box::new(outcome))) };
    }
    -errno
}

/// Runs work that has a value and no error; `otherwise` if it panics.
pub(crate) fn quiet<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise)
}

/// The kind of an error, one of `COWSLIP_ERROR_…`; 0 for none.
///
/// # Safety
/// `error` is null or an error that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_error_kind(error: *const cowslip_error) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { pointer::reference(error) }.map_or(0, |error| error.kind as c_int)
}

/// The errno of an error, positive; 0 for none.
///
/// # Safety
/// As of [`cowslip_error_kind`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_error_errno(error: *const cowslip_error) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { pointer::reference(error) }.map_or(0, |error| error.errno)
}

/// The words of an error, in English, until it is freed; null for none.
///
/// # Safety
/// As of [`cowslip_error_kind`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_error_message(error: *const cowslip_error) -> *const c_char {
    // SAFETY: the caller's promise.
    let error = unsafe { pointer::reference(error) };
    error.map_or(ptr::null(), |error| error.message.as_ptr())
}

/// Frees an error; does nothing for null.
///
/// # Safety
/// `error` is null or an error that was not freed; it is freed now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_error_free(error: *mut cowslip_error) {
    // SAFETY: the caller's promise.
    unsafe { pointer::free(error) };
}
