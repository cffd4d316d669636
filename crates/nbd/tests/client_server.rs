//! Our client against our server, on both kinds of queue.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::*;
use cowslip_block::disk::MemoryDisk;
use cowslip_nbd::client::ClientError;
use cowslip_nbd::export::{Durability, Space, ZeroOptions};
use cowslip_nbd::protocol::handshake::{MetaContextEntry, MetaContextRequest};
use cowslip_nbd::protocol::transmission::{BlockStatus, StatusDescriptor};
use cowslip_nbd::protocol::{
    ALLOCATION_DEPTH, AllocationFlags, BASE_ALLOCATION, ChunkCode, ChunkFlags, Command, ErrorCode,
    OptionCode, OptionReplyCode, TransmissionFlags,
};
use cowslip_nbd::server::Lifetime;
use cowslip_nbd::{Client, ConnectOptions, Export, Server, ServerEvent, ServerOptions};
use cowslip_queue::{Backend, Buf, BufMut, IoVec, Listener, SharedMemory, Stream, sleep, spawn};

const ZEROES: ZeroOptions = ZeroOptions {
    space: Space::Release,
    durability: Durability::Cached,
    fast_only: false,
};

/// Time that clients have to take their replies.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs a test on each pair of queues: the server's and the client's are of one kind.
fn on_both_backends(test: impl Fn(Backend, &cowslip_queue::Queue)) {
    for backend in BACKENDS {
        if let Some(queue) = queue(backend) {
            test(backend, &queue);
        }
    }
}

/// Random requests, checked against an array; one client with all features, one with none.
#[test]
fn what_was_written_is_read() {
    const SIZE: u64 = 3 << 20;
    const SEED: u64 = 0x0bad_5eed;
    on_both_backends(|backend, queue| {
        let running = Running::with_export(backend, Arc::new(MemoryDisk::new("memory", SIZE)));
        queue.block_on(async {
            for (structured, extended) in [(true, true), (true, false), (false, false)] {
                let stream = Stream::connect_unix(&running.path).await.unwrap();
                let options = ConnectOptions {
                    structured_replies: structured,
                    extended_headers: extended,
                    block_status: structured,
                    ..ConnectOptions::new("")
                };
                let client = Client::connect(stream, &options).await.unwrap();
                assert_eq!(client.export().extended_headers, extended);
                client.write_zeroes(0, SIZE, ZEROES).await.unwrap();
                let mut random = Random(SEED);
                let mut model = vec![0u8; SIZE as usize];
                for step in 0..1500 {
                    random_step(&client, &mut random, &mut model)
                        .await
                        .unwrap_or_else(|error| panic!("seed {SEED:#x} step {step}: {error}"));
                }
                let buf = client.read(0, BufMut::zeroed(SIZE as usize)).await.unwrap();
                assert!(buf[..] == model[..], "seed {SEED:#x}: the end differs");
                client.disconnect().await.unwrap();
            }
        });
        running.stop();
    });
}

/// Bytes that a client has written are the system's when its connection has ended, in order or not,
/// even if it has flushed nothing.
#[test]
fn what_a_client_leaves_is_handed_over() {
    on_both_backends(|backend, queue| {
        let disk = Arc::new(HoldingDisk::new(1 << 20, 1));
        let running = Running::with_export(backend, Arc::<HoldingDisk>::clone(&disk));
        for (written, leaves) in [(1, true), (2, false)] {
            queue.block_on(async {
                let client = connect(&running.path, "").await;
                let data = Buf::copy_of(&[7; 512]);
                client.write(0, data, Durability::Cached).await.unwrap();
                assert_eq!(disk.handed_over(), written - 1);
                if leaves {
                    client.disconnect().await.unwrap();
                }
            });
            eventually("handed over", || disk.handed_over() == written);
        }
        running.stop();
    });
}

