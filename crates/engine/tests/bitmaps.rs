//! Persistent bitmaps from outside: what a session leaves that does not end in order, what other
//! verbs do to them, and images whose bitmaps lie.

use std::sync::Arc;

use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{BackingChoice, Durability, Format, OpenOptions};
use cowslip::qcow2::amend::Amendment;
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::create::{CreateOptions, Version, create};
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Buf, BufMut, Error, Image, Job, Result};

use crate::support::{block_on, our_check};

/// Whatever is named, it is this file.
struct OneFile(Arc<MemoryFile>);

impl Gate for OneFile {
    fn open(&self, _request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        Ok(self.0.clone())
    }
}

fn open(file: &Arc<MemoryFile>, writable: bool) -> Result<Image> {
    let options = OpenOptions {
        writable,
        backing: BackingChoice::None,
        ..OpenOptions::default()
    };
    block_on(Image::open(file.clone(), options, &NoFiles))
}

fn change(image: &Image, name: &str, change: &BitmapChange) {
    block_on(image.change_bitmap(name, change)).unwrap();
}

fn add(image: &Image, name: &str) {
    let granularity = Some(4096);
    change(image, name, &BitmapChange::Add { granularity });
}

fn write(image: &Image, offset: u64) -> Result<()> {
    let data = Buf::from(vec![7; 512]);
    block_on(image.write(offset, data, Durability::Cached))
}

/// An image of 1 MiB in clusters of 4 KiB, with a bitmap whose first granule is dirty.
fn with_bitmap() -> Arc<MemoryFile> {
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    let mut options = CreateOptions::new(1 << 20);
    options.cluster_size = 4096;
    block_on(create(file.clone(), None, &options)).unwrap();
    let image = open(&file, true).unwrap();
    add(&image, "b");
    write(&image, 0).unwrap();
    block_on(image.close()).unwrap();
    file
}

fn dirty(image: &Image, name: &str) -> Vec<(u64, u64)> {
    let bits = block_on(image.dirty_bits(name)).unwrap();
    let ranges = bits.dirty_ranges();
    ranges.map(|range| (range.start, range.end)).collect()
}

/// The bitmaps that the file has: name, and whether it was not saved properly.
fn found(file: &Arc<MemoryFile>) -> Vec<(String, bool)> {
    let image = open(file, false).unwrap();
    let bitmaps = block_on(image.bitmaps()).unwrap();
    let listed = bitmaps
        .into_iter()
        .map(|bitmap| (bitmap.name, bitmap.in_use));
    listed.collect()
}

fn copy(file: &MemoryFile) -> Arc<MemoryFile> {
    Arc::new(MemoryFile::new("image", file.contents(), 1))
}

fn assert_clean(file: &MemoryFile) {
    let mut findings = Vec::new();
    let result = our_check(file.contents(), &mut findings).unwrap();
    assert!(result.is_clean(), "{findings:?}");
}

/// Asking for runs brings a bitmap into memory, where writes mark it; on disk nothing changes until
/// there is a write.
#[test]
fn runs_follow_writes_and_asking_for_them_changes_nothing() {
    let file = with_bitmap();
    let before = file.contents();
    let image = open(&file, true).unwrap();
    let runs = |range| {
        let runs = block_on(image.dirty_runs("b", range, 10)).unwrap();
        let runs = runs.iter().map(|run| (run.len, run.dirty));
        runs.collect::<Vec<_>>()
    };
    assert_eq!(runs(0..16384), [(4096, true), (12288, false)]);
    block_on(image.close()).unwrap();
    assert!(file.contents() == before, "it was only asked");

    let image = open(&file, true).unwrap();
    let runs = |range| {
        let runs = block_on(image.dirty_runs("b", range, 2)).unwrap();
        let runs = runs.iter().map(|run| (run.len, run.dirty));
        runs.collect::<Vec<_>>()
    };
    assert_eq!(runs(1000..8192), [(3096, true), (4096, false)]);
    write(&image, 12288).unwrap();
    assert_eq!(runs(0..1 << 20), [(4096, true), (8192, false)]);
    assert_eq!(
        runs(12288..1 << 20),
        [(4096, true), ((1 << 20) - 16384, false)]
    );
    change(&image, "b", &BitmapChange::Clear);
    assert_eq!(runs(0..1 << 20), [(1 << 20, false)]);
    let unknown = block_on(image.dirty_runs("c", 0..1, 1)).unwrap_err();
    assert_eq!(unknown.to_string(), "Dirty bitmap 'c' not found");
    block_on(image.close()).unwrap();

    let image = open(&file, false).unwrap();
    assert_eq!(dirty(&image, "b"), []);
    let refused = block_on(image.dirty_runs("b", 0..1, 1)).unwrap_err();
    assert!(matches!(refused, Error::ReadOnly(_)), "{refused}");
    assert_clean(&file);
}

