//! Space of a file, allocated as a [`Job`]: by the file system's call, or with zeroes written to
//! it.
//!
//! It is the plain file's part of a preallocation. The caller knows which bytes belong to which
//! structure, and in what order they become part of an image. Nothing here frees space again.

use std::future::Future;
use std::io::ErrorKind;
use std::ops::Range;

use crate::file::{AlignedFile, BlockFile, Durability};
use crate::geometry::BLOCK_BYTES;
use crate::job::{Job, PIECE_BYTES, Stage};
use crate::units::pieces;
use crate::{Error, Result};
use cowslip_block::Buf;
use cowslip_block::errno::ENOSPC;
use cowslip_block::policy::Preallocation;

/// Bytes that one call of the file system allocates: it holds up other I/O of the file, and cannot
/// be cancelled.
pub const CALL_BYTES: u64 = 1 << 30;
/// Bytes that one call zeroes: the device does it, which takes its time.
const ZERO_CALL_BYTES: u64 = 256 << 20;
/// Bytes of a file whose extents are asked for at once.
const WINDOW_BYTES: u64 = 1 << 30;

/// How a range gets its space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Space is allocated.
    Allocate,
    /// Zeroes are written, so that later writes change no metadata of the file system.
    Write,
}

impl Fill {
    /// How preallocated data gets its space, if it does.
    pub fn of(preallocation: Preallocation) -> Option<Fill> {
        match preallocation {
            Preallocation::Off | Preallocation::Metadata => None,
            Preallocation::Falloc => Some(Fill::Allocate),
            Preallocation::Full => Some(Fill::Write),
        }
    }
}

/// Refuses what the file system has no room for, before anything is done.
///
/// # Errors
/// `ENOSPC`, with both numbers. Where the room is not known, nothing is refused.
pub async fn check_room(file: &dyn BlockFile, needed_bytes: u64) -> Result<()> {
    match file.free_bytes_in_the_end(needed_bytes).await {
        Some(free) if free < needed_bytes => Err(Error::io(
            format!(
                "Could not preallocate '{}': {needed_bytes} bytes are needed, its file system has {free} left",
                file.name()
            ),
            std::io::Error::from_raw_os_error(ENOSPC),
        )),
        _ => Ok(()),
    }
}

/// Gives a range of a file its space; what is beyond the end of file moves it. With [`Fill::Write`]
/// whatever is there is lost.
///
/// # Errors
/// I/O, [`Error::Cancelled`]; part of the range may have its space then. All I/O has ended.
pub async fn fill(file: &AlignedFile, range: Range<u64>, how: Fill, job: &Job) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    job.enter(match how {
        Fill::Allocate => Stage::Allocate,
        Fill::Write => Stage::WriteZeroes,
    });
    let rest = match how {
        Fill::Allocate => allocate(file, range, (Account::Reported, job)).await?,
        Fill::Write => {
            let rest = zero_by_calls(file, range, job).await?;
            // Writes into space that is there neither wait for each other at the end of file nor
            // run out of it.
            allocate(file, rest.clone(), (Account::Silent, job)).await?;
            rest
        }
    };
    write_zeroes(file, rest, job).await
}

/// Report of a call to the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    /// No report: the same range is filled again.
    Silent,
    /// Completion.
    Reported,
    /// Completion, and the bytes count for the pace.
    Paced,
}

/// Makes a call for each piece of a range, one after the other; what is left where it turns out to
/// be unsupported.
///
/// # Errors
/// The call's, [`Error::Cancelled`].
pub async fn by_calls<F: Future<Output = Result<()>>>(
    range: Range<u64>,
    call_bytes: u64,
    (account, job): (Account, &Job),
    call: impl Fn(u64, u64) -> F,
) -> Result<Range<u64>> {
    let mut at = range.start;
    while at < range.end {
        let len = call_bytes.min(range.end - at);
        job.begin(0).await?;
        match call(at, len).await {
            Ok(()) => {}
            Err(error) if is_unsupported(&error) => break,
            Err(error) => return Err(error),
        }
        if account != Account::Silent {
            job.done(len);
        }
        if account == Account::Paced {
            // Only what was done counts.
            job.begin(len).await?;
        }
        at += len;
    }
    Ok(at..range.end)
}

