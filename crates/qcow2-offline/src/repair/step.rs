//! The steps of a repair, as values: the change, its reason, its offset, and the data it may lose.

use std::fmt;
use std::ops::Range;

use crate::check::{Finding, SnapshotL1Flaw, Structure};
use crate::entry::inspect::Flaw;
use crate::entry::mend::Wrong;

/// A word of a table that changes: an entry, or its bitmap.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Where it is in the file.
    pub at: u64,
    /// Value before the repair.
    pub from: u64,
    /// Value that the repair stores.
    pub to: u64,
}

/// The correction of a snapshot.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotFate {
    /// The fields that version 3 demands are added.
    Completed,
    /// Unusable extra data is dropped.
    Cut {
        /// Its length in bytes.
        extra_bytes: u32,
    },
    /// Its L1 table is found where, or as long as, it must have been.
    Corrected {
        /// Flaw of the snapshot's L1 table.
        flaw: SnapshotL1Flaw,
    },
    /// Its L1 table moves: something else has its place, or the end of the file cuts it.
    Moved,
    /// It has no L1 table that could be used, and is removed.
    Removed,
}

/// A step of a repair; its text, by [`fmt::Display`], says what changes, where and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// An L1 entry is set right or cleared.
    #[doc(hidden)]
    L1Entry {
        /// Change of the L1 entry.
        change: Change,
        /// Flaw of the entry.
        wrong: Wrong,
        /// The data that it maps may be lost.
        loses: bool,
    },
    /// An L2 entry is corrected or cleared.
    #[doc(hidden)]
    L2Entry {
        /// Change of the L2 entry.
        change: Change,
        /// Its bitmap, before and after; 0 without extended L2.
        bitmap: (u64, u64),
        /// Its index in the table.
        l2_index: u64,
        /// Flaw of the entry.
        wrong: Wrong,
        /// The cluster's data may be lost.
        loses: bool,
    },
    /// Guest data that shares space with something else gets a copy of its own.
    #[doc(hidden)]
    Copy {
        /// The L2 entry; both offsets are in `change`.
        change: Change,
        /// Bytes that are copied.
        bytes: u64,
        /// The metadata in whose place it is; else the cluster's refcount cannot count all.
        structure: Option<Structure>,
    },
    /// The active L1 table moves: something else has its place, or the end of the file cuts it.
    #[doc(hidden)]
    L1Table {
        /// Offset in the file before the repair.
        from: u64,
        /// Length in bytes.
        bytes: u64,
        /// The end of the file cuts it.
        cut: bool,
    },
    /// An L2 table moves: guest data has its place.
    #[doc(hidden)]
    L2Table {
        /// Offset in the file before the repair.
        from: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// A snapshot's entry changes.
    #[doc(hidden)]
    Snapshot {
        /// The index in the snapshot table.
        index: u32,
        /// Unique ID of the snapshot.
        id: String,
        /// Name of the snapshot.
        name: String,
        /// Correction of the snapshot.
        fate: SnapshotFate,
        /// Where the entry is.
        at: u64,
    },
    /// The snapshot table is rewritten.
    #[doc(hidden)]
    SnapshotTable {
        /// Offset in the file before the repair.
        from: u64,
    },
    /// The bitmaps are declared inconsistent.
    #[doc(hidden)]
    Bitmaps {
        /// Where their directory is.
        at: u64,
        /// Description of the flaw.
        what: String,
    },
    /// The refcount table, or an entry of it, cannot be used.
    #[doc(hidden)]
    RefcountTable {
        /// The finding of a check about it, if there is one.
        finding: Option<Finding>,
        /// Offset in the file.
        at: u64,
    },
    /// All refcounts are rebuilt elsewhere, and the header switches to them.
    #[doc(hidden)]
    RebuildRefcounts {
        /// Number of refcount blocks.
        blocks: u64,
        /// Where the new structure is.
        to: u64,
    },
    /// A refcount is corrected.
    #[doc(hidden)]
    Refcount {
        /// Number of the cluster in the file.
        cluster: u64,
        /// Count that the refcount block stores.
        refcount: u64,
        /// References that there are.
        references: u64,
        /// Where the refcount is, if its block exists.
        at: Option<u64>,
        /// Bytes that it takes there; narrower ones share a byte.
        bytes: u64,
    },
    /// Refcounts beyond the end of the file, as a file that was cut has them, become 0. A check
    /// does not see them; they would be leaks as soon as the file grows.
    #[doc(hidden)]
    CountsBeyondEnd {
        /// Clusters whose refcount is not 0.
        clusters: u64,
        /// Where the refcounts are, from the first one beyond the end to the end of the block.
        at: Range<u64>,
    },
    /// COPIED of an L1 entry is corrected.
    #[doc(hidden)]
    CopiedL2 {
        /// Change of the L1 entry.
        change: Change,
        /// Index of the entry in the L1 table.
        l1_index: u64,
        /// The L2 table's refcount.
        refcount: u64,
    },
    /// COPIED of an L2 entry is corrected.
    #[doc(hidden)]
    CopiedData {
        /// Change of the L2 entry.
        change: Change,
        /// Count of the cluster that the entry refers to.
        refcount: u64,
    },
    /// The marks of damage are taken from the header.
    #[doc(hidden)]
    Marks {
        /// It says that the image was not closed cleanly.
        dirty: bool,
        /// It says that the image is corrupt.
        corrupt: bool,
    },
}

