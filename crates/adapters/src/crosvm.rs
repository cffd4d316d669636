//! crosvm: `AsyncDisk` of its crate `disk`. Its futures stay on the thread of crosvm's executor
//! (`cros_async`), so a ring of ours belongs to that thread: a task of the executor drives it, and
//! requests are polled within it.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use cowslip::blocking::wait;
use cowslip::image::{Durability, Space, ZeroOptions};
use cowslip::{Image, IoVec, IoVecMut, SharedMemory};
use cowslip_queue::{Backend, Reactor};

/// A future of `async_trait(?Send)`.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The part of crosvm's executor that an adapter needs: tasks, and waits for a descriptor.
pub trait Executor {
    /// Runs a task beside the others of the thread.
    fn spawn_local(&self, task: LocalFuture<'static, ()>);

    /// Waits until a descriptor is readable, again and again: `EventAsync` there.
    ///
    /// # Errors
    /// The system's refusal.
    fn watch(&self, fd: OwnedFd) -> io::Result<Box<dyn Readable>>;
}

/// A descriptor that an executor watches.
pub trait Readable {
    /// Waits until it is readable.
    fn readable(&self) -> LocalFuture<'_, io::Result<()>>;
}

/// Memory of a guest, as `BackingMemory` gives it out.
pub type BackingMemory = Arc<SharedMemory>;

/// A disk of crosvm.
#[allow(missing_docs)] // crosvm's own.
pub trait AsyncDisk {
    fn get_len(&self) -> io::Result<u64>;
    fn set_len(&self, len: u64) -> io::Result<()>;
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()>;
    fn flush(&self) -> LocalFuture<'_, io::Result<()>>;
    fn fsync(&self) -> LocalFuture<'_, io::Result<()>>;
    fn fdatasync(&self) -> LocalFuture<'_, io::Result<()>>;
    fn read_to_mem<'a>(
        &'a self,
        file_offset: u64,
        mem: BackingMemory,
        mem_offsets: &'a [Range<usize>],
    ) -> LocalFuture<'a, io::Result<usize>>;
    fn write_from_mem<'a>(
        &'a self,
        file_offset: u64,
        mem: BackingMemory,
        mem_offsets: &'a [Range<usize>],
    ) -> LocalFuture<'a, io::Result<usize>>;
    fn punch_hole(&self, file_offset: u64, length: u64) -> LocalFuture<'_, io::Result<()>>;
    fn write_zeroes_at(&self, file_offset: u64, length: u64) -> LocalFuture<'_, io::Result<()>>;
}

/// A disk that goes to a queue's thread, and becomes an [`AsyncDisk`] there.
#[allow(missing_docs)] // crosvm's own.
pub trait ToAsyncDisk {
    fn to_async_disk(self: Box<Self>, ex: &dyn Executor) -> io::Result<Box<dyn AsyncDisk>>;
}

/// An image for crosvm.
#[derive(Debug)]
pub struct CowslipDisk {
    /// The image, which several queues may share.
    pub image: Arc<Image>,
}

impl ToAsyncDisk for CowslipDisk {
    fn to_async_disk(self: Box<Self>, ex: &dyn Executor) -> io::Result<Box<dyn AsyncDisk>> {
        let reactor = Rc::new(Reactor::new(Backend::Auto)?);
        let watched = ex.watch(reactor.as_fd().try_clone_to_owned()?)?;
        let driven = Rc::downgrade(&reactor);
        // Ends when the disk is gone: that makes its descriptor readable a last time.
        ex.spawn_local(Box::pin(async move {
            while let Some(reactor) = driven.upgrade() {
                reactor.turn();
                drop(reactor);
                if watched.readable().await.is_err() {
                    return;
                }
            }
        }));
        let image = self.image;
        Ok(Box::new(QueueDisk { image, reactor }))
    }
}

/// An image on the thread of a queue.
struct QueueDisk {
    image: Arc<Image>,
    reactor: Rc<Reactor>,
}

impl Drop for QueueDisk {
    fn drop(&mut self) {
        self.reactor.signal();
    }
}

impl QueueDisk {
    /// A request within the ring of this thread.
    fn request<'a, T: 'a>(
        &'a self,
        request: impl Future<Output = cowslip::Result<T>> + 'a,
    ) -> LocalFuture<'a, io::Result<T>> {
        Box::pin(async move { Ok(self.reactor.within(request).await?) })
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> LocalFuture<'_, io::Result<()>> {
        let options = ZeroOptions {
            space,
            ..ZeroOptions::default()
        };
        self.request(self.image.write_zeroes(offset, len, options))
    }
}

impl AsyncDisk for QueueDisk {
    fn get_len(&self) -> io::Result<u64> {
        Ok(self.image.size())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        Ok(wait(self.image.resize(len))?)
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        Ok(wait(self.image.allocate(offset, len))?)
    }

