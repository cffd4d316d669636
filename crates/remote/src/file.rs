//! [`RemoteFile`]: a remote object as a file that is read.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use cowslip_block::file::{
    BlockFile, Capabilities, ContentId, Durability, FileExtent, FileId, Space, Storage,
};
use cowslip_block::{Error, Result};
use cowslip_queue::{IoVec, IoVecMut, Pending, pending};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use crate::blocks::{Blocks, Bounds, Urgency};
use crate::cache::{CacheDirectory, CacheFile};
use crate::defaults::{Defaulted, Defaults};
use crate::environment::Environment;
use crate::name::{RemoteName, Secrets};
use crate::notice::Notice;
use crate::object::{Object, Patience, Way};
use crate::options::Login;
use crate::reach::{Reach, Registered};
use crate::runtime;
use crate::trace::Recording;
use crate::version::Version;

/// Blocks of an object at most: one that is longer has longer blocks.
const BLOCKS_MAX: u64 = 1 << 22;
/// Bytes of a read that are in memory at a time.
const READ_MAX: usize = 8 << 20;

/// Opens an object; `shown` is what users know it by.
///
/// # Errors
/// It cannot be reached or found, or the server serves no ranges of it; writing is wanted.
pub async fn open(
    name: &RemoteName,
    secrets: Secrets<Option<Zeroizing<String>>>,
    environment: &Environment,
    (shown, writable): (&str, bool),
) -> Result<Arc<RemoteFile>> {
    if writable {
        let scheme = name.url.scheme().name();
        let text = format!("{scheme} objects are read-only");
        return Err(Error::invalid(text));
    }
    let defaults = Defaults::in_force(environment)?;
    let way = way(name, secrets, environment.clone(), &defaults);
    let path = name.cache.as_ref().or(defaults.cache.as_ref());
    let path = path.filter(|path| !path.as_os_str().is_empty());
    let cache = path.map(|path| path.as_path());
    let reach = Reach::of(&way.url, &way.options, &way.environment, cache);
    let (to, opened) = pending();
    let task = {
        let (name, defaults) = (name.clone(), defaults.clone());
        async move { to.complete(open_blocks(way, &name, &defaults).await) }
    };
    enter()?.spawn(task);
    let blocks = opened.await?;
    let (url, bytes) = (&name.url, blocks.bytes());
    let record = name.record.as_ref().or(defaults.record.as_ref());
    let recording = record
        .map(|path| Recording::begin(path, url, bytes))
        .transpose()?;
    if let Some(path) = name.trace.as_ref().or(defaults.trace.as_ref()) {
        crate::prefetch::replay(&blocks, crate::trace::read(path, url, bytes)?);
    }
    let background = name.background_bytes.unwrap_or(defaults.background_bytes);
    if background > 0 && blocks.cache.is_some() {
        crate::prefetch::fill(&blocks, background);
    }
    let storage = Storage::named(&name.url.resource());
    let mut file = RemoteFile::new(blocks, (shown, storage), reach);
    file.recording = recording;
    Ok(Arc::new(file))
}

fn enter() -> Result<runtime::Entered> {
    runtime::enter().map_err(|error| {
        let words = cowslip_block::error::system_words(&error);
        Error::invalid(format!("Could not start a thread: {words}"))
    })
}

fn way(
    name: &RemoteName,
    secrets: Secrets<Option<Zeroizing<String>>>,
    environment: Environment,
    defaults: &Defaulted,
) -> Way {
    let mut options = name.store.clone();
    options.login = name.user.as_ref().map(|user| Login {
        user: user.clone(),
        password: secrets.password.unwrap_or_default(),
    });
    options.cookie = options.cookie.or(secrets.cookie);
    let usual = Patience::default();
    Way {
        url: name.url.clone(),
        options,
        environment,
        patience: Patience {
            timeout: name
                .wait_timeout
                .or(defaults.timeout)
                .unwrap_or(usual.timeout),
            on_failure: name.on_failure.unwrap_or(defaults.on_failure),
        },
        notify: defaults.notify.clone(),
    }
}

