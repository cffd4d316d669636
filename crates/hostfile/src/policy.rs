//! The policy of [`HostGate`](super::host::HostGate) on the files of the host that an image may
//! name.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::file::{FileRequest, Role};
use crate::{Error, Result};

/// Backing files and data files that an image may name. Files that the caller names are opened in
/// any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackingPolicy {
    /// All: for images that are trusted as the user's own command line is.
    #[default]
    Any,
    /// Files that lie, symbolic links resolved, in the directory of the image that names them, or
    /// below it.
    SameDirectory,
    /// None.
    None,
}

impl BackingPolicy {
    /// The policy of this name.
    pub fn from_name(name: &str) -> Option<BackingPolicy> {
        Some(match name {
            "any" => BackingPolicy::Any,
            "same-directory" => BackingPolicy::SameDirectory,
            "none" => BackingPolicy::None,
            _ => return None,
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            BackingPolicy::Any => "any",
            BackingPolicy::SameDirectory => "same-directory",
            BackingPolicy::None => "none",
        }
    }

    /// The refusal of a file, for this reason.
    pub fn forbidden(self, request: &FileRequest<'_>, why: &str) -> Error {
        let role = match request.role {
            Role::Backing => "backing file",
            Role::Data => "data file",
        };
        Error::Forbidden(format!(
            "'{}' names '{}' as its {role}, and the backing policy '{}' forbids that{why}; if the \
             image is trusted, open it with the policy 'any'",
            request.named_by,
            request.name,
            self.name()
        ))
    }
}

/// A file in a directory or below it, by a name without symbolic links.
pub(super) struct Beneath {
    directory: OwnedFd,
    name: PathBuf,
}

impl Beneath {
    /// Finds the file at `path` in the directory of the image that names it, opening nothing.
    ///
    /// # Errors
    /// It lies elsewhere, or there is none.
    pub(super) fn find(request: &FileRequest<'_>, path: &str) -> Result<Beneath> {
        let failed = |error| Error::io(format!("Could not open '{path}'"), error);
        let image = request.named_by;
        let image = Path::new(image.strip_prefix("file:").unwrap_or(image));
        let parent = match image.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => Path::new("/"),
        };
        let parent = fs::canonicalize(parent).map_err(failed)?;
        let outside = || {
            let why = format!(": it is not in '{}'", parent.display());
            BackingPolicy::SameDirectory.forbidden(request, &why)
        };
        let target = match fs::canonicalize(path) {
            Ok(target) => target,
            // The existence of a file elsewhere is not revealed.
            Err(_) if !lies_in(Path::new(path), image) => return Err(outside()),
            Err(error) => return Err(failed(error)),
        };
        let name = target.strip_prefix(&parent).map_err(|_| outside())?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let directory = rustix::fs::open(&parent, flags, Mode::empty());
        let directory = directory.map_err(|error| failed(error.into()))?;
        Ok(Beneath {
            directory,
            name: name.to_path_buf(),
        })
    }

    /// Opens the file. The kernel confines the name to the directory and follows no symbolic link,
    /// so renaming files meanwhile gains an attacker nothing.
    ///
    /// # Errors
    /// The system's; `ENOSYS` before Linux 5.6.
    pub(super) fn open(&self, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&self.directory, &self.name, flags, Mode::empty(), resolve)
    }

    /// Returns the error for a failure to open the file.
    pub(super) fn refused(request: &FileRequest<'_>, path: &str, errno: Errno) -> Error {
        match errno {
            Errno::XDEV | Errno::LOOP => {
                BackingPolicy::SameDirectory.forbidden(request, ": its name was changed meanwhile")
            }
            Errno::NOSYS => Error::Unsupported {
                file: path.to_string(),
                feature: "the backing policy 'same-directory' on a kernel before 5.6".into(),
            },
            errno => Error::io(format!("Could not open '{path}'"), errno.into()),
        }
    }
}

/// Whether a name, by its letters alone, is one of a file beside the image or below it.
fn lies_in(path: &Path, image: &Path) -> bool {
    let parent = image.parent().unwrap_or(Path::new(""));
    let climbs = |part| part == std::path::Component::ParentDir;
    path.strip_prefix(parent)
        .is_ok_and(|rest| !rest.is_absolute() && !rest.components().any(climbs))
}

#[cfg(test)]
mod tests;
