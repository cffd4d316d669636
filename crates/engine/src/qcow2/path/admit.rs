//! Steps 2 to 6 of a write: from a request to a batch of planned, leased writes with their space.
//!
//! All of it is decided in one hold of the metadata lock. If something is missing (a slice, a
//! lease, space, a table of its own) the request lets go of everything, waits for that one thing,
//! and looks again from the start. (Zeroes and discards, holes, preallocation and compressed writes
//! have loops of the same kind in their own files.) A long request goes in batches: steps that
//! can be admitted together are, and an obstacle is waited for while nothing is held.

use std::ops::Range;

use cowslip_queue::{IoVec, Pending};

use crate::backing::Backing;
use crate::file::{Durability, Event};
use crate::qcow2::entry::L2Entry;
use crate::qcow2::geometry::{Geometry, GuestCluster, GuestOffset, HostCluster, HostOffset};
use crate::qcow2::map::{Run, Source, map_cluster};
use crate::qcow2::mapping::inflight::{LeaseKind, LeaseRequest, Ticket};
use crate::qcow2::mapping::lookup::SlicePin;
use crate::qcow2::mapping::tables::{NewTable, OnDisk, Prepared};
use crate::qcow2::plan::{self, Change, Space, View};
use crate::qcow2::space::alloc::SpaceContent;
use crate::qcow2::space::state::HostSpace;
use crate::qcow2::{InlineVec, Qcow2, State};
use crate::{Error, Result};

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

/// The obstacle that a request has to wait for.
pub enum Blocked {
    Slice(u64),
    Lease(Ticket, Pending<()>),
    Space(u64),
    TableSpace,
    OwnTable(u64),
    Other(Pending<()>),
}

/// A place in the queue for a lease, released when dropped.
pub struct QueuePlace<'a> {
    pub image: &'a Qcow2,
    pub ticket: Option<Ticket>,
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.image.lock().mapping.leases.release(ticket);
        }
    }
}

