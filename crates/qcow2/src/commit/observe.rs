//! A look at an image in operation, for tests that crash it.

use std::sync::atomic::Ordering;

use super::probe::{Observation, Stage};
use crate::Qcow2;
use crate::geometry::HostCluster;

impl Qcow2 {
    /// Returns the current stage of write-back.
    pub fn stage(&self) -> Stage {
        let stage = self.probe.stage.load(Ordering::Relaxed);
        Stage::ALL[usize::from(stage)]
    }

    /// Returns whether the cluster with this byte of the image file is known to hold metadata, so
    /// that no guest data can land there.
    pub fn is_protected(&self, host_offset: u64) -> bool {
        let cluster = HostCluster(host_offset >> self.geometry().cluster_bits());
        self.lock().space.protected.contains(cluster)
    }

    /// Returns a snapshot of the current activity.
    pub fn observe(&self) -> Observation {
        let state = self.lock();
        let stage = self.stage();
        // The references that the last stages handle are not free before these end.
        let opening = usize::from(matches!(stage, Stage::Lower | Stage::Release));
        let in_cycle = self.probe.in_cycle.load(Ordering::Relaxed) + opening;
        let evicted_before = self.probe.evicted.load(Ordering::Relaxed);
        Observation {
            stage,
            quarantined: state.space.quarantine.len() + in_cycle,
            joined: state.mapping.joint.shared(),
            evicted: state.mapping.tables.evicted() - evicted_before,
            refcount_table_moved: self.probe.refcount_table_moves.load(Ordering::Relaxed) > 0,
            l1_table_moved: self.probe.l1_table_moves.load(Ordering::Relaxed) > 0,
            snapshots_change: self.probe.snapshots_change.load(Ordering::Relaxed) > 0,
        }
    }
}
