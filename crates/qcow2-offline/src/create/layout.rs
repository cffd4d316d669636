//! Where everything of a fresh image is, and what its tables say. Pure.

use super::placement::Placement;
use super::{CreateOptions, Encryption, Preallocation, SIZE_UNIT, Version};
use crate::Result;
use crate::entry::{EntryFormat, L2Entry, Standard, TableRef, set_refcount};
use crate::geometry::{Geometry, HostCluster, HostOffset};
use crate::header::{CryptoHeader, Header};
use crate::units::round_up;

/// Guest bytes that one allocation of QEMU's preallocation asks for at most, before rounding down
/// to clusters: it counts them in a C int.
const REQUEST_BYTES_MAX: u64 = i32::MAX as u64;

/// Guest clusters that are contiguous in guest and host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub guest: u64,
    pub host: u64,
    pub count: u64,
}

/// Places of all structures of a new image.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub format: EntryFormat,
    placement: Placement,
    l1_entries: u64,
    l1_cluster: u64,
    /// The cluster of each L2 table, in order of the disk. All or none.
    pub l2_tables: Vec<u64>,
    runs: Vec<Run>,
    /// Guest data is encrypted.
    is_encrypted: bool,
    /// Where the LUKS volume of the image's keys is, and its bytes.
    pub keys: Option<(u64, u64)>,
    /// The clusters in `file` that the guest's data will be in, if they are in one piece.
    pub data_bytes: Option<(u64, u64)>,
    /// Length of the image file.
    pub file_len: u64,
}

impl Layout {
    /// Places all structures one after the other.
    pub fn plan(geometry: Geometry, options: &CreateOptions) -> Result<Layout> {
        let size = round_up(options.size, SIZE_UNIT);
        let l1_entries = geometry.l1_entries_for(size);
        let mut placement = Placement::new(geometry);
        let l1_clusters = geometry.clusters_for(l1_entries * 8);
        let l1_cluster = match l1_clusters {
            0 => 0,
            clusters => placement.allocate(clusters)?,
        };
        let mut layout = Layout {
            format: EntryFormat {
                geometry,
                version: match options.version {
                    Version::V2 => 2,
                    Version::V3 => 3,
                },
                data_file: options.data_file.is_some(),
            },
            placement,
            l1_entries,
            l1_cluster,
            l2_tables: Vec::new(),
            runs: Vec::new(),
            is_encrypted: options.encryption.is_some(),
            keys: None,
            data_bytes: None,
            file_len: 0,
        };
        match options.preallocation {
            // A raw data file is read through the tables, so they must be complete.
            Preallocation::Off if options.data_file_raw => layout.assign_clusters(size)?,
            Preallocation::Off => {}
            Preallocation::Falloc | Preallocation::Full if options.data_file.is_none() => {
                layout.assign_in_one_piece(size)?;
            }
            _ => layout.assign_clusters(size)?,
        }
        if let Some(Encryption::Luks(volume)) = &options.encryption {
            let len = volume.header().payload_offset;
            let cluster = layout.placement.allocate(geometry.clusters_for(len))?;
            layout.keys = Some((cluster * layout.cluster_bytes(), len));
        }
        layout.file_len = layout.end_of_file(size);
        Ok(layout)
    }

    fn cluster_bytes(&self) -> u64 {
        self.format.geometry.cluster_bytes()
    }

    /// Bytes of the image file that are the guest's, if they get their space now.
    pub fn data_len(&self) -> u64 {
        self.data_bytes.map_or(0, |(_, len)| len)
    }

    /// Bytes of all tables.
    pub fn tables_len(&self) -> u64 {
        let (_, bytes) = self.refcount_table();
        let clusters = self.l2_tables.len() as u64 + self.refcount_blocks().count() as u64;
        clusters * self.cluster_bytes() + bytes.len() as u64 + self.l1_entries * 8
    }

