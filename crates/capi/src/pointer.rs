//! Pointers of C as references, strings and boxes; null is an error, not a crash.

use std::ffi::{CStr, c_char};

use cowslip::Error;

/// A reference, or `None` for null.
///
/// # Safety
/// `pointer` is null, or valid for reads for as long as the reference is used.
pub unsafe fn reference<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }
}

/// A reference to something that must be there.
///
/// # Errors
/// It is null.
///
/// # Safety
/// As of [`reference()`].
pub unsafe fn needed<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Error> {
    // SAFETY: the caller's promise.
    let reference = unsafe { pointer.as_ref() };
    reference.ok_or_else(|| Error::Invalid(format!("{name} is NULL")))
}

/// A string.
///
/// # Errors
/// It is null, or not in UTF-8.
///
/// # Safety
/// `pointer` is null or a string that ends with a zero byte and does not change meanwhile.
pub unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str, Error> {
    // SAFETY: the caller's promise.
    let text = unsafe { optional_text(pointer, name) }?;
    text.ok_or_else(|| Error::Invalid(format!("{name} is NULL")))
}

/// A string that may be left out.
///
/// # Errors
/// It is not in UTF-8.
///
/// # Safety
/// As of [`text`].
pub unsafe fn optional_text<'a>(
    pointer: *const c_char,
    name: &str,
) -> Result<Option<&'a str>, Error> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    let text = text.map_err(|_| Error::Invalid(format!("{name} is not in UTF-8")))?;
    Ok(Some(text))
}

/// Functions that return a text of an entry of a list.
macro_rules! texts {
    ($($(#[$doc:meta])+ $function:ident: $owner:ty, $list:ident, $place:tt;)+) => {$(
        $(#[$doc])+
        ///
        /// # Safety
        /// The owner of the list is null, or was not freed.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $function(owner: *const $owner, index: usize) -> *const c_char {
            // SAFETY: the caller's promise.
            let owner = unsafe { pointer::reference(owner) };
            let entry = owner.and_then(|owner| owner.$list.get(index));
            entry.map_or(std::ptr::null(), |entry| entry.$place.as_ptr())
        }
    )+};
}
pub(crate) use texts;

/// Gives a value to the caller.
///
/// # Errors
/// The place for it is null; then the value is dropped.
///
/// # Safety
/// `place` is null or valid for a write.
pub unsafe fn give<T>(place: *mut T, value: T, name: &str) -> Result<(), Error> {
    if place.is_null() {
        return Err(Error::Invalid(format!("{name} is NULL")));
    }
    // SAFETY: the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}

/// Gives a handle to the caller, who has to free it.
///
/// # Errors
/// As of [`give`].
///
/// # Safety
/// As of [`give`].
pub unsafe fn give_handle<T>(place: *mut *mut T, value: T, name: &str) -> Result<(), Error> {
    if place.is_null() {
        return Err(Error::Invalid(format!("{name} is NULL")));
    }
    // SAFETY: the caller's promise.
    unsafe { place.write(Box::into_raw(Box::new(value))) };
    Ok(())
}

/// Takes a handle back; `None` for null.
///
/// # Safety
/// `handle` is null, or was given by [`give_handle`] and not taken back.
pub unsafe fn take<T>(handle: *mut T) -> Option<Box<T>> {
    // SAFETY: the caller's promise.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle) })
}

/// Frees a handle; nothing escapes if that panics.
///
/// # Safety
/// As of [`take`].
pub unsafe fn free<T>(handle: *mut T) {
    // SAFETY: the caller's promise.
    let handle = unsafe { take(handle) };
    crate::error::quiet((), || drop(handle));
}
