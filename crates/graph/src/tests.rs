//! Disks in use that are exchanged, mirrored and backed up, with requests and copies in seeded
//! orders.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use cowslip_block::disk::{Disk, DiskFuture, Extent, MemoryDisk, ZeroOptions};
use cowslip_block::file::Durability;
use cowslip_block::job::{Attendant, Job, Moment, Side, Verdict};
use cowslip_block::sync::{Mutex, lock};
use cowslip_block::{Buf, BufMut, Error, IoVec, IoVecMut, Result};
use fastrand::Rng;
use futures_util::task::noop_waker_ref;

use crate::{Backup, CopyMode, DirtyMap, LiveDisk, Mirror, View};

const SIZE: u64 = 40 << 10;
const CHUNK: u64 = 1 << 10;
/// Bytes of a guest's own part; two of them meet in a chunk.
const PART: u64 = SIZE / 3;

/// A disk in memory whose requests take effect, and end, some time after they were made.
#[derive(Debug)]
struct SlowDisk {
    memory: MemoryDisk,
    seed: AtomicU64,
    /// Number of the request that fails.
    fails: AtomicU64,
    /// Requests of which one fails, on an average; 0 is none.
    odds: AtomicU64,
}

impl SlowDisk {
    fn new(seed: u64) -> Arc<SlowDisk> {
        Arc::new(SlowDisk {
            memory: MemoryDisk::new("disk", SIZE),
            seed: AtomicU64::new(seed),
            fails: AtomicU64::new(u64::MAX),
            odds: AtomicU64::new(0),
        })
    }

    /// Lets others go first, a few times.
    async fn pause(&self) {
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        let mut polls = Rng::with_seed(seed).u8(0..4);
        poll_fn(move |context| match polls {
            0 => Poll::Ready(()),
            _ => {
                context.waker().wake_by_ref();
                polls -= 1;
                Poll::Pending
            }
        })
        .await;
    }

    async fn slowly<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        self.pause().await;
        if self.fails.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(Error::Invalid("a failure that was asked for".to_string()));
        }
        let odds = self.odds.load(Ordering::Relaxed);
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        if odds > 0 && Rng::with_seed(seed).u64(0..odds) == 0 {
            return Err(Error::Invalid("a failure at random".to_string()));
        }
        let outcome = request.await;
        self.pause().await;
        outcome
    }

    fn bytes(&self) -> Vec<u8> {
        let read = self.memory.read(0, BufMut::zeroed(SIZE as usize).into());
        let read = futures_util::FutureExt::now_or_never(read).unwrap();
        read.unwrap().to_vec()
    }
}

