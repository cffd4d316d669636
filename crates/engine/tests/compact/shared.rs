//! Clusters that snapshots share, their tables, and compressed clusters move as well: in images of
//! several shapes, cut short at every write, and beside requests that change these clusters.

use super::*;

/// An image with snapshots, whose clusters and tables the disk shares in part, and with room before
/// them: the first of them was deleted.
pub(super) fn with_snapshots(create_options: &str, size: u64) -> (Vec<u8>, Model) {
    let file = Arc::new(MemoryFile::new("image", made(create_options, size), 1));
    let image = open(file.clone());
    let mut model = Model::new(size);
    let random = &mut Random(size);
    for name in ["gone", "one", "two"] {
        for _ in 0..3 {
            model.write(&image, random);
            model.compress(&image, random);
        }
        model.create(&image, name);
    }
    model.write(&image, random);
    model.delete(&image, 0);
    block_on(image.close()).unwrap();
    checked_clean(&file, create_options);
    (file.contents(), model)
}

pub(super) const SNAPSHOT_SHAPES: [(&str, u64); 5] = [
    ("cluster_size=4096", 60 << 10),
    ("cluster_size=512,compat=0.10", 30 << 10),
    ("cluster_size=512,refcount_bits=8", 30 << 10),
    ("cluster_size=1024,refcount_bits=64", 30 << 10),
    ("extended_l2=on,cluster_size=16384", 200 << 10),
];

/// Nothing but leaks; the disk and its snapshots read as they did, and a further compaction ends
/// well.
pub(super) fn judge_snapshots(what: &str, bytes: &[u8], model: &Model) {
    let mut findings = Vec::new();
    our_check(bytes.to_vec(), &mut findings).unwrap();
    for finding in findings {
        assert_eq!(finding.severity(), Severity::Leak, "{what}: {finding}");
    }
    let file = Arc::new(MemoryFile::new("image", bytes.to_vec(), 1));
    model.judge(&file, what);
    let image = open(file.clone());
    compact(&image).unwrap();
    block_on(image.close()).unwrap();
    checked_clean(&file, what);
    model.judge(&file, what);
}

/// The forecast of a compaction.
fn plan(image: &Image) -> cowslip::qcow2::compact::CompactionPlan {
    block_on(image.compaction_plan(&CompactOptions::default(), &Job::default())).unwrap()
}

#[test]
fn nothing_is_left_before_the_end_that_could_move_there() {
    if !peers_are_installed() {
        return;
    }
    for (create_options, size) in SNAPSHOT_SHAPES {
        let (bytes, model) = with_snapshots(create_options, size);
        let file = Arc::new(MemoryFile::new("image", bytes.clone(), 1));
        let image = open(file.clone());
        let before = plan(&image);
        let done = block_on(image.compact(&thrifty(cluster_bytes(&image)), &Job::default()));
        let done = done.unwrap();
        assert_eq!(done.moved_bytes, before.moved_bytes, "{create_options}");
        assert_eq!(done.file_bytes, before.file_bytes_after, "{create_options}");
        let after = plan(&image);
        assert_eq!(after.moved_bytes, 0, "{create_options}");
        match after.held_by {
            None => assert_eq!(after.free_bytes, 0, "{create_options}: {after:?}"),
            Some(held_by) => assert!(
                !["data", "snapshots", "L2 tables"].contains(&held_by),
                "{create_options}: {held_by}"
            ),
        }
        block_on(image.close()).unwrap();
        checked_clean(&file, create_options);
        model.judge(&file, create_options);
        // All snapshots can go.
        let image = open(file.clone());
        let mut model = model;
        while !model.snapshots.is_empty() {
            model.delete(&image, 0);
        }
        compact(&image).unwrap();
        block_on(image.close()).unwrap();
        checked_clean(&file, create_options);
        model.judge(&file, create_options);
    }
}

