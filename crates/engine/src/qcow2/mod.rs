//! The qcow2 format: `docs/interop/qcow2.rst` of QEMU, versions 2 and 3.
//!
//! The path of a guest write, one call into one file each:
//!
//! 1. `image.rs` has validated it; here the latch is consulted, and the header made ready for
//!    writes
//! 2. `tables.rs`: the slices that it needs are loaded
//! 3. `map.rs`, 4. `plan.rs`: what is there, and what to do
//! 5. `inflight.rs`: leases; if one is taken, wait and look again
//! 6. `alloc.rs`: clusters are taken
//! 7. `cow.rs`: data moves, without the metadata lock
//! 8. `tables.rs`: the new mapping is published in memory
//! 9. `writeback.rs`: on flush, FUA, or when much is dirty, metadata becomes durable in order
//!
//! Steps 3 to 6 are one hold of the metadata lock (`admit.rs`), 8 is another. The guard of that
//! lock is not `Send` and the futures here are, so the compiler proves that it is never held across
//! I/O.

mod admit;
mod ahead;
mod alloc;
pub mod amend;
pub mod bitmap;
mod changed;
pub mod check;
pub mod compress;
mod compressed_read;
mod compressed_write;
mod copy_on_read;
pub(crate) mod count_growth;
mod cow;
pub mod create;
mod drain;
mod empty;
mod entries;
pub mod entry;
mod gather;
pub mod geometry;
mod growth;
pub mod header;
pub(crate) mod inflight;
pub mod inspect;
mod keys;
mod latch;
pub mod layout;
pub mod map;
mod open;
pub mod plan;
mod preallocate;
pub mod probe;
mod punch;
mod refcount;
pub mod repair;
mod resize;
mod room;
pub mod snapshot;
mod sound;
mod sparse;
mod tables;
mod turn;
mod vm_state;
mod writeback;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::OnceLock;

use cowslip_queue::IoVec;

use self::admit::{Batch, Origin};
use self::alloc::{FreeSet, Fresh, Protected};
use self::bitmap::Bitmaps;
use self::entry::{EntryError, EntryFormat, L2Entry};
use self::geometry::{Geometry, GuestCluster, GuestOffset, HostCluster, HostOffset};
use self::header::Header;
use self::inflight::{Epochs, Leases, Left, PendingClusters};
use self::latch::Latch;
use self::map::{Run, Source};
use self::plan::{Freed, Unref};
use self::punch::Punches;
use self::refcount::Refcounts;
use self::tables::{Prepared, Tables};
use crate::chain::Below;
use crate::durable::DurableWrites;
use crate::file::{AlignedFile, Durability, Event, Space};
use crate::image::{CacheStatistics, OnAllocated, WriteStatistics};
use crate::policy::{DiscardPolicy, WritePolicy, ZeroMethod};
use crate::sync::{Mutex, MutexGuard, Turn, Waiters, lock};
use crate::{Error, Result, Workers};

pub(crate) use self::compressed_read::Wanted;
pub(crate) use self::compressed_write::Packed;
pub use self::open::{Opening, open};

const EIO: i32 = 5;

/// Things of which a small request has one: its step, its lease, its slice. That one allocates
/// nothing.
type InlineVec<T> = smallvec::SmallVec<[T; 1]>;

