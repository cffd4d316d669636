//! [`CacheFile`]: the cache of one version of an object, as one file of this process uses it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use cowslip_block::error::system_words;
use cowslip_block::file::MemoryAlignment;
use cowslip_queue::file::Route;
use cowslip_queue::{Buf, BufMut, IoVecMut, Pending, lock};

use super::directory::{BLOCKS_AT, CacheDirectory};
use super::index::{self, Entry, Index, Medium, sum_of};
use crate::url::ObjectUrl;
use crate::version::Version;

/// Blocks that are read from the cache at a time.
const LOOKED_AT: u64 = 16;
/// Bytes that the queue of a caller reads and compares at a time, or one block: more is for threads
/// that serve nobody else.
const PRESENT_MAX: u64 = 512 << 10;
/// Entries that are read when the file is opened, 4 MiB of them: those of the first 16 GiB.
const READ_AT_OPENING: u64 = 1 << 18;
/// The pause before a block is looked at again that another process fetches.
const BUSY_PAUSE: Duration = Duration::from_millis(3);
/// Blocks that are marked as durable together, and the time after which fewer are.
const MARKED_AT: usize = 256;
const MARKED_AFTER: Duration = Duration::from_secs(5);

/// The cache of an object.
#[derive(Debug)]
pub(crate) struct CacheFile {
    directory: CacheDirectory,
    files: Arc<Files>,
    /// The files again, for reads by the queue of the caller.
    reader: Arc<cowslip_queue::File>,
    index_reader: Arc<cowslip_queue::File>,
    block_bytes: u64,
    bytes: u64,
    /// The first entries of the index when it was opened. As the object does not change, a sum
    /// holds for good; a block may be gone since.
    at_opening: Vec<Entry>,
    /// Blocks that were compared with their sums by this process, a bit each.
    verified: Vec<AtomicU64>,
    /// Nothing is stored any more.
    is_off: AtomicBool,
    marks: Mutex<Marks>,
}

/// The files of an object, which are in use while they are open.
#[derive(Debug)]
struct Files {
    index: Index<File>,
    data: File,
}

/// Blocks that are present, and may become durable.
#[derive(Debug)]
struct Marks {
    blocks: Vec<u64>,
    since: Instant,
    /// Bytes stored since the space of the directory was looked at.
    stored: u64,
}

/// Outcome of looking for blocks.
pub(crate) enum Look {
    /// The bytes of the first ones.
    Present(Vec<Bytes>),
    /// These are to be fetched. Nobody else fetches them until they are released.
    Absent(Range<u64>),
    /// The first one is being fetched by others.
    Busy,
    /// The first one was damaged, and is dropped.
    Damaged(u64),
    /// The cache cannot be read; the reason comes the first time. The first one is to be fetched,
    /// and is not locked.
    Unreadable(Option<String>),
}

