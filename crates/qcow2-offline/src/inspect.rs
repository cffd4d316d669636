//! An image's description of itself: header, snapshot list, bitmap list.
//!
//! Reads no table that maps data and opens no other file, so an image whose backing file or data
//! file is missing, or that is encrypted, can still be described.

use std::sync::Arc;

use cowslip_queue::BufMut;

use crate::entry::{bitmap, snapshot};
use crate::file::BlockFile;
use crate::header::{BitmapsExtension, FIRST_READ_BYTES, Header};
use crate::{Error, Result};

/// Bytes of a snapshot table or bitmap directory that are read at once.
const WINDOW_BYTES: u64 = 64 << 10;
const SNAPSHOT_TABLE: &str = "snapshot table";
const BEYOND_END: &str = "an entry reaches beyond the end";
const BITMAP_DIRECTORY: &str = "bitmap directory";

/// An internal snapshot, as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Unique ID.
    pub id: String,
    /// Name that the user gave.
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

/// A persistent bitmap, as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapInfo {
    /// Name, unique in the image.
    pub name: String,
    /// Bytes of the disk that a bit stands for.
    pub granularity: u64,
    /// It was not saved properly.
    pub in_use: bool,
    /// It follows all writes.
    pub auto: bool,
}

/// Properties of an image, read without opening it for requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// The header; also an encrypted image's.
    pub header: Header,
    /// The internal snapshots, in the table's order.
    pub snapshots: Vec<SnapshotInfo>,
    /// The bitmaps, if they are consistent.
    pub bitmaps: Vec<BitmapInfo>,
}

impl Inspection {
    /// Returns where the LUKS volume of the image's keys is, if it has one.
    #[doc(hidden)]
    pub fn keys_place(&self) -> Option<std::ops::Range<u64>> {
        let crypto = self.header.extensions.crypto_header?;
        Some(crypto.offset..crypto.offset.saturating_add(crypto.length))
    }
}

/// The first bytes of a file: what probing a format and reading a header need.
///
/// # Errors
/// I/O.
#[doc(hidden)]
pub async fn read_start(file: &dyn BlockFile) -> Result<Vec<u8>> {
    let len = file_len(file).await?;
    let start = read(file, 0, len.min(FIRST_READ_BYTES)).await?;
    let wanted = Header::wanted_bytes(&start, len);
    if crate::foreign::supported(&start) != crate::policy::Format::Qcow2
        || wanted <= start.len() as u64
    {
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
    let header = Header::parse(&start, len, file.name())?;
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
    len.map_err(|e| {
        Error::io(
            format!("Could not determine the length of '{}'", file.name()),
            e,
        )
    })
}

/// Reads bytes at any offset; those beyond the end of file are zero.
async fn read(file: &dyn BlockFile, offset: u64, len: u64) -> Result<Vec<u8>> {
    let alignment = u64::from(file.capabilities().alignment_bytes);
    let start = crate::units::round_down(offset, alignment);
    let end = crate::units::round_up(offset + len, alignment);
    let (done, buf) = file
        .read(start, BufMut::zeroed((end - start) as usize).into())
        .await;
    done.map_err(|e| Error::io(format!("Could not read '{}'", file.name()), e))?;
    let at = (offset - start) as usize;
    let mut bytes = vec![0; len as usize];
    buf.copy_to_slice(at, &mut bytes);
    Ok(bytes)
}

/// Reads a table of entries of varying length front to back, a window at a time.
struct TableReader<'a> {
    file: &'a dyn BlockFile,
    structure: &'static str,
    next: u64,
    end: u64,
    /// The error text for entries that reach beyond the end.
    beyond_end: &'static str,
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
                    return Err(self.corrupt(self.beyond_end));
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

/// A name from an image: a zero byte ends it, as it does for QEMU.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(before_zero(bytes)).into_owned()
}

/// Returns the bytes before the first zero byte.
#[doc(hidden)]
pub fn before_zero(bytes: &[u8]) -> &[u8] {
    bytes.split(|&byte| byte == 0).next().unwrap_or_default()
}

async fn snapshots(
    file: &dyn BlockFile,
    header: &Header,
    file_len: u64,
) -> Result<Vec<SnapshotInfo>> {
    let mut table = snapshot_table(file, header, file_len);
    let mut out = Vec::new();
    for _ in 0..header.nb_snapshots {
        out.push(read_snapshot(&mut table).await?);
    }
    Ok(out)
}

