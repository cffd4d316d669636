//! Clients that break the rules, each with a healthy client alongside, which must not notice.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::*;
use cowslip_block::disk::MemoryDisk;
use cowslip_nbd::export::Durability;
use cowslip_nbd::protocol::handshake::*;
use cowslip_nbd::protocol::transmission::*;
use cowslip_nbd::protocol::*;
use cowslip_nbd::{Server, ServerOptions};
use cowslip_queue::{Backend, Buf, BufMut};

/// A client that writes, reads back and compares until `stop` is set, in the last MiB.
struct Healthy {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU32>,
    thread: JoinHandle<()>,
}

impl Healthy {
    fn start(running: &Running) -> Healthy {
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU32::new(0));
        let thread = std::thread::spawn({
            let (stop, rounds) = (Arc::clone(&stop), Arc::clone(&rounds));
            let path = running.path.clone();
            move || {
                queue(Backend::Threads).unwrap().block_on(async {
                    let client = connect(&path, "").await;
                    let offset = client.size() - (1 << 20);
                    while !stop.load(Ordering::Relaxed) {
                        let round = rounds.load(Ordering::Relaxed);
                        let data = Buf::copy_of(&[round as u8; 10_000]);
                        let write = client.write(offset, data.clone(), Durability::Cached);
                        write.await.unwrap();
                        let buf = client.read(offset, BufMut::zeroed(10_000)).await.unwrap();
                        assert_eq!(buf[..], data[..]);
                        rounds.store(round + 1, Ordering::Relaxed);
                    }
                    client.disconnect().await.unwrap();
                })
            }
        });
        Healthy {
            stop,
            rounds,
            thread,
        }
    }

    fn was_not_harmed(self) {
        let rounds_before = self.rounds.load(Ordering::Relaxed);
        // The first of these may have begun before the harm was done, the second has not.
        eventually("the healthy client goes on", || {
            self.rounds.load(Ordering::Relaxed) >= rounds_before + 2
        });
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

/// A server, a healthy client beside, and what the hostile one does.
fn beside_a_healthy_client(hostile: impl FnOnce(&Running)) {
    let running =
        Running::with_export(Backend::Auto, Arc::new(MemoryDisk::new("memory", 64 << 20)));
    let healthy = Healthy::start(&running);
    hostile(&running);
    healthy.was_not_harmed();
    eventually("connections end", || running.handle.connections() == 0);
    running.stop();
}

const SEED: u64 = 0x1234_abcd;

#[test]
fn garbage_instead_of_a_handshake() {
    beside_a_healthy_client(|running| {
        let mut random = Random(SEED);
        for round in 0..50 {
            let mut client = RawClient::silent(&running.path);
            let garbage: Vec<u8> = (0..1 + random.below(5000))
                .map(|_| random.next() as u8)
                .collect();
            client.try_send(&garbage);
            client.stream.shutdown(Shutdown::Write).unwrap();
            assert!(client.is_hung_up(), "seed {SEED:#x} round {round}");
        }
    });
}

#[test]
fn unknown_client_flags() {
    beside_a_healthy_client(|running| {
        for flags in [4, 8, u32::MAX] {
            let mut client = RawClient::silent(&running.path);
            client.receive(GREETING_BYTES);
            client.send(&encode_client_flags(ClientFlags(flags)));
            assert!(client.is_hung_up(), "flags {flags}");
        }
    });
}

#[test]
fn options_with_wrong_magic_or_endless_length() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::greeted(&running.path);
        client.send(&[0x49; OPTION_HEADER_BYTES]);
        assert!(client.is_hung_up());
        let mut client = RawClient::greeted(&running.path);
        client.send(&OPTION_MAGIC.to_be_bytes());
        client.send(&u32::from(OptionCode::List).to_be_bytes());
        client.send(&u32::MAX.to_be_bytes());
        assert!(client.is_hung_up());
    });
}

