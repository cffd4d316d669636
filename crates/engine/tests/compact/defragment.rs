//! The disk's clusters get the guest's order: in images of several shapes, whose clusters snapshots
//! share in part, cut short at every write, and beside requests.

use super::shared::{SNAPSHOT_SHAPES, judge_snapshots, with_snapshots};
use super::*;

/// In order, a few clusters at a time.
fn ordered(cluster_bytes: u64) -> CompactOptions {
    CompactOptions {
        defragment: true,
        ..thrifty(cluster_bytes)
    }
}

/// A disk all of which a guest has written cluster by cluster, in no order.
fn scattered(create_options: &CreateOptions) -> (Vec<u8>, Vec<u8>) {
    let file = Arc::new(MemoryFile::new("image", Vec::new(), 1));
    block_on(create(file.clone(), None, create_options)).unwrap();
    let image = open(file.clone());
    let unit = create_options.cluster_size as usize;
    let mut disk = vec![0; create_options.size as usize];
    for (at, byte) in disk.iter_mut().enumerate() {
        *byte = (at / 100 % 250) as u8 | 1;
    }
    let clusters = disk.len().div_ceil(unit);
    for step in 0..clusters {
        // Seven has no factor in common with any of these.
        let at = step * 7 % clusters * unit;
        let data = Buf::copy_of(&disk[at..(at + unit).min(disk.len())]);
        block_on(image.write(at as u64, data, Durability::Cached)).unwrap();
    }
    block_on(image.close()).unwrap();
    (file.contents(), disk)
}

fn order_of(done: &Compaction) -> cowslip::qcow2::compact::Defragmentation {
    done.defragmentation.unwrap()
}

#[test]
fn scattered_clusters_get_the_order_of_the_guest() {
    for create_options in shapes() {
        let unit = create_options.cluster_size;
        let (bytes, disk) = scattered(&create_options);
        let file = Arc::new(MemoryFile::new("image", bytes.clone(), 1));
        let image = open(file.clone());
        let job = Job::default();
        let plan = block_on(image.compaction_plan(&ordered(unit), &job)).unwrap();
        let done = block_on(image.compact(&ordered(unit), &job)).unwrap();
        let order = order_of(&done);
        assert!(order.extents_before > 10, "{order:?}");
        assert_eq!((order.extents, order.extents_perfect), (1, 1));
        assert_eq!(plan.extents, order.extents_before);
        assert_eq!((plan.extents_after, plan.extents_perfect), (Some(1), 1));
        assert_eq!(plan.file_bytes_after, done.file_bytes, "{plan:?}");
        assert!(read(&image) == disk);
        block_on(image.close()).unwrap();
        assert_eq!(file.contents().len() as u64, done.file_bytes);
        assert!(file.contents().len() <= bytes.len());
        checked_clean(&file, "in order");
        // The bytes are in the file as they are on the disk.
        let whole = &disk[..disk.len() / 512 * 512];
        let found = file
            .contents()
            .windows(whole.len())
            .any(|part| part == whole);
        assert!(found, "{create_options:?}");
        let image = open(file.clone());
        assert!(read(&image) == disk);
        let again = block_on(image.compact(&ordered(unit), &job)).unwrap();
        assert_eq!(again.moved_bytes, 0);
        assert_eq!(order_of(&again).extents_before, 1);
    }
}

/// Clusters that hold something: others are holes, if the file is one that makes them.
fn filled(bytes: &[u8], unit: u64) -> u64 {
    let clusters = bytes.chunks(unit as usize);
    let filled = clusters.filter(|cluster| cluster.iter().any(|byte| *byte != 0));
    filled.count() as u64
}

#[test]
fn places_keep_their_space_within_the_budget_until_they_are_filled() {
    for create_options in shapes() {
        let unit = create_options.cluster_size;
        let (start, _) = scattered(&create_options);
        let first = filled(&start, unit);
        for budget in [3, 5] {
            let file = Recorder::new(start.clone());
            let image = open(file.clone());
            let options = CompactOptions {
                budget_bytes: budget * unit,
                ..ordered(unit)
            };
            let done = block_on(image.compact(&options, &Job::default())).unwrap();
            assert_eq!(order_of(&done).extents, 1);
            let (mut bytes, mut most, mut holes) = (start.clone(), 0, 0);
            for op in file.ops() {
                op.apply(&mut bytes, usize::MAX);
                if let Op::Write(offset, data) = &op
                    && data.len() as u64 >= unit
                    && data.iter().all(|byte| *byte == 0)
                {
                    holes += u64::from(*offset < start.len() as u64);
                }
                most = most.max(filled(&bytes, unit));
            }
            // A block of counts may be one more.
            assert!(most <= first + budget + 1, "{first}, {most}");
            assert!(most >= first + budget - 1, "{first}, {most}");
            let moved = done.moved_bytes / unit;
            assert!(holes * 4 < moved, "{holes} holes, {moved} moved");
            // None of it stays.
            assert!(filled(&bytes, unit) <= first);
        }
    }
}