async fn open_blocks(way: Way, name: &RemoteName, defaults: &Defaulted) -> Result<Arc<Blocks>> {
    let path = name.cache.as_ref().or(defaults.cache.as_ref());
    let path = path.filter(|path| !path.as_os_str().is_empty());
    // Of clients that share a cache, one fetches the block.
    let first = path.map_or(name.block_bytes, |_| 1);
    let (object, first) = Object::open(way, first).await?;
    let bytes = object.version().bytes;
    let mut block_bytes = name.block_bytes;
    while bytes.div_ceil(block_bytes) > BLOCKS_MAX {
        block_bytes *= 2;
    }
    let cache = match path {
        Some(path) => {
            let limit = name.cache_bytes.unwrap_or(defaults.cache_bytes);
            let directory = CacheDirectory::open(path, limit)?;
            let directory = directory.with_patience(defaults.cache_patience);
            open_cache(&object, directory, block_bytes).await?
        }
        None => None,
    };
    let bounds = Bounds {
        connections: name.connections,
        memory_bytes: name.memory_bytes,
        ahead_bytes: name.readahead_bytes,
    };
    let blocks = Arc::new(Blocks::new(object, cache, block_bytes, bounds));
    if first.len() as u64 == bytes.min(block_bytes) {
        blocks.keep_first(first).await;
    }
    Ok(blocks)
}

/// The cache of an object; none where it cannot be had for the moment.
async fn open_cache(
    object: &Object,
    directory: CacheDirectory,
    block_bytes: u64,
) -> Result<Option<Arc<CacheFile>>> {
    if !object.version().is_certain() {
        let why = "the server does not say which version it has";
        object.notify(&Notice::CacheUnused { why });
        return Ok(None);
    }
    let (url, version) = (object.url().clone(), object.version().clone());
    let opened = tokio::task::spawn_blocking(move || {
        CacheFile::open(&directory, &url, &version, block_bytes.trailing_zeros())
    });
    let opened = opened.await;
    let error = match opened.unwrap_or_else(|_| Err(io::ErrorKind::Other.into())) {
        Ok(cache) => return Ok(Some(Arc::new(cache))),
        Err(error) => error,
    };
    let why = cowslip_block::error::system_words(&error);
    match is_passing(&error) {
        true => {
            object.notify(&Notice::CacheUnused { why: &why });
            Ok(None)
        }
        false => Err(Error::invalid(format!("Could not use the cache: {why}"))),
    }
}

/// Whether a failure is of this moment, and no mistake in what was asked for.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, ResourceBusy, StorageFull};
    matches!(error.kind(), QuotaExceeded | ResourceBusy | StorageFull)
        || error.raw_os_error() == Some(cowslip_block::errno::EIO)
}

/// A remote object in one version, as a file.
pub struct RemoteFile {
    name: String,
    storage: Storage,
    capabilities: Capabilities,
    blocks: Arc<Blocks>,
    recording: Option<Recording>,
    _open: Registered,
}

cowslip_block::debug_by_name!(RemoteFile, name);

impl RemoteFile {
    fn new(blocks: Arc<Blocks>, (name, storage): (&str, Storage), reach: Reach) -> RemoteFile {
        RemoteFile {
            name: name.to_string(),
            storage,
            capabilities: Capabilities {
                extends_with_zeroes: true,
                ..Capabilities::NONE
            },
            blocks,
            recording: None,
            _open: Registered::new(reach),
        }
    }

    /// The version that is read.
    pub fn version(&self) -> &Version {
        self.blocks.object.version()
    }

    /// Bytes of contents that have come from the server so far.
    pub fn fetched_bytes(&self) -> u64 {
        self.blocks.fetched_bytes()
    }

    /// Ends all work ahead of reads; reads go on.
    fn end(&self) {
        self.blocks.abandon();
        if let Some(recording) = &self.recording {
            recording.finish(self.blocks.block_bytes());
        }
    }

    /// Asks for ranges in their order, ahead of the reads that will come for them, if there is a
    /// cache to keep them.
    pub fn prefetch(&self, ranges: Vec<Range<u64>>) {
        crate::prefetch::replay(&self.blocks, ranges);
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        self.end();
    }
}

