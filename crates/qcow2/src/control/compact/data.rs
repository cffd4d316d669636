//! Moves of clusters of the disk, beside its requests.
//!
//! A run moves as a guest's write moves a cluster: under an exclusive lease its entries are looked
//! at once more, and only those that are as the plan knows them go on; their bytes are copied, with
//! no lock held; then the entries refer to the new place, and the old one goes to the quarantine.
//! Whatever a guest has written before is copied, and what it writes afterwards goes to the new
//! place. Persistent bitmaps do not follow: the guest sees no change.

use std::ops::Range;

use cowslip_boxed::boxed;
use cowslip_queue::Buf;
use smallvec::SmallVec;

use super::plan::Move;
use crate::Result;
use crate::entry::{L2Entry, Standard};
use crate::file::{Durability, Event, Space};
use crate::geometry::{GuestCluster, HostCluster};
use crate::job::{Cost, Job, Pieces};
use crate::mapping::inflight::{LeaseKind, LeaseRequest, Ticket};
use crate::path::admit::LeaseGuard;
use crate::path::obstacle::{Blocked, Look};
use crate::plan::{Freed, WriteOrdering};
use crate::sync::{Mutex, lock};
use crate::zero::is_zero;
use crate::{Qcow2, State};

/// Where runs go, and what they take there.
#[derive(Clone, Copy)]
pub(super) struct Destination {
    /// The clusters that are for those whose planned place is not free: before this one.
    pub end: u64,
    /// Whether subclusters that hold nothing take no space there.
    pub without_gaps: bool,
}

/// The runs of a batch.
struct Runs<'a> {
    left: std::slice::Iter<'a, Move>,
    cluster_bits: u32,
}

impl Pieces for Runs<'_> {
    type Piece = Move;

    async fn next(&mut self) -> Result<Option<(Move, Cost)>> {
        let run = self.left.next().copied();
        Ok(run.map(|run| (run, Cost::moving(run.clusters << self.cluster_bits))))
    }
}

/// The fate of the beginning of a run.
enum Begun<'a> {
    /// It moves.
    Moves(Moving<'a>),
    /// This number of clusters stays.
    Stays(u64),
}

/// A run that moves: its lease, and where it goes.
struct Moving<'a> {
    image: &'a Qcow2,
    run: Move,
    entries: SmallVec<[Standard; 1]>,
    stay: Option<LeaseGuard<'a>>,
}

impl Drop for Moving<'_> {
    /// Dropped with the copy under way: the new place has a count that nothing needs, and its
    /// epoch, which the lease abandons, is never left.
    fn drop(&mut self) {
        if self.stay.is_some() {
            let mut state = self.image.lock();
            self.give_new_up(&mut state);
        }
    }
}

impl Moving<'_> {
    fn give_new_up(&self, state: &mut State) {
        let geometry = self.image.geometry();
        for cluster in 0..self.run.clusters {
            let host = geometry.host_offset(self.run.to.plus(cluster));
            state.give_up(geometry, Freed::Cluster(host));
        }
    }

    /// The parts of the run that hold nothing, in clusters of subclusters that hold something.
    fn gaps(&self) -> Vec<Range<u64>> {
        let geometry = self.image.geometry();
        let whole = 0..geometry.cluster_bytes();
        let entries = (0..).zip(&self.entries);
        let partial = entries.filter(|(_, entry)| geometry.extended_l2() && entry.allocated != 0);
        let gaps = partial.flat_map(|(index, entry)| {
            let start = index << geometry.cluster_bits();
            let unused = !entry.allocated & geometry.all_subclusters();
            let parts = geometry.parts_in(&whole, unused).into_iter();
            parts.map(move |part| start + part.start..start + part.end)
        });
        gaps.collect()
    }

    /// The bytes of the run that hold data.
    fn parts(&self) -> Vec<Range<u64>> {
        let geometry = self.image.geometry();
        let mut parts: Vec<Range<u64>> = Vec::new();
        for (index, entry) in (0..).zip(&self.entries) {
            let start = index << geometry.cluster_bits();
            let whole = 0..geometry.cluster_bytes();
            for part in geometry.parts_in(&whole, entry.allocated) {
                let part = start + part.start..start + part.end;
                match parts.last_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => parts.push(part),
                }
            }
        }
        parts
    }
}

