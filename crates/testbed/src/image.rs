//! Images whose metadata is in a chosen order, from that of the disk to the worst: every L2 table
//! and every data cluster at a place of its own, as after years of random writes. Nothing but
//! metadata is written, and the image is sound.
//!
//! The order is a permutation that is computed, not stored: the peak memory of a measured process
//! counts from that of the process that starts it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::random::mix;

/// The low bit of the seed of every order.
const SEED: u64 = 0x9E37_79B9_7F4A_7C15;
const COPIED: u64 = 1 << 63;
const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
/// log2 of the bits of a refcount.
const REFCOUNT_ORDER: u32 = 4;
const HEADER_BYTES: u64 = 104;

/// Which clusters of the disk have space, and where.
#[derive(Clone, Copy, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mapping {
    /// All, after the L2 tables, both in order.
    InOrder,
    /// All, and these and the L2 tables shuffled over the whole file. qemu-img takes some 20 us for
    /// each.
    Shuffled,
    /// As in order, but three of ten clusters have changed places among themselves.
    PartlyShuffled,
    /// This many clusters, scattered over the disk, in the order in which random writes allocate
    /// them.
    Scattered(u64),
}

/// An image to be made.
#[derive(Clone, Copy, serde::Deserialize)]
pub struct Design {
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// log2 of the size of a cluster.
    pub cluster_bits: u32,
    /// Extended L2 entries.
    pub extended_l2: bool,
    /// The clusters that are mapped.
    pub mapping: Mapping,
}

/// Where the metadata lies, in clusters; what the mapping takes follows.
struct Layout {
    refcount_table: u64,
    refcount_table_clusters: u64,
    refcount_blocks: u64,
    l1_table: u64,
    body: u64,
    end: u64,
}

/// The mapping, in as little memory as possible.
enum Places {
    /// The L2 tables come first in the numbering that is shuffled, or is not.
    All { tables: u64, order: Order },
    /// Where each table is, and each mapped cluster in the order of the disk.
    Scattered {
        tables: Vec<u64>,
        clusters: Vec<(u64, u64)>,
        taken: u64,
    },
}

impl Design {
    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn entry_words(&self) -> u64 {
        if self.extended_l2 { 2 } else { 1 }
    }

    fn entries_per_table(&self) -> u64 {
        self.cluster_bytes() / 8 / self.entry_words()
    }

    fn clusters(&self) -> u64 {
        self.disk_bytes.div_ceil(self.cluster_bytes())
    }

    fn tables(&self) -> u64 {
        self.clusters().div_ceil(self.entries_per_table())
    }

    fn layout(&self, body_clusters: u64) -> Layout {
        let counted_by_block = (self.cluster_bytes() * 8) >> REFCOUNT_ORDER;
        let l1_clusters = (self.tables() * 8).div_ceil(self.cluster_bytes());
        let mut blocks = 1_u64;
        loop {
            let table_clusters = (blocks * 8).div_ceil(self.cluster_bytes());
            let body = 1 + table_clusters + blocks + l1_clusters;
            let needed = (body + body_clusters).div_ceil(counted_by_block);
            if needed <= blocks {
                return Layout {
                    refcount_table: 1,
                    refcount_table_clusters: table_clusters,
                    refcount_blocks: 1 + table_clusters,
                    l1_table: 1 + table_clusters + blocks,
                    body,
                    end: body + body_clusters,
                };
            }
            blocks = needed;
        }
    }

    fn places(&self) -> Places {
        let (tables, clusters) = (self.tables(), self.clusters());
        match self.mapping {
            Mapping::InOrder => Places::All {
                tables,
                order: Order::Kept,
            },
            Mapping::Shuffled => Places::All {
                tables,
                order: Order::Shuffled(Shuffle::new(tables + clusters)),
            },
            Mapping::PartlyShuffled => Places::All {
                tables,
                order: Order::Partly(PartialShuffle::new(tables, clusters)),
            },
            Mapping::Scattered(count) => {
                let order = Shuffle::new(clusters);
                let mut table_places = vec![u64::MAX; as_len(tables)];
                let mut places = Vec::new();
                let mut taken = 0;
                for cluster in (0..count.min(clusters)).map(|write| order.place(write)) {
                    let table = &mut table_places[as_len(cluster / self.entries_per_table())];
                    if *table == u64::MAX {
                        *table = taken;
                        taken += 1;
                    }
                    places.push((cluster, taken));
                    taken += 1;
                }
                places.sort_unstable();
                Places::Scattered {
                    tables: table_places,
                    clusters: places,
                    taken,
                }
            }
        }
    }

