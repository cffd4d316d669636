//! Servers that break the rules: our client must end with an error, never panic, hang or believe
//! them.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::JoinHandle;

use crate::support::*;
use cowslip_nbd::client::ClientError;
use cowslip_nbd::export::Durability;
use cowslip_nbd::protocol::ChunkCode::{
    BlockStatus as Status, Error, ErrorOffset, ExtendedStatus, None as Nothing, OffsetData,
    OffsetHole,
};
use cowslip_nbd::protocol::handshake::*;
use cowslip_nbd::protocol::transmission::*;
use cowslip_nbd::protocol::*;
use cowslip_nbd::{Client, ConnectOptions};
use cowslip_queue::{Backend, Buf, BufMut, Stream};
use tempfile::TempDir;

/// A server that follows a script, for one connection.
struct Scripted {
    path: PathBuf,
    thread: JoinHandle<()>,
    _directory: TempDir,
}

fn scripted(script: impl FnOnce(&mut UnixStream) + Send + 'static) -> Scripted {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        script(&mut stream);
    });
    Scripted {
        path,
        thread,
        _directory: directory,
    }
}

fn receive(stream: &mut UnixStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn greet(stream: &mut UnixStream) {
    let flags = HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES);
    stream.write_all(&encode_greeting(flags)).unwrap();
    receive(stream, CLIENT_FLAGS_BYTES);
}

fn next_option(stream: &mut UnixStream) -> OptionCode {
    let header = OptionHeader::decode(&receive(stream, OPTION_HEADER_BYTES)).unwrap();
    receive(stream, header.len as usize);
    header.option
}

fn answer(stream: &mut UnixStream, option: OptionCode, reply: OptionReplyCode, data: &[u8]) {
    let mut message = Vec::new();
    encode_option_reply(&mut message, option, reply, data);
    stream.write_all(&message).unwrap();
}

const SIZE: u64 = 1 << 20;

/// A handshake by the rules: structured replies, `base:allocation` as context 5, 1 MiB.
fn shake_hands(stream: &mut UnixStream) {
    shake_hands_with(stream, OptionReplyCode::ErrUnsupported);
}

/// The same with an answer of choice to extended headers.
fn shake_hands_with(stream: &mut UnixStream, extended: OptionReplyCode) {
    greet(stream);
    loop {
        let option = next_option(stream);
        match option {
            OptionCode::ExtendedHeaders => {
                answer(stream, option, extended, b"");
                continue;
            }
            OptionCode::StructuredReply => {}
            OptionCode::SetMetaContext => {
                let entry = MetaContextEntry {
                    id: 5,
                    name: BASE_ALLOCATION.into(),
                };
                let reply = OptionReplyCode::MetaContext;
                answer(stream, option, reply, &entry.encode());
            }
            OptionCode::Go => {
                let info = Info::Export {
                    size: SIZE,
                    flags: TransmissionFlags(!TransmissionFlags::READ_ONLY.0),
                };
                answer(stream, option, OptionReplyCode::Info, &info.encode());
                answer(stream, option, OptionReplyCode::Ack, b"");
                return;
            }
            other => panic!("a strange option: {other:?}"),
        }
        answer(stream, option, OptionReplyCode::Ack, b"");
    }
}

fn next_request(stream: &mut UnixStream) -> Request {
    let request = Request::decode(&receive(stream, REQUEST_BYTES)).unwrap();
    if request.command == Command::Write {
        receive(stream, request.len as usize);
    }
    request
}

fn chunk(cookie: u64, code: ChunkCode, flags: ChunkFlags, payload: &[u8]) -> Vec<u8> {
    let header = ChunkHeader {
        flags,
        code,
        cookie,
        len: payload.len() as u32,
    };
    let mut message = header.encode().to_vec();
    message.extend_from_slice(payload);
    message
}

fn data(offset: u64, bytes: &[u8]) -> Vec<u8> {
    [&offset.to_be_bytes(), bytes].concat()
}

fn hole(offset: u64, len: u32) -> Vec<u8> {
    transmission::OffsetHole { offset, len }.encode().to_vec()
}

/// The server's answer to a request with that cookie.
type Reply = Box<dyn FnOnce(u64) -> Vec<u8> + Send>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    /// 1000 bytes at 5000.
    Read,
    Flush,
    /// 8192 bytes at 4096.
    Status,
}

