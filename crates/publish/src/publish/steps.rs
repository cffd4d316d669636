//! [`Steps`]: which parts of a disk are read, and which are as an index has them, where it is known
//! what has changed since.
//!
//! Chunks are kept or read as a whole. Zeroes are read where they have changed alone. What lies
//! behind the end of the shorter of the two disks is read.

use std::ops::Range;

use crate::cut::BLOCK_BYTES;
use crate::index::{Content, Index};

/// Changes of a disk since it was published.
#[derive(Clone, Copy, Debug)]
pub struct Changes<'a> {
    /// The disk as it was.
    pub base: &'a Index,
    /// Ranges in bytes, in their order, without overlaps.
    pub ranges: &'a [Range<u64>],
}

/// The next part of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Blocks that are read.
    Read(Range<u64>),
    /// Blocks that are as they were: a whole chunk, or zeroes.
    Kept(Range<u64>, Content),
}

const BLOCK: u64 = BLOCK_BYTES as u64;

/// The parts of a disk in their order, neighbours that are read joined.
#[derive(Debug)]
pub struct Steps<'a> {
    changes: Option<Changes<'a>>,
    /// Blocks of the disk.
    blocks: u64,
    /// Blocks that both disks have as a whole.
    common: u64,
    /// The next block, and its run in the base.
    at: u64,
    run: usize,
    /// A step that was looked at already.
    looked_at: Option<Step>,
}

impl<'a> Steps<'a> {
    /// The steps of a disk of this length in bytes; all of it is read if nothing is known.
    pub fn new(changes: Option<Changes<'a>>, disk_bytes: u64) -> Steps<'a> {
        let base_bytes = changes.map_or(0, |changes| changes.base.disk_bytes);
        let blocks = disk_bytes.div_ceil(BLOCK);
        Steps {
            changes,
            blocks,
            common: match base_bytes == disk_bytes {
                true => blocks,
                false => base_bytes.min(disk_bytes) / BLOCK,
            },
            at: 0,
            run: 0,
            looked_at: None,
        }
    }

    fn read_until(&mut self, end: u64) -> Step {
        let start = self.at;
        self.at = end;
        Step::Read(start..end)
    }

    fn step(&mut self) -> Option<Step> {
        if self.at >= self.blocks {
            return None;
        }
        let Some(changes) = self.changes.as_mut().filter(|_| self.at < self.common) else {
            return Some(self.read_until(self.blocks));
        };
        while let Some((first, rest)) = changes.ranges.split_first()
            && first.end.div_ceil(BLOCK) <= self.at
        {
            changes.ranges = rest;
        }
        let changed = changes.ranges.first();
        let changed = changed.map_or(u64::MAX..u64::MAX, |range| {
            range.start / BLOCK..range.end.div_ceil(BLOCK)
        });
        let content = changes.base.runs[self.run].content;
        let end = changes.base.end_of_run(self.run);
        let is_changed = changed.start <= self.at;
        let until = match content {
            Content::Chunk(_) if end > self.common => self.blocks,
            Content::Chunk(_) => end,
            Content::Unallocated | Content::Zeroes => {
                let until = if is_changed {
                    changed.end
                } else {
                    changed.start
                };
                until.min(end).min(self.common)
            }
        };
        if until == end {
            self.run += 1;
        }
        let is_read = match content {
            Content::Chunk(_) => changed.start < end || end > self.common,
            Content::Unallocated | Content::Zeroes => is_changed,
        };
        if is_read {
            return Some(self.read_until(until));
        }
        let kept = self.at..until;
        self.at = until;
        Some(Step::Kept(kept, content))
    }
}

impl Iterator for Steps<'_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let mut step = self.looked_at.take().or_else(|| self.step())?;
        while let Step::Read(read) = &mut step {
            match self.step() {
                Some(Step::Read(more)) => read.end = more.end,
                other => {
                    self.looked_at = other;
                    break;
                }
            }
        }
        Some(step)
    }
}

#[cfg(test)]
mod tests {
    use cowslip_block::random::Random;

    use super::*;
    use crate::cut::ChunkSizes;
    use crate::index::Run;

