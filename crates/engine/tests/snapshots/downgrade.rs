//! Images with snapshots become images of version 2, cut short at every write: zero clusters of
//! snapshots become what version 2 can say, and disk and snapshots hold what they held.

use std::collections::BTreeSet;
use std::sync::Arc;

use cowslip::Job;
use cowslip::file::memory::MemoryFile;
use cowslip::qcow2::amend::{Amendment, BackingFile};
use cowslip::qcow2::check::{Finding, Severity};
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

fn word(bytes: &[u8], at: u64, len: usize) -> u64 {
    let bytes = &bytes[at as usize..][..len];
    let digits = bytes.iter().map(|&byte| u64::from(byte));
    digits.fold(0, |sum, byte| sum << 8 | byte)
}

/// Where the L2 tables of all snapshots are; each as often as it is referred to.
fn tables(bytes: &[u8]) -> Vec<u64> {
    let mut at = word(bytes, 64, 8);
    let mut tables = Vec::new();
    for _ in 0..word(bytes, 60, 4) {
        let (l1, entries) = (word(bytes, at, 8), word(bytes, at + 8, 4));
        let entries = (0..entries).map(|index| word(bytes, l1 + index * 8, 8) & !(1 << 63));
        tables.extend(entries.filter(|&table| table != 0));
        let texts = word(bytes, at + 12, 2) + word(bytes, at + 14, 2);
        let len = 40 + word(bytes, at + 36, 4) + texts;
        at += len.next_multiple_of(8);
    }
    tables
}

/// Zero clusters in the tables of all snapshots; a table counts as often as it is referred to.
fn zero_clusters(bytes: &[u8]) -> usize {
    let unit = 1 << word(bytes, 20, 4);
    let entries = |table| (0..unit / 8).map(move |index| word(bytes, table + index * 8, 8));
    let is_zero = |entry: &u64| entry >> 62 & 1 == 0 && entry & 1 != 0;
    let tables = tables(bytes).into_iter();
    tables.flat_map(entries).filter(is_zero).count()
}

/// Adds one to the count of a cluster, as a crash leaves it.
fn leak(bytes: &mut [u8], offset: u64) {
    let unit = 1 << word(bytes, 20, 4);
    let (cluster, counts_per_block) = (offset / unit, unit / 2);
    let entry = word(bytes, 48, 8) + cluster / counts_per_block * 8;
    let at = word(bytes, entry, 8) + cluster % counts_per_block * 2;
    let count = word(bytes, at, 2) as u16 + 1;
    bytes[at as usize..][..2].copy_from_slice(&count.to_be_bytes());
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
            let is_leak = |finding: &Finding| finding.severity() == Severity::Leak;
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

/// Zero clusters of a table take the counts of its references with them, not those that a crash has
/// left: a count that went down by the table's leaked count freed clusters that other tables use.
#[test]
fn leaked_counts_of_tables_free_nothing_that_is_in_use() {
    if !peers_are_installed() {
        return;
    }
    for (create_options, size) in [
        ("cluster_size=4096", 120 << 10),
        ("cluster_size=512", 60 << 10),
    ] {
        let (mut start, model) = image(create_options, size, false);
        let leaked: BTreeSet<u64> = tables(&start).into_iter().collect();
        leaked.iter().for_each(|&table| leak(&mut start, table));
        let file = Arc::new(MemoryFile::new("image", start, 1));
        let opened = open(file.clone());
        block_on(opened.amend(&to_version_2(), &Job::default())).unwrap();
        block_on(opened.close()).unwrap();
        let done = file.contents();
        assert_eq!((done[7], zero_clusters(&done)), (2, 0), "{create_options}");
        let mut findings = Vec::new();
        our_check(done, &mut findings).unwrap();
        let is_leak = |finding: &Finding| finding.severity() == Severity::Leak;
        assert!(
            findings.iter().all(is_leak),
            "{create_options}: {findings:?}"
        );
        assert_eq!(findings.len(), leaked.len(), "{create_options}");
        model.judge(&file, create_options);
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
