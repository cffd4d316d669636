//! Counts against a vector of numbers, in every width, on a file in memory; the file's bytes are
//! decoded here bit by bit, as the specification says it.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::*;
use crate::file::memory::MemoryFile;
use crate::random::Random;

const CLUSTER_BITS: u32 = 13;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
const TABLE: u64 = CLUSTER;
/// Entries of the refcount table; the last ones have no block.
const BLOCKS: u64 = 5;
/// Which entries of the refcount table have a block, and where; not in order.
const PRESENT: [(u64, u64); 3] = [(0, 4 * CLUSTER), (2, 2 * CLUSTER), (3, 3 * CLUSTER)];

fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..1000 {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
    panic!("files in memory make nobody wait");
}

/// The counts, one number each, and what the file holds.
struct Model {
    order: u32,
    /// Counts now, of all clusters that the table's blocks could count.
    counts: Vec<u64>,
    /// Counts that were written last.
    written: Vec<u64>,
}

impl Model {
    fn per_block(&self) -> u64 {
        (CLUSTER * 8) >> self.order
    }

    fn max(&self) -> u64 {
        match self.order {
            6 => u64::MAX,
            order => (1 << (1u32 << order)) - 1,
        }
    }

    fn has_block(&self, cluster: u64) -> bool {
        PRESENT
            .iter()
            .any(|(index, _)| *index == cluster / self.per_block())
    }

    fn zero_runs(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for cluster in range {
            if self.counts[cluster as usize] != 0 {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == cluster => run.end += 1,
                _ => runs.push(cluster..cluster + 1),
            }
        }
        runs
    }

    /// A count as it is in the file, read one bit after the other.
    fn in_file(&self, bytes: &[u8], cluster: u64) -> u64 {
        let (index, within) = (cluster / self.per_block(), cluster % self.per_block());
        let Some((_, block)) = PRESENT.iter().find(|(at, _)| *at == index) else {
            return 0;
        };
        let bits = 1u64 << self.order;
        let first_bit = within * bits;
        let mut value = 0;
        for bit in 0..bits {
            // Below a byte the first count is in the low bits; above, the first byte is the
            // highest.
            let (byte, place) = if bits < 8 {
                (first_bit / 8, first_bit % 8 + bit)
            } else {
                (first_bit / 8 + (bits - 8 - bit / 8 * 8) / 8, bit % 8)
            };
            value |= u64::from(bytes[(block + byte) as usize] >> place & 1) << bit;
        }
        value
    }
}

/// A file whose blocks hold random bytes, the counts in it, and the model of them.
fn image(order: u32, random: &mut Random) -> (Arc<MemoryFile>, Refcounts, Model) {
    let mut bytes = vec![0; 5 * CLUSTER as usize];
    for byte in &mut bytes[2 * CLUSTER as usize..] {
        // Sparse, so that zeroes and runs of them occur in every width.
        *byte = (random.next() & random.next() & random.next()) as u8;
        if random.below(4) != 0 {
            *byte = 0;
        }
    }
    let mut table = vec![0; BLOCKS as usize];
    for (index, offset) in PRESENT {
        table[index as usize] = offset;
    }
    let mut model = Model {
        order,
        counts: Vec::new(),
        written: Vec::new(),
    };
    // One entry more than the table has: beyond it everything counts 0.
    model.counts = (0..(BLOCKS + 1) * model.per_block())
        .map(|cluster| model.in_file(&bytes, cluster))
        .collect();
    model.written = model.counts.clone();
    let file = Arc::new(MemoryFile::new("counts", bytes, 1));
    let geometry = Geometry::new(CLUSTER_BITS, order, false).unwrap();
    let format = EntryFormat {
        geometry,
        version: 3,
        data_file: false,
    };
    let counts = Refcounts::new(
        AlignedFile::new(file.clone()),
        format,
        table,
        HostOffset(TABLE),
    );
    (file, counts, model)
}

/// Changes one count in both; refusals are for the same reasons, and change nothing.
fn add(counts: &mut Refcounts, model: &mut Model, cluster: u64, delta: i64) {
    let old = model.counts[cluster as usize];
    let new = i128::from(old) + i128::from(delta);
    let allowed = (0..=i128::from(model.max())).contains(&new) && model.has_block(cluster);
    match block_on(counts.add(HostCluster(cluster), delta)) {
        Ok(count) => {
            assert!(allowed, "{old} changed by {delta} was accepted");
            assert_eq!(i128::from(count), new);
            model.counts[cluster as usize] = count;
        }
        Err(error) => {
            assert!(!allowed, "{old} changed by {delta} was refused: {error}");
            assert!(
                matches!(&error, Error::Corrupt { offset, .. } if *offset == cluster * CLUSTER)
            );
        }
    }
    let count = block_on(counts.get(HostCluster(cluster))).unwrap();
    assert_eq!(count, model.counts[cluster as usize]);
}