#[test]
fn snapshots_outlast_a_crash_at_any_moment() {
    if !peers_are_installed() {
        return;
    }
    let mut moved = 0;
    for (create_options, size) in SNAPSHOT_SHAPES {
        let (start, model) = with_snapshots(create_options, size);
        let file = Recorder::new(start.clone());
        let image = open(file.clone());
        let options = thrifty(cluster_bytes(&image));
        let done = block_on(image.compact(&options, &Job::default())).unwrap();
        moved += done.moved_bytes / cluster_bytes(&image);
        let ops = file.ops();
        each_crash(&start, &ops, |what, bytes| {
            judge_snapshots(&format!("{create_options}, {what}"), bytes, &model);
        });
    }
    assert!(moved > 40, "{moved}");
}

#[test]
fn snapshots_outlast_a_full_disk_at_any_moment() {
    if !peers_are_installed() {
        return;
    }
    for (create_options, size) in SNAPSHOT_SHAPES {
        let (start, model) = with_snapshots(create_options, size);
        for budget in 0.. {
            let file = Recorder::failing_after(start.clone(), budget);
            let image = open(file.clone());
            let options = thrifty(cluster_bytes(&image));
            let outcome = block_on(image.compact(&options, &Job::default()));
            let what = format!("{create_options}, {budget}");
            assert!(read(&image) == model.disk, "{what}");
            drop(image);
            judge_snapshots(&what, &file.contents(), &model);
            if outcome.is_ok() {
                break;
            }
        }
    }
}

#[test]
fn snapshots_outlast_a_cancel_at_any_moment() {
    if !peers_are_installed() {
        return;
    }
    let mut cancelled = 0;
    for (create_options, size) in SNAPSHOT_SHAPES {
        let (start, model) = with_snapshots(create_options, size);
        for left in 1.. {
            let what = format!("{create_options}, {left}");
            let file = Arc::new(MemoryFile::new("image", start.clone(), 1));
            let image = open(file.clone());
            let (job, _attendant) = cancelled_at(left);
            let outcome = block_on(image.compact(&thrifty(cluster_bytes(&image)), &job));
            // The session goes on.
            let mut model = model.clone();
            model.write(&image, &mut Random(left as u64));
            model.create(&image, "late");
            block_on(image.close()).unwrap();
            checked_clean(&file, &what);
            model.judge(&file, &what);
            match outcome {
                Ok(_) => break,
                Err(error) => assert!(matches!(error, Error::Cancelled), "{what}: {error}"),
            }
            cancelled += 1;
        }
    }
    assert!(cancelled > 15, "{cancelled}");
}

/// A write of which no space is left fails in turn, once; the session goes on.
#[test]
fn a_write_without_space_is_taken_back() {
    if !peers_are_installed() {
        return;
    }
    let (create_options, size) = SNAPSHOT_SHAPES[0];
    let (start, model) = with_snapshots(create_options, size);
    let mut failed = 0;
    for nth in 0.. {
        let file = FailsOnce::new(start.clone(), nth);
        let image = open(file.clone());
        let outcome = block_on(image.compact(&thrifty(4096), &Job::default()));
        let what = format!("write {nth}");
        assert!(read(&image) == model.disk, "{what}");
        if !file.has_failed() {
            break;
        }
        failed += 1;
        // What has come back by then may be room enough to go on.
        drop(outcome);
        // It may be latched, for a root or for what cannot be taken back; else it goes on.
        let mut model = model.clone();
        let data = Buf::copy_of(&[7; 512]);
        if block_on(image.write(0, data, Durability::Durable)).is_ok() {
            model.disk[..512].fill(7);
            block_on(image.compact(&thrifty(4096), &Job::default())).unwrap();
            block_on(image.close()).unwrap();
            checked_clean(&file.memory, &what);
        } else {
            drop(image);
        }
        judge_snapshots(&what, &file.memory.contents(), &model);
    }
    assert!(failed > 10, "{failed}");
}

