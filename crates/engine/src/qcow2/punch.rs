//! Holes: the space of free clusters, of subclusters that were given up in clusters that stay
//! mapped, and of parts of a subcluster.
//!
//! A subcluster's space goes back to the host when the clearing of its bit is durable and no
//! request is left that may read it (invariant D2). Until then a write may fill it again, and calls
//! the hole off; while it is being punched, a write waits. Whole clusters are punched when nothing
//! refers to them, and before they can be taken. A part of a subcluster is punched in place, at
//! once: its entry goes on to say that there is data, so for everybody else it is as if zeroes were
//! written there.

use std::collections::BTreeMap;
use std::ops::Range;

use cowslip_queue::Pending;
use futures_util::future::join_all;

use super::admit::{Blocked, LeaseGuard, Place};
use super::alloc::Content;
use super::geometry::{Geometry, GuestOffset, HostCluster, SubclusterMask};
use super::inflight::{Kind, LeaseRequest};
use super::plan::{self, Freed};
use super::{Counts, Qcow2};
use crate::Result;
use crate::chain::Below;
use crate::file::AlignedFile;
use crate::policy::DiscardPolicy;
use crate::sync::Waiters;

/// Holes that are punched at once.
const AT_ONCE: usize = 32;
/// The block of the usual file systems: a hole that is smaller gives nothing back.
pub const HOST_BLOCK_BYTES: u64 = 4096;

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

    /// These subclusters are about to be written, or the cluster is given up as a whole.
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

    /// Begins to punch what was cleared in `epoch` and is still wanted back.
    fn issue(&mut self, cluster: HostCluster, epoch: u64) -> SubclusterMask {
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
    fn done(&mut self, cluster: HostCluster) {
        // Dropping the waiters wakes them.
        self.issued.remove(&cluster);
    }
}

/// A hole in place: what is held meanwhile, and the bytes of the file.
type Hole<'a> = (LeaseGuard<'a>, Range<u64>);

/// The subclusters whose space goes with that of `given_up`: those that fill up its blocks of the
/// host and hold no data either (`unused`).
pub fn with_neighbours(
    geometry: &Geometry,
    given_up: SubclusterMask,
    unused: SubclusterMask,
) -> SubclusterMask {
    let per_block = HOST_BLOCK_BYTES.div_ceil(geometry.subcluster_bytes());
    let mut out = given_up;
    for run in runs(given_up) {
        let first = run.start / per_block * per_block;
        let end = run.end.next_multiple_of(per_block);
        out |= (first..end).fold(0, |mask, i| mask | 1 << i) & unused;
    }
    out & geometry.all_subclusters()
}

/// The runs of set bits.
fn runs(mask: SubclusterMask) -> impl Iterator<Item = Range<u64>> {
    let mut rest = u64::from(mask);
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let start = u64::from(rest.trailing_zeros());
        let end = start + u64::from((rest >> start).trailing_ones());
        rest &= !((1 << end) - 1);
        Some(start..end)
    })
}

impl Qcow2 {
    /// Punches what has become due: the clearing is durable, and its epoch has left. Called by the
    /// holder of the turn, before any cluster becomes free.
    pub(super) async fn punch_subclusters(&self, counts: &mut Counts, due: &[(Freed, u64)]) {
        let due = due.iter().filter_map(|(freed, epoch)| match freed {
            Freed::Subclusters(host, _) => Some((self.host_cluster(*host), *epoch)),
            Freed::Cluster(_) | Freed::Compressed(_) => None,
        });
        let due: Vec<_> = due.collect();
        for some in due.chunks(AT_ONCE) {
            let mut issued = Vec::new();
            for &(cluster, epoch) in some {
                // Whatever the entry says: nobody else may have it.
                if matches!(counts.refcounts.get(cluster).await, Ok(1)) {
                    let mask = self.lock().punches.issue(cluster, epoch);
                    issued.push((cluster, mask));
                }
            }
            let punches = issued.iter().filter(|(_, mask)| *mask != 0);
            let punched = punches.map(|&(cluster, mask)| async move {
                let zeroes = punch(&self.file, self.geometry(), (cluster, mask)).await;
                (cluster, zeroes)
            });
            let punched = join_all(punched).await;
            let mut state = self.lock();
            for (cluster, zeroes) in punched {
                state.punches.done(cluster);
                let fresh = state.fresh.of(cluster) | zeroes;
                state.fresh.set(cluster, fresh);
            }
        }
    }

    /// Leaves a hole in a part of a subcluster, which stays mapped. It holds what a write in place
    /// holds: a shared lease, and an epoch, without which the cluster could be freed and taken by
    /// somebody else before the host comes to punch it.
    pub(super) async fn punch_in_place(&self, part: Range<u64>, below: &Below) -> Result<()> {
        let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
        let slice = self.geometry().slice_of(cluster);
        let mut place = Place {
            image: self,
            ticket: None,
        };
        loop {
            let pin = self.load(slice).await?;
            if pin.slice.is_none() {
                return Ok(());
            }
            let found = self.hole_to_punch(part.clone(), below, &mut place)?;
            drop(pin);
            match found {
                None => return Ok(()),
                Some(Ok((stay, hole))) => {
                    // A discard is advice: where it fails, the bytes merely stay.
                    drop(self.data.discard(hole.start, hole.end - hole.start).await);
                    stay.end(&mut self.lock());
                    return Ok(());
                }
                Some(Err(need)) => drop(self.satisfy(need, &mut place).await?),
            }
        }
    }

