//! Submit and complete: requests of an event loop against a model of the disk, on a qcow2 image in
//! a file, with a ring and without.

use std::os::fd::AsFd;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cowslip::file::host::{CreateMode, HostGate, HostOptions, host_file_of, open_host_file};
use cowslip::image::{Durability, OpenOptions, ZeroOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::requests::{Completion, Operation, Request, RequestQueue};
use cowslip::{Buf, BufMut, Disk, Error, Image, IoVec, IoVecMut, SharedMemory};
use cowslip_block::disk::{DiskFuture, Extent, Features};
use cowslip_block::random::Random;
use cowslip_queue::{Backend, PreparedQueue, block_here};
use rustix::event::{PollFd, PollFlags};

use crate::support::slow::{HELD, NoFiles, SlowFile};

pub const SIZE: u64 = 4 << 20;
/// Bytes of the pieces in which requests lie, so that those in flight do not overlap.
const PIECE: u64 = 16 << 10;
const WRITABLE: HostOptions = HostOptions {
    writable: true,
    create: CreateMode::OpenExisting,
    page_cache: cowslip::file::host::PageCache::Use,
    flush: cowslip::file::host::FlushPolicy::Honour,
    aio: cowslip::file::host::Aio::Auto,
    locking: cowslip::file::host::Locking::Auto,
    driver: cowslip::file::host::Driver::Unsaid,
};

/// Makes an image, and opens it over a descriptor that was opened elsewhere.
pub fn open(path: &Path) -> Arc<Image> {
    block_here(async {
        let made = HostOptions {
            create: CreateMode::CreateNew,
            ..WRITABLE
        };
        let file = open_host_file(path, &made).unwrap();
        create(file, None, &CreateOptions::new(SIZE)).await.unwrap();
        let mut passed = std::fs::OpenOptions::new();
        let passed = passed.read(true).write(true).open(path).unwrap();
        let file = host_file_of(passed.into(), "passed", &WRITABLE).unwrap();
        let options = OpenOptions {
            writable: true,
            ..OpenOptions::default()
        };
        let image = Image::open(file, options, &HostGate::default()).await;
        Arc::new(image.unwrap())
    })
}

fn queues() -> Vec<RequestQueue> {
    let of = |backend| PreparedQueue::new(backend).unwrap();
    vec![
        RequestQueue::new().unwrap(),
        RequestQueue::with(of(Backend::Auto)).unwrap(),
        RequestQueue::with(of(Backend::Threads)).unwrap(),
        RequestQueue::with(of(Backend::Threads).without_threads()).unwrap(),
    ]
}

fn is_readable(queue: &RequestQueue) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default())).unwrap() == 1
}

/// Follows the descriptor until nothing is in flight.
fn all(queue: &mut RequestQueue) -> Vec<Completion> {
    let mut batch = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(Some(Duration::from_secs(20))).unwrap();
        assert!(is_readable(queue), "the descriptor was never readable");
        queue.complete(&mut batch).unwrap();
    }
    batch
}

/// A guest: its memory, the disk that it expects, and the requests of one batch.
struct Guest {
    random: Random,
    memory: Arc<SharedMemory>,
    model: Vec<u8>,
    /// Pieces without a request in this batch.
    free: Vec<u64>,
    /// Reads, as token, offset and length; their memory begins at the offset.
    reads: Vec<(u64, u64, u64)>,
}

impl Guest {
    fn new(seed: u64) -> Guest {
        Guest {
            random: Random(seed),
            memory: SharedMemory::new(2 * SIZE as usize),
            model: vec![0; SIZE as usize],
            free: Vec::new(),
            reads: Vec::new(),
        }
    }

    fn batch(&mut self, first: u64) -> Vec<Request> {
        self.free = (0..SIZE / PIECE).collect();
        self.reads.clear();
        let count = 1 + self.random.below(48);
        (first..first + count)
            .map(|token| Request::new(token, self.operation(token)))
            .collect()
    }

