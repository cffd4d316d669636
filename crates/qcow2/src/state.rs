//! The state of an open image: what does not change, the turn's, and what the metadata lock guards.
//! That belongs to an owner for each subject; here is what two owners do together.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use super::entry::EntryFormat;
use super::geometry::{Geometry, GuestCluster, HostCluster, HostOffset};
use super::header::CompressionType;
use super::plan::{Freed, Unref};
use crate::Workers;
use crate::commit::probe::Probe;
use crate::commit::state::{Committed, Ready};
use crate::control::bitmap::Bitmaps;
use crate::durable::DurableWrites;
use crate::file::AlignedFile;
use crate::health::state::Health;
use crate::mapping::direct::DirectMap;
use crate::mapping::inflight::Left;
use crate::mapping::state::Mapping;
use crate::mapping::visits::{Closed, Visits};
use crate::path::compressed_tail::Tail;
use crate::path::gather::Gathering;
use crate::policy::{DiscardPolicy, WritePolicy, ZeroMethod};
use crate::space::growth;
use crate::space::refcount::Refcounts;
use crate::space::state::HostSpace;
use crate::statistics::WriteStatistics;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Turn, Waiters, lock};

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
    /// Requests that take no lock, and what they find.
    pub(super) visits: Arc<Visits>,
    pub(super) direct: Arc<DirectMap>,
    /// The size of the disk in bytes.
    pub(super) size: Arc<AtomicU64>,
    /// The metadata lock: CPU work only.
    pub(super) state: Mutex<State>,
    /// The turn to write metadata; with it goes the ownership of the counts.
    pub(super) turn: Turn<Counts>,
    /// Held by operations that use the area of the VM state, or change the size of the disk.
    pub(super) vm_state: Turn<()>,
    /// Held by a compaction: there is one at a time.
    pub(super) compaction: Turn<()>,
    /// Held by operations that keep free clusters for themselves, without a count or a reference,
    /// and by those that give up what has none.
    pub(super) kept_space: Turn<()>,
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
    /// Stage and position, for the simulator's observers.
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

/// The state under the metadata lock, by its owners.
#[derive(Debug)]
pub struct State {
    pub(super) mapping: Mapping,
    pub(super) space: HostSpace,
    pub(super) committed: Committed,
    pub(super) health: Health,
    /// The persistent bitmaps, if the image may be written.
    pub(super) bitmaps: Bitmaps,
    /// The requests that take no lock.
    pub(super) visits: Arc<Visits>,
    /// Statistics of admitted writes, but for those.
    pub(super) writes: WriteStatistics,
    /// Tasks in `maintain` that wait for work.
    pub(super) maintenance: Waiters,
}

impl State {
    /// Space that no entry refers to any more goes to the quarantine.
    pub(super) fn give_up(&mut self, geometry: &Geometry, freed: Freed) {
        let epoch = self.mapping.epochs.current();
        self.space.give_up(geometry, freed, epoch);
    }

    /// A write no longer fills its part of a new cluster. The last one to leave makes known what of
    /// the cluster is still fresh, or gives it up if none was published.
    pub(super) fn leave_joint(&mut self, format: &EntryFormat, cluster: GuestCluster) {
        match self.mapping.joint.leave(cluster) {
            Left::Shared => {}
            Left::Published(space) if format.data_file => {
                debug_assert_eq!(space.fresh, 0, "nothing is fresh in a data file");
            }
            Left::Published(space) => {
                let host = format.geometry.host_cluster(space.host);
                self.space.fresh.set(host, space.fresh);
            }
            Left::Forfeited(_) if format.data_file => {}
            Left::Forfeited(space) => {
                self.give_up(&format.geometry, Freed::Cluster(space.host));
            }
        }
    }

    /// A cluster holds metadata from now on. Returns whether it did not before.
    pub(super) fn protect_cluster(&mut self, cluster: HostCluster) -> bool {
        self.mapping.tables.forget_host(cluster);
        self.space.protected.insert(cluster)
    }

    /// Requests write in place without the lock if the header is fit for it, and no bitmap follows.
    pub(super) fn set_gate(&self) {
        match self.committed.is_ready_for(Ready::Writes) && !self.bitmaps.follow_writes() {
            true => self.visits.open(Closed::Unready),
            false => self.visits.close(Closed::Unready),
        }
    }

    /// All that is known of tables and clusters was known of the old state; `l1` is the new one.
    pub(super) fn forget_tables(&mut self, l1: Vec<u64>) {
        self.mapping.tables.replace(l1);
        self.space.fresh.forget();
    }

    /// Has changes of tables written back in the background, if there are many.
    pub(super) fn wake_maintenance_if_dirty(&mut self) {
        if self.mapping.tables.wants_writeback() {
            self.maintenance.wake();
        }
    }

    /// Returns whether the session has changed nothing, and kept no space ahead.
    pub(super) fn is_as_opened(&self) -> bool {
        let is_unready = !self.committed.is_ready_for(Ready::Changes);
        self.space.is_as_opened() && is_unready && !self.health.is_latched()
    }
}

impl Qcow2 {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    #[inline]
    pub(super) fn geometry(&self) -> &Geometry {
        &self.format.geometry
    }

    pub(super) fn host_cluster(&self, offset: HostOffset) -> HostCluster {
        self.geometry().host_cluster(offset)
    }
}
