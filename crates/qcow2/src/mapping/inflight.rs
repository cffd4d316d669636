//! Requests in flight: leases on guest ranges, space that several writes fill together, and epochs.
//!
//! A *lease* is the right to a guest range until a request is done with it: shared to write in
//! place, exclusive to change the mapping. They are granted in order of arrival: a request also
//! waits for those before it that wait, so a stream of in-place writes cannot starve an exclusive
//! one. No request waits while it holds a lease, so there is no deadlock.
//!
//! A *joint cluster* is one that is taken or being filled; it belongs to all writes that fill
//! parts of it. The parts that its members have not written are as they were when it was taken, so
//! its freshness holds for a joiner whatever the others do elsewhere in it (the leases keep them
//! elsewhere). Freshness ends where a member failed, and where an entry lets a range that a member
//! has written read as zeroes again.
//!
//! An *epoch* is the time between two write-back cuts. A cluster freed in epoch e is reused only
//! when every request that entered up to e has left (invariant D2). Those that take no lock are
//! counted by themselves, in generations (`visits.rs`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use cowslip_queue::{Completer, Pending, pending};
use smallvec::SmallVec;

use crate::geometry::{GuestCluster, SubclusterMask};
use crate::plan::Space;
use crate::sync::Waiters;

use super::visits::{Visit, Visits};

/// The access that a lease allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseKind {
    /// Writing in place, beside others.
    Shared,
    /// Changing the mapping, alone.
    Exclusive,
}

/// A lease or the place in line for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket {
    slice: u64,
    number: u64,
}

impl Ticket {
    /// The slice that it is for.
    pub fn slice(&self) -> u64 {
        self.slice
    }
}

struct Claim {
    number: u64,
    range: Range<u64>,
    kind: LeaseKind,
    /// Completed when the lease is granted; `None` if no request waits for that.
    waiter: Option<Completer<()>>,
    granted: bool,
}

/// All leases of an image, by the slice of the tables that maps them; no lease spans two.
#[derive(Default)]
pub struct Leases {
    slices: BTreeMap<u64, SmallVec<[Claim; 1]>>,
    next: u64,
}

impl std::fmt::Debug for Leases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Leases({} slices)", self.slices.len())
    }
}

/// The lease that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRequest {
    /// Guest bytes, within one slice.
    pub range: Range<u64>,
    /// The access it needs.
    pub kind: LeaseKind,
}

impl Leases {
    fn conflicts(&self, slice: u64, want: &LeaseRequest, before: u64) -> bool {
        self.slices.get(&slice).is_some_and(|claims| {
            claims.iter().any(|claim| {
                (claim.granted || claim.number < before)
                    && claim.number != before
                    && claim.range.start < want.range.end
                    && want.range.start < claim.range.end
                    && (claim.kind == LeaseKind::Exclusive || want.kind == LeaseKind::Exclusive)
            })
        })
    }

