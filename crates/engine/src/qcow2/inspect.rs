//! What an image says of itself, for reports: header, snapshot list, bitmap list.
//!
//! Reads no table that maps data and opens no other file, so an image whose backing file or data
//! file is missing, or that is encrypted, can still be described.

use std::sync::Arc;

use cowslip_queue::BufMut;

use super::header::{BitmapsExtension, Header};
use crate::file::BlockFile;
use crate::{Error, Result};

/// Bytes that are read first: most headers need no more.
const FIRST_READ_BYTES: u64 = 4096;
/// Bytes of a snapshot table or bitmap directory that are read at once.
const WINDOW_BYTES: u64 = 64 << 10;
/// Limits of QEMU.
const SNAPSHOT_TABLE_BYTES_MAX: u64 = 64 << 20;
const SNAPSHOT_EXTRA_BYTES_MAX: u32 = 1024;
const BITMAPS_MAX: u32 = 65535;
const BITMAP_DIRECTORY_BYTES_MAX: u64 = 64 << 20;
const BITMAP_NAME_BYTES_MAX: usize = 1023;
const BITMAP_GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;

const SNAPSHOT_TABLE: &str = "snapshot table";
const BITMAP_DIRECTORY: &str = "bitmap directory";
const SNAPSHOT_ENTRY_BYTES: usize = 40;
const BITMAP_ENTRY_BYTES: usize = 24;

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Its unique ID.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Bytes of saved VM state.
    pub vm_state_size: u64,
    /// When it was taken, in seconds since the epoch.
    pub date_sec: u32,
    /// The rest of that time.
    pub date_nsec: u32,
    /// How long the guest had run.
    pub vm_clock_nsec: u64,
    /// Instructions that the guest had run, if counted.
    pub icount: Option<u64>,
}

/// A persistent bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapInfo {
    /// Its name.
    pub name: String,
    /// Bytes of the disk that a bit stands for.
    pub granularity: u64,
    /// It was not saved properly.
    pub in_use: bool,
    /// It follows all writes.
    pub auto: bool,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// The header; also an encrypted image's.
    pub header: Header,
    /// The internal snapshots, in the table's order.
    pub snapshots: Vec<SnapshotInfo>,
    /// The bitmaps, if they are consistent.
    pub bitmaps: Vec<BitmapInfo>,
}

/// The first bytes of a file: what probing a format and reading a header need.
///
/// # Errors
/// I/O.
pub async fn read_start(file: &dyn BlockFile) -> Result<Vec<u8>> {
    let len = file_len(file).await?;
    let start = read(file, 0, len.min(FIRST_READ_BYTES)).await?;
    let wanted = Header::wanted_bytes(&start, len);
    if super::header::probe(&start) == crate::image::Format::Raw || wanted <= start.len() as u64 {
        return Ok(start);
    }
    read(file, 0, wanted).await
}

/// Reads what the qcow2 image in `file` says of itself.
///
/// # Errors
/// I/O, or a structure that is corrupt or not supported.
pub async fn inspect(file: &Arc<dyn BlockFile>) -> Result<Inspection> {
    let start = read_start(file.as_ref()).await?;
    let len = file_len(file.as_ref()).await?;
    let header = Header::parse_encrypted_too(&start, len, file.name())?;
    let snapshots = snapshots(file.as_ref(), &header, len).await?;
    let bitmaps = match header.consistent_bitmaps() {
        Some(extension) => bitmaps(file.as_ref(), extension, &header, len).await?,
        None => Vec::new(),
    };
    Ok(Inspection {
        header,
        snapshots,
        bitmaps,
    })
}

async fn file_len(file: &dyn BlockFile) -> Result<u64> {
    let len = file.len().await;
    len.map_err(|e| Error::io(format!("Could not tell the length of '{}'", file.name()), e))
}

/// Reads bytes at any offset; what is beyond the end of file is zero.
async fn read(file: &dyn BlockFile, offset: u64, len: u64) -> Result<Vec<u8>> {
    let alignment = u64::from(file.capabilities().alignment_bytes);
    let start = super::geometry::round_down(offset, alignment);
    let end = super::geometry::round_up(offset + len, alignment);
    let (done, buf) = file
        .read(start, BufMut::zeroed((end - start) as usize))
        .await;
    done.map_err(|e| Error::io(format!("Could not read '{}'", file.name()), e))?;
    let at = (offset - start) as usize;
    Ok(buf[at..at + len as usize].to_vec())
}

/// Reads a table of entries of varying length front to back, a window at a time.
struct TableReader<'a> {
    file: &'a dyn BlockFile,
    structure: &'static str,
    next: u64,
    end: u64,
    window: Vec<u8>,
    at: usize,
}

impl TableReader<'_> {
    fn offset(&self) -> u64 {
        self.next - (self.window.len() - self.at) as u64
    }

    fn corrupt(&self, detail: impl Into<String>) -> Error {
        Error::Corrupt {
            file: self.file.name().to_string(),
            structure: self.structure,
            offset: self.offset(),
            detail: detail.into(),
        }
    }

    async fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(len);
        while out.len() < len {
            if self.at == self.window.len() {
                let bytes = WINDOW_BYTES.min(self.end - self.next);
                if bytes == 0 {
                    return Err(self.corrupt("an entry reaches beyond the end"));
                }
                self.window = read(self.file, self.next, bytes).await?;
                self.next += bytes;
                self.at = 0;
            }
            let part = (len - out.len()).min(self.window.len() - self.at);
            out.extend_from_slice(&self.window[self.at..self.at + part]);
            self.at += part;
        }
        Ok(out)
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |n, &byte| n << 8 | u64::from(byte))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

