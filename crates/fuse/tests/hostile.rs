//! A device that lies: messages that no kernel sends, by way of a socket in the device's place.
//! Each gets its error, and the server goes on; what it holds meanwhile is bounded.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cowslip_block::Error;
use cowslip_block::disk::{Disk, HoldingDisk, MemoryDisk};
use cowslip_block::random::Random;
use cowslip_fuse::{Growth, Options, Server, ServerEvent};
use cowslip_queue::{Backend, FuseDevice, Queue};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

const SIZE: u64 = 10_000;

/// Kinds of requests, by the protocol's numbers.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
const FALLOCATE: u32 = 43;
const LSEEK: u32 = 46;

const EPERM: i32 = 1;
const ENXIO: i32 = 6;
const EINVAL: i32 = 22;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;
const ENOSYS: i32 = 38;
const EPROTO: i32 = 71;
const ENOTSUP: i32 = 95;

/// A message about a file, from the kind of request on.
fn message(kind: u32, unique: u64, body: &[u8]) -> Vec<u8> {
    let len = (40 + body.len()) as u32;
    let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(unique.to_ne_bytes());
    bytes.extend(1u64.to_ne_bytes());
    bytes.extend([0; 16]);
    bytes.extend(body);
    bytes
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Numbers of 32 bits.
fn halves(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_ne_bytes()).collect()
}

fn read(offset: u64, len: u32) -> Vec<u8> {
    [words(&[0, offset]), halves(&[len, 0]), words(&[0, 0])].concat()
}

fn write(offset: u64, claimed: u32, data: &[u8]) -> Vec<u8> {
    let head = [words(&[0, offset]), halves(&[claimed, 0]), words(&[0, 0])].concat();
    [head, data.to_vec()].concat()
}

fn fallocate(offset: u64, len: u64, mode: u32) -> Vec<u8> {
    [words(&[0, offset, len]), halves(&[mode, 0])].concat()
}

fn seek(offset: u64, whence: u32) -> Vec<u8> {
    [words(&[0, offset]), halves(&[whence, 0])].concat()
}

fn set_size(size: u64) -> Vec<u8> {
    let mut body = words(&[1 << 3, 0, size]);
    body.resize(88, 0);
    body
}

fn init(major: u32, minor: u32) -> Vec<u8> {
    let mut body = halves(&[major, minor, 0, u32::MAX]);
    body.resize(64, 0xff);
    body
}

fn send(socket: &OwnedFd, message: &[u8]) {
    let send = || rustix::net::send(socket, message, SendFlags::empty());
    assert_eq!(rustix::io::retry_on_intr(send), Ok(message.len()));
}

/// The kernel's side of a connection.
struct Kernel {
    socket: OwnedFd,
    thread: Option<JoinHandle<()>>,
    events: Arc<Mutex<Vec<ServerEvent>>>,
}

impl Kernel {
    fn new(disk: Arc<dyn Disk>, options: Options, backend: Backend) -> Kernel {
        let (socket, device) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        // Answers that nobody has read yet: a device has room for all of them.
        sockopt::set_socket_send_buffer_size(&device, 4 << 20).unwrap();
        // A lost answer is a failure, not a test without an end.
        let patience = Some(Duration::from_secs(30));
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, patience).unwrap();
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, patience).unwrap();
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&events);
        let thread = std::thread::spawn(move || {
            Queue::new(backend).unwrap().block_on(async {
                let device = FuseDevice::from_fd(device).unwrap();
                let mut server = Server::new(disk, device, options).unwrap();
                server.observe(move |event| seen.lock().unwrap().push(event.clone()));
                server.serve().await.unwrap();
            });
        });
        Kernel {
            socket,
            thread: Some(thread),
            events,
        }
    }

    fn send(&self, message: &[u8]) {
        send(&self.socket, message);
    }

    /// The next answer: its number, its error number, and its result.
    fn receive(&self) -> (u64, i32, Vec<u8>) {
        let mut buf = vec![0; 1 << 17];
        let receive = || rustix::net::recv(&self.socket, &mut buf[..], RecvFlags::empty());
        let (len, _) = rustix::io::retry_on_intr(receive).unwrap();
        let number = |at: usize| i32::from_ne_bytes(buf[at..at + 4].try_into().unwrap());
        assert!(len >= 16 && number(0) as usize == len, "{len}");
        let errno = -number(4);
        assert!((0..4096).contains(&errno), "{errno}");
        assert!(errno == 0 || len == 16, "an error has no result");
        let unique = u64::from_ne_bytes(buf[8..16].try_into().unwrap());
        (unique, errno, buf[16..len].to_vec())
    }

    fn ask(&self, kind: u32, body: &[u8]) -> (i32, Vec<u8>) {
        self.send(&message(kind, 77, body));
        let (unique, errno, result) = self.receive();
        assert_eq!(unique, 77);
        (errno, result)
    }

    fn errno_of(&self, message: &[u8]) -> i32 {
        self.send(message);
        self.receive().1
    }

    /// Ends the connection, and the server with it; returns what it has reported.
    fn end(mut self) -> Vec<ServerEvent> {
        let thread = self.thread.take().unwrap();
        let events = Arc::clone(&self.events);
        drop(self);
        thread.join().unwrap();
        let events = events.lock().unwrap();
        events.clone()
    }
}

