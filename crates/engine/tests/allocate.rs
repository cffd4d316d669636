//! Space in advance, within the disk: nothing that a guest reads changes, and its later writes take
//! no space any more.

use std::sync::Arc;

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{Durability, OpenOptions, Space, ZeroOptions};
use cowslip::qcow2::create::{CreateOptions, Version, create};
use cowslip::{Buf, BufMut, Error, Image, Result};
use cowslip_block::random::Random;

use crate::support::{block_on, our_check};

/// Ends within a cluster, and within a block of the host.
const SIZE: u64 = (1 << 20) + 1536;
/// The layer below ends within a cluster, too.
const BELOW: u64 = (300 << 10) + 512;

/// A layout of the image.
#[derive(Clone, Copy, Debug)]
struct Layout {
    cluster_size: u64,
    is_extended: bool,
    version: Version,
    is_overlay: bool,
    has_data_file: bool,
}

const LAYOUTS: [Layout; 6] = [
    plain(4096),
    Layout {
        version: Version::V2,
        ..plain(512)
    },
    Layout {
        is_overlay: true,
        ..plain(8192)
    },
    Layout {
        is_overlay: true,
        is_extended: true,
        ..plain(64 << 10)
    },
    Layout {
        is_overlay: true,
        version: Version::V2,
        ..plain(2048)
    },
    Layout {
        has_data_file: true,
        ..plain(4096)
    },
];

const fn plain(cluster_size: u64) -> Layout {
    Layout {
        cluster_size,
        is_extended: false,
        version: Version::V3,
        is_overlay: false,
        has_data_file: false,
    }
}

/// The files, all in memory.
struct Files([Arc<MemoryFile>; 3]);

const NAMES: [&str; 3] = ["top", "below", "data"];

impl Gate for Files {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        let index = NAMES.iter().position(|name| *name == request.name).unwrap();
        Ok(self.0[index].clone())
    }
}

impl Files {
    fn new(layout: Layout, random: &mut Random) -> Files {
        // What a data file holds where nothing was written may be anything.
        let noise = |len: u64| (0..len).map(|at| (at * 7 % 251) as u8).collect();
        let files = [Vec::new(), noise(BELOW), noise(SIZE)];
        let mut index = 0;
        let files = Files(files.map(|bytes| {
            index += 1;
            Arc::new(MemoryFile::new(NAMES[index - 1], bytes, 1))
        }));
        let options = CreateOptions {
            cluster_size: layout.cluster_size,
            extended_l2: layout.is_extended,
            version: layout.version,
            backing_file: layout.is_overlay.then(|| "below".to_string()),
            backing_format: layout.is_overlay.then(|| "raw".to_string()),
            data_file: layout.has_data_file.then(|| "data".to_string()),
            ..CreateOptions::new(SIZE)
        };
        let data_file = layout.has_data_file.then(|| files.0[2].clone() as _);
        block_on(create(files.0[0].clone(), data_file, &options)).unwrap();
        let image = files.open();
        for _ in 0..20 {
            change(&image, random);
        }
        block_on(image.close()).unwrap();
        files
    }

    fn open(&self) -> Image {
        let options = OpenOptions {
            writable: true,
            ..OpenOptions::default()
        };
        block_on(Image::open(self.0[0].clone(), options, self)).unwrap()
    }
}

fn range(random: &mut Random) -> (u64, u64) {
    let start = random.below(SIZE);
    (start, 1 + random.below((SIZE - start).min(100_000)))
}

/// A write, zeroes with and without space, or a discard.
fn change(image: &Image, random: &mut Random) {
    let (start, len) = range(random);
    let zero = |space| {
        let options = ZeroOptions {
            space,
            ..ZeroOptions::default()
        };
        block_on(image.write_zeroes(start, len, options)).unwrap();
    };
    match random.below(6) {
        0 => zero(Space::Keep),
        1 => zero(Space::Release),
        2 => block_on(image.discard(start, len)).unwrap(),
        _ => write(image, (start, len), random.below(256) as u8),
    }
}

fn write(image: &Image, (start, len): (u64, u64), byte: u8) {
    let data = Buf::copy_of(&vec![byte; len as usize]);
    block_on(image.write(start, data, Durability::Cached)).unwrap();
}

fn content(image: &Image) -> Vec<u8> {
    block_on(image.read(0, BufMut::zeroed(SIZE as usize)))
        .unwrap()
        .to_vec()
}

#[test]
fn bytes_stay_and_later_writes_take_no_space() {
    for layout in LAYOUTS {
        for seed in 0..8 {
            let random = &mut Random(seed + 1);
            let files = Files::new(layout, random);
            let what = format!("{layout:?}, seed {seed}");
            let image = files.open();
            let before = content(&image);
            let (start, len) = match seed {
                0 => (0, SIZE),
                _ => range(random),
            };
            block_on(image.allocate(start, len)).unwrap();
            assert!(content(&image) == before, "{what}: {start}+{len}");
            let taken = || image.write_statistics().unwrap().new_space;
            let space = taken();
            write(&image, (start, len), 7);
            assert_eq!(taken(), space, "{what}: {start}+{len}");
            let mut expected = before;
            expected[start as usize..(start + len) as usize].fill(7);
            block_on(image.close()).unwrap();
            let image = files.open();
            assert!(content(&image) == expected, "{what}: opened again");
            block_on(image.close()).unwrap();
            if !layout.has_data_file {
                let mut findings = Vec::new();
                our_check(files.0[0].contents(), &mut findings).unwrap();
                assert_eq!(findings, [], "{what}");
            }
        }
    }
}

#[test]
fn what_cannot_be_allocated_is_refused() {
    let random = &mut Random(1);
    let files = Files::new(LAYOUTS[0], random);
    let image = files.open();
    block_on(image.allocate(0, 0)).unwrap();
    for (start, len) in [(SIZE, 1), (0, SIZE + 1), (u64::MAX, 2)] {
        let refused = block_on(image.allocate(start, len));
        assert!(matches!(refused, Err(Error::Io { .. })), "{start}+{len}");
    }
    block_on(image.close()).unwrap();
    let read_only = Image::open(files.0[0].clone(), OpenOptions::default(), &files);
    let refused = block_on(block_on(read_only).unwrap().allocate(0, 512));
    assert!(matches!(refused, Err(Error::ReadOnly(_))));
}
