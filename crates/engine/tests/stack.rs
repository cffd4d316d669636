//! Chains that change while they are used: an overlay over an open disk, layers that leave, and one
//! that is written while those above it are read.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use cowslip::file::BlockFile;
use cowslip::image::{BackingChoice, DiscardPolicy, Durability, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image};

use crate::support::slow::{NoFiles, SlowFile};
use crate::support::{block_on, our_check};

const CLUSTER: u64 = 4096;
const SIZE: u64 = 64 * CLUSTER;

/// An image without data, in memory.
fn file() -> Arc<SlowFile> {
    file_with(CreateOptions {
        cluster_size: CLUSTER,
        ..CreateOptions::new(SIZE)
    })
}

fn file_with(options: CreateOptions) -> Arc<SlowFile> {
    let file = SlowFile::new(Vec::new());
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

/// Opens an image alone, with so much memory for metadata.
fn open_within(file: &Arc<SlowFile>, cache_bytes: u64) -> Image {
    let options = OpenOptions {
        writable: true,
        backing: BackingChoice::None,
        discard: DiscardPolicy::Unmap,
        cache_bytes,
        ..OpenOptions::default()
    };
    block_on(Image::open(file.clone(), options, &NoFiles)).unwrap()
}

#[test]
fn the_index_of_a_chain_agrees_with_its_layers() {
    // Several regions of the index.
    const BYTES: u64 = 9 << 20;
    for seed in 0..24 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut model: Vec<u8> = Vec::new();
        let mut image: Option<Image> = None;
        for layer in 1..=6_u8 {
            let bits = random.u32(12..17);
            let size = BYTES - 512 * random.u64(0..2000);
            let file = file_with(CreateOptions {
                cluster_size: 1 << bits,
                extended_l2: bits >= 14 && random.bool(),
                ..CreateOptions::new(size)
            });
            let cache_bytes = if random.bool() { 1 << 16 } else { 0 };
            let opened = open_within(&file, cache_bytes);
            let next = match &image {
                Some(below) => opened.above(&below.stack()).unwrap(),
                None => opened,
            };
            // What lies behind the end of a layer reads as zeroes above it.
            model.resize(size as usize, 0);
            for _ in 0..random.u32(1..12) {
                let start = random.u64(0..size);
                let len = random.u64(1..=(size - start).min(400_000));
                let part = start as usize..(start + len) as usize;
                match random.u8(0..5) {
                    0 => {
                        let zeroes = Default::default();
                        block_on(next.write_zeroes(start, len, zeroes)).unwrap();
                        model[part].fill(0);
                    }
                    1 if bits >= 14 => {
                        let unit = 1 << bits;
                        let start = start & !(unit - 1);
                        let len = unit.min(size - start);
                        let data = Buf::copy_of(&vec![layer; len as usize]);
                        block_on(next.write_compressed(start, data)).unwrap();
                        model[start as usize..(start + len) as usize].fill(layer);
                    }
                    _ => {
                        let data = Buf::copy_of(&vec![layer; len as usize]);
                        block_on(next.write(start, data, Durability::Cached)).unwrap();
                        model[part].fill(layer);
                    }
                }
            }
            block_on(next.freeze()).unwrap();
            image = Some(next);
        }
        let top = open_within(&file_with(CreateOptions::new(BYTES)), 0);
        let top = top.above(&image.unwrap().stack()).unwrap();
        model.resize(BYTES as usize, 0);
        for _ in 0..120 {
            let start = random.u64(0..BYTES);
            let len = random.u64(1..=(BYTES - start).min(3 << 20));
            let read = block_on(top.read(start, BufMut::zeroed(len as usize))).unwrap();
            let expected = &model[start as usize..(start + len) as usize];
            assert!(read[..] == *expected, "seed {seed}: {len} bytes at {start}");
        }
    }
}