/// Memory that is not the client's, in pieces, is sent as it is, and as one request.
#[test]
fn a_list_of_a_guests_memory_is_one_request() {
    on_both_backends(|backend, queue| {
        let disk = Arc::new(HoldingDisk::new(1 << 20, 1));
        let running = Running::with_export(backend, Arc::<HoldingDisk>::clone(&disk));
        let memory = SharedMemory::new(64 << 10);
        let bytes: Vec<u8> = (0..64 << 10).map(|at| (at / 7) as u8).collect();
        memory.write(0, &bytes);
        let pages = [9, 2, 3, 15, 0].map(|page| page * 4096..(page + 1) * 4096);
        let expected = pages.clone().map(|page| &bytes[page]).concat();
        let list: IoVec = pages
            .map(|page| IoVec::shared(&memory, page))
            .into_iter()
            .collect();
        assert_eq!(list.segment_count(), 4, "two follow one another");
        queue.block_on(async {
            let client = connect(&running.path, "").await;
            client.write(512, list, Durability::Cached).await.unwrap();
            assert_eq!(disk.finished(), 1);
            let read = client
                .read(512, BufMut::zeroed(expected.len()))
                .await
                .unwrap();
            assert!(read[..] == expected[..]);
            client.disconnect().await.unwrap();
        });
        running.stop();
    });
}

async fn random_step(
    client: &Client,
    random: &mut Random,
    model: &mut [u8],
) -> Result<(), ClientError> {
    let size = model.len() as u64;
    let offset = random.below(size);
    let longest = match random.below(10) {
        0 => size,
        1..4 => 100_000,
        _ => 8192,
    };
    let len = 1 + random.below(longest.min(size - offset));
    let range = offset as usize..(offset + len) as usize;
    match random.below(6) {
        0..2 => {
            let byte = random.next() as u8;
            let data: Vec<u8> = (0..len).map(|at| byte.wrapping_add(at as u8)).collect();
            model[range].copy_from_slice(&data);
            let durability = match random.below(2) {
                0 => Durability::Cached,
                _ => Durability::Durable,
            };
            client.write(offset, Buf::from(data), durability).await
        }
        2 => {
            model[range].fill(0);
            client.write_zeroes(offset, len, ZEROES).await
        }
        3 => client.flush().await,
        _ => {
            let mut buf = BufMut::zeroed(len as usize);
            buf.fill(0xee);
            let buf = client.read(offset, buf).await?;
            assert!(buf[..] == model[range], "{len} bytes at {offset} differ");
            Ok(())
        }
    }
}

#[test]
fn many_requests_are_in_flight_and_answered_out_of_order() {
    // The server's limit: beyond it a connection is not read.
    const LIMIT: usize = 256;
    const REQUESTS: usize = 400;
    on_both_backends(|backend, queue| {
        let export = Arc::new(HoldingDisk::new(1 << 30, LIMIT));
        let running = Running::with_export(backend, Arc::<HoldingDisk>::clone(&export));
        let order = Rc::new(RefCell::new(Vec::new()));
        queue.block_on(async {
            let client = Rc::new(connect(&running.path, "").await);
            for nth in 0..REQUESTS {
                let (client, order) = (Rc::clone(&client), Rc::clone(&order));
                // A task asks and waits at once, so that it is woken in the order of the replies.
                spawn(async move {
                    let data = Buf::copy_of(&[nth as u8; 4096]);
                    let write = client.write(nth as u64 * 4096, data, Durability::Cached);
                    write.await.unwrap();
                    order.borrow_mut().push(nth);
                });
            }
            while order.borrow().len() < REQUESTS {
                sleep(Duration::from_millis(1)).await;
            }
            for nth in 0..REQUESTS {
                let buf = client.read(nth as u64 * 4096, BufMut::zeroed(4096));
                assert_eq!(buf.await.unwrap()[..], [nth as u8; 4096]);
            }
            let client = Rc::into_inner(client).expect("all its requests are done");
            client.disconnect().await.unwrap();
        });
        assert_eq!(export.peak(), LIMIT, "requests in flight");
        let reversed: Vec<usize> = (0..LIMIT).rev().collect();
        assert_eq!(order.borrow()[..LIMIT], reversed, "the last came first");
        running.stop();
    });
}

