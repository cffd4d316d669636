//! Host files against a model in memory: both backends, every driver, with the page cache and
//! without; and the refusals at open.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cowslip::file::host::{
    Aio, CreateMode, FlushPolicy, HostGate, HostOptions, PageCache, open_host_file,
};
use cowslip::file::{AlignedFile, BlockFile, ChosenBy, Durability, FileRequest, Gate, Role, Space};
use cowslip::{Buf, BufMut, Error, IoVec, IoVecMut, SharedMemory};
use cowslip_block::random::Random;
use cowslip_queue::{Backend, Queue};

/// Small, seeded and good enough: xorshift.
fn writable() -> HostOptions {
    HostOptions {
        writable: true,
        create: CreateMode::Truncate,
        ..HostOptions::default()
    }
}

fn backends() -> Vec<Backend> {
    let all = [Backend::Uring, Backend::Threads];
    let works = |backend: &Backend| Queue::new(*backend).is_ok();
    let found: Vec<Backend> = all.into_iter().filter(works).collect();
    assert!(found.contains(&Backend::Threads));
    found
}

/// The directories that tests run in: the usual one, and memory where there is such a place.
fn scratch_dirs() -> Vec<tempfile::TempDir> {
    let mut dirs = vec![tempfile::tempdir().unwrap()];
    dirs.extend(tempfile::tempdir_in("/dev/shm").ok());
    dirs
}

/// Cuts a range of `len` bytes; with how far from aligned memory each part begins. Whole sectors
/// now and then, which direct I/O takes as they are.
fn pieces(random: &mut Random, len: usize) -> Vec<(usize, usize, usize)> {
    let unit = [1, 512, 4096][random.below(3) as usize];
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < len {
        let piece = (random.below(9000) as usize + 1).next_multiple_of(unit);
        let piece = piece.min(len - at);
        pieces.push((at, piece, random.below(3) as usize * unit));
        at += piece;
    }
    pieces
}

/// A host file beside the bytes that it should have.
struct Checked {
    file: Arc<dyn BlockFile>,
    model: Vec<u8>,
    unit: u64,
}

const MODEL_BYTES: u64 = 1 << 20;

impl Checked {
    fn grow(&mut self, end: u64) {
        if self.model.len() < end as usize {
            self.model.resize(end as usize, 0);
        }
    }

    fn range(&self, random: &mut Random) -> (u64, u64) {
        let units = MODEL_BYTES / self.unit;
        let len = match random.below(8) {
            0 => random.below(units / 2) + 1,
            _ => random.below(16) + 1,
        };
        let start = random.below(units - len);
        (start * self.unit, len * self.unit)
    }

