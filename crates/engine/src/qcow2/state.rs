//! The state of an open image. Types alone: the methods are in the files of their subjects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use super::entry::EntryFormat;
use super::geometry::{Geometry, HostCluster, HostOffset};
use super::header::{CompressionType, Header};
use super::plan::{Freed, Unref};
use crate::Workers;
use crate::durable::DurableWrites;
use crate::file::AlignedFile;
use crate::policy::{DiscardPolicy, WritePolicy, ZeroMethod};
use crate::qcow2::commit::probe::Probe;
use crate::qcow2::control::bitmap::Bitmaps;
use crate::qcow2::health::hold::Hold;
use crate::qcow2::health::latch::Latch;
use crate::qcow2::mapping::inflight::{Epochs, Leases, PendingClusters};
use crate::qcow2::mapping::tables::Tables;
use crate::qcow2::path::compressed_tail::Tail;
use crate::qcow2::path::gather::Gathering;
use crate::qcow2::space::alloc::{FreeSet, Fresh, Protected};
use crate::qcow2::space::growth;
use crate::qcow2::space::punches::Punches;
use crate::qcow2::space::refcount::Refcounts;
use crate::statistics::WriteStatistics;
use crate::sync::{Mutex, MutexGuard, Turn, Waiters, lock};

/// Things of which a small request has one: its step, its lease, its slice. That one allocates
/// nothing.
pub(super) type InlineVec<T> = smallvec::SmallVec<[T; 1]>;

/// A qcow2 image, open.
#[derive(Debug)]
pub struct Qcow2 {
    /// The image file: metadata, and guest data unless there is a data file.
    pub(super) file: AlignedFile,
    /// The file that guest data is in.
    pub(super) data: AlignedFile,
    /// The data file is a raw image of the disk, to be kept so.
    pub(super) raw_data: bool,
    pub(super) format: EntryFormat,
    pub(super) compression: CompressionType,
    pub(super) discard: DiscardPolicy,
    /// Whether discards free the clusters that they cover.
    pub(super) unref: Unref,
    pub(super) policy: growth::Policy,
    pub(super) zero_method: ZeroMethod,
    pub(super) write_policy: WritePolicy,
    pub(super) writable: bool,
    /// The metadata lock: CPU work only.
    pub(super) state: Mutex<State>,
    /// The turn to write metadata; with it goes the ownership of the counts.
    pub(super) turn: Turn<Counts>,
    /// Held by operations that use the area of the VM state, or change the size of the disk.
    pub(super) vm_state: Turn<()>,
    /// Whole clusters of a file that cannot grow.
    pub(super) fixed_end: Option<u64>,
    /// The host file had much less than was allocated when that was first asked.
    pub(super) sparse: OnceLock<bool>,
    pub(super) durable_writes: DurableWrites,
    pub(super) gathering: Gathering,
    /// Threads that compress and decompress clusters.
    pub(super) workers: Workers,
    /// Bytes of a bitmap's table that are read at a time.
    pub(super) bitmap_piece_bytes: u64,
    /// For observers.
    pub(super) probe: Probe,
}

/// The state that the holder of the write-back turn owns.
#[derive(Debug)]
pub struct Counts {
    pub(super) refcounts: Refcounts,
    /// Clusters below this have been looked through for free ones.
    pub(super) scanned: u64,
    /// Bytes by which this session has grown the file.
    pub(super) grown_bytes: u64,
    /// Steps of growth are no longer: a longer one found no space.
    pub(super) step_bytes_max: u64,
    /// The last growth stepped over counts beyond the end of the file, which takes long: a smaller
    /// one is not tried.
    pub(super) stepped_over: bool,
    /// Number of refcount blocks, from the first on, that are known to exist.
    pub(super) blocks_there: u64,
    /// Refcount blocks that this session has dropped, by index, whose space is within the file.
    pub(super) dropped: BTreeSet<u64>,
    /// Space for metadata packed with compressed clusters: see `compressed_write.rs`.
    pub(super) compressed_tail: Option<Tail>,
    /// The host file cannot allocate; extend it only.
    pub(super) cannot_allocate: bool,
    /// Clusters whose space was allocated for tables in this session.
    pub(super) tables_allocated: u64,
    /// Cycles so far that raised few counts.
    pub(super) small_cycles: u32,
}

/// The state under the metadata lock.
#[derive(Debug)]
pub struct State {
    /// The header as on disk.
    pub(super) header: Header,
    pub(super) tables: Tables,
    pub(super) leases: Leases,
    pub(super) joint: PendingClusters,
    pub(super) epochs: Epochs,
    pub(super) free: FreeSet,
    /// Free clusters that have their space on the host, for new tables.
    pub(super) table_space: FreeSet,
    pub(super) fresh: Fresh,
    pub(super) protected: Protected,
    /// L1 entries whose tables overlap other metadata or are beyond the end: never written through.
    pub(super) bad_tables: BTreeSet<u64>,
    /// The first cluster beyond the end of the file that L1 refers to: the file does not grow
    /// there.
    pub(super) table_beyond: Option<HostCluster>,
    /// Tables that are being copied because a snapshot shares them.
    pub(super) copying: BTreeMap<u64, Waiters>,
    /// References added since the last cut.
    pub(super) raised: BTreeMap<HostCluster, u64>,
    /// Free clusters whose count is 1 already, or will be with the next barrier.
    pub(super) counted_ahead: BTreeSet<HostCluster>,
    /// References dropped since the last cut, with the epoch in which they were.
    pub(super) quarantine: Vec<(Freed, u64)>,
    /// References whose clearing is durable, waiting for their epoch to leave.
    pub(super) cleared: Vec<(Freed, u64)>,
    /// Subclusters whose space is wanted back.
    pub(super) punches: Punches,
    /// Clusters of the file below which space is claimed: the file is that long.
    pub(super) claimed: u64,
    /// Clusters of the file when it was opened: only what is above was grown by this session.
    pub(super) claimed_at_open: u64,
    /// Cuts made so far; a flush needs one made after it arrived.
    pub(super) cuts: u64,
    /// The last cut whose cycle ended well.
    pub(super) durable_cut: u64,
    /// Statistics of admitted writes.
    pub(super) writes: WriteStatistics,
    /// Something was written since the last barrier that covers it.
    pub(super) unflushed: bool,
    /// Changes of space of the image file that a barrier covers.
    pub(super) settled_space_changes: u64,
    /// The header is fit for changes of the image (invariant D5).
    pub(super) ready_for_changes: bool,
    /// It is, and bitmaps follow writes of the guest.
    pub(super) ready_for_writes: bool,
    /// The persistent bitmaps, if the image may be written.
    pub(super) bitmaps: Bitmaps,
    /// Why writes and flushes are refused (invariant D4).
    pub(super) latch: Latch,
    /// Guest data is mapped to metadata: the image is to be marked corrupt.
    pub(super) damaged: bool,
    /// No request may begin: somebody waits for all to end.
    pub(super) draining: Option<Waiters>,
    /// No read may begin either.
    pub(super) hold: Option<Hold>,
    /// Free clusters below which the file is grown ahead of need.
    pub(super) low_water: u64,
    /// Wakes `maintain`.
    pub(super) maintenance: Waiters,
    pub(super) closed: bool,
}

impl Qcow2 {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.format.geometry
    }

    pub(super) fn host_cluster(&self, offset: HostOffset) -> HostCluster {
        self.geometry().host_cluster(offset)
    }
}
