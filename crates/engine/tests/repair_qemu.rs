//! Broken images, repaired here and by qemu-img: afterwards both checkers find nothing, and no byte
//! of the guest that QEMU's repair keeps is lost. Then the same with a crash at every write of the
//! repair: the image is no worse, and a second repair completes.
//!
//! Skips loudly where qemu-img and qemu-io are not installed.

#[path = "repair_qemu/bases.rs"]
mod bases;
#[path = "repair_qemu/judge.rs"]
mod judge;
use self::bases::{
    BITMAP, Base, Breaking, CLUSTER, DATA_FILE, EXTENDED, EXTENDED_PACKED, LAZY, OLD, OLD_SNAPSHOT,
    OVERLAY, PACKED, PLAIN, SMALL, SNAPSHOT,
};
use std::sync::Arc;

use self::judge::{Break, judge};
use crate::support::crash::Recorder;
use crate::support::{COMPRESSED, COPIED, block_on, peers_are_installed};
use cowslip::file::BlockFile;
use cowslip::qcow2::inspect::inspect;
use cowslip::qcow2::repair::{self, RepairOptions, Scope};
use cowslip::{Buf, Error};

#[test]
fn refcounts() {
    judge(&[
        ("a leaked cluster", PLAIN, |i| {
            let cluster = i.add_cluster();
            i.count(cluster, 1);
        }),
        ("a count too high", PLAIN, |i| i.count(5, 2)),
        ("a count of 0", PLAIN, |i| i.count(5, 0)),
        ("no refcount block", PLAIN, |i| {
            i.set_word(i.refcount_table(), 0)
        }),
        ("a refcount block that starts no cluster", PLAIN, |i| {
            i.map_word(i.refcount_table(), |e| e | 512)
        }),
        ("a refcount block beyond the end", PLAIN, |i| {
            i.set_word(i.refcount_table(), 1 << 40)
        }),
        ("reserved bits in the refcount table", PLAIN, |i| {
            i.map_word(i.refcount_table(), |e| e | 1)
        }),
        ("a refcount block of zeroes", PLAIN, |i| {
            let at = i.refcount_block() as usize;
            i.bytes[at..at + CLUSTER as usize].fill(0);
        }),
        ("a refcount block of noise", PLAIN, |i| {
            let at = i.refcount_block() as usize;
            i.bytes[at..at + CLUSTER as usize]
                .iter_mut()
                .enumerate()
                .for_each(|(n, b)| {
                    *b = (n * 31 % 251) as u8;
                });
        }),
        ("a refcount block in the place of data", PLAIN, |i| {
            i.set_word(i.refcount_table(), i.entry(0))
        }),
        ("a refcount block in the place of an L2 table", PLAIN, |i| {
            i.set_word(i.refcount_table(), i.l2())
        }),
        ("one refcount block twice", PLAIN, |i| {
            i.set_word(i.refcount_table() + 8, i.refcount_block())
        }),
        ("no refcount table", PLAIN, |i| i.set(56, 4, 0)),
        ("a refcount table beyond the end", PLAIN, |i| {
            i.set_word(48, 1 << 40)
        }),
        ("a refcount table that starts no cluster", PLAIN, |i| {
            i.map_word(48, |o| o | 512)
        }),
        (
            "a refcount table in the place of the L1 table",
            PLAIN,
            |i| i.set_word(48, i.l1()),
        ),
        ("small clusters without counts", SMALL, |i| {
            let at = i.refcount_block() as usize;
            i.bytes[at..at + 4096].fill(0);
        }),
    ]);
}

