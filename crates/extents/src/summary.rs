//! Sums of the mapping records of one file. Pure; memory grows with the number of different lengths
//! only, of which a file of n blocks has at most the square root of 2n.

use std::collections::BTreeMap;

use cowslip_queue::fiemap::{Flags, Record};

use crate::perfect::{Limits, Perfect};

/// Records of lengths within a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The least length in bytes; the greatest is below twice that.
    pub least: u64,
    /// Records.
    pub count: u64,
    /// Bytes of the extents.
    pub bytes: u64,
}

/// Lengths of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The shortest.
    pub min: u64,
    /// The middle one; of two middle ones the shorter.
    pub median: u64,
    /// The longest.
    pub max: u64,
}

/// Bytes of space in a special state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Marked {
    /// Records.
    pub count: u64,
    /// Bytes of the extents.
    pub bytes: u64,
}

/// States that are counted, and their names in output.
pub const MARKS: [(Flags, &str); 9] = [
    (Flags::UNWRITTEN, "unwritten"),
    (Flags::SHARED, "shared"),
    (Flags::DELAYED, "delayed"),
    (Flags::INLINE, "inline"),
    (Flags::ENCODED, "encoded"),
    (Flags::ENCRYPTED, "encrypted"),
    (Flags::TAIL, "tail"),
    (Flags::NOT_ALIGNED, "not-aligned"),
    (Flags::UNKNOWN, "unknown"),
];

/// The sums.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Length of the file.
    size: u64,
    /// Where the last block of the file ends.
    end: u64,
    /// How often each length occurs.
    lengths: BTreeMap<u64, u64>,
    perfect: Perfect,
    /// Where the records so far end.
    at: u64,
    /// Mapping records.
    pub records: u64,
    /// Bytes of the records.
    pub bytes: u64,
    /// Sums for each of [`MARKS`].
    pub marked: [Marked; MARKS.len()],
    /// Holes before the end of the file.
    pub holes: Marked,
    /// Space beyond the block that the file ends in.
    pub beyond: Marked,
}

impl Summary {
    /// Returns the summary of a file of `size` bytes in blocks of `block_bytes`, without records
    /// yet.
    pub fn new(size: u64, block_bytes: u64, limits: Limits) -> Summary {
        Summary {
            size,
            end: size.div_ceil(block_bytes).saturating_mul(block_bytes),
            lengths: BTreeMap::new(),
            perfect: Perfect::new(limits),
            at: 0,
            records: 0,
            bytes: 0,
            marked: [Marked::default(); MARKS.len()],
            holes: Marked::default(),
            beyond: Marked::default(),
        }
    }

    /// The next record in the order of the file.
    pub fn push(&mut self, record: &Record) {
        self.hole_until(record.logical);
        self.at = record.logical + record.len;
        self.perfect.push(record);
        self.records += 1;
        self.bytes += record.len;
        *self.lengths.entry(record.len).or_default() += 1;
        for ((flag, _), marked) in MARKS.iter().zip(&mut self.marked) {
            if record.flags.has(*flag) {
                marked.count += 1;
                marked.bytes += record.len;
            }
        }
        if self.at > self.end {
            self.beyond.count += 1;
            self.beyond.bytes += self.at - self.end.max(record.logical);
        }
    }

    /// Ends the list of records.
    pub fn finish(&mut self) {
        self.hole_until(self.size);
    }

    fn hole_until(&mut self, end: u64) {
        let end = end.min(self.size);
        if end > self.at {
            self.holes.count += 1;
            self.holes.bytes += end - self.at;
            self.at = end;
        }
    }

    /// The fewest records that the file system could do with.
    pub fn perfect(&self) -> u64 {
        self.perfect.count()
    }

    /// Extents as the file system counts them, to be held against the perfect count.
    pub fn expressed(&self) -> u64 {
        self.perfect.expressed()
    }

    /// Lengths; `None` without records.
    pub fn sizes(&self) -> Option<Sizes> {
        let (&min, _) = self.lengths.first_key_value()?;
        let (&max, _) = self.lengths.last_key_value()?;
        let middle = self.records.div_ceil(2);
        let mut below = 0;
        let median = self.lengths.iter().find_map(|(&len, count)| {
            below += count;
            (below >= middle).then_some(len)
        });
        let median = median.unwrap_or(max);
        Some(Sizes { min, median, max })
    }

