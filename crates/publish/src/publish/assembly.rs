//! [`Assembly`]: the index that comes into being, the pack that is being filled, and uploads.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use cowslip_block::{Error, Result};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};

use crate::cut::{BLOCK_BYTES, ChunkSizes};
use crate::digest::Digest;
use crate::index::{Chunk, Content, Index, PACK_BYTES_MAX, Pack, Run, Session};
use crate::pack::{self, OpenPack, StoredChunk};
use crate::store::{Store, pack_key};

use super::Request;

/// Packs that are stored at a time.
const UPLOADS: usize = 4;
/// Longest run of one entry in blocks, so that its length fits 32 bits.
const RUN_BLOCKS_MAX: u64 = 1 << 31;

/// The chunks of the indexes that a publication builds upon.
#[derive(Debug)]
pub struct Known {
    parents: Vec<Index>,
    /// The index, and the number of the chunk in it.
    chunks: HashMap<Digest, (u32, u32)>,
}

impl Known {
    fn new(parents: Vec<Index>) -> Known {
        let mut chunks = HashMap::new();
        for (parent, index) in parents.iter().enumerate() {
            for (number, chunk) in index.chunks.iter().enumerate() {
                chunks.insert(chunk.digest, (parent as u32, number as u32));
            }
        }
        Known { parents, chunks }
    }

    /// One of the indexes.
    pub fn parent(&self, number: usize) -> &Index {
        &self.parents[number]
    }

    /// Whether a chunk is one of them.
    pub fn has(&self, digest: Digest) -> bool {
        self.chunks.contains_key(&digest)
    }

    fn get(&self, digest: Digest) -> Option<(Chunk, Pack)> {
        let (parent, number) = self.chunks.get(&digest)?;
        let index = &self.parents[*parent as usize];
        let chunk = index.chunks[*number as usize];
        Some((chunk, index.packs[chunk.pack as usize]))
    }
}

/// A part of the disk that is ready for the index.
#[derive(Debug)]
pub enum Prepared {
    /// Zeroes, by their number of blocks.
    Zeroes(u64),
    /// A chunk that some index has, and its length in blocks.
    Known(Digest, u16),
    /// A chunk that none has.
    New(StoredChunk),
}

/// Work that was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes of the disk that are no zeroes.
    pub data_bytes: u64,
    /// Bytes of packs that were stored.
    pub stored_bytes: u64,
    /// Bytes of packs that were there already.
    pub kept_bytes: u64,
    /// Packs that were stored.
    pub packs: u64,
}

type Upload<'a> = futures_util::future::BoxFuture<'a, Result<()>>;

/// The index that comes into being.
pub struct Assembly<'a> {
    store: &'a Store,
    request: &'a Request,
    session: Session,
    known: Arc<Known>,
    /// Packs of the session that are there.
    present: HashMap<Digest, u64>,
    index: Index,
    /// The numbers of chunks and packs in the index.
    chunk_numbers: HashMap<Digest, u32>,
    pack_numbers: HashMap<Pack, u32>,
    /// The pack that is being filled, and its number once it has a chunk.
    open: OpenPack,
    open_number: Option<u32>,
    uploads: FuturesUnordered<Upload<'a>>,
    /// Where the next part begins, in blocks.
    at: u64,
    /// Ranges in bytes that no layer has, from there on.
    unallocated: VecDeque<Range<u64>>,
    totals: Totals,
}

