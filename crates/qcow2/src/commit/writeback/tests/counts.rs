//! Counts: where there is a gap among them, what it takes to count a longer file, in which order
//! that becomes reachable, and what is freed with it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::disk::{Disk, Op};
use super::space::qcow2_on;
use super::{EIO, ENOSPC, block_on, faults, open};
use crate::Buf;
use crate::commit::writeback::grow::gap_from;
use crate::commit::writeback::{REFCOUNT_TABLE_BYTES_MAX, SCAN_CLUSTERS, is_no_space};
use crate::count_growth::CountGrowth;
use crate::create::{CreateOptions, create};
use crate::entry::set_refcount;
use crate::file::AlignedFile;
use crate::file::Durability;
use crate::geometry::{HOST_OFFSET_END, HostCluster, HostOffset};
use crate::random::Random;
use crate::space::alloc::SpaceContent;
use crate::space::growth;
use crate::space::refcount::Refcounts;
use crate::{Counts, Qcow2};

const CLUSTER: u64 = 512;
/// Counts of 64 bits in a block.
const PER_BLOCK: u64 = 64;
/// Entries in a cluster of the refcount table.
const PER_TABLE_CLUSTER: u64 = 64;

/// An image of small clusters with wide counts, which soon needs blocks and tables.
fn small() -> Arc<Disk> {
    let disk = Disk::new(1);
    let options = CreateOptions {
        cluster_size: CLUSTER,
        refcount_bits: 64,
        ..CreateOptions::new(1 << 20)
    };
    block_on(create(disk.clone(), None, &options)).expect("there is room");
    disk
}

/// A refcount table with blocks here and there, whose counts are mostly 0.
struct Model {
    counts: Vec<u64>,
    table: Vec<u64>,
}

impl Model {
    /// Puts blocks on the disk from cluster 1024 on.
    fn random(random: &mut Random, disk: &Disk) -> Model {
        let entries = PER_TABLE_CLUSTER * (1 + random.below(2));
        let mut model = Model {
            counts: vec![0; (entries * PER_BLOCK) as usize],
            table: vec![0; entries as usize],
        };
        let rare = 1 + random.below(40);
        for index in 0..entries {
            if random.below(3) == 0 {
                continue;
            }
            let mut block = vec![0; CLUSTER as usize];
            for i in 0..PER_BLOCK {
                // Neighbours are alike as a rule.
                if random.below(rare) == 0 {
                    for at in i..(i + 1 + random.below(9)).min(PER_BLOCK) {
                        set_refcount(&mut block, at as usize, 6, 1);
                        model.counts[(index * PER_BLOCK + at) as usize] = 1;
                    }
                }
            }
            let offset = (1024 + index) * CLUSTER;
            disk.patch(offset, &block);
            model.table[index as usize] = offset;
        }
        model
    }

    fn is_zero(&self, cluster: u64) -> bool {
        self.counts
            .get(cluster as usize)
            .is_none_or(|&count| count == 0)
    }

    fn has_block(&self, index: u64) -> bool {
        self.table
            .get(index as usize)
            .is_some_and(|&entry| entry != 0)
    }

    fn refcounts(&self, image: &Qcow2, disk: &Arc<Disk>) -> Refcounts {
        let table = HostOffset(1023 * CLUSTER);
        Refcounts::new(
            AlignedFile::new(disk.clone()),
            image.format,
            self.table.clone(),
            table,
        )
    }
}

#[test]
fn a_gap_is_the_first_one_that_is_long_enough() {
    let mut random = Random(0x1234_5678_9abc_def1);
    for _ in 0..60 {
        let disk = small();
        let image = qcow2_on(&disk);
        let model = Model::random(&mut random, &disk);
        let mut refcounts = model.refcounts(&image, &disk);
        for _ in 0..40 {
            let start = random.below(model.counts.len() as u64 + 10);
            let widest = [2, 8, 70, 3000][random.below(4) as usize];
            let clusters = 1 + random.below(widest);
            let fits = |gap: &u64| (*gap..gap + clusters).all(|cluster| model.is_zero(cluster));
            let expected = (start..).find(fits).unwrap();
            let gap = block_on(gap_from(&mut refcounts, start, clusters)).unwrap();
            assert_eq!(gap, expected, "{clusters} from {start}");
        }
    }
}

