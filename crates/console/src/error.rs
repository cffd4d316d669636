//! [`CommandError`]: the failure of a verb, as a message for the user and an exit code.

use std::fmt;
use std::path::Path;

use cowslip::Error;
use cowslip::error::{Opening, Overwrite};

use crate::program::is_called_as_qemu;

/// A message without the program's name, and the exit code of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandError {
    attempt: Attempt,
    reason: String,
    exit_code: u8,
}

/// An attempt that has failed: the message begins with it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Attempt {
    /// None that the message names apart from the reason.
    Unnamed,
    Opening(Opening),
    LoadingSnapshot,
}

impl CommandError {
    /// A failure with exit code 1.
    pub fn new(message: impl Into<String>) -> CommandError {
        CommandError::after(Attempt::Unnamed, message)
    }

    /// `Could not open 'NAME': why`.
    pub fn opening(name: &str, why: impl Into<String>) -> CommandError {
        let opening = Opening::Named(name.to_string());
        CommandError::after(Attempt::Opening(opening), why)
    }

    /// `Failed to load snapshot: why`.
    pub fn loading_snapshot(why: impl Into<String>) -> CommandError {
        CommandError::after(Attempt::LoadingSnapshot, why)
    }

    /// Whether the reason begins with the failed attempt already.
    fn reason_names(&self, what: &Opening) -> bool {
        let rest = self.reason.strip_prefix(&what.to_string());
        rest.is_some_and(|rest| rest.starts_with(": "))
    }

    fn after(attempt: Attempt, reason: impl Into<String>) -> CommandError {
        CommandError {
            attempt,
            reason: reason.into(),
            exit_code: 1,
        }
    }

    /// The message; of a failure to open an image only the reason.
    pub fn reason_not_to_open(&self) -> String {
        match self.attempt {
            Attempt::Opening(Opening::Named(_)) => self.reason.clone(),
            _ => self.to_string(),
        }
    }

    /// Whether the image could be opened, and its snapshot could not be loaded.
    pub fn is_of_snapshot(&self) -> bool {
        self.attempt == Attempt::LoadingSnapshot
    }

    /// A failure that has already been reported to the user.
    pub fn already_reported() -> CommandError {
        CommandError::new("")
    }

    /// The failure with another exit code of the process.
    #[must_use]
    pub fn with_exit_code(mut self, exit_code: u8) -> CommandError {
        self.exit_code = exit_code;
        self
    }

    /// Whether the failure has already been reported to the user.
    pub fn is_already_reported(&self) -> bool {
        self.reason.is_empty()
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
        match &self.attempt {
            Attempt::Unnamed => f.write_str(&self.reason),
            // QEMU says it twice where the reason is that of the file itself.
            Attempt::Opening(what) if !is_called_as_qemu() && self.reason_names(what) => {
                f.write_str(&self.reason)
            }
            Attempt::Opening(what) => write!(f, "{what}: {}", self.reason),
            Attempt::LoadingSnapshot => write!(f, "Failed to load snapshot: {}", self.reason),
        }
    }
}

impl From<Error> for CommandError {
    fn from(error: Error) -> CommandError {
        match error {
            Error::Overwrites(overwrite) => CommandError::new(overwrite_words(&overwrite)),
            Error::Opening { what, why, .. } => CommandError::after(Attempt::Opening(what), why),
            other => CommandError::new(other.to_string()),
        }
    }
}

/// `Could not VERB 'PATH': why`.
pub fn failed(verb: &str, path: &Path, error: &std::io::Error) -> CommandError {
    let words = cowslip::error::system_words(error);
    CommandError::new(format!("Could not {verb} '{}': {words}", path.display()))
}
