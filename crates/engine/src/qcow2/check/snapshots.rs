//! The snapshot table: where the L1 tables of snapshots are (qcow2.rst, "Snapshots").

use super::reader::{Reader, Window, word};
use super::{Finding, L1, Owner, SnapshotL1Flaw, State, count_l1};
use crate::qcow2::header::L1_BYTES_MAX;
use crate::{Error, Result};

/// Bytes of an entry before its extra data.
const ENTRY_BYTES: usize = 40;
/// The most extra data that QEMU accepts.
const EXTRA_BYTES_MAX: u32 = 1024;
/// Extra data that version 3 demands: the size of the VM state and that of the disk.
const EXTRA_BYTES_V3: u32 = 16;
/// The largest snapshot table that QEMU accepts.
const TABLE_BYTES_MAX: u64 = 64 << 20;

/// A snapshot, as far as a check needs it.
struct Snapshot {
    l1_offset: u64,
    l1_size: u32,
    /// Id and name, kept only where a finding will need them.
    names: Option<(String, String)>,
}

/// All snapshots.
pub(super) struct Snapshots {
    list: Vec<Snapshot>,
    /// Length of the table.
    pub(super) bytes: u64,
}

/// Reads the snapshot table.
///
/// # Errors
/// If an entry cannot be right, so that nobody knows where the next one is.
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
        let entry = window.get(at, ENTRY_BYTES).await?;
        let l1_offset = word(&entry[..8]);
        let [l1_size, extra_bytes] = [8, 36].map(|at| word(&entry[at..at + 4]) as u32);
        let [id_bytes, name_bytes] = [12, 14].map(|at| word(&entry[at..at + 2]) as usize);
        if extra_bytes > EXTRA_BYTES_MAX {
            return Err(corrupt(format!(
                "too much extra metadata in snapshot table entry {index}"
            )));
        }
        if state.header.version >= 3 && extra_bytes < EXTRA_BYTES_V3 {
            incomplete.push(index);
        }
        let names_at = at + ENTRY_BYTES as u64 + u64::from(extra_bytes);
        let names = if l1_flaw(state, l1_offset, l1_size).is_some() {
            let names = window.get(names_at, id_bytes + name_bytes).await?;
            let (id, name) = names.split_at(id_bytes);
            Some([id, name].map(|text| String::from_utf8_lossy(text).into_owned()))
                .map(|[id, name]| (id, name))
        } else {
            None
        };
        list.push(Snapshot {
            l1_offset,
            l1_size,
            names,
        });
        at = (names_at + (id_bytes + name_bytes) as u64).next_multiple_of(8);
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

fn l1_flaw(state: &State<'_>, l1_offset: u64, l1_size: u32) -> Option<SnapshotL1Flaw> {
    if !state.geometry.is_cluster_aligned(l1_offset) {
        Some(SnapshotL1Flaw::Unaligned { l1_offset })
    } else if u64::from(l1_size) * 8 > L1_BYTES_MAX {
        Some(SnapshotL1Flaw::TooLarge { l1_size })
    } else {
        None
    }
}

impl Snapshots {
    /// Counts the L1 tables and notes the L2 tables that they point to.
    pub(super) async fn count(&self, reader: &Reader<'_>, state: &mut State<'_>) -> Result<()> {
        if state.format.data_file && !self.list.is_empty() {
            let count = state.header.nb_snapshots;
            state.emit(&Finding::SnapshotsWithDataFile { count });
        }
        for snapshot in &self.list {
            if let Some(flaw) = l1_flaw(state, snapshot.l1_offset, snapshot.l1_size) {
                let (id, name) = snapshot.names.clone().unwrap_or_default();
                state.emit(&Finding::SnapshotL1 { id, name, flaw });
                continue;
            }
            let l1 = L1 {
                offset: snapshot.l1_offset,
                entries: u64::from(snapshot.l1_size),
                owner: Owner::Snapshot,
            };
            count_l1(reader, state, l1).await?;
        }
        Ok(())
    }
}