    /// Either the file system does it, or it says that it does not.
    fn done(result: io::Result<()>) -> bool {
        match result {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::Unsupported => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn clear(&mut self, offset: u64, len: u64) {
        let end = self.model.len().min((offset + len) as usize);
        if let Some(part) = self.model.get_mut(offset as usize..end) {
            part.fill(0);
        }
    }

    async fn write(&mut self, random: &mut Random) {
        let (offset, len) = self.range(random);
        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        // As several segments that start and end anywhere in memory, ours or somebody else's.
        let mut list = IoVec::default();
        for (at, piece, skew) in pieces(random, bytes.len()) {
            let part = &bytes[at..at + piece];
            if random.below(2) == 0 {
                let mut buf = BufMut::zeroed(piece + skew);
                buf[skew..].copy_from_slice(part);
                list.append(buf.freeze().slice(skew, piece).into());
            } else {
                let memory = SharedMemory::new(piece + skew);
                memory.write(skew, part);
                list.append(IoVec::shared(&memory, skew..skew + piece));
            }
        }
        let durability = match random.below(4) {
            0 => Durability::Durable,
            _ => Durability::Cached,
        };
        let file = AlignedFile::new(Arc::clone(&self.file));
        file.write(offset, list, durability).await.unwrap();
        self.grow(offset + len);
        self.model[offset as usize..][..len as usize].copy_from_slice(&bytes);
    }

    async fn read(&mut self, random: &mut Random) {
        let (offset, len) = self.range(random);
        let mut list = IoVecMut::default();
        for (_, piece, skew) in pieces(random, len as usize) {
            if random.below(2) == 0 {
                let mut buf = BufMut::zeroed(piece + skew).split_off(skew);
                buf.fill(0xEE);
                list.append(buf.into());
            } else {
                let memory = SharedMemory::new(piece + skew);
                memory.write(0, &vec![0xEE; piece + skew]);
                list.append(IoVecMut::shared(&memory, skew..skew + piece));
            }
        }
        let file = AlignedFile::new(Arc::clone(&self.file));
        let buf = file.read(offset, list).await.unwrap().to_vec();
        let end = self.model.len().min((offset + len) as usize);
        let present = self.model.get(offset as usize..end).unwrap_or(&[]);
        assert!(&buf[..present.len()] == present, "{offset:#x}+{len:#x}");
        assert!(buf[present.len()..].iter().all(|byte| *byte == 0));
    }

    async fn shape(&mut self, random: &mut Random) {
        let (offset, len) = self.range(random);
        match random.below(4) {
            0 => {
                if Self::done(self.file.zero(offset, len, Space::Keep).await) {
                    self.clear(offset, len);
                    self.grow(offset + len);
                }
            }
            1 => {
                if Self::done(self.file.zero(offset, len, Space::Release).await) {
                    self.clear(offset, len);
                }
            }
            2 => {
                if Self::done(self.file.discard(offset, len).await) {
                    self.clear(offset, len);
                }
            }
            _ => {
                if Self::done(self.file.allocate(offset, len).await) {
                    self.grow(offset + len);
                }
            }
        }
    }

    async fn resize(&mut self, random: &mut Random) {
        let len = random.below(MODEL_BYTES / self.unit) * self.unit;
        self.file.set_len(len).await.unwrap();
        self.model.resize(len as usize, 0);
    }

    async fn check_extents(&self, random: &mut Random) {
        let (offset, len) = self.range(random);
        let mut at = offset;
        for extent in self.file.extents(offset, len).await.unwrap() {
            assert_eq!(extent.start, at, "extents follow each other");
            assert!(extent.len > 0);
            at += extent.len;
            let end = self.model.len().min(at as usize);
            let bytes = self.model.get(extent.start as usize..end).unwrap_or(&[]);
            if extent.hole {
                assert!(bytes.iter().all(|byte| *byte == 0), "holes are zeroes");
            } else {
                assert_eq!(end, at as usize, "no data beyond the end");
            }
        }
        assert_eq!(at, offset + len, "extents cover the range");
    }
}

fn run_model(path: &Path, options: &HostOptions, backend: Backend, seed: u64) {
    let queue = Queue::new(backend).unwrap();
    let file = match open_host_file(path, options) {
        Ok(file) => file,
        Err(Error::Unsupported { feature, .. }) => {
            eprintln!("{}: no {feature}", path.display());
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let unit = u64::from(file.capabilities().alignment_bytes).max(64);
    let mut checked = Checked {
        file,
        model: Vec::new(),
        unit,
    };
    let mut random = Random(seed);
    queue.block_on(async {
        for _ in 0..300 {
            match random.below(10) {
                0..4 => checked.write(&mut random).await,
                4..7 => checked.read(&mut random).await,
                7 => checked.shape(&mut random).await,
                8 => checked.check_extents(&mut random).await,
                _ if random.below(4) == 0 => checked.resize(&mut random).await,
                _ => checked.file.flush().await.unwrap(),
            }
            let len = checked.file.len().await.unwrap();
            assert_eq!(len, checked.model.len() as u64);
        }
    });
    assert!(fs::read(path).unwrap() == checked.model, "seed {seed}");
}

#[test]
fn random_operations_match_the_model() {
    for dir in scratch_dirs() {
        for backend in backends() {
            for aio in [Aio::Auto, Aio::Threads] {
                for page_cache in [PageCache::Use, PageCache::Bypass] {
                    let seed = 0x5EED_0001 + backend as u64 * 7 + aio as u64 * 3;
                    eprintln!("{backend:?} {aio:?} {page_cache:?} {:?}", dir.path());
                    let options = HostOptions {
                        aio,
                        page_cache,
                        ..writable()
                    };
                    run_model(&dir.path().join("model"), &options, backend, seed);
                }
            }
        }
    }
}

#[test]
fn many_operations_are_in_flight_at_once() {
    const BLOCK: usize = 4096;
    const BLOCKS: usize = 2000;
    let dir = tempfile::tempdir().unwrap();
    for backend in backends() {
        let queue = Queue::new(backend).unwrap();
        let file = open_host_file(&dir.path().join("many"), &writable()).unwrap();
        queue.block_on(async {
            let writes: Vec<_> = (0..BLOCKS)
                .map(|index| {
                    let data = Buf::from(vec![index as u8; BLOCK]);
                    file.write((index * BLOCK) as u64, data.into(), Durability::Cached)
                })
                .collect();
            for write in writes {
                write.await.unwrap();
            }
            let reads: Vec<_> = (0..BLOCKS)
                .map(|index| file.read((index * BLOCK) as u64, BufMut::zeroed(BLOCK).into()))
                .collect();
            for (index, read) in reads.into_iter().enumerate() {
                let (result, buf) = read.await;
                result.unwrap();
                assert!(buf.to_vec().iter().all(|byte| *byte == index as u8));
            }
        });
    }
}

#[test]
fn a_write_of_more_buffers_than_one_call_takes_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("scattered");
    for backend in backends() {
        for aio in [Aio::Auto, Aio::Threads] {
            let options = HostOptions { aio, ..writable() };
            let file = open_host_file(&path, &options).unwrap();
            let bufs = (0..3000u32).map(|n| Buf::copy_of(&n.to_le_bytes()));
            let write = file.write(5, bufs.collect(), Durability::Cached);
            Queue::new(backend).unwrap().block_on(write).unwrap();
            let expected: Vec<u8> = (0..3000u32).flat_map(u32::to_le_bytes).collect();
            assert!(fs::read(&path).unwrap()[5..] == expected);
        }
    }
}

#[test]
fn operations_run_without_a_queue_and_wake_a_foreign_waiter() {
    let dir = tempfile::tempdir().unwrap();
    let file = open_host_file(&dir.path().join("f"), &writable()).unwrap();
    let write = file.write(0, Buf::copy_of(b"hello").into(), Durability::Durable);
    let queue = Queue::new(Backend::Auto).unwrap();
    queue.block_on(write).unwrap();
    let read = file.read(0, BufMut::zeroed(8).into());
    let (result, buf) = queue.block_on(read);
    result.unwrap();
    assert_eq!(buf.to_vec(), b"hello\0\0\0");
}

#[test]
fn dropping_a_read_in_flight_frees_nothing_too_early() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, vec![0x55; 1 << 20]).unwrap();
    for backend in backends() {
        let queue = Queue::new(backend).unwrap();
        let file = open_host_file(&path, &HostOptions::default()).unwrap();
        queue.block_on(async {
            for round in 0..50u64 {
                // Issued and dropped before the queue has even submitted it to the kernel.
                drop(file.read(round * 4096, BufMut::zeroed(65536).into()));
                // A buffer that would reuse freed memory must not change.
                let canary = BufMut::zeroed(65536);
                let (result, buf) = file.read(1 << 20, BufMut::zeroed(65536).into()).await;
                result.unwrap();
                let buf = BufMut::from(buf);
                assert!(canary.iter().chain(buf.iter()).all(|byte| *byte == 0));
            }
        });
        // The file goes first, then the queue with what may still be in flight.
        queue.block_on(async { drop(file.read(0, BufMut::zeroed(1 << 20).into())) });
        drop(file);
        drop(queue);
    }
}

#[test]
fn many_queues_share_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shared");
    let file = open_host_file(&path, &writable()).unwrap();
    let threads: Vec<_> = (0..4u8)
        .map(|number| {
            let file = Arc::clone(&file);
            std::thread::spawn(move || {
                let queue = Queue::new(Backend::Auto).unwrap();
                queue.block_on(async {
                    for block in 0..100u64 {
                        let data = Buf::from(vec![number; 512]).into();
                        let offset = (block * 4 + u64::from(number)) * 512;
                        file.write(offset, data, Durability::Cached).await.unwrap();
                    }
                });
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let bytes = fs::read(&path).unwrap();
    for (index, block) in bytes.chunks(512).enumerate() {
        assert!(block.iter().all(|byte| usize::from(*byte) == index % 4));
    }
    assert_eq!(bytes.len(), 4 * 100 * 512);
}

fn refusal(path: &Path, options: &HostOptions) -> String {
    let result = open_host_file(path, options);
    result.expect_err("it must be refused").to_string()
}

#[test]
fn what_is_no_file_is_refused_in_the_systems_words() {
    let dir = tempfile::tempdir().unwrap();
    let read = HostOptions::default();
    let write = HostOptions {
        writable: true,
        ..read
    };
    let place = dir.path().display();
    let at = |name: &str| dir.path().join(name);
    let _socket = UnixListener::bind(at("socket")).unwrap();
    let fifo = std::process::Command::new("mkfifo")
        .arg(at("fifo"))
        .status();
    assert!(fifo.unwrap().success());
    let cases: [(PathBuf, &HostOptions, String); 6] = [
        (
            dir.path().into(),
            &read,
            format!("'file' driver requires '{place}' to be a regular file"),
        ),
        (
            dir.path().into(),
            &write,
            format!("Could not open '{place}': Is a directory"),
        ),
        (
            at("nobody"),
            &read,
            format!("Could not open '{place}/nobody': No such file or directory"),
        ),
        (
            at("socket"),
            &read,
            format!("Could not open '{place}/socket': No such device or address"),
        ),
        (
            at("fifo"),
            &read,
            format!("Could not open '{place}/fifo': Illegal seek"),
        ),
        (
            "/dev/null".into(),
            &read,
            "Could not open '/dev/null': Block device required".to_string(),
        ),
    ];
    for (path, options, expected) in cases {
        assert_eq!(refusal(&path, options), expected);
    }
}

#[test]
fn create_modes_do_what_they_say() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let with = |create| HostOptions {
        create,
        ..writable()
    };
    let text = refusal(&path, &with(CreateMode::OpenExisting));
    assert!(text.ends_with("No such file or directory"), "{text}");
    open_host_file(&path, &with(CreateMode::CreateNew)).unwrap();
    fs::write(&path, b"bytes").unwrap();
    let text = refusal(&path, &with(CreateMode::CreateNew));
    assert_eq!(
        text,
        format!("Could not create '{}': File exists", path.display())
    );
    open_host_file(&path, &with(CreateMode::OpenExisting)).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"bytes");
    open_host_file(&path, &with(CreateMode::Truncate)).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"");
}

#[test]
fn a_read_only_file_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, b"bytes").unwrap();
    let file = open_host_file(&path, &HostOptions::default()).unwrap();
    assert!(!file.capabilities().writable);
    let queue = Queue::new(Backend::Auto).unwrap();
    let write = file.write(0, Buf::copy_of(b"x").into(), Durability::Cached);
    assert!(queue.block_on(write).is_err());
    assert_eq!(fs::read(&path).unwrap(), b"bytes");
}