#[test]
fn bytes_in_flight_are_bounded_too() {
    const MIB: usize = 1 << 20;
    let queue = queue(Backend::Threads).unwrap();
    let export = Arc::new(HoldingDisk::new(1 << 30, usize::MAX));
    let mut server = Server::new(ServerOptions {
        bytes_in_flight_max: 10 * MIB,
        ..ServerOptions::default()
    });
    server.add_export("", Arc::<HoldingDisk>::clone(&export));
    let running = Running::start(Backend::Threads, server);
    queue.block_on(async {
        let client = connect(&running.path, "").await;
        let requests: Vec<_> = (0..40)
            .map(|nth| client.read(nth, BufMut::zeroed(3 * MIB)))
            .collect();
        while export.held_now() < 3 {
            sleep(Duration::from_millis(1)).await;
        }
        sleep(Duration::from_millis(50)).await;
        assert_eq!(export.held_now(), 3, "the fourth would exceed 10 MiB");
        export.open();
        for request in requests {
            request.await.unwrap();
        }
        // A single request may exceed the limit.
        client.read(0, BufMut::zeroed(32 * MIB)).await.unwrap();
        client.disconnect().await.unwrap();
    });
}

#[test]
fn eight_clients_at_once() {
    on_both_backends(|backend, queue| {
        let export = Arc::new(MemoryDisk::new("memory", 64 << 20));
        let running = Running::with_export(backend, export);
        let done = Rc::new(RefCell::new(0));
        queue.block_on(async {
            for nth in 0..8u8 {
                let (path, done) = (running.path.clone(), Rc::clone(&done));
                spawn(async move {
                    let client = connect(&path, "").await;
                    // Each has every eighth block, so that all of them touch every page range.
                    let offset = |block: u64| (block * 8 + u64::from(nth)) * 1000;
                    for round in 0..4u8 {
                        let data = Buf::copy_of(&[nth * 16 + round; 1000]);
                        let writes: Vec<_> = (0..100)
                            .map(|block| {
                                client.write(offset(block), data.clone(), Durability::Cached)
                            })
                            .collect();
                        for write in writes {
                            write.await.unwrap();
                        }
                        client.flush().await.unwrap();
                        for block in 0..100 {
                            let buf = client.read(offset(block), BufMut::zeroed(1000));
                            assert_eq!(buf.await.unwrap()[..], data[..]);
                        }
                    }
                    client.disconnect().await.unwrap();
                    *done.borrow_mut() += 1;
                });
            }
            while *done.borrow() < 8 {
                sleep(Duration::from_millis(1)).await;
            }
        });
        assert_eq!(running.handle.connections_ever(), 8);
        running.stop();
    });
}

#[test]
fn block_status_distinguishes_data_from_holes() {
    on_both_backends(|backend, queue| {
        let running = Running::with_export(backend, Arc::new(MemoryDisk::new("memory", 1 << 20)));
        queue.block_on(async {
            let client = connect(&running.path, "").await;
            let data = Buf::copy_of(&[1; 4096]);
            client.write(8192, data, Durability::Cached).await.unwrap();
            let extents = client.block_status(0, 1 << 20).await.unwrap();
            let hole = AllocationFlags::HOLE.with(AllocationFlags::ZERO);
            let reply: Vec<_> = extents.iter().map(|e| (e.len, e.flags)).collect();
            let rest = (1 << 20) - 8192 - 4096;
            let expected = [(8192, hole), (4096, AllocationFlags::empty()), (rest, hole)];
            assert_eq!(reply, expected);
            client.disconnect().await.unwrap();
        });
    });
}