#[test]
fn options_that_are_too_long_unknown_or_malformed_are_refused_and_haggling_goes_on() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::greeted(&running.path);
        let mut answer = |option: OptionCode, data: &[u8]| {
            client.option(option, data);
            client.replies().last().unwrap().0
        };
        let long = vec![b'x'; 500_000];
        let unsupported = OptionReplyCode::ErrUnsupported;
        let invalid = OptionReplyCode::ErrInvalid;
        assert_eq!(answer(OptionCode::List, &long), OptionReplyCode::ErrTooBig);
        assert_eq!(answer(OptionCode::Unknown(4), b"data"), unsupported);
        assert_eq!(answer(OptionCode::Unknown(999), b""), unsupported);
        assert_eq!(
            answer(OptionCode::StartTls, b""),
            OptionReplyCode::ErrPolicy
        );
        assert_eq!(answer(OptionCode::ExtendedHeaders, b"x"), invalid);
        assert_eq!(answer(OptionCode::List, b"data"), invalid);
        assert_eq!(answer(OptionCode::Info, b"\0\0\0\x09name"), invalid);
        let contexts = MetaContextRequest {
            name: String::new(),
            queries: vec![BASE_ALLOCATION.to_owned()],
        };
        let before_structured = answer(OptionCode::SetMetaContext, &contexts.encode());
        assert_eq!(before_structured, invalid);
        assert_eq!(answer(OptionCode::StructuredReply, b"x"), invalid);
        assert_eq!(
            answer(OptionCode::StructuredReply, b""),
            OptionReplyCode::Ack
        );
        assert_eq!(answer(OptionCode::StructuredReply, b""), invalid);
        let strange = InfoRequest {
            name: "strange".into(),
            infos: Vec::new(),
        };
        let unknown = OptionReplyCode::ErrUnknown;
        assert_eq!(answer(OptionCode::Go, &strange.encode()), unknown);
        assert_eq!(answer(OptionCode::Abort, b""), OptionReplyCode::Ack);
        assert!(client.is_hung_up());
    });
}

#[test]
fn an_export_that_does_not_exist() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::greeted(&running.path);
        client.option(OptionCode::ExportName, b"strange");
        assert!(client.is_hung_up());
    });
}

#[test]
fn a_flood_of_options_whose_replies_nobody_reads() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::greeted(&running.path);
        client
            .stream
            .set_write_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        let mut flood = Vec::new();
        for _ in 0..100_000 {
            encode_option(&mut flood, OptionCode::List, b"");
        }
        assert!(!client.try_send(&flood), "the server took it all");
    });
}

#[test]
fn a_flood_of_options_whose_replies_are_read() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::greeted(&running.path);
        let mut reader = RawClient {
            stream: client.stream.try_clone().unwrap(),
        };
        let reading = std::thread::spawn(move || reader.is_hung_up());
        let mut option = Vec::new();
        encode_option(&mut option, OptionCode::List, b"");
        let flood = option.repeat(1000);
        while client.try_send(&flood) {}
        assert!(reading.join().unwrap());
    });
}

#[test]
fn clients_that_vanish_within_a_message() {
    beside_a_healthy_client(|running| {
        let mut option = Vec::new();
        encode_option(&mut option, OptionCode::Go, b"\0\0\0\0\0\0");
        for cut in 0..option.len() {
            RawClient::greeted(&running.path).send(&option[..cut]);
        }
        let request = Request {
            flags: CommandFlags::empty(),
            command: Command::Write,
            cookie: 1,
            offset: 0,
            len: 100_000,
        };
        let mut write = request.encode().to_vec();
        write.extend_from_slice(&[1; 100_000]);
        for cut in [1, 27, 28, 29, 30_000, 60_000, 100_027] {
            RawClient::transmitting(&running.path).send(&write[..cut]);
        }
    });
}

#[test]
fn requests_with_wrong_magic_or_endless_payload() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::transmitting(&running.path);
        client.send(&[0x25; REQUEST_BYTES]);
        assert!(client.is_hung_up());
        for len in [PAYLOAD_BYTES_MAX + 1, u32::MAX] {
            let mut client = RawClient::transmitting(&running.path);
            client.request(Command::Write, 0, len);
            assert!(client.is_hung_up(), "a write of {len} bytes");
        }
    });
}

