//! Steps 2 to 6 of a write: from a request to a batch of planned, leased writes with their space.
//!
//! All of it is decided in one hold of the metadata lock, by the loop of `obstacle.rs`: if
//! something is missing, the request waits for that and looks again. A long request goes in
//! batches: steps that can be admitted together are, and an obstacle is waited for while nothing is
//! held.

use std::ops::Range;

use cowslip_queue::{IoVec, Pending};

use crate::backing::Backing;
use crate::entry::L2Entry;
use crate::file::{Durability, Event};
use crate::geometry::{Geometry, GuestCluster, GuestOffset, HostCluster, HostOffset};
use crate::map::{Run, Source, map_cluster};
use crate::mapping::inflight::{LeaseKind, LeaseRequest, Ticket};
use crate::mapping::tables::{NewTable, OnDisk, Prepared};
use crate::plan::{self, Change, Space, View};
use crate::space::alloc::SpaceContent;
use crate::space::state::HostSpace;
use crate::{Error, Result};
use crate::{InlineVec, Qcow2, State};

use super::obstacle::{Blocked, Look, NotYet};

/// Slices that a batch pins at most.
const SLICES_PER_BATCH: usize = 8;

/// Whose bytes a request writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The guest's: they replace the present data.
    Guest,
    /// The layers' below: they are written where the image has nothing of its own at the moment of
    /// admission, and the guest sees no change.
    Below,
}

/// A write, as far as it has come.
pub struct Request {
    at: u64,
    end: u64,
    rest: IoVec,
    origin: Origin,
}

impl Request {
    /// A write of `data` at `offset`.
    pub fn new(offset: u64, data: IoVec, origin: Origin) -> Request {
        Request {
            at: offset,
            end: offset + data.len() as u64,
            rest: data,
            origin,
        }
    }

    /// Whose bytes it writes.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Returns whether all of it is admitted.
    pub fn is_admitted(&self) -> bool {
        self.at == self.end
    }

    /// Advances, and returns the bytes that it passes.
    fn advance(&mut self, len: u64) -> IoVec {
        self.at += len;
        self.rest.split_to(len as usize)
    }
}

/// A planned write to one cluster, with the guest's bytes for it.
pub struct Step {
    pub cluster: GuestCluster,
    pub write: plan::Write,
    pub data: IoVec,
}

/// Writes that are issued together, and the resources they hold until they are published.
pub struct Batch<'a> {
    pub steps: InlineVec<Step>,
    pub durability: Durability,
    image: &'a Qcow2,
    leases: InlineVec<Ticket>,
    pins: InlineVec<u64>,
    epoch: Option<u64>,
    needs_cycle: bool,
}

impl Batch<'_> {
    /// Returns whether durability takes a write-back cycle: the mapping changes, or is not durable
    /// yet.
    pub fn needs_cycle(&self) -> bool {
        self.needs_cycle
    }

    /// Has it written plainly, and made durable by a cycle. A durable write that finds no space in
    /// a hole of the file would count as a flush that has lost bytes (invariant D4).
    pub fn flush_apart(&mut self) {
        self.durability = Durability::Cached;
        self.needs_cycle = true;
    }

    /// Lets go of everything.
    pub fn end(mut self, state: &mut State) {
        self.let_go(state);
        if let Some(epoch) = self.epoch.take() {
            state.mapping.epochs.leave(epoch);
        }
        state.committed.note_unflushed();
    }

    fn let_go(&mut self, state: &mut State) {
        for ticket in self.leases.drain(..) {
            state.mapping.leases.release(ticket);
        }
        for slice in self.pins.drain(..) {
            state.mapping.tables.unpin(slice);
        }
    }
}

