//! A file in memory whose blocks take space as they are written, on a file system that may be full.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use cowslip::Image;
use cowslip::errno::ENOSPC;
use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Durability, FileExtent, FileId, Space};
use cowslip::image::{DiscardPolicy, OpenOptions};
use cowslip_queue::{Completer, IoVec, Pending, pending};

use super::block_on;

/// Bytes of a block.
pub const BLOCK: u64 = 4096;

#[derive(Default)]
struct Host {
    /// Blocks that have space.
    given: BTreeSet<u64>,
    is_full: bool,
    /// Blocks that may have space at a time.
    most: Option<usize>,
    /// Writes that were to be durable by themselves.
    durable: usize,
    flushes: usize,
    asked: usize,
    /// Discards wait while there is a list for them.
    held: Option<Vec<Held>>,
    /// Writes wait while there is a list for them.
    held_writes: Option<Vec<HeldWrite>>,
}

/// A discard that waits.
type Held = (u64, u64, Completer<io::Result<()>>);

/// A write that waits.
type HeldWrite = (u64, IoVec, Completer<io::Result<()>>);

/// The file.
pub struct Sparse {
    pub memory: MemoryFile,
    host: Mutex<Host>,
}

impl Sparse {
    /// Opens the image in a file for writing; discards give space back.
    pub fn open(file: &Arc<Sparse>) -> Image {
        let options = OpenOptions {
            writable: true,
            discard: DiscardPolicy::Unmap,
            ..OpenOptions::default()
        };
        block_on(Image::open(file.clone(), options, &NoFiles)).unwrap()
    }
}

cowslip_block::debug_by_name!(Sparse);

fn blocks(offset: u64, len: u64) -> Range<u64> {
    offset / BLOCK..(offset + len).div_ceil(BLOCK)
}

impl Sparse {
    pub fn new(bytes: Vec<u8>) -> Arc<Sparse> {
        Arc::new(Sparse {
            memory: MemoryFile::new("file", bytes, 1),
            host: Mutex::default(),
        })
    }

    fn take(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut host = self.host.lock().unwrap();
        let wanted = blocks(offset, len);
        let is_given = wanted.clone().all(|block| host.given.contains(&block));
        let more = wanted.clone().filter(|block| !host.given.contains(block));
        let has_room = host
            .most
            .is_none_or(|most| host.given.len() + more.count() <= most);
        if (host.is_full || !has_room) && !is_given {
            return Err(io::Error::from_raw_os_error(ENOSPC));
        }
        host.given.extend(wanted);
        Ok(())
    }

    /// Gives blocks their space, as an allocation by others does.
    pub fn give(&self, range: Range<u64>) {
        let blocks = blocks(range.start, range.end - range.start);
        self.host.lock().unwrap().given.extend(blocks);
    }

    /// Takes the space of the whole blocks of a range away.
    pub fn release(&self, offset: u64, len: u64) {
        let whole = offset.div_ceil(BLOCK)..(offset + len) / BLOCK;
        let mut host = self.host.lock().unwrap();
        host.given.retain(|block| !whole.contains(block));
    }

    /// Whether the file system has no free block.
    pub fn fill_up(&self, is_full: bool) {
        self.host.lock().unwrap().is_full = is_full;
    }

    /// From now on the file system has this many free blocks, and those that the file gives back.
    pub fn leave(&self, blocks: usize) {
        let mut host = self.host.lock().unwrap();
        host.most = Some(host.given.len() + blocks);
    }

    /// Returns the bytes that have space.
    pub fn given_bytes(&self) -> u64 {
        self.host.lock().unwrap().given.len() as u64 * BLOCK
    }

    /// From now on discards wait.
    pub fn hold_discards(&self) {
        self.host.lock().unwrap().held = Some(Vec::new());
    }

    /// Returns how many discards wait.
    pub fn held(&self) -> usize {
        let host = self.host.lock().unwrap();
        host.held.as_ref().map_or(0, Vec::len)
    }

    /// From now on writes wait.
    pub fn hold_writes(&self) {
        self.host.lock().unwrap().held_writes = Some(Vec::new());
    }

    /// Lets further writes go on at once, beside those that wait; returns these.
    pub fn take_writes(&self) -> Vec<HeldWrite> {
        let held = self.host.lock().unwrap().held_writes.take();
        held.unwrap_or_default()
    }

    /// Carries out writes that have waited.
    pub fn let_writes_go(&self, held: Vec<HeldWrite>) {
        for (offset, data, completer) in held {
            let written = self.write(offset, data, Durability::Cached);
            completer.complete(crate::support::block_on(written));
        }
    }

    /// Carries out the discards that wait.
    pub fn let_discards_go(&self) {
        let held = self.host.lock().unwrap().held.take();
        for (offset, len, completer) in held.unwrap_or_default() {
            completer.complete(crate::support::block_on(self.discard(offset, len)));
        }
    }

    /// Returns durable writes, flushes and questions about space since the last time.
    pub fn take_counts(&self) -> (usize, usize, usize) {
        let mut host = self.host.lock().unwrap();
        let counts = (host.durable, host.flushes, host.asked);
        (host.durable, host.flushes, host.asked) = (0, 0, 0);
        counts
    }
}

impl BlockFile for Sparse {
    cowslip_block::forward_to_file!(memory: name, capabilities, len, read);

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        self.host
            .lock()
            .unwrap()
            .given
            .split_off(&len.div_ceil(BLOCK));
        self.memory.set_len(len)
    }

    fn id(&self) -> Option<FileId> {
        Some(FileId(1, 1))
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        if let Some(held) = &mut self.host.lock().unwrap().held_writes {
            let (completer, result) = pending();
            held.push((offset, data, completer));
            return result;
        }
        let is_durable = durability == Durability::Durable;
        self.host.lock().unwrap().durable += usize::from(is_durable);
        match self.take(offset, data.len() as u64) {
            Ok(()) => self.memory.write(offset, data, durability),
            Err(error) => Pending::ready(Err(error)),
        }
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        match space {
            Space::Release => self.release(offset, len),
            Space::Keep => {
                if let Err(error) = self.take(offset, len) {
                    return Pending::ready(Err(error));
                }
            }
        }
        self.memory.zero(offset, len, space)
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        if let Some(held) = &mut self.host.lock().unwrap().held {
            let (completer, result) = pending();
            held.push((offset, len, completer));
            return result;
        }
        self.release(offset, len);
        self.memory.discard(offset, len)
    }

    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        match self.take(offset, len) {
            Ok(()) => self.memory.allocate(offset, len),
            Err(error) => Pending::ready(Err(error)),
        }
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let mut host = self.host.lock().unwrap();
        host.asked += 1;
        let extents = blocks(offset, len).map(|block| {
            let (start, end) = (block * BLOCK, (block + 1) * BLOCK);
            FileExtent {
                start: start.max(offset),
                len: end.min(offset + len) - start.max(offset),
                hole: !host.given.contains(&block),
            }
        });
        Pending::ready(Ok(extents.collect()))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.host.lock().unwrap().flushes += 1;
        self.memory.flush()
    }
}