/// While the copy of a cluster of the disk is under way, a guest writes clusters that are shared
/// and about to move, and snapshots come and go between batches: what has changed stays, the rest
/// moves.
#[test]
fn a_guest_wins_over_what_was_planned() {
    let size = 96 << 10;
    let memory = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    block_on(create(memory.clone(), None, &shapes()[0])).unwrap();
    let file = SlowFile::new(memory.contents());
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
    let mut model = Model::new(size);
    let fill = |model: &mut Model, range: std::ops::Range<usize>, byte| {
        model.disk[range.clone()].fill(byte);
        let data = Buf::copy_of(&model.disk[range.clone()]);
        block_on(image.write(range.start as u64, data, Durability::Cached)).unwrap();
    };
    fill(&mut model, 0..size as usize, 1);
    model.create(&image, "gone");
    fill(&mut model, 0..size as usize, 2);
    model.create(&image, "kept");
    let mut context = Context::from_waker(Waker::noop());
    {
        // A cluster of the disk's own at the end, whose copy is held up.
        let data = Buf::copy_of(&[HELD; 4096]);
        let mut held = pin!(image.write(0, data, Durability::Cached));
        while file.waiting() == 0 {
            assert!(held.as_mut().poll(&mut context).is_pending());
        }
        file.let_go();
        block_on(held).unwrap();
        model.disk[..4096].fill(HELD);
    }
    model.delete(&image, 0);
    let (job, options) = (Job::default(), CompactOptions::default());
    let mut compaction = pin!(image.compact(&options, &job));
    while file.waiting() == 0 {
        assert!(compaction.as_mut().poll(&mut context).is_pending());
    }
    // The plan is made. These clusters are shared no longer when their turn comes.
    for at in [4096, 40960] {
        fill(&mut model, at..at + 4096, 9);
    }
    let compacted = loop {
        file.let_go();
        if let Poll::Ready(outcome) = compaction.as_mut().poll(&mut context) {
            break outcome.unwrap();
        }
    };
    assert!(compacted.moved_bytes > 0);
    assert!(read(&image) == model.disk);
    block_on(image.close()).unwrap();
    let bytes = file.memory.contents();
    judge_snapshots("beside a guest", &bytes, &model);
}

/// Holds a job up, once, when it has asked so often whether it may go on.
struct HoldAt {
    left: AtomicUsize,
    hold: Arc<Hold>,
}

#[derive(Default)]
struct Hold {
    is_held: AtomicBool,
    goes_on: AtomicBool,
}

impl Attendant for HoldAt {
    fn pace(&self, _bytes: u64) -> Option<Moment> {
        if self.left.fetch_sub(1, Ordering::Relaxed) != 1 {
            return None;
        }
        let hold = self.hold.clone();
        hold.is_held.store(true, Ordering::Relaxed);
        Some(Box::pin(std::future::poll_fn(move |_| {
            match hold.goes_on.load(Ordering::Relaxed) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })))
    }
}

/// Whatever a guest or a change of snapshots does between two batches, no byte is lost: what was
/// planned is out of date.
#[test]
fn everything_may_change_between_batches() {
    if !peers_are_installed() {
        return;
    }
    type Change = fn(&Image, &mut Model, &mut Random);
    let changes: [Change; 5] = [
        |image, model, _| model.delete(image, 0),
        |image, model, _| {
            model.create(image, "late");
            model.delete(image, 0);
        },
        |image, model, random| {
            for _ in 0..3 {
                model.write(image, random);
            }
        },
        |image, model, random| {
            while !model.snapshots.is_empty() {
                model.delete(image, 0);
            }
            model.create(image, "late");
            model.write(image, random);
        },
        |image, model, random| {
            for name in ["a longer name than before", "b"] {
                model.create(image, name);
                model.compress(image, random);
                model.write(image, random);
            }
            model.delete(image, 0);
        },
    ];
    for (create_options, size) in SNAPSHOT_SHAPES {
        let (start, before) = with_snapshots(create_options, size);
        for (number, change) in changes.iter().enumerate() {
            for left in 1.. {
                let what = format!("{create_options}, change {number}, {left}");
                let file = Arc::new(MemoryFile::new("image", start.clone(), 1));
                let image = open(file.clone());
                let hold = Arc::new(Hold::default());
                let job = Job::attended(HoldAt {
                    left: AtomicUsize::new(left),
                    hold: hold.clone(),
                });
                let options = thrifty(cluster_bytes(&image));
                let mut model = before.clone();
                let mut context = Context::from_waker(Waker::noop());
                let mut compaction = Box::pin(image.compact(&options, &job));
                let mut was_held = false;
                let outcome = loop {
                    if let Poll::Ready(outcome) = compaction.as_mut().poll(&mut context) {
                        break outcome;
                    }
                    if hold.is_held.load(Ordering::Relaxed) && !was_held {
                        was_held = true;
                        change(&image, &mut model, &mut Random(left as u64));
                        hold.goes_on.store(true, Ordering::Relaxed);
                    }
                };
                outcome.unwrap();
                drop(compaction);
                assert!(read(&image) == model.disk, "{what}");
                block_on(image.close()).unwrap();
                checked_clean(&file, &what);
                judge_snapshots(&what, &file.contents(), &model);
                if !was_held {
                    break;
                }
            }
        }
    }
}