    fn operation(&mut self, token: u64) -> Operation {
        let piece = self.random.below(self.free.len() as u64) as usize;
        let piece = self.free.swap_remove(piece) * PIECE;
        let start = self.random.below(PIECE);
        let len = 1 + self.random.below(PIECE - start);
        let offset = piece + start;
        let range = offset as usize..(offset + len) as usize;
        match self.random.below(10) {
            0..4 => {
                self.reads.push((token, offset, len));
                Operation::read(offset, IoVecMut::shared(&self.memory, range))
            }
            4..8 => {
                let bytes: Vec<u8> = range
                    .clone()
                    .map(|_| self.random.below(256) as u8)
                    .collect();
                self.model[range.clone()].copy_from_slice(&bytes);
                let at = SIZE as usize + range.start;
                self.memory.write(at, &bytes);
                let list = IoVec::shared(&self.memory, at..at + bytes.len());
                let durable = self.random.below(8) == 0;
                Operation::write(offset, list, Durability::of_fua(durable))
            }
            8 => {
                self.model[range].fill(0);
                let options = ZeroOptions::default();
                Operation::Zero {
                    offset,
                    len,
                    options,
                }
            }
            _ => Operation::Flush,
        }
    }

    fn check(&self, batch: &[Completion]) {
        for completion in batch {
            assert!(completion.result.is_ok(), "{completion:?}");
            assert!(completion.byte_count <= PIECE);
        }
        for &(token, offset, len) in &self.reads {
            let completion = batch.iter().find(|one| one.token == token).unwrap();
            let target = completion.target.as_ref().unwrap();
            assert_eq!(completion.byte_count, len);
            let range = offset as usize..(offset + len) as usize;
            assert_eq!(target.to_vec(), self.model[range], "{offset:#x}+{len:#x}");
        }
    }
}

#[test]
fn requests_of_a_loop_do_what_the_model_does() {
    for (seed, mut queue) in queues().into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let image = open(&dir.path().join("disk"));
        let disk: Arc<dyn Disk> = image.clone();
        let mut guest = Guest::new(seed as u64 + 1);
        assert!(!is_readable(&queue));
        for round in 0..24 {
            let requests = guest.batch(round * 100);
            let count = requests.len();
            queue.submit(&disk, requests).unwrap();
            let batch = all(&mut queue);
            assert_eq!(batch.len(), count);
            guest.check(&batch);
            // A turn more, for what the kernel counted meanwhile: then it is quiet.
            assert_eq!(queue.complete(&mut Vec::new()).unwrap(), 0);
            assert!(!is_readable(&queue), "nothing is to be done");
        }
        queue.wait_for(image.close()).unwrap().unwrap();
    }
}

#[test]
fn several_threads_with_a_queue_each_share_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let image = open(&dir.path().join("disk"));
    std::thread::scope(|scope| {
        for (index, queue) in queues().into_iter().enumerate() {
            let disk: Arc<dyn Disk> = image.clone();
            scope.spawn(move || {
                // Made elsewhere, it belongs to the thread that submits first.
                let mut queue = queue;
                for round in 0..20u64 {
                    let at = |piece: u64| (piece * 4 + index as u64) * 4096;
                    let data = || Buf::copy_of(&[round as u8 + index as u8; 4096]);
                    let write = |piece| Operation::write(at(piece), data(), Durability::Cached);
                    let writes = (0..64).map(|piece| Request::new(piece, write(piece)));
                    queue.submit(&disk, writes).unwrap();
                    assert!(all(&mut queue).iter().all(|one| one.result.is_ok()));
                    let read = |piece| Operation::read(at(piece), BufMut::zeroed(4096));
                    let reads = (0..64).map(|piece| Request::new(piece, read(piece)));
                    queue.submit(&disk, reads).unwrap();
                    for completion in all(&mut queue) {
                        let bytes = completion.target.unwrap().to_vec();
                        assert_eq!(bytes, [round as u8 + index as u8; 4096]);
                    }
                }
            });
        }
    });
    block_here(image.close()).unwrap();
}

