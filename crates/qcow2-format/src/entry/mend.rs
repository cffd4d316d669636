//! Corrects broken table entries, for repair.
//!
//! Pure. One call corrects one flaw, so that each is reported; the caller repeats it until there is
//! none. Data is kept wherever the entry still says where it is. A cluster whose data is lost reads
//! as zeroes, never as older data of a backing file; only version 2, which has no zero flag, leaves
//! such a cluster unallocated.

use super::inspect::{self, ClaimedSpace, Flaw};
use super::{COMPRESSED, COPIED, EntryFormat, OFFSET_MASK, ZERO};

/// The facts that decide whether an entry is valid, besides its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// Bytes of the file: no cluster starts there or beyond.
    pub file_bytes: u64,
    /// Where the guest has the cluster: there it is in an external data file.
    pub guest_offset: u64,
}

/// Why an entry is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// See [`Flaw`].
    Flaw(Flaw),
    /// Its target begins beyond the end of the file.
    Beyond,
    /// An L2 table or data cluster that does not start a cluster.
    Unaligned,
    /// Its cluster of an external data file is not the guest's.
    DataFileOffset,
    /// The table that it points to is that of another L1 entry, beside an external data file.
    OthersTable,
    /// The table that it points to is another structure.
    NoTable,
}

/// An entry as repair writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mend {
    /// Value to store.
    pub entry: u64,
    /// Its bitmap, 0 without extended L2.
    pub bitmap: u64,
    /// The flaw that is corrected.
    pub wrong: Wrong,
    /// Data that the entry may have meant is no longer reached.
    pub loses: bool,
    /// The cluster that the entry may have meant, if nothing else uses it.
    pub candidate: Option<u64>,
}

const ALLOCATED: u64 = 0xffff_ffff;

impl EntryFormat {
    /// The first thing that is wrong with an L2 entry, set right; `None` for a sound one.
    pub fn mend_l2(&self, entry: u64, bitmap: u64, around: &Surroundings) -> Option<Mend> {
        if entry == 0 && bitmap == 0 {
            return None;
        }
        if entry & COMPRESSED != 0 {
            return self.mend_compressed(entry, bitmap, around);
        }
        let inspected = self.inspect_l2(entry, bitmap);
        if let Some(&flaw) = inspected.flaws.first() {
            return Some(self.mend_flaw(entry, bitmap, flaw, around));
        }
        let ClaimedSpace::Cluster { offset, .. } = inspected.claim else {
            return None;
        };
        if self.data_file {
            return (offset != around.guest_offset).then_some(Mend {
                entry: entry & !OFFSET_MASK | around.guest_offset | COPIED,
                bitmap,
                wrong: Wrong::DataFileOffset,
                loses: false,
                candidate: None,
            });
        }
        (offset >= around.file_bytes).then(|| self.without_space(entry, bitmap, Wrong::Beyond))
    }

    fn mend_compressed(&self, entry: u64, bitmap: u64, around: &Surroundings) -> Option<Mend> {
        let inspected = self.inspect_l2(entry, bitmap);
        let beyond = |offset: u64, len: u64| {
            let end = offset.saturating_add(len);
            offset >= around.file_bytes
                || end.saturating_sub(around.file_bytes) >= self.geometry.cluster_bytes()
        };
        let kept = |entry, flaw| Mend {
            entry,
            bitmap: 0,
            wrong: Wrong::Flaw(flaw),
            loses: false,
            candidate: None,
        };
        match (inspected.flaws.first(), inspected.claim) {
            (Some(&flaw @ Flaw::CompressedCopied), _) => Some(Mend {
                bitmap,
                ..kept(entry & !COPIED, flaw)
            }),
            // The specification ignores the bitmap: the data is good.
            (Some(&flaw @ Flaw::CompressedWithBitmap), _) => Some(kept(entry, flaw)),
            (Some(&flaw), _) => Some(self.zeroes(ALLOCATED, Wrong::Flaw(flaw))),
            (None, ClaimedSpace::Compressed { start, len }) if beyond(start, len) => {
                Some(self.zeroes(ALLOCATED, Wrong::Beyond))
            }
            (None, _) => None,
        }
    }

