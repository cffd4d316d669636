//! Copies of the sources, to be changed and built elsewhere.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::run;

/// Copies what git knows of, as it is now; the directory is made anew.
pub fn copy(to: &Path) -> Result<(), String> {
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
