//! Reads of metadata: any alignment, beyond the end of file, several in flight.
//!
//! Reads beyond the end of file return zeroes and cost no I/O, so that entries of a hostile image
//! that point there are harmless.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cowslip_block::joins::Ahead;
use cowslip_queue::{BufMut, Pending, yield_now};

use crate::entry::big_endian;
use crate::file::BlockFile;
use crate::sync::{Mutex, lock};
use crate::{Error, Result};

/// Bytes that are in flight at once, at most, but for a single table that is larger.
const IN_FLIGHT_BYTES: u64 = 4 << 20;
/// Reads that are in flight at once: enough for a fast disk to work on, few enough for any driver.
const IN_FLIGHT_READS: u64 = 32;

/// How often the queue has its turn while all reads that are in flight at once are looked at.
const TURNS_PER_WINDOW: usize = 4;
/// Buffers that wait for their next use: one a table that is looked at would do.
const SPARE_BUFFERS_MAX: usize = 4;
/// The limit of a check's reads, zeroes beyond the end of file included: the file's length times
/// `READ_FACTOR`, plus `READ_BYTES`. An honest image needs about twice its metadata. Where
/// structures overlap a thousandfold, a small file would otherwise keep a check busy for days.
const READ_FACTOR: u64 = 16;
const READ_BYTES: u64 = 64 << 20;

/// Returns how many bytes a check may read of a file of this length.
pub fn read_bytes_max(file_bytes: u64) -> u64 {
    let times = file_bytes.saturating_mul(READ_FACTOR);
    times.saturating_add(READ_BYTES)
}

/// Bytes that were read.
pub struct Bytes {
    buf: BufMut,
    range: Range<usize>,
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buf[self.range.clone()]
    }
}

impl Bytes {
    /// Returns the bytes as big-endian words; a partial word at the end is ignored.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        self.chunks_exact(8).map(big_endian)
    }
}

/// Returns whether all bytes are 0.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |all, &byte| all | byte) == 0
}

/// The image file, read-only.
pub struct Reader<'a> {
    file: &'a Arc<dyn BlockFile>,
    len: u64,
    /// Buffers to read into again: fresh ones would be zeroed first, and their memory faulted in.
    spare: Mutex<Vec<BufMut>>,
    /// Bytes that may still be read.
    left_bytes: AtomicU64,
}