    /// The first of `wants` that someone else is in the way of, seen from `place` in line, or from
    /// its end.
    pub fn obstacle<'a>(
        &self,
        slice: u64,
        wants: &'a [LeaseRequest],
        place: Option<Ticket>,
    ) -> Option<&'a LeaseRequest> {
        let before = place
            .filter(|ticket| ticket.slice == slice)
            .map_or(self.next, |t| t.number);
        wants
            .iter()
            .find(|want| self.conflicts(slice, want, before))
    }

    /// Returns whether a request has, or waits for, an exclusive lease in a range of a slice.
    pub fn is_wanted_alone(&self, slice: u64, range: &Range<u64>) -> bool {
        let claims = self.slices.get(&slice);
        claims.into_iter().flatten().any(|claim| {
            claim.kind == LeaseKind::Exclusive
                && claim.range.start < range.end
                && range.start < claim.range.end
        })
    }

    /// Wakes requests that wait for a range of a slice: a write has ended that had no lease here.
    pub fn wake(&mut self, slice: u64, range: &Range<u64>) {
        if let Some(claims) = self.slices.get_mut(&slice) {
            wake_overlapping(claims, range, |_| true);
        }
    }

    /// Takes a lease that has no [`Leases::obstacle`].
    pub fn grant(&mut self, slice: u64, want: LeaseRequest) -> Ticket {
        let number = self.next;
        self.next += 1;
        let claim = Claim {
            number,
            range: want.range,
            kind: want.kind,
            waiter: None,
            granted: true,
        };
        self.slices.entry(slice).or_default().push(claim);
        Ticket { slice, number }
    }

    /// Joins the line for `want`, or keeps the place in it. Resolves when it is worth looking
    /// again.
    pub fn wait(
        &mut self,
        slice: u64,
        want: LeaseRequest,
        place: Option<Ticket>,
    ) -> (Ticket, Pending<()>) {
        let (completer, waiting) = pending();
        let number = match place.filter(|ticket| ticket.slice == slice) {
            Some(ticket) => ticket.number,
            None => {
                self.next += 1;
                self.next - 1
            }
        };
        let claims = self.slices.entry(slice).or_default();
        if let Some(at) = claims.iter().position(|claim| claim.number == number) {
            // Those behind that only the old claim was in the way of look again.
            let old = claims.swap_remove(at);
            wake_overlapping(claims, &old.range, |behind| behind > number);
        }
        let waiter = Some(completer);
        claims.push(Claim {
            number,
            range: want.range,
            kind: want.kind,
            waiter,
            granted: false,
        });
        (Ticket { slice, number }, waiting)
    }

    /// Gives a lease back, or leaves the line; wakes those that it was in the way of.
    pub fn release(&mut self, ticket: Ticket) {
        let Some(claims) = self.slices.get_mut(&ticket.slice) else {
            return;
        };
        let Some(at) = claims
            .iter()
            .position(|claim| claim.number == ticket.number)
        else {
            return;
        };
        let gone = claims.swap_remove(at);
        wake_overlapping(claims, &gone.range, |_| true);
        if claims.is_empty() {
            self.slices.remove(&ticket.slice);
        }
    }
}

fn wake_overlapping(claims: &mut [Claim], range: &Range<u64>, which: impl Fn(u64) -> bool) {
    for claim in claims.iter_mut().filter(|claim| which(claim.number)) {
        if claim.range.start < range.end
            && range.start < claim.range.end
            && let Some(waiter) = claim.waiter.take()
        {
            waiter.complete(());
        }
    }
}

/// A cluster that writes fill together.
#[derive(Debug)]
pub struct JointCluster {
    /// The cluster and the facts known about it.
    pub space: Space,
    /// Writes under way in it.
    pub members: u32,
    /// Subclusters that any member has tried to write: not fresh once all have left.
    pub attempted: SubclusterMask,
    /// Subclusters that hold what a failed member has left.
    pub failed: SubclusterMask,
    /// An entry refers to it.
    pub published: bool,
}

/// The joint clusters of an image.
#[derive(Debug, Default)]
pub struct JointClusters(BTreeMap<GuestCluster, JointCluster>);

/// The state of a joint cluster when a member leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Others are still at it.
    Shared,
    /// A cluster with its mapping; these subclusters are still fresh.
    Published(Space),
    /// A cluster that nothing refers to.
    Forfeited(Space),
}

impl JointClusters {
    /// The space that writes of this cluster fill.
    pub fn get(&self, cluster: GuestCluster) -> Option<Space> {
        self.0.get(&cluster).map(|joint| joint.space)
    }

    /// Returns whether several writes fill this cluster.
    pub fn is_shared(&self, cluster: GuestCluster) -> bool {
        self.0.get(&cluster).is_some_and(|joint| joint.members > 1)
    }

    /// Clusters that several writes fill.
    pub fn shared(&self) -> usize {
        self.0.values().filter(|joint| joint.members > 1).count()
    }

    /// Joins a joint cluster, or makes it one; `published` if an entry refers to it already.
    pub fn join(
        &mut self,
        cluster: GuestCluster,
        space: Space,
        published: bool,
        attempt: SubclusterMask,
    ) {
        let joint = self.0.entry(cluster).or_insert(JointCluster {
            space,
            members: 0,
            attempted: 0,
            failed: 0,
            published,
        });
        assert_eq!(joint.space.host, space.host, "members share one cluster");
        joint.members += 1;
        joint.attempted |= attempt;
        // It is not fresh any more, so who joins there now makes it whole, and alone.
        joint.failed &= !attempt;
    }

    /// Records that an entry refers to the space.
    pub fn published(&mut self, cluster: GuestCluster) {
        if let Some(joint) = self.0.get_mut(&cluster) {
            joint.published = true;
        }
    }