impl Qcow2 {
    /// Moves runs, those that are still as they were planned: to the places that are planned if
    /// these are free, else before the end, or not at all if that is 0. Adds the places that are
    /// left to a list, also if some are not. While a run waits for the job's pace, those under way
    /// go on: they have leases, for which guests wait.
    #[boxed]
    pub(super) async fn move_batch(
        &self,
        batch: &[Move],
        destination: Destination,
        (job, left): (&Job, &mut Vec<HostCluster>),
    ) -> Result<()> {
        let mut runs = Runs {
            left: batch.iter(),
            cluster_bits: self.geometry().cluster_bits(),
        };
        let all = &Mutex::new(left);
        let outcome = job.run_each(&mut runs, |run| async move {
            let left = self.move_all(run, destination).await?;
            lock(all).extend(left);
            Ok(())
        });
        outcome.await
    }

    /// Moves what is left of a run, part by part. Returns the places that are left.
    #[boxed]
    async fn move_all(&self, run: Move, destination: Destination) -> Result<Vec<HostCluster>> {
        let (mut at, mut left) = (0, Vec::new());
        while at < run.clusters {
            let rest = Move {
                guest: run.guest.plus(at),
                from: run.from.plus(at),
                to: run.to.plus(at),
                clusters: run.clusters - at,
            };
            let (passed, done) = self.move_part(rest, destination).await?;
            left.extend((at..at + done).map(|moved| run.from.plus(moved)));
            at += passed;
        }
        Ok(left)
    }

    /// Moves the beginning of a run, or passes it: how many clusters, and how many of them moved.
    async fn move_part(&self, run: Move, destination: Destination) -> Result<(u64, u64)> {
        let begun =
            self.when_clear(|state, place| self.begin_move(state, run, destination.end, *place));
        match begun.await? {
            Begun::Stays(passed) => Ok((passed, 0)),
            Begun::Moves(moving) => {
                let clusters = moving.run.clusters;
                let copied = self.copy(&moving).await;
                if copied.is_ok() && destination.without_gaps {
                    self.punch_gaps(&moving).await;
                }
                self.end_move(moving, copied)?;
                Ok((clusters, clusters))
            }
        }
    }