#[test]
fn lengths_have_64_bits_with_extended_headers_only() {
    const SIZE: u64 = 20 << 30;
    let running = Running::with_export(Backend::Auto, Arc::new(MemoryDisk::new("memory", SIZE)));
    queue(Backend::Auto).unwrap().block_on(async {
        let stream = Stream::connect_unix(&running.path).await.unwrap();
        let compact = ConnectOptions {
            extended_headers: false,
            ..ConnectOptions::new("")
        };
        let compact = Client::connect(stream, &compact).await.unwrap();
        let refused = compact.block_status(0, 5 << 30).await;
        assert!(
            matches!(&refused, Err(ClientError::Request(error)) if error.code == ErrorCode::Overflow)
        );
        let client = connect(&running.path, "").await;
        let at = 9 << 30;
        let data = Buf::copy_of(&[1; 8192]);
        for offset in [at, SIZE - 8192] {
            let write = client.write(offset, data.clone(), Durability::Cached);
            write.await.unwrap();
        }
        let reply = |runs: Vec<StatusDescriptor>| {
            let reply = runs.iter().map(|run| (run.len, run.flags.0));
            reply.collect::<Vec<_>>()
        };
        let status = client.block_status(0, SIZE).await.unwrap();
        let rest = SIZE - at - 2 * 8192;
        assert_eq!(reply(status), [(at, 3), (8192, 0), (rest, 3), (8192, 0)]);
        client.trim(0, at + 4096, Durability::Cached).await.unwrap();
        let status = client.block_status(4096, SIZE - 4096).await.unwrap();
        assert_eq!(reply(status)[..2], [(at, 3), (4096, 0)]);
        client.write_zeroes(4096, SIZE - 4096, ZEROES).await.unwrap();
        let status = client.block_status(0, SIZE).await.unwrap();
        assert_eq!(reply(status), [(SIZE, 3)]);
    });
}

/// Exports for the tests of names and listings.
fn two_exports() -> Server {
    let mut server = Server::new(ServerOptions::default());
    server.add_export("", Arc::new(MemoryDisk::new("memory", 1 << 20)));
    let golden = Arc::new(MemoryDisk::new("golden", 12_345).read_only());
    let golden = Export {
        description: "a golden image".into(),
        rotational: true,
        ..golden.into()
    };
    server.add_export("golden", golden);
    server
}

#[test]
fn exports_are_found_by_name_and_listed() {
    on_both_backends(|backend, queue| {
        let running = Running::start(backend, two_exports());
        queue.block_on(async {
            assert_eq!(connect(&running.path, "").await.size(), 1 << 20);
            let golden = connect(&running.path, "golden").await;
            assert_eq!(golden.size(), 12_345);
            let read_only = TransmissionFlags::READ_ONLY.with(TransmissionFlags::ROTATIONAL);
            assert!(golden.export().flags.contains(read_only));
            let refused = golden.write(0, Buf::zeroed(1), Durability::Cached).await;
            assert!(
                matches!(&refused, Err(ClientError::Request(error)) if error.code == ErrorCode::Perm)
            );

            let stream = Stream::connect_unix(&running.path).await.unwrap();
            let strange = Client::connect(stream, &ConnectOptions::new("strange")).await;
            assert!(matches!(
                strange.map(|_| ()),
                Err(ClientError::Refused {
                    reply: OptionReplyCode::ErrUnknown,
                    ..
                })
            ));

            let stream = Stream::connect_unix(&running.path).await.unwrap();
            let exports = Client::list(stream, None).await.unwrap();
            let reply: Vec<_> = exports
                .iter()
                .map(|e| (&*e.name, e.size, &*e.description))
                .collect();
            let expected = [("", 1 << 20, ""), ("golden", 12_345, "a golden image")];
            assert_eq!(reply, expected);
            assert_eq!(exports[1].contexts, ["base:allocation"]);
            assert_eq!(exports[1].block_sizes.unwrap().minimum, 1);
        });
    });
}

#[test]
fn requests_that_cannot_be_fail_without_being_sent() {
    let queue = queue(Backend::Threads).unwrap();
    let running = Running::with_export(Backend::Threads, Arc::new(MemoryDisk::new("memory", 4096)));
    queue.block_on(async {
        let client = connect(&running.path, "").await;
        let code = |result: Result<(), ClientError>| match result {
            Err(ClientError::Request(error)) => error.code,
            other => panic!("not refused: {other:?}"),
        };
        let beyond = client.write(4000, Buf::zeroed(97), Durability::Cached);
        assert_eq!(code(beyond.await), ErrorCode::Inval);
        let overflowing = client.trim(u64::MAX, 2, Durability::Cached);
        assert_eq!(code(overflowing.await), ErrorCode::Inval);
        let long = client.read(0, BufMut::zeroed((32 << 20) + 1)).await;
        assert_eq!(code(long.map(|_| ())), ErrorCode::Overflow);
        client.flush().await.unwrap();
    });
}