fn check_file(file: &MemoryFile, model: &Model) {
    let bytes = file.contents();
    for (cluster, expected) in model.written.iter().enumerate() {
        assert_eq!(
            model.in_file(&bytes, cluster as u64),
            *expected,
            "count of {cluster} in the file"
        );
    }
    assert!(
        bytes[..2 * CLUSTER as usize].iter().all(|&byte| byte == 0),
        "only blocks are written"
    );
}

#[test]
fn counts_of_every_width_agree_with_a_vector() {
    for order in 0..=6 {
        let mut random = Random(0x1234_5678_9abc_def1 + u64::from(order));
        let (file, mut counts, mut model) = image(order, &mut random);
        let end = model.counts.len() as u64;
        for step in 0..1500 {
            // Mostly a few clusters beside edges of slices and blocks, so that counts move far.
            let per_slice = (4096 * 8) >> order;
            let edge = random.below(end / per_slice + 1) * per_slice;
            let cluster = match random.below(3) {
                0 => random.below(end),
                _ => (edge + random.below(4)).saturating_sub(2).min(end - 1),
            };
            let old = model.counts[cluster as usize];
            let delta = match random.below(8) {
                0 => -1,
                1 => i64::MIN,
                2 => i64::MAX,
                3 => -(old.min(1 << 62) as i64),
                4 => (model.max() - old).min(1 << 62) as i64,
                5 => ((model.max() - old).min(1 << 62) as i64).saturating_add(1),
                _ => 1,
            };
            add(&mut counts, &mut model, cluster, delta);
            if step % 50 == 0 {
                let (a, b) = (random.below(end + 1), random.below(end + 1));
                let range = a.min(b)..a.max(b).min(a.min(b) + 40_000);
                let runs = block_on(counts.zero_runs(range.clone())).unwrap();
                assert_eq!(runs, model.zero_runs(range.clone()));
                let countable = block_on(counts.countable_zero_runs(range.clone())).unwrap();
                let listed: Vec<u64> = countable.into_iter().flatten().collect();
                let free = model.zero_runs(range).into_iter().flatten();
                let expected: Vec<u64> = free.filter(|&c| model.has_block(c)).collect();
                assert!(listed == expected, "order {order}, step {step}");
            }
            if step % 200 == 199 {
                check_file(&file, &model);
                let is_changed = model.counts != model.written;
                assert!(counts.is_dirty() || !is_changed);
                block_on(counts.write_dirty()).unwrap();
                assert!(!counts.is_dirty());
                model.written.clone_from(&model.counts);
                check_file(&file, &model);
            }
        }
        assert_eq!(
            block_on(counts.zero_runs(0..end)).unwrap(),
            model.zero_runs(0..end)
        );
    }
}

#[test]
fn a_refused_change_leaves_nothing_to_write() {
    for order in 0..=6 {
        let mut random = Random(99);
        let (file, mut counts, mut model) = image(order, &mut random);
        let before = file.contents();
        let full = (0..model.per_block()).find(|&c| model.counts[c as usize] == 0);
        let (empty, missing) = (full.unwrap(), model.per_block());
        add(&mut counts, &mut model, empty, -1);
        add(&mut counts, &mut model, missing, 1);
        add(&mut counts, &mut model, missing, -1);
        let beyond = BLOCKS * missing;
        add(&mut counts, &mut model, beyond, 1);
        if order < 6 {
            let above = model.max() as i64 + 1;
            add(&mut counts, &mut model, empty, above);
        }
        assert!(!counts.is_dirty());
        block_on(counts.write_dirty()).unwrap();
        assert!(file.contents() == before);
    }
}

