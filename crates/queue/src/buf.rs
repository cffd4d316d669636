//! Memory for I/O: aligned for direct I/O, shared without copying, owned until the kernel lets go.
//!
//! [`BufMut`] is exclusive and can be split into disjoint parts that are read into concurrently;
//! [`Buf`] is shared and read-only. Both keep the whole allocation alive. Requests take lists of
//! them, or of memory that others change meanwhile ([`mod@crate::iovec`]).
#![allow(unsafe_code)] // Slices of raw memory: each use says why it is sound.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::memory::Memory;

/// Alignment of every buffer's start: the largest block size of the direct I/O that is met in
/// practice.
pub const ALIGNMENT_BYTES: usize = 4096;

/// Demands of direct I/O on memory. The caller sees to it; else the system refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryAlignment {
    /// Segments must start at multiples of this many bytes.
    pub start_bytes: usize,
    /// Unit of the lengths of a list's segments.
    pub len_bytes: usize,
}

impl MemoryAlignment {
    /// No demands: I/O through the page cache.
    pub const NONE: MemoryAlignment = MemoryAlignment {
        start_bytes: 1,
        len_bytes: 1,
    };
}

/// Content of a buffer for overwriting, in builds with assertions: a byte that is not overwritten
/// shows.
const STALE: u8 = 0xA5;

/// An exclusive, writable range of an aligned allocation.
pub struct BufMut {
    pub(crate) memory: Arc<Memory>,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl BufMut {
    /// `len` bytes of zeroes.
    pub fn zeroed(len: usize) -> BufMut {
        BufMut {
            memory: Arc::new(Memory::zeroed(len)),
            start: 0,
            len,
        }
    }

    /// `len` bytes that the caller overwrites, all of them, before it uses any: until then they are
    /// whatever an earlier buffer of the process held, which may be another guest's. Cheaper than
    /// [`BufMut::zeroed`], since large memory is used again.
    ///
    /// A read fills its whole buffer or fails (beyond the end of a file with zeroes), and a buffer
    /// whose read has failed is dropped: so what is read into this and only then passed on shows
    /// nobody what is not his. Buffers that a read may fill in part only are no case for it.
    pub fn for_overwrite(len: usize) -> BufMut {
        let mut buf = BufMut {
            memory: Arc::new(Memory::for_overwrite(len)),
            start: 0,
            len,
        };
        if cfg!(debug_assertions) {
            buf.fill(STALE);
        }
        buf
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> BufMut {
        let mut buf = BufMut::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// Keeps the first `at` bytes and returns the rest.
    ///
    /// # Panics
    /// If `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> BufMut {
        assert!(at <= self.len, "split at {at} of {}", self.len);
        let rest = BufMut {
            memory: Arc::clone(&self.memory),
            start: self.start + at,
            len: self.len - at,
        };
        self.len = at;
        rest
    }

    /// Returns the first `at` bytes and keeps the rest.
    ///
    /// # Panics
    /// If `at` is beyond the end.
    pub fn split_to(&mut self, at: usize) -> BufMut {
        let rest = self.split_off(at);
        std::mem::replace(self, rest)
    }

    /// Joins what `split_off` separated.
    ///
    /// # Panics
    /// If `next` is not the range that follows this one in the same allocation.
    pub fn unsplit(&mut self, next: BufMut) {
        assert!(
            Arc::ptr_eq(&self.memory, &next.memory) && self.start + self.len == next.start,
            "only neighbouring parts of one buffer join"
        );
        self.len += next.len;
    }

    /// Shortens the buffer to its first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Becomes the whole allocation again if no other part of it is left anywhere; says whether.
    /// The bytes are what was last written there.
    pub fn try_reclaim(&mut self) -> bool {
        let Some(memory) = Arc::get_mut(&mut self.memory) else {
            return false;
        };
        (self.start, self.len) = (0, memory.len());
        true
    }

    /// Gives up the exclusive right, for writing the bytes out.
    pub fn freeze(self) -> Buf {
        Buf {
            memory: self.memory,
            start: self.start,
            len: self.len,
        }
    }
}

impl Deref for BufMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies within the initialised allocation, and it is exclusively ours.
        unsafe { std::slice::from_raw_parts(self.memory.start().add(self.start), self.len) }
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; ranges of several `BufMut` of one allocation never overlap,
        // since they only come from splitting, and a `Buf` is only made by giving one up.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start().add(self.start), self.len) }
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} bytes)", self.len)
    }
}

