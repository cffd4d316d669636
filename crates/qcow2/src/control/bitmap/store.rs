//! Storing the bitmaps when the image is closed: everything in new space, then the header (D6).

use cowslip_boxed::boxed;
use std::ops::Range;

use super::bits::DirtyBits;
use super::list::{self, Bitmaps, Bits, Entry};
use crate::commit::writeback::is_no_space;
use crate::entry::bitmap::{Fixed, TableEntry};
use crate::file::Durability;
use crate::geometry::{Geometry, HostCluster};
use crate::header::{BitmapsExtension, autoclear};
use crate::space::alloc::SpaceContent;
use crate::{Buf, Error, Result};
use crate::{Counts, Qcow2};

/// Pieces of bits that are collected for one write: 1 MiB as a rule.
const PIECES_PER_WRITE: u64 = 4;

/// Space of structures that nothing refers to yet: all of this can be taken back.
#[derive(Debug, Default)]
struct ReservedSpace {
    runs: Vec<Range<u64>>,
    /// Number of these clusters whose refcounts are raised.
    counted: usize,
}

impl ReservedSpace {
    fn clusters(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().cloned().flatten()
    }
}

/// The structures that the header will refer to.
struct Prepared {
    entries: Vec<Entry>,
    directory: Option<BitmapsExtension>,
}

/// The clusters of a directory.
fn clusters_of(directory: &BitmapsExtension, geometry: &Geometry) -> Range<u64> {
    let bytes = directory.bitmap_directory_size;
    geometry.clusters_at(directory.bitmap_directory_offset, bytes)
}

impl Qcow2 {
    /// Stores what the session has made of the bitmaps. No request is under way, and none follows.
    pub(crate) async fn store_bitmaps(&self) -> Result<()> {
        let mut counts = self.turn.take().await;
        let bitmaps = {
            let mut state = self.lock();
            if state.health.is_latched() || !state.bitmaps.is_to_be_stored() {
                return Ok(());
            }
            std::mem::take(&mut state.bitmaps)
        };
        self.latch_if_cancelled(self.store_in_turn(&mut counts, bitmaps))
            .await
    }