/// The uppermost image that has one of the name counts.
#[test]
fn a_bitmap_is_found_in_the_images_below_too() {
    let below = with_bitmap();
    let image = open(&below, true).unwrap();
    add(&image, "only-below");
    block_on(image.close()).unwrap();
    let above = Arc::new(MemoryFile::new("above", Vec::new(), 1));
    block_on(create(above.clone(), None, &CreateOptions::new(2 << 20))).unwrap();
    let over = || {
        let options = OpenOptions {
            writable: true,
            backing: BackingChoice::Override {
                name: "image".to_string(),
                format: Some(Format::Qcow2),
            },
            ..OpenOptions::default()
        };
        block_on(Image::open(above.clone(), options, &OneFile(below.clone()))).unwrap()
    };
    let place = |image: &Image, name: &str| {
        let found = block_on(image.find_bitmap(name)).unwrap();
        found.map(|(depth, info)| (depth, info.name))
    };
    let image = over();
    assert_eq!(place(&image, "b"), Some((1, "b".to_string())));
    let bits = block_on(image.dirty_bits_below(1, "b")).unwrap();
    assert_eq!(bits.dirty_ranges().next(), Some(0..4096));
    assert_eq!(bits.dirty_ranges().count(), 1);
    assert!(block_on(image.dirty_bits_below(0, "b")).is_err());
    add(&image, "b");
    assert_eq!(place(&image, "b"), Some((0, "b".to_string())));
    let below = Some((1, "only-below".to_string()));
    assert_eq!(place(&image, "only-below"), below);
    assert_eq!(place(&image, "nowhere"), None);
    block_on(image.close()).unwrap();
}

/// They are in no list any more, but on disk they still say what was right before.
#[test]
fn bitmaps_that_were_removed_are_marked_before_a_snapshot_is_applied() {
    let file = with_bitmap();
    let image = open(&file, true).unwrap();
    let job = Job::default();
    block_on(image.create_snapshot(&NewSnapshot::default(), &job)).unwrap();
    write(&image, 8192).unwrap();
    block_on(image.close()).unwrap();

    let image = open(&file, true).unwrap();
    let first = SnapshotChoice::Id("1".to_string());
    let refused = block_on(image.apply_snapshot(&first, &job)).unwrap_err();
    assert_eq!(refused.to_string(), "Device has active dirty bitmaps");
    change(&image, "b", &BitmapChange::Remove);
    block_on(image.apply_snapshot(&first, &job)).unwrap();
    assert_eq!(
        found(&copy(&file)),
        [("b".to_string(), true)],
        "after a crash"
    );
    block_on(image.close()).unwrap();
    assert_eq!(found(&file), []);
    assert_clean(&file);
}

