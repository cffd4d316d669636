//! [`CommandError`]: the failure of a verb, as a message for the user and an exit code.

use std::fmt;
use std::path::Path;

use cowslip::Error;
use cowslip::error::Overwrite;

use crate::program::is_called_as_qemu;

/// A message without the program's name, and the exit code of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandError {
    message: String,
    exit_code: u8,
}

impl CommandError {
    /// A failure with exit code 1.
    pub fn new(message: impl Into<String>) -> CommandError {
        CommandError {
            message: message.into(),
            exit_code: 1,
        }
    }

    /// A failure that has already been reported to the user.
    pub fn already_reported() -> CommandError {
        CommandError::new("")
    }

    /// The same with another exit code.
    #[must_use]
    pub fn with_exit_code(mut self, exit_code: u8) -> CommandError {
        self.exit_code = exit_code;
        self
    }

    /// Whether the failure has already been reported to the user.
    pub fn is_already_reported(&self) -> bool {
        self.message.is_empty()
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        self.exit_code
    }
}

/// Refuses to overwrite a file that is also read. Under the names of QEMU's programs the message is
/// the one of QEMU's file locks, which detect the same conflict there.
pub fn overwrite_words(overwrite: &Overwrite) -> String {
    match is_called_as_qemu() {
        true => format!(
            "Failed to get \"write\" lock\nIs another process using the image [{}]?",
            overwrite.file
        ),
        false => overwrite.to_string(),
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Error> for CommandError {
    fn from(error: Error) -> CommandError {
        CommandError::new(match &error {
            Error::Overwrites(overwrite) => overwrite_words(overwrite),
            other => other.to_string(),
        })
    }
}

/// `Could not VERB 'PATH': why`.
pub fn failed(verb: &str, path: &Path, error: &std::io::Error) -> CommandError {
    let words = cowslip::error::system_words(error);
    CommandError::new(format!("Could not {verb} '{}': {words}", path.display()))
}
