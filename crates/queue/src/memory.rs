//! The memory of buffers: aligned, initialised, and kept for use again where a caller wants any
//! bytes.
//!
//! A copy of a large cluster needs a large buffer that is overwritten at once. Fresh memory would
//! be cleared first, and above some size mapped and faulted in page by page; that costs as much as
//! the copy. So memory that was handed out for overwriting is kept when its last user lets go of
//! it, in classes of powers of two, and handed out again with what it holds. What is kept is
//! bounded for the process; where there is no room, the class that went unused longest gives way.
#![allow(unsafe_code)] // Raw aligned memory: each use says why it is sound.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};

use crate::buf::ALIGNMENT_BYTES;

/// The smallest class, and the largest: that of the largest cluster. Other lengths always get fresh
/// memory.
const CLASS_BYTES_MIN: usize = ALIGNMENT_BYTES;
const CLASS_BYTES_MAX: usize = 2 << 20;
const CLASSES: usize = (CLASS_BYTES_MAX / CLASS_BYTES_MIN).ilog2() as usize + 1;

/// Bytes that are kept while nobody uses them. In a steady load a buffer that is let go of is taken
/// again at once, whatever its size; this much covers what ends in one go: a deep queue (256) of
/// copies of 64 KiB, or eight of the largest.
const SPARE_BYTES_MAX: usize = 16 << 20;

/// Sizes of the pieces of fixed memory, which share it in equal parts.
const FIXED_PIECES: [usize; 2] = [4 << 10, 64 << 10];

/// An aligned, initialised allocation.
struct Allocation {
    start: NonNull<u8>,
    layout: Layout,
    /// A piece of memory that rings know, which is never freed.
    is_fixed: bool,
}

