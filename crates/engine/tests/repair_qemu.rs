//! Broken images, repaired here and by qemu-img: afterwards both checkers find nothing, and no byte
//! of the guest that QEMU's repair keeps is lost. Then the same with a crash at every write of the
//! repair: the image is no worse, and a second repair completes.
//!
//! Skips loudly where qemu-img and qemu-io are not installed.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

mod support;

use std::collections::{BTreeMap, HashSet};
use std::io::Read;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{Format, OpenOptions};
use cowslip::qcow2::check::Finding;
use cowslip::qcow2::repair::{self, Outcome, RepairOptions, Scope, Step};
use cowslip::{BufMut, Error};
use support::crash::{Recorder, each_crash};
use support::{COMPRESSED, COPIED, Image, block_on, our_check, peers_are_installed};

const CLUSTER: u64 = 65536;
/// The unit in which guest contents are compared.
const BLOCK: u64 = 4096;

/// What is read at once, where it can be.
const READ_BYTES: u64 = 256 << 10;

/// A sound image, before something is broken in it.
#[derive(Clone, Copy)]
struct Base {
    options: &'static str,
    commands: &'static [&'static str],
    after: &'static [&'static [&'static str]],
}

const PLAIN: Base = Base {
    options: "",
    commands: &[
        "write -P 1 0 64k",
        "write -P 2 64k 64k",
        "write -P 3 1M 128k",
    ],
    after: &[],
};
const OLD: Base = Base {
    options: "compat=0.10",
    ..PLAIN
};
const SMALL: Base = Base {
    options: "cluster_size=4k",
    commands: &["write -P 1 0 4k", "write -P 2 2M 8k", "write -P 3 8k 20k"],
    ..PLAIN
};
const EXTENDED: Base = Base {
    options: "extended_l2=on",
    commands: &[
        "write -P 1 0 64k",
        "write -P 2 68k 4k",
        "write -z 100k 8k",
        "write -P 3 1M 128k",
    ],
    ..PLAIN
};
const PACKED: Base = Base {
    commands: &[
        "write -P 1 0 64k",
        "write -c -P 2 64k 64k",
        "write -c -P 4 128k 64k",
    ],
    ..PLAIN
};
const EXTENDED_PACKED: Base = Base {
    options: "extended_l2=on",
    ..PACKED
};
const DATA_FILE: Base = Base {
    options: "data_file=data.raw",
    ..PLAIN
};
const SNAPSHOT: Base = Base {
    after: &[&["snapshot", "-c", "s", "image.qcow2"]],
    ..PLAIN
};
const OLD_SNAPSHOT: Base = Base {
    options: "compat=0.10",
    ..SNAPSHOT
};
const BITMAP: Base = Base {
    after: &[&["bitmap", "--add", "image.qcow2", "b0"]],
    ..PLAIN
};
const OVERLAY: Base = Base {
    options: "backing_file=base.raw,backing_fmt=raw",
    commands: &[
        "write -P 1 0 64k",
        "write -P 2 64k 20k",
        "write -z 256k 64k",
    ],
    ..PLAIN
};
const LAZY: Base = Base {
    options: "lazy_refcounts=on",
    ..PLAIN
};

impl Base {
    fn make(&self) -> Image {
        let mut image = Image::create_beside(self.options, "4M", |dir| {
            let base: Vec<u8> = (0..4u32 << 20).map(|i| (i / 4096 + 100) as u8).collect();
            std::fs::write(dir.join("base.raw"), base).unwrap();
        });
        image.io(self.commands);
        for args in self.after {
            image.img(args);
        }
        image
    }
}

/// What the breaking steps have in common.
trait Breaking {
    fn entry(&self, index: u64) -> u64;
    fn count(&mut self, cluster: u64, count: u64);
    fn l2_entry(&mut self, index: u64, change: impl FnOnce(u64) -> u64);
    fn add_cluster(&mut self) -> u64;
}

