//! Errors, in three kinds that are kept apart.
//!
//! The system failed ([`Error::Io`]); the image is damaged ([`Error::Corrupt`]) or needs an
//! unsupported feature ([`Error::Unsupported`]); the caller's request is impossible
//! ([`Error::Invalid`] and others). Mistakes of this program are assertions, not errors.

use std::fmt;
use std::io;

use crate::errno::{EACCES, EAGAIN, EBUSY, ECANCELED, EINVAL, EIO, ENOTSUP, EPERM, words};
use crate::file::{Conflict, ReadAs};

/// A failure of an operation on an image.
#[derive(Debug)]
pub enum Error {
    /// A file operation failed.
    Io {
        /// The attempted operation and the file, such as "Could not read 'a.qcow2'".
        context: String,
        /// The error of the system, with its errno.
        source: io::Error,
    },
    /// The image contradicts the specification or itself. Nothing was changed.
    Corrupt {
        /// The file, as the user named it.
        file: String,
        /// The structure of the format, in the specification's words: "L2 entry".
        structure: &'static str,
        /// The structure's offset in the file, in bytes.
        offset: u64,
        /// The contradiction that was found, in words.
        detail: String,
    },
    /// The image or the request needs something that is not supported.
    Unsupported {
        /// The file, as the user named it.
        file: String,
        /// The feature that is not supported.
        feature: Feature,
    },
    /// An image, or a file that an image names, could not be opened.
    Opening {
        /// The attempted opening.
        what: Opening,
        /// The reason, in words.
        why: String,
        /// The failure that is the reason, if there is one beside the words.
        cause: Option<Box<Error>>,
    },
    /// The request makes no sense: out of range, contradictory options.
    Invalid(String),
    /// A write to an object that was opened read-only.
    ReadOnly(String),
    /// An earlier failure of a metadata write or a flush makes further writes unsafe until the
    /// image is reopened (invariant D4).
    Latched(String),
    /// The image names a file that the caller's policy forbids.
    Forbidden(String),
    /// The image is encrypted, and its key or passphrase is missing or wrong.
    Key(String),
    /// Another process uses the file in a way that conflicts with this use.
    Locked(Box<Conflict>),
    /// A write would change a file that the same command reads.
    Overwrites(Box<Overwrite>),
    /// The caller has cancelled the job; its work has been undone.
    Cancelled,
}

/// A feature that is not supported.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Feature {
    /// The image format of this name.
    Format(String),
    /// Incompatible features of a qcow2 image, as its header names them.
    Qcow2(Vec<String>),
    /// Another one, in words.
    Other(String),
}

impl From<String> for Feature {
    fn from(words: String) -> Feature {
        Feature::Other(words)
    }
}

impl From<&str> for Feature {
    fn from(words: &str) -> Feature {
        Feature::Other(words.to_string())
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Feature::Format(name) => write!(f, "image format {name}"),
            Feature::Qcow2(names) => write!(f, "qcow2 feature(s) {}", names.join(", ")),
            Feature::Other(words) => f.write_str(words),
        }
    }
}

/// An opening that has failed.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Of an image or a file, under the name that the user gave.
    Named(String),
    /// Of the backing file that an image names.
    Backing,
}

impl fmt::Display for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Opening::Named(name) => write!(f, "Could not open '{name}'"),
            Opening::Backing => f.write_str("Could not open backing file"),
        }
    }
}

/// A write that would change a file that is read.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overwrite {
    /// The file that would be written, as the user named it.
    pub file: String,
    /// The file that is read, as the user named it.
    pub read: String,
    /// The use of the file that is read.
    pub read_as: ReadAs,
}

impl fmt::Display for Overwrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Overwrite {
            file,
            read,
            read_as,
        } = self;
        let read_as = read_as.name();
        match file == read {
            true => write!(
                f,
                "'{file}' must not be overwritten: it is read as {read_as}"
            ),
            false => write!(
                f,
                "'{file}' must not be overwritten: it stores '{read}', which is read as {read_as}"
            ),
        }
    }
}

impl Error {
    /// An I/O error with its context.
    pub fn io(context: impl Into<String>, source: io::Error) -> Error {
        Error::Io {
            context: context.into(),
            source,
        }
    }

    /// A request that makes no sense, and why.
    pub fn invalid(why: impl Into<String>) -> Error {
        Error::Invalid(why.into())
    }