#[test]
fn version_2_has_no_bitmaps_and_keeps_none_of_their_space() {
    let file = with_bitmap();
    let image = open(&file, true).unwrap();
    let amendment = Amendment {
        version: Some(Version::V2),
        ..Amendment::default()
    };
    block_on(image.amend(&amendment, &Job::default())).unwrap();
    block_on(image.close()).unwrap();
    assert_eq!(found(&file), []);
    assert_clean(&file);
    let image = open(&file, true).unwrap();
    let granularity = None;
    let refused = block_on(image.change_bitmap("b", &BitmapChange::Add { granularity }));
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("Cannot store dirty bitmaps in qcow2 v2 files"),
        "{text}"
    );
    block_on(image.close()).unwrap();
}

/// A session that ends without a close, at each of the moments of `bitmap.rs`.
#[test]
fn the_first_write_marks_bitmaps_and_the_close_stores_them() {
    let file = with_bitmap();
    let image = open(&file, true).unwrap();
    add(&image, "new");
    assert_eq!(
        found(&copy(&file)),
        [("b".to_string(), false)],
        "nothing has changed"
    );
    write(&image, 4096).unwrap();
    assert_eq!(found(&copy(&file)), [("b".to_string(), true)]);
    assert_eq!(dirty(&image, "new"), [(4096, 8192)]);
    block_on(image.close()).unwrap();
    assert_eq!(
        found(&file),
        [("b".to_string(), false), ("new".to_string(), false)]
    );
    let image = open(&file, false).unwrap();
    assert_eq!(dirty(&image, "b"), [(0, 8192)]);
    assert_clean(&file);
}

/// A bitmap that was lost can be removed, and nothing else can be done with it; the guest is served
/// all the same.
#[test]
fn a_lost_bitmap_can_only_be_removed() {
    let file = with_bitmap();
    write(&open(&file, true).unwrap(), 4096).unwrap();
    let file = copy(&file);
    let image = open(&file, true).unwrap();
    for lost in [
        BitmapChange::Clear,
        BitmapChange::Enable,
        BitmapChange::Disable,
        BitmapChange::Merge("b".to_string()),
    ] {
        let refused = block_on(image.change_bitmap("b", &lost)).unwrap_err();
        assert!(refused.to_string().contains("is inconsistent"), "{refused}");
    }
    assert!(block_on(image.dirty_bits("b")).is_err());
    assert!(block_on(image.resize(2 << 20)).is_err());
    write(&image, 8192).unwrap();
    block_on(image.close()).unwrap();
    assert_eq!(found(&file), [("b".to_string(), true)]);
    let image = open(&file, true).unwrap();
    change(&image, "b", &BitmapChange::Remove);
    block_on(image.resize(2 << 20)).unwrap();
    block_on(image.close()).unwrap();
    assert_eq!(found(&file), []);
    assert_clean(&file);
}

