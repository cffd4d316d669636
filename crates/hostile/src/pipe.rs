//! A connection whose other end is a script: bytes that were all sent before anybody looked.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use cowslip_queue::{Backend, BufMut, Queue, Stream, spawn};

/// Bytes that fit in a socket's buffer while the other end does not read.
pub(crate) const SCRIPT_BYTES_MAX: usize = 100_000;

/// A queue of its own: epoll, because a fuzzer makes thousands of them a second.
pub(crate) fn queue() -> Queue {
    Queue::new(Backend::Threads).unwrap()
}

/// A connection to a peer that has said `script` and will say nothing more. Whatever is sent to it
/// is taken and dropped. Runs on a queue.
pub(crate) fn scripted(script: &[u8]) -> Stream {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let script = &script[..script.len().min(SCRIPT_BYTES_MAX)];
    theirs.write_all(script).unwrap();
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    let theirs = Stream::from_fd(OwnedFd::from(theirs));
    spawn(async move {
        let mut buf = BufMut::zeroed(1 << 16);
        loop {
            let result;
            (result, buf) = theirs.read(buf).await;
            if !matches!(result, Ok(1..)) {
                break;
            }
        }
    });
    Stream::from_fd(OwnedFd::from(ours))
}