    fn mend_flaw(&self, entry: u64, bitmap: u64, flaw: Flaw, around: &Surroundings) -> Mend {
        let wrong = Wrong::Flaw(flaw);
        let kept = |entry, bitmap| Mend {
            entry,
            bitmap,
            wrong,
            loses: false,
            candidate: None,
        };
        match flaw {
            Flaw::Reserved => kept(entry & (COPIED | OFFSET_MASK | ZERO), bitmap),
            Flaw::ZeroFlag => kept(entry & !ZERO, bitmap),
            // Data is kept: zeroes can be written again.
            Flaw::AllocatedAndZero => kept(entry, bitmap & !(bitmap << 32)),
            Flaw::AllocatedWithoutOffset if self.data_file => {
                kept(entry | COPIED | around.guest_offset, bitmap)
            }
            Flaw::DataUnaligned if self.data_file => Mend {
                wrong: Wrong::DataFileOffset,
                ..kept(entry & !OFFSET_MASK | around.guest_offset | COPIED, bitmap)
            },
            Flaw::DataUnaligned => {
                let offset = entry & OFFSET_MASK;
                let candidate = offset & !(self.geometry.cluster_bytes() - 1);
                Mend {
                    candidate: (candidate != 0).then_some(candidate),
                    ..self.without_space(entry, bitmap, Wrong::Unaligned)
                }
            }
            Flaw::PreallocatedUnaligned => Mend {
                loses: false,
                ..self.without_space(entry, bitmap, wrong)
            },
            Flaw::AllocatedWithoutOffset
            | Flaw::CompressedCopied
            | Flaw::CompressedWithDataFile
            | Flaw::CompressedWithBitmap => self.without_space(entry, bitmap, wrong),
        }
    }

    /// Returns a standard entry without its space: allocated subclusters read as zeroes.
    fn without_space(&self, entry: u64, bitmap: u64, wrong: Wrong) -> Mend {
        if !self.geometry.extended_l2() {
            let loses = entry & ZERO == 0;
            return Mend {
                loses,
                ..self.zeroes(ALLOCATED, wrong)
            };
        }
        let allocated = bitmap & ALLOCATED;
        Mend {
            entry: 0,
            bitmap: bitmap & !ALLOCATED | allocated << 32,
            wrong,
            loses: allocated != 0,
            candidate: None,
        }
    }

    fn zeroes(&self, subclusters: u64, wrong: Wrong) -> Mend {
        let (entry, bitmap) = match (self.geometry.extended_l2(), self.version) {
            (true, _) => (0, subclusters << 32),
            (false, 2) => (0, 0),
            (false, _) => (ZERO, 0),
        };
        Mend {
            entry,
            bitmap,
            wrong,
            loses: true,
            candidate: None,
        }
    }

    /// An entry that points to another cluster, by its offset in the file: of a copy.
    pub fn moved(&self, entry: u64, from: u64, to: u64) -> u64 {
        if entry & COMPRESSED != 0 {
            return entry - from + to;
        }
        entry & !OFFSET_MASK | to
    }

    /// An entry with the cluster that it may have meant.
    pub fn aligned(&self, entry: u64, candidate: u64) -> u64 {
        entry & !OFFSET_MASK | candidate
    }

    /// An L1 entry or a standard L2 entry with COPIED as the count says.
    pub fn with_copied(&self, entry: u64, copied: bool) -> u64 {
        if copied {
            entry | COPIED
        } else {
            entry & !COPIED
        }
    }

    /// As [`EntryFormat::with_copied`], for L2 entries of any kind: compressed ones have no COPIED.
    pub fn with_copied_if_standard(&self, entry: u64, copied: bool) -> u64 {
        let compressed = entry & COMPRESSED != 0;
        if compressed {
            entry
        } else {
            self.with_copied(entry, copied)
        }
    }

