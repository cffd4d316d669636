//! [`CacheDirectory`]: the files of a cache: finding, making, listing and removing them.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

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
/// Attempts to come to terms with other processes, a millisecond each.
const ATTEMPTS: usize = 5000;
const PAUSE: Duration = Duration::from_millis(1);

/// A directory with cached objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheDirectory {
    path: PathBuf,
    limit_bytes: u64,
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
        Ok(CacheDirectory { path, limit_bytes })
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
        for _ in 0..ATTEMPTS {
            let file = match writable().open(self.index_path(&key)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.publish(&key, &page)?;
                    continue;
                }
                opened => opened?,
            };
            match self.enter(file, &head, &key)? {
                Some(found) => return Ok(found),
                None => std::thread::sleep(PAUSE),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Makes an index, whole from the moment that it has its name.
    fn publish(&self, key: &str, page: &[u8]) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = format!("{key}.{}-{number}.new", std::process::id());
        let own = self.path.join(own);
        let made = (|| {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&own)?;
            Medium::write_at(&file, page, 0)?;
            file.sync_data()?;
            match std::fs::hard_link(&own, self.index_path(key)) {
                // Another process was faster.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                linked => linked,
            }
        })();
        let removed = std::fs::remove_file(&own);
        made.and(removed)
    }

    /// Uses an index that is open; nothing if it is being removed or changed.
    fn enter(&self, file: File, head: &Head, key: &str) -> io::Result<Option<(Index<File>, File)>> {
        if lock::share(file.as_fd(), USE_AT, 1).is_err() {
            return Ok(None);
        }
        if !is_still(&file, &self.index_path(key)) {
            return Ok(None);
        }
        let Some(index) = Index::open(file)? else {
            // A damaged one is of no use to anybody.
            std::fs::remove_file(self.index_path(key))?;
            return Ok(None);
        };
        if index.head.url != head.url || index.head.version != head.version {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if index.boot()? != head.boot {
            if lock::exclude(index.medium.as_fd(), USE_AT, 1).is_err() {
                return Ok(None);
            }
            if index.boot()? != head.boot {
                index.begin_boot(&head.boot)?;
            }
            lock::share(index.medium.as_fd(), USE_AT, 1)?;
        }
        let data = writable().create(true).open(self.data_path(key))?;
        if data.metadata()?.len() != head.version.bytes {
            data.set_len(head.version.bytes)?;
        }
        // The time of the last use.
        index.medium.set_modified(SystemTime::now())?;
        Ok(Some((index, data)))
    }

    /// The cached objects, those used last first.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<Cached>> {
        let failed = |error: io::Error| {
            let (path, words) = (self.path.display(), system_words(&error));
            Error::invalid(format!(
                "Could not read the cache directory '{path}': {words}"
            ))
        };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let key = name.to_str().and_then(|name| name.strip_suffix(".index"));
            let is_key = |key: &&str| key.len() == 32 && key.bytes().all(|b| b.is_ascii_hexdigit());
            // One that is removed meanwhile is none.
            if let Some(key) = key.filter(is_key)
                && let Ok(Some(cached)) = self.cached(key)
            {
                found.push(cached);
            }
        }
        found.sort_by(|a, b| b.used.cmp(&a.used).then(a.key.cmp(&b.key)));
        Ok(found)
    }

    fn cached(&self, key: &str) -> io::Result<Option<Cached>> {
        let file = File::open(self.index_path(key))?;
        let metadata = file.metadata()?;
        let is_in_use = lock::is_locked_by_others(file.as_fd(), USE_AT, 1)?;
        let Some(index) = Index::open(file)? else {
            return Ok(None);
        };
        let data = std::fs::metadata(self.data_path(key));
        let data_blocks = data.map_or(0, |data| data.blocks());
        Ok(Some(Cached {
            url: index.head.url,
            version: index.head.version,
            block_bytes: 1 << index.head.block_bits,
            disk_bytes: (data_blocks + metadata.blocks()) * 512,
            used: metadata.modified()?,
            is_in_use,
            key: key.to_string(),
        }))
    }

    /// Removes objects that are not in use until all take at most so much space, those first that
    /// were used longest ago. Returns those that it has removed, and the space that is left taken.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn prune(&self, to_bytes: u64) -> Result<(Vec<Cached>, u64)> {
        let mut all = self.list()?;
        let mut taken: u64 = all.iter().map(|cached| cached.disk_bytes).sum();
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

    /// Removes an object, unless it is in use.
    fn remove(&self, key: &str) -> io::Result<bool> {
        let index = writable().open(self.index_path(key))?;
        if lock::exclude(index.as_fd(), USE_AT, 1).is_err()
            || !is_still(&index, &self.index_path(key))
        {
            return Ok(false);
        }
        // Without its index, data means nothing; the other way round, an index without its data
        // would have wrong sums.
        std::fs::remove_file(self.index_path(key))?;
        match std::fs::remove_file(self.data_path(key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(true),
        }
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
        if lock::share(file.as_fd(), USE_AT, 1).is_err() {
            return Ok(None);
        }
        let Some(index) = Index::open(file)? else {
            return Ok(None);
        };
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
