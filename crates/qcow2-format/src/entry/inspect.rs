//! Table entries as they are, flaws and all: for `check`, which has to go on where decoding
//! refuses.
//!
//! An entry has a meaning however broken it is: the space that it claims, which is counted, and the
//! flaws, which are reported. Everybody else decodes, and stops at the first flaw.

use smallvec::SmallVec;

use super::{
    COMPRESSED, COPIED, EntryFormat, OFFSET_MASK, REFTABLE_OFFSET_MASK, SECTOR_BYTES, ZERO,
};

/// A flaw of an L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Reserved bits are set.
    Reserved,
    /// The zero flag where there is none: version 2, or extended L2 entries.
    ZeroFlag,
    /// A compressed cluster with COPIED set.
    CompressedCopied,
    /// A compressed cluster in an image with an external data file.
    CompressedWithDataFile,
    /// A compressed cluster with a subcluster bitmap.
    CompressedWithBitmap,
    /// Subclusters both allocated and zero.
    AllocatedAndZero,
    /// The offset is no cluster's start, and the cluster holds data.
    DataUnaligned,
    /// The offset is no cluster's start, and the cluster is only preallocated.
    PreallocatedUnaligned,
    /// Subclusters are allocated in a cluster without space.
    AllocatedWithoutOffset,
}

/// The space that an L2 entry claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimedSpace {
    /// The entry claims no space.
    Nothing,
    /// A cluster, of the image or of its data file.
    Cluster {
        /// Its offset, which may be unaligned.
        offset: u64,
        /// COPIED flag of the entry.
        copied: bool,
    },
    /// The sectors of a compressed cluster.
    Compressed {
        /// Their first byte that counts.
        start: u64,
        /// Bytes up to the end of the last sector.
        len: u64,
    },
}

/// An L2 entry, inspected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspected {
    /// The offset that it names, whether or not that claims anything.
    pub offset: u64,
    /// The space that it claims.
    pub claim: ClaimedSpace,
    /// Its flaws, in the order in which QEMU reports them.
    pub flaws: SmallVec<[Flaw; 2]>,
}

/// An L1 or refcount table entry, inspected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InspectedTable {
    /// The table's offset, which may be unaligned; 0 is none.
    pub offset: u64,
    /// The COPIED flag; never set in a refcount table.
    pub copied: bool,
    /// Reserved bits are set.
    pub reserved: bool,
}

/// A cheap test for L2 entries that claim a cluster of the image and have no flaw.
#[derive(Clone, Copy, Debug)]
pub struct PlainClusters {
    /// Bits that no such entry has.
    forbidden: u64,
}

impl PlainClusters {
    /// The cluster's offset and the COPIED flag. None of any other entry, whatever its meaning.
    #[inline]
    pub fn of(self, entry: u64, bitmap: u64) -> Option<(u64, bool)> {
        let offset = entry & OFFSET_MASK;
        let ambiguous = bitmap >> 32 & bitmap;
        if entry & self.forbidden != 0 || offset == 0 || ambiguous != 0 {
            return None;
        }
        Some((offset, entry & COPIED != 0))
    }
}

impl EntryFormat {
    /// Returns which entries are plain in this image.
    pub fn plain_clusters(&self) -> PlainClusters {
        let zero = match self.version {
            3.. if !self.geometry.extended_l2() => ZERO,
            _ => 0,
        };
        let unaligned = OFFSET_MASK & (self.geometry.cluster_bytes() - 1);
        let forbidden = match self.data_file {
            true => u64::MAX,
            false => !(COPIED | OFFSET_MASK | zero) | unaligned,
        };
        PlainClusters { forbidden }
    }

    /// Returns the claim and the flaws of an L2 entry; `bitmap` is 0 without extended L2.
    pub fn inspect_l2(&self, entry: u64, bitmap: u64) -> Inspected {
        if entry & COMPRESSED != 0 {
            return self.inspect_compressed(entry, bitmap);
        }
        let extended = self.geometry.extended_l2();
        let mut flaws = SmallVec::new();
        if entry & !(COPIED | OFFSET_MASK | ZERO) != 0 {
            flaws.push(Flaw::Reserved);
        }
        if entry & ZERO != 0 && (extended || self.version < 3) {
            flaws.push(Flaw::ZeroFlag);
        }
        let offset = entry & OFFSET_MASK;
        let copied = entry & COPIED != 0;
        let allocated = bitmap & 0xffff_ffff;
        let plain_zero = entry & ZERO != 0 && !extended;
        if offset == 0 && (plain_zero || !(self.data_file && copied)) {
            if allocated != 0 {
                flaws.push(Flaw::AllocatedWithoutOffset);
            }
            let claim = ClaimedSpace::Nothing;
            return Inspected {
                offset,
                claim,
                flaws,
            };
        }
        if bitmap >> 32 & allocated != 0 {
            flaws.push(Flaw::AllocatedAndZero);
        }
        if !self.geometry.is_cluster_aligned(offset) {
            let holds_data = if extended {
                allocated != 0
            } else {
                !plain_zero
            };
            flaws.push(if holds_data {
                Flaw::DataUnaligned
            } else {
                Flaw::PreallocatedUnaligned
            });
        }
        let claim = ClaimedSpace::Cluster { offset, copied };
        Inspected {
            offset,
            claim,
            flaws,
        }
    }

