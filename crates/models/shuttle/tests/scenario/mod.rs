//! The whole engine on several threads, with a disk thread, in an order that a seed decides: at
//! every lock and every atomic step another thread may go on. The data that threads read is checked
//! against a history of each sector; so is the state that a crash leaves at some moment, in which
//! the checker finds no corruption.

#![allow(dead_code)] // Shared by tests that use parts of it.

mod disk;
#[path = "../../../../engine/tests/threads/history.rs"]
mod history;
#[path = "../../../../engine/tests/threads/requests.rs"]
mod requests;

use std::pin::pin;
use std::sync::Arc;

use cowslip::file::BlockFile;
use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{DiscardPolicy, Format, OpenOptions, WritePolicy};
use cowslip::qcow2::check::{CheckOptions, Finding, check};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{BufMut, Image};
use cowslip_block::random::Random;
use futures_util::future::{join_all, select};
use shuttle::future::block_on;
use shuttle::rand::{Rng as _, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner, thread};

use disk::Disk;
use history::{History, SECTOR_BYTES, ZEROES};
use requests::Mix;

/// An image and those who use it.
#[derive(Clone, Debug)]
pub struct Case {
    seed: u64,
    threads: usize,
    tasks_per_thread: usize,
    requests_per_task: usize,
    size: u64,
    extended_l2: bool,
    alignment_bytes: u32,
    mix: Mix,
}

impl Case {
    pub fn of_seed(seed: u64) -> Case {
        let mut rng = Random(seed);
        let extended_l2 = rng.chance(30);
        let cluster_bytes = match extended_l2 {
            true => 16384,
            false => rng.pick(&[512, 512, 1024, 4096]),
        };
        Case {
            seed,
            threads: 2 + rng.below(2) as usize,
            tasks_per_thread: 1 + rng.below(3) as usize,
            requests_per_task: 3 + rng.below(10) as usize,
            size: cluster_bytes * rng.pick(&[8, 150]).min(400 * 1024 / cluster_bytes),
            extended_l2,
            alignment_bytes: rng.pick(&[1, 512, 4096]),
            mix: Mix {
                cluster_bytes,
                discard_bytes: cluster_bytes / if extended_l2 { 32 } else { 1 },
                hot_clusters: rng.pick(&[1, 2, 6]),
                sectors_max: rng.pick(&[2, 6]),
                discards: true,
                compressed: rng.chance(30),
                writethrough: rng.chance(10),
            },
        }
    }

    fn options(&self, writable: bool) -> OpenOptions {
        let write_policy = match self.mix.writethrough {
            true => WritePolicy::Writethrough,
            false => WritePolicy::Writeback,
        };
        OpenOptions {
            format: Some(Format::Qcow2),
            writable,
            write_policy,
            discard: DiscardPolicy::Unmap,
            cache_bytes: 1,
            ..OpenOptions::default()
        }
    }
}

async fn read_all(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(image.size() as usize);
    image.read(0, buf).await.unwrap().to_vec()
}

/// Opens what a crash or a close has left; what the disk reads as. Leaks are a crash's right.
fn read_left(case: &Case, bytes: Vec<u8>, leaks: bool) -> Vec<u8> {
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("left", bytes, 1));
    block_on(async {
        let mut findings: Vec<Finding> = Vec::new();
        let result = check(&file, &CheckOptions::default(), &mut findings).await;
        let result = result.unwrap();
        let sound = result.corruptions == 0 && result.check_errors == 0;
        assert!(sound && (leaks || result.is_clean()), "{findings:?}");
        let image = Image::open(file, case.options(false), &NoFiles)
            .await
            .unwrap();
        read_all(&image).await
    })
}

/// A new image on the disk, open.
async fn make(case: &Case, disk: &Arc<Disk>) -> Image {
    let mut options = CreateOptions::new(case.size);
    options.cluster_size = case.mix.cluster_bytes;
    options.extended_l2 = case.extended_l2;
    let file: Arc<dyn BlockFile> = Arc::clone(disk) as _;
    create(Arc::clone(&file), None, &options).await.unwrap();
    Image::open(file, case.options(true), &NoFiles)
        .await
        .unwrap()
}

