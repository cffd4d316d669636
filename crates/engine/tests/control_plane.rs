//! Resizes that preallocate or shrink, and changes of the header, cut short at every write: by a
//! crash, by the job's being cancelled, and by a full disk.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use cowslip::file::BlockFile;
use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{AllocPolicy, OpenOptions};
use cowslip::job::{Attendant, Moment};
use cowslip::qcow2::amend::Amendment;
use cowslip::qcow2::check::{CheckOptions, CheckResult, check};
use cowslip::qcow2::create::{CreateOptions, Preallocation, Version, create};
use cowslip::qcow2::header::Header;
use cowslip::{Buf, BufMut, Error, Image, Job};

use crate::support::crash::{Op, Recorder, each_crash};

const OLD: u64 = 100 << 10;
const NEW: u64 = 400 << 10;
/// A disk that shrinks, and what is written of it at a time.
const LONG: u64 = 384 << 10;
const SHORT: u64 = 128 << 10;
const PIECE: u64 = 64 << 10;

fn now<T>(work: impl Future<Output = T>) -> T {
    // Work that lets others go first is only asked again: nothing here waits for anything else.
    let mut work = std::pin::pin!(work);
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..1_000_000 {
        if let Poll::Ready(value) = work.as_mut().poll(&mut cx) {
            return value;
        }
    }
    panic!("it does not end");
}

async fn open(file: Arc<dyn BlockFile>) -> Image {
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    Image::open(file, options, &NoFiles).await.unwrap()
}

/// An image with some data up to its end, which is in the middle of a cluster.
fn image(extended_l2: bool, cluster_size: u64) -> Vec<u8> {
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    now(async {
        let options = CreateOptions {
            extended_l2,
            cluster_size,
            ..CreateOptions::new(OLD + 512)
        };
        create(file.clone(), None, &options).await.unwrap();
        let image = open(file.clone()).await;
        let data = Buf::copy_of(&[9; 4096]);
        image
            .write(OLD + 512 - 4096, data, Default::default())
            .await
            .unwrap();
        image.close().await.unwrap();
    });
    file.contents()
}

async fn checked(file: &Arc<dyn BlockFile>) -> CheckResult {
    struct Silent;
    impl cowslip::qcow2::check::Observer for Silent {
        fn finding(&mut self, finding: &cowslip::qcow2::check::Finding) {
            eprintln!("{finding:?}");
        }
        fn progress(&mut self, _: u64, _: u64) {}
    }
    check(file, &CheckOptions::default(), &mut Silent)
        .await
        .unwrap()
}

/// The first byte other than zero that no refcount block counts.
fn uncounted_data(bytes: &[u8]) -> Option<usize> {
    let header = Header::parse(bytes, u64::MAX, "image").unwrap();
    let cluster = 1usize << header.cluster_bits;
    let counted = ((cluster * 8) >> header.refcount_order) * cluster;
    let table = header.refcount_table_offset as usize;
    let is_counted = |at: usize| {
        let entry = table + at / counted * 8;
        let len = header.refcount_table_clusters as usize * cluster;
        entry < table + len && bytes[entry..][..8].iter().any(|&byte| byte != 0)
    };
    let mut parts = (0..bytes.len()).step_by(counted);
    parts.find_map(|at| {
        let part = &bytes[at..bytes.len().min(at + counted)];
        let data = part.iter().position(|&byte| byte != 0);
        data.filter(|_| !is_counted(at)).map(|data| at + data)
    })
}

/// The image is sound, has the old or the new size, and reads as it should; the resize can be
/// repeated.
fn judge(what: &str, bytes: &[u8]) {
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("image", bytes.to_vec(), 1));
    now(async {
        let found = checked(&file).await;
        assert_eq!(found.corruptions, 0, "{what}");
        let image = open(file.clone()).await;
        assert!(
            [OLD + 512, NEW].contains(&image.size()),
            "{what}: {}",
            image.size()
        );
        image.resize(NEW).await.unwrap();
        let read = image.read(0, BufMut::zeroed(NEW as usize)).await.unwrap();
        for (at, byte) in read.iter().enumerate() {
            let is_data = (OLD + 512 - 4096..OLD + 512).contains(&(at as u64));
            assert_eq!(*byte, if is_data { 9 } else { 0 }, "{what}: {at}");
        }
        image.close().await.unwrap();
        assert_eq!(checked(&file).await.corruptions, 0, "{what}");
    });
}