/// A qcow2 image, open.
#[derive(Debug)]
pub struct Qcow2 {
    /// The image file: metadata, and guest data unless there is a data file.
    file: AlignedFile,
    /// The file that guest data is in.
    data: AlignedFile,
    /// The data file is a raw image of the disk, to be kept so.
    raw_data: bool,
    format: EntryFormat,
    compression: header::CompressionType,
    discard: DiscardPolicy,
    /// What discards leave of the clusters that they cover.
    unref: Unref,
    policy: growth::Policy,
    zero_method: ZeroMethod,
    write_policy: WritePolicy,
    writable: bool,
    /// The metadata lock: CPU work only.
    state: Mutex<State>,
    /// The turn to write metadata; with it goes the ownership of the counts.
    turn: Turn<Counts>,
    /// Held by whoever uses the area of the VM state, and by whoever changes the size of the disk.
    vm_state: Turn<()>,
    /// Whole clusters of a file that cannot grow.
    fixed_end: Option<u64>,
    /// The host file had much less than was allocated when that was first asked.
    sparse: OnceLock<bool>,
    durable_writes: DurableWrites,
    gathering: gather::Gathering,
    /// Who packs and unpacks compressed clusters.
    workers: Workers,
    /// Bytes of a bitmap's table that are read at a time.
    bitmap_piece_bytes: u64,
    /// For whoever watches.
    probe: probe::Probe,
}

/// What the holder of the write-back turn owns.
#[derive(Debug)]
pub struct Counts {
    refcounts: Refcounts,
    /// Clusters below this have been looked through for free ones.
    scanned: u64,
    /// Bytes by which this session has grown the file.
    grown_bytes: u64,
    /// Steps of growth are no longer: a longer one found no space.
    step_bytes_max: u64,
    /// The last growth stepped over counts beyond the end of the file, which takes long: a smaller
    /// one is not tried.
    stepped_over: bool,
    /// So many refcount blocks, from the first on, are known to exist.
    blocks_there: u64,
    /// Refcount blocks that this session has dropped, by index, whose space is within the file.
    dropped: BTreeSet<u64>,
    /// Space for metadata packed with compressed clusters: see `compressed_write.rs`.
    compressed_tail: Option<compressed_write::Tail>,
    /// The host file cannot allocate; extend it only.
    cannot_allocate: bool,
    /// Clusters whose space was allocated for tables in this session.
    tables_allocated: u64,
    /// Cycles so far that raised few counts.
    small_cycles: u32,
}

/// What the metadata lock guards.
#[derive(Debug)]
struct State {
    /// The header as on disk.
    header: Header,
    tables: Tables,
    leases: Leases,
    joint: PendingClusters,
    epochs: Epochs,
    free: FreeSet,
    /// Free clusters that have their space on the host, for new tables.
    table_space: FreeSet,
    fresh: Fresh,
    protected: Protected,
    /// L1 entries whose tables overlap other metadata or are beyond the end: never written through.
    bad_tables: BTreeSet<u64>,
    /// The first cluster beyond the end of the file that L1 refers to: the file does not grow
    /// there.
    table_beyond: Option<HostCluster>,
    /// Tables that are being copied because a snapshot shares them.
    copying: BTreeMap<u64, Waiters>,
    /// References added since the last cut.
    raised: BTreeMap<HostCluster, u64>,
    /// Free clusters whose count is 1 already, or will be with the next barrier.
    counted_ahead: BTreeSet<HostCluster>,
    /// References dropped since the last cut, with the epoch in which they were.
    quarantine: Vec<(Freed, u64)>,
    /// References whose clearing is durable, waiting for their epoch to leave.
    cleared: Vec<(Freed, u64)>,
    /// Subclusters whose space is wanted back.
    punches: Punches,
    /// Clusters of the file below which space is claimed: the file is that long.
    claimed: u64,
    /// Clusters of the file when it was opened: only what is above was grown by this session.
    claimed_at_open: u64,
    /// Cuts made so far; a flush needs one made after it arrived.
    cuts: u64,
    /// The last cut whose cycle ended well.
    durable_cut: u64,
    /// What admitted writes found.
    writes: WriteStatistics,
    /// Something was written since the last barrier that covers it.
    unflushed: bool,
    /// Changes of space of the image file that a barrier covers.
    settled_space_changes: u64,
    /// The header is fit for changes of the image (invariant D5).
    ready_for_changes: bool,
    /// It is, and bitmaps follow writes of the guest.
    ready_for_writes: bool,
    /// The persistent bitmaps, if the image may be written.
    bitmaps: Bitmaps,
    /// Why writes and flushes are refused (invariant D4).
    latch: Latch,
    /// Guest data is mapped to metadata: the image is to be marked corrupt.
    damaged: bool,
    /// No request may begin: somebody waits for all to end.
    draining: Option<Waiters>,
    /// No read may begin either.
    hold: Option<drain::Hold>,
    /// Free clusters below which the file is grown ahead of need.
    low_water: u64,
    /// Wakes `maintain`.
    maintenance: Waiters,
    closed: bool,
}

