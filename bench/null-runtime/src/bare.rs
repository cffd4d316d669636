//! The floor: one ring, batches of 32, no tasks.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use io_uring::squeue::Entry;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};

use crate::{BLOCK_BYTES, DEPTH, FILE_BLOCKS};

fn run(operations: usize, mut entry: impl FnMut(usize) -> Entry) {
    let mut ring: IoUring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(256)
        .expect("a ring");
    let mut done = 0;
    while done < operations {
        let batch = DEPTH.min(operations - done);
        for slot in 0..batch {
            let entry = entry(slot).user_data(slot as u64);
            // SAFETY: the buffers of `reads` outlive the ring's last completion, which is awaited
            // below; a NOP has none.
            unsafe { ring.submission().push(&entry) }.expect("256 entries hold a batch");
        }
        ring.submit_and_wait(batch).expect("the kernel takes them");
        for completion in ring.completion() {
            assert!(completion.result() >= 0);
            done += 1;
        }
    }
}

pub fn nops(operations: usize) {
    run(operations, |_| opcode::Nop::new().build());
}

pub fn reads(path: &Path, operations: usize) {
    let file = File::open(path).expect("the scratch file");
    let mut buffers = vec![vec![0u8; BLOCK_BYTES]; DEPTH];
    let mut block = 0;
    run(operations, |slot| {
        block = (block + 1) % FILE_BLOCKS;
        let fd = Fd(file.as_raw_fd());
        opcode::Read::new(fd, buffers[slot].as_mut_ptr(), BLOCK_BYTES as u32)
            .offset(block * BLOCK_BYTES as u64)
            .build()
    });
}
