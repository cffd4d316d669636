//! Guest offset to cluster to host extent: the image's parts laid over the records of the file they
//! are in. Pure.
//!
//! The sequential read of the guest consists of the data and compressed clusters of this image.
//! Zeroes and data of the layers below are reported but not part of the read; nor are holes of the
//! file, or data that has no place on the device yet.

use std::ops::Range;

use cowslip::qcow2::check::Structure;
use cowslip::qcow2::layout::{Area, Part, PartKind};
use cowslip_queue::fiemap::{Flags, Record};

use crate::interleave::{Neighbours, is_placed};
use crate::sequential::{Piece, Reason, Sequential};

/// Compressed clusters begin at any byte, and are read by sectors.
const SECTOR_BYTES: u64 = 512;

/// Kind of a part of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Data.
    Data,
    /// Compressed data.
    Compressed,
    /// Zeroes.
    Zero,
    /// No data here: the backing file decides.
    Below,
    /// The image's own.
    Metadata(Structure),
}

impl What {
    /// Its name in output.
    pub fn name(self) -> &'static str {
        match self {
            What::Data => "data",
            What::Compressed => "compressed",
            What::Zero => "zero",
            What::Below => "below",
            What::Metadata(structure) => structure_name(structure),
        }
    }
}

/// A structure's name in output.
pub fn structure_name(structure: Structure) -> &'static str {
    match structure {
        Structure::Header => "header",
        Structure::ActiveL1 => "l1",
        Structure::SnapshotL1 => "snapshot-l1",
        Structure::L2 => "l2",
        Structure::RefcountTable => "refcount-table",
        Structure::RefcountBlock => "refcount-block",
        Structure::SnapshotTable => "snapshot-table",
        Structure::Bitmaps => "bitmap",
        Structure::CryptoHeader => "crypto-header",
    }
}

/// A piece that is contiguous in all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// First byte on the disk; metadata has none.
    pub guest: Option<u64>,
    /// Bytes of the disk; of a compressed cluster all of them with each of its pieces.
    pub guest_len: u64,
    /// Kind of the part.
    pub what: What,
    /// Where it is in the file, if it has space there.
    pub file: Option<u64>,
    /// Bytes in the file.
    pub file_len: u64,
    /// Where it is on the device, if the file is no hole there and the place is known.
    pub physical: Option<u64>,
    /// Flags of the file system.
    pub flags: Flags,
}

/// The records of a file, to be asked for ranges.
#[derive(Clone, Copy, Debug)]
pub struct HostMap<'a>(pub &'a [Record]);

impl HostMap<'_> {
    /// The pieces of a range of the file, holes too: offset, length, and the record's part.
    fn split(&self, range: Range<u64>, mut each: impl FnMut(u64, u64, Option<Record>)) {
        let records = self.0;
        let first = records.partition_point(|r| r.logical + r.len <= range.start);
        let mut at = range.start;
        for record in &records[first..] {
            if at >= range.end || record.logical >= range.end {
                break;
            }
            if record.logical > at {
                each(at, record.logical - at, None);
                at = record.logical;
            }
            let end = range.end.min(record.logical + record.len);
            let part = Record {
                logical: at,
                physical: record.physical.saturating_add(at - record.logical),
                len: end - at,
                flags: record.flags,
            };
            each(at, end - at, Some(part));
            at = end;
        }
        if at < range.end {
            each(at, range.end - at, None);
        }
    }

    /// Whether the file has nothing in this range.
    fn is_hole(&self, range: &Range<u64>) -> bool {
        let first = self.0.partition_point(|r| r.logical + r.len <= range.start);
        self.0.get(first).is_none_or(|r| r.logical >= range.end)
    }
}

