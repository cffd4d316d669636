//! Holes: the space of free clusters, of subclusters that were discarded in clusters that stay
//! mapped, and of parts of a subcluster.
//!
//! A subcluster's space goes back to the host when the clearing of its bit is durable and no
//! request is left that may read it (invariant D2). Until then a write may fill it again, and calls
//! the hole off; while it is being punched, a write waits. Whole clusters are punched when nothing
//! refers to them, and before they can be taken. A part of a subcluster is punched in place, at
//! once: its entry goes on to say that there is data, so for everybody else it is as if zeroes were
//! written there.

use std::ops::Range;

use cowslip_block::joins::join_all;

use super::alloc::SpaceContent;
use super::growth;
use crate::Result;
use crate::backing::Backing;
use crate::file::AlignedFile;
use crate::geometry::{Geometry, GuestOffset, HOST_BLOCK_BYTES, HostCluster, SubclusterMask};
use crate::mapping::inflight::{LeaseKind, LeaseRequest, Ticket};
use crate::path::admit::LeaseGuard;
use crate::path::obstacle::{Blocked, Look};
use crate::plan::{self, Freed, Unref};
use crate::policy::DiscardPolicy;
use crate::{Counts, Qcow2, State};

/// Holes that are punched at once.
const AT_ONCE: usize = 32;

/// A hole in place: the resources held meanwhile, and the bytes of the file.
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
    /// Returns whether the space of single subclusters is released.
    pub(crate) fn punches_subclusters(&self) -> bool {
        let keeps = self.policy == growth::Policy::Contiguous && self.unref == Unref::Free;
        self.discard == DiscardPolicy::Unmap && !keeps && self.file.capabilities().punches_holes
    }

    /// Returns whether a discard leaves holes in subclusters that stay mapped.
    pub(crate) fn punches_in_place(&self) -> bool {
        let zeroes = self.data.capabilities().punches_holes;
        let larger = self.geometry().subcluster_bytes() > HOST_BLOCK_BYTES;
        self.punches_subclusters() && zeroes && larger
    }

    /// Punches holes that have become due: the clearing is durable, and its epoch has left. Called
    /// by the holder of the turn, before any cluster becomes free.
    pub(crate) async fn punch_subclusters(&self, counts: &mut Counts, due: &[(Freed, u64)]) {
        let due = due.iter().filter_map(|(freed, epoch)| match freed {
            Freed::Subclusters(host, _) => Some((self.host_cluster(*host), *epoch)),
            Freed::Cluster(_) | Freed::Compressed(_) => None,
        });
        let due: Vec<_> = due.collect();
        for some in due.chunks(AT_ONCE) {
            let mut issued = Vec::new();
            for &(cluster, epoch) in some {
                // Whatever the entry says: nothing else may use it.
                if matches!(counts.refcounts.get(cluster).await, Ok(1)) {
                    let mask = self.lock().space.punches.issue(cluster, epoch);
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
                state.space.punches.done(cluster);
                let fresh = state.space.fresh.of(cluster) | zeroes;
                state.space.fresh.set(cluster, fresh);
            }
        }
    }

    /// Leaves a hole in a part of a subcluster, which stays mapped. It holds what a write in place
    /// holds: a shared lease, and an epoch, without which the cluster could be freed and reused
    /// before the host punches it.
    pub(crate) async fn punch_in_place(&self, part: Range<u64>, below: &dyn Backing) -> Result<()> {
        let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
        let slice = self.geometry().slice_of(cluster);
        let held = self.when_clear(|state, place| {
            if !self.has_table(state, cluster)? {
                return Ok(None);
            }
            if !state.mapping.tables.look(slice) {
                return Err(Blocked::Slice(slice).into());
            }
            self.hole_to_punch(state, part.clone(), below, *place)
        });
        if let Some((stay, hole)) = held.await? {
            // A discard is advice: where it fails, the bytes merely stay.
            drop(self.data.discard(hole.start, hole.end - hole.start).await);
            stay.end(&mut self.lock());
        }
        Ok(())
    }

    /// The bytes of the file that a discard of this part turns into a hole, held, if there are any.
    /// The slice is in memory.
    fn hole_to_punch(
        &self,
        state: &mut State,
        part: Range<u64>,
        below: &dyn Backing,
        place: Option<Ticket>,
    ) -> Look<Option<Hole<'_>>> {
        let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
        let slice = self.geometry().slice_of(cluster);
        let view = self.view(state, cluster, below)?;
        let bytes = part.start - view.start..part.end - view.start;
        let Some((host, hole)) = plan::hole(&self.format, &view, &bytes) else {
            return Ok(None);
        };
        self.protect(state, host)?;
        let want = LeaseRequest {
            range: view.start + hole.start..view.start + hole.end,
            kind: LeaseKind::Shared,
        };
        state.expect_no_obstacle(slice, std::slice::from_ref(&want), place)?;
        state.bitmaps.mark(&part);
        let stay = LeaseGuard::new(self, state, (slice, want));
        Ok(Some((stay, host.0 + hole.start..host.0 + hole.end)))
    }

    /// Releases the space of freed clusters to the host, if that is wanted. They cannot be taken
    /// meanwhile, so a hole never meets a new write.
    pub(crate) async fn punch_clusters(&self, free: &[HostCluster]) -> Vec<SpaceContent> {
        let mut content = vec![SpaceContent::Unknown; free.len()];
        if self.discard == DiscardPolicy::Ignore && !self.lock().space.gives_back {
            return content;
        }
        let zeroes = self.file.capabilities().punches_holes;
        let spared = self.lock().space.are_spared(free);
        let mut at = 0;
        while at < free.len() {
            let is_next = |i: &usize| free[at + i].0 == free[at].0 + *i as u64;
            let len = (1..free.len() - at)
                .take_while(|i| is_next(i) && spared[at + i] == spared[at])
                .count()
                + 1;
            if spared[at] {
                // They hold what they held.
                at += len;
                continue;
            }
            let start = self.geometry().host_offset(free[at]).0;
            let bytes = (len as u64) << self.geometry().cluster_bits();
            // A discard is advice: where it fails, the space merely stays allocated.
            if let (Ok(punched), true) = (self.file.discard(start, bytes).await, zeroes) {
                for (i, content) in content[at..at + len].iter_mut().enumerate() {
                    let cluster = start + ((i as u64) << self.geometry().cluster_bits());
                    if punched.start <= cluster
                        && cluster + self.geometry().cluster_bytes() <= punched.end
                    {
                        *content = SpaceContent::Zeroes;
                    }
                }
            }
            at += len;
        }
        content
    }
}

/// Punches these subclusters; returns those that read as zeroes now.
pub(crate) async fn punch(
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