impl Qcow2 {
    /// Whether the active L1 table refers to no L2 table: all of the disk is unallocated.
    pub(crate) fn maps_nothing(&self) -> bool {
        self.lock().tables.l1().iter().all(|&entry| entry == 0)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn geometry(&self) -> &Geometry {
        &self.format.geometry
    }

    /// The file's name, for messages.
    pub fn name(&self) -> &str {
        self.file.name()
    }

    /// The image file.
    pub fn file(&self) -> &AlignedFile {
        &self.file
    }

    /// The file that guest data is in.
    pub fn data_file(&self) -> &AlignedFile {
        &self.data
    }

    /// Whether much of the allocated data is holes in the host file; asked once.
    pub async fn is_sparse(&self) -> Result<bool> {
        if let Some(&sparse) = self.sparse.get() {
            return Ok(sparse);
        }
        // Holes below a cipher are no zeroes.
        if self.data.is_encrypted() {
            return Ok(false);
        }
        let header = self.header();
        let sparse = sparse::is_sparse(&self.file, &header).await?;
        Ok(*self.sparse.get_or_init(|| sparse))
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.lock().header.size
    }

    /// A copy of the header.
    pub fn header(&self) -> Header {
        self.lock().header.clone()
    }

    /// The unit of allocation and zeroing.
    pub fn subcluster_bytes(&self) -> u64 {
        self.geometry().subcluster_bytes()
    }

    /// Bytes in a cluster.
    pub(crate) fn cluster_bytes(&self) -> u64 {
        self.geometry().cluster_bytes()
    }

    /// Bytes that the tables take in memory if nothing is let go.
    pub(crate) fn cache_bytes_wanted(&self) -> u64 {
        self.lock().tables.bytes_wanted(self.writable)
    }

    /// Sets what L2 slices may take from now on.
    pub(crate) fn set_cache_budget(&self, bytes: u64) {
        self.lock().tables.set_budget(bytes);
    }

    /// What the cache of L2 slices did so far, and what it holds.
    pub(crate) fn cache_statistics(&self) -> CacheStatistics {
        self.lock().tables.statistics()
    }

    /// What writes of guest data found so far.
    pub(crate) fn write_statistics(&self) -> WriteStatistics {
        self.lock().writes
    }

    fn corrupt_entry(&self, tables: &Tables, cluster: GuestCluster, error: EntryError) -> Error {
        let (structure, offset) = match tables.table(self.geometry().l1_index(cluster)) {
            Ok(_) => ("L2 entry", tables.entry_offset(cluster)),
            Err(_) => ("L1 entry", self.geometry().l1_index(cluster)),
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
    async fn load(&self, slice: u64) -> Result<SlicePin<'_>> {
        let cluster = GuestCluster(slice * self.geometry().slice_entries());
        loop {
            let mut visit = None;
            let prepared = {
                let mut state = self.lock();
                let held_back = state.slices_held_back();
                let prepared = match held_back {
                    Some(waiting) => Ok(Prepared::Wait(waiting)),
                    None => state.tables.prepare(slice),
                };
                if matches!(prepared, Ok(Prepared::Load(_))) {
                    // Entered with the place in hand: the table is not reused while it is read.
                    visit = Some(EpochGuard {
                        image: self,
                        epoch: state.epochs.enter(),
                    });
                }
                if matches!(prepared, Ok(Prepared::Ready)) {
                    state.tables.pin(slice);
                    return Ok(SlicePin {
                        image: self,
                        slice: Some(slice),
                    });
                }
                prepared.map_err(|error| self.corrupt_entry(&state.tables, cluster, error))?
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
                let entry = state.tables.entry(cluster);
                let entry =
                    entry.map_err(|error| self.corrupt_entry(&state.tables, cluster, error))?;
                let start = self.geometry().guest_offset(cluster).0;
                map::map_cluster(&self.format, &entry, start, part, &mut runs);
            }
            drop(state);
        }
        Ok(runs)
    }

    fn has_table(&self, state: &State, cluster: GuestCluster) -> Result<bool> {
        let table = state.tables.table(self.geometry().l1_index(cluster));
        let table = table.map_err(|error| self.corrupt_entry(&state.tables, cluster, error))?;
        Ok(table.is_some())
    }

    /// Enters an epoch for the time of a read.
    pub(crate) async fn enter(&self) -> EpochGuard<'_> {
        loop {
            let waiting = {
                let mut state = self.lock();
                match state.held_back() {
                    Some(waiting) => waiting,
                    None => {
                        return EpochGuard {
                            image: self,
                            epoch: state.epochs.enter(),
                        };
                    }
                }
            };
            waiting.await;
        }
    }

    /// Writes guest data; the numbered steps. Durable at the next flush, if the image is no
    /// write-through one.
    pub(crate) async fn write(
        &self,
        offset: u64,
        data: impl Into<IoVec>,
        below: &Below,
    ) -> Result<()> {
        let context = (below, Durability::Cached);
        self.write_notify(offset, data.into(), context, &|| ())
            .await
    }

    /// The same; tells when all of it is admitted.
    pub(crate) async fn write_notify(
        &self,
        offset: u64,
        data: IoVec,
        (below, durability): (&Below, Durability),
        admitted: &OnAllocated<'_>,
    ) -> Result<()> {
        let durability = self.effective(durability);
        let request = admit::Request::new(offset, data, Origin::Guest);
        let needs_cycle = self.perform(request, (below, durability), admitted).await?; // 1-8
        self.settle(durability, needs_cycle).await //          9
    }

    /// Steps 1 to 8 of a write that is durable at the next flush.
    async fn perform_cached(&self, request: admit::Request, below: &Below) -> Result<bool> {
        let context = (below, Durability::Cached);
        self.perform(request, context, &|| ()).await
    }

    /// Steps 1 to 8 of a write. Whether it takes a write-back cycle to make it durable.
    async fn perform(
        &self,
        mut request: admit::Request,
        (below, durability): (&Below, Durability),
        admitted: &OnAllocated<'_>,
    ) -> Result<bool> {
        let mut needs_cycle = false;
        while !request.is_done() {
            match request.origin() {
                Origin::Guest => self.ready_for_writes().await?, // 1
                Origin::Below => self.ready_for_changes().await?,
            }
            let batch = self.admit(&mut request, below, durability).await?; // 2-6
            if request.is_done() {
                admitted();
            }
            needs_cycle |= batch.needs_cycle();
            let durable = batch.durability == Durability::Durable;
            let under_way = durable.then(|| self.durable_writes.begin());
            let mut outcome = self.carry_out(&batch, below).await; // 7
            self.erase_failed(&batch, &outcome).await;
            self.publish(batch, &mut outcome); //       8
            if let Some(under_way) = under_way {
                under_way.end();
            }
            outcome.into_iter().collect::<Result<()>>()?;
            if durable {
                self.check_concurrent_flushes().await?;
            }
        }
        Ok(needs_cycle)
    }

    /// What a failed write has left in space that others fill too is erased before anybody hears of
    /// the failure: they may publish the subcluster, in which the guest goes on to see zeroes
    /// there. What the write would have changed in place stays between old and new, as always.
    async fn erase_failed(&self, batch: &Batch<'_>, outcome: &[Result<()>]) {
        for (step, outcome) in batch.steps.iter().zip(outcome) {
            let plan::Change::Fill(filled) = step.write.change else {
                continue;
            };
            if outcome.is_ok() {
                continue;
            }
            let attempted = self.attempted(&step.write);
            {
                let mut state = self.lock();
                // Whoever joins from now on makes its subclusters whole, and needs nothing erased.
                state.joint.mark_failed(step.cluster, attempted);
                if !state.joint.is_shared(step.cluster) {
                    continue;
                }
            }
            let guest = self.geometry().guest_offset(step.cluster).0;
            let file = self.data.for_guest(step.write.host.0, guest);
            for left in self.geometry().parts_in(&step.write.lease, filled) {
                let start = step.write.host.0 + left.start;
                let erased = file.zero(start, left.end - left.start, Space::Release);
                if erased.await.is_err() {
                    self.lock().joint.fail(step.cluster, attempted);
                }
            }
        }
    }

    /// Step 8: what was written becomes the mapping; what failed leaves it as it was.
    fn publish(&self, batch: Batch<'_>, outcome: &mut [Result<()>]) {
        let mut state = self.lock();
        let state = &mut *state;
        if batch.durability == Durability::Durable
            && let Some(error) = outcome.iter().find_map(|outcome| outcome.as_ref().err())
        {
            // It is a flush of the file, and one that failed: see `sync`.
            state.latch.set(error.duplicate());
        }
        for (step, outcome) in batch.steps.iter().zip(outcome) {
            let attempted = self.attempted(&step.write);
            let changes = step.write.change != plan::Change::None;
            if changes && outcome.is_ok() && state.joint.has_failed(step.cluster, attempted) {
                let neighbour = std::io::Error::from_raw_os_error(EIO);
                let text = format!("A write beside this one failed in '{}'", self.name());
                *outcome = Err(Error::io(text, neighbour));
                // What this write has left beside others stays there, so they fail in turn.
                state.joint.fail(step.cluster, attempted);
            }
            if changes && outcome.is_ok() {
                let before = state
                    .tables
                    .entry(step.cluster)
                    .expect("it was decoded at admission, and leased");
                let (entry, freed) = plan::publish(&self.format, &before, &step.write);
                let promise = step.write.promise;
                state.tables.set_entry(step.cluster, &entry, promise);
                state.joint.published(step.cluster);
                if let Some(freed) = freed {
                    self.give_up(state, freed);
                }
            }
            if changes {
                if outcome.is_err() {
                    state.joint.mark_failed(step.cluster, attempted);
                }
                self.leave_joint(state, step.cluster);
            }
        }
        batch.end(state);
        if state.tables.wants_writeback() {
            state.maintenance.wake();
        }
    }

    fn leave_joint(&self, state: &mut State, cluster: GuestCluster) {
        match state.joint.leave(cluster) {
            Left::Shared => {}
            Left::Published(space) if self.format.data_file => {
                debug_assert_eq!(space.fresh, 0, "nothing is fresh in a data file");
            }
            Left::Published(space) => {
                state
                    .fresh
                    .set(self.geometry().host_cluster(space.host), space.fresh);
            }
            Left::Forfeited(_) if self.format.data_file => {}
            Left::Forfeited(space) => {
                self.give_up(state, Freed::Cluster(space.host));
            }
        }
    }

    /// Space that no entry refers to any more goes to the quarantine.
    fn give_up(&self, state: &mut State, freed: Freed) {
        let epoch = state.epochs.current();
        match &freed {
            Freed::Subclusters(host, mask) => {
                let cluster = self.host_cluster(*host);
                state.punches.want(cluster, epoch, *mask);
            }
            Freed::Cluster(_) | Freed::Compressed(_) => {
                let all = self.geometry().all_subclusters();
                for cluster in self.clusters_of(&freed) {
                    state.punches.call_off(cluster, all);
                }
            }
        }
        state.quarantine.push((freed, epoch));
    }

    /// Whether the space of single subclusters is given back.
    fn punches_subclusters(&self) -> bool {
        let keeps = self.policy == growth::Policy::Contiguous && self.unref == Unref::Free;
        self.discard == DiscardPolicy::Unmap && !keeps && self.file.capabilities().punches_holes
    }

    /// Whether a discard leaves holes in subclusters that stay mapped.
    fn punches_in_place(&self) -> bool {
        let zeroes = self.data.capabilities().punches_holes;
        let larger = self.geometry().subcluster_bytes() > punch::HOST_BLOCK_BYTES;
        self.punches_subclusters() && zeroes && larger
    }

    /// Step 9 for a request that asks for nothing: the image's policy decides.
    async fn settle_by_policy(&self) -> Result<()> {
        self.settle(self.effective(Durability::Cached), true).await
    }

    /// Step 9 for a request: durable if it asked for it, and not too much dirty in any case.
    async fn settle(&self, durability: Durability, needs_cycle: bool) -> Result<()> {
        if durability == Durability::Durable && needs_cycle {
            return self.write_back().await;
        }
        Ok(())
    }

    fn effective(&self, durability: Durability) -> Durability {
        if self.write_policy == WritePolicy::Writethrough {
            Durability::Durable
        } else {
            durability
        }
    }

    /// Makes durable all that had completed.
    pub(crate) async fn flush(&self) -> Result<()> {
        if !self.writable {
            return Ok(());
        }
        self.write_back().await
    }

    /// Refuses what would touch metadata (invariant S3), and remembers that the image is damaged.
    fn protect(&self, state: &mut State, host: HostOffset) -> Result<()> {
        if self.format.data_file || !state.protected.contains(self.geometry().host_cluster(host)) {
            return Ok(());
        }
        let error = Error::Corrupt {
            file: self.name().to_string(),
            structure: "cluster",
            offset: host.0,
            detail: "guest data is mapped to a cluster that holds metadata".to_string(),
        };
        state.latch.set(error.duplicate());
        state.damaged = true;
        Err(error)
    }

    /// The outcome of a request that writes. If it met damage, the image is marked, so that nobody
    /// writes it before its repair.
    pub(crate) async fn mark_corrupt_on_error<T>(&self, outcome: Result<T>) -> Result<T> {
        if matches!(outcome, Err(Error::Corrupt { .. })) {
            self.mark_corrupt().await;
        }
        outcome
    }

    /// Refuses to change what is mapped to metadata or beyond the end of the file, be it in place
    /// or by giving the old space up (invariant S3): what is freed is counted down, punched and
    /// reused.
    fn refuse_misplaced(&self, state: &mut State, entry: &L2Entry) -> Result<()> {
        let freed = match entry {
            _ if self.format.data_file => return Ok(()),
            L2Entry::Standard(entry) => match entry.host {
                Some(host) => Freed::Cluster(host),
                None => return Ok(()),
            },
            L2Entry::Compressed(place) => Freed::Compressed(*place),
        };
        for cluster in self.clusters_of(&freed) {
            let host = self.geometry().host_offset(cluster);
            self.protect(state, host)?;
            if cluster.0 >= state.claimed {
                return Err(Error::Corrupt {
                    file: self.name().to_string(),
                    structure: "cluster",
                    offset: host.0,
                    detail: "guest data is mapped beyond the end of the file".to_string(),
                });
            }
        }
        Ok(())
    }

    /// The latch, for requests that write or flush.
    fn unlatched(&self, state: &State) -> Result<()> {
        if let Some(error) = state.latch.reason() {
            return Err(match error {
                Error::Corrupt { .. } => error.duplicate(),
                _ => Error::Latched(self.name().to_string()),
            });
        }
        Ok(())
    }

    fn host_cluster(&self, offset: HostOffset) -> HostCluster {
        self.geometry().host_cluster(offset)
    }
}

/// A slice that stays in memory while the pin lives.
struct SlicePin<'a> {
    image: &'a Qcow2,
    /// `None`: there is no table.
    slice: Option<u64>,
}

impl Drop for SlicePin<'_> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice {
            self.image.lock().tables.unpin(slice);
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
        self.image.lock().epochs.leave(self.epoch);
    }
}
