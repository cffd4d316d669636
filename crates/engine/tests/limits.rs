//! A disk that has limits holds the same bytes as one without; its requests are cut.

use std::sync::Arc;

use crate::support::block_on;
use crate::support::slow::{NoFiles, SlowFile};
use cowslip::image::{DiscardPolicy, Durability, OpenOptions, ZeroOptions};
use cowslip::limits::Limits;
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image};

const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 4 << 20;

const LIMITS: Limits = Limits {
    align: 512,
    transfer_max: 32 << 10,
    zeroes_unit: 3 * CLUSTER,
    zeroes_max: 3 * CLUSTER,
    discard_unit: 3 * CLUSTER,
    discard_max: 6 * CLUSTER,
};

/// An image, or a raw disk, with limits.
fn limited(is_raw: bool) -> (Image, Arc<SlowFile>) {
    let bytes = if is_raw { SIZE as usize } else { 0 };
    let file = SlowFile::new(vec![0; bytes]);
    if !is_raw {
        let create_options = CreateOptions {
            cluster_size: CLUSTER,
            ..CreateOptions::new(SIZE)
        };
        block_on(create(file.clone(), None, &create_options)).unwrap();
    }
    let options = OpenOptions {
        format: is_raw.then_some(cowslip::image::Format::Raw),
        writable: true,
        discard: DiscardPolicy::Unmap,
        limits: LIMITS,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(Arc::clone(&file) as _, options, &NoFiles)).unwrap();
    (image, file)
}

fn write(image: &Image, model: &mut [u8], (at, len, value): (u64, u64, u8)) {
    let data: Vec<u8> = (0..len).map(|i| value ^ (i / 512) as u8).collect();
    model[at as usize..(at + len) as usize].copy_from_slice(&data);
    let durability = Durability::of_fua(value == 7);
    block_on(image.write(at, Buf::copy_of(&data), durability)).unwrap();
}

fn assert_holds(image: &Image, model: &[u8]) {
    for (at, len) in [(0, SIZE), (1000, 100_000), (SIZE - 513, 513), (5, 0)] {
        let read = block_on(image.read(at, BufMut::zeroed(len as usize))).unwrap();
        assert!(
            read[..] == model[at as usize..(at + len) as usize],
            "{at}+{len}"
        );
    }
}

#[test]
fn a_disk_with_limits_holds_what_was_written() {
    for is_raw in [false, true] {
        let (image, _) = limited(is_raw);
        let mut model = vec![0; SIZE as usize];
        write(&image, &mut model, (1000, 2 << 20, 3));
        write(&image, &mut model, (SIZE - 700, 700, 7));
        let zeroes = (5 * CLUSTER - 100, 9 * CLUSTER + 300);
        block_on(image.write_zeroes(zeroes.0, zeroes.1, ZeroOptions::default())).unwrap();
        model[zeroes.0 as usize..(zeroes.0 + zeroes.1) as usize].fill(0);
        assert_holds(&image, &model);
        block_on(image.close()).unwrap();
    }
}

#[test]
fn writes_of_a_raw_disk_are_cut() {
    let (image, file) = limited(true);
    let before = file.writes().len();
    write(&image, &mut vec![0; SIZE as usize], (1000, 100 << 10, 1));
    let kib = 1 << 10;
    let parts = [
        1000..32 * kib + 512,
        32 * kib + 512..64 * kib + 512,
        64 * kib + 512..96 * kib + 512,
        96 * kib + 512..100 * kib + 1000,
    ];
    assert_eq!(file.writes()[before..], parts);
}

#[test]
fn zeroes_that_are_no_whole_units_are_data_and_others_take_no_space() {
    let (image, _) = limited(false);
    let zeroes = (2 * CLUSTER, 8 * CLUSTER);
    block_on(image.write_zeroes(zeroes.0, zeroes.1, ZeroOptions::default())).unwrap();
    let extents = block_on(image.extents(0, 12 * CLUSTER, 100)).unwrap();
    let data: Vec<_> = extents
        .iter()
        .filter(|extent| extent.data)
        .map(|extent| extent.start / CLUSTER..(extent.start + extent.len) / CLUSTER)
        .collect();
    // Clusters 3 to 8 are two units.
    assert_eq!(data, [2..3, 9..10]);
    let fast = ZeroOptions {
        fast_only: true,
        ..ZeroOptions::default()
    };
    let refused = block_on(image.write_zeroes(2 * CLUSTER, CLUSTER, fast));
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
    block_on(image.write_zeroes(3 * CLUSTER, 3 * CLUSTER, fast)).unwrap();
}

#[test]
fn what_is_no_whole_block_is_not_discarded() {
    let (image, _) = limited(false);
    let mut model = vec![0; SIZE as usize];
    write(&image, &mut model, (0, 8 * CLUSTER, 3));
    block_on(image.discard(2 * CLUSTER + 1, 510)).unwrap();
    assert_holds(&image, &model);
    block_on(image.discard(CLUSTER, 5 * CLUSTER)).unwrap();
    model[CLUSTER as usize..6 * CLUSTER as usize].fill(0);
    assert_holds(&image, &model);
}
