//! L1, L2, extended L2 and refcount entries: bits on one side, values on the other; in modules, the
//! entries of the snapshot table and of the bitmap directory.
//!
//! All masks and shifts of table entries are here (qcow2.rst, "Cluster mapping", "Extended L2
//! Entries", "Host cluster management"). Decoding refuses what the specification reserves; encoding
//! a decoded entry gives the same bits, but for the ignored bitmap of a compressed cluster.
//!
//! | entry | bits |
//! | --- | --- |
//! | L1 | 0-8 reserved, 9-55 table offset, 56-62 reserved, 63 COPIED |
//! | L2, standard | 0 zero flag (v3, not extended), 1-8 reserved, 9-55 offset, 56-61 reserved, 62 = 0, 63 COPIED |
//! | L2, compressed | x = 62 - (cluster_bits - 8): 0..x offset, x..62 further sectors, 62 = 1, 63 = 0 |
//! | extended bitmap | 0-31 subcluster i is allocated, 32-63 subcluster i reads as zeroes |
//! | refcount table | 0-8 reserved, 9-63 block offset |

pub mod bitmap;
pub mod inspect;
pub mod mend;
pub mod moved;
pub mod snapshot;

use super::geometry::{Geometry, HOST_OFFSET_END, HostOffset, SubclusterMask};

pub use crate::run::Compressed;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const ZERO: u64 = 1;
const REFTABLE_OFFSET_MASK: u64 = 0xffff_ffff_ffff_fe00;
/// Unit of a compressed cluster's length.
pub const SECTOR_BYTES: u64 = 512;

/// A number of at most eight bytes, as all structures have them. Words of tables, of eight, are the
/// fast case.
#[inline]
pub fn big_endian(bytes: &[u8]) -> u64 {
    match bytes.try_into() {
        Ok(eight) => u64::from_be_bytes(eight),
        Err(_) => {
            let bytes = bytes.iter();
            bytes.fold(0, |value, &byte| value << 8 | u64::from(byte))
        }
    }
}

/// A decoded L2 entry: how its guest cluster is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Entry {
    /// Mapped, or not, subcluster by subcluster.
    Standard(Standard),
    /// The whole cluster is stored compressed.
    Compressed(Compressed),
}

/// An entry that is not compressed. Without extended L2 there is one subcluster, the whole cluster.
///
/// A subcluster that is in neither mask is unallocated: it reads from the backing file. A cluster
/// with a host offset may have any subclusters; one without has none allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Standard {
    /// Where the cluster's space is, if it has any.
    pub host: Option<HostOffset>,
    /// The reference count of that space is exactly 1: it may be written in place.
    pub copied: bool,
    /// Subclusters that hold data.
    pub allocated: SubclusterMask,
    /// Subclusters that read as zeroes.
    pub zeroes: SubclusterMask,
}

/// The flaw of an entry that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryError {
    /// Bits that the specification reserves are set.
    Reserved(u64),
    /// The offset is not a multiple of the cluster size.
    Unaligned(u64),
    /// The zero flag in a version 2 image.
    ZeroFlagInVersion2,
    /// Subclusters both allocated and zero.
    AllocatedAndZero(SubclusterMask),
    /// Subclusters allocated in a cluster without a host offset.
    AllocatedWithoutOffset(SubclusterMask),
    /// A compressed cluster in an image with an external data file.
    CompressedWithDataFile,
    /// An offset that does not fit in 56 bits.
    Beyond(u64),
}

