//! `grow --trim`: frees the space behind the ends of files once, no matter which program has
//! allocated it.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use cowslip_queue::fiemap::beyond_end_bytes;
use rustix::fs::{Mode, OFlags};

use super::report::{Event, Reporter};
use super::shown;
use super::target::{self, Handle, Refused, Trimmed};
use crate::error::CommandError;

/// Trims named files, and all regular files of named directories.
///
/// # Errors
/// What was named is not there, or is neither.
pub fn run(paths: &[PathBuf], reporter: &mut Reporter) -> Result<(), CommandError> {
    for path in paths {
        let failed = |error: std::io::Error| {
            let words = cowslip::error::system_words(&error);
            CommandError::new(format!("Could not open '{}': {words}", path.display()))
        };
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        if std::fs::symlink_metadata(path).map_err(failed)?.is_dir() {
            let directory = open_directory(path).map_err(failed)?;
            for found in std::fs::read_dir(path).map_err(failed)? {
                let name = found.map_err(failed)?.file_name();
                let shown = shown(&path.join(&name));
                match trim(&directory, &name, &shown, reporter) {
                    Ok(()) | Err(Refused::Gone | Refused::NotRegular) => {}
                    Err(refused) => reporter.event(&shown, &left_alone(refused)),
                }
            }
        } else {
            let directory = open_directory(parent.unwrap_or(Path::new("."))).map_err(failed)?;
            let name = path.file_name().unwrap_or(OsStr::new("."));
            trim(&directory, name, &shown(path), reporter).map_err(|refused| {
                let why = match refused {
                    Refused::NotRegular => "it is not a regular file".to_string(),
                    refused => words(refused),
                };
                CommandError::new(format!("Could not trim '{}': {why}", path.display()))
            })?;
        }
    }
    reporter.end();
    Ok(())
}

fn open_directory(path: &Path) -> std::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

fn words(refused: Refused) -> String {
    match refused {
        Refused::Gone => "it no longer exists".to_string(),
        Refused::NotRegular => "it is not a regular file".to_string(),
        Refused::Busy => "it is busy".to_string(),
        Refused::For(why) => why,
    }
}

fn left_alone(refused: Refused) -> Event {
    Event::LeftAlone {
        why: words(refused),
    }
}

fn trim(
    directory: impl AsFd,
    name: &OsStr,
    shown: &str,
    reporter: &mut Reporter,
) -> Result<(), Refused> {
    let handle = Handle::find(directory, name)?;
    let (file, _) = handle.open()?;
    let failed = |error: std::io::Error| Refused::For(cowslip::error::system_words(&error));
    let beyond = beyond_end_bytes(&file).map_err(failed)?;
    if beyond == Some(0) {
        return Ok(());
    }
    let event = match target::trim(&file).map_err(failed)? {
        Trimmed::Done { left, .. } if left > 0 => Event::Left {
            bytes: left,
            why: target::KEPT_BY_SYSTEM.to_string(),
        },
        Trimmed::Done {
            size, given_back, ..
        } => Event::GivenBack {
            bytes: given_back,
            size,
            steps: 0,
        },
        Trimmed::InUse => Event::Left {
            bytes: beyond.unwrap_or(0),
            why: "another process has it open".to_string(),
        },
        Trimmed::Late => Event::Left {
            bytes: 0,
            why: target::CUT_LATE.to_string(),
        },
    };
    reporter.event(shown, &event);
    Ok(())
}
