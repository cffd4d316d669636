//! Files of text that a command writes beside the images that it reads: pictures, process numbers.

use std::path::Path;

use cowslip::file::ReadSet;
use cowslip::file::host::{HostOptions, open_host_file};

use crate::error::CommandError;

/// Writes a file of text, which must not be one that the command reads.
///
/// # Errors
/// It stores a file of `read`; the system's failure, behind "Could not `verb`".
pub fn write(path: &Path, text: &str, verb: &str, read: &ReadSet) -> Result<(), CommandError> {
    // What cannot be opened is no file of an image that is open.
    if let Ok(file) = open_host_file(path, &HostOptions::default()) {
        read.check(file.as_ref())?;
    }
    std::fs::write(path, text).map_err(|error| {
        let words = cowslip::error::system_words(&error);
        CommandError::new(format!("Could not {verb} '{}': {words}", path.display()))
    })
}