    /// Makes the image.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        let places = self.places();
        let layout = self.layout(match &places {
            Places::All { tables, .. } => tables + self.clusters(),
            Places::Scattered { taken, .. } => *taken,
        });
        file.set_len(layout.end << self.cluster_bits)?;
        let at = |cluster: u64| cluster << self.cluster_bits;
        self.write_refcounts(&file, &layout)?;
        let mut l1 = Vec::new();
        for table in 0..self.tables() {
            let place = match &places {
                Places::All { order, .. } => order.place(table),
                Places::Scattered { tables, .. } => tables[as_len(table)],
            };
            if place == u64::MAX {
                l1.push(0);
                continue;
            }
            let offset = at(layout.body + place);
            l1.push(offset | COPIED);
            let words = self.table_words(table, &places, layout.body);
            file.write_all_at(&big_endian(&words), offset)?;
        }
        file.write_all_at(&big_endian(&l1), at(layout.l1_table))?;
        file.write_all_at(&self.header(&layout), 0)?;
        file.sync_all()
    }

    fn write_refcounts(&self, file: &File, layout: &Layout) -> io::Result<()> {
        let blocks = layout.refcount_blocks..layout.l1_table;
        let table: Vec<u64> = blocks
            .clone()
            .map(|block| block << self.cluster_bits)
            .collect();
        let table_offset = layout.refcount_table << self.cluster_bits;
        file.write_all_at(&big_endian(&table), table_offset)?;
        let counted_by_block = (self.cluster_bytes() * 8) >> REFCOUNT_ORDER;
        let counts = 1_u16.to_be_bytes().repeat(as_len(counted_by_block));
        let mut left = layout.end;
        for block in blocks {
            let counted = left.min(counted_by_block);
            left -= counted;
            let offset = block << self.cluster_bits;
            file.write_all_at(&counts[..as_len(counted * 2)], offset)?;
        }
        Ok(())
    }

    /// The words of an L2 table.
    fn table_words(&self, table: u64, places: &Places, body: u64) -> Vec<u64> {
        let first = table * self.entries_per_table();
        let range = first..(first + self.entries_per_table()).min(self.clusters());
        let mut words = vec![0; as_len(self.entries_per_table() * self.entry_words())];
        let mut set = |cluster: u64, place: u64| {
            let index = as_len((cluster - first) * self.entry_words());
            words[index] = (body + place) << self.cluster_bits | COPIED;
            if self.extended_l2 {
                // All subclusters are allocated, or some, and the others read as zeroes.
                let allocated = match self.mapping {
                    Mapping::InOrder | Mapping::PartlyShuffled => 0xffff_ffff,
                    Mapping::Shuffled | Mapping::Scattered(_) => mix(cluster) & 0xffff_ffff | 1,
                };
                words[index + 1] = (!allocated & 0xffff_ffff) << 32 | allocated;
            }
        };
        match places {
            Places::All { tables, order } => {
                for cluster in range {
                    set(cluster, order.place(tables + cluster));
                }
            }
            Places::Scattered { clusters, .. } => {
                let start = clusters.partition_point(|&(cluster, _)| cluster < range.start);
                let mapped = clusters[start..].iter();
                for &(cluster, place) in mapped.take_while(|&&(cluster, _)| cluster < range.end) {
                    set(cluster, place);
                }
            }
        }
        words
    }

    /// The header of version 3, as qcow2.rst lays it out.
    fn header(&self, layout: &Layout) -> Vec<u8> {
        let word = |value: u64| (value as u32).to_be_bytes().to_vec();
        let long = |value: u64| value.to_be_bytes().to_vec();
        let incompatible = match self.extended_l2 {
            true => INCOMPATIBLE_EXTENDED_L2,
            false => 0,
        };
        [
            b"QFI\xfb".to_vec(),
            word(3),
            // No backing file.
            long(0),
            word(0),
            word(self.cluster_bits.into()),
            long(self.disk_bytes),
            // Not encrypted.
            word(0),
            word(self.tables()),
            long(layout.l1_table << self.cluster_bits),
            long(layout.refcount_table << self.cluster_bits),
            word(layout.refcount_table_clusters),
            // No snapshots.
            word(0),
            long(0),
            // Incompatible, compatible and autoclear features.
            long(incompatible),
            long(0),
            long(0),
            word(REFCOUNT_ORDER.into()),
            word(HEADER_BYTES),
            // The end of the extensions.
            long(0),
        ]
        .concat()
    }
}