/// Allocates by calls of the file system, as far as it has them; what is left.
async fn allocate(
    file: &AlignedFile,
    range: Range<u64>,
    to: (Account, &Job),
) -> Result<Range<u64>> {
    by_calls(range, CALL_BYTES, to, |at, len| file.allocate(at, len)).await
}

/// Zeroes by calls that count as writing, where device and system have them; what is left.
async fn zero_by_calls(file: &AlignedFile, range: Range<u64>, job: &Job) -> Result<Range<u64>> {
    let unit = BLOCK_BYTES.max(u64::from(file.capabilities().alignment_bytes));
    if !range.start.is_multiple_of(unit) || !range.end.is_multiple_of(unit) {
        return Ok(range);
    }
    let call = |at, len| file.allocate_written(at, len);
    by_calls(range, ZERO_CALL_BYTES, (Account::Paced, job), call).await
}

/// Writes zeroes over a range, in large pieces, several at a time.
async fn write_zeroes(file: &AlignedFile, range: Range<u64>, job: &Job) -> Result<()> {
    let zeroes = Buf::zeroed(PIECE_BYTES.min(range.end - range.start) as usize);
    let write = |at, len| {
        let part = zeroes.slice(0, len as usize);
        file.write(at, vec![part], Durability::Cached)
    };
    job.run_pieces(range, write).await
}

/// Copies a file into an empty one, holes as holes; several pieces at a time.
///
/// # Errors
/// I/O, [`Error::Cancelled`]; then the target holds a part.
pub async fn copy(source: &AlignedFile, target: &AlignedFile, job: &Job) -> Result<()> {
    let len = source.len().await?;
    let mut data_len = 0;
    // Asked for twice, so that a file of many extents is never listed as a whole.
    for pass in [Pass::Count, Pass::Copy] {
        for window in pieces(0, len, WINDOW_BYTES) {
            let extents = source
                .extents(window.start, window.end - window.start)
                .await?;
            for extent in extents.iter().filter(|extent| !extent.hole) {
                let range = extent.start..extent.start + extent.len;
                match pass {
                    Pass::Count => data_len += extent.len,
                    Pass::Copy => {
                        let piece = |at, len| async move {
                            let bytes = source.read_new(at, len).await?;
                            target
                                .write(at, vec![bytes.freeze()], Durability::Cached)
                                .await
                        };
                        job.run_pieces(range, piece).await?;
                    }
                }
            }
        }
        if pass == Pass::Count {
            check_room(target.block_file().as_ref(), data_len).await?;
            job.expect(data_len);
            job.enter(Stage::Copy);
        }
    }
    target.set_len(len).await
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Count,
    Copy,
}

/// Whether a call failed since the file, its system or the kernel has no such call.
pub fn is_unsupported(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == ErrorKind::Unsupported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::memory::MemoryFile;
    use futures_util::FutureExt;
    use std::sync::Arc;

    #[test]
    fn zeroes_are_written_over_the_range_and_nothing_else() {
        for alignment in [1, 4096] {
            let file = Arc::new(MemoryFile::new("a", vec![7; 3 << 20], alignment));
            let job = Job::default();
            let (start, end) = (100, (2 << 20) + 5000);
            let host = AlignedFile::new(file.clone());
            let filled = fill(&host, start..end, Fill::Write, &job);
            filled.now_or_never().unwrap().unwrap();
            for (at, byte) in (0..).zip(file.contents()) {
                assert_eq!(byte == 0, (start..end).contains(&at), "{at}");
            }
            assert_eq!(job.progress().done_bytes, end - start);
        }
    }
}
