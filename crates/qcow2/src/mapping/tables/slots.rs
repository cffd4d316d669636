//! The cache of slices, within a budget of bytes: which are in memory, and which is evicted for
//! another.
//!
//! The replacement policy is 2Q (Johnson and Shasha, 1994). A slice enters a queue, and accesses
//! there change nothing: a scan, however often it accesses a slice on its way, passes through a
//! quarter of the budget. A slice that is accessed again after it left that queue is kept, and is
//! evicted only when it has not been accessed for a round of a clock. Before anything is evicted
//! all clean slices are packed; where a quarter of the budget holds all, none is.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;

use foldhash::HashMap;

use super::packed::Packed;
use crate::entry::big_endian;
use crate::geometry::Geometry;
use crate::statistics::CacheStatistics;

/// Bytes that a slice in memory takes besides its entries: its slot, and its places in the index
/// and the queue.
pub const SLOT_BYTES: u64 = 128;
/// Bytes that an evicted slice takes as long as it is remembered, and the part of the budget for
/// these.
const GONE_BYTES: u64 = 32;
const GONE_FRACTION: u64 = 32;
/// The part of the budget that slices take at most before it is tried to pack them: memory that
/// they have left is not soon returned to the system.
const UNPACKED_FRACTION: u64 = 4;
/// The part of the budget for slices that are accessed once and not again.
const ENTERED_FRACTION: u64 = 4;

/// A slice in memory.
pub struct Slot {
    pub slice: u64,
    content: SlotContent,
    pub pins: u32,
    pub dirty: bool,
    pub writing: bool,
    /// Looked at since the clock came by.
    referenced: bool,
    /// It waits to be packed.
    unpacked: bool,
    queue: Queue,
}

enum SlotContent {
    Bytes(Box<[u8]>),
    /// It was found that packing saves too little.
    Unpackable(Box<[u8]>),
    Packed(Packed),
}