    /// The first thing that is wrong with an L1 entry, set right; `None` for a sound one.
    pub fn mend_l1(&self, entry: u64, file_bytes: u64) -> Option<Mend> {
        let table = inspect::inspect_l1(entry);
        let gone = |wrong, candidate| Mend {
            entry: 0,
            bitmap: 0,
            wrong,
            loses: true,
            candidate,
        };
        if table.reserved {
            return Some(Mend {
                entry: entry & (COPIED | OFFSET_MASK),
                loses: false,
                ..gone(Wrong::Flaw(Flaw::Reserved), None)
            });
        }
        if table.offset == 0 {
            // COPIED of nothing; a check takes it for a table in the header's place.
            return (entry != 0).then(|| Mend {
                loses: false,
                ..gone(Wrong::NoTable, None)
            });
        }
        if !self.geometry.is_cluster_aligned(table.offset) {
            let candidate = table.offset & !(self.geometry.cluster_bytes() - 1);
            let candidate = (candidate != 0).then_some(candidate);
            return Some(gone(Wrong::Unaligned, candidate));
        }
        (table.offset >= file_bytes).then(|| gone(Wrong::Beyond, None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Geometry;

    const AROUND: Surroundings = Surroundings {
        file_bytes: 1 << 24,
        guest_offset: 3 << 16,
    };

    fn formats() -> Vec<EntryFormat> {
        [
            (false, false, 3),
            (false, false, 2),
            (true, false, 3),
            (true, true, 3),
            (false, true, 3),
        ]
        .into_iter()
        .map(|(extended, data_file, version)| EntryFormat {
            geometry: Geometry::new(16, 4, extended).unwrap(),
            version,
            data_file,
        })
        .collect()
    }

    /// Mending ends, and its result decodes.
    #[test]
    fn mended_entries_decode() {
        let bits = [
            0,
            1,
            2,
            1 << 8,
            1 << 9,
            1 << 16,
            1 << 23,
            1 << 24,
            1 << 55,
            1 << 56,
            1 << 61,
        ];
        let bitmaps = [0, 1, 1 << 32, 1 << 32 | 1, 1 << 33 | 1, u64::MAX];
        let mut mended = 0;
        for format in formats() {
            for low in bits.iter().flat_map(|a| bits.iter().map(move |b| a | b)) {
                for top in [0, COPIED, COMPRESSED, COPIED | COMPRESSED] {
                    for bitmap in bitmaps {
                        let extended = format.geometry.extended_l2();
                        let (mut entry, mut map) = (low | top, if extended { bitmap } else { 0 });
                        let mut rounds = 0;
                        while let Some(mend) = format.mend_l2(entry, map, &AROUND) {
                            assert_ne!((mend.entry, mend.bitmap), (entry, map), "{mend:x?}");
                            (entry, map) = (mend.entry, mend.bitmap);
                            rounds += 1;
                            assert!(rounds < 8, "{low:x} {top:x} {bitmap:x}");
                        }
                        mended += u32::from(rounds > 0);
                        format.decode_l2(entry, map).unwrap();
                        if let ClaimedSpace::Cluster { offset, .. } =
                            format.inspect_l2(entry, map).claim
                        {
                            let end = if format.data_file { u64::MAX } else { 1 << 24 };
                            assert!(offset < end);
                        }
                    }
                }
            }
        }
        assert!(mended > 1000);
    }

    /// The location of an entry's data is kept, unless the data cannot be there.
    #[test]
    fn data_is_kept() {
        let [plain, old, extended, ..] = &formats()[..] else {
            unreachable!()
        };
        let at = 5 << 16;
        let mended = |format: &EntryFormat, entry, bitmap| {
            format
                .mend_l2(entry, bitmap, &AROUND)
                .map(|m| (m.entry, m.bitmap, m.loses))
        };
        assert_eq!(mended(plain, COPIED | at, 0), None);
        assert_eq!(
            mended(plain, COPIED | at | 1 << 57, 0),
            Some((COPIED | at, 0, false))
        );
        assert_eq!(mended(old, at | ZERO, 0), Some((at, 0, false)));
        assert_eq!(mended(plain, 1 << 24, 0), Some((ZERO, 0, true)));
        assert_eq!(mended(old, 1 << 24, 0), Some((0, 0, true)));
        assert_eq!(
            mended(extended, at, 3 << 32 | 6),
            Some((at, 1 << 32 | 6, false))
        );
        assert_eq!(mended(extended, 0, 3 << 32 | 4), Some((0, 7 << 32, true)));
        assert_eq!(
            mended(extended, COMPRESSED | at, 9),
            Some((COMPRESSED | at, 0, false))
        );
        let unaligned = plain.mend_l2(COPIED | at | 512, 0, &AROUND).unwrap();
        assert_eq!((unaligned.candidate, unaligned.loses), (Some(at), true));
    }
}