/// More of them than are looked at together, none of which is 0.
#[test]
fn a_gap_is_found_behind_many_counts() {
    let disk = small();
    let image = qcow2_on(&disk);
    let mut block = vec![0; CLUSTER as usize];
    (0..PER_BLOCK as usize).for_each(|at| set_refcount(&mut block, at, 6, 1));
    disk.patch(1024 * CLUSTER, &block);
    let entries = 2 * SCAN_CLUSTERS / PER_BLOCK + 1;
    let table = vec![1024 * CLUSTER; entries as usize];
    let offset = HostOffset(1023 * CLUSTER);
    let mut refcounts = Refcounts::new(image.file.clone(), image.format, table, offset);
    for (start, clusters) in [(0, 1), (5, 3), (700, 100)] {
        let gap = block_on(gap_from(&mut refcounts, start, clusters)).unwrap();
        assert_eq!(gap, entries * PER_BLOCK);
    }
}

fn check_growth(model: &Model, growth: &CountGrowth, (claimed, ahead, needed): (u64, u64, u64)) {
    let CountGrowth {
        start,
        end,
        ref blocks,
        table_clusters,
    } = *growth;
    let (first, last) = (start / PER_BLOCK, (end - 1) / PER_BLOCK);
    let missing: Vec<u64> = (first..=last).filter(|&i| !model.has_block(i)).collect();
    assert_eq!(*blocks, missing);
    let entries = model.table.len() as u64;
    let wanted = (last + 1).max(entries + entries / 2);
    let wanted = if last < entries { 0 } else { wanted };
    assert_eq!(table_clusters, wanted.div_ceil(PER_TABLE_CLUSTER));
    let metadata = table_clusters + missing.len() as u64;
    assert_eq!(growth.first_free(), start + metadata);
    assert!((start..start + metadata + needed).all(|cluster| model.is_zero(cluster)));
    // No further than it must be.
    assert!(start == claimed || (start > claimed && !model.is_zero(start - 1)));
    assert!(end >= claimed + ahead && end >= start + metadata + needed);
    assert!(end <= (claimed + ahead).max(start + metadata + needed));
    let bytes = missing.last().map_or(0, |last| (last + 1) * 8);
    assert_eq!(growth.table_bytes(), bytes);
}

#[test]
fn a_longer_file_is_counted_by_what_lies_at_its_new_beginning() {
    let mut random = Random(0x0fed_cba9_8765_4321);
    let mut moved = 0;
    for _ in 0..60 {
        let disk = small();
        let image = qcow2_on(&disk);
        let mut counts = block_on(image.turn.take());
        let model = Model::random(&mut random, &disk);
        counts.refcounts = model.refcounts(&image, &disk);
        for _ in 0..40 {
            let claimed = 1 + random.below(model.counts.len() as u64 + 200);
            let widest = [2, 100, 5000][random.below(3) as usize];
            let needed = 1 + random.below(widest);
            let ahead = needed + random.below(200);
            let growth = image.plan_counts(&mut counts, claimed, (ahead, needed));
            let growth = block_on(growth).unwrap();
            check_growth(&model, &growth, (claimed, ahead, needed));
            moved += u32::from(growth.table_clusters > 0);
        }
    }
    assert!(moved > 100, "{moved} tables move");
}

/// Whether a device has space that no block counts, and where.
#[test]
fn the_lowest_space_without_a_block_is_counted() {
    let mut random = Random(0x0123_4567_89ab_cdef);
    let (mut counted, mut full) = (0, 0);
    for _ in 0..300 {
        let disk = small();
        let image = qcow2_on(&disk);
        let mut counts = block_on(image.turn.take());
        let model = Model::random(&mut random, &disk);
        counts.refcounts = model.refcounts(&image, &disk);
        let entries = model.table.len() as u64;
        let longest = model.counts.len() as u64 + 200;
        let end = [1 + random.below(longest), 1 + random.below(5 * PER_BLOCK)];
        let end = end[random.below(2) as usize];
        let total = end.div_ceil(PER_BLOCK);
        let missing = (0..total).find(|&block| !model.has_block(block));
        let Some(growth) = image.plan_fixed(&mut counts, end).unwrap() else {
            // One cluster is left, which its own block would take; or as many as a table would.
            let rest = missing.map(|block| end - block * PER_BLOCK);
            assert!(rest.is_none_or(|rest| rest <= 1 || (end > entries * PER_BLOCK && rest < 5)));
            full += 1;
            continue;
        };
        let first = missing.expect("there is something to count");
        assert_eq!(growth.start, first * PER_BLOCK);
        assert_eq!(growth.end, end.min((first + 1) * PER_BLOCK));
        assert_eq!(growth.blocks, [first]);
        assert_eq!(growth.table_clusters > 0, first >= entries);
        assert!(growth.first_free() <= growth.end);
        counted += 1;
    }
    assert!(counted > 50 && full > 10, "{counted}, {full}");
}