fn backends() -> impl Iterator<Item = Backend> {
    let all = [Backend::Uring, Backend::Threads].into_iter();
    all.filter(|backend| Queue::new(*backend).is_ok())
}

fn kernels() -> impl Iterator<Item = Kernel> {
    backends().map(|backend| {
        let disk = Arc::new(MemoryDisk::new("disk", SIZE));
        let options = Options {
            // Grows never; what it is asked for is not too large for the file system.
            grow: Some(Arc::new(|growth: Growth| {
                assert!(i64::try_from(growth.size).is_ok());
                Box::pin(async { Err(Error::Invalid("it is large enough".into())) })
            })),
            ..Options::default()
        };
        Kernel::new(disk, options, backend)
    })
}

#[test]
fn each_lie_gets_its_error_and_the_file_is_as_before() {
    for kernel in kernels() {
        assert_eq!(kernel.ask(WRITE, &write(0, 4, b"data")).0, 0);
        let far = i64::MAX as u64;
        let cases: &[(u32, Vec<u8>, i32)] = &[
            (READ, read(0, (1 << 20) + 1), EINVAL),
            (READ, read(0, u32::MAX), EINVAL),
            (WRITE, write(0, 3, b"data"), EINVAL),
            (WRITE, write(0, 5, b"data"), EINVAL),
            (WRITE, write(0, u32::MAX, b""), EINVAL),
            (WRITE, write(u64::MAX, 4, b"data"), EFBIG),
            (WRITE, write(far, 4, b"data"), EFBIG),
            (WRITE, write(far - 4, 4, b"data"), EFBIG),
            (FALLOCATE, fallocate(u64::MAX, 2, 3), EFBIG),
            (FALLOCATE, fallocate(0, u64::MAX, 3), EFBIG),
            (FALLOCATE, fallocate(0, 1, u32::MAX), ENOTSUP),
            (FALLOCATE, fallocate(0, 1, 2), ENOTSUP),
            (FALLOCATE, fallocate(1, u64::MAX - 1, 0), EFBIG),
            (FALLOCATE, fallocate(far, 0, 3), 0),
            (LSEEK, seek(0, 99), EINVAL),
            (LSEEK, seek(0, 0), EINVAL),
            (LSEEK, seek(SIZE, 3), ENXIO),
            (LSEEK, seek(u64::MAX, 4), ENXIO),
            (SETATTR, set_size(0), EPERM),
            (SETATTR, set_size(u64::MAX), EFBIG),
            (SETATTR, words(&[u64::MAX]), EINVAL),
            (INIT, init(6, 99), EPROTO),
            (INIT, init(7, 22), EPROTO),
            (INIT, init(7, u32::MAX), 0),
            (INIT, init(u32::MAX, 0), 0),
            // A name of 60 KiB, and none.
            (LOOKUP, vec![b'x'; 60_000], ENOSYS),
            (LOOKUP, Vec::new(), ENOSYS),
            (INTERRUPT, words(&[77]), ENOSYS),
        ];
        for (kind, body, expected) in cases {
            let (errno, _) = kernel.ask(*kind, body);
            let shown = &body[..body.len().min(48)];
            assert_eq!(errno, *expected, "kind {kind}: {shown:?}");
        }
        for kind in [0, 5, 7, 13, 35, 37, 100, 4096, 1 << 20, u32::MAX] {
            assert_eq!(kernel.ask(kind, &[0xff; 200]).0, ENOSYS, "kind {kind}");
        }
        assert_eq!(kernel.ask(READ, &read(u64::MAX, 4096)), (0, Vec::new()));
        assert_eq!(kernel.ask(READ, &read(1, 3)), (0, b"ata".to_vec()));
        let (errno, content) = kernel.ask(READ, &read(0, 16_384));
        assert_eq!((errno, content.len() as u64), (0, SIZE));
        assert!(content.starts_with(b"data") && content[4..].iter().all(|byte| *byte == 0));
        kernel.end();
    }
}

