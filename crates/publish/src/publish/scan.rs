//! Reading a disk in order, several pieces ahead, and what is done with each: cutting here, hashing
//! and compression by workers. Parts that are known to be as they were are not read.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use cowslip_block::disk::{Disk, Extent};
use cowslip_block::{Job, Result, Workers};
use futures_util::stream::FuturesOrdered;
use futures_util::{FutureExt, StreamExt};

use crate::cut::{BLOCK_BYTES, ChunkSizes, Cut, Cutter};
use crate::digest::Digest;
use crate::index::Content;
use crate::pack;

use super::Held;
use super::assembly::{Assembly, Known, Prepared};
use super::reads::{BLOCK, Blocks, EXTENTS, READS, read};
use super::steps::{Changes, Step, Steps};

/// Bytes of one read.
const READ_BYTES: u64 = 1 << 20;
/// Data of chunks that are hashed and compressed in one unit of work, in bytes.
const BATCH_BYTES: usize = 1 << 20;
/// Parts in one unit of work.
const BATCH_PARTS: usize = 4096;
/// Units of work in flight.
const BATCHES: usize = 16;

/// The next part of a disk.
enum Segment {
    Zeroes(Blocks),
    Data(Blocks),
    Kept(Blocks, Content),
}

/// Content of a segment.
enum Found {
    Zeroes,
    Bytes(Vec<u8>),
    Kept(Content),
}

/// Walks over the extents of a disk.
struct Walk<'a> {
    source: &'a dyn Disk,
    steps: Steps<'a>,
    /// The end of the step that is read, in blocks.
    end: u64,
    /// Extents that are known.
    known: VecDeque<Extent>,
    /// First byte after them.
    asked: u64,
    /// First block that has not been handed out.
    at: u64,
    /// Ranges that no layer has, in bytes, joined; they are handed to the assembly.
    unallocated: VecDeque<Range<u64>>,
}

impl<'a> Walk<'a> {
    fn new(source: &'a dyn Disk, changes: Option<Changes<'a>>) -> Walk<'a> {
        Walk {
            source,
            steps: Steps::new(changes, source.size()),
            end: 0,
            known: VecDeque::new(),
            asked: 0,
            at: 0,
            unallocated: VecDeque::new(),
        }
    }

    /// The next segment: zeroes as far as they go, data of one read, or what is as it was.
    async fn next(&mut self) -> Result<Option<Segment>> {
        if self.at >= self.end {
            match self.steps.next() {
                None => return Ok(None),
                Some(Step::Kept(blocks, content)) => {
                    (self.at, self.end) = (blocks.end, blocks.end);
                    if content == Content::Unallocated {
                        let end = blocks.end * BLOCK;
                        self.unallocated.push_back(blocks.start * BLOCK..end);
                    }
                    return Ok(Some(Segment::Kept(blocks, content)));
                }
                Some(Step::Read(blocks)) => {
                    (self.at, self.end) = (blocks.start, blocks.end);
                    self.asked = blocks.start * BLOCK;
                    self.known.clear();
                }
            }
        }
        let size = self.source.size().min(self.end * BLOCK);
        let blocks = self.end;
        loop {
            let done = self.at * BLOCK;
            while let Some(first) = self.known.front()
                && first.start + first.len <= done
            {
                self.known.pop_front();
            }
            let zero_end = self.zero_end();
            let is_open = zero_end == self.asked && self.asked < size;
            if self.known.is_empty() || is_open {
                self.ask(size).await?;
                continue;
            }
            // The last block is whole: what is behind the disk is zeroes too.
            let zero_blocks = match zero_end == size {
                true => blocks,
                false => zero_end / BLOCK,
            };
            if zero_blocks > self.at {
                let found = self.at..zero_blocks;
                self.at = found.end;
                return Ok(Some(Segment::Zeroes(found)));
            }
            let read_end = (done + READ_BYTES)
                .min(size)
                .min(self.asked.max(done + BLOCK));
            let end = self.data_end(read_end).div_ceil(BLOCK).min(blocks);
            let found = self.at..end.max(self.at + 1);
            self.at = found.end;
            return Ok(Some(Segment::Data(found)));
        }
    }

    /// The end of the zeroes at the current block.
    fn zero_end(&self) -> u64 {
        let mut end = self.at * BLOCK;
        for extent in &self.known {
            if !extent.zero || extent.start > end {
                break;
            }
            end = extent.start + extent.len;
        }
        end
    }

    /// The end of the data at the current block, at most `max`. A block that is zero in part is
    /// data.
    fn data_end(&self, max: u64) -> u64 {
        let here = self.at * BLOCK;
        for extent in &self.known {
            let begins = extent.start.next_multiple_of(BLOCK);
            if extent.zero && begins > here && begins + BLOCK <= extent.start + extent.len {
                return begins.min(max);
            }
        }
        max
    }

    async fn ask(&mut self, size: u64) -> Result<()> {
        let (at, left) = (self.asked, size - self.asked);
        for extent in self.source.extents(at, left, EXTENTS).await? {
            self.asked = extent.start + extent.len;
            if extent.zero && !extent.present {
                // The last block is whole.
                let end = match self.asked == size {
                    true => size.next_multiple_of(BLOCK),
                    false => self.asked,
                };
                match self.unallocated.back_mut() {
                    Some(last) if last.end == extent.start => last.end = end,
                    _ => self.unallocated.push_back(extent.start..end),
                }
            }
            match self.known.back_mut() {
                Some(last) if last.zero == extent.zero => last.len += extent.len,
                _ => self.known.push_back(extent),
            }
        }
        Ok(())
    }
}

