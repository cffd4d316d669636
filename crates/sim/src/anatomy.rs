//! Names of the ranges of a qcow2 file, for records of runs. Nothing is checked here, and the file,
//! which may be half written, is not trusted.

use std::ops::Range;

use crate::disk::content::Content;
use crate::rng::Rng;

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Tables longer than this are not looked through.
const ENTRIES_MAX: u64 = 1 << 16;

/// The structures of a file.
#[derive(Clone, Copy, Debug)]
struct Shape {
    cluster_bits: u32,
    refcount_order: u32,
    entry_bytes: u64,
    l1: (u64, u64),
    refcounts: (u64, u64),
    data_file: bool,
}

impl Shape {
    fn of(content: &Content) -> Option<Shape> {
        let field = |offset, bytes| content.number(offset, bytes);
        let cluster_bits = field(20, 4) as u32;
        if field(0, 4) != 0x5146_49fb || !(9..=21).contains(&cluster_bits) {
            return None;
        }
        let version3 = field(4, 4) >= 3;
        let incompatible = if version3 { field(72, 8) } else { 0 };
        let table_bytes = field(56, 4) << cluster_bits;
        Some(Shape {
            cluster_bits,
            refcount_order: if version3 { field(96, 4) as u32 } else { 4 },
            entry_bytes: if incompatible & 16 != 0 { 16 } else { 8 },
            l1: (field(40, 8), field(36, 4).min(ENTRIES_MAX)),
            refcounts: (field(48, 8), (table_bytes / 8).min(ENTRIES_MAX)),
            data_file: incompatible & 4 != 0,
        })
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn entries(&self) -> u64 {
        self.cluster() / self.entry_bytes
    }

    /// Where the count of a cluster is: the byte, and the lowest bit in it.
    fn count_at(&self, content: &Content, index: u64) -> Option<(u64, u64)> {
        let per_block = (self.cluster() * 8) >> self.refcount_order;
        let slot = index / per_block;
        let block = content.number(self.refcounts.0 + slot * 8, 8) & !0x1ff;
        if slot >= self.refcounts.1 || block == 0 {
            return None;
        }
        let bit = (index % per_block) << self.refcount_order;
        Some((block + bit / 8, bit % 8))
    }

    fn count_bytes(&self) -> usize {
        (1usize << self.refcount_order).div_ceil(8)
    }

    fn count_mask(&self) -> u64 {
        let bits = 1u64 << self.refcount_order;
        if bits == 64 {
            u64::MAX
        } else {
            (1 << bits) - 1
        }
    }

    fn count(&self, content: &Content, index: u64) -> u64 {
        let Some((at, bit)) = self.count_at(content, index) else {
            return 0;
        };
        content.number(at, self.count_bytes()) >> bit & self.count_mask()
    }

    fn set_count(&self, content: &mut Content, index: u64, count: u64) {
        if let Some((at, bit)) = self.count_at(content, index) {
            let bytes = self.count_bytes();
            let others = content.number(at, bytes) & !(self.count_mask() << bit);
            let value = (others | count << bit).to_be_bytes();
            content.write(at, &value[8 - bytes..]);
        }
    }

    /// L1 index and place of all tables.
    fn tables<'a>(&self, content: &'a Content) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        let (l1, entries) = self.l1;
        let entry = move |index| (index, content.number(l1 + index * 8, 8) & OFFSET);
        (0..entries).map(entry).filter(|(_, table)| *table != 0)
    }
}

/// Names the structures in `range` of an image file, joined; empty if none is known there.
pub fn name(content: &Content, range: &Range<u64>) -> String {
    let Some(shape) = Shape::of(content) else {
        return String::new();
    };
    let meets = |start: u64, len: u64| start < range.end && range.start < start + len;
    let mut names = Vec::new();
    if meets(0, 512) {
        names.push("header".to_string());
    }
    if meets(shape.l1.0, shape.l1.1 * 8) {
        names.push("L1 table".to_string());
    }
    if meets(shape.refcounts.0, shape.refcounts.1 * 8) {
        names.push("refcount table".to_string());
    }
    for index in 0..shape.refcounts.1 {
        let block = content.number(shape.refcounts.0 + index * 8, 8) & !0x1ff;
        if block != 0 && meets(block, shape.cluster()) {
            names.push(format!("refcount block {index}"));
        }
    }
    for (index, table) in shape.tables(content) {
        if meets(table, shape.cluster()) {
            names.push(format!("L2 table {index}"));
        }
        if shape.data_file {
            continue;
        }
        for slot in 0..shape.entries() {
            let entry = content.number(table + slot * shape.entry_bytes, 8);
            let guest = (index * shape.entries() + slot) << shape.cluster_bits;
            let host = entry & OFFSET;
            if entry >> 62 & 1 == 0 && host != 0 && meets(host, shape.cluster()) {
                names.push(format!("guest {guest:#x}"));
            }
        }
    }
    let more = names.len().saturating_sub(4);
    names.truncate(4);
    if more > 0 {
        names.push(format!("{more} more"));
    }
    names.join(", ")
}

