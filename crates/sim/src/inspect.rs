//! A second opinion on qcow2 files: a small reader of its own that shares no code with the engine.
//!
//! It looks for states that a crash must never leave behind: an entry that points outside of the
//! file or at metadata, two references to one cluster, a reference that the counts do not cover, a
//! COPIED bit that the count contradicts, reserved bits, impossible subclusters. Leaks are counted
//! and are no corruption, nor are counts and COPIED bits under the dirty bit. What snapshots reach
//! must stay as it is, byte by byte. Bitmaps are read, and their clusters counted (`bitmaps.rs`).

mod bitmaps;

use std::fmt;

use crate::bitmaps::Reading;
use crate::disk::content::Content;

/// Findings of a look at a file.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// States that must not be.
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
    /// A fingerprint of all that snapshots reach, wherever it lies.
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
/// Header extensions.
const CRYPTO_HEADER: u64 = 0x0537_be77;
const BITMAPS: u64 = 0x2385_2875;
/// Number of findings that are kept; the first ones suffice.
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
    /// The references to clusters, by index.
    references: Vec<(u64, User)>,
    /// Entries with COPIED set or clear: where, cluster, set.
    copied: Vec<(User, u64, bool)>,
}

fn number(content: &Content, offset: u64, bytes: usize) -> u64 {
    content.number(offset, bytes)
}

/// The data of a header extension: where it is, and its length.
fn extension(content: &Content, wanted: u64) -> Option<(u64, u64)> {
    if content.number(4, 4) < 3 {
        // Without a length of the header; extensions begin where version 2 ends.
        return extension_from(content, 72, wanted);
    }
    extension_from(content, content.number(100, 4), wanted)
}

fn extension_from(content: &Content, start: u64, wanted: u64) -> Option<(u64, u64)> {
    let (mut at, cluster) = (start, 1 << content.number(20, 4));
    while at + 8 <= cluster {
        let (kind, len) = (content.number(at, 4), content.number(at + 4, 4));
        match kind {
            0 => return None,
            _ if kind == wanted => return Some((at + 8, len)),
            _ => at = (at + 8 + len).next_multiple_of(8),
        }
    }
    None
}

/// Whether a file is a qcow2 image.
pub fn is_image(content: &Content) -> bool {
    content.number(0, 4) == 0x5146_49fb
}

/// Where the keys of an encrypted image are, and their length.
pub fn crypto_header(content: &Content) -> Option<(u64, u64)> {
    let (at, _) = extension(content, CRYPTO_HEADER)?;
    Some((content.number(at, 8), content.number(at + 8, 8)))
}

/// The IDs of the snapshots, in the table's order.
pub fn snapshot_ids(content: &Content) -> Vec<String> {
    let (count, mut at) = (content.number(60, 4), content.number(64, 8));
    let mut ids = Vec::new();
    for _ in 0..count {
        let field = |offset, bytes| content.number(at + offset, bytes);
        let (id, name, extra) = (field(12, 2), field(14, 2), field(36, 4));
        let id = content.bytes(at + 40 + extra, id as usize);
        ids.push(String::from_utf8_lossy(&id).into_owned());
        at =
            (at + 40 + extra + ids.last().map_or(0, String::len) as u64 + name).next_multiple_of(8);
    }
    ids
}

/// The structures that guest data must never land in, by the bytes of their first clusters: the
/// header, tables of the active state, counts, the tables of snapshots and bitmaps, the keys.
pub fn metadata(content: &Content) -> Vec<(String, std::ops::Range<u64>)> {
    let field = |offset, bytes| content.number(offset, bytes);
    let cluster = 1 << field(20, 4);
    let mut found = vec![("the header".to_string(), 0..cluster)];
    let mut add = |what: String, at: u64, len: u64| found.push((what, at..at + len));
    add("the L1 table".to_string(), field(40, 8), field(36, 4) * 8);
    let (table, clusters) = (field(48, 8), field(56, 4));
    add("the refcount table".to_string(), table, clusters * cluster);
    for index in 0..clusters * cluster / 8 {
        match field(table + index * 8, 8) & !0x1ff {
            0 => {}
            block => add(format!("refcount block {index}"), block, cluster),
        }
    }
    for index in 0..field(36, 4) {
        match field(field(40, 8) + index * 8, 8) & OFFSET {
            0 => {}
            l2 => add(format!("L2 table {index}"), l2, cluster),
        }
    }
    if field(60, 4) > 0 {
        add("the snapshot table".to_string(), field(64, 8), 1);
    }
    if let Some((at, len)) = crypto_header(content) {
        add("the encryption header".to_string(), at, len);
    }
    let consistent = field(4, 4) >= 3 && field(88, 8) & 1 != 0;
    if let (true, Some((at, _))) = (consistent, extension(content, BITMAPS)) {
        let (len, directory) = (field(at + 8, 8), field(at + 16, 8));
        add("the bitmap directory".to_string(), directory, len);
    }
    found
}

