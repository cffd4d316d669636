//! Scatter lists: what requests read into and write from.
//!
//! A list has segments of memory, one after the other. A segment is a part of a buffer of ours
//! ([`Buf`], [`BufMut`]), or of memory that another owner keeps and may change at any time: a
//! guest's, or an embedder's. Its owner is kept until the last request has let go of it, as the
//! memory of buffers is. Lists of one segment, as most are, take no memory of their own; splitting,
//! slicing and joining copy no bytes.
//!
//! The bytes of a list can only be copied, in and out: memory that others change must not be
//! referred to as a slice ([`mod@crate::shared`]), and looking twice may show two things. So code
//! that decides by the bytes of a request decides once, or by a copy of its own
//! ([`IoVec::to_buf`]), and then writes that copy.
#![allow(unsafe_code)] // Raw memory of buffers and of others: each use says why it is sound.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::buf::{Buf, BufMut, MemoryAlignment};
use crate::memory::Memory;
use crate::shared::{self, SharedMemory};
use crate::zero;

/// The owner of memory that is not ours, which is kept for as long as a list has the memory.
pub type Keeper = Arc<dyn Any + Send + Sync>;

/// Owner of the memory of a segment.
#[derive(Clone)]
enum Owner {
    /// A buffer of ours: exclusive in an [`IoVecMut`], not written any more in an [`IoVec`].
    Buffer(Arc<Memory>),
    /// A caller that waits: exclusive in an [`IoVecMut`], not written any more in an [`IoVec`].
    Lent(Keeper),
    /// Another owner, which may change it at any time.
    Foreign(Keeper),
}

/// A part of a list, contiguous; never empty.
pub(crate) struct Segment {
    owner: Owner,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the owners are both. The memory of buffers is exclusive or not written, as for `Buf` and
// `BufMut`; that of others is accessed by atomic operations only.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    fn of_buffer(memory: Arc<Memory>, start: usize, len: usize) -> Segment {
        // SAFETY: a buffer lies within its allocation.
        let start = unsafe { NonNull::new_unchecked(memory.start().add(start)) };
        Segment {
            owner: Owner::Buffer(memory),
            start,
            len,
        }
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The part `[start, start + len)`, for a list that shares it or gives up its own.
    fn part(&self, start: usize, len: usize) -> Segment {
        debug_assert!(start + len <= self.len, "a part is within its segment");
        Segment {
            owner: self.owner.clone(),
            // SAFETY: within the segment.
            start: unsafe { self.start.add(start) },
            len,
        }
    }