#[test]
fn a_crash_in_a_preallocating_resize_leaves_the_old_disk_or_the_new_one() {
    for (extended_l2, cluster_size) in [(false, 512), (false, 4096), (true, 16384)] {
        let start = image(extended_l2, cluster_size);
        for how in [
            Preallocation::Metadata,
            Preallocation::Falloc,
            Preallocation::Full,
        ] {
            let file = Recorder::new(start.clone());
            now(async {
                let image = open(file.clone()).await;
                image
                    .resize_as_job(NEW, how, &Job::default())
                    .await
                    .unwrap();
                image.close().await.unwrap();
            });
            // The states are many and alike; every seventh is looked at.
            let count = AtomicUsize::new(0);
            each_crash(&start, &file.ops(), |what, bytes| {
                if count.fetch_add(1, Ordering::Relaxed).is_multiple_of(7) {
                    judge(&format!("{cluster_size} {how:?} {what}"), bytes);
                }
            });
            judge("the end", &file.contents());
        }
    }
}

/// Cancels its job after a number of pieces.
struct Cancels {
    left: AtomicUsize,
    job: Arc<OnceLock<Job>>,
}

impl Attendant for Cancels {
    fn pace(&self, _: u64) -> Option<Moment> {
        let left = self.left.fetch_sub(1, Ordering::Relaxed);
        if left == 0 {
            self.job.get().unwrap().cancel();
        }
        None
    }
}

#[test]
fn a_resize_that_is_cancelled_or_runs_out_of_space_leaves_what_was_there() {
    let start = image(false, 4096);
    for how in [
        Preallocation::Metadata,
        Preallocation::Falloc,
        Preallocation::Full,
    ] {
        for left in 0..3 {
            let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("image", start.clone(), 1));
            let job = Arc::new(OnceLock::new());
            let attended = Job::attended(Cancels {
                left: AtomicUsize::new(left),
                job: job.clone(),
            });
            job.set(attended.clone()).unwrap();
            if how == Preallocation::Metadata {
                attended.cancel();
            }
            now(async {
                let image = open(file.clone()).await;
                let resized = image.resize_as_job(NEW, how, &attended).await;
                if resized.is_ok() {
                    // It had fewer pieces.
                    assert!(left > 0, "{how:?}");
                    return;
                }
                assert!(matches!(resized, Err(Error::Cancelled)), "{resized:?}");
                assert_eq!(image.size(), OLD + 512);
                image.close().await.unwrap();
                let found = checked(&file).await;
                assert_eq!((found.corruptions, found.leaks), (0, 0), "{how:?} {left}");
                let len = file.len().await.unwrap();
                assert!(
                    len <= start.len() as u64 + 3 * 4096,
                    "{how:?} {left}: {len}"
                );
            });
        }
        // No operation of the medium succeeds any more.
        for budget in 0..60 {
            let file = Recorder::failing_after(start.clone(), budget);
            now(async {
                let image = open(file.clone()).await;
                if image.resize_as_job(NEW, how, &Job::default()).await.is_ok() {
                    return;
                }
                assert_eq!(image.size(), OLD + 512);
                // It may be unable to write that to the medium.
                drop(image.close().await);
            });
            judge(&format!("{how:?} after {budget}"), &file.contents());
        }
    }
}