#[test]
fn refcounts_of_every_width() {
    macro_rules! width {
        ($bits:literal) => {
            Base {
                options: concat!("refcount_bits=", $bits),
                ..PLAIN
            }
        };
    }
    let too_low: Break = |i| i.count(6, 0);
    let too_high: Break = |i| {
        let cluster = i.add_cluster();
        i.count(cluster, 1);
        i.count(cluster - 1, 0);
    };
    let linked: Break = |i| i.set_word(i.l2() + 16, i.word(i.l2()));
    for (base, name) in [
        (width!("1"), "1 bit"),
        (width!("2"), "2 bits"),
        (width!("4"), "4 bits"),
        (width!("8"), "8 bits"),
        (width!("32"), "32 bits"),
        (width!("64"), "64 bits"),
    ] {
        judge(&[
            (name, base, too_low),
            (name, base, too_high),
            (name, base, linked),
        ]);
    }
}

#[test]
fn copied_flags() {
    judge(&[
        ("COPIED missing from an L2 entry", PLAIN, |i| {
            i.l2_entry(0, |e| e & !COPIED)
        }),
        ("COPIED missing from an L1 entry", PLAIN, |i| {
            i.map_word(i.l1(), |e| e & !COPIED)
        }),
        ("COPIED on what a snapshot shares", SNAPSHOT, |i| {
            i.l2_entry(0, |e| e | COPIED)
        }),
        ("COPIED on a table that a snapshot shares", SNAPSHOT, |i| {
            i.map_word(i.l1(), |e| e | COPIED)
        }),
        ("COPIED on compressed data", PACKED, |i| {
            i.l2_entry(1, |e| e | COPIED)
        }),
        ("a count too high, and COPIED by it", PLAIN, |i| {
            i.count(5, 2);
            i.l2_entry(0, |e| e & !COPIED);
        }),
    ]);
}

#[test]
fn data_clusters() {
    judge(&[
        ("one data cluster twice", PLAIN, |i| {
            i.set_word(i.l2() + 8, i.word(i.l2()))
        }),
        ("data that starts no cluster", PLAIN, |i| {
            i.l2_entry(0, |e| e | 512)
        }),
        ("data that starts no cluster, in old images", OLD, |i| {
            i.l2_entry(1, |e| e | 1024)
        }),
        ("reserved bits in an L2 entry", PLAIN, |i| {
            i.l2_entry(0, |e| e | 1 << 57 | 4)
        }),
        ("data beyond the end", PLAIN, |i| {
            i.l2_entry(0, |_| COPIED | 1 << 40)
        }),
        ("data just beyond the end", PLAIN, |i| {
            let end = i.bytes.len() as u64;
            i.l2_entry(0, |_| COPIED | end);
            i.count(6, 0);
            i.set_word(i.refcount_table() + 8, 1 << 40);
        }),
        ("data beyond the end in old images", OLD, |i| {
            i.l2_entry(0, |_| COPIED | 1 << 40)
        }),
        ("data in the place of its L2 table", PLAIN, |i| {
            i.set_word(i.l2() + 160, COPIED | i.l2())
        }),
        ("data in the place of the L1 table", PLAIN, |i| {
            i.set_word(i.l2() + 160, COPIED | i.l1())
        }),
        ("data in the place of the refcount table", PLAIN, |i| {
            i.set_word(i.l2() + 160, COPIED | i.refcount_table())
        }),
        ("data in the place of a refcount block", PLAIN, |i| {
            i.set_word(i.l2() + 160, COPIED | i.refcount_block())
        }),
        ("data in the place of the bitmap directory", BITMAP, |i| {
            i.set_word(i.l2() + 160, COPIED | i.bitmap_directory())
        }),
        ("data in the place of the snapshot table", SNAPSHOT, |i| {
            i.set_word(i.l2() + 160, COPIED | i.snapshots())
        }),
        ("preallocated space that starts no cluster", PLAIN, |i| {
            i.l2_entry(0, |e| e | 513)
        }),
        ("a zero flag in an old image", OLD, |i| {
            i.l2_entry(0, |e| e | 1)
        }),
        ("the file is cut by a cluster", PLAIN, |i| {
            let len = i.bytes.len() - CLUSTER as usize;
            i.bytes.truncate(len);
        }),
        ("the file is cut by two clusters and a half", PLAIN, |i| {
            let len = i.bytes.len() - 5 * CLUSTER as usize / 2;
            i.bytes.truncate(len);
        }),
        ("data beyond the end of an overlay", OVERLAY, |i| {
            i.l2_entry(1, |_| COPIED | 1 << 40)
        }),
        ("a count of 0 in an overlay", OVERLAY, |i| i.count(5, 0)),
    ]);
}

