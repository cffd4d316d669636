//! Resizes that preallocate, and changes of the header, cut short at every write: by a crash, by the job's
//! being cancelled, and by a full disk.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{AllocPolicy, OpenOptions};
use cowslip::job::{Attendant, Moment};
use cowslip::qcow2::amend::Amendment;
use cowslip::qcow2::check::{CheckOptions, CheckResult, check};
use cowslip::qcow2::create::{CreateOptions, Preallocation, Version, create};
use cowslip::qcow2::header::Header;
use cowslip::{Buf, BufMut, Error, Image, Job, Result};

use crate::support::crash::{Recorder, each_crash};

const OLD: u64 = 100 << 10;
const NEW: u64 = 400 << 10;

struct NoGate;

impl Gate for NoGate {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        Err(Error::Invalid(format!("'{}' is not wanted", request.name)))
    }
}

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
    Image::open(file, options, &NoGate).await.unwrap()
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
    let (_, start) = file.read(0, BufMut::zeroed(512)).await;
    let wanted = Header::wanted_bytes(&start, u64::MAX);
    let (_, start) = file.read(0, BufMut::zeroed(wanted as usize)).await;
    let header = Header::parse_damaged(&start, "image").unwrap();
    check(file, &header, &CheckOptions::default(), &mut Silent)
        .await
        .unwrap()
}

/// The image is sound, has the old or the new size, and reads as it should; the resize can be repeated.
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

/// Cancels its job when so many pieces have been asked for.
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
                // It may not be able to tell the medium.
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