impl Disk for SlowDisk {
    cowslip_block::forward_to_disk!(memory: name, size, features);

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        Box::pin(self.slowly(self.memory.read(offset, buf)))
    }
    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> DiskFuture<'_, ()> {
        Box::pin(self.slowly(self.memory.write(offset, data, durability)))
    }
    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        Box::pin(self.slowly(self.memory.zero(offset, len, options)))
    }
    fn discard(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        Box::pin(self.slowly(self.memory.discard(offset, len)))
    }
    fn extents(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<Extent>> {
        Box::pin(self.slowly(self.memory.extents(offset, len, max)))
    }
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Polls tasks in a seeded order until all have ended.
fn run(mut random: Rng, mut tasks: Vec<Task>) {
    let mut context = Context::from_waker(noop_waker_ref());
    for _ in 0..2_000_000 {
        if tasks.is_empty() {
            return;
        }
        let index = random.usize(0..tasks.len());
        if tasks[index].as_mut().poll(&mut context).is_ready() {
            drop(tasks.swap_remove(index));
        }
    }
    panic!("tasks wait for each other");
}

/// A guest with a part of the disk of its own, which makes a number of requests.
async fn guest(disk: Arc<LiveDisk>, number: u64, seed: u64, requests: u64) {
    let mut random = Rng::with_seed(seed);
    let mut model = vec![0; PART as usize];
    for request in 0..requests {
        let start = random.u64(0..PART);
        let len = random.u64(1..=(PART - start).min(6000));
        let (at, range) = (
            number * PART + start,
            start as usize..(start + len) as usize,
        );
        match random.u8(0..4) {
            0 => {
                disk.zero(at, len, ZeroOptions::default()).await.unwrap();
                model[range].fill(0);
            }
            1 => {
                let read = disk.read(at, BufMut::zeroed(len as usize).into());
                assert!(
                    read.await.unwrap().to_vec() == model[range],
                    "guest {number}"
                );
            }
            _ => {
                let byte = (number * 80 + request % 80 + 1) as u8;
                let data = Buf::copy_of(&vec![byte; len as usize]);
                let written = disk.write(at, data.into(), Durability::Cached);
                written.await.unwrap();
                model[range].fill(byte);
            }
        }
    }
    let read = disk.read(number * PART, BufMut::zeroed(PART as usize).into());
    assert!(read.await.unwrap().to_vec() == model, "guest {number}");
}

/// Has a job's copies made by a task of their own.
struct Aside(Arc<Mutex<Vec<Moment>>>);

impl Attendant for Aside {
    fn run_aside(&self, work: Moment) -> Option<Moment> {
        lock(&self.0).push(work);
        None
    }
}

/// A job, which by the seed copies in its own task or in another one.
fn job(seed: u64, tasks: &mut Vec<Task>) -> Job {
    if seed.is_multiple_of(2) {
        return Job::default();
    }
    let left = Arc::new(Mutex::new(Vec::new()));
    let arriving = Arc::downgrade(&left);
    let mut copies: Vec<Moment> = Vec::new();
    tasks.push(Box::pin(poll_fn(move |context| {
        let Some(left) = arriving.upgrade() else {
            assert!(copies.is_empty(), "the job has not waited for its copies");
            return Poll::Ready(());
        };
        copies.append(&mut lock(&left));
        copies.retain_mut(|copy| copy.as_mut().poll(context).is_pending());
        Poll::Pending
    })));
    Job::attended(Aside(left))
}

fn guests(disk: &Arc<LiveDisk>, random: &mut Rng, requests: u64) -> Vec<Task> {
    let guest = |number| guest(Arc::clone(disk), number, random.u64(..), requests);
    (0..3).map(guest).map(|it| Box::pin(it) as Task).collect()
}

/// Two slow disks, a disk that begins as the first, and its guests.
fn disks(
    random: &mut Rng,
    requests: u64,
) -> (Arc<SlowDisk>, Arc<SlowDisk>, Arc<LiveDisk>, Vec<Task>) {
    let (source, target) = (SlowDisk::new(random.u64(..)), SlowDisk::new(random.u64(..)));
    let disk = LiveDisk::new("disk", source.clone());
    let tasks = guests(&disk, random, requests);
    (source, target, disk, tasks)
}

fn any_mode(random: &mut Rng) -> CopyMode {
    match random.bool() {
        true => CopyMode::Background,
        false => CopyMode::WriteBlocking,
    }
}

#[test]
fn a_mirror_is_equal_when_it_takes_over() {
    for seed in 0..400 {
        let mut random = Rng::with_seed(seed);
        let (source, target, disk, mut tasks) = disks(&mut random, 60);
        let mode = any_mode(&mut random);
        let switched = Rc::new(RefCell::new(false));
        let (live, seen) = (Arc::clone(&disk), Rc::clone(&switched));
        let job = job(seed, &mut tasks);
        tasks.push(Box::pin(async move {
            let mirror = Mirror::begin(live, target.clone(), (CHUNK, mode)).await;
            mirror.mark(&job, |_| true).await.unwrap();
            mirror.follow(&job, || mirror.complete()).await.unwrap();
            let drained = mirror.finish(&job).await.unwrap();
            assert!(source.bytes() == target.bytes(), "seed {seed}");
            drained.exchange(target);
            *seen.borrow_mut() = true;
        }));
        run(random, tasks);
        assert!(*switched.borrow());
    }
}

#[test]
fn a_mirror_that_comes_to_block_writes_has_each_write_before_its_answer() {
    for seed in 0..200 {
        let mut random = Rng::with_seed(seed);
        let (_, target, disk, mut tasks) = disks(&mut random, 60);
        // The last part is that of the test.
        tasks.truncate(2);
        let pauses = SlowDisk::new(random.u64(..));
        let mirror: Rc<RefCell<Option<Rc<Mirror>>>> = Rc::default();
        let begun = Rc::clone(&mirror);
        let live = Arc::clone(&disk);
        let copy = target.clone();
        let job = job(seed, &mut tasks);
        tasks.push(Box::pin(async move {
            let modes = (CHUNK, CopyMode::Background);
            let mirror = Rc::new(Mirror::begin(live, copy, modes).await);
            *begun.borrow_mut() = Some(Rc::clone(&mirror));
            mirror.mark(&job, |_| true).await.unwrap();
            mirror.follow(&job, || ()).await.unwrap();
            drop(mirror.finish(&job).await.unwrap());
        }));
        let turns = random.u64(..40);
        tasks.push(Box::pin(async move {
            for _ in 0..turns {
                pauses.pause().await;
            }
            let mirror = loop {
                let begun = mirror.borrow().clone();
                match begun {
                    Some(mirror) => break mirror,
                    None => pauses.pause().await,
                }
            };
            assert_eq!(mirror.mode(), CopyMode::Background);
            assert!(!mirror.is_synced());
            mirror.block_writes();
            assert_eq!(mirror.mode(), CopyMode::WriteBlocking);
            while !mirror.is_synced() {
                pauses.pause().await;
            }
            for value in 1..5 {
                let at = SIZE - CHUNK;
                let write = disk.write(
                    at,
                    Buf::copy_of(&[value; CHUNK as usize]).into(),
                    Durability::Cached,
                );
                write.await.unwrap();
                let bytes = target.bytes();
                assert!(
                    bytes[at as usize..].iter().all(|byte| *byte == value),
                    "seed {seed}"
                );
                assert!(mirror.is_synced());
            }
            mirror.complete();
        }));
        run(random, tasks);
    }
}

/// A copy that a request has made is asked for by nobody again when it has failed.
#[test]
fn a_mirror_of_which_any_copy_has_failed_does_not_take_over() {
    let mut failures = 0;
    for seed in 0..400 {
        let mut random = Rng::with_seed(seed);
        let (source, target, disk, mut tasks) = disks(&mut random, 60);
        target.fails.store(random.u64(0..150), Ordering::Relaxed);
        let failed = Rc::new(RefCell::new(false));
        let seen = Rc::clone(&failed);
        let job = job(seed, &mut tasks);
        tasks.push(Box::pin(async move {
            let modes = (CHUNK, CopyMode::WriteBlocking);
            let mirror = Mirror::begin(disk, target.clone(), modes).await;
            mirror.mark(&job, |_| true).await.unwrap();
            let followed = mirror.follow(&job, || mirror.complete()).await;
            let finished = match followed {
                Ok(()) => mirror.finish(&job).await.map(drop),
                Err(error) => Err(error),
            };
            *seen.borrow_mut() = finished.is_err();
            assert!(
                finished.is_err() || source.bytes() == target.bytes(),
                "seed {seed}"
            );
        }));
        run(random, tasks);
        failures += usize::from(*failed.borrow());
    }
    assert!(failures > 20, "{failures} fail");
}

#[test]
fn a_backup_has_the_bytes_of_its_moment() {
    for seed in 0..400 {
        let mut random = Rng::with_seed(seed);
        let (source, target, disk, mut tasks) = disks(&mut random, 60);
        let live = Arc::clone(&disk);
        let job = job(seed, &mut tasks);
        tasks.push(Box::pin(async move {
            let backup = Backup::new(Arc::clone(&live), target.clone(), CHUNK);
            backup.want_all();
            let drained = live.drain().await;
            let moment = source.bytes();
            backup.freeze(&drained);
            drop(drained);
            backup.run(&job).await.unwrap();
            assert!(target.bytes() == moment, "seed {seed}");
        }));
        run(random, tasks);
    }
}

#[test]
fn an_incremental_backup_copies_what_has_changed_and_nothing_else() {
    let mut random = Rng::with_seed(3);
    let (source, target) = (SlowDisk::new(1), SlowDisk::new(2));
    let disk = LiveDisk::new("disk", source.clone());
    let map = DirtyMap::new(SIZE, CHUNK);
    let (live, seen) = (Arc::clone(&disk), Arc::clone(&map));
    let task: Task = Box::pin(async move {
        let write = |at: u64, byte: u8| {
            let data = Buf::copy_of(&[byte; 100]);
            live.write(at, data.into(), Durability::Cached)
        };
        write(CHUNK, 1).await.unwrap();
        live.drain().await.add(seen.clone());
        write(3 * CHUNK - 50, 2).await.unwrap();
        live.discard(7 * CHUNK, 1).await.unwrap();
        let backup = Backup::new(Arc::clone(&live), target.clone(), CHUNK);
        backup.want(&seen);
        backup.freeze(&live.drain().await);
        write(3 * CHUNK, 9).await.unwrap();
        backup.run(&Job::default()).await.unwrap();
        let bytes = target.bytes();
        assert_eq!(bytes[CHUNK as usize], 0, "it was not changed");
        assert_eq!(bytes[3 * CHUNK as usize - 50..][..100], [2; 100]);
    });
    run(random.fork(), vec![task]);
    let dirty = map.runs(0..SIZE, usize::MAX);
    let dirty: Vec<_> = dirty
        .into_iter()
        .filter(|run| run.1)
        .map(|run| run.0)
        .collect();
    assert_eq!(dirty, [2 * CHUNK..4 * CHUNK, 7 * CHUNK..8 * CHUNK]);
}

async fn read_all(disk: &dyn Disk, random: &mut Rng) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < SIZE {
        let at = bytes.len() as u64;
        let len = random.u64(1..=(SIZE - at).min(7000));
        let read = disk.read(at, BufMut::zeroed(len as usize).into()).await?;
        bytes.extend(read.to_vec());
    }
    Ok(bytes)
}

