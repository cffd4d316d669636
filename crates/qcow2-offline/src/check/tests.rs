//! The check on images that are built here, byte by byte: limits, hostile contents, single reads.

use crate::random::Random;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use super::*;
use crate::entry::set_refcount;
use crate::file::memory::MemoryFile;

const CLUSTER: u64 = 512;

/// An image of 512-byte clusters: header, refcount table, one block, L1, then what is added.
struct Builder {
    bytes: Vec<u8>,
    next_cluster: u64,
}

const REFCOUNT_TABLE: u64 = CLUSTER;
const REFCOUNT_BLOCK: u64 = 2 * CLUSTER;
const L1_TABLE: u64 = 3 * CLUSTER;

impl Builder {
    /// A sound image with an L1 table of one cluster and no data.
    fn new() -> Builder {
        let mut builder = Builder {
            bytes: vec![0; 64 * CLUSTER as usize],
            next_cluster: 4,
        };
        let fields: [(usize, &[u8]); 12] = [
            (0, b"QFI\xfb"),
            (4, &3u32.to_be_bytes()),
            (20, &9u32.to_be_bytes()),
            // 64 L2 tables of 64 clusters.
            (24, &(64 * 64 * CLUSTER).to_be_bytes()),
            (36, &64u32.to_be_bytes()),
            (40, &L1_TABLE.to_be_bytes()),
            (48, &REFCOUNT_TABLE.to_be_bytes()),
            (56, &1u32.to_be_bytes()),
            (96, &4u32.to_be_bytes()),
            (100, &104u32.to_be_bytes()),
            (REFCOUNT_TABLE as usize, &REFCOUNT_BLOCK.to_be_bytes()),
            (104, &0u64.to_be_bytes()),
        ];
        for (at, field) in fields {
            builder.bytes[at..at + field.len()].copy_from_slice(field);
        }
        for cluster in 0..4 {
            builder.count(cluster, 1);
        }
        builder
    }

    fn count(&mut self, cluster: u64, count: u64) {
        let block = &mut self.bytes[REFCOUNT_BLOCK as usize..][..CLUSTER as usize];
        set_refcount(block, cluster as usize, 4, count);
    }

    /// A cluster with a count of 1; its offset.
    fn cluster(&mut self) -> u64 {
        let cluster = self.next_cluster;
        self.next_cluster += 1;
        self.count(cluster, 1);
        cluster * CLUSTER
    }

    fn word(&mut self, at: u64, value: u64) {
        self.bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
    }
}

const COPIED: u64 = 1 << 63;

fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
}

fn check_bytes(bytes: Vec<u8>, options: &CheckOptions) -> Result<(CheckResult, Vec<Finding>)> {
    let header = Header::parse(&bytes[..bytes.len().min(512)], u64::MAX, "image")?;
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("image", bytes, 512));
    let mut findings = Vec::new();
    let result = block_on(check_with_header(&file, &header, options, &mut findings))?;
    Ok((result, findings))
}

/// The check can be spawned on another thread.
#[test]
fn a_check_is_send() {
    fn is_send<T: Send>(_: &T) {}
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("image", vec![0; 512], 1));
    let header = Header::parse(&Builder::new().bytes, u64::MAX, "image").unwrap();
    let mut findings = Vec::new();
    let options = CheckOptions::default();
    is_send(&check_with_header(&file, &header, &options, &mut findings));
}

#[test]
fn a_sound_image_has_no_findings() {
    let mut image = Builder::new();
    let l2 = image.cluster();
    let data = image.cluster();
    image.word(L1_TABLE, l2 | COPIED);
    image.word(l2, data | COPIED);
    let (result, findings) = check_bytes(image.bytes, &CheckOptions::default()).unwrap();
    assert_eq!(findings, []);
    assert!(result.is_clean());
    assert_eq!(
        (result.allocated_clusters, result.total_clusters),
        (1, 4096)
    );
    assert_eq!(result.image_end_offset, 6 * CLUSTER);
}

/// Flaws of a shared table count as often as the table is referenced, and are reported once.
#[test]
fn a_shared_table_is_counted_for_each_reference() {
    let mut image = Builder::new();
    let l2 = image.cluster();
    for index in 0..64 {
        image.word(L1_TABLE + index * 8, l2);
    }
    image.word(l2, 1 << 40 | COPIED);
    image.count(l2 / CLUSTER, 64);
    let (result, findings) = check_bytes(image.bytes, &CheckOptions::default()).unwrap();
    let offset = 1 << 40;
    let entry = offset | COPIED;
    assert_eq!(
        findings,
        [
            Finding::BeyondEnd { offset, len: 512 },
            Finding::CopiedData { entry, refcount: 0 }
        ]
    );
    assert_eq!(result.corruptions, 128);
}

