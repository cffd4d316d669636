//! Random operations on an image through the library, and the model that follows them.

use std::fmt;
use std::path::Path;

use cowslip::file::host::{
    Aio, CreateMode, FlushPolicy, HostGate, HostOptions, PageCache, open_host_file,
};
use cowslip::image::{
    BackingChoice, DiscardPolicy, Durability, Format, OpenOptions, Space, ZeroOptions,
};
use cowslip::{Buf, BufMut, Image};
use futures_util::future::join_all;

use super::model::{Model, first_difference};
use super::rng::Rng;
use super::shape::{Shape, Version};

/// The effect of an operation.
#[derive(Clone)]
enum Action {
    Read,
    Write(Vec<u8>, Durability),
    Zero(ZeroOptions),
    Discard,
}

/// An operation of a batch, on a range of the disk.
#[derive(Clone)]
struct Operation {
    offset: u64,
    len: u64,
    action: Action,
}

impl Operation {
    fn random(model: &Model, shape: &Shape, rng: &mut Rng) -> Operation {
        let (offset, len) = model.random_range(shape, rng);
        let action = match rng.below(10) {
            0 => Action::Read,
            1 | 2 => Action::Zero(ZeroOptions {
                space: Space::of_unmap(rng.once_in(2)),
                durability: Durability::of_fua(rng.once_in(8)),
                fast_only: false,
            }),
            3 => Action::Discard,
            _ => Action::Write(rng.bytes(len as usize), Durability::of_fua(rng.once_in(8))),
        };
        Operation {
            offset,
            len,
            action,
        }
    }

    fn overlaps(&self, other: &Operation) -> bool {
        self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match &self.action {
            Action::Read => "read",
            Action::Write(_, Durability::Durable) => "write -f",
            Action::Write(..) => "write",
            Action::Zero(options) if options.space == Space::Release => "write -z -u",
            Action::Zero(_) => "write -z",
            Action::Discard => "discard",
        };
        write!(f, "{name} {} {}", self.offset, self.len)
    }
}

/// How an image is opened; drawn from the seed.
#[derive(Clone, Debug)]
pub struct How {
    page_cache: PageCache,
    aio: Aio,
    discard: DiscardPolicy,
}

impl How {
    /// Any of the ways.
    pub fn random(rng: &mut Rng) -> How {
        How {
            page_cache: if rng.once_in(2) {
                PageCache::Bypass
            } else {
                PageCache::Use
            },
            aio: if rng.once_in(3) {
                Aio::Threads
            } else {
                Aio::Auto
            },
            discard: if rng.once_in(4) {
                DiscardPolicy::Ignore
            } else {
                DiscardPolicy::Unmap
            },
        }
    }
}

/// Opens a qcow2 image for writing.
pub async fn open(path: &Path, how: &How) -> Image {
    let options = HostOptions {
        writable: true,
        create: CreateMode::OpenExisting,
        page_cache: how.page_cache,
        flush: FlushPolicy::Honour,
        aio: how.aio,
        ..HostOptions::default()
    };
    let file = open_host_file(path, &options).unwrap_or_else(|e| panic!("{e}"));
    let open = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        discard: how.discard,
        backing: BackingChoice::AsNamed,
        ..OpenOptions::default()
    };
    let gate = HostGate {
        options,
        ..HostGate::default()
    };
    Image::open(file, open, &gate)
        .await
        .unwrap_or_else(|e| panic!("{e}"))
}

/// Reads all windows and compares them with the model.
pub async fn verify(image: &Image, model: &Model) {
    assert_eq!(image.size(), model.disk_bytes, "the size of the disk");
    for (start, len) in model.ranges() {
        let bytes = read(image, start, len).await;
        let expected = model.get(start, len);
        if let Some(at) = first_difference(&bytes, expected) {
            let offset = start + at as u64;
            panic!(
                "reads {:#x} at {offset} ({offset:#x}), must be {:#x}",
                bytes[at], expected[at]
            );
        }
    }
}

/// The states of the windows' parts cover them, and what is said to be zero is.
pub async fn verify_extents(image: &Image, model: &Model) {
    for (start, len) in model.ranges() {
        let mut position = start;
        while position < start + len {
            let left = start + len - position;
            let extents = image
                .extents(position, left, 16)
                .await
                .unwrap_or_else(|e| panic!("extents {position} {left}: {e}"));
            assert!(!extents.is_empty(), "no extents at {position}");
            for extent in extents {
                assert_eq!(extent.start, position, "a gap in the extents");
                assert!(extent.len > 0, "an empty extent at {position}");
                position += extent.len;
                assert!(position <= start + len, "an extent beyond the range");
                let bytes = model.get(extent.start, extent.len);
                assert!(!extent.zero || is_zero(bytes), "{extent:?} is not zero");
            }
        }
    }
}

