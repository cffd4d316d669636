//! Compares two disks, as a job that reads as little as possible.
//!
//! ```
//! # use std::sync::Arc;
//! # use cowslip::file::{host::NoFiles, memory::MemoryFile};
//! # use cowslip::image::{Durability, OpenOptions};
//! # use cowslip::qcow2::create::{CreateOptions, create};
//! # use cowslip::{Buf, BufMut, Image, Job};
//! # async fn image(bytes: u64) -> cowslip::Result<Image> {
//! #     let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
//! #     create(file.clone(), None, &CreateOptions::new(bytes)).await?;
//! #     let options = OpenOptions { writable: true, ..OpenOptions::default() };
//! #     Image::open(file, options, &NoFiles).await
//! # }
//! # fn main() -> cowslip::Result<()> {
//! # cowslip::blocking::wait(async {
//! use cowslip::compare::{Strictness, Verdict, compare};
//!
//! # let (one, other) = (image(1 << 20).await?, image(1 << 20).await?);
//! other.write(8192, Buf::copy_of(b"a difference"), Durability::Cached).await?;
//! let compared = compare([&one, &other], Strictness::Content, &Job::default()).await;
//! assert_eq!(compared.expect("both can be read").verdict, Verdict::ContentDiffers(8192));
//! # Ok(())
//! # })
//! # }
//! ```
//!
//! The tables come first: a range that is zero on both disks, or that both take from one image, is
//! not read (`pairs.rs`). The rest is read in pieces, of both disks at once and several pieces
//! ahead, and compared in order, so that the difference reported is the first one. Memory is 2 MiB
//! of each disk for each of 4 pieces in flight.

use std::pin::pin;

use cowslip_block::joins::{Line, try_join};
use cowslip_boxed::boxed;
use cowslip_queue::BufMut;

use crate::image::Image;
use crate::job::Job;
pub use crate::pairs::Side;
use crate::pairs::{Known, Span, Spans};
use crate::units::SECTOR_BYTES;
use crate::zero::is_zero;
use crate::{Error, Result};

/// Bytes of each disk that are compared at a time, as in qemu-img, so that a failed read is
/// reported at the same offset.
const PIECE_BYTES: u64 = 2 << 20;
/// Pieces that are read at a time.
const IN_FLIGHT: usize = 4;

/// The properties that have to be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strictness {
    /// The bytes that reads return.
    Content,
    /// Also how they are stored: unallocated, as zeroes, as data, as compressed data. Host offsets
    /// do not matter.
    Storage,
}

/// How two disks compare. The shorter one reads as zeroes beyond its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The disks are equal.
    Identical,
    /// They are not; with the first sector that differs, in bytes.
    ContentDiffers(u64),
    /// They are stored differently from this byte on.
    StorageDiffers(u64),
}

/// The result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// Whether the disks are equal.
    pub verdict: Verdict,
    /// Bytes of the disks that had to be looked at to find out.
    pub looked_at_bytes: u64,
}

/// Why disks could not be compared.
#[derive(Debug)]
pub enum Failure {
    /// The extents of this disk could not be listed.
    Extents(Side, Error),
    /// This one could not be read at this offset.
    Read(Side, u64, Error),
    /// The job was cancelled.
    Cancelled,
}

/// Compares two disks.
///
/// # Errors
/// Which one of them failed, and how.
pub async fn compare(
    images: [&Image; 2],
    strictness: Strictness,
    job: &Job,
) -> std::result::Result<Comparison, Failure> {
    let size = images.map(Image::size).into_iter().max().unwrap_or(0);
    job.expect(size);
    let matters = match strictness {
        Strictness::Content => |known| Known {
            stored_alike: true,
            held_by_first: false,
            ..known
        },
        Strictness::Storage => |known| Known {
            held_by_first: false,
            ..known
        },
    };
    let mut spans = Spans::new(images.map(Some), 0..size, matters);
    let mut pieces = Line::default();
    let mut looked_at_bytes = 0;
    let mut outcome = None;
    let verdict = loop {
        while outcome.is_none() && pieces.len() < IN_FLIGHT {
            match spans.next(PIECE_BYTES).await {
                Err((side, error)) => outcome = Some(Err(Failure::Extents(side, error))),
                Ok(None) => outcome = Some(Ok(Verdict::Identical)),
                Ok(Some(span)) if !span.known.stored_alike => {
                    outcome = Some(Ok(Verdict::StorageDiffers(span.range.start)));
                }
                Ok(Some(span)) if span.known.same => {
                    job.check().map_err(|_| Failure::Cancelled)?;
                    job.done(span.len());
                }
                Ok(Some(span)) => {
                    job.begin(span.len())
                        .await
                        .map_err(|_| Failure::Cancelled)?;
                    pieces.push(async move { (differs(images, &span).await, span.len()) });
                }
            }
        }
        match pieces.next().await {
            None => break outcome.expect("without pieces the spans have ended")?,
            Some((Ok(None), len)) => {
                looked_at_bytes += len;
                job.done(len);
            }
            Some((Ok(Some(at)), len)) => {
                looked_at_bytes += len;
                break Verdict::ContentDiffers(at);
            }
            Some((Err(failure), _)) => return Err(failure),
        }
    };
    Ok(Comparison {
        verdict,
        looked_at_bytes,
    })
}

/// The first sector in which a span differs.
#[boxed]
async fn differs(images: [&Image; 2], span: &Span) -> std::result::Result<Option<u64>, Failure> {
    let start = span.range.start;
    let read = |index: usize| async move {
        if span.known.zero[index] {
            return Ok(None);
        }
        let buf = BufMut::for_overwrite(span.len() as usize);
        let read: Result<BufMut> = images[index].read(start, buf).await;
        let failed = |error| Failure::Read(Side::BOTH[index], start, error);
        read.map(Some).map_err(failed)
    };
    let at = match try_join(pin!(read(0)), pin!(read(1))).await? {
        (Some(first), Some(second)) => first_difference(&first, &second),
        (Some(one), None) | (None, Some(one)) => first_data(&one),
        (None, None) => None,
    };
    Ok(at.map(|at| start + at))
}

/// Returns where two buffers of one length differ, to the sector.
fn first_difference(first: &[u8], second: &[u8]) -> Option<u64> {
    if first == second {
        return None;
    }
    let sectors = |buf| <[u8]>::chunks(buf, SECTOR_BYTES as usize);
    let mut pairs = sectors(first).zip(sectors(second));
    let sector = pairs.position(|(first, second)| first != second)?;
    Some(sector as u64 * SECTOR_BYTES)
}

/// Returns where a buffer is not zero, to the sector.
fn first_data(buf: &[u8]) -> Option<u64> {
    let mut sectors = buf.chunks(SECTOR_BYTES as usize);
    let sector = sectors.position(|sector| !is_zero(sector))?;
    Some(sector as u64 * SECTOR_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found_by_the_sector() {
        let zeroes = vec![0; 5000];
        assert_eq!(first_difference(&zeroes, &zeroes), None);
        assert_eq!(first_data(&zeroes), None);
        for at in [0, 1, 511, 512, 4607, 4608, 4999] {
            let mut data = zeroes.clone();
            data[at] = 1;
            let sector = Some(at as u64 / 512 * 512);
            assert_eq!(first_difference(&zeroes, &data), sector);
            assert_eq!(first_data(&data), sector);
        }
    }
}
