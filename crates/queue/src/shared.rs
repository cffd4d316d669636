//! Memory that others read and write at the same time: a guest's, or an embedder's.
//!
//! No reference to its bytes is ever made, since a reference promises that nobody changes them.
//! All access is by relaxed atomic operations on aligned machine words, whatever the range: the
//! words at its ends are loaded whole, and changed by compare-and-exchange, which leaves the bytes
//! beside the range as their owner has them. So the accesses of several requests to one piece of
//! memory are of one size and race by the rules of the language. Those of a guest, of another
//! process or of the kernel are outside of the language, and for the processor all are alike.
//!
//! Plain or volatile copies, which others use here, are data races by the letter, and no faster
//! where the memory is not in the nearest cache.
#![allow(unsafe_code)] // Words of memory that is not ours: each access says why it is sound.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::buf::ALIGNMENT_BYTES;
use crate::mapping::Mapping;

/// Bytes of a word.
pub const WORD_BYTES: usize = size_of::<usize>();

/// Words that are joined before it is asked whether a bit was set.
const STRIDE_WORDS: usize = 32;

/// The part of one aligned word that belongs to a range.
struct Piece<'a> {
    word: &'a AtomicUsize,
    /// Range of its bytes.
    part: Range<usize>,
}

impl Piece<'_> {
    fn load(&self) -> [u8; WORD_BYTES] {
        self.word.load(Ordering::Relaxed).to_ne_bytes()
    }

    fn store(&self, bytes: &[u8]) {
        let changed = |old: usize| {
            let mut word = old.to_ne_bytes();
            word[self.part.clone()].copy_from_slice(bytes);
            Some(usize::from_ne_bytes(word))
        };
        let stored = self
            .word
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
        debug_assert!(stored.is_ok(), "the update always has a value");
    }
}

/// A range of memory as whole aligned words and what is before and behind them.
struct Words<'a> {
    head: Option<Piece<'a>>,
    body: &'a [AtomicUsize],
    tail: Option<Piece<'a>>,
}

impl<'a> Words<'a> {
    /// # Safety
    /// The aligned words that the range lies in are mapped for as long as `'a`, and nobody accesses
    /// them but by atomic operations on words, or from outside of the language.
    unsafe fn of(start: NonNull<u8>, len: usize) -> Words<'a> {
        let skip = start.as_ptr().addr() % WORD_BYTES;
        // SAFETY: `skip` bytes before the range are in its first word, which is mapped.
        let first = unsafe { start.sub(skip) }.cast::<AtomicUsize>();
        let piece = |index: usize, part| Piece {
            // SAFETY: the caller's promise. A word has no invalid values, and a shared reference to
            // an atomic one allows others to change it.
            word: unsafe { first.add(index).as_ref() },
            part,
        };
        let end = skip + len;
        let (whole_start, whole_end) = (skip.div_ceil(WORD_BYTES), end / WORD_BYTES);
        if len == 0 || whole_start > whole_end {
            // Within one word.
            return Words {
                head: (len > 0).then(|| piece(0, skip..end)),
                body: &[],
                tail: None,
            };
        }
        let head = (skip > 0).then(|| piece(0, skip..WORD_BYTES));
        let tail_len = end % WORD_BYTES;
        let tail = (tail_len > 0).then(|| piece(whole_end, 0..tail_len));
        let count = whole_end - whole_start;
        // SAFETY: as for a piece; these words lie side by side within the range.
        let body = unsafe { std::slice::from_raw_parts(first.add(whole_start).as_ptr(), count) };
        Words { head, body, tail }
    }
}

