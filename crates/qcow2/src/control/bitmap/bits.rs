//! The bits of a dirty bitmap in memory. Pure.
//!
//! A bit stands for `granularity` bytes of the disk, the last one for what there is. Bits are kept
//! in pages of which most are all clean or all dirty and take no memory of their own: a bitmap of a
//! disk of which the guest writes little stays small, and none takes more than a bit for each
//! granule.

use std::ops::Range;

/// Words of a page.
const PAGE_WORDS: usize = 512;
/// Bits of a page.
const PAGE_BITS: u64 = PAGE_WORDS as u64 * 64;

/// Which parts of a disk have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyBits {
    granularity_bits: u8,
    disk_bytes: u64,
    pages: Vec<Page>,
}

/// A part of a disk that has changed as a whole, or has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyRun {
    /// Length in bytes; never 0.
    pub len: u64,
    /// The part has changed since it was stored.
    pub dirty: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Page {
    Clean,
    Dirty,
    Mixed(Box<[u64; PAGE_WORDS]>),
}

impl Page {
    fn word(&self, index: usize) -> u64 {
        match self {
            Page::Clean => 0,
            Page::Dirty => u64::MAX,
            Page::Mixed(words) => words[index],
        }
    }

    fn words(&mut self) -> &mut [u64; PAGE_WORDS] {
        let all = self.word(0);
        if !matches!(self, Page::Mixed(_)) {
            *self = Page::Mixed(Box::new([all; PAGE_WORDS]));
        }
        match self {
            Page::Mixed(words) => words,
            Page::Clean | Page::Dirty => unreachable!("it has just become mixed"),
        }
    }
}

/// Bits `from..to` of a word, `to` at most 64.
fn mask(from: u64, to: u64) -> u64 {
    let below = |bit: u64| match bit {
        64.. => u64::MAX,
        bit => (1 << bit) - 1,
    };
    below(to) & !below(from)
}

impl DirtyBits {
    /// Returns the bits of an unchanged disk of `disk_bytes`.
    #[doc(hidden)]
    pub fn clean(granularity_bits: u8, disk_bytes: u64) -> DirtyBits {
        let bits = disk_bytes.div_ceil(1 << granularity_bits);
        DirtyBits {
            granularity_bits,
            disk_bytes,
            pages: vec![Page::Clean; bits.div_ceil(PAGE_BITS) as usize],
        }
    }

    /// Bytes of the disk that a bit stands for.
    pub fn granularity(&self) -> u64 {
        1 << self.granularity_bits
    }