fn big_endian(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn as_len(value: u64) -> usize {
    usize::try_from(value).expect("a 64-bit machine")
}

/// A pseudo-random permutation of `0..len`: a Feistel network over the next power of four, walked
/// until it lands within.
struct Shuffle {
    len: u64,
    half_bits: u32,
}

impl Shuffle {
    fn new(len: u64) -> Shuffle {
        let half_bits = (u64::BITS - len.leading_zeros()).div_ceil(2).max(1);
        Shuffle { len, half_bits }
    }

    fn place(&self, index: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let mut value = index;
        loop {
            for round in 1..5 {
                let (left, right) = (value >> self.half_bits, value & mask);
                let mixed = left ^ mix(right ^ SEED.wrapping_mul(round)) & mask;
                value = right << self.half_bits | mixed;
            }
            if value < self.len {
                return value;
            }
        }
    }
}

/// Of each ten clusters, three have changed places with others of these; which three differs from
/// ten to ten.
struct PartialShuffle {
    /// Below it nothing moves.
    first: u64,
    tens: u64,
    order: Shuffle,
}

impl PartialShuffle {
    /// From the first of three to each of them.
    const STEPS: [u64; 3] = [0, 3, 7];

    fn new(first: u64, len: u64) -> PartialShuffle {
        let tens = len / 10;
        PartialShuffle {
            first,
            tens,
            order: Shuffle::new((tens * 3).max(1)),
        }
    }

    fn place(&self, index: u64) -> u64 {
        let Some(moving) = index.checked_sub(self.first) else {
            return index;
        };
        let (ten, digit) = (moving / 10, moving % 10);
        let step = (digit + 10 - mix(ten) % 10) % 10;
        let rank = Self::STEPS.iter().position(|known| *known == step);
        let Some(rank) = rank.filter(|_| ten < self.tens) else {
            return index;
        };
        let goal = self.order.place(ten * 3 + rank as u64);
        let ten = goal / 3;
        let digit = (mix(ten) + Self::STEPS[as_len(goal % 3)]) % 10;
        self.first + ten * 10 + digit
    }
}

/// In what order tables and clusters lie.
enum Order {
    /// In that of the disk.
    Kept,
    /// In none.
    Shuffled(Shuffle),
    /// In that of the disk, but for some.
    Partly(PartialShuffle),
}

impl Order {
    fn place(&self, index: u64) -> u64 {
        match self {
            Order::Kept => index,
            Order::Shuffled(order) => order.place(index),
            Order::Partly(order) => order.place(index),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_is_a_permutation() {
        for len in [1, 2, 5, 64, 1000] {
            let shuffle = Shuffle::new(len);
            let mut places: Vec<u64> = (0..len).map(|index| shuffle.place(index)).collect();
            places.sort_unstable();
            assert_eq!(places, (0..len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_partial_shuffle_moves_three_of_ten() {
        for len in [0, 9, 10, 1000, 100_003] {
            let shuffle = PartialShuffle::new(7, len);
            let mut places: Vec<u64> = (0..7 + len).map(|index| shuffle.place(index)).collect();
            let moved = (0..).zip(&places).filter(|(index, place)| index != *place);
            let moved = moved.count() as u64;
            // Some stay where they are by chance.
            assert!(moved <= len * 3 / 10, "{moved} of {len}");
            assert!(len < 1000 || moved > len * 29 / 100, "{moved} of {len}");
            places.sort_unstable();
            assert_eq!(places, (0..7 + len).collect::<Vec<_>>());
        }
    }
}
