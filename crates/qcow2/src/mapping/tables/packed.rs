//! Slices in little memory: a line for most entries, and the distances of the others. Pure.
//!
//! Where clusters were handed out in guest order, an entry is the one before plus a cluster; where
//! nothing is mapped, all are zero. A column of words is kept as the line that most of them lie on,
//! a mask of those that do not, and how far each of these is from it, in as few bits as hold the
//! farthest (frame of reference). A run that is broken once costs a mask and nothing else, since
//! all entries after the break are off the line by the same distance.

use crate::entry::big_endian;

/// Approximate overhead of an allocation, in bytes.
const HEAP_BYTES: usize = 16;

/// A slice, packed. Nothing of a plain run is on the heap, whose larger blocks would be cut up for
/// it.
#[derive(Debug, PartialEq, Eq)]
pub struct Packed {
    entries: Column,
    /// Subcluster bitmaps, where entries are extended.
    bitmaps: Option<Box<Column>>,
}

/// The words at one place of each entry.
#[derive(Debug, PartialEq, Eq)]
struct Column {
    line: Line,
    others: Option<Box<Others>>,
}

/// Word `i` is `first + i * step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    first: u64,
    step: u64,
}

/// The words that are not on the line.
#[derive(Debug, PartialEq, Eq)]
struct Others {
    /// Word less line is `least + (distance << shift)`.
    least: u64,
    shift: u32,
    /// Bits of a distance.
    width: u8,
    /// Elements of the mask.
    masks: u16,
    /// The mask, in which bit `i % 64` of element `i / 64` says that word `i` is one; then the
    /// distances, in the order of their words, from the lowest bit on.
    packed: Box<[u64]>,
}

impl Packed {
    /// Packs the big-endian words of a slice whose entries have `columns` words and whose clusters
    /// have `step` bytes; `None` if that saves less than a quarter.
    pub fn pack(bytes: &[u8], columns: usize, step: u64) -> Option<Packed> {
        let column = |at| pack(bytes, columns, at, step);
        let packed = Packed {
            entries: column(0),
            bitmaps: (columns > 1).then(|| Box::new(column(1))),
        };
        (packed.heap_bytes() <= bytes.len() / 4 * 3).then_some(packed)
    }

    /// The words of an entry: the entry, and its bitmap or 0.
    pub fn words(&self, entry: usize) -> (u64, u64) {
        let bitmap = self.bitmaps.as_ref();
        let bitmap = bitmap.map_or(0, |bitmaps| bitmaps.word(entry));
        (self.entries.word(entry), bitmap)
    }

    /// Returns the slice, of `entries` entries, as it is on disk.
    pub fn unpack(&self, entries: usize) -> Box<[u8]> {
        let words = (0..entries).flat_map(|entry| {
            let bitmap = self.bitmaps.as_ref().map(|bitmaps| bitmaps.word(entry));
            std::iter::once(self.entries.word(entry)).chain(bitmap)
        });
        words.flat_map(u64::to_be_bytes).collect()
    }

    /// Bytes that it takes besides itself.
    pub fn heap_bytes(&self) -> usize {
        let bitmaps = self.bitmaps.as_ref();
        let bitmaps = bitmaps.map_or(0, |b| HEAP_BYTES + size_of::<Column>() + b.heap_bytes());
        self.entries.heap_bytes() + bitmaps
    }
}

impl Line {
    fn at(self, entry: usize) -> u64 {
        self.first
            .wrapping_add(self.step.wrapping_mul(entry as u64))
    }
}

impl Column {
    fn word(&self, entry: usize) -> u64 {
        let besides = self.others.as_ref().map_or(0, |others| others.at(entry));
        self.line.at(entry).wrapping_add(besides)
    }

    fn heap_bytes(&self) -> usize {
        self.others.as_ref().map_or(0, |others| {
            let packed = size_of_val(&*others.packed) + HEAP_BYTES;
            size_of::<Others>() + HEAP_BYTES + packed
        })
    }
}