    /// Bytes of the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    fn bits(&self) -> u64 {
        self.disk_bytes.div_ceil(self.granularity())
    }

    /// Bytes that the bits take when they are stored.
    #[doc(hidden)]
    pub fn stored_bytes(&self) -> u64 {
        self.bits().div_ceil(8)
    }

    /// Marks all granules that a range of the disk touches; beyond the end there are none. Returns
    /// whether any bit was clear.
    #[doc(hidden)]
    pub fn mark(&mut self, range: &Range<u64>) -> bool {
        let end = range.end.min(self.disk_bytes);
        if range.start >= end {
            return false;
        }
        let first = range.start >> self.granularity_bits;
        self.mark_bits(first..((end - 1) >> self.granularity_bits) + 1)
    }

    fn mark_bits(&mut self, bits: Range<u64>) -> bool {
        let mut changed = false;
        let mut at = bits.start;
        while at < bits.end {
            let page = at / PAGE_BITS;
            let end = bits.end.min((page + 1) * PAGE_BITS);
            let within = at - page * PAGE_BITS..end - page * PAGE_BITS;
            changed |= mark_in_page(&mut self.pages[page as usize], within);
            at = end;
        }
        changed
    }

    /// Clears all bits. Returns whether any was set.
    #[doc(hidden)]
    pub fn clear(&mut self) -> bool {
        let was_dirty = self.is_any_dirty();
        self.pages.fill(Page::Clean);
        was_dirty
    }

    fn is_any_dirty(&self) -> bool {
        let mut words = self.pages.iter().flat_map(|page| {
            let words = if matches!(page, Page::Mixed(_)) {
                PAGE_WORDS
            } else {
                1
            };
            (0..words).map(|index| page.word(index))
        });
        words.any(|word| word != 0)
    }

    /// Adds the changes of `other`. Returns whether any bit was clear.
    #[doc(hidden)]
    pub fn merge(&mut self, other: &DirtyBits) -> bool {
        let mut changed = false;
        for range in other.dirty_ranges() {
            changed |= self.mark(&range);
        }
        changed
    }

    /// Adapts to a new size of the disk. An added range is clean.
    #[doc(hidden)]
    pub fn resize(&mut self, disk_bytes: u64) {
        self.disk_bytes = disk_bytes;
        let pages = self.bits().div_ceil(PAGE_BITS) as usize;
        self.pages.resize(pages, Page::Clean);
        self.clear_beyond();
    }

    /// Bits that stand for nothing are clear.
    fn clear_beyond(&mut self) {
        let bits = self.bits();
        let Some(last) = self
            .pages
            .last_mut()
            .filter(|_| !bits.is_multiple_of(PAGE_BITS))
        else {
            return;
        };
        if *last == Page::Clean {
            return;
        }
        let kept = bits % PAGE_BITS;
        for (word, at) in last.words().iter_mut().zip((0..).step_by(64)) {
            *word &= mask(0, kept.saturating_sub(at).min(64));
        }
    }

    /// The ranges of the disk that have changed, in order, as long as they can be.
    pub fn dirty_ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, 0)?;
            at = self.next(start, u64::MAX).unwrap_or(self.bits());
            let start = start << self.granularity_bits;
            Some(start..(at << self.granularity_bits).min(self.disk_bytes))
        })
    }

    /// The first bit from `at` on that differs from what a word of `skipped` has.
    fn next(&self, at: u64, skipped: u64) -> Option<u64> {
        self.next_in(at..self.bits(), skipped)
    }

    /// The first of these bits that does, none of which is beyond the end.
    fn next_in(&self, bits: Range<u64>, skipped: u64) -> Option<u64> {
        let mut at = bits.start;
        while at < bits.end {
            let page = &self.pages[(at / PAGE_BITS) as usize];
            let uniform = !matches!(page, Page::Mixed(_));
            let word = page.word((at % PAGE_BITS / 64) as usize);
            let wanted = (word ^ skipped) & mask(at % 64, 64);
            if wanted != 0 {
                let found = at / 64 * 64 + u64::from(wanted.trailing_zeros());
                return (found < bits.end).then_some(found);
            }
            let step = if uniform { PAGE_BITS } else { 64 };
            at = (at / step + 1) * step;
        }
        None
    }

    /// Whether the part of the disk at `offset` has changed, and up to where all of it has or has
    /// not. `None` at the end of the disk.
    #[doc(hidden)]
    pub fn run_at(&self, offset: u64) -> Option<(bool, u64)> {
        if offset >= self.disk_bytes {
            return None;
        }
        let bit = offset >> self.granularity_bits;
        let dirty = self.next(bit, 0) == Some(bit);
        let skipped = if dirty { u64::MAX } else { 0 };
        let end = self.next(bit, skipped).unwrap_or(self.bits());
        Some((dirty, (end << self.granularity_bits).min(self.disk_bytes)))
    }

    /// Returns the first `most` runs of a range of the disk, alternately dirty and clean. Beyond
    /// the end of the disk that the bits describe nothing is dirty.
    #[doc(hidden)]
    pub fn runs(&self, range: &Range<u64>, most: usize) -> Vec<DirtyRun> {
        let mut runs: Vec<DirtyRun> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (dirty, end) = self.run_at(at).unwrap_or((false, range.end));
            let len = end.min(range.end) - at;
            let is_full = runs.len() == most;
            match runs.last_mut() {
                // A clean end of the disk, and the range beyond it.
                Some(last) if last.dirty == dirty => last.len += len,
                _ if is_full => break,
                _ => runs.push(DirtyRun { len, dirty }),
            }
            at += len;
        }
        runs
    }

    /// Adds bits as they are stored, from byte `at` on, a multiple of 8. Those beyond the end of
    /// the disk are ignored.
    #[doc(hidden)]
    pub fn load(&mut self, at: u64, stored: &[u8]) {
        for (chunk, at) in stored.chunks(8).zip((at * 8..).step_by(64)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            let word = u64::from_le_bytes(bytes);
            if word != 0 && at < self.bits() {
                let page = &mut self.pages[(at / PAGE_BITS) as usize];
                page.words()[(at % PAGE_BITS / 64) as usize] |= word;
            }
        }
        self.clear_beyond();
    }

    /// Sets all bits that are stored in `bytes` bytes of the bitmap from `at` on.
    #[doc(hidden)]
    pub fn load_dirty(&mut self, at: u64, bytes: u64) {
        let end = (at + bytes).saturating_mul(8).min(self.bits());
        self.mark_bits(at * 8..end.max(at * 8));
    }

    /// The bits as they are stored, `len` bytes from `at` on, both multiples of 8; zeroes beyond
    /// the end.
    #[doc(hidden)]
    pub fn store(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len);
        for at in (at * 8..).step_by(64).take(len / 8) {
            let page = self.pages.get((at / PAGE_BITS) as usize);
            let word = page.map_or(0, |page| page.word((at % PAGE_BITS / 64) as usize));
            out.extend(word.to_le_bytes());
        }
        out
    }

    /// Returns the common value of all bits that are stored in `bytes` bytes of the bitmap from
    /// `at` on, as far as they exist; `None` if they differ.
    #[doc(hidden)]
    pub fn uniform(&self, at: u64, bytes: u64) -> Option<bool> {
        let end = (at + bytes).saturating_mul(8);
        let held = at * 8..end.min(self.bits());
        if self.next_in(held.clone(), 0).is_none() {
            return Some(false);
        }
        // Padding is clear, so a cluster with some of it is not all ones.
        let is_whole = end <= self.bits();
        (is_whole && self.next_in(held, u64::MAX).is_none()).then_some(true)
    }
}

