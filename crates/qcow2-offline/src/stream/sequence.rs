//! [`Sequence`]: the places of all parts of an image that is made in the order of its file, and
//! their bytes. Pure.

use std::collections::BTreeMap;

use crate::count_growth::structures_for;
use crate::create::{CreateOptions, SIZE_UNIT, Version, encode_header};
use crate::entry::{Compressed, EntryFormat, L2Entry, Standard, TableRef, set_refcount};
use crate::geometry::{HOST_OFFSET_END, HostOffset};
use crate::units::round_up;
use crate::{Error, Result};

/// L2 tables that are kept in memory, in bytes: those of 128 GiB of data in clusters of 64 KiB.
pub const TABLES_BYTES: u64 = 16 << 20;

/// A file that is made from its beginning to its end.
pub struct Sequence {
    format: EntryFormat,
    /// Bytes that have not been taken.
    made: Vec<u8>,
    /// Length of the file so far.
    end: u64,
    /// References to each cluster of the file.
    counts: Vec<u16>,
    /// References to one cluster that a compressed cluster may add to.
    count_max: u16,
    l1: Vec<u64>,
    /// Tables that have no place, by their numbers. Clusters come in order, so the last one alone
    /// may get further entries.
    tables: BTreeMap<u64, Vec<u8>>,
}

impl Sequence {
    /// A file of one cluster, for the header.
    pub fn new(options: &CreateOptions) -> Result<Sequence> {
        let geometry = options.validate()?;
        let format = EntryFormat {
            geometry,
            version: match options.version {
                Version::V2 => 2,
                Version::V3 => 3,
            },
            data_file: false,
        };
        let l1_entries = geometry.l1_entries_for(round_up(options.size, SIZE_UNIT));
        let count_max = geometry.refcount_max().min(u64::from(u16::MAX)) as u16;
        let mut sequence = Sequence {
            format,
            made: Vec::new(),
            end: 0,
            counts: Vec::new(),
            count_max,
            l1: vec![0; l1_entries as usize],
            tables: BTreeMap::new(),
        };
        sequence.append(&[0])?;
        sequence.fill_cluster();
        Ok(sequence)
    }