impl CacheFile {
    /// The cache of a version.
    pub(crate) fn open(
        directory: &CacheDirectory,
        url: &ObjectUrl,
        version: &Version,
        block_bits: u32,
    ) -> io::Result<CacheFile> {
        let (index, data) = directory.files_of(url, version, block_bits)?;
        let (reader, index_reader) = (reader_of(&data)?, reader_of(&index.medium)?);
        let words = index.head.blocks().div_ceil(64);
        Ok(CacheFile {
            directory: directory.clone(),
            reader,
            index_reader,
            block_bytes: 1 << block_bits,
            bytes: version.bytes,
            at_opening: index.first_entries(READ_AT_OPENING)?,
            verified: (0..words).map(|_| AtomicU64::new(0)).collect(),
            is_off: AtomicBool::new(false),
            marks: Mutex::new(Marks {
                blocks: Vec::new(),
                since: Instant::now(),
                stored: directory.limit_bytes(),
            }),
            files: Arc::new(Files { index, data }),
        })
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a block can be read as it is.
    pub(crate) fn is_verified(&self, block: u64) -> bool {
        let word = &self.verified[(block / 64) as usize];
        word.load(Ordering::Acquire) & (1 << (block % 64)) != 0
    }

    /// Whether a block was there when the file was opened, or has come since.
    pub(crate) fn had(&self, block: u64) -> bool {
        let entry = self.at_opening.get(block as usize);
        self.is_verified(block) || entry.is_some_and(|entry| *entry != Entry::Absent)
    }

    fn verify(&self, block: u64) {
        let word = &self.verified[(block / 64) as usize];
        word.fetch_or(1 << (block % 64), Ordering::Release);
    }

    /// Has blocks be compared with their sums again before they are read.
    pub(crate) fn distrust(&self, blocks: Range<u64>) {
        for block in blocks {
            let word = &self.verified[(block / 64) as usize];
            word.fetch_and(!(1 << (block % 64)), Ordering::Release);
        }
    }

    /// Reads bytes whose blocks are verified.
    pub(crate) fn read(
        &self,
        offset: u64,
        target: IoVecMut,
    ) -> Pending<(io::Result<()>, IoVecMut)> {
        self.reader.read_at(offset, target)
    }

    /// The bytes of blocks that are there, compared with their sums, by the queue of the caller:
    /// of a second start this is what the guest waits for. Nothing where one is absent, damaged or
    /// cannot be read, which is for [`CacheFile::look`].
    pub(crate) async fn present(&self, blocks: Range<u64>) -> Option<Vec<Bytes>> {
        let count = blocks.end - blocks.start;
        if (count > 1 && count * self.block_bytes > PRESENT_MAX) || self.is_off() {
            return None;
        }
        let mut entries = Vec::with_capacity(count as usize);
        for (block, entry) in blocks.clone().zip(self.entries(&blocks).await?) {
            match entry {
                Entry::Absent => return None,
                Entry::Present(sum) => entries.push((block, sum, true)),
                Entry::Durable(sum) => entries.push((block, sum, false)),
            }
        }
        let end = (blocks.end * self.block_bytes).min(self.bytes);
        let mut data = bytes_at(&self.reader, blocks.start * self.block_bytes..end).await?;
        let mut found = Vec::with_capacity(entries.len());
        for (block, sum, may_be_lost) in entries {
            let len = data.len().min(self.block_bytes as usize);
            let bytes = data.split_to(len);
            if sum_of(&bytes) != sum {
                return None;
            }
            self.note_found(block, may_be_lost);
            found.push(bytes);
        }
        Some(found)
    }

    /// The entries of blocks: those that are known, unless a block was absent.
    async fn entries(&self, blocks: &Range<u64>) -> Option<Vec<Entry>> {
        let known = self
            .at_opening
            .get(blocks.start as usize..blocks.end as usize);
        if let Some(known) = known.filter(|known| !known.contains(&Entry::Absent)) {
            return Some(known.to_vec());
        }
        let table = bytes_at(&self.index_reader, index::range_of(blocks)).await?;
        let entries = blocks.clone().zip(table.as_chunks().0);
        Some(
            entries
                .map(|(block, entry)| Entry::decode(entry, block))
                .collect(),
        )
    }

    /// A block has its sum.
    fn note_found(&self, block: u64, may_be_lost: bool) {
        if may_be_lost && !self.is_verified(block) {
            self.marks().blocks.push(block);
        }
        self.verify(block);
    }

    /// Whether nothing is stored any more.
    pub(crate) fn is_off(&self) -> bool {
        self.is_off.load(Ordering::Acquire)
    }

    /// Looks for blocks; those that are absent are then this caller's to fetch.
    pub(crate) async fn look(self: &Arc<Self>, blocks: Range<u64>) -> Look {
        let this = Arc::clone(self);
        let looked = tokio::task::spawn_blocking(move || this.look_now(&blocks)).await;
        match looked {
            Ok(Ok(Look::Busy)) => {
                tokio::time::sleep(BUSY_PAUSE).await;
                Look::Busy
            }
            Ok(Ok(look)) => look,
            // A cache that cannot be read is as good as none.
            Ok(Err(error)) => self.give_up(&error),
            Err(_) => self.give_up(&io::ErrorKind::Other.into()),
        }
    }

    fn give_up(&self, error: &io::Error) -> Look {
        let is_new = !self.is_off.swap(true, Ordering::AcqRel);
        Look::Unreadable(is_new.then(|| system_words(error).to_string()))
    }

    fn look_now(&self, blocks: &Range<u64>) -> io::Result<Look> {
        let mut found = Vec::new();
        for block in blocks.clone().take(LOOKED_AT as usize) {
            let entry = self.files.index.entry(block)?;
            let (Entry::Present(sum) | Entry::Durable(sum)) = entry else {
                break;
            };
            let bytes = self.read_block(block)?;
            if sum_of(&bytes) == sum {
                self.note_found(block, matches!(entry, Entry::Present(_)));
                found.push(bytes);
                continue;
            }
            if !found.is_empty() {
                break;
            }
            return self.drop_damaged(block, sum);
        }
        match found.is_empty() {
            true => self.take_absent(blocks),
            false => Ok(Look::Present(found)),
        }
    }

    fn read_block(&self, block: u64) -> io::Result<Bytes> {
        let start = block * self.block_bytes;
        let len = self.block_bytes.min(self.bytes - start);
        let mut bytes = vec![0; len as usize];
        Medium::read_at(&self.files.data, &mut bytes, start)?;
        Ok(Bytes::from(bytes))
    }

    /// A block does not have the sum of its entry: it is damaged, or it is being dropped or stored
    /// again by others.
    fn drop_damaged(&self, block: u64, sum: u64) -> io::Result<Look> {
        if !self.try_lock(block) {
            return Ok(Look::Busy);
        }
        let is_same = match self.files.index.entry(block)? {
            Entry::Present(now) | Entry::Durable(now) => now == sum,
            Entry::Absent => false,
        };
        let is_damaged = is_same && sum_of(&self.read_block(block)?) != sum;
        if is_damaged {
            self.files.index.set(block, Entry::Absent)?;
        }
        self.release(block..block + 1);
        match is_damaged {
            true => Ok(Look::Damaged(block)),
            false => Ok(Look::Busy),
        }
    }

    fn take_absent(&self, blocks: &Range<u64>) -> io::Result<Look> {
        let mut end = blocks.start;
        while end < blocks.end {
            if !self.try_lock(end) {
                break;
            }
            // Others may have stored it between the look and the lock.
            if self.files.index.entry(end)? != Entry::Absent {
                self.release(end..end + 1);
                break;
            }
            end += 1;
        }
        match end > blocks.start {
            true => Ok(Look::Absent(blocks.start..end)),
            false => Ok(Look::Busy),
        }
    }

    fn try_lock(&self, block: u64) -> bool {
        lock::exclude(self.files.index.medium.as_fd(), BLOCKS_AT + block, 1).is_ok()
    }

    /// Lets others fetch blocks.
    pub(crate) fn release(&self, blocks: Range<u64>) {
        let len = blocks.end - blocks.start;
        if len > 0 {
            // Where it fails, the locks go with the file.
            drop(lock::release(
                self.files.index.medium.as_fd(),
                BLOCKS_AT + blocks.start,
                len,
            ));
        }
    }

    /// Stores a block that was absent.
    ///
    /// # Errors
    /// In words: it cannot be stored. From then on nothing is, and nothing fails.
    pub(crate) async fn store(self: &Arc<Self>, block: u64, bytes: Bytes) -> Result<(), String> {
        if self.is_off.load(Ordering::Acquire) {
            return Ok(());
        }
        let this = Arc::clone(self);
        let stored = tokio::task::spawn_blocking(move || this.store_now(block, &bytes)).await;
        let why = match stored {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(why)) => why,
            Err(_) => "its thread has ended".to_string(),
        };
        match self.is_off.swap(true, Ordering::AcqRel) {
            true => Ok(()),
            false => Err(why),
        }
    }