    /// Returns the subclusters that members have tried to write.
    pub fn attempted(&self, cluster: GuestCluster) -> SubclusterMask {
        self.0.get(&cluster).map_or(0, |joint| joint.attempted)
    }

    /// Ends the freshness of these subclusters for requests that join from now on: bytes
    /// that members have tried to write may be there, though no entry says so.
    pub fn no_longer_fresh(&mut self, cluster: GuestCluster, subclusters: SubclusterMask) {
        if let Some(joint) = self.0.get_mut(&cluster) {
            joint.space.fresh &= !(joint.attempted & subclusters);
        }
    }

    /// Notes that the remains of a failed member in these subclusters could not be erased: the
    /// other members must not publish them.
    pub fn taint(&mut self, cluster: GuestCluster, subclusters: SubclusterMask) {
        if let Some(joint) = self.0.get_mut(&cluster) {
            joint.failed |= subclusters;
        }
    }

    /// Returns whether one of these subclusters holds what must not be published.
    pub fn has_failed(&self, cluster: GuestCluster, subclusters: SubclusterMask) -> bool {
        let joint = self.0.get(&cluster);
        joint.is_some_and(|joint| joint.failed & subclusters != 0)
    }

    /// Ends a request's part in a joint cluster.
    pub fn leave(&mut self, cluster: GuestCluster) -> Left {
        let joint = self
            .0
            .get_mut(&cluster)
            .expect("a member leaves what it joined");
        joint.members -= 1;
        if joint.members > 0 {
            return Left::Shared;
        }
        let joint = self.0.remove(&cluster).expect("it is there");
        let space = Space {
            fresh: joint.space.fresh & !joint.attempted,
            ..joint.space
        };
        if joint.published {
            Left::Published(space)
        } else {
            Left::Forfeited(space)
        }
    }
}

/// Counts the requests of each epoch.
#[derive(Debug, Default)]
pub struct Epochs {
    current: u64,
    active: BTreeMap<u64, u64>,
    /// The first epoch of a request that was dropped: it never leaves.
    abandoned: Option<u64>,
    changed: Waiters,
    /// Requests that take no lock.
    visits: Arc<Visits>,
    /// The epoch in which each of their generations began.
    begun: [u64; 2],
    /// Their writes that a cut has seen.
    written: u64,
}

impl Epochs {
    /// No requests but those visits.
    pub fn beside(visits: Arc<Visits>) -> Epochs {
        Epochs {
            visits,
            ..Epochs::default()
        }
    }

    /// Enters the current epoch.
    pub fn enter(&mut self) -> u64 {
        *self.active.entry(self.current).or_default() += 1;
        self.current
    }

    /// Leaves the epoch that was entered.
    pub fn leave(&mut self, epoch: u64) {
        let count = self
            .active
            .get_mut(&epoch)
            .expect("a request leaves the epoch that it entered");
        *count -= 1;
        if *count == 0 {
            self.active.remove(&epoch);
            self.changed.wake();
        }
    }

    /// A request of an epoch was dropped with I/O under way: the epoch is never left, so nothing
    /// that it could reach is reused, but no request has to wait for it.
    pub fn abandon(&mut self, epoch: u64) {
        self.never_left(epoch);
        self.leave(epoch);
        self.changed.wake();
    }

    fn never_left(&mut self, epoch: u64) {
        self.abandoned = Some(self.abandoned.map_or(epoch, |first| first.min(epoch)));
    }

    /// The same of a request that takes no lock.
    pub fn abandon_visit(&mut self, visit: Visit) {
        self.never_left(self.begun[usize::from(visit.generation())]);
        if self.visits.leave(visit, 0) {
            self.changed.wake();
        }
    }

    /// A request has left that takes no lock, and that an operation may wait for.
    pub fn visit_left(&mut self) {
        self.changed.wake();
    }

    /// Returns whether I/O of dropped requests may be under way.
    pub fn any_abandoned(&self) -> bool {
        self.abandoned.is_some()
    }

    /// Returns the wait for some request to end, unless all of `epoch` and before have, or were
    /// abandoned.
    pub fn wait_for_end(&mut self, epoch: u64) -> Option<Pending<()>> {
        // Before the counters are read: who leaves later wakes.
        self.visits.watch(true);
        if !self.all_ended(epoch) {
            return Some(self.changed.wait());
        }
        self.no_longer_waits();
        None
    }

    /// No operation waits for requests to end any more.
    pub fn no_longer_waits(&mut self) {
        self.visits.watch(false);
    }

