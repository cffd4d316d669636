//! [`CacheDirectory`]: the files of a cache: finding, making, listing and removing them.

use std::collections::BTreeSet;
use std::collections::hash_map::RandomState;
use std::fs::{DirBuilder, File, OpenOptions};
use std::hash::BuildHasher;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use cowslip_block::error::system_words;
use cowslip_block::{Error, Result};
use cowslip_queue::lock;
use sha2::{Digest, Sha256};

use super::index::{Entry, Head, Index, Medium, sum_of};
use crate::url::ObjectUrl;
use crate::version::Version;

/// The byte of an index that its users share.
pub(crate) const USE_AT: u64 = 1 << 61;
/// The byte of an index that the process has which fetches the first block.
pub(crate) const BLOCKS_AT: u64 = 1 << 60;
/// Time in which other processes have to come to terms with this one.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// The first pause between two attempts; each is longer, up to the last.
const PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(20);
/// End of the names of files that are about to become indexes.
const UNFINISHED: &str = ".new";
/// Such a file has its name for a moment; one that is older is left of a process that has ended.
const UNFINISHED_KEPT: Duration = Duration::from_secs(60);

/// A directory with cached objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheDirectory {
    path: PathBuf,
    limit_bytes: u64,
    patience: Duration,
}

/// A cached object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cached {
    /// The URL, without query.
    pub url: String,
    /// The version.
    pub version: Version,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Space that its files take, in bytes.
    pub disk_bytes: u64,
    /// The time of its last use.
    pub used: SystemTime,
    /// Some process has it open.
    pub is_in_use: bool,
    /// The beginning of the names of its files.
    pub key: String,
}

/// Result of comparing the blocks of an object with their checksums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// The object.
    pub object: Cached,
    /// Blocks that are there.
    pub blocks: u64,
    /// Offsets of those that were damaged, in bytes. They are dropped.
    pub damaged: Vec<u64>,
}

/// The boot of the host, as the kernel names it; without a name, another one for each process.
pub(crate) fn this_boot() -> [u8; 16] {
    static BOOT: OnceLock<[u8; 16]> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let text =
            text.unwrap_or_else(|_| format!("{} {:?}", std::process::id(), SystemTime::now()));
        first_half(&Sha256::digest(text.trim()))
    })
}

fn first_half(digest: &[u8]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&digest[..16]);
    half
}

