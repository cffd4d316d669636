//! Fuzz target: a hostile kernel. Messages are made of bytes as they are, or of requests whose
//! fields are drawn. The server must end, must not have panicked, and answers each message that
//! waits for that once, in the protocol's form.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use cowslip::Error;
use cowslip::disk::MemoryDisk;
use cowslip_fuse::{Grow, Options, Server};
use cowslip_queue::FuseDevice;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::draw::Draw;
use crate::pipe;

const DISK_BYTES: u64 = (1 << 20) + 512;
/// Messages of one run: as many answers fit in a socket's buffer, if they are short.
const MESSAGES_MAX: usize = 48;
/// Bytes of the header of a request, and of that of an answer.
const IN_HEADER_BYTES: usize = 40;
const OUT_HEADER_BYTES: usize = 16;
/// Kinds of requests that a file knows, and some that it does not.
const KINDS: [u32; 20] = [
    2, 3, 4, 14, 15, 15, 16, 16, 17, 18, 20, 25, 26, 34, 36, 42, 43, 46, 1, 4096,
];
/// Requests to forget have no answer.
const UNANSWERED: [u32; 2] = [2, 42];

/// The target's body.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    let grows = draw.one_in(2);
    let (kernel, device) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .unwrap();
    let asked = ask(&mut draw, &kernel);
    rustix::net::shutdown(&kernel, rustix::net::Shutdown::Write).unwrap();
    let options = Options {
        grow: grows.then(never_grows),
        ..Options::default()
    };
    pipe::queue().block_on(async {
        let device = FuseDevice::from_fd(device).unwrap();
        let disk = Arc::new(MemoryDisk::new("memory", DISK_BYTES));
        let server = Server::new(disk, device, options).unwrap();
        server.serve().await.unwrap();
    });
    check(&kernel, asked);
}

fn never_grows() -> Grow {
    Arc::new(|_| Box::pin(async { Err(Error::Invalid("it is large enough".into())) }))
}

/// Sends messages; returns how many have each number and wait for an answer.
fn ask(draw: &mut Draw, kernel: &OwnedFd) -> BTreeMap<u64, usize> {
    let mut asked = BTreeMap::new();
    let mut sent_bytes = 0;
    for _ in 0..MESSAGES_MAX {
        if draw.is_empty() {
            break;
        }
        let message = match draw.one_in(4) {
            true => {
                let len = draw.pick(&[IN_HEADER_BYTES, 41, 48, 60, 80, 81, 130, 300]);
                draw.take(len).to_vec()
            }
            false => request(draw),
        };
        sent_bytes += message.len();
        let is_sent = sent_bytes < pipe::SCRIPT_BYTES_MAX
            && rustix::net::send(kernel, &message, SendFlags::empty()).is_ok();
        if !is_sent || message.len() < IN_HEADER_BYTES {
            // The server ends there.
            break;
        }
        let number = |at: usize| u32::from_ne_bytes(message[at..at + 4].try_into().unwrap());
        let unique = u64::from_ne_bytes(message[8..16].try_into().unwrap());
        let is_answered = !UNANSWERED.contains(&number(4)) || number(0) as usize != message.len();
        *asked.entry(unique).or_default() += usize::from(is_answered);
    }
    asked
}

/// A request; most are by the rules but for one field.
fn request(draw: &mut Draw) -> Vec<u8> {
    let kind = match draw.one_in(16) {
        true => draw.number() as u32,
        false => draw.pick(&KINDS),
    };
    let len = match draw.below(6) {
        0 => draw.below(4096) as u32,
        1 => (1 << 20) + draw.below(2) as u32,
        2 => draw.number() as u32,
        _ => draw.below(64) as u32,
    };
    let mut body = Vec::new();
    match kind {
        15 | 16 | 43 | 46 => {
            body.extend(draw.number().to_ne_bytes());
            body.extend(offset(draw).to_ne_bytes());
            if kind == 43 {
                body.extend(offset(draw).to_ne_bytes());
                body.extend(draw.pick(&[0u64, 1, 2, 3, 16, 17, 8, 64]).to_ne_bytes());
            } else if kind == 46 {
                body.extend(draw.below(6).to_ne_bytes());
            } else {
                body.extend(u64::from(len).to_ne_bytes());
                body.extend([0; 16]);
            }
            if kind == 16 {
                let more = draw.pick(&[0, 0, 0, 1, 40]);
                body.resize(body.len() + (len as usize).min(4096) + more, 0xd5);
            }
        }
        _ => {
            for _ in 0..draw.below(14) {
                let word = match draw.below(3) {
                    0 => draw.number(),
                    1 => offset(draw),
                    _ => draw.below(2048),
                };
                body.extend(word.to_ne_bytes());
            }
        }
    }
    let claimed = (IN_HEADER_BYTES + body.len()) as u32;
    let claimed = match draw.one_in(16) {
        true => draw.pick(&[0, 39, claimed - 1, claimed + 1, u32::MAX]),
        false => claimed,
    };
    let node = match draw.one_in(16) {
        true => draw.number(),
        false => 1,
    };
    let mut message = [claimed.to_ne_bytes(), kind.to_ne_bytes()].concat();
    message.extend(draw.below(4).to_ne_bytes());
    message.extend(node.to_ne_bytes());
    message.extend([0; 16]);
    message.extend(body);
    message
}

fn offset(draw: &mut Draw) -> u64 {
    match draw.below(6) {
        0 => draw.number(),
        1 => DISK_BYTES,
        2 => DISK_BYTES - 1,
        3 => i64::MAX as u64,
        _ => draw.below(DISK_BYTES),
    }
}

/// Checks the answers, as many as the socket has taken: long ones do not fit there.
fn check(kernel: &OwnedFd, mut asked: BTreeMap<u64, usize>) {
    let mut answer = vec![0; 1 << 18];
    loop {
        let received = rustix::net::recv(kernel, &mut answer[..], RecvFlags::empty());
        let Ok((len @ 1.., _)) = received else {
            return;
        };
        assert!(len >= OUT_HEADER_BYTES, "{len}");
        let number = |at: usize| i32::from_ne_bytes(answer[at..at + 4].try_into().unwrap());
        assert_eq!(number(0) as usize, len);
        assert!((-4095..=0).contains(&number(4)), "{}", number(4));
        assert!(number(4) == 0 || len == OUT_HEADER_BYTES);
        let unique = u64::from_ne_bytes(answer[8..16].try_into().unwrap());
        let left = asked.get_mut(&unique).expect("it was asked for");
        *left = left.checked_sub(1).expect("it is answered once");
    }
}