#[test]
fn a_crash_in_an_amendment_leaves_the_old_header_or_the_new_one() {
    let amendments = [
        Amendment {
            version: Some(Version::V2),
            ..Amendment::default()
        },
        Amendment {
            lazy_refcounts: Some(true),
            alloc_policy: Some(AllocPolicy::Sparse),
            ..Amendment::default()
        },
    ];
    for cluster_size in [512, 65536] {
        let start = image(false, cluster_size);
        let before = Header::parse(&start, u64::MAX, "image").unwrap();
        for amendment in &amendments {
            let file = Recorder::new(start.clone());
            now(async {
                let image = open(file.clone()).await;
                image.amend(amendment, &Job::default()).await.unwrap();
                image.close().await.unwrap();
            });
            let after = Header::parse(&file.contents(), u64::MAX, "image").unwrap();
            let says = |header: &Header| {
                let hint = header.extensions.allocation.map(|hint| hint.policy);
                (header.version, header.compatible_features, hint)
            };
            assert_ne!(says(&before), says(&after));
            let states = each_crash(&start, &file.ops(), |what, bytes| {
                let found = Header::parse(bytes, u64::MAX, "image").unwrap();
                assert!(
                    [says(&before), says(&after)].contains(&says(&found)),
                    "{what}"
                );
                judge(what, bytes);
            });
            assert!(states > 1);
        }
    }
}

/// A disk of small clusters whose counts take many blocks, written in several sessions: each lays
/// blocks of its own.
fn many_blocks(backwards: bool, extended_l2: bool) -> Vec<u8> {
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    now(async {
        let options = CreateOptions {
            extended_l2,
            cluster_size: if extended_l2 { 16384 } else { 512 },
            refcount_bits: 64,
            ..CreateOptions::new(LONG)
        };
        create(file.clone(), None, &options).await.unwrap();
        let pieces = LONG / PIECE;
        for piece in 0..pieces {
            let piece = if backwards { pieces - 1 - piece } else { piece };
            let image = open(file.clone()).await;
            let data = Buf::copy_of(&[1 + piece as u8; PIECE as usize]);
            let written = image.write(piece * PIECE, data, Default::default());
            written.await.unwrap();
            image.close().await.unwrap();
        }
    });
    file.contents()
}

/// Refcount blocks that the table refers to, those of them that hold zeroes alone, L1 entries
/// behind the end.
fn left_behind(bytes: &[u8]) -> (usize, usize, usize) {
    let header = Header::parse(bytes, u64::MAX, "image").unwrap();
    let table = |offset: u64, len: usize| {
        let bytes = &bytes[offset as usize..][..len];
        let words = bytes.chunks_exact(8);
        words.map(|word| u64::from_be_bytes(word.try_into().unwrap()))
    };
    let cluster = 1usize << header.cluster_bits;
    let len = header.refcount_table_clusters as usize * cluster;
    let blocks: Vec<u64> = table(header.refcount_table_offset, len)
        .filter(|&entry| entry != 0)
        .collect();
    let is_empty = |&&block: &&u64| bytes[block as usize..][..cluster].iter().all(|&b| b == 0);
    let empty = blocks.iter().filter(is_empty).count();
    let per_table = cluster * cluster / if cluster == 512 { 8 } else { 16 };
    let needed = header.size.div_ceil(per_table as u64) as usize;
    let l1 = table(header.l1_table_offset, header.l1_size as usize * 8);
    let behind = l1.skip(needed).filter(|&entry| entry != 0).count();
    (blocks.len(), empty, behind)
}

/// The image is sound, has the old or the new size, and reads as it should below the new one; the
/// disk can be shrunk again, and grow, and be written.
fn judge_shrunk(what: &str, bytes: &[u8]) {
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("image", bytes.to_vec(), 1));
    let shows = |read: &[u8], what: &str| {
        for (piece, bytes) in read[..SHORT as usize].chunks(PIECE as usize).enumerate() {
            assert!(bytes.iter().all(|&byte| byte == 1 + piece as u8), "{what}");
        }
    };
    now(async {
        assert_eq!(checked(&file).await.corruptions, 0, "{what}");
        let image = open(file.clone()).await;
        assert!([SHORT, LONG].contains(&image.size()), "{what}");
        image.resize(SHORT).await.unwrap();
        image.resize(LONG).await.unwrap();
        let read = image.read(0, BufMut::zeroed(LONG as usize)).await.unwrap();
        shows(&read, what);
        assert!(
            read[SHORT as usize..].iter().all(|&byte| byte == 0),
            "{what}"
        );
        let rest = Buf::copy_of(&vec![77; (LONG - SHORT) as usize]);
        image.write(SHORT, rest, Default::default()).await.unwrap();
        image.close().await.unwrap();
        let image = open(file.clone()).await;
        let read = image.read(0, BufMut::zeroed(LONG as usize)).await.unwrap();
        shows(&read, what);
        assert!(
            read[SHORT as usize..].iter().all(|&byte| byte == 77),
            "{what}"
        );
        image.close().await.unwrap();
        assert_eq!(checked(&file).await.corruptions, 0, "{what}");
    });
}