/// Bytes of the disk in each state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct GuestBytes {
    /// Data.
    pub data: u64,
    /// Compressed, as the guest reads it.
    pub compressed: u64,
    /// Stored for that.
    pub stored: u64,
    /// Zeroes.
    pub zero: u64,
    /// Bytes without data here.
    pub below: u64,
    /// Zeroes and nothing, for which there is space.
    pub reserved: u64,
    /// Data that is a hole in the file.
    pub in_holes: u64,
}

/// Surroundings of the file that guest data is in.
#[derive(Clone, Copy, Debug)]
pub struct Around<'a> {
    /// Its records.
    pub host: HostMap<'a>,
    /// Metadata in it, in the order of the file.
    pub areas: &'a [Area],
    /// Other named files on the device.
    pub neighbours: Option<&'a Neighbours>,
    /// The file's number among them.
    pub number: usize,
}

impl Around<'_> {
    /// Whether metadata fills this range.
    fn is_metadata(&self, range: &Range<u64>) -> bool {
        let end = |area: &Area| area.offset + area.len;
        let first = self.areas.partition_point(|a| end(a) <= range.start);
        let mut at = range.start;
        for area in &self.areas[first..] {
            if at >= range.end || area.offset > at {
                break;
            }
            at = at.max(end(area));
        }
        at >= range.end
    }

    /// Why a run ends between two pieces.
    pub fn reason(&self, last: &Piece, next: &Piece) -> Reason {
        let end = last.file + last.len;
        let adjoins = next.file <= end && end - next.file <= last.slack;
        if adjoins {
            let other = self
                .neighbours
                .and_then(|neighbours| neighbours.other_at(last.end(), self.number));
            return other.map_or(Reason::HostFragmented, Reason::Interleaved);
        }
        let gap = end..next.file;
        if gap.is_empty() {
            Reason::OutOfOrder
        } else if self.is_metadata(&gap) {
            Reason::Metadata
        } else if self.host.is_hole(&gap) {
            Reason::Hole
        } else {
            Reason::OutOfOrder
        }
    }
}

/// The join, part by part in the guest's order.
#[derive(Debug)]
pub struct Join<'a> {
    around: Around<'a>,
    /// Bytes in each state.
    pub bytes: GuestBytes,
    /// Pieces that are contiguous in guest and file.
    pub parts: u64,
    /// The guest's sequential read.
    pub read: Sequential,
}

