//! Writes are counted by what they found: no space, space to be filled, data.

use std::sync::Arc;

use crate::support::block_on;
use crate::support::slow::{NoFiles, SlowFile};
use cowslip::image::{DiscardPolicy, Durability, OpenOptions, WriteStatistics};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, Image};

const CLUSTER: u64 = 64 << 10;
const SUBCLUSTER: u64 = CLUSTER / 32;

fn image(extended_l2: bool) -> Image {
    let file = SlowFile::new(Vec::new());
    let create_options = CreateOptions {
        cluster_size: CLUSTER,
        extended_l2,
        ..CreateOptions::new(4 << 20)
    };
    block_on(create(file.clone(), None, &create_options)).unwrap();
    let options = OpenOptions {
        writable: true,
        discard: DiscardPolicy::Unmap,
        ..OpenOptions::default()
    };
    block_on(Image::open(Arc::clone(&file) as _, options, &NoFiles)).unwrap()
}

/// Writes `len` bytes, and returns the counts of the write: new space, filled, in place.
fn write(image: &Image, offset: u64, len: u64) -> [u64; 3] {
    let before = image.write_statistics().unwrap();
    let data = Buf::copy_of(&vec![7; len as usize]);
    block_on(image.write(offset, data, Durability::Cached)).unwrap();
    let WriteStatistics {
        new_space,
        filled,
        in_place,
    } = image.write_statistics().unwrap().since(before);
    [new_space, filled, in_place]
}

#[test]
fn a_write_is_counted_once_in_each_cluster() {
    let image = image(false);
    assert_eq!(write(&image, 512, 512), [1, 0, 0]);
    // The rest of a plain cluster came with it.
    assert_eq!(write(&image, 4096, 512), [0, 0, 1]);
    assert_eq!(write(&image, CLUSTER - 512, 2 * CLUSTER), [2, 0, 1]);
}

#[test]
fn new_subclusters_of_a_cluster_with_space_are_filled() {
    let image = image(true);
    assert_eq!(write(&image, 0, 512), [1, 0, 0]);
    assert_eq!(write(&image, 512, 512), [0, 0, 1]);
    assert_eq!(write(&image, SUBCLUSTER, 512), [0, 1, 0]);
    // One that is there and one that is not.
    assert_eq!(write(&image, 2 * SUBCLUSTER - 512, 1024), [0, 1, 0]);
}

#[test]
fn space_is_reported_as_it_grows_and_is_freed() {
    let image = image(false);
    let space = || image.space_statistics().unwrap();
    let opened = space();
    assert_eq!(opened.grown_bytes, 0);
    assert!(!opened.is_latched);
    write(&image, 0, 4 * CLUSTER);
    let written = space();
    assert!(written.grown_bytes >= 4 * CLUSTER, "{written:?}");
    assert_eq!(written.file_bytes, opened.file_bytes + written.grown_bytes);
    block_on(image.flush()).unwrap();
    assert_eq!(space().quarantined, 0);
    let free = space().free_bytes;
    block_on(image.discard(0, 2 * CLUSTER)).unwrap();
    assert_eq!(space().quarantined, 2);
    block_on(image.flush()).unwrap();
    let freed = space();
    assert_eq!(freed.quarantined, 0);
    assert_eq!(freed.free_bytes, free + 2 * CLUSTER);
}
