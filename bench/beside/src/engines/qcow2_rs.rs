//! qcow2-rs: on tokio-uring, and with its files that block. An image belongs to one thread.

use std::path::Path;

use cowslip_queue::{Buf, BufMut};
use qcow2_rs::dev::{Qcow2Dev, Qcow2DevParams};
use qcow2_rs::ops::Qcow2IoOps;
use qcow2_rs::qcow2_default_params;
use qcow2_rs::sync_io::Qcow2IoSync;
use qcow2_rs::uring::Qcow2IoUring;
use qcow2_rs::utils::{qcow2_setup_dev_sync, qcow2_setup_dev_uring};

use super::{Engine, run_here};

/// On tokio-uring.
pub struct Qcow2Rs(Qcow2Dev<Qcow2IoUring>);

/// By a thread that waits.
pub struct Qcow2RsBlocking(Qcow2Dev<Qcow2IoSync>);

async fn read<T: Qcow2IoOps>(image: &Qcow2Dev<T>, offset: u64, mut target: BufMut) -> BufMut {
    let read = image.read_at(&mut target, offset).await.expect("a read");
    assert_eq!(read, target.len(), "all of it is read");
    target
}

async fn flush<T: Qcow2IoOps>(image: &Qcow2Dev<T>) {
    image.flush_meta().await.expect("the tables");
    let size = image.info.virtual_size() as usize;
    image.fsync_range(0, size).await.expect("a sync");
}

impl Engine for Qcow2Rs {
    fn run<T>(future: impl Future<Output = T>) -> T {
        // Its runtime is the only one on which its files work.
        tokio_uring::builder().start(future)
    }

    async fn open(path: &Path, direct: bool) -> Qcow2Rs {
        let params = qcow2_default_params!(false, direct);
        let image = qcow2_setup_dev_uring(path, &params).await;
        Qcow2Rs(image.expect("an image"))
    }

    async fn read(&self, offset: u64, target: BufMut) -> BufMut {
        read(&self.0, offset, target).await
    }

    async fn write(&self, offset: u64, data: Buf) {
        self.0.write_at(&data, offset).await.expect("a write");
    }

    async fn flush(&self) {
        flush(&self.0).await;
    }

    async fn close(self) {
        self.0.flush_meta().await.expect("the end");
    }
}

impl Engine for Qcow2RsBlocking {
    fn run<T>(future: impl Future<Output = T>) -> T {
        run_here(future)
    }

    async fn open(path: &Path, direct: bool) -> Qcow2RsBlocking {
        let params = qcow2_default_params!(false, direct);
        let image = qcow2_setup_dev_sync(path, &params).expect("an image");
        image.qcow2_prep_io().await.expect("its tables");
        Qcow2RsBlocking(image)
    }

    async fn read(&self, offset: u64, target: BufMut) -> BufMut {
        read(&self.0, offset, target).await
    }

    async fn write(&self, offset: u64, data: Buf) {
        self.0.write_at(&data, offset).await.expect("a write");
    }

    async fn flush(&self) {
        flush(&self.0).await;
    }

    async fn close(self) {
        self.0.flush_meta().await.expect("the end");
    }
}
