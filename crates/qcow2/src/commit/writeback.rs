//! Write-back cycles: the order in which tables and counts become durable.
//!
//! Definitions. A *cut* copies, in one hold of the metadata lock, all that is dirty; only these
//! copies are written. A *barrier* is a flush of every file that was written; it covers what had
//! completed before it was issued. The holder of the *turn* runs the cycle: cycles are serial, so a
//! metadata sector never has two writes in flight.
//!
//! | stage | what is written | what a crash after it leaves |
//! | --- | --- | --- |
//! | A | raised counts, new tables (nothing refers to them yet); guest data is down already | leaks |
//! | barrier | | |
//! | B | slices of tables that L1 refers to, L1 entries of new tables | leaks; each entry refers to counted, durable clusters (D1) |
//! | barrier | | all that completed before the cut is durable |
//! | C | lowered counts of what the cut cleared, once its epoch has left (D2) | leaks |
//!
//! Stage A needs one barrier for data, counts and new tables together, since a new table is reached
//! only through its L1 entry, which is a stage-B write. Empty stages cost nothing.
//!
//! A cut is *unordered* if it raises no count, and no entry in it promises bytes that may not be
//! durable yet ([`WriteOrdering`](crate::plan::WriteOrdering)): each entry refers to space
//! that reads as zeroes, durably, where the guest's disk did. Then stage A is empty, new tables,
//! slices and L1 go down together, and there is one barrier for them and for the guest's data:
//! whatever a crash keeps of them, each sector is old or new.
//!
//! The refcount table and its blocks grow ahead of need ([`Qcow2::make_room`]): blocks, barrier,
//! table entries (or a new table, barrier, header), barrier; only then is the space they count
//! handed out. So no cluster is taken that could not be counted.

use cowslip_boxed::boxed;
use std::ops::Range;

use cowslip_block::joins::join_all;

use super::probe::Stage;
use super::roots::Flush;
use super::state::Ready;
use crate::errno::{EDQUOT, ENOSPC};
use crate::file::{AlignedFile, Durability, Event};
use crate::geometry::HostCluster;
use crate::header::{AllocationHint, Header, autoclear, incompatible};
use crate::mapping::tables::{CycleTables, OnDisk, SliceCopy};
use crate::plan::Freed;
use crate::space::alloc::{self, SpaceContent};
use crate::{Buf, Error, Result};
use crate::{Counts, Qcow2, State};

mod drop_counts;
mod fixed;
mod grow;

/// Clusters whose counts are looked through at a time.
const SCAN_CLUSTERS: u64 = 1 << 15;
/// Bytes whose holes are queried from the host at a time, which bounds their number.
const LOOK_BYTES: u64 = 256 << 20;
/// The largest refcount table, as QEMU's.
const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;

/// The changes that one cycle writes.
struct Cycle {
    number: u64,
    tables: CycleTables,
    raised: Vec<(HostCluster, u64)>,
    freed: Vec<(Freed, u64)>,
    unflushed: bool,
    /// Changes of space before the cut.
    space_changes: u64,
    /// There is no barrier before entries.
    unordered: bool,
    /// Entries of L1 may have been written.
    l1_reached: bool,
}

impl Cycle {
    /// After a failure nothing of the cut counts as durable. Without space it may be tried again;
    /// any other failure latches the image (invariant D4).
    fn take_back(self, state: &mut State, error: &Error) {
        state
            .mapping
            .tables
            .cut_failed(&self.tables, self.l1_reached);
        state.space.raised.take_back(self.raised);
        state.space.quarantine.take_back(self.freed);
        state.committed.note_unflushed();
        if !is_no_space(error) {
            state.health.latch(error.duplicate());
        }
    }
}

/// How a write in place goes down: synchronously if it asks to be durable and its mapping is.
pub(crate) fn durability(asked: Durability, mapping_is_durable: bool) -> Durability {
    match asked {
        Durability::Durable if mapping_is_durable => Durability::Durable,
        Durability::Durable | Durability::Cached => Durability::Cached,
    }
}

/// Returns whether an error says that there is no space. Of a write: nothing is lost then, and a
/// retry may succeed. A flush that fails so has latched the image.
pub(crate) fn is_no_space(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. }
        if matches!(source.raw_os_error(), Some(ENOSPC | EDQUOT)))
}