#[test]
fn a_stopped_server_finishes_what_was_started() {
    on_both_backends(|backend, queue| {
        let export = Arc::new(HoldingDisk::new(1 << 20, usize::MAX));
        let running = Running::with_export(backend, Arc::<HoldingDisk>::clone(&export));
        queue.block_on(async {
            let client = connect(&running.path, "").await;
            let writes: Vec<_> = (0..20)
                .map(|nth| client.write(nth * 512, Buf::zeroed(512), Durability::Cached))
                .collect();
            while export.held_now() < 20 {
                sleep(Duration::from_millis(1)).await;
            }
            running.handle.stop();
            sleep(Duration::from_millis(50)).await;
            assert!(!running.has_ended(), "it ended with requests in flight");
            export.open();
            for write in writes {
                write.await.unwrap();
            }
            let late = client.flush().await;
            assert!(late.is_err(), "it read a request after it was stopped");
        });
        running.join();
    });
}

#[test]
fn a_server_may_end_with_its_last_client() {
    let queue = queue(Backend::Threads).unwrap();
    let mut server = Server::new(ServerOptions {
        lifetime: Lifetime::UntilLastClient,
        ..ServerOptions::default()
    });
    server.add_export("", Arc::new(MemoryDisk::new("memory", 1 << 20)));
    let running = Running::start(Backend::Threads, server);
    queue.block_on(async {
        let stream = Stream::connect_unix(&running.path).await.unwrap();
        Client::list(stream, None).await.unwrap();
        running.handle.idle().await;
        let first = connect(&running.path, "").await;
        let second = connect(&running.path, "").await;
        first.disconnect().await.unwrap();
        second.flush().await.unwrap();
        second.disconnect().await.unwrap();
    });
    running.join();
}

#[test]
fn connections_beyond_the_limit_wait() {
    let queue = queue(Backend::Threads).unwrap();
    let mut server = Server::new(ServerOptions {
        connections_max: Some(2),
        ..ServerOptions::default()
    });
    server.add_export("", Arc::new(MemoryDisk::new("memory", 1 << 20)));
    let running = Running::start(Backend::Threads, server);
    queue.block_on(async {
        let first = connect(&running.path, "").await;
        let second = connect(&running.path, "").await;
        let third = Rc::new(RefCell::new(None));
        spawn({
            let (path, third) = (running.path.clone(), Rc::clone(&third));
            async move {
                let client = connect(&path, "").await;
                third.replace(Some(client));
            }
        });
        sleep(Duration::from_millis(50)).await;
        assert!(third.borrow().is_none(), "the third was served");
        assert_eq!(running.handle.connections(), 2);
        first.disconnect().await.unwrap();
        while third.borrow().is_none() {
            sleep(Duration::from_millis(1)).await;
        }
        second.disconnect().await.unwrap();
    });
}

#[test]
fn a_server_reports_events_also_on_tcp_and_on_the_queue_of_its_client() {
    on_both_backends(|_, queue| {
        let events = Arc::new(Mutex::new(Vec::new()));
        let mut server = two_exports();
        server.observe({
            let events = Arc::clone(&events);
            move |event| events.lock().unwrap().push(event.clone())
        });
        let handle = server.handle();
        let listener = Listener::tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        queue.block_on(async {
            spawn(server.serve(vec![listener]));
            let stream = Stream::connect_tcp(address).await.unwrap();
            let golden = ConnectOptions::new("golden");
            let client = Client::connect(stream, &golden).await.unwrap();
            let buf = client.read(345, BufMut::zeroed(12_000)).await.unwrap();
            assert_eq!(buf[..], [0; 12_000]);
            client.disconnect().await.unwrap();
            handle.idle().await;
            handle.stop();
        });
        let events = events.lock().unwrap();
        let chosen = |event: &ServerEvent| matches!(event, ServerEvent::Chosen { export, .. } if export == "golden");
        assert!(matches!(
            events[0],
            ServerEvent::Connected { connection: 1 }
        ));
        assert!(events.iter().any(chosen), "{events:?}");
        assert!(matches!(
            events.last(),
            Some(ServerEvent::Disconnected {
                connection: 1,
                reason: None
            })
        ));
    });
}

const BITMAP: &str = "qemu:dirty-bitmap:b";
const OTHER_BITMAP: &str = "qemu:dirty-bitmap:x:";

