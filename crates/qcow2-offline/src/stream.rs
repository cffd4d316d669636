//! A qcow2 image of a disk, made in the order of its file: for objects in stores, and whatever else
//! takes bytes one after the other. No byte is written twice but those of the header, which says
//! where the tables are and is handed over at the end.
//!
//! | part of the file | |
//! | --- | --- |
//! | first cluster | zeroes, which the header takes the place of |
//! | data | clusters that are not zero, in the order of the disk, stored or compressed |
//! | L2 tables | together, behind the data that they map: all at the end, or whenever they take [`TABLES_BYTES`] |
//! | L1 table, refcount table, refcount blocks | at the end |
//!
//! The image has no backing file: it holds all of the disk. Zeroes take no space, whether the
//! source stores them or not. Memory is that of the tables, of the counts (2 bytes for each
//! cluster of the file), and of `READS` reads.
//!
//! `stream/sequence.rs` decides where everything goes, and does no I/O.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use cowslip_block::joins::Line;

use crate::compress::{Compressor, missing_codec};
use crate::create::{CreateOptions, Preallocation};
use crate::disk::Disk;
use crate::job::Stage;
use crate::units::{round_down, round_up};
use crate::zero::is_zero;
use crate::{BufMut, Error, Job, Result, Workers};

mod sequence;

use sequence::Sequence;
#[doc(hidden)]
pub use sequence::TABLES_BYTES;

/// Bytes of the disk that are read and compressed together: whole clusters of any size.
const READ_BYTES: u64 = 2 << 20;
/// Reads under way.
const READS: usize = 8;
/// Extents that are asked for at a time.
const EXTENTS: usize = 1024;

/// A taker of the file's bytes.
pub trait Sink: Send {
    /// Takes the bytes that follow those of before.
    ///
    /// # Errors
    /// The taker's.
    fn push(&mut self, bytes: Vec<u8>) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>>;
}

/// The form of data clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As they are.
    Plain,
    /// Compressed, where that makes them smaller.
    Compressed,
}

/// A file whose bytes a sink has taken, but for the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Streamed {
    /// The first bytes of the file, instead of zeroes.
    pub header: Vec<u8>,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Bytes of the disk in clusters that are not zero.
    pub data_bytes: u64,
    /// Bytes of the file that they take.
    pub stored_bytes: u64,
}

/// Checks that an image of these options can be made in the order of its file.
///
/// # Errors
/// `Invalid`, in QEMU's words where QEMU has some; `Unsupported` where the library was built
/// without the codec.
#[doc(hidden)]
pub fn validate(options: &CreateOptions, stored: Stored) -> Result<()> {
    options.validate()?;
    let refused = [
        (options.backing_file.is_some(), "a backing file"),
        (options.data_file.is_some(), "an external data file"),
        (options.encryption.is_some(), "encryption"),
        (
            options.preallocation != Preallocation::Off,
            "preallocated space",
        ),
    ];
    if let Some((_, what)) = refused.iter().find(|(is_wanted, _)| *is_wanted) {
        return Err(Error::invalid(format!(
            "an image that is made in the order of its file cannot have {what}"
        )));
    }
    match missing_codec(options.compression_type) {
        Some(feature) if stored == Stored::Compressed => Err(Error::Unsupported {
            file: "the new image".to_string(),
            feature: feature.into(),
        }),
        _ => Ok(()),
    }
}

/// Hands an image of a disk, which must not change meanwhile, to a sink. Its size is the disk's.
///
/// # Errors
/// `Invalid` options ([`validate`]); the disk's, the sink's; [`Error::Cancelled`]. What the sink
/// has is no image then.
pub async fn stream(
    source: &dyn Disk,
    (options, stored): (&CreateOptions, Stored),
    sink: &mut dyn Sink,
    (workers, job): (&Workers, &Job),
) -> Result<Streamed> {
    let options = &CreateOptions {
        size: source.size(),
        ..options.clone()
    };
    validate(options, stored)?;
    job.enter(Stage::Copy);
    job.expect(source.size());
    job.done(0);
    let mut sequence = Sequence::new(options)?;
    let mut walk = Walk::new(source, options.cluster_size);
    let form = Form {
        cluster_bytes: options.cluster_size as usize,
        compressor: (stored == Stored::Compressed).then_some(options.compression_type),
    };
    let mut data_bytes = 0;
    let mut stored_bytes = 0;
    let mut pieces = Line::default();
    let mut is_more = true;
    loop {
        while is_more && pieces.len() < READS {
            match walk.next().await? {
                None => is_more = false,
                Some(range) => pieces.push(prepare(source, range, form, (workers, job))),
            }
        }
        let Some(piece) = pieces.next().await.transpose()? else {
            break;
        };
        let before = sequence.end();
        for (number, cluster) in piece.clusters() {
            let start = number * options.cluster_size;
            data_bytes += options.cluster_size.min(source.size() - start);
            match cluster {
                Cluster::Plain(bytes) => sequence.plain(number, bytes)?,
                Cluster::Compressed(bytes) => sequence.compressed(number, bytes)?,
            }
        }
        stored_bytes += sequence.end() - before;
        sequence.place_full_tables()?;
        job.done(walk.passed(&piece.range));
        let made = sequence.take();
        if !made.is_empty() {
            sink.push(made).await?;
        }
        job.check()?;
    }
    job.done(source.size() - walk.reported);
    job.enter(Stage::Tables);
    let header = sequence.finish(options)?;
    let (file_bytes, made) = (sequence.end(), sequence.take());
    sink.push(made).await?;
    Ok(Streamed {
        header,
        file_bytes,
        data_bytes,
        stored_bytes,
    })
}

