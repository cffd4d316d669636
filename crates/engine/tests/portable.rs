//! Files by plain positioned reads and writes: images in them are like those of others, and what
//! the system cannot do is written out.

use std::fs::OpenOptions as Open;
use std::sync::Arc;

use cowslip::blocking::{BlockingDisk, wait};
use cowslip::file::BlockFile;
use cowslip::file::host::HostGate;
use cowslip::file::portable::PortableFile;
use cowslip::image::{OpenOptions, Space, ZeroOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{BufMut, Image};
use cowslip_block::random::Random;
use cowslip_queue::{Backend, Queue};

use crate::support::our_check;

const SIZE: u64 = 2 << 20;

fn file(path: &std::path::Path) -> Arc<dyn BlockFile> {
    let file = Open::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path);
    Arc::new(PortableFile::new("disk", file.unwrap(), true).unwrap())
}

#[test]
fn an_image_in_a_portable_file_does_what_the_model_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    wait(create(file(&path), None, &CreateOptions::new(SIZE))).unwrap();
    let options = || OpenOptions {
        writable: true,
        format: Some(cowslip::image::Format::Qcow2),
        ..OpenOptions::default()
    };
    let image = wait(Image::open(file(&path), options(), &HostGate::default())).unwrap();
    assert_eq!(
        image.unprotected().len(),
        1,
        "nothing locks it, and it says so"
    );
    let disk = BlockingDisk::new(image);
    let (mut random, mut model) = (Random(7), vec![0; SIZE as usize]);
    for _ in 0..300 {
        let at = random.below(SIZE);
        let len = 1 + random.below((SIZE - at).min(100_000));
        let range = at as usize..(at + len) as usize;
        match random.below(5) {
            0..2 => {
                let byte = random.below(256) as u8;
                model[range.clone()].fill(byte);
                disk.write_at(&model[range], at).unwrap();
            }
            2 => {
                model[range].fill(0);
                let space = Space::of_unmap(random.below(2) == 0);
                let options = ZeroOptions {
                    space,
                    ..ZeroOptions::default()
                };
                disk.zero(at, len, options).unwrap();
            }
            3 => {
                let mut read = vec![1; len as usize];
                disk.read_at(&mut read, at).unwrap();
                assert_eq!(read, model[range]);
            }
            _ => disk.flush().unwrap(),
        }
    }
    wait(disk.disk().close()).unwrap();
    let mut found = Vec::new();
    our_check(std::fs::read(&path).unwrap(), &mut found).unwrap();
    assert!(found.is_empty(), "{found:?}");
    // The pool's threads, too.
    let image = wait(Image::open(file(&path), options(), &HostGate::default())).unwrap();
    let queue = Queue::new(Backend::Threads).unwrap();
    let read = queue
        .block_on(image.read(0, BufMut::zeroed(SIZE as usize)))
        .unwrap();
    assert!(read[..] == model[..]);
    queue.block_on(image.close()).unwrap();
    assert!(PortableFile::new("/", std::fs::File::open("/").unwrap(), false).is_err());
}