#[test]
fn opening_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, b"bytes").unwrap();
    let before = fs::metadata(&path).unwrap();
    for page_cache in [PageCache::Use, PageCache::Bypass] {
        let options = HostOptions {
            create: CreateMode::OpenExisting,
            page_cache,
            ..writable()
        };
        drop(open_host_file(&path, &options));
    }
    let after = fs::metadata(&path).unwrap();
    assert_eq!(before.mtime_nsec(), after.mtime_nsec());
    assert_eq!(before.ctime_nsec(), after.ctime_nsec());
}

#[test]
fn discarded_space_is_given_back_and_kept_space_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let options = HostOptions {
        flush: FlushPolicy::Ignore,
        ..writable()
    };
    let file = open_host_file(&path, &options).unwrap();
    let queue = Queue::new(Backend::Auto).unwrap();
    queue.block_on(async {
        let data = Buf::from(vec![1; 1 << 20]);
        file.write(0, data.into(), Durability::Durable)
            .await
            .unwrap();
        // `Ignore` holds back flushes, but delayed allocation must not blur what is counted.
        file.flush().await.unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        let full = file.allocated_bytes().expect("a regular file tells");
        assert!(full >= 1 << 20);
        if !file.capabilities().punches_holes {
            return;
        }
        file.discard(0, 512 << 10).await.unwrap();
        let half = file.allocated_bytes().unwrap();
        assert!(half <= full - (512 << 10), "{half} of {full}");
        if file.capabilities().zeroes_fast {
            file.zero(512 << 10, 512 << 10, Space::Keep).await.unwrap();
            assert_eq!(file.allocated_bytes().unwrap(), half);
        }
        let extents = file.extents(0, 1 << 20).await.unwrap();
        assert!(extents[0].hole && extents[0].len >= 512 << 10);
    });
}

#[test]
fn the_same_file_has_the_same_id_under_all_names() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("a"), b"").unwrap();
    fs::write(at("b"), b"").unwrap();
    fs::hard_link(at("a"), at("c")).unwrap();
    let id = |name: &str| {
        let file = open_host_file(&at(name), &HostOptions::default()).unwrap();
        file.id().expect("host files have one")
    };
    assert_eq!(id("a"), id("c"));
    assert_ne!(id("a"), id("b"));
}

#[test]
fn the_gate_opens_beside_the_image_and_only_files() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("base"), b"base").unwrap();
    let image = dir.path().join("overlay").display().to_string();
    let gate = HostGate::default();
    let open = |name: &str| {
        gate.open(&FileRequest {
            named_by: &image,
            name,
            role: Role::Backing,
            writable: false,
            chosen_by: ChosenBy::Image,
        })
    };
    let base = open("base").unwrap();
    assert_eq!(base.name(), dir.path().join("base").display().to_string());
    let text = open("nbd://somewhere/x").expect_err("no file").to_string();
    assert!(text.contains("protocol 'nbd'"), "{text}");
    let text = open("other").expect_err("not there").to_string();
    assert!(
        text.ends_with("other': No such file or directory"),
        "{text}"
    );
}