impl Others {
    /// Returns the distance of word `entry` from the line.
    fn at(&self, entry: usize) -> u64 {
        let (mask, distances) = self.packed.split_at(usize::from(self.masks));
        let (element, bit) = (entry / 64, 1 << (entry % 64));
        if mask[element] & bit == 0 {
            return 0;
        }
        let before = mask[..element].iter().map(|mask| mask.count_ones());
        let rank = before.sum::<u32>() + (mask[element] & (bit - 1)).count_ones();
        let distance = bits_at(distances, rank as usize, u32::from(self.width));
        self.least.wrapping_add(distance << self.shift)
    }
}

/// Number `index` of those that have `width` bits each.
fn bits_at(numbers: &[u64], index: usize, width: u32) -> u64 {
    if width == 0 {
        return 0;
    }
    let at = index * width as usize;
    let (element, skipped) = (at / 64, (at % 64) as u32);
    let mut number = numbers[element] >> skipped;
    if skipped + width > 64 {
        number |= numbers[element + 1] << (64 - skipped);
    }
    number & (u64::MAX >> (64 - width))
}

/// Appends numbers of `width` bits.
fn put_bits(target: &mut Vec<u64>, numbers: impl Iterator<Item = u64>, width: u32) {
    let mut free = 0;
    for number in numbers.filter(|_| width != 0) {
        if free > 0 {
            *target.last_mut().expect("it has free bits") |= number << (64 - free);
        }
        if free < width {
            target.push(number >> free);
            free += 64;
        }
        free -= width;
    }
}

fn pack(bytes: &[u8], columns: usize, column: usize, step: u64) -> Column {
    let words = bytes.chunks_exact(8).skip(column).step_by(columns);
    let words: Vec<u64> = words.map(big_endian).collect();
    let rising = line_of_most(&words, step);
    let level = line_of_most(&words, 0);
    let (line, _) = std::cmp::max_by_key(level, rising, |&(_, on_it)| on_it);
    let besides = words.iter().enumerate();
    let besides = besides.map(|(entry, &word)| word.wrapping_sub(line.at(entry)));
    Column {
        line,
        others: others(besides.collect()),
    }
}

/// The line of this step that has more than half of the words, if there is one, and how many it
/// has: by the majority vote of Boyer and Moore.
fn line_of_most(words: &[u64], step: u64) -> (Line, usize) {
    let firsts = || {
        let each = words.iter().enumerate();
        each.map(|(entry, &word)| word.wrapping_sub(step.wrapping_mul(entry as u64)))
    };
    let (mut first, mut votes) = (0, 0u32);
    for candidate in firsts() {
        match (votes, candidate == first) {
            (0, _) => (first, votes) = (candidate, 1),
            (_, true) => votes += 1,
            (_, false) => votes -= 1,
        }
    }
    let on_it = firsts().filter(|&candidate| candidate == first).count();
    (Line { first, step }, on_it)
}