#[test]
fn errors_are_completions_with_a_number_for_guests() {
    let mut queue = RequestQueue::new().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let image = open(&dir.path().join("disk"));
    let disk: Arc<dyn Disk> = image.clone();
    let beyond = Operation::read(SIZE, BufMut::zeroed(1));
    queue.submit(&disk, [Request::new(7, beyond)]).unwrap();
    let batch = all(&mut queue);
    assert_eq!(batch[0].token, 7);
    assert_eq!(batch[0].result.as_ref().unwrap_err().errno(), 5);
    let twice = [
        Request::new(1, Operation::Flush),
        Request::new(1, Operation::Flush),
    ];
    let refused = queue.submit(&disk, twice).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::AlreadyExists);
    assert_eq!(all(&mut queue).len(), 1);
    block_here(image.close()).unwrap();
}

/// An image whose file ends some requests only when it is let go.
fn slow() -> (Arc<SlowFile>, Arc<Image>) {
    let file = SlowFile::new(Vec::new());
    let image = block_here(async {
        let options = CreateOptions::new(SIZE);
        create(file.clone(), None, &options).await.unwrap();
        let options = OpenOptions {
            writable: true,
            ..OpenOptions::default()
        };
        let image = Image::open(file.clone(), options, &NoFiles).await;
        let image = image.unwrap();
        let data = Buf::copy_of(&[5; 65536]);
        image.write(0, data, Durability::Cached).await.unwrap();
        image.flush().await.unwrap();
        image
    });
    (file, Arc::new(image))
}

#[test]
fn a_read_is_given_up_and_a_write_is_not() {
    let mut queue = RequestQueue::new().unwrap();
    let (file, image) = slow();
    let disk: Arc<dyn Disk> = image.clone();
    let memory = SharedMemory::new(8192);
    file.hold_reads(true);
    let read = Operation::read(0, IoVecMut::shared(&memory, 0..4096));
    let write = Operation::write(4096, Buf::copy_of(&[HELD; 4096]), Durability::Cached);
    let both = [Request::new(1, read), Request::new(2, write)];
    queue.submit(&disk, both).unwrap();
    assert_eq!((file.waiting_reads(), file.waiting()), (1, 1));
    assert!(!is_readable(&queue));
    assert!(queue.cancel(1).unwrap());
    assert!(!queue.cancel(1).unwrap(), "it has ended");
    assert!(!queue.cancel(2).unwrap(), "it may have changed the disk");
    assert!(is_readable(&queue));
    let mut batch = Vec::new();
    assert_eq!(queue.complete(&mut batch).unwrap(), 1);
    assert_eq!(batch[0].token, 1);
    assert!(matches!(batch[0].result, Err(Error::Cancelled)));
    assert_eq!(Arc::strong_count(&memory), 2, "the read still has it");
    file.hold_reads(false);
    file.let_reads_go();
    assert_eq!(Arc::strong_count(&memory), 1);
    file.let_go();
    let ended = queue.next_completion().unwrap().unwrap();
    assert!(ended.token == 2 && ended.result.is_ok());
    assert!(queue.next_completion().unwrap().is_none());
    let bytes = block_here(image.read(4096, BufMut::zeroed(1))).unwrap();
    assert_eq!(bytes[..], [HELD]);
    block_here(image.close()).unwrap();
}

#[test]
fn dropping_a_queue_gives_up_reads_and_waits_for_writes() {
    let (file, image) = slow();
    let disk: Arc<dyn Disk> = image.clone();
    let memory = SharedMemory::new(8192);
    file.hold_reads(true);
    let mut queue = RequestQueue::new().unwrap();
    let read = Operation::read(0, IoVecMut::shared(&memory, 0..4096));
    let write = Operation::write(4096, Buf::copy_of(&[HELD; 4096]), Durability::Cached);
    let both = [Request::new(1, read), Request::new(2, write)];
    queue.submit(&disk, both).unwrap();
    let other = {
        let file = Arc::clone(&file);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            file.let_go();
        })
    };
    drop(queue);
    assert_eq!(file.waiting(), 0, "the write has ended");
    other.join().unwrap();
    file.hold_reads(false);
    file.let_reads_go();
    let bytes = block_here(image.read(4096, BufMut::zeroed(4096))).unwrap();
    assert_eq!(bytes[..], [HELD; 4096]);
    block_here(image.close()).unwrap();
}