async fn snapshots(
    file: &dyn BlockFile,
    header: &Header,
    file_len: u64,
) -> Result<Vec<SnapshotInfo>> {
    let mut table = snapshot_table(file, header, file_len);
    let mut out = Vec::new();
    for _ in 0..header.nb_snapshots {
        out.push(snapshot(&mut table).await?);
    }
    Ok(out)
}

/// The length of the snapshot table, whose entries have no fixed one.
pub(super) async fn snapshot_table_bytes(
    file: &dyn BlockFile,
    header: &Header,
    file_len: u64,
) -> Result<u64> {
    let mut table = snapshot_table(file, header, file_len);
    for _ in 0..header.nb_snapshots {
        snapshot(&mut table).await?;
    }
    Ok(table.offset() - header.snapshots_offset)
}

fn snapshot_table<'a>(file: &'a dyn BlockFile, header: &Header, file_len: u64) -> TableReader<'a> {
    let start = header.snapshots_offset;
    TableReader {
        file,
        structure: SNAPSHOT_TABLE,
        next: start,
        // QEMU leaves out the padding of the last entry where the table is the end of the file.
        end: file_len
            .next_multiple_of(8)
            .min(start.saturating_add(SNAPSHOT_TABLE_BYTES_MAX)),
        window: Vec::new(),
        at: 0,
    }
}

async fn snapshot(table: &mut TableReader<'_>) -> Result<SnapshotInfo> {
    let fixed = table.take(SNAPSHOT_ENTRY_BYTES).await?;
    let extra_len = number(&fixed[36..40]) as u32;
    if extra_len > SNAPSHOT_EXTRA_BYTES_MAX {
        let detail = format!("Too much extra metadata in snapshot table entry ({extra_len} bytes)");
        return Err(table.corrupt(detail));
    }
    let extra = table.take(extra_len as usize).await?;
    let id = table.take(number(&fixed[12..14]) as usize).await?;
    let name = table.take(number(&fixed[14..16]) as usize).await?;
    let len = fixed.len() + extra.len() + id.len() + name.len();
    table.take(len.next_multiple_of(8) - len).await?;
    let icount = extra.get(16..24).map(number);
    Ok(SnapshotInfo {
        id: text(&id),
        name: text(&name),
        vm_state_size: extra
            .get(..8)
            .map_or_else(|| number(&fixed[32..36]), number),
        date_sec: number(&fixed[16..20]) as u32,
        date_nsec: number(&fixed[20..24]) as u32,
        vm_clock_nsec: number(&fixed[24..32]),
        icount: icount.filter(|&count| count != u64::MAX),
    })
}

async fn bitmaps(
    file: &dyn BlockFile,
    extension: &BitmapsExtension,
    header: &Header,
    file_len: u64,
) -> Result<Vec<BitmapInfo>> {
    let start = extension.bitmap_directory_offset;
    let mut directory = TableReader {
        file,
        structure: BITMAP_DIRECTORY,
        next: start,
        end: start.saturating_add(extension.bitmap_directory_size),
        window: Vec::new(),
        at: 0,
    };
    let count = extension.nb_bitmaps;
    let valid = (1..=BITMAPS_MAX).contains(&count)
        && extension.reserved == 0
        && extension.bitmap_directory_size <= BITMAP_DIRECTORY_BYTES_MAX
        && header.geometry().is_cluster_aligned(start)
        && directory.end <= file_len;
    if !valid {
        return Err(directory.corrupt("the bitmaps extension describes no valid directory"));
    }
    let mut out = Vec::new();
    for _ in 0..count {
        out.push(bitmap(&mut directory).await?);
    }
    Ok(out)
}

async fn bitmap(directory: &mut TableReader<'_>) -> Result<BitmapInfo> {
    const IN_USE: u64 = 1;
    const AUTO: u64 = 2;
    let fixed = directory.take(BITMAP_ENTRY_BYTES).await?;
    let flags = number(&fixed[12..16]);
    let granularity_bits = fixed[17];
    let name_len = number(&fixed[18..20]) as usize;
    let extra_len = number(&fixed[20..24]);
    let left = directory.end - directory.offset();
    if flags >> 3 != 0
        || !BITMAP_GRANULARITY_BITS.contains(&granularity_bits)
        || name_len == 0
        || name_len > BITMAP_NAME_BYTES_MAX
        || extra_len > left
    {
        return Err(directory.corrupt("a bitmap's entry is not valid"));
    }
    directory.take(extra_len as usize).await?;
    let name = directory.take(name_len).await?;
    let len = fixed.len() + extra_len as usize + name_len;
    directory.take(len.next_multiple_of(8) - len).await?;
    Ok(BitmapInfo {
        name: text(&name),
        granularity: 1 << granularity_bits,
        in_use: flags & IN_USE != 0,
        auto: flags & AUTO != 0,
    })
}
