//! Counts that are raised ahead of need.
//!
//! A guest that flushes after every few writes would wait twice for each flush: a count must be
//! durable before the entry that it counts for (D1). So a cycle that raises a few counts raises
//! those of the clusters that will be taken next with them, in the same sectors; what takes such a
//! cluster raises nothing, and its cycle may have no counts to write at all.
//!
//! Such a cluster is free and its count is 1: a leak, if the power fails. There are never more than
//! [`AHEAD_BYTES_MAX`] of them, a cycle that raises many raises none ahead, and `close` lowers
//! them.

use super::alloc::SpaceContent;
use super::state::HostSpace;
use crate::Result;
use crate::geometry::HostCluster;
use crate::{Counts, Qcow2};

/// Clusters whose counts are raised ahead, at most.
const AHEAD_MAX: u64 = 64;
/// Bytes of these clusters: what a crash leaks at most.
const AHEAD_BYTES_MAX: u64 = 4 << 20;
/// Number of cycles that raise few counts before any count is raised ahead: a command that writes
/// once leaves no leak.
const CYCLES_BEFORE: u32 = 2;

/// Returns how many clusters should be counted ahead after `cycles` cycles that raised few counts,
/// of which the last one raised `raised`.
fn wanted(cycles: u32, raised: u64, cluster_bits: u32) -> u64 {
    let most = (AHEAD_BYTES_MAX >> cluster_bits).clamp(1, AHEAD_MAX);
    match cycles.checked_sub(CYCLES_BEFORE) {
        None | Some(0) => 0,
        Some(doublings) => raised.saturating_mul(1 << doublings.min(16)).min(most),
    }
}

impl Qcow2 {
    /// Raises the counts of the clusters that will be taken next, after `raised` were. A request
    /// that takes one of them meanwhile is served by a later cycle, which finds these counts
    /// durable or writes them itself.
    pub(crate) async fn count_ahead(&self, counts: &mut Counts, raised: u64) {
        let bits = self.geometry().cluster_bits();
        if raised == 0 || raised > AHEAD_MAX {
            return;
        }
        counts.small_cycles = counts.small_cycles.saturating_add(1);
        let picked = {
            let mut state = self.lock();
            let there = state.space.raised.ahead() as u64;
            let wanted = wanted(counts.small_cycles, raised, bits).saturating_sub(there);
            state.space.take_uncounted(wanted)
        };
        for (cluster, content) in picked {
            let added = counts.refcounts.add(cluster, 1).await;
            let mut state = self.lock();
            state.space.free.add(cluster, 1, content);
            // Without its block it stays as it was, and the request that takes it gets the error.
            if added.is_ok() {
                state.space.raised.count_ahead(cluster);
            }
        }
    }

    /// Lowers the counts raised ahead of clusters that were not taken; the next cycle writes them.
    pub(crate) async fn release_counted_ahead(&self, counts: &mut Counts) -> Result<()> {
        // One by one, so that a failure leaves the others as they are.
        loop {
            let next = self.lock().space.raised.next_ahead();
            let Some(cluster) = next else {
                return Ok(());
            };
            counts.refcounts.add(cluster, -1).await?;
        }
    }
}

impl HostSpace {
    /// The lowest free clusters that are not counted, for a moment not to be taken.
    fn take_uncounted(&mut self, count: u64) -> Vec<(HostCluster, SpaceContent)> {
        let mut picked = Vec::new();
        let mut passed = Vec::new();
        while (picked.len() as u64) < count
            && let Some((cluster, _, content)) = self.free.take(1)
        {
            match self.raised.is_ahead(cluster) {
                true => passed.push((cluster, content)),
                false => picked.push((cluster, content)),
            }
        }
        for (cluster, content) in passed {
            self.free.add(cluster, 1, content);
        }
        picked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_ahead_begins_late_doubles_and_is_bounded() {
        let wanted_64k = |cycles| wanted(cycles, 1, 16);
        assert_eq!(
            [1, 2, 3, 4, 8, 9, 1000].map(wanted_64k),
            [0, 0, 2, 4, 64, 64, 64]
        );
        assert_eq!(wanted(1000, 64, 21), 2);
        assert_eq!(wanted(1000, 64, 9), 64);
        assert_eq!(wanted(3, 8, 16), 16);
    }
}
