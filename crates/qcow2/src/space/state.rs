//! The clusters of the image file that an open image knows of.

use cowslip_queue::Pending;

use super::alloc::{FreeSet, Fresh, Protected, SpaceContent};
use super::punches::Punches;
use super::quarantine::Quarantine;
use super::raised::Raised;
use crate::geometry::{Geometry, HostCluster, SubclusterMask};
use crate::plan::Freed;

/// Clusters of the image file: which are free, which may become so, and which hold metadata.
#[derive(Debug)]
pub(crate) struct HostSpace {
    pub(crate) free: FreeSet,
    pub(crate) fresh: Fresh,
    pub(crate) protected: Protected,
    pub(crate) raised: Raised,
    pub(crate) quarantine: Quarantine,
    /// Free clusters that have their space on the host, for new tables.
    pub(super) table_space: FreeSet,
    /// Subclusters whose space is wanted back.
    pub(super) punches: Punches,
    /// The first cluster beyond the end of the file that L1 refers to: the file does not grow
    /// there.
    table_beyond: Option<HostCluster>,
    /// Clusters of the file below which space is claimed: the file is that long.
    claimed: u64,
    /// Clusters of the file when it was opened: only clusters above were grown by this session.
    claimed_at_open: u64,
    /// Free clusters below which the file is grown ahead of need.
    low_water: u64,
    /// The file is being compacted: the space of freed clusters goes back to the host, whatever is
    /// done with discards.
    pub(crate) gives_back: bool,
    /// Clusters that keep their space when they are freed even so, in order: something is about to
    /// be moved there.
    spared: Vec<HostCluster>,
}

impl HostSpace {
    /// The space of an image whose file is not known yet.
    pub fn new(fresh: Fresh) -> HostSpace {
        HostSpace {
            free: FreeSet::default(),
            fresh,
            protected: Protected::default(),
            raised: Raised::default(),
            quarantine: Quarantine::default(),
            table_space: FreeSet::default(),
            punches: Punches::default(),
            table_beyond: None,
            claimed: 0,
            claimed_at_open: 0,
            low_water: 0,
            gives_back: false,
            spared: Vec::new(),
        }
    }

    /// These clusters, in order, keep their space when they are freed, and no others.
    pub fn spare(&mut self, clusters: Vec<HostCluster>) {
        debug_assert!(clusters.is_sorted());
        self.spared = clusters;
    }

    /// Returns which of these clusters keep their space when they are freed.
    pub(super) fn are_spared(&self, freed: &[HostCluster]) -> Vec<bool> {
        let is_spared = |cluster| self.spared.binary_search(cluster).is_ok();
        freed.iter().map(is_spared).collect()
    }

    /// The file has this many clusters at open.
    pub fn opened_with(&mut self, claimed: u64) {
        self.claimed = claimed;
        self.claimed_at_open = claimed;
    }

    /// Clusters of the file.
    pub fn claimed(&self) -> u64 {
        self.claimed
    }

    /// Clusters of the file when it was opened, unless it was cut below since.
    pub fn claimed_at_open(&self) -> u64 {
        self.claimed_at_open
    }

    /// The file has grown to `end`; it grows on ahead of need while fewer clusters than `low_water`
    /// are free.
    pub fn extend_to(&mut self, end: u64, low_water: u64) {
        self.claimed = end;
        self.low_water = low_water;
    }

    /// The file is about to be cut at `start`: what is free behind is not to be taken.
    pub fn cut_to(&mut self, start: u64) {
        self.free.cut_at(start);
        self.claimed = start;
        self.claimed_at_open = self.claimed_at_open.min(start);
    }

    /// Returns where the clusters begin that this session has grown and not used; the end of the
    /// file if there are none.
    pub fn unused_from(&self) -> u64 {
        let first = self.free.run_ending_at(self.claimed);
        first.unwrap_or(self.claimed).max(self.claimed_at_open)
    }

    /// Returns how many clusters should be free, if fewer are.
    pub fn wanted_ahead(&self) -> Option<u64> {
        (self.free.clusters() < self.low_water).then_some(self.low_water)
    }

    /// The file does not grow ahead of need until it has grown again.
    pub fn stop_growing_ahead(&mut self) {
        self.low_water = 0;
    }

    /// Returns whether the session has changed nothing, and kept no space ahead.
    pub fn is_as_opened(&self) -> bool {
        let is_unwritten = self.raised.is_empty() && self.quarantine.is_empty();
        is_unwritten && self.claimed == self.claimed_at_open
    }

