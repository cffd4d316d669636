//! Both repairs of a broken image, compared; then ours with a crash at every write, and a failure.

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

use super::bases::{BITMAP, Base};
use crate::support::crash::{Recorder, each_crash};
use crate::support::{Image, block_on, our_check, peers_are_installed};

/// The unit in which guest contents are compared.
const BLOCK: u64 = 4096;
/// Bytes that are read at once, where possible.
const READ_BYTES: u64 = 256 << 10;

/// Damages a sound image.
pub type Break = fn(&mut Image);
/// A case: its name, the sound image, and the damage.
pub type Case = (&'static str, Base, Break);

/// Files of the image's directory, read-only.
struct Directory(PathBuf);

impl Gate for Directory {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        let bytes = std::fs::read(self.0.join(request.name));
        let bytes = bytes.map_err(|error| Error::io(request.name, error))?;
        Ok(Arc::new(MemoryFile::read_only(request.name, bytes)))
    }
}

/// The guest's data, block by block; `None` where it cannot be read.
pub type Contents = Vec<Option<Vec<u8>>>;

/// An image in memory, to be written.
pub fn open_writable(file: Arc<dyn BlockFile>, image: &Image) -> cowslip::Image {
    try_open_writable(file, image).unwrap()
}

pub fn try_open_writable(
    file: Arc<dyn BlockFile>,
    image: &Image,
) -> cowslip::Result<cowslip::Image> {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        ..OpenOptions::default()
    };
    let gate = Directory(image.dir().to_path_buf());
    block_on(cowslip::Image::open(file, options, &gate))
}

pub fn contents(bytes: &[u8], image: &Image) -> Contents {
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

/// Returns the guest's data of a snapshot, as QEMU reads it.
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

/// Kinds of corruption, how many of each. A crash in a repair may leave leaks, and COPIED behind
/// the counts.
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
            // A shared cluster is reported in one way or the other, depending on its refcount.
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

/// Returns the guest's data after QEMU's repair, as QEMU reads it.
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

/// Repairs each, compares, and does so again with every crash and every failure.
pub fn judge(cases: &[Case]) {
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