#[test]
fn what_is_dead_goes_and_what_is_left_is_in_order() {
    for create_options in shapes() {
        let unit = create_options.cluster_size;
        let (bytes, mut disk) = scattered(&create_options);
        let file = Arc::new(MemoryFile::new("image", bytes.clone(), 1));
        let image = open(file.clone());
        // Parts of three clusters stay, of eight each.
        for at in (0..disk.len()).step_by(8 * unit as usize) {
            let end = (at + 5 * unit as usize).min(disk.len());
            block_on(image.discard(at as u64, (end - at) as u64)).unwrap();
            disk[at..end].fill(0);
        }
        let done = block_on(image.compact(&ordered(unit), &Job::default())).unwrap();
        let order = order_of(&done);
        assert!(5 * order.extents <= 6 * order.extents_perfect, "{order:?}");
        assert!(order.extents_perfect > 1);
        assert!(done.file_bytes < bytes.len() as u64 * 2 / 3);
        assert!(read(&image) == disk);
        block_on(image.close()).unwrap();
        checked_clean(&file, "in order");
    }
}

#[test]
fn snapshots_stay_and_what_they_share_gets_the_order_of_the_disk() {
    if !peers_are_installed() {
        return;
    }
    let mut better = 0;
    for (create_options, size) in SNAPSHOT_SHAPES {
        let (bytes, model) = with_snapshots(create_options, size);
        let file = Arc::new(MemoryFile::new("image", bytes.clone(), 1));
        let image = open(file.clone());
        let options = ordered(cluster_bytes(&image));
        let done = block_on(image.compact(&options, &Job::default())).unwrap();
        let order = order_of(&done);
        assert!(
            5 * order.extents <= 6 * order.extents_perfect,
            "{create_options}: {order:?}"
        );
        // Where it is near enough, what is cut off at the end may go anywhere.
        better += order.extents_before.saturating_sub(order.extents);
        assert!(read(&image) == model.disk, "{create_options}");
        block_on(image.close()).unwrap();
        checked_clean(&file, create_options);
        model.judge(&file, create_options);
    }
    assert!(better > 0, "{better}");
}

#[test]
fn images_of_all_shapes_keep_what_they_hold_in_order() {
    if !peers_are_installed() {
        return;
    }
    among_steps((2, 57), ordered, |what, _, _, done| {
        let order = order_of(&done);
        assert!(order.extents_perfect <= order.extents, "{what}: {order:?}");
    });
}

#[test]
fn a_crash_at_any_moment_leaves_a_disk_that_can_be_put_in_order() {
    for create_options in shapes() {
        let (start, disk) = scattered(&create_options);
        let file = Recorder::new(start.clone());
        let image = open(file.clone());
        let options = ordered(create_options.cluster_size);
        block_on(image.compact(&options, &Job::default())).unwrap();
        let mut states = 0;
        each_crash(&start, &file.ops(), |what, bytes| {
            states += 1;
            // Each state is checked; a few are put in order once more.
            match states % 16 {
                0 => {
                    let file = Arc::new(MemoryFile::new("image", bytes.to_vec(), 1));
                    let image = open(file.clone());
                    let done = block_on(image.compact(&options, &Job::default())).unwrap();
                    assert_eq!(order_of(&done).extents, 1, "{what}");
                    assert!(read(&image) == disk, "{what}");
                    block_on(image.close()).unwrap();
                    checked_clean(&file, what);
                }
                _ => judge(what, bytes, &disk),
            }
        });
        assert!(states > 50, "{states}");
    }
}

#[test]
fn snapshots_outlast_a_crash_amid_an_order() {
    if !peers_are_installed() {
        return;
    }
    for (create_options, size) in &SNAPSHOT_SHAPES[..3] {
        let (start, model) = with_snapshots(create_options, *size);
        let file = Recorder::new(start.clone());
        let image = open(file.clone());
        let options = ordered(cluster_bytes(&image));
        block_on(image.compact(&options, &Job::default())).unwrap();
        let mut states = 0;
        each_crash(&start, &file.ops(), |what, bytes| {
            states += 1;
            if states % 5 == 0 {
                judge_snapshots(&format!("{create_options}, {what}"), bytes, &model);
            }
        });
        assert!(states > 50, "{states}");
    }
}

