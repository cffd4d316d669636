//! Bytes in the caches of the system, from a process that was killed, in layers below the top.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::support::block_on;
use crate::support::slow::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Durability, FileId, FileRequest, Gate};
use cowslip::image::{BackingChoice, Format, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, Error, Image};
use cowslip_queue::{Pending, pending};

const SIZE: u64 = 1 << 20;

/// A file that other processes find, and that counts its flushes, which may fail.
#[derive(Debug)]
struct Counting {
    inner: MemoryFile,
    id: FileId,
    flushes: AtomicUsize,
    fails: AtomicBool,
}

impl Counting {
    fn new(name: &str, bytes: Vec<u8>, id: u64) -> Arc<Counting> {
        Arc::new(Counting {
            inner: MemoryFile::new(name, bytes, 1),
            id: FileId(1, id),
            flushes: AtomicUsize::default(),
            fails: AtomicBool::default(),
        })
    }

    fn flushes(&self) -> usize {
        self.flushes.swap(0, Ordering::Relaxed)
    }
}

impl BlockFile for Counting {
    cowslip_block::forward_to_file!(inner: name, capabilities, len, read, write, zero, discard);
    cowslip_block::forward_to_file!(inner: allocate, extents, set_len, allocated_bytes);

    fn id(&self) -> Option<FileId> {
        Some(self.id)
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        let (to, flushed) = pending();
        to.complete(match self.fails.swap(false, Ordering::Relaxed) {
            true => Err(io::Error::from_raw_os_error(5)),
            false => Ok(()),
        });
        flushed
    }
}

/// An overlay, a base, and its raw base.
struct Files([Arc<Counting>; 3]);

impl Gate for Files {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        let found = self.0.iter().find(|file| file.name() == request.name);
        Ok(Arc::clone(found.unwrap()) as _)
    }
}

impl Files {
    fn new() -> Files {
        let files = Files([
            Counting::new("top", Vec::new(), 1),
            Counting::new("middle", Vec::new(), 2),
            Counting::new("low", vec![1; SIZE as usize], 3),
        ]);
        for (file, below) in [(0, ("middle", "qcow2")), (1, ("low", "raw"))] {
            let options = CreateOptions {
                backing_file: Some(below.0.to_string()),
                backing_format: Some(below.1.to_string()),
                ..CreateOptions::new(SIZE)
            };
            block_on(create(Arc::clone(&files.0[file]) as _, None, &options)).unwrap();
        }
        files.flushes();
        files
    }

    fn flushes(&self) -> [usize; 3] {
        std::array::from_fn(|at| self.0[at].flushes())
    }

    fn open(&self, writable: bool) -> Image {
        let options = OpenOptions {
            writable,
            ..OpenOptions::default()
        };
        block_on(Image::open(Arc::clone(&self.0[0]) as _, options, self)).unwrap()
    }
}

fn write(image: &Image) {
    let data = Buf::copy_of(&[7; 512]);
    block_on(image.write(0, data, Durability::Cached)).unwrap();
}

/// A process before may have served the disk from a layer that is below now, and was killed.
#[test]
fn the_first_flush_covers_what_was_left_in_layers_below() {
    let files = Files::new();
    let image = files.open(true);
    write(&image);
    assert_eq!(files.flushes()[1..], [0, 0]);
    block_on(image.flush()).unwrap();
    assert_eq!(files.flushes()[1..], [1, 1]);
    write(&image);
    block_on(image.flush()).unwrap();
    assert_eq!(files.flushes()[1..], [0, 0], "they are immutable since");
    block_on(image.close()).unwrap();
}

#[test]
fn what_lies_below_is_flushed_once_for_all_images_over_it() {
    let files = Files::new();
    let options = OpenOptions {
        backing: BackingChoice::None,
        ..OpenOptions::default()
    };
    let low = OpenOptions {
        format: Some(Format::Raw),
        ..OpenOptions::default()
    };
    let low = block_on(Image::open(Arc::clone(&files.0[2]) as _, low, &NoFiles)).unwrap();
    let middle = Image::open(Arc::clone(&files.0[1]) as _, options.clone(), &NoFiles);
    let middle = block_on(middle).unwrap().above(&low.stack()).unwrap();
    let options = OpenOptions {
        writable: true,
        ..options
    };
    let top = Image::open(Arc::clone(&files.0[0]) as _, options, &NoFiles);
    let top = block_on(top).unwrap();
    for flushes in [1, 0] {
        let disk = top.above(&middle.stack()).unwrap();
        write(&disk);
        block_on(disk.flush()).unwrap();
        assert_eq!(files.flushes()[1..], [flushes; 2]);
    }
}

#[test]
fn what_a_layer_below_has_lost_fails_each_flush() {
    let files = Files::new();
    let image = files.open(true);
    write(&image);
    files.0[2].fails.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        // The system reports it once.
        let error = block_on(image.flush()).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        assert!(error.to_string().contains("'low'"), "{error}");
    }
}

#[test]
fn a_reader_flushes_nothing() {
    let files = Files::new();
    let image = files.open(false);
    block_on(image.flush()).unwrap();
    block_on(image.close()).unwrap();
    assert_eq!(files.flushes(), [0; 3]);
}