impl Qcow2 {
    /// Makes durable what had completed when it was called, by a cycle whose cut comes after.
    #[boxed]
    pub(crate) async fn write_back(&self) -> Result<()> {
        let wanted = {
            let state = self.lock();
            self.unlatched(&state)?;
            state.committed.next_cut()
        };
        let mut turn = self.turn.take().await;
        {
            let state = self.lock();
            self.unlatched(&state)?;
            if state.committed.is_durable(wanted) {
                return Ok(());
            }
        }
        self.latch_if_cancelled(self.cycle(&mut turn)).await
    }

    /// Runs one write-back cycle: stages A, B and C, with the barriers that the cut needs.
    #[boxed]
    pub(crate) async fn cycle(&self, counts: &mut Counts) -> Result<()> {
        // After a failed barrier nothing may depend on the writes it should have covered.
        self.unlatched(&self.lock())?;
        let mut cycle = self.cut();
        self.probe.cycle_begins(cycle.freed.len());
        let mut written = self.write_stages(counts, &mut cycle).await;
        {
            let mut state = self.lock();
            match &written {
                Ok(()) => {
                    let state = &mut *state;
                    state.mapping.tables.cut_is_durable(&cycle.tables);
                    state.committed.cut_is_durable(cycle.number);
                    state.space.quarantine.clearing_is_durable(cycle.freed);
                }
                Err(error) => cycle.take_back(&mut state, error),
            }
        }
        if written.is_ok() {
            written = self.open_quarantine(counts).await;
        }
        self.probe.cycle_ends(self.lock().mapping.tables.evicted());
        written
    }

    fn cut(&self) -> Cycle {
        let mut state = self.lock();
        let state = &mut *state;
        if state.mapping.epochs.take_writes() {
            state.committed.note_unflushed();
        }
        let (number, unflushed) = state.committed.cut();
        state.mapping.epochs.advance();
        Cycle {
            number,
            tables: state.mapping.tables.cut(),
            raised: state.space.raised.cut(),
            freed: state.space.quarantine.cut(),
            unflushed,
            space_changes: self.file.space_changes(),
            unordered: false,
            l1_reached: false,
        }
    }

    async fn write_stages(&self, counts: &mut Counts, cycle: &mut Cycle) -> Result<()> {
        // Stage A. Raised counts stay raised in memory if a later step fails.
        let stage = self.probe.stage(Stage::Raise);
        let raised = cycle.raised.len() as u64;
        if raised > 0 {
            self.file.reach(Event::RefblockAlloc).await;
        }
        while let Some((cluster, count)) = cycle.raised.pop() {
            if let Err(error) = counts.refcounts.add(cluster, count as i64).await {
                cycle.raised.push((cluster, count));
                return Err(error);
            }
        }
        self.count_ahead(counts, raised).await;
        let wrote_counts = counts.refcounts.is_dirty();
        let has_tables = !cycle.tables.new_tables.is_empty() || !cycle.tables.slices.is_empty();
        let has_entries = !cycle.tables.slices.is_empty() || !cycle.tables.l1.is_empty();
        cycle.unordered = has_entries && !self.is_ordered(counts, cycle);
        if !cycle.unordered {
            counts.refcounts.write_dirty().await?;
            self.write_new_tables(&cycle.tables).await?;
            if cycle.unflushed || wrote_counts || has_tables {
                self.barrier().await?;
                counts.refcounts.settle();
                self.lock().committed.settle_space(cycle.space_changes);
            }
        }
        drop(stage);
        // Stage B.
        if !has_entries {
            return Ok(());
        }
        let _slices = self.probe.stage(Stage::Slices);
        if !cycle.tables.slices.is_empty() {
            self.file.reach(Event::L2Update).await;
        }
        let new_slices = match cycle.unordered {
            true => &cycle.tables.new_slices[..],
            false => &[],
        };
        self.write_slices(new_slices.iter().chain(&cycle.tables.slices))
            .await?;
        let _roots = (!cycle.tables.l1.is_empty()).then(|| self.probe.stage(Stage::Roots));
        cycle.l1_reached = true;
        self.write_l1(&cycle.tables).await?;
        self.sync(&self.file).await
    }

    /// Returns whether entries of a cut have to wait until what they refer to, and its counts, are
    /// durable.
    fn is_ordered(&self, counts: &Counts, cycle: &Cycle) -> bool {
        let is_settled = self.lock().committed.is_space_settled(cycle.space_changes);
        !counts.refcounts.is_settled()
            || !is_settled
            || cycle.tables.is_ordered()
            || self.format.data_file
    }

