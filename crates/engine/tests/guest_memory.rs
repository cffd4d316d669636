//! Requests over memory of a guest, as scatter lists of any shape, against a model of the disk:
//! each kind of image, each way that bytes take through the engine. The guest uses its memory for
//! something else as soon as a request has ended, and in one test while it goes on.

use std::sync::Arc;

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, FileRequest, Gate};
use cowslip::image::{CopyOnRead, DetectZeroes, Durability, OpenOptions};
use cowslip::limits::Limits;
use cowslip::luks::Passphrase;
use cowslip::qcow2::create::{CreateOptions, Encryption, create};
use cowslip::{Buf, BufMut, Error, Image, IoVec, IoVecMut, Result, SharedMemory};
use cowslip_block::random::Random;

use crate::keys;
use crate::support::block_on;
use crate::support::slow::{HELD, SlowFile};

const SIZE: usize = 1 << 20;
const LATER: u8 = 0xD7;

/// The files of a chain.
struct Files(Vec<(&'static str, Arc<MemoryFile>)>);

impl Gate for Files {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        let found = self.0.iter().find(|(name, _)| *name == request.name);
        match found {
            Some((_, file)) => Ok(file.clone()),
            None => Err(Error::Invalid(format!("no '{}'", request.name))),
        }
    }
}

/// A guest's memory, of which requests have segments here and there.
struct Guest {
    memory: Arc<SharedMemory>,
    random: Random,
}

impl Guest {
    fn new(seed: u64) -> Guest {
        Guest {
            memory: SharedMemory::new(2 * SIZE),
            random: Random(seed + 1),
        }
    }

    /// Disjoint segments for a request of this length, in no order.
    fn segments(&mut self, len: usize) -> Vec<(usize, usize)> {
        let unit = [1, 512, 4096][self.random.below(3) as usize];
        let mut cuts = vec![0, len];
        for _ in 0..self.random.below(7) {
            cuts.push(self.random.below(len as u64 + 1) as usize / unit * unit);
        }
        cuts.sort_unstable();
        let lens: Vec<usize> = cuts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mut order: Vec<usize> = (0..lens.len()).collect();
        let turn = self.random.below(lens.len() as u64) as usize;
        order.rotate_left(turn);
        let mut segments = vec![(0, 0); lens.len()];
        let mut at = 0;
        for index in order {
            at += self.random.below(9000) as usize / unit * unit;
            segments[index] = (at, lens[index]);
            at += lens[index];
        }
        segments
    }

    fn write(&mut self, image: &Image, offset: usize, bytes: &[u8]) {
        let mut list = IoVec::default();
        let mut from = 0;
        for (at, len) in self.segments(bytes.len()) {
            self.memory.write(at, &bytes[from..from + len]);
            list.append(IoVec::shared(&self.memory, at..at + len));
            from += len;
        }
        let fua = self.random.below(4) == 0;
        block_on(image.write(offset as u64, list, Durability::of_fua(fua))).unwrap();
        self.memory.write(0, &vec![LATER; self.memory.len()]);
    }

    fn read(&mut self, image: &Image, offset: usize, len: usize) -> Vec<u8> {
        let segments = self.segments(len);
        let list: IoVecMut = segments
            .iter()
            .map(|&(at, len)| IoVecMut::shared(&self.memory, at..at + len))
            .collect();
        self.memory.write(0, &vec![LATER; self.memory.len()]);
        let list = block_on(image.read(offset as u64, list)).unwrap();
        let mut bytes = vec![0; len];
        let mut from = 0;
        for (at, len) in segments {
            self.memory.read(at, &mut bytes[from..from + len]);
            from += len;
        }
        assert_eq!(list.to_vec(), bytes, "the list comes back");
        // Nothing else of the guest's memory was touched.
        drop(list);
        bytes
    }
}

/// Bytes of a request: data, zeroes, or clusters of both.
fn bytes(random: &mut Random, len: usize) -> Vec<u8> {
    let kind = random.below(4);
    let mut bytes = vec![0; len];
    for (at, byte) in bytes.iter_mut().enumerate() {
        let is_data = match kind {
            0 => false,
            1 => (at / 4096) % 2 == 0,
            _ => true,
        };
        if is_data {
            // Some compresses well, some not at all.
            *byte = match kind {
                3 => random.below(256) as u8,
                _ => (at / 100) as u8 | 1,
            };
        }
    }
    bytes
}

fn judge(made: &CreateOptions, options: &OpenOptions, alignment: u32, seed: u64) {
    let base_bytes: Vec<u8> = (0..SIZE / 2).map(|at| (at / 512) as u8).collect();
    let base = Arc::new(MemoryFile::new("base", base_bytes.clone(), alignment));
    let file = Arc::new(MemoryFile::new("image", Vec::new(), alignment));
    let files = Files(vec![("base", base)]);
    block_on(create(file.clone(), None, made)).unwrap();
    let mut model = vec![0; SIZE];
    if made.backing_file.is_some() {
        model[..SIZE / 2].copy_from_slice(&base_bytes);
    }
    let mut guest = Guest::new(seed);
    for _ in 0..2 {
        let image = block_on(Image::open(file.clone(), options.clone(), &files)).unwrap();
        for step in 0..60 {
            let offset = guest.random.below(SIZE as u64 - 1) as usize;
            let longest = [4096, 20_000, 200_000][guest.random.below(3) as usize];
            let len = 1 + guest.random.below((SIZE - offset).min(longest) as u64) as usize;
            // Also what needs nothing of the clusters' rest.
            let (offset, len) = match guest.random.below(3) {
                0 if len > 8192 => (offset / 4096 * 4096, len / 4096 * 4096),
                _ => (offset, len),
            };
            if guest.random.below(2) == 0 {
                let bytes = bytes(&mut guest.random, len);
                guest.write(&image, offset, &bytes);
                model[offset..offset + len].copy_from_slice(&bytes);
            } else {
                let read = guest.read(&image, offset, len);
                assert!(read == model[offset..offset + len], "{seed} {step}");
            }
        }
        let all = block_on(image.read(0, BufMut::zeroed(SIZE))).unwrap();
        assert!(all[..] == model[..], "{seed}: by a buffer");
        assert!(guest.read(&image, 0, SIZE) == model, "{seed}: by a list");
        block_on(image.close()).unwrap();
    }
}

fn writable() -> OpenOptions {
    OpenOptions {
        writable: true,
        cache_bytes: 4 * 4096,
        passphrase: Some(Passphrase::new(b"a".to_vec())),
        ..OpenOptions::default()
    }
}

fn judge_all(made: &CreateOptions, options: &OpenOptions) {
    for alignment in [1, 512, 4096] {
        for seed in 0..4 {
            judge(made, options, alignment, seed);
        }
    }
}

fn small_clusters() -> CreateOptions {
    CreateOptions {
        cluster_size: 8192,
        ..CreateOptions::new(SIZE as u64)
    }
}

#[test]
fn plain_images_hold_what_a_guests_lists_have() {
    judge_all(&small_clusters(), &writable());
    let limits = Limits {
        transfer_max: 16 << 10,
        ..Limits::default()
    };
    let options = OpenOptions {
        limits,
        detect_zeroes: DetectZeroes::On,
        ..writable()
    };
    judge_all(&small_clusters(), &options);
}

#[test]
fn encrypted_images_hold_what_a_guests_lists_have() {
    let made = CreateOptions {
        encryption: Some(Encryption::Luks(Box::new(keys::volume()))),
        ..small_clusters()
    };
    judge_all(&made, &writable());
}

#[test]
fn compressed_images_hold_what_a_guests_lists_have() {
    let options = OpenOptions {
        compress: true,
        ..writable()
    };
    judge_all(&small_clusters(), &options);
}

#[test]
fn subclusters_hold_what_a_guests_lists_have() {
    let made = CreateOptions {
        cluster_size: 64 << 10,
        extended_l2: true,
        ..CreateOptions::new(SIZE as u64)
    };
    let options = OpenOptions {
        detect_zeroes: DetectZeroes::On,
        ..writable()
    };
    judge_all(&made, &options);
}

#[test]
fn chains_hold_what_a_guests_lists_have() {
    let made = CreateOptions {
        backing_file: Some("base".to_string()),
        backing_format: Some("raw".to_string()),
        ..small_clusters()
    };
    judge_all(&made, &writable());
    let options = OpenOptions {
        copy_on_read: CopyOnRead::All,
        ..writable()
    };
    judge_all(&made, &options);
}

/// A write that is under way keeps the guest's memory, also when nobody waits for it any more.
#[test]
fn a_dropped_write_keeps_a_guests_memory_until_it_has_ended() {
    let file = SlowFile::new(vec![0; 4096]);
    let options = OpenOptions {
        format: Some(cowslip::image::Format::Raw),
        writable: true,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(file.clone(), options, &Files(Vec::new()))).unwrap();
    let memory = SharedMemory::new(512);
    memory.write(0, &[HELD; 512]);
    let list = IoVec::shared(&memory, 0..512);
    let mut write = Box::pin(image.write(0, list, Durability::Cached));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(write.as_mut().poll(&mut context).is_pending());
    drop(write);
    assert_eq!(file.waiting(), 1);
    assert_eq!(Arc::strong_count(&memory), 2, "the file has it");
    // The disk receives the content of the memory at that moment.
    memory.write(0, b"changed meanwhile");
    file.let_go();
    assert_eq!(Arc::strong_count(&memory), 1);
    assert!(file.memory.contents().starts_with(b"changed meanwhile"));
}

/// A guest that changes a header under the engine's hands gets no other one onto the disk than that
/// which was examined.
#[test]
fn a_guessed_disk_keeps_what_was_examined() {
    let file = SlowFile::new(vec![7; 4096]);
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(file.clone(), options, &Files(Vec::new()))).unwrap();
    let memory = SharedMemory::new(1024);
    memory.write(0, &[HELD; 1024]);
    let list = IoVec::shared(&memory, 0..1024);
    let mut write = Box::pin(image.write(0, list, Durability::Cached));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(write.as_mut().poll(&mut context).is_pending());
    memory.write(0, b"QFI\xfb\0\0\0\x03");
    file.let_go();
    block_on(write).unwrap();
    assert_eq!(file.memory.contents()[..1024], [HELD; 1024]);
    let refused = image.write(0, IoVec::shared(&memory, 0..1024), Durability::Cached);
    assert!(block_on(refused).is_err(), "by then it is a header");
    assert_eq!(
        block_on(image.read(0, BufMut::zeroed(8))).unwrap()[..],
        [HELD; 8]
    );
    let whole = Buf::copy_of(&[1; 512]);
    block_on(image.write(0, whole, Durability::Cached)).unwrap();
}
