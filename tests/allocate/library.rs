//! The job as a library call: cancelled after each of its pieces.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cowslip::Error;
use cowslip::allocate::{End, LibraryMakes, Method, Outcome, Plan};
use cowslip::file::AlignedFile;
use cowslip::file::host::{HostOptions, PageCache, open_host_file};
use cowslip::job::{Attendant, Job, Progress};
use cowslip_queue::{Backend, Queue};

use super::layout::{self, State};
use crate::support::rng::Rng;

const SIZE: u64 = 16 << 20;

/// Cancels a job after a number of pieces.
#[derive(Clone, Default)]
struct Canceller(Arc<Shared>);

#[derive(Default)]
struct Shared {
    job: OnceLock<Job>,
    pieces: AtomicU64,
    most: u64,
}

impl Attendant for Canceller {
    fn progress(&self, _: Progress) {
        let pieces = self.0.pieces.fetch_add(1, Ordering::Relaxed) + 1;
        if pieces == self.0.most
            && let Some(job) = self.0.job.get()
        {
            job.cancel();
        }
    }
}

/// Allocates, and cancels after a number of pieces; returns how many there were.
fn allocate(
    path: &Path,
    (method, end): (Method, End),
    most: u64,
) -> (cowslip::Result<Outcome>, u64) {
    let canceller = Canceller(Arc::new(Shared {
        most,
        ..Shared::default()
    }));
    let job = Job::attended(canceller.clone());
    canceller.0.job.set(job.clone()).unwrap();
    if most == 0 {
        job.cancel();
    }
    let options = HostOptions {
        writable: true,
        ..HostOptions::default()
    };
    let file = AlignedFile::new(open_host_file(path, &options).unwrap());
    let work = async {
        let plan = Plan::new(&file, SIZE, end).await?;
        plan.carry_out(method, &job).await
    };
    let outcome = Queue::new(Backend::Auto).unwrap().block_on(work);
    (outcome, canceller.0.pieces.load(Ordering::Relaxed))
}

/// Whatever piece is the last, the file is what it was.
pub fn each_piece_can_be_the_last(dir: &Path, methods: &[&str], unwritten: bool) {
    let path = dir.join("file");
    let mut ways: Vec<(Method, End)> = Vec::new();
    for name in methods {
        let method = match *name {
            "fallocate" => Method::Fallocate,
            "posix_fallocate" => Method::PosixFallocate(LibraryMakes::Writes),
            "mmap" => Method::Mmap,
            _ => Method::Write { chunk_bytes: 8192 },
        };
        ways.push((method, End::Moves));
        if method == Method::Fallocate {
            ways.push((method, End::Stays));
        }
    }
    for way in ways {
        layout::make(&path, &mut Rng::named(7, "each piece"), unwritten);
        let before = State::of(&path, SIZE);
        let mut most = 0;
        loop {
            let (outcome, pieces) = allocate(&path, way, most);
            match outcome {
                Err(Error::Cancelled) => {
                    let after = State::of(&path, SIZE);
                    assert_eq!(after, before, "{way:?} after {most} pieces");
                }
                Ok(outcome) => {
                    assert!(most > pieces, "{way:?}: cancelled after {most} of {pieces}");
                    assert!(pieces > 3, "{way:?}: too few pieces for a test");
                    assert_eq!(outcome.missing_bytes, 0, "{way:?}");
                    break;
                }
                Err(error) => panic!("{way:?} after {most} pieces: {error}"),
            }
            // The first ones, then every fifth: each takes its time.
            most += if most < 3 { 1 } else { 5 };
        }
        let whole = State::of(&path, SIZE);
        let len = match way.1 {
            End::Moves => SIZE,
            End::Stays => before.len,
        };
        assert_eq!(whole.len, len, "{way:?}");
        assert!(whole.extends(&before), "{way:?}");
        std::fs::remove_file(&path).unwrap();
    }
}

/// Their lengths and holes would be rounded.
pub fn direct_handles_are_refused(dir: &Path) {
    let path = dir.join("direct");
    std::fs::write(&path, "text").unwrap();
    let options = HostOptions {
        writable: true,
        page_cache: PageCache::Bypass,
        ..HostOptions::default()
    };
    let file = match open_host_file(&path, &options) {
        Ok(file) => AlignedFile::new(file),
        Err(error) => return eprintln!("SKIPPED: no direct I/O: {error}"),
    };
    let queue = Queue::new(Backend::Auto).unwrap();
    let error = queue
        .block_on(Plan::new(&file, SIZE, End::Moves))
        .unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("O_DIRECT"), "{error}");
}

/// The space of a file that has just been removed counts as free, although the file system may not
/// say so yet.
pub fn what_was_just_removed_is_free(dir: &Path) {
    let options = HostOptions {
        writable: true,
        ..HostOptions::default()
    };
    let space = rustix::fs::statvfs(dir).unwrap();
    let most = space.f_bfree * space.f_frsize / 10 * 9;
    std::fs::write(dir.join("new"), "").unwrap();
    let queue = Queue::new(Backend::Auto).unwrap();
    for _ in 0..5 {
        let old = std::fs::File::create(dir.join("old")).unwrap();
        let none = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&old, none, 0, most).unwrap();
        let new = AlignedFile::new(open_host_file(&dir.join("new"), &options).unwrap());
        drop(old);
        std::fs::remove_file(dir.join("old")).unwrap();
        let planned = queue.block_on(Plan::new(&new, most, End::Moves));
        assert_eq!(planned.unwrap().needed_bytes(), most);
    }
}
