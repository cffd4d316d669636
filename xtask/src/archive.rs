//! Archives that are the same for the same files: names in order, no users of this machine, the
//! time of the sources. GNU tar and gzip make them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run;

/// Owner and place of files in an archive.
#[derive(Clone, Copy, Debug, Default)]
pub struct Put<'a> {
    /// Number of the user and of the group.
    pub owner: u32,
    /// Words before their names, such as `usr/`.
    pub below: &'a str,
}

/// Writes a tar of all that a directory holds, with the modes that files have there.
pub fn pack(directory: &Path, put: Put<'_>, file: &Path) -> Result<(), String> {
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(directory).arg("-cf").arg(file);
    tar.args(["--format=gnu", "--sort=name", "--numeric-owner"]);
    tar.arg(format!("--mtime=@{}", run::epoch()));
    tar.arg(format!("--owner={}", put.owner));
    tar.arg(format!("--group={}", put.owner));
    // Names of files, not what links point to.
    tar.arg(format!("--transform=flags=rh;s,^,{},", put.below));
    tar.arg("--");
    run::run(tar.args(names(directory)?))
}

/// Compresses a file in its place. Returns the one that is there instead, with `.gz` added to its
/// name.
pub fn compress(file: &Path) -> Result<PathBuf, String> {
    run::run(Command::new("gzip").arg("-9nf").arg(file))?;
    let mut name = file.as_os_str().to_os_string();
    name.push(".gz");
    Ok(name.into())
}

/// Gives files and directories of a tree the modes that archives have, whatever the mask of the
/// user was: programs stay programs.
pub fn settle(path: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let known = path.symlink_metadata().map_err(failed)?;
    if known.is_symlink() {
        return Ok(());
    }
    let is_open = known.is_dir() || known.permissions().mode() & 0o100 != 0;
    let mode = if is_open { 0o755 } else { 0o644 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed)?;
    if known.is_dir() {
        for name in names(path)? {
            settle(&path.join(name))?;
        }
    }
    Ok(())
}

/// Names in a directory, in order.
fn names(directory: &Path) -> Result<Vec<std::ffi::OsString>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", directory.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        names.push(entry.map_err(failed)?.file_name());
    }
    names.sort();
    Ok(names)
}