/// The use of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thing {
    Header,
    Keys,
    L1,
    RefcountTable,
    RefcountBlock(u64),
    Table(u64),
    Guest(u64),
    Compressed(u64),
    SnapshotTable,
    BitmapDirectory,
    BitmapTable(u64),
    Bits(u64),
}

/// A use of a cluster: by the active state, or by the snapshot of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct User(Option<u64>, Thing);

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(snapshot) = self.0 {
            write!(f, "snapshot {snapshot}: ")?;
        }
        match self.1 {
            Thing::Header => f.write_str("the header"),
            Thing::Keys => f.write_str("the encryption header"),
            Thing::L1 => f.write_str("the L1 table"),
            Thing::RefcountTable => f.write_str("the refcount table"),
            Thing::RefcountBlock(index) => write!(f, "refcount block {index}"),
            Thing::Table(index) => write!(f, "L2 table {index}"),
            Thing::Guest(guest) => write!(f, "guest cluster {guest:#x}"),
            Thing::Compressed(guest) => write!(f, "compressed guest cluster {guest:#x}"),
            Thing::SnapshotTable => f.write_str("the snapshot table"),
            Thing::BitmapDirectory => f.write_str("the bitmap directory"),
            Thing::BitmapTable(number) => write!(f, "the table of bitmap {number}"),
            Thing::Bits(number) => write!(f, "bits of bitmap {number}"),
        }
    }
}

fn listed(users: &[User]) -> String {
    let users: Vec<String> = users.iter().map(User::to_string).collect();
    users.join(" and ")
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
        references: Vec::new(),
        copied: Vec::new(),
    };
    reader.metadata();
    reader.keys();
    reader.mapping(None, reader.l1);
    reader.snapshots();
    reader.bitmaps();
    reader.check();
    reader.found
}