impl SlotContent {
    fn bytes(&self) -> u64 {
        match self {
            SlotContent::Bytes(bytes) | SlotContent::Unpackable(bytes) => bytes.len() as u64,
            SlotContent::Packed(packed) => packed.heap_bytes() as u64,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Queue {
    Entered,
    Kept,
}

/// The slices that are in memory, within the budget.
pub struct Slots {
    geometry: Geometry,
    slots: Vec<Slot>,
    index: HashMap<u64, u32>,
    entered: VecDeque<u64>,
    kept: VecDeque<u64>,
    /// Slices that were not tried to be packed since they were clean, each once; some are gone or
    /// changed.
    unpacked: VecDeque<u64>,
    /// Slices that left the entry queue, the next to be forgotten first.
    gone: VecDeque<u64>,
    is_gone: HashSet<u64>,
    gone_max: usize,
    slots_min: u64,
    /// The budget that was asked for.
    given_bytes: u64,
    budget_bytes: u64,
    used_bytes: u64,
    entered_bytes: u64,
    statistics: CacheStatistics,
}

impl Slots {
    /// No slices, and a budget for `slots_min` of them.
    pub fn new(geometry: Geometry, slots_min: u64) -> Slots {
        let mut slots = Slots {
            geometry,
            slots: Vec::new(),
            index: HashMap::default(),
            entered: VecDeque::new(),
            kept: VecDeque::new(),
            unpacked: VecDeque::new(),
            gone: VecDeque::new(),
            is_gone: HashSet::new(),
            gone_max: 0,
            slots_min,
            given_bytes: 0,
            budget_bytes: 0,
            used_bytes: 0,
            entered_bytes: 0,
            statistics: CacheStatistics::default(),
        };
        slots.set_budget(0);
        slots
    }

    /// Sets what slices may take from now on; `slots_min` of them fit whatever it is.
    pub fn set_budget(&mut self, bytes: u64) {
        self.given_bytes = bytes;
        let gone = bytes / GONE_FRACTION;
        self.gone_max = (gone / GONE_BYTES).max(1) as usize;
        self.budget_bytes = (bytes - gone).max(self.slots_min * self.whole_bytes());
    }

    /// Number of slices in memory.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns the statistics of the cache.
    pub fn statistics(&self) -> CacheStatistics {
        CacheStatistics {
            budget_bytes: self.budget_bytes,
            used_bytes: self.used_bytes,
            slices: self.slots.len() as u64,
            ..self.statistics
        }
    }

    /// Returns whether any slice is in use.
    pub fn is_any_pinned(&self) -> bool {
        self.slots.iter().any(|slot| slot.pins > 0)
    }

    /// Lets all slices go.
    pub fn clear(&mut self) {
        let (bytes, slots_min) = (self.given_bytes, self.slots_min);
        let statistics = CacheStatistics {
            packed: 0,
            ..self.statistics
        };
        *self = Slots {
            statistics,
            ..Slots::new(self.geometry, slots_min)
        };
        self.set_budget(bytes);
    }

    /// Returns whether a slice is not in memory, or can leave it.
    pub fn may_go(&self, slice: u64) -> bool {
        let at = self.index.get(&slice);
        at.is_none_or(|&at| self.slots[at as usize].may_go())
    }

    /// Lets slices go whose table is gone.
    pub fn forget(&mut self, is_gone: impl Fn(u64) -> bool) {
        self.entered.retain(|&slice| !is_gone(slice));
        self.kept.retain(|&slice| !is_gone(slice));
        let slices = self.slots.iter().map(|slot| slot.slice);
        for slice in slices.filter(|&slice| is_gone(slice)).collect::<Vec<_>>() {
            self.remove(slice);
        }
    }

    /// Lets slices of a range go that can leave memory.
    pub fn release(&mut self, slices: Range<u64>) {
        let is_here = |slice: &u64| self.index.contains_key(slice) && self.may_go(*slice);
        let going: Vec<u64> = slices.filter(is_here).collect();
        if !going.is_empty() {
            self.forget(|slice| going.contains(&slice));
        }
    }

    /// Slices that the budget holds as they are on disk.
    pub fn capacity(&self) -> u64 {
        self.budget_bytes / self.whole_bytes()
    }

    /// Bytes of a slice that is not packed.
    pub fn whole_bytes(&self) -> u64 {
        self.geometry.slice_bytes() + SLOT_BYTES
    }

    /// Notes that a slice is looked at; whether it is in memory.
    pub fn look(&mut self, slice: u64) -> bool {
        let Some(&at) = self.index.get(&slice) else {
            return false;
        };
        self.slots[at as usize].referenced = true;
        self.statistics.hits += 1;
        true
    }

    /// A slot that is in memory.
    ///
    /// # Panics
    /// If it is not: it was prepared under this hold of the lock, or is pinned.
    pub fn slot(&self, slice: u64) -> &Slot {
        &self.slots[self.at(slice)]
    }

    /// As [`Slots::slot`].
    pub fn slot_mut(&mut self, slice: u64) -> &mut Slot {
        let at = self.at(slice);
        &mut self.slots[at]
    }

    fn at(&self, slice: u64) -> usize {
        let at = self.index.get(&slice);
        *at.expect("the slice was prepared under this lock or is pinned") as usize
    }

    /// The words of an entry of a slice: the entry, and its bitmap or 0.
    pub fn words(&self, slice: u64, entry: usize) -> (u64, u64) {
        let columns = self.columns();
        match &self.slot(slice).content {
            SlotContent::Bytes(bytes) | SlotContent::Unpackable(bytes) => {
                let at = entry * columns * 8;
                let bitmap = match columns {
                    1 => 0,
                    _ => big_endian(&bytes[at + 8..at + 16]),
                };
                (big_endian(&bytes[at..at + 8]), bitmap)
            }
            SlotContent::Packed(packed) => packed.words(entry),
        }
    }

    fn columns(&self) -> usize {
        (self.geometry.l2_entry_bytes() / 8) as usize
    }

    /// The bytes of a slice, to be changed. They may take more than the budget until room is made.
    pub fn bytes_mut(&mut self, slice: u64) -> &mut [u8] {
        let at = self.at(slice);
        let content = &mut self.slots[at].content;
        let bytes = match std::mem::replace(content, SlotContent::Bytes(Box::default())) {
            SlotContent::Bytes(bytes) | SlotContent::Unpackable(bytes) => bytes,
            SlotContent::Packed(packed) => {
                let entries = self.geometry.slice_entries() as usize;
                let bytes = packed.unpack(entries);
                let more = (bytes.len() - packed.heap_bytes()) as u64;
                self.used_bytes += more;
                if self.slots[at].queue == Queue::Entered {
                    self.entered_bytes += more;
                }
                self.statistics.packed -= 1;
                bytes
            }
        };
        self.slots[at].content = SlotContent::Bytes(bytes);
        match &mut self.slots[at].content {
            SlotContent::Bytes(bytes) => bytes,
            _ => unreachable!("it was set above"),
        }
    }

    /// Notes that the writes of a slice are durable.
    pub fn is_written(&mut self, slice: u64) {
        let slot = self.slot_mut(slice);
        slot.writing = false;
        if !slot.dirty && !std::mem::replace(&mut slot.unpacked, true) {
            self.unpacked.push_back(slice);
        }
    }

    /// Takes a slice in. Room was made for it.
    pub fn insert(&mut self, slice: u64, bytes: Box<[u8]>) {
        let returns = self.is_gone.remove(&slice);
        let queue = if returns { Queue::Kept } else { Queue::Entered };
        match queue {
            Queue::Entered => {
                self.entered.push_back(slice);
                self.entered_bytes += self.whole_bytes();
            }
            Queue::Kept => self.kept.push_back(slice),
        }
        self.used_bytes += self.whole_bytes();
        self.index.insert(slice, self.slots.len() as u32);
        self.unpacked.push_back(slice);
        self.statistics.misses += 1;
        self.slots.push(Slot {
            slice,
            content: SlotContent::Bytes(bytes),
            pins: 0,
            dirty: false,
            writing: false,
            referenced: true,
            unpacked: true,
            queue,
        });
    }

    /// Makes room for `slices` slices at once, and returns whether it could.
    pub fn make_room(&mut self, slices: u64) -> bool {
        let wanted = slices * self.whole_bytes();
        let unpacked_max = self.budget_bytes / UNPACKED_FRACTION / self.whole_bytes();
        while self.unpacked.len() as u64 > unpacked_max {
            self.pack_next();
        }
        while self.used_bytes + wanted > self.budget_bytes {
            if !self.shrink() {
                return false;
            }
        }
        true
    }

    /// Packs a slice or lets one go.
    fn shrink(&mut self) -> bool {
        while !self.unpacked.is_empty() {
            if self.pack_next() {
                return true;
            }
        }
        let entered_max = self.budget_bytes / ENTERED_FRACTION;
        let passes = self.entered_bytes > entered_max;
        (passes && self.evict_entered()) || self.evict_kept() || self.evict_entered()
    }

    /// Tries the slice that has waited longest to be packed; whether it takes less now.
    fn pack_next(&mut self) -> bool {
        let next = self.unpacked.pop_front();
        next.is_some_and(|slice| self.pack(slice))
    }

    fn evict_entered(&mut self) -> bool {
        for _ in 0..self.entered.len() {
            let slice = self.entered[0];
            self.entered.rotate_left(1);
            if self.slot(slice).may_go() {
                self.entered.pop_back();
                self.remove(slice);
                self.remember(slice);
                return true;
            }
        }
        false
    }

    fn evict_kept(&mut self) -> bool {
        // Two rounds: the first clears the reference bits.
        for _ in 0..2 * self.kept.len() {
            let slice = self.kept[0];
            self.kept.rotate_left(1);
            let slot = self.slot_mut(slice);
            if slot.may_go() && !std::mem::take(&mut slot.referenced) {
                self.kept.pop_back();
                self.remove(slice);
                return true;
            }
        }
        false
    }

    /// Packs a slice that is not, but what is about to change or be written; whether it takes less
    /// now.
    fn pack(&mut self, slice: u64) -> bool {
        let columns = self.columns();
        let Some(&at) = self.index.get(&slice) else {
            return false;
        };
        let slot = &mut self.slots[at as usize];
        slot.unpacked = false;
        if slot.dirty || slot.writing {
            return false;
        }
        let SlotContent::Bytes(bytes) = &mut slot.content else {
            return false;
        };
        match Packed::pack(bytes, columns, self.geometry.cluster_bytes()) {
            Some(packed) => {
                let less = (bytes.len() - packed.heap_bytes()) as u64;
                slot.content = SlotContent::Packed(packed);
                self.used_bytes -= less;
                if slot.queue == Queue::Entered {
                    self.entered_bytes -= less;
                }
                self.statistics.packed += 1;
                true
            }
            None => {
                slot.content = SlotContent::Unpackable(std::mem::take(bytes));
                false
            }
        }
    }

    /// Takes a slice out that is in no queue any more.
    fn remove(&mut self, slice: u64) {
        let at = self.at(slice);
        let gone = self.slots.swap_remove(at);
        self.index.remove(&slice);
        if let Some(moved) = self.slots.get(at) {
            self.index.insert(moved.slice, at as u32);
        }
        let bytes = gone.content.bytes() + SLOT_BYTES;
        self.statistics.packed -= u64::from(matches!(gone.content, SlotContent::Packed(_)));
        self.used_bytes -= bytes;
        if gone.queue == Queue::Entered {
            self.entered_bytes -= bytes;
        }
        self.statistics.evicted += 1;
    }

    /// Remembers that a slice was here.
    fn remember(&mut self, slice: u64) {
        while self.gone.len() >= self.gone_max {
            if let Some(forgotten) = self.gone.pop_front() {
                self.is_gone.remove(&forgotten);
            }
        }
        if self.is_gone.insert(slice) {
            self.gone.push_back(slice);
        }
    }
}

impl Slot {
    fn may_go(&self) -> bool {
        let is_clean = !self.dirty && !self.writing;
        self.pins == 0 && is_clean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Slots {
        /// Returns whether a slice is in memory.
        pub fn contains(&self, slice: u64) -> bool {
            self.index.contains_key(&slice)
        }
    }

    /// A cluster of 64 KiB: slices of 4 KiB.
    fn slots(budget_slices: u64) -> Slots {
        let geometry = Geometry::new(16, 4, false).unwrap();
        let mut slots = Slots::new(geometry, 4);
        let whole = slots.whole_bytes();
        slots.set_budget(budget_slices * whole * GONE_FRACTION / (GONE_FRACTION - 1) + 1);
        assert_eq!(slots.capacity(), budget_slices);
        slots
    }

    /// A slice that cannot be packed.
    fn noise(slice: u64) -> Box<[u8]> {
        let mut state = slice + 1;
        let words = (0..512).map(|_| {
            state = state
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            state
        });
        words.flat_map(u64::to_be_bytes).collect()
    }

    fn touch(slots: &mut Slots, slice: u64) -> bool {
        let hit = slots.look(slice);
        if !hit {
            assert!(slots.make_room(1));
            slots.insert(slice, noise(slice));
        }
        hit
    }

    #[test]
    fn a_scan_passes_through_a_quarter() {
        let mut slots = slots(64);
        // A working set of 40 slices, asked for again after it had to go, is kept.
        for round in 0..4 {
            for slice in 0..40 {
                touch(&mut slots, slice);
            }
            for slice in 0..64 {
                touch(&mut slots, 1000 + 100 * round + slice);
            }
        }
        // A scan of a thousand slices, each looked at often.
        for slice in 10_000..11_000 {
            for _ in 0..8 {
                touch(&mut slots, slice);
            }
        }
        let stayed = (0..40).filter(|&slice| slots.contains(slice)).count();
        assert!(stayed >= 36, "{stayed} of 40 stayed");
    }

    #[test]
    fn runs_of_entries_fit_many_times_over() {
        let mut slots = slots(64);
        let run = |slice: u64| {
            let words = (0..512).map(move |entry| 1 << 63 | ((slice * 512 + entry) << 16));
            words.flat_map(u64::to_be_bytes).collect::<Box<[u8]>>()
        };
        for slice in 0..1000 {
            assert!(slots.make_room(1));
            slots.insert(slice, run(slice));
        }
        assert!(
            (0..1000).all(|slice| slots.contains(slice)),
            "{:?}",
            slots.statistics()
        );
        assert_eq!(slots.words(777, 5), (1 << 63 | ((777 * 512 + 5) << 16), 0));
        // A change takes it apart, and it is packed again once it is written and room is short.
        slots.bytes_mut(777)[40..48].fill(0);
        slots.is_written(777);
        assert_eq!(slots.words(777, 5), (0, 0));
        assert_eq!(slots.words(777, 6), (1 << 63 | ((777 * 512 + 6) << 16), 0));
        for slice in 1000..1100 {
            assert!(slots.make_room(1));
            slots.insert(slice, run(slice));
        }
        assert_eq!(slots.words(777, 5), (0, 0));
        assert!(
            slots.statistics().packed >= 1050,
            "{:?}",
            slots.statistics()
        );
        assert_eq!(slots.statistics().evicted, 0);
    }

    #[test]
    fn slices_that_are_written_over_and_over_wait_once_to_be_packed() {
        let mut slots = slots(16);
        for slice in 0..3 {
            touch(&mut slots, slice);
        }
        for _ in 0..1000 {
            for slice in 0..3 {
                slots.bytes_mut(slice)[0] ^= 1;
                slots.is_written(slice);
            }
        }
        assert_eq!(slots.unpacked.len(), 3);
    }

    #[test]
    fn what_is_used_adds_up() {
        let mut slots = slots(16);
        for step in 0..4000u64 {
            let slice = step * 7919 % 61;
            touch(&mut slots, slice);
            if step % 3 == 0 {
                slots.bytes_mut(slice).fill(0);
            }
            let statistics = slots.statistics();
            let all = slots.slots.iter();
            let used: u64 = all.map(|slot| slot.content.bytes() + SLOT_BYTES).sum();
            assert_eq!(statistics.used_bytes, used);
            let entered = slots
                .slots
                .iter()
                .filter(|slot| slot.queue == Queue::Entered);
            let entered_bytes: u64 = entered.map(|slot| slot.content.bytes() + SLOT_BYTES).sum();
            assert_eq!(slots.entered_bytes, entered_bytes);
            assert_eq!(slots.entered.len() + slots.kept.len(), slots.len());
            assert!(slots.gone.len() <= slots.gone_max);
        }
    }
}
