//! A power failure at every write of a change, torn at sectors: something always opens the volume.

use std::sync::Mutex;

use futures_util::FutureExt;

use super::super::{CipherMode, NewVolume, SECTOR_BYTES, VolumeOptions};
use super::*;
use crate::file::memory::MemoryFile;
use crate::random;

/// The volume is somewhere in its file, as in a qcow2 image.
const START: usize = 3 * SECTOR_BYTES;
const FILE_BYTES: usize = 1 << 20;

fn passphrase(name: &str) -> Passphrase {
    Passphrase::new(name.as_bytes().to_vec())
}

fn means() -> KeyMaterial {
    let random = Mutex::new(random::Random(5));
    let random = move |bytes: &mut [u8]| {
        let mut random = random.lock().unwrap();
        bytes.fill_with(|| random.next() as u8);
        Ok(())
    };
    KeyMaterial {
        random: Arc::new(random),
        workers: Workers::default(),
    }
}

/// A file with a volume that 'a' opens, by slot 0.
fn volume() -> Vec<u8> {
    let options = VolumeOptions::cheap(CipherMode::Cbc, passphrase("a"));
    let means = means();
    let made = NewVolume::make(&options, &mut |bytes| (means.random)(bytes)).unwrap();
    let mut file = vec![0; FILE_BYTES];
    for (at, bytes) in made.pieces() {
        write(&mut file, (START as u64 + at, &bytes));
    }
    file
}

fn write(file: &mut [u8], (at, bytes): (u64, &[u8])) {
    file[at as usize..][..bytes.len()].copy_from_slice(bytes);
}

fn place() -> Range<u64> {
    START as u64..FILE_BYTES as u64
}

fn stages_for(file: &[u8], change: &KeyChange) -> Result<Stages> {
    let file = AlignedFile::new(Arc::new(MemoryFile::new("x", file.to_vec(), 1)));
    let (means, job) = (means(), Job::default());
    let stages = stages(&file, place(), (change, &means), &job);
    stages.now_or_never().expect("memory does not wait")
}