    fn store_now(&self, block: u64, bytes: &[u8]) -> Result<(), String> {
        self.make_room(bytes.len() as u64)?;
        let words = |error: io::Error| system_words(&error).to_string();
        let Files { index, data } = &*self.files;
        index.store(data, block, bytes).map_err(words)?;
        self.verify(block);
        let is_due = {
            let mut marks = self.marks();
            marks.blocks.push(block);
            marks.blocks.len() >= MARKED_AT || marks.since.elapsed() >= MARKED_AFTER
        };
        match is_due {
            true => self.mark_durable().map_err(words),
            false => Ok(()),
        }
    }

    /// Looks at the space of the directory now and then.
    fn make_room(&self, len: u64) -> Result<(), String> {
        let limit = self.directory.limit_bytes();
        let step = (limit / 32).clamp(1 << 20, 1 << 30);
        let is_due = {
            let mut marks = self.marks();
            marks.stored = marks.stored.saturating_add(len);
            let is_due = marks.stored > step;
            if is_due {
                marks.stored = 0;
            }
            is_due
        };
        if !is_due {
            return Ok(());
        }
        let pruned = self.directory.prune(limit.saturating_sub(step));
        let (_, taken) = pruned.map_err(|error| error.to_string())?;
        match taken.saturating_add(step) > limit {
            true => Err(format!(
                "{taken} of {limit} bytes are taken by images in use"
            )),
            false => Ok(()),
        }
    }