#[test]
fn damage_in_a_layer_fails_the_reads_that_meet_it_and_no_others() {
    let files = [file(), file(), file()];
    let layers = files.each_ref().map(open);
    write(&layers[0], 1, 1).unwrap();
    write(&layers[1], 2, 2).unwrap();
    for layer in &layers {
        block_on(layer.close()).unwrap();
    }
    // The entry of cluster 1 of the lowest layer refers to no cluster's beginning.
    let bytes = files[0].memory.contents();
    let word = |at: u64| u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap());
    let table = word(word(40)) & 0x00ff_ffff_ffff_fe00;
    let damaged = (word(table + 8) | 0x200).to_be_bytes();
    let data = Buf::copy_of(&damaged);
    let written = files[0]
        .memory
        .write(table + 8, data.into(), Durability::Cached);
    block_on(written).unwrap();

    let low = open(&files[0]);
    block_on(low.freeze()).unwrap();
    let middle = open(&files[1]).above(&low.stack()).unwrap();
    block_on(middle.freeze()).unwrap();
    let top = open(&files[2]).above(&middle.stack()).unwrap();
    let one = |cluster: u64| {
        let buf = BufMut::zeroed(CLUSTER as usize);
        block_on(top.read(cluster * CLUSTER, buf)).map(|read| read[0])
    };
    assert_eq!((one(0).unwrap(), one(2).unwrap()), (0, 2));
    assert!(matches!(one(1), Err(Error::Corrupt { .. })), "{:?}", one(1));
}

/// Layers of several cluster sizes and lengths: each read is that of a model, and when all was
/// read, the layers below the first have nothing of their tables in memory.
#[test]
fn layers_that_do_not_change_keep_no_tables_in_memory() {
    const LONGEST: u64 = 5 << 20;
    let mut random = fastrand::Rng::with_seed(0x1a7e5);
    for _ in 0..8 {
        let mut model = vec![0; LONGEST as usize];
        let (mut disk, mut files): (Option<Image>, Vec<_>) = (None, Vec::new());
        for layer in 1..=random.u8(3..12) {
            let size = random.u64(LONGEST / 2..LONGEST) & !511;
            let file = file_with(CreateOptions {
                cluster_size: 512 << random.u64(0..6),
                ..CreateOptions::new(size)
            });
            let opened = open(&file);
            let next = match &disk {
                None => opened,
                Some(below) => opened.above(&below.stack()).unwrap(),
            };
            // Beyond the end of a layer there are zeroes, whatever lies below.
            model[size as usize..].fill(0);
            for _ in 0..random.u8(0..6) {
                let start = random.u64(0..size);
                let len = random.u64(1..40_000).min(size - start);
                let data = Buf::copy_of(&vec![layer; len as usize]);
                block_on(next.write(start, data, Durability::Cached)).unwrap();
                model[start as usize..(start + len) as usize].fill(layer);
            }
            block_on(next.freeze()).unwrap();
            disk = Some(next);
            files.push(file);
        }
        // Opened again, they have nothing in memory.
        drop(disk.take());
        for file in &files {
            let options = OpenOptions {
                backing: BackingChoice::None,
                ..OpenOptions::default()
            };
            let opened = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
            disk = match &disk {
                None => Some(opened),
                Some(below) => Some(opened.above(&below.stack()).unwrap()),
            };
        }
        let disk = disk.unwrap();
        for _ in 0..60 {
            let start = random.u64(0..disk.size());
            let len = random.u64(1..100_000).min(disk.size() - start);
            let read = block_on(disk.read(start, BufMut::zeroed(len as usize))).unwrap();
            let expected = &model[start as usize..(start + len) as usize];
            assert!(*read == *expected, "{len} bytes at {start}");
        }
        let all = BufMut::zeroed(disk.size() as usize);
        let read = block_on(disk.read(0, all)).unwrap();
        assert!(*read == model[..disk.size() as usize]);
        let (own, all) = (disk.own_cache_statistics(), disk.cache_statistics());
        assert_eq!(all.slices, own.slices, "{all:?}");
    }
}
