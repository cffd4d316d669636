//! Checks of TLS that hold by certificates and by keys.

use std::io::Read;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cowslip_nbd::ServerOptions;
use cowslip_nbd::export::Durability;
use cowslip_nbd::protocol::handshake::*;
use cowslip_nbd::protocol::*;
use cowslip_nbd::tls::{ClientTls, ServerTls};
use cowslip_queue::{Backend, Buf, BufMut, IoVec, SharedMemory};

use super::{Between, DISK_BYTES, Watched, connect_tls, go, options, pattern};
use crate::support::*;

/// Reads back, by rings and by threads, the bytes that a client has written.
pub(crate) fn written_is_read_back(server: &dyn Fn() -> ServerTls, client: &dyn Fn() -> ClientTls) {
    for (server_side, client_side) in [
        (Backend::Uring, Backend::Threads),
        (Backend::Threads, Backend::Uring),
    ] {
        let (Some(_), Some(queue)) = (queue(server_side), queue(client_side)) else {
            return;
        };
        let watched = Watched::start(server_side, options(server()));
        queue.block_on(async {
            let client = connect_tls(watched.path(), client()).await.unwrap();
            // Of one byte, of less, exactly and more than a record, and of many; all in flight at
            // once.
            let lens = [1, 4096, 16_384, 16_385, 300_000, 5 << 20, 32 << 20, 4096];
            let mut at = 0;
            let parts: Vec<(u64, Vec<u8>)> = lens
                .iter()
                .map(|&len| {
                    let part = (at, pattern(at + 1, len));
                    at += len as u64;
                    part
                })
                .collect();
            let writes: Vec<_> = parts
                .iter()
                .map(|(at, data)| client.write(*at, Buf::copy_of(data), Durability::Cached))
                .collect();
            for write in writes {
                write.await.unwrap();
            }
            let reads: Vec<_> = parts
                .iter()
                .map(|(at, data)| client.read(*at, BufMut::zeroed(data.len())))
                .collect();
            for (read, (at, data)) in reads.into_iter().zip(&parts) {
                assert!(read.await.unwrap()[..] == data[..], "what is at {at}");
            }
            // Memory of another, in pieces.
            let bytes = pattern(at, 8192);
            let memory = SharedMemory::new(8192);
            memory.write(0, &bytes);
            let halves = [4096..8192, 0..4096].map(|half| IoVec::shared(&memory, half));
            let list: IoVec = halves.into_iter().collect();
            client.write(at, list, Durability::Cached).await.unwrap();
            let read = client.read(at, BufMut::zeroed(8192)).await.unwrap();
            assert!(read[..] == [&bytes[4096..], &bytes[..4096]].concat());
            assert!(!client.block_status(0, DISK_BYTES).await.unwrap().is_empty());
            client.flush().await.unwrap();
            client.disconnect().await.unwrap();
        });
        watched.wait_for_reason("");
        assert_eq!(*watched.reasons.lock().unwrap(), [""], "it took its leave");
    }
}

/// Bytes before the handshake are not taken for what comes after it. `refusal` says that they are
/// no handshake.
pub(crate) fn early_bytes_are_not_believed(watched: &Watched, refusal: &str) {
    let mut start = Vec::new();
    encode_option(&mut start, OptionCode::StartTls, b"");
    let mut injected = Vec::new();
    encode_option(&mut injected, OptionCode::Go, &go());
    for len in [1, OPTION_HEADER_BYTES, injected.len()] {
        let mut client = RawClient::greeted(watched.path());
        client.send(&[&start[..], &injected[..len]].concat());
        let mut said = Vec::new();
        client.stream.read_to_end(&mut said).unwrap();
        assert!(said.is_empty(), "not even an answer: {said:?}");
    }
    watched.wait_for_reason("data before its TLS handshake");
    // A little later they are a handshake that is none.
    let mut client = RawClient::greeted(watched.path());
    client.option(OptionCode::StartTls, b"");
    client.replies();
    client.send(&injected);
    assert!(client.is_hung_up());
    watched.wait_for_reason(refusal);
}