#[test]
fn l1_entries_and_tables() {
    judge(&[
        ("an L1 entry that starts no cluster", PLAIN, |i| {
            i.map_word(i.l1(), |e| e | 512)
        }),
        ("reserved bits in an L1 entry", PLAIN, |i| {
            i.map_word(i.l1(), |e| e | 1 | 1 << 60)
        }),
        ("an L1 entry beyond the end", PLAIN, |i| {
            i.set_word(i.l1(), COPIED | 1 << 40)
        }),
        ("an L1 entry to the refcount table", PLAIN, |i| {
            i.set_word(i.l1(), COPIED | i.refcount_table())
        }),
        ("COPIED alone in an L1 entry", PLAIN, |i| {
            i.set_word(i.l1(), COPIED)
        }),
        ("an L1 entry to the L1 table", PLAIN, |i| {
            i.set_word(i.l1(), COPIED | i.l1())
        }),
        ("an L1 entry to guest data", PLAIN, |i| {
            i.set_word(i.l1(), i.word(i.l2()))
        }),
        ("a second L1 entry to guest data", SMALL, |i| {
            i.set_word(i.l1() + 16, COPIED | i.entry(2))
        }),
        ("one L2 table twice", SMALL, |i| {
            i.set_word(i.l1() + 8, i.word(i.l1()))
        }),
        ("the file is cut before its L2 table", PLAIN, |i| {
            let len = i.l2() as usize;
            i.bytes.truncate(len);
        }),
        ("the file is cut in its L1 table", SMALL, |i| {
            let len = i.l1() as usize + 8;
            i.bytes.truncate(len);
        }),
        ("the file is cut before its L1 table", PLAIN, |i| {
            let len = i.l1() as usize;
            i.bytes.truncate(len);
        }),
        ("the L1 table is beyond the end", PLAIN, |i| {
            i.set_word(40, 1 << 40)
        }),
        (
            "the L1 table is in the place of the refcount table",
            PLAIN,
            |i| i.set_word(40, i.refcount_table()),
        ),
    ]);
}

#[test]
fn compressed_and_extended() {
    judge(&[
        ("compressed data beyond the end", PACKED, |i| {
            i.l2_entry(1, |_| COMPRESSED | 1 << 40)
        }),
        ("a count too low under compressed data", PACKED, |i| {
            i.count(6, 1)
        }),
        ("a count of 0 under compressed data", PACKED, |i| {
            i.count(6, 0)
        }),
        ("a count too high under compressed data", PACKED, |i| {
            i.count(6, 7)
        }),
        (
            "compressed data in the place of the L2 table",
            PACKED,
            |i| {
                let at = i.l2() + 512;
                i.l2_entry(9, |_| COMPRESSED | at)
            },
        ),
        ("a bitmap beside compressed data", EXTENDED_PACKED, |i| {
            i.set_word(i.l2() + 24, 1)
        }),
        ("subclusters allocated and zero", EXTENDED, |i| {
            i.map_word(i.l2() + 8, |b| b | 3 << 32)
        }),
        ("subclusters allocated without space", EXTENDED, |i| {
            i.set_word(i.l2() + 16 * 3 + 8, 2 << 32 | 5)
        }),
        ("the zero flag in an extended entry", EXTENDED, |i| {
            i.map_word(i.l2(), |e| e | 1)
        }),
        ("extended data that starts no cluster", EXTENDED, |i| {
            i.map_word(i.l2(), |e| e | 512)
        }),
        ("extended data beyond the end", EXTENDED, |i| {
            i.set_word(i.l2() + 16, COPIED | 1 << 40)
        }),
        ("compressed data beside a data file", DATA_FILE, |i| {
            i.l2_entry(0, |_| COMPRESSED | 65536)
        }),
        ("another offset in the data file", DATA_FILE, |i| {
            i.l2_entry(1, |_| COPIED | (3 * CLUSTER))
        }),
        ("COPIED missing beside a data file", DATA_FILE, |i| {
            i.l2_entry(16, |e| e & !COPIED)
        }),
        ("a leak beside a data file", DATA_FILE, |i| {
            let cluster = i.add_cluster();
            i.count(cluster, 1);
        }),
    ]);
}

