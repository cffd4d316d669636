//! [`PublishedDisk`]: reads of a published disk in place.
//!
//! Chunks that are neighbours in a pack are fetched together, and a chunk that several requests
//! want is fetched once. Data that was unpacked stays in memory up to a limit, the last used
//! longest. No byte is returned whose chunk does not have the digest that the index says, and the
//! index has the digest by which it was opened.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cowslip_block::disk::within;
use cowslip_block::{Error, IoVecMut, Result, Workers};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use lru::LruCache;

use crate::cut::BLOCK_BYTES;
use crate::digest::Digest;
use crate::index::{Content, Index};
use crate::pack;
use crate::store::{Store, pack_key};

/// Bytes of unpacked chunks that are kept by default.
pub const CACHE_BYTES: u64 = 64 << 20;
/// Bytes of the disk that are read at a time, so that a long request takes little memory.
const READ_BYTES: u64 = 4 << 20;
/// Bytes of a pack between two chunks that are fetched rather than asked for apart.
const GAP_BYTES: u64 = 64 << 10;
/// Bytes of one fetch.
const FETCH_BYTES: u64 = 4 << 20;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// The data of a chunk.
type Data = Arc<Vec<u8>>;

/// Chunks that are fetched together, by their numbers.
type Group = Arc<HashMap<u32, Data>>;

/// A fetch that is under way, for all that wait for it.
type Fetch = Shared<BoxFuture<'static, std::result::Result<Group, Arc<Error>>>>;

/// A part of a published disk in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First byte on the disk.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Its content.
    pub content: Content,
}

/// A published disk that is open.
pub struct PublishedDisk {
    name: String,
    digest: Digest,
    store: Store,
    index: Arc<Index>,
    workers: Workers,
    kept: Arc<Mutex<Kept>>,
}

impl std::fmt::Debug for PublishedDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PublishedDisk")
            .field("name", &self.name)
            .field("digest", &self.digest)
            .finish_non_exhaustive()
    }
}

/// Chunks in memory, and those that are on their way.
struct Kept {
    chunks: LruCache<u32, Data>,
    bytes: u64,
    bytes_max: u64,
    fetches: HashMap<u32, Fetch>,
    fetched_bytes: u64,
}

