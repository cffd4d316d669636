//! Several queue threads on one image: each has its own executor and ring (or threads), and all of
//! them read, write, zero, discard and flush the same clusters. Their reads are checked against a
//! history; the image is checked by both checkers when they are done.
//!
//! Schedules are the kernel's, so a seed decides the requests, not their interleaving. A longer run
//! is `cargo xtask threads`, which sets `COWSLIP_THREADS_SECONDS`.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

#[path = "threads/history.rs"]
mod history;
#[path = "threads/requests.rs"]
mod requests;

use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use cowslip::file::host::{
    Aio, CreateMode, FlushPolicy, HostGate, HostOptions, Locking, PageCache, open_host_file,
};
use cowslip::image::{DiscardPolicy, Format, OpenOptions, WritePolicy};
use cowslip::qcow2::check::{CheckOptions, CheckResult, Finding, check};
use cowslip::qcow2::create::{CreateOptions, create, create_raw};
use cowslip::{BufMut, Image};
use cowslip_block::random::Random;
use cowslip_queue::{Backend, Queue, sleep, spawn, yield_now};

use history::{History, SECTOR_BYTES, ZEROES, content};
use requests::Mix;

/// The number that fills the backing file.
const BELOW: u64 = 7;

/// An image and those who use it.
#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    backend: Backend,
    threads: usize,
    tasks_per_thread: usize,
    requests_per_task: usize,
    size: u64,
    extended_l2: bool,
    refcount_bits: u64,
    page_cache: PageCache,
    backing: bool,
    cache_bytes: u64,
    mix: Mix,
}

impl Case {
    fn of_seed(seed: u64, backend: Backend) -> Case {
        let mut rng = Random(seed);
        let extended_l2 = rng.chance(40);
        let cluster_bytes = match extended_l2 {
            true => rng.pick(&[16384, 65536]),
            false => rng.pick(&[512, 512, 1024, 4096, 65536]),
        };
        let clusters = rng.pick(&[24, 64, 200]).max(65536 / cluster_bytes);
        let mix = Mix {
            cluster_bytes,
            discard_bytes: cluster_bytes / if extended_l2 { 32 } else { 1 },
            hot_clusters: rng.pick(&[2, 8, 40]),
            sectors_max: rng.pick(&[2, 16, 40]),
            discards: true,
            compressed: rng.chance(50),
            writethrough: rng.chance(10),
        };
        Case {
            seed,
            backend,
            threads: 2 + rng.below(3) as usize,
            tasks_per_thread: rng.pick(&[1, 4, 8]),
            requests_per_task: 60,
            size: clusters * cluster_bytes,
            extended_l2,
            refcount_bits: rng.pick(&[16, 16, 1, 64]),
            page_cache: rng.pick(&[PageCache::Use, PageCache::Use, PageCache::Bypass]),
            backing: rng.chance(40),
            cache_bytes: rng.pick(&[1, 1, 65536]),
            mix,
        }
    }

    fn host_options(&self, create: CreateMode) -> HostOptions {
        HostOptions {
            writable: true,
            create,
            page_cache: self.page_cache,
            flush: FlushPolicy::Honour,
            aio: match self.backend {
                Backend::Threads => Aio::Threads,
                _ => Aio::Auto,
            },
            // An operation of a dropped request, still in the kernel, keeps the file open a little
            // longer.
            locking: Locking::Off,
            ..HostOptions::default()
        }
    }

    async fn create(&self, path: &Path) {
        let mut options = CreateOptions::new(self.size);
        options.cluster_size = self.mix.cluster_bytes;
        options.extended_l2 = self.extended_l2;
        options.refcount_bits = self.refcount_bits;
        if self.backing {
            let below = path.with_file_name("below.raw");
            let host = HostOptions {
                page_cache: PageCache::Use,
                ..self.host_options(CreateMode::CreateNew)
            };
            let file = open_host_file(&below, &host).unwrap();
            let preallocation = options.preallocation;
            create_raw(file, self.size, preallocation, &cowslip::Job::default())
                .await
                .unwrap();
            let sectors = self.size as usize / SECTOR_BYTES;
            std::fs::write(below, content(BELOW, 0, sectors)).unwrap();
            options.backing_file = Some("below.raw".to_string());
            options.backing_format = Some("raw".to_string());
        }
        let host = self.host_options(CreateMode::CreateNew);
        let file = open_host_file(path, &host).unwrap();
        create(file, None, &options).await.unwrap();
    }