impl std::fmt::Display for EntryError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EntryError::Reserved(bits) => write!(f, "reserved bits {bits:#x} are set"),
            EntryError::Unaligned(offset) => {
                write!(f, "offset {offset:#x} is not the start of a cluster")
            }
            EntryError::ZeroFlagInVersion2 => f.write_str("zero flag in a version 2 image"),
            EntryError::AllocatedAndZero(mask) => {
                write!(f, "subclusters {mask:#010x} are both allocated and zero")
            }
            EntryError::AllocatedWithoutOffset(mask) => {
                write!(
                    f,
                    "subclusters {mask:#010x} are allocated in a cluster that has no offset"
                )
            }
            EntryError::CompressedWithDataFile => {
                f.write_str("compressed cluster in an image with an external data file")
            }
            EntryError::Beyond(offset) => write!(f, "offset {offset:#x} is beyond 56 bits"),
        }
    }
}

/// The properties of an image that decoding depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryFormat {
    /// Sizes of the image's structures.
    pub geometry: Geometry,
    /// Header version, 2 or 3.
    pub version: u32,
    /// Guest data is in an external data file, where offset 0 is valid.
    pub data_file: bool,
}

impl Standard {
    /// Neither data nor zeroes nor space.
    pub const UNALLOCATED: Standard = Standard {
        host: None,
        copied: false,
        allocated: 0,
        zeroes: 0,
    };
}

impl EntryFormat {
    /// Decodes an L2 entry; `None` if it is corrupt.
    #[inline]
    pub fn l2_entry(&self, words: &[u8]) -> Option<L2Entry> {
        let (word, bitmap) = (big_endian(&words[..8]), words.get(8..16).map(big_endian));
        self.decode_l2(word, bitmap.unwrap_or(0)).ok()
    }

    /// Decodes an L2 entry; `bitmap` is ignored without extended L2.
    ///
    /// # Errors
    /// The entry is corrupt.
    #[inline]
    pub fn decode_l2(&self, entry: u64, bitmap: u64) -> Result<L2Entry, EntryError> {
        if entry & COMPRESSED != 0 {
            return self.decode_compressed(entry).map(L2Entry::Compressed);
        }
        let extended = self.geometry.extended_l2();
        let flags = if extended { COPIED } else { COPIED | ZERO };
        let offset = self.offset(entry, flags)?;
        let copied = entry & COPIED != 0;
        // With an external data file offset 0 is valid; COPIED distinguishes it from "no offset".
        let host = (offset != 0 || (self.data_file && copied)).then_some(HostOffset(offset));
        let (allocated, zeroes) = if extended {
            (
                (bitmap & 0xffff_ffff) as SubclusterMask,
                (bitmap >> 32) as SubclusterMask,
            )
        } else if entry & ZERO != 0 {
            if self.version < 3 {
                return Err(EntryError::ZeroFlagInVersion2);
            }
            (0, 1)
        } else {
            (SubclusterMask::from(host.is_some()), 0)
        };
        if allocated & zeroes != 0 {
            return Err(EntryError::AllocatedAndZero(allocated & zeroes));
        }
        if host.is_none() && allocated != 0 {
            return Err(EntryError::AllocatedWithoutOffset(allocated));
        }
        Ok(L2Entry::Standard(Standard {
            host,
            copied: copied && host.is_some(),
            allocated,
            zeroes,
        }))
    }

    fn decode_compressed(&self, entry: u64) -> Result<Compressed, EntryError> {
        if self.data_file {
            return Err(EntryError::CompressedWithDataFile);
        }
        if entry & COPIED != 0 {
            return Err(EntryError::Reserved(COPIED));
        }
        let offset_bits = self.compressed_offset_bits();
        let start = entry & ((1 << offset_bits) - 1);
        if start >= HOST_OFFSET_END {
            return Err(EntryError::Beyond(start));
        }
        let further_sectors = (entry & !COMPRESSED) >> offset_bits;
        let end = (start / SECTOR_BYTES + 1 + further_sectors) * SECTOR_BYTES;
        Ok(Compressed {
            start,
            len: end - start,
        })
    }