#[test]
fn a_view_shows_its_moment_while_guests_write_and_after() {
    for seed in 0..400 {
        let mut random = Rng::with_seed(seed);
        let (source, store) = (SlowDisk::new(random.u64(..)), SlowDisk::new(random.u64(..)));
        let disk = LiveDisk::new("disk", source.clone());
        let mut tasks = guests(&disk, &mut random, 60);
        let fails = random.u8(0..4) == 0;
        let (mut choice, pauses) = (random.fork(), SlowDisk::new(random.u64(..)));
        tasks.push(Box::pin(async move {
            for _ in 0..choice.u8(0..40) {
                pauses.pause().await;
            }
            let view = View::new("view", (Arc::clone(&disk), store.clone() as _), CHUNK);
            let drained = disk.drain().await;
            let moment = source.bytes();
            view.freeze(&drained);
            drop(drained);
            if fails {
                store.odds.store(9, Ordering::Relaxed);
            }
            for _ in 0..6 {
                match read_all(&view, &mut choice).await {
                    Ok(bytes) => assert!(bytes == moment, "seed {seed}"),
                    Err(_) => assert!(fails, "seed {seed}"),
                }
                let extents = view.extents(0, SIZE, 100).await;
                let zeroes = extents.into_iter().flatten().filter(|extent| extent.zero);
                for extent in zeroes {
                    let range = extent.start as usize..(extent.start + extent.len) as usize;
                    assert!(moment[range].iter().all(|byte| *byte == 0), "seed {seed}");
                }
            }
            assert!(
                view.write(0, Buf::copy_of(b"x").into(), Durability::Cached)
                    .await
                    .is_err()
            );
        }));
        run(random, tasks);
    }
}

