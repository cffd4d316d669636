//! The same on compio.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use compio::BufResult;
use compio::driver::op::ReadAt;
use compio::driver::{IourOpCode, OpEntry, ProactorBuilder};
use compio::runtime::{Runtime, RuntimeBuilder, spawn, submit};

use crate::{BLOCK_BYTES, DEPTH, FILE_BLOCKS, operations_of};

/// With the ring modes that our queue uses.
pub fn tuned() -> Runtime {
    let mut proactor = ProactorBuilder::new();
    proactor
        .single_issuer(true)
        .defer_taskrun(true)
        .taskrun_flag(true);
    let mut builder = RuntimeBuilder::new();
    builder.with_proactor(proactor);
    builder.build().expect("a runtime")
}

/// As a program gets it without asking.
pub fn plain() -> Runtime {
    Runtime::new().expect("a runtime")
}

fn run<T: Future<Output = ()> + 'static>(
    runtime: Runtime,
    operations: usize,
    task: impl Fn(usize, usize) -> T,
) {
    assert!(runtime.driver_type().is_iouring());
    runtime.block_on(async {
        let tasks: Vec<_> = (0..DEPTH)
            .map(|number| spawn(task(number, operations_of(number, operations))))
            .collect();
        for task in tasks {
            task.await.expect("no task panics");
        }
    });
}

/// compio has no operation that does nothing, but takes foreign ones.
struct Nop;

// SAFETY: the entry points to nothing.
unsafe impl IourOpCode for Nop {
    type Control = ();

    fn create_entry(&mut self, _: &mut ()) -> OpEntry {
        OpEntry::Submission(io_uring::opcode::Nop::new().build())
    }
}

pub fn nops(runtime: Runtime, operations: usize) {
    run(runtime, operations, |_, share| async move {
        for _ in 0..share {
            let BufResult(result, _) = submit(Nop).await;
            result.expect("doing nothing works");
        }
    });
}

pub fn reads(runtime: Runtime, path: &Path, operations: usize) {
    let file = Arc::new(File::open(path).expect("the scratch file"));
    run(runtime, operations, |number, share| {
        let file = Arc::clone(&file);
        async move {
            let mut buf = Vec::with_capacity(BLOCK_BYTES);
            let mut block = number as u64;
            for _ in 0..share {
                block = (block + 1) % FILE_BLOCKS;
                buf.clear();
                let offset = block * BLOCK_BYTES as u64;
                let read = ReadAt::new(Arc::clone(&file), offset, buf);
                let BufResult(result, read) = submit(read).await;
                assert_eq!(result.expect("reading works"), BLOCK_BYTES);
                buf = compio::buf::IntoInner::into_inner(read);
            }
        }
    });
}