#[test]
fn memory_is_limited() {
    let mut image = Builder::new();
    let l2 = image.cluster();
    image.word(L1_TABLE, l2 | COPIED);
    let little = CheckOptions {
        memory_bytes_max: 1000,
    };
    let error = check_bytes(image.bytes, &little).unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
}

/// Random words everywhere: any outcome but a panic or an endless loop.
#[test]
fn garbage_is_survived() {
    let mut numbers = Random(0x9e37_79b9_7f4a_7c15);
    let mut random = move |below: u64| numbers.next() % below;
    let mut outcomes = [0; 2];
    for _ in 0..3000 {
        let mut image = Builder::new();
        let l2 = image.cluster();
        image.word(L1_TABLE, l2 | COPIED);
        let words = image.bytes.len() as u64 / 8;
        for _ in 0..1 + random(20) {
            let at = match random(3) {
                0 => random(14),
                1 => 64 + random(4 * 64),
                _ => random(words),
            };
            let value = match random(4) {
                0 => random(1 << 20) << 9,
                1 => u64::MAX >> random(64),
                2 => 1 << random(64) | COPIED,
                _ => random(70) * CLUSTER,
            };
            image.word(at * 8, value);
        }
        let outcome = check_bytes(image.bytes, &CheckOptions::default());
        outcomes[usize::from(outcome.is_ok())] += 1;
    }
    assert!(outcomes[0] > 100 && outcomes[1] > 100, "{outcomes:?}");
}

/// Counts the bytes that are read.
#[derive(Debug)]
struct Metered(MemoryFile, AtomicU64, Option<Synthetic>);

/// A file of which every word is computed.
#[derive(Debug)]
struct Synthetic {
    len: u64,
    word: fn(u64) -> u64,
}

impl BlockFile for Metered {
    cowslip_block::forward_to_file!(0: name, capabilities, id, extents, allocated_bytes);

    fn len(&self) -> cowslip_queue::Pending<std::io::Result<u64>> {
        match &self.2 {
            Some(synthetic) => cowslip_queue::Pending::ready(Ok(synthetic.len)),
            None => self.0.len(),
        }
    }
    fn read(
        &self,
        offset: u64,
        mut buf: cowslip_queue::IoVecMut,
    ) -> cowslip_queue::Pending<(std::io::Result<()>, cowslip_queue::IoVecMut)> {
        self.1.fetch_add(buf.len() as u64, Ordering::Relaxed);
        let Some(synthetic) = &self.2 else {
            return self.0.read(offset, buf);
        };
        let words = (0..buf.len() as u64 / 8).map(|index| (synthetic.word)(offset / 8 + index));
        let bytes: Vec<u8> = words.flat_map(u64::to_be_bytes).collect();
        buf.copy_from_slice(0, &bytes);
        cowslip_queue::Pending::ready((Ok(()), buf))
    }
    fn write(
        &self,
        _: u64,
        _: cowslip_queue::IoVec,
        _: crate::file::Durability,
    ) -> cowslip_queue::Pending<std::io::Result<()>> {
        unreachable!("a check writes nothing")
    }
    fn zero(
        &self,
        _: u64,
        _: u64,
        _: crate::file::Space,
    ) -> cowslip_queue::Pending<std::io::Result<()>> {
        unreachable!("a check writes nothing")
    }
    fn discard(&self, _: u64, _: u64) -> cowslip_queue::Pending<std::io::Result<()>> {
        unreachable!("a check writes nothing")
    }
    fn allocate(&self, _: u64, _: u64) -> cowslip_queue::Pending<std::io::Result<()>> {
        unreachable!("a check writes nothing")
    }
    fn flush(&self) -> cowslip_queue::Pending<std::io::Result<()>> {
        unreachable!("a check writes nothing")
    }
    fn set_len(&self, _: u64) -> cowslip_queue::Pending<std::io::Result<()>> {
        unreachable!("a check writes nothing")
    }
}

