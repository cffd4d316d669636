//! Errors of opening images, in QEMU's words where it has any.

use std::fs;
use std::os::unix::fs::MetadataExt;

use cowslip::Error;
use cowslip::error::Feature;
use cowslip_console::error::{CommandError, overwrite_words};
use cowslip_nodes::Source;
use cowslip_nodes::foreign::format_refused;
use rustix::fs::{major, minor};

/// The unit of a loop device's length.
const SECTOR_BYTES: u64 = 512;

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
        } if file == filename => format!("{detail}{}", cut_by_loop(filename, detail)),
        Error::Corrupt {
            structure,
            offset,
            file,
            detail,
        } if file == filename => {
            let hint = cut_by_loop(filename, detail);
            format!("{structure} at offset {offset:#x}: {detail}{hint}")
        }
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

/// Why an image in a loop device may end before its file does, if that is what is wrong: the kernel
/// shows whole sectors of the file.
fn cut_by_loop(filename: &str, detail: &str) -> String {
    let is_beyond_end = detail.contains("beyond the end of the file");
    match behind_loop(filename).filter(|_| is_beyond_end) {
        Some((file, len)) if !len.is_multiple_of(SECTOR_BYTES) => format!(
            "; the loop device lacks the last {} bytes of '{file}', which fill no sector: open the \
             file itself, or lengthen it (truncate -s %{SECTOR_BYTES})",
            len % SECTOR_BYTES
        ),
        _ => String::new(),
    }
}

/// The file behind a loop device that shows all of it from an offset on, and its bytes from there.
fn behind_loop(filename: &str) -> Option<(String, u64)> {
    let number = fs::metadata(filename).ok()?.rdev();
    let directory = format!("/sys/dev/block/{}:{}/loop", major(number), minor(number));
    let text = |name: &str| fs::read_to_string(format!("{directory}/{name}")).ok();
    let value = |name: &str| text(name)?.trim().parse::<u64>().ok();
    let file = text("backing_file")?.trim_end_matches('\n').to_string();
    let is_all = value("sizelimit")? == 0;
    let len = fs::metadata(&file).ok()?.len();
    is_all.then_some((file, len.checked_sub(value("offset")?)?))
}

/// `Could not open 'x': why`.
pub fn refused(source: &Source, error: &Error) -> CommandError {
    CommandError::opening(&source.given, opening_reason(&source.filename, error))
}
