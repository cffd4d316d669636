//! The contenders of this project: a queue on a ring, a queue on epoll and threads.

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::rc::Rc;

use cowslip_queue::file::{File, MemoryAlignment, Persistence, Route, nothing};
use cowslip_queue::{
    Backend, Buf, BufMut, Completer, IoVecMut, Pending, Queue, Stream, pending, spawn,
};

use crate::{BLOCK_BYTES, DEPTH, FILE_BLOCKS, operations_of};

/// Tells when the last of the tasks is done.
struct Countdown {
    left: Cell<usize>,
    last: Cell<Option<Completer<()>>>,
}

impl Countdown {
    fn new() -> (Rc<Countdown>, Pending<()>) {
        let (completer, all) = pending();
        let countdown = Countdown {
            left: Cell::new(DEPTH),
            last: Cell::new(Some(completer)),
        };
        (Rc::new(countdown), all)
    }

    fn one(&self) {
        self.left.set(self.left.get() - 1);
        if self.left.get() == 0 {
            self.last.take().expect("there is one last").complete(());
        }
    }
}

/// Runs 32 tasks that share the operations.
fn run<T: Future<Output = ()> + 'static>(
    backend: Backend,
    operations: usize,
    task: impl Fn(usize, usize) -> T,
) {
    let queue = Queue::new(backend).expect("a queue");
    assert_eq!(queue.backend(), backend);
    queue.block_on(async {
        let (countdown, all) = Countdown::new();
        for number in 0..DEPTH {
            let task = task(number, operations_of(number, operations));
            let countdown = Rc::clone(&countdown);
            spawn(async move {
                task.await;
                countdown.one();
            });
        }
        all.await;
    });
}

pub fn nops(backend: Backend, operations: usize) {
    run(backend, operations, |_, share| async move {
        for _ in 0..share {
            nothing().await;
        }
    });
}

pub fn reads(backend: Backend, path: &Path, operations: usize) {
    let file = fs::File::open(path).expect("the scratch file");
    let file = File::new(file.into(), Route::Ring, MemoryAlignment::NONE);
    run(backend, operations, |number, share| {
        let file = file.clone();
        async move {
            let mut buf = IoVecMut::from(BufMut::zeroed(BLOCK_BYTES));
            let mut block = number as u64;
            for _ in 0..share {
                block = (block + 1) % FILE_BLOCKS;
                let (result, back) = file.read_at(block * BLOCK_BYTES as u64, buf).await;
                result.expect("reading works");
                buf = back;
            }
        }
    });
}

pub fn writes(backend: Backend, path: &Path, operations: usize) {
    let file = fs::File::options()
        .write(true)
        .open(path)
        .expect("the scratch file");
    let file = File::new(file.into(), Route::Ring, MemoryAlignment::NONE);
    run(backend, operations, |number, share| {
        let file = file.clone();
        async move {
            let buf = Buf::zeroed(BLOCK_BYTES);
            let mut block = number as u64;
            for _ in 0..share {
                block = (block + 7) % FILE_BLOCKS;
                let offset = block * BLOCK_BYTES as u64;
                let write = file.write_at(offset, buf.clone(), Persistence::Cached);
                write.await.expect("writing works");
            }
        }
    });
}

const MESSAGE_BYTES: usize = 64;

pub fn echoes(backend: Backend, operations: usize) {
    run(backend, operations, |_, share| async move {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let server = Stream::from_fd(theirs.into());
        spawn(async move {
            let mut buf = BufMut::zeroed(MESSAGE_BYTES);
            loop {
                let (result, back) = server.read(buf).await;
                let got = result.expect("reading works");
                if got == 0 {
                    return;
                }
                let reply = Buf::copy_of(&back[..got]);
                server.write_all(vec![reply]).await.expect("writing works");
                buf = back;
            }
        });
        let client = Stream::from_fd(ours.into());
        let message = Buf::zeroed(MESSAGE_BYTES);
        let mut buf = BufMut::zeroed(MESSAGE_BYTES);
        for _ in 0..share {
            client
                .write_all(vec![message.clone()])
                .await
                .expect("writing works");
            let (result, back) = client.read(buf).await;
            assert_eq!(result.expect("reading works"), MESSAGE_BYTES);
            buf = back;
        }
    });
}

const REQUEST_BYTES: usize = 28 + BLOCK_BYTES;
const REPLY_BYTES: usize = 16;

/// A server with one pipelined client on a thread of its own: 32 requests of 4 KiB are in flight,
/// and every request waits for an operation of the ring (or pool) before its small reply.
pub fn pipelined(backend: Backend, operations: usize) {
    use std::io::{Read, Write};
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let client = std::thread::spawn(move || {
        let mut socket = ours;
        let batch = vec![0; REQUEST_BYTES];
        let mut sent = 0;
        let mut replies = 0;
        let mut buf = [0; REPLY_BYTES * DEPTH];
        let mut partial = 0;
        while replies < operations {
            while sent < operations && sent - replies < DEPTH {
                socket.write_all(&batch).expect("sending works");
                sent += 1;
            }
            let got = socket.read(&mut buf).expect("receiving works");
            assert!(got > 0);
            partial += got;
            replies += partial / REPLY_BYTES;
            partial %= REPLY_BYTES;
        }
    });
    let queue = Queue::new(backend).expect("a queue");
    queue.block_on(async {
        let stream = Stream::from_fd(theirs.into());
        let outbox: Rc<std::cell::RefCell<Vec<Buf>>> = Rc::default();
        let writing = Rc::new(Cell::new(false));
        let reply = Buf::zeroed(REPLY_BYTES);
        let mut buf = BufMut::zeroed(256 * 1024);
        let mut partial = 0;
        loop {
            let (result, back) = stream.read(buf).await;
            let got = result.expect("reading works");
            buf = back;
            if got == 0 {
                break;
            }
            partial += got;
            for _ in 0..partial / REQUEST_BYTES {
                let outbox = Rc::clone(&outbox);
                let writing = Rc::clone(&writing);
                let stream = stream.clone();
                let reply = reply.clone();
                spawn(async move {
                    nothing().await;
                    outbox.borrow_mut().push(reply);
                    if writing.replace(true) {
                        return;
                    }
                    cowslip_queue::yield_now().await;
                    loop {
                        let bufs = std::mem::take(&mut *outbox.borrow_mut());
                        if bufs.is_empty() {
                            break;
                        }
                        stream.write_all(bufs).await.expect("writing works");
                    }
                    writing.set(false);
                });
            }
            partial %= REQUEST_BYTES;
        }
    });
    client.join().expect("the client ends well");
}