#[test]
fn a_shrink_leaves_no_empty_block_no_table_behind_the_end_and_a_shorter_file() {
    for (backwards, extended_l2) in [(false, false), (true, false), (false, true)] {
        let start = many_blocks(backwards, extended_l2);
        let before = left_behind(&start);
        let file: Arc<MemoryFile> = Arc::new(MemoryFile::new("image", start.clone(), 1));
        now(async {
            let image = open(file.clone()).await;
            image.resize(SHORT).await.unwrap();
            image.close().await.unwrap();
            let found = checked(&(file.clone() as Arc<dyn BlockFile>)).await;
            assert_eq!((found.corruptions, found.leaks), (0, 0));
        });
        let (blocks, empty, behind) = left_behind(&file.contents());
        assert_eq!((empty, behind), (0, 0), "{before:?}");
        assert!(extended_l2 || blocks < before.0, "{blocks} of {before:?}");
        assert!(backwards || file.contents().len() < start.len() * 2 / 3);
        // Nobody takes that space again: it is the host's.
        assert_eq!(uncounted_data(&file.contents()), None);
        judge_shrunk("shrunk", &file.contents());
    }
}

/// Returns an image whose disk shrinks, grows and is filled again, twice, in one session or in
/// several.
fn filled_again(file: &Arc<Recorder>, sessions: u32) -> Vec<u8> {
    now(async {
        let mut image = open(file.clone()).await;
        for _ in 0..2 {
            image.resize(SHORT).await.unwrap();
            if sessions > 1 {
                image.close().await.unwrap();
                image = open(file.clone()).await;
            }
            image.resize(LONG).await.unwrap();
            let rest = Buf::copy_of(&vec![77; (LONG - SHORT) as usize]);
            image.write(SHORT, rest, Default::default()).await.unwrap();
        }
        image.close().await.unwrap();
        let file: Arc<dyn BlockFile> = file.clone();
        let found = checked(&file).await;
        assert_eq!((found.corruptions, found.leaks), (0, 0));
    });
    file.contents()
}

#[test]
fn space_that_no_hole_gives_back_keeps_its_counts() {
    for (backwards, sessions) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
        let start = many_blocks(backwards, false);
        let file = Recorder::without_holes(start.clone());
        let (before, after) = (start.len(), filled_again(&file, sessions).len());
        // Tables and blocks get new space; a lost block counts 32 KiB, and there are seven.
        let more = before / 8;
        assert!(after <= before + more, "{before} bytes became {after}");
    }
}

#[test]
fn a_device_uses_the_space_again() {
    for (backwards, sessions) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
        let mut start = many_blocks(backwards, false);
        // An image that is written in one piece has other tables, and they come first.
        start.resize(start.len() + (8 << 10), 0);
        let file = Recorder::device(start.clone());
        let after = filled_again(&file, sessions);
        assert_eq!(after.len(), start.len());
        judge_shrunk("a device", &after);
    }
}

