//! Encrypted images when the power fails, or the disk: what was flushed is read as it was, and a
//! passphrase opens them.

use std::sync::{Arc, Mutex};

use cowslip::file::BlockFile;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{Durability, Format, OpenOptions};
use cowslip::luks::{
    CipherMode, ErasedKeys, KeyChange, KeyMaterial, NewKey, NewVolume, Passphrase, VolumeOptions,
};
use cowslip::qcow2::create::{CreateOptions, Encryption, Preallocation, create, create_luks};
use cowslip::{Image, Job, Result, Workers};
use cowslip_block::random::Random;
use cowslip_queue::{Buf, BufMut};

use crate::support::block_on;
use crate::support::crash::{Recorder, each_crash};

const DISK_BYTES: u64 = 128 << 10;
const SECTOR_BYTES: usize = 512;

/// A passphrase of this text.
pub fn passphrase(name: &str) -> Passphrase {
    Passphrase::new(name.as_bytes().to_vec())
}

/// The material of new keys: the same numbers in every run.
pub fn means() -> KeyMaterial {
    let random = Mutex::new(Random(1));
    let random = move |bytes: &mut [u8]| {
        let mut random = random.lock().unwrap();
        bytes.fill_with(|| (random.next() >> 56) as u8);
        Ok(())
    };
    KeyMaterial {
        random: Arc::new(random),
        workers: Workers::default(),
    }
}

/// A volume that 'a' opens, by a slot that costs little.
pub fn volume() -> NewVolume {
    let means = means();
    let options = VolumeOptions::cheap(CipherMode::Cbc, passphrase("a"));
    NewVolume::make(&options, &mut |bytes| (means.random)(bytes)).unwrap()
}

/// An image of this volume.
fn made(format: Format) -> Vec<u8> {
    let volume = volume();
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    if format == Format::Luks {
        let (off, job) = (Preallocation::Off, Job::default());
        block_on(create_luks(file.clone(), DISK_BYTES, &volume, off, &job)).unwrap();
    } else {
        let mut options = CreateOptions::new(DISK_BYTES);
        options.cluster_size = 4096;
        options.encryption = Some(Encryption::Luks(Box::new(volume)));
        block_on(create(file.clone(), None, &options)).unwrap();
    }
    file.contents()
}

/// An image in QEMU's old way, with clusters as small as they can be.
fn made_the_old_way() -> Vec<u8> {
    let mut options = CreateOptions::new(DISK_BYTES);
    options.cluster_size = 512;
    options.encryption = Some(Encryption::Aes);
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    block_on(create(file.clone(), None, &options)).unwrap();
    file.contents()
}

/// Nothing else belongs to the images here.
struct NoFiles;

impl cowslip::file::Gate for NoFiles {
    fn open(&self, request: &cowslip::file::FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        Err(cowslip::Error::Invalid(format!(
            "'{}' is not wanted",
            request.name
        )))
    }
}

fn open(file: Arc<dyn BlockFile>, format: Format, name: &str) -> Result<Image> {
    let options = OpenOptions {
        format: Some(format),
        writable: true,
        passphrase: Some(passphrase(name)),
        ..OpenOptions::default()
    };
    block_on(Image::open(file, options, &NoFiles))
}

fn write(image: &Image, offset: u64, (byte, len): (u8, usize)) {
    let data = Buf::from(vec![byte; len]);
    block_on(image.write(offset, data, Durability::Cached)).unwrap();
}

fn read(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(DISK_BYTES as usize);
    block_on(image.read(0, buf)).unwrap().to_vec()
}

/// An image with some data, and the disk.
fn filled(format: Format, made: Vec<u8>) -> (Vec<u8>, Vec<u8>) {
    let file = Arc::new(MemoryFile::new("image", made, 1));
    let image = open(file.clone(), format, "a").unwrap();
    write(&image, 0, (0, DISK_BYTES as usize));
    write(&image, 1000, (1, 9000));
    write(&image, 70_000, (2, 20_000));
    block_on(image.flush()).unwrap();
    let disk = read(&image);
    block_on(image.close()).unwrap();
    (file.contents(), disk)
}

/// The disk as the first of these passphrases sees it that opens the image.
fn seen(format: Format, bytes: &[u8], passphrases: &[&str]) -> Option<Vec<u8>> {
    let opened = passphrases.iter().find_map(|name| {
        let file = Arc::new(MemoryFile::new("image", bytes.to_vec(), 1));
        open(file, format, name).ok()
    });
    opened.map(|image| read(&image))
}

#[test]
fn sectors_are_the_old_or_the_new_ones_after_a_crash() {
    let images = [
        (Format::Qcow2, made(Format::Qcow2)),
        (Format::Qcow2, made_the_old_way()),
        (Format::Luks, made(Format::Luks)),
    ];
    for (format, made) in images {
        let (start, old) = filled(format, made);
        let file = Recorder::new(start.clone());
        let image = open(file.clone(), format, "a").unwrap();
        // In place, into new space, over the edges of sectors and clusters.
        write(&image, 1500, (3, 700));
        write(&image, 40_000, (4, 13_000));
        write(&image, 89_990, (5, 20));
        let new = read(&image);
        block_on(image.flush()).unwrap();
        let (flushed, durable) = (file.ops().len(), file.contents());
        write(&image, 0, (6, 512));
        let states = each_crash(&start, &file.ops()[..flushed], |what, bytes| {
            let found = seen(format, bytes, &["a"]).expect("no key has changed");
            for at in (0..found.len()).step_by(SECTOR_BYTES) {
                let sector = at..at + SECTOR_BYTES;
                let found = &found[sector.clone()];
                let may_be = found == &old[sector.clone()] || found == &new[sector];
                assert!(may_be, "{format:?} {what}: sector at {at}");
            }
        });
        assert!(states > 3, "{format:?}: {states}");
        each_crash(&durable, &file.ops()[flushed..], |what, bytes| {
            let found = seen(format, bytes, &["a"]).expect("no key has changed");
            assert!(
                found[SECTOR_BYTES..] == new[SECTOR_BYTES..],
                "{format:?} {what}"
            );
        });
    }
}