impl CacheDirectory {
    /// A directory for at most so much space. It is made if need be, for this user alone.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(path: &Path, limit_bytes: u64) -> Result<CacheDirectory> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|error| {
            let (path, words) = (path.display(), system_words(&error));
            Error::invalid(format!(
                "Could not make the cache directory '{path}': {words}"
            ))
        })?;
        // Other processes may have other working directories, and so may this one later.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        Ok(CacheDirectory {
            path,
            limit_bytes,
            patience: PATIENCE,
        })
    }

    /// The same, which waits for so long for processes that are in the way.
    pub(crate) fn with_patience(self, patience: Duration) -> CacheDirectory {
        CacheDirectory { patience, ..self }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Space that it may take, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    fn key(url: &ObjectUrl, version: &Version, block_bits: u32) -> String {
        let text = format!(
            "{}\n{:?}\n{:?}\n{}\n{block_bits}",
            url.resource(),
            version.e_tag,
            version.last_modified,
            version.bytes
        );
        let half = first_half(&Sha256::digest(text));
        half.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn index_path(&self, key: &str) -> PathBuf {
        self.path.join(format!("{key}.index"))
    }

    fn data_path(&self, key: &str) -> PathBuf {
        self.path.join(format!("{key}.data"))
    }

    /// The index and the data file of a version, which are made if need be. The index is in use
    /// until the returned file is closed.
    pub(crate) fn files_of(
        &self,
        url: &ObjectUrl,
        version: &Version,
        block_bits: u32,
    ) -> io::Result<(Index<File>, File)> {
        let head = Head {
            url: url.identity().to_string(),
            version: version.clone(),
            block_bits,
            boot: this_boot(),
        };
        let key = CacheDirectory::key(url, version, block_bits);
        let page = head.encode().ok_or(io::ErrorKind::InvalidFilename)?;
        let (begun, mut pause) = (Instant::now(), PAUSE);
        while begun.elapsed() < self.patience {
            let file = match writable().open(self.index_path(&key)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.publish(&key, &page)?;
                    continue;
                }
                opened => opened?,
            };
            if let Some(found) = self.enter(file, &head, &key)? {
                return Ok(found);
            }
            std::thread::sleep(pause);
            pause = (pause * 3 / 2).min(LAST_PAUSE);
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Makes an index, whole from the moment that it has its name. Others may be faster, or in the
    /// way: then there is nothing new, and the caller tries again.
    fn publish(&self, key: &str, page: &[u8]) -> io::Result<()> {
        // Containers that share the directory may have equal numbers of processes.
        let random = RandomState::new().hash_one(std::process::id());
        let own = self.path.join(format!("{key}.{random:016x}{UNFINISHED}"));
        let new = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&own);
        let file = match new {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
            opened => opened?,
        };
        let made = Medium::write_at(&file, page, 0)
            .and_then(|()| file.sync_data())
            .and_then(|()| std::fs::hard_link(&own, self.index_path(key)));
        let removed = removed(std::fs::remove_file(&own));
        match made.map_err(|error| (error.kind(), error)) {
            // Another process has made it, or has taken this file for one of the dead.
            Err((io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound, _)) => removed,
            Err((_, error)) => Err(error),
            Ok(()) => removed,
        }
    }

    /// Uses an index that is open; nothing if it is being removed or changed.
    fn enter(&self, file: File, head: &Head, key: &str) -> io::Result<Option<(Index<File>, File)>> {
        if lock::share(file.as_fd(), USE_AT, 1).is_err() {
            return Ok(None);
        }
        if !is_still(&file, &self.index_path(key)) {
            return Ok(None);
        }
        let index = match Index::open(file)? {
            Ok(index) => index,
            Err(file) => {
                self.write_again(file, head, key)?;
                return Ok(None);
            }
        };
        if index.head.url != head.url || index.head.version != head.version {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if !belong_to_boot(&index, &head.boot)? {
            return Ok(None);
        }
        let data = writable().create(true).open(self.data_path(key))?;
        if data.metadata()?.len() != head.version.bytes {
            data.set_len(head.version.bytes)?;
        }
        // The time of the last use.
        index.medium.set_modified(SystemTime::now())?;
        Ok(Some((index, data)))
    }

    /// Writes an index once more whose head is damaged or missing, unless others use it: they go on
    /// with what they know of it.
    fn write_again(&self, file: File, head: &Head, key: &str) -> io::Result<()> {
        if lock::exclude(file.as_fd(), USE_AT, 1).is_err()
            || !is_still(&file, &self.index_path(key))
        {
            return Ok(());
        }
        // Another process may have had this lock before.
        let Err(file) = Index::open(file)? else {
            return Ok(());
        };
        let page = head.encode().ok_or(io::ErrorKind::InvalidFilename)?;
        file.set_len(0)?;
        Medium::write_at(&file, &page, 0)?;
        file.sync_data()
    }

    /// The cached objects, those used last first.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<Cached>> {
        let found = self.scan()?;
        // One that is removed meanwhile is none.
        let all = found.keys.iter().filter_map(|key| self.cached(key).ok()?);
        Ok(by_use(all.collect()))
    }

    /// Space that all files of the cache take, in bytes; those that belong to no object included.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn taken_bytes(&self) -> Result<u64> {
        let found = self.scan()?;
        let unfinished = found.unfinished.iter().map(|path| space_of(path));
        let objects = found.keys.iter().map(|key| self.bytes_of(key));
        Ok(objects.chain(unfinished).sum())
    }

    fn bytes_of(&self, key: &str) -> u64 {
        space_of(&self.index_path(key)) + space_of(&self.data_path(key))
    }

    fn scan(&self) -> Result<Found> {
        let failed = |error: io::Error| {
            let (path, words) = (self.path.display(), system_words(&error));
            Error::invalid(format!(
                "Could not read the cache directory '{path}': {words}"
            ))
        };
        let mut found = Found::default();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let Some((key, rest)) = name.to_str().and_then(|name| name.split_once('.')) else {
                continue;
            };
            let is_key = key.len() == 32 && key.bytes().all(|byte| byte.is_ascii_hexdigit());
            if is_key && (rest == "index" || rest == "data") {
                found.keys.insert(key.to_string());
            } else if is_key && rest.ends_with(UNFINISHED) {
                found.unfinished.push(self.path.join(&name));
            }
        }
        Ok(found)
    }

    fn cached(&self, key: &str) -> io::Result<Option<Cached>> {
        let file = File::open(self.index_path(key))?;
        let metadata = file.metadata()?;
        let is_in_use = lock::is_locked_by_others(file.as_fd(), USE_AT, 1)?;
        let Ok(index) = Index::open(file)? else {
            return Ok(None);
        };
        Ok(Some(Cached {
            url: index.head.url,
            version: index.head.version,
            block_bytes: 1 << index.head.block_bits,
            disk_bytes: self.bytes_of(key),
            used: metadata.modified()?,
            is_in_use,
            key: key.to_string(),
        }))
    }

    /// Removes objects that are not in use until all take at most so much space, those first that
    /// were used longest ago. Returns those that it has removed, and the space that is left taken.
    /// What ended processes have left behind goes in any case.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn prune(&self, to_bytes: u64) -> Result<(Vec<Cached>, u64)> {
        let found = self.scan()?;
        let unfinished = found.unfinished.iter();
        let mut taken: u64 = unfinished.map(|path| left_of_unfinished(path)).sum();
        let mut all = Vec::new();
        for key in &found.keys {
            match self.cached(key) {
                Ok(Some(cached)) => all.push(cached),
                outcome => {
                    let bytes = self.bytes_of(key);
                    // One whose index cannot be read now may be whole.
                    let is_left = outcome
                        .map_or_else(|error| error.kind() == io::ErrorKind::NotFound, |_| true);
                    let is_removed = is_left && self.remove(key).is_ok_and(|removed| removed);
                    taken += if is_removed { 0 } else { bytes };
                }
            }
        }
        taken += all.iter().map(|cached| cached.disk_bytes).sum::<u64>();
        let mut all = by_use(all);
        let mut removed = Vec::new();
        while taken > to_bytes
            && let Some(oldest) = all.pop()
        {
            if self.remove(&oldest.key).is_ok_and(|is_removed| is_removed) {
                taken -= oldest.disk_bytes;
                removed.push(oldest);
            }
        }
        Ok((removed, taken))
    }

    /// Removes the files of an object, unless they are in use.
    fn remove(&self, key: &str) -> io::Result<bool> {
        // Where there is none, one is made: it is what processes lock.
        let index = writable()
            .create(true)
            .truncate(false)
            .open(self.index_path(key))?;
        if lock::exclude(index.as_fd(), USE_AT, 1).is_err()
            || !is_still(&index, &self.index_path(key))
        {
            return Ok(false);
        }
        // Interrupted, it leaves an index without entries, with data or without it. Who opens the
        // object writes the index once more, and a later pruning finds it.
        index.set_len(0)?;
        removed(std::fs::remove_file(self.data_path(key)))?;
        removed(std::fs::remove_file(self.index_path(key)))?;
        Ok(true)
    }

    /// Compares all blocks with their checksums, and drops those that are damaged.
    ///
    /// # Errors
    /// The directory or an object in it cannot be read.
    pub fn verify(&self) -> Result<Vec<Verified>> {
        let mut all = Vec::new();
        for object in self.list()? {
            let key = object.key.clone();
            match self.verify_one(object) {
                Ok(verified) => all.extend(verified),
                Err(error) => {
                    let (path, words) = (self.data_path(&key), system_words(&error));
                    let path = path.display();
                    return Err(Error::invalid(format!(
                        "Could not verify '{path}': {words}"
                    )));
                }
            }
        }
        Ok(all)
    }

    fn verify_one(&self, object: Cached) -> io::Result<Option<Verified>> {
        let file = match writable().open(self.index_path(&object.key)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        if lock::share(file.as_fd(), USE_AT, 1).is_err()
            || !is_still(&file, &self.index_path(&object.key))
        {
            return Ok(None);
        }
        let Ok(index) = Index::open(file)? else {
            return Ok(None);
        };
        // Who opens the object in a new boot of the host needs the index alone for that, and not
        // after all blocks have been read here.
        if !belong_to_boot(&index, &this_boot())? {
            return Ok(None);
        }
        let data = File::open(self.data_path(&object.key))?;
        let (mut blocks, mut damaged) = (0, Vec::new());
        let mut bytes = Vec::new();
        for block in 0..index.head.blocks() {
            let (Entry::Present(sum) | Entry::Durable(sum)) = index.entry(block)? else {
                continue;
            };
            blocks += 1;
            let start = block * object.block_bytes;
            let len = object.block_bytes.min(object.version.bytes - start);
            bytes.resize(len as usize, 0);
            Medium::read_at(&data, &mut bytes, start)?;
            // A process that stores this very block has its lock.
            let at = BLOCKS_AT + block;
            if sum_of(&bytes) != sum && lock::exclude(index.medium.as_fd(), at, 1).is_ok() {
                index.set(block, Entry::Absent)?;
                lock::release(index.medium.as_fd(), at, 1)?;
                damaged.push(start);
            }
        }
        Ok(Some(Verified {
            object,
            blocks,
            damaged,
        }))
    }
}

