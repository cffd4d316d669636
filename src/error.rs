//! [`CommandError`]: a failure of a verb, in the words that the user reads.

use std::fmt;

use cowslip::Error;
use cowslip::error::Overwrite;

use crate::open::foreign::format_refused;
use crate::output::is_called_as_qemu;

/// A message without the program's name, and the exit code.
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

    /// A failure of which the user has been told.
    pub fn told() -> CommandError {
        CommandError::new("")
    }

    /// The same with another exit code.
    #[must_use]
    pub fn with_exit_code(mut self, exit_code: u8) -> CommandError {
        self.exit_code = exit_code;
        self
    }

    /// Whether the user has been told.
    pub fn is_told(&self) -> bool {
        self.message.is_empty()
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        self.exit_code
    }

    /// The failure to open `filename`: `Could not open 'FILE': why`.
    pub fn opening(filename: &str, error: &Error) -> CommandError {
        CommandError::new(format!(
            "Could not open '{filename}': {}",
            opening_reason(filename, error)
        ))
    }
}

/// Why a file could not be opened, in QEMU's words where it has any.
pub fn opening_reason(filename: &str, error: &Error) -> String {
    match error {
        Error::Corrupt {
            structure: "header",
            file,
            detail,
            ..
        } if file == filename => detail.clone(),
        Error::Corrupt {
            structure,
            offset,
            file,
            detail,
        } if file == filename => format!("{structure} at offset {offset:#x}: {detail}"),
        Error::Unsupported { file, feature } if file == filename => {
            let format = feature.strip_prefix("image format ");
            match (
                feature.strip_prefix("qcow2 feature(s) "),
                format.and_then(format_refused),
            ) {
                (Some(names), _) => format!("Unsupported qcow2 feature(s): {names}"),
                (None, Some(refused)) => refused,
                (None, None) => format!("{feature} is not supported"),
            }
        }
        Error::Overwrites(overwrite) => overwrite_words(overwrite),
        other => other.to_string(),
    }
}

/// Refusal to overwrite what is read; under QEMU's names in the words of its locks, which find the same there.
fn overwrite_words(overwrite: &Overwrite) -> String {
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
