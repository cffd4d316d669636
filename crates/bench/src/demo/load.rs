//! The client: what it writes where, and what the disk must read as afterwards.
//!
//! Every 4 KiB block of the disk has contents that follow from the seed, its number and how often
//! it was written, so that nothing has to be remembered but which blocks were written.

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use cowslip_console::error::CommandError;
use cowslip_console::progress::Progress;
use cowslip_nbd::export::Durability;
use cowslip_nbd::{Client, ClientError, ConnectOptions};
use cowslip_queue::{Buf, BufMut, Stream};
use futures_util::future::try_join_all;

const BLOCK_BYTES: u64 = 4096;
/// Requests in flight.
pub const DEPTH: usize = 32;
/// Blocks of a sequential request: 512 KiB.
const RUN_BLOCKS: u64 = 128;
/// Sequential requests in flight.
const RUN_DEPTH: usize = 4;

/// Contents of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    /// The golden image's.
    Golden,
    /// Data that the client wrote over it.
    Written,
}

/// The work of one row, the same for each.
pub struct Load {
    blocks: u64,
    seed: u64,
    /// The blocks to be written, in order; each once.
    order: Vec<u64>,
    /// Whether it is among them, by block.
    chosen: Vec<bool>,
}

impl Load {
    /// Plans `operations` random writes of blocks to a disk.
    pub fn new(disk_bytes: u64, operations: u64, seed: u64) -> Result<Load, CommandError> {
        let blocks = disk_bytes / BLOCK_BYTES;
        if operations == 0 || operations > blocks {
            return Err(CommandError::new(format!(
                "A disk of {} MiB has blocks for 1 to {blocks} operations",
                disk_bytes >> 20
            )));
        }
        let mut order: Vec<u64> = (0..blocks).collect();
        for at in 0..operations {
            let other = at + random(seed, at) % (blocks - at);
            order.swap(at as usize, other as usize);
        }
        order.truncate(operations as usize);
        let mut chosen = vec![false; blocks as usize];
        for block in &order {
            chosen[*block as usize] = true;
        }
        Ok(Load {
            blocks,
            seed,
            order,
            chosen,
        })
    }

