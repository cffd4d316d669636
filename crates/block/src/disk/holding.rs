//! [`HoldingDisk`]: a disk in memory whose requests wait until they are let go, for tests.

use cowslip_queue::{Completer, IoVecMut, pending};

use super::{Disk, DiskFuture, MemoryDisk};
use crate::sync::{Mutex, lock};

/// A disk in memory whose flushes wait until they are let go, and its reads if that is wanted.
pub struct HoldingDisk {
    inner: MemoryDisk,
    holds_reads: bool,
    /// Requests that wait; `None` when they are let go.
    held: Mutex<Option<Vec<Completer<()>>>>,
}

crate::debug_by_name!(HoldingDisk);

impl HoldingDisk {
    /// A disk of `size` zeroes.
    pub fn new(size: u64, holds_reads: bool) -> HoldingDisk {
        HoldingDisk {
            inner: MemoryDisk::new("disk", size),
            holds_reads,
            held: Mutex::new(Some(Vec::new())),
        }
    }

    /// Number of requests that wait.
    pub fn held(&self) -> usize {
        lock(&self.held).as_ref().map_or(0, Vec::len)
    }

    /// Lets requests go on, those that wait and those to come.
    pub fn let_go(&self) {
        let held = lock(&self.held).take();
        for completer in held.into_iter().flatten() {
            completer.complete(());
        }
    }

    async fn pass(&self) {
        let waits = lock(&self.held).as_mut().map(|held| {
            let (completer, waits) = pending();
            held.push(completer);
            waits
        });
        if let Some(waits) = waits {
            waits.await;
        }
    }
}

impl Disk for HoldingDisk {
    crate::forward_to_disk!(inner: name, size, features, extents);

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        Box::pin(async move {
            if self.holds_reads {
                self.pass().await;
            }
            self.inner.read(offset, buf).await
        })
    }

    fn flush(&self) -> DiskFuture<'_, ()> {
        Box::pin(async move {
            self.pass().await;
            self.inner.flush().await
        })
    }
}