    /// Lengths by powers of two, from the shortest to the longest, empty ones in between too.
    pub fn histogram(&self) -> Vec<Bucket> {
        let mut buckets: Vec<Bucket> = Vec::new();
        for (&len, &count) in &self.lengths {
            let least = 1 << (63 - len.max(1).leading_zeros());
            while let Some(last) = buckets.last()
                && last.least < least
            {
                let least = last.least * 2;
                buckets.push(Bucket {
                    least,
                    count: 0,
                    bytes: 0,
                });
            }
            if buckets.is_empty() {
                buckets.push(Bucket {
                    least,
                    count: 0,
                    bytes: 0,
                });
            }
            if let Some(bucket) = buckets.last_mut() {
                bucket.count += count;
                bucket.bytes += len * count;
            }
        }
        buckets
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perfect::Kind;

    fn summary(size: u64, records: &[(u64, u64, Flags)]) -> Summary {
        let mut summary = Summary::new(size, 4096, Limits::of(Kind::Other, 4096));
        for &(logical, len, flags) in records {
            summary.push(&Record {
                logical,
                physical: logical,
                len,
                flags,
            });
        }
        summary.finish();
        summary
    }

    const NONE: Flags = Flags::from_bits(0);

    #[test]
    fn holes_lie_before_the_end_and_space_beyond_it() {
        let marked = |count, bytes| Marked { count, bytes };
        let whole = summary(10_000, &[(0, 12_288, NONE)]);
        assert_eq!(whole.holes, marked(0, 0));
        assert_eq!(whole.beyond, marked(0, 0), "the last block is the file's");
        let islands = summary(100_000, &[(4096, 4096, NONE), (65_536, 4096, NONE)]);
        assert_eq!(islands.holes, marked(3, 100_000 - 8192));
        let more = summary(5000, &[(0, 16_384, NONE), (32_768, 4096, Flags::UNWRITTEN)]);
        assert_eq!(more.beyond, marked(2, 8192 + 4096));
        assert_eq!(more.holes, marked(0, 0));
        let empty = summary(5000, &[]);
        assert_eq!(empty.holes, marked(1, 5000));
        assert_eq!(summary(0, &[]).holes, marked(0, 0));
        assert_eq!(empty.sizes(), None);
        assert_eq!(empty.histogram(), []);
    }

    #[test]
    fn states_are_counted_each_for_itself() {
        let both = Flags::UNWRITTEN.with(Flags::SHARED);
        let summary = summary(1 << 20, &[(0, 4096, both), (4096, 8192, Flags::SHARED)]);
        let of = |wanted: &str| {
            let at = MARKS.iter().position(|(_, name)| *name == wanted).unwrap();
            summary.marked[at].bytes
        };
        assert_eq!(
            (of("unwritten"), of("shared"), of("inline")),
            (4096, 12_288, 0)
        );
    }

    /// Comparison with a sorted list, for every number of records up to some.
    #[test]
    fn sizes_agree_with_a_sorted_list() {
        let mut state = 7_u64;
        for count in 1..40 {
            let mut lens = Vec::new();
            let mut records = Vec::new();
            let mut at = 0;
            for _ in 0..count {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let len = (state >> 33) % 9 * 4096 + 4096;
                lens.push(len);
                records.push((at, len, NONE));
                at += len;
            }
            let summary = summary(at, &records);
            lens.sort_unstable();
            let sizes = summary.sizes().unwrap();
            assert_eq!(sizes.min, lens[0]);
            assert_eq!(sizes.max, lens[count - 1]);
            assert_eq!(sizes.median, lens[(count - 1) / 2]);
            let histogram = summary.histogram();
            assert_eq!(histogram.iter().map(|b| b.count).sum::<u64>(), count as u64);
            for (bucket, next) in histogram.iter().zip(&histogram[1..]) {
                assert_eq!(bucket.least * 2, next.least);
            }
            for bucket in histogram {
                let within = |len: &&u64| (bucket.least..bucket.least * 2).contains(*len);
                assert_eq!(bucket.count, lens.iter().filter(within).count() as u64);
                assert_eq!(bucket.bytes, lens.iter().filter(within).sum::<u64>());
            }
        }
    }
}
