//! The tree of an L1 table: its L2 tables, and how often it references each host cluster; and how
//! refcounts change when one such tree is added and another removed.

use cowslip_boxed::boxed;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::Qcow2;
use crate::check::counts::{Copied, Counts, Memory, OutOfMemory};
use crate::check::reader::Reader;
use crate::entry::inspect::{ClaimedSpace, inspect_l1};
use crate::entry::{EntryFormat, big_endian};
use crate::job::{Job, Stage};
use crate::{Error, Result};

/// Bytes of memory for what grows with the image, for each of two trees; as a check may use by
/// default.
pub const MEMORY_BYTES_MAX: u64 = 1 << 30;
/// Bytes that an L2 table takes in the collection of them.
pub const TABLE_MEMORY_BYTES: u64 = 64;

/// The tree of an L1 table. The image was checked, so all of it is sound.
#[derive(Debug)]
pub struct Tree {
    /// Entries of the L1 table.
    pub l1: Vec<u64>,
    /// The offsets of its L2 tables, and how many of its entries point to each.
    pub tables: BTreeMap<u64, u64>,
    /// References to each host cluster.
    pub references: Counts,
}

impl Qcow2 {
    /// Reads the tables that an L1 table reaches.
    ///
    /// # Errors
    /// I/O, too little memory, [`Error::Cancelled`].
    #[boxed]
    pub(super) async fn read_tree(&self, l1: Vec<u64>, job: &Job) -> Result<Tree> {
        job.enter(Stage::Tables);
        let mut memory = Memory::new(MEMORY_BYTES_MAX);
        let too_large = |OutOfMemory| too_large(self.name());
        let mut references = Counts::new(u64::MAX);
        let mut tables: BTreeMap<u64, u64> = BTreeMap::new();
        for &entry in &l1 {
            let offset = inspect_l1(entry).offset;
            if offset != 0 {
                memory.charge(TABLE_MEMORY_BYTES).map_err(too_large)?;
                *tables.entry(offset).or_default() += 1;
            }
        }
        let (bits, cluster_bytes) = (
            self.geometry().cluster_bits(),
            self.geometry().cluster_bytes(),
        );
        let mut refer = |bytes: Range<u64>, times| {
            for cluster in bytes.start >> bits..((bytes.end - 1) >> bits) + 1 {
                let added = references.add(cluster, times, Copied::Ignored, &mut memory);
                added.map_err(too_large)?;
            }
            Ok::<_, Error>(())
        };
        for (&offset, &times) in &tables {
            refer(offset..offset + cluster_bytes, times)?;
        }
        job.expect(tables.len() as u64 * cluster_bytes);
        let reader = Reader::new(self.file.block_file()).await?;
        let wanted: Vec<(u64, u64)> = tables.iter().map(|(&at, &times)| (at, times)).collect();
        let wanted = wanted.into_iter();
        let mut reads = reader.tables(wanted, cluster_bytes);
        while let Some(read) = reads.next().await {
            job.begin(cluster_bytes).await?;
            let (times, bytes) = read?;
            for (start, len) in claims(&self.format, &bytes) {
                refer(start..start + len, times)?;
            }
            reader.recycle(bytes);
            job.done(cluster_bytes);
        }
        Ok(Tree {
            l1,
            tables,
            references,
        })
    }
}

/// The refusal where there are more references than memory for them.
pub fn too_large(name: &str) -> Error {
    Error::Unsupported {
        file: name.to_string(),
        feature: "a snapshot whose references take more memory than is allowed".into(),
    }
}

/// The bytes of the file that the entries of an L2 table claim.
fn claims(format: &EntryFormat, table: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let entries = table.chunks_exact(format.geometry.l2_entry_bytes() as usize);
    entries.filter_map(|words| {
        let bitmap = words.get(8..16).map_or(0, big_endian);
        match format.inspect_l2(big_endian(&words[..8]), bitmap).claim {
            ClaimedSpace::Nothing => None,
            ClaimedSpace::Cluster { offset, .. } => Some((offset, format.geometry.cluster_bytes())),
            ClaimedSpace::Compressed { start, len } => Some((start, len)),
        }
    })
}

/// How the counts change when the references of one tree are added and those of another are
/// dropped. A cluster that both have keeps its count throughout.
#[derive(Debug)]
pub struct Balance {
    gained: Counts,
    lost: Counts,
}

impl Balance {
    /// These references come, and those go.
    pub fn new(gained: Option<Counts>, lost: Option<Counts>) -> Balance {
        let none = || Counts::new(u64::MAX);
        Balance {
            gained: gained.unwrap_or_else(none),
            lost: lost.unwrap_or_else(none),
        }
    }

    /// By how much the count of a cluster changes.
    pub fn of(&self, cluster: u64) -> i64 {
        let references = |counts: &Counts| counts.get(cluster).references as i64;
        references(&self.gained) - references(&self.lost)
    }

    /// The clusters of `range` in pieces of a few thousand, in order, without those that are known
    /// to keep their counts.
    pub fn pieces(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let gained = self.gained.referenced_pieces(range.clone());
        let both = gained.chain(self.lost.referenced_pieces(range));
        let pieces: BTreeSet<(u64, u64)> = both.map(|piece| (piece.start, piece.end)).collect();
        pieces.into_iter().map(|(start, end)| start..end).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(references: &[(u64, u64)]) -> Counts {
        let mut memory = Memory::new(1 << 30);
        let mut counts = Counts::new(u64::MAX);
        for &(cluster, times) in references {
            let added = counts.add(cluster, times, Copied::Ignored, &mut memory);
            added.unwrap();
        }
        counts
    }

    #[test]
    fn what_both_have_cancels_out() {
        let (gained, lost) = (
            counts(&[(1, 1), (2, 1), (40_000, 3), (70_000, 300)]),
            counts(&[(2, 1), (3, 2), (70_000, 1), (90_000, 1)]),
        );
        let balance = Balance::new(Some(gained), Some(lost));
        let of = [0, 1, 2, 3, 40_000, 70_000, 90_000, 1 << 40].map(|at| balance.of(at));
        assert_eq!(of, [0, 1, 0, -2, 3, 299, -1, 0]);
        let pieces = balance.pieces(2..90_001);
        assert!(pieces.windows(2).all(|pair| pair[0].end <= pair[1].start));
        for cluster in [2, 3, 40_000, 70_000, 90_000] {
            let times = pieces.iter().filter(|piece| piece.contains(&cluster));
            assert_eq!(times.count(), 1, "{cluster}");
        }
        assert!(pieces.iter().all(|p| p.start >= 2 && p.end <= 90_001));
        assert_eq!(Balance::new(None, None).pieces(0..1 << 40), []);
    }

    #[test]
    fn all_kinds_of_entries_claim_their_bytes() {
        let format = EntryFormat {
            geometry: crate::geometry::Geometry::new(16, 4, false).unwrap(),
            version: 3,
            data_file: false,
        };
        let entries: [u64; 5] = [
            0,
            1,
            1 << 63 | 0x50000,
            0x60001,
            // Two sectors from byte 0x70100 on.
            1 << 62 | 1 << 54 | 0x70100,
        ];
        let table: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry.to_be_bytes())
            .collect();
        let claimed: Vec<_> = claims(&format, &table).collect();
        let expected = [(0x50000, 0x10000), (0x60000, 0x10000), (0x70100, 0x300)];
        assert_eq!(claimed, expected);
    }
}
