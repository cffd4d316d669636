//! Copies of the sources, to be changed and built elsewhere.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::run;

/// Version of the packages in a copy. Cargo names what it builds by a package's name, version and
/// place in its workspace: with the version of the sources, a build of the copy would pass for one
/// of theirs that is newer than their last change.
const VERSION_IN_COPY: &str = "version = \"0.0.0\"";

/// Copies all files that git knows, as they are now, into a new directory, with another version.
pub fn copy(to: &Path) -> Result<(), String> {
    export(to)?;
    let manifest = to.join("Cargo.toml");
    let failed = |e: std::io::Error| format!("cannot change {}: {e}", manifest.display());
    let text = fs::read_to_string(&manifest).map_err(failed)?;
    let is_version = |line: &&str| line.starts_with("version = ");
    let version = text.lines().find(is_version);
    let version = version.ok_or_else(|| format!("{} has no version", manifest.display()))?;
    // That of the packages, and of those that they need of each other.
    fs::write(&manifest, text.replace(version, VERSION_IN_COPY)).map_err(failed)
}

/// Copies all files that git knows, as they are now, into a new directory.
pub fn export(to: &Path) -> Result<(), String> {
    let mut list = Command::new("git");
    list.current_dir(run::root());
    list.args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    let listed = run::output(&mut list)?;
    remove(to)?;
    for name in listed.lines() {
        let source = run::root().join(name);
        // Listed, but removed since.
        if source.is_file() {
            let target = to.join(name);
            make(target.parent().expect("it is below the tree"))?;
            fs::copy(&source, &target)
                .map_err(|e| format!("cannot copy {}: {e}", source.display()))?;
        }
    }
    Ok(())
}

/// Makes a directory, and those above it.
pub fn make(directory: &Path) -> Result<(), String> {
    fs::create_dir_all(directory).map_err(|e| format!("cannot make {}: {e}", directory.display()))
}

/// Removes a directory, if it is there.
pub fn remove(directory: &Path) -> Result<(), String> {
    match fs::remove_dir_all(directory) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {e}", directory.display()))
        }
        _ => Ok(()),
    }
}