    /// Flushes the data file first, so that no entry can be durable before its data.
    pub(crate) async fn barrier(&self) -> Result<()> {
        if self.format.data_file {
            self.sync(&self.data).await?;
        }
        self.sync(&self.file).await
    }

    /// Flushes a file. Whatever the error of a flush that fails, no space included: the data it
    /// should have covered may be lost, and the system reports that only once (invariant D4).
    pub(crate) async fn sync(&self, file: &AlignedFile) -> Result<()> {
        let under_way = self.durable_writes.begin();
        let flushed = file.flush().await;
        if let Err(error) = &flushed {
            self.lock().health.latch(error.duplicate());
        }
        under_way.end();
        flushed?;
        self.check_concurrent_flushes().await
    }

    /// Checks, after a flush or a durable write has succeeded, that nothing it should have covered
    /// was lost: the system may have reported that to a concurrent one instead.
    pub(crate) async fn check_concurrent_flushes(&self) -> Result<()> {
        let all_noted = self.durable_writes.settle().await;
        let mut state = self.lock();
        if all_noted.is_err() {
            let abandoned = std::io::Error::from(std::io::ErrorKind::Interrupted);
            let text = format!("A durable write to '{}' was broken off", self.name());
            state.health.latch(Error::io(text, abandoned));
        }
        self.unlatched(&state)
    }

    async fn write_slices(&self, slices: impl Iterator<Item = &SliceCopy>) -> Result<()> {
        // Tables lie in the order in which they were made, which is not that of what they map.
        let mut slices: Vec<&SliceCopy> = slices.collect();
        slices.sort_by_key(|copy| copy.offset);
        let mut writes: Vec<(u64, u64, Vec<Buf>)> = Vec::new();
        for copy in slices {
            let len = copy.bytes.len() as u64;
            match writes.last_mut() {
                Some((_, end, data)) if *end == copy.offset.0 && data.len() < 256 => {
                    *end += len;
                    data.push(copy.bytes.clone());
                }
                _ => writes.push((copy.offset.0, copy.offset.0 + len, vec![copy.bytes.clone()])),
            }
        }
        self.write_all(
            writes
                .into_iter()
                .map(|(offset, _, data)| (offset, data))
                .collect(),
        )
        .await
    }

    /// Writes them all at once; returns when all have ended.
    pub(crate) async fn write_all(&self, writes: Vec<(u64, Vec<Buf>)>) -> Result<()> {
        let writes = writes
            .into_iter()
            .map(|(at, data)| self.file.write(at, data, Durability::Cached));
        join_all(writes).await.into_iter().collect()
    }

    /// The same, durable at their completion, and nothing else of the file: what guests have
    /// written may take long.
    pub(crate) async fn write_durably(&self, writes: Vec<(u64, Vec<Buf>)>) -> Result<()> {
        let under_way = self.durable_writes.begin();
        let writes = writes
            .into_iter()
            .map(|(at, data)| self.file.write(at, data, Durability::Durable));
        // All of them end before the failure of one is known.
        let written: Result<()> = join_all(writes).await.into_iter().collect();
        if let Err(error) = &written {
            self.lock().health.latch(error.duplicate());
        }
        under_way.end();
        written?;
        self.check_concurrent_flushes().await
    }

    async fn write_new_tables(&self, cut: &CycleTables) -> Result<()> {
        let unknown = cut
            .new_tables
            .iter()
            .filter(|(_, table)| table.on_disk == OnDisk::Unknown);
        for (_, table) in unknown {
            self.file
                .write(
                    table.offset.0,
                    vec![crate::path::cow::zeroes(
                        self.geometry().cluster_bytes() as usize
                    )],
                    Durability::Cached,
                )
                .await?;
        }
        if !cut.new_slices.is_empty() {
            self.file.reach(Event::L2AllocWrite).await;
        }
        self.write_slices(cut.new_slices.iter()).await
    }

    /// Writes single entries: L1 in memory may hold newer ones that must not go down yet.
    async fn write_l1(&self, cut: &CycleTables) -> Result<()> {
        let table = self.lock().committed.header.l1_table_offset;
        let entries: Vec<_> = cut
            .l1
            .iter()
            .map(|(&index, &entry)| (index, entry))
            .collect();
        if !entries.is_empty() {
            self.file.reach(Event::L1Update).await;
        }
        self.write_all(entry_writes(table, &entries)).await
    }