/// The length of the snapshot table, whose entries have no fixed one.
///
/// # Errors
/// If the file cannot be read, or an entry reaches beyond its end.
#[doc(hidden)]
pub async fn snapshot_table_bytes(
    file: &dyn BlockFile,
    header: &Header,
    file_len: u64,
) -> Result<u64> {
    let mut table = snapshot_table(file, header, file_len);
    for _ in 0..header.nb_snapshots {
        read_snapshot(&mut table).await?;
    }
    Ok(table.offset() - header.snapshots_offset)
}

fn snapshot_table<'a>(file: &'a dyn BlockFile, header: &Header, file_len: u64) -> TableReader<'a> {
    let start = header.snapshots_offset;
    // QEMU leaves out the padding of the last entry where the table is the end of the file.
    let file_end = file_len.next_multiple_of(8);
    let longest = start.saturating_add(snapshot::TABLE_BYTES_MAX);
    TableReader {
        file,
        structure: SNAPSHOT_TABLE,
        next: start,
        end: file_end.min(longest),
        beyond_end: match longest < file_end {
            true => {
                "Snapshot table is too big (more than 64 MiB); check -r all removes what is beyond"
            }
            false => BEYOND_END,
        },
        window: Vec::new(),
        at: 0,
    }
}

async fn read_snapshot(table: &mut TableReader<'_>) -> Result<SnapshotInfo> {
    let fixed = table.take(snapshot::FIXED_BYTES).await?;
    let fixed = snapshot::Fixed::decode(&fixed);
    let extra_bytes = fixed.extra_bytes;
    if extra_bytes > snapshot::EXTRA_BYTES_MAX {
        let detail =
            format!("Too much extra metadata in snapshot table entry ({extra_bytes} bytes)");
        return Err(table.corrupt(detail));
    }
    let extra = table.take(extra_bytes as usize).await?;
    let extra = snapshot::Extra::decode(&extra);
    let id = table.take(usize::from(fixed.id_bytes)).await?;
    let name = table.take(usize::from(fixed.name_bytes)).await?;
    let padding = fixed.entry_bytes() - fixed.names_start() - fixed.names_bytes();
    table.take(padding as usize).await?;
    let vm_state_size = extra.vm_state_bytes;
    Ok(SnapshotInfo {
        id: text(&id),
        name: text(&name),
        vm_state_size: vm_state_size.unwrap_or_else(|| fixed.vm_state_bytes.into()),
        date_sec: fixed.date_sec,
        date_nsec: fixed.date_nsec,
        vm_clock_nsec: fixed.vm_clock_nsec,
        icount: extra.icount,
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
        beyond_end: BEYOND_END,
        window: Vec::new(),
        at: 0,
    };
    let count = extension.nb_bitmaps;
    let valid = (1..=bitmap::COUNT_MAX).contains(&count)
        && extension.reserved == 0
        && extension.bitmap_directory_size <= bitmap::DIRECTORY_BYTES_MAX
        && header.geometry().is_cluster_aligned(start)
        && directory.end <= file_len;
    if !valid {
        return Err(directory.corrupt("the bitmaps extension describes no valid directory"));
    }
    let mut out = Vec::new();
    for _ in 0..count {
        out.push(read_bitmap(&mut directory).await?);
    }
    Ok(out)
}

async fn read_bitmap(directory: &mut TableReader<'_>) -> Result<BitmapInfo> {
    let fixed = directory.take(bitmap::FIXED_BYTES).await?;
    let fixed = bitmap::Fixed::decode(&fixed);
    let left = directory.end - directory.offset();
    let granularity = fixed.granularity().filter(|_| fixed.flaw().is_none());
    let granularity = granularity.filter(|_| u64::from(fixed.extra_bytes) <= left);
    let Some(granularity) = granularity else {
        return Err(directory.corrupt("a bitmap's entry is not valid"));
    };
    directory.take(fixed.extra_bytes as usize).await?;
    let name = directory.take(usize::from(fixed.name_bytes)).await?;
    let before = bitmap::FIXED_BYTES as u64 + u64::from(fixed.extra_bytes) + name.len() as u64;
    directory
        .take((fixed.entry_bytes() - before) as usize)
        .await?;
    Ok(BitmapInfo {
        name: text(&name),
        granularity,
        in_use: fixed.in_use(),
        auto: fixed.auto(),
    })
}