    /// Encodes an L2 entry: the entry and its bitmap, 0 without extended L2.
    ///
    /// # Panics
    /// If the entry is none that the format can hold: a mistake of ours.
    #[inline]
    pub fn encode_l2(&self, entry: &L2Entry) -> (u64, u64) {
        match entry {
            L2Entry::Standard(standard) => self.encode_standard(standard),
            L2Entry::Compressed(compressed) => (self.encode_compressed(compressed), 0),
        }
    }

    fn encode_standard(&self, entry: &Standard) -> (u64, u64) {
        assert_eq!(
            entry.allocated & entry.zeroes,
            0,
            "a subcluster has one state"
        );
        assert!(
            entry.host.is_some() || entry.allocated == 0,
            "allocated subclusters need space"
        );
        let offset = entry.host.map_or(0, |host| host.0);
        assert_eq!(
            offset & !OFFSET_MASK,
            0,
            "a host offset has 47 bits of sectors"
        );
        assert!(
            self.geometry.is_cluster_aligned(offset),
            "a host offset starts a cluster"
        );
        let copied = if entry.copied { COPIED } else { 0 };
        if self.geometry.extended_l2() {
            let bitmap = u64::from(entry.zeroes) << 32 | u64::from(entry.allocated);
            return (offset | copied, bitmap);
        }
        assert!(
            entry.host.is_none() || entry.allocated | entry.zeroes != 0,
            "without subclusters, space holds data or reads as zeroes"
        );
        assert!(
            entry.zeroes == 0 || self.version >= 3,
            "version 2 has no zero flag"
        );
        (
            offset | copied | if entry.zeroes != 0 { ZERO } else { 0 },
            0,
        )
    }

    fn encode_compressed(&self, place: &Compressed) -> u64 {
        let further_sectors =
            (place.start + place.len - 1) / SECTOR_BYTES - place.start / SECTOR_BYTES;
        let offset_bits = self.compressed_offset_bits();
        assert!(
            place.start < 1 << offset_bits.min(56),
            "a compressed cluster's offset fits"
        );
        assert!(
            further_sectors < 1 << (62 - offset_bits),
            "a compressed cluster's length fits"
        );
        COMPRESSED | further_sectors << offset_bits | place.start
    }

    /// Bits of a compressed entry's offset; the length has those up to bit 61.
    fn compressed_offset_bits(&self) -> u32 {
        62 - (self.geometry.cluster_bits() - 8)
    }

    /// The largest host offset at which compressed data may start, exclusive.
    pub fn compressed_offset_end(&self) -> u64 {
        1 << self.compressed_offset_bits().min(56)
    }

    /// Takes the offset of a cluster out of an entry that may have these flags beside it.
    fn offset(&self, entry: u64, flags: u64) -> Result<u64, EntryError> {
        let reserved = entry & !(flags | OFFSET_MASK);
        if reserved != 0 {
            return Err(EntryError::Reserved(reserved));
        }
        let offset = entry & OFFSET_MASK;
        match self.geometry.is_cluster_aligned(offset) {
            true => Ok(offset),
            false => Err(EntryError::Unaligned(offset)),
        }
    }

    /// Decodes an L1 entry: the L2 table's offset, and whether its refcount is 1 (COPIED).
    ///
    /// # Errors
    /// The entry is corrupt.
    #[inline]
    pub fn decode_l1(&self, entry: u64) -> Result<Option<TableRef>, EntryError> {
        let offset = self.offset(entry, COPIED)?;
        let copied = entry & COPIED != 0;
        Ok((offset != 0).then_some(TableRef {
            offset: HostOffset(offset),
            copied,
        }))
    }

    /// Decodes a refcount table entry: the block's offset, if there is a block.
    ///
    /// # Errors
    /// The entry is corrupt.
    pub fn decode_refcount_table(&self, entry: u64) -> Result<Option<HostOffset>, EntryError> {
        if entry & !REFTABLE_OFFSET_MASK != 0 {
            return Err(EntryError::Reserved(entry & !REFTABLE_OFFSET_MASK));
        }
        if entry >= HOST_OFFSET_END {
            return Err(EntryError::Beyond(entry));
        }
        if !self.geometry.is_cluster_aligned(entry) {
            return Err(EntryError::Unaligned(entry));
        }
        Ok((entry != 0).then_some(HostOffset(entry)))
    }
}

