//! Refusal of images in which a structure reaches over a table that the disk is read by.
//!
//! Where two structures have one place, the repair gives it to the one that comes first, and the
//! entries of the other are lost. That is right where neither can be used. But a wrong length in
//! the header lets an L1 table or a snapshot table reach over tables that are sound: the disk reads
//! as ever, and the repair would destroy it for the sake of entries that never were. The file does
//! not show which of the two is meant, so nothing is changed.

use std::ops::Range;

use super::plan::{Plan, Scope};
use super::survey::Owner;
use crate::check::Structure;
use crate::entry::big_endian;
use crate::entry::inspect;
use crate::units::pieces;
use crate::{Error, Result};

/// The L1 table is read in pieces of this size.
const PIECE_BYTES: u64 = 256 << 10;

/// A structure that must not lie over the tables of the disk.
struct Reach {
    clusters: Range<u64>,
    structure: &'static str,
    /// Its first byte in the file.
    offset: u64,
}

impl Plan<'_> {
    /// Checks that nothing reaches over the L1 entries that the disk needs, or over the L2 tables
    /// that they refer to.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the structure that reaches too far; I/O.
    pub(super) async fn refuse_overreach(&self) -> Result<()> {
        if self.options.scope != Scope::All {
            return Ok(());
        }
        let (offset, size) = (self.header.l1_table_offset, self.header.size);
        let needed = self.survey.geometry.l1_entries_for(size);
        let needed_bytes = needed.min(u64::from(self.header.l1_size)) * 8;
        let l1 = self.survey.clusters_of(offset, needed_bytes);
        let reaches = self.reaches(&l1);
        let over = |cluster: u64| {
            let from = reaches.partition_point(|reach| reach.clusters.end <= cluster);
            reaches
                .get(from)
                .filter(|reach| reach.clusters.start <= cluster)
        };
        if let Some(reach) = l1.clone().find_map(over) {
            return Err(self.overreach(reach, offset));
        }
        for piece in pieces(offset, needed_bytes, PIECE_BYTES) {
            if piece.start >= self.survey.file_bytes {
                break;
            }
            let entries = self
                .file
                .read_new(piece.start, piece.end - piece.start)
                .await?;
            for entry in entries.chunks_exact(8).map(big_endian) {
                let table = inspect::inspect_l1(entry).offset;
                let is_readable = table != 0
                    && self
                        .survey
                        .format
                        .mend_l1(entry, self.survey.file_bytes)
                        .is_none();
                let cluster = table >> self.survey.geometry.cluster_bits();
                if let (true, Some(reach)) = (is_readable, over(cluster)) {
                    return Err(self.overreach(reach, table));
                }
            }
        }
        Ok(())
    }

    /// Structures that may reach too far, in order, without overlaps: the part of the active L1
    /// table behind `needed`, the snapshot table, and the L1 tables of snapshots. Those that move
    /// are changed in their copies alone, and leave their places to others.
    fn reaches(&self, needed: &Range<u64>) -> Vec<Reach> {
        let survey = &self.survey;
        let mut reaches: Vec<Reach> = survey
            .l1s
            .iter()
            .filter(|l1| l1.moves.is_none())
            .map(|l1| {
                let clusters = survey.clusters_of(l1.offset, l1.bytes());
                Reach {
                    clusters: match l1.owner {
                        Owner::Active => needed.end.max(clusters.start)..clusters.end,
                        Owner::Snapshot(_) => clusters,
                    },
                    structure: match l1.owner {
                        Owner::Active => "L1 table",
                        Owner::Snapshot(_) => "L1 table of a snapshot",
                    },
                    offset: l1.offset,
                }
            })
            .collect();
        let offset = self.header.snapshots_offset;
        let clusters = survey.clusters_of(offset, survey.snapshots_bytes);
        if survey.owner(clusters.start) == Some(Structure::SnapshotTable) {
            reaches.push(Reach {
                clusters,
                structure: "snapshot table",
                offset,
            });
        }
        reaches.retain(|reach| !reach.clusters.is_empty());
        reaches.sort_by_key(|reach| reach.clusters.start);
        // What an earlier one has is its own, so that the ends are in order too.
        let mut end = 0;
        for reach in &mut reaches {
            reach.clusters.start = reach.clusters.start.max(end);
            end = end.max(reach.clusters.end);
        }
        reaches.retain(|reach| !reach.clusters.is_empty());
        reaches
    }

    fn overreach(&self, reach: &Reach, table: u64) -> Error {
        Error::Corrupt {
            file: self.file.name().to_string(),
            structure: reach.structure,
            offset: reach.offset,
            detail: format!(
                "it reaches over the table at {table:#x}, by which the disk is read; a repair \
                 would lose one of them, so nothing was changed. Copy the disk with convert"
            ),
        }
    }
}
