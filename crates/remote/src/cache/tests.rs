//! Crashes of the host: what the index believes afterwards was durable before.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use cowslip_block::random::Random;

use super::index::{Entry, Head, Index, Medium, sum_of};
use crate::version::Version;

const SECTOR: u64 = 512;
const BLOCK: u64 = 4096;

/// A file on a disk that keeps writes in memory until they are flushed, and loses them in any
/// order, a sector at a time.
#[derive(Clone, Debug, Default)]
struct Disk(Arc<Mutex<Sectors>>);

#[derive(Debug, Default)]
struct Sectors {
    durable: BTreeMap<u64, [u8; SECTOR as usize]>,
    cached: BTreeMap<u64, [u8; SECTOR as usize]>,
}

impl Sectors {
    fn get(&self, sector: u64) -> [u8; SECTOR as usize] {
        let cached = self.cached.get(&sector);
        let found = cached.or(self.durable.get(&sector));
        found.copied().unwrap_or([0; SECTOR as usize])
    }
}

/// The parts of a range of bytes by sectors: the sector, where in it, and where in the range.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, Range<usize>, Range<usize>)> {
    let end = offset + len as u64;
    (offset / SECTOR..end.div_ceil(SECTOR)).map(move |sector| {
        let (start, stop) = (offset.max(sector * SECTOR), end.min((sector + 1) * SECTOR));
        let within = |base: u64| (start - base) as usize..(stop - base) as usize;
        (sector, within(sector * SECTOR), within(offset))
    })
}

impl Medium for Disk {
    fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<()> {
        let sectors = self.0.lock().unwrap();
        for (sector, from, at) in parts(offset, to.len()) {
            to[at].copy_from_slice(&sectors.get(sector)[from]);
        }
        Ok(())
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        let mut sectors = self.0.lock().unwrap();
        for (number, to, at) in parts(offset, from.len()) {
            let mut sector = sectors.get(number);
            sector[to].copy_from_slice(&from[at]);
            sectors.cached.insert(number, sector);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut sectors = self.0.lock().unwrap();
        let cached = std::mem::take(&mut sectors.cached);
        sectors.durable.extend(cached);
        Ok(())
    }
}

impl Disk {
    /// The system writes some of what is cached by itself.
    fn write_back_some(&self, random: &mut Random) {
        let mut sectors = self.0.lock().unwrap();
        let chosen = sectors
            .cached
            .keys()
            .copied()
            .filter(|_| random.below(4) == 0);
        for sector in chosen.collect::<Vec<_>>() {
            if let Some(bytes) = sectors.cached.get(&sector).copied() {
                sectors.durable.insert(sector, bytes);
            }
        }
    }

    fn crash(&self, random: &mut Random) {
        let mut sectors = self.0.lock().unwrap();
        let cached = std::mem::take(&mut sectors.cached);
        let survivors = cached.into_iter().filter(|_| random.below(2) == 0);
        let survivors: Vec<_> = survivors.collect();
        sectors.durable.extend(survivors);
    }
}

fn head(boot: u8) -> Head {
    Head {
        url: "https://host/golden.qcow2".to_string(),
        version: Version {
            e_tag: Some("\"one\"".to_string()),
            last_modified: Some(1_800_000_000),
            bytes: 300 * BLOCK - 100,
        },
        block_bits: BLOCK.trailing_zeros(),
        boot: [boot; 16],
    }
}

fn contents(block: u64) -> Vec<u8> {
    (0..BLOCK)
        .map(|at| (at ^ block.wrapping_mul(37)) as u8 | 1)
        .collect()
}

#[test]
fn heads_are_read_as_written_and_damage_is_seen() {
    for version in [
        head(1).version,
        Version {
            e_tag: None,
            last_modified: None,
            bytes: 0,
        },
    ] {
        let head = Head { version, ..head(1) };
        let page = head.encode().unwrap();
        assert_eq!(Head::decode(&page), Some(head.clone()));
        for at in [0, 8, 12, 20, 33, 40, 50, 4000, 4077] {
            let mut damaged = page.clone();
            damaged[at] ^= 0x10;
            assert_eq!(Head::decode(&damaged), None, "byte {at}");
        }
    }
    let long = Head {
        url: "x".repeat(5000),
        ..head(1)
    };
    assert_eq!(long.encode(), None);
    assert_eq!(Head::decode(&[0; 4096]), None);
    assert_eq!(Head::decode(b"CWSLPCCH"), None);
}

/// An entry that says *durable* has its bytes after any crash, without a look at its checksum; and
/// those that were lost are not believed.
#[test]
fn nothing_is_believed_beyond_what_was_durable() {
    let (mut believed, mut dropped) = (0, 0);
    for seed in 1..60 {
        let mut random = Random(seed * 0x9e37);
        let (index_disk, data) = (Disk::default(), Disk::default());
        index_disk.write_at(&head(0).encode().unwrap(), 0).unwrap();
        index_disk.sync().unwrap();
        for boot in 1..6 {
            let index = Index::open(index_disk.clone()).unwrap().unwrap();
            index.begin_boot(&[boot; 16]).unwrap();
            for block in 0..index.head.blocks() {
                match index.entry(block).unwrap() {
                    Entry::Absent => {}
                    Entry::Present(_) => panic!("block {block} of the boot before"),
                    Entry::Durable(sum) => {
                        let mut bytes = vec![0; BLOCK as usize];
                        data.read_at(&mut bytes, block * BLOCK).unwrap();
                        assert!(bytes == contents(block), "seed {seed}, block {block}");
                        assert_eq!(sum, sum_of(&bytes));
                        believed += 1;
                    }
                }
            }
            let mut waiting = Vec::new();
            for _ in 0..random.below(120) {
                let block = random.below(index.head.blocks());
                if index.entry(block).unwrap() == Entry::Absent {
                    index.store(&data, block, &contents(block)).unwrap();
                    waiting.push(block);
                }
                if random.below(30) == 0 {
                    index
                        .mark_durable(&data, &std::mem::take(&mut waiting))
                        .unwrap();
                }
                if random.below(10) == 0 {
                    index_disk.write_back_some(&mut random);
                    data.write_back_some(&mut random);
                }
            }
            dropped += waiting.len();
            index_disk.crash(&mut random);
            data.crash(&mut random);
        }
    }
    assert!(believed > 1000 && dropped > 1000, "{believed} {dropped}");
}

#[test]
fn entries_of_other_blocks_and_torn_ones_are_absent() {
    let disk = Disk::default();
    disk.write_at(&head(1).encode().unwrap(), 0).unwrap();
    let index = Index::open(disk.clone()).unwrap().unwrap();
    index.set(5, Entry::Durable(77)).unwrap();
    assert_eq!(index.entry(5).unwrap(), Entry::Durable(77));
    let mut bytes = [0; 16];
    disk.read_at(&mut bytes, 4096 + 5 * 16).unwrap();
    disk.write_at(&bytes, 4096 + 6 * 16).unwrap();
    assert_eq!(index.entry(6).unwrap(), Entry::Absent);
    for at in 0..16 {
        let mut torn = bytes;
        torn[at] ^= 1;
        disk.write_at(&torn, 4096 + 5 * 16).unwrap();
        assert_eq!(index.entry(5).unwrap(), Entry::Absent, "byte {at}");
    }
}