/// All that follows the extension of the file in the log.
fn after_extension(disk: &Disk) -> Vec<Op> {
    let log = disk.take_log();
    let extended = log
        .iter()
        .position(|op| matches!(op, Op::SetLen(_) | Op::Allocate(_)));
    let rest = &log[extended.expect("the file grows") + 1..];
    let rest = rest.iter().filter(|op| !matches!(op, Op::Read(_)));
    rest.cloned().collect()
}

fn is_write_in(op: &Op, place: &Range<u64>) -> bool {
    matches!(op, Op::Write(range) if place.start <= range.start && range.end <= place.end)
}

/// New blocks are durable before the table refers to them, a new table before the header does, and
/// all of it before the space is handed out. The old table is free then, and nothing leaks.
#[test]
fn new_counts_are_durable_before_they_are_reachable() {
    let disk = small();
    let image = qcow2_on(&disk);
    let old_table = image.header().refcount_table_offset;
    let table = old_table..old_table + CLUSTER;
    for (more, moves) in [(200, false), (3000, false), (9000, true), (40_000, true)] {
        let old = image.header();
        disk.take_log();
        disk.take_durable();
        let start = image.lock().space.claimed() * CLUSTER;
        while image.lock().space.free.take(1).is_some() {}
        block_on(image.make_room(more)).expect("there is room");
        let log = after_extension(&disk);
        let flushes: Vec<usize> = (0..log.len()).filter(|&i| log[i] == Op::Flush).collect();
        // A few blocks and their entries by themselves, the entries last; else two flushes.
        let durable = disk.take_durable();
        if more == 200 {
            let durable: Vec<Op> = durable.into_iter().map(Op::Write).collect();
            assert_eq!((&durable, flushes.len()), (&log, 0));
            let (entries, blocks) = log.split_last().expect("there are writes");
            assert!(is_write_in(entries, &table), "{log:?}");
            assert!(!blocks.iter().any(|op| is_write_in(op, &table)), "{log:?}");
            continue;
        }
        assert!(durable.is_empty());
        assert_eq!(flushes.len(), 2, "{log:?}");
        assert_eq!(flushes[1], log.len() - 1);
        let root = if moves { 0..CLUSTER } else { table.clone() };
        let new = start..image.lock().space.claimed() * CLUSTER;
        if old.refcount_table_offset == old_table || moves {
            let placed = |op| is_write_in(op, &new) || !is_write_in(op, &root);
            assert!(log[..flushes[0]].iter().all(placed), "{log:?}");
            assert!(
                log[flushes[0] + 1..flushes[1]]
                    .iter()
                    .all(|op| is_write_in(op, &root))
            );
        }
        let header = image.header();
        assert_eq!(
            header.refcount_table_offset != old.refcount_table_offset,
            moves
        );
        let mut counts = block_on(image.turn.take());
        assert_eq!(
            counts.refcounts.table_offset().0,
            header.refcount_table_offset
        );
        let room = u64::from(header.refcount_table_clusters) * PER_TABLE_CLUSTER;
        assert_eq!(counts.refcounts.table().len() as u64, room);
        let first = HostCluster(old.refcount_table_offset / CLUSTER);
        let count = block_on(counts.refcounts.get(first)).unwrap();
        assert_eq!(count, u64::from(!moves));
        drop(counts);
        let mut state = image.lock();
        assert_eq!(state.space.protected.contains(first), !moves);
        let new_table = HostCluster(header.refcount_table_offset / CLUSTER);
        assert!(state.space.protected.contains(new_table));
        if moves {
            // Lowest first.
            let (lowest, len, content) = state.space.free.take(1).expect("the old table is free");
            assert_eq!((lowest, content), (first, SpaceContent::Unknown));
            state.space.free.add(lowest, len, content);
        }
    }
    block_on(image.close()).expect("nothing fails");
    assert_eq!(faults(disk.contents()), (0, 0));
}