/// A part that has not been passed on.
enum Part {
    Cut(Cut),
    /// A chunk that the base has, and its blocks.
    Kept(Digest, u16),
}

/// Parts that have not been passed on.
#[derive(Default)]
struct Batch {
    parts: Vec<Part>,
    bytes: usize,
}

fn prepare(parts: Vec<Part>, known: &Known, level: i32) -> Result<Vec<Prepared>> {
    let prepare = |part| {
        Ok(match part {
            Part::Kept(digest, blocks) => Prepared::Known(digest, blocks),
            Part::Cut(Cut::Zeroes(blocks)) => Prepared::Zeroes(blocks),
            Part::Cut(Cut::Chunk(data)) => {
                let digest = Digest::of(&data);
                let blocks = (data.len() / BLOCK_BYTES) as u16;
                match known.has(digest) {
                    true => Prepared::Known(digest, blocks),
                    false => Prepared::New(pack::compress(digest, data, level)?),
                }
            }
        })
    };
    parts.into_iter().map(prepare).collect()
}

/// Reads the disk from its beginning to its end into the assembly, or what has changed since one of
/// the indexes that it knows.
pub async fn scan(
    (source, sizes): (&dyn Disk, ChunkSizes),
    changed: Option<(usize, &[Range<u64>])>,
    assembly: &mut Assembly<'_>,
    workers: &Workers,
    (job, held): (&Job, &mut Held),
) -> Result<()> {
    job.expect(source.size());
    job.done(0);
    let (known, level) = (assembly.known(), assembly.level());
    let changes = changed.map(|(number, ranges)| Changes {
        base: known.parent(number),
        ranges,
    });
    let mut walk = Walk::new(source, changes);
    let mut cutter = Cutter::new(sizes);
    let mut batch = Batch::default();
    let mut segments = FuturesOrdered::new();
    let mut batches = FuturesOrdered::new();
    let mut is_more = true;
    loop {
        while is_more && segments.len() < READS {
            match walk.next().await? {
                None => is_more = false,
                Some(segment) => segments.push_back(async {
                    match segment {
                        Segment::Zeroes(blocks) => Ok((blocks, Found::Zeroes)),
                        Segment::Kept(blocks, content) => Ok((blocks, Found::Kept(content))),
                        Segment::Data(blocks) => {
                            let read = read(source, blocks, job).await;
                            read.map(|(blocks, bytes)| (blocks, Found::Bytes(bytes)))
                        }
                    }
                }),
            }
        }
        let is_end = match segments.next().await.transpose()? {
            Some((blocks, found)) => {
                let end = (blocks.end * BLOCK).min(source.size());
                job.done(end - (blocks.start * BLOCK).min(end));
                batch.add(&mut cutter, blocks.end - blocks.start, found, changes);
                false
            }
            None => {
                batch.finish(&mut cutter);
                true
            }
        };
        assembly.add_unallocated(&mut walk.unallocated);
        if is_end || batch.is_full() {
            let (parts, known) = (std::mem::take(&mut batch).parts, Arc::clone(&known));
            batches.push_back(workers.run(move || prepare(parts, &known, level)));
        }
        while !batches.is_empty() {
            // Also polls those that have not begun.
            let next = match is_end || batches.len() > BATCHES {
                true => batches.next().await,
                false => batches.next().now_or_never().flatten(),
            };
            let Some(prepared) = next else { break };
            for prepared in prepared? {
                assembly.take(prepared).await?;
            }
            held.renew_if_due(assembly.store()).await?;
        }
        if is_end {
            return assembly.close_pack().await;
        }
        job.check()?;
    }
}

impl Batch {
    /// Adds a segment, which the cutter cuts unless it is as it was.
    fn add(
        &mut self,
        cutter: &mut Cutter,
        blocks: u64,
        found: Found,
        changes: Option<Changes<'_>>,
    ) {
        let mut cuts = Vec::new();
        match (found, changes) {
            (Found::Zeroes, _) => cutter.push_zeroes(blocks),
            (Found::Bytes(bytes), _) => cutter.push(&bytes, &mut cuts),
            (Found::Kept(Content::Chunk(number)), Some(changes)) => {
                let chunk = &changes.base.chunks[number as usize];
                self.finish(cutter);
                self.parts.push(Part::Kept(chunk.digest, chunk.blocks));
            }
            (Found::Kept(_), _) => {
                self.finish(cutter);
                self.parts.push(Part::Cut(Cut::Zeroes(blocks)));
            }
        }
        self.take(cuts);
    }

    /// Ends what the cutter has.
    fn finish(&mut self, cutter: &mut Cutter) {
        let mut cuts = Vec::new();
        cutter.finish(&mut cuts);
        self.take(cuts);
    }

    fn take(&mut self, cuts: Vec<Cut>) {
        for cut in cuts {
            if let Cut::Chunk(data) = &cut {
                self.bytes += data.len();
            }
            self.parts.push(Part::Cut(cut));
        }
    }

    fn is_full(&self) -> bool {
        self.bytes >= BATCH_BYTES || self.parts.len() >= BATCH_PARTS
    }
}