#[test]
fn a_shrink_that_is_cancelled_is_done_and_keeps_blocks() {
    let start = many_blocks(true, false);
    let file: Arc<MemoryFile> = Arc::new(MemoryFile::new("image", start.clone(), 1));
    now(async {
        let image = open(file.clone()).await;
        let job = Job::default();
        job.cancel();
        let resized = image.resize_as_job(SHORT, Preallocation::Off, &job);
        resized.await.unwrap();
        image.close().await.unwrap();
    });
    let (_, empty, behind) = left_behind(&file.contents());
    assert!(empty > 0 && behind > 0 && file.contents().len() >= start.len());
    judge_shrunk("cancelled", &file.contents());
    // The next resize frees the rest, though the disk has that size already.
    now(async {
        let image = open(file.clone()).await;
        image.resize(SHORT).await.unwrap();
        image.close().await.unwrap();
    });
    let (_, empty, behind) = left_behind(&file.contents());
    assert_eq!((empty, behind), (0, 0));
}

#[test]
fn a_session_that_shrinks_and_grows_uses_the_space_again() {
    let start = many_blocks(true, false);
    let file: Arc<MemoryFile> = Arc::new(MemoryFile::new("image", start.clone(), 1));
    let mut lengths = vec![start.len()];
    now(async {
        let image = open(file.clone()).await;
        for _ in 0..8 {
            image.resize(SHORT).await.unwrap();
            image.resize(LONG).await.unwrap();
            let rest = Buf::copy_of(&vec![77; (LONG - SHORT) as usize]);
            image.write(SHORT, rest, Default::default()).await.unwrap();
            lengths.push(file.contents().len());
        }
        image.close().await.unwrap();
        let found = checked(&(file.clone() as Arc<dyn BlockFile>)).await;
        assert_eq!((found.corruptions, found.leaks), (0, 0));
    });
    lengths.push(file.contents().len());
    // A block that is made again takes a cluster of what it counts, so the disk needs one step of
    // growth more than it did at first, 64 KiB and what counts them; and never another one.
    let most = start.len() + (68 << 10);
    assert!(lengths.iter().all(|&len| len <= most), "{lengths:?}");
    let settled = lengths[4];
    assert!(
        lengths[4..].iter().all(|&len| len <= settled),
        "{lengths:?}"
    );
}

