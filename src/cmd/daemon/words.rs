//! Errors of the daemon in words: for clients, and for the command line.

use std::fmt::Display;

use cowslip_qmp::QmpError;

use crate::error::CommandError;

/// An error of the engine, or of the program, for a client. What follows its first line is advice
/// for people.
pub fn failed(error: impl Display) -> QmpError {
    QmpError::generic(error.to_string().lines().next().unwrap_or_default())
}

/// The reason why an image cannot be opened: as in QEMU's daemon, without the attempt before it.
pub fn not_opened(error: impl Into<cowslip::Error>) -> QmpError {
    failed(CommandError::from(error.into()).reason_not_to_open())
}

/// A refusal.
pub fn refused(text: &str) -> QmpError {
    QmpError::generic(text)
}

/// The refusal of a call without an argument.
pub fn missing(name: &str) -> QmpError {
    QmpError::generic(format!("Parameter '{name}' is missing"))
}

/// An error for the command line.
pub fn complaint(error: &QmpError) -> CommandError {
    CommandError::new(error.desc.clone())
}