/// A file in memory on which one write fails, after it was done in part, for want of space.
struct FailsOnce {
    memory: MemoryFile,
    left: AtomicUsize,
}

impl FailsOnce {
    fn new(bytes: Vec<u8>, nth: usize) -> Arc<FailsOnce> {
        Arc::new(FailsOnce {
            memory: MemoryFile::new("image", bytes, 1),
            left: AtomicUsize::new(nth + 1),
        })
    }

    fn has_failed(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }
}

cowslip_block::debug_by_name!(FailsOnce);

impl BlockFile for FailsOnce {
    cowslip_block::forward_to_file!(memory: name, capabilities, len, read, zero, discard, allocate, extents, flush, set_len, allocated_bytes);

    fn write(&self, offset: u64, data: IoVec, how: Durability) -> Pending<io::Result<()>> {
        let order = Ordering::Relaxed;
        let left = self
            .left
            .fetch_update(order, order, |left| left.checked_sub(1));
        if left != Ok(1) {
            return self.memory.write(offset, data, how);
        }
        let half = data.len() / 1024 * 512;
        if half > 0 {
            block_on(self.memory.write(offset, data.slice(0, half), how)).unwrap();
        }
        Pending::ready(Err(io::Error::from_raw_os_error(28)))
    }
}

/// Runs qemu-img in the image's directory.
fn qemu_img(dir: &std::path::Path, args: &[&str]) {
    let run = std::process::Command::new("qemu-img")
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(run.status.success(), "qemu-img {args:?}: {run:?}");
}

/// Twenty snapshots are made, and most of them deleted again: afterwards the file is as long as
/// what it holds, and QEMU's tools read from it what they read before.
#[test]
fn a_file_with_a_history_of_snapshots_is_as_long_as_what_it_holds() {
    if !peers_are_installed() {
        return;
    }
    let size = 8 << 20;
    let mut stored = crate::support::Image::create("cluster_size=4096", &size.to_string(), &[]);
    let file = Arc::new(MemoryFile::new("image", stored.bytes.clone(), 1));
    let image = open(file.clone());
    let mut model = Model::new(size);
    let random = &mut Random(20);
    for number in 0..20 {
        for _ in 0..20 {
            model.write(&image, random);
            model.compress(&image, random);
        }
        model.create(&image, &format!("number {number}"));
    }
    for number in (0..20).rev().filter(|number| number % 4 != 0) {
        model.delete(&image, number);
    }
    block_on(image.close()).unwrap();
    stored.bytes = file.contents();
    stored.save();
    let before = stored.bytes.len();
    let ids: Vec<String> = model.snapshots.iter().map(|(id, _)| id.clone()).collect();
    assert!(ids.len() > 3);
    let disk = ["convert", "-O", "raw", "image.qcow2", "disk.raw"];
    qemu_img(stored.dir(), &disk);
    let snapshot = |id: &str, to: &str| {
        let choice = format!("snapshot.id={id}");
        let args = ["convert", "-O", "raw", "-l", &choice, "image.qcow2", to];
        qemu_img(stored.dir(), &args);
    };
    ids.iter().for_each(|id| snapshot(id, &format!("{id}.raw")));
    let image = open(file.clone());
    let options = thrifty(100 * 4096);
    let done = block_on(image.compact(&options, &Job::default())).unwrap();
    let after = plan(&image);
    block_on(image.close()).unwrap();
    checked_clean(&file, "compacted");
    let bytes = file.contents();
    assert_eq!(done.file_bytes, bytes.len() as u64);
    assert!(done.file_bytes < before as u64 * 9 / 10, "{done:?}");
    assert!(
        done.file_bytes <= after.used_bytes * 102 / 100,
        "{done:?}, {after:?}"
    );
    std::fs::write(stored.path(), &bytes).unwrap();
    qemu_img(stored.dir(), &["check", "image.qcow2"]);
    let args = [
        "compare",
        "-f",
        "raw",
        "-F",
        "qcow2",
        "disk.raw",
        "image.qcow2",
    ];
    qemu_img(stored.dir(), &args);
    for id in &ids {
        snapshot(id, "now.raw");
        qemu_img(stored.dir(), &["compare", &format!("{id}.raw"), "now.raw"]);
    }
    model.judge(&file, "compacted");
}