    #[boxed]
    async fn store_in_turn(&self, counts: &mut Counts, bitmaps: Bitmaps) -> Result<()> {
        let mut taken = ReservedSpace::default();
        let prepared = self.prepare_bitmaps(counts, &bitmaps, &mut taken).await;
        let Prepared { entries, directory } = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                // On disk they stay marked. The failure that led here is the one to report.
                drop(self.forget_taken(counts, taken).await);
                self.lock().bitmaps = bitmaps;
                return Err(error);
            }
        };
        let old = self.header();
        let old_directory = old.consistent_bitmaps().copied();
        let mut new = old.clone();
        new.extensions.bitmaps = directory;
        new.autoclear_features &= !autoclear::BITMAPS;
        if directory.is_some() {
            new.autoclear_features |= autoclear::BITMAPS;
        }
        self.change_header(&old, new).await?;
        {
            let mut state = self.lock();
            if let Some(directory) = directory {
                let clusters = clusters_of(&directory, self.geometry());
                for cluster in clusters {
                    state.protect_cluster(HostCluster(cluster));
                }
            }
            // A write that comes after all marks them again.
            state.committed.end_tracking();
            state.bitmaps.now_stored(entries.clone());
            state.set_gate();
        }
        if let Some(directory) = old_directory {
            let clusters = clusters_of(&directory, self.geometry());
            self.free_metadata(counts, clusters).await?;
        }
        self.free_bitmaps(counts, bitmaps.directory(), &entries)
            .await?;
        counts.refcounts.write_dirty().await
    }

    /// Writes the structures that the header will refer to, durably.
    async fn prepare_bitmaps(
        &self,
        counts: &mut Counts,
        bitmaps: &Bitmaps,
        taken: &mut ReservedSpace,
    ) -> Result<Prepared> {
        let mut entries = Vec::new();
        for bitmap in bitmaps.list() {
            let mut entry = bitmap.entry.clone();
            match &bitmap.bits {
                Bits::Lost => {}
                Bits::Stored | Bits::Loaded { changed: false, .. } => {
                    entry.fixed = entry.fixed.saved(bitmap.enabled);
                }
                Bits::Loaded {
                    bits,
                    changed: true,
                } => {
                    let stored = self.store_bits(counts, (entry.fixed, bits), taken).await?;
                    entry.fixed = stored.saved(bitmap.enabled);
                }
            }
            entries.push(entry);
        }
        let mut directory = None;
        if !entries.is_empty() {
            let bytes = list::encode(entries.iter());
            let len = bytes.len() as u64;
            let first = self.take_counted(counts, len, taken).await?;
            let offset = first << self.geometry().cluster_bits();
            self.write_clusters(offset, bytes).await?;
            directory = Some(BitmapsExtension {
                nb_bitmaps: entries.len() as u32,
                reserved: 0,
                bitmap_directory_size: len,
                bitmap_directory_offset: offset,
            });
        }
        counts.refcounts.write_dirty().await?;
        self.barrier().await?;
        Ok(Prepared { entries, directory })
    }

    /// Writes bits and their table; the entry that refers to them.
    async fn store_bits(
        &self,
        counts: &mut Counts,
        (fixed, bits): (Fixed, &DirtyBits),
        taken: &mut ReservedSpace,
    ) -> Result<Fixed> {
        let cluster_bytes = self.geometry().cluster_bytes();
        let table_entries = fixed.table_entries_for(self.geometry(), bits.disk_bytes());
        let at = |index: u64| index * cluster_bytes;
        let is_mixed = |&index: &u64| bits.uniform(at(index), cluster_bytes).is_none();
        let mixed = (0..table_entries).filter(is_mixed).count() as u64;
        let table_clusters = self.geometry().clusters_for(table_entries * 8);
        let places = self.take_places(counts, (table_clusters, mixed), taken);
        let (table_offset, places) = places.await?;
        let mut places = places.into_iter();
        let mut table = Vec::with_capacity(table_entries as usize * 8);
        let write_bytes = PIECES_PER_WRITE * self.bitmap_piece_bytes;
        let (mut waiting, mut waiting_at) = (Vec::new(), 0);
        for index in 0..table_entries {
            let entry = match bits.uniform(at(index), cluster_bytes) {
                Some(false) => TableEntry::Clean,
                Some(true) => TableEntry::Dirty,
                None => {
                    let place = places.next().expect("a place for each piece");
                    let is_next = place == waiting_at + waiting.len() as u64;
                    if !is_next || waiting.len() as u64 >= write_bytes {
                        let bytes = std::mem::take(&mut waiting);
                        self.write_clusters(waiting_at, bytes).await?;
                        waiting_at = place;
                    }
                    waiting.extend(bits.store(at(index), cluster_bytes as usize));
                    TableEntry::At(place)
                }
            };
            table.extend(entry.encode().to_be_bytes());
        }
        self.write_clusters(waiting_at, waiting).await?;
        self.write_clusters(table_offset, table).await?;
        let mut stored = fixed;
        stored.table_offset = table_offset;
        stored.table_entries = table_entries as u32;
        Ok(stored)
    }

    /// Takes space for the table of a bitmap, and for `bits` clusters of bits: in one run, or the
    /// bits scattered if no free run is that long. Returns the offsets of the table and of each
    /// cluster.
    async fn take_places(
        &self,
        counts: &mut Counts,
        (table, bits): (u64, u64),
        taken: &mut ReservedSpace,
    ) -> Result<(u64, Vec<u64>)> {
        let bytes = |clusters: u64| clusters << self.geometry().cluster_bits();
        match self.take_counted(counts, bytes(table + bits), taken).await {
            Ok(first) => {
                let start = first + table;
                let places = (start..start + bits).map(bytes).collect();
                return Ok((bytes(first), places));
            }
            Err(error) if is_no_space(&error) && !self.is_latched() => {}
            Err(error) => return Err(error),
        }
        let first = self.take_counted(counts, bytes(table), taken).await?;
        let mut places = Vec::new();
        for _ in 0..bits {
            places.push(bytes(self.take_counted(counts, bytes(1), taken).await?));
        }
        Ok((bytes(first), places))
    }

    /// Writes whole clusters, if any; what bytes do not fill is zeroes.
    async fn write_clusters(&self, offset: u64, bytes: Vec<u8>) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut bytes = bytes;
        let clusters = self.geometry().clusters_for(bytes.len() as u64);
        bytes.resize((clusters << self.geometry().cluster_bits()) as usize, 0);
        let data = vec![Buf::from(bytes)];
        self.file.write(offset, data, Durability::Cached).await
    }

    /// Takes and counts neighbouring clusters; the first of them.
    async fn take_counted(
        &self,
        counts: &mut Counts,
        bytes: u64,
        taken: &mut ReservedSpace,
    ) -> Result<u64> {
        let clusters = self.geometry().clusters_for(bytes);
        let first = self.take_run(counts, clusters).await?;
        taken.runs.push(first..first + clusters);
        for cluster in first..first + clusters {
            counts.refcounts.add(HostCluster(cluster), 1).await?;
            taken.counted += 1;
        }
        Ok(first)
    }

    /// Frees the structures that nothing refers to.
    async fn forget_taken(&self, counts: &mut Counts, taken: ReservedSpace) -> Result<()> {
        {
            let mut state = self.lock();
            for cluster in taken.clusters().skip(taken.counted) {
                state
                    .space
                    .free
                    .add(HostCluster(cluster), 1, SpaceContent::Unknown);
            }
        }
        for cluster in taken.clusters().take(taken.counted) {
            self.free_metadata(counts, cluster..cluster + 1).await?;
        }
        counts.refcounts.write_dirty().await
    }

    /// Lowers the counts of bits and tables that the new directory refers to no longer. What an
    /// entry that makes no sense had stays counted: a leak.
    async fn free_bitmaps(&self, counts: &mut Counts, old: &[Entry], new: &[Entry]) -> Result<()> {
        for entry in old {
            let table = entry.fixed.table_offset;
            let is_kept = new.iter().any(|other| other.fixed.table_offset == table);
            if is_kept
                || entry
                    .fixed
                    .table_flaw(self.geometry(), self.size())
                    .is_some()
            {
                continue;
            }
            match self.free_bitmap(counts, &entry.fixed).await {
                Err(Error::Corrupt { .. }) => {}
                freed => freed?,
            }
        }
        Ok(())
    }

    async fn free_bitmap(&self, counts: &mut Counts, fixed: &Fixed) -> Result<()> {
        let bits = self.geometry().cluster_bits();
        let entries = u64::from(fixed.table_entries);
        let step = self.bitmap_piece_bytes / 8;
        for start in (0..entries).step_by(step as usize) {
            let piece = start..entries.min(start + step);
            for entry in self.read_table(fixed, piece).await? {
                if let TableEntry::At(offset) = entry {
                    self.free_unprotected(counts, offset >> bits).await?;
                }
            }
        }
        let first = fixed.table_offset >> bits;
        for cluster in first..first + self.geometry().clusters_for(fixed.table_bytes()) {
            self.free_unprotected(counts, cluster).await?;
        }
        Ok(())
    }

    /// Lowers the count of a cluster that is not known to hold anything else (S3).
    async fn free_unprotected(&self, counts: &mut Counts, cluster: u64) -> Result<()> {
        if self.lock().space.protected.contains(HostCluster(cluster)) {
            return Err(Error::Corrupt {
                file: self.name().to_string(),
                structure: "bitmap",
                offset: cluster << self.geometry().cluster_bits(),
                detail: "its cluster holds other metadata".to_string(),
            });
        }
        self.free_metadata(counts, cluster..cluster + 1).await
    }
}