impl<'a> Reader<'a> {
    /// A reader of this file, as long as it is now.
    ///
    /// # Errors
    /// If the length cannot be found.
    pub async fn new(file: &'a Arc<dyn BlockFile>) -> Result<Reader<'a>> {
        let len = file.len().await.map_err(|error| {
            Error::io(
                format!("Could not get the length of '{}'", file.name()),
                error,
            )
        })?;
        let left_bytes = read_bytes_max(len);
        Ok(Reader {
            file,
            len,
            spare: Mutex::new(Vec::new()),
            left_bytes: AtomicU64::new(left_bytes),
        })
    }

    /// Length of the file in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Name of the file, for errors.
    pub fn name(&self) -> &str {
        self.file.name()
    }

    fn spend(&self, bytes: u64) -> Result<()> {
        let spent = |left: u64| left.checked_sub(bytes);
        let order = Ordering::Relaxed;
        match self.left_bytes.fetch_update(order, order, spent) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "checking an image whose structures lie over each other many times".into(),
            }),
        }
    }

    /// Reads `len` bytes at `offset`.
    pub async fn read(&self, offset: u64, len: u64) -> Result<Bytes> {
        self.start_read(offset, len).await
    }

    /// Begins to read `len` bytes at `offset`, now and not when it is first awaited.
    fn start_read(&self, offset: u64, len: u64) -> impl Future<Output = Result<Bytes>> + Send + '_ {
        let allowed = self.spend(len);
        let count = usize::try_from(len).expect("metadata is read in pieces that fit in memory");
        let end = offset.saturating_add(len);
        let alignment = u64::from(self.file.capabilities().alignment_bytes);
        let first = offset / alignment * alignment;
        let start = (offset - first) as usize;
        let reading = if allowed.is_err() || offset >= self.len || len == 0 {
            Pending::ready((Ok(()), BufMut::zeroed(start + count).into()))
        } else {
            // Beyond the end of file there are zeroes to the last byte that is wanted.
            let last = end.div_ceil(alignment).saturating_mul(alignment);
            let buf = self.buffer((last - first) as usize);
            self.file.read(first, buf.into())
        };
        async move {
            allowed?;
            let (result, buf) = reading.await;
            result.map_err(|error| {
                let name = self.name();
                Error::io(
                    format!("Could not read '{name}' at offset {offset:#x}"),
                    error,
                )
            })?;
            let range = start..start + count;
            Ok(Bytes {
                buf: buf.into(),
                range,
            })
        }
    }

    /// Takes back the buffer of a read, for the next read of that length.
    pub fn recycle(&self, bytes: Bytes) {
        let mut spare = lock(&self.spare);
        if spare.len() < SPARE_BUFFERS_MAX {
            spare.push(bytes.buf);
        }
    }

    fn buffer(&self, len: usize) -> BufMut {
        let mut spare = lock(&self.spare);
        match spare.pop() {
            Some(buf) if buf.len() == len => buf,
            _ => BufMut::zeroed(len),
        }
    }

    /// Reads `len` bytes at the offset of each of `tables`, in order, several at a time. The other
    /// number says which table it is.
    pub fn tables<'s>(
        &'s self,
        tables: impl Iterator<Item = (u64, u64)> + 's,
        len: u64,
    ) -> Tables<impl Iterator<Item: Future<Output = Result<(u64, Bytes)>> + Send> + 's> {
        let reads = (IN_FLIGHT_BYTES / len).clamp(2, IN_FLIGHT_READS) as usize;
        let read = move |(offset, which)| {
            let reading = self.start_read(offset, len);
            async move { Ok((which, reading.await?)) }
        };
        Tables {
            reads: Ahead::new(tables.map(read), reads),
            tables_per_turn: (reads / TURNS_PER_WINDOW).max(1),
            until_turn: 0,
        }
    }

    /// Reads a long range in pieces of `piece_bytes`, in order, several at a time.
    pub fn pieces(
        &self,
        offset: u64,
        len: u64,
        piece_bytes: u64,
    ) -> Ahead<impl Iterator<Item: Future<Output = Result<Bytes>> + Send>> {
        let reads = (IN_FLIGHT_BYTES / piece_bytes).clamp(2, IN_FLIGHT_READS) as usize;
        let pieces = (0..len.div_ceil(piece_bytes)).map(move |index| {
            let at = index * piece_bytes;
            (offset.saturating_add(at), piece_bytes.min(len - at))
        });
        let read = move |(offset, len)| self.start_read(offset, len);
        Ahead::new(pieces.map(read), reads)
    }
}

/// Tables that are read, in order.
pub struct Tables<I: Iterator<Item: Future>> {
    reads: Ahead<I>,
    tables_per_turn: usize,
    until_turn: usize,
}

impl<I: Iterator<Item: Future>> Tables<I> {
    /// Waits for the next. `None` after the last.
    pub async fn next(&mut self) -> Option<<I::Item as Future>::Output> {
        let table = self.reads.next().await?;
        // The queue hands requests to the kernel when it has its turn. Without one, the next reads
        // would wait until all that has been read is looked at.
        if self.until_turn == 0 {
            yield_now().await;
            self.until_turn = self.tables_per_turn;
        }
        self.until_turn -= 1;
        Some(table)
    }
}

/// Small reads that go on from each other, through a window.
pub(crate) struct Window<'a> {
    reader: &'a Reader<'a>,
    start: u64,
    bytes: Option<Bytes>,
}

impl<'a> Window<'a> {
    const BYTES: u64 = 64 << 10;

    pub(crate) fn new(reader: &'a Reader<'a>) -> Window<'a> {
        Window {
            reader,
            start: 0,
            bytes: None,
        }
    }

    /// The `len` bytes at `offset`.
    pub(crate) async fn get(&mut self, offset: u64, len: usize) -> Result<&[u8]> {
        let fits = self.bytes.as_ref().is_some_and(|bytes| {
            offset >= self.start
                && offset.saturating_add(len as u64)
                    <= self.start.saturating_add(bytes.len() as u64)
        });
        if !fits {
            let bytes = self
                .reader
                .read(offset, Self::BYTES.max(len as u64))
                .await?;
            self.start = offset;
            self.bytes = Some(bytes);
        }
        let start = (offset - self.start) as usize;
        let bytes = self.bytes.as_ref().expect("the window was just filled");
        Ok(&bytes[start..start + len])
    }
}
