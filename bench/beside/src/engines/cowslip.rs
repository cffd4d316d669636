//! Ours: futures with a ring, which tokio drives, and blocking calls.

use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use cowslip::blocking::BlockingDisk;
use cowslip::file::host::{HostGate, HostOptions, PageCache, open_host_file};
use cowslip::image::{Durability, Format, OpenOptions};
use cowslip::{Buf, BufMut, Image};
use cowslip_queue::{Backend, Reactor};
use tokio::io::unix::AsyncFd;

use super::{Engine, run_on_tokio};

/// Futures, each thread with a ring.
pub struct Cowslip(Image);

/// Calls that block.
pub struct CowslipBlocking(BlockingDisk<Image>);

async fn open(path: &Path, direct: bool) -> Image {
    let host = HostOptions {
        writable: true,
        page_cache: match direct {
            true => PageCache::Bypass,
            false => PageCache::Use,
        },
        ..HostOptions::default()
    };
    let file = open_host_file(path, &host).expect("the image's file");
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        ..OpenOptions::default()
    };
    let gate = HostGate {
        options: host,
        ..HostGate::default()
    };
    Image::open(file, options, &gate).await.expect("an image")
}

/// Turns the ring whenever its descriptor is readable.
async fn drive(reactor: &Reactor) {
    #[allow(deprecated)] // Its replacement is unsafe; a descriptor of one's own stays open.
    let descriptor = reactor.as_fd().try_clone_to_owned().map(AsyncFd::new);
    let descriptor = descriptor.flatten().expect("a descriptor");
    loop {
        let left = reactor.turn().unwrap_or(Duration::MAX);
        if let Ok(ready) = tokio::time::timeout(left, descriptor.readable()).await {
            ready.expect("readiness").clear_ready();
        }
    }
}

impl Engine for Cowslip {
    fn run<T>(future: impl Future<Output = T>) -> T {
        run_on_tokio(tokio::task::LocalSet::new().run_until(async {
            let reactor = Rc::new(Reactor::new(Backend::Auto).expect("a ring"));
            let driven = Rc::clone(&reactor);
            let driver = tokio::task::spawn_local(async move { drive(&driven).await });
            let result = reactor.within(future).await;
            driver.abort();
            result
        }))
    }

    async fn open(path: &Path, direct: bool) -> Cowslip {
        Cowslip(open(path, direct).await)
    }

    async fn read(&self, offset: u64, target: BufMut) -> BufMut {
        self.0.read(offset, target).await.expect("a read")
    }

    async fn write(&self, offset: u64, data: Buf) {
        let written = self.0.write(offset, data, Durability::Cached);
        written.await.expect("a write");
    }

    async fn flush(&self) {
        self.0.flush().await.expect("a flush");
    }

    async fn close(self) {
        self.0.close().await.expect("the end");
    }
}

impl Engine for CowslipBlocking {
    fn run<T>(future: impl Future<Output = T>) -> T {
        cowslip::blocking::wait(future)
    }

    async fn open(path: &Path, direct: bool) -> CowslipBlocking {
        CowslipBlocking(BlockingDisk::from(Arc::new(open(path, direct).await)))
    }

    async fn read(&self, offset: u64, mut target: BufMut) -> BufMut {
        self.0.read_at(&mut target, offset).expect("a read");
        target
    }

    async fn write(&self, offset: u64, data: Buf) {
        self.0.write_at(&data, offset).expect("a write");
    }

    async fn flush(&self) {
        self.0.flush().expect("a flush");
    }

    async fn close(self) {
        self.0.disk().close().await.expect("the end");
    }
}
