//! Holes that are wanted in the space of subclusters, and those that are being punched.

use std::collections::BTreeMap;

use cowslip_queue::Pending;

use crate::geometry::{HostCluster, SubclusterMask};
use crate::sync::Waiters;

/// Subclusters without data whose space is wanted back.
#[derive(Debug, Default)]
pub struct Punches {
    /// Not before the clearing is durable, by the epoch in which it was made.
    wanted: BTreeMap<HostCluster, Vec<(u64, SubclusterMask)>>,
    /// Being punched, and who waits for that.
    issued: BTreeMap<HostCluster, (SubclusterMask, Waiters)>,
}

impl Punches {
    /// Wants the space of these subclusters back, which were cleared in `epoch`.
    pub fn want(&mut self, cluster: HostCluster, epoch: u64, subclusters: SubclusterMask) {
        // The latest clearing counts: an earlier one may have been durable before a write between
        // them.
        self.call_off(cluster, subclusters);
        let wanted = self.wanted.entry(cluster).or_default();
        wanted.push((epoch, subclusters));
    }

    /// These subclusters are about to be written, or the cluster is freed as a whole.
    pub fn call_off(&mut self, cluster: HostCluster, subclusters: SubclusterMask) {
        let Some(wanted) = self.wanted.get_mut(&cluster) else {
            return;
        };
        wanted.retain_mut(|(_, mask)| {
            *mask &= !subclusters;
            *mask != 0
        });
        if wanted.is_empty() {
            self.wanted.remove(&cluster);
        }
    }

    /// Something to wait for, if one of these subclusters is being punched.
    pub fn obstacle(
        &mut self,
        cluster: HostCluster,
        subclusters: SubclusterMask,
    ) -> Option<Pending<()>> {
        let (mask, waiters) = self.issued.get_mut(&cluster)?;
        (*mask & subclusters != 0).then(|| waiters.wait())
    }

    /// Begins to punch subclusters that were cleared in `epoch` and are still to be released.
    pub fn issue(&mut self, cluster: HostCluster, epoch: u64) -> SubclusterMask {
        let Some(wanted) = self.wanted.get_mut(&cluster) else {
            return 0;
        };
        let mut due = 0;
        wanted.retain(|(of, mask)| {
            if *of == epoch {
                due |= mask;
            }
            *of != epoch
        });
        if wanted.is_empty() {
            self.wanted.remove(&cluster);
        }
        if due != 0 {
            self.issued.entry(cluster).or_default().0 |= due;
        }
        due
    }

    /// The holes of this cluster are punched, as far as they could be.
    pub fn done(&mut self, cluster: HostCluster) {
        // Dropping the waiters wakes them.
        self.issued.remove(&cluster);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: HostCluster = HostCluster(7);

    #[test]
    fn a_write_calls_the_hole_off() {
        let mut punches = Punches::default();
        punches.want(CLUSTER, 3, 0b1111);
        punches.call_off(CLUSTER, 0b0110);
        assert_eq!(punches.issue(CLUSTER, 3), 0b1001);
        assert!(punches.wanted.is_empty());
    }

    #[test]
    fn what_is_given_up_again_waits_for_the_later_clearing() {
        let mut punches = Punches::default();
        punches.want(CLUSTER, 3, 0b11);
        punches.call_off(CLUSTER, 0b01);
        punches.want(CLUSTER, 4, 0b01);
        assert_eq!(punches.issue(CLUSTER, 3), 0b10);
        assert_eq!(punches.issue(CLUSTER, 3), 0);
        assert_eq!(punches.issue(CLUSTER, 4), 0b01);
    }

    #[test]
    fn a_write_waits_for_a_hole_that_is_being_punched() {
        let mut punches = Punches::default();
        punches.want(CLUSTER, 3, 0b11);
        assert!(punches.obstacle(CLUSTER, 0b11).is_none());
        punches.issue(CLUSTER, 3);
        assert!(punches.obstacle(CLUSTER, 0b100).is_none());
        let mut waiting = punches
            .obstacle(CLUSTER, 0b10)
            .expect("it is being punched");
        punches.done(CLUSTER);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(
            std::pin::Pin::new(&mut waiting)
                .poll(&mut context)
                .is_ready()
        );
        assert!(punches.obstacle(CLUSTER, 0b11).is_none());
    }
}
