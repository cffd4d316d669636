//! Snapshots for images before a run, made byte by byte since the engine makes none: L1 is copied,
//! all that it reaches is counted once more, and loses its COPIED bits.

use crate::disk::content::Content;

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// A file that gets a snapshot.
struct Image<'a> {
    content: &'a mut Content,
    cluster: u64,
    refcount_bits: u64,
}

/// Adds snapshots to a qcow2 image of ours; as many as its counts allow.
pub fn add(content: &mut Content, wanted: u32) {
    for _ in 0..wanted {
        let version = content.number(4, 4);
        let order = if version == 3 {
            content.number(96, 4)
        } else {
            4
        };
        let cluster = 1 << content.number(20, 4);
        let mut image = Image {
            content,
            cluster,
            refcount_bits: 1 << order,
        };
        if !image.snapshot() {
            return;
        }
    }
}

impl Image<'_> {
    fn put(&mut self, offset: u64, value: u64, bytes: usize) {
        self.content
            .write(offset, &value.to_be_bytes()[8 - bytes..]);
    }

    /// Where the count of a cluster is: only whole bytes are known here.
    fn count_at(&self, index: u64) -> Option<u64> {
        let per_block = self.cluster * 8 / self.refcount_bits;
        let (table, clusters) = (self.content.number(48, 8), self.content.number(56, 4));
        if index / per_block >= clusters * self.cluster / 8 {
            return None;
        }
        let block = self.content.number(table + index / per_block * 8, 8) & OFFSET;
        (block != 0).then_some(block)
    }

    fn count(&self, index: u64) -> Option<u64> {
        let block = self.count_at(index)?;
        let bit = index % (self.cluster * 8 / self.refcount_bits) * self.refcount_bits;
        if self.refcount_bits < 8 {
            let byte = self.content.number(block + bit / 8, 1);
            return Some(byte >> (bit % 8) & ((1 << self.refcount_bits) - 1));
        }
        let bytes = (self.refcount_bits / 8) as usize;
        Some(self.content.number(block + bit / 8, bytes))
    }

    /// Counts a cluster once more.
    fn raise(&mut self, index: u64) {
        let block = self.count_at(index).expect("what is used is counted");
        let count = self.count(index).expect("what is used is counted") + 1;
        let bit = index % (self.cluster * 8 / self.refcount_bits) * self.refcount_bits;
        let (at, bits) = (block + bit / 8, self.refcount_bits);
        if bits < 8 {
            let mask = ((1 << bits) - 1) << (bit % 8);
            let byte = self.content.number(at, 1) & !mask | count << (bit % 8);
            return self.put(at, byte, 1);
        }
        self.put(at, count, (bits / 8) as usize);
    }

    /// Clusters that nobody uses, in one piece, counted.
    fn take(&mut self, clusters: u64) -> Option<u64> {
        let end = self.content.len().div_ceil(self.cluster) + clusters;
        let free = |start: &u64| (*start..start + clusters).all(|i| self.count(i) == Some(0));
        let start = (1..end).find(free)?;
        (start..start + clusters).for_each(|index| self.raise(index));
        let end = (start + clusters) * self.cluster;
        self.content.extend_to(end);
        self.content
            .zero(start * self.cluster, clusters * self.cluster);
        Some(start * self.cluster)
    }

    /// Returns the clusters that the entries of all L2 tables refer to, and the entries' places.
    fn reached(&self, l1: u64, entries: u64) -> (Vec<u64>, Vec<u64>) {
        let extended = self.content.number(4, 4) == 3 && self.content.number(72, 8) & 16 != 0;
        let entry_bytes = if extended { 16 } else { 8 };
        let (mut clusters, mut places) = (Vec::new(), Vec::new());
        for index in 0..entries {
            let table = self.content.number(l1 + index * 8, 8) & OFFSET;
            if table == 0 {
                continue;
            }
            clusters.push(table / self.cluster);
            places.push(l1 + index * 8);
            for at in (table..table + self.cluster).step_by(entry_bytes) {
                let entry = self.content.number(at, 8);
                if entry & COMPRESSED == 0 && entry & OFFSET != 0 {
                    clusters.push((entry & OFFSET) / self.cluster);
                    places.push(at);
                }
            }
        }
        (clusters, places)
    }

    /// Makes one; `false` if there is no room in the counts.
    fn snapshot(&mut self) -> bool {
        let (l1, entries) = (self.content.number(40, 8), self.content.number(36, 4));
        let (reached, places) = self.reached(l1, entries);
        let max = if self.refcount_bits == 64 {
            u64::MAX
        } else {
            (1 << self.refcount_bits) - 1
        };
        if reached.iter().any(|index| self.count(*index) >= Some(max)) {
            return false;
        }
        let table_clusters = (entries * 8).div_ceil(self.cluster).max(1);
        let old = (self.content.number(60, 4), self.content.number(64, 8));
        // The table of snapshots lies in one cluster; the entry here has 64 bytes.
        let Some(copy) = self.take(table_clusters) else {
            return false;
        };
        let snapshots = match old.0 {
            0 => self.take(1),
            _ => Some(old.1),
        };
        let Some(snapshots) = snapshots else {
            return false;
        };
        reached.into_iter().for_each(|index| self.raise(index));
        for place in places {
            let entry = self.content.number(place, 8);
            self.put(place, entry & !COPIED, 8);
        }
        let table = self.content.bytes(l1, (entries * 8) as usize);
        self.content.write(copy, &table);
        let at = snapshots + old.0 * 64;
        self.put(at, copy, 8);
        self.put(at + 8, entries, 4);
        self.put(at + 12, 1, 2);
        self.put(at + 14, 1, 2);
        self.put(at + 36, 16, 4);
        // Extra data: no VM state, and the disk's size; then id and name.
        self.put(at + 48, self.content.number(24, 8), 8);
        let name = b'1' + old.0 as u8;
        self.content.write(at + 56, &[name, name]);
        self.put(60, old.0 + 1, 4);
        self.put(64, snapshots, 8);
        true
    }
}