/// Fills a list from blocks that hold its range.
fn copy(blocks: &Blocks, parts: &[Bytes], first: u64, offset: u64, target: &mut IoVecMut) {
    let unit = blocks.block_bytes();
    let end = offset + target.len() as u64;
    for (number, part) in (first..).zip(parts) {
        let start = number * unit;
        let from = offset.max(start);
        let to = end.min(start + part.len() as u64);
        if from < to {
            let part = &part[(from - start) as usize..(to - start) as usize];
            target.copy_from_slice((from - offset) as usize, part);
        }
    }
    let bytes = blocks.bytes();
    if end > bytes {
        let kept = bytes.saturating_sub(offset) as usize;
        target.fill_range(kept..target.len(), 0);
    }
}

async fn fill(blocks: &Arc<Blocks>, offset: u64, target: &mut IoVecMut) -> io::Result<()> {
    let range = offset..offset + target.len() as u64;
    let numbers = blocks.blocks_of(&range);
    let first = numbers.start;
    match blocks.read(numbers, Urgency::Guest).await {
        Ok(parts) => {
            copy(blocks, &parts, first, offset, target);
            Ok(())
        }
        Err(why) => Err(io::Error::other(Unreadable(why))),
    }
}

/// The reason of a failed read.
#[derive(Debug)]
struct Unreadable(Arc<str>);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unreadable {}

fn read_only<T>() -> Pending<io::Result<T>> {
    Pending::ready(Err(io::ErrorKind::ReadOnlyFilesystem.into()))
}

impl BlockFile for RemoteFile {
    cowslip_block::file_from_fields!(name, capabilities, storage);

    fn content_id(&self) -> Option<ContentId> {
        let version = self.version();
        let tag = version
            .e_tag
            .as_ref()
            .filter(|tag| !tag.starts_with("W/"))?;
        let identity = self.blocks.object.url().resource();
        let digest = Sha256::digest(format!("{identity}\n{tag}\n{}", version.bytes));
        let half = |at: usize| {
            let half = digest[at..at + 8].iter();
            half.fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        Some(ContentId::whole(FileId(half(0), half(8))))
    }

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.blocks.bytes()))
    }

    fn read(&self, offset: u64, mut target: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let Some(end) = offset.checked_add(target.len() as u64) else {
            return Pending::ready((Err(io::ErrorKind::InvalidInput.into()), target));
        };
        let numbers = self.blocks.blocks_of(&(offset..end));
        if let Some(why) = self.blocks.object.change() {
            return Pending::ready((Err(io::Error::other(why)), target));
        }
        let next = self.blocks.note_read(&(offset..end));
        if let Some(recording) = &self.recording {
            recording.note(numbers.clone());
        }
        if let Some(cache) = &self.blocks.cache
            && numbers.clone().all(|block| cache.is_verified(block))
        {
            self.blocks.ask(next);
            let blocks = Arc::clone(&self.blocks);
            return read_cache(blocks, Arc::clone(cache), offset, target);
        }
        let is_small = target.len() <= READ_MAX;
        if is_small && let Some(parts) = self.blocks.in_memory(numbers.clone()) {
            self.blocks.ask(next);
            copy(&self.blocks, &parts, numbers.start, offset, &mut target);
            return Pending::ready((Ok(()), target));
        }
        match &self.blocks.cache {
            Some(cache) if cowslip_queue::has_queue() => {
                let blocks = Arc::clone(&self.blocks);
                read_present((blocks, next), Arc::clone(cache), offset, target)
            }
            _ => {
                self.blocks.expect_after(next);
                bring(Arc::clone(&self.blocks), offset, target)
            }
        }
    }

    fn write(&self, _: u64, _: IoVec, _: Durability) -> Pending<io::Result<()>> {
        read_only()
    }

    fn zero(&self, _: u64, _: u64, _: Space) -> Pending<io::Result<()>> {
        read_only()
    }

    fn discard(&self, _: u64, _: u64) -> Pending<io::Result<()>> {
        read_only()
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let size = self.blocks.bytes();
        Pending::ready(Ok(FileExtent::split_at_end(offset, len, size)))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        Pending::ready(Ok(()))
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        match len == self.blocks.bytes() {
            true => Pending::ready(Ok(())),
            false => read_only(),
        }
    }

    fn close(&self) -> Pending<io::Result<()>> {
        self.end();
        let Some(cache) = self.blocks.cache.clone() else {
            return Pending::ready(Ok(()));
        };
        cowslip_queue::blocking(move || {
            // Where it fails, the blocks are fetched again after the next start of the host.
            drop(cache.mark_durable());
            Ok(())
        })
    }
}

