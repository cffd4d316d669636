//! [`prove`]: whether what a disk is said to have changed is all of it, as far as a bounded part of
//! the rest can show.
//!
//! A bitmap that began at another moment, was cleared, or follows another image would publish a
//! disk that never was. So of what is taken from the parent unread
//!
//! - all extents are asked for. Where the disk stores something and the parent has zeroes, it is
//!   read, and so is a chunk where the disk has zeroes: [`SUSPECTS_MAX`] of such pieces, drawn
//!   where there are more;
//! - chunks are drawn, as many as [`chunks_drawn`] says, each as likely as any other, or all where
//!   there are no more, and read and compared with their digests.
//!
//! Of `k` chunks that are not read, with `d` others than they should be, `n` that are drawn find
//! one with a probability of `1 - (1 - d/k)^n` at least.

use std::collections::VecDeque;
use std::ops::Range;

use cowslip_block::disk::{Disk, Extent};
use cowslip_block::random::Random;
use cowslip_block::{Error, Job, Result, Workers};
use futures_util::{StreamExt, TryStreamExt};

use crate::digest::Digest;
use crate::index::{Content, Index};

use super::reads::{BLOCK, EXTENTS, READS, read};
use super::steps::{Changes, Step, Steps};

/// Most chunks that are drawn.
const CHUNKS_MAX: u64 = 1024;
/// Fewest chunks that are drawn, however long they are.
const CHUNKS_MIN: u64 = 64;
/// Bytes of the chunks that are drawn between these two numbers, by the usual length of a chunk.
const CHUNK_BYTES: u64 = 64 << 20;
/// Pieces that are drawn of those whose extents contradict the parent.
const SUSPECTS_MAX: u64 = 1024;
/// Longest piece of them that is no chunk, in blocks.
const SUSPECT_BLOCKS: u64 = 16;

/// The number of chunks that are drawn where chunks have this usual length in bytes.
fn chunks_drawn(average: u32) -> u64 {
    (CHUNK_BYTES / u64::from(average.max(1))).clamp(CHUNKS_MIN, CHUNKS_MAX)
}

/// A part of a disk that is read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    blocks: Range<u64>,
    /// The digest that its bytes should have; `None`: they should be zeroes.
    digest: Option<Digest>,
}

/// Some of many, of which each is as likely as any other.
#[derive(Debug)]
struct Draw<T> {
    drawn: Vec<T>,
    max: u64,
    seen: u64,
}

impl<T> Draw<T> {
    fn new(max: u64) -> Draw<T> {
        Draw {
            drawn: Vec::new(),
            max,
            seen: 0,
        }
    }

    fn add(&mut self, random: &mut Random, item: T) {
        self.seen += 1;
        if self.seen <= self.max {
            self.drawn.push(item);
            return;
        }
        let place = random.below(self.seen);
        if place < self.max {
            self.drawn[place as usize] = item;
        }
    }
}

/// The extents of a disk, from its beginning to its end.
struct Extents<'a> {
    source: &'a dyn Disk,
    known: VecDeque<Extent>,
}

impl Extents<'_> {
    /// The parts of a range in bytes that are no zeroes, joined. Ranges come in their order.
    async fn data_in(&mut self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        let mut data: Vec<Range<u64>> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let Some(first) = self.known.front() else {
                let left = self.source.size() - at;
                self.known = self.source.extents(at, left, EXTENTS).await?.into();
                if self.known.is_empty() {
                    let text = format!("the disk has no extent at offset {at}");
                    return Err(Error::invalid(text));
                }
                continue;
            };
            let end = first.start + first.len;
            if end <= at {
                self.known.pop_front();
                continue;
            }
            let end = end.min(range.end);
            match data.last_mut() {
                _ if first.zero => {}
                Some(last) if last.end == at => last.end = end,
                _ => data.push(at..end),
            }
            at = end;
        }
        Ok(data)
    }
}

