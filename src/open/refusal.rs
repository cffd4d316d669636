//! Errors of opening images, in QEMU's words where it has any.

use cowslip::Error;

use crate::error::{CommandError, overwrite_words};
use cowslip_nodes::Source;
use cowslip_nodes::foreign::format_refused;

/// The failure to open `filename`: `Could not open 'FILE': why`.
pub fn opening_failed(filename: &str, error: &Error) -> CommandError {
    CommandError::new(format!(
        "Could not open '{filename}': {}",
        opening_reason(filename, error)
    ))
}

/// Text of an error of opening a file, in QEMU's words where it has any.
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

/// `Could not open 'x': why`.
pub fn refused(source: &Source, error: &Error) -> CommandError {
    let why = opening_reason(&source.filename, error);
    CommandError::new(format!("Could not open '{}': {why}", source.given))
}