    async fn open(&self, path: &Path) -> Image {
        let host = self.host_options(CreateMode::OpenExisting);
        let file = open_host_file(path, &host).unwrap();
        let write_policy = match self.mix.writethrough {
            true => WritePolicy::Writethrough,
            false => WritePolicy::Writeback,
        };
        let options = OpenOptions {
            format: Some(Format::Qcow2),
            writable: true,
            write_policy,
            discard: DiscardPolicy::Unmap,
            cache_bytes: self.cache_bytes,
            ..OpenOptions::default()
        };
        let gate = HostGate {
            options: host,
            ..HostGate::default()
        };
        Image::open(file, options, &gate).await.unwrap()
    }
}

/// A queue of the backend, or nothing where the kernel gives no ring.
fn queue(backend: Backend) -> Option<Queue> {
    match Queue::new(backend) {
        Ok(queue) => Some(queue),
        Err(error) => {
            eprintln!("SKIPPED: no io_uring here ({error})");
            None
        }
    }
}

async fn read_all(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(image.size() as usize);
    image.read(0, buf).await.unwrap().to_vec()
}

/// The requests of one thread.
fn run_thread(case: &Case, thread: usize, image: &Arc<Image>, history: &Arc<History>) {
    let queue = Queue::new(case.backend).unwrap();
    queue.block_on(async {
        let mut ends = Vec::new();
        for task in 0..case.tasks_per_thread {
            let mut rng = Random(case.seed ^ ((thread * 100 + task + 1) as u64) << 40);
            let (image, history, case) = (Arc::clone(image), Arc::clone(history), case.clone());
            let (completer, end) = cowslip_queue::pending();
            ends.push(end);
            spawn(async move {
                for _ in 0..case.requests_per_task {
                    let done = requests::one(&image, &history, &mut rng, &case.mix).await;
                    done.expect("a request succeeds");
                }
                completer.complete(());
            });
        }
        for end in ends {
            end.await;
        }
    });
}

/// Runs a case; `false` if this machine cannot.
fn run(case: &Case) -> bool {
    let Some(main) = queue(case.backend) else {
        return false;
    };
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("image.qcow2");
    let image = main.block_on(async {
        case.create(&path).await;
        Arc::new(case.open(&path).await)
    });
    let initial = if case.backing { BELOW } else { ZEROES };
    let history = Arc::new(History::new(case.size as usize / SECTOR_BYTES, initial));
    let (maintained, backend) = (Arc::clone(&image), case.backend);
    // Ends when another thread closes the image.
    let maintenance = thread::spawn(move || {
        let queue = Queue::new(backend).unwrap();
        queue.block_on(maintained.maintain());
    });
    thread::scope(|scope| {
        for thread in 0..case.threads {
            let (image, history) = (&image, &history);
            scope.spawn(move || run_thread(case, thread, image, history));
        }
    });
    main.block_on(async {
        history.verify_at_rest(&read_all(&image).await).unwrap();
        image.close().await.unwrap();
        maintenance.join().unwrap();
        drop(image);
        let image = case.open(&path).await;
        history.verify_at_rest(&read_all(&image).await).unwrap();
        image.close().await.unwrap();
        drop(image);
        check_ours(case, &path).await;
    });
    check_qemus(&path);
    true
}

async fn check_ours(case: &Case, path: &Path) {
    assert!(our_check(case, path).await.is_clean());
}

async fn our_check(case: &Case, path: &Path) -> CheckResult {
    let file = open_host_file(path, &case.host_options(CreateMode::OpenExisting)).unwrap();
    let mut findings: Vec<Finding> = Vec::new();
    let result = check(&file, &CheckOptions::default(), &mut findings).await;
    if !findings.is_empty() {
        eprintln!("{findings:?}");
    }
    result.unwrap()
}

fn check_qemus(path: &Path) {
    let Ok(output) = Command::new("qemu-img").arg("check").arg(path).output() else {
        let required = std::env::var_os("COWSLIP_REQUIRE_PEERS").is_some();
        assert!(!required, "qemu-img is not installed");
        eprintln!("SKIPPED: qemu-img is not installed");
        return;
    };
    assert!(output.status.success(), "{output:?}");
}

/// Runs seeds until the time is over, at least one; says which before each.
fn soak(backend: Backend, default_seeds: u64) {
    let variable = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seconds: Option<u64> = variable("COWSLIP_THREADS_SECONDS");
    let first: u64 = variable("COWSLIP_THREADS_SEED").unwrap_or(1);
    let end = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut seed = first;
    loop {
        let case = Case::of_seed(seed, backend);
        println!("{case:?}");
        if !run(&case) {
            return;
        }
        seed += 1;
        let done = end.map_or(seed >= first + default_seeds, |end| Instant::now() >= end);
        if done {
            println!("{} seeds", seed - first);
            return;
        }
    }
}

/// The request that a future is, moved to another thread when it has begun.
type Begun = Pin<Box<dyn Future<Output = ()> + Send>>;

