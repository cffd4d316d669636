//! Disks, requests and comparisons that the tests share.

use std::time::Duration;

use cowslip_block::disk::{Disk, MemoryDisk};
use cowslip_block::file::Durability;
use cowslip_block::random::Random;
use cowslip_block::{Buf, BufMut, Job, Result, Workers};
use cowslip_publish::catalog;
use cowslip_publish::cut::ChunkSizes;
use cowslip_publish::digest::Digest;
use cowslip_publish::disk::{CACHE_BYTES, PublishedDisk};
use cowslip_publish::location::{Location, Version};
use cowslip_publish::publish::{Published, Request, publish};
use cowslip_publish::store::Store;

use crate::simulated::run;

/// A disk in memory with these bytes; blocks of zeroes are not stored.
pub fn disk_of(bytes: &[u8]) -> MemoryDisk {
    let disk = MemoryDisk::new("disk", bytes.len() as u64);
    for (at, block) in bytes.chunks(4096).enumerate() {
        if block.iter().any(|byte| *byte != 0) {
            let data = Buf::copy_of(block).into();
            run(disk.write(at as u64 * 4096, data, Durability::Cached)).unwrap();
        }
    }
    disk
}

/// All bytes of a disk.
pub fn bytes_of(disk: &dyn Disk) -> Vec<u8> {
    let buf = BufMut::zeroed(disk.size() as usize);
    run(disk.read(0, buf.into())).unwrap().to_vec()
}

/// A request with small chunks and packs.
pub fn small_request(name: &str, rng: &mut Random) -> Request {
    let mut random = [0; 16];
    rng.fill(&mut random);
    Request {
        name: name.to_string(),
        parents: Vec::new(),
        changed: None,
        tracked_by: None,
        sizes: Some(ChunkSizes {
            min: 4096,
            average: 8192,
            max: 32 << 10,
        }),
        level: 1,
        pack_bytes: 96 << 10,
        reads_back: true,
        random,
        renewed_after: Duration::ZERO,
    }
}

/// A request as the command makes it.
pub fn usual_request(name: &str, rng: &mut Random) -> Request {
    Request {
        sizes: None,
        level: 3,
        pack_bytes: cowslip_publish::pack::PACK_BYTES,
        renewed_after: Duration::from_secs(60),
        ..small_request(name, rng)
    }
}

/// Publishes bytes.
pub async fn publish_bytes(store: &Store, bytes: &[u8], request: &Request) -> Result<Published> {
    let disk = disk_of(bytes);
    publish(&disk, store, request, &Workers::default(), &Job::default()).await
}

/// Opens a version.
pub async fn open(store: &Store, name: &str, version: Version) -> Result<PublishedDisk> {
    let location = Location {
        root: "sim".to_string(),
        name: name.to_string(),
        version,
    };
    let digest = catalog::index_digest(store, &location).await?;
    open_digest(store, digest).await
}

pub async fn open_digest(store: &Store, digest: Digest) -> Result<PublishedDisk> {
    PublishedDisk::open(store, digest, "sim", (CACHE_BYTES, Workers::default())).await
}

/// All bytes of a published disk.
pub async fn read_all(disk: &PublishedDisk) -> Result<Vec<u8>> {
    let buf = BufMut::zeroed(disk.size() as usize);
    Ok(disk.read(0, buf.into()).await?.to_vec())
}

/// Bytes of a disk: noise, text and zeroes in runs.
pub fn random_bytes(rng: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for _ in 0..len / (24 << 10) {
        change(rng, &mut bytes);
    }
    bytes
}

/// Changes a run of a disk's bytes.
pub fn change(rng: &mut Random, bytes: &mut [u8]) {
    let unit = if rng.one_in(4) { 512 } else { 4096 };
    let units = bytes.len() / unit;
    let start = rng.below(units as u64) as usize * unit;
    let len = (1 + rng.below(40) as usize) * unit;
    let run = start..(start + len).min(bytes.len());
    match rng.below(6) {
        0 => bytes[run].fill(0),
        1 => bytes[run].fill(rng.below(256) as u8),
        2 => {
            // Data that moves.
            let from = rng.below(units as u64) as usize * unit;
            let from = from.min(bytes.len() - run.len());
            bytes.copy_within(from..from + run.len(), run.start);
        }
        _ => rng.fill(&mut bytes[run]),
    }
}