#[test]
fn garbage_instead_of_requests() {
    beside_a_healthy_client(|running| {
        let mut random = Random(SEED);
        for round in 0..50 {
            let mut client = match round % 2 {
                0 => RawClient::transmitting(&running.path),
                _ => RawClient::structured(&running.path),
            };
            // Valid magic, arbitrary fields; then arbitrary bytes. Kept out of the healthy client's
            // MiB.
            for _ in 0..random.below(20) {
                let request = Request {
                    flags: CommandFlags(random.below(64) as u16),
                    command: Command::from(random.below(10) as u16),
                    cookie: random.next(),
                    offset: random.below(1 << 20),
                    len: random.below(1 << 16),
                };
                client.try_send(&request.encode());
                if request.command == Command::Write {
                    client.try_send(&vec![0; request.len as usize]);
                }
            }
            client.try_send(&[0xff; 64]);
            assert!(client.is_hung_up(), "seed {SEED:#x} round {round}");
        }
    });
}

#[test]
fn requests_beyond_the_end_fail_and_the_connection_goes_on() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::transmitting(&running.path);
        let end = 64 << 20;
        let mut errors = |command: Command, payload: &[u8]| {
            [(end - 10, 20), (end, 20), (u64::MAX - 5, 20)].map(|(offset, len)| {
                client.request(command, offset, len);
                client.send(payload);
                client.simple_reply()
            })
        };
        let [no_space, invalid] = [ErrorCode::NoSpc, ErrorCode::Inval].map(|code| [Some(code); 3]);
        assert_eq!(errors(Command::Write, &[1; 20]), no_space);
        assert_eq!(errors(Command::WriteZeroes, &[]), no_space);
        assert_eq!(errors(Command::Read, &[]), invalid);
        assert_eq!(errors(Command::Trim, &[]), invalid);
        assert_eq!(errors(Command::Cache, &[]), invalid);
        client.request(Command::Flush, 0, 0);
        assert_eq!(client.simple_reply(), None);
    });
}

#[test]
fn what_was_not_agreed_on_is_refused() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::transmitting(&running.path);
        let mut error = |command: Command, flags: CommandFlags, len: u32| {
            client.flagged_request(command, flags, 0, len);
            client.simple_reply()
        };
        let none = CommandFlags::empty();
        let invalid = Some(ErrorCode::Inval);
        assert_eq!(error(Command::BlockStatus, none, 4096), invalid);
        assert_eq!(error(Command::Read, CommandFlags::DF, 4096), invalid);
        assert_eq!(error(Command::Read, CommandFlags::NO_HOLE, 4096), invalid);
        assert_eq!(error(Command::Trim, CommandFlags(1 << 15), 4096), invalid);
        assert_eq!(error(Command::Resize, none, 4096), invalid);
        assert_eq!(error(Command::Unknown(77), none, 4096), invalid);
        assert_eq!(error(Command::Read, none, PAYLOAD_BYTES_MAX + 1), invalid);
        assert_eq!(error(Command::Flush, CommandFlags::FUA, 0), None);
    });
}

#[test]
fn errors_of_structured_replies_carry_a_message() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::structured(&running.path);
        client.request(Command::Read, 64 << 20, 1);
        let (header, payload) = client.chunk();
        assert_eq!(header.flags, ChunkFlags::DONE);
        let error = ErrorChunk::decode(header.code, &payload).unwrap();
        assert_eq!(error.error, ErrorCode::Inval);
        assert!(
            error.message.contains("beyond the end"),
            "{}",
            error.message
        );
    });
}

const PAYLOAD: CommandFlags = CommandFlags::PAYLOAD_LEN;

