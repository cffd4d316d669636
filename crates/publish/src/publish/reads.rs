//! Reads of a disk in blocks.

use std::ops::Range;

use cowslip_block::disk::Disk;
use cowslip_block::{BufMut, Job, Result};

use crate::cut::BLOCK_BYTES;

/// Reads in flight.
pub const READS: usize = 8;
/// Extents that are asked for at a time.
pub const EXTENTS: usize = 1024;
/// Length of a block in bytes.
pub const BLOCK: u64 = BLOCK_BYTES as u64;

/// Blocks of a disk.
pub type Blocks = Range<u64>;

/// Reads blocks of a disk; what is behind its end is zeroes.
pub async fn read(source: &dyn Disk, blocks: Blocks, job: &Job) -> Result<(Blocks, Vec<u8>)> {
    let start = blocks.start * BLOCK;
    let whole = (blocks.end - blocks.start) * BLOCK;
    let there = whole.min(source.size() - start);
    job.begin(there).await?;
    let read = source.read(start, BufMut::zeroed(there as usize).into());
    let mut bytes = read.await?.to_vec();
    bytes.resize(whole as usize, 0);
    Ok((blocks, bytes))
}