// SAFETY: `Allocation` owns its memory; access is governed by `Buf` (shared, read-only) and
// `BufMut` (exclusive, disjoint ranges).
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn zeroed(len: usize) -> Allocation {
        let layout = Layout::from_size_align(len.max(1), ALIGNMENT_BYTES)
            .expect("a buffer's length fits the address space");
        // SAFETY: the layout has a size of at least one byte.
        let start = unsafe { alloc_zeroed(layout) };
        match NonNull::new(start) {
            Some(start) => Allocation {
                start,
                layout,
                is_fixed: false,
            },
            None => handle_alloc_error(layout),
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.is_fixed {
            return;
        }
        // SAFETY: allocated by `zeroed` with this layout, and nobody else holds it any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Memory of one buffer and its parts.
pub(crate) struct Memory {
    start: NonNull<u8>,
    len: usize,
    keeper: Keeper,
}

/// Keeper of the memory.
enum Keeper {
    /// Freed with the last part of the buffer.
    Freed { _allocation: Allocation },
    /// Kept for the next one who overwrites it. Absent once it was given back only.
    Kept(Option<Allocation>),
    /// Memory of another owner, which does not change it.
    Owned { _owner: Box<dyn Any + Send + Sync> },
}

// SAFETY: the memory belongs to the keeper, which is both; access is governed by `Buf` (shared,
// read-only) and `BufMut` (exclusive, disjoint ranges).
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` bytes of zeroes.
    pub(crate) fn zeroed(len: usize) -> Memory {
        let allocation = Allocation::zeroed(len);
        Memory {
            start: allocation.start,
            len,
            keeper: Keeper::Freed {
                _allocation: allocation,
            },
        }
    }

    /// `len` bytes of any content.
    pub(crate) fn for_overwrite(len: usize) -> Memory {
        let Some(class) = class_of(len) else {
            return Memory::zeroed(len);
        };
        let spare = spares().take(class);
        let allocation = spare.unwrap_or_else(|| Allocation::zeroed(class_bytes(class)));
        Memory {
            start: allocation.start,
            len,
            keeper: Keeper::Kept(Some(allocation)),
        }
    }

    /// The bytes of an owner, to be read only.
    pub(crate) fn owned_by(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Memory {
        let owner = Box::new(owner);
        // The owner does not move any more, and lives as long as this.
        let bytes = (*owner).as_ref();
        Memory {
            start: NonNull::from(bytes).cast(),
            len: bytes.len(),
            keeper: Keeper::Owned { _owner: owner },
        }
    }

    /// The first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes that were asked for.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Keeper::Kept(allocation) = &mut self.keeper
            && let Some(allocation) = allocation.take()
        {
            // Memory beyond the limit is freed outside of the lock.
            let displaced = spares().keep(allocation);
            drop(displaced);
        }
    }
}

/// Makes memory for the life of the process, whose pieces are handed out before others; returns its
/// start.
pub(crate) fn reserve(len: usize) -> NonNull<u8> {
    // Of a huge page's alignment, so that it can be one.
    let layout = Layout::from_size_align(len, len).expect("a power of two");
    // SAFETY: the layout has a size.
    let start = unsafe { alloc_zeroed(layout) };
    let Some(start) = NonNull::new(start) else {
        handle_alloc_error(layout);
    };
    let part = len / FIXED_PIECES.len();
    for (index, size) in FIXED_PIECES.into_iter().enumerate() {
        let layout = Layout::from_size_align(size, ALIGNMENT_BYTES).expect("a class's size");
        let offsets = (index * part..(index + 1) * part).step_by(size);
        for offset in offsets {
            // SAFETY: the piece lies within the allocation, and pieces do not overlap.
            let start = unsafe { start.add(offset) };
            let piece = Allocation {
                start,
                layout,
                is_fixed: true,
            };
            drop(spares().keep(piece));
        }
    }
    start
}

/// The class whose memory holds `len` bytes.
fn class_of(len: usize) -> Option<usize> {
    if !(CLASS_BYTES_MIN..=CLASS_BYTES_MAX).contains(&len) {
        return None;
    }
    Some((len.next_power_of_two() / CLASS_BYTES_MIN).ilog2() as usize)
}

fn class_bytes(class: usize) -> usize {
    CLASS_BYTES_MIN << class
}

/// Memory of one size that nobody uses.
struct Class {
    /// Pieces that rings know: they go first, and stay.
    fixed: Vec<Allocation>,
    spares: Vec<Allocation>,
    /// When it was last asked or given, as a count of both.
    touched: u64,
}

/// All memory that nobody uses.
struct Spares {
    classes: [Class; CLASSES],
    bytes: usize,
    clock: u64,
}

static SPARES: Mutex<Spares> = Mutex::new(Spares::new());

fn spares() -> MutexGuard<'static, Spares> {
    SPARES
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Spares {
    const fn new() -> Spares {
        let classes = [const {
            Class {
                fixed: Vec::new(),
                spares: Vec::new(),
                touched: 0,
            }
        }; CLASSES];
        Spares {
            classes,
            bytes: 0,
            clock: 0,
        }
    }

    fn touch(&mut self, class: usize) -> &mut Class {
        self.clock += 1;
        self.classes[class].touched = self.clock;
        &mut self.classes[class]
    }

    /// The one that was kept last, which the processor's caches may still hold.
    fn take(&mut self, class: usize) -> Option<Allocation> {
        let unused = self.touch(class);
        if let Some(piece) = unused.fixed.pop() {
            return Some(piece);
        }
        let spare = unused.spares.pop()?;
        self.bytes -= class_bytes(class);
        Some(spare)
    }

    /// Keeps an allocation of a class, and returns what there is no room for.
    fn keep(&mut self, allocation: Allocation) -> Vec<Allocation> {
        let class = class_of(allocation.layout.size()).expect("it was allocated for a class");
        let unused = self.touch(class);
        if allocation.is_fixed {
            unused.fixed.push(allocation);
            return Vec::new();
        }
        unused.spares.push(allocation);
        self.bytes += class_bytes(class);
        let mut displaced = Vec::new();
        while self.bytes > SPARE_BYTES_MAX {
            let held = self.classes.iter_mut().enumerate();
            let held = held.filter(|(_, class)| !class.spares.is_empty());
            let Some((index, longest_unused)) = held.min_by_key(|(_, class)| class.touched) else {
                break;
            };
            displaced.extend(longest_unused.spares.pop());
            self.bytes -= class_bytes(index);
        }
        displaced
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: usize = 64 << 10;

    fn allocation(len: usize) -> Allocation {
        Allocation::zeroed(class_bytes(class_of(len).unwrap()))
    }

    fn kept_bytes(spares: &Spares) -> usize {
        let classes = spares.classes.iter();
        let allocations = classes.flat_map(|class| &class.spares);
        allocations.map(|spare| spare.layout.size()).sum()
    }

    #[test]
    fn a_class_holds_what_was_asked_for_and_wastes_less_than_half() {
        for len in [4096, 4097, 60 << 10, SMALL, SMALL + 1, 2 << 20] {
            let bytes = class_bytes(class_of(len).unwrap());
            assert!(bytes >= len && bytes < 2 * len);
        }
        for len in [0, 4095, (2 << 20) + 1, usize::MAX] {
            assert_eq!(class_of(len), None);
        }
    }

    #[test]
    fn what_was_kept_last_is_taken_first_by_its_class_alone() {
        let mut spares = Spares::new();
        let starts = [SMALL, SMALL, 2 * SMALL].map(|len| {
            let allocation = allocation(len);
            let start = allocation.start;
            assert!(spares.keep(allocation).is_empty());
            start
        });
        let mut take = |len| spares.take(class_of(len).unwrap()).map(|spare| spare.start);
        assert_eq!(take(SMALL - 9), Some(starts[1]));
        assert_eq!(take(SMALL), Some(starts[0]));
        assert_eq!(take(SMALL), None);
        assert_eq!(take(SMALL + 1), Some(starts[2]));
        assert_eq!((spares.bytes, kept_bytes(&spares)), (0, 0));
    }

    #[test]
    fn no_more_is_kept_than_the_limit_and_the_unused_class_gives_way() {
        let mut spares = Spares::new();
        let count = SPARE_BYTES_MAX / SMALL;
        for _ in 0..count {
            assert!(spares.keep(allocation(SMALL)).is_empty());
        }
        // A class that fills the room gives way to itself.
        let displaced = spares.keep(allocation(SMALL));
        assert_eq!(displaced.len(), 1);
        let displaced = spares.keep(allocation(2 * SMALL));
        let sizes: Vec<usize> = displaced.iter().map(|spare| spare.layout.size()).collect();
        assert_eq!(sizes, [SMALL, SMALL]);
        assert_eq!(spares.bytes, kept_bytes(&spares));
        assert_eq!(spares.bytes, SPARE_BYTES_MAX);
    }
}
