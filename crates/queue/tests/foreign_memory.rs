//! Memory that is not ours, in the kernel's hands: segments of any size and address on each
//! backend, and an owner that lives as long as an operation.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use cowslip_queue::file::{File, MemoryAlignment, Persistence, Route};
use cowslip_queue::{Backend, Buf, BufMut, IoVec, IoVecMut, Queue, SharedMemory, sleep};
use rustix::event::EventfdFlags;

fn queues() -> Vec<(Queue, Route)> {
    let ways = [
        (Backend::Uring, Route::Ring),
        (Backend::Uring, Route::Pool),
        (Backend::Threads, Route::Ring),
    ];
    let open = |(backend, route)| Some((Queue::new(backend).ok()?, route));
    ways.into_iter().filter_map(open).collect()
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 7 + at / 251 + seed) as u8)
        .collect()
}

/// A part of memory for each length, with a gap before it; every third is a buffer of ours.
fn source(bytes: &[u8], lens: &[usize], gap: usize) -> IoVec {
    let mut list = IoVec::default();
    let mut from = 0;
    for (index, &len) in lens.iter().enumerate() {
        let part = &bytes[from..from + len];
        from += len;
        if index % 3 == 2 {
            let padded = [&vec![0; gap], part].concat();
            list.append(Buf::copy_of(&padded).slice(gap, len).into());
        } else {
            let memory = SharedMemory::new(gap + len);
            memory.write(gap, part);
            list.append(IoVec::shared(&memory, gap..gap + len));
        }
    }
    list
}

fn target(lens: &[usize], gap: usize) -> IoVecMut {
    let parts = lens.iter().enumerate().map(|(index, &len)| {
        if index % 3 == 2 {
            BufMut::zeroed(gap + len).split_off(gap).into()
        } else {
            let memory = SharedMemory::new(gap + len);
            memory.write(0, &vec![0xEE; gap + len]);
            IoVecMut::shared(&memory, gap..gap + len)
        }
    });
    parts.collect()
}

/// Writes a list, reads it into others of the same and of another shape, and reads on beyond the
/// end of the file.
fn exchange(file: &Arc<File>, queue: &Queue, (lens, gap): (&[usize], usize)) {
    let bytes = pattern(lens.iter().sum(), gap);
    queue.block_on(async {
        for persistence in [Persistence::Cached, Persistence::Durable] {
            let data = source(&bytes, lens, gap);
            file.write_at(4096, data, persistence).await.unwrap();
        }
        let (read, list) = file.read_at(4096, target(lens, gap)).await;
        read.unwrap();
        assert_eq!(list.to_vec(), bytes);
        let mut reversed = lens.to_vec();
        reversed.reverse();
        let (read, list) = file.read_at(4096, target(&reversed, gap)).await;
        read.unwrap();
        assert_eq!(list.to_vec(), bytes);
        let beyond = [lens, &[4096, 8192]].concat();
        let (read, list) = file.read_at(4096, target(&beyond, gap)).await;
        read.unwrap();
        assert_eq!(list.to_vec(), [bytes, vec![0; 4096 + 8192]].concat());
    });
}

#[test]
fn segments_of_any_size_and_address_are_transferred() {
    for (queue, route) in queues() {
        for gap in [0, 1, 7, 4095] {
            for lens in [&[1][..], &[1, 2, 3, 5000, 7, 65_537], &[4096; 9]] {
                let file = tempfile::tempfile().unwrap();
                let file = File::new(file.into(), route, MemoryAlignment::NONE);
                exchange(&file, &queue, (lens, gap));
            }
        }
        // More than one call takes.
        let lens: Vec<usize> = (0..2500).map(|index| 1 + index % 5).collect();
        let file = tempfile::tempfile().unwrap();
        let file = File::new(file.into(), route, MemoryAlignment::NONE);
        exchange(&file, &queue, (&lens, 3));
    }
}

/// A new file past the page cache; `None` where there is no such thing.
fn direct_file(path: &Path) -> Option<std::fs::File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    options.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
    let file = options.open(path).ok();
    if file.is_none() {
        eprintln!("SKIPPED: no direct I/O here");
    }
    file
}

#[test]
fn direct_io_takes_segments_of_whole_sectors() {
    let dir = tempfile::tempdir().unwrap();
    for (index, (queue, route)) in queues().into_iter().enumerate() {
        let Some(file) = direct_file(&dir.path().join(index.to_string())) else {
            return;
        };
        let alignment = MemoryAlignment {
            start_bytes: 4096,
            len_bytes: 4096,
        };
        let file = File::new(file.into(), route, alignment);
        for gap in [0, 4096] {
            exchange(&file, &queue, (&[4096, 8192, 4096, 65_536, 4096], gap));
        }
    }
}

