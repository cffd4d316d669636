//! The engine's barriers: the places where a flush stands between two durable writes, the later of
//! which builds on the earlier. Each has runs that are made to cross it again and again.
//!
//! Where a barrier is missing, the next flush covers the later write beside the earlier one. So a
//! run that is aimed at a barrier is looked at (`look.rs`) at each flush that covers the later
//! write: with all else lost, with each kind of structure lost alone, and so on. Where the barrier
//! is in its place these looks find nothing, since the earlier write is no longer at risk.
//!
//! The barriers are those of `docs/durability.md`. Rebases, commits and changes of the header are
//! crossed by the runs about chains ([`chains`](crate::chains)), which are looked at likewise.

use crate::disk::structure::{Structure, Structures};

mod shape;

/// A barrier, by what has to be durable before what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Barrier {
    /// The leftovers of a process that died, before the first write of the next session.
    LeftBehind,
    /// The cleared autoclear bits, before anything else.
    Autoclear,
    /// The counts of single clusters, and the data, before the entries that refer to them.
    Counts,
    /// The data in a data file, before the entries.
    DataFile,
    /// New L2 tables, before the L1 entries that refer to them.
    Tables,
    /// Cleared entries, before the space that they referred to is anybody's.
    Clearing,
    /// Zeroes in space, before entries that promise no bytes.
    Zeroes,
    /// New refcount blocks, before the entries of the refcount table.
    Blocks,
    /// A new refcount table, before the header; the header, before the old one is free.
    CountTable,
    /// A longer L1 table and its counts, before the header; the header, before the old one is free.
    L1,
    /// A smaller size, before what is beyond it is given up.
    Shrink,
    /// The same where the data is in a raw data file, which is cut.
    DataFileCut,
    /// The stages of a snapshot that is taken, applied or deleted.
    Snapshots,
    /// The marks of bitmaps, before the first write.
    BitmapMarks,
    /// Bits, tables and directory of bitmaps, before the header; the header, before the old ones
    /// are free.
    BitmapStore,
    /// The stages of a repair.
    Repair,
    /// A durable write, with all that it builds on, before it is acknowledged.
    DurableWrite,
}

impl Barrier {
    /// All of them.
    pub const ALL: [Barrier; 17] = [
        Barrier::LeftBehind,
        Barrier::Autoclear,
        Barrier::Counts,
        Barrier::DataFile,
        Barrier::Tables,
        Barrier::Clearing,
        Barrier::Zeroes,
        Barrier::Blocks,
        Barrier::CountTable,
        Barrier::L1,
        Barrier::Shrink,
        Barrier::DataFileCut,
        Barrier::Snapshots,
        Barrier::BitmapMarks,
        Barrier::BitmapStore,
        Barrier::Repair,
        Barrier::DurableWrite,
    ];

    /// The structures of which one is written after it; anything if none is named.
    fn later(self) -> &'static [Structure] {
        use Structure::{Counts, Directory, Header, L1, Other, RefcountTable, Table};
        match self {
            Barrier::LeftBehind | Barrier::Repair | Barrier::DurableWrite => &[],
            Barrier::Snapshots | Barrier::Shrink | Barrier::DataFileCut => &[],
            Barrier::Autoclear | Barrier::CountTable | Barrier::L1 => &[Header],
            Barrier::BitmapStore => &[Header, Counts],
            Barrier::Counts | Barrier::DataFile | Barrier::Zeroes => &[Table, L1],
            Barrier::Tables => &[L1],
            Barrier::Clearing => &[Counts, Other],
            Barrier::Blocks => &[RefcountTable],
            Barrier::BitmapMarks => &[Directory],
        }
    }

    /// Whether a flush that covers these covers the later write.
    pub(crate) fn is_at(self, at_risk: Structures) -> bool {
        let later = self.later();
        later.is_empty() || later.iter().any(|structure| at_risk.has(*structure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_is_where_its_later_write_is_at_risk() {
        let with = |structures: &[Structure]| Structures::of(structures);
        let tables = with(&[Structure::Table, Structure::Counts]);
        assert!(Barrier::Counts.is_at(tables));
        assert!(!Barrier::Tables.is_at(tables));
        assert!(Barrier::Repair.is_at(tables));
        assert!(Barrier::L1.is_at(with(&[Structure::Header, Structure::L1])));
    }
}
