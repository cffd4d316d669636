//! Entries of the bitmap directory and of bitmap tables (qcow2.rst, "Bitmaps").
//!
//! | bits | of a bitmap table entry |
//! | --- | --- |
//! | 0 | all bits of the cluster are set; only without an offset |
//! | 9-55 | offset of the cluster of bits |
//! | others | reserved |

use std::ops::RangeInclusive;

use super::super::geometry::Geometry;
use super::{OFFSET_MASK, big_endian};

/// Bytes of a directory entry before its extra data.
pub const FIXED_BYTES: usize = 24;
/// The most bitmaps of an image, as in QEMU.
pub const COUNT_MAX: u32 = 65535;
/// The largest directory that QEMU accepts.
pub const DIRECTORY_BYTES_MAX: u64 = 64 << 20;
/// The longest name of a bitmap.
pub const NAME_BYTES_MAX: u16 = 1023;
/// The most entries of a bitmap table, as in QEMU.
pub const TABLE_ENTRIES_MAX: u64 = 0x800_0000;
/// The most bytes of clusters that the bits of a bitmap take, as in QEMU.
pub const BITS_BYTES_MAX: u64 = 512 << 20;
/// log2 of the granularity, as in QEMU.
pub const GRANULARITY_BITS: RangeInclusive<u8> = 9..=31;
/// The only type: a dirty tracking bitmap.
const DIRTY_TRACKING: u8 = 1;
const IN_USE: u32 = 1;
const AUTO: u32 = 2;
const EXTRA_DATA_COMPATIBLE: u32 = 4;
const ALL_ONES: u64 = 1;

/// The fixed part of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// Where the bitmap table is.
    pub table_offset: u64,
    /// Number of entries of the bitmap table.
    pub table_entries: u32,
    flags: u32,
    kind: u8,
    /// log2 of the granularity; possible only if [`Fixed::granularity`] says so.
    pub granularity_bits: u8,
    /// Length of the name.
    pub name_bytes: u16,
    /// Length of the extra data.
    pub extra_bytes: u32,
}

impl Fixed {
    /// That of a new bitmap without extra data.
    pub fn new(granularity_bits: u8, name_bytes: u16) -> Fixed {
        Fixed {
            table_offset: 0,
            table_entries: 0,
            flags: 0,
            kind: DIRTY_TRACKING,
            granularity_bits,
            name_bytes,
            extra_bytes: 0,
        }
    }

    /// Encodes the fields, big-endian.
    pub fn encode(&self) -> [u8; FIXED_BYTES] {
        let mut out = [0; FIXED_BYTES];
        out[..8].copy_from_slice(&self.table_offset.to_be_bytes());
        out[8..12].copy_from_slice(&self.table_entries.to_be_bytes());
        out[12..16].copy_from_slice(&self.flags.to_be_bytes());
        out[16] = self.kind;
        out[17] = self.granularity_bits;
        out[18..20].copy_from_slice(&self.name_bytes.to_be_bytes());
        out[20..].copy_from_slice(&self.extra_bytes.to_be_bytes());
        out
    }

    /// Decodes the first [`FIXED_BYTES`] bytes of an entry.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn decode(bytes: &[u8]) -> Fixed {
        let u32_at = |at: usize| big_endian(&bytes[at..at + 4]) as u32;
        Fixed {
            table_offset: big_endian(&bytes[..8]),
            table_entries: u32_at(8),
            flags: u32_at(12),
            kind: bytes[16],
            granularity_bits: bytes[17],
            name_bytes: big_endian(&bytes[18..20]) as u16,
            extra_bytes: u32_at(20),
        }
    }

    /// Length of the entry with its padding: the next one is there.
    pub fn entry_bytes(&self) -> u64 {
        let len = FIXED_BYTES as u64 + u64::from(self.extra_bytes) + u64::from(self.name_bytes);
        len.next_multiple_of(8)
    }

    /// Length of the table.
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.table_entries) * 8
    }

    /// It was not saved properly.
    pub fn in_use(&self) -> bool {
        self.flags & IN_USE != 0
    }

    /// The same, not saved properly.
    #[must_use]
    pub fn marked_in_use(self) -> Fixed {
        Fixed {
            flags: self.flags | IN_USE,
            ..self
        }
    }

    /// It follows all writes.
    pub fn auto(&self) -> bool {
        self.flags & AUTO != 0
    }

    /// The same, saved properly, following all writes or not.
    #[must_use]
    pub fn saved(self, auto: bool) -> Fixed {
        let kept = self.flags & !(IN_USE | AUTO);
        let flags = if auto { kept | AUTO } else { kept };
        Fixed { flags, ..self }
    }

    /// Returns whether it has extra data of unknown meaning, so that it must not be changed.
    pub fn is_foreign(&self) -> bool {
        self.extra_bytes > 0 && self.flags & EXTRA_DATA_COMPATIBLE == 0
    }

    /// Bytes of the disk that a bit stands for, if that is possible.
    pub fn granularity(&self) -> Option<u64> {
        let possible = GRANULARITY_BITS.contains(&self.granularity_bits);
        possible.then(|| 1 << self.granularity_bits)
    }

    /// Returns the flaw, if any, that makes it impossible to describe the bitmap.
    pub fn flaw(&self) -> Option<&'static str> {
        let known = IN_USE | AUTO | EXTRA_DATA_COMPATIBLE;
        if self.kind != DIRTY_TRACKING || self.flags & !known != 0 {
            Some("its type or its flags are not known")
        } else if self.granularity().is_none() {
            Some("its granularity is impossible")
        } else if self.name_bytes == 0 || self.name_bytes > NAME_BYTES_MAX {
            Some("its name is empty or too long")
        } else {
            None
        }
    }

    /// Returns the flaw, if any, that makes it impossible to read its table, on a disk of
    /// `disk_bytes`.
    pub fn table_flaw(&self, geometry: &Geometry, disk_bytes: u64) -> Option<&'static str> {
        if self.table_offset == 0 || !geometry.is_cluster_aligned(self.table_offset) {
            return Some("its table does not start a cluster");
        }
        if let Some(flaw) = self.flaw() {
            return Some(flaw);
        }
        let entries = u64::from(self.table_entries);
        let most = (BITS_BYTES_MAX >> geometry.cluster_bits()).min(TABLE_ENTRIES_MAX);
        if entries == 0 || entries > most {
            return Some("its table is empty or too large");
        }
        // A crash while the disk grew leaves the table at its old size.
        if !self.in_use() && entries != self.table_entries_for(geometry, disk_bytes) {
            return Some("its table is not of the size that the disk asks for");
        }
        None
    }

    /// Entries that the table needs for a disk of `disk_bytes`; the granularity is possible.
    pub fn table_entries_for(&self, geometry: &Geometry, disk_bytes: u64) -> u64 {
        let bits = disk_bytes.div_ceil(1 << self.granularity_bits);
        geometry.clusters_for(bits.div_ceil(8)).max(1)
    }
}