/// Returns the structures on the way to a guest byte: each one's name and the bytes of it that
/// matter.
pub fn trail(content: &Content, guest: u64) -> Vec<(String, Range<u64>)> {
    let Some(shape) = Shape::of(content) else {
        return Vec::new();
    };
    let cluster = guest >> shape.cluster_bits;
    let (l1_index, l2_index) = (cluster / shape.entries(), cluster % shape.entries());
    let l1_at = shape.l1.0 + l1_index * 8;
    let l1_entry = content.number(l1_at, 8);
    let mut trail = vec![(
        format!("L1 entry {l1_index} is {l1_entry:#x}"),
        l1_at..l1_at + 8,
    )];
    let table = l1_entry & OFFSET;
    if table == 0 || l1_index >= shape.l1.1 {
        return trail;
    }
    let entry_at = table + l2_index * shape.entry_bytes;
    let entry = content.number(entry_at, 8);
    let bitmap = match shape.entry_bytes {
        16 => format!(", bitmap {:#x}", content.number(entry_at + 8, 8)),
        _ => String::new(),
    };
    trail.push((
        format!("L2 entry {l2_index} of table {l1_index} is {entry:#x}{bitmap}"),
        entry_at..entry_at + shape.entry_bytes,
    ));
    let host = entry & OFFSET;
    if entry >> 62 & 1 == 0 && host != 0 && !shape.data_file {
        trail.push((
            format!("host cluster {host:#x}"),
            host..host + shape.cluster(),
        ));
        trail.extend(count_of(&shape, content, host));
    }
    trail
}

/// Leaves the image as a program that keeps counts lazily leaves it when it dies: the dirty bit is
/// set, and some counts are wrong.
pub fn soil(content: &mut Content, rng: &mut Rng) {
    let bits = content.number(72, 8) | 1;
    content.write(72, &bits.to_be_bytes());
    let shape = Shape::of(content).expect("it is an image");
    let clusters = content.len() / shape.cluster();
    for _ in 0..rng.below(12) {
        let index = rng.below(clusters.max(1));
        let wrong = rng.below(2);
        shape.set_count(content, index, wrong);
    }
    for (_, table) in shape.tables(content).collect::<Vec<_>>() {
        let places = (0..shape.entries()).map(|index| table + index * shape.entry_bytes);
        let ours: Vec<u64> = places
            .filter(|at| content.number(*at, 8) >> 62 == 2)
            .collect();
        let changed = if ours.is_empty() || shape.data_file {
            0
        } else {
            rng.pick(&[0, 1, 1, 3])
        };
        for _ in 0..changed {
            let at = rng.pick(&ours);
            let entry = content.number(at, 8);
            content.write(at, &(entry & !(1 << 63)).to_be_bytes());
        }
    }
}

/// Counts every free cluster that has a count, so that nobody can take it, and extends the file,
/// but for some clusters, as far as the refcount table reaches. Tables that reach further than a
/// file of 64 GiB are left alone.
pub fn cram(content: &mut Content, spare: u64) {
    let shape = Shape::of(content).expect("it is an image");
    let per_block = (shape.cluster() * 8) >> shape.refcount_order;
    let clusters = shape.refcounts.1 * per_block;
    if clusters << shape.cluster_bits > 64 << 30 {
        return;
    }
    for slot in 0..shape.refcounts.1 {
        if content.number(shape.refcounts.0 + slot * 8, 8) == 0 {
            continue;
        }
        for index in slot * per_block..(slot + 1) * per_block {
            if shape.count(content, index) == 0 {
                shape.set_count(content, index, 1);
            }
        }
    }
    let end = (clusters - spare) << shape.cluster_bits;
    content.extend_to(end);
}

/// The count of a host cluster.
fn count_of(shape: &Shape, content: &Content, host: u64) -> Option<(String, Range<u64>)> {
    let index = host >> shape.cluster_bits;
    let (at, _) = shape.count_at(content, index)?;
    let count = shape.count(content, index);
    let what = format!("the count of {host:#x} is {count}");
    Some((what, at..at + shape.count_bytes() as u64))
}
