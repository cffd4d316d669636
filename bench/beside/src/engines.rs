//! The engines behind one trait, each as its documentation has it used.

mod cowslip;
mod imago;
mod img_qcow2;
mod qcow2_rs;

use std::future::Future;
use std::path::Path;

use cowslip_queue::{Buf, BufMut};

pub use self::cowslip::{Cowslip, CowslipBlocking};
pub use self::imago::{Imago, ImagoBlocking};
pub use self::img_qcow2::ImgQcow2;
pub use self::qcow2_rs::{Qcow2Rs, Qcow2RsBlocking};

/// An open image of one engine. Errors are panics: they end the comparison.
#[allow(async_fn_in_trait)] // Nothing here needs to be Send: tasks stay on their thread.
pub trait Engine: Sized {
    /// Runs a future on the calling thread, by the executor for which this face of the engine is.
    fn run<T>(future: impl Future<Output = T>) -> T;

    /// Opens an image for reading and writing, past the page cache if `direct`.
    async fn open(path: &Path, direct: bool) -> Self;

    /// Fills the buffer from `offset` on.
    async fn read(&self, offset: u64, target: BufMut) -> BufMut;

    /// Writes the bytes at `offset`.
    async fn write(&self, offset: u64, data: Buf);

    /// Makes all that has been written durable.
    async fn flush(&self);

    /// Ends the use of the image.
    async fn close(self);
}

/// tokio on one thread.
fn run_on_tokio<T>(future: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().expect("a runtime");
    runtime.block_on(future)
}

/// The smallest executor: polls on the calling thread, which sleeps in between.
fn run_here<T>(future: impl Future<Output = T>) -> T {
    futures_executor::block_on(future)
}
