//! imago: its futures, polled by tokio, and by a thread that waits. Its file makes system calls
//! that block, on tokio too.

use std::path::Path;

use cowslip_queue::{Buf, BufMut};
use imago::file::File;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate, StorageOpenOptions};

use super::{Engine, run_here, run_on_tokio};

/// On tokio.
pub struct Imago(FormatAccess<File>);

/// By a thread that waits.
pub struct ImagoBlocking(Imago);

impl Engine for Imago {
    fn run<T>(future: impl Future<Output = T>) -> T {
        run_on_tokio(future)
    }

    async fn open(path: &Path, direct: bool) -> Imago {
        let image = Qcow2::<File>::builder_path(path)
            .storage_open_options(StorageOpenOptions::new().direct(direct))
            .write(true)
            .open(PermissiveImplicitOpenGate::default())
            .await;
        Imago(FormatAccess::new(image.expect("an image")))
    }

    async fn read(&self, offset: u64, mut target: BufMut) -> BufMut {
        let read = self.0.read(&mut target[..], offset).await;
        read.expect("a read");
        target
    }

    async fn write(&self, offset: u64, data: Buf) {
        self.0.write(&data[..], offset).await.expect("a write");
    }

    async fn flush(&self) {
        self.0.flush().await.expect("a flush");
        self.0.sync().await.expect("a sync");
    }

    async fn close(self) {
        self.0.flush().await.expect("the end");
    }
}

impl Engine for ImagoBlocking {
    fn run<T>(future: impl Future<Output = T>) -> T {
        run_here(future)
    }

    async fn open(path: &Path, direct: bool) -> ImagoBlocking {
        ImagoBlocking(Imago::open(path, direct).await)
    }

    async fn read(&self, offset: u64, target: BufMut) -> BufMut {
        self.0.read(offset, target).await
    }

    async fn write(&self, offset: u64, data: Buf) {
        self.0.write(offset, data).await;
    }

    async fn flush(&self) {
        self.0.flush().await;
    }

    async fn close(self) {
        self.0.close().await;
    }
}