    /// Takes free clusters, in as few runs as there are.
    ///
    /// # Panics
    /// If fewer are free.
    pub fn take(&mut self, count: u64) -> Vec<(HostCluster, SpaceContent)> {
        let mut taken = Vec::with_capacity(count as usize);
        while (taken.len() as u64) < count {
            let missing = count - taken.len() as u64;
            let run = self.free.take(missing);
            let (start, len, content) = run.expect("the caller has checked that there is enough");
            taken.extend((start.0..start.0 + len).map(|cluster| (HostCluster(cluster), content)));
        }
        taken
    }

    /// Frees clusters that were taken and that nothing has referred to.
    pub fn give_back(&mut self, taken: &[(HostCluster, SpaceContent)]) {
        for (cluster, content) in taken {
            self.free.add(*cluster, 1, *content);
        }
    }

    /// A cluster gets a reference, which the next cut counts.
    pub fn raise(&mut self, cluster: HostCluster) {
        self.raised.add(cluster);
    }

    /// Space that no entry refers to any more goes to the quarantine, in the epoch of now.
    pub fn give_up(&mut self, geometry: &Geometry, freed: Freed, epoch: u64) {
        match &freed {
            Freed::Subclusters(host, mask) => {
                let cluster = geometry.host_cluster(*host);
                self.punches.want(cluster, epoch, *mask);
            }
            Freed::Cluster(_) | Freed::Compressed(_) => {
                let all = geometry.all_subclusters();
                for cluster in freed.clusters(geometry) {
                    self.punches.call_off(cluster, all);
                }
            }
        }
        self.quarantine.give_up(freed, epoch);
    }

    /// Returns whether a cluster that the file has grown by is free, so that what refers to it did
    /// before it was there.
    pub fn is_free_growth(&self, cluster: HostCluster) -> bool {
        cluster.0 >= self.claimed_at_open && self.is_free(cluster)
    }

    /// Returns whether a cluster is known to be free.
    pub fn is_free(&self, cluster: HostCluster) -> bool {
        let has = |free: &FreeSet| {
            free.run_from(cluster.0)
                .is_some_and(|(at, ..)| at <= cluster.0)
        };
        has(&self.free) || has(&self.table_space)
    }

    /// A cluster has lost its last reference. Those that the scan has yet to look through are left
    /// to it: it goes by the counts, and would find them a second time. Clusters below `scanned`
    /// have been looked through.
    pub fn set_free(&mut self, scanned: u64, (cluster, content): (HostCluster, SpaceContent)) {
        self.fresh.set(cluster, 0);
        self.protected.remove(cluster);
        if cluster.0 < scanned || cluster.0 >= self.claimed_at_open {
            self.free.add(cluster, 1, content);
        }
    }

    /// Clusters that a new table may take.
    pub fn clusters_for_tables(&self) -> u64 {
        self.free.clusters() + self.table_space.clusters()
    }

    /// Clusters from `start` on that are kept for tables.
    pub fn table_space_from(&self, start: u64) -> u64 {
        self.table_space.clusters_from(start)
    }

    /// Frees the space that was reserved for tables and not used: at the end of the session, and
    /// when no other space is left. Returns whether there was some.
    pub fn release_table_space(&mut self) -> bool {
        let is_some = self.table_space.clusters() > 0;
        while let Some((start, len, content)) = self.table_space.take(u64::MAX) {
            self.free.add(start, len, content);
        }
        is_some
    }

    /// Protects the cluster of an L2 table. Returns whether the table may be written through: it
    /// overlaps no other metadata, and lies within the file, which else does not grow over it.
    pub fn protect_table(&mut self, cluster: HostCluster) -> bool {
        if cluster.0 >= self.claimed {
            let first = self.table_beyond.get_or_insert(cluster);
            *first = cluster.min(*first);
            return false;
        }
        self.protected.insert(cluster)
    }

    /// Returns a table that lies beyond the end of the file, and before `end`.
    pub fn table_before(&self, end: u64) -> Option<HostCluster> {
        self.table_beyond.filter(|table| table.0 < end)
    }

    /// Nothing is known of metadata any more.
    pub fn forget_metadata(&mut self) {
        self.protected = Protected::default();
        self.table_beyond = None;
    }

    /// Returns the wait for a hole that is being punched in one of these subclusters.
    pub fn hole_under_way(
        &mut self,
        cluster: HostCluster,
        subclusters: SubclusterMask,
    ) -> Option<Pending<()>> {
        self.punches.obstacle(cluster, subclusters)
    }

    /// A write fills these subclusters of a cluster: no other one may take some of them for fresh,
    /// and they are not punched.
    pub fn begin_fill(&mut self, cluster: HostCluster, subclusters: SubclusterMask) {
        self.fresh.set(cluster, 0);
        self.punches.call_off(cluster, subclusters);
    }
}
