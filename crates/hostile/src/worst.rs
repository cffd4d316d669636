//! Images of 1 MiB that make as much work, and take as much memory, as their author can think of.

use cowslip::qcow2::compress::compress;
use cowslip::qcow2::header::CompressionType;

/// Their length.
pub const BYTES: usize = 1 << 20;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const BITMAPS: u32 = 0x2385_2875;

/// An image and what is wrong with it.
#[derive(Clone, Debug)]
pub struct Worst {
    /// For messages.
    pub name: &'static str,
    /// All of it.
    pub bytes: Vec<u8>,
}

/// A version 3 header and nothing else: fields are set as they come.
struct Builder {
    bytes: Vec<u8>,
    cluster: u64,
}

impl Builder {
    /// L1 table, refcount table and first refcount block in clusters 1 to 3, where they fit.
    fn new(cluster_bits: u32) -> Builder {
        let cluster = 1 << cluster_bits;
        let mut builder = Builder {
            bytes: vec![0; BYTES],
            cluster,
        };
        builder.bytes[..4].copy_from_slice(b"QFI\xfb");
        builder.half(4, 3);
        builder.half(20, cluster_bits);
        builder.refcounts(2 * cluster, 1);
        builder.half(96, 4);
        builder.half(100, 104);
        builder.word(2 * cluster, 3 * cluster);
        builder
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        let at = at as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn half(&mut self, at: u64, value: u32) {
        self.put(at, &value.to_be_bytes());
    }

    fn word(&mut self, at: u64, value: u64) {
        self.put(at, &value.to_be_bytes());
    }

    fn refcounts(&mut self, offset: u64, clusters: u32) {
        self.word(48, offset);
        self.half(56, clusters);
    }

    /// The L1 table, and a disk that needs all of it. Extended entries count twice.
    fn l1(&mut self, offset: u64, entries: u64) {
        let entry_bytes = if self.bytes[79] & 16 != 0 { 16 } else { 8 };
        let coverage = self.cluster / entry_bytes * self.cluster;
        self.word(24, entries * coverage);
        self.half(36, entries as u32);
        self.word(40, offset);
    }

    /// Words from `start` to the end of the file, or until `of` has no more.
    fn fill(&mut self, start: u64, of: impl Iterator<Item = u64>) {
        let places = (start..BYTES as u64).step_by(8);
        places.zip(of).for_each(|(at, word)| self.word(at, word));
    }

    fn bitmaps(&mut self, count: u32, directory: u64, bytes: u64) {
        self.word(88, 1);
        self.half(104, BITMAPS);
        self.half(108, 24);
        self.half(112, count);
        self.word(120, bytes);
        self.word(128, directory);
    }

    fn named(self, name: &'static str) -> Worst {
        let bytes = self.bytes;
        Worst { name, bytes }
    }
}

/// All of them.
pub fn all() -> Vec<Worst> {
    let mut images = vec![
        one_l2_table_everywhere(0, "one L2 table everywhere"),
        // A map has learnt by then to take long steps.
        one_l2_table_everywhere(65_536, "nothing, then one L2 table everywhere"),
        subclusters_everywhere(),
        unaligned_l2_tables(),
        endless_bitmaps(),
        bitmaps_with_one_table(),
        snapshots_with_one_l1_table(),
        snapshots_of_nothing(),
        long_named_snapshots(),
        counts_beyond_the_end(0xff, "counts beyond the end, all 1"),
        counts_beyond_the_end(0x55, "counts beyond the end, every second 1"),
        one_refcount_block_everywhere(),
        nothing_on_a_huge_disk(),
        empty_extensions(),
    ];
    images.extend([CompressionType::Deflate, CompressionType::Zstd].map(compressed_zeroes));
    images
}

/// Gigabytes of the smallest clusters, every second one mapped, through a single table; nothing
/// before the L1 entry `first`.
fn one_l2_table_everywhere(first: u64, name: &'static str) -> Worst {
    let mut image = Builder::new(9);
    let l1 = 8 * 512;
    image.l1(l1, (BYTES as u64 - l1) / 8);
    image.fill(l1 + first * 8, std::iter::repeat(4 * 512));
    image.fill(
        4 * 512,
        (0..64).map(|index| (index % 2) * ((5 * 512) | COPIED)),
    );
    image.named(name)
}

/// The same with subclusters, every second one allocated.
fn subclusters_everywhere() -> Worst {
    let mut image = Builder::new(14);
    let cluster = image.cluster;
    image.word(72, 16);
    let l1 = 8 * cluster;
    image.l1(l1, (BYTES as u64 - l1) / 8);
    image.fill(l1, std::iter::repeat(4 * cluster));
    let entry = [(5 * cluster) | COPIED, 0x5555_5555];
    image.fill(4 * cluster, (0..2048).map(|index| entry[index % 2]));
    image.named("subclusters everywhere")
}

/// As many tables as there are sectors, each reaching into the others.
fn unaligned_l2_tables() -> Worst {
    let mut image = Builder::new(16);
    let l1 = image.cluster;
    image.l1(l1, (BYTES as u64 - l1) / 8);
    image.refcounts(15 * image.cluster, 1);
    image.fill(l1, (0..).map(|index| index * 512 % BYTES as u64));
    image.named("unaligned L2 tables")
}

fn endless_bitmaps() -> Worst {
    let mut image = Builder::new(9);
    image.l1(512, 1);
    image.bitmaps(u32::MAX, 8 * 512, 1 << 60);
    image.named("endless bitmaps")
}

/// Thousands of bitmaps with one table, as long as the largest disk allows, that refers to all of
/// the file.
fn bitmaps_with_one_table() -> Worst {
    let mut image = Builder::new(9);
    let (table, directory) = (8 * 512, BYTES as u64 / 2);
    let l1_entries = (BYTES as u64 - table) / 8;
    image.l1(table, l1_entries);
    let disk = l1_entries * 64 * 512;
    let table_entries = (disk / 512).div_ceil(8).div_ceil(512);
    let count = directory / 32;
    for at in (0..count).map(|index| directory + index * 32) {
        image.word(at, table);
        image.half(at + 8, table_entries as u32);
        image.put(at + 16, &[1, 9, 0, 1]);
        image.put(at + 24, b"b");
    }
    image.fill(table, (0..table_entries).map(|index| index % 2048 * 512));
    image.bitmaps(count as u32, directory, count * 32);
    image.named("bitmaps with one table")
}

fn snapshots(image: &mut Builder, table: u64, count: u32) {
    image.half(60, count);
    image.word(64, table);
}

fn snapshots_with_one_l1_table() -> Worst {
    let mut image = Builder::new(9);
    let (l1, table) = (8 * 512, BYTES as u64 / 2);
    let l1_entries = (table - l1) / 8;
    image.l1(l1, l1_entries);
    let count = (table / 56).min(65536);
    for at in (0..count).map(|index| table + index * 56) {
        image.word(at, l1);
        image.half(at + 8, l1_entries as u32);
        image.half(at + 36, 16);
    }
    image.fill(
        l1,
        (0..l1_entries).map(|index| 4 * 512 + index % 1024 * 512),
    );
    snapshots(&mut image, table, count as u32);
    image.named("snapshots with one L1 table")
}

/// A repair gives each of them an L1 table of its own.
fn snapshots_of_nothing() -> Worst {
    let mut image = Builder::new(9);
    let table = BYTES as u64 / 2;
    let l1_entries = (table - 8 * 512) / 8;
    image.l1(8 * 512, l1_entries);
    let count = table / 56;
    for at in (0..count).map(|index| table + index * 56) {
        image.word(at, 8 * 512);
        image.half(at + 8, l1_entries as u32);
        image.half(at + 36, 16);
    }
    snapshots(&mut image, table, count as u32);
    image.named("snapshots of nothing")
}

fn long_named_snapshots() -> Worst {
    let mut image = Builder::new(9);
    image.l1(512, 1);
    let (mut at, mut count) = (4096, 0);
    while at + 0x1_8000 < BYTES as u64 {
        image.word(at, 7);
        image.put(at + 12, &[0x7f, 0xff, 0xff, 0xff]);
        image.half(at + 36, 16);
        at = (at + 56 + 0x7fff + 0xffff).next_multiple_of(8);
        count += 1;
    }
    snapshots(&mut image, 4096, count);
    image.named("snapshots with long names")
}

/// Millions of clusters behind the end of the file that are in use, it is said.
fn counts_beyond_the_end(pattern: u8, name: &'static str) -> Worst {
    let mut image = Builder::new(9);
    image.half(96, 0);
    image.l1(512, 1);
    let (table, table_clusters) = (4 * 512, 31);
    let blocks = table / 512 + table_clusters;
    image.refcounts(table, table_clusters as u32);
    let count = (BYTES as u64 / 512 - blocks).min(table_clusters * 64);
    image.fill(table, (0..count).map(|index| (blocks + index) * 512));
    let range = blocks as usize * 512..(blocks + count) as usize * 512;
    image.bytes[range].fill(pattern);
    // All that the file has is in use.
    image.bytes[blocks as usize * 512..][..BYTES / 512 / 8].fill(0xff);
    image.named(name)
}

fn one_refcount_block_everywhere() -> Worst {
    let mut image = Builder::new(9);
    image.l1(512, 1);
    let table = 8 * 512;
    let clusters = (BYTES as u64 - table) / 512;
    image.refcounts(table, clusters as u32);
    image.fill(table, std::iter::repeat(4 * 512));
    image.named("one refcount block everywhere")
}

fn nothing_on_a_huge_disk() -> Worst {
    let mut image = Builder::new(16);
    let l1 = 4 * image.cluster;
    image.l1(l1, (BYTES as u64 - l1) / 8);
    image.named("nothing on a huge disk")
}

/// A first cluster of nothing but empty extensions, each of a type of its own.
fn empty_extensions() -> Worst {
    let mut image = Builder::new(16);
    image.l1(image.cluster, 1);
    for (kind, at) in (1..).zip((104..image.cluster - 16).step_by(8)) {
        image.half(at, kind);
    }
    image.named("empty extensions")
}

/// A sector that becomes a cluster of zeroes, for every cluster of the disk.
fn compressed_zeroes(kind: CompressionType) -> Worst {
    let mut image = Builder::new(16);
    let cluster = image.cluster;
    if kind == CompressionType::Zstd {
        image.word(72, 8);
        image.half(100, 112);
        image.bytes[104] = 1;
    }
    image.l1(cluster, 1);
    let stream = compress(kind, &vec![0; cluster as usize]).unwrap();
    image.put(5 * cluster, &stream);
    image.word(cluster, (4 * cluster) | COPIED);
    // As long as an entry can say.
    let entry = COMPRESSED | 0xff << 54 | (5 * cluster);
    image.fill(4 * cluster, std::iter::repeat_n(entry, 8192));
    match kind {
        CompressionType::Deflate => image.named("compressed zeroes, deflate"),
        CompressionType::Zstd => image.named("compressed zeroes, zstd"),
    }
}