    fn inspect_compressed(&self, entry: u64, bitmap: u64) -> Inspected {
        let offset_bits = self.compressed_offset_bits();
        let offset = entry & ((1 << offset_bits) - 1);
        let mut flaws = SmallVec::new();
        if entry & COPIED != 0 {
            flaws.push(Flaw::CompressedCopied);
        }
        let claimless = if self.data_file {
            Some(Flaw::CompressedWithDataFile)
        } else {
            (bitmap != 0).then_some(Flaw::CompressedWithBitmap)
        };
        if let Some(flaw) = claimless {
            flaws.push(flaw);
            let claim = ClaimedSpace::Nothing;
            return Inspected {
                offset,
                claim,
                flaws,
            };
        }
        let start = offset;
        let further_sectors = (entry & !(COMPRESSED | COPIED)) >> offset_bits;
        let len = (further_sectors + 1) * SECTOR_BYTES - start % SECTOR_BYTES;
        let claim = ClaimedSpace::Compressed { start, len };
        Inspected {
            offset,
            claim,
            flaws,
        }
    }
}

/// Returns where an L2 entry points, if it is one that points to a cluster.
#[inline]
pub fn offset_of(entry: u64) -> u64 {
    entry & OFFSET_MASK
}

/// Returns the target and the flaws of an L1 entry.
pub fn inspect_l1(entry: u64) -> InspectedTable {
    InspectedTable {
        offset: entry & OFFSET_MASK,
        copied: entry & COPIED != 0,
        reserved: entry & !(COPIED | OFFSET_MASK) != 0,
    }
}

/// Returns the target and the flaws of a refcount table entry.
pub fn inspect_refcount_table(entry: u64) -> InspectedTable {
    InspectedTable {
        offset: entry & REFTABLE_OFFSET_MASK,
        copied: false,
        reserved: entry & !REFTABLE_OFFSET_MASK != 0,
    }
}

/// Returns the entry as QEMU prints it in messages about a compressed cluster: without COPIED.
pub fn without_copied(entry: u64) -> u64 {
    entry & !COPIED
}

#[cfg(test)]
mod tests {
    use super::super::{EntryError, L2Entry};
    use super::*;
    use crate::geometry::Geometry;

    fn expected_plain(format: &EntryFormat, inspected: &Inspected) -> Option<(u64, bool)> {
        match inspected.claim {
            ClaimedSpace::Cluster { offset, copied } if offset != 0 => {
                let is_plain = !format.data_file && inspected.flaws.is_empty();
                is_plain.then_some((offset, copied))
            }
            _ => None,
        }
    }

    /// An entry has flaws exactly where decoding refuses it, but for what decoding may ignore.
    #[test]
    fn flaws_are_what_decoding_refuses() {
        let bits = [
            0,
            1,
            1 << 1,
            1 << 8,
            1 << 9,
            1 << 16,
            1 << 55,
            1 << 56,
            1 << 61,
        ];
        let high = [0, COPIED, COMPRESSED, COPIED | COMPRESSED];
        let bitmaps = [0, 1, 1 << 32, 1 << 32 | 1, 1 << 33 | 1, u64::MAX];
        let mut seen = [0; 2];
        for (extended, data_file, version) in [
            (false, false, 3),
            (false, false, 2),
            (true, false, 3),
            (true, true, 3),
            (false, true, 3),
        ] {
            let format = EntryFormat {
                geometry: Geometry::new(16, 4, extended).unwrap(),
                version,
                data_file,
            };
            for (low, top) in bits
                .iter()
                .flat_map(|a| bits.iter().map(move |b| a | b))
                .flat_map(|low| high.iter().map(move |top| (low, top)))
            {
                for &bitmap in if extended {
                    &bitmaps[..]
                } else {
                    &bitmaps[..1]
                } {
                    let entry = low | top;
                    let decoded = format.decode_l2(entry, bitmap);
                    let inspected = format.inspect_l2(entry, bitmap);
                    let plain = format.plain_clusters().of(entry, bitmap);
                    assert_eq!(plain, expected_plain(&format, &inspected));
                    if inspected.flaws[..] == [Flaw::CompressedWithBitmap] {
                        assert!(decoded.is_ok(), "ignored on read");
                        continue;
                    }
                    if let Err(EntryError::AllocatedAndZero(_)) = decoded {
                        assert!(
                            !inspected.flaws.is_empty() || inspected.claim == ClaimedSpace::Nothing
                        );
                        continue;
                    }
                    let flawless = inspected.flaws.is_empty();
                    seen[usize::from(flawless)] += 1;
                    assert_eq!(
                        decoded.is_ok(),
                        flawless,
                        "{entry:#x} {bitmap:#x} {decoded:?}"
                    );
                    let claim = match decoded {
                        Ok(L2Entry::Compressed(place)) => ClaimedSpace::Compressed {
                            start: place.start,
                            len: place.len,
                        },
                        Ok(L2Entry::Standard(standard)) => match standard.host {
                            Some(host) => ClaimedSpace::Cluster {
                                offset: host.0,
                                copied: standard.copied,
                            },
                            None => ClaimedSpace::Nothing,
                        },
                        Err(_) => continue,
                    };
                    if !(data_file && entry & ZERO != 0) {
                        assert_eq!(inspected.claim, claim, "{entry:#x}");
                    }
                }
            }
        }
        assert!(seen[0] > 100 && seen[1] > 100, "{seen:?}");
    }
}