/// A device's block holds several clusters, each with sectors of its own numbers.
#[test]
fn blocks_of_a_device_may_hold_clusters_from_all_over_the_disk() {
    let file = Arc::new(MemoryFile::new("image", made_the_old_way(), 4096));
    let image = open(file.clone(), Format::Qcow2, "a").unwrap();
    let mut disk = vec![0; DISK_BYTES as usize];
    let mut put = |at: usize, byte: u8, len: usize| {
        write(&image, at as u64, (byte, len));
        disk[at..at + len].fill(byte);
    };
    // Backwards, so that what lies side by side in the file does not on the disk; then over edges,
    // in place.
    for (byte, cluster) in (1..).zip((0..40).rev().step_by(3)) {
        put(cluster * 512, byte, 512);
    }
    put(0, 100, 7);
    put(3000, 101, 5000);
    put(DISK_BYTES as usize - 100, 102, 100);
    assert!(read(&image) == disk);
    block_on(image.flush()).unwrap();
    block_on(image.close()).unwrap();
    let found = seen(Format::Qcow2, &file.contents(), &["a"]).unwrap();
    assert!(found == disk);
    let otherwise = seen(Format::Qcow2, &file.contents(), &["b"]).unwrap();
    assert!(otherwise != disk, "another password is another disk");
}

fn add(current: &str, new: &str, slot: Option<u64>) -> KeyChange {
    KeyChange::Add(NewKey::cheap(passphrase(current), passphrase(new), slot))
}

fn erase(name: &str) -> KeyChange {
    KeyChange::Erase(ErasedKeys {
        slot: None,
        passphrase: Some(passphrase(name)),
        force: false,
    })
}

/// Changes, each of what those before have left: what opens the image before, and after.
fn changes() -> [(KeyChange, &'static [&'static str], &'static [&'static str]); 4] {
    [
        (add("a", "b", Some(6)), &["a"], &["a", "b"]),
        (erase("a"), &["a", "b"], &["b"]),
        (add("b", "c", Some(6)), &["b"], &["c"]),
        (add("c", "d", None), &["c"], &["c", "d"]),
    ]
}

#[test]
fn some_passphrase_opens_what_a_crash_or_a_failure_leaves_of_a_change() {
    for format in [Format::Qcow2, Format::Luks] {
        let (mut start, disk) = filled(format, made(format));
        for (change, before, after) in changes() {
            let either = [before, after].concat();
            let judge = |what: &str, bytes: &[u8]| {
                let found = seen(format, bytes, &either);
                assert!(
                    found.as_ref() == Some(&disk),
                    "{format:?} {change:?} {what}"
                );
            };
            let file = Recorder::new(start.clone());
            let image = open(file.clone(), format, before[0]).unwrap();
            block_on(image.change_keys(&change, &means(), &Job::default())).unwrap();
            let ops = file.ops();
            each_crash(&start, &ops, judge);
            block_on(image.close()).unwrap();
            for done in 0..ops.len() {
                let failing = Recorder::failing_after(start.clone(), done);
                let image = open(failing.clone(), format, before[0]).unwrap();
                let changed = block_on(image.change_keys(&change, &means(), &Job::default()));
                assert!(changed.is_err(), "{format:?} {change:?} {done}");
                judge("failed", &failing.contents());
            }
            start = file.contents();
            for name in ["a", "b", "c", "d"] {
                let opens = seen(format, &start, &[name]).is_some();
                assert_eq!(opens, after.contains(&name), "{format:?} {change:?} {name}");
            }
        }
    }
}

#[test]
fn requests_go_on_while_keys_change_and_a_plain_image_has_none() {
    for format in [Format::Qcow2, Format::Luks] {
        let (start, _) = filled(format, made(format));
        let file = Arc::new(MemoryFile::new("image", start, 1));
        let image = open(file.clone(), format, "a").unwrap();
        write(&image, 5000, (7, 5000));
        block_on(image.change_keys(&add("a", "b", None), &means(), &Job::default())).unwrap();
        write(&image, 5000, (8, 100));
        block_on(image.change_keys(&erase("a"), &means(), &Job::default())).unwrap();
        let disk = read(&image);
        block_on(image.close()).unwrap();
        assert!(seen(format, &file.contents(), &["b"]) == Some(disk));
        let keys = block_on(image.keys()).unwrap().unwrap();
        let used: Vec<bool> = keys.slots.iter().map(|slot| slot.active).collect();
        assert_eq!(used[..3], [false, true, false]);
    }
    let file = Arc::new(MemoryFile::new("plain", vec![0; 4096], 1));
    let plain = open(file, Format::Raw, "a").unwrap();
    assert!(block_on(plain.keys()).unwrap().is_none());
    let refused = block_on(plain.change_keys(&erase("a"), &means(), &Job::default()));
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("is not encrypted")
    );
}
