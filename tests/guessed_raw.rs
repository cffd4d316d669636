//! A raw disk whose format was guessed: no client, no shell and no verb makes an image of it,
//! beside QEMU. The engine's tests try every order of requests; here these come over a socket,
//! several at once.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::{Command, Stdio};

use cowslip_nbd::export::{Durability, Space, ZeroOptions};
use cowslip_nbd::{Client, ConnectOptions};
use cowslip_queue::{Backend, Buf, BufMut, Queue, Stream};

use crate::support::golden::{self, said};
use crate::support::headers::HEADERS;
use crate::support::server::Server;
use crate::support::{cowslip, outcome, run, scratch, scratch_beside, scratch_in_memory};

/// Fills the disk before: no header has such bytes.
const FILL: u8 = 0xee;

/// A server of a disk whose format is not named.
fn serve(dir: &Path, disk: &str) -> Server {
    let socket = dir.join("socket");
    let mut serve = cowslip();
    serve.args(["serve", "--discard=unmap", "--socket"]);
    let serve = serve.arg(&socket).arg(dir.join(disk));
    Server::start(serve.stderr(Stdio::null()), &socket)
}

/// A part of a header, and how it is asked for.
#[derive(Clone, Debug)]
struct Part<'a> {
    at: u64,
    bytes: &'a [u8],
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write,
    Zeroes { may_unmap: bool },
    Trim,
}

/// All ways to ask for a header in up to three parts.
fn attempts((at, header): (usize, &[u8])) -> Vec<Vec<Part<'_>>> {
    let len = header.len();
    let mut cuts = vec![vec![0, len]];
    for first in 1..len {
        cuts.push(vec![0, first, len]);
        cuts.extend((first + 1..len).map(|second| vec![0, first, second, len]));
    }
    let mut all = Vec::new();
    for cuts in cuts {
        let mut sets: Vec<Vec<Part<'_>>> = vec![Vec::new()];
        for cut in cuts.windows(2) {
            let bytes = &header[cut[0]..cut[1]];
            let mut kinds = vec![Kind::Write];
            if bytes.iter().all(|&byte| byte == 0) {
                kinds.extend([false, true].map(|may_unmap| Kind::Zeroes { may_unmap }));
                kinds.push(Kind::Trim);
            }
            let at = (at + cut[0]) as u64;
            sets = sets
                .iter()
                .flat_map(|set| {
                    let longer = |&kind: &Kind| {
                        let mut set = set.clone();
                        set.push(Part { at, bytes, kind });
                        set
                    };
                    kinds.iter().map(longer).collect::<Vec<_>>()
                })
                .collect();
        }
        all.extend(sets);
    }
    all
}

/// Sends the parts without waiting for an answer; how many were refused, and what the sector is
/// then.
async fn try_at_once(clients: &[Client], parts: &[Part<'_>], number: usize) -> (usize, Vec<u8>) {
    let fill = Buf::from(vec![FILL; 512]);
    clients[0].write(0, fill, Durability::Cached).await.unwrap();
    let mut sent = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        let client = &clients[(number >> 3 & index) % clients.len()];
        let durability = match number >> index & 1 {
            0 => Durability::Cached,
            _ => Durability::Durable,
        };
        let len = part.bytes.len() as u64;
        sent.push(match part.kind {
            Kind::Write => client.write(part.at, Buf::copy_of(part.bytes), durability),
            Kind::Trim => client.trim(part.at, len, durability),
            Kind::Zeroes { may_unmap } => {
                let how = ZeroOptions {
                    space: Space::of_unmap(may_unmap),
                    fast_only: false,
                    durability,
                };
                client.write_zeroes(part.at, len, how)
            }
        });
    }
    let mut refused = 0;
    for answer in sent {
        if let Err(error) = answer.await {
            let text = error.to_string();
            assert!(text.to_lowercase().contains("perm"), "{text}");
            refused += 1;
        }
    }
    let sector = clients[0].read(0, BufMut::zeroed(512)).await.unwrap();
    (refused, sector.to_vec())
}

#[test]
fn no_requests_at_once_make_a_guessed_disk_an_image() {
    // In memory: thousands of durable writes would take their time on a disk.
    let dir = scratch_in_memory();
    let disk = dir.path().join("disk");
    std::fs::write(&disk, vec![FILL; 1 << 20]).unwrap();
    let _server = serve(dir.path(), "disk");
    let queue = Queue::new(Backend::Threads).unwrap();
    queue.block_on(async {
        let mut clients = Vec::new();
        for _ in 0..2 {
            let stream = Stream::connect_unix(&dir.path().join("socket")).await;
            let options = ConnectOptions::new("");
            clients.push(Client::connect(stream.unwrap(), &options).await.unwrap());
        }
        let mut number = 0;
        for &(at, header) in HEADERS {
            for parts in attempts((at, header)) {
                number += 1;
                let (refused, sector) = try_at_once(&clients, &parts, number).await;
                assert_ne!(&sector[at..at + header.len()], header, "{parts:?}");
                let trims = parts.iter().any(|part| part.kind == Kind::Trim);
                assert!(refused == 1 || trims, "{refused} {parts:?}");
            }
        }
        for client in clients {
            client.disconnect().await.unwrap();
        }
    });
}

