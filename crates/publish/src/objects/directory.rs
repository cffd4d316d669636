//! [`Directory`]: a directory of the host as a store, an object a file.
//!
//! An object is written to a file of another name, flushed and renamed, so readers see it complete
//! or not at all, also after a power failure; the directories are flushed when [`Objects::settle`]
//! is called, before anything refers to what was written.

use std::collections::BTreeSet;
use std::collections::hash_map::RandomState;
use std::fs::{self, File, OpenOptions};
use std::hash::BuildHasher;
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

use cowslip_block::error::system_words;
use cowslip_queue::blocking;

use super::{Existing, LIST_BYTES_MAX, Listing, ObjectError, ObjectFuture, ObjectInfo, Objects};

/// How the names of files begin that are not objects so far. No key has a part that begins so.
const UNFINISHED: &str = ".unfinished-";
/// Unfinished files of killed programs are removed by a later one when they are older.
const UNFINISHED_KEPT_SECONDS: u64 = 24 * 60 * 60;

static OPEN: LazyLock<Mutex<BTreeSet<PathBuf>>> = LazyLock::new(Mutex::default);

/// The directories that this process reads published disks in, for a sandbox that keeps them
/// readable.
pub fn open_directories() -> Vec<PathBuf> {
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.iter().cloned().collect()
}

/// A directory of the host.
#[derive(Debug)]
pub struct Directory {
    root: PathBuf,
    /// Directories with names that are not durable.
    written: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl Directory {
    /// The store in a directory, which is made with the first object.
    ///
    /// # Errors
    /// The current directory is gone.
    pub fn new(root: &Path) -> io::Result<Directory> {
        let root = std::path::absolute(root)?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.insert(root.clone());
        Ok(Directory {
            root,
            written: Arc::default(),
        })
    }
}

fn failed(error: &io::Error) -> ObjectError {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => ObjectError::Missing,
        ErrorKind::AlreadyExists => ObjectError::Exists,
        _ => ObjectError::Failed(system_words(error)),
    }
}

/// Runs a call on the queue's threads.
fn call<'a, T: Send + 'static>(
    call: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> ObjectFuture<'a, T> {
    let done = blocking(call);
    Box::pin(async move { done.await.map_err(|error| failed(&error)) })
}

fn put(path: &Path, bytes: &[u8], existing: Existing) -> io::Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let parent = path.parent().unwrap_or(Path::new("/"));
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    // Containers that share a directory may have equal numbers of processes.
    let random = RandomState::new().hash_one(number);
    let unfinished = format!("{UNFINISHED}{}-{random:016x}-{number}", std::process::id());
    let unfinished = parent.join(unfinished);
    let written = match write_new(&unfinished, bytes) {
        // A pruning has removed the folder in between, which was empty.
        Err(error) if error.kind() == ErrorKind::NotFound => write_new(&unfinished, bytes),
        written => written,
    };
    if let Err(error) = &written
        && error.kind() == ErrorKind::AlreadyExists
    {
        // It is another's, and says nothing about the object.
        return Err(io::Error::other("an unfinished file has the same name"));
    }
    let written = written.and_then(|()| match existing {
        Existing::Replace => fs::rename(&unfinished, path),
        // A link fails where the name is taken; a rename would replace it.
        Existing::Keep => fs::hard_link(&unfinished, path),
    });
    if written.is_err() || existing == Existing::Keep {
        let removed = fs::remove_file(&unfinished);
        return written.and(removed);
    }
    written
}

/// The directories from that of an object up to the root.
fn folders(root: &Path, key: &str) -> Vec<PathBuf> {
    let path = root.join(key);
    let above = path.ancestors().skip(1);
    let above = above.take_while(|above| above.starts_with(root));
    above.map(Path::to_path_buf).collect()
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_data()
}

fn info(key: &str, found: &fs::Metadata) -> ObjectInfo {
    let since = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    let since = since.duration_since(SystemTime::UNIX_EPOCH);
    ObjectInfo {
        key: key.to_string(),
        bytes: found.len(),
        written_ms: since.map_or(0, |since| since.as_millis() as i64),
    }
}