impl<'a> Assembly<'a> {
    pub fn new(
        store: &'a Store,
        (session, sizes): (Session, ChunkSizes),
        request: &'a Request,
        (parents, present): (Vec<Index>, HashMap<Digest, u64>),
    ) -> Assembly<'a> {
        Assembly {
            store,
            request,
            session,
            known: Arc::new(Known::new(parents)),
            present,
            index: Index {
                disk_bytes: 0,
                session,
                sizes,
                packs: Vec::new(),
                chunks: Vec::new(),
                runs: Vec::new(),
            },
            chunk_numbers: HashMap::new(),
            pack_numbers: HashMap::new(),
            open: OpenPack::default(),
            open_number: None,
            uploads: FuturesUnordered::new(),
            at: 0,
            unallocated: VecDeque::new(),
            totals: Totals::default(),
        }
    }

    pub fn store(&self) -> &'a Store {
        self.store
    }

    pub fn known(&self) -> Arc<Known> {
        Arc::clone(&self.known)
    }

    pub fn level(&self) -> i32 {
        self.request.level
    }

    /// Takes the ranges that no layer has.
    pub fn add_unallocated(&mut self, ranges: &mut VecDeque<Range<u64>>) {
        for range in ranges.drain(..) {
            match self.unallocated.back_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => self.unallocated.push_back(range),
            }
        }
    }

    /// Takes the next part of the disk, and stores a pack that it fills.
    pub async fn take(&mut self, part: Prepared) -> Result<()> {
        match part {
            Prepared::Zeroes(blocks) => self.add_zeroes(blocks),
            Prepared::Known(digest, blocks) => {
                let number = self.number_of_known(digest)?;
                self.add_chunk(number, blocks);
            }
            Prepared::New(stored) => {
                let number = match self.chunk_numbers.get(&stored.digest) {
                    Some(number) => *number,
                    None => self.store_chunk(&stored),
                };
                self.add_chunk(number, stored.blocks);
                if self.open.len() >= self.request.pack_bytes {
                    self.close_pack().await?;
                }
            }
        }
        Ok(())
    }

    fn add_chunk(&mut self, number: u32, blocks: u16) {
        let content = Content::Chunk(number);
        let start = self.at;
        self.index.runs.push(Run { start, content });
        self.at += u64::from(blocks);
        self.totals.data_bytes += u64::from(blocks) * BLOCK_BYTES as u64;
    }

    /// Adds zeroes, apart from each other what no layer has and what is stored as zeroes.
    fn add_zeroes(&mut self, blocks: u64) {
        let end = self.at + blocks;
        let block = BLOCK_BYTES as u64;
        while self.at < end {
            while let Some(first) = self.unallocated.front()
                && first.end / block <= self.at
            {
                self.unallocated.pop_front();
            }
            let hole = self.unallocated.front().map(|range| {
                let start = range.start.div_ceil(block);
                (start, range.end / block)
            });
            let (content, until) = match hole {
                Some((start, hole_end)) if start <= self.at && hole_end > self.at => {
                    (Content::Unallocated, hole_end)
                }
                Some((start, _)) if start > self.at => (Content::Zeroes, start),
                _ => (Content::Zeroes, end),
            };
            let until = until.min(end).min(self.at + RUN_BLOCKS_MAX);
            let start = self.at;
            self.index.runs.push(Run { start, content });
            self.at = until;
        }
    }

    fn number_of_known(&mut self, digest: Digest) -> Result<u32> {
        if let Some(number) = self.chunk_numbers.get(&digest) {
            return Ok(*number);
        }
        let found = self.known.get(digest);
        let missing = || Error::invalid(format!("the chunk {digest} is in no index"));
        let (chunk, pack) = found.ok_or_else(missing)?;
        let next = self.index.packs.len() as u32;
        let pack_number = *self.pack_numbers.entry(pack).or_insert(next);
        if pack_number == next {
            self.index.packs.push(pack);
        }
        let pack = pack_number;
        Ok(self.push_chunk(Chunk { pack, ..chunk }))
    }

    fn push_chunk(&mut self, chunk: Chunk) -> u32 {
        let number = self.index.chunks.len() as u32;
        self.chunk_numbers.insert(chunk.digest, number);
        self.index.chunks.push(chunk);
        number
    }

    /// Adds a chunk to the open pack, which is entered into the index with its first chunk.
    fn store_chunk(&mut self, stored: &StoredChunk) -> u32 {
        let packs = &mut self.index.packs;
        let number = *self.open_number.get_or_insert_with(|| {
            packs.push(pack::entry(Session::default(), &[]));
            (packs.len() - 1) as u32
        });
        let chunk = self.open.add(stored, number);
        self.push_chunk(chunk)
    }

    /// Ends the open pack and begins to store it, unless it is there already.
    pub async fn close_pack(&mut self) -> Result<()> {
        let Some(number) = self.open_number.take() else {
            return Ok(());
        };
        let bytes = self.open.take();
        debug_assert!(
            bytes.len() as u64 <= PACK_BYTES_MAX,
            "packs end when they are full"
        );
        let pack = pack::entry(self.session, &bytes);
        self.index.packs[number as usize] = pack;
        self.pack_numbers.insert(pack, number);
        if self.present.get(&pack.digest) == Some(&pack.bytes) {
            self.totals.kept_bytes += pack.bytes;
            return Ok(());
        }
        self.totals.stored_bytes += pack.bytes;
        self.totals.packs += 1;
        let (store, reads_back) = (self.store, self.request.reads_back);
        self.uploads
            .push(Box::pin(upload(store, pack, bytes, reads_back)));
        // Begins it, and ends those that have ended.
        while let Some(uploaded) = self.uploads.next().now_or_never().flatten() {
            uploaded?;
        }
        while self.uploads.len() >= UPLOADS {
            if let Some(uploaded) = self.uploads.next().await {
                uploaded?;
            }
        }
        Ok(())
    }

    /// Waits for all uploads.
    pub async fn settle(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        while let Some(uploaded) = self.uploads.next().await {
            outcome = outcome.and(uploaded);
        }
        outcome
    }

    /// The index of a disk of this length.
    pub fn finish(mut self, disk_bytes: u64) -> (Index, Totals) {
        self.index.disk_bytes = disk_bytes;
        debug_assert_eq!(
            self.at,
            self.index.disk_blocks(),
            "the disk was read to its end"
        );
        (self.index, self.totals)
    }
}

async fn upload(store: &Store, pack: Pack, bytes: Vec<u8>, reads_back: bool) -> Result<()> {
    let key = pack_key(&pack);
    store.put(&key, bytes).await?;
    if reads_back {
        let read = store.get(&key, 0..pack.bytes).await?;
        if Digest::of(&read) != pack.digest {
            return Err(Error::Corrupt {
                file: store.name_of(&key),
                structure: "pack",
                offset: 0,
                detail: "it is not what was written".to_string(),
            });
        }
    }
    Ok(())
}
