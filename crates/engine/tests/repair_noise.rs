//! Repairs of images that are damaged at random: no panic, no byte lost that could be read, at most
//! as much damage after a crash as before it. And images that were not closed cleanly.

use std::sync::Arc;

use crate::support::crash::{Recorder, each_crash};
use crate::support::{block_on, our_check};
use cowslip::file::BlockFile;
use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{DirtyImage, Format, OpenOptions, ZeroOptions};
use cowslip::qcow2::create::{self, CreateOptions};
use cowslip::qcow2::header::Header;
use cowslip::qcow2::repair::{self, Outcome, RepairOptions, Scope, Step};
use cowslip::{Buf, BufMut, Image};
use cowslip_block::random::Random;

const SIZE: u64 = 256 << 10;
const BLOCK: u64 = 512;

fn open(file: Arc<dyn BlockFile>, writable: bool, dirty: DirtyImage) -> cowslip::Result<Image> {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable,
        dirty,
        ..OpenOptions::default()
    };
    block_on(Image::open(file, options, &NoFiles))
}

/// A sound image with some data, and the bytes of its file.
fn sound(cluster_bits: u32, extended_l2: bool, refcount_bits: u64) -> Vec<u8> {
    let file: Arc<MemoryFile> = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    let options = CreateOptions {
        cluster_size: 1 << cluster_bits,
        extended_l2,
        refcount_bits,
        ..CreateOptions::new(SIZE)
    };
    block_on(create::create(file.clone(), None, &options)).unwrap();
    let image = open(file.clone(), true, DirtyImage::default()).unwrap();
    for (offset, len) in [(0, 9000), (20_000, 4096), (70_000, 30_000), (200_000, 5000)] {
        let bytes: Vec<u8> = (offset..offset + len)
            .map(|i| (i * 7 % 251) as u8)
            .collect();
        block_on(image.write(offset, Buf::from(bytes), Default::default())).unwrap();
    }
    block_on(image.write_zeroes(24_000, 20_000, ZeroOptions::default())).unwrap();
    block_on(image.write_compressed(131_072, Buf::from(vec![9; 16384]))).ok();
    block_on(image.close()).unwrap();
    file.contents()
}

type Contents = Vec<Option<Vec<u8>>>;

fn contents(bytes: &[u8]) -> Contents {
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::read_only("image", bytes.to_vec()));
    let Ok(image) = open(file, false, DirtyImage::Refuse) else {
        return vec![None; (SIZE / BLOCK) as usize];
    };
    let read = |block: u64| {
        let buf = BufMut::zeroed(BLOCK as usize);
        let read = block_on(image.read(block * BLOCK, buf));
        read.ok().map(|buf| buf.to_vec())
    };
    (0..SIZE / BLOCK).map(read).collect()
}

fn lost(original: &Contents, before: &Contents, after: &Contents) -> Vec<usize> {
    (0..original.len())
        .filter(|&block| before[block] == original[block] && after[block] != original[block])
        .collect()
}

fn repaired(file: Arc<Recorder>) -> cowslip::Result<Outcome> {
    let file: Arc<dyn BlockFile> = file;
    block_on(repair::repair(
        &file,
        &RepairOptions::new(Scope::All),
        &mut (),
    ))
}

/// Damages entries of the tables: flips bits, and puts offsets of other clusters into them.
fn damage(bytes: &mut [u8], random: &mut Random) {
    let header = Header::parse_damaged(bytes, "image").unwrap();
    let word = |bytes: &[u8], at: u64| {
        let at = at as usize;
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
    };
    let cluster = 1u64 << header.cluster_bits;
    let table = word(bytes, header.l1_table_offset) & 0x00ff_ffff_ffff_fe00;
    let block = word(bytes, header.refcount_table_offset);
    let (l2, l1) = (cluster / 8, header.l1_bytes() / 8);
    let places = [
        (table, l2),
        (table, l2.min(24)),
        (header.l1_table_offset, l1),
        (header.refcount_table_offset, 2),
        (block, (bytes.len() as u64 / cluster / 4).max(1)),
        (40, 3),
    ];
    for _ in 0..=random.below(4) {
        let (start, words) = places[random.below(places.len() as u64) as usize];
        let at = start + 8 * random.below(words);
        if at + 8 > bytes.len() as u64 || start == 0 {
            continue;
        }
        let entry = word(bytes, at);
        let new = match random.below(6) {
            0 => entry ^ 1 << random.below(64),
            1 => entry ^ 1 << (9 + random.below(12)),
            2 => 0,
            3 => (1 << 63) | (random.below(bytes.len() as u64 / cluster) * cluster),
            4 => random.below(bytes.len() as u64 / cluster + 3) * cluster,
            _ => entry ^ random.below(1 << 30) << random.below(34),
        };
        bytes[at as usize..at as usize + 8].copy_from_slice(&new.to_be_bytes());
    }
}

