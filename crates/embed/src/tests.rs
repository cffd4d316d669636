//! Calls as bindings make them.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cowslip::image::{DiscardPolicy, Durability, ZeroOptions};
use cowslip::requests::{Operation, Request};
use cowslip::{Buf, BufMut, Error, Image, Job};

use super::*;

fn made(path: &Path, size: u64) -> String {
    let name = path.to_str().unwrap().to_string();
    block_on(create(&name, &NewImage::qcow2(size), &Job::default())).unwrap();
    name
}

fn writable() -> OpenRequest {
    OpenRequest {
        writable: true,
        discard: DiscardPolicy::Unmap,
        ..OpenRequest::default()
    }
}

fn opened(name: &str) -> Image {
    block_on(open(name, &writable())).unwrap()
}

#[test]
fn an_image_is_made_written_checked_and_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let name = made(&dir.path().join("a.qcow2"), 64 << 20);
    let again = block_on(create(&name, &NewImage::qcow2(1 << 20), &Job::default()));
    assert!(matches!(again, Err(Error::Io { .. })), "{again:?}");
    let image = opened(&name);
    block_on(image.write(4096, Buf::copy_of(b"bytes"), Durability::Cached)).unwrap();
    block_on(close(&image)).unwrap();
    let mut findings = 0;
    let mut count = |_: &_| findings += 1;
    let (request, job) = (OpenRequest::default(), Job::default());
    let checked = check(&name, &request, (&mut count, &job));
    assert!(block_on(checked).unwrap().is_clean());
    assert_eq!(findings, 0);
    let image = block_on(open(&name, &OpenRequest::default())).unwrap();
    let read = block_on(image.read(4096, BufMut::zeroed(5))).unwrap();
    assert_eq!(&read[..], b"bytes");
    let refused = block_on(image.write(0, Buf::copy_of(b"x"), Durability::Cached));
    assert!(matches!(refused, Err(Error::ReadOnly(_))), "{refused:?}");
}

#[test]
fn a_new_overlay_has_the_size_of_what_is_below() {
    let dir = tempfile::tempdir().unwrap();
    made(&dir.path().join("base.qcow2"), 3 << 20);
    let mut overlay = NewImage::qcow2(0);
    overlay.options.backing_file = Some("base.qcow2".to_string());
    overlay.options.backing_format = Some("qcow2".to_string());
    let name = dir.path().join("top.qcow2");
    let name = name.to_str().unwrap();
    block_on(create(name, &overlay, &Job::default())).unwrap();
    let image = opened(name);
    assert_eq!((image.size(), image.layers().len()), (3 << 20, 2));
}

/// Notes what is asked for, and opens it or not.
struct Noting(Mutex<Vec<(String, bool, bool)>>, bool);

impl Opener for Noting {
    fn open(&self, naming: &Naming<'_>) -> std::io::Result<std::os::fd::OwnedFd> {
        let noted = (naming.name.to_string(), naming.writable, naming.by_image);
        self.0.lock().unwrap().push(noted);
        if naming.by_image && !self.1 {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        let file = std::fs::File::options()
            .read(true)
            .write(naming.writable)
            .open(naming.name)?;
        Ok(file.into())
    }
}

#[test]
fn files_are_opened_by_the_caller_alone() {
    let dir = tempfile::tempdir().unwrap();
    let base = made(&dir.path().join("base.qcow2"), 1 << 20);
    let mut overlay = NewImage::qcow2(1 << 20);
    overlay.options.backing_file = Some("base.qcow2".to_string());
    overlay.options.backing_format = Some("qcow2".to_string());
    let name = dir.path().join("top.qcow2").to_str().unwrap().to_string();
    block_on(create(&name, &overlay, &Job::default())).unwrap();
    for opens in [true, false] {
        let opener = Arc::new(Noting(Mutex::default(), opens));
        let request = OpenRequest {
            opener: Some(Arc::clone(&opener) as _),
            ..writable()
        };
        let outcome = block_on(open(&name, &request));
        assert_eq!(outcome.is_ok(), opens, "{outcome:?}");
        let noted = opener.0.lock().unwrap().clone();
        let wanted = [(name.clone(), true, false), (base.clone(), false, true)];
        assert_eq!(noted, wanted);
    }
}

#[test]
fn a_copy_reports_its_progress_and_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let source = opened(&made(&dir.path().join("source.qcow2"), 32 << 20));
    block_on(source.write(0, Buf::copy_of(&[7; 9 << 20]), Durability::Cached)).unwrap();
    let target = opened(&made(&dir.path().join("target.qcow2"), 32 << 20));
    let options = ConvertOptions {
        target_is_zero: true,
        ..ConvertOptions::default()
    };
    let job = Job::default();
    block_on(convert((&source, &target), options, &job)).unwrap();
    let progress = job.progress();
    assert!(progress.done_bytes >= 9 << 20 && progress.done_bytes == progress.total_bytes);
    let read = block_on(target.read((9 << 20) - 2, BufMut::zeroed(4))).unwrap();
    assert_eq!(read[..], [7, 7, 0, 0]);
    let job = Job::default();
    job.cancel();
    let cancelled = block_on(convert((&source, &target), options, &job));
    assert!(matches!(cancelled, Err(Error::Cancelled)));
    let short = opened(&made(&dir.path().join("short.qcow2"), 1 << 20));
    let refused = block_on(convert((&source, &short), options, &Job::default()));
    assert!(matches!(refused, Err(Error::Invalid(_))));
}

