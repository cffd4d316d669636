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

/// The kinds of files that an image can be in.
pub trait Files: Qcow2IoOps + Sized {
    /// As [`Engine::run`].
    fn run<T>(future: impl Future<Output = T>) -> T;

    /// As [`Engine::open`].
    #[allow(async_fn_in_trait)] // As of `Engine`.
    async fn open(path: &Path, direct: bool) -> Qcow2Dev<Self>;
}

/// An image in such files.
pub struct InFiles<F>(Qcow2Dev<F>);

/// On tokio-uring.
pub type Qcow2Rs = InFiles<Qcow2IoUring>;

/// By a thread that waits.
pub type Qcow2RsBlocking = InFiles<Qcow2IoSync>;

impl Files for Qcow2IoUring {
    fn run<T>(future: impl Future<Output = T>) -> T {
        // Its runtime is the only one on which its files work.
        tokio_uring::builder().start(future)
    }

    async fn open(path: &Path, direct: bool) -> Qcow2Dev<Qcow2IoUring> {
        let params = qcow2_default_params!(false, direct);
        qcow2_setup_dev_uring(path, &params)
            .await
            .expect("an image")
    }
}

impl Files for Qcow2IoSync {
    fn run<T>(future: impl Future<Output = T>) -> T {
        run_here(future)
    }

    async fn open(path: &Path, direct: bool) -> Qcow2Dev<Qcow2IoSync> {
        let params = qcow2_default_params!(false, direct);
        let image = qcow2_setup_dev_sync(path, &params).expect("an image");
        image.qcow2_prep_io().await.expect("its tables");
        image
    }
}

impl<F: Files> Engine for InFiles<F> {
    fn run<T>(future: impl Future<Output = T>) -> T {
        F::run(future)
    }

    async fn open(path: &Path, direct: bool) -> InFiles<F> {
        InFiles(F::open(path, direct).await)
    }

    async fn read(&self, offset: u64, mut target: BufMut) -> BufMut {
        let read = self.0.read_at(&mut target, offset).await.expect("a read");
        assert_eq!(read, target.len(), "all of it is read");
        target
    }

    async fn write(&self, offset: u64, data: Buf) {
        self.0.write_at(&data, offset).await.expect("a write");
    }

    async fn flush(&self) {
        self.0.flush_meta().await.expect("the tables");
        let size = self.0.info.virtual_size() as usize;
        self.0.fsync_range(0, size).await.expect("a sync");
    }

    async fn close(self) {
        self.0.flush_meta().await.expect("the end");
    }
}