/// A shared, read-only range of an aligned allocation. Cloning and slicing copy nothing.
#[derive(Clone)]
pub struct Buf {
    pub(crate) memory: Arc<Memory>,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Buf {
    /// `len` bytes of zeroes.
    pub fn zeroed(len: usize) -> Buf {
        BufMut::zeroed(len).freeze()
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Buf {
        BufMut::copy_of(bytes).freeze()
    }

    /// The bytes of an owner, such as a `Vec<u8>` or an `Arc<[u8]>`, without a copy: the owner
    /// lives until the last part of the buffer is gone. They begin at any address, so direct I/O
    /// may need a copy yet.
    pub fn from_owner(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Buf {
        let memory = Memory::owned_by(owner);
        Buf {
            start: 0,
            len: memory.len(),
            memory: Arc::new(memory),
        }
    }

    /// The part `[start, start + len)`.
    ///
    /// # Panics
    /// If the part is not within the buffer.
    pub fn slice(&self, start: usize, len: usize) -> Buf {
        assert!(
            start <= self.len && len <= self.len - start,
            "slice beyond the buffer"
        );
        Buf {
            memory: Arc::clone(&self.memory),
            start: self.start + start,
            len,
        }
    }

    /// Returns this buffer and `next` as one, if `next` follows it in the same allocation.
    pub fn joined(&self, next: &Buf) -> Option<Buf> {
        let len = self.len + next.len;
        self.is_followed_by(next).then(|| Buf {
            memory: Arc::clone(&self.memory),
            start: self.start,
            len,
        })
    }

    /// Whether `next` follows this buffer in the same allocation, so that both are one run.
    pub fn is_followed_by(&self, next: &Buf) -> bool {
        Arc::ptr_eq(&self.memory, &next.memory) && self.start + self.len == next.start
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies within the initialised allocation, and nobody writes to it: the
        // exclusive right was given up by `freeze`.
        unsafe { std::slice::from_raw_parts(self.memory.start().add(self.start), self.len) }
    }
}

impl From<Vec<u8>> for Buf {
    fn from(bytes: Vec<u8>) -> Buf {
        Buf::copy_of(&bytes)
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_buffer_are_disjoint_and_join_again() {
        let mut head = BufMut::zeroed(10);
        let mut tail = head.split_off(4);
        head.fill(1);
        tail.fill(2);
        head.unsplit(tail);
        assert_eq!(&head[..], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
        let buf = head.freeze();
        assert!(buf.slice(0, 4).is_followed_by(&buf.slice(4, 2)));
        assert!(!buf.slice(0, 4).is_followed_by(&buf.slice(5, 2)));
    }

    #[test]
    fn a_buffer_is_reclaimed_once_all_its_parts_are_gone() {
        let mut rest = BufMut::zeroed(8);
        let head = rest.split_to(5);
        let head = head.freeze();
        let clone = head.slice(1, 1);
        drop(head);
        assert!(!rest.try_reclaim(), "a slice is still there");
        assert_eq!(rest.len(), 3);
        drop(clone);
        assert!(rest.try_reclaim());
        assert_eq!(rest.len(), 8);
    }

    #[test]
    fn bytes_of_an_owner_are_not_copied_and_live_as_long_as_a_part_of_them() {
        let owner: Arc<[u8]> = (0..10).collect();
        let buf = Buf::from_owner(Arc::clone(&owner));
        assert_eq!(buf.as_ptr(), owner.as_ptr());
        let part = buf.slice(3, 4);
        drop(buf);
        assert_eq!((&part[..], Arc::strong_count(&owner)), (&owner[3..7], 2));
        drop(part);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn buffers_are_aligned_for_direct_io() {
        for len in [0, 1, 512, 4096, 70_000, 3 << 20] {
            for buf in [BufMut::zeroed(len), BufMut::for_overwrite(len)] {
                assert_eq!(buf.as_ptr() as usize % ALIGNMENT_BYTES, 0);
                assert_eq!(buf.len(), len);
            }
        }
    }

    #[test]
    fn memory_for_overwriting_is_used_again_once_no_part_of_it_is_left() {
        // No other test takes memory of this class.
        const LEN: usize = 500_000;
        let mut first = BufMut::for_overwrite(LEN);
        let start = first.as_ptr();
        let tail = first.split_off(LEN - 1).freeze();
        drop(first);
        let other = BufMut::for_overwrite(LEN);
        assert_ne!(other.as_ptr(), start, "a part of the first is left");
        drop(tail);
        let mut again = BufMut::for_overwrite(LEN - 7);
        assert_eq!(again.as_ptr(), start);
        again.truncate(1);
        assert!(again.try_reclaim());
        assert_eq!(again.len(), LEN - 7, "not that of its class");
    }

    #[test]
    fn zeroed_memory_is_zeroed_after_other_memory_was_used() {
        const LEN: usize = 300_000;
        let mut used = BufMut::for_overwrite(LEN);
        used.fill(7);
        drop(used);
        assert!(BufMut::zeroed(LEN).iter().all(|&byte| byte == 0));
    }

    #[test]
    #[should_panic(expected = "only neighbouring parts")]
    fn strangers_do_not_join() {
        let mut a = BufMut::zeroed(4);
        a.unsplit(BufMut::zeroed(4));
    }
}