impl Reader<'_> {
    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The entries of a table. It may claim to be longer than the file, where it reads as zeroes.
    fn table(&self, offset: u64, len: u64) -> Vec<u64> {
        let most = self.content.len().next_multiple_of(self.cluster());
        self.content.numbers(offset, len.min(most))
    }

    fn corrupt(&mut self, what: String) {
        if self.found.corruptions.len() < CORRUPTIONS_MAX {
            self.found.corruptions.push(what);
        }
    }

    /// Notes a reference to `len` bytes; false if they cannot be read.
    fn reference(&mut self, what: User, offset: u64, len: u64) -> bool {
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
            self.references.push((index, what));
        }
        true
    }

    fn metadata(&mut self) {
        let cluster = self.cluster();
        self.reference(User(None, Thing::Header), 0, cluster);
        let (l1, entries) = self.l1;
        if entries > 0 {
            self.reference(User(None, Thing::L1), l1, u64::from(entries) * 8);
        }
        let (table, clusters) = self.refcounts;
        let len = u64::from(clusters) * cluster;
        if !self.reference(User(None, Thing::RefcountTable), table, len) {
            return;
        }
        for (index, entry) in (0..).zip(self.table(table, len)) {
            if entry & 0x1ff != 0 {
                self.corrupt(format!("refcount table entry {index} is {entry:#x}"));
            } else if entry != 0 {
                self.reference(User(None, Thing::RefcountBlock(index)), entry, cluster);
            }
        }
    }

    /// The LUKS volume that holds the keys of the image.
    fn keys(&mut self) {
        match (self.content.number(32, 4), crypto_header(self.content)) {
            (2, None) => self.corrupt("an encrypted image has no keys".to_string()),
            (_, Some((at, len))) => {
                self.reference(User(None, Thing::Keys), at, len);
            }
            (_, None) => {}
        }
    }

    /// Collects the clusters that the snapshots reach, and a fingerprint of them.
    fn snapshots(&mut self) {
        let (count, table) = (self.content.number(60, 4), self.content.number(64, 8));
        let mut at = table;
        let mut starts = Vec::new();
        for index in 0..count {
            starts.push((at - table) as usize);
            let field = |offset, bytes| self.content.number(at + offset, bytes);
            let l1 = (field(0, 8), field(8, 4) as u32);
            let names = field(12, 2) + field(14, 2);
            at = (at + 40 + field(36, 4) + names).next_multiple_of(8);
            let who = Some(index);
            self.reference(User(who, Thing::L1), l1.0, u64::from(l1.1) * 8);
            self.mapping(who, l1);
        }
        if count > 0 {
            self.reference(User(None, Thing::SnapshotTable), table, at - table);
            let mut bytes = self.content.bytes(table, (at - table) as usize).to_vec();
            // Compactions move L1 tables.
            for start in starts {
                bytes[start..start + 8].fill(0);
            }
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

    /// The bytes of an entry without its place, which compactions change.
    fn without_place(&self, words: &[u64]) -> Vec<u8> {
        let mask = match words[0] & COMPRESSED {
            0 => OFFSET,
            _ => (1 << (62 - (self.cluster_bits - 8))) - 1,
        };
        let has_place = u64::from(words[0] & mask != 0);
        let first = [words[0] & !mask | has_place];
        let words = first.iter().chain(&words[1..]);
        words.flat_map(|word| word.to_be_bytes()).collect()
    }

    /// Visits the tables and clusters of an L1 table; `who` is its snapshot, or none for the active
    /// state.
    fn mapping(&mut self, who: Option<u64>, (l1, entries): (u64, u32)) {
        let entry_bytes = if self.extended { 16 } else { 8 };
        let per_table = self.cluster() / entry_bytes;
        let needed = self.size.div_ceil(self.cluster() * per_table);
        if who.is_none() && needed > u64::from(entries) {
            self.corrupt(format!("{entries} L1 entries, and the disk needs {needed}"));
        }
        for (index, entry) in (0..).zip(self.table(l1, u64::from(entries) * 8)) {
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
            let what = User(who, Thing::Table(index));
            if !self.reference(what, table, self.cluster()) {
                continue;
            }
            if who.is_none() {
                let cluster = table >> self.cluster_bits;
                self.copied.push((what, cluster, entry & COPIED != 0));
            } else {
                let words = self.content.numbers(table, self.cluster());
                let words = words.chunks(entry_bytes as usize / 8);
                let words: Vec<u8> = words.flat_map(|words| self.without_place(words)).collect();
                self.remember(&words);
            }
            let words = self.content.numbers(table, self.cluster());
            for (slot, words) in (0..).zip(words.chunks(entry_bytes as usize / 8)) {
                let bitmap = words.get(1).copied().unwrap_or(0);
                if words[0] != 0 || bitmap != 0 {
                    self.entry(who, index * per_table + slot, (words[0], bitmap));
                }
            }
        }
    }

    fn entry(&mut self, who: Option<u64>, guest_cluster: u64, (entry, bitmap): (u64, u64)) {
        let guest = guest_cluster << self.cluster_bits;
        let what = User(who, Thing::Guest(guest));
        if entry & COMPRESSED != 0 {
            let what = User(who, Thing::Compressed(guest));
            return self.compressed(what, (entry, bitmap));
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
        if !self.reference(what, offset, self.cluster()) {
            return;
        }
        if who.is_none() {
            self.copied
                .push((what, offset >> self.cluster_bits, entry & COPIED != 0));
        } else {
            let bytes = self.content.bytes(offset, self.cluster() as usize);
            self.remember(&bytes);
        }
    }

    fn compressed(&mut self, what: User, (entry, bitmap): (u64, u64)) {
        if self.data_file || entry & COPIED != 0 || bitmap != 0 {
            self.corrupt(format!("{what}: {entry:#x}, {bitmap:#x}"));
        }
        let offset_bits = 62 - (self.cluster_bits - 8);
        let offset = entry & ((1 << offset_bits) - 1);
        let sectors = (entry & !COMPRESSED & !COPIED) >> offset_bits;
        let end = (offset / 512 + 1 + sectors) * 512;
        let first = offset >> self.cluster_bits << self.cluster_bits;
        self.reference(what, first, end - first);
    }

    fn check(&mut self) {
        let counts = Counts::read(self);
        let mut references = std::mem::take(&mut self.references);
        // Stable: users of a cluster stay in the order in which they were found.
        references.sort_by_key(|(index, _)| *index);
        let mut users = Vec::new();
        for group in references.chunk_by(|a, b| a.0 == b.0) {
            let index = group[0].0;
            users.clear();
            users.extend(group.iter().map(|(_, user)| *user));
            self.check_cluster(index, &users, counts.of(index));
        }
        for (what, cluster, set) in std::mem::take(&mut self.copied) {
            let count = counts.of(cluster);
            let wrong = set != (count == 1) && !self.found.dirty;
            if wrong && self.found.flags.len() < CORRUPTIONS_MAX {
                let what = format!("{what} has COPIED {set} and count {count}");
                self.found.flags.push(what);
            }
        }
        let end = self.content.len().div_ceil(self.cluster());
        let mut groups = references.chunk_by(|a, b| a.0 == b.0).peekable();
        for index in counts.indices(end) {
            while groups.next_if(|group| group[0].0 < index).is_some() {}
            let users = groups.next_if(|group| group[0].0 == index);
            let users = users.map_or(0, <[_]>::len) as u64;
            self.found.leaks += u64::from(counts.of(index) > users);
        }
    }

    /// Whether a cluster may have these users under this count.
    fn check_cluster(&mut self, index: u64, users: &[User], count: u64) {
        let offset = index << self.cluster_bits;
        if !may_share(users) {
            self.corrupt(format!("{offset:#x} is used by {}", listed(users)));
        }
        if count >= users.len() as u64 {
            return;
        }
        let users = listed(users);
        let what = format!("{offset:#x} has count {count} and is used by {users}");
        match self.found.dirty {
            true if self.found.low_counts.len() < CORRUPTIONS_MAX => {
                self.found.low_counts.push(what);
            }
            true => {}
            false => self.corrupt(what),
        }
    }
}

/// The counts of a file's clusters.
struct Counts {
    /// The bytes of the refcount blocks, by the entries of the table.
    blocks: Vec<Option<Vec<u8>>>,
    /// Bits of a count.
    bits: u64,
    per_block: u64,
}

impl Counts {
    fn read(reader: &Reader<'_>) -> Counts {
        let (content, cluster) = (reader.content, reader.cluster());
        let (table, clusters) = reader.refcounts;
        let table = reader.table(table, u64::from(clusters) * cluster);
        let block = |entry: &u64| match entry & !0x1ff {
            0 => None,
            block => Some(content.bytes(block, cluster as usize)),
        };
        let bits = 1u64 << reader.refcount_order;
        Counts {
            blocks: table.iter().map(block).collect(),
            bits,
            per_block: cluster * 8 / bits,
        }
    }

    /// The count of a cluster; 0 where no block has one.
    fn of(&self, index: u64) -> u64 {
        let slot = (index / self.per_block) as usize;
        let Some(Some(block)) = self.blocks.get(slot) else {
            return 0;
        };
        let bit = index % self.per_block * self.bits;
        let byte = (bit / 8) as usize;
        if self.bits < 8 {
            return u64::from(block[byte]) >> (bit % 8) & ((1 << self.bits) - 1);
        }
        let bytes = block[byte..byte + (self.bits / 8) as usize].iter();
        bytes.fold(0, |count, byte| count << 8 | u64::from(*byte))
    }

    /// The clusters that the blocks have counts for, up to the end of the file: like QEMU's check,
    /// which does not look beyond it.
    fn indices(&self, end: u64) -> impl Iterator<Item = u64> {
        let slots = (0..).zip(&self.blocks);
        let present = slots.filter(|(_, block)| block.is_some());
        present.flat_map(move |(slot, _): (u64, _)| {
            slot * self.per_block..((slot + 1) * self.per_block).min(end)
        })
    }
}

/// Whether these may use one cluster: compressed clusters, or one thing and snapshots of it.
fn may_share(users: &[User]) -> bool {
    let is_compressed = |user: &User| matches!(user.1, Thing::Compressed(_));
    let own = users.iter().filter(|user| user.0.is_none()).count();
    let is_one = users.iter().all(|user| user.1 == users[0].1);
    users.iter().all(is_compressed) || own <= 1 && is_one
}
