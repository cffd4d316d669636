//! Zeroes and failures in a cluster whose space other writes still fill: what was written there before
//! must not come back with the next write.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use cowslip::file::memory::MemoryFile;
use cowslip::file::{
    BlockFile, Capabilities, Durability, FileExtent, FileId, FileRequest, Gate, Space,
};
use cowslip::image::{OpenOptions, WriteOptions, ZeroOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image};
use cowslip_queue::{Completer, Pending, pending};

/// Writes that begin with this byte wait until they are let go.
const HELD: u8 = 0xbb;
/// Writes that begin with this byte fail when they have been written, for want of space.
const FAILING: u8 = 0xee;

/// A write that waits.
type Waiting = (u64, Vec<Buf>, Completer<io::Result<()>>);

/// A file in memory on which some writes take as long as the test wants.
struct SlowFile {
    memory: MemoryFile,
    waiting: Mutex<Vec<Waiting>>,
}

impl std::fmt::Debug for SlowFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SlowFile")
    }
}

impl SlowFile {
    fn waiting(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }

    /// Carries out the writes that wait.
    fn let_go(&self) {
        for (offset, data, completer) in self.waiting.lock().unwrap().drain(..) {
            completer.complete(block_on(self.memory.write(
                offset,
                data,
                Durability::Cached,
            )));
        }
    }
}

impl BlockFile for SlowFile {
    fn name(&self) -> &str {
        self.memory.name()
    }
    fn capabilities(&self) -> &Capabilities {
        self.memory.capabilities()
    }
    fn id(&self) -> Option<FileId> {
        None
    }
    fn len(&self) -> Pending<io::Result<u64>> {
        self.memory.len()
    }
    fn read(&self, offset: u64, buf: BufMut) -> Pending<(io::Result<()>, BufMut)> {
        self.memory.read(offset, buf)
    }
    fn write(&self, offset: u64, data: Vec<Buf>, how: Durability) -> Pending<io::Result<()>> {
        let first = data[0].first().copied();
        if first != Some(HELD) {
            let done = self.memory.write(offset, data, how);
            return match first {
                Some(FAILING) => Pending::ready(Err(io::Error::from_raw_os_error(28))),
                _ => done,
            };
        }
        let (completer, result) = pending();
        self.waiting.lock().unwrap().push((offset, data, completer));
        result
    }
    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        self.memory.zero(offset, len, space)
    }
    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.memory.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.memory.allocate(offset, len)
    }
    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.memory.extents(offset, len)
    }
    fn flush(&self) -> Pending<io::Result<()>> {
        self.memory.flush()
    }
    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        self.memory.set_len(len)
    }
    fn allocated_bytes(&self) -> Option<u64> {
        self.memory.allocated_bytes()
    }
}

struct NoFiles;
impl Gate for NoFiles {
    fn open(&self, request: &FileRequest<'_>) -> cowslip::Result<Arc<dyn BlockFile>> {
        Err(Error::Invalid(format!("no {}", request.name)))
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..1000 {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
    panic!("a request waits for nothing");
}

const SUBCLUSTER: u64 = 2048;

/// An empty disk with subclusters of 2 KiB.
fn disk() -> (Arc<SlowFile>, Image) {
    let file = Arc::new(SlowFile {
        memory: MemoryFile::new("a.qcow2", Vec::new(), 1),
        waiting: Mutex::default(),
    });
    let create_options = CreateOptions {
        extended_l2: true,
        ..CreateOptions::new(1 << 20)
    };
    block_on(create(file.clone(), None, &create_options)).unwrap();
    let options = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let image = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
    (file, image)
}

fn write(
    image: &Image,
    offset: u64,
    len: u64,
    byte: u8,
) -> impl Future<Output = cowslip::Result<()>> {
    let data = Buf::copy_of(&vec![byte; len as usize]);
    image.write(offset, data, WriteOptions::default())
}

fn read(image: &Image, offset: u64, len: u64) -> Vec<u8> {
    block_on(image.read(offset, BufMut::zeroed(len as usize)))
        .unwrap()
        .to_vec()
}

#[test]
fn zeroed_subclusters_of_joint_space_do_not_show_what_was_written_before() {
    for may_unmap in [false, true] {
        let (file, image) = disk();
        // A slow write keeps the cluster's space joint.
        let mut slow = pin!(write(&image, 5 * SUBCLUSTER, 512, HELD));
        let mut context = Context::from_waker(Waker::noop());
        assert!(slow.as_mut().poll(&mut context).is_pending());
        assert_eq!(file.waiting(), 1);
        block_on(write(&image, 0, 2 * SUBCLUSTER, 0xaa)).unwrap();
        let zero = ZeroOptions {
            may_unmap,
            ..ZeroOptions::default()
        };
        block_on(image.write_zeroes(0, 2 * SUBCLUSTER, zero)).unwrap();
        assert_eq!(read(&image, 0, 2 * SUBCLUSTER), [0; 4096]);
        block_on(write(&image, 1024, 512, 0xcc)).unwrap();
        let mut expected = [0; 4096];
        expected[1024..1536].fill(0xcc);
        assert!(read(&image, 0, 2 * SUBCLUSTER) == expected);
        file.let_go();
        block_on(slow).unwrap();
        assert!(read(&image, 0, 2 * SUBCLUSTER) == expected);
        assert_eq!(read(&image, 5 * SUBCLUSTER, 512), [HELD; 512]);
        assert_eq!(read(&image, 5 * SUBCLUSTER + 512, 1536), [0; 1536]);
    }
}

#[test]
fn a_failed_write_into_joint_space_does_not_show_after_the_next() {
    let (file, image) = disk();
    let mut slow = pin!(write(&image, 5 * SUBCLUSTER, 512, HELD));
    let mut context = Context::from_waker(Waker::noop());
    assert!(slow.as_mut().poll(&mut context).is_pending());
    block_on(write(&image, 512, 512, FAILING)).unwrap_err();
    assert_eq!(read(&image, 0, SUBCLUSTER), [0; 2048]);
    block_on(write(&image, 1024, 512, 0xcc)).unwrap();
    let mut expected = [0; 2048];
    expected[1024..1536].fill(0xcc);
    assert!(read(&image, 0, SUBCLUSTER) == expected);
    file.let_go();
    block_on(slow).unwrap();
    assert!(read(&image, 0, SUBCLUSTER) == expected);
}

#[test]
fn zeroes_over_a_failed_write_stay_when_another_write_publishes_its_subcluster() {
    let (file, image) = disk();
    let mut slow = pin!(write(&image, 5 * SUBCLUSTER, 512, HELD));
    let mut context = Context::from_waker(Waker::noop());
    assert!(slow.as_mut().poll(&mut context).is_pending());
    block_on(write(&image, 5 * SUBCLUSTER + 512, 512, FAILING)).unwrap_err();
    // It waits for the slow write, which makes the failed one's bytes part of a mapped subcluster.
    let options = ZeroOptions::default();
    let mut zeroes = pin!(image.write_zeroes(5 * SUBCLUSTER + 512, 512, options));
    let early = zeroes.as_mut().poll(&mut context).is_ready();
    file.let_go();
    block_on(slow).unwrap();
    if !early {
        block_on(zeroes).unwrap();
    }
    assert_eq!(read(&image, 5 * SUBCLUSTER, 512), [HELD; 512]);
    assert!(read(&image, 5 * SUBCLUSTER + 512, 1536) == [0; 1536]);
}