impl Drop for Batch<'_> {
    /// A future that was dropped before its writes ended. The kernel may still be writing, so the
    /// epoch is never left: nothing that these writes could reach is reused in this session.
    fn drop(&mut self) {
        let Some(epoch) = self.epoch else {
            return;
        };
        let mut state = self.image.lock();
        for step in self
            .steps
            .iter()
            .filter(|step| step.write.change != Change::None)
        {
            let attempted = step.write.attempted(self.image.geometry());
            state.mapping.joint.no_longer_fresh(step.cluster, attempted);
            state.leave_joint(&self.image.format, step.cluster);
        }
        state.mapping.epochs.abandon(epoch);
        // The bytes that have reached the file need a flush, even if no request waits for it.
        state.committed.note_unflushed();
        self.let_go(&mut state);
    }
}

/// A lease on a part of a slice that is pinned, and an epoch: what a request that is no [`Batch`]
/// holds while data moves.
pub struct LeaseGuard<'a> {
    image: &'a Qcow2,
    held: Option<(Ticket, u64)>,
}

impl<'a> LeaseGuard<'a> {
    /// Takes a lease that has no obstacle, on a slice in memory.
    pub fn new(
        image: &'a Qcow2,
        state: &mut State,
        (slice, want): (u64, LeaseRequest),
    ) -> LeaseGuard<'a> {
        state.mapping.tables.pin(slice);
        let ticket = state.mapping.leases.grant(slice, want);
        LeaseGuard {
            image,
            held: Some((ticket, state.mapping.epochs.enter())),
        }
    }

    /// Lets go of everything.
    pub fn end(mut self, state: &mut State) {
        if let Some(epoch) = self.let_go(state) {
            state.mapping.epochs.leave(epoch);
        }
    }

    fn let_go(&mut self, state: &mut State) -> Option<u64> {
        let (ticket, epoch) = self.held.take()?;
        state.mapping.leases.release(ticket);
        state.mapping.tables.unpin(ticket.slice());
        state.committed.note_unflushed();
        Some(epoch)
    }
}

impl Drop for LeaseGuard<'_> {
    /// As for a [`Batch`]: the epoch is never left.
    fn drop(&mut self) {
        if self.held.is_some() {
            let mut state = self.image.lock();
            if let Some(epoch) = self.let_go(&mut state) {
                state.mapping.epochs.abandon(epoch);
            }
        }
    }
}

