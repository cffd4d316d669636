//! Opening and reading remote files, as tests do it.

use std::io;
use std::sync::Arc;

use cowslip_block::file::BlockFile;
use cowslip_block::options::{self, Options};
use cowslip_queue::{Backend, BufMut, IoVecMut, Queue};
use cowslip_remote::{Environment, RemoteFile, RemoteName, Scheme, Secrets};
use cowslip_testbed::web::{WebObject, WebServer};

pub const MIB: usize = 1 << 20;

/// Bytes that differ from place to place.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let word = |number: u64| {
        (number ^ seed)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .to_le_bytes()
    };
    let words = (0..len.div_ceil(8) as u64).flat_map(word);
    words.take(len).collect()
}

/// A server with an object under `/a`, and its bytes.
pub fn server_of(len: usize) -> (WebServer, Vec<u8>) {
    let server = WebServer::start().unwrap();
    let bytes = pattern(len, 1);
    server.put("/a", WebObject::tagged(bytes.clone(), "one"));
    (server, bytes)
}

/// Opens `/a` of a server.
pub fn open(server: &WebServer, more: &str) -> cowslip_block::Result<Arc<RemoteFile>> {
    open_url(&server.url("/a"), more)
}

pub fn open_url(url: &str, more: &str) -> cowslip_block::Result<Arc<RemoteFile>> {
    let list = match more {
        "" => format!("url={url}"),
        more => format!("url={url},{more}"),
    };
    let mut options = Options::new(options::split(&list)?);
    let name = RemoteName::of_options(Scheme::Http, &mut options)?;
    block_on(async {
        cowslip_remote::open(
            &name,
            Secrets::default(),
            &Environment::default(),
            ("a", false),
        )
        .await
    })
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    Queue::new(Backend::Auto).unwrap().block_on(future)
}

pub fn read(file: &RemoteFile, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    block_on(read_async(file, offset, len))
}

pub async fn read_async(file: &RemoteFile, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let target = IoVecMut::from(BufMut::for_overwrite(len));
    let (result, target) = file.read(offset, target).await;
    result.map(|()| target.to_vec())
}