/// A disk whose requests panic, at once or after they have waited.
#[derive(Debug)]
struct Panicking;

impl Disk for Panicking {
    fn name(&self) -> &str {
        "panicking"
    }

    fn size(&self) -> u64 {
        SIZE
    }

    fn features(&self) -> Features {
        Features {
            writable: true,
            preferred_block_bytes: 4096,
        }
    }

    fn read(&self, _: u64, _: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        panic!("as planned")
    }

    fn write(&self, _: u64, _: IoVec, _: Durability) -> DiskFuture<'_, ()> {
        Box::pin(async {
            cowslip_queue::yield_now().await;
            panic!("as planned")
        })
    }

    fn extents(&self, _: u64, _: u64, _: usize) -> DiskFuture<'_, Vec<Extent>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

#[test]
fn a_request_that_panics_ends() {
    let panicking: Arc<dyn Disk> = Arc::new(Panicking);
    for mut queue in queues() {
        let read = Operation::read(0, BufMut::zeroed(512));
        let write = Operation::write(0, Buf::copy_of(&[1; 512]), Durability::Cached);
        let mut ended = Vec::new();
        for request in [Request::new(1, read), Request::new(2, write)] {
            let (token, queue) = (request.token, &mut queue);
            let panicked = std::panic::catch_unwind(AssertUnwindSafe(|| {
                queue.submit(&panicking, [request]).unwrap();
                queue.complete(&mut Vec::new()).unwrap();
            }));
            assert!(panicked.is_err(), "request {token}");
            queue.complete(&mut ended).unwrap();
        }
        let tokens: Vec<u64> = ended.iter().map(|completion| completion.token).collect();
        assert_eq!(tokens, [1, 2]);
        assert!(ended.iter().all(|completion| completion.result.is_err()));
        // Its drop waits for what is in flight: nothing.
        assert_eq!(queue.in_flight(), 0);
    }
}

#[test]
fn a_queue_belongs_to_the_thread_that_submits_first() {
    let dir = tempfile::tempdir().unwrap();
    let image = open(&dir.path().join("disk"));
    let disk: Arc<dyn Disk> = image.clone();
    let mut queue = RequestQueue::new().unwrap();
    queue.submit(&disk, []).unwrap();
    let queue = std::thread::spawn(move || {
        assert!(
            queue
                .submit(&disk, [Request::new(1, Operation::Flush)])
                .is_err()
        );
        assert!(queue.complete(&mut Vec::new()).is_err());
        queue
    });
    assert_eq!(queue.join().unwrap().in_flight(), 0);
    block_here(image.close()).unwrap();
}

/// Names of this process's threads, but for those that the kernel has for its rings.
fn threads() -> Vec<String> {
    let names = std::fs::read_dir("/proc/self/task").unwrap();
    names
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
        .filter(|name| !name.starts_with("iou-"))
        .collect()
}

/// By a process of its own: the other tests have threads.
#[test]
fn no_thread_is_started() {
    const ALONE: &str = "COWSLIP_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "requests::no_thread_is_started"]);
        let output = alone.env(ALONE, "1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let before = threads();
    let dir = tempfile::tempdir().unwrap();
    let image = open(&dir.path().join("disk"));
    let disk: Arc<dyn Disk> = image.clone();
    for backend in [Backend::Auto, Backend::Threads] {
        let queue = PreparedQueue::new(backend).unwrap().without_threads();
        let mut queue = RequestQueue::with(queue).unwrap();
        let mut guest = Guest::new(9);
        for round in 0..10 {
            queue.submit(&disk, guest.batch(round * 100)).unwrap();
            all(&mut queue);
        }
        queue
            .wait_for(image.resize(image.size() + SIZE))
            .unwrap()
            .unwrap();
        queue
            .wait_for(image.extents(0, SIZE, 100))
            .unwrap()
            .unwrap();
    }
    block_here(image.close()).unwrap();
    assert_eq!(threads(), before);
}