/// Reads blocks of the cache that are verified; where its disk fails, from the server.
fn read_cache(
    blocks: Arc<Blocks>,
    cache: Arc<CacheFile>,
    offset: u64,
    target: IoVecMut,
) -> Pending<(io::Result<()>, IoVecMut)> {
    let read = async move {
        let (outcome, target) = cache.read(offset, target).await;
        if outcome.is_ok() {
            return (outcome, target);
        }
        cache.distrust(blocks.blocks_of(&(offset..offset + target.len() as u64)));
        bring(blocks, offset, target).await
    };
    if !cowslip_queue::has_queue() {
        return cowslip_queue::blocking(move || cowslip_queue::block_here(read));
    }
    let (to, result) = pending();
    cowslip_queue::spawn(async move { to.complete(read.await) });
    result
}

/// Reads blocks that the cache may have; what it has not comes from the server, with the blocks
/// that will follow.
fn read_present(
    (blocks, next): (Arc<Blocks>, Range<u64>),
    cache: Arc<CacheFile>,
    offset: u64,
    mut target: IoVecMut,
) -> Pending<(io::Result<()>, IoVecMut)> {
    let numbers = blocks.blocks_of(&(offset..offset + target.len() as u64));
    let (to, result) = pending();
    cowslip_queue::spawn(async move {
        if let Some(parts) = cache.present(numbers.clone()).await {
            blocks.ask(next);
            copy(&blocks, &parts, numbers.start, offset, &mut target);
            return to.complete((Ok(()), target));
        }
        blocks.expect_after(next);
        to.complete(bring(blocks, offset, target).await);
    });
    result
}

/// Reads by the thread of requests, which looks into the cache first.
fn bring(
    blocks: Arc<Blocks>,
    offset: u64,
    target: IoVecMut,
) -> Pending<(io::Result<()>, IoVecMut)> {
    let entered = match runtime::enter() {
        Ok(entered) => entered,
        Err(error) => return Pending::ready((Err(error), target)),
    };
    let (to, result) = pending();
    entered.spawn(async move { to.complete(fill_in_parts(&blocks, offset, target).await) });
    result
}

