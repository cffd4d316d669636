//! Durable writes in place where the host's file has a hole and its file system is full: such a
//! write fails, and nothing else does.

use std::sync::Arc;

use cowslip::Image;
use cowslip::file::host::NoFiles;
use cowslip::file::{BlockFile, Durability};
use cowslip::image::{DiscardPolicy, Format, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip_queue::Buf;

use crate::support::sparse::{BLOCK, Sparse};
use crate::support::{block_on, our_check};

const CLUSTER: u64 = 64 << 10;

fn open(file: &Arc<Sparse>, format: Format) -> Image {
    let options = OpenOptions {
        writable: true,
        format: Some(format),
        discard: DiscardPolicy::Unmap,
        ..OpenOptions::default()
    };
    block_on(Image::open(file.clone(), options, &NoFiles)).unwrap()
}

/// An image whose first clusters are data, and where they are in the file.
fn image(format: Format) -> (Arc<Sparse>, u64) {
    let bytes = match format {
        Format::Raw => vec![0; 1 << 20],
        _ => Vec::new(),
    };
    let file = Sparse::new(bytes);
    if format == Format::Raw {
        return (file, 0);
    }
    block_on(create(file.clone(), None, &CreateOptions::new(1 << 20))).unwrap();
    let image = open(&file, format);
    let data = Buf::zeroed(4 * CLUSTER as usize);
    block_on(image.write(0, data, Durability::Cached)).unwrap();
    block_on(image.flush()).unwrap();
    let place = block_on(image.extents(0, CLUSTER, 1)).unwrap()[0].host_offset;
    block_on(image.close()).unwrap();
    (file, place.unwrap())
}

#[test]
fn a_durable_write_into_a_hole_that_finds_no_space_fails_alone() {
    for format in [Format::Raw, Format::Qcow2] {
        let (file, place) = image(format);
        // As preallocated metadata, another program's copy or a discard leaves it.
        file.release(place, 4 * CLUSTER);
        let image = open(&file, format);
        let write = |at: u64, byte, len: usize| {
            let data = Buf::copy_of(&vec![byte; len]);
            block_on(image.write(at, data, Durability::Durable))
        };
        write(BLOCK, 1, BLOCK as usize).unwrap();
        file.fill_up(true);
        for at in [0, 3 * BLOCK, CLUSTER, BLOCK + 512] {
            let error = write(at, 2, BLOCK as usize).unwrap_err();
            assert!(
                error.to_string().contains("No space"),
                "{format:?}: {error}"
            );
        }
        // What has its space, and all else once there is room.
        write(BLOCK, 3, 512).unwrap();
        block_on(image.flush()).unwrap();
        file.fill_up(false);
        write(3 * BLOCK, 4, BLOCK as usize).unwrap();
        block_on(image.close()).unwrap();
        if format == Format::Qcow2 {
            let checked = our_check(file.memory.contents(), &mut Vec::new()).unwrap();
            assert_eq!((checked.corruptions, checked.leaks), (0, 0));
        }
    }
}

#[test]
fn where_the_space_is_there_a_durable_write_is_one_call() {
    for format in [Format::Raw, Format::Qcow2] {
        let (file, place) = image(format);
        block_on(file.allocate(place, 4 * CLUSTER)).unwrap();
        let image = open(&file, format);
        let write = |at| {
            let data = Buf::copy_of(&[1; 512]);
            block_on(image.write(at, data, Durability::Durable)).unwrap();
        };
        // The first change of a session flushes what was there.
        write(0);
        file.take_counts();
        for at in [0, 512, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK + 512] {
            write(at);
        }
        let (durable, flushes, asked) = file.take_counts();
        assert_eq!((durable, flushes), (6, 0), "{format:?}");
        assert_eq!(asked, 0, "{format:?}: one answer is for all");
        // A discard of the space, and the answer is not the old one.
        block_on(image.discard(CLUSTER, CLUSTER)).unwrap();
        block_on(image.flush()).unwrap();
        file.take_counts();
        write(CLUSTER);
        let (durable, flushes, _) = file.take_counts();
        assert_eq!(durable, 0, "{format:?}");
        assert!(flushes > 0, "{format:?}");
        block_on(image.close()).unwrap();
    }
}