impl Breaking for Image {
    /// An L2 entry without COPIED.
    fn entry(&self, index: u64) -> u64 {
        self.word(self.l2() + 8 * index) & !COPIED
    }
    /// Sets a refcount of any width.
    fn count(&mut self, cluster: u64, count: u64) {
        let order = self.get(96, 4);
        let order = if self.get(4, 4) == 2 { 4 } else { order };
        let block = self.refcount_block();
        if order >= 3 {
            let width = 1 << (order - 3);
            self.set(block + cluster * width, width as usize, count);
            return;
        }
        let bits = 1 << order;
        let at = block + cluster * bits / 8;
        let shift = cluster * bits % 8;
        let mask = ((1 << bits) - 1) << shift;
        let byte = self.get(at, 1) & !mask | count << shift;
        self.set(at, 1, byte);
    }
    fn l2_entry(&mut self, index: u64, change: impl FnOnce(u64) -> u64) {
        self.map_word(self.l2() + 8 * index, change);
    }
    fn add_cluster(&mut self) -> u64 {
        let len = self.bytes.len().next_multiple_of(CLUSTER as usize);
        self.bytes.resize(len + CLUSTER as usize, 0x77);
        len as u64 / CLUSTER
    }
}

type Break = fn(&mut Image);
/// Its name, the sound image, and what is done to it.
type Case = (&'static str, Base, Break);

/// Files of the image's directory, read-only.
struct Directory(PathBuf);

impl Gate for Directory {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        let bytes = std::fs::read(self.0.join(request.name));
        let bytes = bytes.map_err(|error| Error::io(request.name, error))?;
        Ok(Arc::new(MemoryFile::read_only(request.name, bytes)))
    }
}

/// What the guest reads, block by block; `None` where it cannot.
type Contents = Vec<Option<Vec<u8>>>;

fn contents(bytes: &[u8], image: &Image) -> Contents {
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::read_only("image", bytes.to_vec()));
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        ..OpenOptions::default()
    };
    let gate = Directory(image.dir().to_path_buf());
    let blocks = (4 << 20) / BLOCK;
    let Ok(disk) = block_on(cowslip::Image::open(file, options, &gate)) else {
        return vec![None; blocks as usize];
    };
    let read = |offset: u64, len: u64| {
        let read = block_on(disk.read(offset, BufMut::zeroed(len as usize)));
        read.ok().map(|buf| buf.to_vec())
    };
    let mut contents = Vec::new();
    for offset in (0..blocks * BLOCK).step_by(READ_BYTES as usize) {
        match read(offset, READ_BYTES) {
            Some(bytes) => contents.extend(bytes.chunks(BLOCK as usize).map(|b| Some(b.to_vec()))),
            None => {
                let blocks = (offset..offset + READ_BYTES).step_by(BLOCK as usize);
                contents.extend(blocks.map(|offset| read(offset, BLOCK)));
            }
        }
    }
    contents
}

/// What a snapshot's guest read, as QEMU tells it.
fn snapshot_contents(image: &Image) -> Option<Vec<u8>> {
    image.save();
    let output = Command::new("qemu-img")
        .args([
            "convert",
            "-l",
            "snapshot.name=s",
            "-O",
            "raw",
            "image.qcow2",
            "snapshot.raw",
        ])
        .current_dir(image.dir())
        .output()
        .unwrap();
    let read = output.status.success();
    read.then(|| std::fs::read(image.dir().join("snapshot.raw")).unwrap())
}

