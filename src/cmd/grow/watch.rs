//! Events in directories, as inotify reports them, in batches.
//!
//! The directories of named files are watched, not the files: so a file that is replaced, or does
//! not exist yet, is followed by its name. Events of one file are joined, so a batch has a file
//! once, however often it was written.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::error::CommandError;

/// Files per batch: a program that writes thousands of files at once gets its events in parts.
const BATCH_FILES: usize = 4096;
/// Room for some thousand events.
const BUFFER_BYTES: usize = 128 << 10;

/// A directory that is watched.
pub struct Directory {
    /// Path as it was named.
    pub path: PathBuf,
    handle: OwnedFd,
    watch: i32,
    /// The files that count; `None` for all.
    names: Option<HashSet<OsString>>,
    /// Whether it is gone.
    is_gone: bool,
}

impl Directory {
    /// The open directory.
    pub fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }

    fn counts(&self, name: &OsStr) -> bool {
        self.names.as_ref().is_none_or(|names| names.contains(name))
    }
}

/// A file by its directory's number and its name.
pub type Key = (usize, OsString);

/// Change of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Whether it was written, truncated, or moved here.
    pub is_modified: bool,
    /// A process that could write has closed it.
    pub is_closed: bool,
}

/// Changes since the last batch.
#[derive(Debug, Default)]
pub struct Batch {
    /// Changes since the last batch, by file.
    pub changes: HashMap<Key, Change>,
    /// Whether some events were lost: all files have to be looked at.
    pub has_lost: bool,
}

/// The directories that are watched.
pub struct Watch {
    inotify: OwnedFd,
    directories: Vec<Directory>,
    buffer: Vec<MaybeUninit<u8>>,
}

fn failed(path: &Path, error: Errno) -> CommandError {
    let words = match error {
        Errno::NOSPC => {
            "the user has no inotify watches left (fs.inotify.max_user_watches)".to_string()
        }
        error => cowslip::error::system_words(&error.into()),
    };
    CommandError::new(format!("Could not watch '{}': {words}", path.display()))
}

impl Watch {
    /// Watches directories, and files by name in theirs.
    ///
    /// # Errors
    /// A directory is not there, or the system refuses.
    pub fn new(paths: &[PathBuf]) -> Result<Watch, CommandError> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|error| failed(Path::new("."), error))?;
        let mut watch = Watch {
            inotify,
            directories: Vec::new(),
            buffer: vec![MaybeUninit::uninit(); BUFFER_BYTES],
        };
        for path in paths {
            watch.add(path)?;
        }
        Ok(watch)
    }

    fn add(&mut self, path: &Path) -> Result<(), CommandError> {
        let kind = std::fs::symlink_metadata(path).map(|found| found.file_type());
        let refused =
            |why| CommandError::new(format!("Could not watch '{}': {why}", path.display()));
        let (directory, name) = match (&kind, path.file_name()) {
            (Ok(kind), _) if kind.is_dir() => (path, None),
            (Ok(kind), _) if kind.is_symlink() => {
                return Err(refused("it is a symbolic link; name its target instead"));
            }
            (Ok(kind), _) if !kind.is_file() => {
                return Err(refused("it is neither a regular file nor a directory"));
            }
            (_, Some(name)) => {
                let parent = path
                    .parent()
                    .filter(|parent| !parent.as_os_str().is_empty());
                (parent.unwrap_or(Path::new(".")), Some(name.to_os_string()))
            }
            (_, None) => return Err(refused("it has no name")),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = rustix::fs::open(directory, flags, Mode::empty())
            .map_err(|error| failed(path, error))?;
        let events = WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::MOVE
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::ONLYDIR
            | WatchFlags::EXCL_UNLINK;
        let watch = inotify::add_watch(&self.inotify, directory, events)
            .map_err(|error| failed(path, error))?;
        // One directory by several names has one watch.
        match self
            .directories
            .iter_mut()
            .find(|known| known.watch == watch)
        {
            Some(known) => match (&mut known.names, name) {
                (Some(names), Some(name)) => drop(names.insert(name)),
                (names, None) => *names = None,
                (None, Some(_)) => {}
            },
            None => self.directories.push(Directory {
                path: directory.to_path_buf(),
                handle,
                watch,
                names: name.map(|name| HashSet::from([name])),
                is_gone: false,
            }),
        }
        Ok(())
    }

    /// A directory by its number.
    pub fn directory(&self, number: usize) -> &Directory {
        &self.directories[number]
    }

    /// Whether there is something left to watch.
    pub fn is_alive(&self) -> bool {
        self.directories.iter().any(|directory| !directory.is_gone)
    }

    /// Takes what has happened, without waiting for more.
    ///
    /// # Errors
    /// The system's.
    pub fn read(&mut self, batch: &mut Batch) -> Result<(), CommandError> {
        let mut reader = Reader::new(&self.inotify, &mut self.buffer);
        while batch.changes.len() < BATCH_FILES || !reader.is_buffer_empty() {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(failed(Path::new("."), error)),
            };
            let what = event.events();
            if what.contains(ReadFlags::QUEUE_OVERFLOW) {
                batch.has_lost = true;
                continue;
            }
            let directory = self.directories.iter_mut().enumerate();
            let found = directory.into_iter().find(|(_, d)| d.watch == event.wd());
            let Some((number, directory)) = found else {
                continue;
            };
            if what.intersects(ReadFlags::IGNORED | ReadFlags::DELETE_SELF | ReadFlags::UNMOUNT) {
                directory.is_gone = true;
                continue;
            }
            let Some(name) = event.file_name() else {
                continue;
            };
            let name = OsStr::from_bytes(name.to_bytes());
            if what.contains(ReadFlags::ISDIR) || !directory.counts(name) {
                continue;
            }
            let change = batch.changes.entry((number, name.to_os_string()));
            let change = change.or_default();
            change.is_closed |= what.contains(ReadFlags::CLOSE_WRITE);
            change.is_modified |= !what.contains(ReadFlags::CLOSE_WRITE);
        }
        Ok(())
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}