/// A record of a handshake, with any content.
pub(crate) fn hello(version: [u8; 2], len: usize) -> Vec<u8> {
    let mut record = vec![22, version[0], version[1], (len >> 8) as u8, len as u8];
    record.extend(pattern(5, len));
    record
}

/// A message of the handshake that says how long it is, and records that seem to bring it.
pub(crate) fn endless(claimed: [u8; 3]) -> Vec<u8> {
    let mut endless = Vec::new();
    for nth in 0..64 {
        let mut record = hello([3, 1], 16_000);
        if nth == 0 {
            record[5] = 1;
            record[6..9].copy_from_slice(&claimed);
        }
        endless.extend(record);
    }
    endless
}

/// Ends connections by bytes that are no handshake, and by `more` of those.
pub(crate) fn garbage_ends_the_connection(watched: &Watched, more: &[Vec<u8>]) {
    let garbage = [
        vec![0; 100],
        vec![0xff; 100_000],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        hello([3, 1], 300),
        hello([3, 3], 16_384),
        hello([2, 0], 30_000),
        // Data before there are keys, an alert, a change of keys too early.
        vec![23, 3, 3, 0, 1, 7],
        vec![21, 3, 3, 0, 2, 2, 40],
        vec![20, 3, 3, 0, 1, 1, 20, 3, 3, 0, 1, 1, 20, 3, 3, 0, 1, 1],
        endless([0xff, 0xff, 0xff]),
    ];
    for garbage in garbage.iter().chain(more) {
        let mut client = RawClient::greeted(watched.path());
        client.option(OptionCode::StartTls, b"");
        client.replies();
        // The server may hang up before it has all of it.
        client.try_send(garbage);
        drop(client.stream.shutdown(Shutdown::Write));
        assert!(client.is_hung_up(), "{:?}", &garbage[..6]);
    }
}

/// A handshake that is never finished is cut off. Returns the server.
pub(crate) fn endless_handshakes_are_cut_off(tls: ServerTls) -> Watched {
    let watched = Watched::start(
        Backend::Auto,
        ServerOptions {
            handshake_timeout: Duration::from_millis(300),
            ..options(tls)
        },
    );
    let begun = Instant::now();
    let mut clients: Vec<RawClient> = (0..3)
        .map(|_| {
            let mut client = RawClient::greeted(watched.path());
            client.option(OptionCode::StartTls, b"");
            client.replies();
            client
        })
        .collect();
    // One says nothing, one the beginning of something, one a byte now and then.
    clients[1].send(&[22, 3, 1, 2, 0]);
    while begun.elapsed() < Duration::from_secs(5) && clients[2].try_send(&[22]) {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(clients.iter_mut().all(RawClient::is_hung_up));
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    watched.wait_for_reason("took too long to choose an export");
    watched
}

/// Bytes that are changed on the way are noticed. `unseen` is the distance of one, behind the first
/// of a reply, that has no meaning.
pub(crate) fn changed_bytes_are_noticed(
    watched: &Watched,
    client: &dyn Fn() -> ClientTls,
    unseen: Option<u64>,
) {
    let data = pattern(3, 100_000);
    // In the header of a record, in its middle, at its end, in the next one.
    for distance in [0, 3, 50, 16_000, 16_420, 70_000] {
        let between = Between::start(watched.path());
        queue(Backend::Threads).unwrap().block_on(async {
            let client = connect_tls(&between.path, client()).await.unwrap();
            let write = client.write(0, Buf::copy_of(&data), Durability::Cached);
            write.await.unwrap();
            let honest = client.read(0, BufMut::zeroed(data.len())).await.unwrap();
            assert!(honest[..] == data[..]);
            let next = between.passed.load(Ordering::Relaxed);
            between.spoil_at.store(next + distance, Ordering::Relaxed);
            let spoiled = client.read(0, BufMut::zeroed(data.len())).await;
            if let (true, Ok(read)) = (unseen == Some(distance), &spoiled) {
                assert!(read[..] == data[..]);
                return;
            }
            let error = spoiled.unwrap_err().to_string();
            assert!(error.contains("TLS"), "{distance}: {error}");
            let after = client.read(0, BufMut::zeroed(10)).await;
            assert!(after.is_err(), "nothing more is believed");
        });
        between.thread.join().unwrap();
    }
}