    fn index(disk_bytes: u64, contents: &[(Content, u64)]) -> Index {
        let mut start = 0;
        let runs = contents.iter().map(|(content, blocks)| {
            let run = Run {
                start,
                content: *content,
            };
            start += blocks;
            run
        });
        Index {
            disk_bytes,
            session: [0; 16],
            sizes: ChunkSizes::default(),
            packs: Vec::new(),
            chunks: Vec::new(),
            runs: runs.collect(),
        }
    }

    /// Every block is in one step; none is kept that has changed, or lies beyond the common part;
    /// and of what has not, no more is read than chunks that have.
    #[test]
    fn what_has_changed_is_read_and_the_rest_is_kept() {
        let mut random = Random(0x57e9);
        for _ in 0..3000 {
            let mut contents = Vec::new();
            for number in 0..1 + random.below(6) {
                let content = match random.below(3) {
                    0 => Content::Chunk(number as u32),
                    1 => Content::Zeroes,
                    _ => Content::Unallocated,
                };
                contents.push((content, 1 + random.below(9)));
            }
            let blocks: u64 = contents.iter().map(|(_, blocks)| blocks).sum();
            let base = index(blocks * BLOCK - random.below(BLOCK), &contents);
            let disk_bytes = match random.below(3) {
                0 => 1 + random.below(2 * base.disk_bytes),
                _ => base.disk_bytes,
            };
            let mut ranges = Vec::new();
            let mut at = 0;
            for _ in 0..random.below(4) {
                let start = at + random.below(10 * BLOCK);
                at = start + 1 + random.below(6 * BLOCK);
                ranges.push(start..at);
            }
            let is_changed = |blocks: &Range<u64>| {
                let bytes = blocks.start * BLOCK..blocks.end * BLOCK;
                let meets = |range: &Range<u64>| range.start < bytes.end && range.end > bytes.start;
                ranges.iter().any(meets)
            };
            let changes = Changes {
                base: &base,
                ranges: &ranges,
            };
            let mut end = 0;
            let mut was_read = false;
            for step in Steps::new(Some(changes), disk_bytes) {
                let (blocks, is_read) = match &step {
                    Step::Read(blocks) => (blocks.clone(), true),
                    Step::Kept(blocks, _) => (blocks.clone(), false),
                };
                assert!(blocks.start == end && !blocks.is_empty(), "{step:?}");
                assert!(!(is_read && was_read), "neighbours are joined");
                (end, was_read) = (blocks.end, is_read);
                for block in blocks.clone().take_while(|_| is_read) {
                    let common = base.disk_bytes.min(disk_bytes);
                    let is_new = (block + 1) * BLOCK > common;
                    let run = base.run_at(block.min(base.disk_blocks() - 1));
                    let whole = base.runs[run].start..base.end_of_run(run);
                    let is_chunk = matches!(base.runs[run].content, Content::Chunk(_));
                    let may_be_read = is_new
                        || is_changed(&(block..block + 1))
                        || (is_chunk && (is_changed(&whole) || whole.end * BLOCK > common));
                    assert!(may_be_read, "{block} of {changes:?} {disk_bytes}");
                }
                if let Step::Kept(blocks, content) = step {
                    assert!(!is_changed(&blocks), "{blocks:?} of {changes:?}");
                    let run = base.run_at(blocks.start);
                    assert_eq!(base.runs[run].content, content);
                    assert!(blocks.end <= base.end_of_run(run));
                    if let Content::Chunk(_) = content {
                        assert_eq!(blocks, base.runs[run].start..base.end_of_run(run));
                    }
                    assert!(
                        disk_bytes == base.disk_bytes
                            || blocks.end * BLOCK <= disk_bytes.min(base.disk_bytes)
                    );
                }
            }
            assert_eq!(end, disk_bytes.div_ceil(BLOCK));
        }
    }

    #[test]
    fn without_changes_all_of_a_disk_is_read() {
        let all: Vec<Step> = Steps::new(None, 10 * BLOCK + 1).collect();
        assert_eq!(all, [Step::Read(0..11)]);
        assert_eq!(Steps::new(None, 0).next(), None);
    }
}
