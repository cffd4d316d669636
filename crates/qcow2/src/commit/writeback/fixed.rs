//! Room in a file that cannot grow, a device or an export. Its space ends where it ends, and what
//! no refcount block counts yet is free: blocks are made for it when it is needed, the lowest
//! first, each for all that it counts.

use super::REFCOUNT_TABLE_BYTES_MAX;
use crate::count_growth::{CountGrowth, table_entries};
use crate::geometry::HostCluster;
use crate::space::alloc::SpaceContent;
use crate::{Counts, Qcow2};
use crate::{Error, Result};

/// The largest refcount table, in entries.
const TABLE_ENTRIES_MAX: u64 = REFCOUNT_TABLE_BYTES_MAX / 8;

impl Qcow2 {
    /// The error of an image that has used up its space.
    pub(super) fn no_space(&self) -> Error {
        let full = std::io::Error::from_raw_os_error(28);
        let text = format!("Could not allocate clusters in '{}'", self.name());
        Error::io(text, full)
    }

    /// Counts the lowest space that is not counted yet, which makes it free.
    pub(super) async fn count_fixed_space(&self, counts: &mut Counts, end: u64) -> Result<()> {
        let Some(growth) = self.plan_fixed(counts, end)? else {
            return Err(self.no_space());
        };
        self.count_as_free(counts, growth).await
    }

    /// Counts space that is not counted yet, which makes what its counts leave free.
    pub(super) async fn count_as_free(
        &self,
        counts: &mut Counts,
        growth: CountGrowth,
    ) -> Result<()> {
        // A damaged image may have tables where nothing is counted (invariant S3).
        self.refuse_free_metadata(std::slice::from_ref(&(growth.start..growth.end)))?;
        self.write_counts(counts, &growth).await?;
        // Its content is not queried: it may be large, and on a remote host.
        let (first, free) = (growth.first_free(), growth.end - growth.first_free());
        let mut state = self.lock();
        state
            .space
            .free
            .add(HostCluster(first), free, SpaceContent::Unknown);
        Ok(())
    }

    /// The block, and the table, that it takes to count the lowest space before cluster `end` that
    /// is not counted; more blocks where they have no room in what one of them counts. `None` if
    /// nothing would become free.
    pub(super) fn plan_fixed(&self, counts: &mut Counts, end: u64) -> Result<Option<CountGrowth>> {
        let geometry = self.geometry();
        let total = end.div_ceil(geometry.refcounts_per_block());
        let total = total.min(TABLE_ENTRIES_MAX);
        while counts.blocks_there < total && counts.refcounts.block(counts.blocks_there)?.is_some()
        {
            counts.blocks_there += 1;
        }
        let first = counts.blocks_there;
        let start = geometry.first_counted(first).0;
        let entries = counts.refcounts.table().len() as u64;
        for last in first..total {
            if last > first && counts.refcounts.block(last)?.is_some() {
                return Ok(None);
            }
            let wanted = match last < entries {
                true => 0,
                false => table_entries(geometry, self.size(), (entries, last, total)),
            };
            let growth = CountGrowth {
                start,
                end: geometry.first_counted(last + 1).0.min(end),
                blocks: (first..=last).collect(),
                table_clusters: wanted.div_ceil(geometry.refcount_table_entries_per_cluster()),
            };
            // A table that moves leaves the clusters of the old one free.
            let is_worth_it = growth.first_free() < growth.end
                || (growth.table_clusters > 0 && growth.first_free() == growth.end);
            if is_worth_it {
                return Ok(Some(growth));
            }
        }
        Ok(None)
    }
}
