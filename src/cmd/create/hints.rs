//! Hints of a new image's options to the file system that its files are in.

use cowslip::file::BlockFile;

use super::Request;
use crate::error::CommandError;
use crate::options;
use crate::output::warn;

/// The extent size hint where space is allocated ahead, as QEMU's.
const EXTENT_HINT_BYTES: u64 = 1 << 20;

/// Passes the allocation hints for a new file to the file system before the file has any space. The
/// default depends on the policy: whole extents where space is preallocated, no hint where only
/// written data takes space.
///
/// # Errors
/// An option's value.
pub fn set_file_system_options(
    request: &Request,
    file: &dyn BlockFile,
) -> Result<(), CommandError> {
    let value = |name| options::value(&request.options, name);
    let nocow = value("nocow").map(|on| options::switch("nocow", on));
    if nocow.transpose()? == Some(true) {
        // As in QEMU, which does not say either where it has no effect.
        drop(file.set_nocow());
    }
    let asked = value("extent_size_hint");
    let bytes = match asked {
        Some(text) => options::size("extent_size_hint", text)?,
        None if value("alloc_policy") == Some("sparse") => 0,
        None => EXTENT_HINT_BYTES,
    };
    if bytes > u64::from(u32::MAX) {
        return Err(CommandError::new("Extent size hint is too large"));
    }
    let outcome = if bytes > 0 {
        file.set_extent_hint(bytes)
    } else {
        Ok(())
    };
    if let (Err(error), Some(_)) = (outcome, asked) {
        let why = cowslip::error::system_words(&error);
        warn(&format!("Failed to set extent size hint: {why}"));
    }
    Ok(())
}