/// Checks that a disk is as the base has it where nothing is said to have changed. `version` is the
/// base's name, for messages.
///
/// # Errors
/// It is not; the disk's; [`Error::Cancelled`].
pub async fn prove(
    source: &dyn Disk,
    changes: Changes<'_>,
    (version, random): (&str, &mut Random),
    (workers, job): (&Workers, &Job),
) -> Result<()> {
    let pieces = drawn(source, changes, random, job).await?;
    let reads = pieces.into_iter().map(|piece| async {
        let (blocks, bytes) = read(source, piece.blocks.clone(), job).await?;
        let differs = move || difference(&piece, &bytes);
        match workers.run(differs).await {
            None => Ok(()),
            Some(block) => Err(Error::invalid(format!(
                "the disk differs from {version} at or behind offset {}, where no change is noted: what is noted is not all that has changed since; publish it without --bitmap and --track",
                (blocks.start + block) * BLOCK
            ))),
        }
    });
    let reads = futures_util::stream::iter(reads).buffered(READS);
    reads.try_collect().await
}

/// The pieces to be read, in their order.
async fn drawn(
    source: &dyn Disk,
    changes: Changes<'_>,
    random: &mut Random,
    job: &Job,
) -> Result<Vec<Piece>> {
    let base: &Index = changes.base;
    let mut chunks = Draw::new(chunks_drawn(base.sizes.average));
    let mut suspects = Draw::new(SUSPECTS_MAX);
    let mut extents = Extents {
        source,
        known: VecDeque::new(),
    };
    for step in Steps::new(Some(changes), source.size()) {
        let Step::Kept(blocks, content) = step else {
            continue;
        };
        job.check()?;
        let bytes = blocks.start * BLOCK..(blocks.end * BLOCK).min(source.size());
        let data = extents.data_in(bytes).await?;
        match content {
            Content::Chunk(number) => {
                let digest = Some(base.chunks[number as usize].digest);
                let chunk = Piece { blocks, digest };
                match data.is_empty() {
                    true => suspects.add(random, chunk),
                    false => chunks.add(random, chunk),
                }
            }
            Content::Unallocated | Content::Zeroes => {
                for data in data {
                    let end = data.end.div_ceil(BLOCK);
                    let mut at = data.start / BLOCK;
                    while at < end {
                        let blocks = at..(at + SUSPECT_BLOCKS).min(end);
                        at = blocks.end;
                        let digest = None;
                        suspects.add(random, Piece { blocks, digest });
                    }
                }
            }
        }
    }
    let mut pieces = chunks.drawn;
    pieces.append(&mut suspects.drawn);
    pieces.sort_unstable_by_key(|piece| piece.blocks.start);
    Ok(pieces)
}

/// The first block of a piece that is not as it should be, or of a chunk the first at all.
fn difference(piece: &Piece, bytes: &[u8]) -> Option<u64> {
    match piece.digest {
        Some(digest) => (Digest::of(bytes) != digest).then_some(0),
        None => {
            let first = bytes.iter().position(|byte| *byte != 0)?;
            Some(first as u64 / BLOCK)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_many_is_as_likely_to_be_drawn() {
        let mut random = Random(0xd4a3);
        let mut times = [0_u64; 40];
        for _ in 0..4000 {
            let mut draw = Draw::new(10);
            for item in 0..times.len() {
                draw.add(&mut random, item);
            }
            assert_eq!(draw.drawn.len(), 10);
            draw.drawn.into_iter().for_each(|item| times[item] += 1);
        }
        // Each 1000 times, with a standard deviation of 27.
        assert!(
            times.iter().all(|times| (865..1135).contains(times)),
            "{times:?}"
        );
    }

    #[test]
    fn longer_chunks_are_drawn_in_smaller_numbers() {
        let drawn = [16 << 10, 32 << 10, 128 << 10, 1 << 20, 4 << 20].map(chunks_drawn);
        assert_eq!(drawn, [1024, 1024, 512, 64, 64]);
    }
}