    /// Stage C: clusters whose last reference is gone for good, and that no request can still
    /// reach, lose their count and become free.
    async fn open_quarantine(&self, counts: &mut Counts) -> Result<()> {
        let ready: Vec<(Freed, u64)> = {
            let mut state = self.lock();
            let state = &mut *state;
            state.space.quarantine.open(&mut state.mapping.epochs)
        };
        if ready.is_empty() {
            return Ok(());
        }
        self.punch_subclusters(counts, &ready).await;
        self.file.reach(Event::ClusterFree).await;
        let lower = self.probe.stage(Stage::Lower);
        let mut free = Vec::new();
        let mut damaged = None;
        let clusters = |(freed, _): &(Freed, u64)| freed.clusters(self.geometry());
        for cluster in ready.iter().flat_map(clusters) {
            match self.lower_count(counts, cluster).await {
                Ok(0) => free.push(cluster),
                Ok(_) => {}
                Err(error) => damaged = Some(error),
            }
        }
        free.sort_unstable();
        free.dedup();
        if let Some(tail) = &counts.compressed_tail
            && free.binary_search(&tail.cluster(self.geometry())).is_ok()
        {
            counts.compressed_tail = None;
        }
        let written = counts.refcounts.write_dirty().await;
        drop(lower);
        let _release = self.probe.stage(Stage::Release);
        let content = self.punch_clusters(&free).await;
        let mut state = self.lock();
        let state = &mut *state;
        for (cluster, content) in free.iter().zip(content) {
            state.space.set_free(counts.scanned, (*cluster, content));
        }
        if let Some(error) = damaged {
            // The image's own counts contradict its tables: it must not be written any more.
            state.health.latch(error);
        }
        if let Err(error) = &written {
            state.committed.note_unflushed();
            if !is_no_space(error) {
                state.health.latch(error.duplicate());
            }
        }
        Ok(())
    }

    /// Provides room for `clusters` clusters: finds free ones, or grows the file. If there is no
    /// space, the error comes before anything is taken.
    pub(crate) async fn make_room(&self, clusters: u64) -> Result<()> {
        let mut counts = self.turn.take().await;
        self.latch_if_cancelled(self.make_room_in_turn(&mut counts, clusters))
            .await
    }

    /// The same ahead of need: if space is scarce, the rest is left to requests that need it.
    pub(crate) async fn make_room_ahead(&self, clusters: u64) -> Result<()> {
        let mut counts = self.turn.take().await;
        let room = async {
            while self.lock().space.free.clusters() < clusters {
                self.unlatched(&self.lock())?;
                if !self.scan(&mut counts).await? {
                    let wanted = clusters.min(self.clusters_left());
                    if wanted == 0 {
                        return Err(self.no_space());
                    }
                    self.grow_ahead(&mut counts, wanted).await?;
                }
            }
            Ok(())
        };
        let outcome = self.latch_if_cancelled(room).await;
        if outcome.is_err() {
            self.lock().space.stop_growing_ahead();
        }
        outcome
    }

