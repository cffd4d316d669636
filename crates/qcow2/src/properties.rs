//! Properties of an open image: its files, its size, the contents of its caches.

use std::ops::Range;

use super::Qcow2;
use super::header::Header;
use crate::Result;
use crate::file::AlignedFile;
use crate::space::sparse;
use crate::statistics::{CacheStatistics, SpaceStatistics, WriteStatistics};
use crate::sync::Ordering;

impl Qcow2 {
    /// Returns whether the active L1 table refers to no L2 table: all of the disk is unallocated.
    pub fn maps_nothing(&self) -> bool {
        self.lock()
            .mapping
            .tables
            .l1()
            .iter()
            .all(|&entry| entry == 0)
    }

    /// The file's name, for messages.
    pub fn name(&self) -> &str {
        self.file.name()
    }

    /// The image file.
    #[inline]
    pub fn file(&self) -> &AlignedFile {
        &self.file
    }

    /// The file that guest data is in.
    #[inline]
    pub fn data_file(&self) -> &AlignedFile {
        &self.data
    }

    /// Returns whether much of the allocated data is holes in the host file; asked once.
    pub async fn is_sparse(&self) -> Result<bool> {
        if let Some(&sparse) = self.sparse.get() {
            return Ok(sparse);
        }
        // Holes below a cipher are no zeroes.
        if self.data.is_encrypted() {
            return Ok(false);
        }
        let header = self.header();
        let sparse = sparse::is_sparse(&self.file, &header).await?;
        Ok(*self.sparse.get_or_init(|| sparse))
    }

    /// The size of the disk in bytes.
    #[inline]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Returns whether its tables may change: it was opened for writing, and its session goes on.
    pub fn may_change(&self) -> bool {
        self.writable && !self.lock().health.is_closed()
    }

    /// A copy of the header.
    pub fn header(&self) -> Header {
        self.lock().committed.header.clone()
    }

    /// The unit of allocation and zeroing.
    pub fn subcluster_bytes(&self) -> u64 {
        self.geometry().subcluster_bytes()
    }

    /// Bytes in a cluster.
    pub fn cluster_bytes(&self) -> u64 {
        self.geometry().cluster_bytes()
    }

    /// Bytes that the tables take in memory if nothing is let go.
    pub fn cache_bytes_wanted(&self) -> u64 {
        self.lock().mapping.tables.bytes_wanted(self.writable)
    }

    /// Sets what L2 slices may take from now on.
    pub fn set_cache_budget(&self, bytes: u64) {
        self.lock().mapping.tables.set_budget(bytes);
    }

    /// Bytes of the disk that a slice of an L2 table maps.
    pub fn slice_span_bytes(&self) -> u64 {
        self.geometry().slice_coverage_bytes()
    }

    /// Lets the slices go that map a range of the disk, unless they are in use.
    pub fn release_slices(&self, range: &Range<u64>) {
        if range.is_empty() {
            return;
        }
        let coverage = self.slice_span_bytes();
        let slices = range.start / coverage..range.end.div_ceil(coverage);
        self.lock().mapping.tables.release(slices);
    }

    /// Returns the statistics of the cache of L2 slices.
    pub fn cache_statistics(&self) -> CacheStatistics {
        let mut statistics = self.lock().mapping.tables.statistics();
        statistics.hits += self.visits.hits();
        statistics
    }

    /// Returns the statistics of writes of guest data.
    pub fn write_statistics(&self) -> WriteStatistics {
        let mut writes = self.lock().writes;
        writes.in_place += self.visits.written();
        writes
    }

    /// Returns the statistics of the space in the image's file.
    pub fn space_statistics(&self) -> SpaceStatistics {
        let quarantined = self.observe().quarantined as u64;
        let cluster_bytes = self.cluster_bytes();
        let state = self.lock();
        let space = &state.space;
        SpaceStatistics {
            file_bytes: space.claimed() * cluster_bytes,
            grown_bytes: (space.claimed() - space.claimed_at_open()) * cluster_bytes,
            free_bytes: space.clusters_for_tables() * cluster_bytes,
            quarantined,
            is_latched: state.health.is_latched(),
        }
    }
}
