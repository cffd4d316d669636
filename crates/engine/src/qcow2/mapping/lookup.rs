//! Steps 2 and 3 of a request: slices of L2 tables are loaded and pinned, and say where data is.

use std::ops::Range;

use super::tables::Prepared;
use crate::file::Event;
use crate::qcow2::entry::EntryError;
use crate::qcow2::geometry::{GuestCluster, GuestOffset, HostOffset};
use crate::qcow2::map::{self, Run, Source};
use crate::qcow2::{Qcow2, State};
use crate::{Error, Result};

/// A slice that stays in memory while the pin lives.
pub(in crate::qcow2) struct SlicePin<'a> {
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
pub(crate) struct EpochGuard<'a> {
    image: &'a Qcow2,
    epoch: u64,
}

impl Drop for EpochGuard<'_> {
    fn drop(&mut self) {
        self.image.lock().mapping.epochs.leave(self.epoch);
    }
}

impl Qcow2 {
    pub(in crate::qcow2) fn corrupt_entry(
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
    pub(in crate::qcow2) async fn load(&self, slice: u64) -> Result<SlicePin<'_>> {
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
                    visit = Some(EpochGuard {
                        image: self,
                        epoch: state.mapping.epochs.enter(),
                    });
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
    pub(crate) async fn map(&self, range: Range<u64>) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        let coverage = self.geometry().slice_coverage_bytes();
        let mut at = range.start;
        while at < range.end {
            let piece = at..range.end.min((at / coverage + 1) * coverage);
            let first = self.geometry().guest_cluster(GuestOffset(at));
            let pin = self.load(self.geometry().slice_of(first)).await?;
            let state = self.lock();
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
            let len = piece.end - piece.start;
            for part in crate::units::pieces(piece.start, len, self.geometry().cluster_bytes()) {
                let cluster = self.geometry().guest_cluster(GuestOffset(part.start));
                let entry = state.mapping.tables.entry(cluster);
                let entry = entry.map_err(|error| self.corrupt_entry(&state, cluster, error))?;
                let start = self.geometry().guest_offset(cluster).0;
                map::map_cluster(&self.format, &entry, start, part, &mut runs);
            }
            drop(state);
        }
        Ok(runs)
    }

    pub(in crate::qcow2) fn has_table(&self, state: &State, cluster: GuestCluster) -> Result<bool> {
        let table = state
            .mapping
            .tables
            .table(self.geometry().l1_index(cluster));
        let table = table.map_err(|error| self.corrupt_entry(state, cluster, error))?;
        Ok(table.is_some())
    }

    /// Enters an epoch for the time of a read.
    pub(crate) async fn enter(&self) -> EpochGuard<'_> {
        loop {
            let waiting = {
                let mut state = self.lock();
                match state.health.reads_held_back() {
                    Some(waiting) => waiting,
                    None => {
                        return EpochGuard {
                            image: self,
                            epoch: state.mapping.epochs.enter(),
                        };
                    }
                }
            };
            waiting.await;
        }
    }
}
