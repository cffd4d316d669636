//! Where QEMU's programs are. Cowslip has their names, too, so the first of a `PATH` may be this
//! command: a table that ran that one would compare Cowslip with itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use cowslip_console::output;

/// Words of a version by which Cowslip shows itself under another name.
const OURS: &str = "(cowslip ";

/// Programs that were looked for.
static FOUND: Mutex<BTreeMap<&'static str, PathBuf>> = Mutex::new(BTreeMap::new());

/// Where a program of QEMU's of this name is: the bare name where it is the first of the `PATH`, or
/// where there is none; the path of one behind ours; a name that no program has where there are
/// only ours. What was passed over is reported once.
pub fn of(name: &'static str) -> PathBuf {
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = found.get(name) {
        return path.clone();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let look = look(name, &directories);
    if let Some(passed) = &look.passed {
        let passed = passed.display();
        output::warn(&match look.is_there {
            true => format!(
                "'{passed}' is Cowslip under QEMU's name: '{}' takes its place",
                look.path.display()
            ),
            false => format!("'{passed}' is Cowslip under QEMU's name: QEMU's does not take part"),
        });
    }
    found.insert(name, look.path.clone());
    look.path
}

/// A command of QEMU's.
pub fn command(name: &'static str) -> Command {
    Command::new(of(name))
}

/// The outcome of a search.
struct Look {
    path: PathBuf,
    /// A program of QEMU's was found.
    is_there: bool,
    /// The first of ours before it.
    passed: Option<PathBuf>,
}

fn look(name: &str, directories: &[PathBuf]) -> Look {
    let mut passed = None;
    let candidates = directories.iter().map(|directory| directory.join(name));
    for path in candidates.filter(|path| path.is_file()) {
        if !is_ours(&path) {
            let is_first = passed.is_none();
            return Look {
                path: if is_first { name.into() } else { path },
                is_there: true,
                passed,
            };
        }
        passed.get_or_insert(path);
    }
    let path = match passed {
        None => name.to_string(),
        Some(_) => format!("QEMU's own {name}"),
    };
    Look {
        path: path.into(),
        is_there: false,
        passed,
    }
}

fn is_ours(program: &Path) -> bool {
    let mut command = Command::new(program);
    let output = command.arg("--version").stdin(Stdio::null()).output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(OURS))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // In a test a panic is the report.

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn programs_of_ours_under_qemus_names_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let program = |place: &str, version: &str| {
            let place = dir.path().join(place);
            std::fs::create_dir(&place).unwrap();
            let path = place.join("qemu-img");
            std::fs::write(&path, format!("#!/bin/sh\necho '{version}'\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            place
        };
        let ours = program("ours", "qemu-img version 10.0.2 (cowslip 0.1.0)");
        let theirs = program("theirs", "qemu-img version 10.0.2 (Debian 1:10.0.2)");
        let first = look("qemu-img", &[theirs.clone(), ours.clone()]);
        assert!(first.is_there && first.passed.is_none());
        assert_eq!(first.path, Path::new("qemu-img"));
        let behind = look("qemu-img", &[ours.clone(), theirs.clone()]);
        assert!(behind.is_there && behind.path == theirs.join("qemu-img"));
        assert_eq!(behind.passed, Some(ours.join("qemu-img")));
        let alone = look("qemu-img", std::slice::from_ref(&ours));
        assert!(!alone.is_there && alone.passed.is_some());
        assert!(Command::new(alone.path).output().is_err());
        let none = look("qemu-nbd", &[ours, theirs]);
        assert!(!none.is_there && none.passed.is_none());
        assert_eq!(none.path, Path::new("qemu-nbd"));
    }
}