fn others(besides: Vec<u64>) -> Option<Box<Others>> {
    let mut mask = vec![0u64; besides.len().div_ceil(64)];
    for (entry, _) in besides.iter().enumerate().filter(|(_, b)| **b != 0) {
        mask[entry / 64] |= 1 << (entry % 64);
    }
    let besides: Vec<u64> = besides.into_iter().filter(|&b| b != 0).collect();
    // As signed numbers: words may lie below the line.
    let least = besides.iter().map(|&b| b as i64).min()? as u64;
    let distances: Vec<u64> = besides.iter().map(|b| b.wrapping_sub(least)).collect();
    let all = distances.iter().fold(0, |all, distance| all | distance);
    let shift = if all == 0 { 0 } else { all.trailing_zeros() };
    let width = 64 - (all >> shift).leading_zeros();
    let masks = u16::try_from(mask.len()).expect("a slice has a few thousand entries at most");
    let mut packed = mask;
    packed.reserve_exact((distances.len() * width as usize).div_ceil(64));
    let distances = distances.iter().map(|distance| distance >> shift);
    put_bits(&mut packed, distances, width);
    Some(Box::new(Others {
        least,
        shift,
        width: width as u8,
        masks,
        packed: packed.into(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const STEP: u64 = 65536;
    const ENTRIES: usize = 512;

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    /// Packs words, and asserts that they come out again; what that takes, if it is worth it.
    fn packs(words: &[u64], columns: usize) -> Option<usize> {
        let bytes = bytes(words);
        let packed = Packed::pack(&bytes, columns, STEP)?;
        for (at, &word) in words.iter().enumerate() {
            let (entry, bitmap) = packed.words(at / columns);
            assert_eq!([entry, bitmap][at % columns], word, "word {at}");
        }
        assert!(packed.unpack(words.len() / columns)[..] == bytes[..]);
        Some(packed.heap_bytes())
    }

    fn run(first: u64) -> impl Iterator<Item = u64> {
        (0..).map(move |i| 1 << 63 | (first + i * STEP))
    }

    #[test]
    fn runs_and_emptiness_take_a_few_bytes() {
        let runs: Vec<u64> = run(5 << 20).take(ENTRIES).collect();
        assert!(packs(&runs, 1).unwrap() < 64);
        assert!(packs(&[0; ENTRIES], 1).unwrap() < 64);
        assert!(packs(&[0; ENTRIES], 2).unwrap() < 96);
        let broken: Vec<u64> = run(5 << 20)
            .take(200)
            .chain(run(9 << 30))
            .take(ENTRIES)
            .collect();
        assert!(packs(&broken, 1).unwrap() < 256);
        // Extended entries: a run, and bitmaps that differ now and then.
        let bitmap = |i: usize| {
            if i.is_multiple_of(9) {
                0xff
            } else {
                u64::from(u32::MAX)
            }
        };
        let extended = run(1 << 30).take(256).enumerate();
        let extended: Vec<u64> = extended.flat_map(|(i, word)| [word, bitmap(i)]).collect();
        assert!(packs(&extended, 2).unwrap() < 400);
    }

    #[test]
    fn a_third_scattered_takes_what_says_where_it_is() {
        let mut random = Random(7);
        let words: Vec<u64> = run(1 << 40)
            .take(ENTRIES)
            .map(|word| match random.next() % 10 {
                0..3 => 1 << 63 | ((random.next() % (1 << 27)) * STEP),
                _ => word,
            })
            .collect();
        let line = run(1 << 40).take(ENTRIES);
        let scattered = words.iter().zip(line).filter(|(word, on)| **word != *on);
        // 27 bits say where a cluster of 2^27 is, and one more that it may lie below the line.
        let distances = scattered.count() * 28 / 8;
        assert!(packs(&words, 1).unwrap() < distances + ENTRIES / 8 + 96);
    }

    #[test]
    fn numbers_of_any_width_come_out_as_they_went_in() {
        let mut random = Random(5);
        for width in 0..=64 {
            let most = u64::MAX.checked_shr(64 - width).unwrap_or(0);
            let numbers: Vec<u64> = (0..200).map(|_| random.next() & most).collect();
            let mut packed = Vec::new();
            put_bits(&mut packed, numbers.iter().copied(), width);
            assert_eq!(packed.len(), (200 * width as usize).div_ceil(64));
            for (index, &number) in numbers.iter().enumerate() {
                assert_eq!(bits_at(&packed, index, width), number, "{width} bits");
            }
        }
    }

    #[test]
    fn what_saves_nothing_stays_as_it_is() {
        let mut random = Random(3);
        let words: Vec<u64> = (0..ENTRIES).map(|_| random.next()).collect();
        assert_eq!(packs(&words, 1), None);
        assert_eq!(packs(&words, 2), None);
    }

    #[test]
    fn all_words_come_out_as_they_went_in() {
        let mut random = Random(11);
        let mut packed = 0;
        for case in 0..4000 {
            let entries = [8, 64, 256, 512][case % 4];
            let columns = 1 + case / 4 % 2;
            let first = random.next();
            let scattered = random.next() % 12;
            let spread = random.next() % 64;
            let words: Vec<u64> = (0..entries * columns)
                .map(|at| match random.next() % 12 < scattered {
                    true => first.wrapping_add(random.next() >> spread),
                    false if random.next().is_multiple_of(40) => random.next(),
                    false => first.wrapping_add((at / columns) as u64 * STEP),
                })
                .collect();
            packed += u32::from(packs(&words, columns).is_some());
        }
        assert!((1000..3500).contains(&packed), "{packed} of 4000");
    }
}
