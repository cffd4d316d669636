//! Executors of others as drivers of a ring: each watches the descriptor of a
//! [`Reactor`] and calls [`Reactor::turn`] when it is readable. Futures that are polled within the
//! reactor ([`Reactor::within`]) then use its ring, on an executor whose tasks stay on one thread.
//!
//! These loops never end by themselves; they are dropped with the task that runs them.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use cowslip_queue::Reactor;
use tokio::io::unix::AsyncFd;

/// Drives a ring from a task of tokio on the ring's thread: of a current-thread runtime, or of a
/// `LocalSet`.
///
/// # Errors
/// The system's refusal.
pub async fn drive_by_tokio(reactor: &Reactor) -> io::Result<()> {
    #[allow(deprecated)] // Its replacement is unsafe; a descriptor of one's own stays open.
    let descriptor = AsyncFd::new(reactor.as_fd().try_clone_to_owned()?)?;
    loop {
        let left = reactor.turn().unwrap_or(Duration::MAX);
        // An end of the time is a turn, too.
        if let Ok(ready) = tokio::time::timeout(left, descriptor.readable()).await {
            ready?.clear_ready();
        }
    }
}

/// Drives a ring from a task of smol, or of any executor beside `async-io`, on the ring's thread.
///
/// # Errors
/// The system's refusal.
pub async fn drive_by_smol(reactor: &Reactor) -> io::Result<()> {
    let descriptor = async_io::Async::new(reactor.as_fd().try_clone_to_owned()?)?;
    loop {
        reactor.turn();
        descriptor.readable().await?;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // Failing a test is a panic.
mod tests {
    use super::*;
    use crate::testing::{Ask, Model, Scratch};
    use cowslip::image::{Durability, ZeroOptions};
    use cowslip::{Buf, BufMut, Image};
    use cowslip_queue::{Backend, Queue};
    use std::future::poll_fn;
    use std::pin::pin;
    use std::rc::Rc;
    use std::task::Poll;

    /// Requests of a task, with the library's futures.
    async fn machine(image: &Image) -> Vec<u8> {
        let mut model = Model::new(4, 1);
        for _ in 0..300 {
            match model.next() {
                Ask::Read(offset, len) => {
                    let read = image.read(offset, BufMut::zeroed(len)).await.unwrap();
                    model.check(offset, &read);
                }
                Ask::Write(offset, bytes) => {
                    let data = Buf::copy_of(&bytes);
                    let written = image.write(offset, data, Durability::Cached);
                    written.await.unwrap();
                }
                Ask::Zero(offset, len) => {
                    let options = ZeroOptions::default();
                    image.write_zeroes(offset, len, options).await.unwrap();
                }
                Ask::Flush => image.flush().await.unwrap(),
            }
        }
        model.bytes
    }

    #[test]
    fn tokio_drives_a_ring_on_its_thread() {
        let scratch = Scratch::new();
        let runtime = { tokio::runtime::Builder::new_current_thread() }
            .enable_all()
            .build()
            .unwrap();
        let model = runtime.block_on(tokio::task::LocalSet::new().run_until(async {
            let reactor = Rc::new(Reactor::new(Backend::Auto).unwrap());
            let driven = Rc::clone(&reactor);
            let driver = tokio::task::spawn_local(async move {
                drive_by_tokio(&driven).await.unwrap();
            });
            let model = reactor.within(machine(&scratch.image)).await;
            driver.abort();
            model
        }));
        scratch.end(&model);
    }

    #[test]
    fn tokio_on_several_threads_leaves_files_to_the_pool() {
        let scratch = Scratch::new();
        let image = scratch.image.clone();
        let runtime = { tokio::runtime::Builder::new_multi_thread() }
            .worker_threads(2)
            .build()
            .unwrap();
        let model = runtime.block_on(async {
            tokio::spawn(async move { machine(&image).await })
                .await
                .unwrap()
        });
        drop(runtime);
        scratch.end(&model);
    }

    #[test]
    fn smol_drives_a_ring_on_its_thread() {
        let scratch = Scratch::new();
        let reactor = Reactor::new(Backend::Auto).unwrap();
        let model = async_io::block_on(async {
            let mut driver = pin!(drive_by_smol(&reactor));
            let mut machine = pin!(reactor.within(machine(&scratch.image)));
            // Either may make progress by what woke the other.
            poll_fn(|cx| {
                if let Poll::Ready(ended) = driver.as_mut().poll(cx) {
                    ended.unwrap();
                }
                machine.as_mut().poll(cx)
            })
            .await
        });
        scratch.end(&model);
    }

    #[test]
    fn our_own_queue_needs_no_driver() {
        let scratch = Scratch::new();
        let queue = Queue::new(Backend::Auto).unwrap();
        let model = queue.block_on(machine(&scratch.image));
        drop(queue);
        scratch.end(&model);
    }
}
