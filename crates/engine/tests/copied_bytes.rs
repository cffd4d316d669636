//! A first write copies into memory that was used before: nothing of what that held may reach a
//! disk. Where assertions are compiled in, such memory is full of a pattern that no layer here
//! holds.

use std::sync::Arc;

use crate::support::block_on;
use crate::support::slow::SlowFile;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{BackingChoice, Durability, Format, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image};

const UNIT: u64 = 64 << 10;
const SIZE: u64 = 8 * UNIT;
/// Content of the lowest layer; it ends within the sixth unit.
const BELOW: u8 = 0x11;
const BELOW_LEN: u64 = 5 * UNIT + 5000;
/// Content of the layer between, in each third block.
const BETWEEN: u8 = 0x22;
const BLOCK: u64 = 4096;
const GUEST: u8 = 0x33;
/// The previous content of the memory.
const SECRET: u8 = 0x5a;

/// Opens what has the name that is asked for.
struct Shelf(Vec<(&'static str, Arc<dyn BlockFile>)>);

impl Gate for Shelf {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        let found = self.0.iter().find(|(name, _)| *name == request.name);
        let missing = || Error::Invalid(format!("no {}", request.name));
        found.map(|(_, file)| Arc::clone(file)).ok_or_else(missing)
    }
}

fn open(file: Arc<dyn BlockFile>, shelf: &Shelf) -> Image {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        backing: BackingChoice::AsNamed,
        ..OpenOptions::default()
    };
    block_on(Image::open(file, options, shelf)).unwrap()
}

fn write(image: &Image, offset: u64, len: u64, byte: u8) -> cowslip::Result<()> {
    let data = Buf::copy_of(&vec![byte; len as usize]);
    block_on(image.write(offset, data, Durability::Cached))
}

/// Leaves memory of all sizes behind that a first write here may ask for.
fn leave_secrets() {
    for len in [4096, 8192, 16_384, 32_768, 65_536] {
        let mut used: Vec<BufMut> = (0..4).map(|_| BufMut::for_overwrite(len)).collect();
        used.iter_mut().for_each(|buf| buf.fill(SECRET));
    }
}

/// A chain of three: raw and too short at the bottom, small clusters that are not all there
/// between, and large ones on top. What its disk holds.
fn chain(extended_l2: bool) -> (Arc<SlowFile>, Image, Vec<u8>) {
    let lowest = SlowFile::new(vec![BELOW; BELOW_LEN as usize]);
    let mut shelf = Shelf(vec![("lowest", lowest.clone())]);
    let image = |name, options: &CreateOptions| {
        let file = Arc::new(MemoryFile::new(name, Vec::new(), 1));
        block_on(create(file.clone(), None, options)).unwrap();
        file
    };
    let between = image(
        "between",
        &CreateOptions {
            cluster_size: BLOCK,
            backing_file: Some("lowest".to_string()),
            backing_format: Some("raw".to_string()),
            ..CreateOptions::new(SIZE - UNIT)
        },
    );
    let mut disk = vec![BELOW; BELOW_LEN as usize];
    disk.resize(SIZE as usize, 0);
    let filled = open(between.clone(), &shelf);
    for at in (0..SIZE - UNIT).step_by(3 * BLOCK as usize) {
        write(&filled, at, BLOCK, BETWEEN).unwrap();
        disk[at as usize..][..BLOCK as usize].fill(BETWEEN);
    }
    block_on(filled.close()).unwrap();
    drop(filled);
    shelf.0.push(("between", between));
    let top = image(
        "top",
        &CreateOptions {
            cluster_size: if extended_l2 { 32 * UNIT } else { UNIT },
            extended_l2,
            backing_file: Some("between".to_string()),
            backing_format: Some("qcow2".to_string()),
            ..CreateOptions::new(SIZE)
        },
    );
    (lowest, open(top, &shelf), disk)
}

fn contents(image: &Image) -> Vec<u8> {
    let read = block_on(image.read(0, BufMut::zeroed(SIZE as usize)));
    read.unwrap().to_vec()
}

#[test]
fn a_copy_holds_what_the_chain_holds_and_zeroes_where_that_ends() {
    for extended_l2 in [false, true] {
        // Near the start, the middle and the end of a unit; short and long, which are copied in one
        // and in two reads.
        for (start, len) in [(0, 512), (20_480, 4096), (20_000, 30_000), (65_024, 512)] {
            let (_, image, mut disk) = chain(extended_l2);
            for unit in 0..SIZE / UNIT {
                leave_secrets();
                let at = unit * UNIT + start;
                write(&image, at, len, GUEST).unwrap();
                disk[at as usize..][..len as usize].fill(GUEST);
            }
            assert!(contents(&image) == disk, "{start}+{len}, {extended_l2}");
        }
    }
}

#[test]
fn a_copy_that_could_not_be_read_leaves_nothing() {
    for extended_l2 in [false, true] {
        let (lowest, image, mut disk) = chain(extended_l2);
        lowest.let_reading_fail(true);
        for unit in 0..5 {
            leave_secrets();
            assert!(write(&image, unit * UNIT + 20_480, 4096, GUEST).is_err());
        }
        lowest.let_reading_fail(false);
        assert!(contents(&image) == disk, "as if nobody had written");
        for unit in 0..5 {
            let at = unit * UNIT + 20_480;
            write(&image, at, 4096, GUEST).unwrap();
            disk[at as usize..][..4096].fill(GUEST);
        }
        assert!(contents(&image) == disk);
    }
}
