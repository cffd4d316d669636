//! Errors of the daemon in words: for clients, and for the command line.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use cowslip_console::error::CommandError;
use cowslip_qmp::QmpError;

/// An error of the engine, or of the program, for a client. What follows its first line is advice
/// for people.
pub fn failed(error: impl Display) -> QmpError {
    QmpError::generic(error.to_string().lines().next().unwrap_or_default())
}

/// The reason why an image cannot be opened: as in QEMU's daemon, without the attempt before it.
pub fn not_opened(error: impl Into<cowslip::Error>) -> QmpError {
    failed(CommandError::from(error.into()).reason_not_to_open())
}

/// An error with what helps to understand it: the directory that relative names are looked up in,
/// and what the sandbox of the daemon lets be opened.
pub fn explained(
    error: QmpError,
    directory: Option<&Path>,
    allowed: Option<&[PathBuf]>,
) -> QmpError {
    let is_missing = error.desc.ends_with("No such file or directory");
    let is_refused = error.desc.ends_with("Permission denied");
    let note = match (quoted(&error.desc), directory, allowed) {
        (Some(name), Some(directory), _) if is_missing && is_relative(name) => {
            format!("names are relative to '{}'", directory.display())
        }
        (_, _, Some([])) if is_refused => {
            "the sandbox lets no file be opened: give --sandbox-dir, or pass it with add-fd".into()
        }
        (_, _, Some(allowed)) if is_refused => {
            let allowed: Vec<String> = allowed
                .iter()
                .map(|directory| format!("'{}'", directory.display()))
                .collect();
            format!(
                "the sandbox lets files be opened in {}: give another --sandbox-dir, or pass it \
                 with add-fd",
                allowed.join(", ")
            )
        }
        _ => return error,
    };
    QmpError {
        desc: format!("{} ({note})", error.desc),
        ..error
    }
}

/// The first name in quotes.
fn quoted(text: &str) -> Option<&str> {
    text.split('\'').nth(1)
}

fn is_relative(name: &str) -> bool {
    !name.starts_with('/') && !name.contains(':')
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_where_names_are_looked_up_and_what_the_sandbox_allows() {
        let missing = "Could not open 'a.qcow2': No such file or directory";
        let here = Some(Path::new("/srv"));
        let said = |text: &str, allowed: Option<&[PathBuf]>| {
            explained(QmpError::generic(text), here, allowed).desc
        };
        assert_eq!(
            said(missing, None),
            format!("{missing} (names are relative to '/srv')")
        );
        let absolute = "Could not open '/a.qcow2': No such file or directory";
        assert_eq!(said(absolute, None), absolute);
        let denied = "Could not open '/a.qcow2': Permission denied";
        assert_eq!(said(denied, None), denied);
        assert!(said(denied, Some(&[])).contains("lets no file be opened"));
        let allowed = [PathBuf::from("/x"), PathBuf::from("/y")];
        let words = "lets files be opened in '/x', '/y': give another --sandbox-dir";
        assert!(said(denied, Some(&allowed)).contains(words));
        assert_eq!(said("Node 'a' is busy", Some(&allowed)), "Node 'a' is busy");
    }
}