/// The slots in use, and those of the passphrases that open the volume.
fn found(file: &[u8], passphrases: &[&'static str]) -> (Vec<usize>, Vec<&'static str>) {
    let file = AlignedFile::new(Arc::new(MemoryFile::new("x", file.to_vec(), 1)));
    let volume = Volume::read(&file, place())
        .now_or_never()
        .unwrap()
        .unwrap();
    let opens = |name: &&&str| {
        let with = (&Workers::default(), &Job::default());
        let unlocked = volume.unlock(&passphrase(name), with).now_or_never();
        unlocked.unwrap().is_ok()
    };
    let opening = passphrases.iter().filter(opens).copied().collect();
    (volume.active(), opening)
}

fn add(current: &str, new: &str, slot: Option<u64>) -> KeyChange {
    KeyChange::Add(NewKey::cheap(passphrase(current), passphrase(new), slot))
}

fn erase(slot: Option<u64>, name: Option<&str>) -> KeyChange {
    KeyChange::Erase(ErasedKeys {
        slot,
        passphrase: name.map(passphrase),
        force: true,
    })
}

/// Carries the change out. After any part of a stage, of which the disk has written some sectors,
/// whichever, one of `open` opens the volume.
fn change(file: &mut [u8], change: &KeyChange, open: &[&'static str]) {
    let survives = |file: &[u8]| {
        let (active, opening) = found(file, open);
        assert!(!opening.is_empty(), "{change:?}: {active:?}");
    };
    for stage in stages_for(file, change).unwrap() {
        let mut writes = Vec::new();
        for (at, bytes) in &stage {
            let mut from = 0;
            while from < bytes.len() {
                let to_edge = SECTOR_BYTES - (*at as usize + from) % SECTOR_BYTES;
                let to = bytes.len().min(from + to_edge);
                writes.push((at + from as u64, &bytes[from..to]));
                from = to;
            }
        }
        // Of the many sectors of stripes a few are enough.
        let step = writes.len().div_ceil(8);
        for count in (0..writes.len()).step_by(step) {
            let mut first = file.to_vec();
            let mut last = file.to_vec();
            for &sector in &writes[..count] {
                write(&mut first, sector);
            }
            for &sector in &writes[count..] {
                write(&mut last, sector);
            }
            survives(&first);
            survives(&last);
        }
        for (at, bytes) in stage {
            write(file, (at, &bytes));
        }
        survives(file);
    }
}

#[test]
fn a_key_is_added_to_any_slot_and_the_old_one_opens_meanwhile() {
    for slot in [1, 5, 6, 7] {
        let mut file = volume();
        change(&mut file, &add("a", "b", Some(slot)), &["a"]);
        let expected = (vec![0, slot as usize], vec!["a", "b"]);
        assert_eq!(found(&file, &["a", "b", "c"]), expected);
    }
}

#[test]
fn the_only_key_is_replaced_and_one_of_both_opens_meanwhile() {
    let mut file = volume();
    change(&mut file, &add("a", "b", Some(0)), &["a", "b"]);
    assert_eq!(found(&file, &["a", "b"]), (vec![0], vec!["b"]));
}

#[test]
fn with_all_slots_in_use_the_others_open_while_one_is_replaced() {
    let mut file = volume();
    for _ in 1..SLOTS {
        change(&mut file, &add("a", "c", None), &["a"]);
    }
    let full = stages_for(&file, &add("a", "b", None)).unwrap_err();
    assert!(full.to_string().contains("all keyslots are in use"));
    change(&mut file, &add("c", "b", Some(6)), &["c"]);
    let all = (0..SLOTS).collect();
    assert_eq!(found(&file, &["a", "b", "c"]), (all, vec!["a", "b", "c"]));
}

#[test]
fn what_is_erased_opens_nothing_and_is_gone() {
    for slot in [1, 5, 6, 7] {
        let mut file = volume();
        change(&mut file, &add("a", "b", Some(slot)), &["a"]);
        let before = file.clone();
        change(&mut file, &erase(Some(slot), Some("b")), &["a"]);
        assert_eq!(found(&file, &["a", "b"]), (vec![0], vec!["a"]));
        // Neither its stripes are there nor its salt, with which noise that survives could be
        // tried.
        let (start, bytes) = (START + 4096 + slot as usize * 64 * 1024, 64_000);
        let entry = START + Header::slot_at(slot as usize) + 4;
        for part in [start..start + bytes, entry..entry + 36] {
            let sectors = before[part.clone()].chunks(36);
            let same = sectors.zip(file[part].chunks(36)).filter(|(a, b)| a == b);
            assert_eq!(same.count(), 0, "slot {slot}");
        }
    }
    let mut file = volume();
    for _ in 0..3 {
        change(&mut file, &add("a", "b", None), &["a"]);
    }
    change(&mut file, &erase(None, Some("b")), &["a"]);
    assert_eq!(found(&file, &["a", "b"]), (vec![0], vec!["a"]));
    // Nothing is left to open.
    let last = erase(None, Some("a"));
    for stage in stages_for(&file, &last).unwrap() {
        for (at, bytes) in stage {
            write(&mut file, (at, &bytes));
        }
    }
    assert_eq!(found(&file, &["a", "b"]), (vec![], vec![]));
}

#[test]
fn a_cancelled_change_writes_nothing() {
    let file = AlignedFile::new(Arc::new(MemoryFile::new("x", volume(), 1)));
    let (means, job) = (means(), Job::default());
    job.cancel();
    for change in [add("a", "b", None), erase(Some(0), None)] {
        let stages = stages(&file, place(), (&change, &means), &job).now_or_never();
        assert!(matches!(stages, Some(Err(Error::Cancelled))), "{change:?}");
    }
}