    /// Whether `next` follows in the same memory, so that both are one run.
    fn is_followed_by(&self, next: &Segment) -> bool {
        let same = match (&self.owner, &next.owner) {
            (Owner::Buffer(a), Owner::Buffer(b)) => Arc::ptr_eq(a, b),
            (Owner::Foreign(a), Owner::Foreign(b)) => Arc::ptr_eq(a, b),
            // Each slice has an owner of its own.
            (Owner::Lent(a), Owner::Lent(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        same && self.start().addr() + self.len == next.start().addr()
    }

    /// The buffer that it is a part of, with its place there.
    fn into_buffer(self) -> Result<(Arc<Memory>, usize, usize), Segment> {
        let start = match &self.owner {
            Owner::Buffer(memory) => self.place_in(memory),
            Owner::Lent(_) | Owner::Foreign(_) => 0,
        };
        match self.owner {
            Owner::Buffer(memory) => Ok((memory, start, self.len)),
            Owner::Lent(_) | Owner::Foreign(_) => Err(self),
        }
    }

    fn place_in(&self, memory: &Memory) -> usize {
        self.start().addr() - memory.start().addr()
    }

    /// The address of `len` bytes that are accessed.
    fn address(&self, start: usize, len: usize) -> NonNull<u8> {
        assert!(start + len <= self.len, "an access is within its segment");
        // SAFETY: within the segment.
        unsafe { self.start.add(start) }
    }

    fn copy_to(&self, start: usize, to: &mut [u8]) {
        let from = self.address(start, to.len());
        match self.owner {
            // SAFETY: nobody writes such memory but its `IoVecMut`, if it has one.
            Owner::Buffer(_) | Owner::Lent(_) => unsafe {
                from.as_ptr()
                    .copy_to_nonoverlapping(to.as_mut_ptr(), to.len());
            },
            // SAFETY: the constructor of the segment has promised what is required here.
            Owner::Foreign(_) => unsafe { shared::load(from, to) },
        }
    }

    /// # Safety
    /// The list is exclusive.
    unsafe fn copy_from(&self, start: usize, from: &[u8]) {
        let to = self.address(start, from.len());
        match self.owner {
            // SAFETY: the memory is exclusive, so `from` is no part of it.
            Owner::Buffer(_) | Owner::Lent(_) => unsafe {
                to.as_ptr()
                    .copy_from_nonoverlapping(from.as_ptr(), from.len());
            },
            // SAFETY: the constructor of the segment has promised what is required here.
            Owner::Foreign(_) => unsafe { shared::store(to, from) },
        }
    }

    /// # Safety
    /// The list is exclusive.
    unsafe fn fill(&self, range: Range<usize>, byte: u8) {
        let to = self.address(range.start, range.len());
        match self.owner {
            // SAFETY: the memory is exclusive.
            Owner::Buffer(_) | Owner::Lent(_) => unsafe {
                to.as_ptr().write_bytes(byte, range.len());
            },
            // SAFETY: the constructor of the segment has promised what is required here.
            Owner::Foreign(_) => unsafe { shared::fill(to, range.len(), byte) },
        }
    }

    fn fits(&self, alignment: MemoryAlignment) -> bool {
        self.start().addr().is_multiple_of(alignment.start_bytes)
            && self.len.is_multiple_of(alignment.len_bytes)
    }
}

/// Segments, one after the other.
#[derive(Default)]
struct List(SmallVec<[Segment; 1]>);

impl List {
    fn new(segment: Segment) -> List {
        match segment.len {
            0 => List::default(),
            _ => List(smallvec![segment]),
        }
    }

    fn len(&self) -> usize {
        match &self.0[..] {
            [only] => only.len,
            segments => segments.iter().map(|segment| segment.len).sum(),
        }
    }

    /// Adds a segment, as part of the last one if it follows that in the same memory.
    fn push(&mut self, segment: Segment) {
        match self.0.last_mut() {
            _ if segment.len == 0 => {}
            Some(last) if last.is_followed_by(&segment) => last.len += segment.len,
            _ => self.0.push(segment),
        }
    }

    fn append(&mut self, next: List) {
        match self.0.is_empty() && !self.0.spilled() {
            true => *self = next,
            false => next.0.into_iter().for_each(|segment| self.push(segment)),
        }
    }

    /// The segments of a range, each with the part of it, and where that begins in the range.
    fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = (&Segment, Range<usize>, usize)> {
        let mut at = 0;
        let whole = self.0.iter().map(move |segment| {
            let start = at;
            at += segment.len;
            (segment, start)
        });
        whole.filter_map(move |(segment, at)| {
            let start = range.start.max(at);
            let end = range.end.min(at + segment.len);
            (start < end).then(|| (segment, start - at..end - at, start - range.start))
        })
    }

    /// Returns another list of a range, which the caller gives up or shares.
    fn part(&self, range: Range<usize>) -> List {
        if let [only] = &self.0[..] {
            return List::new(only.part(range.start, range.len()));
        }
        let pieces = self.pieces(range);
        List(
            pieces
                .map(|(s, part, _)| s.part(part.start, part.len()))
                .collect(),
        )
    }

    fn split_off(&mut self, at: usize) -> List {
        let len = self.len();
        assert!(at <= len, "split at {at} of {len}");
        if at == 0 {
            return std::mem::take(self);
        }
        if at == len {
            return List::default();
        }
        let rest = self.part(at..len);
        self.truncate(at);
        rest
    }

    fn truncate(&mut self, len: usize) {
        let mut left = len;
        self.0.retain(|segment| {
            segment.len = segment.len.min(left);
            left -= segment.len;
            segment.len > 0
        });
    }

    fn copy_to(&self, at: usize, to: &mut [u8]) {
        assert!(
            at + to.len() <= self.len(),
            "{} bytes at {at} of a list of {}",
            to.len(),
            self.len()
        );
        for (segment, part, from) in self.pieces(at..at + to.len()) {
            segment.copy_to(part.start, &mut to[from..from + part.len()]);
        }
    }

    fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(0, &mut bytes);
        bytes
    }

    fn fits(&self, alignment: MemoryAlignment) -> bool {
        alignment == MemoryAlignment::NONE || self.0.iter().all(|segment| segment.fits(alignment))
    }

    /// A segment of memory that a caller lends.
    fn lent(start: NonNull<u8>, len: usize, owner: Keeper) -> List {
        List::new(Segment {
            owner: Owner::Lent(owner),
            start,
            len,
        })
    }

    /// A segment of memory that is not ours.
    fn foreign(start: NonNull<u8>, len: usize, owner: Keeper) -> List {
        List::new(Segment {
            owner: Owner::Foreign(owner),
            start,
            len,
        })
    }
}

/// Access to the segments of a list, for those who hand them to the kernel.
pub(crate) trait Segments {
    fn segments(&self) -> &[Segment];
}

/// The methods that both kinds of lists have.
macro_rules! list_methods {
    ($list:ident) => {
        impl $list {
            /// A list of a part of shared memory.
            ///
            /// # Panics
            /// If the range is not within the memory.
            pub fn shared(memory: &Arc<SharedMemory>, range: Range<usize>) -> $list {
                let start = memory.at(&range);
                // SAFETY: shared memory is whole words, and accessed by atomic operations only.
                unsafe { $list::foreign(start, range.len(), Arc::clone(memory) as _) }
            }

            /// Its length in bytes.
            pub fn len(&self) -> usize {
                self.0.len()
            }

            /// Whether it has no bytes.
            pub fn is_empty(&self) -> bool {
                self.0.0.is_empty()
            }

            /// Its segments; those that follow one another in one memory count as one.
            pub fn segment_count(&self) -> usize {
                self.0.0.len()
            }

            /// Keeps the first `at` bytes and returns the rest.
            ///
            /// # Panics
            /// If `at` is beyond the end.
            pub fn split_off(&mut self, at: usize) -> $list {
                $list(self.0.split_off(at))
            }

            /// Returns the first `at` bytes and keeps the rest.
            ///
            /// # Panics
            /// If `at` is beyond the end.
            pub fn split_to(&mut self, at: usize) -> $list {
                let rest = self.split_off(at);
                std::mem::replace(self, rest)
            }

            /// Adds what follows. What a split has separated becomes one segment again.
            pub fn append(&mut self, next: $list) {
                self.0.append(next.0);
            }

            /// Copies the bytes at `at` into `to`.
            ///
            /// # Panics
            /// If they are not within the list.
            pub fn copy_to_slice(&self, at: usize, to: &mut [u8]) {
                self.0.copy_to(at, to);
            }

            /// A copy of all bytes.
            pub fn to_vec(&self) -> Vec<u8> {
                self.0.to_vec()
            }

            /// Whether direct I/O takes each segment as it is.
            pub fn fits(&self, alignment: MemoryAlignment) -> bool {
                self.0.fits(alignment)
            }
        }

        impl Segments for $list {
            fn segments(&self) -> &[Segment] {
                &self.0.0
            }
        }
    };
}

list_methods!(IoVec);
list_methods!(IoVecMut);

/// Data of a write: a list of memory that it only reads.
///
/// Memory of buffers is not written any more while it is in a list; that of others may change at
/// any time, and what reaches the disk then is what the memory held when the kernel read it, or a
/// copy was made.
#[derive(Default)]
pub struct IoVec(List);

impl IoVec {
    /// Returns a list of memory of another owner, without a copy. `owner` is dropped when the last
    /// request has let go of the memory, and not before.
    ///
    /// # Safety
    /// While `owner` lives, the aligned words (of the size of `usize`) that the range lies in are
    /// mapped and readable by this pointer. They are changed meanwhile by the kernel, by other
    /// processes, or by relaxed atomic operations on such words, as of [`SharedMemory`]. Where
    /// memory of one owner lies side by side it is one mapping or allocation, and each pointer is
    /// good for all of it: such segments become one.
    pub unsafe fn foreign(start: NonNull<u8>, len: usize, owner: Keeper) -> IoVec {
        IoVec(List::foreign(start, len, owner))
    }

    /// Returns a list of memory that is borrowed.
    ///
    /// # Safety
    /// Nobody writes the memory while `owner` lives, which no other memory has.
    pub(crate) unsafe fn lent(start: NonNull<u8>, len: usize, owner: Keeper) -> IoVec {
        IoVec(List::lent(start, len, owner))
    }

    /// An empty list with room for this many segments.
    pub fn with_capacity(segments: usize) -> IoVec {
        IoVec(List(SmallVec::with_capacity(segments)))
    }

    /// The part `[start, start + len)`.
    ///
    /// # Panics
    /// If the part is not within the list.
    pub fn slice(&self, start: usize, len: usize) -> IoVec {
        let whole = self.len();
        assert!(
            start <= whole && len <= whole - start,
            "slice beyond the list"
        );
        IoVec(self.0.part(start..start + len))
    }

    /// The bytes as a buffer, which does not change any more: the one that they are in, or a copy.
    pub fn to_buf(&self) -> Buf {
        if let [segment] = &self.0.0[..]
            && let Owner::Buffer(memory) = &segment.owner
        {
            return Buf {
                start: segment.place_in(memory),
                len: segment.len,
                memory: Arc::clone(memory),
            };
        }
        self.to_buf_mut().freeze()
    }

    /// The bytes of each segment as a buffer, as [`IoVec::to_buf`].
    pub fn to_bufs(&self) -> impl Iterator<Item = Buf> {
        let segments = self.0.0.iter();
        segments.map(|segment| IoVec(List::new(segment.part(0, segment.len))).to_buf())
    }

    /// A copy of the bytes in a buffer of their own.
    pub fn to_buf_mut(&self) -> BufMut {
        let mut copy = BufMut::for_overwrite(self.len());
        self.copy_to_slice(0, &mut copy);
        copy
    }

    /// Whether all bytes are zero, or were at the moment when they were looked at: of memory that
    /// others change this is not to be asked twice.
    pub fn is_zero(&self) -> bool {
        self.0.0.iter().all(|segment| match segment.owner {
            Owner::Buffer(_) | Owner::Lent(_) => {
                // SAFETY: a range that nobody writes any more.
                zero::is_zero(unsafe { std::slice::from_raw_parts(segment.start(), segment.len) })
            }
            // SAFETY: the constructor of the segment has promised what is required here.
            Owner::Foreign(_) => unsafe { shared::is_zero(segment.start, segment.len) },
        })
    }
}

impl Clone for IoVec {
    fn clone(&self) -> IoVec {
        let segments = self.0.0.iter();
        IoVec(List(segments.map(|s| s.part(0, s.len)).collect()))
    }
}

impl From<Buf> for IoVec {
    fn from(buf: Buf) -> IoVec {
        IoVec(List::new(Segment::of_buffer(
            buf.memory, buf.start, buf.len,
        )))
    }
}

impl From<Vec<Buf>> for IoVec {
    fn from(bufs: Vec<Buf>) -> IoVec {
        bufs.into_iter().collect()
    }
}

impl<T: Into<IoVec>> FromIterator<T> for IoVec {
    fn from_iter<I: IntoIterator<Item = T>>(parts: I) -> IoVec {
        let mut list = IoVec::default();
        parts.into_iter().for_each(|part| list.append(part.into()));
        list
    }
}

impl fmt::Debug for IoVec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoVec({} bytes in {})", self.len(), self.segment_count())
    }
}

