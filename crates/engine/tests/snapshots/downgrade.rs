//! Images with snapshots become images of version 2, cut short at every write: zero clusters of
//! snapshots become what version 2 can say, and disk and snapshots hold what they held.

use std::sync::Arc;

use cowslip::Job;
use cowslip::file::memory::MemoryFile;
use cowslip::qcow2::amend::{Amendment, BackingFile};
use cowslip::qcow2::check::Severity;
use cowslip::qcow2::create::Version;

use super::{Model, Random, checked_clean, made, open};
use crate::support::crash::{Op, Recorder, each_crash};
use crate::support::{Image, block_on, our_check, peers_are_installed};

fn to_version_2() -> Amendment {
    Amendment {
        version: Some(Version::V2),
        ..Amendment::default()
    }
}

/// An image with three snapshots, whose tables are shared with each other and with the disk.
fn image(create_options: &str, size: u64, has_backing: bool) -> (Vec<u8>, Model) {
    let file = Arc::new(MemoryFile::new("image", made(create_options, size), 1));
    let mut opened = open(file.clone());
    if has_backing {
        let backing = Amendment::of_backing(BackingFile::File {
            name: "below".to_string(),
            format: "raw".to_string(),
        });
        block_on(opened.amend(&backing, &Job::default())).unwrap();
        block_on(opened.close()).unwrap();
        opened = open(file.clone());
    }
    let mut model = Model::new(size);
    let random = &mut Random(size);
    for round in 0..3 {
        for _ in 0..8 {
            model.write(&opened, random);
        }
        model.compress(&opened, random);
        model.create(&opened, &format!("s{round}"));
        if round == 1 {
            model.create(&opened, "twin");
        }
    }
    model.write(&opened, random);
    block_on(opened.close()).unwrap();
    checked_clean(&file, create_options);
    (file.contents(), model)
}

/// Zero clusters in the tables of all snapshots; a table counts as often as it is referred to.
fn zero_clusters(bytes: &[u8]) -> usize {
    let word = |at: u64, len: usize| {
        let bytes = &bytes[at as usize..][..len];
        bytes
            .iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    };
    let (count, unit) = (word(60, 4), 1u64 << word(20, 4));
    let mut at = word(64, 8);
    let mut found = 0;
    for _ in 0..count {
        let (l1, entries) = (word(at, 8), word(at + 8, 4));
        for table in (0..entries).map(|index| word(l1 + index * 8, 8) & !(1 << 63)) {
            let words = (0..unit / 8).filter(|_| table != 0);
            let entries = words.map(|index| word(table + index * 8, 8));
            found += entries
                .filter(|entry| entry >> 62 & 1 == 0 && entry & 1 != 0)
                .count();
        }
        let len = 40 + word(at + 36, 4) + word(at + 12, 2) + word(at + 14, 2);
        at += len.next_multiple_of(8);
    }
    found
}

#[test]
fn snapshots_become_version_2_whenever_it_is_cut_short() {
    if !peers_are_installed() {
        return;
    }
    for (create_options, size, has_backing) in [
        ("cluster_size=4096", 120 << 10, false),
        ("cluster_size=512", 60 << 10, false),
        ("cluster_size=512", 60 << 10, true),
        ("cluster_size=4096", 120 << 10, true),
    ] {
        let (start, model) = image(create_options, size, has_backing);
        let name = format!("{create_options}, backing {has_backing}");
        assert!(zero_clusters(&start) > 3, "{name}");
        let file = Recorder::new(start.clone());
        let opened = open(file.clone());
        block_on(opened.amend(&to_version_2(), &Job::default())).unwrap();
        block_on(opened.close()).unwrap();
        let ops = file.ops();
        assert!(ops.iter().filter(|op| matches!(op, Op::Flush)).count() > 4);
        let (mut old, mut new) = (0, 0);
        each_crash(&start, &ops, |what, bytes| {
            let what = format!("{name}, {what}");
            let mut findings = Vec::new();
            our_check(bytes.to_vec(), &mut findings).unwrap();
            let is_leak =
                |finding: &cowslip::qcow2::check::Finding| finding.severity() == Severity::Leak;
            assert!(findings.iter().all(is_leak), "{what}: {findings:?}");
            let file = Arc::new(MemoryFile::new("image", bytes.to_vec(), 1));
            model.judge(&file, &what);
            match bytes[7] {
                2 => new += 1,
                _ => old += 1,
            }
        });
        assert!(old > 20 && new > 0, "{name}: {old}, {new}");
        let done = file.contents();
        assert_eq!((done[7], zero_clusters(&done)), (2, 0), "{name}");
        let file = Arc::new(MemoryFile::new("image", done.clone(), 1));
        checked_clean(&file, &name);
        // All of it can go on.
        let mut model = model.clone();
        let opened = open(file.clone());
        for _ in 0..3 {
            model.write(&opened, &mut Random(7));
        }
        model.apply(&opened, 1);
        model.delete(&opened, 0);
        block_on(opened.close()).unwrap();
        model.judge(&file, &name);
        if !has_backing {
            let mut image = Image::create(create_options, &size.to_string(), &[]);
            image.bytes = file.contents();
            image.save();
            assert_eq!(image.qemu_check().exit_code, 0, "{name}");
        }
    }
}

#[test]
fn a_snapshot_of_a_disk_of_another_size_stays_version_3() {
    if !peers_are_installed() {
        return;
    }
    let (start, mut model) = image("cluster_size=4096", 120 << 10, false);
    let file = Arc::new(MemoryFile::new("image", start, 1));
    let opened = open(file.clone());
    block_on(opened.resize(200 << 10)).unwrap();
    block_on(opened.close()).unwrap();
    let before = file.contents();
    let opened = open(file.clone());
    let refused = block_on(opened.amend(&to_version_2(), &Job::default())).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "Internal snapshots prevent downgrade of image"
    );
    block_on(opened.close()).unwrap();
    assert!(file.contents() == before);
    model.disk.resize(200 << 10, 0);
    model.judge(&file, "refused");
}