/// A server of an export with contexts and of one, `plain`, with none but the usual one; and a
/// client that is about to choose.
fn with_contexts() -> (Running, RawClient) {
    let contexts = [ALLOCATION_DEPTH, BITMAP, BITMAP, OTHER_BITMAP];
    let export = export_with_contexts(MemoryDisk::new("memory", 1 << 20), &contexts);
    let mut server = Server::new(ServerOptions::default());
    server.add_export("", export);
    server.add_export("plain", Arc::new(MemoryDisk::new("memory", 1 << 20)));
    let running = Running::start(Backend::Auto, server);
    let mut haggler = RawClient::greeted(&running.path);
    haggler.option(OptionCode::StructuredReply, b"");
    haggler.replies();
    (running, haggler)
}

/// The contexts that an option about this export is answered with.
fn contexts(
    haggler: &mut RawClient,
    option: OptionCode,
    export: &str,
    queries: &[&str],
) -> Vec<(u32, String)> {
    let request = MetaContextRequest {
        name: export.to_owned(),
        queries: queries.iter().map(|&query| query.to_owned()).collect(),
    };
    haggler.option(option, &request.encode());
    let mut replies = haggler.replies();
    assert_eq!(replies.pop().unwrap().0, OptionReplyCode::Ack);
    let entries = replies
        .iter()
        .map(|(_, data)| MetaContextEntry::decode(data).unwrap());
    entries.map(|entry| (entry.id, entry.name)).collect()
}

#[test]
fn contexts_are_listed_by_name_and_by_namespace() {
    let (_running, mut haggler) = with_contexts();
    let mut reply = |export: &str, queries: &[&str]| {
        contexts(&mut haggler, OptionCode::ListMetaContext, export, queries)
    };
    let listed = |names: &[&str]| {
        let names = names.iter().map(|&name| (0, name.to_owned()));
        names.collect::<Vec<_>>()
    };
    let (base, depth) = (BASE_ALLOCATION, ALLOCATION_DEPTH);
    let bitmaps = [BITMAP, BITMAP, OTHER_BITMAP];
    let all = [&[base, depth], &bitmaps[..]].concat();
    assert_eq!(reply("", &[]), listed(&all));
    assert_eq!(reply("", &["qemu:"]), listed(&all[1..]));
    let of_one_name_too = listed(&bitmaps);
    assert_eq!(reply("", &["qemu:dirty-bitmap:"]), of_one_name_too);
    assert_eq!(reply("", &[OTHER_BITMAP]), listed(&[OTHER_BITMAP]));
    assert_eq!(reply("", &["qemu:dirty-bitmap:y"]), []);
    assert_eq!(reply("", &["base:", depth]), listed(&[base, depth]));
    assert_eq!(reply("plain", &[]), listed(&[base]));
}

#[test]
fn selected_contexts_are_answered_and_in_one_reply() {
    let (_running, mut haggler) = with_contexts();
    let mut reply = |export: &str, queries: &[&str]| {
        contexts(&mut haggler, OptionCode::SetMetaContext, export, queries)
    };
    let (base, depth) = (BASE_ALLOCATION, ALLOCATION_DEPTH);
    assert_eq!(reply("", &["qemu:", "qemu:other"]), []);
    assert_eq!(reply("plain", &[depth]), []);
    assert_eq!(reply("", &[depth]), [(2, depth.to_owned())]);
    assert_eq!(reply("", &["qemu:dirty-bitmap:"]), []);
    let three = reply("", &[BITMAP, depth, base]);
    let expected = [(1, base), (2, depth), (3, BITMAP)];
    assert_eq!(three, expected.map(|(id, name)| (id, name.to_owned())));
    haggler.option(OptionCode::Go, &[0; 6]);
    assert_eq!(haggler.replies().last().unwrap().0, OptionReplyCode::Ack);
    haggler.request(Command::Write, 0, 8192);
    haggler.send(&[7; 8192]);
    assert_eq!(haggler.simple_reply(), None);
    haggler.request(Command::BlockStatus, 0, 1 << 20);
    let more = ChunkFlags::empty();
    let reply = [
        (1, more, 0, 3),
        (2, more, 1, 0),
        (3, ChunkFlags::DONE, 1, 0),
    ];
    for (id, flags, written, empty) in reply {
        let (header, payload) = haggler.chunk();
        assert_eq!((header.code, header.flags), (ChunkCode::BlockStatus, flags));
        let status = BlockStatus::decode(&payload).unwrap();
        let runs: Vec<_> = status
            .descriptors
            .iter()
            .map(|run| (run.len, run.flags.0))
            .collect();
        let rest = (1 << 20) - 8192;
        assert_eq!(status.context_id, id);
        assert_eq!(runs, [(8192, written), (rest, empty)]);
    }
}