/// Kinds of corruption, how many of each. A crash in a repair may leave leaks, and COPIED behind the
/// counts.
fn kinds(bytes: &[u8]) -> BTreeMap<String, usize> {
    let mut findings = Vec::new();
    if let Err(error) = our_check(bytes.to_vec(), &mut findings) {
        return BTreeMap::from([(format!("{error}"), 1)]);
    }
    let mut kinds = BTreeMap::new();
    for finding in findings {
        match finding {
            Finding::Refcount {
                refcount,
                references,
                ..
            } if refcount > references => {}
            Finding::CopiedData { .. } | Finding::CopiedL2 { .. } => {}
            // One for each cluster, those that the repair itself adds among them.
            Finding::RefcountUnreadable { .. } => {
                kinds.insert("RefcountUnreadable".to_string(), 1);
            }
            // Who shares a cluster is told in one way or another, by its count.
            Finding::Refcount { .. } | Finding::Overlap { .. } => {
                *kinds.entry("Shared".to_string()).or_default() += 1;
            }
            other => {
                let text = format!("{other:?}");
                let kind = text.split([' ', '{']).next().unwrap().to_string();
                *kinds.entry(kind).or_default() += 1;
            }
        }
    }
    kinds
}

fn repair_in(file: Arc<Recorder>, scope: Scope) -> cowslip::Result<Outcome> {
    let file: Arc<dyn BlockFile> = file;
    block_on(repair::repair(&file, &RepairOptions::new(scope), &mut ()))
}

fn qemu_repairs(broken: &Image) -> Image {
    let mut image = broken.copy_beside();
    image.save();
    // Some images it breaks off at, or cannot open at all.
    let output = Command::new("qemu-img")
        .args(["check", "-q", "-f", "qcow2", "-r", "all", "image.qcow2"])
        .current_dir(image.dir())
        .output()
        .unwrap();
    assert!(output.status.code().is_some(), "{output:?}");
    // It follows broken entries far beyond the end: what is there is no guest's.
    let mut file = std::fs::File::open(image.path()).unwrap().take(64 << 20);
    image.bytes.clear();
    file.read_to_end(&mut image.bytes).unwrap();
    image
}

/// What the guest reads after QEMU's repair, as QEMU tells it.
fn qemu_contents(image: &Image) -> Contents {
    let output = Command::new("qemu-img")
        .args([
            "convert",
            "-f",
            "qcow2",
            "-O",
            "raw",
            "image.qcow2",
            "guest.raw",
        ])
        .current_dir(image.dir())
        .output()
        .unwrap();
    if !output.status.success() {
        // Some of it may be readable all the same.
        return contents(&image.bytes, image);
    }
    let raw = std::fs::read(image.dir().join("guest.raw")).unwrap();
    raw.chunks(BLOCK as usize)
        .map(|block| Some(block.to_vec()))
        .collect()
}

/// Blocks of the original that one repair keeps and the other does not.
fn lost(original: &Contents, theirs: &Contents, ours: &Contents) -> Vec<usize> {
    (0..original.len())
        .filter(|&block| theirs[block] == original[block] && ours[block] != original[block])
        .collect()
}

struct Broken {
    name: &'static str,
    image: Image,
    original: Contents,
    snapshot: Option<Vec<u8>>,
}

impl Broken {
    fn make((name, base, change): &Case) -> Broken {
        let mut image = base.make();
        let original = contents(&image.bytes, &image);
        assert!(original.iter().all(Option::is_some), "{name}");
        let has_snapshot = !base.after.is_empty() && base.after != BITMAP.after;
        let snapshot = has_snapshot.then(|| snapshot_contents(&image).unwrap());
        change(&mut image);
        Broken {
            name,
            image,
            original,
            snapshot,
        }
    }