#[test]
fn a_call_within_a_call_is_refused() {
    let inner = block_on(async { block_on(async { Ok(1) }) });
    assert!(matches!(inner, Err(Error::Invalid(_))), "{inner:?}");
    assert_eq!(block_on(async { Ok(2) }).unwrap(), 2);
}

fn wait_readable(submitter: &Submitter) {
    let mut fds = [rustix_free::poll_fd(submitter.as_fd())];
    rustix_free::wait(&mut fds);
}

/// Waiting for a descriptor with what the standard library has: a read that blocks is not to be had
/// of an event that does not, so it is polled.
mod rustix_free {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::BorrowedFd;
    use std::time::{Duration, Instant};

    pub fn poll_fd(fd: BorrowedFd<'_>) -> File {
        File::from(fd.try_clone_to_owned().unwrap())
    }

    pub fn wait(files: &mut [File; 1]) {
        let begun = Instant::now();
        while files[0].read(&mut [0; 8]).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30), "no event");
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

#[test]
fn requests_are_submitted_together_and_complete() {
    let dir = tempfile::tempdir().unwrap();
    let image = Arc::new(opened(&made(&dir.path().join("a.qcow2"), 16 << 20)));
    let submitter = Submitter::new(Arc::clone(&image)).unwrap();
    let write = |number: u64| {
        let data = Buf::copy_of(&[number as u8; 4096]);
        let write = Operation::write(number * 4096, data, Durability::Cached);
        Request::new(number, write)
    };
    submitter.submit((0..100).map(write));
    let mut seen = Vec::new();
    while seen.len() < 100 {
        wait_readable(&submitter);
        for completion in submitter.complete(7) {
            completion.result.unwrap();
            seen.push(completion.token);
        }
    }
    seen.sort_unstable();
    assert!(seen.iter().copied().eq(0..100));
    assert!(submitter.complete(7).is_empty() && submitter.in_flight() == 0);
    let discard = |offset| Operation::Discard { offset, len: 4096 };
    let zero = Operation::Zero {
        offset: 8192,
        len: 4096,
        options: ZeroOptions {
            durability: Durability::Durable,
            ..ZeroOptions::default()
        },
    };
    let read = Operation::read(3 * 4096, BufMut::zeroed(4096));
    let operations = [
        Operation::Flush,
        discard(4096),
        zero,
        discard(u64::MAX),
        read,
    ];
    submitter.submit((1..).zip(operations).map(|(n, op)| Request::new(n, op)));
    submitter.drain();
    let mut outcomes = submitter.complete(usize::MAX);
    outcomes.sort_by_key(|completion| completion.token);
    let are_right = outcomes.iter().map(|c| c.result.is_ok());
    assert!(
        are_right.eq([true, true, true, false, true]),
        "{outcomes:?}"
    );
    drop(submitter);
    let read = block_on(image.read(2 * 4096, BufMut::zeroed(2 * 4096))).unwrap();
    assert_eq!((read[0], read[4096]), (0, 3));
    // What is under way when it is dropped is carried out.
    let submitter = Submitter::new(Arc::clone(&image)).unwrap();
    submitter.submit((0..100).map(|number| write(number + 100)));
    drop(submitter);
    let read = block_on(image.read(199 * 4096, BufMut::zeroed(1))).unwrap();
    assert_eq!(read[..], [199]);
}

#[test]
fn threads_end_with_their_queues() {
    let dir = tempfile::tempdir().unwrap();
    let image = Arc::new(opened(&made(&dir.path().join("a.qcow2"), 1 << 20)));
    let write = |number: u8| {
        let image = Arc::clone(&image);
        std::thread::spawn(move || {
            for at in 0..4 {
                let data = Buf::copy_of(&[number; 512]);
                let at = (u64::from(number) * 4 + at) * 512;
                block_on(image.write(at, data, Durability::Cached)).unwrap();
            }
        })
    };
    let threads: Vec<_> = (0..4).map(write).collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let read = block_on(image.read(7 * 512, BufMut::zeroed(1024))).unwrap();
    assert_eq!((read[0], read[512]), (1, 2));
}