    /// Nothing is kept back from the system but metadata.
    fn flush(&self) -> LocalFuture<'_, io::Result<()>> {
        self.request(self.image.write_back())
    }

    fn fsync(&self) -> LocalFuture<'_, io::Result<()>> {
        self.request(self.image.flush())
    }

    fn fdatasync(&self) -> LocalFuture<'_, io::Result<()>> {
        self.request(self.image.flush())
    }

    fn read_to_mem<'a>(
        &'a self,
        file_offset: u64,
        mem: BackingMemory,
        mem_offsets: &'a [Range<usize>],
    ) -> LocalFuture<'a, io::Result<usize>> {
        let parts = mem_offsets.iter().cloned();
        let target: IoVecMut = parts.map(|range| IoVecMut::shared(&mem, range)).collect();
        self.request(async move { Ok(self.image.read(file_offset, target).await?.len()) })
    }

    fn write_from_mem<'a>(
        &'a self,
        file_offset: u64,
        mem: BackingMemory,
        mem_offsets: &'a [Range<usize>],
    ) -> LocalFuture<'a, io::Result<usize>> {
        let parts = mem_offsets.iter().cloned();
        let data: IoVec = parts.map(|range| IoVec::shared(&mem, range)).collect();
        let len = data.len();
        self.request(async move {
            let written = self.image.write(file_offset, data, Durability::Cached);
            written.await.map(|()| len)
        })
    }

    fn punch_hole(&self, file_offset: u64, length: u64) -> LocalFuture<'_, io::Result<()>> {
        self.zero(file_offset, length, Space::Release)
    }

    fn write_zeroes_at(&self, file_offset: u64, length: u64) -> LocalFuture<'_, io::Result<()>> {
        self.zero(file_offset, length, Space::Keep)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // Failing a test is a panic.
mod tests {
    use super::*;
    use crate::testing::{Ask, Model, SIZE, Scratch, read_halves};
    use tokio::io::unix::AsyncFd;

    /// In place of crosvm's executor: the local tasks of tokio.
    struct LocalTasks;

    struct Watched(AsyncFd<OwnedFd>);

    impl Executor for LocalTasks {
        fn spawn_local(&self, task: LocalFuture<'static, ()>) {
            drop(tokio::task::spawn_local(task));
        }

        fn watch(&self, fd: OwnedFd) -> io::Result<Box<dyn Readable>> {
            #[allow(deprecated)] // Its replacement is unsafe; an owned descriptor stays open.
            let watched = AsyncFd::new(fd)?;
            Ok(Box::new(Watched(watched)))
        }
    }

    impl Readable for Watched {
        fn readable(&self) -> LocalFuture<'_, io::Result<()>> {
            Box::pin(async {
                self.0.readable().await?.clear_ready();
                Ok(())
            })
        }
    }

    async fn machine(disk: Box<dyn AsyncDisk>) -> Vec<u8> {
        let memory = SharedMemory::new(1 << 18);
        let mut model = Model::new(6, 512);
        for round in 0..300 {
            match model.next() {
                Ask::Read(offset, len) => {
                    let parts = [0..len / 2, 1 << 17..(1 << 17) + len - len / 2];
                    let read = disk.read_to_mem(offset, Arc::clone(&memory), &parts);
                    assert_eq!(read.await.unwrap(), len);
                    model.check(offset, &read_halves(&memory, len));
                }
                Ask::Write(offset, bytes) => {
                    memory.write(64, &bytes);
                    let part = 64..64 + bytes.len();
                    let parts = std::slice::from_ref(&part);
                    let written = disk.write_from_mem(offset, Arc::clone(&memory), parts);
                    assert_eq!(written.await.unwrap(), bytes.len());
                }
                Ask::Zero(offset, len) if round % 2 == 0 => {
                    disk.punch_hole(offset, len).await.unwrap();
                }
                Ask::Zero(offset, len) => disk.write_zeroes_at(offset, len).await.unwrap(),
                Ask::Flush => {
                    disk.flush().await.unwrap();
                    disk.fsync().await.unwrap();
                    disk.fdatasync().await.unwrap();
                }
            }
        }
        disk.allocate(0, 4096).unwrap();
        assert_eq!(disk.get_len().unwrap(), SIZE);
        assert!(disk.set_len(SIZE + 1).is_err(), "a disk has whole sectors");
        model.bytes
    }

    #[test]
    fn a_queue_on_an_executor_reads_and_writes_the_image() {
        let scratch = Scratch::new();
        let disk = Box::new(CowslipDisk {
            image: Arc::clone(&scratch.image),
        });
        let runtime = { tokio::runtime::Builder::new_current_thread() }
            .enable_all()
            .build()
            .unwrap();
        let model = runtime.block_on(
            tokio::task::LocalSet::new()
                .run_until(async { machine(disk.to_async_disk(&LocalTasks).unwrap()).await }),
        );
        scratch.end(&model);
    }
}
