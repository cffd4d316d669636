//! Files of text that a command writes beside the images that it reads: pictures, process numbers.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use cowslip::file::ReadSet;
use cowslip::file::host::{HostOptions, open_host_file};
use cowslip_console::error::CommandError;

/// Opens a file for a text that is written later, with [`write_later`]; it keeps its content until
/// then.
///
/// # Errors
/// As [`write()`].
pub fn open_for_later(
    path: &Path,
    mode: u32,
    verb: &str,
    read: &ReadSet,
) -> Result<std::fs::File, CommandError> {
    if let Ok(file) = open_host_file(path, &HostOptions::default()) {
        read.check(file.as_ref())?;
    }
    let mut options = std::fs::OpenOptions::new();
    let options = options.write(true).create(true).truncate(false).mode(mode);
    options.open(path).map_err(|error| {
        let words = cowslip::error::system_words(&error);
        CommandError::new(format!("Could not {verb} '{}': {words}", path.display()))
    })
}

/// Writes a text to a file of [`open_for_later`].
///
/// # Errors
/// The system's failure.
pub fn write_later(mut file: &std::fs::File, text: &str) -> std::io::Result<()> {
    file.set_len(0)?;
    file.write_all(text.as_bytes())
}

/// Writes a file of text, which must not be one that the command reads. A new one has this mode,
/// less what the process masks.
///
/// # Errors
/// It stores a file of `read`; the system's failure, behind "Could not `verb`".
pub fn write(
    path: &Path,
    text: &str,
    mode: u32,
    verb: &str,
    read: &ReadSet,
) -> Result<(), CommandError> {
    // A file that cannot be opened is no file of an open image.
    if let Ok(file) = open_host_file(path, &HostOptions::default()) {
        read.check(file.as_ref())?;
    }
    let mut options = std::fs::OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(mode);
    let written = options
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| {
        let words = cowslip::error::system_words(&error);
        CommandError::new(format!("Could not {verb} '{}': {words}", path.display()))
    })
}
