//! Addresses of a qcow2 image: newtypes, and all arithmetic between them.
//!
//! A guest offset splits into L1 index, L2 index and offset in the cluster (qcow2.rst, "Cluster
//! mapping"). Images without extended L2 entries are treated as having one subcluster a cluster, so
//! that every layer above thinks in subclusters only.
//!
//! Worked example, 64 KiB clusters, extended L2 (16-byte entries): a table holds 4096 entries and
//! maps 256 MiB; guest offset 0x1234_5678 is L1 index 1, L2 index 0x234, offset 0x5678, which is
//! subcluster 0x5678 / 2048 = 10.

use std::ops::Range;

pub use crate::run::HostOffset;

/// The block of the usual file systems: a hole that is smaller gives nothing back.
pub const HOST_BLOCK_BYTES: u64 = 4096;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);

        impl $name {
            /// The address `count` units further.
            #[must_use]
            #[inline]
            pub const fn plus(self, count: u64) -> $name {
                $name(self.0 + count)
            }
        }
    };
}

address!(
    /// A byte of the virtual disk.
    GuestOffset
);
address!(
    /// A cluster of the virtual disk, counted from 0.
    GuestCluster
);
address!(
    /// A cluster of the image file, counted from 0.
    HostCluster
);

/// Bits of a subcluster bitmap: one for each subcluster of a cluster, the first in bit 0.
pub type SubclusterMask = u32;

/// The sizes that an image's header fixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    cluster_bits: u32,
    refcount_order: u32,
    extended_l2: bool,
}

/// The smallest cluster: 512 bytes.
pub const CLUSTER_BITS_MIN: u32 = 9;
/// The largest cluster: 2 MiB.
pub const CLUSTER_BITS_MAX: u32 = 21;
/// The smallest cluster with extended L2 entries: 16 KiB (a subcluster is a sector at least).
pub const CLUSTER_BITS_MIN_EXTENDED: u32 = 14;
/// Host offsets in table entries have 56 bits.
pub const HOST_OFFSET_END: u64 = 1 << 56;
/// Subclusters in a cluster with extended L2 entries.
pub const SUBCLUSTERS: u32 = 32;
/// The unit of the cache: part of an L2 table or refcount block.
pub const SLICE_BYTES: u64 = 4096;

impl Geometry {
    /// The geometry of an image, or `None` where the specification forbids it.
    pub fn new(cluster_bits: u32, refcount_order: u32, extended_l2: bool) -> Option<Geometry> {
        let min = if extended_l2 {
            CLUSTER_BITS_MIN_EXTENDED
        } else {
            CLUSTER_BITS_MIN
        };
        let valid = (min..=CLUSTER_BITS_MAX).contains(&cluster_bits) && refcount_order <= 6;
        valid.then_some(Geometry {
            cluster_bits,
            refcount_order,
            extended_l2,
        })
    }

    /// log2 of the cluster size.
    #[inline]
    pub fn cluster_bits(&self) -> u32 {
        self.cluster_bits
    }

    /// Bytes in a cluster.
    #[inline]
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns whether L2 entries are extended (128 bits).
    #[inline]
    pub fn extended_l2(&self) -> bool {
        self.extended_l2
    }

    /// log2 of the width of a refcount in bits.
    #[inline]
    pub fn refcount_order(&self) -> u32 {
        self.refcount_order
    }

    /// Width of a refcount in bits.
    #[inline]
    pub fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// Bytes that a refcount takes; narrower ones share a byte.
    #[inline]
    pub fn refcount_bytes(&self) -> u64 {
        u64::from(self.refcount_bits()).div_ceil(8)
    }

    /// The largest refcount that the width can hold.
    #[inline]
    pub fn refcount_max(&self) -> u64 {
        u64::MAX >> (64 - self.refcount_bits())
    }

    // Subclusters.

    /// Subclusters in a cluster: 32, or 1 without extended L2 entries.
    #[inline]
    pub fn subclusters(&self) -> u32 {
        if self.extended_l2 { SUBCLUSTERS } else { 1 }
    }

    /// log2 of the subcluster size.
    #[inline]
    pub fn subcluster_bits(&self) -> u32 {
        if self.extended_l2 {
            self.cluster_bits - 5
        } else {
            self.cluster_bits
        }
    }

    /// Bytes in a subcluster: the unit of allocation and zeroing.
    #[inline]
    pub fn subcluster_bytes(&self) -> u64 {
        1 << self.subcluster_bits()
    }

    /// The mask of all subclusters of a cluster.
    #[inline]
    pub fn all_subclusters(&self) -> SubclusterMask {
        if self.extended_l2 {
            SubclusterMask::MAX
        } else {
            1
        }
    }

