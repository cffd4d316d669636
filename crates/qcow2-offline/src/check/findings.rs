//! The findings of a check; their text is qemu-img's, where qemu-img reports them too.

use std::fmt;

use crate::entry::snapshot::SnapshotL1Flaw;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Data is wrong, or may be overwritten by the next write.
    Corruption,
    /// Space is lost, nothing else.
    Leak,
    /// Something could not be checked.
    Unchecked,
}

/// A metadata structure that something else uses, too.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    /// The header's cluster, the first of the file.
    Header,
    /// The active L1 table.
    ActiveL1,
    /// The L1 table of a snapshot.
    SnapshotL1,
    /// An L2 table of any L1 table.
    L2,
    /// The refcount table, by which blocks are found.
    RefcountTable,
    /// A refcount block of the refcount table.
    RefcountBlock,
    /// The table of internal snapshots.
    SnapshotTable,
    /// The bitmap directory or a bitmap table.
    Bitmaps,
    /// The LUKS header, by the header extension.
    CryptoHeader,
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Structure::Header => "the header",
            Structure::ActiveL1 => "the active L1 table",
            Structure::SnapshotL1 => "a snapshot's L1 table",
            Structure::L2 => "an L2 table",
            Structure::RefcountTable => "the refcount table",
            Structure::RefcountBlock => "a refcount block",
            Structure::SnapshotTable => "the snapshot table",
            Structure::Bitmaps => "the bitmap directory or a bitmap table",
            Structure::CryptoHeader => "the encryption header",
        })
    }
}

/// Something that is wrong with an image.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// A structure or cluster lies beyond the end of the file.
    BeyondEnd {
        /// Offset of the structure in the file.
        offset: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// A cluster is referenced more often than its refcount can express.
    Overflow {
        /// The cluster's first byte.
        offset: u64,
    },
    /// Reserved bits in an L1 entry.
    L1Reserved {
        /// Value of the entry.
        entry: u64,
    },
    /// An L2 table that does not start a cluster.
    L2TableUnaligned {
        /// Offset of the entry in the file.
        offset: u64,
    },
    /// Reserved bits in an L2 entry.
    L2Reserved {
        /// Value of the entry.
        entry: u64,
    },
    /// A zero flag where the format has none. QEMU does not look for it.
    ZeroFlag {
        /// Value of the entry.
        entry: u64,
    },
    /// A compressed cluster with COPIED.
    CompressedCopied {
        /// Where its data starts.
        offset: u64,
    },
    /// A compressed cluster in an image with an external data file.
    CompressedWithDataFile {
        /// Its index in the L2 table.
        l2_index: u64,
        /// The entry without COPIED.
        entry: u64,
    },
    /// A compressed cluster with a subcluster bitmap.
    CompressedWithBitmap {
        /// Its index in the L2 table.
        l2_index: u64,
        /// The entry without COPIED.
        entry: u64,
    },
    /// Subclusters both allocated and zero.
    AllocatedAndZero {
        /// Offset of the cluster in the file.
        offset: u64,
    },
    /// A data cluster that does not start a cluster.
    DataUnaligned {
        /// Offset that the entry gives.
        offset: u64,
    },
    /// A preallocated cluster that does not start a cluster.
    PreallocatedUnaligned {
        /// Offset that the entry gives.
        offset: u64,
    },
    /// Allocated subclusters without space.
    AllocatedWithoutOffset,
    /// A cluster of an external data file that is not where the guest has it. QEMU does not look
    /// for it, but refuses to read such a cluster.
    DataFileOffset {
        /// Where the entry says that it is.
        offset: u64,
        /// Where the guest has it.
        guest_offset: u64,
    },
    /// A second L1 entry that points to an L2 table of an image with an external data file, whose
    /// offsets can be right for one guest range only. QEMU does not look for it.
    DataFileTable {
        /// Where the table is.
        offset: u64,
        /// The first entry that points to it.
        first_index: u64,
        /// Index of the entry in the L1 table.
        l1_index: u64,
    },
    /// Snapshots in an image with an external data file.
    SnapshotsWithDataFile {
        /// Number of snapshots that the header gives.
        count: u32,
    },
    /// A snapshot table entry without the fields that version 3 demands.
    SnapshotIncomplete {
        /// Index of the snapshot in the table.
        index: u32,
    },
    /// A snapshot whose L1 table cannot be right.
    SnapshotL1 {
        /// Unique ID of the snapshot.
        id: String,
        /// Name of the snapshot.
        name: String,
        /// Flaw of the snapshot's L1 table.
        #[doc(hidden)]
        flaw: SnapshotL1Flaw,
    },
    /// Something about the bitmaps cannot be right.
    Bitmaps {
        /// Description of the flaw.
        what: String,
    },
    /// Reserved bits in a refcount table entry.
    RefcountTableReserved {
        /// Index of the block in the refcount table.
        index: u64,
    },
    /// A refcount block that does not start a cluster.
    RefcountBlockUnaligned {
        /// Its index in the refcount table.
        index: u64,
    },
    /// A refcount block beyond the end of the file.
    RefcountBlockOutside {
        /// Its index in the refcount table.
        index: u64,
    },
    /// A refcount block that is something else, too.
    RefcountBlockShared {
        /// Its index in the refcount table.
        index: u64,
        /// How often its cluster is referenced.
        references: u64,
    },
    /// A refcount whose block cannot be read.
    RefcountUnreadable {
        /// Number of the cluster in the file.
        cluster: u64,
    },
    /// A refcount that is too high (a leak) or too low (a corruption).
    Refcount {
        /// Number of the cluster in the file.
        cluster: u64,
        /// Count that the refcount block stores.
        refcount: u64,
        /// References that were found.
        references: u64,
    },
    /// COPIED of an L1 entry contradicts the refcount.
    CopiedL2 {
        /// Index of the entry in the L1 table.
        l1_index: u64,
        /// Value of the entry.
        entry: u64,
        /// The L2 table's refcount.
        refcount: u64,
    },
    /// COPIED of an L2 entry contradicts the refcount.
    CopiedData {
        /// Value of the entry.
        entry: u64,
        /// Count of the cluster that the entry refers to.
        refcount: u64,
    },
    /// Metadata that something else uses, too, with a refcount that covers both. QEMU does not look
    /// for it; the next write to either destroys the other.
    Overlap {
        /// Number of the cluster in the file.
        cluster: u64,
        /// One of the structures in it.
        #[doc(hidden)]
        structure: Structure,
        /// How often it is referenced.
        references: u64,
    },
}

