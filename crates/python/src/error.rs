//! Errors of the engine as exceptions of the package, which derive from `OSError`.

use cowslip::Error;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// The name of the exception for an error, in `cowslip/_errors.py`.
fn class_name(error: &Error) -> &'static str {
    match error {
        Error::Io { source, .. } => match source.kind() {
            std::io::ErrorKind::NotFound => "NotFoundError",
            std::io::ErrorKind::AlreadyExists => "ExistsError",
            std::io::ErrorKind::PermissionDenied => "DeniedError",
            _ => "Error",
        },
        Error::Corrupt { .. } => "CorruptError",
        Error::Unsupported { .. } => "UnsupportedError",
        Error::Opening {
            cause: Some(cause), ..
        } => class_name(cause),
        Error::Opening { cause: None, .. } => "OpenError",
        Error::Invalid(_) => "InvalidError",
        Error::ReadOnly(_) => "ReadOnlyError",
        Error::Latched(_) => "LatchedError",
        Error::Forbidden(_) => "DeniedError",
        Error::Key(_) => "PassphraseError",
        Error::Locked(_) => "LockedError",
        Error::Overwrites(_) => "OverwriteError",
        Error::Cancelled => "CancelledError",
    }
}

/// The exception of an error.
pub fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let words = match error {
        // The reason names the file itself: once is enough.
        Error::Opening { what, why, .. } if why.starts_with(&what.to_string()) => why.clone(),
        other => other.to_string(),
    };
    let arguments = (error.errno(), words);
    let made = py
        .import("cowslip._errors")
        .and_then(|module| module.getattr(class_name(error)))
        .and_then(|class| class.call1(arguments.clone()));
    match made {
        Ok(value) => PyErr::from_value(value),
        // The interpreter is being taken down, say.
        Err(_) => PyOSError::new_err(arguments),
    }
}

/// The exception of an error, for `map_err`.
#[allow(clippy::needless_pass_by_value)] // As `map_err` has it.
pub fn to_python(error: Error) -> PyErr {
    Python::attach(|py| exception(py, &error))
}

/// The refusal of a call of a closed image, in the words of Python's files.
pub fn closed() -> PyErr {
    PyValueError::new_err("I/O operation on a closed image")
}

/// The refusal of a call in a process that has not opened the image.
pub fn of_another_process(process: u32) -> PyErr {
    PyRuntimeError::new_err(format!(
        "this was opened by process {process}, of which this process is a fork; it opens its own"
    ))
}
