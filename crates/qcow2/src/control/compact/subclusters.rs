//! Space of subclusters that hold nothing, in clusters of the disk that hold something: it was
//! allocated with the cluster, or held data that was zeroed or discarded since.
//!
//! No entry changes. The space goes back as after a discard (`space/punch.rs`): the hole is wanted
//! while no request is filling the cluster, is punched when all that has changed before is durable
//! and no request of before is left, is called off by a write that comes first, and a write that
//! comes while it is punched waits (invariant D2).
//!
//! | the cluster | |
//! | --- | --- |
//! | with a count of 1, some subclusters with data | loses the space of the others, in whole blocks of the host |
//! | without any data | stays: it was preallocated, which `--zeroes` is about |
//! | shared with a snapshot, or in a table that is; compressed | stays: its entries elsewhere may have data there |

use std::ops::Range;

use cowslip_boxed::boxed;

use super::CompactOptions;
use crate::Result;
use crate::entry::L2Entry;
use crate::geometry::{Geometry, GuestCluster, HOST_BLOCK_BYTES, HostOffset, SubclusterMask};
use crate::job::{Job, Stage};
use crate::mapping::inflight::{LeaseKind, LeaseRequest, Ticket};
use crate::path::obstacle::Look;
use crate::plan::Freed;
use crate::{Qcow2, State};

/// Clusters of one slice that are looked at together.
const GROUP_CLUSTERS: u64 = 64;
/// Holes of the file that are asked for at a time.
const HOLES_MAX: usize = 1024;
/// Clusters whose holes wait for a cycle, before there is one.
const WAITING_CLUSTERS_MAX: u64 = 1 << 12;

/// A cluster that holds something, and subclusters of it that hold nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Partial {
    guest: GuestCluster,
    host: HostOffset,
    unused: SubclusterMask,
}

/// Bytes that the host has allocated for each subcluster of a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Space([u32; 32]);

impl Space {
    fn total(&self) -> u64 {
        self.of(SubclusterMask::MAX)
    }

    fn of(&self, mask: SubclusterMask) -> u64 {
        let some = self
            .0
            .iter()
            .enumerate()
            .filter(|(i, _)| mask >> i & 1 != 0);
        some.map(|(_, &bytes)| u64::from(bytes)).sum()
    }
}

/// Returns those of some subclusters that fill whole blocks of the host.
fn in_whole_blocks(geometry: &Geometry, mask: SubclusterMask) -> SubclusterMask {
    let per_block = HOST_BLOCK_BYTES
        .div_ceil(geometry.subcluster_bytes())
        .min(32) as u32;
    let block = u32::MAX >> (32 - per_block);
    let firsts = (0..32).step_by(per_block as usize);
    firsts
        .map(|first| block << first)
        .filter(|block| mask & block == *block)
        .fold(0, |whole, block| whole | block)
}

/// Bytes of a range that are in none of these ranges, which are in order.
fn outside(range: &Range<u64>, holes: &[Range<u64>]) -> u64 {
    let overlaps = holes.iter().map(|hole| {
        let end = hole.end.min(range.end);
        end.saturating_sub(hole.start.max(range.start))
    });
    (range.end - range.start) - overlaps.sum::<u64>()
}

impl Qcow2 {
    /// Returns whether there are subclusters that can lose their space alone.
    pub(super) fn has_subclusters_to_release(&self, options: &CompactOptions) -> bool {
        options.subclusters
            && self.geometry().extended_l2()
            && !self.format.data_file
            && self.file.capabilities().punches_holes
    }

    /// Has subclusters that hold nothing lose their space, in clusters that hold something. The
    /// image was checked. Returns the bytes of the file that had space.
    #[boxed]
    pub(super) async fn release_subclusters(&self, job: &Job) -> Result<u64> {
        job.enter(Stage::Tables);
        let (mut at, mut bytes, mut waiting) = (GuestCluster(0), 0, 0);
        while let Some((group, next)) = self.partial_from(at).await? {
            at = next;
            job.begin(0).await?;
            let with_space = self.with_space(group).await;
            if with_space.is_empty() {
                continue;
            }
            let wanted =
                self.when_clear(|state, place| self.want_holes(state, &with_space, *place));
            bytes += wanted.await?;
            waiting += with_space.len() as u64;
            if waiting >= WAITING_CLUSTERS_MAX {
                waiting = 0;
                self.release_moved(job).await?;
                job.enter(Stage::Tables);
            }
        }
        if bytes > 0 {
            self.release_moved(job).await?;
        }
        Ok(bytes)
    }

    /// Counts the bytes that [`Qcow2::release_subclusters`] gives back, and changes nothing.
    #[boxed]
    pub(super) async fn count_subclusters(&self, job: &Job) -> Result<u64> {
        let (mut at, mut bytes) = (GuestCluster(0), 0);
        while let Some((group, next)) = self.partial_from(at).await? {
            at = next;
            job.begin(0).await?;
            let with_space = self.with_space(group).await;
            bytes += with_space
                .iter()
                .map(|(_, bytes)| bytes.total())
                .sum::<u64>();
        }
        Ok(bytes)
    }

