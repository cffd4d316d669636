//! Persistent bitmaps: their directory, their tables and the clusters of their data (qcow2.rst,
//! "Bitmaps"). Only where the autoclear bit says that they are consistent: otherwise nothing
//! references them, and their clusters are leaked.

use futures_util::StreamExt;

use super::counts::Copied;
use super::reader::{Reader, Window, word};
use super::{Finding, PIECE_BYTES, State, Structure};
use crate::Result;

/// Bytes of a directory entry before its extra data.
const ENTRY_BYTES: usize = 24;
/// The longest name of a bitmap.
const NAME_BYTES_MAX: usize = 1023;
/// The most entries of a bitmap table, as in QEMU.
const TABLE_ENTRIES_MAX: u64 = 0x800_0000;
/// The only type: a dirty tracking bitmap.
const TYPE_DIRTY_TRACKING: u8 = 1;
/// log2 of the granularity, as in QEMU.
const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// Flags that are known: in_use, auto, extra_data_compatible.
const FLAGS_KNOWN: u32 = 7;
const TABLE_OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// All bits of the bitmap's cluster are set; it has no space.
const TABLE_ALL_ONES: u64 = 1;

/// Counts the directory, the tables and their clusters.
pub(super) async fn count(reader: &Reader<'_>, state: &mut State<'_>) -> Result<()> {
    let Some(&extension) = state.header.consistent_bitmaps() else {
        return Ok(());
    };
    let directory = extension.bitmap_directory_offset;
    let bytes = extension.bitmap_directory_size;
    state.region(directory, bytes, Structure::Bitmaps)?;
    let mut window = Window::new(reader);
    let mut at = 0;
    for index in 0..extension.nb_bitmaps {
        let broken = |what: &str| Finding::Bitmaps {
            what: format!("directory entry {index}: {what}"),
        };
        if bytes - at < ENTRY_BYTES as u64 {
            state.emit(&broken("the directory ends before it"));
            return Ok(());
        }
        let entry = window.get(directory + at, ENTRY_BYTES).await?;
        let entry = Entry::parse(entry);
        let len = ENTRY_BYTES as u64 + entry.extra_bytes + entry.name_bytes as u64;
        let len = len.next_multiple_of(8);
        if len > bytes - at {
            state.emit(&broken("it is longer than the directory"));
            return Ok(());
        }
        at += len;
        match entry.flaw(state) {
            Some(flaw) => state.emit(&broken(flaw)),
            None => count_table(reader, state, &entry).await?,
        }
    }
    if at != bytes {
        let what = "the directory is longer than its entries".to_string();
        state.emit(&Finding::Bitmaps { what });
    }
    Ok(())
}

/// A directory entry.
struct Entry {
    table_offset: u64,
    table_entries: u64,
    flags: u32,
    kind: u8,
    granularity_bits: u8,
    name_bytes: usize,
    extra_bytes: u64,
}

impl Entry {
    fn parse(bytes: &[u8]) -> Entry {
        Entry {
            table_offset: word(&bytes[..8]),
            table_entries: word(&bytes[8..12]),
            flags: word(&bytes[12..16]) as u32,
            kind: bytes[16],
            granularity_bits: bytes[17],
            name_bytes: word(&bytes[18..20]) as usize,
            extra_bytes: word(&bytes[20..24]),
        }
    }

    /// What makes it impossible to count its table.
    fn flaw(&self, state: &State<'_>) -> Option<&'static str> {
        let aligned = state.geometry.is_cluster_aligned(self.table_offset);
        if self.table_offset == 0 || !aligned {
            return Some("its table does not start a cluster");
        }
        if self.kind != TYPE_DIRTY_TRACKING || self.flags & !FLAGS_KNOWN != 0 {
            return Some("its type or its flags are not known");
        }
        if !GRANULARITY_BITS.contains(&self.granularity_bits) {
            return Some("its granularity is impossible");
        }
        if self.name_bytes == 0 || self.name_bytes > NAME_BYTES_MAX {
            return Some("its name is empty or too long");
        }
        let bits = state.header.size.div_ceil(1 << self.granularity_bits);
        let entries = state.geometry.clusters_for(bits.div_ceil(8));
        if self.table_entries != entries || entries > TABLE_ENTRIES_MAX {
            return Some("its table is not of the size that the disk asks for");
        }
        None
    }
}

async fn count_table(reader: &Reader<'_>, state: &mut State<'_>, entry: &Entry) -> Result<()> {
    let bytes = entry.table_entries * 8;
    state.region(entry.table_offset, bytes, Structure::Bitmaps)?;
    let mut pieces = std::pin::pin!(reader.pieces(entry.table_offset, bytes, PIECE_BYTES));
    while let Some(piece) = pieces.next().await {
        for entry in piece?.words().filter(|&entry| entry != 0) {
            let offset = entry & TABLE_OFFSET_MASK;
            let aligned = state.geometry.is_cluster_aligned(offset);
            let allowed = if offset == 0 { TABLE_ALL_ONES } else { 0 };
            if !aligned || entry & !(TABLE_OFFSET_MASK | allowed) != 0 {
                let what = format!("bitmap table entry {entry:#x} is invalid");
                state.emit(&Finding::Bitmaps { what });
            } else if offset != 0 {
                state.reference(offset, state.cluster_bytes, 1, Copied::Ignored)?;
            }
        }
    }
    Ok(())
}