async fn read(image: &Image, offset: u64, len: u64) -> Vec<u8> {
    let buf = BufMut::zeroed(len as usize);
    match image.read(offset, buf).await {
        Ok(buf) => buf.to_vec(),
        Err(e) => panic!("read {offset} {len}: {e}"),
    }
}

/// Runs batches of operations, those of a batch at once, and lets the model follow.
pub async fn exercise(image: &Image, model: &mut Model, shape: &Shape, how: &How, rng: &mut Rng) {
    let batches = 12;
    for batch in 0..batches {
        let mut operations: Vec<Operation> = Vec::new();
        let depth = 1 + rng.below(10);
        for _ in 0..depth {
            let operation = Operation::random(model, shape, rng);
            if !operations.iter().any(|other| other.overlaps(&operation)) {
                operations.push(operation);
            }
        }
        for operation in &operations {
            eprintln!("  {batch}: {operation}");
        }
        join_all(operations.iter().map(|o| perform(image, model, o))).await;
        for operation in &operations {
            follow(image, model, shape, how, operation).await;
        }
        if rng.once_in(4) {
            eprintln!("  {batch}: flush");
            image.flush().await.unwrap_or_else(|e| panic!("flush: {e}"));
        }
    }
}

async fn perform(image: &Image, model: &Model, operation: &Operation) {
    let (offset, len) = (operation.offset, operation.len);
    let result = match &operation.action {
        Action::Read => {
            let bytes = read(image, offset, len).await;
            let difference = first_difference(&bytes, model.get(offset, len));
            assert_eq!(difference, None, "{operation}: differs at this byte of it");
            Ok(())
        }
        Action::Write(bytes, durability) => {
            image.write(offset, Buf::copy_of(bytes), *durability).await
        }
        Action::Zero(options) => image.write_zeroes(offset, len, *options).await,
        Action::Discard => image.discard(offset, len).await,
    };
    if let Err(e) = result {
        panic!("{operation}: {e}");
    }
}

async fn follow(image: &Image, model: &mut Model, shape: &Shape, how: &How, operation: &Operation) {
    let (offset, len) = (operation.offset, operation.len);
    match &operation.action {
        Action::Read => {}
        Action::Write(bytes, _) => model.set(offset, bytes),
        Action::Zero(_) => model.set(offset, &vec![0; len as usize]),
        Action::Discard => {
            let bytes = read(image, offset, len).await;
            check_discarded(&bytes, model.get(offset, len), offset, shape, how);
            model.set(offset, &bytes);
        }
    }
}

/// Bytes that are compared at a time.
const PIECE: usize = 4096;

fn is_zero(bytes: &[u8]) -> bool {
    bytes
        .chunks(PIECE)
        .all(|piece| *piece == [0; PIECE][..piece.len()])
}

/// A discarded byte is what it was or zero; in version 3 those of whole clusters are zero.
fn check_discarded(bytes: &[u8], before: &[u8], offset: u64, shape: &Shape, how: &How) {
    let end = offset + bytes.len() as u64;
    let whole = offset.next_multiple_of(shape.cluster_bytes)
        ..end / shape.cluster_bytes * shape.cluster_bytes;
    let frees = how.discard == DiscardPolicy::Unmap;
    let must_be_zero = shape.version == Version::V3 && frees;
    // Wholes are compared quickly without an optimiser too, bytes by themselves are not.
    let pieces = bytes.chunks(PIECE).zip(before.chunks(PIECE));
    for (start, (piece, old)) in (offset..).step_by(PIECE).zip(pieces) {
        let is_outside = start >= whole.end || start + piece.len() as u64 <= whole.start;
        let is_right = match is_zero(piece) {
            true => frees || piece == old,
            false => piece == old && (is_outside || !must_be_zero),
        };
        if is_right {
            continue;
        }
        for (position, (byte, old)) in (start..).zip(piece.iter().zip(old)) {
            let may_be = byte == old || (frees && *byte == 0);
            assert!(
                may_be,
                "a discard changed {position} from {old:#x} to {byte:#x}"
            );
            if must_be_zero && whole.contains(&position) {
                assert_eq!(*byte, 0, "a discarded cluster is not zero at {position}");
            }
        }
    }
}