impl Step {
    /// Returns the finding of a check about it, if that describes the step completely.
    pub fn finding(&self) -> Option<Finding> {
        match *self {
            Step::Refcount {
                cluster,
                refcount,
                references,
                ..
            } => Some(Finding::Refcount {
                cluster,
                refcount,
                references,
            }),
            Step::CopiedL2 {
                change,
                l1_index,
                refcount,
            } => Some(Finding::CopiedL2 {
                l1_index,
                entry: change.from,
                refcount,
            }),
            Step::CopiedData { change, refcount } => Some(Finding::CopiedData {
                entry: change.from,
                refcount,
            }),
            Step::RefcountTable { ref finding, .. } => finding.clone(),
            _ => None,
        }
    }

    /// Returns whether it only frees unused space.
    pub fn frees_leak(&self) -> bool {
        matches!(self, Step::Refcount { refcount, references, .. } if refcount > references)
    }

    /// Returns the kind of the step, in the plural, for summaries.
    pub fn kind(&self) -> &'static str {
        match self {
            Step::L1Entry { .. } => "changes of L1 entries",
            Step::L2Entry { .. } => "changes of L2 entries",
            Step::Copy { .. } => "copies of guest data",
            Step::L1Table { .. } | Step::L2Table { .. } => "moves of tables",
            Step::Snapshot { .. } | Step::SnapshotTable { .. } => "changes of snapshots",
            Step::Bitmaps { .. } => "changes of bitmaps",
            Step::RefcountTable { .. } => "changes of the refcount table",
            Step::RebuildRefcounts { .. } => "rewrites of all refcounts",
            Step::Refcount { .. } => "changes of refcounts",
            Step::CountsBeyondEnd { .. } => "clearings of refcounts beyond the end",
            Step::CopiedL2 { .. } | Step::CopiedData { .. } => "changes of COPIED flags",
            Step::Marks { .. } => "changes of the header",
        }
    }

    /// It repairs something that a check finds, rather than being a part of how another step is
    /// done.
    pub fn counts(&self) -> bool {
        !matches!(
            self,
            Step::SnapshotTable { .. }
                | Step::RebuildRefcounts { .. }
                | Step::CountsBeyondEnd { .. }
                | Step::RefcountTable { finding: None, .. }
                | Step::Marks { .. }
        )
    }

    /// Memory that a list of steps takes for it, at most.
    pub(super) fn memory_bytes(&self) -> u64 {
        let texts = match self {
            Step::Snapshot { id, name, .. } => id.len() + name.len(),
            Step::Bitmaps { what, .. } => what.len(),
            _ => 0,
        };
        (2 * std::mem::size_of::<Step>() + texts) as u64
    }

    /// Returns a description of the step.
    pub fn what(&self) -> String {
        match self {
            Step::L1Entry { change, .. } if change.to == 0 => "clear an L1 entry".into(),
            Step::L1Entry { change, .. } => {
                format!(
                    "change an L1 entry from {:#x} to {:#x}",
                    change.from, change.to
                )
            }
            Step::L2Entry { change, bitmap, .. } if bitmap.0 == bitmap.1 => {
                format!(
                    "change an L2 entry from {:#x} to {:#x}",
                    change.from, change.to
                )
            }
            Step::L2Entry { change, bitmap, .. } => format!(
                "change an L2 entry from {:#x} with bitmap {:#x} to {:#x} with bitmap {:#x}",
                change.from, bitmap.0, change.to, bitmap.1
            ),
            Step::Copy { bytes, .. } => format!("copy {bytes} bytes of guest data to new space"),
            Step::L1Table { .. } => "move the active L1 table".into(),
            Step::L2Table { .. } => "move an L2 table".into(),
            Step::Snapshot { fate, .. } => match fate {
                SnapshotFate::Completed => "complete a snapshot table entry".into(),
                SnapshotFate::Cut { .. } => "drop extra data of a snapshot table entry".into(),
                SnapshotFate::Corrected { .. } => "correct where a snapshot's L1 table is".into(),
                SnapshotFate::Moved => "move a snapshot's L1 table".into(),
                SnapshotFate::Removed => "remove a snapshot".into(),
            },
            Step::SnapshotTable { .. } => "rewrite the snapshot table".into(),
            Step::Bitmaps { .. } => "mark the bitmaps as inconsistent".into(),
            Step::RefcountTable { .. } => "replace a part of the refcount table".into(),
            Step::RebuildRefcounts { blocks, .. } => {
                format!("rewrite all refcounts: {blocks} refcount blocks and their table")
            }
            Step::Refcount {
                cluster,
                refcount,
                references,
                ..
            } => {
                format!("change the refcount of cluster {cluster} from {refcount} to {references}")
            }
            Step::CountsBeyondEnd { clusters, .. } => {
                format!("clear {clusters} refcounts beyond the end of the file")
            }
            Step::CopiedL2 { change, .. } | Step::CopiedData { change, .. } => {
                let set = change.to > change.from;
                format!("{} COPIED of an entry", if set { "set" } else { "clear" })
            }
            Step::Marks { dirty, corrupt } => match (dirty, corrupt) {
                (true, true) => "clear the dirty and the corrupt flag of the header".into(),
                (false, true) => "clear the corrupt flag of the header".into(),
                (_, false) => "clear the dirty flag of the header".into(),
            },
        }
    }

    /// Why it is done.
    pub fn why(&self) -> String {
        if let Some(finding) = self.finding() {
            return finding.to_string();
        }
        match self {
            Step::L1Entry { wrong, .. } => {
                format!("L1 entry: {}", why_entry(*wrong, "an L2 table"))
            }
            Step::L2Entry { wrong, .. } => {
                format!("L2 entry: {}", why_entry(*wrong, "a data cluster"))
            }
            Step::Copy {
                structure: Some(structure),
                ..
            } => format!("its space also holds {structure}"),
            Step::Copy { .. } => "its cluster has more references than a refcount can count".into(),
            Step::L1Table { cut: true, .. } => "it reaches beyond the end of the file".into(),
            Step::L1Table { .. } => "something else occupies its place".into(),
            Step::L2Table { .. } => "guest data occupies its place".into(),
            Step::Snapshot { index, fate, .. } => match fate {
                SnapshotFate::Completed => format!("snapshot table entry {index} is incomplete"),
                SnapshotFate::Cut { extra_bytes } => format!(
                    "too much extra metadata in snapshot table entry {index} ({extra_bytes} > 1024)"
                ),
                SnapshotFate::Corrected { flaw } => match flaw {
                    SnapshotL1Flaw::Unaligned { .. } => "it does not start a cluster".into(),
                    SnapshotL1Flaw::TooLarge { .. } => "it is too large".into(),
                },
                SnapshotFate::Moved => {
                    "it reaches beyond the end of the file, or something else occupies its place"
                        .into()
                }
                SnapshotFate::Removed => "its L1 table is not in the file".into(),
            },
            Step::SnapshotTable { .. } => {
                "its entries change, or it cannot stay where it is".into()
            }
            Step::Bitmaps { what, .. } => what.clone(),
            Step::RefcountTable { .. } => "the refcount table cannot be where it is".into(),
            Step::RebuildRefcounts { .. } => {
                "the refcount structure cannot count all clusters where it is".into()
            }
            Step::CountsBeyondEnd { clusters, .. } => {
                format!("{clusters} refcounts beyond the end of the file are not 0")
            }
            Step::Marks { .. } => "the repair is complete".into(),
            Step::Refcount { .. } | Step::CopiedL2 { .. } | Step::CopiedData { .. } => {
                unreachable!("these are findings")
            }
        }
    }

    /// The bytes of the file that it is about.
    pub fn place(&self) -> Option<Range<u64>> {
        let place = |at: u64, len: u64| Some(at..at.saturating_add(len));
        match self {
            Step::L1Entry { change, .. }
            | Step::Copy { change, .. }
            | Step::CopiedL2 { change, .. }
            | Step::CopiedData { change, .. } => place(change.at, 8),
            Step::L2Entry { change, bitmap, .. } => {
                place(change.at, if bitmap.0 == bitmap.1 { 8 } else { 16 })
            }
            Step::L1Table { from, bytes, .. } | Step::L2Table { from, bytes } => {
                place(*from, *bytes)
            }
            Step::Snapshot { at, .. } => place(*at, 40),
            Step::SnapshotTable { from } => place(*from, 0),
            Step::Bitmaps { at, .. } => place(*at, 0),
            Step::RefcountTable { at, .. } => place(*at, 8),
            Step::RebuildRefcounts { to, .. } => place(*to, 0),
            Step::Refcount { at, bytes, .. } => at.and_then(|at| place(at, *bytes)),
            Step::CountsBeyondEnd { at, .. } => Some(at.clone()),
            Step::Marks { .. } => place(72, 8),
        }
    }

    /// Returns a description of the data that it may lose, beyond data that was unreachable before.
    pub fn may_lose(&self) -> Option<String> {
        match self {
            Step::L1Entry { loses: true, .. } => {
                Some("the data that the L2 table maps, which is currently unreadable".into())
            }
            Step::L2Entry {
                loses: true, wrong, ..
            } => Some(match wrong {
                Wrong::Beyond => {
                    "no data that the file still holds: the cluster will read as zeroes".into()
                }
                _ => "the cluster's data, which is currently unreadable: it will read as zeroes"
                    .into(),
            }),
            Step::Snapshot {
                id,
                name,
                fate: SnapshotFate::Removed,
                ..
            } => Some(format!("snapshot {id} ({name})")),
            Step::Snapshot {
                fate: SnapshotFate::Cut { .. },
                ..
            } => Some("extra data of the snapshot".into()),
            Step::L1Table { cut: true, .. } => Some(
                "the data mapped by the part of the table that is beyond the end of the file"
                    .into(),
            ),
            Step::Bitmaps { .. } => {
                Some("the bitmaps: the next incremental backup must be a full one".into())
            }
            _ => None,
        }
    }
}