/// Target of a read: a list of memory that no other request has.
#[derive(Default)]
pub struct IoVecMut(List);

impl IoVecMut {
    /// Returns a list of memory of another owner, as [`IoVec::foreign`].
    ///
    /// # Safety
    /// As there; and the words may be written. Readers of them meanwhile are bound as writers are.
    /// Neither reads nor writes are exclusive: where two lists have the same memory, its content in
    /// the end is of one or the other.
    pub unsafe fn foreign(start: NonNull<u8>, len: usize, owner: Keeper) -> IoVecMut {
        IoVecMut(List::foreign(start, len, owner))
    }

    /// Returns a list of memory that is borrowed.
    ///
    /// # Safety
    /// The memory is initialised, and nobody else accesses it while `owner` lives, which no other
    /// memory has.
    pub(crate) unsafe fn lent(start: NonNull<u8>, len: usize, owner: Keeper) -> IoVecMut {
        IoVecMut(List::lent(start, len, owner))
    }

    /// Shortens the list to its first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }

    /// Sets all bytes.
    pub fn fill(&mut self, byte: u8) {
        self.fill_range(0..self.len(), byte);
    }

    /// Sets the bytes of a range.
    ///
    /// # Panics
    /// If the range is not within the list.
    pub fn fill_range(&mut self, range: Range<usize>, byte: u8) {
        assert!(range.end <= self.len(), "{range:?} of {} bytes", self.len());
        for (segment, part, _) in self.0.pieces(range) {
            // SAFETY: the list is borrowed exclusively.
            unsafe { segment.fill(part, byte) };
        }
    }

