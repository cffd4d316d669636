//! [`DirtyMap`]: ranges of a disk that have changed, in chunks of one size.

use std::ops::Range;
use std::sync::Arc;

use cowslip_block::sync::{Mutex, lock};

use crate::live::Tap;

const WORD_BITS: u64 = 64;

/// Chunks of a disk that have changed. As a [`Tap`] it follows the changes of a disk.
#[derive(Debug)]
pub struct DirtyMap {
    chunk_bits: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    size: u64,
    words: Vec<u64>,
    dirty: u64,
    is_enabled: bool,
}

impl DirtyMap {
    /// A map of a disk of `size` bytes, in chunks of `chunk_bytes`, without a dirty one.
    ///
    /// # Panics
    /// Unless `chunk_bytes` is a power of two.
    pub fn new(size: u64, chunk_bytes: u64) -> Arc<DirtyMap> {
        assert!(chunk_bytes.is_power_of_two(), "chunks are powers of two");
        let map = DirtyMap {
            chunk_bits: chunk_bytes.ilog2(),
            state: Mutex::new(State {
                size: 0,
                words: Vec::new(),
                dirty: 0,
                is_enabled: true,
            }),
        };
        map.resize(size);
        Arc::new(map)
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        1 << self.chunk_bits
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        lock(&self.state).size
    }

    /// Bytes of the disk that lie in dirty chunks, the last one counted whole.
    pub fn dirty_bytes(&self) -> u64 {
        lock(&self.state).dirty << self.chunk_bits
    }

    /// Whether changes are noted.
    pub fn is_enabled(&self) -> bool {
        lock(&self.state).is_enabled
    }

    /// Sets whether changes are noted from now on.
    pub fn enable(&self, is_enabled: bool) {
        lock(&self.state).is_enabled = is_enabled;
    }

    /// The chunks that a range touches.
    fn chunks(&self, range: &Range<u64>, size: u64) -> Range<u64> {
        let end = range.end.min(size);
        if range.start >= end {
            return 0..0;
        }
        range.start >> self.chunk_bits..((end - 1) >> self.chunk_bits) + 1
    }

    /// Marks the chunks that a range touches.
    pub fn mark(&self, range: Range<u64>) {
        let mut state = lock(&self.state);
        let chunks = self.chunks(&range, state.size);
        state.set(chunks, true);
    }

    /// Marks no chunk.
    pub fn clear(&self) {
        let mut state = lock(&self.state);
        state.words.fill(0);
        state.dirty = 0;
    }

    /// Takes all marks out of it.
    pub fn take(&self) -> Arc<DirtyMap> {
        let taken = DirtyMap::new(self.size(), self.chunk_bytes());
        taken.merge(self);
        self.clear();
        taken
    }

    /// Marks what another map has marked too.
    pub fn merge(&self, other: &DirtyMap) {
        let size = lock(&other.state).size;
        let mut at = 0;
        while let Some(run) = other.next(at, size) {
            at = run.end;
            self.mark(run);
        }
    }

    /// The first dirty range at or behind `from`, of `most` bytes at most (a chunk in any case), or
    /// to the end of the disk.
    pub fn next(&self, from: u64, most: u64) -> Option<Range<u64>> {
        let state = lock(&self.state);
        let first = match from < state.size {
            true => state.find(from >> self.chunk_bits, true)?,
            false => return None,
        };
        let most = (most >> self.chunk_bits).max(1);
        let end = state
            .find(first, false)
            .unwrap_or(state.chunks(self.chunk_bits));
        let end = end.min(first.saturating_add(most));
        Some(first << self.chunk_bits..(end << self.chunk_bits).min(state.size))
    }

    /// Takes a range out of the map.
    pub fn unmark(&self, range: Range<u64>) {
        let mut state = lock(&self.state);
        let chunks = self.chunks(&range, state.size);
        state.set(chunks, false);
    }

    /// Runs of a range, alternately dirty and clean, `most` at most.
    pub fn runs(&self, range: Range<u64>, most: usize) -> Vec<(Range<u64>, bool)> {
        let state = lock(&self.state);
        let (mut at, mut runs) = (range.start, Vec::new());
        while at < range.end && runs.len() < most {
            let chunk = at >> self.chunk_bits;
            let is_dirty = state.get(chunk);
            let end = state.find(chunk, !is_dirty);
            let end = end.map_or(range.end, |end| (end << self.chunk_bits).min(range.end));
            runs.push((at..end, is_dirty));
            at = end;
        }
        runs
    }

    /// Follows the disk to another size; what is added is clean.
    pub fn resize(&self, size: u64) {
        let mut state = lock(&self.state);
        let chunks = size.div_ceil(1 << self.chunk_bits);
        let old = state.chunks(self.chunk_bits);
        if chunks < old {
            state.set(chunks..old, false);
        }
        state.size = size;
        state.words.resize(chunks.div_ceil(WORD_BITS) as usize, 0);
    }
}

impl State {
    fn chunks(&self, chunk_bits: u32) -> u64 {
        self.size.div_ceil(1 << chunk_bits)
    }

