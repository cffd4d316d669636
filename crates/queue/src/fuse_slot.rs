//! Requests of a FUSE connection by way of the ring (Linux 6.14): [`FuseSlot`], which the kernel
//! fills with a request, and takes back with the answer in exchange for the next one.
//!
//! A slot is memory that is registered with the kernel once. Header, argument and data of a request
//! are in places of their own, and the data of a read or write goes from there to the disk, or from
//! the disk there, without a copy here. The kernel touches the memory while it has the slot, which
//! the operation of the ring owns for so long.
//!
//! | bytes | in the slot |
//! | --- | --- |
//! | 0..128 | the header of the request, then that of the answer |
//! | 128..256 | the request's argument |
//! | 256..288 | flags, number of the exchange, bytes of data in or out |
//! | 4096.. | data |
#![allow(unsafe_code)] // One field of a submission that its builder does not set.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use io_uring::squeue::Entry128;
use io_uring::{opcode, types};

use crate::iovec::{IoVec, IoVecMut};
use crate::shared::SharedMemory;

/// Bytes of the header of a request that are filled in, and of that of an answer.
const IN_HEADER_BYTES: usize = 40;
const OUT_HEADER_BYTES: usize = 16;
/// Where the argument is, and its bytes at most.
const ARGUMENT_AT: usize = 128;
const ARGUMENT_BYTES: usize = 128;
/// Where the number of the exchange is, and the bytes of data.
const EXCHANGE_AT: usize = 264;
const DATA_LEN_AT: usize = 272;
/// Bytes up to here are the kernel's headers.
const HEADERS_BYTES: usize = 288;
/// Where the data begins.
const DATA_AT: usize = 4096;

/// Commands of the device: `FUSE_IO_URING_CMD_REGISTER` and `…_COMMIT_AND_FETCH` of linux/fuse.h.
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;

/// Bytes of header and argument of a request.
pub const FUSE_HEAD_BYTES: usize = IN_HEADER_BYTES + ARGUMENT_BYTES;

/// The place of one request.
#[derive(Debug)]
pub struct FuseSlot {
    memory: Arc<SharedMemory>,
    /// The two parts of the memory, as the kernel wants them.
    parts: Box<[Part; 2]>,
    /// The kernel's queue that it belongs to.
    queue: u16,
    /// Whether it is registered.
    is_registered: bool,
}

/// `struct iovec`.
#[derive(Debug)]
#[repr(C)]
struct Part {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the parts are of memory that the slot owns, and all access to that is atomic.
unsafe impl Send for FuseSlot {}

impl FuseSlot {
    /// A slot of one of the kernel's queues, with room for this much data.
    pub fn new(queue: u16, data_bytes: usize) -> FuseSlot {
        let memory = SharedMemory::new(DATA_AT + data_bytes);
        let part = |range: std::ops::Range<usize>| Part {
            start: memory.at(&range),
            len: range.len(),
        };
        let parts = Box::new([part(0..HEADERS_BYTES), part(DATA_AT..DATA_AT + data_bytes)]);
        FuseSlot {
            memory,
            parts,
            queue,
            is_registered: false,
        }
    }

    /// Header and argument of the request, one behind the other; the argument may be shorter than
    /// its place.
    pub fn head(&self) -> [u8; FUSE_HEAD_BYTES] {
        let mut head = [0; FUSE_HEAD_BYTES];
        self.memory.read(0, &mut head[..IN_HEADER_BYTES]);
        self.memory.read(ARGUMENT_AT, &mut head[IN_HEADER_BYTES..]);
        head
    }

    /// The first bytes of the request's data.
    ///
    /// # Panics
    /// If it has no room for so much.
    pub fn data(&self, len: usize) -> IoVec {
        IoVec::shared(&self.memory, DATA_AT..DATA_AT + len)
    }

    /// The place for the first bytes of the answer's data.
    ///
    /// # Panics
    /// If it has no room for so much.
    pub fn target(&self, len: usize) -> IoVecMut {
        IoVecMut::shared(&self.memory, DATA_AT..DATA_AT + len)
    }