#[test]
fn a_request_begun_on_one_queue_ends_on_another() {
    const REQUESTS: usize = 300;
    for backend in [Backend::Uring, Backend::Threads] {
        let case = Case {
            threads: 2,
            ..Case::of_seed(3, backend)
        };
        let Some(queue) = queue(backend) else {
            continue;
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.qcow2");
        let image = queue.block_on(async {
            case.create(&path).await;
            Arc::new(case.open(&path).await)
        });
        let initial = if case.backing { BELOW } else { ZEROES };
        let history = Arc::new(History::new(case.size as usize / SECTOR_BYTES, initial));
        let done = Arc::new(AtomicUsize::new(0));
        let (hand_over, begun) = std::sync::mpsc::channel::<Begun>();
        let other = thread::spawn(move || {
            let queue = Queue::new(backend).unwrap();
            queue.block_on(async {
                while let Some(request) = next_begun(&begun).await {
                    spawn(request);
                }
            });
        });
        queue.block_on(async {
            for number in 0..REQUESTS {
                let (image, history, done) =
                    (Arc::clone(&image), Arc::clone(&history), Arc::clone(&done));
                let (mut rng, mix) = (Random(number as u64), case.mix);
                let mut request: Begun = Box::pin(async move {
                    let outcome = requests::one(&image, &history, &mut rng, &mix).await;
                    outcome.expect("a request succeeds");
                    done.fetch_add(1, Ordering::SeqCst);
                });
                let polled = poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx))).await;
                if polled.is_pending() {
                    hand_over.send(request).unwrap();
                }
                yield_now().await;
            }
            // Operations begun on this thread go on here, whichever thread waits for them.
            while done.load(Ordering::SeqCst) < REQUESTS {
                sleep(Duration::from_millis(1)).await;
            }
            drop(hand_over);
            history.verify_at_rest(&read_all(&image).await).unwrap();
            image.close().await.unwrap();
            check_ours(&case, &path).await;
        });
        other.join().unwrap();
    }
}

async fn next_begun(begun: &Receiver<Begun>) -> Option<Begun> {
    loop {
        match begun.try_recv() {
            Ok(request) => return Some(request),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => sleep(Duration::from_micros(200)).await,
        }
    }
}

/// A queue ends with requests half way, one of which may have the turn to write metadata: the
/// others go on, or fail because the image is latched; nothing waits for ever and nothing is
/// damaged.
fn end_a_queue_half_way(seed: u64, backend: Backend) -> bool {
    let case = Case {
        backing: false,
        ..Case::of_seed(seed, backend)
    };
    let Some(main) = queue(backend) else {
        return false;
    };
    println!("{case:?}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image.qcow2");
    let image = main.block_on(async {
        case.create(&path).await;
        Arc::new(case.open(&path).await)
    });
    let history = Arc::new(History::new(case.size as usize / SECTOR_BYTES, ZEROES));
    thread::scope(|scope| {
        let (image, history, case) = (&image, &history, &case);
        scope.spawn(move || {
            let queue = Queue::new(backend).unwrap();
            queue.block_on(async {
                for task in 0..6 {
                    let mut rng = Random(case.seed << 8 | task);
                    let (image, history, mix) = (Arc::clone(image), Arc::clone(history), case.mix);
                    spawn(async move {
                        while requests::doomed(&image, &history, &mut rng, &mix)
                            .await
                            .is_ok()
                        {}
                    });
                }
                sleep(Duration::from_micros(500 + Random(seed).below(8000))).await;
            });
        });
        scope.spawn(move || {
            let queue = Queue::new(backend).unwrap();
            let mut rng = Random(case.seed ^ 1 << 50);
            queue.block_on(async {
                for _ in 0..150 {
                    if requests::one(image, history, &mut rng, &case.mix)
                        .await
                        .is_err()
                    {
                        break;
                    }
                }
            });
        });
    });
    main.block_on(async {
        let latched = image.close().await.is_err();
        drop(image);
        let image = case.open(&path).await;
        let left = read_all(&image).await;
        match latched {
            true => history.verify_after_crash(&left).unwrap(),
            false => history.verify_at_rest(&left).unwrap(),
        }
        drop(image);
        let result = our_check(&case, &path).await;
        assert_eq!((result.corruptions, result.check_errors), (0, 0));
    });
    true
}

#[test]
fn a_queue_that_ends_half_way_leaves_the_others_going() {
    for backend in [Backend::Uring, Backend::Threads] {
        for seed in 1..=12 {
            if !end_a_queue_half_way(seed, backend) {
                break;
            }
        }
    }
}

#[test]
fn several_rings_use_one_image() {
    soak(Backend::Uring, 12);
}

#[test]
fn several_threads_without_rings_use_one_image() {
    soak(Backend::Threads, 12);
}
