//! Connections that are spread over threads.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

use crate::support::*;
use cowslip_block::disk::{Disk, DiskFuture, MemoryDisk};
use cowslip_nbd::export::Durability;
use cowslip_nbd::protocol::Command;
use cowslip_nbd::server::{Lifetime, Workers};
use cowslip_nbd::{Client, Server, ServerEvent, ServerOptions};
use cowslip_queue::{Backend, Buf, BufMut, IoVecMut, Queue};

/// A disk in memory that notes on which threads it is read.
struct NotingDisk {
    inner: MemoryDisk,
    threads: Mutex<BTreeSet<String>>,
}

impl NotingDisk {
    fn new(size: u64) -> Arc<NotingDisk> {
        Arc::new(NotingDisk {
            inner: MemoryDisk::new("memory", size),
            threads: Mutex::default(),
        })
    }

    fn threads(&self) -> usize {
        self.threads.lock().unwrap().len()
    }
}

cowslip_block::debug_by_name!(NotingDisk);

fn here() -> String {
    let id: ThreadId = std::thread::current().id();
    format!("{id:?}")
}

impl Disk for NotingDisk {
    cowslip_block::forward_to_disk!(inner: name, size, features, write, zero, discard, write_back, extents);

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        self.threads.lock().unwrap().insert(here());
        self.inner.read(offset, buf)
    }
}

fn server(workers: usize, lifetime: Lifetime) -> Server {
    Server::new(ServerOptions {
        lifetime,
        workers: Workers::new(workers, Duration::ZERO).unwrap(),
        ..ServerOptions::default()
    })
}

/// A client that writes blocks of its own part of the disk, and reads them again.
async fn work(client: &Client, part: u64, seed: u64) {
    const BLOCKS: u64 = 64;
    let mut random = Random(seed);
    let mut model = vec![0u8; BLOCKS as usize];
    let base = part * BLOCKS * 4096;
    for _ in 0..400 {
        let block = random.below(BLOCKS);
        let at = base + block * 4096;
        if random.below(2) == 0 {
            let byte = random.below(256) as u8;
            let data = Buf::from(vec![byte; 4096]);
            client.write(at, data, Durability::Cached).await.unwrap();
            model[block as usize] = byte;
        } else {
            let read = client.read(at, BufMut::zeroed(4096)).await.unwrap();
            let expected = model[block as usize];
            assert!(read.iter().all(|&byte| byte == expected), "seed {seed}");
        }
    }
    client.flush().await.unwrap();
}

#[test]
fn connections_are_spread_over_threads_in_turn() {
    for backend in BACKENDS {
        if queue(backend).is_none() {
            continue;
        }
        let disk = NotingDisk::new(8 << 20);
        let mut server = server(2, Lifetime::UntilStopped);
        server.add_export("", disk.clone());
        let running = Running::start(backend, server);
        let clients: Vec<_> = (0..6)
            .map(|part| {
                let path = running.path.clone();
                std::thread::spawn(move || {
                    Queue::new(Backend::Threads).unwrap().block_on(async {
                        let client = connect(&path, "").await;
                        work(&client, part, part + 1).await;
                        client.disconnect().await.unwrap();
                    });
                })
            })
            .collect();
        for client in clients {
            client.join().unwrap();
        }
        assert_eq!(disk.threads(), 3);
        eventually("clients have left", || running.handle.connections() == 0);
        assert_eq!(running.handle.connections_ever(), 6);
        running.stop();
    }
}

#[test]
fn the_last_client_ends_the_server_on_any_thread() {
    let disk = NotingDisk::new(1 << 20);
    let ended = Arc::new(AtomicUsize::new(0));
    let mut server = server(3, Lifetime::UntilLastClient);
    server.add_export("", disk.clone());
    let count = Arc::clone(&ended);
    server.observe(move |event| {
        if let ServerEvent::Disconnected { .. } = event {
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    let running = Running::start(Backend::Threads, server);
    Queue::new(Backend::Threads).unwrap().block_on(async {
        let mut clients = vec![];
        for _ in 0..4 {
            let client = connect(&running.path, "").await;
            client.read(0, BufMut::zeroed(512)).await.unwrap();
            clients.push(client);
        }
        // One leaves without a word; it is the third, on a thread of the server's own.
        drop(clients.remove(2));
        for client in clients {
            client.disconnect().await.unwrap();
        }
    });
    running.join();
    assert_eq!(ended.load(Ordering::Relaxed), 4);
    assert_eq!(disk.threads(), 4);
}

#[test]
fn clients_on_other_threads_are_drained_and_cut_off() {
    let disk = Arc::new(HoldingDisk::new(64 << 20, usize::MAX));
    let mut server = server(1, Lifetime::UntilStopped);
    server.add_export("", disk.clone());
    let running = Running::start(Backend::Threads, server);
    // The first is on the thread that serves, the second on the other one.
    let _first = RawClient::transmitting(&running.path);
    let mut second = RawClient::transmitting(&running.path);
    for _ in 0..8 {
        // Far more than a socket holds.
        second.request(Command::Read, 0, 4 << 20);
    }
    eventually("requests are there", || disk.held_now() == 8);
    running.handle.stop();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!running.has_ended(), "requests are under way");
    disk.open();
    running.handle.abort();
    running.join();
    assert_eq!(disk.finished(), 8);
}