/// A bitmap table entry: how its cluster of bits is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableEntry {
    /// It has no cluster: no bit is set.
    Clean,
    /// It has no cluster: all bits are set.
    Dirty,
    /// The cluster is here.
    At(u64),
    /// A value that the specification reserves.
    Invalid,
}

impl TableEntry {
    /// Decodes an entry of a bitmap table.
    pub fn decode(raw: u64, geometry: &Geometry) -> TableEntry {
        let offset = raw & OFFSET_MASK;
        let flags = raw & !OFFSET_MASK;
        match (offset, flags) {
            (0, 0) => TableEntry::Clean,
            (0, ALL_ONES) => TableEntry::Dirty,
            (offset, 0) if offset != 0 && geometry.is_cluster_aligned(offset) => {
                TableEntry::At(offset)
            }
            _ => TableEntry::Invalid,
        }
    }

    /// The entry's bits.
    ///
    /// # Panics
    /// If it is invalid.
    pub fn encode(self) -> u64 {
        match self {
            TableEntry::Clean => 0,
            TableEntry::Dirty => ALL_ONES,
            TableEntry::At(offset) => offset,
            TableEntry::Invalid => panic!("nobody writes an invalid entry"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bitmap of one bit for 64 KiB of a disk of 1 GiB: 2 KiB of bits.
    fn sound() -> [u8; FIXED_BYTES] {
        let mut bytes = [0; FIXED_BYTES];
        bytes[5] = 3;
        bytes[11] = 1;
        bytes[15] = 2;
        bytes[16] = 1;
        bytes[17] = 16;
        bytes[19] = 4;
        bytes
    }

    fn flaw(bytes: &[u8]) -> Option<&'static str> {
        let geometry = Geometry::new(16, 4, false).expect("a valid one");
        Fixed::decode(bytes).table_flaw(&geometry, 1 << 30)
    }

    #[test]
    fn a_sound_entry_has_no_flaw() {
        assert_eq!(flaw(&sound()), None);
        let fixed = Fixed::decode(&sound());
        assert_eq!(fixed.granularity(), Some(64 << 10));
        assert!(fixed.auto() && !fixed.in_use());
        assert_eq!((fixed.entry_bytes(), fixed.table_bytes()), (32, 8));
        assert_eq!(fixed.encode(), sound());
        let marked = fixed.marked_in_use();
        assert!(marked.in_use() && marked.auto());
        assert_eq!(marked.saved(true), fixed);
        assert!(!marked.saved(false).auto());
    }

    #[test]
    fn every_field_is_held_to_its_limits() {
        for (at, value) in [
            (5, 0),
            (6, 1),
            (11, 0),
            (8, 1),
            (12, 1),
            (16, 2),
            (17, 8),
            (17, 32),
        ] {
            let mut bytes = sound();
            bytes[at] = value;
            assert!(flaw(&bytes).is_some(), "byte {at} is {value}");
        }
        for name_bytes in [0, 1024_u16] {
            let mut bytes = sound();
            bytes[18..20].copy_from_slice(&name_bytes.to_be_bytes());
            assert!(flaw(&bytes).is_some(), "a name of {name_bytes} bytes");
        }
    }

    #[test]
    fn a_table_may_be_of_another_size_only_if_it_was_not_saved() {
        let small = |bytes: &[u8]| {
            let geometry = Geometry::new(9, 4, false).expect("a valid one");
            Fixed::decode(bytes).table_flaw(&geometry, 1 << 30)
        };
        let mut bytes = sound();
        assert!(small(&bytes).is_some(), "2 KiB of bits in 512 bytes");
        bytes[15] = 3;
        assert_eq!(small(&bytes), None);
        (bytes[15], bytes[11]) = (2, 5);
        assert!(small(&bytes).is_some(), "one cluster too many");
    }

    #[test]
    fn a_table_entry_has_an_offset_or_a_flag() {
        let geometry = Geometry::new(16, 4, false).expect("a valid one");
        let decode = |raw| TableEntry::decode(raw, &geometry);
        let sound = [(0, TableEntry::Clean), (1, TableEntry::Dirty)];
        for (raw, entry) in sound
            .into_iter()
            .chain([(0x30000, TableEntry::At(0x30000))])
        {
            assert_eq!((decode(raw), entry.encode()), (entry, raw));
        }
        let invalid = [2, 0x30001, 0x30200, 1 << 56, 1 << 63];
        assert_eq!(invalid.map(decode), [TableEntry::Invalid; 5]);
    }
}
