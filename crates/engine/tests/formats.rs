//! A format that is not built in: one module and one line, and chains, reads, extents, conversion
//! and the guard of guessed disks take it like any other.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use cowslip::convert::{Options, Plan, Sources};
use cowslip::disk::{DiskFuture, Features};
use cowslip::file::memory::MemoryFile;
use cowslip::file::{AlignedFile, BlockFile, FileRequest, Gate};
use cowslip::formats::{FormatDriver, FormatImage, Formats, OpenRequest, Opened};
use cowslip::image::{BackingChoice, Durability, Extent, Format, OpenOptions, ZeroOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::run::{HostOffset, Run, Source, push};
use cowslip::{Buf, BufMut, Error, Image, IoVec, Job, Result};

use crate::support::block_on;

/// The toy format. The first sector: `TOYDISK` and a newline, the size of the disk, the number of
/// blocks that are stored, and a byte a stored block with its place on the disk; blocks of 4 KiB
/// follow, in that order, from 4 KiB on. Blocks that are not stored are those of the backing file
/// `base.raw`, if the byte before the map is set, and else zeroes.
static TOY: FormatDriver = FormatDriver {
    format: Format::Other("toy"),
    matches: |sector| sector.starts_with(MAGIC),
    open: |opening| Box::pin(open(opening)),
};

const MAGIC: &[u8] = b"TOYDISK\n";
const BLOCK: u64 = 4096;

#[derive(Debug)]
struct Toy {
    file: AlignedFile,
    size: u64,
    has_backing: bool,
    /// The block of the disk that each stored block is.
    stored: Vec<u8>,
}

async fn open(opening: OpenRequest<'_>) -> Result<Opened> {
    let file = opening.file;
    let header = file.read(0, BufMut::zeroed(512)).await?;
    let size = u64::from_be_bytes(header[8..16].try_into().expect("eight bytes"));
    let count = usize::from(header[16]);
    let toy = Toy {
        has_backing: header[17] != 0,
        stored: header[18..18 + count].to_vec(),
        size,
        file,
    };
    let has_backing = toy.has_backing;
    let opened = Opened::by(Box::new(toy), &TOY);
    Ok(match has_backing {
        true => opened.over("base.raw".to_string(), Some("raw".to_string())),
        false => opened,
    })
}

impl FormatImage for Toy {
    fn size(&self) -> u64 {
        self.size
    }

    fn map(&self, range: Range<u64>) -> DiskFuture<'_, Vec<Run>> {
        let mut runs = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (block, into) = (at / BLOCK, at % BLOCK);
            let end = range.end.min((block + 1) * BLOCK);
            let place = self
                .stored
                .iter()
                .position(|&stored| u64::from(stored) == block);
            let source = match place {
                Some(place) => Source::Data(HostOffset((place as u64 + 1) * BLOCK + into)),
                None if self.has_backing => Source::Below,
                None => Source::Zero(None),
            };
            push(
                &mut runs,
                Run {
                    range: at..end,
                    source,
                },
            );
            at = end;
        }
        Box::pin(std::future::ready(Ok(runs)))
    }

    fn file(&self) -> &AlignedFile {
        &self.file
    }
}

/// Files in memory by name.
struct Files(Vec<(&'static str, Arc<MemoryFile>)>);

impl Gate for Files {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        let found = self.0.iter().find(|(name, _)| *name == request.name);
        let (_, file) = found.ok_or_else(|| Error::Invalid(format!("no '{}'", request.name)))?;
        Ok(Arc::clone(file) as _)
    }
}

fn memory(bytes: Vec<u8>) -> Arc<MemoryFile> {
    Arc::new(MemoryFile::new("memory", bytes, 1))
}

/// A disk of five blocks and a half, of which the blocks 4 and 1 are stored; block 4 first.
fn toy(has_backing: bool) -> Arc<MemoryFile> {
    let mut bytes = vec![0; 3 * BLOCK as usize];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&SIZE.to_be_bytes());
    bytes[16..20].copy_from_slice(&[2, has_backing.into(), 4, 1]);
    bytes[BLOCK as usize..][..BLOCK as usize].fill(0x44);
    bytes[2 * BLOCK as usize..].fill(0x11);
    memory(bytes)
}

const SIZE: u64 = 5 * BLOCK + 2048;

/// The bytes of that disk over a backing file of these.
fn expected(below: u8) -> Vec<u8> {
    let block = |offset: u64| match offset / BLOCK {
        4 => 0x44,
        1 => 0x11,
        _ => below,
    };
    (0..SIZE).map(block).collect()
}

fn with_toy() -> OpenOptions {
    OpenOptions {
        formats: Formats::default().with(&TOY),
        ..OpenOptions::default()
    }
}

fn open_image(file: &Arc<MemoryFile>, options: OpenOptions, files: &Files) -> Result<Image> {
    block_on(Image::open(Arc::clone(file) as _, options, files))
}

