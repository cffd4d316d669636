//! Files that a program makes for itself: they have no name, or lose it at once, and until then
//! only their owner can open them.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// How many names are tried where files need one: others may have taken some.
const NAMES: u32 = 1000;

/// Makes a file in a directory that vanishes when it is closed.
///
/// # Errors
/// The file system's.
pub(super) fn unnamed(directory: &Path) -> rustix::io::Result<OwnedFd> {
    // With EXCL it cannot be given a name later either.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE | OFlags::EXCL;
    match rustix::fs::open(directory, flags, owners()) {
        // The kernel or the file system has no nameless files: NFS, FUSE.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS) => unlinked(directory),
        opened => opened,
    }
}

/// Permissions of the owner, and of no other user.
fn owners() -> Mode {
    Mode::RUSR | Mode::WUSR
}

/// Makes a file and removes its name.
fn unlinked(directory: &Path) -> rustix::io::Result<OwnedFd> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let process = rustix::process::getpid().as_raw_nonzero();
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
    for _ in 0..NAMES {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!(".cowslip-{process}-{number}"));
        match rustix::fs::open(&path, flags, owners()) {
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
            Ok(file) => {
                rustix::fs::unlink(&path)?;
                return Ok(file);
            }
        }
    }
    Err(Errno::EXIST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fstat;

    #[test]
    fn nobody_else_can_open_it() {
        let dir = tempfile::tempdir().unwrap();
        for make in [unnamed, unlinked] {
            let file = make(dir.path()).unwrap();
            let stat = fstat(&file).unwrap();
            assert_eq!((stat.st_mode & 0o7777, stat.st_nlink), (0o600, 0));
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn names_that_others_have_taken_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let process = std::process::id();
        for number in 0..32 {
            let name = dir.path().join(format!(".cowslip-{process}-{number}"));
            std::fs::write(name, "another's").unwrap();
        }
        assert!(unlinked(dir.path()).is_ok());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 32);
    }
}