impl Qcow2 {
    /// Admits as much of the request as can go now; waits if that is nothing.
    pub(crate) async fn admit(
        &self,
        request: &mut Request,
        below: &dyn Backing,
        durability: Durability,
    ) -> Result<Batch<'_>> {
        self.when_clear(|state, place| self.try_admit(state, request, (below, durability), place))
            .await
    }

    fn try_admit(
        &self,
        state: &mut State,
        request: &mut Request,
        (below, durability): (&dyn Backing, Durability),
        place: &mut Option<Ticket>,
    ) -> Look<Batch<'_>> {
        let mut batch = Batch {
            steps: InlineVec::new(),
            durability: Durability::Cached,
            image: self,
            leases: InlineVec::new(),
            pins: InlineVec::new(),
            epoch: None,
            needs_cycle: false,
        };
        let coverage = self.geometry().slice_coverage_bytes();
        while !request.is_admitted() && batch.pins.len() < SLICES_PER_BATCH {
            let end = request.end.min((request.at / coverage + 1) * coverage);
            match self.admit_piece(state, request, (end, below), (&mut batch, *place)) {
                Ok(()) => {}
                Err(why) if batch.steps.is_empty() => return Err(why),
                // The admitted steps go first; the obstacle or the error is met again after them.
                Err(NotYet::Blocked(Blocked::Lease(ticket, _))) => {
                    state.mapping.leases.release(ticket);
                    break;
                }
                Err(_) => break,
            }
            if let Some(ticket) = place.take() {
                state.mapping.leases.release(ticket);
            }
        }
        batch.epoch = Some(state.mapping.epochs.enter());
        let in_place = batch
            .steps
            .iter()
            .all(|step| step.write.change == Change::None);
        let mut pins = batch.pins.iter();
        let durable = in_place && pins.all(|&slice| state.mapping.tables.is_durable(slice));
        batch.durability = crate::commit::writeback::durability(durability, durable);
        batch.needs_cycle = !durable;
        Ok(batch)
    }

    /// Admits the part of a request that lies in one slice, wholly or not at all.
    fn admit_piece<'a>(
        &'a self,
        state: &mut State,
        request: &mut Request,
        (end, below): (u64, &dyn Backing),
        (batch, place): (&mut Batch<'a>, Option<Ticket>),
    ) -> Look<()> {
        let first = self.geometry().guest_cluster(GuestOffset(request.at));
        let slice = self.geometry().slice_of(first);
        self.own_slice(state, slice)?;
        let Some(end) = self.next_part(state, request, (end, below))? else {
            return Ok(());
        };
        let len = end - request.at;
        let parts = crate::units::pieces(request.at, len, self.geometry().cluster_bytes());
        let mut views: InlineVec<_> = InlineVec::new();
        for part in parts {
            let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
            let view = self.view(state, cluster, below)?;
            let bytes = part.start - view.start..part.end - view.start;
            views.push((cluster, view, bytes));
        }
        let needed = views
            .iter()
            .filter(|(_, view, _)| plan::needs_space(view))
            .count() as u64;
        let mut taken = Vec::new();
        if needed > 0 && !self.format.data_file {
            if state.space.free.clusters() < needed {
                return Err(Blocked::Space(needed).into());
            }
            taken = self.take_clusters(state, needed);
        }
        let mut spaces = taken.iter().copied();
        let steps: InlineVec<(GuestCluster, plan::Write)> = views
            .into_iter()
            .map(|(cluster, view, bytes)| {
                let space = plan::needs_space(&view).then(|| self.space_for(&view, &mut spaces));
                (cluster, plan::plan_write(&self.format, &view, bytes, space))
            })
            .collect();
        let wants = leases_for(self.geometry(), &steps);
        if let Err(blocked) = state.expect_no_obstacle(slice, &wants, place) {
            state.space.give_back(&taken);
            return Err(blocked.into());
        }
        for (_, write) in &steps {
            if let Err(error) = self.protect(state, write.host) {
                state.space.give_back(&taken);
                return Err(error.into());
            }
        }
        if let Some(punched) = hole_in_the_way(&mut state.space, self.geometry(), &steps) {
            state.space.give_back(&taken);
            return Err(Blocked::Other(punched).into());
        }
        for (cluster, _) in &taken {
            state.space.raise(*cluster);
        }
        let granted = wants
            .into_iter()
            .map(|want| state.mapping.leases.grant(slice, want));
        batch.leases.extend(granted);
        state.mapping.tables.pin(slice);
        batch.pins.push(slice);
        let in_place = steps.iter().filter(|(_, w)| w.change == Change::None);
        let in_place = in_place.count() as u64;
        state.writes.new_space += needed;
        state.writes.filled += steps.len() as u64 - needed - in_place;
        state.writes.in_place += in_place;
        // Before the data moves: what fails may have changed some of it.
        if request.origin == Origin::Guest {
            state.bitmaps.mark(&(request.at..end));
        }
        self.enlist(state, request, steps, (batch, &taken));
        Ok(())
    }

    /// Returns where the part of a request ends that is to be written now, up to `end`; what is not
    /// to be written before it is left out. `None` if nothing is.
    fn next_part(
        &self,
        state: &mut State,
        request: &mut Request,
        (end, below): (u64, &dyn Backing),
    ) -> Result<Option<u64>> {
        if request.origin == Origin::Guest {
            return Ok(Some(end));
        }
        let stretch = self.absent_stretch(state, request.at..end, below)?;
        let start = stretch.as_ref().map_or(end, |stretch| stretch.start);
        request.advance(start - request.at);
        Ok(stretch.map(|stretch| stretch.end))
    }

    /// The first stretch of a range, within one slice, of which the image has nothing of its own.
    fn absent_stretch(
        &self,
        state: &mut State,
        range: Range<u64>,
        below: &dyn Backing,
    ) -> Result<Option<Range<u64>>> {
        let mut found: Option<Range<u64>> = None;
        let len = range.end - range.start;
        for part in crate::units::pieces(range.start, len, self.geometry().cluster_bytes()) {
            let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
            let view = self.view(state, cluster, below)?;
            let mut runs = Vec::new();
            map_cluster(&self.format, &view.entry, view.start, part, &mut runs);
            for Run { range, source } in runs {
                match (source, &mut found) {
                    (Source::Below, Some(stretch)) => stretch.end = range.end,
                    (Source::Below, None) => found = Some(range),
                    (_, Some(_)) => return Ok(found),
                    (_, None) => {}
                }
            }
        }
        Ok(found)
    }

    /// Makes the steps part of the batch, and members of the space that they fill.
    fn enlist(
        &self,
        state: &mut State,
        request: &mut Request,
        steps: InlineVec<(GuestCluster, plan::Write)>,
        (batch, taken): (&mut Batch<'_>, &[(HostCluster, SpaceContent)]),
    ) {
        for (cluster, write) in steps {
            let len = write.bytes.end - write.bytes.start;
            if write.change != Change::None {
                let host = self.host_cluster(write.host);
                let content = taken
                    .iter()
                    .find(|(at, _)| *at == host)
                    .map(|(_, content)| *content);
                let (space, published) = match (content, state.mapping.joint.get(cluster)) {
                    (Some(content), _) => (self.space(host, content), false),
                    (None, Some(space)) => (space, false),
                    (None, None) if self.format.data_file => (
                        Space {
                            host: write.host,
                            fresh: 0,
                        },
                        true,
                    ),
                    (None, None) => (
                        Space {
                            host: write.host,
                            fresh: state.space.fresh.of(host),
                        },
                        true,
                    ),
                };
                let attempted = write.attempted(self.geometry());
                state.space.begin_fill(host, attempted);
                let joint = &mut state.mapping.joint;
                joint.join(cluster, space, published, attempted);
            }
            batch.steps.push(Step {
                cluster,
                write,
                data: request.advance(len),
            });
        }
    }

    /// A slice in memory, of a table that may be changed.
    pub(crate) fn own_slice(&self, state: &mut State, slice: u64) -> Look<()> {
        let cluster = GuestCluster(slice * self.geometry().slice_entries());
        let l1_index = state.mapping.tables.l1_index(slice);
        let table = state.mapping.tables.table(l1_index);
        let table = table.map_err(|error| self.corrupt_entry(state, cluster, error))?;
        if state.mapping.is_bad_table(l1_index) {
            let error = Error::Corrupt {
                file: self.name().to_string(),
                structure: "L2 table",
                offset: table.map_or(0, |table| table.offset.0),
                detail: "it overlaps other metadata or is beyond the end of the file".to_string(),
            };
            return Err(error.into());
        }
        if let Some(waiting) = state.mapping.copy_under_way(l1_index) {
            return Err(Blocked::Other(waiting).into());
        }
        match table {
            Some(table) if !table.copied => return Err(Blocked::OwnTable(l1_index).into()),
            Some(_) => {}
            None => {
                if state.space.clusters_for_tables() == 0 {
                    return Err(Blocked::Space(1).into());
                }
                let Some((cluster, content)) = self.take_table(state) else {
                    return Err(Blocked::TableSpace.into());
                };
                state.space.raise(cluster);
                let on_disk = if content.is_zero() {
                    OnDisk::Zeroes
                } else {
                    OnDisk::Unknown
                };
                let offset = self.geometry().host_offset(cluster);
                state.protect_cluster(cluster);
                state
                    .mapping
                    .tables
                    .set_table(l1_index, NewTable { offset, on_disk });
            }
        }
        if state.mapping.tables.look(slice) {
            return Ok(());
        }
        let in_memory = state.mapping.tables.is_in_memory(l1_index);
        match in_memory.then(|| state.mapping.tables.prepare(slice)) {
            Some(Ok(Prepared::Ready)) => Ok(()),
            _ => Err(Blocked::Slice(slice).into()),
        }
    }

    /// Returns the facts about a cluster that planning needs; its slice is in memory.
    pub(crate) fn view(
        &self,
        state: &mut State,
        cluster: GuestCluster,
        below: &dyn Backing,
    ) -> Result<View> {
        let entry = state.mapping.tables.entry(cluster);
        let entry = entry.map_err(|error| self.corrupt_entry(state, cluster, error))?;
        self.refuse_misplaced(state, &entry)?;
        let start = self.geometry().guest_offset(cluster).0;
        let own = match &entry {
            L2Entry::Standard(standard) if standard.copied => standard.host,
            L2Entry::Standard(_) | L2Entry::Compressed(_) => None,
        };
        let filled = state.mapping.joint.get(cluster);
        let joined = filled.or_else(|| {
            let host = own.filter(|_| !self.format.data_file)?;
            let fresh = state.space.fresh.of(self.host_cluster(host));
            (fresh != 0).then_some(Space { host, fresh })
        });
        let below_end = below
            .size()
            .saturating_sub(start)
            .min(self.geometry().cluster_bytes());
        Ok(View {
            start,
            entry,
            joined,
            is_filled: filled.is_some(),
            below_end,
        })
    }

    fn space_for(
        &self,
        view: &View,
        taken: &mut impl Iterator<Item = (HostCluster, SpaceContent)>,
    ) -> Space {
        if self.format.data_file {
            return Space {
                host: HostOffset(view.start),
                fresh: 0,
            };
        }
        let (cluster, content) = taken
            .next()
            .expect("as many clusters as views that need one");
        self.space(cluster, content)
    }

    fn space(&self, cluster: HostCluster, content: SpaceContent) -> Space {
        let fresh = match content.is_zero() && self.zero_method.knows_fresh() {
            true => self.geometry().all_subclusters(),
            false => 0,
        };
        Space {
            host: self.geometry().host_offset(cluster),
            fresh,
        }
    }

    /// Takes clusters, in as few runs as there are.
    pub(crate) fn take_clusters(
        &self,
        state: &mut State,
        count: u64,
    ) -> Vec<(HostCluster, SpaceContent)> {
        if count > 0 {
            self.file.pass(Event::ClusterAlloc);
        }
        let taken = state.space.take(count);
        if state.space.wanted_ahead().is_some() {
            state.maintenance.wake();
        }
        taken
    }
}

/// A hole that is being punched where one of the steps will write.
fn hole_in_the_way(
    space: &mut HostSpace,
    geometry: &Geometry,
    steps: &[(GuestCluster, plan::Write)],
) -> Option<Pending<()>> {
    steps.iter().find_map(|(_, write)| {
        let host = geometry.host_cluster(write.host);
        space.hole_under_way(host, write.attempted(geometry))
    })
}

/// The leases of neighbouring steps, joined where they are of one kind.
fn leases_for(
    geometry: &Geometry,
    steps: &[(GuestCluster, plan::Write)],
) -> InlineVec<LeaseRequest> {
    let mut wants: InlineVec<LeaseRequest> = InlineVec::new();
    for (cluster, write) in steps {
        let start = geometry.guest_offset(*cluster).0;
        let range = start + write.lease.start..start + write.lease.end;
        let kind = if write.change == Change::None {
            LeaseKind::Shared
        } else {
            LeaseKind::Exclusive
        };
        match wants.last_mut() {
            Some(last) if last.kind == kind && last.range.end == range.start => {
                last.range.end = range.end;
            }
            _ => wants.push(LeaseRequest { range, kind }),
        }
    }
    wants
}