    /// The epoch in which something is freed now.
    pub fn current(&self) -> u64 {
        self.current
    }

    /// Begins the next epoch, at a cut or for a drain. Returns the one before.
    pub fn advance(&mut self) -> u64 {
        self.current += 1;
        self.renew();
        self.current - 1
    }

    /// Begins the next generation of visits, if nothing is left of the one before the last.
    fn renew(&mut self) {
        let next = 1 - self.visits.generation();
        if self.visits.is_empty(next) {
            self.begun[usize::from(next)] = self.current;
            self.visits.begin(next);
        }
    }

    /// Returns whether visits have written since this was asked last.
    pub fn take_writes(&mut self) -> bool {
        let before = std::mem::replace(&mut self.written, self.visits.written());
        before != self.written
    }

    /// Returns whether no request of `epoch` or before is left.
    pub fn all_left(&mut self, epoch: u64) -> bool {
        self.abandoned.is_none_or(|first| first > epoch) && self.all_ended(epoch)
    }

    /// The same, if those do not count that were abandoned.
    fn all_ended(&mut self, epoch: u64) -> bool {
        if self.begun[usize::from(self.visits.generation())] <= epoch && epoch < self.current {
            self.renew();
        }
        let is_over = |generation: u8| {
            self.begun[usize::from(generation)] > epoch || self.visits.is_empty(generation)
        };
        let oldest = self.active.keys().next();
        oldest.is_none_or(|&oldest| oldest > epoch) && is_over(0) && is_over(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::HostOffset;
    use std::future::Future;

    /// A guest cluster and the new space that requests share.
    const CLUSTER_AND_SPACE: (GuestCluster, Space) = (
        GuestCluster(3),
        Space {
            host: HostOffset(0x10000),
            fresh: 0xff,
        },
    );

    fn want(range: Range<u64>, kind: LeaseKind) -> LeaseRequest {
        LeaseRequest { range, kind }
    }

    /// The wait for all that is under way.
    fn wait(epochs: &mut Epochs) -> Option<Pending<()>> {
        epochs.wait_for_end(epochs.current())
    }

    #[test]
    fn a_stream_of_shared_leases_cannot_starve_an_exclusive_one() {
        let mut leases = Leases::default();
        let first = leases.grant(0, want(0..10, LeaseKind::Shared));
        let exclusive = want(5..6, LeaseKind::Exclusive);
        assert!(
            leases
                .obstacle(0, std::slice::from_ref(&exclusive), None)
                .is_some()
        );
        let (place, _waiting) = leases.wait(0, exclusive.clone(), None);
        // A later shared one that overlaps the waiting claim waits; one that does not is granted.
        assert!(
            leases
                .obstacle(0, &[want(0..6, LeaseKind::Shared)], None)
                .is_some()
        );
        assert!(
            leases
                .obstacle(0, &[want(6..9, LeaseKind::Shared)], None)
                .is_none()
        );
        assert!(
            leases
                .obstacle(0, &[want(0..5, LeaseKind::Shared)], None)
                .is_none()
        );
        assert!(
            leases
                .obstacle(1, &[want(0..6, LeaseKind::Shared)], None)
                .is_none()
        );
        leases.release(first);
        assert!(leases.obstacle(0, &[exclusive], Some(place)).is_none());
        leases.release(place);
        assert!(leases.slices.is_empty());
    }

    #[test]
    fn a_request_that_waits_keeps_its_place_when_it_wants_something_else() {
        let mut leases = Leases::default();
        let held = leases.grant(0, want(0..10, LeaseKind::Exclusive));
        let (early, _a) = leases.wait(0, want(0..10, LeaseKind::Exclusive), None);
        let (late, _b) = leases.wait(0, want(0..10, LeaseKind::Exclusive), None);
        leases.release(held);
        let (kept, _c) = leases.wait(0, want(0..5, LeaseKind::Shared), Some(early));
        assert_eq!(kept, early);
        assert!(
            leases
                .obstacle(0, &[want(0..5, LeaseKind::Shared)], Some(early))
                .is_none()
        );
        assert!(
            leases
                .obstacle(0, &[want(0..10, LeaseKind::Exclusive)], Some(late))
                .is_some()
        );
    }

    #[test]
    fn a_claim_that_moves_wakes_those_behind_it() {
        let mut leases = Leases::default();
        let held = leases.grant(0, want(0..30, LeaseKind::Exclusive));
        let (first, _a) = leases.wait(0, want(0..20, LeaseKind::Exclusive), None);
        let (second, mut b) = leases.wait(0, want(0..10, LeaseKind::Exclusive), None);
        leases.release(held);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(std::pin::Pin::new(&mut b).poll(&mut context).is_ready());
        // The second looks again while the first still claims all; then the first wants less.
        let (_, mut b) = leases.wait(0, want(0..10, LeaseKind::Exclusive), Some(second));
        let (_, _a) = leases.wait(0, want(15..20, LeaseKind::Exclusive), Some(first));
        assert!(std::pin::Pin::new(&mut b).poll(&mut context).is_ready());
    }

    #[test]
    fn joint_space_is_forfeited_only_when_the_last_member_failed() {
        let mut joint = JointClusters::default();
        let (cluster, space) = CLUSTER_AND_SPACE;
        joint.join(cluster, space, false, 1);
        joint.join(cluster, space, false, 2);
        assert_eq!(joint.get(cluster), Some(space));
        assert_eq!(joint.leave(cluster), Left::Shared);
        joint.published(cluster);
        assert_eq!(
            joint.leave(cluster),
            Left::Published(Space {
                fresh: 0xfc,
                ..space
            })
        );
        joint.join(cluster, space, false, 1);
        assert_eq!(
            joint.leave(cluster),
            Left::Forfeited(Space {
                fresh: 0xfe,
                ..space
            })
        );
    }

    #[test]
    fn what_could_not_be_erased_is_not_published_until_somebody_makes_it_whole() {
        let mut joint = JointClusters::default();
        let (cluster, space) = CLUSTER_AND_SPACE;
        joint.join(cluster, space, false, 0b0110);
        joint.join(cluster, space, false, 0b0010);
        joint.taint(cluster, 0b0010);
        assert!(joint.has_failed(cluster, 0b0110) && !joint.has_failed(cluster, 0b0100));
        joint.join(cluster, space, false, 0b0010);
        assert!(!joint.has_failed(cluster, 0b0010));
    }

    #[test]
    fn only_subclusters_that_members_have_tried_to_write_are_spoiled() {
        let mut joint = JointClusters::default();
        let space = Space {
            host: HostOffset(0x10000),
            fresh: 0xff,
        };
        let cluster = GuestCluster(3);
        joint.no_longer_fresh(cluster, 0xff);
        joint.join(cluster, space, false, 0b0110);
        joint.no_longer_fresh(cluster, 0b1010);
        let fresh = |joint: &JointClusters| joint.get(cluster).map(|space| space.fresh);
        assert_eq!(fresh(&joint), Some(0xfd));
        joint.join(cluster, space, false, 0b1000);
        assert_eq!(fresh(&joint), Some(0xfd));
        assert_eq!(joint.leave(cluster), Left::Shared);
        let left = Space {
            fresh: 0xf1,
            ..space
        };
        assert_eq!(joint.leave(cluster), Left::Forfeited(left));
    }

    #[test]
    fn what_is_freed_waits_for_the_requests_of_its_epoch_and_earlier() {
        let mut epochs = Epochs::default();
        let old = epochs.enter();
        epochs.advance();
        let freed_in = epochs.current();
        let reader = epochs.enter();
        epochs.advance();
        let _later = epochs.enter();
        assert!(!epochs.all_left(freed_in));
        epochs.leave(reader);
        assert!(!epochs.all_left(freed_in));
        epochs.leave(old);
        assert!(epochs.all_left(freed_in));
    }

    #[test]
    fn a_request_of_the_epoch_itself_keeps_what_was_freed_in_it() {
        let mut epochs = Epochs::default();
        for _ in 0..3 {
            epochs.advance();
        }
        let reader = epochs.enter();
        let freed_in = epochs.current();
        epochs.advance();
        let later = epochs.enter();
        assert!(!epochs.all_left(freed_in));
        epochs.leave(reader);
        let now = epochs.current();
        assert!(epochs.all_left(freed_in) && !epochs.all_left(now));
        epochs.leave(later);
        assert!(epochs.all_left(now));
    }

    #[test]
    fn what_a_dropped_request_could_reach_is_never_reused_and_nobody_waits_for_it() {
        let mut epochs = Epochs::default();
        assert!(wait(&mut epochs).is_none() && !epochs.any_abandoned());
        let dropped = epochs.enter();
        let other = epochs.enter();
        assert!(!epochs.any_abandoned());
        let mut drain = wait(&mut epochs).expect("two are under way");
        epochs.abandon(dropped);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(std::pin::Pin::new(&mut drain).poll(&mut context).is_ready());
        assert!(wait(&mut epochs).is_some() && epochs.any_abandoned());
        epochs.advance();
        epochs.leave(other);
        assert!(wait(&mut epochs).is_none() && !epochs.all_left(dropped));
    }

    #[test]
    fn visits_keep_what_was_freed_until_they_have_left_and_later_ones_do_not() {
        let visits = Arc::new(Visits::new(2));
        let mut epochs = Epochs::beside(Arc::clone(&visits));
        let old = visits.enter(0);
        let freed_in = epochs.current();
        epochs.advance();
        let later = visits.enter(1);
        assert!(!epochs.all_left(freed_in) && wait(&mut epochs).is_some());
        assert!(visits.leave(old, 0), "an operation waits for it");
        epochs.visit_left();
        let newer_in = epochs.current();
        assert!(epochs.all_left(freed_in) && !epochs.all_left(newer_in));
        // Two generations are under way when the next epochs begin, and stay apart when they can.
        epochs.advance();
        let newest = visits.enter(0);
        epochs.advance();
        assert!(!epochs.all_left(newer_in));
        assert!(visits.leave(later, 0));
        assert!(epochs.all_left(newer_in));
        assert!(visits.leave(newest, 0) && wait(&mut epochs).is_none());
    }

    #[test]
    fn visits_that_never_cease_do_not_keep_what_was_freed_for_ever() {
        let visits = Arc::new(Visits::new(1));
        let mut epochs = Epochs::beside(Arc::clone(&visits));
        let mut one = visits.enter(0);
        let mut leave_later = |visits: &Visits| {
            let next = visits.enter(0);
            let last = std::mem::replace(&mut one, next);
            assert!(!visits.leave(last, 1));
        };
        let freed_in = epochs.current();
        epochs.advance();
        leave_later(&visits);
        leave_later(&visits);
        assert!(epochs.all_left(freed_in));
        // A generation that still has requests does not begin again with the next epoch.
        let freed_in = epochs.current();
        let stays = visits.enter(0);
        epochs.advance();
        epochs.advance();
        leave_later(&visits);
        assert!(!epochs.all_left(freed_in));
        assert!(!visits.leave(stays, 0));
        leave_later(&visits);
        let now = epochs.current();
        assert!(!epochs.all_left(now) && epochs.all_left(freed_in));
        // It begins when that is asked for.
        assert!(!epochs.all_left(freed_in + 1));
        leave_later(&visits);
        assert!(epochs.all_left(freed_in + 1));
    }

    #[test]
    fn a_dropped_visit_keeps_its_place_and_lets_the_others_go_on() {
        let visits = Arc::new(Visits::new(1));
        let mut epochs = Epochs::beside(Arc::clone(&visits));
        let (dropped, freed_in) = (visits.enter(0), epochs.current());
        visits.note_written(dropped, 1);
        assert!(epochs.take_writes() && !epochs.take_writes());
        epochs.abandon_visit(dropped);
        epochs.advance();
        assert!(wait(&mut epochs).is_none() && epochs.any_abandoned());
        assert!(!epochs.all_left(freed_in));
    }

    #[test]
    fn a_drain_ends_though_later_requests_are_always_under_way() {
        let visits = Arc::new(Visits::new(1));
        let mut epochs = Epochs::beside(Arc::clone(&visits));
        let (locked, early) = (epochs.enter(), visits.enter(0));
        let before = epochs.advance();
        let later = visits.enter(0);
        assert!(epochs.wait_for_end(before).is_some());
        epochs.leave(locked);
        assert!(epochs.wait_for_end(before).is_some());
        assert!(visits.leave(early, 0));
        assert!(epochs.wait_for_end(before).is_none());
        // The next one finds requests in both generations.
        let latest = visits.enter(0);
        let before = epochs.advance();
        let newest = visits.enter(0);
        assert!(epochs.wait_for_end(before).is_some());
        assert!(!visits.leave(later, 0), "it is not the last of its counter");
        assert!(visits.leave(latest, 0));
        assert!(epochs.wait_for_end(before).is_none());
        assert!(!visits.leave(newest, 0));
    }
}
