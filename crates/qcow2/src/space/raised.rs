//! Counts that have to be raised, and those that are already.

use std::collections::{BTreeMap, BTreeSet};

use crate::geometry::HostCluster;

/// References that were added and that no cycle has counted yet. A cluster that is counted ahead
/// has its count of 1 before it has the reference.
#[derive(Debug, Default)]
pub(crate) struct Raised {
    /// References added since the last cut.
    since_cut: BTreeMap<HostCluster, u64>,
    /// Free clusters whose count is 1 already, or will be with the next barrier.
    ahead: BTreeSet<HostCluster>,
}

impl Raised {
    /// A cluster gets a reference, which the next cut counts unless it is counted ahead.
    pub fn add(&mut self, cluster: HostCluster) {
        let is_counted = self.ahead.remove(&cluster);
        if !is_counted {
            *self.since_cut.entry(cluster).or_default() += 1;
        }
    }

    /// Takes the references added so far: a cycle counts them.
    pub fn cut(&mut self) -> Vec<(HostCluster, u64)> {
        std::mem::take(&mut self.since_cut).into_iter().collect()
    }

    /// A cycle has failed before it has counted these.
    pub fn take_back(&mut self, raised: Vec<(HostCluster, u64)>) {
        for (cluster, count) in raised {
            *self.since_cut.entry(cluster).or_default() += count;
        }
    }

    /// Clusters whose counts the next cut raises.
    pub fn clusters(&self) -> usize {
        self.since_cut.len()
    }

    /// The count of a free cluster is raised.
    pub fn count_ahead(&mut self, cluster: HostCluster) {
        self.ahead.insert(cluster);
    }

    /// Returns whether the count of a free cluster is raised.
    pub fn is_ahead(&self, cluster: HostCluster) -> bool {
        self.ahead.contains(&cluster)
    }

    /// Takes a cluster that is counted ahead, whose count is lowered again.
    pub fn next_ahead(&mut self) -> Option<HostCluster> {
        self.ahead.pop_first()
    }

    /// Clusters that are counted ahead.
    pub fn ahead(&self) -> usize {
        self.ahead.len()
    }

    /// Returns whether no count differs from what the medium should have.
    pub fn is_empty(&self) -> bool {
        self.since_cut.is_empty() && self.ahead.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: HostCluster = HostCluster(7);

    #[test]
    fn a_cluster_that_is_counted_ahead_is_not_counted_again() {
        let mut raised = Raised::default();
        raised.count_ahead(CLUSTER);
        assert!(raised.is_ahead(CLUSTER) && !raised.is_empty());
        raised.add(CLUSTER);
        assert!(raised.is_empty() && raised.cut().is_empty());
        raised.add(CLUSTER);
        assert_eq!(raised.cut(), [(CLUSTER, 1)]);
    }

    #[test]
    fn counts_that_could_not_be_raised_are_added_to_later_ones() {
        let mut raised = Raised::default();
        raised.add(CLUSTER);
        let cut = raised.cut();
        raised.add(CLUSTER);
        raised.take_back(cut);
        assert_eq!(raised.clusters(), 1);
        assert_eq!(raised.cut(), [(CLUSTER, 2)]);
    }
}
