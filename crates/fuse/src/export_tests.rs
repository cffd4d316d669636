//! Requests on a disk in memory, without a kernel.

use std::future::Future;

use cowslip_block::disk::MemoryDisk;
use cowslip_queue::{Backend, Buf, BufMut, Queue};

use super::*;

const SIZE: u64 = 10_000;

fn block_on<T>(future: impl Future<Output = T>) -> T {
    Queue::new(Backend::Threads).unwrap().block_on(future)
}

fn memory(len: usize) -> IoVecMut {
    BufMut::zeroed(len).into()
}

fn export() -> Export {
    let disk = Arc::new(MemoryDisk::new("disk", SIZE));
    Export::new(disk, Options::default(), false)
}

fn write(export: &Export, offset: u64, data: &[u8]) -> Answer {
    let operation = Operation::Write {
        offset,
        len: data.len(),
        flags: 0,
    };
    block_on(export.perform(operation, (Buf::copy_of(data).into(), memory)))
}

fn perform(export: &Export, operation: Operation) -> Answer {
    block_on(export.perform(operation, (IoVec::default(), memory)))
}

fn read(export: &Export, offset: u64, len: usize) -> Vec<u8> {
    match perform(export, Operation::Read { offset, len }) {
        Answer::Data(data) => data.to_vec(),
        other => panic!("{other:?}"),
    }
}

fn errno(answer: &Answer) -> i32 {
    match answer {
        Answer::Failed(failure) => failure.errno(),
        _ => 0,
    }
}

fn fallocate(export: &Export, (offset, len): (u64, u64), mode: u32) -> i32 {
    errno(&perform(export, Operation::Fallocate { offset, len, mode }))
}

#[test]
fn reads_and_writes_end_with_the_disk() {
    let export = export();
    let written = |answer: &Answer| match answer {
        Answer::Fields(fields) => u32::from_ne_bytes(fields.bytes()[..4].try_into().unwrap()),
        other => panic!("{other:?}"),
    };
    assert_eq!(written(&write(&export, 100, &[1; 50])), 50);
    assert_eq!(read(&export, 90, 20), [[0; 10], [1; 10]].concat());
    assert_eq!(read(&export, SIZE - 10, 4096).len(), 10);
    assert!(read(&export, SIZE, 4096).is_empty());
    assert!(read(&export, u64::MAX, 4096).is_empty());
    assert_eq!(written(&write(&export, SIZE - 10, &[2; 50])), 10);
    assert_eq!(errno(&write(&export, SIZE, &[2; 50])), ENOSPC);
    assert_eq!(errno(&write(&export, u64::MAX, &[2; 50])), EFBIG);
}

#[test]
fn kinds_of_fallocate_do_what_they_say_or_are_refused() {
    let export = export();
    drop(write(&export, 0, &[7; 8192]));
    assert_eq!(fallocate(&export, (100, 100), 3), 0, "punch");
    assert_eq!(fallocate(&export, (300, 100), 0x11), 0, "zero");
    assert_eq!(fallocate(&export, (500, 100), 0x10), 0, "zero, may grow");
    let bytes = read(&export, 0, 600);
    let is_zero = |at: usize| matches!(at, 100..200 | 300..400 | 500..600);
    assert!((0..600).all(|at| bytes[at] == if is_zero(at) { 0 } else { 7 }));
    // Nothing beyond the end, and no kind that moves bytes.
    assert_eq!(fallocate(&export, (SIZE, 100), 3), 0);
    assert_eq!(fallocate(&export, (SIZE - 10, 100), 0x11), 0);
    assert_eq!(fallocate(&export, (SIZE - 10, 100), 0x10), ENOSPC);
    assert_eq!(fallocate(&export, (SIZE - 10, 100), 0), ENOTSUP);
    for mode in [2, 8, 0x20, 0x40, 0x13] {
        assert_eq!(fallocate(&export, (0, 4096), mode), ENOTSUP, "{mode:#x}");
    }
    assert_eq!(fallocate(&export, (u64::MAX, 2), 3), EFBIG);
}

#[test]
fn the_size_changes_by_no_request_without_a_way_to_grow() {
    let export = export();
    let set = |size| {
        let wanted = Attributes {
            size: Some(size),
            ..Attributes::default()
        };
        errno(&perform(&export, Operation::SetAttributes(wanted)))
    };
    assert_eq!(set(SIZE), 0);
    assert_eq!(set(SIZE - 1), EPERM);
    assert_eq!(set(0), EPERM);
    assert_eq!(set(SIZE + 1), EFBIG);
    let owner = Attributes {
        uid: Some(1),
        ..Attributes::default()
    };
    let changed = perform(&export, Operation::SetAttributes(owner));
    assert_eq!(errno(&changed), ENOTSUP);
}

#[test]
fn results_have_the_lengths_of_the_protocol() {
    let export = export();
    let len = |operation| match perform(&export, operation) {
        Answer::Fields(fields) => fields.bytes().len(),
        other => panic!("{other:?}"),
    };
    let offer = |major, minor| {
        Operation::Init(Init {
            major,
            minor,
            readahead_max: 0,
            flags: u64::MAX,
        })
    };
    assert_eq!(len(offer(7, 45)), 64);
    assert_eq!(len(offer(8, 0)), 64);
    assert_eq!(errno(&perform(&export, offer(7, 22))), EPROTO);
    assert_eq!(len(Operation::GetAttributes), 104);
    assert_eq!(len(Operation::Open { flags: 2 }), 16);
    assert_eq!(len(Operation::StatFs), 80);
    assert!(!export.uses_ring());
    let unknown = perform(&export, Operation::Unsupported { opcode: 22 });
    assert_eq!(errno(&unknown), ENOSYS);
}

#[test]
fn the_ring_is_agreed_on_where_both_sides_have_it() {
    for (has_ring, offered) in [(true, true), (true, false), (false, true)] {
        let disk = Arc::new(MemoryDisk::new("disk", SIZE));
        let export = Export::new(disk, Options::default(), has_ring);
        let flags = if offered {
            u64::MAX
        } else {
            !init::OVER_IO_URING
        };
        let offer = Init {
            major: 7,
            minor: 45,
            readahead_max: 0,
            flags,
        };
        let answer = match perform(&export, Operation::Init(offer)) {
            Answer::Fields(fields) => fields.bytes().to_vec(),
            other => panic!("{other:?}"),
        };
        // The upper half of the flags.
        let high = u32::from_ne_bytes(answer[32..36].try_into().unwrap());
        let is_agreed = u64::from(high) << 32 & init::OVER_IO_URING != 0;
        assert_eq!(is_agreed, has_ring && offered);
        assert_eq!(export.uses_ring(), is_agreed);
    }
}
