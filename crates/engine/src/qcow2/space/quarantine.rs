//! Space that no entry refers to any more, on its way to the quarantine.

use super::growth;
use crate::policy::DiscardPolicy;
use crate::qcow2::geometry::HOST_BLOCK_BYTES;
use crate::qcow2::plan::{Freed, Unref};
use crate::qcow2::{Qcow2, State};

impl Qcow2 {
    /// Space that no entry refers to any more goes to the quarantine.
    pub(in crate::qcow2) fn give_up(&self, state: &mut State, freed: Freed) {
        let epoch = state.mapping.epochs.current();
        match &freed {
            Freed::Subclusters(host, mask) => {
                let cluster = self.host_cluster(*host);
                state.space.punches.want(cluster, epoch, *mask);
            }
            Freed::Cluster(_) | Freed::Compressed(_) => {
                let all = self.geometry().all_subclusters();
                for cluster in self.clusters_of(&freed) {
                    state.space.punches.call_off(cluster, all);
                }
            }
        }
        state.space.quarantine.push((freed, epoch));
    }

    /// Returns whether the space of single subclusters is released.
    pub(in crate::qcow2) fn punches_subclusters(&self) -> bool {
        let keeps = self.policy == growth::Policy::Contiguous && self.unref == Unref::Free;
        self.discard == DiscardPolicy::Unmap && !keeps && self.file.capabilities().punches_holes
    }

    /// Returns whether a discard leaves holes in subclusters that stay mapped.
    pub(in crate::qcow2) fn punches_in_place(&self) -> bool {
        let zeroes = self.data.capabilities().punches_holes;
        let larger = self.geometry().subcluster_bytes() > HOST_BLOCK_BYTES;
        self.punches_subclusters() && zeroes && larger
    }
}