fn run_thread(case: &Case, thread: usize, image: &Image, history: &History) {
    block_on(join_all((0..case.tasks_per_thread).map(|task| {
        let mut rng = Random(case.seed ^ ((thread * 100 + task + 1) as u64) << 40);
        async move {
            for _ in 0..case.requests_per_task {
                let done = requests::one(image, history, &mut rng, &case.mix).await;
                done.expect("a request succeeds");
            }
        }
    })));
}

pub fn run(case: &Case) {
    let disk = Disk::new(case.alignment_bytes);
    let server = Arc::clone(&disk);
    let server = thread::spawn(move || server.serve());
    let image = Arc::new(block_on(make(case, &disk)));
    let history = Arc::new(History::new(case.size as usize / SECTOR_BYTES, ZEROES));
    let maintained = Arc::clone(&image);
    let maintenance = thread::spawn(move || block_on(maintained.maintain()));
    let threads: Vec<_> = (0..case.threads)
        .map(|thread| {
            let (case, image, history) = (case.clone(), Arc::clone(&image), Arc::clone(&history));
            thread::spawn(move || run_thread(&case, thread, &image, &history))
        })
        .collect();
    // The power fails at some moments, each in another world.
    for _ in 0..6 {
        for _ in 0..thread_rng().gen_range(0..60) {
            thread::yield_now();
        }
        let (left, then) = disk.crash(|| history.snapshot());
        let left = read_left(case, left, true);
        then.verify_after_crash(&left).unwrap();
    }
    for thread in threads {
        thread.join().unwrap();
    }
    let (left, then) = disk.crash(|| history.snapshot());
    then.verify_after_crash(&read_left(case, left, true))
        .unwrap();
    block_on(async {
        history.verify_at_rest(&read_all(&image).await).unwrap();
        image.close().await.unwrap();
    });
    maintenance.join().unwrap();
    history
        .verify_at_rest(&read_left(case, disk.bytes(), false))
        .unwrap();
    disk.end();
    server.join().unwrap();
}

/// One thread drops its requests at any moment: the others go on, or fail because the image is
/// latched; none waits for ever, and after a successful close all writes are durable.
pub fn run_with_drops(case: &Case) {
    let disk = Disk::new(case.alignment_bytes);
    let server = Arc::clone(&disk);
    let server = thread::spawn(move || server.serve());
    let image = Arc::new(block_on(make(case, &disk)));
    let history = Arc::new(History::new(case.size as usize / SECTOR_BYTES, ZEROES));
    let (of_dropper, dropped, dropping) = (Arc::clone(&image), Arc::clone(&history), case.clone());
    let dropper = thread::spawn(move || {
        let mut rng = Random(dropping.seed ^ 1 << 50);
        for _ in 0..4 {
            let moments = rng.below(40);
            let request = requests::doomed(&of_dropper, &dropped, &mut rng, &dropping.mix);
            let passing = async {
                for _ in 0..moments {
                    shuttle::future::yield_now().await;
                }
            };
            drop(block_on(select(pin!(request), pin!(passing))));
        }
    });
    let (other, theirs, case_of_other) = (Arc::clone(&image), Arc::clone(&history), case.clone());
    let worker = thread::spawn(move || {
        let mut rng = Random(case_of_other.seed ^ 1 << 51);
        block_on(async {
            for _ in 0..8 {
                let done = requests::one(&other, &theirs, &mut rng, &case_of_other.mix).await;
                if done.is_err() {
                    break;
                }
            }
        });
    });
    dropper.join().unwrap();
    worker.join().unwrap();
    let closed = block_on(image.close());
    let (left, then) = disk.crash(|| history.snapshot());
    then.verify_after_crash(&read_left(case, left, true))
        .unwrap();
    if closed.is_ok() {
        let at_rest = read_left(case, disk.bytes(), true);
        history.verify_at_rest(&at_rest).unwrap();
    }
    disk.end();
    server.join().unwrap();
}

pub fn run_seed(seed: u64, run: fn(&Case)) {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config.silence_warnings = true;
    config.max_steps = shuttle::MaxSteps::FailAfter(400_000);
    let case = Case::of_seed(seed);
    // Half of the schedules change threads anywhere, half of them seldom.
    let scheduler: Box<dyn Scheduler + Send> = match seed % 2 {
        0 => Box::new(RandomScheduler::new_from_seed(seed, 1)),
        _ => Box::new(PctScheduler::new_from_seed(seed, 3, 1)),
    };
    Runner::new(scheduler, config).run(move || run(&case));
}
