//! Persistent bitmaps: their directory, their tables and the clusters of their data (qcow2.rst,
//! "Bitmaps"). Only where the autoclear bit says that they are consistent: otherwise nothing
//! references them, and their clusters are leaked.

use super::counts::Copied;
use super::findings::{Finding, Structure};
use super::reader::{Reader, Window};
use super::state::{PIECE_BYTES, State};
use crate::Result;
use crate::entry::bitmap::{FIXED_BYTES, Fixed, TableEntry};

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
        if bytes - at < FIXED_BYTES as u64 {
            state.emit(&broken("the directory ends before it"));
            return Ok(());
        }
        let entry = Fixed::decode(window.get(directory + at, FIXED_BYTES).await?);
        if entry.entry_bytes() > bytes - at {
            state.emit(&broken("it is longer than the directory"));
            return Ok(());
        }
        at += entry.entry_bytes();
        match entry.table_flaw(&state.geometry, state.header.size) {
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

async fn count_table(reader: &Reader<'_>, state: &mut State<'_>, bitmap: &Fixed) -> Result<()> {
    let (offset, bytes) = (bitmap.table_offset, bitmap.table_bytes());
    state.region(offset, bytes, Structure::Bitmaps)?;
    let mut pieces = reader.pieces(offset, bytes, PIECE_BYTES);
    while let Some(piece) = pieces.next().await {
        for entry in piece?.words().filter(|&entry| entry != 0) {
            match TableEntry::decode(entry, &state.geometry) {
                TableEntry::Clean | TableEntry::Dirty => {}
                TableEntry::At(offset) => {
                    state.reference(offset, state.cluster_bytes, 1, Copied::Ignored)?;
                }
                TableEntry::Invalid => {
                    let what = format!("bitmap table entry {entry:#x} is invalid");
                    state.emit(&Finding::Bitmaps { what });
                }
            }
        }
    }
    Ok(())
}