    /// The mask of the subclusters that a byte range within a cluster touches.
    #[inline]
    pub fn subclusters_touched(&self, range: &Range<u64>) -> SubclusterMask {
        if range.is_empty() {
            return 0;
        }
        let first = range.start >> self.subcluster_bits();
        let last = (range.end - 1) >> self.subcluster_bits();
        mask(first, last + 1)
    }

    /// The mask of the subclusters that lie wholly in a byte range within a cluster.
    #[inline]
    pub fn subclusters_within(&self, range: &Range<u64>) -> SubclusterMask {
        let first = range.start.div_ceil(self.subcluster_bytes());
        let end = range.end >> self.subcluster_bits();
        if first < end { mask(first, end) } else { 0 }
    }

    /// The parts of a byte range within a cluster that lie in these subclusters, neighbours joined.
    pub fn parts_in(&self, range: &Range<u64>, subclusters: SubclusterMask) -> Vec<Range<u64>> {
        let mut parts: Vec<Range<u64>> = Vec::new();
        for i in (0..self.subclusters()).filter(|i| subclusters >> i & 1 != 0) {
            let start = u64::from(i) << self.subcluster_bits();
            let part = start.max(range.start)..(start + self.subcluster_bytes()).min(range.end);
            match parts.last_mut() {
                _ if part.start >= part.end => {}
                Some(last) if last.end == part.start => last.end = part.end,
                _ => parts.push(part),
            }
        }
        parts
    }

    // Guest addresses.

    /// The cluster that a guest byte lies in.
    #[inline]
    pub fn guest_cluster(&self, offset: GuestOffset) -> GuestCluster {
        GuestCluster(offset.0 >> self.cluster_bits)
    }

    /// The first byte of a guest cluster.
    #[inline]
    pub fn guest_offset(&self, cluster: GuestCluster) -> GuestOffset {
        GuestOffset(cluster.0 << self.cluster_bits)
    }

    /// The offset of a byte in its cluster.
    #[inline]
    pub fn offset_in_cluster(&self, offset: u64) -> u64 {
        offset & (self.cluster_bytes() - 1)
    }

    /// Bytes of an L2 entry: 8 or 16.
    #[inline]
    pub fn l2_entry_bytes(&self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// Entries in an L2 table, which is one cluster.
    #[inline]
    pub fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / self.l2_entry_bytes()
    }

    /// Guest bytes that one L2 table maps.
    #[inline]
    pub fn l2_coverage_bytes(&self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// The index into the L1 table of a guest cluster.
    #[inline]
    pub fn l1_index(&self, cluster: GuestCluster) -> u64 {
        cluster.0 / self.l2_entries()
    }

    /// The index into its L2 table of a guest cluster.
    #[inline]
    pub fn l2_index(&self, cluster: GuestCluster) -> u64 {
        cluster.0 % self.l2_entries()
    }

    /// L1 entries that a disk of `size_bytes` needs.
    pub fn l1_entries_for(&self, size_bytes: u64) -> u64 {
        size_bytes
            .div_ceil(self.cluster_bytes())
            .div_ceil(self.l2_entries())
    }

    /// Returns where the area of the VM state begins behind a disk of `size_bytes`: with the first
    /// L1 entry that the disk does not need (QEMU: `vm_state_offset`).
    pub fn vm_state_offset(&self, size_bytes: u64) -> u64 {
        self.l1_entries_for(size_bytes)
            .saturating_mul(self.l2_coverage_bytes())
    }

    // Slices.

    /// Bytes of a slice of a table: 4 KiB, or the cluster where that is smaller.
    #[inline]
    pub fn slice_bytes(&self) -> u64 {
        SLICE_BYTES.min(self.cluster_bytes())
    }

    /// L2 entries in a slice.
    #[inline]
    pub fn slice_entries(&self) -> u64 {
        self.slice_bytes() / self.l2_entry_bytes()
    }

    /// Slices in a table.
    #[inline]
    pub fn slices_per_table(&self) -> u64 {
        self.cluster_bytes() / self.slice_bytes()
    }

    /// Guest bytes that a slice maps.
    #[inline]
    pub fn slice_coverage_bytes(&self) -> u64 {
        self.slice_entries() << self.cluster_bits
    }

    /// The slice, counted over the whole disk, that maps a guest cluster.
    #[inline]
    pub fn slice_of(&self, cluster: GuestCluster) -> u64 {
        cluster.0 / self.slice_entries()
    }

    // Host addresses.

    /// The cluster that a host byte lies in.
    #[inline]
    pub fn host_cluster(&self, offset: HostOffset) -> HostCluster {
        HostCluster(offset.0 >> self.cluster_bits)
    }

    /// The first byte of a host cluster.
    #[inline]
    pub fn host_offset(&self, cluster: HostCluster) -> HostOffset {
        HostOffset(cluster.0 << self.cluster_bits)
    }

    /// Returns whether a host offset is the start of a cluster.
    #[inline]
    pub fn is_cluster_aligned(&self, offset: u64) -> bool {
        self.offset_in_cluster(offset) == 0
    }

    /// Clusters that hold `bytes`.
    pub fn clusters_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_bytes())
    }

    /// The clusters of a structure of `bytes` at an offset that is a cluster's.
    pub fn clusters_at(&self, offset: u64, bytes: u64) -> Range<u64> {
        let first = offset >> self.cluster_bits();
        first..first + self.clusters_for(bytes)
    }

    // Refcounts.

    /// Host clusters that a refcount block counts.
    #[inline]
    pub fn refcounts_per_block(&self) -> u64 {
        (self.cluster_bytes() * 8) >> self.refcount_order
    }

    /// The entry of the refcount table that reaches a cluster's count.
    #[inline]
    pub fn refcount_block_index(&self, cluster: HostCluster) -> u64 {
        cluster.0 / self.refcounts_per_block()
    }

    /// A cluster's index in its refcount block.
    #[inline]
    pub fn index_in_refcount_block(&self, cluster: HostCluster) -> u64 {
        cluster.0 % self.refcounts_per_block()
    }

    /// The first cluster that refcount block `index` counts.
    #[inline]
    pub fn first_counted(&self, index: u64) -> HostCluster {
        HostCluster(index * self.refcounts_per_block())
    }

    /// Entries in one cluster of the refcount table.
    pub fn refcount_table_entries_per_cluster(&self) -> u64 {
        self.cluster_bytes() / 8
    }
}