/// Reads a list, a part at a time, so that memory stays within bounds.
async fn fill_in_parts(
    blocks: &Arc<Blocks>,
    offset: u64,
    mut target: IoVecMut,
) -> (io::Result<()>, IoVecMut) {
    let mut done: Option<IoVecMut> = None;
    let mut at = offset;
    loop {
        let rest = match target.len() > READ_MAX {
            true => Some(target.split_off(READ_MAX)),
            false => None,
        };
        let outcome = fill(blocks, at, &mut target).await;
        at += target.len() as u64;
        let mut whole = match done.take() {
            Some(mut before) => {
                before.append(target);
                before
            }
            None => target,
        };
        match (outcome, rest) {
            (Ok(()), Some(rest)) => {
                done = Some(whole);
                target = rest;
            }
            (outcome, rest) => {
                if let Some(rest) = rest {
                    whole.append(rest);
                }
                return (outcome, whole);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use cowslip_block::options::{self, Options};
    use cowslip_queue::{Backend, BufMut, Queue, block_here};
    use cowslip_testbed::web::{WebObject, WebServer};

    use super::*;
    use crate::notice::Notify;
    use crate::url::Scheme;

    /// The way to an object with a cache, and what was said of it.
    fn with_cache(server: &WebServer, dir: &std::path::Path) -> (Way, RemoteName, Defaulted) {
        let list = format!(
            "url={},readahead=0,cache-dir={}",
            server.url("/a"),
            dir.display()
        );
        let mut options = Options::new(options::split(&list).unwrap());
        let name = RemoteName::of_options(Scheme::Http, &mut options).unwrap();
        let defaults = Defaults::in_force(&Environment::default()).unwrap();
        let way = way(&name, Secrets::default(), Environment::default(), &defaults);
        (way, name, defaults)
    }

    /// The blocks of an object, all of which have been read once.
    fn all_read((way, name, defaults): (Way, RemoteName, Defaulted)) -> Arc<Blocks> {
        let (to, opened) = pending();
        enter().unwrap().spawn(async move {
            let blocks = open_blocks(way, &name, &defaults).await.unwrap();
            let all = 0..blocks.count();
            blocks.read(all, Urgency::Guest).await.unwrap();
            to.complete(blocks);
        });
        block_here(opened)
    }

    /// An object, read once into a cache whose disk fails from then on.
    fn with_failing_cache(server: &WebServer, dir: &std::path::Path) -> RemoteFile {
        let mut blocks = all_read(with_cache(server, dir));
        loop {
            // The end of the request may hold it for a moment.
            if let Some(blocks) = Arc::get_mut(&mut blocks)
                && let Some(cache) = blocks.cache.as_mut().and_then(Arc::get_mut)
            {
                cache.break_data();
                break;
            }
            std::thread::yield_now();
        }
        RemoteFile::new(blocks, ("a", Storage::named("a")), Reach::default())
    }

    #[test]
    fn a_cache_that_others_hold_is_not_waited_for_for_ever() {
        let server = WebServer::start().unwrap();
        server.put("/a", WebObject::tagged(vec![7; 100_000], "one"));
        let dir = tempfile::tempdir().unwrap();
        assert!(all_read(with_cache(&server, dir.path())).cache.is_some());
        let mut entries = std::fs::read_dir(dir.path()).unwrap();
        let index = entries.find_map(|entry| {
            let path = entry.unwrap().path();
            (path.extension()? == "index").then_some(path)
        });
        let index = std::fs::File::options()
            .read(true)
            .write(true)
            .open(index.unwrap())
            .unwrap();
        // As if the host had been started again: who opens it needs the index alone for a moment.
        index.write_all_at(&[0; 16], 4080).unwrap();
        cowslip_queue::lock::share(index.as_fd(), 1 << 61, 1).unwrap();
        let (mut way, name, mut defaults) = with_cache(&server, dir.path());
        let noticed = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&noticed);
        way.notify = Notify(Arc::new(move |_: &_, notice: &Notice<'_>| {
            assert!(matches!(notice, Notice::CacheUnused { .. }));
            counted.fetch_add(1, Ordering::Relaxed);
        }));
        defaults.cache_patience = Duration::from_millis(50);
        assert!(all_read((way, name, defaults)).cache.is_none());
        assert_eq!(noticed.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn what_a_failing_disk_cannot_give_back_comes_from_the_server() {
        let server = WebServer::start().unwrap();
        let bytes: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
        server.put("/a", WebObject::tagged(bytes.clone(), "one"));
        let read = |file: &RemoteFile, offset: u64, len: usize| {
            let read = file.read(offset, BufMut::for_overwrite(len).into());
            async move {
                let (outcome, target) = read.await;
                outcome.map(|()| target.to_vec())
            }
        };
        let dir = tempfile::tempdir().unwrap();
        let file = with_failing_cache(&server, dir.path());
        server.forget();
        let queue = Queue::new(Backend::Auto).unwrap();
        let found = queue.block_on(async { read(&file, 70_000, 1000).await });
        assert!(found.unwrap() == bytes[70_000..71_000]);
        assert_eq!(server.sent(), 64 << 10, "one block");
        // Without a queue, and from memory.
        let found = block_here(read(&file, 1, 200_000));
        assert!(found.unwrap() == bytes[1..200_001]);
        assert_eq!(server.sent(), 256 << 10);
        let found = block_here(async { read(&file, 1, 200_000).await });
        assert!(found.unwrap() == bytes[1..200_001]);
        assert_eq!(server.sent(), 256 << 10);
    }
}