/// Copies the bytes from `start` on into `to`.
///
/// # Safety
/// As for [`Words::of`] with the length of `to`, until it returns.
pub(crate) unsafe fn load(start: NonNull<u8>, to: &mut [u8]) {
    // SAFETY: the caller's promise.
    let words = unsafe { Words::of(start, to.len()) };
    let (head, rest) = to.split_at_mut(words.head.as_ref().map_or(0, |piece| piece.part.len()));
    let (body, tail) = rest.split_at_mut(words.body.len() * WORD_BYTES);
    if let Some(piece) = words.head {
        head.copy_from_slice(&piece.load()[piece.part]);
    }
    for (to, word) in body.chunks_exact_mut(WORD_BYTES).zip(words.body) {
        to.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
    if let Some(piece) = words.tail {
        tail.copy_from_slice(&piece.load()[piece.part]);
    }
}

/// Copies `from` to the memory from `start` on.
///
/// # Safety
/// As for [`Words::of`] with the length of `from`, until it returns; the memory may be written.
pub(crate) unsafe fn store(start: NonNull<u8>, from: &[u8]) {
    // SAFETY: the caller's promise.
    let words = unsafe { Words::of(start, from.len()) };
    let (head, rest) = from.split_at(words.head.as_ref().map_or(0, |piece| piece.part.len()));
    let (body, tail) = rest.split_at(words.body.len() * WORD_BYTES);
    if let Some(piece) = words.head {
        piece.store(head);
    }
    for (from, word) in body.chunks_exact(WORD_BYTES).zip(words.body) {
        let bytes = from.try_into().expect("a chunk is a word");
        word.store(usize::from_ne_bytes(bytes), Ordering::Relaxed);
    }
    if let Some(piece) = words.tail {
        piece.store(tail);
    }
}

/// Sets `len` bytes from `start` on.
///
/// # Safety
/// As for [`store`].
pub(crate) unsafe fn fill(start: NonNull<u8>, len: usize, byte: u8) {
    // SAFETY: the caller's promise.
    let words = unsafe { Words::of(start, len) };
    let bytes = [byte; WORD_BYTES];
    for piece in [words.head, words.tail].into_iter().flatten() {
        piece.store(&bytes[piece.part.clone()]);
    }
    for word in words.body {
        word.store(usize::from_ne_bytes(bytes), Ordering::Relaxed);
    }
}

/// Whether the bytes were zero at the moments when they were looked at.
///
/// # Safety
/// As for [`load`].
pub(crate) unsafe fn is_zero(start: NonNull<u8>, len: usize) -> bool {
    // SAFETY: the caller's promise.
    let words = unsafe { Words::of(start, len) };
    let ends = [words.head, words.tail];
    let mut ends = ends.into_iter().flatten();
    let joined = |all: usize, word: &AtomicUsize| all | word.load(Ordering::Relaxed);
    ends.all(|piece| piece.load()[piece.part].iter().all(|&byte| byte == 0))
        && words
            .body
            .chunks(STRIDE_WORDS)
            .all(|chunk| chunk.iter().fold(0, joined) == 0)
}

/// Memory that this process shares: with its own threads, or with the other processes that map a
/// file, as a VMM does with its guest's memory.
///
/// # Fields
///
/// Rings and tables in such memory have fields that several processes read and write at the same
/// time: [`SharedMemory::load_u16`] and its like access these by one operation of their size, with
/// the order that a consumer (acquire) and a producer (release) need. Threads of one process that
/// access one field at a time must all use the same size.
#[derive(Debug)]
pub struct SharedMemory {
    _keeper: Keeper,
    start: NonNull<u8>,
    len: usize,
}

/// Owner of the memory.
#[derive(Debug)]
#[expect(dead_code, reason = "it is kept for the memory that it owns")]
enum Keeper {
    Words(Box<[AtomicUsize]>),
    File(Mapping),
}

// SAFETY: the memory lives as long as its keeper, and all access is atomic.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

/// Accessors of a field of one size.
macro_rules! fields {
    ($($load:ident, $store:ident: $word:ty, $atomic:ty;)+) => {$(
        /// The field at `at`, as little-endian bytes; what was written before it was stored can be
        /// read afterwards.
        ///
        /// # Panics
        /// If the field is not within the memory, or not aligned to its size.
        pub fn $load(&self, at: usize) -> $word {
            let field = self.field::<$atomic>(at);
            // SAFETY: within the memory and aligned, as was asserted; atomic words may be changed
            // by others while they are referred to.
            <$word>::from_le(unsafe { field.as_ref() }.load(Ordering::Acquire))
        }

        /// Stores the field at `at`, as little-endian bytes, after all that was written before.
        ///
        /// # Panics
        /// As the method that loads it.
        pub fn $store(&self, at: usize, value: $word) {
            let field = self.field::<$atomic>(at);
            // SAFETY: as for loading; atomic words may be written through a shared reference.
            unsafe { field.as_ref() }.store(value.to_le(), Ordering::Release);
        }
    )+};
}

impl SharedMemory {
    /// `len` bytes of zeroes, of which the first is at a multiple of [`ALIGNMENT_BYTES`].
    pub fn new(len: usize) -> Arc<SharedMemory> {
        let count = (len + ALIGNMENT_BYTES).div_ceil(WORD_BYTES);
        // Zeroed as it comes from the system, so that memory is taken when it is used.
        let words: Box<[usize]> = vec![0; count].into();
        // SAFETY: the atomic type has size, alignment and values of the plain one; nothing else
        // refers to the words.
        let words = unsafe { Box::from_raw(Box::into_raw(words) as *mut [AtomicUsize]) };
        let address = words.as_ptr().addr();
        let skip = address.next_multiple_of(ALIGNMENT_BYTES) - address;
        // SAFETY: within the allocation, which has `ALIGNMENT_BYTES` more than are asked for.
        let start = unsafe { NonNull::from(&*words).cast::<u8>().add(skip) };
        Arc::new(SharedMemory {
            _keeper: Keeper::Words(words),
            start,
            len,
        })
    }

    /// Maps `len` bytes at `offset` of a file, such as a guest's memory.
    ///
    /// A process that shortens the file later ends this one by SIGBUS, unless the file is sealed
    /// against that: memory is taken from processes that are trusted so far.
    ///
    /// # Errors
    /// The file ends before that part does; the system's refusal.
    pub fn map(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<Arc<SharedMemory>> {
        let mapping = Mapping::of(file, offset, len)?;
        Ok(Arc::new(SharedMemory {
            start: mapping.start(),
            len: mapping.len(),
            _keeper: Keeper::File(mapping),
        }))
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte of a range.
    ///
    /// # Panics
    /// If the range is not within the memory.
    pub(crate) fn at(&self, range: &Range<usize>) -> NonNull<u8> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {} bytes of shared memory",
            self.len
        );
        // SAFETY: within the memory, as was asserted.
        unsafe { self.start.add(range.start) }
    }

    /// The place of a field of type `T`.
    fn field<T>(&self, at: usize) -> NonNull<T> {
        let field = self.at(&(at..at + size_of::<T>())).cast::<T>();
        assert!(field.is_aligned(), "a field at {at} is not aligned");
        field
    }

    fields! {
        load_u8, store_u8: u8, AtomicU8;
        load_u16, store_u16: u16, AtomicU16;
        load_u32, store_u32: u32, AtomicU32;
        load_u64, store_u64: u64, AtomicU64;
    }

    /// Sets bits of the byte at `at`, and leaves the others.
    ///
    /// # Panics
    /// If the byte is not within the memory.
    pub fn set_bits(&self, at: usize, bits: u8) {
        let field = self.field::<AtomicU8>(at);
        // SAFETY: as for storing a field.
        unsafe { field.as_ref() }.fetch_or(bits, Ordering::SeqCst);
    }

    /// Copies the bytes at `at` into `to`.
    ///
    /// # Panics
    /// If they are not within the memory.
    pub fn read(&self, at: usize, to: &mut [u8]) {
        let start = self.at(&(at..at + to.len()));
        // SAFETY: the words are ours, and everybody accesses them by atomic operations.
        unsafe { load(start, to) }
    }

    /// Copies `from` to the memory at `at`.
    ///
    /// # Panics
    /// If that is not within the memory.
    pub fn write(&self, at: usize, from: &[u8]) {
        let start = self.at(&(at..at + from.len()));
        // SAFETY: as in `read`; atomic words may be written through a shared reference.
        unsafe { store(start, from) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_all_ends_are_copied_and_nothing_beside_them() {
        let memory = SharedMemory::new(48);
        for start in 0..17 {
            for len in 0..=30 {
                let before: Vec<u8> = (0..48).map(|i| 100 + i as u8).collect();
                memory.write(0, &before);
                let bytes: Vec<u8> = (1..=len as u8).collect();
                memory.write(start, &bytes);
                let mut expected = before.clone();
                expected[start..start + len].copy_from_slice(&bytes);
                let mut all = [0; 48];
                memory.read(0, &mut all);
                assert_eq!(all[..], expected, "{start} {len}");
                let mut part = vec![0xEE; len];
                memory.read(start, &mut part);
                assert_eq!(part, bytes, "{start} {len}");
            }
        }
    }

    #[test]
    fn filled_ranges_are_zero_and_one_byte_anywhere_is_found() {
        let memory = SharedMemory::new(600);
        for (start, len) in [(0, 600), (3, 2), (7, 1), (8, 8), (5, 300), (1, 598), (9, 0)] {
            memory.write(0, &[0xFF; 600]);
            let at = memory.at(&(start..start + len));
            // SAFETY: the range was checked, and the memory lives.
            let is_zero = || unsafe { is_zero(at, len) };
            assert_eq!(is_zero(), len == 0);
            // SAFETY: as above.
            unsafe { fill(at, len, 0) };
            assert!(is_zero(), "{start} {len}");
            let mut all = [0; 600];
            memory.read(0, &mut all);
            let zeroes = all.iter().filter(|&&byte| byte == 0).count();
            assert_eq!(zeroes, len);
            for index in start..start + len {
                memory.write(index, &[0x80]);
                assert!(!is_zero(), "{index} of {start} {len}");
                memory.write(index, &[0]);
            }
        }
    }

    #[test]
    fn a_mapped_part_of_a_file_is_the_files_bytes() {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileExt;

        let file = tempfile::tempfile().unwrap();
        file.set_len(10_000).unwrap();
        let memory = SharedMemory::map(file.as_fd(), 96, 9_904).unwrap();
        assert_eq!(memory.len(), 9_904);
        memory.write(4, b"guest");
        memory.store_u16(4_000, 0x1234);
        memory.store_u64(4_008, 7);
        memory.set_bits(9_903, 0x80);
        memory.set_bits(9_903, 0x01);
        let mut bytes = [0; 10_000];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes[100..105], b"guest");
        assert_eq!(bytes[4_096..4_098], [0x34, 0x12]);
        assert_eq!(bytes[9_999], 0x81);
        file.write_all_at(&0xABCD_u32.to_le_bytes(), 200).unwrap();
        assert_eq!(memory.load_u32(104), 0xABCD);
        assert_eq!(memory.load_u16(4_000), 0x1234);
        assert_eq!((memory.load_u64(4_008), memory.load_u8(9_903)), (7, 0x81));
        for (offset, len) in [(0, 10_001), (10_000, 1), (0, 0), (u64::MAX, 2)] {
            assert!(SharedMemory::map(file.as_fd(), offset, len).is_err());
        }
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn a_field_is_aligned() {
        SharedMemory::new(8).load_u32(2);
    }

    #[test]
    #[should_panic(expected = "of 8 bytes of shared memory")]
    fn nothing_beyond_the_memory_is_read() {
        SharedMemory::new(8).read(1, &mut [0; 8]);
    }
}