    async fn make_room_in_turn(&self, counts: &mut Counts, clusters: u64) -> Result<()> {
        let mut cycled = false;
        loop {
            {
                let state = self.lock();
                self.unlatched(&state)?;
                if state.space.free.clusters() >= clusters {
                    return Ok(());
                }
            }
            match self.find_room(counts, clusters).await {
                Ok(()) => {}
                Err(error) if is_no_space(&error) && !cycled && !self.is_latched() => {
                    // Clusters that are freed, but not durably yet, may suffice.
                    cycled = true;
                    self.cycle(counts).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Finds some free clusters among those that exist, or grows the file by at least `clusters`.
    #[boxed]
    pub(crate) async fn find_room(&self, counts: &mut Counts, clusters: u64) -> Result<()> {
        if self.scan(counts).await? || self.recount_dropped(counts).await? {
            return Ok(());
        }
        self.grow(counts, clusters).await
    }

    /// Looks through the counts of clusters that existed at open; `false` when there are no more.
    pub(crate) async fn scan(&self, counts: &mut Counts) -> Result<bool> {
        let end = self.lock().space.claimed_at_open();
        // A cluster that the end of a device cuts through cannot be written as a whole.
        let end = end.min(self.fixed_end.unwrap_or(u64::MAX));
        let from = counts.scanned;
        if from >= end {
            return Ok(false);
        }
        let to = end.min(from + SCAN_CLUSTERS);
        let runs = counts.refcounts.countable_zero_runs(from..to).await?;
        self.refuse_free_metadata(&runs)?;
        let mut found = Vec::new();
        for run in runs {
            self.look_for_holes(run, &mut found).await;
        }
        let mut state = self.lock();
        for (run, content) in found {
            let count = run.end - run.start;
            state.space.free.add(HostCluster(run.start), count, content);
        }
        counts.scanned = to;
        Ok(true)
    }

    /// Metadata whose count is 0 would be handed out.
    fn refuse_free_metadata(&self, free: &[Range<u64>]) -> Result<()> {
        let mut state = self.lock();
        let holds_metadata = |&c: &u64| state.space.protected.contains(HostCluster(c));
        let Some(cluster) = free.iter().cloned().flatten().find(holds_metadata) else {
            return Ok(());
        };
        let error = Error::Corrupt {
            file: self.name().to_string(),
            structure: "reference count of the cluster",
            offset: self.geometry().host_offset(HostCluster(cluster)).0,
            detail: "it is 0, but the cluster holds metadata".to_string(),
        };
        state.health.latch(error.duplicate());
        Err(error)
    }

    /// Appends to `found` which free clusters read as zeroes: those in a hole of the host file. The
    /// hole is from an earlier session, and the flush that precedes the first write of this session
    /// has made it durable; or this session has punched it, which counts as a change of space.
    /// Holes are trusted only on a file system that is known to punch them: FUSE reports data as a
    /// hole that is written but still in the page cache.
    async fn look_for_holes(&self, free: Range<u64>, found: &mut Vec<(Range<u64>, SpaceContent)>) {
        if !self.zero_method.knows_fresh() || !self.file.capabilities().punches_holes {
            return found.push((free, SpaceContent::Unknown));
        }
        let bits = self.geometry().cluster_bits();
        let step = (LOOK_BYTES >> bits).max(1);
        let mut at = free.start;
        while at < free.end {
            let part = at..free.end.min(at + step);
            at = part.end;
            let bytes = (part.end - part.start) << bits;
            match self.file.extents(part.start << bits, bytes).await {
                Ok(extents) => alloc::in_holes(&part, &extents, bits, found),
                // Where the host cannot list its extents, the content is unknown.
                Err(_) => found.push((part, SpaceContent::Unknown)),
            }
        }
    }

    /// Frees clusters of a structure that the header has, durably, ceased to refer to. Only the
    /// holder of the turn reads such structures, so no epoch has to be awaited.
    pub(crate) async fn free_metadata(
        &self,
        counts: &mut Counts,
        clusters: Range<u64>,
    ) -> Result<()> {
        self.file.reach(Event::ClusterFree).await;
        for cluster in clusters.map(HostCluster) {
            if self.lower_count(counts, cluster).await? == 0 {
                self.lock()
                    .space
                    .set_free(counts.scanned, (cluster, SpaceContent::Unknown));
            }
        }
        Ok(())
    }

    /// Lowers the count of a cluster that has lost a reference, and returns the new one.
    ///
    /// # Errors
    /// I/O, a corrupt table entry, or a cluster that had no reference by the counts: its count is
    /// 0, or it is free and was counted ahead.
    async fn lower_count(&self, counts: &mut Counts, cluster: HostCluster) -> Result<u64> {
        if self.lock().space.is_free(cluster) {
            return Err(Error::Corrupt {
                file: self.name().to_string(),
                structure: "reference count of the cluster",
                offset: self.geometry().host_offset(cluster).0,
                detail: "the cluster is free, and something refers to it".to_string(),
            });
        }
        counts.refcounts.add(cluster, -1).await
    }

    /// Changes a root (invariant D6): one write within header sector 0, between barriers. What the
    /// new header refers to is durable already.
    pub(crate) async fn write_header(&self, header: &Header) -> Result<()> {
        let _roots = (self.stage() == Stage::Idle).then(|| self.probe.stage(Stage::Roots));
        let fixed = vec![(0, vec![Buf::from(header.fixed_part())])];
        self.write_root(fixed, Flush::File).await?;
        self.lock().committed.set_header(header.clone());
        Ok(())
    }

    /// Changes the hint where it is: eight bytes of one sector, which nothing depends on, so
    /// nothing is flushed for them, and lack of space stops nothing. Their offset is known, since
    /// a failed write of a root latches.
    pub(crate) async fn write_allocation_hint(&self, hint: AllocationHint) -> Result<()> {
        {
            let state = self.lock();
            let changes = state.committed.header.extensions.allocation != Some(hint);
            if !changes || !state.committed.is_ready_for(Ready::Changes) || hint.data_offset == 0 {
                return Ok(());
            }
        }
        let data = vec![Buf::from(hint.encode().to_vec())];
        let write = self.file.write(hint.data_offset, data, Durability::Cached);
        let written = write.await;
        if let Err(error) = &written
            && !is_no_space(error)
        {
            self.latch(error);
        }
        written?;
        self.lock().committed.header.extensions.allocation = Some(hint);
        Ok(())
    }

    /// Sets the corrupt bit where damage was met (invariant S3); version 2 has none. It is the only
    /// write that may follow the latch, which the damage has set. After the failed write of a root
    /// it may not: the header in memory may be another one than the medium's.
    #[boxed]
    pub(crate) async fn mark_corrupt(&self) {
        let _turn = self.turn.take().await;
        let mut header = {
            let state = self.lock();
            let is_marked =
                state.committed.header.version < 3 || state.committed.header.is_corrupt();
            if is_marked || !state.health.may_mark_damage() {
                return;
            }
            state.committed.header.clone()
        };
        header.incompatible_features |= incompatible::CORRUPT;
        let fixed = vec![Buf::from(header.fixed_part())];
        let unbraked = self.file.without_brake();
        let written = match unbraked.write(0, fixed, Durability::Cached).await {
            Ok(()) => self.file.flush().await,
            failed => failed,
        };
        // With or without the bit, all else is the same: it may be tried again.
        if written.is_ok() {
            self.lock().committed.set_header(header);
        }
    }

    /// Before the first write of a session: what we do not maintain is marked so, durably, and what
    /// we do is marked as not yet right (D5).
    pub(crate) async fn ready_for_writes(&self) -> Result<()> {
        if self.lock().committed.is_ready_for(Ready::Writes) {
            return Ok(());
        }
        let _turn = self.turn.take().await;
        self.latch_if_cancelled(async {
            self.ready_in_turn().await?;
            if self.lock().committed.is_ready_for(Ready::Writes) {
                return Ok(());
            }
            self.track_in_turn().await?;
            let mut state = self.lock();
            state.committed.now_ready_for(Ready::Writes);
            state.set_gate();
            Ok(())
        })
        .await
    }

    /// The same before what changes the image, and nothing that the guest sees.
    pub(crate) async fn ready_for_changes(&self) -> Result<()> {
        if self.lock().committed.is_ready_for(Ready::Changes) {
            return Ok(());
        }
        let _turn = self.turn.take().await;
        self.latch_if_cancelled(self.ready_in_turn()).await
    }

    #[boxed]
    async fn ready_in_turn(&self) -> Result<()> {
        let mut header = {
            let state = self.lock();
            self.unlatched(&state)?;
            if state.committed.is_ready_for(Ready::Changes) {
                return Ok(());
            }
            state.committed.header.clone()
        };
        // The data read so far, table entries included, may have been left unflushed by a process
        // that died: nothing may depend on it before it is durable.
        if let Err(error) = self.barrier().await {
            self.lock().health.latch(error.duplicate());
            return Err(error);
        }
        let maintained = autoclear::DATA_FILE_RAW | autoclear::BITMAPS;
        if header.autoclear_features & !maintained != 0 {
            header.autoclear_features &= maintained;
            self.write_header(&header).await?;
        }
        self.lock().committed.now_ready_for(Ready::Changes);
        Ok(())
    }
}

/// Writes of single 8-byte entries of a table, neighbours joined.
pub(crate) fn entry_writes(table: u64, entries: &[(u64, u64)]) -> Vec<(u64, Vec<Buf>)> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for (index, entry) in entries {
        let offset = table + 8 * index;
        match runs.last_mut() {
            Some((start, bytes)) if *start + bytes.len() as u64 == offset => {
                bytes.extend(entry.to_be_bytes());
            }
            _ => runs.push((offset, entry.to_be_bytes().to_vec())),
        }
    }
    runs.into_iter()
        .map(|(offset, bytes)| (offset, vec![Buf::from(bytes)]))
        .collect()
}

#[cfg(test)]
mod tests;
