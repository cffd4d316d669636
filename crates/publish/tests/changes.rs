//! Versions of which it is known what has changed: what is read for them, and what is noticed where
//! that is wrong.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use cowslip_block::disk::{Disk, DiskFuture, Extent, Features, MemoryDisk};
use cowslip_block::file::Durability;
use cowslip_block::random::Random;
use cowslip_block::{Buf, IoVecMut, Job, Workers};
use cowslip_publish::digest::Digest;
use cowslip_publish::location::Version;
use cowslip_publish::publish::{Changed, Request, publish};
use cowslip_publish::store::Store;

use crate::shared::{change, disk_of, open, publish_bytes, random_bytes, read_all, small_request};
use crate::simulated::{Simulated, run};
use crate::versions::golden;

/// Bytes that differ, in ranges of this granularity, as a bitmap has them.
fn differences(old: &[u8], new: &[u8], granularity: usize) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for start in (0..new.len()).step_by(granularity) {
        let end = (start + granularity).min(new.len());
        let is_same = old
            .get(start..end)
            .is_some_and(|old| *old == new[start..end]);
        let piece = start as u64..end as u64;
        match ranges.last_mut() {
            _ if is_same => {}
            Some(last) if last.end == piece.start => last.end = piece.end,
            _ => ranges.push(piece),
        }
    }
    ranges
}

/// Versions by what is known to have changed, each upon the one before: of any lengths, and each is
/// the disk of its moment.
#[test]
fn a_version_of_which_the_changes_are_known_is_the_disk() {
    let mut rng = Random(23);
    let store = Simulated::new(7);
    let client = cowslip_publish::store::Store::new(store.client(), "sim");
    let mut bytes = random_bytes(&mut rng, 900_000);
    let request = small_request("golden", &mut rng);
    let mut before = run(publish_bytes(&client, &bytes, &request))
        .unwrap()
        .record;
    for round in 0..60 {
        let old = bytes.clone();
        for _ in 0..rng.below(4) {
            change(&mut rng, &mut bytes);
        }
        if rng.one_in(5) {
            let len = 4096 + rng.below(1 << 20) as usize;
            bytes.resize(len, 0);
        }
        let granularity = 512 << rng.below(9);
        let since = Digest::from_hex(&before.index).unwrap();
        let request = Request {
            changed: Some(Changed {
                since,
                ranges: differences(&old, &bytes, granularity),
            }),
            ..small_request("golden", &mut rng)
        };
        before = run(publish_bytes(&client, &bytes, &request))
            .unwrap()
            .record;
        let disk = run(open(&client, "golden", Version::Newest)).unwrap();
        assert!(run(read_all(&disk)).unwrap() == bytes, "round {round}");
    }
}

/// A disk that counts the bytes that are read of it.
#[derive(Debug)]
struct Counted(MemoryDisk, AtomicU64);

