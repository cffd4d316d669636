//! The VM state behind a disk: what is there after a resize, a snapshot, a commit and an amendment,
//! and what is refused. How QEMU's tools see it is in the command's tests.

use std::sync::Arc;

use cowslip::commit::{Afterwards, Commit};
use cowslip::errno::{EFBIG, EIO};
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Durability, FileRequest, Gate};
use cowslip::image::{Format, OpenOptions};
use cowslip::qcow2::amend::Amendment;
use cowslip::qcow2::check::CheckResult;
use cowslip::qcow2::create::{CreateOptions, Version, create};
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Buf, BufMut, Error, Image, Job, Result};
use futures_util::future::join;

use crate::support::{block_on, our_check};

/// A disk whose last L2 table maps 8 KiB more than it has: with clusters of 512 bytes each maps 32
/// KiB.
const SIZE: u64 = 88 << 10;
const TABLE: u64 = 32 << 10;

/// The files of a test by their names.
#[derive(Default)]
struct Files(Vec<(String, Arc<MemoryFile>)>);

impl Gate for Files {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        Ok(self.get(request.name))
    }
}

impl Files {
    fn get(&self, name: &str) -> Arc<MemoryFile> {
        let found = self.0.iter().find(|(known, _)| known == name);
        Arc::clone(&found.unwrap().1)
    }

    fn add(&mut self, name: &str) -> Arc<MemoryFile> {
        let file = Arc::new(MemoryFile::new(name, Vec::new(), 1));
        self.0.push((name.to_string(), file.clone()));
        file
    }

    /// The image `top` of these options, with small clusters.
    fn with_top(mut self, options: CreateOptions) -> Files {
        let data = options.data_file.as_ref().map(|name| self.add(name));
        let options = CreateOptions {
            cluster_size: 512,
            ..options
        };
        let file = self.add("top");
        let data = data.map(|data| data as Arc<dyn BlockFile>);
        block_on(create(file, data, &options)).unwrap();
        self
    }

    fn open(&self, name: &str) -> Image {
        let options = OpenOptions {
            writable: true,
            ..OpenOptions::default()
        };
        block_on(Image::open(self.get(name), options, self)).unwrap()
    }

    /// Closes `top`, and looks at what is left of it.
    fn close(&self, image: &Image) -> CheckResult {
        block_on(image.close()).unwrap();
        let mut findings = Vec::new();
        let result = our_check(self.get("top").contents(), &mut findings).unwrap();
        assert!(result.is_clean(), "{findings:?}");
        result
    }
}

fn plain() -> Files {
    Files::default().with_top(CreateOptions::new(SIZE))
}

fn save(image: &Image, offset: u64, byte: u8, len: usize) {
    block_on(image.write_vm_state(offset, Buf::copy_of(&vec![byte; len]))).unwrap();
}

fn load(image: &Image, offset: u64, len: usize) -> Vec<u8> {
    let loaded = image.read_vm_state(offset, BufMut::zeroed(len));
    block_on(loaded).unwrap().to_vec()
}

fn disk(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(image.size() as usize);
    block_on(image.read(0, buf)).unwrap().to_vec()
}

fn is_all(bytes: &[u8], byte: u8) -> bool {
    bytes.iter().all(|&other| other == byte)
}

#[test]
fn what_was_saved_is_loaded_and_the_rest_reads_as_zeroes() {
    let files = plain();
    let image = files.open("top");
    assert_eq!(image.vm_state_offset(), Some(3 * TABLE));
    assert!(is_all(&load(&image, 0, 4096), 0));
    save(&image, 100, 1, 1000);
    // Far away: the L1 table grows.
    save(&image, 40 * TABLE - 700, 2, 1400);
    files.close(&image);
    let image = files.open("top");
    let near = load(&image, 0, 1536);
    assert!(is_all(&near[..100], 0) && is_all(&near[100..1100], 1) && is_all(&near[1100..], 0));
    let far = load(&image, 40 * TABLE - 1024, 2048);
    assert!(is_all(&far[..324], 0) && is_all(&far[324..1724], 2) && is_all(&far[1724..], 0));
    assert!(is_all(&disk(&image), 0));
    files.close(&image);
}

#[test]
fn a_backing_file_has_no_part_in_it() {
    let mut files = Files::default();
    let base = files.add("base");
    let sevens = Buf::copy_of(&[7; 10 << 15]);
    block_on(base.write(0, sevens.into(), Durability::Cached)).unwrap();
    let files = files.with_top(CreateOptions {
        backing_file: Some("base".to_string()),
        backing_format: Some("raw".to_string()),
        ..CreateOptions::new(SIZE)
    });
    let image = files.open("top");
    assert!(is_all(&load(&image, 0, 4096), 0));
    save(&image, 600, 1, 100);
    let loaded = load(&image, 0, 1024);
    assert!(is_all(&loaded[..600], 0) && is_all(&loaded[700..], 0));
    assert!(is_all(&disk(&image), 7));
    files.close(&image);
}