/// A file is never longer than offsets in entries reach, and up to there it grows.
#[test]
fn a_file_does_not_grow_beyond_the_last_offset() {
    const LARGE: u64 = 2 << 20;
    for beyond in [0, 1, 2] {
        let disk = Disk::new(1);
        let options = CreateOptions {
            cluster_size: LARGE,
            ..CreateOptions::new(1 << 30)
        };
        block_on(create(disk.clone(), None, &options)).expect("there is room");
        let image = qcow2_on(&disk);
        let mut counts = block_on(image.turn.take());
        let end = HOST_OFFSET_END / LARGE;
        // A new block, and one cluster that is asked for.
        let claimed = end - 2 + beyond;
        image.lock().space.extend_to(claimed, 0);
        block_on(image.file.set_len(claimed * LARGE)).expect("it is sparse");
        let grown = block_on(image.grow(&mut counts, 1));
        if beyond == 0 {
            grown.expect("it ends at the last offset");
            assert_eq!(image.lock().space.claimed(), end);
        } else {
            assert!(is_no_space(&grown.expect_err("it would end beyond")));
            assert_eq!(disk.len_bytes(), claimed * LARGE);
        }
    }
}

/// The refcount table grows to the length that readers accept, and no longer.
#[test]
fn a_refcount_table_does_not_grow_beyond_its_largest_length() {
    let most = REFCOUNT_TABLE_BYTES_MAX / 8;
    for (table_entries, last_block, fits) in [
        (PER_TABLE_CLUSTER, most - 1, true),
        (PER_TABLE_CLUSTER, most, false),
        // Half as much again would be too much.
        (most / 4 * 3, most / 4 * 3 + PER_TABLE_CLUSTER, true),
    ] {
        let disk = small();
        let image = qcow2_on(&disk);
        let mut counts = block_on(image.turn.take());
        // The table takes 16384 clusters, their blocks 256 and some more.
        let claimed = last_block * PER_BLOCK + PER_BLOCK / 2 - most / PER_TABLE_CLUSTER - 300;
        let mut table = counts.refcounts.table().to_vec();
        table.resize(table_entries as usize, 0);
        let offset = counts.refcounts.table_offset();
        counts.refcounts.set_table(table, offset);
        let growth = block_on(image.plan_counts(&mut counts, claimed, (1, 1))).unwrap();
        // The clusters needed beyond, so that the last block is the intended one.
        let needed = last_block * PER_BLOCK + 1 - growth.first_free();
        image.lock().space.extend_to(claimed, 0);
        block_on(image.file.set_len(claimed * CLUSTER)).expect("it is sparse");
        let step = growth::Step {
            bytes: needed * CLUSTER,
            method: growth::Method::Extend,
        };
        let grown = block_on(image.grow_by(&mut counts, needed, step));
        assert_eq!(grown.is_ok(), fits, "block {last_block}: {grown:?}");
        if fits {
            let bytes = image.header().refcount_table_bytes();
            assert!(
                bytes <= REFCOUNT_TABLE_BYTES_MAX,
                "nobody opens it: {bytes}"
            );
        } else {
            assert!(is_no_space(&grown.unwrap_err()));
            assert_eq!(disk.len_bytes(), claimed * CLUSTER);
        }
    }
}