impl<'a> Join<'a> {
    /// Returns a join without any pieces yet.
    pub fn new(around: Around<'a>) -> Join<'a> {
        Join {
            around,
            bytes: GuestBytes::default(),
            parts: 0,
            read: Sequential::default(),
        }
    }

    /// Adds the next part of the disk, and reports each of its pieces.
    pub fn push(&mut self, part: &Part, mut report: impl FnMut(&Joined)) {
        let (what, place) = match part.kind {
            PartKind::Data(file) => (What::Data, Some((file, part.len))),
            PartKind::Compressed { start, len } => (What::Compressed, Some((start, len))),
            PartKind::Zero { space } => (What::Zero, space.map(|file| (file, part.len))),
            PartKind::Below { space } => (What::Below, space.map(|file| (file, part.len))),
        };
        self.count(part, what, place.map_or(0, |(_, len)| len));
        let Some((file, len)) = place else {
            report(&Joined {
                guest: Some(part.start),
                guest_len: part.len,
                what,
                file: None,
                file_len: 0,
                physical: None,
                flags: Flags::default(),
            });
            return;
        };
        let is_read = matches!(what, What::Data | What::Compressed);
        let host = self.around.host;
        host.split(file..file + len, |at, len, record| {
            let placed = record.filter(is_placed);
            let joined = Joined {
                guest: Some(match what {
                    What::Compressed => part.start,
                    _ => part.start + (at - file),
                }),
                guest_len: match what {
                    What::Compressed => part.len,
                    _ => len,
                },
                what,
                file: Some(at),
                file_len: len,
                physical: placed.map(|record| record.physical),
                flags: record.map_or(Flags::default(), |record| record.flags),
            };
            report(&joined);
            if is_read {
                self.read(&joined, record.is_none());
            }
        });
    }

    fn read(&mut self, joined: &Joined, in_hole: bool) {
        if in_hole {
            self.bytes.in_holes += joined.file_len;
        }
        let (Some(physical), Some(file)) = (joined.physical, joined.file) else {
            return;
        };
        let slack = match joined.what {
            What::Compressed => SECTOR_BYTES - 1,
            _ => 0,
        };
        let slack = match joined.flags.has(Flags::ENCODED) {
            true => joined.file_len,
            false => slack,
        };
        let piece = Piece {
            file,
            physical,
            len: joined.file_len,
            slack,
        };
        let around = self.around;
        self.read
            .push(piece, |last, next| around.reason(last, next));
    }

    fn count(&mut self, part: &Part, what: What, stored: u64) {
        self.parts += 1;
        let bytes = &mut self.bytes;
        match what {
            What::Data => bytes.data += part.len,
            What::Compressed => {
                bytes.compressed += part.len;
                bytes.stored += stored;
            }
            What::Zero => bytes.zero += part.len,
            What::Below => bytes.below += part.len,
            What::Metadata(_) => unreachable!("metadata is no part of the disk"),
        }
        if matches!(what, What::Zero | What::Below) {
            bytes.reserved += stored;
        }
    }

    /// Reports the pieces of the image's metadata, which lies in the file of these records.
    pub fn metadata(areas: &[Area], host: HostMap<'_>, mut report: impl FnMut(&Joined)) {
        for area in areas {
            host.split(area.offset..area.offset + area.len, |at, len, record| {
                let placed = record.filter(is_placed);
                report(&Joined {
                    guest: None,
                    guest_len: 0,
                    what: What::Metadata(area.structure),
                    file: Some(at),
                    file_len: len,
                    physical: placed.map(|record| record.physical),
                    flags: record.map_or(Flags::default(), |record| record.flags),
                });
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    fn record(logical: u64, physical: u64, len: u64) -> Record {
        Record {
            logical: logical * KIB,
            physical: physical * KIB,
            len: len * KIB,
            flags: Flags::default(),
        }
    }

    fn data(start: u64, file: u64, len: u64) -> Part {
        Part {
            start: start * KIB,
            len: len * KIB,
            kind: PartKind::Data(file * KIB),
        }
    }

    fn around<'a>(records: &'a [Record], areas: &'a [Area]) -> Around<'a> {
        Around {
            host: HostMap(records),
            areas,
            neighbours: None,
            number: 0,
        }
    }

    fn joined(around: Around<'_>, parts: &[Part]) -> (Sequential, Vec<Joined>) {
        let mut join = Join::new(around);
        let mut pieces = Vec::new();
        for part in parts {
            join.push(part, |piece| pieces.push(*piece));
        }
        (join.read, pieces)
    }

    fn reasons(read: &Sequential) -> Vec<(Reason, u64)> {
        let reasons = read.reasons.iter();
        reasons
            .map(|&(reason, breaks)| (reason, breaks.runs))
            .collect()
    }

    #[test]
    fn pieces_are_contiguous_in_all_layers() {
        let records = [
            record(0, 1000, 100),
            record(100, 5000, 50),
            record(200, 0, 10),
        ];
        let parts = [data(0, 90, 20), data(20, 140, 70)];
        let (read, pieces) = joined(around(&records, &[]), &parts);
        let found: Vec<_> = pieces
            .iter()
            .map(|p| {
                (
                    p.guest.unwrap() / KIB,
                    p.file_len / KIB,
                    p.physical.map(|at| at / KIB),
                )
            })
            .collect();
        let expected = [
            (0, 10, Some(1090)),
            (10, 10, Some(5000)),
            (20, 10, Some(5040)),
            (30, 50, None),
            (80, 10, Some(0)),
        ];
        assert_eq!(found, expected);
        assert_eq!(read.runs, 4);
        assert_eq!(read.bytes, 40 * KIB, "a hole is not read");
    }

    #[test]
    fn runs_end_for_reasons() {
        let areas = [Area {
            offset: 64 * KIB,
            len: 64 * KIB,
            structure: Structure::L2,
        }];
        let one = [record(0, 1000, 1000)];
        let metadata = [data(0, 0, 64), data(64, 128, 64)];
        let (read, _) = joined(around(&one, &areas), &metadata);
        assert_eq!(reasons(&read), [(Reason::Metadata, 1)]);
        assert_eq!(read.seeks, 0, "over metadata it reads on");
        let backwards = [data(0, 128, 64), data(64, 0, 64)];
        let (read, _) = joined(around(&one, &[]), &backwards);
        assert_eq!(reasons(&read), [(Reason::OutOfOrder, 1)]);
        assert_eq!(read.seeks, 1);
        let (read, _) = joined(around(&one, &[]), &metadata);
        assert_eq!(reasons(&read), [(Reason::OutOfOrder, 1)]);
        let sparse = [record(0, 1000, 64), record(128, 1128, 64)];
        let (read, _) = joined(around(&sparse, &[]), &metadata);
        assert_eq!(reasons(&read), [(Reason::Hole, 1)]);
        let apart = [record(0, 1000, 64), record(64, 9000, 64)];
        let (read, _) = joined(around(&apart, &[]), &[data(0, 0, 128)]);
        assert_eq!(reasons(&read), [(Reason::HostFragmented, 1)]);
        let between = [record(0, 1064, 64)];
        let neighbours = Neighbours::of([(0, &apart[..]), (7, &between[..])]);
        let beside = Around {
            neighbours: Some(&neighbours),
            ..around(&apart, &[])
        };
        let (read, _) = joined(beside, &[data(0, 0, 128)]);
        assert_eq!(reasons(&read), [(Reason::Interleaved(7), 1)]);
    }

    #[test]
    fn compressed_clusters_that_share_a_sector_are_one_run() {
        let compressed = |start: u64, at: u64, len| Part {
            start: start * KIB,
            len: 64 * KIB,
            kind: PartKind::Compressed { start: at, len },
        };
        let one = [record(0, 1000, 1000)];
        let parts = [compressed(0, 1000, 536), compressed(64, 1300, 236)];
        let mut join = Join::new(around(&one, &[]));
        for part in &parts {
            join.push(part, |_| {});
        }
        assert_eq!((join.read.runs, join.read.seeks), (1, 0));
        assert_eq!(join.bytes.compressed, 128 * KIB);
        assert_eq!(join.bytes.stored, 772);
    }

    /// A random layout, against a map of every byte.
    #[test]
    fn pieces_agree_with_a_look_at_every_byte() {
        let mut state = 11_u64;
        let mut next = |bound: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % bound
        };
        for _ in 0..100 {
            let mut records = Vec::new();
            let mut at = 0;
            for _ in 0..next(10) {
                at += next(3) * KIB;
                let len = (next(5) + 1) * KIB;
                records.push(Record {
                    logical: at,
                    physical: next(1000) * KIB,
                    len,
                    flags: Flags::default(),
                });
                at += len;
            }
            let start = next(40);
            let part = data(0, start, next(20) + 1);
            let (_, pieces) = joined(around(&records, &[]), &[part]);
            let mut guest = 0;
            for piece in &pieces {
                assert_eq!(piece.guest, Some(guest));
                for byte in (0..piece.file_len).step_by(KIB as usize) {
                    let file = start * KIB + guest + byte;
                    let holder = records
                        .iter()
                        .find(|r| (r.logical..r.logical + r.len).contains(&file));
                    let place = holder.map(|r| r.physical + file - r.logical);
                    assert_eq!(piece.physical.map(|at| at + byte), place);
                }
                guest += piece.file_len;
            }
            assert_eq!(guest, part.len);
        }
    }
}
