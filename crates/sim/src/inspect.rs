//! A second opinion on qcow2 files: a small reader of its own that shares no code with the engine.
//!
//! It judges what a crash must never leave behind: an entry that points outside of the file or at
//! metadata, two references to one cluster, a reference that the counts do not cover, a COPIED bit
//! that the count contradicts, reserved bits, impossible subclusters. Leaks are counted, not judged.
//! Under the dirty bit counts and COPIED bits are not judged. What snapshots reach must stay as it
//! is, byte by byte. Bitmaps are read, and their clusters counted (`bitmaps.rs`).

mod bitmaps;

use std::collections::BTreeMap;

use crate::bitmaps::Reading;
use crate::disk::content::Content;

/// What a look at a file tells.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// What must not be.
    pub corruptions: Vec<String>,
    /// COPIED bits that contradict the counts; under the dirty bit they are not looked at.
    pub flags: Vec<String>,
    /// Counts that are too low, under the dirty bit.
    pub low_counts: Vec<String>,
    /// Clusters that are counted more often than referenced.
    pub leaks: u64,
    /// The dirty bit is set.
    pub dirty: bool,
    /// The corrupt bit is set.
    pub corrupt_bit: bool,
    /// The autoclear bits.
    pub autoclear: u64,
    /// A fingerprint of all that snapshots reach.
    pub snapshots: u64,
    /// The bitmaps, if they are consistent.
    pub bitmaps: Vec<Reading>,
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
const DIRTY: u64 = 1;
const CORRUPT: u64 = 2;
const DATA_FILE: u64 = 4;
const EXTENDED: u64 = 16;
/// Findings that are kept; the first ones tell the story.
const CORRUPTIONS_MAX: usize = 20;

struct Reader<'a> {
    content: &'a Content,
    cluster_bits: u32,
    version: u32,
    size: u64,
    l1: (u64, u32),
    refcounts: (u64, u32),
    refcount_order: u32,
    data_file: bool,
    data_file_raw: bool,
    extended: bool,
    found: Findings,
    /// What references each cluster, by index.
    references: BTreeMap<u64, Vec<String>>,
    /// Entries with COPIED set or clear: where, cluster, set.
    copied: Vec<(String, u64, bool)>,
}

fn number(content: &Content, offset: u64, bytes: usize) -> u64 {
    content.number(offset, bytes)
}

/// Looks at a qcow2 file.
pub fn inspect(content: &Content) -> Findings {
    let field = |offset, bytes| number(content, offset, bytes);
    let version = field(4, 4) as u32;
    let refuse = |what: String| Findings {
        corruptions: vec![what],
        ..Findings::default()
    };
    if field(0, 4) != 0x5146_49fb || !(2..=3).contains(&version) {
        return refuse("no qcow2 header".to_string());
    }
    let cluster_bits = field(20, 4) as u32;
    if !(9..=21).contains(&cluster_bits) {
        return refuse(format!("cluster bits {cluster_bits}"));
    }
    let incompatible = if version == 3 { field(72, 8) } else { 0 };
    let autoclear = if version == 3 { field(88, 8) } else { 0 };
    let mut reader = Reader {
        content,
        cluster_bits,
        version,
        size: field(24, 8),
        l1: (field(40, 8), field(36, 4) as u32),
        refcounts: (field(48, 8), field(56, 4) as u32),
        refcount_order: if version == 3 { field(96, 4) as u32 } else { 4 },
        data_file: incompatible & DATA_FILE != 0,
        data_file_raw: autoclear & 2 != 0,
        extended: incompatible & EXTENDED != 0,
        found: Findings {
            dirty: incompatible & DIRTY != 0,
            corrupt_bit: incompatible & CORRUPT != 0,
            autoclear,
            ..Findings::default()
        },
        references: BTreeMap::new(),
        copied: Vec::new(),
    };
    reader.metadata();
    reader.mapping("", reader.l1);
    reader.snapshots();
    reader.bitmaps();
    reader.judge();
    reader.found
}