    /// Both repairs, compared.
    fn compare(&self) {
        let name = self.name;
        let file = Recorder::new(self.image.bytes.clone());
        let outcome = repair_in(file.clone(), Scope::All).unwrap();
        let mut ours = self.image.copy_beside();
        ours.bytes = file.contents();
        assert!(outcome.check.corruptions == 0, "{name}: {outcome:?}");
        let (verdict, findings) = ours.our_check();
        assert_eq!(verdict.exit_code, 0, "{name}: {findings:?}");
        let theirs = ours.qemu_check();
        assert_eq!(theirs.exit_code, 0, "{name}: {theirs:?}");
        assert_eq!(
            ours.word(72) & (3 * u64::from(ours.get(4, 4) == 3)),
            0,
            "{name}: marks remain"
        );
        // Nothing is left to do, and nothing is written then.
        let again = Recorder::new(ours.bytes.clone());
        let mut steps: Vec<Step> = Vec::new();
        let file: Arc<dyn BlockFile> = again.clone();
        let options = RepairOptions::new(Scope::All);
        block_on(repair::repair(&file, &options, &mut steps)).unwrap();
        assert!(
            steps.is_empty() && again.ops().is_empty(),
            "{name}: {steps:?}"
        );

        let theirs = qemu_repairs(&self.image);
        let kept = contents(&ours.bytes, &ours);
        let their_contents = qemu_contents(&theirs);
        let lost = lost(&self.original, &their_contents, &kept);
        assert!(lost.is_empty(), "{name}: lost blocks {lost:?}");
        let readable = |block: usize| kept[block].is_some() || their_contents[block].is_none();
        assert!((0..kept.len()).all(readable), "{name}: unreadable");
        if self.snapshot.is_some() && snapshot_contents(&theirs) == self.snapshot {
            assert!(
                snapshot_contents(&ours) == self.snapshot,
                "{name}: the snapshot is lost"
            );
        }
    }

    /// A crash at every write.
    fn crash(&self) -> usize {
        let name = self.name;
        let before = contents(&self.image.bytes, &self.image);
        let kinds_before = kinds(&self.image.bytes);
        let file = Recorder::new(self.image.bytes.clone());
        repair_in(file.clone(), Scope::All).unwrap();
        let whole = contents(&file.contents(), &self.image);
        let mut seen: HashSet<Vec<u8>> = HashSet::new();
        each_crash(&self.image.bytes, &file.ops(), |at, bytes| {
            if !seen.insert(bytes.to_vec()) {
                return;
            }
            for (kind, count) in kinds(bytes) {
                let had = kinds_before.get(&kind).copied().unwrap_or(0);
                if count > had {
                    let mut findings = Vec::new();
                    drop(our_check(bytes.to_vec(), &mut findings));
                    panic!("{name}, {at}: {kind}: {count} after {had}: {findings:#?}");
                }
            }
            let after = contents(bytes, &self.image);
            let lost = lost(&self.original, &before, &after);
            assert!(lost.is_empty(), "{name}, {at}: lost blocks {lost:?}");
            let again = Recorder::new(bytes.to_vec());
            let outcome = repair_in(again.clone(), Scope::All).unwrap();
            assert!(
                outcome.check.is_clean(),
                "{name}, {at}: {:?}",
                outcome.check
            );
            let second = contents(&again.contents(), &self.image);
            for (block, content) in second.iter().enumerate() {
                assert!(
                    *content == whole[block],
                    "{name}, {at}: block {block} differs"
                );
            }
        })
    }

    /// Every write fails once: the repair says so, and the image is no worse.
    fn fail(&self) {
        let name = self.name;
        let whole = Recorder::new(self.image.bytes.clone());
        repair_in(whole.clone(), Scope::All).unwrap();
        for budget in 0..whole.ops().len() {
            let file = Recorder::failing_after(self.image.bytes.clone(), budget);
            let outcome = repair_in(file.clone(), Scope::All);
            assert!(
                outcome.is_err(),
                "{name}: {budget} of {}",
                whole.ops().len()
            );
            let again = Recorder::new(file.contents());
            let outcome = repair_in(again, Scope::All).unwrap();
            assert!(outcome.check.is_clean(), "{name} after {budget}");
        }
    }
}

fn judge(cases: &[Case]) {
    if !peers_are_installed() {
        return;
    }
    let mut states = 0;
    for case in cases {
        let broken = Broken::make(case);
        broken.compare();
        states += broken.crash();
        broken.fail();
    }
    eprintln!("{} images, {states} crashes", cases.len());
    assert!(states > cases.len());
}

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
