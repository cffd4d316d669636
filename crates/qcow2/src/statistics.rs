//! Statistics of an image.

/// Statistics of a cache of L2 slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CacheStatistics {
    /// Bytes of memory that slices may take.
    pub budget_bytes: u64,
    /// Bytes of memory that they take.
    pub used_bytes: u64,
    /// Number of slices in memory.
    pub slices: u64,
    /// Those of them that are kept as runs of entries.
    pub packed: u64,
    /// Times that a slice was asked for and there.
    pub hits: u64,
    /// Times that one was brought in.
    pub misses: u64,
    /// Times that one was let go to make room.
    pub evicted: u64,
}

impl CacheStatistics {
    /// The sum of both.
    #[doc(hidden)]
    #[must_use]
    pub fn plus(self, other: CacheStatistics) -> CacheStatistics {
        CacheStatistics {
            budget_bytes: self.budget_bytes + other.budget_bytes,
            used_bytes: self.used_bytes + other.used_bytes,
            slices: self.slices + other.slices,
            packed: self.packed + other.packed,
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            evicted: self.evicted + other.evicted,
        }
    }
}

/// Counts of writes of guest data, each counted once in every cluster that it touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct WriteStatistics {
    /// The cluster needed new space: it had none, or shared it, or was compressed.
    pub new_space: u64,
    /// The cluster had space, and parts of it became data: subclusters, or all of one that read as
    /// zeroes. So do those that join a write in the new space of their cluster.
    pub filled: u64,
    /// Number of writes that allocated nothing.
    pub in_place: u64,
}

impl WriteStatistics {
    /// Returns the difference to `earlier`.
    #[must_use]
    pub fn since(self, earlier: WriteStatistics) -> WriteStatistics {
        WriteStatistics {
            new_space: self.new_space - earlier.new_space,
            filled: self.filled - earlier.filled,
            in_place: self.in_place - earlier.in_place,
        }
    }
}

/// Space of an image in its file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SpaceStatistics {
    /// Length of the file, with space ahead of need.
    pub file_bytes: u64,
    /// Growth of the file since it was opened.
    pub grown_bytes: u64,
    /// Clusters that are free, as far as the session has looked for them.
    pub free_bytes: u64,
    /// References to space that were dropped, and whose space is not free yet (invariant D2).
    pub quarantined: u64,
    /// An earlier failure keeps the image from being changed until it is opened again (invariant
    /// D4).
    pub is_latched: bool,
}