/// A corruption: its name, its offset, its length in bytes and its value, stored big-endian.
type Lie = (&'static str, fn(&Places) -> u64, usize, u64);

/// Where the structures of [`with_bitmap`] are.
struct Places {
    extension: u64,
    directory: u64,
    table: u64,
}

impl Places {
    fn of(bytes: &[u8]) -> Places {
        let magic = 0x2385_2875_u32.to_be_bytes();
        let at = bytes.windows(4).position(|window| window == magic).unwrap();
        let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        let directory = word(at + 24);
        Places {
            extension: at as u64 + 8,
            directory,
            table: word(directory as usize),
        }
    }
}

const LIES: [Lie; 21] = [
    ("no bitmaps", |p| p.extension, 4, 0),
    ("too many bitmaps", |p| p.extension, 4, 0xffff_ffff),
    ("one bitmap more", |p| p.extension, 4, 2),
    ("reserved bytes", |p| p.extension + 4, 4, 1),
    ("an empty directory", |p| p.extension + 8, 8, 0),
    ("a directory that is too long", |p| p.extension + 8, 8, 40),
    ("an endless directory", |p| p.extension + 8, 8, u64::MAX),
    (
        "a directory beyond the end",
        |p| p.extension + 16,
        8,
        1 << 50,
    ),
    (
        "a directory that starts no cluster",
        |p| p.extension + 16,
        8,
        4104,
    ),
    ("a table that starts no cluster", |p| p.directory, 8, 4104),
    ("no table", |p| p.directory, 8, 0),
    ("a table beyond the end", |p| p.directory, 8, 1 << 50),
    ("an empty table", |p| p.directory + 8, 4, 0),
    ("an endless table", |p| p.directory + 8, 4, 0xffff_ffff),
    ("unknown flags", |p| p.directory + 12, 4, 8),
    ("an unknown type", |p| p.directory + 16, 1, 2),
    ("an impossible granularity", |p| p.directory + 17, 1, 64),
    ("a name beyond the directory", |p| p.directory + 18, 2, 1000),
    (
        "extra data beyond the directory",
        |p| p.directory + 20,
        4,
        0xffff_ffff,
    ),
    ("an entry with reserved bits", |p| p.table, 8, 4096 << 1 | 2),
    ("bits beyond the end", |p| p.table, 8, 1 << 50),
];

/// Nothing is written to an image whose enabled bitmaps cannot be followed: the error names the
/// corrupt structure, and the file stays as it is.
#[test]
fn lies_about_bitmaps_are_refused_before_anything_is_written() {
    let sound = with_bitmap().contents();
    let places = Places::of(&sound);
    for (what, place, len, value) in LIES {
        let mut bytes = sound.clone();
        let at = place(&places) as usize;
        bytes[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
        let file = Arc::new(MemoryFile::new("image", bytes.clone(), 1));
        let refused = match open(&file, true) {
            Ok(image) => write(&image, 4096).expect_err(what),
            Err(error) => error,
        };
        assert!(
            matches!(&refused, Error::Corrupt { structure, .. } if structure.contains("bitmap")),
            "{what}: {refused}"
        );
        assert!(file.contents() == bytes, "{what}: the file has changed");
        let readable = open(&file, false).unwrap();
        block_on(readable.read(0, BufMut::zeroed(4096))).expect(what);
    }
}

/// Bits that overlap other metadata are read as bits, and their clusters are never freed when the
/// bits are stored again.
#[test]
fn clusters_of_other_metadata_stay_counted() {
    let file = with_bitmap();
    let mut bytes = file.contents();
    let table = Places::of(&bytes).table as usize;
    let l1 = bytes[40..48].to_vec();
    bytes[table..table + 8].copy_from_slice(&l1);
    let file = Arc::new(MemoryFile::new("image", bytes, 1));
    let image = open(&file, true).unwrap();
    write(&image, 512 << 10).unwrap();
    block_on(image.close()).unwrap();
    let mut findings = Vec::new();
    let result = our_check(file.contents(), &mut findings).unwrap();
    assert_eq!(result.corruptions, 0, "{findings:?}");
}

/// A bitmap that is removed is on disk until the close. When the disk changes its size meanwhile,
/// its table has the wrong length, and its entry has to say that it was not saved: else the
/// image could not be opened after a crash, and the close would not free it.
#[test]
fn a_removed_bitmap_does_not_outlive_another_size() {
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    let mut options = CreateOptions::new(1 << 20);
    options.cluster_size = 4096;
    block_on(create(file.clone(), None, &options)).unwrap();
    let image = open(&file, true).unwrap();
    let granularity = Some(512);
    change(&image, "b", &BitmapChange::Add { granularity });
    block_on(image.close()).unwrap();

    let image = open(&file, true).unwrap();
    change(&image, "b", &BitmapChange::Remove);
    block_on(image.resize(40 << 20)).unwrap();
    let crashed = copy(&file);
    block_on(image.close()).unwrap();
    assert_clean(&file);
    assert!(found(&file).is_empty());

    assert_eq!(found(&crashed), [("b".to_string(), true)]);
    let image = open(&crashed, true).unwrap();
    change(&image, "b", &BitmapChange::Remove);
    block_on(image.close()).unwrap();
    assert_clean(&crashed);
}