impl Qcow2 {
    /// Admits as much of the request as can go now; waits if that is nothing.
    pub(in crate::qcow2) async fn admit(
        &self,
        request: &mut Request,
        below: &dyn Backing,
        durability: Durability,
    ) -> Result<Batch<'_>> {
        let mut place = QueuePlace {
            image: self,
            ticket: None,
        };
        let mut pinned: Option<SlicePin<'_>> = None;
        loop {
            let need = {
                let mut state = self.lock();
                self.unlatched(&state)?;
                match state.health.changes_held_back() {
                    Some(waiting) => Blocked::Other(waiting),
                    None => match self.try_admit(
                        &mut state,
                        request,
                        (below, durability),
                        &mut place.ticket,
                    )? {
                        Ok(batch) => {
                            // Not before the lock is released: dropping a pin takes it.
                            drop(state);
                            drop(pinned);
                            return Ok(batch);
                        }
                        Err(need) => need,
                    },
                }
            };
            drop(pinned.take());
            pinned = self.satisfy(need, &mut place).await?;
        }
    }

    /// Waits for the obstacle to go away, holding nothing but a place in line.
    pub(in crate::qcow2) async fn satisfy<'a>(
        &'a self,
        need: Blocked,
        place: &mut QueuePlace<'a>,
    ) -> Result<Option<SlicePin<'a>>> {
        match need {
            Blocked::Slice(slice) => return Ok(Some(self.load(slice).await?)),
            Blocked::Lease(ticket, waiting) => {
                place.ticket = Some(ticket);
                waiting.await;
            }
            Blocked::Space(clusters) => self.make_room(clusters).await?,
            Blocked::TableSpace => self.make_table_space().await?,
            Blocked::OwnTable(l1_index) => self.unshare_table(l1_index).await?,
            Blocked::Other(waiting) => waiting.await,
        }
        Ok(None)
    }

    /// [`Qcow2::own_slice`], unless requests are held back.
    pub(in crate::qcow2) fn own_slice_now(
        &self,
        state: &mut State,
        slice: u64,
    ) -> Result<std::result::Result<(), Blocked>> {
        match state.health.changes_held_back() {
            Some(waiting) => Ok(Err(Blocked::Other(waiting))),
            None => self.own_slice(state, slice),
        }
    }

    fn try_admit(
        &self,
        state: &mut State,
        request: &mut Request,
        (below, durability): (&dyn Backing, Durability),
        place: &mut Option<Ticket>,
    ) -> Result<std::result::Result<Batch<'_>, Blocked>> {
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
            let admitted = self.admit_piece(state, request, (end, below), (&mut batch, *place));
            match admitted {
                Ok(Ok(())) => {}
                Ok(Err(need)) if batch.steps.is_empty() => return Ok(Err(need)),
                Err(error) if batch.steps.is_empty() => return Err(error),
                // The admitted steps go first; the obstacle or the error is met again after them.
                Ok(Err(Blocked::Lease(ticket, _))) => {
                    state.mapping.leases.release(ticket);
                    break;
                }
                Ok(Err(_)) | Err(_) => break,
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
        batch.durability = crate::qcow2::commit::writeback::durability(durability, durable);
        batch.needs_cycle = !durable;
        Ok(Ok(batch))
    }

    /// Admits the part of a request that lies in one slice, wholly or not at all.
    fn admit_piece<'a>(
        &'a self,
        state: &mut State,
        request: &mut Request,
        (end, below): (u64, &dyn Backing),
        (batch, place): (&mut Batch<'a>, Option<Ticket>),
    ) -> Result<std::result::Result<(), Blocked>> {
        let first = self.geometry().guest_cluster(GuestOffset(request.at));
        let slice = self.geometry().slice_of(first);
        if let Err(need) = self.own_slice(state, slice)? {
            return Ok(Err(need));
        }
        let Some(end) = self.next_part(state, request, (end, below))? else {
            return Ok(Ok(()));
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
                return Ok(Err(Blocked::Space(needed)));
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
        if let Some(want) = state.mapping.obstacle(slice, &wants, place) {
            let want = want.clone();
            state.space.give_back(&taken);
            let (ticket, waiting) = state.mapping.leases.wait(slice, want, place);
            return Ok(Err(Blocked::Lease(ticket, waiting)));
        }
        for (_, write) in &steps {
            if let Err(error) = self.protect(state, write.host) {
                state.space.give_back(&taken);
                return Err(error);
            }
        }
        if let Some(punched) = hole_in_the_way(&mut state.space, self.geometry(), &steps) {
            state.space.give_back(&taken);
            return Ok(Err(Blocked::Other(punched)));
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
        Ok(Ok(()))
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
    fn own_slice(&self, state: &mut State, slice: u64) -> Result<std::result::Result<(), Blocked>> {
        let cluster = GuestCluster(slice * self.geometry().slice_entries());
        let l1_index = state.mapping.tables.l1_index(slice);
        let table = state.mapping.tables.table(l1_index);
        let table = table.map_err(|error| self.corrupt_entry(state, cluster, error))?;
        if state.mapping.is_bad_table(l1_index) {
            return Err(Error::Corrupt {
                file: self.name().to_string(),
                structure: "L2 table",
                offset: table.map_or(0, |table| table.offset.0),
                detail: "it overlaps other metadata or is beyond the end of the file".to_string(),
            });
        }
        if let Some(waiting) = state.mapping.copy_under_way(l1_index) {
            return Ok(Err(Blocked::Other(waiting)));
        }
        match table {
            Some(table) if !table.copied => return Ok(Err(Blocked::OwnTable(l1_index))),
            Some(_) => {}
            None => {
                if state.space.clusters_for_tables() == 0 {
                    return Ok(Err(Blocked::Space(1)));
                }
                let Some((cluster, content)) = self.take_table(state) else {
                    return Ok(Err(Blocked::TableSpace));
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
            return Ok(Ok(()));
        }
        let in_memory = state.mapping.tables.is_in_memory(l1_index);
        match in_memory.then(|| state.mapping.tables.prepare(slice)) {
            Some(Ok(Prepared::Ready)) => Ok(Ok(())),
            _ => Ok(Err(Blocked::Slice(slice))),
        }
    }

    /// Returns the facts about a cluster that planning needs; its slice is in memory.
    pub(in crate::qcow2) fn view(
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
    pub(in crate::qcow2) fn take_clusters(
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