#[test]
fn exports_come_and_go_while_the_server_runs() {
    on_both_backends(|backend, queue| {
        let first = Arc::new(MemoryDisk::new("first", 1 << 20));
        let running = Running::with_export(backend, first);
        let handle = running.handle.clone();
        queue.block_on(async {
            let connect = |name: &str| {
                let options = ConnectOptions::new(name);
                let path = running.path.clone();
                async move {
                    let stream = Stream::connect_unix(&path).await.unwrap();
                    Client::connect(stream, &options).await
                }
            };
            assert!(connect("second").await.is_err());
            let second = Arc::new(MemoryDisk::new("second", 2 << 20));
            assert!(handle.add_export("second", second.clone()));
            assert!(
                !handle.add_export("second", second.clone()),
                "the name is taken"
            );
            let client = connect("second").await.unwrap();
            assert_eq!(client.export().size, 2 << 20);
            let other = connect("").await.unwrap();
            assert_eq!(handle.export("second").unwrap().clients(), 1);

            let withdrawn = handle.withdraw("second").unwrap();
            handle.gone(&withdrawn, PATIENCE).await;
            assert!(client.read(0, BufMut::zeroed(512)).await.is_err());
            assert!(connect("second").await.is_err());
            assert!(handle.withdraw("second").is_none());
            other.read(0, BufMut::zeroed(512)).await.unwrap();
            assert!(handle.add_export("second", second));
            connect("second").await.unwrap();
        });
        running.stop();
    });
}

#[test]
fn an_export_is_gone_when_its_last_request_has_ended() {
    on_both_backends(|backend, queue| {
        let disk = Arc::new(HoldingDisk::new(1 << 20, usize::MAX));
        let running = Running::with_export(backend, disk.clone());
        let handle = running.handle.clone();
        queue.block_on(async {
            let stream = Stream::connect_unix(&running.path).await.unwrap();
            let client = Rc::new(
                Client::connect(stream, &ConnectOptions::new(""))
                    .await
                    .unwrap(),
            );
            let reading = Rc::clone(&client);
            spawn(async move { drop(reading.read(0, BufMut::zeroed(512)).await) });
            while disk.held_now() == 0 {
                sleep(Duration::from_millis(1)).await;
            }
            let withdrawn = handle.withdraw("").unwrap();
            sleep(Duration::from_millis(20)).await;
            assert_eq!(withdrawn.clients(), 1, "its request is under way");
            disk.open();
            handle.gone(&withdrawn, PATIENCE).await;
        });
        running.stop();
    });
}

#[test]
fn a_client_that_takes_no_replies_holds_no_withdrawal_up() {
    on_both_backends(|backend, queue| {
        let running = Running::with_export(backend, Arc::new(MemoryDisk::new("memory", 64 << 20)));
        let handle = running.handle.clone();
        let mut client = RawClient::transmitting(&running.path);
        for _ in 0..8 {
            // Far more than a socket holds.
            client.request(Command::Read, 0, 4 << 20);
        }
        queue.block_on(async {
            let offered = handle.export("").unwrap();
            while offered.clients() == 0 {
                sleep(Duration::from_millis(1)).await;
            }
            let withdrawn = handle.withdraw("").unwrap();
            let gone = handle.gone(&withdrawn, Duration::from_millis(50));
            let mut gone = std::pin::pin!(gone);
            let limit = std::pin::pin!(sleep(Duration::from_secs(10)));
            let ended = futures_util::future::select(gone.as_mut(), limit).await;
            assert!(
                matches!(ended, futures_util::future::Either::Left(_)),
                "it waits for ever"
            );
        });
        drop(client);
        running.stop();
    });
}