#[test]
fn extended_headers_are_agreed_on_once_and_for_all() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::greeted(&running.path);
        let mut answer = |option: OptionCode| {
            client.option(option, b"");
            client.replies().last().unwrap().0
        };
        assert_eq!(answer(OptionCode::StructuredReply), OptionReplyCode::Ack);
        assert_eq!(answer(OptionCode::ExtendedHeaders), OptionReplyCode::Ack);
        let twice = answer(OptionCode::ExtendedHeaders);
        assert_eq!(twice, OptionReplyCode::ErrInvalid);
        let less = answer(OptionCode::StructuredReply);
        assert_eq!(less, OptionReplyCode::ErrExtendedHeadersRequired);
        client.option(OptionCode::ExportName, b"");
        assert!(client.is_hung_up(), "the old way was gone");
        let (mut client, _) = RawClient::extended(&running.path, &[]);
        client.request(Command::Read, 0, 512);
        // Headers are longer, so the server waits for more.
        client.send(&[0; 4]);
        assert!(client.is_hung_up(), "a compact request");
    });
}

#[test]
fn payload_is_where_its_flag_says() {
    beside_a_healthy_client(|running| {
        let (mut client, _) = RawClient::extended(&running.path, &[BASE_ALLOCATION]);
        let none = CommandFlags::empty();
        let invalid = Some(ErrorCode::Inval);
        client.extended_request(Command::Write, PAYLOAD, (0, 512), &[7; 512]);
        assert_eq!(client.extended_error(0), None);
        client.extended_request(Command::Write, none, (0, 512), &[7; 512]);
        assert_eq!(client.extended_error(0), None, "QEMU's way");
        for command in [
            Command::Read,
            Command::Flush,
            Command::Trim,
            Command::Unknown(99),
        ] {
            client.extended_request(command, PAYLOAD, (512, 100_000), &[1; 100_000]);
            assert_eq!(client.extended_error(512), invalid, "{command:?} has none");
        }
        let beyond = (64 << 20, 4096);
        client.extended_request(Command::Write, PAYLOAD, beyond, &[1; 4096]);
        assert_eq!(client.extended_error(beyond.0), Some(ErrorCode::NoSpc));
        for range in [(0, u64::MAX), (1, u64::MAX), (0, 1 << 40), (64 << 20, 1)] {
            for command in [Command::Trim, Command::Cache, Command::BlockStatus] {
                client.extended_request(command, none, range, b"");
                assert_eq!(
                    client.extended_error(range.0),
                    invalid,
                    "{command:?} {range:?}"
                );
            }
        }
        client.extended_request(Command::Read, none, (0, 513), b"");
        let (header, data) = client.extended_chunk(0);
        assert_eq!(
            (header.code, header.flags),
            (ChunkCode::OffsetData, ChunkFlags::DONE)
        );
        assert_eq!(data[8..], [&[7; 512][..], &[0]].concat());
        for command in [Command::Write, Command::Read, Command::BlockStatus] {
            let (mut client, _) = RawClient::extended(&running.path, &[BASE_ALLOCATION]);
            let len = u64::from(PAYLOAD_BYTES_MAX) + 1;
            client.extended_request(command, PAYLOAD, (0, len), b"");
            assert!(client.is_hung_up(), "{command:?} with endless payload");
        }
    });
}