/// Repairs one damaged image, and again with a crash at every write.
fn judge(name: &str, original: &Contents, broken: &[u8]) -> usize {
    let before = contents(broken);
    let file = Recorder::new(broken.to_vec());
    let outcome = match repaired(file.clone()) {
        Ok(outcome) => outcome,
        // A header that says nothing usable.
        Err(_) => {
            assert!(file.ops().is_empty(), "{name}: written, and failed");
            return 0;
        }
    };
    if !outcome.check.is_clean() {
        let mut findings = Vec::new();
        drop(our_check(file.contents(), &mut findings));
        let mut steps: Vec<Step> = Vec::new();
        let file: Arc<dyn BlockFile> = Recorder::new(broken.to_vec());
        drop(block_on(repair::plan(
            &file,
            &RepairOptions::new(Scope::All),
            &mut steps,
        )));
        panic!("{name}: {outcome:?}: {steps:#x?} {findings:#?}");
    }
    let whole = contents(&file.contents());
    let gone = lost(original, &before, &whole);
    assert!(gone.is_empty(), "{name}: lost {gone:?}");
    each_crash(broken, &file.ops(), |at, bytes| {
        let gone = lost(original, &before, &contents(bytes));
        assert!(gone.is_empty(), "{name}, {at}: lost {gone:?}");
        let again = Recorder::new(bytes.to_vec());
        let outcome = repaired(again.clone()).unwrap();
        assert!(outcome.check.is_clean(), "{name}, {at}: {outcome:?}");
        let second = contents(&again.contents());
        let gone = lost(original, &whole, &second);
        assert!(
            gone.is_empty(),
            "{name}, {at}: the second repair lost {gone:?}"
        );
    })
}

#[test]
fn random_damage_is_repaired() {
    let seeds = std::env::var("COWSLIP_SEEDS").map_or(12, |n| n.parse().unwrap());
    let first = std::env::var("COWSLIP_SEED").map_or(0, |n| n.parse().unwrap());
    let (mut states, mut damaged) = (0, 0);
    for (cluster_bits, extended, refcount_bits) in [
        (12, false, 16),
        (9, false, 64),
        (14, true, 16),
        (12, false, 1),
        (16, false, 8),
    ] {
        let sound = sound(cluster_bits, extended, refcount_bits);
        let original = contents(&sound);
        assert!(original.iter().all(Option::is_some));
        for seed in first..first + seeds {
            let mut random = Random(seed * 977 + u64::from(cluster_bits));
            let mut broken = sound.clone();
            damage(&mut broken, &mut random);
            damaged += usize::from(broken != sound);
            let name = format!("{cluster_bits} {extended} {refcount_bits}, seed {seed}");
            states += judge(&name, &original, &broken);
        }
    }
    eprintln!("{damaged} damaged images, {states} crashes");
    assert!(states > damaged);
}

fn with_features(bytes: &[u8], bits: u8) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[79] |= bits;
    bytes
}

#[test]
fn an_image_that_was_not_closed_is_repaired_before_it_is_written() {
    let sound = sound(12, false, 16);
    let original = contents(&sound);
    let mut dirty = with_features(&sound, 1);
    let word = |at: usize| u64::from_be_bytes(sound[at..at + 8].try_into().unwrap()) as usize;
    let counts = word(word(48));
    // Counts are behind: two clusters that are in use look free.
    dirty[counts + 8..counts + 12].fill(0);

    let file = Recorder::new(dirty.clone());
    assert!(open(file.clone(), false, DirtyImage::default()).is_ok());
    assert!(contents(&dirty) == original);
    assert!(open(file.clone(), true, DirtyImage::Refuse).is_err());
    assert!(file.ops().is_empty(), "reading and refusing change nothing");

    let image = open(file.clone(), true, DirtyImage::default()).unwrap();
    assert_eq!(file.contents()[79] & 1, 0);
    block_on(image.write(100_000, Buf::from(vec![1; 8192]), Default::default())).unwrap();
    block_on(image.close()).unwrap();
    let after = contents(&file.contents());
    for (block, content) in after.iter().enumerate() {
        let written = (100_000..108_192).contains(&((block as u64 + 1) * BLOCK))
            || (100_000..108_192).contains(&(block as u64 * BLOCK));
        assert!(written || *content == original[block], "block {block}");
    }
}

#[test]
fn a_corrupt_image_is_read_and_refused_for_writing() {
    let sound = sound(12, false, 16);
    let corrupt = with_features(&sound, 2);
    let file = Recorder::new(corrupt.clone());
    assert!(contents(&corrupt) == contents(&sound));
    let refused = open(file.clone(), true, DirtyImage::default()).unwrap_err();
    assert!(refused.to_string().contains("check -r all"), "{refused}");
    assert!(file.ops().is_empty());
    repaired(file.clone()).unwrap();
    assert!(file.contents() == sound, "the mark is all that was wrong");
}