#[test]
fn lengths_files_and_arguments_that_cannot_be_are_refused() {
    for kernel in kernels() {
        let good = message(GETATTR, 77, &[0; 16]);
        assert_eq!(kernel.errno_of(&good), 0);
        for len in [0, 39, 40, 55, 57, 1 << 20, u32::MAX] {
            let mut bad = good.clone();
            bad[..4].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(kernel.errno_of(&bad), EINVAL, "length {len}");
        }
        for node in [0, 2, u64::MAX] {
            for kind in [GETATTR, OPEN, READ, WRITE, FALLOCATE, LOOKUP] {
                let mut bad = message(kind, 77, &[0; 64]);
                bad[16..24].copy_from_slice(&node.to_ne_bytes());
                assert_eq!(kernel.errno_of(&bad), EINVAL, "kind {kind} of file {node}");
            }
        }
        let arguments = [
            (SETATTR, 84),
            (OPEN, 4),
            (READ, 20),
            (WRITE, 40),
            (INIT, 8),
            (FALLOCATE, 28),
            (LSEEK, 20),
        ];
        for (kind, len) in arguments {
            for cut in [0, 1, len / 2, len - 3] {
                let bad = message(kind, 77, &vec![0; cut]);
                assert_eq!(kernel.errno_of(&bad), EINVAL, "{cut} bytes for kind {kind}");
            }
        }
        let events = kernel.end();
        let is_failure = |event: &&ServerEvent| matches!(event, ServerEvent::RequestFailed { .. });
        assert!(events.iter().filter(is_failure).count() > 20, "{events:?}");
    }
}

#[test]
fn what_has_no_answer_gets_none_and_floods_end() {
    for kernel in kernels() {
        for round in 0..2000u64 {
            kernel.send(&message(FORGET, round, &[0xff; 8]));
            kernel.send(&message(BATCH_FORGET, round, &[0xff; 64]));
            // The answer of the one before is read first, since a socket holds few.
            assert_eq!(kernel.ask(INTERRUPT, &words(&[round])).0, ENOSYS);
        }
        assert_eq!(kernel.ask(READ, &read(0, 512)).0, 0);
        kernel.end();
    }
}

#[test]
fn less_than_a_header_ends_the_connection_in_order() {
    for len in [1, 16, 39] {
        for kernel in kernels() {
            kernel.send(&message(GETATTR, 1, &[])[..len]);
            let events = kernel.end();
            let is_end =
                |event: &ServerEvent| matches!(event, ServerEvent::ConnectionFailed { .. });
            assert!(events.iter().any(is_end), "{events:?}");
        }
    }
}

#[test]
fn random_messages_are_answered_once_each() {
    for kernel in kernels() {
        let mut random = Random(1);
        let mut below = |end: u64| random.below(end);
        for unique in 0..5000 {
            let kind = match below(50) as u32 {
                // They have no answer.
                FORGET | BATCH_FORGET => GETATTR,
                kind => kind,
            };
            let len = [0, 8, 16, 24, 40, 64, 88, 104][below(8) as usize];
            let kinds = below(3);
            let body: Vec<u8> = (0..len)
                .map(|_| match kinds {
                    0 => 0,
                    1 => below(2) as u8 * below(256) as u8,
                    _ => below(256) as u8,
                })
                .collect();
            kernel.send(&message(kind, unique, &body));
            assert_eq!(kernel.receive().0, unique);
        }
        kernel.end();
    }
}

/// Sends more requests than a channel takes; it has `taken` of them in flight, and in the end all
/// are answered.
fn flood(taken: usize, sent: u64, kind: u32, body: &[u8]) {
    for backend in backends() {
        let disk = Arc::new(HoldingDisk::new(512, true));
        let kernel = Kernel::new(disk.clone(), Options::default(), backend);
        let socket = kernel.socket.try_clone().unwrap();
        let body = body.to_vec();
        let sender = std::thread::spawn(move || {
            for unique in 0..sent {
                let message = message(kind, unique, &body);
                send(&socket, &message);
            }
        });
        let begun = Instant::now();
        while disk.held() < taken {
            assert!(begun.elapsed() < Duration::from_secs(30), "{}", disk.held());
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(disk.held(), taken);
        disk.let_go();
        let answered: BTreeSet<u64> = (0..sent).map(|_| kernel.receive().0).collect();
        assert_eq!(answered.len() as u64, sent);
        sender.join().unwrap();
        kernel.end();
    }
}

#[test]
fn a_flood_of_reads_holds_64_mib() {
    // They are counted by what they ask for, not by what there is.
    flood(64, 200, READ, &read(0, 1 << 20));
}

#[test]
fn a_flood_of_small_requests_holds_256_of_them() {
    const FSYNC: u32 = 20;
    flood(256, 1000, FSYNC, &[0; 16]);
    flood(256, 1000, READ, &read(0, 1));
}

#[test]
fn a_disk_that_is_full_takes_no_more() {
    for backend in backends() {
        let disk = Arc::new(MemoryDisk::new("disk", SIZE));
        let kernel = Kernel::new(disk, Options::default(), backend);
        assert_eq!(kernel.ask(WRITE, &write(SIZE, 4, b"data")).0, ENOSPC);
        assert_eq!(kernel.ask(FALLOCATE, &fallocate(SIZE, 1, 0)).0, ENOSPC);
        assert_eq!(kernel.ask(SETATTR, &set_size(SIZE + 1)).0, EFBIG);
        kernel.end();
    }
}
