//! Random reads of published disks, against their bytes, with caches of all sizes.

use cowslip_block::random::Random;
use cowslip_block::{BufMut, Workers};
use cowslip_publish::cut::BLOCK_BYTES;
use cowslip_publish::digest::Digest;
use cowslip_publish::disk::PublishedDisk;
use cowslip_publish::index::Content;
use cowslip_publish::store::Store;
use futures_util::future::join_all;

use crate::shared::{change, publish_bytes, random_bytes, small_request};
use crate::simulated::{Simulated, run};

/// Reads of a seed; `COWSLIP_PUBLISH_READS` for a soak.
fn reads() -> u64 {
    let reads = std::env::var("COWSLIP_PUBLISH_READS");
    reads.map_or(2000, |text| text.parse().unwrap())
}

#[test]
fn reads_are_those_of_the_bytes() {
    let mut rng = Random(21);
    let sim = Simulated::new(9);
    let store = Store::new(sim.client(), "sim");
    let mut bytes = random_bytes(&mut rng, (3 << 20) + 1536);
    for version in 0..3 {
        for _ in 0..version * 4 {
            change(&mut rng, &mut bytes);
        }
        let request = small_request("one", &mut rng);
        let done = run(publish_bytes(&store, &bytes, &request)).unwrap();
        let digest = Digest::from_hex(&done.record.index).unwrap();
        for cache_bytes in [0, 64 << 10, 64 << 20] {
            let way = (cache_bytes, Workers::default());
            let disk = run(PublishedDisk::open(&store, digest, "sim", way)).unwrap();
            check_parts(&disk, &bytes);
            let mut done = 0;
            while done < reads() / 9 {
                let count = 1 + rng.below(6);
                let ranges = (0..count).map(|_| range(&mut rng, bytes.len()));
                let ranges: Vec<(usize, usize)> = ranges.collect();
                let reads = ranges.iter().map(|(at, len)| {
                    let buf = BufMut::zeroed(*len);
                    disk.read(*at as u64, buf.into())
                });
                for (read, (at, len)) in run(join_all(reads)).into_iter().zip(&ranges) {
                    let read = read.unwrap().to_vec();
                    assert!(read == bytes[*at..at + len], "{at} {len}");
                }
                done += count;
            }
            let beyond = disk.read(bytes.len() as u64 - 10, BufMut::zeroed(11).into());
            assert!(run(beyond).is_err());
        }
    }
}

fn range(rng: &mut Random, size: usize) -> (usize, usize) {
    let len = match rng.below(3) {
        0 => 1 + rng.below(600) as usize,
        1 => 4096 * (1 + rng.below(16) as usize),
        _ => 1 + rng.below(1 << 20) as usize,
    };
    let len = len.min(size);
    (rng.below((size - len + 1) as u64) as usize, len)
}

/// Parts are in order, without gaps, and zero where they say so.
fn check_parts(disk: &PublishedDisk, bytes: &[u8]) {
    let mut at = 0;
    for part in disk.parts(0..disk.size(), usize::MAX) {
        assert_eq!(part.start, at);
        at += part.len;
        let these = &bytes[part.start as usize..at as usize];
        if !matches!(part.content, Content::Chunk(_)) {
            assert!(these.iter().all(|byte| *byte == 0));
            let is_last = at == disk.size();
            assert!(is_last || part.len.is_multiple_of(BLOCK_BYTES as u64));
        }
    }
    assert_eq!(at, disk.size());
}

#[test]
fn a_chunk_that_several_want_is_fetched_once() {
    let mut rng = Random(22);
    let sim = Simulated::new(10);
    let store = Store::new(sim.client(), "sim");
    let mut bytes = vec![0; 1 << 20];
    rng.fill(&mut bytes);
    let request = small_request("one", &mut rng);
    let done = run(publish_bytes(&store, &bytes, &request)).unwrap();
    let digest = Digest::from_hex(&done.record.index).unwrap();
    let way = (64 << 20, Workers::default());
    let disk = run(PublishedDisk::open(&store, digest, "sim", way)).unwrap();
    let reads = (0..200).map(|_| disk.read(0, BufMut::zeroed(1 << 20).into()));
    for read in run(join_all(reads)) {
        assert!(read.unwrap().to_vec() == bytes);
    }
    assert_eq!(disk.fetched_bytes(), done.record.stored_bytes);
}
