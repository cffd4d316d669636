//! The jobs, and the images that they begin with: small, with all that the job changes.

use std::sync::Arc;

use cowslip::commit::{Afterwards, Commit};
use cowslip::convert::Form;
use cowslip::file::BlockFile;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{AllocPolicy, Durability, Format, OpenOptions, ZeroOptions};
use cowslip::luks::{ErasedKeys, KeyChange, NewKey};
use cowslip::qcow2::amend::{Amendment, BackingFile};
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::create::{
    CreateOptions, Encryption, Preallocation, Version, create, create_luks,
};
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Buf, Image, Job, Result};

use super::{Case, each_failure, open, plain, seen};
use crate::keys;
use crate::support::block_on;
use crate::support::failing::{Contents, Medium};

const SIZE: u64 = 96 << 10;

fn case(
    name: &'static str,
    start: Contents,
    job: impl Fn(&Image, &Medium) -> Result<()> + 'static,
) -> Case {
    Case {
        name,
        start,
        job: Box::new(job),
        changes_keys: false,
        ends_with_close: false,
        writes: None,
        is_long: false,
    }
}

/// A new image, named `top`, before these other files, and what a session makes of it.
fn made(options: &CreateOptions, others: Contents, session: impl Fn(&Image)) -> Contents {
    let file = Arc::new(MemoryFile::new("top", Vec::new(), 1));
    let data = options.data_file.is_some();
    let data = data.then(|| Arc::new(MemoryFile::new("data", Vec::new(), 1)));
    let data_file = data.clone().map(|file| file as Arc<dyn BlockFile>);
    block_on(create(file.clone(), data_file, options)).unwrap();
    let mut contents = vec![("top".to_string(), file.contents())];
    contents.extend(data.map(|file| ("data".to_string(), file.contents())));
    contents.extend(others);
    changed(&contents, session)
}

/// Returns an image after a session.
fn changed(contents: &Contents, session: impl Fn(&Image)) -> Contents {
    let medium = plain(contents);
    let image = open(&medium, &contents[0].0, true).unwrap();
    session(&image);
    block_on(image.close()).unwrap();
    medium.contents()
}

fn small() -> CreateOptions {
    CreateOptions {
        cluster_size: 4096,
        alloc_policy: AllocPolicy::Sparse,
        ..CreateOptions::new(SIZE)
    }
}

fn put(image: &Image, at: u64, (byte, len): (u8, usize)) -> Result<()> {
    let data = Buf::from(vec![byte; len]);
    block_on(image.write(at, data, Durability::Cached))
}

/// Data, zeroes, and a cluster of which a part is written.
fn fill(image: &Image) {
    put(image, 1000, (1, 9000)).unwrap();
    put(image, 40_000, (2, 20_000)).unwrap();
    put(image, SIZE - 700, (3, 700)).unwrap();
    let zeroes = image.write_zeroes(8192, 8192, ZeroOptions::default());
    block_on(zeroes).unwrap();
}

fn snapshot(image: &Image, name: &str) -> Result<()> {
    let new = NewSnapshot {
        name: name.to_string(),
        date_sec: 1_700_000_000,
        date_nsec: 5,
    };
    block_on(image.create_snapshot(&new, &Job::default())).map(drop)
}

fn first_snapshot() -> SnapshotChoice {
    SnapshotChoice::Id("1".to_string())
}

fn with_snapshot(options: &CreateOptions) -> Contents {
    made(options, Vec::new(), |image| {
        fill(image);
        snapshot(image, "one").unwrap();
        put(image, 5000, (4, 3000)).unwrap();
        put(image, 80_000, (5, 5000)).unwrap();
    })
}

fn amend(amendment: Amendment) -> impl Fn(&Image, &Medium) -> Result<()> {
    move |image, _| block_on(image.amend(&amendment, &Job::default()))
}

