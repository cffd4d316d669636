//! [`Cutter`]: where chunks begin and end, decided by the bytes of the disk alone.
//!
//! FastCDC finds a place by its content, and the chunk ends at the next block of 4 KiB: guests
//! store in blocks, so data that moves by whole blocks, within a disk or from one disk to another,
//! is cut at the same places again, and no block of a guest lies in two chunks. A run of zeroes of
//! [`ZERO_RUN_BYTES`] or more belongs to no chunk, whether an image stores it, marks it as zeroes
//! or does not mention it, so chunks do not depend on that.

use cowslip_block::{Error, Result, zero};
use fastcdc::v2020::FastCDC;

/// Unit of everything in a published disk, in bytes.
pub const BLOCK_BYTES: usize = 4096;

/// Shortest run of zeroes within data that belongs to no chunk, in bytes.
pub const ZERO_RUN_BYTES: usize = 64 << 10;

/// Longest chunk of any disk, in bytes.
pub const CHUNK_BYTES_MAX: usize = 4 << 20;

/// Lengths of chunks in bytes, before they are rounded up to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSizes {
    /// The shortest, except at the end of data.
    pub min: u32,
    /// The usual one.
    pub average: u32,
    /// The longest.
    pub max: u32,
}

impl ChunkSizes {
    /// Lengths around an average: a quarter to four times as much.
    ///
    /// # Errors
    /// It is no power of two from 16 KiB to 1 MiB.
    pub fn around(average: u64) -> Result<ChunkSizes> {
        let average = u32::try_from(average).unwrap_or(0);
        if !average.is_power_of_two() || !(16 << 10..=1 << 20).contains(&average) {
            return Err(Error::invalid(
                "the chunk size must be a power of two from 16 KiB to 1 MiB",
            ));
        }
        Ok(ChunkSizes {
            min: average / 4,
            average,
            max: average * 4,
        })
    }
}

impl Default for ChunkSizes {
    fn default() -> ChunkSizes {
        ChunkSizes {
            min: 8 << 10,
            average: 32 << 10,
            max: 128 << 10,
        }
    }
}

/// The next part of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Zeroes, by their number of blocks.
    Zeroes(u64),
    /// The bytes of a chunk, whole blocks.
    Chunk(Vec<u8>),
}

/// Cuts a disk whose bytes arrive in order.
#[derive(Debug)]
pub struct Cutter {
    sizes: ChunkSizes,
    /// Data that is not cut so far.
    held: Vec<u8>,
    /// Bytes at its beginning that are.
    taken: usize,
    /// Blocks of zeroes that follow it.
    zero_blocks: u64,
}

impl Cutter {
    /// A cutter at the beginning of a disk.
    pub fn new(sizes: ChunkSizes) -> Cutter {
        Cutter {
            sizes,
            held: Vec::new(),
            taken: 0,
            zero_blocks: 0,
        }
    }

    /// Takes whole blocks of any content.
    ///
    /// # Panics
    /// If they are not whole.
    pub fn push(&mut self, bytes: &[u8], cuts: &mut Vec<Cut>) {
        assert_eq!(bytes.len() % BLOCK_BYTES, 0, "whole blocks");
        let mut from = 0;
        while from < bytes.len() {
            let blocks = bytes[from..].chunks_exact(BLOCK_BYTES);
            let zeroes = blocks.clone().take_while(|block| zero::is_zero(block));
            let zeroes = zeroes.count();
            self.zero_blocks += zeroes as u64;
            let data = blocks
                .skip(zeroes)
                .take_while(|block| !zero::is_zero(block));
            let data = data.count() * BLOCK_BYTES;
            from += zeroes * BLOCK_BYTES;
            if data > 0 {
                self.settle_zeroes(cuts);
                self.held.extend_from_slice(&bytes[from..from + data]);
                from += data;
                self.cut_full(cuts);
            }
        }
    }

    /// Takes blocks of zeroes.
    pub fn push_zeroes(&mut self, blocks: u64) {
        self.zero_blocks += blocks;
    }

    /// Ends the disk.
    pub fn finish(&mut self, cuts: &mut Vec<Cut>) {
        self.cut_rest(cuts);
        if self.zero_blocks > 0 {
            cuts.push(Cut::Zeroes(self.zero_blocks));
            self.zero_blocks = 0;
        }
    }

    /// Decides what the zeroes before a block of data are.
    fn settle_zeroes(&mut self, cuts: &mut Vec<Cut>) {
        if self.zero_blocks >= (ZERO_RUN_BYTES / BLOCK_BYTES) as u64 {
            self.finish(cuts);
            return;
        }
        let len = self.held.len() + self.zero_blocks as usize * BLOCK_BYTES;
        self.held.resize(len, 0);
        self.zero_blocks = 0;
    }