fn why_entry(wrong: Wrong, meant: &str) -> String {
    match wrong {
        Wrong::Flaw(Flaw::Reserved) => "reserved bits are set".into(),
        Wrong::Flaw(Flaw::ZeroFlag) => "a zero flag, which version 2 does not have".into(),
        Wrong::Flaw(Flaw::CompressedCopied) => "a compressed cluster with COPIED".into(),
        Wrong::Flaw(Flaw::CompressedWithDataFile) => {
            "a compressed cluster in an image with an external data file".into()
        }
        Wrong::Flaw(Flaw::CompressedWithBitmap) => {
            "a compressed cluster with a subcluster bitmap".into()
        }
        Wrong::Flaw(Flaw::AllocatedAndZero) => "subclusters are both allocated and zero".into(),
        Wrong::Flaw(Flaw::AllocatedWithoutOffset) => {
            "subclusters are allocated in a cluster without space".into()
        }
        Wrong::Flaw(Flaw::DataUnaligned | Flaw::PreallocatedUnaligned) | Wrong::Unaligned => {
            format!("{meant} that does not start a cluster")
        }
        Wrong::Beyond => format!("{meant} beyond the end of the file"),
        Wrong::DataFileOffset => "a cluster of the data file that is not the guest's".into(),
        Wrong::OthersTable => {
            "it points to another entry's table, in an image with a data file".into()
        }
        Wrong::NoTable => "it points to another structure".into(),
    }
}

/// The line of a check that repairs, as QEMU has it where QEMU repairs the same.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::RebuildRefcounts { .. } => f.write_str("Rebuilding refcount structure"),
            Step::Refcount {
                cluster,
                refcount,
                references,
                ..
            } => write!(
                f,
                "Repairing cluster {cluster} refcount={refcount} reference={references}"
            ),
            Step::CountsBeyondEnd { clusters, .. } => write!(
                f,
                "Repairing {clusters} refcounts beyond the end of the file"
            ),
            Step::Snapshot {
                index,
                fate: SnapshotFate::Cut { extra_bytes },
                ..
            } => write!(
                f,
                "Discarding too much extra metadata in snapshot table entry {index} \
                 ({extra_bytes} > 1024)"
            ),
            Step::Marks { .. } | Step::SnapshotTable { .. } => {
                write!(f, "Repairing: {}", self.what())
            }
            _ => match self.finding() {
                Some(finding) => {
                    let text = finding.to_string();
                    let text = text.strip_prefix("ERROR").unwrap_or(&text);
                    write!(f, "Repairing{text}")
                }
                None => write!(f, "Repairing {}", self.why()),
            },
        }
    }
}
