//! Errors of opening images, in QEMU's words where it has any.

use cowslip::Error;
use cowslip::error::Feature;
use cowslip_console::error::{CommandError, overwrite_words};
use cowslip_nodes::Source;
use cowslip_nodes::foreign::format_refused;

/// The failure to open `filename`: `Could not open 'FILE': why`.
pub fn opening_failed(filename: &str, error: &Error) -> CommandError {
    CommandError::opening(filename, opening_reason(filename, error))
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
            let refused = match feature {
                Feature::Qcow2(names) => Some(format!(
                    "Unsupported qcow2 feature(s): {}",
                    names.join(", ")
                )),
                Feature::Format(name) => format_refused(name),
                Feature::Other(_) => None,
            };
            refused.unwrap_or_else(|| format!("{feature} is not supported"))
        }
        Error::Overwrites(overwrite) => overwrite_words(overwrite),
        other => other.to_string(),
    }
}

/// `Could not open 'x': why`.
pub fn refused(source: &Source, error: &Error) -> CommandError {
    CommandError::opening(&source.given, opening_reason(&source.filename, error))
}
