//! cloud-hypervisor: a disk for its `block` crate. A queue thread of the virtual machine monitor
//! has an `AsyncIo`; its epoll loop watches the notifier and takes completions.
//!
//! The traits are those of `block` 0.1.0: `AsyncIo` of `io/async_io.rs`, and the capabilities of
//! `disk_file.rs`.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use cowslip::blocking::wait;
use cowslip::file::BlockFile;
use cowslip::image::{Durability, Space, ZeroOptions};
use cowslip::requests::{Completion, Operation, Request, RequestQueue};
use cowslip::{Disk, Image, IoVec, IoVecMut, SharedMemory};

/// `vmm_sys_util::eventfd::EventFd`.
#[derive(Debug)]
pub struct EventFd(File);

impl EventFd {
    /// Takes the events that there are.
    ///
    /// # Errors
    /// `WouldBlock` if there is none.
    pub fn read(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        (&self.0).read_exact(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Parts of a guest's memory, as `GuestMemoryTarget` keeps them for the time of an operation.
#[derive(Clone, Debug)]
pub struct GuestMemoryTarget {
    /// The memory.
    pub memory: Arc<SharedMemory>,
    /// Its parts, one after the other.
    pub ranges: Vec<Range<usize>>,
}

/// A read or a write, with its memory.
#[derive(Clone, Debug)]
pub struct AsyncIoOperation {
    /// Whether it reads from the disk.
    pub is_read: bool,
    /// First byte on the disk.
    pub offset: i64,
    /// Its memory.
    pub target: GuestMemoryTarget,
    /// Returned with the completion.
    pub user_data: u64,
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncIoCompletion {
    /// Of the operation.
    pub user_data: u64,
    /// Bytes that were transferred, or an error number, negative.
    pub result: i32,
}

/// The errors of `AsyncIo`, without those that cannot occur here.
#[derive(Debug)]
pub enum AsyncIoError {
    /// An operation could not be submitted.
    SubmitBatchRequests(io::Error),
    /// A flush failed.
    Fsync(io::Error),
}

/// Their result.
pub type AsyncIoResult<T> = Result<T, AsyncIoError>;

/// Requests of one virtio queue.
#[allow(missing_docs)] // cloud-hypervisor's own.
pub trait AsyncIo: Send {
    fn notifier(&self) -> &EventFd;
    fn submit_data_operation(&mut self, op: AsyncIoOperation) -> AsyncIoResult<()>;
    fn fsync(&mut self, user_data: Option<u64>) -> AsyncIoResult<()>;
    fn punch_hole(&mut self, offset: u64, length: u64, user_data: u64) -> AsyncIoResult<()>;
    fn write_zeroes(&mut self, offset: u64, length: u64, user_data: u64) -> AsyncIoResult<()>;
    fn next_completed_request(&mut self) -> Option<AsyncIoCompletion>;
    fn batch_requests_enabled(&self) -> bool;
    fn submit_batch_requests(&mut self, batch: Vec<AsyncIoOperation>) -> AsyncIoResult<()>;
    fn alignment(&self) -> u64;
}

/// Sectors and clusters as a guest is to know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskTopology {
    /// Bytes of a sector.
    pub logical_block_size: u64,
    /// Bytes that are best written together.
    pub physical_block_size: u64,
}

/// The capabilities of a disk file, of which cloud-hypervisor has a trait each.
#[allow(missing_docs)] // cloud-hypervisor's own.
pub trait AsyncFullDiskFile: Send + Sync + std::fmt::Debug {
    fn logical_size(&self) -> io::Result<u64>;
    fn physical_size(&self) -> io::Result<u64>;
    fn fd(&self) -> Option<RawFd>;
    fn topology(&self) -> DiskTopology;
    fn supports_sparse_operations(&self) -> bool;
    fn supports_zero_flag(&self) -> bool;
    fn resize(&mut self, size: u64) -> io::Result<()>;
    fn try_clone(&self) -> io::Result<Box<dyn AsyncFullDiskFile>>;
    fn create_async_io(&self, ring_depth: u32) -> io::Result<Box<dyn AsyncIo>>;
}

/// An image as a disk file.
#[derive(Clone, Debug)]
pub struct CowslipDisk {
    image: Arc<Image>,
    file: Arc<dyn BlockFile>,
}

impl CowslipDisk {
    /// A disk of an image, and the file that the image is in. For `punch_hole` to do something, the
    /// image is open with `DiscardPolicy::Unmap`.
    pub fn new(image: Arc<Image>, file: Arc<dyn BlockFile>) -> CowslipDisk {
        CowslipDisk { image, file }
    }
}

impl AsyncFullDiskFile for CowslipDisk {
    fn logical_size(&self) -> io::Result<u64> {
        Ok(self.image.size())
    }

    fn physical_size(&self) -> io::Result<u64> {
        match self.file.allocated_bytes() {
            Some(bytes) => Ok(bytes),
            None => wait(self.file.len()),
        }
    }

    /// For its locks. QEMU's byte locks are taken already, and do not meet those of the whole file.
    fn fd(&self) -> Option<RawFd> {
        self.file.descriptor().map(|fd| fd.as_raw_fd())
    }

    fn topology(&self) -> DiskTopology {
        DiskTopology {
            logical_block_size: 512,
            physical_block_size: self.image.preferred_block_bytes(),
        }
    }

    fn supports_sparse_operations(&self) -> bool {
        true
    }

    fn supports_zero_flag(&self) -> bool {
        true
    }

    fn resize(&mut self, size: u64) -> io::Result<()> {
        Ok(wait(self.image.resize(size))?)
    }

    fn try_clone(&self) -> io::Result<Box<dyn AsyncFullDiskFile>> {
        Ok(Box::new(self.clone()))
    }

    fn create_async_io(&self, _ring_depth: u32) -> io::Result<Box<dyn AsyncIo>> {
        Ok(Box::new(QueueIo::new(Arc::clone(&self.image) as _)?))
    }
}

/// The requests of one virtio queue. It may be made on any thread; the first that submits is its
/// own.
#[derive(Debug)]
pub struct QueueIo {
    queue: RequestQueue,
    notifier: EventFd,
    disk: Arc<dyn Disk>,
    done: VecDeque<Completion>,
}

impl QueueIo {
    fn new(disk: Arc<dyn Disk>) -> io::Result<QueueIo> {
        let queue = RequestQueue::new()?;
        let notifier = EventFd(queue.as_fd().try_clone_to_owned()?.into());
        Ok(QueueIo {
            queue,
            notifier,
            disk,
            done: VecDeque::new(),
        })
    }

    fn submit(&mut self, requests: impl IntoIterator<Item = Request>) -> AsyncIoResult<()> {
        let submitted = self.queue.submit(&self.disk, requests);
        submitted.map_err(AsyncIoError::SubmitBatchRequests)
    }
}

fn request(op: AsyncIoOperation) -> Request {
    let GuestMemoryTarget { memory, ranges } = op.target;
    let (offset, ranges) = (op.offset as u64, ranges.into_iter());
    let operation = match op.is_read {
        true => {
            let parts = ranges.map(|range| IoVecMut::shared(&memory, range));
            Operation::read(offset, parts.collect::<IoVecMut>())
        }
        false => {
            let parts = ranges.map(|range| IoVec::shared(&memory, range));
            Operation::write(offset, parts.collect::<IoVec>(), Durability::Cached)
        }
    };
    Request::new(op.user_data, operation)
}

impl AsyncIo for QueueIo {
    fn notifier(&self) -> &EventFd {
        &self.notifier
    }

    fn submit_data_operation(&mut self, op: AsyncIoOperation) -> AsyncIoResult<()> {
        self.submit([request(op)])
    }

    fn fsync(&mut self, user_data: Option<u64>) -> AsyncIoResult<()> {
        if let Some(user_data) = user_data {
            return self.submit([Request::new(user_data, Operation::Flush)]);
        }
        let disk = Arc::clone(&self.disk);
        let flushed = self.queue.wait_for(disk.flush());
        let flushed = flushed.and_then(|flushed| Ok(flushed?));
        flushed.map_err(AsyncIoError::Fsync)
    }

    fn punch_hole(&mut self, offset: u64, len: u64, user_data: u64) -> AsyncIoResult<()> {
        let discard = Operation::Discard { offset, len };
        self.submit([Request::new(user_data, discard)])
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, user_data: u64) -> AsyncIoResult<()> {
        let options = ZeroOptions {
            space: Space::Release,
            ..ZeroOptions::default()
        };
        let zero = Operation::Zero {
            offset,
            len,
            options,
        };
        self.submit([Request::new(user_data, zero)])
    }

    fn next_completed_request(&mut self) -> Option<AsyncIoCompletion> {
        if self.done.is_empty() {
            let mut batch = Vec::new();
            // The one error is that of another thread, which has submitted nothing.
            self.queue.complete(&mut batch).ok()?;
            self.done.extend(batch);
        }
        let next = self.done.pop_front()?;
        Some(AsyncIoCompletion {
            user_data: next.token,
            result: match next.result {
                Ok(()) => i32::try_from(next.byte_count).unwrap_or(i32::MAX),
                Err(error) => -error.errno(),
            },
        })
    }

    fn batch_requests_enabled(&self) -> bool {
        true
    }

    fn submit_batch_requests(&mut self, batch: Vec<AsyncIoOperation>) -> AsyncIoResult<()> {
        self.submit(batch.into_iter().map(request))
    }

    /// Requests of any alignment are taken.
    fn alignment(&self) -> u64 {
        1
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // Failing a test is a panic.
mod tests {
    use super::*;
    use crate::testing::{Ask, Model, SIZE, Scratch};

    /// Waits as an epoll loop does: for the notifier, which it reads.
    fn next(io: &mut dyn AsyncIo) -> AsyncIoCompletion {
        loop {
            if let Some(done) = io.next_completed_request() {
                return done;
            }
            let fd = io.notifier().as_fd().try_clone_to_owned().unwrap();
            async_io::block_on(async_io::Async::new(fd).unwrap().readable()).unwrap();
            drop(io.notifier().read());
        }
    }

    #[test]
    fn a_queue_of_a_machine_reads_and_writes_the_image() {
        let scratch = Scratch::new();
        let mut disk = CowslipDisk::new(Arc::clone(&scratch.image), Arc::clone(&scratch.file));
        assert_eq!(disk.logical_size().unwrap(), SIZE);
        assert!(disk.physical_size().unwrap() > 0 && disk.fd().is_some());
        assert!(disk.supports_sparse_operations() && disk.supports_zero_flag());
        assert_eq!(disk.topology().logical_block_size, 512);
        let io = disk.try_clone().unwrap().create_async_io(128).unwrap();
        let model = std::thread::spawn(move || machine(io)).join().unwrap();
        scratch.end(&model);
        let scratch = Scratch::new();
        disk = CowslipDisk::new(Arc::clone(&scratch.image), Arc::clone(&scratch.file));
        disk.resize(2 * SIZE).unwrap();
        assert_eq!(disk.logical_size().unwrap(), 2 * SIZE);
    }

    fn machine(mut io: Box<dyn AsyncIo>) -> Vec<u8> {
        let memory = SharedMemory::new(1 << 20);
        let mut model = Model::new(1, 512);
        for token in 0..300 {
            let operation = |is_read, offset, len: usize| AsyncIoOperation {
                is_read,
                offset,
                target: GuestMemoryTarget {
                    memory: Arc::clone(&memory),
                    ranges: vec![4096..4096 + len / 2, 512 << 10..(512 << 10) + len - len / 2],
                },
                user_data: token,
            };
            let ask = model.next();
            let expected = match &ask {
                &Ask::Read(offset, len) => {
                    let op = operation(true, offset as i64, len);
                    io.submit_data_operation(op).unwrap();
                    len as i32
                }
                Ask::Write(offset, bytes) => {
                    let (head, tail) = bytes.split_at(bytes.len() / 2);
                    memory.write(4096, head);
                    memory.write(512 << 10, tail);
                    let op = operation(false, *offset as i64, bytes.len());
                    io.submit_batch_requests(vec![op]).unwrap();
                    bytes.len() as i32
                }
                &Ask::Zero(offset, len) => {
                    io.write_zeroes(offset, len, token).unwrap();
                    len as i32
                }
                Ask::Flush => {
                    io.fsync(None).unwrap();
                    io.fsync(Some(token)).unwrap();
                    0
                }
            };
            let done = next(&mut *io);
            assert_eq!((done.user_data, done.result), (token, expected));
            if let Ask::Read(offset, len) = ask {
                let mut read = vec![0; len];
                let (head, tail) = read.split_at_mut(len / 2);
                memory.read(4096, head);
                memory.read(512 << 10, tail);
                model.check(offset, &read);
            }
        }
        io.punch_hole(SIZE, 512, 7).unwrap();
        assert_eq!(next(&mut *io).result, -5);
        io.punch_hole(0, 65536, 8).unwrap();
        assert_eq!(next(&mut *io).result, 65536);
        model.bytes[..65536].fill(0);
        model.bytes
    }
}
