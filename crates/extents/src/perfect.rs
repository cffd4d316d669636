//! The fewest extents that a file system can express for what a file has, from its geometry. Pure.
//!
//! A *stretch* is a part of the file that has space throughout and in one state (written,
//! unwritten, encoded). A perfect file has one extent a stretch, or as many as the longest extent
//! of that state makes necessary:
//!
//! | file system | longest extent |
//! | --- | --- |
//! | XFS | 2^21 - 1 blocks, and no more than an allocation group has |
//! | ext4, ext2 and ext3 with extents | 32 768 blocks written, 32 767 unwritten |
//! | ext2, ext3, ext4 with indirect blocks | one block group: as many blocks as a bitmap of one block counts |
//! | the same with groups that keep their tables together (ext4's flex_bg) | no limit that is known |
//! | btrfs | 128 MiB; 128 KiB compressed |

use cowslip_queue::fiemap::{Flags, Record};

/// XFS: 21 bits of a record (`BMBT_BLOCKCOUNT_BITLEN`), all of them set.
const XFS_BLOCKS: u64 = (1 << 21) - 1;
/// ext4: `EXT_INIT_MAX_LEN`; one less unwritten, because the number beyond marks it.
const EXT4_BLOCKS: u64 = 1 << 15;
/// btrfs: `BTRFS_MAX_EXTENT_SIZE`.
const BTRFS_BYTES: u64 = 128 << 20;
/// btrfs: `BTRFS_MAX_UNCOMPRESSED`.
const BTRFS_ENCODED_BYTES: u64 = 128 << 10;

/// How a file's blocks are found in ext2 and its successors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtMapping {
    /// Mapping by extents.
    Extents,
    /// Block by block.
    Indirect,
    /// Block by block, and runs go on from one group to the next.
    IndirectAcrossGroups,
}

/// The kind of a file system, as far as it decides how long an extent may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// XFS.
    Xfs {
        /// Bytes of an allocation group, if known.
        group_bytes: Option<u64>,
    },
    /// ext2, ext3, ext4.
    Ext(ExtMapping),
    /// btrfs.
    Btrfs,
    /// A file system whose limits are not known here.
    Other,
}

/// The longest extents in bytes; `None` for no limit that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Limit of extents of written space.
    pub written: Option<u64>,
    /// Limit of extents of unwritten space.
    pub unwritten: Option<u64>,
    /// Limit of extents of data stored in another form.
    pub encoded: Option<u64>,
}

impl Limits {
    /// Returns the limits of a file system with blocks of this length.
    pub fn of(kind: Kind, block_bytes: u64) -> Limits {
        let blocks = |count: u64| Some(count.saturating_mul(block_bytes).max(1));
        match kind {
            Kind::Xfs { group_bytes } => {
                let longest = blocks(XFS_BLOCKS);
                let longest = match group_bytes {
                    Some(group) if group > 0 => longest.map(|bytes| bytes.min(group)),
                    _ => longest,
                };
                Limits {
                    written: longest,
                    unwritten: longest,
                    encoded: longest,
                }
            }
            Kind::Ext(ExtMapping::Extents) => Limits {
                written: blocks(EXT4_BLOCKS),
                unwritten: blocks(EXT4_BLOCKS - 1),
                encoded: blocks(EXT4_BLOCKS),
            },
            Kind::Ext(ExtMapping::Indirect) => {
                let group = blocks(8 * block_bytes);
                Limits {
                    written: group,
                    unwritten: group,
                    encoded: group,
                }
            }
            Kind::Btrfs => Limits {
                written: Some(BTRFS_BYTES),
                unwritten: Some(BTRFS_BYTES),
                encoded: Some(BTRFS_ENCODED_BYTES),
            },
            Kind::Ext(ExtMapping::IndirectAcrossGroups) | Kind::Other => Limits {
                written: None,
                unwritten: None,
                encoded: None,
            },
        }
    }
}

/// The state that a stretch has throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Written,
    Unwritten,
    Encoded,
}

fn state(flags: Flags) -> State {
    if flags.has(Flags::UNWRITTEN) {
        State::Unwritten
    } else if flags.has(Flags::ENCODED) {
        State::Encoded
    } else {
        State::Written
    }
}

/// Counts the fewest extents of a file whose records come in order.
#[derive(Clone, Debug)]
pub struct Perfect {
    limits: Limits,
    /// State, end and length of the stretch so far.
    stretch: Option<(State, u64, u64)>,
    count: u64,
    expressed: u64,
}

impl Perfect {
    /// Returns the state for a file on a file system with these limits.
    pub fn new(limits: Limits) -> Perfect {
        Perfect {
            limits,
            stretch: None,
            count: 0,
            expressed: 0,
        }
    }

