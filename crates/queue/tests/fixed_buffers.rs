//! Memory that rings know: what is written from it and read into it, in any part and with any
//! number of buffers, beside rings and memory that do not.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::sync::Arc;

use cowslip_queue::file::{File, MemoryAlignment, Persistence, Route};
use cowslip_queue::{Backend, Buf, BufMut, IoVec, IoVecMut, Queue, fix_buffers};

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 7 + at / 251 + seed) as u8)
        .collect()
}

fn filled(len: usize, seed: usize) -> Buf {
    let mut buf = BufMut::for_overwrite(len);
    buf.copy_from_slice(&pattern(len, seed));
    buf.freeze()
}

/// Writes, and reads again, more buffers at once than there are pieces, of all sizes, and parts of
/// them, in both directions.
async fn there_and_back(file: &Arc<File>) {
    let sizes = [4096, 4096, 4096, 5000, 8192, 60_000, 65_536, 65_537, 100];
    let mut offset = 0;
    let mut places = Vec::new();
    let mut writes = Vec::new();
    for seed in 0..600 {
        let len = sizes[seed % sizes.len()];
        let cut = seed % 7 * 13;
        let data = filled(len, seed).slice(cut, len - cut);
        places.push((offset, len - cut, seed, cut));
        writes.push(file.write_at(offset, data, Persistence::Cached));
        offset += len as u64;
    }
    for write in writes {
        write.await.unwrap();
    }
    let reads: Vec<_> = places
        .iter()
        .map(|&(offset, len, ..)| {
            // Not at the start of a piece.
            let part = BufMut::for_overwrite(len + 8).split_off(8);
            file.read_at(offset, part)
        })
        .collect();
    for (read, (_, len, seed, cut)) in reads.into_iter().zip(places) {
        let (result, target) = read.await;
        result.unwrap();
        assert_eq!(target.to_vec(), pattern(len + cut, seed)[cut..]);
    }
}

/// Lists of which one segment is known to the ring, and reads behind the end of the file.
async fn beside_other_memory(file: &Arc<File>) {
    let mut data = IoVec::from(filled(4096, 1));
    data.append(Buf::copy_of(&pattern(100, 2)).into());
    file.write_at(0, data, Persistence::Durable).await.unwrap();
    let mut target = IoVecMut::from(BufMut::for_overwrite(4000));
    target.append(BufMut::zeroed(196).into());
    let (result, target) = file.read_at(0, target).await;
    result.unwrap();
    let expected = [pattern(4096, 1), pattern(100, 2)].concat();
    assert_eq!(target.to_vec(), expected);
    let end = 1 << 30;
    let last = file.write_at(end - 10, filled(10, 3), Persistence::Cached);
    last.await.unwrap();
    let (result, target) = file.read_at(end - 10, BufMut::for_overwrite(4096)).await;
    result.unwrap();
    assert_eq!(target.to_vec()[..10], pattern(10, 3));
    assert_eq!(target.to_vec()[10..], [0; 4086]);
}

#[test]
fn what_fixed_memory_holds_goes_to_files_and_back() {
    // Before the memory is there: its ring does not know it.
    let early = Queue::new(Backend::Auto).unwrap();
    fix_buffers();
    fix_buffers();
    let late = Queue::new(Backend::Auto).unwrap();
    let threads = Queue::new(Backend::Threads).unwrap();
    for queue in [&early, &late, &threads] {
        let file = File::new(
            tempfile::tempfile().unwrap().into(),
            Route::Ring,
            MemoryAlignment::NONE,
        );
        queue.block_on(async {
            there_and_back(&file).await;
            beside_other_memory(&file).await;
        });
    }
    // Threads with rings of their own, which hand buffers of one memory around.
    let workers: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(|| {
                let file = tempfile::tempfile().unwrap();
                let file = File::new(file.into(), Route::Ring, MemoryAlignment::NONE);
                let queue = Queue::new(Backend::Auto).unwrap();
                queue.block_on(there_and_back(&file));
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
}
