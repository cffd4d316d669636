//! Steps 2 and 3 of a request: slices of L2 tables are loaded and pinned, and say where data is.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use super::direct::Access;
use super::tables::Prepared;
use super::visits::Visit;
use crate::entry::{EntryError, L2Entry};
use crate::file::Event;
use crate::geometry::{GuestCluster, GuestOffset, HostCluster, HostOffset};
use crate::map::{self, Run, Source};
use crate::{Error, Result};
use crate::{Qcow2, State};

/// A slice that stays in memory while the pin lives.
pub(crate) struct SlicePin<'a> {
    image: &'a Qcow2,
    /// `None`: there is no table.
    pub slice: Option<u64>,
}

impl Drop for SlicePin<'_> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice {
            self.image.lock().mapping.tables.unpin(slice);
        }
    }
}

/// A load under way; ends it even if its future is dropped.
struct Loading<'a> {
    image: &'a Qcow2,
    slice: u64,
    bytes: Option<Vec<u8>>,
}

impl Loading<'_> {
    async fn run(mut self, offset: HostOffset) -> Result<()> {
        let len = self.image.geometry().slice_bytes();
        self.image.file.reach(Event::L2Load).await;
        self.bytes = Some(self.image.file.read_new(offset.0, len).await?.to_vec());
        Ok(())
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.image
            .lock()
            .mapping
            .tables
            .loaded(self.slice, self.bytes.as_deref());
    }
}

/// A read's stay in its epoch.
pub struct EpochGuard<'a> {
    image: &'a Qcow2,
    visit: Visit,
    /// Slices that it has found by the direct map.
    hits: u64,
}

impl EpochGuard<'_> {
    #[inline]
    fn enter(image: &Qcow2) -> EpochGuard<'_> {
        EpochGuard {
            image,
            visit: image.visits.enter(thread_number()),
            hits: 0,
        }
    }

    /// Counts a slice that it has found by the direct map.
    #[inline]
    pub(crate) fn count_hit(&mut self) {
        self.hits += 1;
    }
}

impl Drop for EpochGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.image.visits.leave(self.visit, self.hits) {
            self.image.lock().mapping.epochs.visit_left();
        }
    }
}

/// The number of this thread, for counters that threads share out among them.
#[inline]
pub(crate) fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    // The thread's storage may be gone when it ends; any counter will do.
    NUMBER.try_with(|&number| number).unwrap_or(0)
}

impl Qcow2 {
    pub(crate) fn corrupt_entry(
        &self,
        state: &State,
        cluster: GuestCluster,
        error: EntryError,
    ) -> Error {
        let tables = &state.mapping.tables;
        let l1_index = self.geometry().l1_index(cluster);
        let (structure, offset) = match tables.table(l1_index) {
            Ok(_) => ("L2 entry", tables.entry_offset(cluster)),
            Err(_) => (
                "L1 entry",
                state.committed.header.l1_table_offset + 8 * l1_index,
            ),
        };
        Error::Corrupt {
            file: self.name().to_string(),
            structure,
            offset,
            detail: error.to_string(),
        }
    }