/// Where an L2 table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRef {
    /// First byte of the table in the file.
    pub offset: HostOffset,
    /// Its reference count is exactly 1.
    pub copied: bool,
}

impl TableRef {
    /// Encodes the entry as the L1 table stores it.
    pub fn encode(self) -> u64 {
        self.offset.0 | if self.copied { COPIED } else { 0 }
    }
}

/// Reads the refcount at `index` of a block or a part of one (qcow2.rst, "Refcount table and
/// blocks"). Widths below a byte count from the least significant bit; wider ones are big-endian.
#[inline]
pub fn refcount_at(block: &[u8], index: usize, order: u32) -> u64 {
    match order {
        0..=2 => {
            let bits = 1usize << order;
            let at = index * bits;
            u64::from(block[at / 8] >> (at % 8)) & ((1 << bits) - 1)
        }
        _ => {
            let width = 1usize << (order - 3);
            block[index * width..][..width]
                .iter()
                .fold(0, |value, &byte| value << 8 | u64::from(byte))
        }
    }
}

/// Sets the refcount at `index` of a block or a part of one.
///
/// # Panics
/// If the width cannot hold the count: callers check against `Geometry::refcount_max` first.
#[inline]
pub fn set_refcount(block: &mut [u8], index: usize, order: u32, count: u64) {
    assert!(
        count <= u64::MAX >> (64 - (1u32 << order)),
        "refcount {count} overflows its width"
    );
    match order {
        0..=2 => {
            let bits = 1usize << order;
            let at = index * bits;
            let mask = (((1u16 << bits) - 1) as u8) << (at % 8);
            let byte = &mut block[at / 8];
            *byte = *byte & !mask | (count as u8) << (at % 8);
        }
        _ => {
            let width = 1usize << (order - 3);
            block[index * width..][..width].copy_from_slice(&count.to_be_bytes()[8 - width..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(bits: u32, extended: bool) -> EntryFormat {
        EntryFormat {
            geometry: Geometry::new(bits, 4, extended).unwrap(),
            version: 3,
            data_file: false,
        }
    }

    #[test]
    fn encoding_a_decoded_entry_gives_the_same_bits() {
        for f in [
            format(16, false),
            format(16, true),
            format(9, false),
            format(21, true),
        ] {
            let cluster = f.geometry.cluster_bytes();
            let offsets = [0, cluster, 5 * cluster, OFFSET_MASK & !(cluster - 1)];
            let bitmaps = [
                0,
                1,
                0xffff_ffff,
                1 << 32,
                0xffff_ffff << 32,
                0x0000_ff00_0000_00ff,
            ];
            let mut valid = 0;
            for (offset, copied, zero) in offsets
                .iter()
                .flat_map(|&o| [(o, 0, 0), (o, COPIED, 0), (o, 0, ZERO), (o, COPIED, ZERO)])
            {
                for bitmap in bitmaps {
                    let Ok(entry) = f.decode_l2(offset | copied | zero, bitmap) else {
                        continue;
                    };
                    if offset == 0 && copied != 0 {
                        continue; // COPIED without an offset means nothing and is not kept.
                    }
                    valid += 1;
                    let bitmap = if f.geometry.extended_l2() { bitmap } else { 0 };
                    assert_eq!(f.encode_l2(&entry), (offset | copied | zero, bitmap));
                }
            }
            assert!(valid > 20);
        }
    }

    #[test]
    fn every_subcluster_state_decodes_and_both_bits_are_corrupt() {
        let f = format(16, true);
        for i in 0..32 {
            let entry = |bitmap| f.decode_l2(0x50000, bitmap);
            let states = |a, z| {
                Ok(L2Entry::Standard(Standard {
                    host: Some(HostOffset(0x50000)),
                    copied: false,
                    allocated: a,
                    zeroes: z,
                }))
            };
            assert_eq!(entry(1 << i), states(1 << i, 0));
            assert_eq!(entry(1 << (i + 32)), states(0, 1 << i));
            assert_eq!(
                entry(1 << i | 1 << (i + 32)),
                Err(EntryError::AllocatedAndZero(1 << i))
            );
            assert_eq!(
                f.decode_l2(0, 1 << i),
                Err(EntryError::AllocatedWithoutOffset(1 << i))
            );
        }
        assert_eq!(f.decode_l2(0x50000 | 1, 0), Err(EntryError::Reserved(1)));
    }

    #[test]
    fn reserved_bits_of_a_standard_entry_are_refused() {
        let f = format(16, false);
        for bit in (1..9).chain(56..62) {
            assert_eq!(
                f.decode_l2(0x10000 | 1 << bit, 0),
                Err(EntryError::Reserved(1 << bit))
            );
        }
        assert_eq!(f.decode_l2(0x10200, 0), Err(EntryError::Unaligned(0x10200)));
    }

    #[test]
    fn the_zero_flag_needs_version_3() {
        let f = EntryFormat {
            version: 2,
            ..format(16, false)
        };
        assert_eq!(f.decode_l2(1, 0), Err(EntryError::ZeroFlagInVersion2));
    }

    #[test]
    fn offset_zero_is_valid_in_a_data_file_and_only_there() {
        let f = EntryFormat {
            data_file: true,
            ..format(16, false)
        };
        let Ok(L2Entry::Standard(entry)) = f.decode_l2(COPIED, 0) else {
            panic!()
        };
        assert_eq!((entry.host, entry.allocated), (Some(HostOffset(0)), 1));
        assert_eq!(
            f.decode_l2(COMPRESSED | 512, 0),
            Err(EntryError::CompressedWithDataFile)
        );
        let Ok(L2Entry::Standard(entry)) = format(16, false).decode_l2(COPIED, 0) else {
            panic!()
        };
        assert_eq!(entry, Standard::UNALLOCATED);
    }

    #[test]
    fn compressed_places_round_trip_at_their_limits() {
        for bits in 9..=21 {
            let f = format(bits, false);
            let cluster = f.geometry.cluster_bytes();
            for start in [0, 1, 511, 512, 12_345, f.compressed_offset_end() - 1] {
                for data in [1, 100, 511, 512, 513, cluster - 1] {
                    let len = (start + data).next_multiple_of(512) - start;
                    let place = Compressed { start, len };
                    let (entry, bitmap) = f.encode_l2(&L2Entry::Compressed(place));
                    assert_eq!(f.decode_l2(entry, bitmap), Ok(L2Entry::Compressed(place)));
                }
            }
        }
    }

    #[test]
    fn refcounts_of_every_width_are_independent() {
        for order in 0..=6 {
            let max = u64::MAX >> (64 - (1u32 << order));
            let entries = (64 * 8) >> order;
            let mut block = vec![0u8; 64];
            let mut model = vec![0u64; entries];
            let mut value = 0x9e37_79b9_7f4a_7c15u64;
            for step in 0..1000 {
                value = value
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(step);
                let (index, count) = ((value >> 7) as usize % entries, value & max);
                set_refcount(&mut block, index, order, count);
                model[index] = count;
                for (i, &count) in model.iter().enumerate() {
                    assert_eq!(refcount_at(&block, i, order), count);
                }
            }
        }
        // Worked example of the specification: 16 bits are big-endian.
        assert_eq!(refcount_at(&[0, 1, 2, 3], 1, 4), 0x203);
        assert_eq!(refcount_at(&[0b1000_0010], 7, 0), 1);
    }
}