    /// The next record.
    pub fn push(&mut self, record: &Record) {
        let state = state(record.flags);
        let end = record.logical + record.len;
        self.expressed += self.needed(Some((state, end, record.len)));
        self.stretch = match self.stretch {
            Some((last, at, len)) if last == state && at == record.logical => {
                Some((state, end, len + record.len))
            }
            other => {
                self.count += self.needed(other);
                Some((state, end, record.len))
            }
        };
    }

    /// The count, for the records so far.
    pub fn count(&self) -> u64 {
        self.count + self.needed(self.stretch)
    }

    /// Extents that the file system takes for the records so far: the kernel may list several that
    /// lie one after the other as one record, longer than its longest extent.
    pub fn expressed(&self) -> u64 {
        self.expressed
    }

    fn needed(&self, stretch: Option<(State, u64, u64)>) -> u64 {
        let Some((state, _, len)) = stretch else {
            return 0;
        };
        let longest = match state {
            State::Written => self.limits.written,
            State::Unwritten => self.limits.unwritten,
            State::Encoded => self.limits.encoded,
        };
        longest.map_or(1, |longest| len.div_ceil(longest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(kind: Kind, records: &[(u64, u64, Flags)]) -> u64 {
        let mut perfect = Perfect::new(Limits::of(kind, 4096));
        for &(logical, len, flags) in records {
            perfect.push(&Record {
                logical,
                physical: 0,
                len,
                flags,
            });
        }
        perfect.count()
    }

    const NONE: Flags = Flags::from_bits(0);
    const XFS: Kind = Kind::Xfs { group_bytes: None };
    const GIB: u64 = 1 << 30;

    #[test]
    fn the_longest_extents_are_those_of_the_formats() {
        let blocks = |kind, block: u64| Limits::of(kind, block).written.map(|len| len / block);
        assert_eq!(blocks(XFS, 4096), Some(2_097_151));
        assert_eq!(blocks(XFS, 1024), Some(2_097_151));
        let small = Kind::Xfs {
            group_bytes: Some(100 << 20),
        };
        assert_eq!(Limits::of(small, 4096).written, Some(100 << 20));
        let ext4 = Limits::of(Kind::Ext(ExtMapping::Extents), 4096);
        assert_eq!(ext4.written, Some(32_768 * 4096));
        assert_eq!(ext4.unwritten, Some(32_767 * 4096));
        let ext2 = Kind::Ext(ExtMapping::Indirect);
        assert_eq!(blocks(ext2, 4096), Some(32_768));
        assert_eq!(blocks(ext2, 1024), Some(8192));
    }

    #[test]
    fn joined_records_count_as_what_they_take() {
        let mut perfect = Perfect::new(Limits::of(Kind::Ext(ExtMapping::Extents), 4096));
        let block = 4096;
        for (logical, len) in [(0, 40_000), (40_000, 10), (40_010, 25_526)] {
            perfect.push(&Record {
                logical: logical * block,
                physical: 0,
                len: len * block,
                flags: NONE,
            });
        }
        assert_eq!((perfect.count(), perfect.expressed()), (2, 4));
    }

    #[test]
    fn a_stretch_takes_as_many_extents_as_its_length_needs() {
        let longest = 2_097_151 * 4096;
        for (len, expected) in [
            (4096, 1),
            (longest, 1),
            (longest + 4096, 2),
            (3 * longest, 3),
        ] {
            assert_eq!(count(XFS, &[(0, len, NONE)]), expected, "{len}");
        }
        let ext4 = Kind::Ext(ExtMapping::Extents);
        assert_eq!(count(ext4, &[(0, GIB, NONE)]), 8);
        assert_eq!(count(ext4, &[(0, GIB, Flags::UNWRITTEN)]), 9);
        assert_eq!(count(Kind::Btrfs, &[(0, GIB, NONE)]), 8);
        assert_eq!(count(Kind::Btrfs, &[(0, GIB, Flags::ENCODED)]), 8192);
        assert_eq!(count(Kind::Other, &[(0, 1 << 50, NONE)]), 1);
        assert_eq!(count(XFS, &[]), 0);
    }

    #[test]
    fn pieces_of_a_stretch_count_once_and_holes_and_states_part_stretches() {
        let pieces: Vec<_> = (0..1000).map(|i| (i << 16, 1 << 16, NONE)).collect();
        assert_eq!(count(XFS, &pieces), 1);
        let shared = [
            (0, 4096, NONE),
            (4096, 4096, Flags::SHARED),
            (8192, 4096, NONE),
        ];
        assert_eq!(count(XFS, &shared), 1, "shared or not, it is one extent");
        let states = [
            (0, 4096, NONE),
            (4096, 4096, Flags::UNWRITTEN),
            (8192, 4096, NONE),
        ];
        assert_eq!(count(XFS, &states), 3);
        let hole = [(0, 4096, NONE), (8192, 4096, NONE)];
        assert_eq!(count(XFS, &hole), 2);
    }
}