/// Bytes of a header, each by a command of the shell that waits for nothing.
#[test]
fn commands_at_once_leave_the_sector_as_with_qemu() {
    let Some(dir) = scratch_beside(&["qemu-io"]) else {
        return;
    };
    let headers: [&[u8]; 5] = [
        b"QED\0",
        b"KDMV",
        b"COWD",
        b"QFI\xfb\0\0\0\x03",
        b"vhdxfile",
    ];
    for header in headers {
        for turn in 0..header.len() {
            let mut places: Vec<usize> = (0..header.len()).collect();
            places.rotate_left(turn);
            let left = |mut shell: Command| {
                std::fs::write(dir.path().join("disk"), vec![FILL; 4096]).unwrap();
                for &at in &places {
                    let command = match (header[at], at % 2) {
                        (0, 0) => format!("aio_write -z {at} 1"),
                        (0, _) => format!("aio_write -z -u {at} 1"),
                        (byte, _) => format!("aio_write -P {byte} {at} 1"),
                    };
                    shell.args(["-c", &command]);
                }
                shell.args(["-c", "aio_flush", "disk"]);
                let output = outcome(shell.current_dir(&dir));
                let refused = said(&output).matches("Operation not permitted").count();
                let disk = std::fs::read(dir.path().join("disk")).unwrap();
                (refused, disk[..512].to_vec())
            };
            let mut ours = cowslip();
            ours.arg("qemu-io");
            let ours = left(ours);
            assert_eq!(ours, left(Command::new("qemu-io")), "{header:?} {turn}");
            assert_eq!(ours.0, 1, "{header:?} {turn}");
        }
    }
}

/// A raw file that begins like an image; its bytes as a disk are the header of one.
fn header_of_an_image(dir: &Path) -> Vec<u8> {
    run(golden::ours()
        .current_dir(dir)
        .args(golden::words("create -q -f qcow2 header 1M")));
    let mut header = std::fs::read(dir.join("header")).unwrap();
    header.resize(1 << 20, 0);
    std::fs::write(dir.join("header"), &header).unwrap();
    header
}

/// Makes the name of the backing format unknown, like in old images, which do not have
/// it.
fn forget_backing_format(image: &Path) {
    const EXTENSION: [u8; 4] = 0xe279_2aca_u32.to_be_bytes();
    let mut bytes = std::fs::read(image).unwrap();
    let at = bytes[..4096].windows(4).position(|word| word == EXTENSION);
    bytes[at.unwrap()..][..4].copy_from_slice(&0x6e6f_6e65_u32.to_be_bytes());
    std::fs::write(image, bytes).unwrap();
}

#[test]
fn a_commit_into_a_guessed_base_is_refused_as_by_qemu() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    header_of_an_image(dir.path());
    let committed = |program: &dyn Fn(&str) -> Command, base_format: &str| {
        std::fs::write(dir.path().join("base"), vec![0; 1 << 20]).unwrap();
        let make = "create -q -f qcow2 -b base -F raw top";
        run(golden::ours().current_dir(&dir).args(golden::words(make)));
        let mut write = cowslip();
        write.args(["io", "-f", "qcow2", "-c", "write -s header 0 512", "top"]);
        run(write.current_dir(&dir));
        if base_format.is_empty() {
            forget_backing_format(&dir.path().join("top"));
        }
        let output = outcome(program("commit").current_dir(&dir).arg("top"));
        let base = std::fs::read(dir.path().join("base")).unwrap();
        (said(&output), base[..512].to_vec())
    };
    let ours = |verb: &str| {
        let mut command = golden::ours();
        command.arg(verb);
        command
    };
    let theirs = |verb: &str| {
        let mut command = Command::new("qemu-img");
        command.arg(verb);
        command
    };
    let refused = committed(&ours, "");
    assert_eq!(refused, committed(&theirs, ""));
    assert!(refused.0.contains("Operation not permitted"), "{refused:?}");
    assert_eq!(refused.1, [0; 512]);
    let named = committed(&ours, "raw");
    assert_eq!(named, committed(&theirs, "raw"));
    assert_eq!(named.1[..4], *b"QFI\xfb");
}

/// QEMU's offload goes past its own check; ours does not.
#[test]
fn no_copy_makes_a_guessed_target_an_image() {
    let dir = scratch();
    let header = header_of_an_image(dir.path());
    for (line, is_refused) in [
        (
            "convert -n -f raw --target-image-opts header file.filename=target",
            true,
        ),
        (
            "convert -n -C -f raw --target-image-opts header file.filename=target",
            true,
        ),
        (
            "convert -n -C -f raw --target-image-opts header driver=raw,file.filename=target",
            false,
        ),
        ("convert -n -C -f raw -O raw header target", false),
    ] {
        std::fs::write(dir.path().join("target"), vec![FILL; 1 << 20]).unwrap();
        let mut copy = golden::ours();
        let output = outcome(copy.current_dir(&dir).args(golden::words(line)));
        let now = std::fs::read(dir.path().join("target")).unwrap();
        assert_eq!(
            output.status.success(),
            !is_refused,
            "{line}: {}",
            said(&output)
        );
        assert_eq!(now[..512] == header[..512], !is_refused, "{line}");
        if is_refused {
            assert!(
                said(&output).contains("Operation not permitted"),
                "{}",
                said(&output)
            );
        }
    }
}