    /// Makes all blocks durable that this process has stored or found.
    pub(crate) fn mark_durable(&self) -> io::Result<()> {
        let blocks = {
            let mut marks = self.marks();
            marks.since = Instant::now();
            std::mem::take(&mut marks.blocks)
        };
        if blocks.is_empty() {
            return Ok(());
        }
        let marked = self.files.mark_durable(&blocks);
        if marked.is_err() {
            // The host may have lost what it was given, and forget that with this error: blocks
            // are compared with their sums again before they are read.
            for word in &self.verified {
                word.store(0, Ordering::Release);
            }
        }
        marked
    }
}

/// A file again, for reads by the queue of a caller.
fn reader_of(file: &File) -> io::Result<Arc<cowslip_queue::File>> {
    let fd = OwnedFd::from(file.try_clone()?);
    let alignment = MemoryAlignment::NONE;
    Ok(cowslip_queue::File::new(fd, Route::Ring, alignment))
}

/// Bytes of a file; nothing where they cannot be read.
async fn bytes_at(file: &Arc<cowslip_queue::File>, range: Range<u64>) -> Option<Bytes> {
    let target = BufMut::for_overwrite((range.end - range.start) as usize);
    let (outcome, target) = file.read_at(range.start, target).await;
    outcome.ok()?;
    Some(Bytes::from_owner(Read(target.freeze().to_buf())))
}

/// Bytes that were read, as those of [`Bytes`].
struct Read(Buf);

impl AsRef<[u8]> for Read {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Files {
    fn mark_durable(&self, blocks: &[u64]) -> io::Result<()> {
        self.index.mark_durable(&self.data, blocks)
    }
}

impl Drop for CacheFile {
    fn drop(&mut self) {
        drop(self.files.index.medium.set_modified(SystemTime::now()));
        let blocks = std::mem::take(&mut self.marks().blocks);
        if !blocks.is_empty() {
            // The dropping thread may be one that serves a guest, and flushes take their time.
            // Where it fails, or the process ends before, the blocks are fetched again after the
            // next start of the host.
            let files = Arc::clone(&self.files);
            drop(cowslip_queue::blocking(move || {
                drop(files.mark_durable(&blocks));
            }));
        }
    }
}

#[cfg(test)]
impl CacheFile {
    /// Has all reads of data fail: the file is a directory from now on.
    pub(crate) fn break_data(&mut self) {
        let directory = || File::open("/").unwrap();
        let fd = directory().into();
        self.reader = cowslip_queue::File::new(fd, Route::Ring, MemoryAlignment::NONE);
        Arc::get_mut(&mut self.files).unwrap().data = directory();
    }
}
