//! Pulling: a published disk is copied to a new one. What an interrupted pull has written is read,
//! compared with the digests, and not fetched again.

use cowslip_block::disk::{Disk, ZeroOptions};
use cowslip_block::file::{Durability, Space};
use cowslip_block::job::Stage;
use cowslip_block::{Buf, BufMut, Error, Job, Result, Workers};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::cut::BLOCK_BYTES;
use crate::digest::Digest;
use crate::disk::{Part, PublishedDisk};
use crate::index::Content;

/// Bytes of the disk that are fetched and written together.
const PIECE_BYTES: u64 = 2 << 20;
/// Pieces in flight.
const IN_FLIGHT: usize = 8;
/// Extents of the target that are asked for at a time.
const EXTENTS: usize = 1024;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// The target's bytes before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// Zeroes: it is new.
    Zeroes,
    /// An interrupted pull has written to it.
    Interrupted,
}

/// Work that a pull did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Bytes of the disk that are no zeroes.
    pub data_bytes: u64,
    /// Of them, those that the target had.
    pub kept_bytes: u64,
}

/// Copies a published disk to a target of at least its length. Does not flush.
///
/// # Errors
/// The store's, the target's; [`Error::Cancelled`]. The target may be used by another pull then.
pub async fn pull(
    source: &PublishedDisk,
    target: &dyn Disk,
    before: Before,
    (workers, job): (&Workers, &Job),
) -> Result<Pulled> {
    if target.size() < source.size() {
        return Err(Error::invalid("the target is shorter than the disk"));
    }
    job.enter(Stage::Copy);
    job.expect(source.size());
    job.done(0);
    let mut total = Pulled::default();
    let mut pieces = FuturesUnordered::new();
    let mut at = 0;
    let mut outcome = Ok(());
    loop {
        while outcome.is_ok() && at < source.size() && pieces.len() < IN_FLIGHT {
            let end = piece_end(source, at);
            pieces.push(piece(source, target, (at, end, before), (workers, job)));
            at = end;
        }
        let Some(done) = pieces.next().await else {
            break;
        };
        match done {
            Ok(pulled) => {
                total.data_bytes += pulled.data_bytes;
                total.kept_bytes += pulled.kept_bytes;
            }
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    outcome.map(|()| total)
}

/// The end of the piece that begins at a run.
fn piece_end(source: &PublishedDisk, at: u64) -> u64 {
    let index = source.index();
    let mut run = index.run_at(at / BLOCK);
    let mut end = index.end_of_run(run) * BLOCK;
    // A run of zeroes of any length is a piece of its own.
    while matches!(index.runs[run].content, Content::Chunk(_))
        && end - at < PIECE_BYTES
        && let Some(next) = index.runs.get(run + 1)
        && matches!(next.content, Content::Chunk(_))
    {
        run += 1;
        end = index.end_of_run(run) * BLOCK;
    }
    end.min(source.size())
}

async fn piece(
    source: &PublishedDisk,
    target: &dyn Disk,
    (start, end, before): (u64, u64, Before),
    (workers, job): (&Workers, &Job),
) -> Result<Pulled> {
    job.check()?;
    let mut pulled = Pulled::default();
    let parts = source.parts(start..end, usize::MAX);
    let mut missing = Vec::new();
    for part in &parts {
        match part.content {
            Content::Chunk(number) => {
                pulled.data_bytes += part.len;
                let is_there = before == Before::Interrupted
                    && has(source, target, (part, number), workers).await?;
                match is_there {
                    true => pulled.kept_bytes += part.len,
                    false => missing.push(*part),
                }
            }
            Content::Unallocated | Content::Zeroes if before == Before::Interrupted => {
                clear(target, part).await?;
            }
            Content::Unallocated | Content::Zeroes => {}
        }
    }
    for run in adjacent(&missing) {
        let len = run.iter().map(|part| part.len).sum::<u64>();
        job.begin(len).await?;
        let read = source.read(run[0].start, BufMut::zeroed(len as usize).into());
        let data = read.await?.freeze();
        target.write(run[0].start, data, Durability::Cached).await?;
    }
    job.done(end - start);
    Ok(pulled)
}

/// Parts that follow each other, together.
fn adjacent(parts: &[Part]) -> impl Iterator<Item = &[Part]> {
    parts.chunk_by(|one, next| one.start + one.len == next.start)
}

/// Whether the target has the data of a chunk.
async fn has(
    source: &PublishedDisk,
    target: &dyn Disk,
    (part, number): (&Part, u32),
    workers: &Workers,
) -> Result<bool> {
    let chunk = source.index().chunks[number as usize];
    let read = target.read(part.start, BufMut::zeroed(part.len as usize).into());
    let mut bytes = read.await?.to_vec();
    let digest = workers.run(move || {
        // The last block may lie in part behind the disk.
        bytes.resize(chunk.data_bytes(), 0);
        Digest::of(&bytes)
    });
    Ok(digest.await == chunk.digest)
}

/// Makes a part of the target zeroes, where it is not.
async fn clear(target: &dyn Disk, part: &Part) -> Result<()> {
    let (mut at, end) = (part.start, part.start + part.len);
    while at < end {
        for extent in target.extents(at, end - at, EXTENTS).await? {
            if !extent.zero {
                let options = ZeroOptions {
                    space: Space::Release,
                    ..ZeroOptions::default()
                };
                clear_data(target, (extent.start, extent.len), options).await?;
            }
            at = extent.start + extent.len;
        }
    }
    Ok(())
}

async fn clear_data(
    target: &dyn Disk,
    (start, len): (u64, u64),
    options: ZeroOptions,
) -> Result<()> {
    match target.zero(start, len, options).await {
        Err(Error::Unsupported { .. }) => {}
        done => return done,
    }
    let mut done = 0;
    while done < len {
        let piece = PIECE_BYTES.min(len - done);
        let zeroes = Buf::zeroed(piece as usize);
        let write = target.write(start + done, zeroes.into(), Durability::Cached);
        write.await?;
        done += piece;
    }
    Ok(())
}