#[test]
fn a_full_disk_or_a_cancel_at_any_moment_leaves_what_there_was() {
    for create_options in shapes() {
        let unit = create_options.cluster_size;
        let (start, disk) = scattered(&create_options);
        outlasts_a_full_disk((&start, &disk), &ordered(unit), (0..).step_by(3));
        for left in 1.. {
            let file = Arc::new(MemoryFile::new("image", start.clone(), 1));
            let image = open(file.clone());
            let (job, _attendant) = cancelled_at(left);
            let outcome = block_on(image.compact(&ordered(unit), &job));
            assert!(read(&image) == disk, "{left}");
            block_on(image.close()).unwrap();
            checked_clean(&file, "cancelled");
            assert!(file.contents().len() <= start.len() + 4 * unit as usize);
            let (before, after) = (filled(&start, unit), filled(&file.contents(), unit));
            assert!(after <= before + 1, "{left}: {before}, {after}");
            match outcome {
                Ok(_) => break,
                Err(error) => assert!(matches!(error, Error::Cancelled), "{error}"),
            }
        }
    }
}

/// Lets others go on before each piece of work.
#[derive(Default)]
struct Polite(AtomicUsize);

impl Attendant for Polite {
    fn pace(&self, _bytes: u64) -> Option<Moment> {
        let is_first = self.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
        is_first.then(|| Box::pin(cowslip_queue::yield_now()) as Moment)
    }
}

/// Counts the surveys of the file: nothing else of a compaction begins with no bytes.
#[derive(Default)]
struct Surveys(Arc<AtomicUsize>);

impl Attendant for Surveys {
    fn pace(&self, bytes: u64) -> Option<Moment> {
        self.0.fetch_add(usize::from(bytes == 0), Ordering::Relaxed);
        None
    }
}

/// The last block of the file had clusters that the session did not take. One was planned for a
/// cluster, which stayed; the next was to go where that was, and so on: each round did little, and
/// read all tables once more. Clusters that go before the disk's did so a batch in a round, too.
#[test]
fn few_rounds_are_enough_where_blocks_are_larger_than_clusters() {
    let create_options = CreateOptions {
        cluster_size: 512,
        size: 384 << 10,
        ..shapes()[1].clone()
    };
    let (bytes, disk) = scattered(&create_options);
    for budget in 3..12 {
        let file = Arc::new(MemoryFile::new("image", bytes.clone(), 4096));
        let image = open(file.clone());
        let options = CompactOptions {
            budget_bytes: budget * 512,
            ..ordered(512)
        };
        let surveys = Surveys::default();
        let count = surveys.0.clone();
        let done = block_on(image.compact(&options, &Job::attended(surveys))).unwrap();
        let order = order_of(&done);
        assert!(
            5 * order.extents <= 6 * order.extents_perfect,
            "{budget}: {order:?}"
        );
        let surveys = count.load(Ordering::Relaxed);
        assert!(surveys <= 16, "{budget}: {surveys}");
        assert!(read(&image) == disk, "{budget}");
        block_on(image.close()).unwrap();
        checked_clean(&file, "blocks of 4096 bytes");
    }
}

/// A guest writes and discards all the time.
#[test]
fn requests_go_on_while_clusters_get_their_order() {
    const CLUSTER: usize = 512;
    let create_options = CreateOptions {
        cluster_size: CLUSTER as u64,
        size: 256 << 10,
        ..shapes()[1].clone()
    };
    let (bytes, mut disk) = scattered(&create_options);
    let file = Arc::new(MemoryFile::new("image", bytes, 1));
    let image = open(file.clone());
    let options = ordered(8 * CLUSTER as u64);
    let job = Job::attended(Polite::default());
    let mut compaction = pin!(image.compact(&options, &job));
    let mut context = Context::from_waker(Waker::noop());
    let (mut requests, mut outcome) = (0, None);
    let clusters = disk.len() / CLUSTER;
    while outcome.is_none() {
        requests += 1;
        let (written, given) = (requests * 7 % clusters, requests * 11 % clusters);
        let is_given = requests % 4 == 0;
        disk[written * CLUSTER..][..CLUSTER].fill(requests as u8);
        if is_given {
            disk[given * CLUSTER..][..CLUSTER].fill(0);
        }
        let mut request = pin!(async {
            let data = Buf::copy_of(&[requests as u8; CLUSTER]);
            let at = (written * CLUSTER) as u64;
            image.write(at, data, Durability::Cached).await?;
            match is_given {
                true => {
                    image
                        .discard((given * CLUSTER) as u64, CLUSTER as u64)
                        .await
                }
                false => Ok(()),
            }
        });
        let (mut polls, mut is_done) = (0, false);
        while polls < 1 || !is_done {
            polls += 1;
            if outcome.is_none()
                && let Poll::Ready(ended) = compaction.as_mut().poll(&mut context)
            {
                outcome = Some(ended);
            }
            if !is_done && let Poll::Ready(ended) = request.as_mut().poll(&mut context) {
                ended.unwrap();
                is_done = true;
            }
        }
    }
    assert!(requests > 10, "{requests}");
    let order = order_of(&outcome.unwrap().unwrap());
    assert!(order.extents * 2 < order.extents_before, "{order:?}");
    assert!(read(&image) == disk);
    block_on(image.close()).unwrap();
    checked_clean(&file, "beside requests");
}
