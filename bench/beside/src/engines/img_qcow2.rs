//! rust-img-qcow2: calls that block, through the page cache alone.

use std::path::Path;

use cowslip_queue::{Buf, BufMut};
use img_qcow2::Qcow2Reader;

use super::{Engine, run_here};

/// By a thread that waits.
pub struct ImgQcow2(Qcow2Reader);

impl Engine for ImgQcow2 {
    fn run<T>(future: impl Future<Output = T>) -> T {
        run_here(future)
    }

    async fn open(path: &Path, direct: bool) -> ImgQcow2 {
        assert!(!direct, "it has no direct I/O");
        ImgQcow2(Qcow2Reader::open_rw(path).expect("an image"))
    }

    async fn read(&self, offset: u64, mut target: BufMut) -> BufMut {
        self.0.read_at(offset, &mut target).expect("a read");
        target
    }

    async fn write(&self, offset: u64, data: Buf) {
        self.0.write_at(offset, &data).expect("a write");
    }

    async fn flush(&self) {
        self.0.flush().expect("a flush");
    }

    async fn close(self) {}
}
