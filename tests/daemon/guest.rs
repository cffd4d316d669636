//! A guest: writes and reads blocks of a disk over NBD, and knows which of their versions it may
//! find.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use cowslip_nbd::client::{Client, ConnectOptions};
use cowslip_nbd::export::Durability;
use cowslip_queue::{Backend, Buf, BufMut, Queue, Stream};

use crate::support::rng::Rng;

const BLOCK_BYTES: usize = 4096;
const BLOCKS: u64 = 2048;
/// Size of the disk.
pub const DISK_BYTES: u64 = BLOCKS * BLOCK_BYTES as u64;
/// Blocks that are written at a time.
const BATCH: usize = 12;

/// Versions of a block.
#[derive(Clone, Debug)]
struct Block {
    /// The last one that was written, and acknowledged.
    current: u32,
    /// Those that it may have after the end of the daemon.
    possible: BTreeSet<u32>,
}

/// Versions of all blocks. Clones are the same.
#[derive(Clone, Debug)]
pub struct Model(Arc<Mutex<Vec<Block>>>);

impl Default for Model {
    fn default() -> Model {
        let zero = Block {
            current: 0,
            possible: BTreeSet::from([0]),
        };
        Model(Arc::new(Mutex::new(vec![zero; BLOCKS as usize])))
    }
}

/// The bytes of a version of a block; version 0 is zeroes.
fn bytes(block: u64, version: u32) -> Vec<u8> {
    let word = match version {
        0 => 0,
        _ => block << 32 | u64::from(version),
    };
    word.to_be_bytes().repeat(BLOCK_BYTES / 8)
}

/// The version in the bytes of a block.
fn version(block: u64, found: &[u8]) -> Result<u32, String> {
    let word = u64::from_be_bytes(found[..8].try_into().unwrap());
    let version = word as u32;
    match found == bytes(block, version) {
        true => Ok(version),
        false => Err(format!(
            "block {block} is torn or of another block: {word:#x}"
        )),
    }
}

impl Model {
    /// Checks the bytes of a disk that was closed in order.
    pub fn check(&self, disk: &[u8]) {
        for (at, block) in self.0.lock().unwrap().iter().enumerate() {
            let found = &disk[at * BLOCK_BYTES..][..BLOCK_BYTES];
            assert_eq!(version(at as u64, found), Ok(block.current), "block {at}");
        }
    }

    /// Checks that the bytes of a disk may be those that a daemon has left that was killed.
    pub fn check_possible(&self, disk: &[u8], context: &str) {
        for (at, block) in self.0.lock().unwrap().iter().enumerate() {
            let found = &disk[at * BLOCK_BYTES..][..BLOCK_BYTES];
            let version = version(at as u64, found);
            let version = version.unwrap_or_else(|error| panic!("{context}: {error}"));
            let possible = &block.possible;
            assert!(
                possible.contains(&version),
                "{context}: block {at}: {version} {possible:?}"
            );
        }
    }

    /// The versions of all blocks whose writes were answered.
    pub fn versions(&self) -> Vec<u32> {
        let blocks = self.0.lock().unwrap();
        blocks.iter().map(|block| block.current).collect()
    }

    /// Checks the bytes of a disk at a moment: later than that of `before`, and past.
    pub fn check_moment(&self, disk: &[u8], before: &[u32]) {
        for (at, block) in self.0.lock().unwrap().iter().enumerate() {
            let found = &disk[at * BLOCK_BYTES..][..BLOCK_BYTES];
            let version = version(at as u64, found).unwrap();
            let last = block
                .possible
                .last()
                .copied()
                .unwrap_or(0)
                .max(block.current);
            let possible = before[at]..=last;
            assert!(
                possible.contains(&version),
                "block {at}: {version} {possible:?}"
            );
        }
    }

    /// Waits until most blocks have been written again.
    pub fn wait_for_writes(&self) {
        let before = self.versions();
        for _ in 0..3000 {
            let now = self.versions();
            let written = now
                .iter()
                .zip(&before)
                .filter(|(now, before)| now != before);
            if written.count() > before.len() / 3 {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("the guest does not write");
    }

    /// Checks the bytes of a disk whose daemon was killed; from now on they are its bytes.
    pub fn check_after_kill(&self, disk: &[u8], context: &str) {
        self.check_possible(disk, context);
        for (at, block) in self.0.lock().unwrap().iter_mut().enumerate() {
            let found = &disk[at * BLOCK_BYTES..][..BLOCK_BYTES];
            block.current = version(at as u64, found).unwrap();
            block.possible = BTreeSet::from([block.current]);
        }
    }
}

/// A guest that runs until it is stopped, or its disk is gone.
pub struct Guest {
    stops: Arc<AtomicBool>,
    thread: JoinHandle<Result<(), String>>,
}

impl Guest {
    /// Starts one on the export `x` of a server.
    pub fn start(socket: &Path, seed: u64, model: &Model) -> Guest {
        let stops = Arc::new(AtomicBool::new(false));
        let (socket, model, stopped) = (socket.to_path_buf(), model.clone(), Arc::clone(&stops));
        let thread = std::thread::spawn(move || {
            let queue = Queue::new(Backend::Auto).unwrap();
            queue.block_on(run((socket, seed), &model, &stopped))
        });
        Guest { stops, thread }
    }

    /// Lets it end, with a last flush.
    pub fn stop(self) -> Result<(), String> {
        self.stops.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

async fn run(
    (socket, seed): (PathBuf, u64),
    model: &Model,
    stopped: &AtomicBool,
) -> Result<(), String> {
    let lost = |error: &dyn std::fmt::Display| error.to_string();
    let stream = Stream::connect_unix(&socket)
        .await
        .map_err(|error| lost(&error))?;
    let client = Client::connect(stream, &ConnectOptions::new("x")).await;
    let client = client.map_err(|error| lost(&error))?;
    let mut rng = Rng::new(seed);
    let mut next = 1 + model
        .0
        .lock()
        .unwrap()
        .iter()
        .map(|it| it.current)
        .max()
        .unwrap();
    while !stopped.load(Ordering::Relaxed) {
        let blocks: BTreeSet<u64> = (0..BATCH).map(|_| rng.below(BLOCKS)).collect();
        if rng.once_in(3) {
            for &block in &blocks {
                let buf = BufMut::zeroed(BLOCK_BYTES);
                let read = client.read(block * BLOCK_BYTES as u64, buf).await;
                let read = read.map_err(|error| lost(&error))?;
                let current = model.0.lock().unwrap()[block as usize].current;
                assert_eq!(version(block, &read), Ok(current), "block {block} is read");
            }
            continue;
        }
        next += 1;
        let mut writes = Vec::new();
        for &block in &blocks {
            model.0.lock().unwrap()[block as usize]
                .possible
                .insert(next);
            let data = Buf::from(bytes(block, next));
            let at = block * BLOCK_BYTES as u64;
            writes.push((block, client.write(at, data, Durability::Cached)));
        }
        for (block, write) in writes {
            write.await.map_err(|error| lost(&error))?;
            model.0.lock().unwrap()[block as usize].current = next;
        }
        if rng.once_in(4) {
            client.flush().await.map_err(|error| lost(&error))?;
            for block in &mut *model.0.lock().unwrap() {
                block.possible = BTreeSet::from([block.current]);
            }
        }
    }
    client.flush().await.map_err(|error| lost(&error))?;
    client.disconnect().await.map_err(|error| lost(&error))
}