/// Walks over the parts of a disk that may hold data.
struct Walk<'a> {
    source: &'a dyn Disk,
    cluster_bytes: u64,
    /// Ranges with data that are known, joined.
    known: VecDeque<Range<u64>>,
    /// First byte after what is known.
    asked: u64,
    /// First byte that has not been handed out.
    at: u64,
    /// First byte that has not been reported as done.
    reported: u64,
}

impl<'a> Walk<'a> {
    fn new(source: &'a dyn Disk, cluster_bytes: u64) -> Walk<'a> {
        Walk {
            source,
            cluster_bytes,
            known: VecDeque::new(),
            asked: 0,
            at: 0,
            reported: 0,
        }
    }

    /// The next range to read: whole clusters within a multiple of [`READ_BYTES`], or the rest of
    /// the disk's last one.
    async fn next(&mut self) -> Result<Option<Range<u64>>> {
        let size = self.source.size();
        loop {
            while self.known.front().is_some_and(|data| data.end <= self.at) {
                self.known.pop_front();
            }
            let Some(data) = self.known.front() else {
                if self.asked >= size {
                    return Ok(None);
                }
                self.ask(size).await?;
                continue;
            };
            let start = round_down(data.start.max(self.at), self.cluster_bytes);
            let group_end = (round_down(start, READ_BYTES) + READ_BYTES).min(size);
            if self.asked < group_end {
                self.ask(size).await?;
                continue;
            }
            // Holes in between are read with the data around them.
            let within = self.known.iter().rev().find(|data| data.start < group_end);
            let end = within.map_or(group_end, |data| data.end.min(group_end));
            let end = round_up(end, self.cluster_bytes).min(size);
            self.at = end;
            return Ok(Some(start..end));
        }
    }

    async fn ask(&mut self, size: u64) -> Result<()> {
        let left = size - self.asked;
        for extent in self.source.extents(self.asked, left, EXTENTS).await? {
            let end = extent.start + extent.len;
            self.asked = end;
            if extent.zero {
                continue;
            }
            match self.known.back_mut() {
                Some(last) if last.end == extent.start => last.end = end,
                _ => self.known.push_back(extent.start..end),
            }
        }
        Ok(())
    }

    /// Bytes of the disk that are done with a range, those before it included.
    fn passed(&mut self, range: &Range<u64>) -> u64 {
        let more = range.end - self.reported;
        self.reported = range.end;
        more
    }
}

/// The form of clusters.
#[derive(Clone, Copy)]
struct Form {
    cluster_bytes: usize,
    compressor: Option<crate::CompressionType>,
}

/// A part of the disk, ready to be placed.
struct Piece {
    range: Range<u64>,
    cluster_bytes: usize,
    bytes: Arc<Vec<u8>>,
    /// Clusters that are not zero, by their numbers in the piece, with their compressed form.
    data: Vec<(usize, Option<Vec<u8>>)>,
}

enum Cluster<'a> {
    Plain(&'a [u8]),
    Compressed(&'a [u8]),
}

impl Piece {
    /// Clusters that are not zero, with their numbers on the disk.
    fn clusters(&self) -> impl Iterator<Item = (u64, Cluster<'_>)> {
        let first = self.range.start / self.cluster_bytes as u64;
        self.data.iter().map(move |(number, compressed)| {
            let at = number * self.cluster_bytes;
            let cluster = match compressed {
                Some(bytes) => Cluster::Compressed(bytes),
                None => Cluster::Plain(&self.bytes[at..at + self.cluster_bytes]),
            };
            (first + *number as u64, cluster)
        })
    }
}

/// Reads a part of the disk, looks for zeroes and compresses the rest.
async fn prepare(
    source: &dyn Disk,
    range: Range<u64>,
    form: Form,
    (workers, job): (&Workers, &Job),
) -> Result<Piece> {
    let len = range.end - range.start;
    job.begin(len).await?;
    let read = source.read(range.start, BufMut::zeroed(len as usize).into());
    let mut bytes = read.await?.to_vec();
    // The disk may end within its last cluster.
    bytes.resize(bytes.len().next_multiple_of(form.cluster_bytes), 0);
    let bytes = Arc::new(bytes);
    let of_work = Arc::clone(&bytes);
    let data = workers.run(move || data_of(&of_work, form)).await;
    Ok(Piece {
        range,
        cluster_bytes: form.cluster_bytes,
        bytes,
        data,
    })
}

fn data_of(bytes: &[u8], form: Form) -> Vec<(usize, Option<Vec<u8>>)> {
    let mut compressor = form.compressor.map(Compressor::new);
    let clusters = bytes.chunks_exact(form.cluster_bytes).enumerate();
    let data = clusters.filter(|(_, cluster)| !is_zero(cluster));
    data.map(|(number, cluster)| {
        let compressor = compressor.as_mut();
        (number, compressor.and_then(|one| one.compress(cluster)))
    })
    .collect()
}