    /// Writes data of the answer.
    ///
    /// # Panics
    /// If it has no room for so much.
    pub fn write(&self, data: &[u8]) {
        self.memory.write(DATA_AT, data);
    }

    /// Makes the request an answer: its header, and the bytes of data that are in their place.
    pub fn answer(&self, header: &[u8; OUT_HEADER_BYTES], data_len: u32) {
        self.memory.write(0, header);
        self.memory.write(DATA_LEN_AT, &data_len.to_ne_bytes());
    }

    /// The command that gives the slot to the kernel.
    pub(crate) fn entry(&self, device: &OwnedFd) -> Entry128 {
        let operation = match self.is_registered {
            false => REGISTER,
            true => COMMIT_AND_FETCH,
        };
        let mut command = [0; 80];
        self.memory.read(EXCHANGE_AT, &mut command[8..16]);
        command[16..18].copy_from_slice(&self.queue.to_ne_bytes());
        let parts = self.parts.as_ptr() as u64;
        let entry = opcode::UringCmd80::new(types::Fd(device.as_raw_fd()), operation)
            .cmd(command)
            .addr(Some(parts))
            .build();
        with_len(entry, self.parts.len() as u32)
    }

    /// Takes note that the kernel has given it back.
    pub(crate) fn returned(&mut self) {
        self.is_registered = true;
    }
}

/// Sets the field `len` of a submission, which its builder leaves at zero.
fn with_len(mut entry: Entry128, len: u32) -> Entry128 {
    const LEN_AT: usize = 24;
    let start = (&raw mut entry).cast::<u8>();
    // SAFETY: the entry is the kernel's `struct io_uring_sqe` of 128 bytes, by its `repr(C)`, which
    // has the 32 bits of `len` at this offset, and no values that are invalid.
    unsafe { start.add(LEN_AT).cast::<u32>().write(len) };
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_where_the_kernel_looks_for_them() {
        let mut slot = FuseSlot::new(3, 8192);
        let device = crate::sys::new_event().unwrap();
        slot.memory.write(EXCHANGE_AT, &77u64.to_ne_bytes());
        for operation in [REGISTER, COMMIT_AND_FETCH] {
            let entry = slot.entry(&device);
            assert_eq!(size_of_val(&entry), 128);
            // SAFETY: 128 bytes without padding, as `with_len` says.
            let bytes: [u8; 128] = unsafe { std::mem::transmute_copy(&entry) };
            let number = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
            assert_eq!(bytes[0], opcode::UringCmd80::CODE);
            assert_eq!(number(4), device.as_raw_fd() as u32);
            assert_eq!(number(8), operation);
            let address = slot.parts.as_ptr() as u64;
            assert_eq!(bytes[16..24], address.to_ne_bytes());
            assert_eq!(number(24), 2);
            assert_eq!(bytes[56..64], 77u64.to_ne_bytes());
            assert_eq!((bytes[64], bytes[65]), (3, 0));
            slot.returned();
        }
    }

    #[test]
    fn parts_of_a_request_and_an_answer_are_in_their_places() {
        let slot = FuseSlot::new(0, 4096);
        slot.memory.write(0, &[1; IN_HEADER_BYTES]);
        slot.memory.write(ARGUMENT_AT, &[2; ARGUMENT_BYTES]);
        let head = slot.head();
        assert!(head[..40] == [1; 40] && head[40..] == [2; 128]);
        slot.write(b"data");
        assert_eq!(slot.data(4).to_vec(), b"data");
        slot.answer(&[9; 16], 4);
        let mut start = [0; 17];
        slot.memory.read(0, &mut start);
        assert!(start[..16] == [9; 16] && start[16] == 1);
        let (headers, data) = (&slot.parts[0], &slot.parts[1]);
        assert_eq!((headers.len, data.len), (288, 4096));
        assert!(data.start.addr().get().is_multiple_of(4096));
    }
}