    /// Size of the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.blocks * BLOCK_BYTES
    }

    /// Number of random writes.
    pub fn operations(&self) -> u64 {
        self.order.len() as u64
    }

    /// Bytes that the guest writes to an overlay.
    pub fn guest_bytes(&self) -> u64 {
        self.operations() * BLOCK_BYTES
    }

    /// Work of filling the golden image, for the bar. A random write weighs as 16 sequential
    /// blocks.
    pub fn populate_units(&self) -> u64 {
        self.blocks
    }

    /// Work of one row.
    pub fn case_units(&self) -> u64 {
        self.operations() * 16 + self.blocks + self.check_units()
    }

    /// Work of checking an image.
    pub fn check_units(&self) -> u64 {
        self.blocks / 16
    }

    fn fill(&self, block: u64, contents: Contents, bytes: &mut [u8]) {
        let salt = match contents {
            Contents::Golden => 0x60_1d,
            Contents::Written => 0x0e_11,
        };
        let mut word = random(self.seed ^ salt, block);
        for chunk in bytes.chunks_exact_mut(8) {
            // xorshift64: cheap, and different in every word.
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            chunk.copy_from_slice(&word.to_le_bytes());
        }
    }

    fn block(&self, block: u64, contents: Contents) -> Buf {
        let mut buf = BufMut::zeroed(BLOCK_BYTES as usize);
        self.fill(block, contents, &mut buf);
        buf.freeze()
    }

    /// Fills the whole disk and flushes it.
    pub async fn populate(&self, socket: &Path, progress: &Progress) -> Result<(), CommandError> {
        let client = connect(socket).await?;
        let next = Cell::new(0);
        let worker = async || {
            while let Some((start, count)) = self.next_run(&next) {
                let mut buf = BufMut::zeroed((count * BLOCK_BYTES) as usize);
                for (block, bytes) in (start..).zip(buf.chunks_exact_mut(BLOCK_BYTES as usize)) {
                    self.fill(block, Contents::Golden, bytes);
                }
                client
                    .write(start * BLOCK_BYTES, buf.freeze(), Durability::Cached)
                    .await?;
                progress.advance(count);
            }
            Ok::<(), ClientError>(())
        };
        try_join_all((0..RUN_DEPTH).map(|_| worker()))
            .await
            .map_err(failed)?;
        client.flush().await.map_err(failed)?;
        client.disconnect().await.map_err(failed)
    }

    /// Writes the chosen blocks and flushes; returns how long that took.
    pub async fn write(
        &self,
        socket: &Path,
        progress: &Progress,
    ) -> Result<Duration, CommandError> {
        let client = connect(socket).await?;
        let next = Cell::new(0);
        let worker = async || {
            while let Some(block) = self.order.get(next.get()) {
                next.set(next.get() + 1);
                let data = self.block(*block, Contents::Written);
                client
                    .write(block * BLOCK_BYTES, data, Durability::Cached)
                    .await?;
                progress.advance(16);
            }
            Ok::<(), ClientError>(())
        };
        let start = Instant::now();
        try_join_all((0..DEPTH).map(|_| worker()))
            .await
            .map_err(failed)?;
        client.flush().await.map_err(failed)?;
        let elapsed = start.elapsed();
        client.disconnect().await.map_err(failed)?;
        Ok(elapsed)
    }

    /// Reads the whole disk and compares every block.
    pub async fn read_back(&self, socket: &Path, progress: &Progress) -> Result<(), CommandError> {
        let client = connect(socket).await?;
        let next = Cell::new(0);
        let worker = async || {
            while let Some((start, count)) = self.next_run(&next) {
                let buf = BufMut::zeroed((count * BLOCK_BYTES) as usize);
                let read = client
                    .read(start * BLOCK_BYTES, buf)
                    .await
                    .map_err(failed)?;
                self.compare(start, &read)?;
                progress.advance(count);
            }
            Ok::<(), CommandError>(())
        };
        try_join_all((0..RUN_DEPTH).map(|_| worker())).await?;
        client.disconnect().await.map_err(failed)
    }

    /// The next run of a walk through the disk: first block and count.
    fn next_run(&self, next: &Cell<u64>) -> Option<(u64, u64)> {
        let start = next.get();
        let count = RUN_BLOCKS.min(self.blocks - start);
        next.set(start + count);
        (count > 0).then_some((start, count))
    }

    fn compare(&self, start: u64, read: &[u8]) -> Result<(), CommandError> {
        let mut expected = vec![0; BLOCK_BYTES as usize];
        for (block, bytes) in (start..).zip(read.chunks_exact(BLOCK_BYTES as usize)) {
            let contents = if self.chosen[block as usize] {
                Contents::Written
            } else {
                Contents::Golden
            };
            self.fill(block, contents, &mut expected);
            if bytes != expected {
                let offset = block * BLOCK_BYTES;
                return Err(CommandError::new(format!(
                    "the block at offset {offset} reads as something else than was written"
                )));
            }
        }
        Ok(())
    }
}

async fn connect(socket: &Path) -> Result<Client, CommandError> {
    let stream = Stream::connect_unix(socket)
        .await
        .map_err(|e| failed(e.into()))?;
    Client::connect(stream, &ConnectOptions::new(""))
        .await
        .map_err(failed)
}

fn failed(error: ClientError) -> CommandError {
    CommandError::new(format!("the server fails: {error}"))
}

/// SplitMix64 of a seed and a counter.
fn random(seed: u64, counter: u64) -> u64 {
    let mut z = (seed ^ counter.rotate_left(32)).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chosen_block_is_written_once() {
        let load = Load::new(1 << 20, 200, 3).unwrap();
        let mut order = load.order.clone();
        order.sort_unstable();
        order.dedup();
        assert_eq!(order.len(), 200);
        assert_eq!(load.chosen.iter().filter(|chosen| **chosen).count(), 200);
        assert!(order.iter().all(|block| *block < 256));
    }

    #[test]
    fn more_operations_than_blocks_are_refused() {
        assert!(Load::new(1 << 20, 257, 3).is_err());
        assert!(Load::new(1 << 20, 0, 3).is_err());
    }

    #[test]
    fn a_wrong_block_is_noticed() {
        let load = Load::new(1 << 20, 1, 3).unwrap();
        let written = load.order[0];
        assert!(
            load.compare(written, &load.block(written, Contents::Written))
                .is_ok()
        );
        assert!(
            load.compare(written, &load.block(written, Contents::Golden))
                .is_err()
        );
        let other = (written + 1) % 256;
        assert!(
            load.compare(other, &load.block(other, Contents::Golden))
                .is_ok()
        );
        assert!(
            load.compare(other, &load.block(written, Contents::Golden))
                .is_err()
        );
    }
}