    /// Longest chunk after rounding.
    fn longest(&self) -> usize {
        (self.sizes.max as usize).next_multiple_of(BLOCK_BYTES)
    }

    /// Cuts what more data cannot change.
    fn cut_full(&mut self, cuts: &mut Vec<Cut>) {
        while self.held.len() - self.taken >= self.longest() {
            self.cut_one(cuts);
        }
        // What is cut is dropped now and then, since dropping moves the rest.
        if self.taken >= 1 << 20 {
            self.held.drain(..self.taken);
            self.taken = 0;
        }
    }

    fn cut_rest(&mut self, cuts: &mut Vec<Cut>) {
        while self.taken < self.held.len() {
            self.cut_one(cuts);
        }
        self.held.clear();
        self.taken = 0;
    }

    fn cut_one(&mut self, cuts: &mut Vec<Cut>) {
        let ChunkSizes { min, average, max } = self.sizes;
        let rest = &self.held[self.taken..];
        let seen = &rest[..rest.len().min(max as usize)];
        let finder = FastCDC::new(seen, min as usize, average as usize, max as usize);
        let (_, end) = finder.cut(0, seen.len());
        let end = end.next_multiple_of(BLOCK_BYTES).min(rest.len());
        cuts.push(Cut::Chunk(rest[..end].to_vec()));
        self.taken += end;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::digest::Digest;

    /// Bytes of a generator (xorshift), none of whose blocks is zero.
    fn noise(len: usize, seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        (0..len / 8).flat_map(|_| next().to_le_bytes()).collect()
    }

    /// The cuts of a disk that arrives in pieces of a number of blocks.
    fn cuts(disk: &[u8], piece_blocks: usize) -> Vec<Cut> {
        let mut cutter = Cutter::new(ChunkSizes::default());
        let mut cuts = Vec::new();
        for piece in disk.chunks(piece_blocks * BLOCK_BYTES) {
            match zero::is_zero(piece) {
                true => cutter.push_zeroes((piece.len() / BLOCK_BYTES) as u64),
                false => cutter.push(piece, &mut cuts),
            }
        }
        cutter.finish(&mut cuts);
        cuts
    }

    fn joined(cuts: &[Cut]) -> Vec<u8> {
        let parts = cuts.iter().map(|cut| match cut {
            Cut::Zeroes(blocks) => vec![0; *blocks as usize * BLOCK_BYTES],
            Cut::Chunk(bytes) => bytes.clone(),
        });
        parts.collect::<Vec<_>>().concat()
    }

    fn digests(cuts: &[Cut]) -> HashSet<Digest> {
        let chunks = cuts.iter().filter_map(|cut| match cut {
            Cut::Chunk(bytes) => Some(Digest::of(bytes)),
            Cut::Zeroes(_) => None,
        });
        chunks.collect()
    }

    #[test]
    fn cuts_do_not_depend_on_how_the_disk_arrives() {
        let mut disk = noise(3 << 20, 7);
        disk[4096..12288].fill(0);
        disk[1 << 20..(1 << 20) + ZERO_RUN_BYTES].fill(0);
        disk[2 << 20..(2 << 20) + ZERO_RUN_BYTES - BLOCK_BYTES].fill(0);
        disk.extend(vec![0; 5 * BLOCK_BYTES]);
        let whole = cuts(&disk, 1 << 20);
        assert_eq!(joined(&whole), disk);
        for blocks in [1, 3, 16, 100] {
            assert_eq!(cuts(&disk, blocks), whole, "{blocks}");
        }
        let zeroes = |cut: &&Cut| matches!(cut, Cut::Zeroes(_));
        let runs: Vec<_> = whole.iter().filter(zeroes).collect();
        assert_eq!(runs, [&Cut::Zeroes(16), &Cut::Zeroes(5)]);
        for cut in &whole {
            if let Cut::Chunk(bytes) = cut {
                assert!(bytes.len() <= 128 << 10 && bytes.len() % BLOCK_BYTES == 0);
            }
        }
    }

    #[test]
    fn data_that_moves_by_blocks_is_cut_at_the_same_places() {
        let data = noise(4 << 20, 1);
        let mut moved = noise(9 * BLOCK_BYTES, 2);
        moved.extend_from_slice(&data);
        let (first, second) = (digests(&cuts(&data, 64)), digests(&cuts(&moved, 64)));
        let new = second.difference(&first).count();
        assert!(new <= 4, "{new} of {} chunks are new", second.len());
        let average = data.len() / first.len();
        assert!((24 << 10..56 << 10).contains(&average), "{average}");
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(ChunkSizes::around(32 << 10).unwrap(), ChunkSizes::default());
        for wrong in [0, 8 << 10, 24 << 10, 2 << 20, 1 << 47] {
            assert!(ChunkSizes::around(wrong).is_err(), "{wrong}");
        }
    }
}