fn read(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(image.size() as usize);
    block_on(image.read(0, buf)).unwrap().to_vec()
}

#[test]
fn a_disk_is_found_by_its_first_sector_and_read() {
    let image = open_image(&toy(false), with_toy(), &Files(Vec::new())).unwrap();
    assert_eq!(image.layers()[0].format.name(), "toy");
    assert_eq!(read(&image), expected(0));
    let extents = block_on(image.extents(0, SIZE, 100)).unwrap();
    let seen = |extent: &Extent| (extent.start / BLOCK, extent.data, extent.host_offset);
    let seen: Vec<_> = extents.iter().map(seen).collect();
    let at = |block: u64| Some(block * BLOCK);
    let nothing = |block| (block, false, None);
    let expected = [
        nothing(0),
        (1, true, at(2)),
        nothing(2),
        (4, true, at(1)),
        nothing(5),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn it_is_one_of_a_chain() {
    let base = memory(vec![0xbb; SIZE as usize]);
    let files = Files(vec![("toy", toy(true)), ("base.raw", base)]);
    let overlay = memory(Vec::new());
    let options = CreateOptions {
        backing_file: Some("toy".to_string()),
        backing_format: Some("toy".to_string()),
        ..CreateOptions::new(SIZE)
    };
    block_on(create(overlay.clone(), None, &options)).unwrap();
    let refused = open_image(&overlay, OpenOptions::default(), &files).unwrap_err();
    assert!(
        refused.to_string().ends_with("Unknown driver 'toy'"),
        "{refused}"
    );
    let options = OpenOptions {
        writable: true,
        ..with_toy()
    };
    let image = open_image(&overlay, options, &files).unwrap();
    let mut expected = expected(0xbb);
    assert_eq!(read(&image), expected);
    let data = Buf::copy_of(&[7; 100]);
    block_on(image.write(BLOCK - 50, data, Durability::Cached)).unwrap();
    expected[BLOCK as usize - 50..][..100].fill(7);
    assert_eq!(read(&image), expected);
    block_on(image.close()).unwrap();
    let formats: Vec<_> = image
        .layers()
        .iter()
        .map(|layer| layer.format.name())
        .collect();
    assert_eq!(formats, ["qcow2", "toy", "raw"]);
}

#[test]
fn it_is_converted() {
    let source = open_image(&toy(false), with_toy(), &Files(Vec::new())).unwrap();
    let target = memory(Vec::new());
    block_on(create(target.clone(), None, &CreateOptions::new(SIZE))).unwrap();
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let target = open_image(&target, options, &Files(Vec::new())).unwrap();
    let images = [source];
    let (sources, job) = (Sources::new(&images), Job::default());
    let plan = block_on(Plan::new(&sources, Options::default(), &job, &|_| ())).unwrap();
    block_on(plan.run(&target, &job)).unwrap();
    assert_eq!(read(&target), expected(0));
}

#[test]
fn it_is_not_written_and_a_gap_in_its_mapping_is_an_error() {
    let options = OpenOptions {
        writable: true,
        ..with_toy()
    };
    let refused = open_image(&toy(false), options, &Files(Vec::new())).unwrap_err();
    assert!(matches!(refused, Error::ReadOnly(_)), "{refused}");
    let file = toy(false);
    // A driver that leaves a gap does not expose stale memory.
    static GAPS: FormatDriver = FormatDriver {
        format: Format::Other("gaps"),
        matches: |sector| sector.starts_with(MAGIC),
        open: |opening| Box::pin(open_with_gaps(opening)),
    };
    async fn open_with_gaps(opening: OpenRequest<'_>) -> Result<Opened> {
        Ok(Opened::by(Box::new(Gaps(opening.file)), &GAPS))
    }
    #[derive(Debug)]
    struct Gaps(AlignedFile);
    impl FormatImage for Gaps {
        fn size(&self) -> u64 {
            SIZE
        }
        fn map(&self, range: Range<u64>) -> DiskFuture<'_, Vec<Run>> {
            let range = range.start..range.end - 1;
            let source = Source::Zero(None);
            Box::pin(std::future::ready(Ok(vec![Run { range, source }])))
        }
        fn file(&self) -> &AlignedFile {
            &self.0
        }
    }
    let options = OpenOptions {
        formats: Formats::default().with(&GAPS),
        ..OpenOptions::default()
    };
    let image = open_image(&file, options, &Files(Vec::new())).unwrap();
    let refused = block_on(image.read(0, BufMut::zeroed(10))).unwrap_err();
    assert!(
        refused.to_string().contains("mapping at offset 0x9"),
        "{refused}"
    );
}

#[test]
fn a_guest_cannot_make_a_disk_that_was_guessed_to_be_raw_one_of_it() {
    let guessed = |options: OpenOptions| {
        let file = memory(vec![0; 1 << 20]);
        let options = OpenOptions {
            writable: true,
            backing: BackingChoice::None,
            ..options
        };
        let image = open_image(&file, options, &Files(Vec::new())).unwrap();
        block_on(image.write(0, Buf::copy_of(MAGIC), Durability::Cached))
    };
    let refused = guessed(with_toy()).unwrap_err();
    assert!(refused.to_string().contains("a toy header"), "{refused}");
    guessed(OpenOptions::default()).unwrap();
}

/// A format that is written: all of the file behind its first block, over a backing file if the
/// file is longer than a megabyte.
static KEPT: FormatDriver = FormatDriver {
    format: Format::Other("kept"),
    matches: |sector| sector.starts_with(MAGIC),
    open: |opening| Box::pin(open_kept(opening)),
};

thread_local! {
    /// The next flush of an image of it fails.
    static FLUSH_FAILS: Cell<bool> = const { Cell::new(false) };
}

#[derive(Debug)]
struct Kept(AlignedFile, u64);

async fn open_kept(opening: OpenRequest<'_>) -> Result<Opened> {
    let size = opening.file_len - BLOCK;
    let opened = Opened::by(Box::new(Kept(opening.file, size)), &KEPT);
    Ok(match size > 1 << 20 {
        true => opened.over("base.raw".to_string(), Some("raw".to_string())),
        false => opened,
    })
}

impl FormatImage for Kept {
    fn size(&self) -> u64 {
        self.1
    }

    fn map(&self, range: Range<u64>) -> DiskFuture<'_, Vec<Run>> {
        let source = Source::Data(HostOffset(range.start + BLOCK));
        Box::pin(std::future::ready(Ok(vec![Run { range, source }])))
    }

    fn file(&self) -> &AlignedFile {
        &self.0
    }

    fn features(&self) -> Features {
        Features {
            writable: true,
            preferred_block_bytes: BLOCK,
        }
    }

    fn write(&self, offset: u64, data: IoVec) -> DiskFuture<'_, ()> {
        Box::pin(self.0.write(offset + BLOCK, data, Durability::Cached))
    }

    fn flush(&self) -> DiskFuture<'_, ()> {
        match FLUSH_FAILS.take() {
            true => Box::pin(std::future::ready(Err(Error::Invalid("lost".to_string())))),
            false => Box::pin(self.0.flush()),
        }
    }
}

