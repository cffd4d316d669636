//! Write-back on a file of which one write, or one flush, fails: what may be tried again, what
//! latches, and what the image holds afterwards.

mod counts;
mod cycle;
mod disk;
mod image;
mod latches;
mod marks;
mod space;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::task::{Context, Poll, Waker};

use cowslip_queue::{BufMut, IoVec, Pending};

use super::*;
use crate::check::{self, CheckOptions, Finding};
use crate::create::{CreateOptions, create};
use crate::errno::{EDQUOT, EIO, ENOSPC};
use crate::file::memory::MemoryFile;
use crate::file::{BlockFile, Durability, FileRequest, Gate};
use crate::options::OpenOptions;
use crate::policy::DiscardPolicy;

use image::Image;

/// The operation of a file that fails once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Write,
    Flush,
}

/// A file in memory of which one operation fails, without having done anything.
#[derive(Debug)]
struct Faulty {
    memory: MemoryFile,
    operation: Operation,
    errno: i32,
    /// Operations until the one that fails; negative if none will.
    left: AtomicI64,
}

impl Faulty {
    fn fails(&self, operation: Operation) -> io::Result<()> {
        if operation == self.operation && self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(io::Error::from_raw_os_error(self.errno));
        }
        Ok(())
    }

    fn has_failed(&self) -> bool {
        self.left.load(Ordering::Relaxed) < 0
    }
}

impl BlockFile for Faulty {
    cowslip_block::forward_to_file!(memory: name, capabilities, len, read, zero, discard, allocate, extents, set_len, allocated_bytes);

    fn write(&self, offset: u64, data: IoVec, how: Durability) -> Pending<io::Result<()>> {
        match self.fails(Operation::Write) {
            Ok(()) => self.memory.write(offset, data, how),
            error => Pending::ready(error),
        }
    }
    fn flush(&self) -> Pending<io::Result<()>> {
        match self.fails(Operation::Flush) {
            Ok(()) => self.memory.flush(),
            error => Pending::ready(error),
        }
    }
}

struct NoFiles;
impl Gate for NoFiles {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
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
    panic!("files in memory make nobody wait");
}

const CLUSTER: u64 = 4096;
const DISK: u64 = 4 << 20;

fn open(file: Arc<dyn BlockFile>) -> Image {
    let options = OpenOptions {
        writable: true,
        discard: DiscardPolicy::Unmap,
        ..OpenOptions::default()
    };
    block_on(Image::open(file, &options)).expect("the image is sound")
}

fn write(image: &Image, cluster: u64, byte: u8, guest: &mut [u8]) -> Result<()> {
    let data = vec![byte; CLUSTER as usize];
    guest[(cluster * CLUSTER) as usize..][..CLUSTER as usize].copy_from_slice(&data);
    let data = Buf::from(data);
    block_on(image.write(cluster * CLUSTER, data, Durability::Cached))
}

/// An image with all kinds of work for a cycle: entries that change in old tables, clusters freed,
/// clusters taken, new tables. The failure is `after` operations from there.
fn with_work(operation: Operation, errno: i32, after: i64) -> (Arc<Faulty>, Image, Vec<u8>) {
    let memory = Arc::new(MemoryFile::new("a.qcow2", Vec::new(), 1));
    let create_options = CreateOptions {
        cluster_size: CLUSTER,
        ..CreateOptions::new(DISK)
    };
    block_on(create(memory.clone(), None, &create_options)).expect("there is room");
    let mut guest = vec![0; DISK as usize];
    let image = open(memory.clone());
    for cluster in 0..8 {
        write(&image, cluster, 0xaa, &mut guest).expect("nothing fails yet");
    }
    block_on(image.close()).expect("nothing fails yet");
    let file = Arc::new(Faulty {
        memory: MemoryFile::new("a.qcow2", memory.contents(), 1),
        operation,
        errno,
        left: AtomicI64::new(i64::MAX),
    });
    let image = open(file.clone());
    block_on(image.discard(0, 4 * CLUSTER)).expect("nothing fails yet");
    guest[..4 * CLUSTER as usize].fill(0);
    // The first L2 table exists, and the second does not.
    for cluster in [9, 10, 600, 601] {
        write(&image, cluster, 0xbb, &mut guest).expect("nothing fails yet");
    }
    file.left.store(after, Ordering::Relaxed);
    (file, image, guest)
}

