//! Free space in allocation groups, and where the next piece of a file goes. Pure.
//!
//! Common rule of file systems: a file goes on where it ends if that is free; else its next
//! piece goes to the nearest free extent behind that is long enough, else to the first in the group
//! of its directory that is, else to the longest there is. An extent lies in one group.

use std::collections::BTreeMap;
use std::ops::Range;

/// Free space of a volume.
#[derive(Clone, Debug)]
pub struct Space {
    /// Start and length in bytes. Groups are never joined.
    free: BTreeMap<u64, u64>,
    group_bytes: u64,
    free_bytes: u64,
}

impl Space {
    /// An empty volume.
    pub fn new(volume_bytes: u64, group_bytes: u64) -> Space {
        let starts = (0..volume_bytes).step_by(usize::try_from(group_bytes).unwrap_or(usize::MAX));
        let free = starts.map(|start| (start, group_bytes.min(volume_bytes - start)));
        Space {
            free: free.collect(),
            group_bytes,
            free_bytes: volume_bytes,
        }
    }

    /// Returns the number of free bytes.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Takes up to `bytes` for a file that ends at `end`, as one piece; `None` on a full volume.
    pub fn take(&mut self, end: u64, bytes: u64) -> Option<Range<u64>> {
        let found = match self.free.get(&end) {
            // A continuation of the last piece is taken however short it is.
            Some(len) => Some((end, *len)),
            None => self.place(end, bytes),
        };
        let (start, len) = found?;
        let taken = len.min(bytes);
        self.free.remove(&start);
        if len > taken {
            self.free.insert(start + taken, len - taken);
        }
        self.free_bytes -= taken;
        Some(start..start + taken)
    }

    fn place(&self, end: u64, bytes: u64) -> Option<(u64, u64)> {
        let fits = |(_, len): &(&u64, &u64)| **len >= bytes;
        let found = self.free.range(end..).find(fits);
        let found = found.or_else(|| self.free.range(..end).find(fits));
        let longest = || self.free.iter().max_by_key(|(_, len)| **len);
        found.or_else(longest).map(|(start, len)| (*start, *len))
    }

    /// Gives a piece back.
    pub fn give(&mut self, piece: Range<u64>) {
        let (mut start, mut end) = (piece.start, piece.end);
        if start >= end {
            return;
        }
        self.free_bytes += end - start;
        let group = start / self.group_bytes;
        if let Some(len) = self.free.get(&end).copied()
            && end / self.group_bytes == group
        {
            self.free.remove(&end);
            end += len;
        }
        if let Some((before, len)) = self.free.range(..start).next_back()
            && before + len == start
            && before / self.group_bytes == group
        {
            start = *before;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_goes_on_where_it_ends_or_to_the_nearest_place_that_is_long_enough() {
        let mut space = Space::new(1000, 500);
        assert_eq!(space.take(0, 100), Some(0..100));
        assert_eq!(space.take(0, 100), Some(100..200));
        // The first ends at 100, which is taken; the second goes on.
        assert_eq!(space.take(100, 50), Some(200..250));
        assert_eq!(space.take(200, 50), Some(250..300));
        space.give(200..250);
        // Too short a gap is passed over, but taken by what ends before it.
        assert_eq!(space.take(150, 100), Some(300..400));
        assert_eq!(space.take(200, 100), Some(200..250));
        // Not across groups.
        assert_eq!(space.take(400, 300), Some(400..500));
        assert_eq!(space.take(500, 300), Some(500..800));
        assert_eq!(space.free_bytes(), 200);
        assert_eq!(space.take(3, 300), Some(800..1000));
        assert_eq!(space.take(3, 1), None);
    }

    #[test]
    fn what_is_given_back_is_joined_within_its_group() {
        let mut space = Space::new(1000, 500);
        space.take(0, 500);
        space.take(500, 500);
        for piece in [100..200, 300..500, 500..600, 200..300] {
            space.give(piece);
        }
        assert_eq!(space.free, BTreeMap::from([(100, 400), (500, 100)]));
        assert_eq!(space.free_bytes(), 500);
    }
}