    /// Returns where the file ends: behind its last cluster, of which an L1 table, or data assigned
    /// in requests, have only as much as there is of them (of data, whole subclusters).
    fn end_of_file(&self, size: u64) -> u64 {
        let geometry = &self.format.geometry;
        let end = self.placement.end();
        let l1_bytes = self.l1_entries * 8;
        let in_requests = self.data_bytes.is_none() && !self.format.data_file;
        let in_file = |run: &&Run| in_requests && run.host + run.count == end;
        if let Some(last) = self.runs.last().filter(in_file) {
            let unused = (last.guest + last.count) * self.cluster_bytes()
                - round_up(size, geometry.subcluster_bytes());
            return end * self.cluster_bytes() - unused;
        }
        if l1_bytes > 0 && self.l1_cluster + geometry.clusters_for(l1_bytes) == end {
            return self.l1_cluster * self.cluster_bytes() + l1_bytes;
        }
        end * self.cluster_bytes()
    }

    fn ensure_l2_table(&mut self, guest: u64) -> Result<()> {
        let index = guest / self.format.geometry.l2_entries();
        if index == self.l2_tables.len() as u64 {
            let cluster = self.placement.allocate(1)?;
            self.l2_tables.push(cluster);
        }
        Ok(())
    }

    /// Guest clusters from `guest` to the end of its slice, `left` at most.
    fn in_slice(&self, guest: u64, left: u64) -> u64 {
        let per_slice = self.format.geometry.slice_entries();
        left.min(per_slice - guest % per_slice)
    }

    /// Assigns clusters to the whole disk in requests of up to 2 GiB; within a request slice by
    /// slice, as long as the slices are contiguous in the file.
    fn assign_clusters(&mut self, size: u64) -> Result<()> {
        let cluster_bytes = self.cluster_bytes();
        let request_max = (REQUEST_BYTES_MAX & !(cluster_bytes - 1)) / cluster_bytes;
        let end = size.div_ceil(cluster_bytes);
        let mut guest = 0;
        while guest < end {
            let request_end = end.min(guest + request_max);
            guest = self.assign_request(guest, request_end)?;
        }
        Ok(())
    }

    fn assign_request(&mut self, start: u64, end: u64) -> Result<u64> {
        let mut guest = start;
        let mut next_host = None;
        while guest < end {
            self.ensure_l2_table(guest)?;
            let wanted = self.in_slice(guest, end - guest);
            let (host, count) = match next_host {
                _ if self.format.data_file => (guest, wanted),
                None => (self.placement.allocate(wanted)?, wanted),
                Some(host) => (host, self.placement.allocate_at(host, wanted)?),
            };
            if count == 0 {
                break;
            }
            self.push_run(Run { guest, host, count });
            guest += count;
            next_host = Some(host + count);
        }
        Ok(guest)
    }

    /// Assigns one piece at the end of the file to the whole disk, behind a new refcount table.
    fn assign_in_one_piece(&mut self, size: u64) -> Result<()> {
        let geometry = self.format.geometry;
        let clusters = geometry.clusters_for(size);
        let l2_tables = clusters.div_ceil(geometry.l2_entries()) + 1;
        let host = self.placement.make_room_behind_end(clusters + l2_tables)?;
        let assigned = self.placement.allocate_at(host, clusters)?;
        assert_eq!(assigned, clusters, "nothing is behind the end");
        let mut guest = 0;
        while guest < clusters {
            self.ensure_l2_table(guest)?;
            guest += self.in_slice(guest, clusters - guest);
        }
        if clusters > 0 {
            self.push_run(Run {
                guest: 0,
                host,
                count: clusters,
            });
        }
        let bytes = geometry.cluster_bytes();
        self.data_bytes = Some((host * bytes, clusters * bytes));
        Ok(())
    }

    fn push_run(&mut self, run: Run) {
        match self.runs.last_mut() {
            Some(last)
                if last.guest + last.count == run.guest && last.host + last.count == run.host =>
            {
                last.count += run.count;
            }
            _ => self.runs.push(run),
        }
    }

    /// Returns whether a cluster of the image file is in use.
    #[cfg(test)]
    pub fn is_used(&self, cluster: u64) -> bool {
        self.placement.is_used(cluster)
    }

