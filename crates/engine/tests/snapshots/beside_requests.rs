//! Requests while snapshots change: those under way end before the change, new ones wait.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use cowslip::image::{Durability, OpenOptions};
use cowslip::qcow2::create::CreateOptions;
use cowslip::{Buf, BufMut, Error, Image, Job};

use super::{by_id, named, read_at};
use crate::support::slow::{HELD, NoFiles, SlowFile};
use crate::support::{block_on, our_check};

fn disk() -> (Arc<SlowFile>, Image) {
    SlowFile::with_image(&CreateOptions {
        cluster_size: 4096,
        ..CreateOptions::new(64 << 10)
    })
}

fn write(image: &Image, offset: u64, byte: u8) -> impl Future<Output = cowslip::Result<()>> {
    let data = Buf::copy_of(&[byte; 4096]);
    image.write(offset, data, Durability::Cached)
}

fn read(image: &Image, offset: u64) -> Vec<u8> {
    let buf = BufMut::zeroed(4096);
    block_on(image.read(offset, buf)).unwrap().to_vec()
}

#[test]
fn a_snapshot_holds_what_came_before_it_and_nothing_that_comes_after() {
    let (file, image) = disk();
    block_on(write(&image, 0, 1)).unwrap();
    block_on(write(&image, 8192, 3)).unwrap();
    block_on(image.flush()).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let job = Job::default();
    let new = named("then");
    // Under way when the snapshot is asked for: in place, and in new space.
    let mut early = pin!(write(&image, 0, HELD));
    let mut early_new = pin!(write(&image, 4096, HELD));
    assert!(early.as_mut().poll(&mut context).is_pending());
    // It gives way once to those that may join it.
    while file.waiting() < 2 {
        assert!(early_new.as_mut().poll(&mut context).is_pending());
    }
    let mut snapshot = pin!(image.create_snapshot(&new, &job));
    assert!(snapshot.as_mut().poll(&mut context).is_pending());
    // These come later.
    let mut late = pin!(write(&image, 8192, 4));
    let mut late_read = pin!(image.read(8192, BufMut::zeroed(4096)));
    let mut late_discard = pin!(image.write_zeroes(0, 4096, Default::default()));
    assert!(late.as_mut().poll(&mut context).is_pending());
    assert!(late_read.as_mut().poll(&mut context).is_pending());
    assert!(late_discard.as_mut().poll(&mut context).is_pending());
    file.let_go();
    assert!(matches!(
        early.as_mut().poll(&mut context),
        Poll::Ready(Ok(()))
    ));
    assert!(snapshot.as_mut().poll(&mut context).is_pending());
    assert!(late.as_mut().poll(&mut context).is_pending());
    assert!(matches!(
        early_new.as_mut().poll(&mut context),
        Poll::Ready(Ok(()))
    ));
    assert_eq!(block_on(snapshot).unwrap(), "1");
    block_on(late).unwrap();
    block_on(late_discard).unwrap();
    let seen = block_on(late_read).unwrap();
    assert!([3, 4].contains(&seen[0]));

    assert_eq!(read(&image, 8192), [4; 4096]);
    assert_eq!(read(&image, 0), [0; 4096]);
    assert_eq!(read(&image, 4096), [HELD; 4096]);
    block_on(image.apply_snapshot(&by_id("1"), &job)).unwrap();
    assert_eq!(read(&image, 8192), [3; 4096]);
    assert_eq!(read(&image, 0), [HELD; 4096]);
    block_on(image.close()).unwrap();
    let then = read_at(file.clone(), "1");
    assert!(then[..8192].iter().all(|&byte| byte == HELD));
    assert!(then[8192..12288].iter().all(|&byte| byte == 3));
    let mut findings = Vec::new();
    let result = our_check(file.memory.contents(), &mut findings).unwrap();
    assert!(result.is_clean(), "{findings:?}");
}

#[test]
fn after_a_request_that_was_broken_off_snapshots_stay_as_they_are() {
    let (file, image) = disk();
    block_on(write(&image, 0, 1)).unwrap();
    {
        let mut dropped = pin!(write(&image, 0, HELD));
        let mut context = Context::from_waker(Waker::noop());
        assert!(dropped.as_mut().poll(&mut context).is_pending());
    }
    let refused = block_on(image.create_snapshot(&named("s"), &Job::default()));
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    // Others go on.
    block_on(write(&image, 4096, 2)).unwrap();
    assert_eq!(read(&image, 4096), [2; 4096]);
    file.let_go();
    block_on(image.close()).unwrap();
    assert_eq!(block_on(image.snapshots()).unwrap(), []);
}

/// A job whose future is dropped half way has left half of its work: nothing is built on that.
#[test]
fn a_snapshot_that_is_broken_off_latches_the_image() {
    let (file, image) = disk();
    block_on(write(&image, 0, 1)).unwrap();
    block_on(image.flush()).unwrap();
    let new = named("s");
    let job = Job::default();
    let mut context = Context::from_waker(Waker::noop());
    {
        // The check lets others go first now and then; the rest is done without waiting.
        let mut dropped = pin!(image.create_snapshot(&new, &job));
        assert!(dropped.as_mut().poll(&mut context).is_pending());
    }
    let refused = block_on(write(&image, 0, 2));
    assert!(matches!(refused, Err(Error::Latched(_))), "{refused:?}");
    assert_eq!(read(&image, 0), [1; 4096]);
    drop(image);
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
    assert_eq!(read(&image, 0), [1; 4096]);
    block_on(image.create_snapshot(&new, &job)).unwrap();
    block_on(image.close()).unwrap();
}