#[test]
fn snapshots_are_made_applied_and_deleted_or_not() {
    let shapes = [
        small(),
        CreateOptions {
            cluster_size: 512,
            version: Version::V2,
            alloc_policy: AllocPolicy::Auto,
            ..small()
        },
    ];
    for options in shapes {
        let start = with_snapshot(&options);
        let job = Job::default();
        each_failure(&case("create", start.clone(), |image, _| {
            snapshot(image, "two")
        }));
        let apply = |image: &Image, _: &Medium| {
            block_on(image.apply_snapshot(&first_snapshot(), &Job::default()))
        };
        each_failure(&case("apply", start.clone(), apply));
        let delete = move |image: &Image, _: &Medium| {
            block_on(image.delete_snapshot(&first_snapshot(), &job))
        };
        each_failure(&case("delete", start, delete));
    }
}

#[test]
fn a_header_is_the_old_or_the_new_one() {
    let start = made(&small(), Vec::new(), fill);
    let hint = Amendment {
        lazy_refcounts: Some(true),
        alloc_policy: Some(AllocPolicy::Contiguous),
        ..Amendment::default()
    };
    each_failure(&case("hint", start.clone(), amend(hint)));
    let name = "a name that is so long that it ends behind the first sector ".repeat(4);
    let other = made(&small(), Vec::new(), |image| {
        put(image, 0, (9, SIZE as usize)).unwrap();
    });
    let mut with_other = changed(&start, |image| put(image, 0, (7, SIZE as usize)).unwrap());
    with_other.push((name.clone(), other[0].1.clone()));
    let backing = Amendment::of_backing(BackingFile::File {
        name,
        format: "qcow2".to_string(),
    });
    each_failure(&case("backing file", with_other, amend(backing)));
    let older = Amendment {
        version: Some(Version::V2),
        ..Amendment::default()
    };
    each_failure(&case("downgrade", start, amend(older)));
}

#[test]
fn snapshots_go_with_a_header_of_another_version() {
    let newer = Amendment {
        version: Some(Version::V3),
        ..Amendment::default()
    };
    let version_2 = CreateOptions {
        version: Version::V2,
        alloc_policy: AllocPolicy::Auto,
        ..small()
    };
    each_failure(&case("upgrade", with_snapshot(&version_2), amend(newer)));
    let older = Amendment {
        version: Some(Version::V2),
        ..Amendment::default()
    };
    let start = with_snapshot(&small());
    each_failure(&case("downgrade with snapshots", start, amend(older)));
}

#[test]
fn counts_of_another_width_are_all_there_or_none() {
    for bits in [8, 64] {
        let width = Amendment {
            refcount_bits: Some(bits),
            ..Amendment::default()
        };
        let options = CreateOptions {
            cluster_size: 512,
            ..small()
        };
        let start = with_snapshot(&options);
        each_failure(&case("width", start, amend(width)));
    }
}

fn add(name: &'static str) -> impl Fn(&Image, &Medium) -> Result<()> {
    move |image, _| {
        let add = BitmapChange::Add {
            granularity: Some(4096),
        };
        block_on(image.change_bitmap(name, &add))
    }
}

/// Three bitmaps, one of which follows no writes.
fn with_bitmaps(options: &CreateOptions) -> Contents {
    made(options, Vec::new(), |image| {
        let nothing = plain(&Vec::new());
        for name in ["one", "two", "three"] {
            add(name)(image, &nothing).unwrap();
        }
        fill(image);
        block_on(image.change_bitmap("two", &BitmapChange::Disable)).unwrap();
    })
}

fn with_bitmaps_at_close(
    name: &'static str,
    start: &Contents,
    job: impl Fn(&Image, &Medium) -> Result<()> + 'static,
) {
    each_failure(&Case {
        ends_with_close: true,
        ..case(name, start.clone(), job)
    });
}