    /// A failure to open the image of this name.
    #[doc(hidden)]
    pub fn opening(name: &str, why: impl Into<String>) -> Error {
        Error::Opening {
            what: Opening::Named(name.to_string()),
            why: why.into(),
            cause: None,
        }
    }

    /// The nearest `errno`, for protocols and for messages in the C library's wording.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Io { source, .. } => source.raw_os_error().unwrap_or(EIO),
            Error::Corrupt { .. } | Error::Latched(_) => EIO,
            Error::Unsupported { .. } => ENOTSUP,
            Error::Opening {
                cause: Some(cause), ..
            } => cause.errno(),
            Error::Invalid(_) | Error::Opening { cause: None, .. } => EINVAL,
            Error::Key(_) => EPERM,
            Error::ReadOnly(_) => EACCES,
            Error::Forbidden(_) => EACCES,
            Error::Locked(_) => EAGAIN,
            Error::Overwrites(_) => EBUSY,
            Error::Cancelled => ECANCELED,
        }
    }

    /// The system's message for [`Error::errno`], without Rust's "(os error N)".
    pub fn system_words(&self) -> String {
        system_words(&io::Error::from_raw_os_error(self.errno()))
    }

    /// A copy, for other requests that fail for the same reason.
    pub fn duplicate(&self) -> Error {
        match self {
            Error::Io { context, source } => Error::Io {
                context: context.clone(),
                source: source.raw_os_error().map_or_else(
                    || io::Error::other(source.to_string()),
                    io::Error::from_raw_os_error,
                ),
            },
            Error::Corrupt {
                file,
                structure,
                offset,
                detail,
            } => Error::Corrupt {
                file: file.clone(),
                structure,
                offset: *offset,
                detail: detail.clone(),
            },
            Error::Unsupported { file, feature } => Error::Unsupported {
                file: file.clone(),
                feature: feature.clone(),
            },
            Error::Opening { what, why, cause } => Error::Opening {
                what: what.clone(),
                why: why.clone(),
                cause: cause.as_ref().map(|cause| Box::new(cause.duplicate())),
            },
            Error::Invalid(what) => Error::Invalid(what.clone()),
            Error::Key(what) => Error::Key(what.clone()),
            Error::ReadOnly(what) => Error::ReadOnly(what.clone()),
            Error::Latched(what) => Error::Latched(what.clone()),
            Error::Forbidden(what) => Error::Forbidden(what.clone()),
            Error::Locked(conflict) => Error::Locked(conflict.clone()),
            Error::Overwrites(overwrite) => Error::Overwrites(overwrite.clone()),
            Error::Cancelled => Error::Cancelled,
        }
    }
}

/// An I/O error in the GNU C library's wording, "No such file or directory", in programs that are
/// linked with another library too.
#[doc(hidden)]
pub fn system_words(error: &io::Error) -> String {
    if let Some(words) = error.raw_os_error().and_then(words::of) {
        return words.to_string();
    }
    let text = error.to_string();
    match text.find(" (os error ") {
        Some(end) => text[..end].to_string(),
        None => text,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { context, source } => write!(f, "{context}: {}", system_words(source)),
            Error::Corrupt {
                file,
                structure,
                offset,
                detail,
            } => {
                write!(
                    f,
                    "'{file}' is corrupt: {structure} at offset {offset:#x}: {detail}"
                )
            }
            Error::Unsupported { file, feature } => {
                write!(f, "'{file}': {feature} is not supported")
            }
            Error::Opening { what, why, .. } => write!(f, "{what}: {why}"),
            Error::Invalid(what) | Error::Key(what) | Error::Forbidden(what) => f.write_str(what),
            Error::ReadOnly(what) => write!(f, "'{what}' is read-only"),
            Error::Locked(conflict) => conflict.fmt(f),
            Error::Overwrites(overwrite) => overwrite.fmt(f),
            Error::Cancelled => f.write_str("cancelled"),
            Error::Latched(what) => write!(
                f,
                "'{what}' takes no more writes after an earlier failure; reopen it to recover"
            ),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// For code that speaks of files: the kind is that of the nearest `errno`, and the error is inside.
impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        io::Error::new(io::Error::from_raw_os_error(error.errno()).kind(), error)
    }
}

/// The result of an operation on an image.
pub type Result<T> = std::result::Result<T, Error>;