fn holds(image: &Image, guest: &[u8]) {
    let read = block_on(image.read(0, BufMut::zeroed(guest.len()))).expect("reads go on");
    assert!(read[..] == *guest, "the guest reads what it has written");
}

/// Corruptions and leaks.
fn faults(bytes: Vec<u8>) -> (u64, u64) {
    let header = Header::parse(&bytes[..512], u64::MAX, "a.qcow2").expect("the header is whole");
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::read_only("a.qcow2", bytes));
    let mut findings: Vec<Finding> = Vec::new();
    let options = CheckOptions::default();
    let result = block_on(check::check_with_header(
        &file,
        &header,
        &options,
        &mut findings,
    ));
    let result = result.expect("it can be read");
    assert_eq!(result.check_errors, 0);
    (result.corruptions, result.leaks)
}

/// Without space nothing is lost, wherever in the cycle it is missing: the next flush does all of
/// it, and no cluster is leaked.
#[test]
fn a_flush_that_finds_no_space_may_be_tried_again() {
    let mut failed = 0;
    for errno in [ENOSPC, EDQUOT] {
        for after in 0.. {
            let (file, image, mut guest) = with_work(Operation::Write, errno, after);
            let flushed = block_on(image.flush());
            if !file.has_failed() {
                flushed.expect("nothing has failed");
                break;
            }
            failed += i32::from(flushed.is_err());
            holds(&image, &guest);
            write(&image, 20, 0xcc, &mut guest).expect("a retry may succeed");
            block_on(image.flush()).expect("there is space now");
            block_on(image.close()).expect("there is space now");
            let bytes = file.memory.contents();
            assert_eq!(faults(bytes.clone()), (0, 0), "after {after} writes");
            holds(
                &open(Arc::new(MemoryFile::new("a.qcow2", bytes, 1))),
                &guest,
            );
        }
    }
    assert!(failed >= 8, "only {failed} flushes fail");
}

/// Any other failure of a write of metadata ends writing; what is on disk stays sound.
#[test]
fn a_write_of_metadata_that_fails_latches_the_image() {
    for after in 0.. {
        let (file, image, guest) = with_work(Operation::Write, EIO, after);
        let flushed = block_on(image.flush());
        if !file.has_failed() {
            flushed.expect("nothing has failed");
            assert!(after >= 4, "a cycle has several writes");
            break;
        }
        write(&image, 20, 0xcc, &mut guest.clone()).expect_err("it is latched");
        block_on(image.flush()).expect_err("it is latched");
        holds(&image, &guest);
        assert_eq!(faults(file.memory.contents()).0, 0, "after {after} writes");
    }
}

/// Data that a failed flush should have covered may be lost, whatever the error.
#[test]
fn a_flush_of_the_file_that_fails_latches_the_image() {
    for errno in [EIO, ENOSPC, EDQUOT] {
        for after in 0..2 {
            let (file, image, guest) = with_work(Operation::Flush, errno, after);
            block_on(image.flush()).expect_err("it has failed");
            assert!(file.has_failed());
            write(&image, 20, 0xcc, &mut guest.clone()).expect_err("it is latched");
            block_on(image.flush()).expect_err("the next would succeed without the bytes");
            holds(&image, &guest);
        }
    }
}

/// Neighbours go down in one write, and the bytes are those of a table written entry by entry.
#[test]
fn entries_are_written_where_they_belong() {
    let entries = [
        (0, 0x11),
        (1, 0x22),
        (5, 0x33),
        (7, 0x44),
        (8, 0x55),
        (9, 0x66),
    ];
    let mut expected = [0u8; 1024];
    for (index, entry) in entries {
        expected[512 + 8 * index as usize..][..8].copy_from_slice(&u64::to_be_bytes(entry));
    }
    let writes = entry_writes(512, &entries);
    assert_eq!(writes.len(), 3);
    let mut table = [0u8; 1024];
    for (offset, data) in writes {
        let mut at = offset as usize;
        for buf in data {
            table[at..at + buf.len()].copy_from_slice(&buf);
            at += buf.len();
        }
    }
    assert!(table == expected);
}