/// A device does not grow: new space is found behind what is in use.
#[test]
fn a_device_is_repaired_within_its_length() {
    let mut bytes = sound(12, false, 16);
    let original = contents(&bytes);
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let table = word(48);
    bytes[table..table + 8].fill(0);
    bytes.resize(bytes.len() + (1 << 20), 0xee);
    let device = Recorder::device(bytes.clone());
    let outcome = repaired(device.clone()).unwrap();
    assert!(
        outcome.check.is_clean() && outcome.done.rebuilds_refcounts,
        "{outcome:?}"
    );
    assert_eq!(device.contents().len(), bytes.len());
    assert!(contents(&device.contents()) == original);
}

#[test]
fn a_sound_image_is_not_written() {
    let file = Recorder::new(sound(16, true, 16));
    let outcome = repaired(file.clone()).unwrap();
    assert!(outcome.check.is_clean() && outcome.done.is_empty());
    assert!(file.ops().is_empty());
}

#[test]
fn a_repair_that_may_not_have_the_memory_changes_nothing() {
    let mut bytes = sound(12, false, 16);
    bytes[48..56].fill(0xff);
    let file = Recorder::new(bytes);
    let options = RepairOptions {
        memory_bytes_max: 4096,
        ..RepairOptions::new(Scope::All)
    };
    let shared: Arc<dyn BlockFile> = file.clone();
    let refused = block_on(repair::repair(&shared, &options, &mut ())).unwrap_err();
    assert!(refused.to_string().contains("memory"), "{refused}");
    assert!(file.ops().is_empty());
}

/// `-r leaks` frees leaks and nothing else, and nothing at all where tables are broken.
#[test]
fn the_scope_of_leaks_is_kept() {
    let sound = sound(12, false, 16);
    let word = |at: usize| u64::from_be_bytes(sound[at..at + 8].try_into().unwrap()) as usize;
    let counts = word(word(48));
    let leaks = RepairOptions::new(Scope::Leaks);
    let mut leaking = sound.clone();
    leaking[counts + 7] = 2;
    let file = Recorder::new(leaking.clone());
    let shared: Arc<dyn BlockFile> = file.clone();
    let outcome = block_on(repair::repair(&shared, &leaks, &mut ())).unwrap();
    assert!(outcome.check.is_clean(), "{outcome:?}");
    assert!(file.contents() == sound);

    leaking[word(40)] |= 1;
    let file = Recorder::new(leaking.clone());
    let shared: Arc<dyn BlockFile> = file.clone();
    let outcome = block_on(repair::repair(&shared, &leaks, &mut ())).unwrap();
    assert!(outcome.check.corruptions > 0 && outcome.check.leaks > 0);
    assert!(file.contents() == leaking);
    let mut steps: Vec<Step> = Vec::new();
    block_on(repair::plan(
        &shared,
        &RepairOptions::new(Scope::All),
        &mut steps,
    ))
    .unwrap();
    assert!(file.contents() == leaking, "a plan changes nothing");
    assert!(steps.iter().any(Step::frees_leak), "{steps:?}");
    assert!(
        steps
            .iter()
            .all(|step| !step.what().is_empty() && !step.why().is_empty())
    );
}

/// As `qemu-img check -r` does it; but where entries were broken, what became free may be what one
/// meant.
#[test]
fn space_of_leaks_is_given_back_unless_an_entry_was_broken() {
    let mut leaking = sound(12, false, 16);
    let word = |at: usize| u64::from_be_bytes(leaking[at..at + 8].try_into().unwrap()) as usize;
    let (l1, counts) = (word(40), word(word(48)));
    let leaked = leaking.len().next_multiple_of(4096);
    leaking.resize(leaked, 0);
    leaking.resize(leaked + 2 * 4096, 0xee);
    for cluster in [leaked / 4096, leaked / 4096 + 1] {
        leaking[counts + 2 * cluster + 1] = 1;
    }
    let mut broken = leaking.clone();
    broken[l1 + 7] |= 1;
    for (image, scope, given_back) in [
        (&leaking, Scope::Leaks, true),
        (&leaking, Scope::All, true),
        (&broken, Scope::All, false),
    ] {
        let file = Recorder::new(image.clone());
        let shared: Arc<dyn BlockFile> = file.clone();
        let options = RepairOptions::new(scope);
        let outcome = block_on(repair::repair(&shared, &options, &mut ())).unwrap();
        assert!(outcome.check.is_clean(), "{outcome:?}");
        assert_eq!(outcome.done.leaks, 2);
        let now = file.contents();
        let expected = if given_back { 0 } else { 0xee };
        let space = &now[leaked..leaked + 2 * 4096];
        assert!(space.iter().all(|&byte| byte == expected), "{scope:?}");
        assert!(contents(&now) == contents(&leaking));
    }
}