    /// Length of the file so far, in bytes.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The bytes since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.made)
    }

    /// Stores a cluster of the disk; clusters come in their order.
    pub fn plain(&mut self, number: u64, bytes: &[u8]) -> Result<()> {
        let host = self.append_aligned(bytes)?;
        let entry = L2Entry::Standard(Standard {
            host: Some(HostOffset(host)),
            copied: true,
            allocated: self.format.geometry.all_subclusters(),
            zeroes: 0,
        });
        self.enter(number, &entry);
        Ok(())
    }

    /// Stores a compressed cluster directly behind what is there.
    pub fn compressed(&mut self, number: u64, bytes: &[u8]) -> Result<()> {
        if self.counts.last() >= Some(&self.count_max) {
            self.fill_cluster();
        }
        let start = self.end;
        if start >= self.format.compressed_offset_end() {
            return Err(too_long());
        }
        self.append(bytes)?;
        let len = bytes.len() as u64;
        let entry = L2Entry::Compressed(Compressed { start, len });
        self.enter(number, &entry);
        Ok(())
    }

    /// Gives places to tables that get no further entries, if they take much memory.
    pub fn place_full_tables(&mut self) -> Result<()> {
        let bytes = self.tables.len() as u64 * self.format.geometry.cluster_bytes();
        if bytes < TABLES_BYTES {
            return Ok(());
        }
        let last = self.tables.pop_last();
        self.place_tables()?;
        self.tables.extend(last);
        Ok(())
    }

    /// Adds all tables. Returns the header.
    pub fn finish(&mut self, options: &CreateOptions) -> Result<Vec<u8>> {
        self.place_tables()?;
        let geometry = self.format.geometry;
        let l1: Vec<u8> = self.l1.iter().flat_map(|word| word.to_be_bytes()).collect();
        let l1_offset = match l1.is_empty() {
            true => 0,
            false => self.append_aligned(&l1)?,
        };
        self.fill_cluster();
        let (blocks, table_clusters) = structures_for(&geometry, self.counts.len() as u64);
        let cluster_bytes = geometry.cluster_bytes();
        let table_offset = self.end;
        let first_block = table_offset + table_clusters * cluster_bytes;
        let places = (0..blocks).map(|number| first_block + number * cluster_bytes);
        let table: Vec<u8> = places.flat_map(u64::to_be_bytes).collect();
        self.append(&table)?;
        self.end_at(first_block);
        // The blocks count themselves, too.
        let all = self.counts.len() + blocks as usize;
        let mut counts = std::mem::take(&mut self.counts);
        counts.resize(all, 1);
        for counted in counts.chunks(geometry.refcounts_per_block() as usize) {
            let mut block = vec![0; cluster_bytes as usize];
            for (index, count) in counted.iter().enumerate() {
                let order = geometry.refcount_order();
                set_refcount(&mut block, index, order, u64::from(*count));
            }
            self.made.extend_from_slice(&block);
            self.end += cluster_bytes;
        }
        let mut header = options.header(&geometry);
        header.l1_size = self.l1.len() as u32;
        header.l1_table_offset = l1_offset;
        header.refcount_table_offset = table_offset;
        header.refcount_table_clusters = table_clusters as u32;
        encode_header(&mut header)
    }

    fn place_tables(&mut self) -> Result<()> {
        for (number, table) in std::mem::take(&mut self.tables) {
            let offset = HostOffset(self.append_aligned(&table)?);
            let place = TableRef {
                offset,
                copied: true,
            };
            self.l1[number as usize] = place.encode();
        }
        Ok(())
    }

    /// Enters a cluster of the disk into its table.
    fn enter(&mut self, number: u64, entry: &L2Entry) {
        let geometry = &self.format.geometry;
        let (table, index) = (
            number / geometry.l2_entries(),
            number % geometry.l2_entries(),
        );
        let cluster_bytes = geometry.cluster_bytes() as usize;
        let (word, bitmap) = self.format.encode_l2(entry);
        let at = (index * geometry.l2_entry_bytes()) as usize;
        let table = self.tables.entry(table);
        let table = table.or_insert_with(|| vec![0; cluster_bytes]);
        table[at..at + 8].copy_from_slice(&word.to_be_bytes());
        if geometry.extended_l2() {
            table[at + 8..at + 16].copy_from_slice(&bitmap.to_be_bytes());
        }
    }

    /// Appends bytes at the beginning of a cluster. Returns where.
    fn append_aligned(&mut self, bytes: &[u8]) -> Result<u64> {
        self.fill_cluster();
        let at = self.end;
        self.append(bytes)?;
        Ok(at)
    }

    /// Appends bytes, as one further reference to each cluster that they touch.
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let len = bytes.len() as u64;
        if HOST_OFFSET_END - self.end < len {
            return Err(too_long());
        }
        let cluster_bits = self.format.geometry.cluster_bits();
        let first = (self.end >> cluster_bits) as usize;
        let touched_end = self.format.geometry.clusters_for(self.end + len) as usize;
        self.counts.resize(touched_end, 0);
        for count in &mut self.counts[first..] {
            *count += 1;
        }
        self.made.extend_from_slice(bytes);
        self.end += len;
        Ok(())
    }

    /// Zeroes up to the end of the cluster.
    fn fill_cluster(&mut self) {
        self.end_at(round_up(self.end, self.format.geometry.cluster_bytes()));
    }

    fn end_at(&mut self, end: u64) {
        let more = (end - self.end) as usize;
        self.made.resize(self.made.len() + more, 0);
        self.end = end;
    }
}

fn too_long() -> Error {
    Error::invalid("the image would be longer than its entries can say")
}