#[test]
fn snapshots() {
    judge(&[
        ("a count too low under a snapshot", SNAPSHOT, |i| {
            i.count(5, 1)
        }),
        ("no counts under a snapshot", OLD_SNAPSHOT, |i| {
            i.set_word(i.refcount_table(), 0)
        }),
        (
            "a snapshot's L1 table that starts no cluster",
            SNAPSHOT,
            |i| i.map_word(i.snapshots(), |o| o | 512),
        ),
        ("a snapshot's L1 table beyond the end", SNAPSHOT, |i| {
            i.set_word(i.snapshots(), 1 << 40)
        }),
        ("a snapshot's L1 table too large", SNAPSHOT, |i| {
            i.set(i.snapshots() + 8, 4, 1 << 30)
        }),
        ("a snapshot's L1 table that is the disk's", SNAPSHOT, |i| {
            i.set_word(i.snapshots(), i.l1())
        }),
        (
            "a snapshot's L1 entry that starts no cluster",
            SNAPSHOT,
            |i| i.map_word(i.word(i.snapshots()), |e| e | 512),
        ),
        ("a snapshot's L1 entry beyond the end", SNAPSHOT, |i| {
            i.set_word(i.word(i.snapshots()), 1 << 40)
        }),
        ("an incomplete snapshot table entry", SNAPSHOT, |i| {
            let at = i.snapshots() as usize;
            let extra = i.get(at as u64 + 36, 4) as usize;
            i.set(at as u64 + 36, 4, 8);
            i.bytes.drain(at + 48..at + 40 + extra);
        }),
        ("too much in a snapshot table entry", SNAPSHOT, |i| {
            i.set(i.snapshots() + 36, 4, 5000)
        }),
        ("a snapshot table beyond the end", SNAPSHOT, |i| {
            i.set_word(64, 1 << 40)
        }),
        ("a snapshot table in the place of data", SNAPSHOT, |i| {
            let at = i.snapshots() as usize;
            let table = i.bytes[at..].to_vec();
            let to = i.entry(16) as usize;
            i.bytes[to..to + table.len()].copy_from_slice(&table);
            i.set_word(64, to as u64);
        }),
    ]);
}

/// A wrong length or offset in the header lets a structure reach over tables by which the disk is
/// read. The repair changes nothing then, also when an opening begins it; the disk can be copied.
#[test]
fn a_structure_that_reaches_over_the_tables_of_the_disk_is_left_alone() {
    let longer_l1: (Base, Break) = (PLAIN, |i| i.set(36, 4, 0x2001));
    let l1_over_snapshots: (Base, Break) = (SNAPSHOT, |i| i.set(36, 4, 0x8001));
    let snapshots_in_l2: (Base, Break) = (SNAPSHOT, |i| i.set_word(64, i.l2()));
    for (base, change) in [longer_l1, l1_over_snapshots, snapshots_in_l2] {
        if !peers_are_installed() {
            return;
        }
        let mut image = base.make();
        let original = judge::contents(&image.bytes, &image);
        change(&mut image);
        image.map_word(72, |bits| bits | 1);
        let still = judge::contents(&image.bytes, &image);
        assert!(still == original, "the disk can be read");
        let file = Recorder::new(image.bytes.clone());
        let shared: Arc<dyn BlockFile> = file.clone();
        let options = RepairOptions::new(Scope::All);
        let refused = block_on(repair::repair(&shared, &options, &mut ()));
        assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
        let opened = judge::try_open_writable(shared, &image);
        assert!(
            opened.is_err(),
            "a dirty image is repaired when it is opened"
        );
        assert!(file.contents() == image.bytes, "nothing is written");
    }
}

