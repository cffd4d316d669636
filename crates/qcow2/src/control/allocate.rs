//! Space for a range of the disk in advance, beside the requests of a guest, which sees no change:
//! later writes there find their space.
//!
//! A chunk at a time, in the two phases of `preallocate.rs`. Clusters are taken and filled with
//! zeroes while nothing refers to them; then, under one hold of the metadata lock and with no
//! request under way in the piece, entries without space get them. What a guest has written or
//! discarded meanwhile is looked at then, so its bytes are never covered. A crash between the
//! phases leaves free space, one after them entries that read as before (D1).
//!
//! | the cluster | is |
//! | --- | --- |
//! | without space, reads as zeroes | given a cluster of zeroes |
//! | without space, shows a layer below | copied, unless an entry with subclusters can have space and still show it |
//! | with space | left there; the host allocates holes under it, which changes no byte |
//! | compressed, or shared with a snapshot | left: a write to it takes space, as in file systems that share extents |

use cowslip_boxed::boxed;
use std::ops::Range;

use super::preallocate::Stock;
use crate::Qcow2;
use crate::Result;
use crate::backing::Backing;
use crate::create::Preallocation;
use crate::job::Job;
use crate::path::admit::{Origin, Request};
use crate::units::{pieces, round_down, round_up};

/// Bytes of the disk whose space is taken at a time, unless a slice of a table maps more.
const CHUNK_BYTES: u64 = 256 << 20;
/// Bytes that are copied from below at a time.
const COPIED_BYTES: u64 = 1 << 20;
/// Looks at a chunk, at most: the first counts what is missing, and a guest that discards may undo
/// any of them.
const LOOKS_MAX: usize = 4;

impl Qcow2 {
    /// Allocates the space of the clusters that a range of the disk touches.
    #[boxed]
    pub async fn allocate(&self, range: Range<u64>, below: &dyn Backing) -> Result<()> {
        self.may_preallocate()?;
        self.ready_for_changes().await?;
        let unit = self.geometry().cluster_bytes();
        let (start, end) = (round_down(range.start, unit), round_up(range.end, unit));
        let step = CHUNK_BYTES.max(self.geometry().slice_coverage_bytes());
        for chunk in pieces(start, end - start, step) {
            let _kept = self.kept_space.take().await;
            let mut stock = Stock::default();
            let outcome = self.allocate_chunk(chunk, below, &mut stock).await;
            self.return_stock(&mut stock).await;
            outcome?;
        }
        self.settle_by_policy().await
    }

    async fn allocate_chunk(
        &self,
        chunk: Range<u64>,
        below: &dyn Backing,
        stock: &mut Stock,
    ) -> Result<()> {
        for _ in 0..LOOKS_MAX {
            let mut missing = 0;
            let slice = self.geometry().slice_coverage_bytes();
            for piece in pieces(chunk.start, chunk.end - chunk.start, slice) {
                let left = self.give_space(piece, below, stock).await?;
                missing += left.missing;
                for write in left.writes {
                    self.copy_up(write, below).await?;
                }
                for place in left.placed {
                    self.allocate_on_host(place).await?;
                }
            }
            if missing == 0 {
                break;
            }
            let how = (Preallocation::Falloc, &Job::default());
            self.take_stock(missing, stock, how).await?;
        }
        Ok(())
    }

    /// Copies what a range shows of the layers below, zeroes too.
    async fn copy_up(&self, range: Range<u64>, below: &dyn Backing) -> Result<()> {
        let end = range.end.min(self.size());
        let step = COPIED_BYTES.max(self.geometry().cluster_bytes());
        for piece in pieces(range.start, end.saturating_sub(range.start), step) {
            let data = self.read_below(piece.clone(), below).await?;
            let request = Request::new(piece.start, data.into(), Origin::Below);
            self.perform_cached(request, below).await?;
        }
        Ok(())
    }

    /// Allocates holes of the file that holds the data. A device has none.
    async fn allocate_on_host(&self, place: Range<u64>) -> Result<()> {
        if !self.data.capabilities().extends_with_zeroes {
            return Ok(());
        }
        let end = match self.format.data_file {
            true => place.end.min(self.size()),
            false => place.end,
        };
        self.data
            .allocate_keeping_end(place.start, end.saturating_sub(place.start))
            .await
    }
}
