//! Entries of the snapshot table (qcow2.rst, "Snapshots").
//!
//! | bytes | of an entry |
//! | --- | --- |
//! | 0-39 | fixed part: L1 table, lengths, dates |
//! | 40-.. | extra data, then ID, then name; padded to 8 bytes |

use super::super::geometry::Geometry;
use super::super::header::L1_BYTES_MAX;
use super::big_endian;

/// A flaw of a snapshot's L1 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotL1Flaw {
    /// It does not start a cluster.
    Unaligned {
        /// Offset of the L1 table in the file.
        l1_offset: u64,
    },
    /// It is larger than any image needs.
    TooLarge {
        /// Number of entries that the header gives the L1 table.
        l1_size: u32,
    },
}

/// Bytes of the fixed part.
pub const FIXED_BYTES: usize = 40;
/// The most extra data that QEMU accepts.
pub const EXTRA_BYTES_MAX: u32 = 1024;
/// Extra data that version 3 demands: the size of the VM state and that of the disk.
pub const EXTRA_BYTES_V3: u32 = 16;
/// Extra data that has a meaning: the instruction count, too.
pub const EXTRA_BYTES_KNOWN: u32 = 24;
/// The largest snapshot table that QEMU accepts.
pub const TABLE_BYTES_MAX: u64 = 64 << 20;

/// The fixed part of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// Where the L1 table is.
    pub l1_offset: u64,
    /// Entries of the L1 table.
    pub l1_size: u32,
    /// Length of the ID.
    pub id_bytes: u16,
    /// Length of the name.
    pub name_bytes: u16,
    /// When it was taken, in seconds since the epoch.
    pub date_sec: u32,
    /// The rest of that time.
    pub date_nsec: u32,
    /// How long the guest had run.
    pub vm_clock_nsec: u64,
    /// Bytes of VM state, unless the extra data says so.
    pub vm_state_bytes: u32,
    /// Length of the extra data.
    pub extra_bytes: u32,
}

impl Fixed {
    /// Decodes the first [`FIXED_BYTES`] bytes of an entry.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn decode(bytes: &[u8]) -> Fixed {
        let u16_at = |at: usize| big_endian(&bytes[at..at + 2]) as u16;
        let u32_at = |at: usize| big_endian(&bytes[at..at + 4]) as u32;
        Fixed {
            l1_offset: big_endian(&bytes[..8]),
            l1_size: u32_at(8),
            id_bytes: u16_at(12),
            name_bytes: u16_at(14),
            date_sec: u32_at(16),
            date_nsec: u32_at(20),
            vm_clock_nsec: big_endian(&bytes[24..32]),
            vm_state_bytes: u32_at(32),
            extra_bytes: u32_at(36),
        }
    }

    /// The bytes of the fixed part.
    pub fn encode(&self) -> [u8; FIXED_BYTES] {
        let mut out = [0; FIXED_BYTES];
        out[..8].copy_from_slice(&self.l1_offset.to_be_bytes());
        out[8..12].copy_from_slice(&self.l1_size.to_be_bytes());
        out[12..14].copy_from_slice(&self.id_bytes.to_be_bytes());
        out[14..16].copy_from_slice(&self.name_bytes.to_be_bytes());
        out[16..20].copy_from_slice(&self.date_sec.to_be_bytes());
        out[20..24].copy_from_slice(&self.date_nsec.to_be_bytes());
        out[24..32].copy_from_slice(&self.vm_clock_nsec.to_be_bytes());
        out[32..36].copy_from_slice(&self.vm_state_bytes.to_be_bytes());
        out[36..].copy_from_slice(&self.extra_bytes.to_be_bytes());
        out
    }

    /// Bytes before the ID, from the start of the entry.
    pub fn names_start(&self) -> u64 {
        FIXED_BYTES as u64 + u64::from(self.extra_bytes)
    }

    /// Length of ID and name.
    pub fn names_bytes(&self) -> u64 {
        u64::from(self.id_bytes) + u64::from(self.name_bytes)
    }

    /// Length of the entry with its padding: the next one is there.
    pub fn entry_bytes(&self) -> u64 {
        (self.names_start() + self.names_bytes()).next_multiple_of(8)
    }

    /// Returns the flaw, if any, that makes it impossible to read its L1 table.
    pub fn l1_flaw(&self, geometry: &Geometry) -> Option<SnapshotL1Flaw> {
        let (l1_offset, l1_size) = (self.l1_offset, self.l1_size);
        if !geometry.is_cluster_aligned(l1_offset) {
            Some(SnapshotL1Flaw::Unaligned { l1_offset })
        } else if u64::from(l1_size) * 8 > L1_BYTES_MAX {
            Some(SnapshotL1Flaw::TooLarge { l1_size })
        } else {
            None
        }
    }
}