/// The metadata of a sound image is read once, though all tables are in one and shared, and nothing
/// is written.
#[test]
fn metadata_is_read_once() {
    let mut image = Builder::new();
    let l2 = image.cluster();
    for index in 0..64 {
        image.word(L1_TABLE + index * 8, l2);
    }
    image.count(l2 / CLUSTER, 64);
    let header = Header::parse(&image.bytes[..512], u64::MAX, "image").unwrap();
    let metered = Arc::new(Metered(
        MemoryFile::read_only("image", image.bytes),
        AtomicU64::new(0),
        None,
    ));
    let file: Arc<dyn BlockFile> = Arc::clone(&metered) as Arc<dyn BlockFile>;
    let mut findings = Vec::new();
    let options = CheckOptions::default();
    block_on(check_with_header(&file, &header, &options, &mut findings)).unwrap();
    assert_eq!(findings, []);
    // L1, L2, refcount table, refcount block.
    assert_eq!(metered.1.load(Ordering::Relaxed), 4 * CLUSTER);
}

/// 256 GiB of clusters of 64 KiB, all of them mapped, and in disorder.
mod large {
    pub const CLUSTER_BITS: u64 = 16;
    pub const DATA_CLUSTERS: u64 = 1 << 22;
    pub const L2_TABLES: u64 = DATA_CLUSTERS / 8192;
    pub const REFCOUNT_TABLE: u64 = 1;
    pub const REFCOUNT_BLOCKS: u64 = 2;
    pub const L1_TABLE: u64 = REFCOUNT_BLOCKS + 129;
    pub const L2: u64 = L1_TABLE + 1;
    pub const DATA: u64 = L2 + L2_TABLES;
    pub const END: u64 = DATA + DATA_CLUSTERS;
}

/// The words of that image.
fn large_word(index: u64) -> u64 {
    use large::*;
    let cluster = index >> (CLUSTER_BITS - 3);
    let within = index & 0x1fff;
    let entry = |cluster: u64| cluster << CLUSTER_BITS | COPIED;
    match cluster {
        REFCOUNT_TABLE if within < 129 => (REFCOUNT_BLOCKS + within) << CLUSTER_BITS,
        REFCOUNT_BLOCKS..L1_TABLE => {
            let first = ((cluster - REFCOUNT_BLOCKS) * 8192 + within) * 4;
            (0..4).fold(0, |counts, at| counts << 16 | u64::from(first + at < END))
        }
        L1_TABLE if within < L2_TABLES => entry(L2 + within),
        L2..DATA => {
            let place = ((cluster - L2) * 8192 + within) * 0x5a_5a5b % DATA_CLUSTERS;
            entry(DATA + place)
        }
        _ => 0,
    }
}

/// A thirty-second of 8 TiB takes less than a thirty-second of 256 MiB, but for what does not grow.
#[test]
fn memory_is_in_proportion() {
    let mut image = Builder::new();
    let offset = |cluster: u64| (cluster << large::CLUSTER_BITS).to_be_bytes();
    let fields: [(usize, &[u8]); 6] = [
        (20, &16u32.to_be_bytes()),
        (24, &offset(large::DATA_CLUSTERS)),
        (36, &(large::L2_TABLES as u32).to_be_bytes()),
        (40, &offset(large::L1_TABLE)),
        (48, &offset(large::REFCOUNT_TABLE)),
        (56, &1u32.to_be_bytes()),
    ];
    for (at, field) in fields {
        image.bytes[at..at + field.len()].copy_from_slice(field);
    }
    let header = Header::parse(&image.bytes[..512], u64::MAX, "image").unwrap();
    let metered = Arc::new(Metered(
        MemoryFile::read_only("image", Vec::new()),
        AtomicU64::new(0),
        Some(Synthetic {
            len: large::END << large::CLUSTER_BITS,
            word: large_word,
        }),
    ));
    let file: Arc<dyn BlockFile> = Arc::clone(&metered) as Arc<dyn BlockFile>;
    let mut findings = Vec::new();
    let options = CheckOptions {
        memory_bytes_max: 8 << 20,
    };
    let result = block_on(check_with_header(&file, &header, &options, &mut findings)).unwrap();
    assert_eq!(findings, []);
    assert_eq!(result.allocated_clusters, large::DATA_CLUSTERS);
    assert!(result.fragmented_clusters > large::DATA_CLUSTERS / 2);
    let metadata = (large::DATA - 1) << large::CLUSTER_BITS;
    let read = metered.1.load(Ordering::Relaxed);
    assert!(read <= metadata, "{read} of {metadata} bytes");
}