impl Finding {
    /// How bad it is.
    pub fn severity(&self) -> Severity {
        match self {
            Finding::Refcount {
                refcount,
                references,
                ..
            } if refcount > references => Severity::Leak,
            Finding::RefcountUnreadable { .. } | Finding::Bitmaps { .. } => Severity::Unchecked,
            _ => Severity::Corruption,
        }
    }

    /// Returns whether QEMU looks for it, so that its count and ours agree.
    pub fn is_known_to_qemu(&self) -> bool {
        !matches!(
            self,
            Finding::ZeroFlag { .. }
                | Finding::DataFileOffset { .. }
                | Finding::DataFileTable { .. }
                | Finding::Overlap { .. }
        )
    }
}

impl fmt::Display for Finding {
    #[allow(clippy::too_many_lines)] // A table of texts: nothing is gained by cutting it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::BeyondEnd { offset, len } => write!(
                f,
                "ERROR: counting reference for region exceeding the end of the file by one cluster \
                 or more: offset {offset:#x} size {len:#x}"
            ),
            Finding::Overflow { offset } => write!(
                f,
                "ERROR: overflow cluster offset={offset:#x}\nUse qemu-img amend to increase the \
                 refcount entry width or qemu-img convert to create a clean copy if the image \
                 cannot be opened for writing"
            ),
            Finding::Refcount {
                cluster,
                refcount,
                references,
            } => {
                let word = match self.severity() {
                    Severity::Leak => "Leaked",
                    Severity::Corruption | Severity::Unchecked => "ERROR",
                };
                write!(
                    f,
                    "{word} cluster {cluster} refcount={refcount} reference={references}"
                )
            }
            Finding::RefcountUnreadable { cluster } => write!(
                f,
                "Can't get refcount for cluster {cluster}: Input/output error"
            ),
            Finding::RefcountTableReserved { index } => {
                write!(
                    f,
                    "ERROR refcount table entry {index} has reserved bits set"
                )
            }
            Finding::RefcountBlockUnaligned { index } => write!(
                f,
                "ERROR refcount block {index} is not cluster aligned; refcount table entry \
                 corrupted"
            ),
            Finding::RefcountBlockOutside { index } => {
                write!(f, "ERROR refcount block {index} is outside image")
            }
            Finding::RefcountBlockShared { index, references } => {
                write!(f, "ERROR refcount block {index} refcount={references}")
            }
            Finding::Overlap {
                cluster,
                structure,
                references,
            } => write!(
                f,
                "ERROR cluster {cluster} is {structure} and something else, too: \
                 reference={references}"
            ),
            Finding::SnapshotsWithDataFile { count } => {
                write!(f, "ERROR {count} snapshots in image with data file")
            }
            Finding::SnapshotIncomplete { index } => {
                write!(f, "ERROR snapshot table entry {index} is incomplete")
            }
            Finding::SnapshotL1 { id, name, flaw } => {
                write!(f, "ERROR snapshot {id} ({name}) ")?;
                match flaw {
                    SnapshotL1Flaw::Unaligned { l1_offset } => write!(
                        f,
                        "l1_offset={l1_offset:#x}: L1 table is not cluster aligned; snapshot table \
                         entry corrupted"
                    ),
                    SnapshotL1Flaw::TooLarge { l1_size } => write!(
                        f,
                        "l1_size={l1_size:#x}: L1 table is too large; snapshot table entry \
                         corrupted"
                    ),
                }
            }
            Finding::Bitmaps { what } => write!(f, "ERROR bitmaps: {what}"),
            Finding::L1Reserved { entry } => {
                write!(f, "ERROR found L1 entry with reserved bits set: {entry:x}")
            }
            Finding::L2TableUnaligned { offset } => write!(
                f,
                "ERROR l2_offset={offset:x}: Table is not cluster aligned; L1 entry corrupted"
            ),
            Finding::L2Reserved { entry } => {
                write!(f, "ERROR found l2 entry with reserved bits set: {entry:x}")
            }
            Finding::ZeroFlag { entry } => {
                write!(
                    f,
                    "ERROR found l2 entry with a zero flag that its format lacks: {entry:x}"
                )
            }
            Finding::CompressedCopied { offset } => write!(
                f,
                "ERROR: coffset={offset:#x}: copied flag must never be set for compressed clusters"
            ),
            Finding::CompressedWithDataFile { l2_index, entry } => write!(
                f,
                "ERROR compressed cluster {l2_index} with data file, entry={entry:#x}"
            ),
            Finding::CompressedWithBitmap { l2_index, entry } => write!(
                f,
                "ERROR compressed cluster {l2_index} with non-zero subcluster allocation bitmap, \
                 entry={entry:#x}"
            ),
            Finding::AllocatedAndZero { offset } => write!(
                f,
                "ERROR offset={offset:x}: Allocated cluster has corrupted subcluster allocation \
                 bitmap"
            ),
            Finding::DataUnaligned { offset } => write!(
                f,
                "ERROR offset={offset:x}: Data cluster is not properly aligned; L2 entry corrupted."
            ),
            Finding::PreallocatedUnaligned { offset } => write!(
                f,
                "ERROR offset={offset:x}: Preallocated cluster is not properly aligned; L2 entry \
                 corrupted."
            ),
            Finding::AllocatedWithoutOffset => {
                f.write_str("ERROR: Unallocated cluster has non-zero subcluster allocation map")
            }
            Finding::DataFileOffset {
                offset,
                guest_offset,
            } => write!(
                f,
                "ERROR offset={offset:x}: Data file cluster is not at its guest offset \
                 {guest_offset:x}"
            ),
            Finding::DataFileTable {
                offset,
                first_index,
                l1_index,
            } => write!(
                f,
                "ERROR: L1 entry {l1_index} points to the L2 table at {offset:#x} of entry {first_index}; with a \
                 data file no two can share one"
            ),
            Finding::CopiedL2 {
                l1_index,
                entry,
                refcount,
            } => write!(
                f,
                "ERROR OFLAG_COPIED L2 cluster: l1_index={l1_index} l1_entry={entry:x} \
                 refcount={refcount}"
            ),
            Finding::CopiedData { entry, refcount } => write!(
                f,
                "ERROR OFLAG_COPIED data cluster: l2_entry={entry:x} refcount={refcount}"
            ),
        }
    }
}