#[test]
fn the_status_of_chosen_contexts_is_sent() {
    let export = export_with_contexts(MemoryDisk::new("memory", 1 << 40), &["a:b", "c:d"]);
    let running = Running::with_export(Backend::Auto, export);
    let (mut client, ids) = RawClient::extended(&running.path, &["c:d", BASE_ALLOCATION]);
    let mut statuses = |flags: CommandFlags, len: u64, payload: &[u8]| {
        client.extended_request(Command::BlockStatus, flags, (4096, len), payload);
        let mut statuses = Vec::new();
        loop {
            let (header, payload) = client.extended_chunk(4096);
            if header.code != ChunkCode::ExtendedStatus {
                return Err(ErrorChunk::decode(header.code, &payload).unwrap().error);
            }
            let status = BlockStatus::decode_extended(&payload).unwrap();
            let runs = status.descriptors.iter().map(|run| (run.len, run.flags.0));
            statuses.push((status.context_id, runs.collect::<Vec<_>>()));
            if header.flags == ChunkFlags::DONE {
                return Ok(statuses);
            }
        }
    };
    let len = 1 << 33;
    let [base, other] = [(ids[0], vec![(len, 3)]), (ids[1], vec![(len, 0)])];
    let none = CommandFlags::empty();
    assert_eq!(
        statuses(none, len, b""),
        Ok(vec![base.clone(), other.clone()])
    );
    let mut narrowed = |len: u64, context_ids: &[u32]| {
        let context_ids = context_ids.to_vec();
        let query = StatusQuery { len, context_ids }.encode();
        statuses(PAYLOAD, query.len() as u64, &query)
    };
    assert_eq!(narrowed(len, &[ids[1]]), Ok(vec![other.clone()]));
    assert_eq!(
        narrowed(len, &[ids[1], ids[0]]),
        Ok(vec![other, base.clone()])
    );
    let invalid = Err(ErrorCode::Inval);
    assert_eq!(narrowed(len, &[]), invalid, "nothing");
    assert_eq!(narrowed(len, &[ids[0], ids[0]]), invalid, "one twice");
    assert_eq!(
        narrowed(len, &[ids[0], ids[1], 77]),
        invalid,
        "more than there are"
    );
    assert_eq!(narrowed(len, &[77]), invalid, "one that was not selected");
    assert_eq!(narrowed(0, &ids), invalid, "an empty range");
    assert_eq!(narrowed(u64::MAX, &ids), invalid, "beyond the end");
    let half = [&len.to_be_bytes()[..], &[0, 0]].concat();
    assert_eq!(
        statuses(PAYLOAD, half.len() as u64, &half),
        invalid,
        "half an identifier"
    );
    assert_eq!(statuses(PAYLOAD, 20_000, &[0; 20_000]), invalid, "too long");
    assert_eq!(
        statuses(CommandFlags::REQ_ONE, 512, b"").map(|all| all.len()),
        Ok(2)
    );
}

#[test]
fn holes_are_sent_as_holes_unless_fragments_are_refused() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::structured(&running.path);
        client.request(Command::Read, 512, 8192);
        let (header, payload) = client.chunk();
        assert_eq!(header.code, ChunkCode::OffsetHole);
        let hole = OffsetHole {
            offset: 512,
            len: 8192,
        };
        assert_eq!(OffsetHole::decode(&payload), Ok(hole));
        client.flagged_request(Command::Read, CommandFlags::DF, 512, 8192);
        let (header, payload) = client.chunk();
        assert_eq!(header.code, ChunkCode::OffsetData);
        assert_eq!(payload[..8], 512u64.to_be_bytes());
        assert_eq!(payload[8..], [0; 8192]);
        client.request(Command::Read, 512, 0);
        assert_eq!(client.chunk().0.code, ChunkCode::None);
    });
}

#[test]
fn a_single_extent_is_sent_where_one_is_asked_for() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::structured(&running.path);
        client.request(Command::Write, 4096, 4096);
        client.send(&[1; 4096]);
        assert_eq!(client.simple_reply(), None);
        for (flags, count) in [(CommandFlags::REQ_ONE, 1), (CommandFlags::empty(), 3)] {
            client.flagged_request(Command::BlockStatus, flags, 0, 16_384);
            let (header, payload) = client.chunk();
            assert_eq!(header.code, ChunkCode::BlockStatus);
            let status = BlockStatus::decode(&payload).unwrap();
            assert_eq!(status.descriptors.len(), count);
        }
    });
}

#[test]
fn a_client_that_vanishes_leaves_its_requests_running() {
    let export = Arc::new(HoldingDisk::new(1 << 20, usize::MAX));
    let running = Running::with_export(Backend::Auto, Arc::<HoldingDisk>::clone(&export));
    let mut client = RawClient::transmitting(&running.path);
    for nth in 0..50 {
        client.request(Command::Write, nth * 100, 100);
        client.send(&[9; 100]);
    }
    client.request(Command::Write, 5000, 100);
    client.send(&[9; 40]);
    eventually("requests start", || export.held_now() == 50);
    drop(client);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(running.handle.connections(), 1, "it waits for its requests");
    export.open();
    eventually("the connection ends", || running.handle.connections() == 0);
    assert_eq!(export.finished(), 50);
    let mut client = RawClient::transmitting(&running.path);
    client.request(Command::Read, 0, 6000);
    assert_eq!(client.simple_reply(), None);
    let data = client.receive(6000);
    assert_eq!(data[..5000], [9; 5000]);
    assert_eq!(data[5000..], [0; 1000], "half a payload was written");
}