    /// Copies `from` to the bytes at `at`.
    ///
    /// # Panics
    /// If these are not within the list.
    pub fn copy_from_slice(&mut self, at: usize, from: &[u8]) {
        assert!(
            at + from.len() <= self.len(),
            "{} bytes at {at} of a list of {}",
            from.len(),
            self.len()
        );
        for (segment, part, start) in self.0.pieces(at..at + from.len()) {
            // SAFETY: the list is borrowed exclusively.
            unsafe { segment.copy_from(part.start, &from[start..start + part.len()]) };
        }
    }

    /// A buffer of our own to be filled in place of the list, which [`Bounce::end`] gives back: the
    /// one that the list is, or another that is copied then.
    pub fn bounce(self) -> (BufMut, Bounce) {
        match self.into_buffer() {
            Ok(buf) => (buf, Bounce(None)),
            Err(list) => (BufMut::for_overwrite(list.len()), Bounce(Some(list))),
        }
    }

    /// Whether the list is one buffer, or a part of one.
    pub fn is_buffer(&self) -> bool {
        matches!(
            &self.0.0[..],
            [Segment {
                owner: Owner::Buffer(_),
                ..
            }]
        )
    }

    /// The buffer that the list is, if it is one.
    fn into_buffer(mut self) -> Result<BufMut, IoVecMut> {
        if self.0.0.len() != 1 {
            return Err(self);
        }
        let segment = self.0.0.pop().expect("there is one");
        match segment.into_buffer() {
            Ok((memory, start, len)) => Ok(BufMut { memory, start, len }),
            Err(segment) => Err(IoVecMut(List::new(segment))),
        }
    }

