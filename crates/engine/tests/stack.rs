//! Chains that change while they are used: an overlay over an open disk, layers that leave, and one
//! that is written while those above it are read.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use cowslip::image::{BackingChoice, DiscardPolicy, Durability, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image};

use crate::support::slow::{NoFiles, SlowFile};
use crate::support::{block_on, our_check};

const CLUSTER: u64 = 4096;
const SIZE: u64 = 64 * CLUSTER;

/// An image without data, in memory.
fn file() -> Arc<SlowFile> {
    let file = SlowFile::new(Vec::new());
    let options = CreateOptions {
        cluster_size: CLUSTER,
        ..CreateOptions::new(SIZE)
    };
    block_on(create(file.clone(), None, &options)).unwrap();
    file
}

/// The image alone, for writing.
fn open(file: &Arc<SlowFile>) -> Image {
    let options = OpenOptions {
        writable: true,
        backing: BackingChoice::None,
        discard: DiscardPolicy::Unmap,
        ..OpenOptions::default()
    };
    block_on(Image::open(file.clone(), options, &NoFiles)).unwrap()
}

fn write(image: &Image, cluster: u64, byte: u8) -> cowslip::Result<()> {
    let data = Buf::copy_of(&vec![byte; CLUSTER as usize]);
    block_on(image.write(cluster * CLUSTER, data, Durability::Cached))
}

/// Returns the first byte of each cluster.
fn read(image: &Image, clusters: usize) -> Vec<u8> {
    let buf = BufMut::zeroed(clusters * CLUSTER as usize);
    let read = block_on(image.read(0, buf)).unwrap();
    read.chunks(CLUSTER as usize)
        .map(|bytes| bytes[0])
        .collect()
}

fn assert_clean(file: &SlowFile) {
    let mut findings = Vec::new();
    our_check(file.memory.contents(), &mut findings).unwrap();
    assert_eq!(findings, []);
}

#[test]
fn an_overlay_takes_the_writes_of_a_disk_in_use() {
    let (base, over) = (file(), file());
    let disk = open(&base);
    write(&disk, 0, 1).unwrap();
    write(&disk, 1, 1).unwrap();

    block_on(disk.freeze()).unwrap();
    // All that a crash could take is durable, and the file is as after a close.
    assert_clean(&base);
    let frozen = base.memory.contents();
    let top = open(&over).above(&disk.stack()).unwrap();
    write(&top, 1, 2).unwrap();
    write(&top, 2, 2).unwrap();
    assert_eq!(read(&top, 4), [1, 2, 2, 0]);
    assert_eq!(read(&disk, 4), [1, 1, 0, 0]);
    block_on(top.flush()).unwrap();

    assert!(matches!(write(&disk, 3, 9), Err(Error::ReadOnly(_))));
    assert!(!disk.is_writable());
    block_on(disk.flush()).unwrap();
    block_on(top.close()).unwrap();
    assert!(
        base.memory.contents() == frozen,
        "nothing writes a frozen layer"
    );
    assert_clean(&over);
    let again = open(&over).above(&open(&base).stack()).unwrap();
    assert_eq!(read(&again, 4), [1, 2, 2, 0]);
}

#[test]
fn layers_leave_a_chain_and_stay_open_for_others() {
    let files = [file(), file(), file()];
    let layers = files.each_ref().map(open);
    for (layer, byte) in layers.iter().zip([1, 2, 3]) {
        write(layer, u64::from(byte), byte).unwrap();
    }
    let [low, middle, high] = layers;
    let middle = middle.above(&low.stack()).unwrap();
    let high = high.above(&middle.stack()).unwrap();
    assert_eq!(read(&high, 4), [0, 1, 2, 3]);
    assert_eq!(high.layers().len(), 3);

    let without = high.above(&high.stack().from(2)).unwrap();
    assert_eq!(read(&without, 4), [0, 1, 0, 3]);
    let alone = without.above(&without.stack().from(3)).unwrap();
    assert_eq!(
        (read(&alone, 4), alone.layers().len()),
        (vec![0, 0, 0, 3], 1)
    );
    assert_eq!(read(&middle, 4), [0, 1, 2, 0]);
    let error = middle.above(&high.stack()).unwrap_err();
    assert!(
        error.to_string().contains("its own backing file"),
        "{error}"
    );
}

#[test]
fn a_layer_that_is_written_keeps_what_a_read_of_an_upper_one_has_found() {
    let (base, over) = (file(), file());
    let below = open(&base);
    write(&below, 0, 1).unwrap();
    block_on(below.flush()).unwrap();
    let top = open(&over).above(&below.stack()).unwrap();
    assert_eq!(read(&top, 2), [1, 0]);

    base.hold_reads(true);
    let mut reading = pin!(top.read(0, BufMut::zeroed(CLUSTER as usize)));
    let mut context = Context::from_waker(Waker::noop());
    assert!(reading.as_mut().poll(&mut context).is_pending());
    assert_eq!(base.waiting_reads(), 1, "the read has found its cluster");
    base.hold_reads(false);
    // The cluster becomes free, and new ones are taken until it would have been used again.
    block_on(below.discard(0, CLUSTER)).unwrap();
    block_on(below.flush()).unwrap();
    for cluster in 1..40 {
        write(&below, cluster, 0xaa).unwrap();
        block_on(below.flush()).unwrap();
    }
    base.let_reads_go();
    let Poll::Ready(read) = reading.as_mut().poll(&mut context) else {
        panic!("nothing holds it up any more");
    };
    assert_eq!(read.unwrap()[0], 1, "bytes of another cluster");
    block_on(below.close()).unwrap();
    assert_clean(&base);
}