#[test]
fn a_damaged_image_keeps_its_length_and_its_blocks_when_it_shrinks() {
    let mut start = many_blocks(false, false);
    let header = Header::parse(&start, u64::MAX, "image").unwrap();
    // Guest data behind the last cluster that has a count.
    let last = start.len() as u64;
    start.extend([0xee; 512]);
    let table = &start[header.l1_table_offset as usize..][..8];
    let table = u64::from_be_bytes(table.try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    let entry = (last | 1 << 63).to_be_bytes();
    start[table as usize..][..8].copy_from_slice(&entry);
    let file: Arc<MemoryFile> = Arc::new(MemoryFile::new("image", start.clone(), 1));
    now(async {
        let image = open(file.clone()).await;
        image.resize(SHORT).await.unwrap();
        let read = image.read(0, BufMut::zeroed(512)).await.unwrap();
        assert_eq!(read[..], [0xee; 512], "what is in use was cut off");
        image.close().await.unwrap();
    });
    assert!(file.contents().len() >= start.len());
}

#[test]
fn a_table_without_a_count_stays_where_a_shrink_finds_it() {
    let mut start = many_blocks(false, false);
    let header = Header::parse(&start, u64::MAX, "image").unwrap();
    let word = |bytes: &[u8], at: u64| {
        let word = bytes[at as usize..][..8].try_into().unwrap();
        u64::from_be_bytes(word) & 0x00ff_ffff_ffff_fe00
    };
    // The last table, which is behind the new end; 64 counts to a block.
    let entry = header.l1_table_offset + 8 * u64::from(header.l1_size - 1);
    let (table, cluster) = (word(&start, entry), word(&start, entry) / 512);
    let block = word(&start, header.refcount_table_offset + cluster / 64 * 8);
    start[(block + cluster % 64 * 8) as usize..][..8].fill(0);
    let file: Arc<MemoryFile> = Arc::new(MemoryFile::new("image", start.clone(), 1));
    now(async {
        let image = open(file.clone()).await;
        image.resize(SHORT).await.unwrap();
        image.close().await.unwrap();
    });
    let after = file.contents();
    assert_eq!(word(&after, entry), table);
    assert!(after.len() >= start.len());
}

#[test]
fn a_crash_in_a_shrink_leaves_the_old_disk_or_the_new_one() {
    for (backwards, extended_l2) in [(false, false), (true, false), (false, true)] {
        let start = many_blocks(backwards, extended_l2);
        let file = Recorder::new(start.clone());
        now(async {
            let image = open(file.clone()).await;
            image.resize(SHORT).await.unwrap();
            image.close().await.unwrap();
        });
        let states = each_crash(&start, &file.ops(), |what, bytes| {
            judge_shrunk(&format!("{extended_l2} {backwards} {what}"), bytes);
        });
        assert!(states > 10, "{states}");
    }
}

/// An image of 64 counts to a block whose refcount table has room, and whose file ends where no
/// block counts: a shrink, or a crash, leaves it so.
fn ends_uncounted() -> Vec<u8> {
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    now(async {
        let options = CreateOptions {
            cluster_size: 512,
            refcount_bits: 64,
            ..CreateOptions::new(8 << 20)
        };
        create(file.clone(), None, &options).await.unwrap();
        let image = open(file.clone()).await;
        let data = Buf::copy_of(&vec![1; 2 << 20]);
        image.write(0, data, Default::default()).await.unwrap();
        image.close().await.unwrap();
    });
    let mut bytes = file.contents();
    bytes.resize(bytes.len().next_multiple_of(32 << 10) + (32 << 10), 0);
    bytes
}

#[test]
fn a_crash_as_many_blocks_become_reachable_leaves_each_with_its_count() {
    let start = ends_uncounted();
    let file = Recorder::new(start.clone());
    now(async {
        let image = open(file.clone()).await;
        let data = Buf::copy_of(&vec![2; 3 << 20]);
        let written = image.write(2 << 20, data, Default::default());
        written.await.unwrap();
    });
    let header = Header::parse(&start, u64::MAX, "image").unwrap();
    let table = header.refcount_table_offset;
    let len = u64::from(header.refcount_table_clusters) * 512;
    let is_entries = |op: &Op| match op {
        Op::Write(at, data) | Op::Durable(at, data) => {
            (table..table + len).contains(at) && data.len() < 512 * 8
        }
        Op::SetLen(_) | Op::Flush => false,
    };
    let mut ops = file.ops();
    let first = ops.iter().position(is_entries).expect("the table has room");
    let last = ops.iter().rposition(is_entries).unwrap();
    // The operations before are durable: a barrier follows them.
    let mut durable = start;
    for op in ops.drain(..first) {
        op.apply(&mut durable, usize::MAX);
    }
    ops.truncate(last + 1 - first);
    // Each sector of the entries may be the one that stays what it was.
    let mut sectors = 0;
    for (nth, op) in ops.iter().enumerate() {
        let (Op::Write(at, data) | Op::Durable(at, data)) = op else {
            continue;
        };
        let mut bytes = durable.clone();
        for op in &ops[..nth] {
            op.apply(&mut bytes, usize::MAX);
        }
        for sector in *at / 512..(at + data.len() as u64).div_ceil(512) {
            let mut torn = bytes.clone();
            op.apply(&mut torn, usize::MAX);
            let part = sector as usize * 512..(sector as usize + 1) * 512;
            torn[part.clone()].copy_from_slice(&bytes[part]);
            let torn: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("image", torn, 1));
            let found = now(checked(&torn));
            assert_eq!(found.corruptions, 0, "sector {sector:#x} of {nth}");
            sectors += 1;
        }
    }
    assert!(sectors > 2, "{sectors}");
}

#[test]
fn a_shrink_that_the_medium_fails_can_be_repeated() {
    let start = many_blocks(true, false);
    for budget in 0.. {
        let file = Recorder::failing_after(start.clone(), budget);
        let shrunk = now(async {
            let image = open(file.clone()).await;
            let shrunk = image.resize(SHORT).await;
            shrunk.and(image.close().await).is_ok()
        });
        judge_shrunk(&format!("after {budget}"), &file.contents());
        if shrunk {
            assert!(budget > 5, "{budget}");
            break;
        }
    }
}
