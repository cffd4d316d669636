//! Lists of options, and arguments that are numbers, with qemu-img's error messages.

use std::ops::RangeInclusive;

use crate::error::CommandError;
use crate::size::{self, SizeError};

pub use cowslip_block::options::*;

/// Parses an argument that is a number of bytes, with qemu-img's error messages. `what` names the
/// argument in them.
///
/// # Errors
/// The text is not a size, or not within the bounds.
pub fn bytes_within(
    what: &str,
    text: &str,
    bounds: RangeInclusive<u64>,
) -> Result<u64, CommandError> {
    match size::parse(text) {
        Ok(bytes) if bounds.contains(&bytes) => Ok(bytes),
        Ok(_) | Err(SizeError::TooLarge) => Err(CommandError::new(format!(
            "Invalid {what} specified. Must be between {} and {}.",
            bounds.start(),
            bounds.end()
        ))),
        Err(SizeError::Malformed) => Err(CommandError::new(format!(
            "Invalid {what} specified: '{text}'."
        ))),
    }
}

/// Like [`bytes_within`], for an integer without a suffix.
///
/// # Errors
/// The text is not such a number, or not within the bounds.
pub fn number_within(
    what: &str,
    text: &str,
    bounds: RangeInclusive<u64>,
) -> Result<u64, CommandError> {
    let hexadecimal = text.starts_with("0x") || text.starts_with("0X");
    if !hexadecimal && !text.ends_with(|last: char| last.is_ascii_digit()) || text.contains('.') {
        return Err(CommandError::new(format!(
            "Invalid {what} specified: '{text}'."
        )));
    }
    bytes_within(what, text, bounds)
}
