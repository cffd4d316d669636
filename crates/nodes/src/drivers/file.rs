//! `file`, `host_device`, `host_cdrom`: a file of the host.

use cowslip::file::host::{Driver, Locking};
use cowslip_block::options::Kind::{Number, Switch, Text};
use cowslip_block::options::{self, OptionEntry, ignored, option};
use cowslip_block::{Error, Result};

use crate::foreign;
use crate::options::{CommonOptions, FileOptions, parse_aio};

/// Its names in `driver=`.
pub const NAMES: &[&str] = &["file", "host_device", "host_cdrom"];

/// Its options, beside those of every node.
#[rustfmt::skip] // An option a line.
pub const OPTIONS: &[OptionEntry] = &[
    option("filename", Text, "", "Path of the file"),
    option("locking", Text, "auto", "Locks against other processes: auto, on or off"),
    option("aio", Text, "threads", "How requests reach the system: threads, native or io_uring"),
    ignored("auto-read-only", Switch, "off"),
    ignored("drop-cache", Switch, "on"),
    ignored("x-check-cache-dropped", Switch, "off"),
    ignored("aio-max-batch", Number, "0"),
    option("node-name", Text, "", "Name of the node"),
];

/// The outcome of reading an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The option is known, and its value was read.
    Yes,
    /// There is none of that name. It is refused when the file is open.
    Unknown,
    /// It is one that QEMU has, and is not supported here.
    Unsupported,
}

/// Reads the driver.
///
/// # Errors
/// It is none for files of the host.
pub fn driver(name: &str) -> Result<Driver> {
    Driver::from_name(name).ok_or_else(|| Error::invalid(foreign::driver_refused(name)))
}

/// Reads how the file is locked.
///
/// # Errors
/// No such value.
pub fn locking(value: &str) -> Result<Locking> {
    match value {
        "auto" => Ok(Locking::Auto),
        "on" => Ok(Locking::On),
        "off" => Ok(Locking::Off),
        _ => Err(Error::invalid(format!("invalid parameter value: {value}"))),
    }
}

/// Whether an option of a node of a file whose bytes are a disk is one of the disk, or of how it is
/// opened; all others are the file's alone.
pub fn is_of_disk(name: &str) -> bool {
    let name = name.split('.').next().unwrap_or(name);
    matches!(
        name,
        "filename"
            | "locking"
            | "auto-read-only"
            | "node-name"
            | "read-only"
            | "force-share"
            | "cache"
            | "discard"
            | "detect-zeroes"
            | "zero-method"
            | "alloc-policy"
            | "snapshot"
            | "backing"
    )
}

/// Reads an option of the file alone.
///
/// # Errors
/// A value that cannot be.
pub fn take(
    host: &mut FileOptions,
    common: &mut CommonOptions,
    (name, value): (&str, &str),
) -> Result<Taken> {
    match name {
        "locking" => host.locking = locking(value)?,
        "aio" => {
            let aio = parse_aio(value)
                .ok_or_else(|| Error::invalid(format!("invalid parameter value: {value}")))?;
            host.aio = Some((aio, value == "native"));
        }
        "read-only" => common.read_only |= options::switch(name, value)?,
        "force-share" => common.force_share |= options::switch(name, value)?,
        "cache.direct" | "cache.no-flush" => {
            common.take(name, value)?;
        }
        "auto-read-only" | "drop-cache" | "x-check-cache-dropped" => {
            options::switch(name, value)?;
        }
        "node-name" | "aio-max-batch" => {}
        // Its discards are those of the image, which are passed on.
        "discard" if value == "unmap" => {}
        "discard" | "pr-manager" | "detect-zeroes" => return Ok(Taken::Unsupported),
        _ if name.contains('.') => return Ok(Taken::Unsupported),
        _ => return Ok(Taken::Unknown),
    }
    Ok(Taken::Yes)
}
