//! Reads and writes that take no lock: of clusters that the direct map knows (`mapping/direct.rs`).
//! All others go by the tables.
//!
//! A write here is steps 1 and 7 of `write.rs`. Steps 2 to 6 would find the slice in memory, plan a
//! write in place, take a shared lease, and have no space to take; 8 would publish nothing. The map
//! says that this is so, and its count is the lease. Writes that are to be durable go by the
//! tables.

use std::ops::Range;

use cowslip_boxed::boxed;
use cowslip_queue::{IoVec, IoVecMut};

use super::write::OnAllocated;
use crate::Result;
use crate::backing::Backing;
use crate::file::{Durability, Event};
use crate::geometry::{GuestCluster, GuestOffset, HostCluster};
use crate::mapping::lookup::thread_number;
use crate::mapping::visits::Visit;
use crate::{Qcow2, State};

/// A write in place that is under way.
struct InPlace<'a> {
    image: &'a Qcow2,
    visit: Visit,
    /// Clusters in which it is counted.
    clusters: Range<u64>,
    /// First byte in the file.
    host: u64,
    is_over: bool,
}

impl InPlace<'_> {
    /// Leaves its clusters. Returns whether a request may wait for one of them.
    #[inline]
    fn let_go(&mut self) -> bool {
        let mut may_be_awaited = false;
        for cluster in self.clusters.clone() {
            may_be_awaited |= self.image.direct.end_write(GuestCluster(cluster));
        }
        may_be_awaited
    }

    /// Wakes the requests that wait for its clusters.
    fn wake(&self, state: &mut State) {
        for cluster in self.clusters.clone().map(GuestCluster) {
            let slice = self.image.geometry().slice_of(cluster);
            let range = self.image.direct.range(cluster);
            state.mapping.leases.wake(slice, &range);
        }
    }

    /// Leaves before anything was written.
    fn give_up(mut self) {
        self.is_over = true;
        self.leave(0);
    }

    /// Ends it when its data is written, or that has failed.
    #[inline]
    fn end(mut self) {
        self.is_over = true;
        let clusters = self.clusters.end - self.clusters.start;
        // Before it leaves: a close waits until it has, and flushes what it says.
        self.image.visits.note_written(self.visit, clusters);
        self.leave(1);
    }

    #[inline]
    fn leave(&mut self, hits: u64) {
        if self.let_go() {
            self.wake(&mut self.image.lock());
        }
        if self.image.visits.leave(self.visit, hits) {
            self.image.lock().mapping.epochs.visit_left();
        }
    }
}

impl Drop for InPlace<'_> {
    /// Dropped with the write under way: as for a [`Batch`](super::admit::Batch), its epoch is
    /// never left.
    #[inline]
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let _may_be_awaited = self.let_go();
        let mut state = self.image.lock();
        self.wake(&mut state);
        state.committed.note_unflushed();
        state.mapping.epochs.abandon_visit(self.visit);
    }
}

impl Qcow2 {
    /// Reads guest data, of layers below too. Waits while reads are held back.
    pub async fn read_guest(
        &self,
        offset: u64,
        buf: IoVecMut,
        below: &dyn Backing,
    ) -> Result<IoVecMut> {
        let mut visit = self.enter().await;
        let range = offset..offset + buf.len() as u64;
        if let Some(host) = self.find_directly(&range) {
            visit.count_hit();
            self.file.reach(Event::ReadAio).await;
            return self.data.for_guest(host, offset).read(host, buf).await;
        }
        self.read_by_tables(range, buf, below).await
    }

    /// Apart, since a future is moved with all that it may need.
    #[boxed]
    async fn read_by_tables(
        &self,
        range: Range<u64>,
        buf: IoVecMut,
        below: &dyn Backing,
    ) -> Result<IoVecMut> {
        let runs = self.map(range.clone()).await?;
        self.read_runs(&runs, (range.start, buf), below).await
    }

    /// The place in the file of a range that is data in one piece, if the direct map knows it.
    #[inline]
    fn find_directly(&self, range: &Range<u64>) -> Option<u64> {
        let clusters = self.clusters_of(range)?;
        let first = self.direct.find(GuestCluster(clusters.start))?;
        for cluster in clusters.start + 1..clusters.end {
            let next = HostCluster(first.0 + (cluster - clusters.start));
            if self.direct.find(GuestCluster(cluster)) != Some(next) {
                return None;
            }
        }
        Some(self.place_in(first, range.start))
    }

    /// Writes guest data in place, if the direct map says that it may; `None` if it does not, and
    /// then nothing has happened.
    pub(super) async fn write_directly(
        &self,
        offset: u64,
        data: &IoVec,
        admitted: &OnAllocated<'_>,
    ) -> Option<Result<()>> {
        let write = self.begin_directly(&(offset..offset + data.len() as u64))?;
        admitted();
        self.file.reach(Event::WriteAio).await;
        let file = self.data.for_guest(write.host, offset);
        let written = file
            .write(write.host, data.clone(), Durability::Cached)
            .await;
        write.end();
        Some(written)
    }

    #[inline]
    fn begin_directly(&self, range: &Range<u64>) -> Option<InPlace<'_>> {
        let clusters = self.clusters_of(range)?;
        // Without the step to enter: most first writes end here.
        self.direct.find(GuestCluster(clusters.start))?;
        let mut write = InPlace {
            image: self,
            visit: self.visits.enter(thread_number()),
            clusters: clusters.start..clusters.start,
            host: 0,
            is_over: false,
        };
        let begun = self.begin_in_clusters(&mut write, clusters);
        match begun {
            Some(first) => {
                write.host = self.place_in(first, range.start);
                Some(write)
            }
            None => {
                write.give_up();
                None
            }
        }
    }

    /// Counts a write in its clusters, as far as they may be written, and are one piece of the
    /// file.
    #[inline]
    fn begin_in_clusters(
        &self,
        write: &mut InPlace<'_>,
        clusters: Range<u64>,
    ) -> Option<HostCluster> {
        // After it has entered: who closes the gate sees it, or it sees the gate closed.
        if !self.visits.admits_writes() {
            return None;
        }
        let mut first = None;
        for cluster in clusters.clone() {
            let host = self.direct.begin_write(GuestCluster(cluster))?;
            write.clusters.end = cluster + 1;
            let first = first.get_or_insert(host);
            if host.0.wrapping_sub(first.0) != cluster - clusters.start {
                return None;
            }
        }
        first
    }

    /// The clusters of a range, unless it is empty or long: then tables decide.
    #[inline]
    fn clusters_of(&self, range: &Range<u64>) -> Option<Range<u64>> {
        const CLUSTERS_MAX: u64 = 32;
        let last = range.end.checked_sub(1).filter(|_| !range.is_empty())?;
        let first = self.geometry().guest_cluster(GuestOffset(range.start)).0;
        let last = self.geometry().guest_cluster(GuestOffset(last)).0;
        (last - first < CLUSTERS_MAX).then_some(first..last + 1)
    }

    #[inline]
    fn place_in(&self, host: HostCluster, guest: u64) -> u64 {
        let within = guest & (self.geometry().cluster_bytes() - 1);
        self.geometry().host_offset(host).0 + within
    }
}