impl Kept {
    /// Enters what was fetched, and forgets what was used longest ago.
    fn enter(&mut self, group: &HashMap<u32, Data>) {
        for (number, data) in group {
            self.bytes += data.len() as u64;
            if let Some((_, old)) = self.chunks.push(*number, Arc::clone(data)) {
                self.bytes -= old.len() as u64;
            }
        }
        while self.bytes > self.bytes_max
            && let Some((_, old)) = self.chunks.pop_lru()
        {
            self.bytes -= old.len() as u64;
        }
    }
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PublishedDisk {
    /// Opens the disk whose index has this digest; `name` is for messages.
    ///
    /// # Errors
    /// There is none; it is damaged; the store's.
    pub async fn open(
        store: &Store,
        digest: Digest,
        name: &str,
        (cache_bytes, workers): (u64, Workers),
    ) -> Result<PublishedDisk> {
        let Some(index) = store.index(digest).await? else {
            return Err(Error::invalid(format!(
                "There is no published disk '{name}'"
            )));
        };
        Ok(PublishedDisk {
            name: name.to_string(),
            digest,
            store: store.clone(),
            index: Arc::new(index),
            workers,
            kept: Arc::new(Mutex::new(Kept {
                chunks: LruCache::unbounded(),
                bytes: 0,
                bytes_max: cache_bytes,
                fetches: HashMap::new(),
                fetched_bytes: 0,
            })),
        })
    }

    /// The name for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The digest of the index: equal disks of one session have equal ones.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.index.disk_bytes
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Bytes that were asked of packs so far.
    pub fn fetched_bytes(&self) -> u64 {
        lock(&self.kept).fetched_bytes
    }

    /// The parts of a range, at most about `max`.
    pub fn parts(&self, range: Range<u64>, max: usize) -> Vec<Part> {
        let end = range.end.min(self.size());
        let mut parts: Vec<Part> = Vec::new();
        let mut at = range.start;
        if at >= end {
            return parts;
        }
        let mut run = self.index.run_at(at / BLOCK);
        while at < end && parts.len() < max {
            let until = (self.index.end_of_run(run) * BLOCK).min(end);
            let content = self.index.runs[run].content;
            let len = until - at;
            parts.push(Part {
                start: at,
                len,
                content,
            });
            (at, run) = (until, run + 1);
        }
        parts
    }

    /// Reads into a list.
    ///
    /// # Errors
    /// A range beyond the end; the store's; a damaged chunk.
    pub async fn read(&self, offset: u64, mut target: IoVecMut) -> Result<IoVecMut> {
        let len = target.len() as u64;
        within(self.size(), offset, len)?;
        let mut done = 0;
        while done < len {
            let piece = READ_BYTES.min(len - done);
            let start = offset + done;
            let parts = self.parts(start..start + piece, usize::MAX);
            let chunks = self.chunks(&parts).await?;
            for part in &parts {
                let at = (part.start - offset) as usize;
                match part.content {
                    Content::Chunk(number) => {
                        let run = self.index.run_at(part.start / BLOCK);
                        let from = (part.start - self.index.runs[run].start * BLOCK) as usize;
                        let data = &chunks[&number];
                        target.copy_from_slice(at, &data[from..from + part.len as usize]);
                    }
                    Content::Unallocated | Content::Zeroes => {
                        target.fill_range(at..at + part.len as usize, 0);
                    }
                }
            }
            done += piece;
        }
        Ok(target)
    }

    /// Fetches what a range needs, so that a read finds it. A failure is left to that read.
    pub async fn prefetch(&self, range: Range<u64>) {
        let parts = self.parts(range, usize::MAX);
        drop(self.chunks(&parts).await);
    }

    /// The data of a chunk.
    ///
    /// # Errors
    /// As [`PublishedDisk::read`].
    pub async fn chunk(&self, number: u32) -> Result<Arc<Vec<u8>>> {
        let part = Part {
            start: 0,
            len: 0,
            content: Content::Chunk(number),
        };
        let chunks = self.chunks(&[part]).await?;
        Ok(Arc::clone(&chunks[&number]))
    }

    /// The data of all chunks of some parts.
    async fn chunks(&self, parts: &[Part]) -> Result<HashMap<u32, Data>> {
        let mut found = HashMap::new();
        let mut fetches: Vec<Fetch> = Vec::new();
        let mut wanted: Vec<u32> = Vec::new();
        {
            let mut kept = lock(&self.kept);
            for part in parts {
                let Content::Chunk(number) = part.content else {
                    continue;
                };
                if found.contains_key(&number) {
                    continue;
                }
                if let Some(data) = kept.chunks.get(&number) {
                    found.insert(number, Arc::clone(data));
                } else if let Some(fetch) = kept.fetches.get(&number) {
                    if !fetches.iter().any(|other| other.ptr_eq(fetch)) {
                        fetches.push(fetch.clone());
                    }
                } else {
                    wanted.push(number);
                }
            }
            for group in self.groups(wanted) {
                let fetch = self.fetch(group.clone(), &mut kept);
                for number in group {
                    kept.fetches.insert(number, fetch.clone());
                }
                fetches.push(fetch);
            }
        }
        for group in futures_util::future::join_all(fetches).await {
            let group = group.map_err(|error| error.duplicate())?;
            found.extend(
                group
                    .iter()
                    .map(|(number, data)| (*number, Arc::clone(data))),
            );
        }
        Ok(found)
    }

    /// Chunks that are near each other in packs, together.
    fn groups(&self, mut wanted: Vec<u32>) -> Vec<Vec<u32>> {
        let place = |number: &u32| {
            let chunk = &self.index.chunks[*number as usize];
            (chunk.pack, chunk.offset)
        };
        wanted.sort_unstable_by_key(place);
        wanted.dedup();
        let mut groups: Vec<Vec<u32>> = Vec::new();
        let (mut pack, mut start, mut end) = (u32::MAX, 0, 0);
        for number in wanted {
            let chunk = &self.index.chunks[number as usize];
            let from = u64::from(chunk.offset);
            let until = from + u64::from(chunk.stored_bytes);
            let is_near = chunk.pack == pack && from <= end + GAP_BYTES;
            if !is_near || until - start > FETCH_BYTES {
                groups.push(Vec::new());
                (pack, start) = (chunk.pack, from);
            }
            if let Some(group) = groups.last_mut() {
                group.push(number);
            }
            end = until;
        }
        groups
    }

    /// Begins to fetch chunks of one pack, in the order of their places.
    fn fetch(&self, numbers: Vec<u32>, kept: &mut Kept) -> Fetch {
        let index = Arc::clone(&self.index);
        let chunk = |number: u32| index.chunks[number as usize];
        let places = numbers.iter().map(|number| chunk(*number));
        let start = places.clone().map(|c| u64::from(c.offset)).min();
        let ends = places.map(|c| u64::from(c.offset) + u64::from(c.stored_bytes));
        let range = start.unwrap_or(0)..ends.max().unwrap_or(0);
        kept.fetched_bytes += range.end - range.start;
        let (store, workers) = (self.store.clone(), self.workers.clone());
        // Not the other way round too: what is kept has the fetch.
        let kept: Weak<Mutex<Kept>> = Arc::downgrade(&self.kept);
        let future = async move {
            let fetched = fetched(&store, &index, (&numbers, range), &workers).await;
            if let Some(kept) = kept.upgrade() {
                let mut kept = lock(&kept);
                for number in &numbers {
                    kept.fetches.remove(number);
                }
                if let Ok(group) = &fetched {
                    kept.enter(group);
                }
            }
            fetched.map(Arc::new).map_err(Arc::new)
        };
        future.boxed().shared()
    }
}

async fn fetched(
    store: &Store,
    index: &Arc<Index>,
    (numbers, range): (&[u32], Range<u64>),
    workers: &Workers,
) -> Result<HashMap<u32, Data>> {
    let pack = index.chunks[numbers[0] as usize].pack;
    let key = pack_key(&index.packs[pack as usize]);
    let start = range.start;
    let bytes = store.get(&key, range).await?;
    let (index, numbers) = (Arc::clone(index), numbers.to_vec());
    let name = store.name_of(&key);
    let unpack = move || {
        let mut group = HashMap::with_capacity(numbers.len());
        for number in numbers {
            let chunk = &index.chunks[number as usize];
            let from = (u64::from(chunk.offset) - start) as usize;
            let stored = &bytes[from..from + chunk.stored_bytes as usize];
            group.insert(number, Arc::new(pack::decompress(chunk, stored, &name)?));
        }
        Ok(group)
    };
    workers.run(unpack).await
}