#[test]
fn a_size_with_which_it_begins_at_the_same_place_leaves_it_alone() {
    let files = plain();
    let image = files.open("top");
    save(&image, 0, 1, 2048);
    for size in [3 * TABLE, 2 * TABLE + 512, SIZE] {
        block_on(image.resize(size)).unwrap();
        assert!(is_all(&load(&image, 0, 2048), 1), "{size}");
        assert!(is_all(&disk(&image), 0), "{size}");
    }
    files.close(&image);
}

/// A disk with a data file of this kind, if with any.
fn with_data_file(is_raw: Option<bool>) -> Files {
    Files::default().with_top(CreateOptions {
        data_file: is_raw.map(|_| "data".to_string()),
        data_file_raw: is_raw == Some(true),
        ..CreateOptions::new(SIZE)
    })
}

#[test]
fn a_disk_that_grows_over_it_shows_none_of_it() {
    for data_file_raw in [None, Some(false), Some(true)] {
        let files = with_data_file(data_file_raw);
        let image = files.open("top");
        save(&image, 0, 1, 2 * TABLE as usize);
        save(&image, 5 * TABLE, 2, 1024);
        let size = 4 * TABLE + 512;
        block_on(image.resize(size)).unwrap();
        let what = format!("{data_file_raw:?}");
        assert!(is_all(&disk(&image), 0), "{what}");
        // The state, whose offsets would have changed, is gone.
        assert!(is_all(&load(&image, 0, 8 * TABLE as usize), 0), "{what}");
        files.close(&image);
        if data_file_raw == Some(true) {
            let data = files.get("data").contents();
            assert!(data.len() as u64 == size && is_all(&data, 0), "{what}");
        }
        let image = files.open("top");
        // Around a small write, too.
        block_on(image.write(SIZE + TABLE + 10, Buf::copy_of(&[9]), Default::default())).unwrap();
        let disk = disk(&image);
        assert_eq!(disk.iter().filter(|&&byte| byte != 0).count(), 1, "{what}");
        files.close(&image);
    }
}

#[test]
fn a_disk_that_shrinks_below_its_last_table_takes_it_along() {
    for data_file_raw in [None, Some(false), Some(true)] {
        let files = with_data_file(data_file_raw);
        let image = files.open("top");
        let data = Buf::copy_of(&vec![5; SIZE as usize]);
        block_on(image.write(0, data, Default::default())).unwrap();
        save(&image, 0, 1, 4096);
        block_on(image.resize(TABLE)).unwrap();
        assert!(is_all(&load(&image, 0, 8 * TABLE as usize), 0));
        assert!(is_all(&disk(&image), 5));
        // No cluster is leaked.
        files.close(&image);
    }
}

#[test]
fn snapshots_take_it_along() {
    let files = plain();
    let image = files.open("top");
    let name = |name: &str| NewSnapshot {
        name: name.to_string(),
        ..NewSnapshot::default()
    };
    let job = Job::default();
    save(&image, 0, 1, 1024);
    block_on(image.create_snapshot(&name("one"), &job)).unwrap();
    // It stays with the disk, too.
    assert!(is_all(&load(&image, 0, 1024), 1));
    save(&image, 512, 2, 1024);
    block_on(image.create_snapshot(&name("two"), &job)).unwrap();
    block_on(image.resize(5 * TABLE)).unwrap();
    save(&image, 0, 3, 2048);
    for (id, byte) in [("1", 1), ("2", 2), ("1", 1)] {
        let choice = SnapshotChoice::Id(id.to_string());
        block_on(image.apply_snapshot(&choice, &job)).unwrap();
        assert_eq!(image.size(), SIZE);
        assert!(is_all(&load(&image, 0, 512), 1), "{id}");
        assert!(is_all(&load(&image, 512, 512), byte), "{id}");
        assert!(is_all(&load(&image, 1536, 512), 0), "{id}");
    }
    for id in ["1", "2"] {
        let choice = SnapshotChoice::Id(id.to_string());
        block_on(image.delete_snapshot(&choice, &job)).unwrap();
    }
    assert!(is_all(&load(&image, 0, 1024), 1));
    files.close(&image);
}