    /// The partial clusters from one on, in its slice, and where to go on; `None` behind the disk.
    async fn partial_from(&self, at: GuestCluster) -> Result<Option<(Vec<Partial>, GuestCluster)>> {
        let geometry = self.geometry();
        let end = geometry.clusters_for(self.size());
        if at.0 >= end {
            return Ok(None);
        }
        let slice = geometry.slice_of(at);
        let behind = ((slice + 1) * geometry.slice_entries()).min(end);
        let nothing = Ok(Some((Vec::new(), GuestCluster(behind))));
        if !self.has_own_table(at) {
            return nothing;
        }
        let pin = self.load(slice).await?;
        if pin.slice.is_none() {
            return nothing;
        }
        let mut state = self.lock();
        let next = (at.0 + GROUP_CLUSTERS).min(behind);
        let mut found = Vec::new();
        for cluster in (at.0..next).map(GuestCluster) {
            found.extend(self.partial(&mut state, cluster)?);
        }
        Ok(Some((found, GuestCluster(next))))
    }

    /// A cluster of a table that is the disk's own, if it is a partial one. Its slice is in memory.
    fn partial(&self, state: &mut State, guest: GuestCluster) -> Result<Option<Partial>> {
        let entry = state.mapping.tables.entry(guest);
        let entry = entry.map_err(|error| self.corrupt_entry(state, guest, error))?;
        let L2Entry::Standard(standard) = entry else {
            return Ok(None);
        };
        let (Some(host), true) = (standard.host, standard.copied) else {
            return Ok(None);
        };
        let used = standard.allocated | state.mapping.joint.attempted(guest);
        let unused = self.geometry().all_subclusters() & !used;
        let unused = in_whole_blocks(self.geometry(), unused);
        if standard.allocated == 0 || unused == 0 {
            return Ok(None);
        }
        // As for redundant clusters.
        if self.writable {
            self.refuse_misplaced(state, &L2Entry::Standard(standard))?;
        }
        Ok(Some(Partial {
            guest,
            host,
            unused,
        }))
    }

    /// Leaves out subclusters that are holes of the file already: what the host has allocated for
    /// the others.
    async fn with_space(&self, group: Vec<Partial>) -> Vec<(Partial, Space)> {
        let geometry = self.geometry();
        let mut found = Vec::new();
        for mut partial in group {
            let start = partial.host.0;
            let holes = self.holes_of(start..start + geometry.cluster_bytes()).await;
            let mut space = Space::default();
            let unused = partial.unused;
            for subcluster in (0..geometry.subclusters()).filter(|i| unused >> i & 1 != 0) {
                let at = start + (u64::from(subcluster) << geometry.subcluster_bits());
                let bytes = outside(&(at..at + geometry.subcluster_bytes()), &holes);
                space.0[subcluster as usize] = u32::try_from(bytes).unwrap_or(u32::MAX);
                if bytes == 0 {
                    partial.unused &= !(1 << subcluster);
                }
            }
            if partial.unused != 0 {
                found.push((partial, space));
            }
        }
        found
    }

    /// Holes of a part of the file, by the host's allocation where that is known.
    async fn holes_of(&self, range: Range<u64>) -> Vec<Range<u64>> {
        if let Ok(holes) = self.file.holes(range.clone(), HOLES_MAX).await {
            return holes.ranges;
        }
        let extents = self
            .file
            .extents(range.start, range.end - range.start)
            .await;
        let extents = extents.unwrap_or_default().into_iter();
        let holes = extents.filter(|extent| extent.hole);
        holes
            .map(|hole| hole.start..hole.start + hole.len)
            .collect()
    }

    /// Wants holes in clusters that are still as they were, when no request is filling them.
    /// Returns the bytes that the host has allocated there.
    fn want_holes(
        &self,
        state: &mut State,
        group: &[(Partial, Space)],
        place: Option<Ticket>,
    ) -> Look<u64> {
        let geometry = self.geometry();
        let [(first, _), ..] = group else {
            return Ok(0);
        };
        let (last, _) = group[group.len() - 1];
        if !self.has_own_slice(state, first.guest)? {
            return Ok(0);
        }
        // What fills a subcluster, or moves the cluster, has an exclusive lease.
        let start = geometry.guest_offset(first.guest).0;
        let want = LeaseRequest {
            range: start..geometry.guest_offset(last.guest).0 + geometry.cluster_bytes(),
            kind: LeaseKind::Shared,
        };
        let slice = geometry.slice_of(first.guest);
        state.expect_no_obstacle(slice, std::slice::from_ref(&want), place)?;
        let mut bytes = 0;
        for (known, space) in group {
            let now = self.partial(state, known.guest)?;
            let Some(now) = now.filter(|now| now.host == known.host) else {
                continue;
            };
            let unused = now.unused & known.unused;
            if unused != 0 {
                bytes += space.of(unused);
                state.give_up(geometry, Freed::Subclusters(known.host, unused));
            }
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_of_the_host_lose_their_space() {
        let small = Geometry::new(14, 4, true).expect("subclusters of 512 bytes");
        assert_eq!(in_whole_blocks(&small, 0xff), 0xff);
        assert_eq!(
            in_whole_blocks(&small, 0x7fff_01ff),
            0x00ff_00ff & 0x7fff_00ff
        );
        assert_eq!(in_whole_blocks(&small, u32::MAX), u32::MAX);
        let large = Geometry::new(17, 4, true).expect("subclusters of 4 KiB");
        assert_eq!(in_whole_blocks(&large, 0b1010), 0b1010);
        let whole = Geometry::new(21, 4, true).expect("subclusters of 64 KiB");
        assert_eq!(in_whole_blocks(&whole, 1 << 31 | 1), 1 << 31 | 1);
    }

    #[test]
    fn bytes_in_holes_are_left_out() {
        let holes = [0..4, 6..20];
        assert_eq!(outside(&(2..10), &holes), 2);
        assert_eq!(outside(&(4..6), &holes), 2);
        assert_eq!(outside(&(8..12), &holes), 0);
        assert_eq!(outside(&(30..40), &[]), 10);
    }
}
