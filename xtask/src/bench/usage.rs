//! The space and extents of a file, as filefrag reports them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use crate::run;

/// Bytes that a file occupies and the number of its extents.
pub fn of(path: &Path) -> Result<(u64, u64), String> {
    let metadata = fs::metadata(path).map_err(|e| e.to_string())?;
    let text = run::output(Command::new("filefrag").arg(path))?;
    // "PATH: 12 extents found"
    let extents = text
        .rsplit(": ")
        .next()
        .and_then(|rest| rest.split(' ').next())
        .and_then(|count| count.trim().parse().ok())
        .ok_or_else(|| format!("filefrag says {text}"))?;
    Ok((metadata.blocks() * 512, extents))
}