impl Disk for Counted {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    fn features(&self) -> Features {
        self.0.features()
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        self.1.fetch_add(buf.len() as u64, Ordering::Relaxed);
        self.0.read(offset, buf)
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<Extent>> {
        self.0.extents(offset, len, max)
    }
}

/// A request that takes these ranges for all that has changed since a version.
fn known(since: &str, ranges: Vec<Range<u64>>, rng: &mut Random) -> Request {
    let since = Digest::from_hex(since).unwrap();
    Request {
        changed: Some(Changed { since, ranges }),
        ..small_request("golden", rng)
    }
}

fn publish_disk(store: &Store, disk: &dyn Disk, request: &Request) -> Result<(), String> {
    let (workers, job) = (Workers::default(), Job::default());
    let done = run(publish(disk, store, request, &workers, &job));
    done.map(drop).map_err(|error| error.to_string())
}

/// A store with a version of a disk.
fn published(rng: &mut Random, disk: &dyn Disk) -> (Simulated, Store, String) {
    let simulated = Simulated::new(8);
    let store = Store::new(simulated.client(), "sim");
    let request = small_request("golden", rng);
    let (workers, job) = (Workers::default(), Job::default());
    let done = run(publish(disk, &store, &request, &workers, &job)).unwrap();
    (simulated, store, done.record.index)
}

#[test]
fn of_what_has_not_changed_only_a_drawn_part_is_read() {
    let mut rng = Random(29);
    let mut bytes = golden(&mut rng, 24 << 20);
    let (_simulated, store, first) = published(&mut rng, &disk_of(&bytes));
    let range = 1 << 20..(1 << 20) + 8192_usize;
    rng.fill(&mut bytes[range.clone()]);
    let marked = range.start as u64..range.end as u64;
    let disk = Counted(disk_of(&bytes), AtomicU64::new(0));
    let request = known(&first, std::iter::once(marked).collect(), &mut rng);
    publish_disk(&store, &disk, &request).unwrap();
    // 1024 chunks of 10 KiB or so are drawn.
    let read = disk.1.load(Ordering::Relaxed);
    assert!((8 << 20..14 << 20).contains(&read), "{read}");
    let shown = run(open(&store, "golden", Version::Newest)).unwrap();
    assert!(run(read_all(&shown)).unwrap() == bytes);
    let gone = known(&Digest::of(b"none").to_string(), Vec::new(), &mut rng);
    let refused = publish_disk(&store, &disk, &gone).unwrap_err();
    assert!(refused.contains("is not there any more"), "{refused}");
}

/// Asserts that changes which are not noted are noticed, and leave no version.
fn assert_noticed(store: &Store, disk: &dyn Disk, request: &Request) {
    let refused = publish_disk(store, disk, request).unwrap_err();
    assert!(refused.contains("not all that has changed"), "{refused}");
    assert!(run(open(store, "golden", Version::Number(2))).is_err());
}

#[test]
fn a_change_of_a_small_disk_that_is_not_noted_is_noticed() {
    let mut rng = Random(31);
    let bytes = random_bytes(&mut rng, 900_000);
    let (_simulated, store, first) = published(&mut rng, &disk_of(&bytes));
    for _ in 0..200 {
        let mut others = bytes.clone();
        while others == bytes {
            change(&mut rng, &mut others);
        }
        // Another change is noted, and this one in part.
        let mut noted = differences(&bytes, &others, 512);
        let missed = noted.remove(rng.below(noted.len() as u64) as usize);
        let far = (missed.end + (64 << 10)).min(bytes.len() as u64);
        noted.retain(|range| range.end + (64 << 10) < missed.start);
        noted.push(far..bytes.len() as u64);
        noted.retain(|range| !range.is_empty());
        assert_noticed(&store, &disk_of(&others), &known(&first, noted, &mut rng));
    }
}

/// A bitmap of another image, or one that was cleared: many chunks are others.
#[test]
fn a_hundredth_of_a_large_disk_that_is_not_noted_is_noticed() {
    let mut rng = Random(37);
    let bytes = golden(&mut rng, 16 << 20);
    let (_simulated, store, first) = published(&mut rng, &disk_of(&bytes));
    let mut others = bytes.clone();
    // Of some 1450 chunks: 15 in different places. That no drawn one is one of them has a
    // probability of (1 - 1024/1450)^15, or one in 10^8.
    for at in (0..15).map(|place| place * (1 << 20) + 77) {
        others[at] ^= 1;
    }
    let before = known(&first, Vec::new(), &mut rng);
    assert_noticed(&store, &disk_of(&others), &before);
}

#[test]
fn what_is_new_where_there_was_nothing_and_gone_where_there_was_is_noticed_on_any_disk() {
    let mut rng = Random(41);
    let disk = MemoryDisk::new("large", 1 << 31);
    let noise = golden(&mut rng, 4 << 20);
    let write = |disk: &MemoryDisk, at: u64, bytes: &[u8]| {
        let data = Buf::copy_of(bytes).into();
        run(disk.write(at, data, Durability::Cached)).unwrap();
    };
    write(&disk, 3 << 29, &noise);
    let (_simulated, store, first) = published(&mut rng, &disk);
    // Zeroes that a guest has written change nothing.
    write(&disk, 5 << 26, &[0; 8192]);
    write(&disk, 7 << 26, &[0, 0, 9, 0]);
    assert_noticed(&store, &disk, &known(&first, Vec::new(), &mut rng));
    write(&disk, 7 << 26, &[0; 4]);
    let discarded = (3 << 29) + (1 << 20);
    run(disk.discard(discarded, 64 << 10)).unwrap();
    assert_noticed(&store, &disk, &known(&first, Vec::new(), &mut rng));
    let noted = std::iter::once(discarded..discarded + (64 << 10)).collect();
    publish_disk(&store, &disk, &known(&first, noted, &mut rng)).unwrap();
}
