//! Waits of a guest's requests while its image is compacted: reads, overwrites and flushes at
//! random, one of each at a time, on the thread that compacts, as a server with one queue has them.
//!
//! ```text
//! cargo run --release -p cowslip --example compact_waits -- DIR 8 4096
//! cargo run --release -p cowslip --example compact_waits -- DIR 8 4096 defragment
//! ```
//!
//! The arguments are a directory, the size of the disk in GiB, and the bytes of a cluster. All of
//! the disk is allocated, its first half is discarded, and some of what is behind moves there: it
//! has no data, so that moves take little. With the fourth one nothing is discarded, but the
//! clusters lie in the file in no order, and get the guest's; with `plan` that is only planned. For
//! each stage of the job it prints the longest request
//! of each kind, and the processor's time of the longest step that the compaction makes without
//! letting others go on, which does not depend on what else the machine does.
#![allow(clippy::unwrap_used)] // It ends by panicking.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip::file::host::{HostOptions, NoFiles, open_host_file};
use cowslip::image::{DiscardPolicy, Durability, Format, OpenOptions};
use cowslip::qcow2::compact::CompactOptions;
use cowslip::qcow2::create::{CreateOptions, Preallocation, create};
use cowslip::{Buf, BufMut, Image, Job};
use cowslip_queue::{Backend, Queue, spawn, yield_now};
use rustix::time::{ClockId, clock_gettime};

const REQUEST_BYTES: u64 = 4096;
/// Requests before the compaction begins.
const BEFORE: u64 = 2000;
/// Time after which it is cancelled: the beginning and the end are what is looked at.
const LONGEST: Duration = Duration::from_secs(15);

/// The kinds of requests.
const KINDS: [&str; 3] = ["read", "write", "flush"];

/// State of the clients and the job.
struct Shared {
    image: Arc<Image>,
    job: Job,
    options: CompactOptions,
    plans: bool,
    disk_bytes: u64,
    begun: Cell<bool>,
    ended: Cell<bool>,
    running: Cell<usize>,
    /// The longest requests by stage.
    longest: RefCell<BTreeMap<(&'static str, usize), Duration>>,
    /// The longest steps of the compaction by stage.
    steps: RefCell<BTreeMap<&'static str, Duration>>,
    all: RefCell<[Vec<Duration>; KINDS.len()]>,
}

impl Shared {
    fn stage(&self) -> &'static str {
        match (self.begun.get(), self.ended.get()) {
            (false, _) => "before",
            (true, true) => "after",
            (true, false) => self.job.progress().stage.name(),
        }
    }
}

async fn client(shared: Rc<Shared>, kind: usize) {
    let mut state = kind as u64 + 1;
    let mut requests = 0;
    let data = Buf::copy_of(&[7; REQUEST_BYTES as usize]);
    while !shared.ended.get() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let half = shared.disk_bytes / 2;
        let offset = half + (state >> 33) % (half / REQUEST_BYTES) * REQUEST_BYTES;
        let (at, begun) = (shared.stage(), Instant::now());
        match KINDS[kind] {
            "read" => {
                let target = BufMut::zeroed(REQUEST_BYTES as usize);
                shared.image.read(offset, target).await.unwrap();
            }
            "write" => {
                let written = shared.image.write(offset, data.clone(), Durability::Cached);
                written.await.unwrap();
            }
            _ => shared.image.flush().await.unwrap(),
        }
        let took = begun.elapsed();
        requests += 1;
        {
            let mut longest = shared.longest.borrow_mut();
            // It may have waited for the stage in which it ended.
            for stage in [at, shared.stage()] {
                let known = longest.entry((stage, kind)).or_default();
                *known = took.max(*known);
            }
            if shared.begun.get() {
                shared.all.borrow_mut()[kind].push(took);
            }
        }
        if requests == BEFORE && KINDS[kind] == "read" {
            shared.begun.set(true);
            spawn(compact(Rc::clone(&shared)));
        }
        yield_now().await;
    }
    shared.running.set(shared.running.get() - 1);
}

/// Time of the processor that this thread has taken.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

async fn compact(shared: Rc<Shared>) {
    let begun = Instant::now();
    let mut compaction = pin!(async {
        let (options, job) = (&shared.options, &shared.job);
        match shared.plans {
            true => format!("{:?}", shared.image.compaction_plan(options, job).await),
            false => format!("{:?}", shared.image.compact(options, job).await),
        }
    });
    let done = poll_fn(|context| {
        let (stage, before) = (shared.stage(), processor_time());
        let polled = compaction.as_mut().poll(context);
        let took = processor_time() - before;
        let mut steps = shared.steps.borrow_mut();
        let known = steps.entry(stage).or_default();
        *known = took.max(*known);
        if begun.elapsed() > LONGEST {
            shared.job.cancel();
        }
        polled
    });
    println!("{} in {:.1?}", done.await, begun.elapsed());
    shared.ended.set(true);
}