/// Answers errors as the seed has it, and lets the job go on some time after a stop.
struct Forgiving {
    random: Mutex<Rng>,
    met: Arc<AtomicU64>,
    stopped: AtomicU64,
}

impl Attendant for Forgiving {
    fn pace(&self, _bytes: u64) -> Option<Moment> {
        let left = self.stopped.load(Ordering::Relaxed);
        if left == 0 {
            return None;
        }
        self.stopped.store(left - 1, Ordering::Relaxed);
        let mut polls = 0..1;
        Some(Box::pin(poll_fn(move |context| {
            context.waker().wake_by_ref();
            match polls.next() {
                Some(_) => Poll::Pending,
                None => Poll::Ready(()),
            }
        })))
    }

    fn failed(&self, _side: Side, _error: &Error) -> Verdict {
        self.met.fetch_add(1, Ordering::Relaxed);
        match lock(&self.random).bool() {
            true => Verdict::Ignore,
            false => {
                self.stopped.store(5, Ordering::Relaxed);
                Verdict::Stop
            }
        }
    }
}

#[test]
fn copies_that_fail_are_made_again_until_all_is_equal() {
    let all_met = Arc::new(AtomicU64::new(0));
    for seed in 0..200 {
        let mut random = Rng::with_seed(seed);
        let (source, target, disk, mut tasks) = disks(&mut random, 40);
        let mode = any_mode(&mut random);
        target.odds.store(6, Ordering::Relaxed);
        let job = Job::attended(Forgiving {
            random: Mutex::new(random.fork()),
            met: Arc::clone(&all_met),
            stopped: AtomicU64::new(0),
        });
        tasks.push(Box::pin(async move {
            let mirror = Mirror::begin(disk, target.clone(), (CHUNK, mode)).await;
            mirror.mark(&job, |_| true).await.unwrap();
            let followed = mirror.follow(&job, || {
                // The last copies are made while requests are held back: they cannot wait.
                target.odds.store(0, Ordering::Relaxed);
                mirror.complete();
            });
            followed.await.unwrap();
            let drained = mirror.finish(&job).await.unwrap();
            assert!(source.bytes() == target.bytes(), "seed {seed}");
            // Copies that requests make are not counted.
            let is_whole = job.progress().done_bytes >= SIZE;
            assert!(is_whole || mode == CopyMode::WriteBlocking, "seed {seed}");
            drop(drained);
        }));
        run(random, tasks);
    }
    assert!(all_met.load(Ordering::Relaxed) > 200, "errors were met");
}