#[test]
fn a_commit_empties_it() {
    let mut files = Files::default();
    let base = files.add("base");
    block_on(create(base, None, &CreateOptions::new(SIZE))).unwrap();
    let files = files.with_top(CreateOptions {
        backing_file: Some("base".to_string()),
        backing_format: Some("qcow2".to_string()),
        ..CreateOptions::new(SIZE)
    });
    let image = files.open("top");
    save(&image, 0, 1, 1024);
    block_on(image.write(0, Buf::copy_of(&[4; 512]), Default::default())).unwrap();
    let commit = Commit {
        depth: 1,
        afterwards: Afterwards::Empty,
        base: OpenOptions::default(),
    };
    block_on(image.commit(&commit, &files, &Job::default())).unwrap();
    files.close(&image);
    let image = files.open("top");
    assert!(is_all(&load(&image, 0, 1024), 0));
    assert!(is_all(&disk(&image)[..512], 4));
    assert!(is_all(&load(&files.open("base"), 0, 1024), 0));
}

#[test]
fn an_amendment_keeps_it() {
    let files = plain();
    let image = files.open("top");
    save(&image, 0, 1, 1024);
    save(&image, 3 * TABLE, 2, 1024);
    let amendment = Amendment {
        version: Some(Version::V2),
        ..Amendment::default()
    };
    block_on(image.amend(&amendment, &Job::default())).unwrap();
    files.close(&image);
    let image = files.open("top");
    assert!(is_all(&load(&image, 0, 1024), 1));
    assert!(is_all(&load(&image, 3 * TABLE, 1024), 2));
    files.close(&image);
}

#[test]
fn a_resize_waits_for_what_is_being_saved() {
    let files = plain();
    let image = files.open("top");
    let data = Buf::copy_of(&vec![1; TABLE as usize]);
    let (saved, resized) = block_on(join(image.write_vm_state(0, data), image.resize(7 * TABLE)));
    saved.unwrap();
    resized.unwrap();
    assert!(is_all(&disk(&image), 0));
    files.close(&image);
}

#[test]
fn what_cannot_be_addressed_is_refused() {
    let files = plain();
    let image = files.open("top");
    let save_at = |offset| {
        let saved = image.write_vm_state(offset, Buf::copy_of(&[1; 512]));
        block_on(saved).map_err(|error| error.errno())
    };
    let load_at = |offset| {
        let loaded = image.read_vm_state(offset, BufMut::zeroed(512));
        block_on(loaded).map(|bytes| bytes.to_vec())
    };
    // The longest L1 table, and one entry more.
    let end = (32 << 20) / 8 * TABLE - 3 * TABLE;
    assert_eq!(save_at(end), Err(EFBIG));
    assert_eq!(save_at(end - 512), Ok(()));
    assert_eq!(save_at(u64::MAX - 600), Err(EIO));
    assert_eq!(save_at(i64::MAX as u64), Err(EIO));
    let last = (1 << 63) - (1 << 30) - 3 * TABLE - 512;
    assert_eq!(load_at(last).unwrap(), [0; 512]);
    assert_eq!(load_at(last + 512).unwrap_err().errno(), EIO);
    files.close(&image);

    let raw = Arc::new(MemoryFile::new("raw", vec![0; 4096], 1));
    let options = OpenOptions {
        writable: true,
        format: Some(Format::Raw),
        ..OpenOptions::default()
    };
    let raw = block_on(Image::open(raw, options, &files)).unwrap();
    let saved = block_on(raw.write_vm_state(0, Buf::copy_of(&[1])));
    assert!(matches!(saved, Err(Error::Unsupported { .. })));
    assert_eq!(raw.vm_state_offset(), None);
}

/// Version 2 has no zero flag, so a discard over a backing file leaves clusters as they are. What
/// lies behind the new end does not: it would be taken for VM state, and its space would be lost.
#[test]
fn shrinking_gives_up_all_that_is_behind_the_end_whatever_lies_below() {
    for version in [Version::V2, Version::V3] {
        let mut files = Files::default();
        let base = files.add("base");
        let options = CreateOptions {
            cluster_size: 512,
            ..CreateOptions::new(SIZE)
        };
        block_on(create(base, None, &options)).unwrap();
        let files = files.with_top(CreateOptions {
            version,
            backing_file: Some("base".to_string()),
            backing_format: Some("qcow2".to_string()),
            ..CreateOptions::new(SIZE)
        });
        let image = files.open("top");
        let data = Buf::copy_of(&vec![5; SIZE as usize]);
        block_on(image.write(0, data, Durability::Cached)).unwrap();
        let small = TABLE / 2;
        block_on(image.resize(small)).unwrap();
        assert!(is_all(&disk(&image), 5));
        assert_eq!(image.vm_state_offset(), Some(TABLE));
        let behind = load(&image, 0, (SIZE - TABLE) as usize);
        assert!(
            is_all(&behind, 0),
            "{version:?}: a guest's data is VM state"
        );
        let result = files.close(&image);
        let clusters = result.allocated_clusters;
        assert_eq!(
            clusters,
            small / 512,
            "{version:?}: space stays behind the end"
        );
    }
}