/// Adds all files below a directory; its key is `prefix`.
fn list(directory: &Path, prefix: &str, found: &mut Listing) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let metadata = match entry.metadata() {
            // It was removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        let key = format!("{prefix}/{name}");
        if metadata.is_dir() {
            list(&entry.path(), &key, found)?;
        } else if name.starts_with(UNFINISHED) {
            let age = metadata.modified()?.elapsed().unwrap_or_default();
            if age.as_secs() > UNFINISHED_KEPT_SECONDS {
                // Where it cannot be removed, another program does.
                drop(fs::remove_file(entry.path()));
            }
        } else {
            let pushed = found.push(info(&key, &metadata));
            pushed.map_err(|error| io::Error::other(error.to_string()))?;
        }
    }
    Ok(())
}

impl Objects for Directory {
    fn put(&self, key: &str, bytes: Vec<u8>, existing: Existing) -> ObjectFuture<'_, ()> {
        let (path, key) = (self.root.join(key), key.to_string());
        let (root, written) = (self.root.clone(), Arc::clone(&self.written));
        call(move || {
            put(&path, &bytes, existing)?;
            let mut written = written.lock().unwrap_or_else(PoisonError::into_inner);
            written.extend(folders(&root, &key));
            Ok(())
        })
    }

    fn get(&self, key: &str, range: Range<u64>) -> ObjectFuture<'_, Vec<u8>> {
        let path = self.root.join(key);
        call(move || {
            let file = File::open(path)?;
            // A file that is shorter must not cost the memory of the whole range.
            if file.metadata()?.len() < range.end {
                let text = "the object is shorter than what is asked of it";
                return Err(io::Error::new(ErrorKind::UnexpectedEof, text));
            }
            let mut bytes = vec![0; (range.end - range.start) as usize];
            file.read_exact_at(&mut bytes, range.start)?;
            Ok(bytes)
        })
    }

    fn info(&self, key: &str) -> ObjectFuture<'_, ObjectInfo> {
        let (path, key) = (self.root.join(key), key.to_string());
        call(move || Ok(info(&key, &fs::metadata(path)?)))
    }

    fn list(&self, prefix: &str) -> ObjectFuture<'_, Vec<ObjectInfo>> {
        let (path, prefix) = (self.root.join(prefix), prefix.to_string());
        let (root, written) = (self.root.clone(), Arc::clone(&self.written));
        call(move || {
            let mut listing = Listing::new(LIST_BYTES_MAX);
            list(&path, &prefix, &mut listing)?;
            let found = listing.into_vec();
            // A process that was killed may not have flushed what it has stored, and what is found
            // may be referred to.
            let above = found.iter().flat_map(|one| folders(&root, &one.key));
            let above: Vec<PathBuf> = above.collect();
            let mut written = written.lock().unwrap_or_else(PoisonError::into_inner);
            written.extend(above);
            Ok(found)
        })
    }

    fn delete(&self, key: &str) -> ObjectFuture<'_, ()> {
        let path = self.root.join(key);
        call(move || match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => {
                removed?;
                // The folder of a session goes with its last pack; others are not empty.
                drop(path.parent().map(fs::remove_dir));
                Ok(())
            }
        })
    }

    fn settle(&self) -> ObjectFuture<'_, ()> {
        let written = Arc::clone(&self.written);
        call(move || {
            let mut written = written.lock().unwrap_or_else(PoisonError::into_inner);
            for directory in &*written {
                match File::open(directory) {
                    // It was empty, and is gone.
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    opened => opened?.sync_all()?,
                }
            }
            written.clear();
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    #[test]
    fn folders_of_what_others_have_stored_are_flushed_before_it_is_referred_to() {
        let dir = tempfile::tempdir().unwrap();
        let wait = cowslip_queue::block_here::<ObjectFuture<'_, ()>>;
        let killed = Directory::new(dir.path()).unwrap();
        wait(killed.put("packs/session/one", vec![1], Existing::Keep)).unwrap();
        // Its successor stores nothing there.
        let successor = Directory::new(dir.path()).unwrap();
        let found = cowslip_queue::block_here(successor.list("packs/session")).unwrap();
        assert_eq!(found.len(), 1);
        let written = successor.written.lock().unwrap().clone();
        for folder in ["packs/session", "packs", ""] {
            assert!(written.contains(&dir.path().join(folder)), "{folder}");
        }
        wait(successor.settle()).unwrap();
        assert!(successor.written.lock().unwrap().is_empty());
    }
}