/// Returns the client's view of a reply; `Err` is the breach that it found, or the server's error.
fn outcome(ask: Ask, reply: Reply) -> Result<Vec<u8>, ClientError> {
    let server = scripted(move |stream| {
        shake_hands(stream);
        let request = next_request(stream);
        stream.write_all(&reply(request.cookie)).unwrap();
        // Stays until the client leaves.
        let mut rest = Vec::new();
        let _gone = stream.read_to_end(&mut rest);
    });
    let outcome = queue(Backend::Threads).unwrap().block_on(async {
        let client = connect(&server.path, "").await;
        let result = match ask {
            Ask::Read => client
                .read(5000, BufMut::zeroed(1000))
                .await
                .map(|buf| buf.to_vec()),
            Ask::Flush => client.flush().await.map(|()| Vec::new()),
            Ask::Status => client.block_status(4096, 8192).await.map(|extents| {
                extents
                    .iter()
                    .flat_map(|extent| extent.len.to_be_bytes())
                    .collect()
            }),
        };
        if let Err(ClientError::Protocol(_)) = &result {
            assert!(client.flush().await.is_err(), "the connection goes on");
        } else {
            drop(client);
        }
        result
    });
    server.thread.join().unwrap();
    outcome
}

/// The flaw, the request, the server's answer.
type Case = (&'static str, Ask, Reply);

const DONE: ChunkFlags = ChunkFlags::DONE;
const MORE: ChunkFlags = ChunkFlags::empty();

/// Breaches with the data of a read.
fn wrong_data() -> Vec<Case> {
    vec![
        (
            "two replies to one request",
            Ask::Read,
            Box::new(move |cookie| {
                let reply = chunk(cookie, Error, MORE, &[0, 0, 0, 5, 0, 0]);
                let end = chunk(cookie ^ (1 << 32), Nothing, DONE, b"");
                [reply, end].concat()
            }),
        ),
        (
            "a simple reply to a read",
            Ask::Read,
            Box::new(|cookie| {
                let head = encode_simple_reply(cookie, None).to_vec();
                [head, vec![0; 1000]].concat()
            }),
        ),
        (
            "data before the range",
            Ask::Read,
            Box::new(move |c| chunk(c, OffsetData, DONE, &data(4999, &[1; 1000]))),
        ),
        (
            "data beyond the range",
            Ask::Read,
            Box::new(move |c| chunk(c, OffsetData, DONE, &data(5001, &[1; 1000]))),
        ),
        (
            "data at the end of the world",
            Ask::Read,
            Box::new(move |c| chunk(c, OffsetData, DONE, &data(u64::MAX, &[1; 1000]))),
        ),
        (
            "endless data",
            Ask::Read,
            Box::new(move |cookie| {
                let header = ChunkHeader {
                    flags: DONE,
                    code: OffsetData,
                    cookie,
                    len: u32::MAX,
                };
                [header.encode().to_vec(), data(5000, &[1; 1000])].concat()
            }),
        ),
        (
            "a data chunk without data",
            Ask::Read,
            Box::new(move |c| chunk(c, OffsetData, DONE, &data(5000, b""))),
        ),
        (
            "not all data",
            Ask::Read,
            Box::new(move |c| chunk(c, OffsetData, DONE, &data(5000, &[1; 999]))),
        ),
        (
            "no data",
            Ask::Read,
            Box::new(move |c| chunk(c, Nothing, DONE, b"")),
        ),
    ]
}

/// Breaches with holes and block status.
fn wrong_holes_and_statuses() -> Vec<Case> {
    vec![
        (
            "data twice",
            Ask::Read,
            Box::new(move |c| {
                let first = chunk(c, OffsetData, MORE, &data(5000, &[1; 600]));
                let second = chunk(c, OffsetHole, DONE, &hole(5599, 401));
                [first, second].concat()
            }),
        ),
        (
            "a hole beyond the range",
            Ask::Read,
            Box::new(move |c| chunk(c, OffsetHole, DONE, &hole(5000, 1001))),
        ),
        (
            "an empty hole",
            Ask::Read,
            Box::new(move |c| chunk(c, OffsetHole, DONE, &hole(5000, 0))),
        ),
        (
            "a hole of a wrong length",
            Ask::Read,
            Box::new(move |c| chunk(c, OffsetHole, DONE, &[0; 13])),
        ),
        (
            "a simple reply to a status",
            Ask::Status,
            Box::new(|c| encode_simple_reply(c, None).to_vec()),
        ),
        (
            "no status",
            Ask::Status,
            Box::new(move |c| chunk(c, Nothing, DONE, b"")),
        ),
        (
            "a status of another context",
            Ask::Status,
            Box::new(move |c| chunk(c, Status, DONE, &[0, 0, 0, 6, 0, 0, 0, 1, 0, 0, 0, 0])),
        ),
        (
            "a status twice",
            Ask::Status,
            Box::new(move |c| {
                let status = [0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0];
                let first = chunk(c, Status, MORE, &status);
                [first, chunk(c, Status, DONE, &status)].concat()
            }),
        ),
        (
            "an empty extent",
            Ask::Status,
            Box::new(move |c| chunk(c, Status, DONE, &[0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0])),
        ),
    ]
}

/// Breaches that any request may meet.
fn wrong_replies() -> Vec<Case> {
    vec![
        ("strange magic", Ask::Flush, Box::new(|_| vec![1; 16])),
        (
            "a cookie that was never used",
            Ask::Flush,
            Box::new(|cookie| encode_simple_reply(!cookie, None).to_vec()),
        ),
        (
            "data in answer to a flush",
            Ask::Flush,
            Box::new(move |c| chunk(c, OffsetData, DONE, &data(0, b"x"))),
        ),
        (
            "an end that is not the end",
            Ask::Flush,
            Box::new(move |c| chunk(c, Nothing, MORE, b"")),
        ),
        (
            "an end with payload",
            Ask::Flush,
            Box::new(move |c| chunk(c, Nothing, DONE, b"x")),
        ),
        (
            "an unknown chunk",
            Ask::Flush,
            Box::new(move |c| chunk(c, ChunkCode::Unknown(99), DONE, b"")),
        ),
        (
            "an error without an error",
            Ask::Flush,
            Box::new(move |c| chunk(c, Error, DONE, &[0; 6])),
        ),
        (
            "an error message beyond its chunk",
            Ask::Flush,
            Box::new(move |c| chunk(c, Error, DONE, &[0, 0, 0, 5, 0, 9])),
        ),
        (
            "an endless error message",
            Ask::Flush,
            Box::new(move |c| chunk(c, Error, DONE, &[7; 70_000])),
        ),
    ]
}

#[test]
fn replies_that_break_the_rules_end_the_connection() {
    let cases = wrong_data()
        .into_iter()
        .chain(wrong_holes_and_statuses())
        .chain(wrong_replies());
    for (what, ask, reply) in cases {
        let outcome = outcome(ask, reply);
        assert!(
            matches!(outcome, Err(ClientError::Protocol(_))),
            "{what}: {outcome:?}"
        );
    }
}

fn extended_chunk(cookie: u64, code: ChunkCode, offset: u64, payload: &[u8]) -> Vec<u8> {
    let chunk = ChunkHeader {
        flags: DONE,
        code,
        cookie,
        len: payload.len() as u32,
    };
    let header = ExtendedChunkHeader { chunk, offset };
    [&header.encode()[..], payload].concat()
}

/// A status of context 5 with extended headers.
fn extended_status(count: u32, runs: &[(u64, u64)]) -> Vec<u8> {
    let mut payload = [5u32.to_be_bytes(), count.to_be_bytes()].concat();
    for (len, flags) in runs {
        payload.extend(len.to_be_bytes());
        payload.extend(flags.to_be_bytes());
    }
    payload
}

/// Returns the client's view of the server's answer to its question for the status of 8192 bytes at
/// 4096, where extended headers were agreed on.
fn extended_outcome(reply: Vec<u8>) -> Result<Vec<StatusDescriptor>, ClientError> {
    // The first request of a connection.
    let cookie = 1u64 << 32;
    let server = scripted(move |stream| {
        shake_hands_with(stream, OptionReplyCode::Ack);
        let request = receive(stream, EXTENDED_REQUEST_BYTES);
        let request = Request::decode_extended(&request).unwrap();
        assert_eq!((request.cookie, request.len), (cookie, 8192));
        stream.write_all(&reply).unwrap();
        let _gone = stream.read_to_end(&mut Vec::new());
    });
    let outcome = queue(Backend::Threads).unwrap().block_on(async {
        let client = connect(&server.path, "").await;
        let outcome = client.block_status(4096, 8192).await;
        drop(client);
        outcome
    });
    server.thread.join().unwrap();
    outcome
}

#[test]
fn replies_with_extended_headers_that_break_the_rules_end_the_connection() {
    let cookie = 1u64 << 32;
    let extended = |code, offset, payload: &[u8]| extended_chunk(cookie, code, offset, payload);
    let status =
        |count, runs: &[(u64, u64)]| extended(ExtendedStatus, 4096, &extended_status(count, runs));
    let right = status(2, &[(4096, 3), (1 << 40, 0)]);
    let descriptors = extended_outcome(right.clone()).unwrap();
    let runs: Vec<_> = descriptors
        .iter()
        .map(|run| (run.len, run.flags.0))
        .collect();
    assert_eq!(runs, [(4096, 3), (4096, 0)], "the last extent is cut");
    let mut endless = right.clone();
    endless[24] = 1;
    let narrow = [0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0];
    let payload = extended_status(1, &[(4096, 0)]);
    for (what, reply) in [
        (
            "a simple reply",
            [encode_simple_reply(cookie, None).to_vec(), vec![0; 32]].concat(),
        ),
        (
            "a structured reply",
            [chunk(cookie, Status, DONE, &narrow), vec![0; 32]].concat(),
        ),
        ("another offset", extended(ExtendedStatus, 4097, &payload)),
        (
            "another cookie",
            extended_chunk(cookie + 1, ExtendedStatus, 4096, &payload),
        ),
        ("a status of 32 bits", extended(Status, 4096, &narrow)),
        ("fewer runs than it says", status(2, &[(4096, 0)])),
        ("more runs than it says", status(1, &[(4096, 0), (4096, 0)])),
        ("no run", status(0, &[])),
        ("an empty run", status(1, &[(0, 0)])),
        ("a state of 33 bits", status(1, &[(4096, 1 << 32)])),
        ("an endless chunk", endless),
        ("no status", extended(Nothing, 4096, b"")),
    ] {
        let outcome = extended_outcome(reply);
        let broken = matches!(outcome, Err(ClientError::Protocol(_)));
        assert!(broken, "{what}: {outcome:?}");
    }
    // Where they were not agreed on, they are as wrong as anything else.
    let reply: Reply = Box::new(|cookie| extended_chunk(cookie, Nothing, 0, b""));
    assert!(matches!(
        outcome(Ask::Flush, reply),
        Err(ClientError::Protocol(_))
    ));
}

#[test]
fn a_server_with_extended_headers_must_know_how_to_go() {
    let outcome = handshake(|stream| {
        greet(stream);
        assert_eq!(next_option(stream), OptionCode::ExtendedHeaders);
        answer(
            stream,
            OptionCode::ExtendedHeaders,
            OptionReplyCode::Ack,
            b"",
        );
        for option in [OptionCode::SetMetaContext, OptionCode::Go] {
            assert_eq!(next_option(stream), option);
            answer(stream, option, OptionReplyCode::ErrUnsupported, b"");
        }
        let _gone = stream.read_to_end(&mut Vec::new());
    });
    assert!(
        matches!(outcome, Err(ClientError::Protocol(_))),
        "{outcome:?}"
    );
}

#[test]
fn replies_within_the_rules_are_understood() {
    let pieces: Reply = Box::new(move |c| {
        [
            chunk(c, OffsetData, MORE, &data(5900, &[3; 100])),
            chunk(c, OffsetHole, MORE, &hole(5100, 800)),
            chunk(c, OffsetData, MORE, &data(5000, &[1; 100])),
            chunk(c, Nothing, DONE, b""),
        ]
        .concat()
    });
    let expected = [&[1; 100][..], &[0; 800], &[3; 100]].concat();
    assert_eq!(outcome(Ask::Read, pieces).unwrap(), expected);

    let nothing: Reply = Box::new(move |c| chunk(c, Nothing, DONE, b""));
    outcome(Ask::Flush, nothing).unwrap();

    // The last extent may reach beyond what was asked about.
    let long: Reply = Box::new(move |c| {
        let descriptors = [4096, 1 << 30, 5].map(|len| StatusDescriptor {
            len,
            flags: AllocationFlags::empty(),
        });
        let status = transmission::BlockStatus {
            context_id: 5,
            descriptors: descriptors.to_vec(),
        };
        chunk(c, Status, DONE, &status.encode())
    });
    let expected = [4096u64.to_be_bytes(), 4096u64.to_be_bytes()].concat();
    assert_eq!(outcome(Ask::Status, long).unwrap(), expected);

    let payload = |error: u32, offset| {
        ErrorChunk {
            error: error.into(),
            message: "out of paper".into(),
            offset,
        }
        .encode()
    };
    let errors: Vec<(Reply, ErrorCode)> = vec![
        (
            Box::new(move |c| chunk(c, Error, DONE, &payload(28, None))),
            ErrorCode::NoSpc,
        ),
        (
            Box::new(move |c| {
                let first = chunk(c, OffsetData, MORE, &data(5000, &[1; 1000]));
                let second = chunk(c, ErrorOffset, DONE, &payload(5, Some(5500)));
                [first, second].concat()
            }),
            ErrorCode::Io,
        ),
        (
            Box::new(move |c| chunk(c, ChunkCode::Unknown(0x8077), DONE, &payload(22, Some(1)))),
            ErrorCode::Inval,
        ),
    ];
    for (reply, code) in errors {
        match outcome(Ask::Read, reply) {
            Err(ClientError::Request(error)) => {
                assert_eq!((error.code, &*error.message), (code, "out of paper"));
            }
            other => panic!("no error: {other:?}"),
        }
    }
}

#[test]
fn a_server_that_hangs_up_fails_all_requests() {
    let server = scripted(|stream| {
        shake_hands(stream);
        next_request(stream);
    });
    queue(Backend::Threads).unwrap().block_on(async {
        let client = connect(&server.path, "").await;
        let writes: Vec<_> = (0..50)
            .map(|nth| client.write(nth * 4096, Buf::zeroed(4096), Durability::Cached))
            .collect();
        for write in writes {
            assert!(matches!(write.await, Err(ClientError::Io(_))));
        }
        assert!(client.flush().await.is_err());
        assert!(client.disconnect().await.is_err());
    });
    server.thread.join().unwrap();
}

/// The client's verdict on a handshake.
fn handshake(script: impl FnOnce(&mut UnixStream) + Send + 'static) -> Result<(), ClientError> {
    let server = scripted(script);
    let outcome = queue(Backend::Threads).unwrap().block_on(async {
        let stream = Stream::connect_unix(&server.path).await.unwrap();
        let client = Client::connect(stream, &ConnectOptions::new("")).await;
        client.map(|_| ())
    });
    server.thread.join().unwrap();
    outcome
}

#[test]
fn handshakes_that_break_the_rules_fail() {
    let broken = |script: fn(&mut UnixStream)| {
        let outcome = handshake(script);
        assert!(
            matches!(outcome, Err(ClientError::Protocol(_))),
            "{outcome:?}"
        );
    };
    broken(|stream| stream.write_all(b"SSH-2.0-OpenSSH_9.9\r\n").unwrap());
    broken(|stream| {
        greet(stream);
        next_option(stream);
        stream.write_all(&[9; OPTION_REPLY_HEADER_BYTES]).unwrap();
    });
    broken(|stream| {
        greet(stream);
        next_option(stream);
        answer(stream, OptionCode::List, OptionReplyCode::Ack, b"");
    });
    broken(|stream| {
        greet(stream);
        let option = next_option(stream);
        answer(stream, option, OptionReplyCode::Info, &[0; 20_000]);
    });
    broken(|stream| {
        greet(stream);
        let option = next_option(stream);
        let mut message = Vec::new();
        encode_option_reply(&mut message, option, OptionReplyCode::Server, b"");
        // Fails when the client has had enough.
        while stream.write_all(&message).is_ok() {}
    });
    broken(|stream| {
        greet(stream);
        for option in [OptionCode::ExtendedHeaders, OptionCode::StructuredReply] {
            assert_eq!(next_option(stream), option);
            answer(stream, option, OptionReplyCode::ErrUnsupported, b"");
        }
        let option = next_option(stream);
        // No size is sent.
        answer(stream, option, OptionReplyCode::Ack, b"");
    });
    let hung_up = handshake(greet);
    assert!(matches!(hung_up, Err(ClientError::Io(_))), "{hung_up:?}");
}

#[test]
fn old_servers_get_the_old_way() {
    let server = scripted(|stream| {
        stream
            .write_all(&encode_greeting(HandshakeFlags::empty()))
            .unwrap();
        receive(stream, CLIENT_FLAGS_BYTES);
        assert_eq!(next_option(stream), OptionCode::ExportName);
        let flags = TransmissionFlags::HAS_FLAGS;
        stream
            .write_all(&encode_export_name_reply(SIZE, flags))
            .unwrap();
        stream.write_all(&[0; EXPORT_NAME_PADDING_BYTES]).unwrap();
        let request = next_request(stream);
        stream
            .write_all(&encode_simple_reply(request.cookie, None))
            .unwrap();
        stream.write_all(&[7; 100]).unwrap();
        assert_eq!(next_request(stream).command, Command::Disconnect);
    });
    queue(Backend::Threads).unwrap().block_on(async {
        let client = connect(&server.path, "").await;
        assert_eq!(client.size(), SIZE);
        let buf = client.read(0, BufMut::zeroed(100)).await.unwrap();
        assert_eq!(buf[..], [7; 100]);
        let refused = client.flush().await;
        assert!(
            matches!(&refused, Err(ClientError::Request(error)) if error.code == ErrorCode::NotSup)
        );
        assert!(client.block_status(0, 512).await.is_err());
        client.disconnect().await.unwrap();
    });
    server.thread.join().unwrap();
}

#[test]
fn arbitrary_replies_never_panic() {
    const SEED: u64 = 0xfeed_f00d;
    let mut random = Random(SEED);
    for _round in 0..200 {
        let ask = [Ask::Read, Ask::Flush, Ask::Status][random.below(3) as usize];
        let mut random = Random(random.next() | 1);
        let reply: Reply = Box::new(move |cookie| {
            let mut bytes = Vec::new();
            for _ in 0..1 + random.below(4) {
                let payload: Vec<u8> = (0..random.below(40))
                    .map(|_| random.below(9) as u8)
                    .collect();
                let codes = [0, 1, 2, 5, 0x8001, 0x8002, 77];
                let code = ChunkCode::from(codes[random.below(7) as usize]);
                let flags = ChunkFlags(random.below(2) as u16);
                bytes.extend(chunk(cookie, code, flags, &payload));
            }
            bytes.extend([0xff; 20]);
            bytes
        });
        // Whatever it is, it ends; a panic would show, and so would waiting for ever.
        let _ended = outcome(ask, reply);
    }
}

/// The greeting of an oldstyle server: `doc/proto.md`, "Oldstyle negotiation".
fn oldstyle_greeting(flags: u32) -> Vec<u8> {
    let magics = [
        INIT_MAGIC.to_be_bytes(),
        0x0000_4202_8186_1253_u64.to_be_bytes(),
    ];
    let mut greeting = magics.concat();
    greeting.extend(SIZE.to_be_bytes());
    greeting.extend(flags.to_be_bytes());
    greeting.extend([0; 124]);
    greeting
}

/// Connects to an oldstyle server with this greeting, and returns the result.
fn meet_oldstyle(greeting: Vec<u8>, export: &'static str) -> Result<(u64, u16), ClientError> {
    let server = scripted(move |stream| {
        stream.write_all(&greeting).unwrap();
        // Nothing more, until the client has hung up.
        drop(stream.shutdown(std::net::Shutdown::Write));
        drop(stream.read(&mut [0; 64]));
    });
    let met = queue(Backend::Auto).unwrap().block_on(async {
        let stream = Stream::connect_unix(&server.path).await?;
        let client = Client::connect(stream, &ConnectOptions::new(export)).await?;
        Ok((client.export().size, client.export().flags.0))
    });
    server.thread.join().unwrap();
    met
}

#[test]
fn oldstyle_servers_have_one_export_and_no_unknown_flags() {
    assert_eq!(
        meet_oldstyle(oldstyle_greeting(0x25), "").unwrap(),
        (SIZE, 0x25)
    );
    let named = meet_oldstyle(oldstyle_greeting(1), "disk").unwrap_err();
    assert!(
        named.to_string().contains("one export, without a name"),
        "{named}"
    );
    let unknown = meet_oldstyle(oldstyle_greeting(0x1_0001), "").unwrap_err();
    assert!(unknown.to_string().contains("unknown flags"), "{unknown}");
    let mut strange = oldstyle_greeting(1);
    strange[8] = 7;
    let strange = meet_oldstyle(strange, "").unwrap_err();
    assert!(strange.to_string().contains("unknown style"), "{strange}");
    for len in [3, 16, 20, 28, 100, 151] {
        let short = meet_oldstyle(oldstyle_greeting(1)[..len].to_vec(), "");
        assert!(matches!(short, Err(ClientError::Io(_))), "{len}");
    }
}