    /// Steps 2 to 6 for the beginning of a run.
    fn begin_move(
        &self,
        state: &mut State,
        run: Move,
        end: u64,
        place: Option<Ticket>,
    ) -> Look<Begun<'_>> {
        let slice = self.geometry().slice_of(run.guest);
        if !self.has_own_slice(state, run.guest)? {
            return Ok(Begun::Stays(run.clusters));
        }
        let entries = self.entries_that_move(state, &run)?;
        if entries.is_empty() {
            return Ok(Begun::Stays(1));
        }
        let start = self.geometry().guest_offset(run.guest).0;
        let bytes = (entries.len() as u64) << self.geometry().cluster_bits();
        let want = LeaseRequest {
            range: start..start + bytes,
            kind: LeaseKind::Exclusive,
        };
        state.expect_no_obstacle(slice, std::slice::from_ref(&want), place)?;
        let all = self.geometry().all_subclusters();
        for cluster in 0..entries.len() as u64 {
            let from = run.from.plus(cluster);
            if let Some(punched) = state.space.hole_under_way(from, all) {
                return Err(Blocked::Other(punched).into());
            }
        }
        let Some((to, clusters)) = self.take_place(state, (run.to, entries.len() as u64), end)
        else {
            return Ok(Begun::Stays(run.clusters));
        };
        let clusters = clusters.min(entries.len() as u64);
        let range = start..start + (clusters << self.geometry().cluster_bits());
        let want = LeaseRequest { range, ..want };
        Ok(Begun::Moves(Moving {
            image: self,
            run: Move {
                to,
                clusters,
                ..run
            },
            entries: entries.into_iter().take(clusters as usize).collect(),
            stay: Some(LeaseGuard::new(self, state, (slice, want))),
        }))
    }

    /// Returns whether the table that maps a cluster is there, sound, and no snapshot's. If it is,
    /// the slice is in memory.
    pub(super) fn has_own_slice(&self, state: &mut State, cluster: GuestCluster) -> Look<bool> {
        let l1_index = self.geometry().l1_index(cluster);
        if let Some(waiting) = state.mapping.copy_under_way(l1_index) {
            return Err(Blocked::Other(waiting).into());
        }
        let table = state.mapping.tables.table(l1_index);
        let is_own = matches!(table, Ok(Some(table)) if table.copied);
        if !is_own || state.mapping.is_bad_table(l1_index) {
            return Ok(false);
        }
        let slice = self.geometry().slice_of(cluster);
        match state.mapping.tables.look(slice) {
            true => Ok(true),
            false => Err(Blocked::Slice(slice).into()),
        }
    }

    /// The entries from the beginning of a run that are as it was planned.
    fn entries_that_move(&self, state: &mut State, run: &Move) -> Result<SmallVec<[Standard; 1]>> {
        let mut entries = SmallVec::new();
        for index in 0..run.clusters {
            let guest = run.guest.plus(index);
            let entry = state.mapping.tables.entry(guest);
            let entry = entry.map_err(|error| self.corrupt_entry(state, guest, error))?;
            let host = self.geometry().host_offset(run.from.plus(index));
            match entry {
                L2Entry::Standard(entry) if entry.host == Some(host) && entry.copied => {
                    self.refuse_misplaced(state, &L2Entry::Standard(entry))?;
                    entries.push(entry);
                }
                L2Entry::Standard(_) | L2Entry::Compressed(_) => break,
            }
        }
        Ok(entries)
    }

    /// Takes the planned place if it is free, or else the lowest before `end`: where it is, and how
    /// many clusters it has. Their counts are noted for the next cycle.
    fn take_place(
        &self,
        state: &mut State,
        (to, clusters): (HostCluster, u64),
        end: u64,
    ) -> Option<(HostCluster, u64)> {
        let planned = state.space.free.take_at(to, clusters);
        let (to, clusters) = match planned {
            true => (to, clusters),
            false => state.space.free.take_before(end, clusters)?,
        };
        for cluster in 0..clusters {
            let host = to.plus(cluster);
            debug_assert!(
                !state.space.protected.contains(host),
                "metadata is not free"
            );
            state.space.fresh.set(host, 0);
            state.space.raise(host);
        }
        Some((to, clusters))
    }

    /// Step 7: copies the bytes of a run.
    async fn copy(&self, moving: &Moving<'_>) -> Result<()> {
        self.file.reach(Event::CowRead).await;
        let geometry = self.geometry();
        let from = geometry.host_offset(moving.run.from).0;
        let to = geometry.host_offset(moving.run.to).0;
        let guest = geometry.guest_offset(moving.run.guest).0;
        for part in moving.parts() {
            let (at, len) = (part.start, part.end - part.start);
            let source = self.data.for_guest(from + at, guest + at);
            let bytes = source.read_new(from + at, len).await?;
            if self.is_hole((from + at, len), &bytes).await {
                self.data.zero(to + at, len, Space::Release).await?;
                continue;
            }
            let target = self.data.for_guest(to + at, guest + at);
            let data: Vec<Buf> = vec![bytes.freeze()];
            target.write(to + at, data, Durability::Cached).await?;
        }
        Ok(())
    }

    /// Takes the space of subclusters that hold nothing from the new place, to which nothing refers
    /// yet. A discard is advice: where it is not possible, the place keeps the space that it had.
    async fn punch_gaps(&self, moving: &Moving<'_>) {
        if self.file.capabilities().punches_holes {
            let to = self.geometry().host_offset(moving.run.to).0;
            for gap in moving.gaps() {
                drop(self.file.discard(to + gap.start, gap.end - gap.start).await);
            }
        }
    }

    /// Returns whether bytes that were read are a hole of the file, which another hole may replace:
    /// space that was preallocated without any stays without.
    pub(super) async fn is_hole(&self, (offset, len): (u64, u64), bytes: &[u8]) -> bool {
        if self.data.is_encrypted() || !self.file.capabilities().punches_holes || !is_zero(bytes) {
            return false;
        }
        let extents = self.file.extents(offset, len).await;
        extents.is_ok_and(|found| found.iter().all(|extent| extent.hole))
    }

    /// Step 8: the entries refer to the new place, or after a failure to the old one still.
    fn end_move(&self, mut moving: Moving<'_>, copied: Result<()>) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        match copied {
            Ok(()) => self.publish_move(state, &moving),
            Err(_) => moving.give_new_up(state),
        }
        if let Some(stay) = moving.stay.take() {
            stay.end(state);
        }
        for index in 0..moving.run.clusters {
            let guest = moving.run.guest.plus(index);
            // Its slice was pinned until now.
            if let Ok(entry) = state.mapping.tables.entry(guest) {
                self.show_directly(state, guest, &entry);
            }
        }
        state.wake_maintenance_if_dirty();
        copied
    }

    fn publish_move(&self, state: &mut State, moving: &Moving<'_>) {
        let geometry = self.geometry();
        for (index, entry) in (0..).zip(&moving.entries) {
            let guest: GuestCluster = moving.run.guest.plus(index);
            let moved = L2Entry::Standard(Standard {
                host: Some(geometry.host_offset(moving.run.to.plus(index))),
                ..*entry
            });
            state
                .mapping
                .tables
                .set_entry(guest, &moved, WriteOrdering::Bytes);
            let old = geometry.host_offset(moving.run.from.plus(index));
            state.give_up(geometry, Freed::Cluster(old));
        }
    }
}
