//! Space without data, for block status alone, by QEMU's rules so that maps agree.
//!
//! [`is_sparse`]: whether the host file holds much less than the image has allocated: preallocated
//! metadata, whose data clusters are still holes. Only then is it worth asking the host which data
//! is a hole. [`Qcow2::unallocated_space`]: where unallocated subclusters would go.

use std::ops::Range;

use crate::Qcow2;
use crate::Result;
use crate::entry::{EntryFormat, L2Entry, refcount_at};
use crate::file::AlignedFile;
use crate::geometry::{GuestOffset, HostOffset};
use crate::header::Header;
use crate::units::pieces;

/// Counts the clusters in use until they are more, by a tenth and by two at least, than the host
/// has given space to.
///
/// # Errors
/// If the refcounts cannot be read.
pub async fn is_sparse(file: &AlignedFile, header: &Header) -> Result<bool> {
    let Some(allocated_bytes) = file.block_file().allocated_bytes() else {
        return Ok(false);
    };
    let format = header.entry_format();
    let clusters = file.len().await? >> header.cluster_bits;
    let allocated = allocated_bytes >> header.cluster_bits;
    let threshold = (allocated.saturating_mul(10) / 9).max(allocated + 2);
    if threshold > clusters {
        return Ok(false);
    }
    let per_block = format.geometry.refcounts_per_block();
    let table_bytes = header.refcount_table_bytes();
    let table_bytes = table_bytes.min(clusters.div_ceil(per_block) * 8);
    let table = file
        .read_new(header.refcount_table_offset, table_bytes)
        .await?;
    let mut used = 0;
    let mut counted = 0;
    for entry in table.chunks_exact(8) {
        let block = block_offset(entry, &format);
        let in_block = per_block.min(clusters - counted);
        counted += in_block;
        let Some(block) = block else { continue };
        let bytes = file
            .read_new(block.0, format.geometry.cluster_bytes())
            .await?;
        let order = format.geometry.refcount_order();
        let nonzero = (0..in_block).filter(|&i| refcount_at(&bytes, i as usize, order) > 0);
        used += nonzero.count() as u64;
        if used >= threshold {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the offset of a block; `None` if its entry is corrupt, which is reported elsewhere.
fn block_offset(entry: &[u8], format: &EntryFormat) -> Option<HostOffset> {
    let entry = entry
        .iter()
        .fold(0, |word, &byte| word << 8 | u64::from(byte));
    format.decode_refcount_table(entry).ok().flatten()
}

impl Qcow2 {
    /// The parts of a range that lie in clusters with space, and where that is. Asked for ranges of
    /// unallocated subclusters only; empty without extended L2 entries.
    pub async fn unallocated_space(
        &self,
        range: Range<u64>,
    ) -> Result<Vec<(Range<u64>, HostOffset)>> {
        let mut found = Vec::new();
        if !self.geometry().extended_l2() {
            return Ok(found);
        }
        let coverage = self.geometry().slice_coverage_bytes();
        for piece in pieces(range.start, range.end - range.start, coverage) {
            let first = self.geometry().guest_cluster(GuestOffset(piece.start));
            let pin = self.load(self.geometry().slice_of(first)).await?;
            if pin.slice.is_none() {
                continue;
            }
            let state = self.lock();
            let len = piece.end - piece.start;
            for part in pieces(piece.start, len, self.geometry().cluster_bytes()) {
                let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
                let entry = state.mapping.tables.entry(cluster);
                let entry = entry.map_err(|error| self.corrupt_entry(&state, cluster, error))?;
                if let L2Entry::Standard(entry) = entry
                    && let Some(host) = entry.host
                {
                    let into = part.start - self.geometry().guest_offset(cluster).0;
                    found.push((part, host.plus(into)));
                }
            }
        }
        Ok(found)
    }
}
