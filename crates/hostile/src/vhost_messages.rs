//! Fuzz target: a hostile front end. Messages of any code, flags and length, with descriptors of
//! any kind and number, to a server that knows nothing of it yet, or while rings are at work. The
//! server must end the connection or answer, and serve the next front end.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use cowslip_queue::Event;

use crate::draw::Draw;
use crate::front::{Served, message};
use crate::pipe;
use crate::vhost_rings::Guest;

/// Codes of the protocol, beyond the last one too.
const CODES_END: u64 = 48;
const MESSAGES_MAX: usize = 40;
/// Numbers that messages are made of: counts, addresses and lengths of the guest's memory, and
/// those at which sums overflow.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    8,
    0x100,
    0x1000,
    0x1_0000,
    0x10_0000,
    1 << 32,
    1 << 40,
    0x7000_0000_0000,
    1 << 63,
    u64::MAX - 0xFFF,
    u64::MAX,
];

/// The target's body.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    let queue = pipe::queue();
    queue.block_on(async {
        let mut descriptors = Descriptors::new();
        let served = Served::new();
        let (front, served) = match draw.byte() % 4 {
            0 => (served.connect(), served),
            _ => Guest::new(served, &mut draw).await.into_parts(),
        };
        let mut sent = 0;
        while !draw.is_empty() && sent < MESSAGES_MAX {
            let bytes = next_message(&mut draw);
            let count = match draw.below(3) {
                0 => draw.below(4),
                1 => 1,
                _ => 0,
            };
            let chosen: Vec<usize> = (0..count).map(|_| draw.byte().into()).collect();
            let chosen = descriptors.choose(&chosen);
            if !front.send_bytes(&bytes, &chosen).await {
                break;
            }
            sent += 1;
        }
        front.leave().await;
        // Whatever it was, another front end finds the server at work.
        drop(served.events());
        let guest = Guest::new(served, &mut Draw::from_bytes(&[])).await;
        guest.end().await;
        descriptors.0.clear();
    });
}

fn next_message(draw: &mut Draw<'_>) -> Vec<u8> {
    if draw.one_in(16) {
        let len = draw.below(40) as usize;
        return draw.take(len).to_vec();
    }
    let code = draw.below(CODES_END) as u32;
    let flags = draw.pick(&[8, 0, 8, 0, 4, 2, 0xFFFF_FFF0]);
    let mut payload = Vec::new();
    for _ in 0..draw.pick(&[1, 0, 2, 3, 5, 6, 9, 40]) {
        let number = match draw.below(4) {
            0 => draw.number(),
            1 => draw.below(8),
            _ => draw.pick(&NUMBERS),
        };
        payload.extend(number.to_le_bytes());
    }
    payload.truncate(payload.len().saturating_sub(draw.pick(&[0, 0, 0, 4, 1])));
    let mut bytes = message(code, flags, &payload);
    if draw.one_in(8) {
        let len = draw.pick(&[0u32, 1, 8, 4096, 4097, u32::MAX]);
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
    }
    bytes
}

/// Descriptors to send; their other ends stay open until the end.
struct Descriptors(Vec<OwnedFd>);

impl Descriptors {
    fn new() -> Descriptors {
        let file = |len: u64| {
            let file = rustix::fs::memfd_create("sent", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, len).unwrap();
            file
        };
        let device =
            |path| OwnedFd::from(File::options().read(true).write(true).open(path).unwrap());
        let (socket, other_socket) = UnixStream::pair().unwrap();
        let (pipe, other_pipe) = rustix::pipe::pipe().unwrap();
        let event = Event::new().unwrap();
        Descriptors(vec![
            file(0x3_0000),
            // No more than a number: nothing of it is there.
            file(1 << 41),
            event.as_fd().try_clone_to_owned().unwrap(),
            socket.into(),
            pipe,
            device("/dev/zero"),
            device("/dev/null"),
            other_socket.into(),
            other_pipe,
        ])
    }

    fn choose(&self, indexes: &[usize]) -> Vec<std::os::fd::BorrowedFd<'_>> {
        let descriptors = indexes.iter().map(|index| &self.0[index % self.0.len()]);
        descriptors.map(AsFd::as_fd).collect()
    }
}