/// More slices than are kept: those that are dirty survive, the others are read again.
#[test]
fn a_full_cache_forgets_only_what_is_written() {
    let geometry = Geometry::new(16, 6, false).unwrap();
    let (per_slice, blocks) = (512, 40u64);
    let format = EntryFormat {
        geometry,
        version: 3,
        data_file: false,
    };
    let size = (blocks + 1) << 16;
    let file = Arc::new(MemoryFile::new("counts", vec![0; size as usize], 1));
    let table = (1..=blocks).map(|block| block << 16).collect();
    let host = AlignedFile::new(file.clone());
    let mut counts = Refcounts::new(host, format, table, HostOffset(0));
    let slices = blocks * 16;
    assert!(slices as usize > SLICES_MAX + 64);
    let is_raised = |slice: u64| slice.is_multiple_of(3);
    for slice in 0..slices {
        let cluster = HostCluster(slice * per_slice + slice % per_slice);
        if is_raised(slice) {
            assert_eq!(
                block_on(counts.add(cluster, slice as i64 + 1)).unwrap(),
                slice + 1
            );
        } else {
            assert_eq!(block_on(counts.get(cluster)).unwrap(), 0);
        }
        assert!(counts.slices.len() <= SLICES_MAX);
    }
    block_on(counts.write_dirty()).unwrap();
    let bytes = file.contents();
    for slice in 0..slices {
        let at = ((1 << 16) + slice * 4096 + slice % per_slice * 8) as usize;
        let count = u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(count, if is_raised(slice) { slice + 1 } else { 0 });
    }
}

#[test]
fn slices_of_a_failed_write_stay_dirty() {
    let mut random = Random(7);
    let (file, mut counts, _) = image(4, &mut random);
    let cluster = HostCluster(0);
    let before = block_on(counts.get(cluster)).unwrap();
    // The file may not be so long: the block cannot be written there.
    let table = vec![(1 << 40) + CLUSTER];
    let old = (counts.table().to_vec(), counts.table_offset());
    block_on(counts.add(cluster, 1)).unwrap();
    counts.set_table(table, old.1);
    assert!(block_on(counts.write_dirty()).is_err());
    assert!(counts.is_dirty());
    counts.set_table(old.0, old.1);
    block_on(counts.write_dirty()).unwrap();
    assert!(!counts.is_dirty());
    let block = PRESENT[0].1 as usize;
    let written = u16::from_be_bytes(file.contents()[block..block + 2].try_into().unwrap());
    assert_eq!(u64::from(written), before + 1);
}

#[test]
fn a_corrupt_table_entry_is_named() {
    let mut random = Random(3);
    let (_, mut counts, model) = image(4, &mut random);
    let mut table = counts.table().to_vec();
    table[1] = 2 * CLUSTER + 512;
    counts.set_table(table, HostOffset(TABLE));
    let cluster = HostCluster(model.per_block());
    let error = block_on(counts.get(cluster)).unwrap_err();
    assert!(matches!(error, Error::Corrupt { offset, .. } if offset == TABLE + 8));
    assert!(block_on(counts.add(cluster, 1)).is_err());
    assert!(block_on(counts.zero_runs(0..2 * cluster.0)).is_err());
    assert!(!counts.is_dirty());
    let mut table = counts.table().to_vec();
    table[3] = 3 * CLUSTER + 512;
    counts.set_table(table, HostOffset(TABLE));
    let error = counts.block(3).unwrap_err();
    assert!(matches!(error, Error::Corrupt { offset, .. } if offset == TABLE + 3 * 8));
}

#[test]
fn a_watch_notes_each_change_until_another_one_begins() {
    let mut random = Random(3);
    let (_, mut counts, model) = image(4, &mut random);
    let free = |from: u64| (from..model.per_block()).find(|&c| model.counts[c as usize] == 0);
    let first = free(0).unwrap();
    let second = free(first + 1).unwrap();
    let add = |counts: &mut Refcounts, cluster, delta| {
        block_on(counts.add(HostCluster(cluster), delta)).unwrap()
    };
    add(&mut counts, first, 1);
    let watch = counts.watch();
    assert_eq!(counts.watched(watch), Some(Changes::default()));
    let watch = counts.watch();
    add(&mut counts, first, -1);
    add(&mut counts, first, 1);
    add(&mut counts, second, 1);
    let changes = counts.watched(watch).unwrap();
    assert_eq!(changes.changed(), &BTreeSet::from([first, second]));
    assert_eq!(changes.freed(), &BTreeSet::from([first]));
    assert_eq!(counts.watched(watch), None);
    let (earlier, later) = (counts.watch(), counts.watch());
    assert_eq!(counts.watched(earlier), None);
    assert!(counts.watched(later).is_some());
}