/// As QEMU leaves it: the table comes last, and what would pad its last entry is not there.
#[test]
fn a_snapshot_table_that_ends_with_the_file_is_whole() {
    if !peers_are_installed() {
        return;
    }
    let mut paddings = [false; 8];
    for name in [
        "s", "s2", "s23", "s234", "s2345", "s23456", "s234567", "s2345678",
    ] {
        let mut image = PLAIN.make();
        image.img(&["snapshot", "-c", name, "image.qcow2"]);
        let at = image.snapshots();
        let [id, name_bytes, extra] =
            [(12, 2), (14, 2), (36, 4)].map(|(field, len)| image.get(at + field, len));
        let end = at + 40 + extra + id + name_bytes;
        assert!(image.bytes.len() as u64 >= end);
        image.bytes.truncate(end as usize);
        paddings[(end % 8) as usize] = true;

        let file = Recorder::new(image.bytes.clone());
        let shared: Arc<dyn BlockFile> = file.clone();
        let described = block_on(inspect(&shared)).unwrap();
        assert_eq!(described.snapshots.len(), 1);
        assert_eq!(described.snapshots[0].name, name);
        let (verdict, findings) = image.our_check();
        assert_eq!(verdict.exit_code, 0, "{name}: {findings:?}");
        let options = RepairOptions::new(Scope::All);
        let outcome = block_on(repair::repair(&shared, &options, &mut ())).unwrap();
        assert!(outcome.done.is_empty() && file.ops().is_empty());
        let opened = judge::open_writable(shared, &image);
        block_on(opened.write(0, Buf::from(vec![9; 70_000]), Default::default())).unwrap();
        block_on(opened.close()).unwrap();
        image.bytes = file.contents();
        assert_eq!(image.our_check().0.exit_code, 0, "{name}");
        assert_eq!(image.qemu_check().exit_code, 0, "{name}");
        image.img(&["snapshot", "-a", name, "image.qcow2"]);
        image.io(&["read -P 1 0 64k", "read -P 2 64k 64k"]);
    }
    assert_eq!(paddings, [true; 8]);
}

#[test]
fn marks_and_bitmaps() {
    judge(&[
        ("the dirty mark", PLAIN, |i| i.map_word(72, |bits| bits | 1)),
        ("the dirty mark and a count of 0", LAZY, |i| {
            i.map_word(72, |bits| bits | 1);
            i.count(5, 0);
            i.count(6, 0);
        }),
        ("the corrupt mark", PLAIN, |i| {
            i.map_word(72, |bits| bits | 2)
        }),
        ("both marks and a leak", PLAIN, |i| {
            i.map_word(72, |bits| bits | 3);
            let cluster = i.add_cluster();
            i.count(cluster, 1);
        }),
        ("stale bitmaps", BITMAP, |i| i.set_word(88, 0)),
        ("a bitmap in use", BITMAP, |i| {
            let at = i.bitmap_directory();
            i.map_word(at + 8, |word| word | 1);
            i.count(5, 2);
        }),
        ("a bitmap directory elsewhere", BITMAP, |i| {
            i.map_word(i.bitmaps_extension() + 16, |at| at + CLUSTER)
        }),
        ("a bitmap table that starts no cluster", BITMAP, |i| {
            i.map_word(i.bitmap_directory(), |at| at | 512)
        }),
    ]);
}
