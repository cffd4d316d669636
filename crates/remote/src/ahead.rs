//! [`Ahead`]: recognises reads that go on where others have ended.

use std::ops::Range;

/// Sequences that are followed at a time: a guest that copies reads several.
const STREAMS: usize = 8;

/// Reads in sequence, and how far ahead of them blocks are asked for.
#[derive(Debug)]
pub(crate) struct Ahead {
    streams: Vec<Stream>,
    /// Bytes of a block.
    block_bytes: u64,
    /// The most bytes that are asked for ahead of a sequence; 0 is none.
    window_max: u64,
    reads: u64,
}

#[derive(Debug)]
struct Stream {
    /// The end of its last read.
    next: u64,
    /// Bytes ahead of it that are asked for; 0 for a single read.
    window: u64,
    /// The end of what was asked for.
    asked: u64,
    /// The number of its last read.
    last: u64,
}

impl Ahead {
    pub(crate) fn new(block_bytes: u64, window_max: u64) -> Ahead {
        Ahead {
            streams: Vec::new(),
            block_bytes,
            window_max,
            reads: 0,
        }
    }

    /// Notes a read, in bytes; returns the range that is worth asking for, if there is one.
    pub(crate) fn note(&mut self, read: &Range<u64>) -> Option<Range<u64>> {
        if self.window_max == 0 {
            return None;
        }
        self.reads += 1;
        let near = |stream: &&mut Stream| {
            let lowest = stream.next.saturating_sub(self.block_bytes);
            (lowest..=stream.next + self.block_bytes).contains(&read.start)
        };
        let Some(stream) = self.streams.iter_mut().find(near) else {
            self.begin(read.end);
            return None;
        };
        stream.last = self.reads;
        if read.end <= stream.next {
            return None;
        }
        stream.next = read.end;
        let left = stream.asked.saturating_sub(stream.next);
        if stream.window > 0 && left > stream.window / 2 {
            return None;
        }
        // About as much as was read: a sequence that ends has cost no more than twice its length.
        let least = self.block_bytes.min(self.window_max);
        stream.window = (stream.window * 2).clamp(least, self.window_max);
        let start = stream.asked.max(stream.next);
        stream.asked = stream.next + stream.window;
        (start < stream.asked).then_some(start..stream.asked)
    }

    fn begin(&mut self, next: u64) {
        if self.streams.len() == STREAMS {
            let oldest = self.streams.iter().enumerate();
            let oldest = oldest.min_by_key(|(_, stream)| stream.last);
            let index = oldest.map_or(0, |(index, _)| index);
            self.streams.swap_remove(index);
        }
        self.streams.push(Stream {
            next,
            window: 0,
            asked: next,
            last: self.reads,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;

    #[test]
    fn windows_grow_with_a_sequence_and_scattered_reads_ask_for_nothing() {
        let mut ahead = Ahead::new(64 * KIB, 512 * KIB);
        let mut asked = 0;
        for step in 0..64 {
            let start = step * 32 * KIB;
            if let Some(range) = ahead.note(&(start..start + 32 * KIB)) {
                assert!(range.start >= asked, "nothing is asked for twice");
                assert!(
                    range.end <= start + 32 * KIB + 512 * KIB,
                    "no further than the window"
                );
                asked = range.end;
            }
        }
        assert!(asked >= 64 * 32 * KIB + 256 * KIB, "{asked}");

        let mut ahead = Ahead::new(64 * KIB, 512 * KIB);
        for step in 1..100 {
            let start = step * step * 1024 * KIB;
            assert_eq!(ahead.note(&(start..start + 4 * KIB)), None);
        }
        let mut off = Ahead::new(64 * KIB, 0);
        assert_eq!((off.note(&(0..10)), off.note(&(10..20))), (None, None));
    }

    #[test]
    fn several_sequences_are_told_apart() {
        let mut ahead = Ahead::new(64 * KIB, 512 * KIB);
        let far = 1 << 30;
        let mut asked = [0, 0];
        for step in 0..16 {
            for (number, base) in [0, far].into_iter().enumerate() {
                let start = base + step * 64 * KIB;
                if let Some(range) = ahead.note(&(start..start + 64 * KIB)) {
                    asked[number] = range.end;
                }
            }
        }
        assert!(asked[0] > 16 * 64 * KIB && asked[0] < far);
        assert!(asked[1] > far + 16 * 64 * KIB);
    }
}
