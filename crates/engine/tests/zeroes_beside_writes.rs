//! Zeroes and failures in a cluster whose space other writes still fill: what was written there
//! before must not come back with the next write.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use crate::support::slow::{FAILING, HELD, SlowFile};
use crate::support::{block_on, write};
use cowslip::image::{Space, ZeroOptions};
use cowslip::qcow2::create::CreateOptions;
use cowslip::{BufMut, Image};

const SUBCLUSTER: u64 = 2048;

/// An empty disk with subclusters of 2 KiB.
fn disk() -> (Arc<SlowFile>, Image) {
    SlowFile::with_image(&CreateOptions {
        extended_l2: true,
        ..CreateOptions::new(1 << 20)
    })
}

fn read(image: &Image, offset: u64, len: u64) -> Vec<u8> {
    block_on(image.read(offset, BufMut::zeroed(len as usize)))
        .unwrap()
        .to_vec()
}

#[test]
fn zeroed_subclusters_of_joint_space_do_not_show_what_was_written_before() {
    for may_unmap in [false, true] {
        let (file, image) = disk();
        // A slow write keeps the cluster's space joint.
        let mut slow = pin!(write(&image, 5 * SUBCLUSTER, 512, HELD));
        let mut context = Context::from_waker(Waker::noop());
        assert!(slow.as_mut().poll(&mut context).is_pending());
        assert_eq!(file.waiting(), 1);
        block_on(write(&image, 0, 2 * SUBCLUSTER, 0xaa)).unwrap();
        let zero = ZeroOptions {
            space: Space::of_unmap(may_unmap),
            ..ZeroOptions::default()
        };
        block_on(image.write_zeroes(0, 2 * SUBCLUSTER, zero)).unwrap();
        assert_eq!(read(&image, 0, 2 * SUBCLUSTER), [0; 4096]);
        block_on(write(&image, 1024, 512, 0xcc)).unwrap();
        let mut expected = [0; 4096];
        expected[1024..1536].fill(0xcc);
        assert!(read(&image, 0, 2 * SUBCLUSTER) == expected);
        file.let_go();
        block_on(slow).unwrap();
        assert!(read(&image, 0, 2 * SUBCLUSTER) == expected);
        assert_eq!(read(&image, 5 * SUBCLUSTER, 512), [HELD; 512]);
        assert_eq!(read(&image, 5 * SUBCLUSTER + 512, 1536), [0; 1536]);
    }
}

#[test]
fn a_failed_write_into_joint_space_does_not_show_after_the_next() {
    // Erasing what it has left works, or fails as well.
    for zeroing_fails in [false, true] {
        let (file, image) = disk();
        let mut slow = pin!(write(&image, 5 * SUBCLUSTER, 512, HELD));
        let mut context = Context::from_waker(Waker::noop());
        assert!(slow.as_mut().poll(&mut context).is_pending());
        file.let_zeroing_fail(zeroing_fails);
        block_on(write(&image, 512, 512, FAILING)).unwrap_err();
        assert_eq!(read(&image, 0, SUBCLUSTER), [0; 2048]);
        block_on(write(&image, 1024, 512, 0xcc)).unwrap();
        let mut expected = [0; 2048];
        expected[1024..1536].fill(0xcc);
        assert!(read(&image, 0, SUBCLUSTER) == expected);
        file.let_go();
        block_on(slow).unwrap();
        assert!(read(&image, 0, SUBCLUSTER) == expected);
    }
}

#[test]
fn zeroes_over_a_failed_write_stay_when_another_write_publishes_its_subcluster() {
    let (file, image) = disk();
    let mut slow = pin!(write(&image, 5 * SUBCLUSTER, 512, HELD));
    let mut context = Context::from_waker(Waker::noop());
    assert!(slow.as_mut().poll(&mut context).is_pending());
    block_on(write(&image, 5 * SUBCLUSTER + 512, 512, FAILING)).unwrap_err();
    // It waits for the slow write, which makes the failed one's bytes part of a mapped subcluster.
    let options = ZeroOptions::default();
    let mut zeroes = pin!(image.write_zeroes(5 * SUBCLUSTER + 512, 512, options));
    let early = zeroes.as_mut().poll(&mut context).is_ready();
    file.let_go();
    block_on(slow).unwrap();
    if !early {
        block_on(zeroes).unwrap();
    }
    assert_eq!(read(&image, 5 * SUBCLUSTER, 512), [HELD; 512]);
    assert!(read(&image, 5 * SUBCLUSTER + 512, 1536) == [0; 1536]);
}

/// A fails, and so does erasing what it has left, so B beside it fails, whose bytes go on into a
/// subcluster of C.
#[test]
fn a_write_that_fails_for_its_neighbour_does_not_show_after_the_next() {
    let (file, image) = disk();
    let mut context = Context::from_waker(Waker::noop());
    let mut b = pin!(write(&image, SUBCLUSTER - 512, 1024, HELD));
    assert!(b.as_mut().poll(&mut context).is_pending());
    let mut c = pin!(write(&image, SUBCLUSTER + 1024, 512, HELD));
    assert!(c.as_mut().poll(&mut context).is_pending());
    assert_eq!(file.waiting(), 2);
    file.let_zeroing_fail(true);
    block_on(write(&image, 0, 512, FAILING)).unwrap_err();
    file.let_go();
    block_on(b).unwrap_err();
    let zeroes = [0; 1024];
    assert!(read(&image, SUBCLUSTER - 512, 1024) == zeroes);
    let last = block_on(c);
    assert!(read(&image, SUBCLUSTER - 512, 1024) == zeroes);
    let expected = [if last.is_ok() { HELD } else { 0 }; 512];
    assert!(read(&image, SUBCLUSTER + 1024, 512) == expected);
}