/// Names of files in a directory.
#[derive(Default)]
struct Found {
    /// Beginnings of the names of indexes and data.
    keys: BTreeSet<String>,
    /// Files that are about to become indexes, or were when their process ended.
    unfinished: Vec<PathBuf>,
}

/// Those used last first.
fn by_use(mut all: Vec<Cached>) -> Vec<Cached> {
    all.sort_by(|a, b| b.used.cmp(&a.used).then(a.key.cmp(&b.key)));
    all
}

/// Has an index that is in use belong to this boot of the host; `false` if others are in the way.
fn belong_to_boot(index: &Index<File>, boot: &[u8; 16]) -> io::Result<bool> {
    if index.boot()? == *boot {
        return Ok(true);
    }
    if lock::exclude(index.medium.as_fd(), USE_AT, 1).is_err() {
        return Ok(false);
    }
    if index.boot()? != *boot {
        index.begin_boot(boot)?;
    }
    lock::share(index.medium.as_fd(), USE_AT, 1)?;
    Ok(true)
}

/// Space that a file takes, in bytes; none if it is not there.
fn space_of(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |found| found.blocks() * 512)
}

/// Removes an unfinished file whose process must have ended; returns the space that it still takes.
fn left_of_unfinished(path: &Path) -> u64 {
    let age = std::fs::metadata(path).and_then(|found| found.modified());
    let age = age.map(|changed| changed.elapsed().unwrap_or_default());
    let is_old = age.is_ok_and(|age| age > UNFINISHED_KEPT);
    match is_old && std::fs::remove_file(path).is_ok() {
        true => 0,
        false => space_of(path),
    }
}

/// The outcome of a removal: a file that is not there is removed.
fn removed(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}

fn writable() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// Whether a name is still that of an open file.
fn is_still(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