/// Clusters that the scan has not reached are left to it; those it has passed, and those that
/// this session has grown, are free at once.
#[test]
fn what_is_freed_is_free_once() {
    let image = qcow2_on(&small());
    let mut state = image.lock();
    state.space.opened_with(200);
    let (scanned, cluster) = (100, HostCluster);
    for (freed, is_free) in [
        (0, true),
        (99, true),
        (100, false),
        (101, false),
        (199, false),
        (200, true),
        (201, true),
    ] {
        state.space.fresh.set(cluster(freed), 1);
        state.space.protected.insert(cluster(freed));
        let before = state.space.free.clusters();
        state
            .space
            .set_free(scanned, (cluster(freed), SpaceContent::Unknown));
        assert_eq!(
            state.space.free.clusters() - before,
            u64::from(is_free),
            "{freed}"
        );
        assert_eq!(state.space.fresh.of(cluster(freed)), 0);
        assert!(!state.space.protected.contains(cluster(freed)));
    }
}

/// Counts that could not be raised, for want of space, are raised by the next cycle: all of them,
/// and once.
#[test]
fn counts_that_could_not_be_raised_are_raised_later() {
    let disk = small();
    let image = qcow2_on(&disk);
    block_on(image.make_room(200)).expect("there is room");
    let places: Vec<HostCluster> = {
        let mut state = image.lock();
        let taken: Vec<_> = (0..150)
            .map(|_| state.space.free.take(1).unwrap().0)
            .collect();
        for (i, cluster) in taken.iter().enumerate() {
            for _ in 0..1 + i as u64 % 3 {
                state.space.raise(*cluster);
            }
        }
        taken
    };
    // Nothing of the counts is in memory, so they are read.
    let forget = |counts: &mut Counts| {
        let (table, offset) = (
            counts.refcounts.table().to_vec(),
            counts.refcounts.table_offset(),
        );
        counts.refcounts = Refcounts::new(image.file.clone(), image.format, table, offset);
    };
    forget(&mut block_on(image.turn.take()));
    let raised = |image: &Qcow2| {
        let mut state = image.lock();
        let raised = state.space.raised.cut();
        state.space.raised.take_back(raised.clone());
        BTreeMap::from_iter(raised)
    };
    let wanted = raised(&image);
    for reads in 0..2 {
        let left = std::sync::atomic::AtomicI64::new(reads);
        disk.fail(move |op| {
            let counted = matches!(op, Op::Read(_));
            let fails = counted && left.fetch_sub(1, std::sync::atomic::Ordering::Relaxed) <= 0;
            fails.then(|| std::io::Error::from_raw_os_error(ENOSPC))
        });
        let failed = block_on(image.write_back()).expect_err("counts cannot be read");
        assert!(is_no_space(&failed));
        if reads == 0 {
            assert_eq!(raised(&image), wanted);
        }
    }
    disk.mend();
    block_on(image.write_back()).expect("nothing fails");
    assert!(image.lock().space.raised.is_empty());
    let mut counts = block_on(image.turn.take());
    forget(&mut counts);
    for cluster in places {
        let count = block_on(counts.refcounts.get(cluster)).unwrap();
        assert_eq!(count, wanted[&cluster], "{cluster:?}");
    }
}

/// New blocks are reachable before anything else can fail: a close cuts the file where the session
/// takes its end to be.
#[test]
fn a_read_that_fails_as_the_file_grows_leaves_no_block_behind_the_end() {
    let mut failed = 0;
    for nth in 0..60 {
        // Blocks of two pages, each for 8 MiB.
        let disk = Disk::new(1);
        let options = CreateOptions {
            cluster_size: 8 << 10,
            refcount_bits: 64,
            ..CreateOptions::new(64 << 20)
        };
        block_on(create(disk.clone(), None, &options)).expect("there is room");
        let image = open(disk.clone());
        let left = AtomicI64::new(nth);
        disk.fail(move |op| {
            let is_due = matches!(op, Op::Read(_)) && left.fetch_sub(1, Ordering::Relaxed) == 0;
            is_due.then(|| std::io::Error::from_raw_os_error(EIO))
        });
        for at in (0..24 << 20).step_by(1 << 20) {
            let data = Buf::from(vec![1; 1 << 20]);
            let written = block_on(image.write(at, data, Durability::Cached));
            if written.is_err() {
                failed += 1;
                break;
            }
        }
        disk.mend();
        block_on(image.close()).expect("a read that failed changes nothing");
        assert_eq!(faults(disk.contents()).0, 0, "read {nth} has failed");
    }
    assert!(failed >= 3, "only {failed} writes fail");
}