    /// Enters the tables' places into the header.
    pub fn enter(&self, header: &mut Header) {
        let bytes = self.cluster_bytes();
        let (table, clusters) = self.placement.refcount_table();
        header.refcount_table_offset = table * bytes;
        header.refcount_table_clusters =
            u32::try_from(clusters).expect("a refcount table has 8 MiB at most");
        header.l1_size = u32::try_from(self.l1_entries).expect("an L1 table has 32 MiB at most");
        header.l1_table_offset = self.l1_cluster * bytes;
        let keys = self.keys;
        header.extensions.crypto_header =
            keys.map(|(offset, length)| CryptoHeader { offset, length });
    }

    /// The L1 table: its offset and its bytes.
    pub fn l1_table(&self) -> (u64, Vec<u8>) {
        let mut bytes = vec![0; (self.l1_entries * 8) as usize];
        for (entry, &cluster) in bytes.chunks_exact_mut(8).zip(&self.l2_tables) {
            let table = TableRef {
                offset: HostOffset(cluster * self.cluster_bytes()),
                copied: true,
            };
            entry.copy_from_slice(&table.encode().to_be_bytes());
        }
        (self.l1_cluster * self.cluster_bytes(), bytes)
    }

    /// L2 table `index`: its offset and its bytes. A preallocated subcluster is not allocated: it
    /// still reads from the backing file, or as zeroes. So does a preallocated cluster of an
    /// encrypted image, whose space decrypts to anything.
    pub fn l2_table(&self, index: u64) -> (u64, Vec<u8>) {
        let geometry = self.format.geometry;
        let entry_bytes = geometry.l2_entry_bytes() as usize;
        let mut bytes = vec![0; geometry.cluster_bytes() as usize];
        let first = index * geometry.l2_entries();
        let end = first + geometry.l2_entries();
        let from = self
            .runs
            .partition_point(|run| run.guest + run.count <= first);
        for run in self.runs[from..].iter().take_while(|run| run.guest < end) {
            for guest in run.guest.max(first)..end.min(run.guest + run.count) {
                let host = HostCluster(run.host + (guest - run.guest));
                let allocated = !geometry.extended_l2() && !self.is_encrypted;
                let zeroes = !geometry.extended_l2() && self.is_encrypted;
                let entry = L2Entry::Standard(Standard {
                    host: Some(geometry.host_offset(host)),
                    copied: true,
                    allocated: allocated.into(),
                    zeroes: zeroes.into(),
                });
                let (entry, bitmap) = self.format.encode_l2(&entry);
                let at = (guest - first) as usize * entry_bytes;
                bytes[at..at + 8].copy_from_slice(&entry.to_be_bytes());
                if geometry.extended_l2() {
                    bytes[at + 8..at + 16].copy_from_slice(&bitmap.to_be_bytes());
                }
            }
        }
        let cluster = self.l2_tables[index as usize];
        (cluster * geometry.cluster_bytes(), bytes)
    }

    /// The refcount table: its offset and its bytes.
    pub fn refcount_table(&self) -> (u64, Vec<u8>) {
        let (table, _) = self.placement.refcount_table();
        let blocks = self.placement.refcount_blocks().iter();
        let entries = blocks.flat_map(|block| (block * self.cluster_bytes()).to_be_bytes());
        (table * self.cluster_bytes(), entries.collect())
    }

    /// The refcount blocks that exist: index and offset.
    pub fn refcount_blocks(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let blocks = self.placement.refcount_blocks().iter().enumerate();
        blocks
            .filter(|&(_, &block)| block != 0)
            .map(|(index, block)| (index as u64, block * self.cluster_bytes()))
    }

    /// The bytes of refcount block `index`.
    pub fn refcount_block(&self, index: u64) -> Vec<u8> {
        let geometry = self.format.geometry;
        let mut bytes = vec![0; geometry.cluster_bytes() as usize];
        let first = geometry.first_counted(index).0;
        for at in 0..geometry.refcounts_per_block() {
            if self.placement.is_used(first + at) {
                let order = geometry.refcount_order();
                set_refcount(&mut bytes, at as usize, order, 1);
            }
        }
        bytes
    }
}