fn kept(bytes: u64) -> (Arc<MemoryFile>, Result<Image>) {
    let mut contents = vec![0x11; bytes as usize];
    contents[..8].copy_from_slice(MAGIC);
    let file = memory(contents);
    let options = OpenOptions {
        writable: true,
        formats: Formats::default().with(&KEPT),
        ..OpenOptions::default()
    };
    let base = Files(vec![("base.raw", memory(vec![0; 512]))]);
    let image = open_image(&file, options, &base);
    (file, image)
}

#[test]
fn what_a_format_takes_is_done_and_the_rest_refused() {
    let (file, image) = kept(9 * BLOCK);
    let image = image.unwrap();
    let data = Buf::copy_of(&[7; 600]);
    block_on(image.write(1000, data, Durability::Durable)).unwrap();
    let zeroes = ZeroOptions::default();
    block_on(image.write_zeroes(1500, 5 * BLOCK, zeroes)).unwrap();
    block_on(image.discard(0, BLOCK)).unwrap();
    let mut expected = vec![0x11; 8 * BLOCK as usize];
    expected[1000..1600].fill(7);
    expected[1500..][..5 * BLOCK as usize].fill(0);
    assert_eq!(read(&image), expected);
    assert_eq!(file.contents()[BLOCK as usize..], expected);
    let fast = ZeroOptions {
        fast_only: true,
        ..zeroes
    };
    let refused = [
        block_on(image.write_zeroes(0, 10, fast)),
        block_on(image.resize(BLOCK)),
        block_on(image.allocate(0, BLOCK)),
        block_on(image.write_compressed(0, Buf::zeroed(BLOCK as usize))),
    ];
    for refused in refused {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    }
    block_on(image.close()).unwrap();
    // What a block lacks that is written in part would have to come from below.
    let (_, over_another) = kept(2 << 20);
    let refused = over_another.unwrap_err();
    assert!(matches!(refused, Error::ReadOnly(_)), "{refused}");
}

#[test]
fn after_a_failed_flush_nothing_of_it_counts_as_durable() {
    let (_, image) = kept(9 * BLOCK);
    let image = image.unwrap();
    FLUSH_FAILS.set(true);
    let data = Buf::copy_of(&[7; 512]);
    let lost = block_on(image.write(0, data.clone(), Durability::Durable));
    assert!(matches!(lost, Err(Error::Invalid(_))), "{lost:?}");
    block_on(image.write(0, data, Durability::Cached)).unwrap();
    for refused in [block_on(image.flush()), block_on(image.close())] {
        assert!(matches!(refused, Err(Error::Latched(_))), "{refused:?}");
    }
}