impl Reader<'_> {
    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn corrupt(&mut self, what: String) {
        if self.found.corruptions.len() < CORRUPTIONS_MAX {
            self.found.corruptions.push(what);
        }
    }

    /// Notes a reference to `len` bytes; false if they cannot be read.
    fn reference(&mut self, what: &str, offset: u64, len: u64) -> bool {
        let cluster = self.cluster();
        if !offset.is_multiple_of(cluster) {
            self.corrupt(format!("{what} at {offset:#x}, which starts no cluster"));
            return false;
        }
        let end = self.content.len().next_multiple_of(cluster);
        if offset + len > end {
            self.corrupt(format!(
                "{what} at {offset:#x}+{len:#x}, beyond the end {:#x}",
                self.content.len()
            ));
            return false;
        }
        for index in offset / cluster..(offset + len).div_ceil(cluster) {
            let users = self.references.entry(index).or_default();
            users.push(what.to_string());
        }
        true
    }

    fn metadata(&mut self) {
        let cluster = self.cluster();
        self.reference("the header", 0, cluster);
        let (l1, entries) = self.l1;
        if entries > 0 {
            self.reference("the L1 table", l1, u64::from(entries) * 8);
        }
        let (table, clusters) = self.refcounts;
        let len = u64::from(clusters) * cluster;
        if !self.reference("the refcount table", table, len) {
            return;
        }
        for index in 0..len / 8 {
            let entry = self.content.number(table + index * 8, 8);
            if entry & 0x1ff != 0 {
                self.corrupt(format!("refcount table entry {index} is {entry:#x}"));
            } else if entry != 0 {
                self.reference(&format!("refcount block {index}"), entry, cluster);
            }
        }
    }

    fn count(&self, cluster_index: u64) -> u64 {
        let bits = 1u64 << self.refcount_order;
        let per_block = self.cluster() * 8 / bits;
        let slot = cluster_index / per_block;
        if slot >= u64::from(self.refcounts.1) * self.cluster() / 8 {
            return 0;
        }
        let block = self.content.number(self.refcounts.0 + slot * 8, 8) & !0x1ff;
        if block == 0 {
            return 0;
        }
        let bit = cluster_index % per_block * bits;
        if bits >= 8 {
            return self.content.number(block + bit / 8, (bits / 8) as usize);
        }
        let byte = self.content.number(block + bit / 8, 1);
        byte >> (bit % 8) & ((1 << bits) - 1)
    }

    /// What the snapshots reach, and a fingerprint of it.
    fn snapshots(&mut self) {
        let (count, table) = (self.content.number(60, 4), self.content.number(64, 8));
        let mut at = table;
        for index in 0..count {
            let field = |offset, bytes| self.content.number(at + offset, bytes);
            let l1 = (field(0, 8), field(8, 4) as u32);
            let names = field(12, 2) + field(14, 2);
            at = (at + 40 + field(36, 4) + names).next_multiple_of(8);
            let who = format!("snapshot {index}: ");
            self.reference(&format!("{who}its L1 table"), l1.0, u64::from(l1.1) * 8);
            self.mapping(&who, l1);
        }
        if count > 0 {
            self.reference("the snapshot table", table, at - table);
            let bytes = self.content.bytes(table, (at - table) as usize);
            self.remember(&bytes);
        }
    }

    /// Adds bytes that a snapshot reaches to the fingerprint.
    fn remember(&mut self, bytes: &[u8]) {
        let sum = &mut self.found.snapshots;
        for chunk in bytes.chunks(8) {
            let value = chunk
                .iter()
                .fold(0, |all, byte| all << 8 | u64::from(*byte));
            *sum = (sum.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }

    /// The tables and clusters of an L1 table; `who` has it, nobody in particular the active state.
    fn mapping(&mut self, who: &str, (l1, entries): (u64, u32)) {
        let entry_bytes = if self.extended { 16 } else { 8 };
        let per_table = self.cluster() / entry_bytes;
        let needed = self.size.div_ceil(self.cluster() * per_table);
        if who.is_empty() && needed > u64::from(entries) {
            self.corrupt(format!("{entries} L1 entries, and the disk needs {needed}"));
        }
        for index in 0..u64::from(entries) {
            let entry = self.content.number(l1 + index * 8, 8);
            if entry == 0 {
                continue;
            }
            if entry & !(OFFSET | COPIED) != 0 {
                self.corrupt(format!("reserved bits in L1 entry {index}: {entry:#x}"));
            }
            let table = entry & OFFSET;
            if table == 0 {
                continue;
            }
            let what = format!("{who}L2 table {index}");
            if !self.reference(&what, table, self.cluster()) {
                continue;
            }
            if who.is_empty() {
                let cluster = table >> self.cluster_bits;
                self.copied.push((what, cluster, entry & COPIED != 0));
            } else {
                let bytes = self.content.bytes(table, self.cluster() as usize);
                self.remember(&bytes);
            }
            for slot in 0..per_table {
                let place = table + slot * entry_bytes;
                self.entry(who, index * per_table + slot, place);
            }
        }
    }

    fn entry(&mut self, who: &str, guest_cluster: u64, at: u64) {
        let entry = self.content.number(at, 8);
        let bitmap = if self.extended {
            self.content.number(at + 8, 8)
        } else {
            0
        };
        if entry == 0 && bitmap == 0 {
            return;
        }
        let guest = guest_cluster << self.cluster_bits;
        let what = format!("{who}guest cluster {guest:#x}");
        if entry & COMPRESSED != 0 {
            return self.compressed(who, &format!("guest cluster {guest:#x}"), (entry, bitmap));
        }
        let zero = if self.version == 3 && !self.extended {
            ZERO
        } else {
            0
        };
        if entry & !(OFFSET | COPIED | zero) != 0 {
            self.corrupt(format!("reserved bits in the entry of {what}: {entry:#x}"));
        }
        let (allocated, zeroes) = (bitmap as u32, (bitmap >> 32) as u32);
        if allocated & zeroes != 0 {
            self.corrupt(format!(
                "{what}: subclusters {bitmap:#x} both allocated and zero"
            ));
        }
        let offset = entry & OFFSET;
        if self.data_file {
            let has = offset != 0 || entry & COPIED != 0;
            if has && entry & COPIED == 0 {
                self.corrupt(format!("{what} in the data file without COPIED"));
            }
            if has && (self.data_file_raw || guest != 0) && offset != guest {
                self.corrupt(format!("{what} at {offset:#x} of the data file"));
            }
            if !has && allocated != 0 {
                self.corrupt(format!(
                    "{what}: subclusters {bitmap:#x} allocated without space"
                ));
            }
            return;
        }
        if offset == 0 {
            if allocated != 0 {
                self.corrupt(format!(
                    "{what}: subclusters {bitmap:#x} allocated without space"
                ));
            }
            return;
        }
        if !self.reference(&what, offset, self.cluster()) {
            return;
        }
        if who.is_empty() {
            self.copied
                .push((what, offset >> self.cluster_bits, entry & COPIED != 0));
        } else {
            let bytes = self.content.bytes(offset, self.cluster() as usize);
            self.remember(&bytes);
        }
    }

    fn compressed(&mut self, who: &str, what: &str, (entry, bitmap): (u64, u64)) {
        if self.data_file || entry & COPIED != 0 || bitmap != 0 {
            self.corrupt(format!("{what} is compressed: {entry:#x}, {bitmap:#x}"));
        }
        let offset_bits = 62 - (self.cluster_bits - 8);
        let offset = entry & ((1 << offset_bits) - 1);
        let sectors = (entry & !COMPRESSED & !COPIED) >> offset_bits;
        let end = (offset / 512 + 1 + sectors) * 512;
        let first = offset >> self.cluster_bits << self.cluster_bits;
        self.reference(&format!("{who}compressed {what}"), first, end - first);
    }

    fn judge(&mut self) {
        let references = std::mem::take(&mut self.references);
        for (index, users) in &references {
            if !may_share(users) {
                let offset = index << self.cluster_bits;
                self.corrupt(format!("{offset:#x} is used by {}", users.join(" and ")));
            }
            let count = self.count(*index);
            if count < users.len() as u64 {
                let offset = index << self.cluster_bits;
                let what = format!(
                    "{offset:#x} has count {count} and is used by {}",
                    users.join(" and ")
                );
                match self.found.dirty {
                    true if self.found.low_counts.len() < CORRUPTIONS_MAX => {
                        self.found.low_counts.push(what);
                    }
                    true => {}
                    false => self.corrupt(what),
                }
            }
        }
        for (what, cluster, set) in std::mem::take(&mut self.copied) {
            let count = self.count(cluster);
            let wrong = set != (count == 1) && !self.found.dirty;
            if wrong && self.found.flags.len() < CORRUPTIONS_MAX {
                let what = format!("{what} has COPIED {set} and count {count}");
                self.found.flags.push(what);
            }
        }
        let per_block = (self.cluster() * 8) >> self.refcount_order;
        let end = self.content.len().div_ceil(self.cluster());
        for slot in 0..u64::from(self.refcounts.1) * self.cluster() / 8 {
            if self.content.number(self.refcounts.0 + slot * 8, 8) == 0 {
                continue;
            }
            // Like QEMU's check, which does not look beyond the end of the file.
            for index in slot * per_block..((slot + 1) * per_block).min(end) {
                let users = references.get(&index).map_or(0, Vec::len);
                if self.count(index) > users as u64 {
                    self.found.leaks += 1;
                }
            }
        }
    }
}

/// Whether these may use one cluster: compressed clusters, or one thing and snapshots of it.
fn may_share(users: &[String]) -> bool {
    let things = users.iter().map(|user| match user.split_once(": ") {
        Some((_, thing)) => (true, thing),
        None => (false, user.as_str()),
    });
    let mut things: Vec<(bool, &str)> = things.collect();
    if things
        .iter()
        .all(|(_, thing)| thing.starts_with("compressed"))
    {
        return true;
    }
    let own = things.iter().filter(|(snapshot, _)| !snapshot).count();
    things.dedup_by_key(|(_, thing)| *thing);
    own <= 1 && things.len() == 1
}