    /// Gives up the exclusive right, for writing the bytes out.
    pub fn freeze(self) -> IoVec {
        IoVec(self.0)
    }
}

/// A list whose place a buffer takes until it is filled.
pub struct Bounce(Option<IoVecMut>);

impl Bounce {
    /// The list, with the bytes of the buffer.
    ///
    /// # Panics
    /// If the buffer is longer than the list.
    pub fn end(self, buf: BufMut) -> IoVecMut {
        match self.0 {
            None => buf.into(),
            Some(mut list) => {
                list.copy_from_slice(0, &buf);
                list
            }
        }
    }
}

impl From<BufMut> for IoVecMut {
    fn from(buf: BufMut) -> IoVecMut {
        IoVecMut(List::new(Segment::of_buffer(
            buf.memory, buf.start, buf.len,
        )))
    }
}

/// The buffer that the list is, or a copy in one.
impl From<IoVecMut> for BufMut {
    fn from(list: IoVecMut) -> BufMut {
        list.into_buffer().unwrap_or_else(|list| {
            let mut copy = BufMut::for_overwrite(list.len());
            list.copy_to_slice(0, &mut copy);
            copy
        })
    }
}

impl FromIterator<IoVecMut> for IoVecMut {
    fn from_iter<I: IntoIterator<Item = IoVecMut>>(parts: I) -> IoVecMut {
        let mut list = IoVecMut::default();
        parts.into_iter().for_each(|part| list.append(part));
        list
    }
}

impl fmt::Debug for IoVecMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.segment_count();
        write!(f, "IoVecMut({} bytes in {count})", self.len())
    }
}

#[cfg(test)]
#[path = "iovec_tests.rs"]
mod tests;