/// Keeps memory, and records its release.
struct Owner {
    memory: Box<[AtomicUsize; 2]>,
    gone: Arc<AtomicBool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

/// A read that takes as long as the test wants: of an event that nobody has signalled.
#[test]
#[allow(unsafe_code)] // Foreign memory, as an embedder hands it over.
fn a_dropped_read_keeps_its_owner_until_the_kernel_lets_go() {
    let Ok(queue) = Queue::new(Backend::Uring) else {
        return eprintln!("SKIPPED: no io_uring here");
    };
    let event: OwnedFd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let mut signal = std::fs::File::from(event.try_clone().unwrap());
    let file = File::new(event, Route::Ring, MemoryAlignment::NONE);
    let gone = Arc::new(AtomicBool::new(false));
    let owner = Owner {
        memory: Box::new([const { AtomicUsize::new(0) }; 2]),
        gone: Arc::clone(&gone),
    };
    let start = NonNull::from(&*owner.memory).cast::<u8>();
    // SAFETY: words that the owner keeps, and nobody else accesses.
    let list = unsafe { IoVecMut::foreign(start, 8, Arc::new(owner)) };
    queue.block_on(async {
        drop(file.read_at(0, list));
        for _ in 0..3 {
            sleep(Duration::from_millis(10)).await;
            assert!(!gone.load(Ordering::SeqCst), "the kernel has the memory");
        }
        signal.write_all(&1u64.to_ne_bytes()).unwrap();
        while !gone.load(Ordering::SeqCst) {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

/// The same for operations that the kernel has not seen yet, and on threads.
#[test]
#[allow(unsafe_code)] // Foreign memory, as an embedder hands it over.
fn owners_are_let_go_of_once_their_operations_have_ended() {
    for (queue, route) in queues() {
        let file = tempfile::tempfile().unwrap();
        let file = File::new(file.into(), route, MemoryAlignment::NONE);
        let gone = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
        let list = |index: usize| {
            let owner = Owner {
                memory: Box::new([const { AtomicUsize::new(0) }; 2]),
                gone: Arc::clone(&gone[index]),
            };
            let start = NonNull::from(&*owner.memory).cast::<u8>();
            // SAFETY: two words that the owner keeps, and nobody else accesses.
            unsafe { IoVecMut::foreign(start, 16, Arc::new(owner)) }
        };
        let is_gone = |index: usize| gone[index].load(Ordering::SeqCst);
        queue.block_on(async {
            drop(file.read_at(0, list(0)));
            drop(file.write_at(0, list(1).freeze(), Persistence::Cached));
            // Requests to a ring wait for the queue's next turn.
            if route == Route::Ring && queue.backend() == Backend::Uring {
                assert!(!is_gone(0) && !is_gone(1));
            }
            let (read, kept) = file.read_at(0, list(2)).await;
            read.unwrap();
            assert!(!is_gone(2), "it came back");
            drop(kept);
            assert!(is_gone(2));
            while !is_gone(0) || !is_gone(1) {
                sleep(Duration::from_millis(1)).await;
            }
        });
    }
}

/// A file that ends within a block of the file system grows while its last sector is written. The
/// kernel may zero the rest of the block in its cache, and must not keep what the sector held.
#[test]
fn files_grow_beside_direct_writes_of_their_last_block() {
    const SECTOR: u64 = 512;
    let dir = tempfile::tempdir().unwrap();
    let alignment = MemoryAlignment {
        start_bytes: 512,
        len_bytes: 512,
    };
    for (index, (queue, route)) in queues().into_iter().enumerate() {
        let Some(file) = direct_file(&dir.path().join(index.to_string())) else {
            return;
        };
        let file = File::new(file.into(), route, alignment);
        let sector = |byte: u8| IoVec::from(Buf::copy_of(&[byte; 512]));
        queue.block_on(async {
            for round in 0..60_u64 {
                // Sectors before the end, one of which is being written, within its block.
                let block = 1 + round * 16;
                let end = block * 8 + 1 + round % 7;
                let byte = 1 + (round % 250) as u8;
                file.set_len(end * SECTOR).await.unwrap();
                let last = (end - 1) * SECTOR;
                if let Err(error) = file.write_at(last, sector(255), Persistence::Cached).await {
                    return eprintln!("SKIPPED: no sectors of 512 bytes here: {error}");
                }
                let write = file.write_at(last, sector(byte), Persistence::Cached);
                let grow = file.set_len((end + 100) * SECTOR);
                write.await.unwrap();
                grow.await.unwrap();
                file.sync_data().await.unwrap();
                let (read, list) = file
                    .read_at(last, IoVecMut::from(BufMut::zeroed(512)))
                    .await;
                read.unwrap();
                assert_eq!(list.to_vec(), [byte; 512], "round {round}");
            }
        });
    }
}
