//! Sockets on both backends.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::thread;
use std::time::Duration;

use cowslip_queue::{
    Backend, Buf, BufMut, IoVec, Listener, Queue, Stream, sleep, spawn, yield_now,
};

fn queues() -> Vec<Queue> {
    let backends = [Backend::Uring, Backend::Threads];
    backends.into_iter().flat_map(Queue::new).collect()
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 7 + at / 251 + seed) as u8)
        .collect()
}

async fn echo(stream: Stream) {
    let mut buf = BufMut::zeroed(16 * 1024);
    loop {
        let (result, back) = stream.read(buf).await;
        let got = result.expect("reading works");
        if got == 0 {
            return;
        }
        let data = Buf::copy_of(&back[..got]);
        stream.write_all(vec![data]).await.expect("writing works");
        buf = back;
    }
}

async fn read_exact(stream: &Stream, len: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let (result, buf) = stream.read(BufMut::zeroed(len - bytes.len())).await;
        let got = result.expect("reading works");
        assert!(got > 0, "the end came early");
        bytes.extend_from_slice(&buf[..got]);
    }
    bytes
}

#[test]
fn many_local_clients_are_echoed() {
    for queue in queues() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("echo");
        let finished = Rc::new(Cell::new(0));
        queue.block_on(async {
            let listener = Listener::unix(&path).unwrap();
            assert_eq!(listener.local_addr(), None);
            spawn(async move {
                loop {
                    spawn(echo(listener.accept().await.unwrap()));
                }
            });
            for client in 0..20 {
                let (path, finished) = (path.clone(), Rc::clone(&finished));
                spawn(async move {
                    let stream = Stream::connect_unix(&path).await.unwrap();
                    let data = pattern(100_000, client);
                    let halves: IoVec = data.chunks(33_333).map(Buf::copy_of).collect();
                    let writer = stream.clone();
                    // Reading and writing at once: neither side's buffer holds all of it.
                    spawn(async move { writer.write_all(halves).await.unwrap() });
                    assert_eq!(read_exact(&stream, data.len()).await, data);
                    finished.set(finished.get() + 1);
                });
            }
            while finished.get() < 20 {
                sleep(Duration::from_millis(1)).await;
            }
        });
    }
}

#[test]
fn tcp_is_echoed_to_a_blocking_client() {
    for queue in queues() {
        queue.block_on(async {
            let listener = Listener::tcp("127.0.0.1:0".parse().unwrap()).unwrap();
            let addr = listener.local_addr().expect("TCP has an address");
            let client = thread::spawn(move || {
                let mut socket = TcpStream::connect(addr).unwrap();
                let data = pattern(5_000, 1);
                let mut back = vec![0; data.len()];
                for _ in 0..50 {
                    socket.write_all(&data).unwrap();
                    socket.read_exact(&mut back).unwrap();
                    assert_eq!(back, data);
                }
            });
            echo(listener.accept().await.unwrap()).await;
            client.join().unwrap();
        });
    }
}

#[test]
fn a_full_socket_takes_the_rest_later() {
    for queue in queues() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let data = pattern(3_000_000, 3);
        let expected = data.clone();
        let reader = thread::spawn(move || {
            // The writer meets a full socket first, then one that takes odd amounts.
            thread::sleep(Duration::from_millis(20));
            let mut all = Vec::new();
            let mut piece = [0; 10_007];
            loop {
                match theirs.read(&mut piece).unwrap() {
                    0 => return all,
                    got => all.extend_from_slice(&piece[..got]),
                }
            }
        });
        queue.block_on(async move {
            let stream = Stream::from_fd(ours.into());
            // More buffers than one call takes, some of them empty.
            let mut bufs: Vec<Buf> = data.chunks(1_999).map(Buf::copy_of).collect();
            bufs.insert(7, Buf::zeroed(0));
            assert!(bufs.len() > 1024);
            stream.write_all(bufs).await.unwrap();
        });
        assert!(reader.join().unwrap() == expected);
    }
}

#[test]
fn shutdown_ends_a_waiting_read() {
    for queue in queues() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        queue.block_on(async move {
            let stream = Stream::from_fd(ours.into());
            let reader = stream.clone();
            let ended = Rc::new(Cell::new(false));
            let note = Rc::clone(&ended);
            spawn(async move {
                let (result, buf) = reader.read(BufMut::zeroed(10)).await;
                assert_eq!(result.unwrap(), 0);
                assert_eq!(buf.len(), 10, "the buffer comes back");
                note.set(true);
            });
            yield_now().await;
            assert!(!ended.get());
            stream.shutdown();
            while !ended.get() {
                sleep(Duration::from_millis(1)).await;
            }
        });
    }
}

#[test]
fn writing_to_a_closed_peer_is_an_error() {
    for queue in queues() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let stream = Stream::from_fd(ours.into());
        let result = queue.block_on(stream.write_all(vec![Buf::zeroed(10)]));
        let error = result.expect_err("nobody reads");
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    }
}

#[test]
fn connecting_to_nobody_is_an_error() {
    for queue in queues() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nobody");
        let error = queue.block_on(Stream::connect_unix(&path)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    }
}

#[test]
fn a_dropped_read_lets_go_of_the_socket() {
    for queue in queues() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        queue.block_on(async move {
            let stream = Stream::from_fd(ours.into());
            {
                let mut read = std::pin::pin!(stream.read(BufMut::zeroed(10)));
                std::future::poll_fn(|cx| {
                    assert!(read.as_mut().poll(cx).is_pending());
                    std::task::Poll::Ready(())
                })
                .await;
                sleep(Duration::from_millis(2)).await;
            }
            drop(stream);
            sleep(Duration::from_millis(2)).await;
        });
        // The queue lives, but nothing in it holds the connection open.
        theirs
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        assert_eq!(theirs.read(&mut [0; 1]).unwrap(), 0);
        drop(queue);
    }
}

#[test]
fn a_queue_with_waiting_sockets_can_be_dropped() {
    for queue in queues() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        queue.block_on(async move {
            let stream = Stream::from_fd(ours.into());
            spawn(async move {
                let (result, _) = stream.read(BufMut::zeroed(10)).await;
                panic!("nothing comes: {result:?}");
            });
            yield_now().await;
            sleep(Duration::from_millis(1)).await;
        });
        drop(queue);
    }
}