    /// The bytes of the file that a discard of this part turns into a hole, held; or what has to be
    /// waited for. The slice is in memory.
    fn hole_to_punch<'a>(
        &'a self,
        part: Range<u64>,
        below: &Below,
        place: &mut Place<'_>,
    ) -> Result<Option<std::result::Result<Hole<'a>, Blocked>>> {
        let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
        let slice = self.geometry().slice_of(cluster);
        let mut state = self.lock();
        let state = &mut *state;
        self.unlatched(state)?;
        let view = self.view(state, cluster, below)?;
        let bytes = part.start - view.start..part.end - view.start;
        let Some((host, hole)) = plan::hole(&self.format, &view, &bytes) else {
            return Ok(None);
        };
        self.protect(state, host)?;
        if let Some(drained) = &mut state.draining {
            return Ok(Some(Err(Blocked::Other(drained.wait()))));
        }
        let want = LeaseRequest {
            range: view.start + hole.start..view.start + hole.end,
            kind: Kind::Shared,
        };
        let wants = std::slice::from_ref(&want);
        if let Some(obstacle) = state.leases.obstacle(slice, wants, place.ticket).cloned() {
            let (ticket, waiting) = state.leases.wait(slice, obstacle, place.ticket);
            return Ok(Some(Err(Blocked::Lease(ticket, waiting))));
        }
        if let Some(ticket) = place.ticket.take() {
            state.leases.release(ticket);
        }
        state.mark_dirty(&part);
        let stay = LeaseGuard::new(self, state, (slice, want));
        Ok(Some(Ok((stay, host.0 + hole.start..host.0 + hole.end))))
    }

    /// Gives the space of freed clusters back to the host, if that is wanted. They are in nobody's
    /// hands meanwhile, so a hole never meets a new write.
    pub(super) async fn punch_clusters(&self, free: &[HostCluster]) -> Vec<Content> {
        let mut content = vec![Content::Unknown; free.len()];
        if self.discard == DiscardPolicy::Ignore {
            return content;
        }
        let zeroes = self.file.capabilities().punches_holes;
        let mut at = 0;
        while at < free.len() {
            let len = (1..free.len() - at)
                .take_while(|i| free[at + i].0 == free[at].0 + *i as u64)
                .count()
                + 1;
            let start = self.geometry().host_offset(free[at]).0;
            let bytes = (len as u64) << self.geometry().cluster_bits();
            // A discard is advice: where it fails, the space merely stays allocated.
            if let (Ok(punched), true) = (self.file.discard(start, bytes).await, zeroes) {
                for (i, content) in content[at..at + len].iter_mut().enumerate() {
                    let cluster = start + ((i as u64) << self.geometry().cluster_bits());
                    if punched.start <= cluster
                        && cluster + self.geometry().cluster_bytes() <= punched.end
                    {
                        *content = Content::Zeroes;
                    }
                }
            }
            at += len;
        }
        content
    }
}

/// Punches these subclusters; returns those that read as zeroes now.
pub(super) async fn punch(
    file: &AlignedFile,
    geometry: &Geometry,
    (cluster, subclusters): (HostCluster, SubclusterMask),
) -> SubclusterMask {
    let start = geometry.host_offset(cluster).0;
    let mut zeroes = 0;
    for run in runs(subclusters) {
        let bytes = run.start << geometry.subcluster_bits()..run.end << geometry.subcluster_bits();
        let len = bytes.end - bytes.start;
        // A discard is advice: where it fails, the space merely stays allocated.
        if let Ok(punched) = file.discard(start + bytes.start, len).await
            && file.capabilities().punches_holes
        {
            let within = punched.start.max(start) - start..punched.end.max(start) - start;
            zeroes |= geometry.subclusters_within(&within);
        }
    }
    zeroes & subclusters
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

    #[test]
    fn holes_reach_to_the_blocks_of_the_host_where_nothing_is_in_the_way() {
        let small = Geometry::new(14, 4, true).expect("subclusters of 512 bytes");
        assert_eq!(with_neighbours(&small, 0b100, 0xff), 0xff);
        assert_eq!(with_neighbours(&small, 0b100, 0b1101), 0b1101);
        assert_eq!(with_neighbours(&small, 1 << 9, 0xffff), 0xff00);
        assert_eq!(with_neighbours(&small, 0b1_1000_0000, 0xffff), 0xffff);
        let large = Geometry::new(17, 4, true).expect("subclusters of 4 KiB");
        assert_eq!(with_neighbours(&large, 0b100, 0xff), 0b100);
    }

    #[test]
    fn runs_are_found() {
        assert_eq!(runs(0).count(), 0);
        assert_eq!(runs(0b1011_0001).collect::<Vec<_>>(), [0..1, 4..6, 7..8]);
        assert_eq!(runs(u32::MAX).next(), Some(0..32));
        assert_eq!(runs(u32::MAX).count(), 1);
    }
}