/// Exchanges the places of all clusters of a disk at random. The image is closed.
fn scatter(path: &Path, cluster_bytes: u64) {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path);
    let file = file.unwrap();
    let read = |offset: u64, len: u64| {
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    };
    let words = |bytes: &[u8]| -> Vec<u64> {
        let words = bytes.chunks_exact(8);
        words
            .map(|word| u64::from_be_bytes(word.try_into().unwrap()))
            .collect()
    };
    let header = read(0, 48);
    let l1_entries = u32::from_be_bytes(header[36..40].try_into().unwrap());
    let l1_offset = u64::from_be_bytes(header[40..48].try_into().unwrap());
    let l1 = words(&read(l1_offset, u64::from(l1_entries) * 8));
    let tables = l1.iter().map(|entry| entry & 0x00ff_ffff_ffff_fe00);
    let mut tables: Vec<(u64, Vec<u64>)> = tables
        .map(|at| (at, words(&read(at, cluster_bytes))))
        .collect();
    let per_table = (cluster_bytes / 8) as usize;
    let mut state = 1_u64;
    for at in (1..tables.len() * per_table).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let other = (state >> 20) as usize % (at + 1);
        let (one, other) = (at, other);
        let place = |at: usize| (at / per_table, at % per_table);
        let (one, other) = (place(one), place(other));
        let entry = tables[one.0].1[one.1];
        tables[one.0].1[one.1] = std::mem::replace(&mut tables[other.0].1[other.1], entry);
    }
    for (at, table) in tables {
        let bytes: Vec<u8> = table.into_iter().flat_map(u64::to_be_bytes).collect();
        file.write_all_at(&bytes, at).unwrap();
    }
}

/// A disk of which all is allocated, and half is discarded or all is in no order.
async fn made(path: &Path, (disk_bytes, cluster_bytes): (u64, u64), scattered: bool) -> Arc<Image> {
    std::fs::File::create(path).unwrap();
    let writable = HostOptions {
        writable: true,
        ..HostOptions::default()
    };
    let file = open_host_file(path, &writable).unwrap();
    let options = CreateOptions {
        cluster_size: cluster_bytes,
        preallocation: Preallocation::Metadata,
        ..CreateOptions::new(disk_bytes)
    };
    create(Arc::clone(&file), None, &options).await.unwrap();
    if scattered {
        scatter(path, cluster_bytes);
    }
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        discard: DiscardPolicy::Unmap,
        ..OpenOptions::default()
    };
    let image = Image::open(file, options, &NoFiles).await.unwrap();
    let discarded = match scattered {
        true => 0,
        false => disk_bytes / 2,
    };
    for at in (0..discarded).step_by(64 << 20) {
        image
            .discard(at, (64 << 20).min(discarded - at))
            .await
            .unwrap();
    }
    image.flush().await.unwrap();
    Arc::new(image)
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, gib, cluster_bytes, words @ ..] = &args[..] else {
        panic!("DIR GIB CLUSTER_BYTES [defragment|plan]");
    };
    let defragment = !words.is_empty();
    let disk_bytes = gib.parse::<u64>().unwrap() << 30;
    let path = Path::new(dir).join("compact-waits.qcow2");
    let queue = Queue::new(Backend::Threads).unwrap();
    queue.block_on(async {
        let sizes = (disk_bytes, cluster_bytes.parse().unwrap());
        let image = made(&path, sizes, defragment).await;
        let shared = Rc::new(Shared {
            image,
            job: Job::default(),
            options: CompactOptions {
                defragment,
                ..CompactOptions::default()
            },
            plans: words.iter().any(|word| word == "plan"),
            disk_bytes,
            begun: Cell::new(false),
            ended: Cell::new(false),
            running: Cell::new(KINDS.len()),
            longest: RefCell::default(),
            steps: RefCell::default(),
            all: RefCell::default(),
        });
        for kind in 0..KINDS.len() {
            spawn(client(Rc::clone(&shared), kind));
        }
        while shared.running.get() > 0 {
            yield_now().await;
        }
        for ((stage, kind), longest) in &*shared.longest.borrow() {
            println!("{stage:12} {:6} {longest:.1?}", KINDS[*kind]);
        }
        for (stage, longest) in &*shared.steps.borrow() {
            println!("{stage:12} step   {longest:.1?}");
        }
        for (kind, mut all) in KINDS.iter().zip(shared.all.take()) {
            all.sort_unstable();
            let at = |part: usize| all[all.len() * part / 1000];
            let (half, most) = (at(500), at(999));
            println!(
                "{kind}: {} requests, median {half:.1?}, 99.9 % {most:.1?}",
                all.len()
            );
        }
        shared.image.close().await.unwrap();
    });
    std::fs::remove_file(&path).unwrap();
}