#[test]
fn bitmaps_are_stored_as_a_whole() {
    // Many names make a directory of several sectors.
    for cluster_size in [512, 4096] {
        let options = CreateOptions {
            cluster_size,
            ..small()
        };
        let start = with_bitmaps(&options);
        with_bitmaps_at_close("add", &start, add("four"));
        with_bitmaps_at_close("remove", &start, |image, _| {
            block_on(image.change_bitmap("two", &BitmapChange::Remove))
        });
        with_bitmaps_at_close("clear", &start, |image, _| {
            block_on(image.change_bitmap("one", &BitmapChange::Clear))
        });
        let write = |image: &Image, _: &Medium| put(image, 70_000, (6, 5000));
        each_failure(&Case {
            ends_with_close: true,
            writes: Some(70_000..75_000),
            ..case("write", start, write)
        });
    }
    let start = made(&small(), Vec::new(), fill);
    with_bitmaps_at_close("the first bitmap", &start, add("one"));
}

fn resize(size: u64, how: Preallocation) -> impl Fn(&Image, &Medium) -> Result<()> {
    move |image, _| {
        if image.size() == size {
            return Ok(());
        }
        block_on(image.resize_as_job(size, how, &Job::default()))
    }
}

#[test]
fn a_disk_has_the_old_size_or_the_new_one() {
    let tiny = CreateOptions {
        cluster_size: 512,
        ..small()
    };
    let start = with_bitmaps(&tiny);
    for size in [2 * SIZE, SIZE / 2] {
        let job = resize(size, Preallocation::Off);
        each_failure(&case("resize in small clusters", start.clone(), job));
    }
    let small_blocks = CreateOptions {
        refcount_bits: 64,
        ..tiny
    };
    let start = made(&small_blocks, Vec::new(), |image| {
        put(image, SIZE / 2, (7, SIZE as usize / 2)).unwrap();
        block_on(image.flush()).unwrap();
        put(image, 0, (8, SIZE as usize / 2)).unwrap();
    });
    let shrink = resize(SIZE / 4, Preallocation::Off);
    each_failure(&case("shrink that drops blocks", start, shrink));
    let start = with_bitmaps(&small());
    for (how, size) in [
        (Preallocation::Off, 4 * SIZE),
        (Preallocation::Off, SIZE / 2),
        (Preallocation::Metadata, SIZE + 40_960),
        (Preallocation::Falloc, SIZE + 40_960),
        (Preallocation::Full, SIZE + 10_240),
    ] {
        each_failure(&case("resize", start.clone(), resize(size, how)));
    }
}

#[test]
fn a_raw_data_file_is_never_shorter_than_the_disk() {
    let options = CreateOptions {
        data_file: Some("data".to_string()),
        data_file_raw: true,
        ..small()
    };
    let start = made(&options, Vec::new(), fill);
    for size in [2 * SIZE, SIZE / 2] {
        let job = resize(size, Preallocation::Off);
        each_failure(&case("resize with a data file", start.clone(), job));
    }
}

/// An image on `base`, and `other` with other bytes.
fn chain() -> Contents {
    let base = made(&small(), Vec::new(), |image| {
        put(image, 0, (11, 50_000)).unwrap();
    });
    let other = made(&small(), Vec::new(), |image| {
        put(image, 30_000, (12, 50_000)).unwrap();
    });
    let options = CreateOptions {
        backing_file: Some("base".to_string()),
        backing_format: Some("qcow2".to_string()),
        ..small()
    };
    let others = vec![
        ("base".to_string(), base[0].1.clone()),
        ("other".to_string(), other[0].1.clone()),
    ];
    made(&options, others, fill)
}

#[test]
fn a_chain_shows_its_disk_whatever_fails_of_a_rebase_or_commit() {
    let rebase = |image: &Image, medium: &Medium| {
        let new = open(medium, "other", false).unwrap();
        let backing = BackingFile::File {
            name: "other".to_string(),
            format: "qcow2".to_string(),
        };
        block_on(image.rebase(Some(&new), backing, Form::Plain, &Job::default()))
    };
    each_failure(&case("rebase", chain(), rebase));
    let commit = |image: &Image, medium: &Medium| {
        let commit = Commit {
            depth: 1,
            afterwards: Afterwards::Empty,
            base: OpenOptions::default(),
        };
        block_on(image.commit(&commit, medium, &Job::default()))
    };
    each_failure(&case("commit", chain(), commit));
}