fn mark_in_page(page: &mut Page, bits: Range<u64>) -> bool {
    if *page == Page::Dirty {
        return false;
    }
    if bits == (0..PAGE_BITS) {
        // A mixed page may have had all of them, which costs a write at close and nothing else.
        *page = Page::Dirty;
        return true;
    }
    let mut changed = false;
    let words = page.words();
    for word in bits.start / 64..bits.end.div_ceil(64) {
        let from = bits.start.saturating_sub(word * 64);
        let wanted = mask(from, (bits.end - word * 64).min(64));
        changed |= !words[word as usize] & wanted != 0;
        words[word as usize] |= wanted;
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const GRANULARITY_BITS: u8 = 9;

    fn dirty(bits: &DirtyBits) -> Vec<(u64, u64)> {
        let ranges = bits.dirty_ranges();
        ranges.map(|range| (range.start, range.end)).collect()
    }

    /// Against one `bool` a granule.
    #[test]
    fn bits_are_those_of_a_naive_model() {
        for seed in 0..60 {
            let mut random = Random(seed);
            let mut disk_bytes = random.below(90_000) * 512 + random.below(2) * 100;
            let mut bits = DirtyBits::clean(GRANULARITY_BITS, disk_bytes);
            let mut model = vec![false; disk_bytes.div_ceil(512) as usize];
            for _ in 0..40 {
                match random.below(12) {
                    0 => {
                        assert_eq!(bits.clear(), model.contains(&true));
                        model.fill(false);
                    }
                    1 => {
                        disk_bytes = random.below(90_000) * 512;
                        bits.resize(disk_bytes);
                        model.resize(disk_bytes.div_ceil(512) as usize, false);
                    }
                    2 => {
                        let mut copy = DirtyBits::clean(GRANULARITY_BITS, disk_bytes);
                        store_and_load(&bits, &mut copy);
                        assert_eq!(
                            copy.dirty_ranges().collect::<Vec<_>>(),
                            bits.dirty_ranges().collect::<Vec<_>>()
                        );
                        bits = copy;
                    }
                    _ => {
                        let start = random.below(disk_bytes + 5000);
                        let most = [40_000_000, 3000, 3000][random.below(3) as usize];
                        let len = random.below(most);
                        bits.mark(&(start..start + len));
                        let end = (start + len).min(disk_bytes);
                        if start < end {
                            model[(start / 512) as usize..end.div_ceil(512) as usize].fill(true);
                        }
                    }
                }
                check(&bits, &model);
            }
        }
    }

    fn check(bits: &DirtyBits, model: &[bool]) {
        let mut found = vec![false; model.len()];
        for range in bits.dirty_ranges() {
            assert!(range.start < range.end && range.end <= bits.disk_bytes());
            found[(range.start / 512) as usize..range.end.div_ceil(512) as usize].fill(true);
        }
        assert_eq!(found, model);
        let mut at = 0;
        while let Some((dirty, end)) = bits.run_at(at) {
            let granules = &model[(at / 512) as usize..end.div_ceil(512) as usize];
            assert!(granules.iter().all(|&granule| granule == dirty));
            at = end;
        }
        assert_eq!(at, bits.disk_bytes());
        // Also from within a granule, and to beyond the end of the disk.
        for range in [0..at + 5000, at / 3..at / 2, at..at + 1, at / 3..at / 3] {
            let runs = bits.runs(&range, usize::MAX);
            let mut start = range.start;
            for pair in runs.windows(2) {
                assert_ne!(pair[0].dirty, pair[1].dirty, "they alternate");
            }
            for run in &runs {
                assert!(run.len > 0, "an empty run");
                let end = (start + run.len).min(bits.disk_bytes()).max(start);
                // Nothing beyond the end of the disk.
                let granules = (start / 512) as usize..end.div_ceil(512) as usize;
                let granules = if end > start { granules } else { 0..0 };
                assert!(model[granules].iter().all(|&granule| granule == run.dirty));
                start += run.len;
            }
            assert_eq!(start, range.end, "they cover it");
            let few = bits.runs(&range, 2);
            assert_eq!(few, runs[..few.len()], "the same, but fewer");
            assert_eq!(few.len(), runs.len().min(2));
        }
    }

    /// In clusters of 512 bytes, as tables have them.
    fn store_and_load(from: &DirtyBits, to: &mut DirtyBits) {
        for at in (0..from.stored_bytes()).step_by(512) {
            match from.uniform(at, 512) {
                Some(false) => assert!(from.store(at, 512).iter().all(|&byte| byte == 0)),
                Some(true) => {
                    assert!(from.store(at, 512).iter().all(|&byte| byte == 0xff));
                    to.load_dirty(at, 512);
                }
                None => to.load(at, &from.store(at, 512)),
            }
        }
    }

    #[test]
    fn a_mark_tells_whether_it_is_news() {
        let mut bits = DirtyBits::clean(16, 1 << 20);
        assert!(bits.mark(&(5..6)));
        assert!(!bits.mark(&(0..65536)));
        assert!(bits.mark(&(0..65537)));
        assert!(!bits.mark(&(1 << 20..2 << 20)) && !bits.mark(&(7..7)));
    }

    #[test]
    fn a_merge_rounds_to_granules() {
        let mut fine = DirtyBits::clean(9, 1 << 20);
        fine.mark(&(70_000..70_001));
        let mut coarse = DirtyBits::clean(16, 1 << 20);
        assert!(coarse.merge(&fine) && !coarse.merge(&fine));
        assert_eq!(dirty(&coarse), [(65536, 131_072)]);
        fine.clear();
        fine.merge(&coarse);
        assert_eq!(dirty(&fine), [(65536, 131_072)]);
    }

    #[test]
    fn bits_beyond_the_end_are_neither_read_nor_written() {
        let mut bits = DirtyBits::clean(9, 512 * 3 + 1);
        bits.load(0, &[0xff; 512]);
        assert_eq!(bits.store(0, 8), [0x0f, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(dirty(&bits), [(0, 512 * 3 + 1)]);
        assert_eq!(bits.uniform(0, 512), None);
        bits.resize(512 * 8);
        assert_eq!(bits.store(0, 8)[0], 0x0f);
    }
}
