//! [`Place`]: the file that is mounted on.
//!
//! It is locked (`flock(2)`) from before the mount until the image is closed, so that programs can
//! wait for that once they have unmounted it. Those that use the mounted file do not see this lock,
//! nor the file below.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cowslip::error::system_words;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::super::transport::Name;

/// How long, and how often, the end of a server is waited for that is closing its image.
const CLOSING_MAX: Duration = Duration::from_secs(10);
const CLOSING_PAUSE: Duration = Duration::from_millis(5);

/// A file to mount on; if it was made for that, it is removed in the end.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    file: File,
    is_made: bool,
}

/// Whether the server of a file is closing its image.
pub fn is_locked(path: &Path) -> bool {
    let is_regular = std::fs::symlink_metadata(path).is_ok_and(|it| it.is_file());
    let file = is_regular.then(|| File::open(path).ok()).flatten();
    file.is_some_and(|file| {
        flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::AGAIN)
    })
}

/// Waits until the server of a file that was unmounted has closed its image.
///
/// # Errors
/// The system's.
pub fn wait_for_close(path: &Path) -> io::Result<()> {
    let file = match File::open(path) {
        Ok(file) => file,
        // It was made for the mount, and is gone with it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    loop {
        match flock(&file, FlockOperation::LockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl Place {
    /// Opens and locks the file, or makes it. Nothing is mounted there.
    ///
    /// # Errors
    /// The reason in words.
    pub async fn take(path: &Path) -> Result<Place, String> {
        let begun = Instant::now();
        loop {
            let (file, is_made) = open(path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // It may have been removed by the server that had it.
                Ok(()) if is_same(&file, path) => {
                    return Ok(Place {
                        path: path.to_path_buf(),
                        file,
                        is_made,
                    });
                }
                Ok(()) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if begun.elapsed() < CLOSING_MAX => {
                    cowslip_queue::sleep(CLOSING_PAUSE).await;
                }
                Err(Errno::AGAIN) => {
                    return Err("its last server has not closed its image yet".to_string());
                }
                Err(error) => return Err(system_words(&error.into())),
            }
        }
    }

    /// The path, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path, if the file is removed in the end.
    pub fn removed(&self) -> Option<PathBuf> {
        self.is_made.then(|| self.path.clone())
    }
}

impl Name for Place {
    /// No successor takes over a mount: it is over, and so is the name.
    fn leave(self: Box<Self>) {}
}

impl Drop for Place {
    /// Removes the file if it was made for the mount and nobody has used it. A sandbox allows this.
    fn drop(&mut self) {
        let is_unused = || self.file.metadata().is_ok_and(|it| it.len() == 0);
        if self.is_made && is_same(&self.file, &self.path) && is_unused() {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

fn open(path: &Path) -> Result<(File, bool), String> {
    use std::os::unix::fs::OpenOptionsExt;
    let words = |error: io::Error| system_words(&error);
    // Nobody but its owner would see what is written there by mistake, when nothing is mounted.
    let mut new = File::options();
    new.read(true).write(true).create_new(true).mode(0o600);
    match new.open(path) {
        Ok(file) => return Ok((file, true)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(words(error)),
    }
    // Others than regular files may wait, or do something, when they are opened.
    let kind = std::fs::symlink_metadata(path).map_err(words)?;
    match kind.is_file() {
        true => Ok((File::open(path).map_err(words)?, false)),
        false => Err("it is no regular file".to_string()),
    }
}

fn is_same(file: &File, path: &Path) -> bool {
    let id = |it: &std::fs::Metadata| (it.dev(), it.ino());
    let (open, there) = (file.metadata(), std::fs::symlink_metadata(path));
    matches!((&open, &there), (Ok(open), Ok(there)) if id(open) == id(there))
}