#[test]
fn a_longer_refcount_table_counts_all_or_is_not_there() {
    let options = CreateOptions {
        cluster_size: 512,
        refcount_bits: 64,
        ..small()
    };
    let save = |image: &Image, at: u64, len: usize| {
        let data = Buf::from(vec![1; len]);
        block_on(image.write_vm_state(at, data))?;
        block_on(image.flush())
    };
    let start = made(&options, Vec::new(), |image| {
        fill(image);
        save(image, 0, 64 << 10).unwrap();
    });
    let job = move |image: &Image, _: &Medium| save(image, 64 << 10, 2 << 20);
    // A cluster of the table counts 2 MiB.
    let table = |contents: &Contents| contents[0].1[48..60].to_vec();
    let after = changed(&start, |image| job(image, &plain(&Vec::new())).unwrap());
    let tables = (table(&start), table(&after));
    assert!(tables.0 != tables.1, "it becomes longer: {tables:?}");
    each_failure(&Case {
        is_long: true,
        ..case("refcount table", start, job)
    });
}

/// An encrypted image that 'a' opens.
fn encrypted(format: Format) -> Contents {
    let volume = keys::volume();
    let contents = match format {
        Format::Luks => {
            let file = Arc::new(MemoryFile::new("top", Vec::new(), 1));
            let (off, job) = (Preallocation::Off, Job::default());
            block_on(create_luks(file.clone(), SIZE, &volume, off, &job)).unwrap();
            vec![("top".to_string(), file.contents())]
        }
        _ => {
            let options = CreateOptions {
                encryption: Some(Encryption::Luks(Box::new(volume))),
                ..small()
            };
            made(&options, Vec::new(), |_| ())
        }
    };
    changed(&contents, fill)
}

#[test]
fn some_passphrase_opens_an_image_whatever_fails_of_a_change_of_keys() {
    let add = |current: &str, new: &str, slot| {
        KeyChange::Add(NewKey {
            current: keys::passphrase(current),
            passphrase: keys::passphrase(new),
            slot,
            iterations: 1,
            force: true,
        })
    };
    let erase = KeyChange::Erase(ErasedKeys {
        slot: None,
        passphrase: Some(keys::passphrase("a")),
        force: false,
    });
    for format in [Format::Qcow2, Format::Luks] {
        let one = encrypted(format);
        let change = |contents: &Contents, change: &KeyChange| {
            changed(contents, |image| {
                block_on(image.change_keys(change, &keys::means(), &Job::default())).unwrap();
            })
        };
        let two = change(&one, &add("a", "b", None));
        for (name, start, change) in [
            ("a second key", &one, add("a", "b", None)),
            ("another key in its place", &one, add("a", "b", Some(0))),
            ("one key less", &two, erase.clone()),
        ] {
            let job = move |image: &Image, _: &Medium| {
                block_on(image.change_keys(&change, &keys::means(), &Job::default()))
            };
            each_failure(&Case {
                changes_keys: true,
                ..case(name, start.clone(), job)
            });
        }
        assert_eq!(seen(&two).opened_by, ["a", "b"]);
    }
}

/// Images that were not closed cleanly, or whose metadata contradicts itself, and whose disks can
/// be read.
pub fn damaged() -> Vec<Contents> {
    let start = with_snapshot(&small());
    let refcount_table = u64::from_be_bytes(start[0].1[48..56].try_into().unwrap()) as usize;
    let table = &start[0].1[refcount_table..][..8];
    let block = u64::from_be_bytes(table.try_into().unwrap()) as usize;
    let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut contents = start.clone();
        edit(&mut contents[0].1);
        contents
    };
    vec![
        // Counts that are too low, and too high, under the dirty bit.
        edited(&|bytes| {
            bytes[79] |= 1;
            bytes[block + 10..block + 14].fill(0);
            bytes[block + 41] += 2;
        }),
        // No refcount block.
        edited(&|bytes| bytes[refcount_table..refcount_table + 8].fill(0)),
    ]
}
