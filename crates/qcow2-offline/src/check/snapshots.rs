//! The snapshot table: where the L1 tables of snapshots are (qcow2.rst, "Snapshots").

use super::findings::Finding;
use super::reader::{Reader, Window};
use super::state::{L1, Owner, State, count_l1};
use crate::entry::snapshot::{
    EXTRA_BYTES_MAX, EXTRA_BYTES_V3, FIXED_BYTES, Fixed, TABLE_BYTES_MAX,
};
use crate::{Error, Result};

/// A snapshot, as far as a check needs it.
struct Snapshot {
    entry: Fixed,
    /// Id and name, kept only where a finding will need them.
    names: Option<(String, String)>,
}

/// Snapshots of the image, read for the check.
pub(super) struct Snapshots {
    list: Vec<Snapshot>,
    /// Length of the table.
    pub(super) bytes: u64,
}

/// Reads the snapshot table.
///
/// # Errors
/// If an entry cannot be right, so that the offset of the next one is unknown.
pub(super) async fn read(reader: &Reader<'_>, state: &mut State<'_>) -> Result<Snapshots> {
    let start = state.header.snapshots_offset;
    let mut window = Window::new(reader);
    let mut at = start;
    let mut list = Vec::new();
    let mut incomplete = Vec::new();
    for index in 0..state.header.nb_snapshots {
        let corrupt = |detail: String| Error::Corrupt {
            file: state.file_name.to_string(),
            structure: "snapshot table",
            offset: start,
            detail,
        };
        let entry = Fixed::decode(window.get(at, FIXED_BYTES).await?);
        if entry.extra_bytes > EXTRA_BYTES_MAX {
            return Err(corrupt(format!(
                "too much extra metadata in snapshot table entry {index}"
            )));
        }
        if state.header.version >= 3 && entry.extra_bytes < EXTRA_BYTES_V3 {
            incomplete.push(index);
        }
        let names = if entry.l1_flaw(&state.geometry).is_some() {
            let len = entry.names_bytes() as usize;
            let names = window.get(at + entry.names_start(), len).await?;
            let (id, name) = names.split_at(usize::from(entry.id_bytes));
            let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
            Some((text(id), text(name)))
        } else {
            None
        };
        list.push(Snapshot { entry, names });
        at += entry.entry_bytes();
        if at - start > TABLE_BYTES_MAX {
            return Err(corrupt("it is longer than 64 MiB".to_string()));
        }
    }
    for index in incomplete {
        state.emit(&Finding::SnapshotIncomplete { index });
    }
    let bytes = at - start;
    Ok(Snapshots { list, bytes })
}

impl Snapshots {
    /// Counts the L1 tables and notes the L2 tables that they point to.
    pub(super) async fn count(&self, reader: &Reader<'_>, state: &mut State<'_>) -> Result<()> {
        if state.format.data_file && !self.list.is_empty() {
            let count = state.header.nb_snapshots;
            state.emit(&Finding::SnapshotsWithDataFile { count });
        }
        for snapshot in &self.list {
            if let Some(flaw) = snapshot.entry.l1_flaw(&state.geometry) {
                let (id, name) = snapshot.names.clone().unwrap_or_default();
                state.emit(&Finding::SnapshotL1 { id, name, flaw });
                continue;
            }
            let l1 = L1 {
                offset: snapshot.entry.l1_offset,
                entries: u64::from(snapshot.entry.l1_size),
                owner: Owner::Snapshot,
            };
            count_l1(reader, state, l1).await?;
        }
        Ok(())
    }
}
