//! COPIED: set exactly where the refcount on disk is 1. A second look, at images where counting has
//! found that some flag may be wrong.

use super::findings::Finding;
use super::reader::{Reader, Window};
use super::refcounts::Refcounts;
use super::state::{L2Table, State};
use crate::Result;
use crate::entry::big_endian;
use crate::entry::inspect::{self, ClaimedSpace};

/// Compares the flags of the active L1 table and its L2 tables with the refcounts.
pub(super) async fn compare(
    reader: &Reader<'_>,
    state: &mut State<'_>,
    refcounts: &mut Refcounts<'_>,
) -> Result<()> {
    if !state.copied_suspect {
        return Ok(());
    }
    let mut l1 = Window::new(reader);
    let mut looked_at = vec![false; state.l2_tables.list.len()];
    for l1_index in 0..u64::from(state.header.l1_size) {
        let at = state.header.l1_table_offset + l1_index * 8;
        let entry = big_endian(l1.get(at, 8).await?);
        let table = inspect::inspect_l1(entry);
        if table.offset == 0 {
            continue;
        }
        let cluster = table.offset >> state.geometry.cluster_bits();
        // An unreadable refcount was reported already, and nothing follows for this table.
        let Some(refcount) = refcounts.get(cluster).await? else {
            continue;
        };
        if (refcount == 1) != table.copied {
            state.emit(&Finding::CopiedL2 {
                l1_index,
                entry,
                refcount,
            });
        }
        let position = state.l2_tables.by_offset.get(&table.offset);
        let position = *position.expect("counting noted every table of the L1 table") as usize;
        let within = table.offset < reader.len();
        if within && !std::mem::replace(&mut looked_at[position], true) {
            let table = state.l2_tables.list[position];
            compare_l2_table(reader, state, refcounts, table).await?;
        }
    }
    Ok(())
}

async fn compare_l2_table(
    reader: &Reader<'_>,
    state: &mut State<'_>,
    refcounts: &mut Refcounts<'_>,
    table: L2Table,
) -> Result<()> {
    let bytes = reader.read(table.offset, state.cluster_bytes).await?;
    for words in bytes.chunks_exact(state.geometry.l2_entry_bytes() as usize) {
        let entry = big_endian(&words[..8]);
        let ClaimedSpace::Cluster { offset, copied } = state.format.inspect_l2(entry, 0).claim
        else {
            continue;
        };
        let refcount = if state.format.data_file {
            Some(1)
        } else {
            refcounts
                .get(offset >> state.geometry.cluster_bits())
                .await?
        };
        if let Some(refcount) = refcount.filter(|&refcount| (refcount == 1) != copied) {
            state.emit_times(&Finding::CopiedData { entry, refcount }, table.active);
        }
    }
    Ok(())
}
