//! [`Threaded`]: a disk whose requests run on threads that the caller has asked for, each with a
//! ring of its own, whichever thread polls them.
//!
//! For executors whose tasks move between threads, such as tokio's of several threads: a ring
//! belongs to one thread, so a request that starts on one and goes on at another has none. Polled
//! there without this, a disk leaves its file operations to the pool of `cowslip-queue`, whose
//! threads make the system calls one by one.
//!
//! ```
//! # fn main() -> cowslip::Result<()> {
//! use std::sync::Arc;
//! use std::time::Duration;
//! use cowslip::threaded::Threaded;
//! use cowslip::{BufMut, Disk};
//! use cowslip_queue::Threads;
//!
//! # let image = cowslip::disk::MemoryDisk::new("disk", 1 << 20);
//! let threads = Threads::new("disk", 2, Duration::ZERO)
//!     .map_err(|error| cowslip::Error::io("threads", error))?;
//! let disk = Threaded::new(Arc::new(image), threads);
//! let read = disk.read(0, BufMut::zeroed(512).into()); // to be awaited anywhere
//! # assert!(cowslip::blocking::wait(read).is_ok());
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cowslip_block::disk::{Disk, DiskFuture, Extent, ZeroOptions};
use cowslip_block::file::Durability;
use cowslip_queue::{IoVec, IoVecMut, Threads, pending};

use crate::requests::Operation;
use crate::sync::{Mutex, lock};
use crate::{Error, Result};

/// A disk on threads of its own. A request that is begun runs to its end, even if its future is
/// dropped; dropping the disk lets the threads finish and end.
pub struct Threaded {
    disk: Arc<dyn Disk>,
    threads: Mutex<Threads>,
    count: usize,
    next: AtomicUsize,
}

impl fmt::Debug for Threaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Threaded({:?} on {})", self.disk, self.count)
    }
}

impl Threaded {
    /// A disk whose requests go to these threads, in turn.
    pub fn new(disk: Arc<dyn Disk>, threads: Threads) -> Threaded {
        Threaded {
            disk,
            count: threads.count(),
            threads: Mutex::new(threads),
            next: AtomicUsize::new(0),
        }
    }

    /// Begins a request on the next thread.
    fn pass<T, F>(&self, run: impl FnOnce(Arc<dyn Disk>) -> F + Send + 'static) -> DiskFuture<'_, T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        let (completer, result) = pending();
        let disk = Arc::clone(&self.disk);
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let begun = lock(&self.threads).run(index, move || async move {
            completer.complete(run(disk).await);
        });
        Box::pin(async move {
            begun
                .map_err(|error| Error::io(format!("Could not reach '{}'", self.name()), error))?;
            result.await
        })
    }

    fn operate(&self, operation: Operation) -> DiskFuture<'_, Option<IoVecMut>> {
        self.pass(|disk| async move { operation.run(&*disk).await })
    }

    fn change(&self, operation: Operation) -> DiskFuture<'_, ()> {
        let changing = self.operate(operation);
        Box::pin(async move { changing.await.map(drop) })
    }
}

impl Disk for Threaded {
    cowslip_block::forward_to_disk!(disk: name, size, features);

    fn read(&self, offset: u64, target: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        let reading = self.operate(Operation::Read { offset, target });
        Box::pin(async move { Ok(reading.await?.unwrap_or_default()) })
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> DiskFuture<'_, ()> {
        self.change(Operation::write(offset, data, durability))
    }

    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        self.change(Operation::Zero {
            offset,
            len,
            options,
        })
    }

    fn allocate(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        self.change(Operation::Allocate { offset, len })
    }

    fn discard(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        self.change(Operation::Discard { offset, len })
    }

    fn flush(&self) -> DiskFuture<'_, ()> {
        self.change(Operation::Flush)
    }

    fn write_back(&self) -> DiskFuture<'_, ()> {
        self.pass(|disk| async move { disk.write_back().await })
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<Extent>> {
        self.pass(move |disk| async move { disk.extents(offset, len, max).await })
    }
}