    fn get(&self, chunk: u64) -> bool {
        let word = self.words.get((chunk / WORD_BITS) as usize);
        word.is_some_and(|word| word >> (chunk % WORD_BITS) & 1 == 1)
    }

    fn set(&mut self, chunks: Range<u64>, is_dirty: bool) {
        let mut at = chunks.start;
        while at < chunks.end {
            let (index, bit) = ((at / WORD_BITS) as usize, at % WORD_BITS);
            let count = (WORD_BITS - bit).min(chunks.end - at);
            let mask = u64::MAX >> (WORD_BITS - count) << bit;
            let word = &mut self.words[index];
            let before = u64::from(word.count_ones());
            match is_dirty {
                true => *word |= mask,
                false => *word &= !mask,
            }
            self.dirty = self.dirty + u64::from(word.count_ones()) - before;
            at += count;
        }
    }

    /// The first chunk at or behind `from` whose state is this one, if the map has one.
    fn find(&self, from: u64, is_dirty: bool) -> Option<u64> {
        let mut at = from;
        while let Some(word) = self.words.get((at / WORD_BITS) as usize) {
            let word = if is_dirty { *word } else { !*word };
            let rest = word >> (at % WORD_BITS);
            if rest != 0 {
                return Some(at + u64::from(rest.trailing_zeros()));
            }
            at = (at / WORD_BITS + 1) * WORD_BITS;
        }
        None
    }
}

impl Tap for DirtyMap {
    fn changed(&self, range: Range<u64>) {
        let mut state = lock(&self.state);
        if state.is_enabled {
            let chunks = self.chunks(&range, state.size);
            state.set(chunks, true);
        }
    }

    fn resized(&self, size: u64) {
        let old = self.size();
        self.resize(size);
        if size > old {
            // It reads as zeroes, and as something else in a copy from before it was cut off.
            self.changed(old..size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All dirty ranges.
    fn all(map: &DirtyMap) -> Vec<Range<u64>> {
        let (mut at, mut found) = (0, Vec::new());
        while let Some(run) = map.next(at, u64::MAX) {
            at = run.end;
            found.push(run);
        }
        found
    }

    #[test]
    fn a_map_agrees_with_a_list_of_bits() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..200 {
            let chunk = 1 << random.u64(0..7);
            let mut size = random.u64(1..chunk * 300);
            let map = DirtyMap::new(size, chunk);
            let mut model = vec![false; size.div_ceil(chunk) as usize];
            for _ in 0..40 {
                let start = random.u64(0..size + 10);
                let range = start..start + random.u64(0..size);
                let touched = |index: usize| {
                    let (begin, end) = (index as u64 * chunk, (index as u64 + 1) * chunk);
                    range.start < end.min(size) && begin < range.end && !range.is_empty()
                };
                match random.u8(0..5) {
                    0..2 => {
                        map.changed(range.clone());
                        (0..model.len()).for_each(|at| model[at] |= touched(at));
                    }
                    2 => {
                        map.unmark(range.clone());
                        (0..model.len()).for_each(|at| model[at] &= !touched(at));
                    }
                    3 => {
                        size = random.u64(1..chunk * 300);
                        map.resize(size);
                        model.resize(size.div_ceil(chunk) as usize, false);
                    }
                    _ => {
                        let most = random.u64(1..size * 2);
                        let first = map.next(start, most).map(|run| run.start / chunk);
                        let from = (start / chunk) as usize;
                        let ends = if start < size { model.len() } else { 0 };
                        let expected = (from..ends).find(|&at| model[at]);
                        assert_eq!(first, expected.map(|at| at as u64));
                    }
                }
                let dirty = model.iter().filter(|bit| **bit).count() as u64;
                assert_eq!(map.dirty_bytes(), dirty * chunk);
                for (run, is_dirty) in map.runs(0..size, usize::MAX) {
                    let chunks = run.start / chunk..run.end.div_ceil(chunk);
                    assert!(chunks.into_iter().all(|at| model[at as usize] == is_dirty));
                }
            }
        }
    }

    /// A disk that was cut and is longer again has other bytes there than an older copy.
    #[test]
    fn what_a_disk_has_gained_is_dirty() {
        let map = DirtyMap::new(1000, 64);
        map.resized(500);
        assert_eq!(map.next(0, u64::MAX), None);
        map.resized(1000);
        assert!(matches!(&all(&map)[..], [run] if *run == (448..1000)));
        map.clear();
        map.enable(false);
        map.resized(2000);
        assert_eq!(map.next(0, u64::MAX), None);
    }

    #[test]
    fn a_run_has_a_length_and_ends_with_the_disk() {
        let map = DirtyMap::new(1000, 64);
        map.mark(100..1000);
        assert!(matches!(&all(&map)[..], [run] if *run == (64..1000)));
        assert_eq!(map.next(0, 130), Some(64..192));
        assert_eq!(map.next(200, 1), Some(192..256));
        let other = DirtyMap::new(1000, 512);
        other.merge(&map);
        assert!(matches!(&all(&other)[..], [run] if *run == (0..1000)));
        map.clear();
        assert_eq!((map.next(0, 1), map.dirty_bytes()), (None, 0));
        map.enable(false);
        map.changed(0..1000);
        assert_eq!(map.next(0, 1), None);
    }
}