#[test]
fn a_failed_or_cancelled_copy_holds_no_request_back() {
    for seed in 0..200 {
        let mut random = Rng::with_seed(seed);
        let (_, target, disk, mut tasks) = disks(&mut random, 30);
        let is_mirror = random.bool();
        let cancels = random.bool();
        if !cancels {
            target.fails.store(random.u64(0..2), Ordering::Relaxed);
        }
        let job = Job::default();
        let (live, copying) = (Arc::clone(&disk), job.clone());
        tasks.push(Box::pin(async move {
            let outcome = match is_mirror {
                true => {
                    let modes = (CHUNK, CopyMode::WriteBlocking);
                    let mirror = Mirror::begin(live, target, modes).await;
                    mirror.mark(&copying, |_| true).await.unwrap_or_default();
                    let followed = mirror.follow(&copying, || mirror.complete()).await;
                    match followed {
                        Ok(()) => mirror.finish(&copying).await.map(drop),
                        Err(error) => Err(error),
                    }
                }
                false => {
                    let backup = Backup::new(Arc::clone(&live), target, CHUNK);
                    backup.want_all();
                    backup.freeze(&live.drain().await);
                    backup.run(&copying).await
                }
            };
            // What a request could not copy to a mirror is copied again.
            assert!(outcome.is_err() || cancels || is_mirror, "seed {seed}");
        }));
        if cancels {
            let pauses = SlowDisk::new(random.u64(..));
            tasks.push(Box::pin(async move {
                for _ in 0..seed % 40 {
                    pauses.pause().await;
                }
                job.cancel();
            }));
        }
        run(random, tasks);
    }
}