/// The fields of the extra data that are present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extra {
    /// Bytes of VM state.
    pub vm_state_bytes: Option<u64>,
    /// Size of the disk.
    pub disk_bytes: Option<u64>,
    /// Instructions that the guest had run, if they were counted.
    pub icount: Option<u64>,
}

impl Extra {
    /// Decodes the extra data, as far as it reaches.
    pub fn decode(bytes: &[u8]) -> Extra {
        let icount = bytes.get(16..24).map(big_endian);
        Extra {
            vm_state_bytes: bytes.get(..8).map(big_endian),
            disk_bytes: bytes.get(8..16).map(big_endian),
            icount: icount.filter(|&count| count != u64::MAX),
        }
    }
}

/// Extra data with all that has a meaning; what it already says stays. Version 3 demands the first
/// two of its three numbers.
pub fn completed_extra(extra: &[u8], vm_state_bytes: u32, disk_bytes: u64) -> Vec<u8> {
    // No instructions were counted.
    let full = [u64::from(vm_state_bytes), disk_bytes, u64::MAX].map(u64::to_be_bytes);
    let said = match extra.len() < EXTRA_BYTES_KNOWN as usize {
        true => &extra[..extra.len() / 8 * 8],
        false => extra,
    };
    let lacking = full.as_flattened().get(said.len()..);
    [said, lacking.unwrap_or_default()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_extra_data_lacks_is_added_and_what_it_says_stays() {
        let numbers =
            |numbers: &[u64]| -> Vec<u8> { numbers.iter().flat_map(|n| n.to_be_bytes()).collect() };
        let none = u64::MAX;
        for (extra, expected) in [
            (vec![], numbers(&[7, 9, none])),
            (numbers(&[1]), numbers(&[1, 9, none])),
            ([numbers(&[1]), vec![5; 4]].concat(), numbers(&[1, 9, none])),
            (numbers(&[1, 2]), numbers(&[1, 2, none])),
            (numbers(&[1, 2, 3]), numbers(&[1, 2, 3])),
            (
                [numbers(&[1, 2, 3]), vec![4; 5]].concat(),
                [numbers(&[1, 2, 3]), vec![4; 5]].concat(),
            ),
        ] {
            assert_eq!(completed_extra(&extra, 7, 9), expected, "{extra:?}");
        }
    }

    #[test]
    fn an_encoded_entry_decodes_to_itself() {
        let fixed = Fixed {
            l1_offset: 0x1122_3344_5566_7788,
            l1_size: 0x99aa_bbcc,
            id_bytes: 0x0102,
            name_bytes: 0x0304,
            date_sec: 5,
            date_nsec: 6,
            vm_clock_nsec: 7 << 40,
            vm_state_bytes: 8,
            extra_bytes: 16,
        };
        assert_eq!(Fixed::decode(&fixed.encode()), fixed);
        assert_eq!(fixed.names_start(), 56);
        assert_eq!(fixed.entry_bytes(), 56 + 0x0406 + 2);
    }

    #[test]
    fn extra_data_says_what_it_has_room_for() {
        let mut bytes = [0; 24];
        bytes[7] = 1;
        bytes[15] = 2;
        bytes[16..].fill(0xff);
        let extra = Extra::decode(&bytes);
        let expected = Extra {
            vm_state_bytes: Some(1),
            disk_bytes: Some(2),
            icount: None,
        };
        assert_eq!(extra, expected);
        bytes[23] = 3;
        assert_eq!(Extra::decode(&bytes).icount, Some(0xffff_ffff_ffff_ff03));
        assert_eq!(Extra::decode(&bytes[..15]).disk_bytes, None);
        assert_eq!(Extra::decode(&[]).vm_state_bytes, None);
    }
}