    /// Brings a slice into memory (step 2). It may be evicted again before the caller looks, who
    /// then asks again; the returned pin prevents that.
    pub(crate) async fn load(&self, slice: u64) -> Result<SlicePin<'_>> {
        let cluster = GuestCluster(slice * self.geometry().slice_entries());
        loop {
            let mut visit = None;
            let prepared = {
                let mut state = self.lock();
                let held_back = state.health.slices_held_back();
                let prepared = match held_back {
                    Some(waiting) => Ok(Prepared::Wait(waiting)),
                    None => state.mapping.tables.prepare(slice),
                };
                if matches!(prepared, Ok(Prepared::Load(_))) {
                    // Entered with the place in hand: the table is not reused while it is read.
                    visit = Some(EpochGuard::enter(self));
                }
                if matches!(prepared, Ok(Prepared::Ready)) {
                    state.mapping.tables.pin(slice);
                    return Ok(SlicePin {
                        image: self,
                        slice: Some(slice),
                    });
                }
                prepared.map_err(|error| self.corrupt_entry(&state, cluster, error))?
            };
            match prepared {
                Prepared::Ready => {}
                Prepared::NoTable => {
                    return Ok(SlicePin {
                        image: self,
                        slice: None,
                    });
                }
                Prepared::Wait(waiting) => waiting.await,
                Prepared::Full { dirty: true, .. } => self.write_back().await?,
                Prepared::Full {
                    dirty: false,
                    freed,
                } => freed.await,
                Prepared::Load(offset) => {
                    let bytes = Loading {
                        image: self,
                        slice,
                        bytes: None,
                    }
                    .run(offset)
                    .await;
                    drop(visit);
                    bytes?;
                }
            }
        }
    }

    /// The runs of a guest range, top layer only. Enters no epoch: the caller has.
    pub async fn map(&self, range: Range<u64>) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        let coverage = self.geometry().slice_coverage_bytes();
        let mut at = range.start;
        while at < range.end {
            let piece = at..range.end.min((at / coverage + 1) * coverage);
            if self.map_at_hand(piece.clone(), &mut runs)? {
                at = piece.end;
                continue;
            }
            let first = self.geometry().guest_cluster(GuestOffset(at));
            let pin = self.load(self.geometry().slice_of(first)).await?;
            let mut state = self.lock();
            if pin.slice.is_none() {
                // A table may have come into being since; then its slice is looked up again.
                if !self.has_table(&state, first)? {
                    // All of the table's range at once: a disk may have millions of empty ones.
                    let table = self.geometry().l2_coverage_bytes();
                    let piece = at..range.end.min((at / table + 1) * table);
                    at = piece.end;
                    map::push(
                        &mut runs,
                        Run {
                            range: piece,
                            source: Source::Below,
                        },
                    );
                }
                continue;
            }
            at = piece.end;
            self.map_slice(&mut state, piece, &mut runs)?;
            drop(state);
        }
        Ok(runs)
    }

    /// The runs of a range within one slice, if that is in memory.
    fn map_at_hand(&self, piece: Range<u64>, runs: &mut Vec<Run>) -> Result<bool> {
        let first = self.geometry().guest_cluster(GuestOffset(piece.start));
        let slice = self.geometry().slice_of(first);
        let mut state = self.lock();
        let is_free = state.health.slices_held_back().is_none();
        let is_at_hand = is_free && state.mapping.tables.look(slice);
        if is_at_hand {
            self.map_slice(&mut state, piece, runs)?;
        }
        Ok(is_at_hand)
    }

    /// The runs of a range within one slice, which is in memory. Those clusters that are data
    /// throughout are found without tables from now on.
    fn map_slice(&self, state: &mut State, piece: Range<u64>, runs: &mut Vec<Run>) -> Result<()> {
        let len = piece.end - piece.start;
        for part in crate::units::pieces(piece.start, len, self.geometry().cluster_bytes()) {
            let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
            let entry = state.mapping.tables.entry(cluster);
            let entry = entry.map_err(|error| self.corrupt_entry(state, cluster, error))?;
            let start = self.geometry().guest_offset(cluster).0;
            map::map_cluster(&self.format, &entry, start, part, runs);
            self.show_directly(state, cluster, &entry);
        }
        Ok(())
    }

    /// Has requests find a cluster without the lock and the tables, if all of it is data; and write
    /// it, if that changes nothing but the data (steps 3 to 6 have nothing to decide). Its slice is
    /// in memory.
    pub(crate) fn show_directly(&self, state: &mut State, cluster: GuestCluster, entry: &L2Entry) {
        let L2Entry::Standard(entry) = entry else {
            return;
        };
        let is_data = entry.allocated == self.geometry().all_subclusters();
        let (Some(host), true) = (entry.host, is_data && state.mapping.tables.uses_direct()) else {
            return;
        };
        let host = self.host_cluster(host);
        let place = (cluster, host);
        if state.mapping.tables.direct().has(place, Access::ReadWrite) {
            return;
        }
        let is_in_place = entry.copied && self.may_write_directly(state, place);
        let access = match is_in_place {
            true => Access::ReadWrite,
            false => Access::Read,
        };
        state.mapping.tables.direct_to(place, access);
    }

    /// Returns whether a cluster of which all is data, with a count of 1, may be written in place
    /// by any request from now on.
    fn may_write_directly(
        &self,
        state: &mut State,
        (cluster, host): (GuestCluster, HostCluster),
    ) -> bool {
        let l1_index = self.geometry().l1_index(cluster);
        let slice = self.geometry().slice_of(cluster);
        let table = state.mapping.tables.table(l1_index);
        let is_own = matches!(table, Ok(Some(table)) if table.copied);
        let range = state.mapping.tables.direct().range(cluster);
        let is_sound = self.format.data_file
            || (!state.space.protected.contains(host) && host.0 < state.space.claimed());
        let all = self.geometry().all_subclusters();
        self.writable
            && is_own
            && is_sound
            && !state.mapping.is_bad_table(l1_index)
            && !state.health.holds_changes_back()
            && state.mapping.joint.get(cluster).is_none()
            && !state.mapping.leases.is_wanted_alone(slice, &range)
            && state.space.hole_under_way(host, all).is_none()
    }

    pub(crate) fn has_table(&self, state: &State, cluster: GuestCluster) -> Result<bool> {
        let table = state
            .mapping
            .tables
            .table(self.geometry().l1_index(cluster));
        let table = table.map_err(|error| self.corrupt_entry(state, cluster, error))?;
        Ok(table.is_some())
    }

    /// Enters an epoch for the time of a read.
    pub async fn enter(&self) -> EpochGuard<'_> {
        loop {
            let guard = EpochGuard::enter(self);
            if self.visits.admits_reads() {
                return guard;
            }
            drop(guard);
            let waiting = self.lock().health.reads_held_back();
            if let Some(waiting) = waiting {
                waiting.await;
            }
        }
    }
}