/// Mask of the bits `first..end`.
#[inline]
pub fn mask(first: u64, end: u64) -> SubclusterMask {
    debug_assert!(first < end && end <= 32, "subclusters {first}..{end}");
    (SubclusterMask::MAX >> (32 - (end - first))) << first
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Geometry> {
        (0..=30).flat_map(|bits| {
            [false, true]
                .into_iter()
                .filter_map(move |extended| Geometry::new(bits, 4, extended))
        })
    }

    #[test]
    fn only_the_specified_geometries_exist() {
        assert_eq!(all().filter(|g| !g.extended_l2()).count(), 13);
        assert_eq!(all().filter(Geometry::extended_l2).count(), 8);
        assert!(Geometry::new(16, 7, false).is_none());
    }

    #[test]
    fn a_range_is_cut_to_subclusters() {
        let g = Geometry::new(16, 4, true).unwrap();
        assert_eq!(g.parts_in(&(100..9000), 0b1_0110), [2048..6144, 8192..9000]);
        assert!(g.parts_in(&(100..2048), 0b110).is_empty());
        let plain = Geometry::new(16, 4, false).unwrap();
        assert_eq!(plain.parts_in(&(100..9000), 1).len(), 1);
    }

    #[test]
    fn the_worked_example_holds() {
        let g = Geometry::new(16, 4, true).unwrap();
        let cluster = g.guest_cluster(GuestOffset(0x1234_5678));
        assert_eq!((g.l1_index(cluster), g.l2_index(cluster)), (1, 0x234));
        assert_eq!(g.l2_coverage_bytes(), 256 << 20);
        assert_eq!(g.subclusters_touched(&(0x5678..0x5679)), 1 << 10);
    }

    #[test]
    fn subcluster_masks_agree_with_counting_bytes() {
        for g in [
            Geometry::new(14, 4, true).unwrap(),
            Geometry::new(9, 4, false).unwrap(),
        ] {
            let sub = g.subcluster_bytes();
            let edges: Vec<u64> = (0..=u64::from(g.subclusters()))
                .flat_map(|i| [i * sub, (i * sub).saturating_sub(1), i * sub + 1])
                .filter(|&e| e <= g.cluster_bytes())
                .collect();
            for &start in &edges {
                for &end in edges.iter().filter(|&&end| end >= start) {
                    let (mut touched, mut within) = (0, 0);
                    for i in 0..u64::from(g.subclusters()) {
                        let (first, last) = (i * sub, (i + 1) * sub);
                        if start < last && end > first && start < end {
                            touched |= 1 << i;
                        }
                        if start <= first && last <= end {
                            within |= 1 << i;
                        }
                    }
                    assert_eq!(
                        g.subclusters_touched(&(start..end)),
                        touched,
                        "{start}..{end}"
                    );
                    assert_eq!(
                        g.subclusters_within(&(start..end)),
                        within,
                        "{start}..{end}"
                    );
                }
            }
        }
    }
}