#[test]
fn replies_come_in_the_order_in_which_requests_end() {
    let export = Arc::new(HoldingDisk::new(1 << 20, 100));
    let running = Running::with_export(Backend::Auto, Arc::<HoldingDisk>::clone(&export));
    let mut client = RawClient::transmitting(&running.path);
    for cookie in 0..100 {
        let request = Request {
            flags: CommandFlags::empty(),
            command: Command::Write,
            cookie,
            offset: 0,
            len: 1,
        };
        client.send(&request.encode());
        client.send(b"x");
    }
    let cookies: Vec<u64> = (0..100)
        .map(|_| {
            let reply = client.receive(SIMPLE_REPLY_BYTES);
            match ReplyHeader::decode_front(&reply) {
                Ok(Some((_, ReplyHeader::Simple { cookie, .. }))) => cookie,
                other => panic!("no simple reply: {other:?}"),
            }
        })
        .collect();
    let last_first: Vec<u64> = (0..100).rev().collect();
    assert_eq!(cookies, last_first);
}

#[test]
fn a_client_that_leaves_politely_gets_all_its_replies() {
    let running =
        Running::with_export(Backend::Auto, Arc::new(MemoryDisk::new("memory", 64 << 20)));
    for polite in [true, false] {
        let mut client = RawClient::transmitting(&running.path);
        for _ in 0..200 {
            client.request(Command::Write, 0, 4096);
            client.send(&[1; 4096]);
        }
        match polite {
            true => client.request(Command::Disconnect, 0, 0),
            false => client.stream.shutdown(Shutdown::Write).unwrap(),
        }
        for _ in 0..200 {
            assert_eq!(client.simple_reply(), None);
        }
        assert!(client.is_hung_up());
    }
}

#[test]
fn a_client_that_reads_no_replies_makes_no_more_requests_run() {
    beside_a_healthy_client(|running| {
        let mut client = RawClient::transmitting(&running.path);
        client
            .stream
            .set_write_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        let read = Request {
            flags: CommandFlags::empty(),
            command: Command::Read,
            cookie: 0,
            offset: 0,
            len: 1 << 20,
        };
        // 20 000 replies of 1 MiB would be 20 GiB of memory.
        assert!(!client.try_send(&read.encode().repeat(20_000)));
    });
}

#[test]
fn a_read_only_export_takes_no_writes() {
    let export = Arc::new(MemoryDisk::new("memory", 1 << 20).read_only());
    let running = Running::with_export(Backend::Auto, export);
    let mut client = RawClient::transmitting(&running.path);
    client.request(Command::Write, 0, 3);
    client.send(b"abc");
    assert_eq!(client.simple_reply(), Some(ErrorCode::Perm));
    for command in [Command::Trim, Command::WriteZeroes] {
        client.request(command, 0, 3);
        assert_eq!(client.simple_reply(), Some(ErrorCode::Perm));
    }
    client.request(Command::Read, 0, 3);
    assert_eq!(client.simple_reply(), None);
    assert_eq!(client.receive(3), [0; 3]);
}

#[test]
fn a_client_that_does_not_choose_is_disconnected_in_time() {
    let mut server = Server::new(ServerOptions {
        handshake_timeout: Duration::from_millis(100),
        ..ServerOptions::default()
    });
    server.add_export("", Arc::new(MemoryDisk::new("memory", 1 << 20)));
    let running = Running::start(Backend::Auto, server);
    let mut chosen = RawClient::transmitting(&running.path);
    let start = Instant::now();
    let mut silent = RawClient::silent(&running.path);
    let mut greeted = RawClient::greeted(&running.path);
    assert!(silent.is_hung_up() && greeted.is_hung_up());
    assert!(start.elapsed() >= Duration::from_millis(90));
    chosen.request(Command::Flush, 0, 0);
    assert_eq!(chosen.simple_reply(), None, "one that has chosen may stay");
}