/// An image in whose first part nothing is left, and behind it bitmaps whose bits are mixed.
fn with_bitmaps(create_options: &CreateOptions) -> (Vec<u8>, Vec<u8>) {
    let (bytes, disk) = half_empty(create_options);
    let file = Arc::new(MemoryFile::new("image", bytes, 1));
    // They are made before there is room: the second half is written to new space, too.
    let image = open(file.clone());
    for name in ["a", "b"] {
        let granularity = Some(512);
        let add = BitmapChange::Add { granularity };
        block_on(image.change_bitmap(name, &add)).unwrap();
    }
    let half = disk.len() / 2;
    block_on(image.write(0, Buf::from(vec![9; half]), Durability::Cached)).unwrap();
    block_on(image.change_bitmap("b", &BitmapChange::Disable)).unwrap();
    block_on(image.close()).unwrap();
    let image = open(file.clone());
    block_on(image.discard(0, half as u64)).unwrap();
    block_on(image.close()).unwrap();
    checked_clean(&file, "with bitmaps");
    (file.contents(), disk)
}

/// The ranges that are dirty in a bitmap.
fn dirty(image: &Image, name: &str) -> Vec<(u64, u64)> {
    let bits = block_on(image.dirty_bits(name)).unwrap();
    let ranges = bits.dirty_ranges();
    ranges.map(|range| (range.start, range.end)).collect()
}

fn all_dirty(file: &Arc<MemoryFile>) -> [Vec<(u64, u64)>; 2] {
    let image = open(file.clone());
    ["a", "b"].map(|name| dirty(&image, name))
}

#[test]
fn bitmaps_move_with_their_tables_and_their_directory() {
    for create_options in shapes() {
        let (start, disk) = with_bitmaps(&create_options);
        let at_first = all_dirty(&Arc::new(MemoryFile::new("image", start.clone(), 1)));
        assert!(
            at_first.iter().all(|ranges| !ranges.is_empty()),
            "{at_first:?}"
        );
        let file = Recorder::new(start.clone());
        let image = open(file.clone());
        let options = thrifty(cluster_bytes(&image));
        let done = block_on(image.compact(&options, &Job::default())).unwrap();
        assert!(done.moved_bytes > 6 * cluster_bytes(&image), "{done:?}");
        let after = plan(&image);
        assert_eq!((after.held_by, after.free_bytes), (None, 0), "{after:?}");
        // Bits that change are stored, and the places that moved are given up.
        let size = disk.len();
        let data = Buf::copy_of(&[3; 700]);
        block_on(image.write(size as u64 - 700, data, Durability::Cached)).unwrap();
        let ops = file.ops();
        block_on(image.close()).unwrap();
        let closed = Arc::new(MemoryFile::new("image", file.contents(), 1));
        checked_clean(&closed, "bitmaps have moved");
        let at_last = all_dirty(&closed);
        assert_eq!(at_last[1], at_first[1], "it follows no writes");
        assert_eq!(at_last[0].last().unwrap().1, size as u64);
        each_crash(&start, &ops, |what, bytes| {
            let file = Arc::new(MemoryFile::new("image", bytes.to_vec(), 1));
            let mut findings = Vec::new();
            our_check(bytes.to_vec(), &mut findings).unwrap();
            for finding in findings {
                assert_eq!(finding.severity(), Severity::Leak, "{what}: {finding}");
            }
            let image = open(file.clone());
            // Those that are not marked say what they said.
            let bitmaps = block_on(image.bitmaps()).unwrap();
            for (bitmap, expected) in bitmaps.iter().zip(&at_first) {
                if !bitmap.in_use {
                    assert_eq!(dirty(&image, &bitmap.name), *expected, "{what}");
                }
            }
        });
    }
}
