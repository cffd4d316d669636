//! The header: the mark of damage, and what is set right before the first write of a session.

use std::io;
use std::sync::Arc;

use super::disk::{Disk, Op};
use super::space::qcow2_on;
use super::{EIO, block_on};

use crate::Error;
use crate::commit::state::Ready;
use crate::create::{CreateOptions, Version, create};
use crate::header::{Header, autoclear, incompatible};

/// An unknown autoclear bit.
const UNKNOWN: u64 = 1 << 40;

fn new_disk(version: Version) -> Arc<Disk> {
    let disk = Disk::new(1);
    let options = CreateOptions {
        version,
        cluster_size: 4096,
        ..CreateOptions::new(1 << 20)
    };
    block_on(create(disk.clone(), None, &options)).expect("there is room");
    disk
}

fn header_of(disk: &Disk) -> Header {
    let bytes = disk.contents();
    Header::parse(&bytes[..4096], bytes.len() as u64, "a.qcow2").expect("it is whole")
}

/// Writes and flushes.
fn changes(disk: &Disk) -> Vec<Op> {
    let log = disk.take_log().into_iter();
    log.filter(|op| matches!(op, Op::Write(_) | Op::Flush))
        .collect()
}

#[test]
fn an_image_is_marked_where_damage_was_met_and_nowhere_else() {
    let damage = |what: &str| Error::Invalid(what.to_string());
    for (version, damaged) in [
        (Version::V3, true),
        (Version::V3, false),
        (Version::V2, true),
        (Version::V2, false),
    ] {
        let disk = new_disk(version);
        let image = qcow2_on(&disk);
        let before = disk.contents();
        if damaged {
            let damage = damage("guest data is mapped to metadata");
            image.lock().health.latch_for_damage(damage);
        }
        disk.take_log();
        block_on(image.mark_corrupt());
        if version == Version::V3 && damaged {
            let header = header_of(&disk);
            assert_eq!(header.incompatible_features, incompatible::CORRUPT);
            assert_eq!(image.header(), header, "nothing but the bit has changed");
            assert_eq!(changes(&disk), [Op::Write(0..112), Op::Flush]);
            assert!(before[112..] == disk.contents()[112..]);
            block_on(image.mark_corrupt());
        } else {
            assert!(disk.contents() == before);
        }
        assert_eq!(changes(&disk), [], "{version:?}, damaged: {damaged}");
    }
}

/// A mark that may not have reached the disk is made again by the next request that meets the
/// damage.
#[test]
fn a_mark_that_fails_is_made_again() {
    for fails in [Op::Write(0..112), Op::Flush] {
        let disk = new_disk(Version::V3);
        let image = qcow2_on(&disk);
        image
            .lock()
            .health
            .latch_for_damage(Error::Invalid("damage".to_string()));
        disk.fail(move |op| (*op == fails).then(|| io::Error::from_raw_os_error(EIO)));
        block_on(image.mark_corrupt());
        assert!(!image.header().is_corrupt());
        disk.mend();
        disk.take_log();
        block_on(image.mark_corrupt());
        assert_eq!(changes(&disk), [Op::Write(0..112), Op::Flush]);
        assert!(image.header().is_corrupt() && header_of(&disk).is_corrupt());
    }
}

/// Data that another process left unflushed is made durable first; then structures that are not
/// maintained are marked so, durably; once.
#[test]
fn before_its_first_write_a_session_flushes_and_clears_what_it_does_not_maintain() {
    for (set, stays) in [
        (0, 0),
        (autoclear::BITMAPS, autoclear::BITMAPS),
        (autoclear::DATA_FILE_RAW, autoclear::DATA_FILE_RAW),
        (UNKNOWN | autoclear::DATA_FILE_RAW, autoclear::DATA_FILE_RAW),
    ] {
        let disk = new_disk(Version::V3);
        let image = qcow2_on(&disk);
        // Images that have all of these have more besides; only what becomes of the bits matters.
        image.lock().committed.header.autoclear_features = set;
        disk.take_log();
        block_on(image.ready_for_writes()).expect("nothing fails");
        let mut expected = vec![Op::Flush];
        if set != stays {
            expected.extend([Op::Write(0..112), Op::Flush]);
            let bytes = disk.contents();
            assert_eq!(bytes[88..96], stays.to_be_bytes());
        }
        assert_eq!(changes(&disk), expected, "{set:#x}");
        assert_eq!(image.header().autoclear_features, stays);
        block_on(image.ready_for_writes()).expect("nothing fails");
        assert_eq!(changes(&disk), [], "once");
    }
}

/// If that cannot be made durable nothing is written, ever.
#[test]
fn a_session_that_cannot_be_made_ready_does_not_write() {
    let fails: [fn(&Op) -> bool; 2] = [|op| *op == Op::Flush, |op| matches!(op, Op::Write(_))];
    for fails in fails {
        let disk = new_disk(Version::V3);
        disk.patch(88, &UNKNOWN.to_be_bytes());
        let image = qcow2_on(&disk);
        disk.fail(move |op| fails(op).then(|| io::Error::from_raw_os_error(EIO)));
        block_on(image.ready_for_writes()).expect_err("it fails");
        disk.mend();
        disk.take_log();
        block_on(image.ready_for_writes()).expect_err("it is latched");
        assert_eq!(changes(&disk), []);
        assert!(!image.lock().committed.is_ready_for(Ready::Changes) && image.is_latched());
    }
}
