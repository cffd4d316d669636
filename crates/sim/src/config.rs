//! The configuration of a run, drawn from its seed.

use cowslip::image::{
    AllocPolicy, CopyOnRead, DetectZeroes, DiscardPolicy, WritePolicy, ZeroMethod,
};
use cowslip::luks::CipherMode;
use cowslip::qcow2::create::Preallocation;

use crate::disk::fault::Fault;
use crate::disk::{Allocates, Lie, Pace};
use crate::model::{Grain, Granules};
use crate::profile::Profile;

mod after_profile;
mod draw;

pub(crate) use draw::draw_faults;

/// The subject of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The simulator's own reference.
    Plain,
    /// The engine's raw format.
    Raw,
    /// qcow2.
    Qcow2,
}

/// The qcow2 features of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bits of the cluster size.
    pub cluster_bits: u32,
    /// Entries with subclusters.
    pub extended_l2: bool,
    /// Version 2 or 3.
    pub version: u32,
    /// Bits of a refcount.
    pub refcount_bits: u32,
    /// Counts may lag under the dirty bit.
    pub lazy_refcounts: bool,
}

/// An image below the top.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Below {
    /// Its layout; raw if none.
    pub layout: Option<Layout>,
    /// Bytes of its disk.
    pub size: u64,
}

/// Where guest data of the top image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// In the image.
    Inside,
    /// In a data file.
    External,
    /// In a data file that is also a raw image.
    ExternalRaw,
}

/// How the guest data of the top image is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// No encryption.
    None,
    /// QEMU's old encryption: the passphrase is the key.
    Aes,
    /// Encryption by the keys of a LUKS volume, in this mode.
    Luks(CipherMode),
}

/// Whether a file that is written can become longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// A regular file, which grows.
    Grows,
    /// A device of a fixed length: more than the run will need.
    Fixed,
    /// A device that may be too small.
    Scarce,
}

/// How a round ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The image is closed in order.
    Close,
    /// The process dies after this many issues and completions.
    Kill(u64),
    /// The power fails after this many.
    Crash(u64),
}

/// One session with the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// Requests at most.
    pub requests: u64,
    /// Requests in flight at most.
    pub depth: usize,
    /// How it ends.
    pub ending: Ending,
    /// The moment of the ending counts issues and completions of flushes only, and the end comes
    /// this number of events of any operation later.
    pub barrier: Option<u64>,
    /// Failures of the disk while requests are served.
    pub faults: Vec<Fault>,
    /// Number of issues and completions from the first failure to the failure of the power, or the
    /// death of the process, if neither has come before.
    pub after_fault: Option<u64>,
    /// Tasks wait long for their turn, so that several answers of the disk await them.
    pub slow_tasks: bool,
    /// `maintain` runs beside the requests.
    pub maintained: bool,
    /// Weights of: read, write, zeroes, discard, flush, compressed write.
    pub weights: [u64; 6],
    /// The disk changes its size.
    pub resizes: bool,
    /// Percent of requests that take, apply or delete a snapshot.
    pub snapshots_percent: u64,
    /// Percent of requests that go to the VM state.
    pub vm_state_percent: u64,
    /// Percent of requests that do something with persistent bitmaps.
    pub bitmaps_percent: u64,
    /// Percent of requests that allocate space in advance.
    pub allocates_percent: u64,
    /// Percent of requests that compact the file.
    pub compacts_percent: u64,
    /// Each compaction is to be cut short by the end of the session; the number, which the seed
    /// decides, selects where, and its options.
    pub cut_short: Option<u64>,
    /// Percent of writes that are durable.
    pub fua_percent: u64,
    /// Percent of requests that go to a hot spot.
    pub hot_percent: u64,
    /// Percent of requests that cover whole clusters.
    pub whole_percent: u64,
    /// Number of successive requests among which most writes go to one cluster. 0 for no such rule.
    pub companions: u64,
    /// Clusters that a request for whole ones covers at most; 0 for a few.
    pub span_clusters: u64,
    /// The request of this number makes the disk as large as it is to be.
    pub grows_at: Option<u64>,
    /// The request of this number makes it smaller.
    pub shrinks_at: Option<u64>,
    /// Bytes that the other requests are limited to; all of the disk if 0.
    pub narrow_bytes: u64,
    /// Number of requests to one narrow place before the next ones go elsewhere.
    pub narrow_requests: u64,
    /// Percent of them that are whole subclusters.
    pub narrow_whole_percent: u64,
    /// Metadata cache in bytes.
    pub cache_bytes: u64,
    /// Effect of a discard.
    pub discard: DiscardPolicy,
    /// Discarded clusters keep their space.
    pub discard_no_unref: bool,
    /// Treatment of writes of zeroes.
    pub detect_zeroes: DetectZeroes,
    /// How new space comes to read as zeroes.
    pub zero_method: ZeroMethod,
    /// How space is allocated.
    pub alloc_policy: AllocPolicy,
    /// When writes are durable.
    pub write_policy: WritePolicy,
    /// Policy of copies that reads make of the layers below.
    pub copy_on_read: CopyOnRead,
    /// Writes store whole clusters, compressed.
    pub compress: bool,
    /// Bytes of a bitmap's table that are read at a time; 0 for as many as usual.
    pub bitmap_piece_bytes: u64,
}

/// A part of runs that can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Processes that die while the system lives on.
    Kills,
    /// Failing operations.
    Faults,
    /// Compressed writes.
    Compressed,
    /// Discards.
    Discards,
    /// `maintain` beside the requests.
    Maintenance,
    /// Files that ask for aligned requests.
    Alignment,
    /// The judgement of raw data files.
    RawData,
    /// Small caches.
    SmallCaches,
    /// Changes of the disk's size.
    Resizes,
    /// Crashes and faults in recoveries from crashes.
    Recoveries,
    /// Images that another program has left dirty.
    Dirty,
    /// Images whose refcount table is about to move.
    Crammed,
    /// Disks that are made smaller than they will be.
    Growth,
    /// Snapshots that are taken, applied and deleted.
    Snapshots,
    /// The VM state behind the disk.
    VmState,
    /// Persistent bitmaps.
    Bitmaps,
    /// Space that requests allocate in advance.
    Allocations,
    /// Compactions of the file.
    Compactions,
    /// Copies that reads make.
    CopyOnRead,
    /// Encrypted images.
    Encryption,
    /// Files that can neither grow nor be cut.
    Devices,
    /// Looks at what a power failure would leave.
    Looks,
}

impl Part {
    /// All parts, by the names that commands use.
    pub const NAMES: [(&'static str, Part); 22] = [
        ("kills", Part::Kills),
        ("faults", Part::Faults),
        ("compressed", Part::Compressed),
        ("discards", Part::Discards),
        ("maintenance", Part::Maintenance),
        ("alignment", Part::Alignment),
        ("raw-data", Part::RawData),
        ("small-caches", Part::SmallCaches),
        ("resizes", Part::Resizes),
        ("recoveries", Part::Recoveries),
        ("dirty", Part::Dirty),
        ("crammed", Part::Crammed),
        ("growth", Part::Growth),
        ("snapshots", Part::Snapshots),
        ("vm-state", Part::VmState),
        ("bitmaps", Part::Bitmaps),
        ("allocations", Part::Allocations),
        ("compactions", Part::Compactions),
        ("copy-on-read", Part::CopyOnRead),
        ("encryption", Part::Encryption),
        ("devices", Part::Devices),
        ("looks", Part::Looks),
    ];
}

/// Changes of the image before the run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// The allocation policy that is stored in the image.
    pub stored_policy: AllocPolicy,
    /// Much of the disk is written.
    pub filled: bool,
    /// Snapshots of what is written.
    pub snapshots: u32,
    /// Autoclear bits that nobody knows are set.
    pub autoclear: bool,
}

/// Configuration of a run.
#[derive(Clone, Debug)]
pub struct Config {
    /// The subject of the run.
    pub kind: Kind,
    /// The conditions that it is made to meet.
    pub profile: Profile,
    /// Changes of the image before the run.
    pub prepared: Prepared,
    /// The top image's layout.
    pub layout: Layout,
    /// Bytes of its disk, at most.
    pub size: u64,
    /// Bytes of its disk when it is made.
    pub created_bytes: u64,
    /// Clusters that the image can take before its refcount table must move, if they are few.
    pub crammed: Option<u64>,
    /// Where its data is.
    pub data: Data,
    /// How that is encrypted.
    pub encryption: Encryption,
    /// Whether the image is in a file or on a device, and an external data file that is not raw
    /// too.
    pub room: Room,
    /// Space that is allocated when the image is made.
    pub preallocation: Preallocation,
    /// The chain below it, from the bottom.
    pub below: Vec<Below>,
    /// The granules.
    pub grain: Grain,
    /// The parts of the disk that are used.
    pub windows: Vec<Granules>,
    /// The parts of the VM state that are used.
    pub vm_state: Vec<Granules>,
    /// The alignment that files ask for.
    pub alignment_bytes: u32,
    /// Whether files zero ranges with one call.
    pub zeroes_fast: bool,
    /// Whether discards leave zeroes.
    pub punches_holes: bool,
    /// Whether files allocate.
    pub allocates: Allocates,
    /// How the disk delays operations.
    pub pace: Pace,
    /// How the disk lies.
    pub lie: Lie,
    /// Looks at the files that a power failure would leave, now and then.
    pub looks: bool,
    /// The sessions.
    pub rounds: Vec<Round>,
}

/// Limit of the space that is allocated in advance, since it is written, at least in part.
pub(crate) const PREALLOCATED_BYTES_MAX: u64 = 64 << 20;

impl Layout {
    /// Bytes of a cluster.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the disk that one L2 table maps.
    pub(crate) fn table_coverage_bytes(&self) -> u64 {
        let entry_bytes = if self.extended_l2 { 16 } else { 8 };
        self.cluster_bytes() / entry_bytes * self.cluster_bytes()
    }

    /// Bytes of the disk that one slice of the cache maps.
    pub(crate) fn slice_coverage_bytes(&self) -> u64 {
        let entry_bytes = if self.extended_l2 { 16 } else { 8 };
        self.cluster_bytes().min(4096) / entry_bytes * self.cluster_bytes()
    }
}

impl Config {
    /// Whether what a resize adds is zeroed by writing it.
    fn resizes_write_zeroes(&self) -> bool {
        let by_writes = self.data == Data::ExternalRaw && !self.zeroes_fast;
        by_writes || (self.layout.version == 2 && !self.below.is_empty())
    }

    /// Bytes of the disk that an L1 entry maps.
    pub fn table_bytes(&self) -> u64 {
        let entry_bytes = if self.layout.extended_l2 { 16 } else { 8 };
        self.layout.cluster_bytes() * (self.layout.cluster_bytes() / entry_bytes)
    }

    /// Leaves a part out.
    pub fn leave_out(&mut self, part: Part) {
        for round in &mut self.rounds {
            match part {
                Part::Kills => {
                    if let Ending::Kill(moment) = round.ending {
                        round.ending = Ending::Crash(moment);
                    }
                }
                Part::Faults => round.faults.clear(),
                Part::Compressed => {
                    round.weights[5] = 0;
                    round.compress = false;
                }
                Part::Discards => round.weights[3] = 0,
                Part::Maintenance => round.maintained = false,
                Part::SmallCaches => round.cache_bytes = 0,
                Part::Resizes => {
                    round.resizes = false;
                    round.grows_at = None;
                }
                Part::Growth => round.grows_at = None,
                Part::Snapshots => round.snapshots_percent = 0,
                Part::VmState => round.vm_state_percent = 0,
                Part::Bitmaps => round.bitmaps_percent = 0,
                Part::Allocations => round.allocates_percent = 0,
                Part::Compactions => {
                    round.compacts_percent = 0;
                    round.cut_short = None;
                }
                Part::CopyOnRead => round.copy_on_read = CopyOnRead::Off,
                Part::Alignment
                | Part::RawData
                | Part::Recoveries
                | Part::Encryption
                | Part::Devices
                | Part::Looks
                | Part::Dirty
                | Part::Crammed => {}
            }
        }
        match part {
            Part::Alignment => self.alignment_bytes = 1,
            Part::RawData if self.data == Data::ExternalRaw => self.data = Data::External,
            Part::Crammed => self.crammed = None,
            Part::Encryption => self.encryption = Encryption::None,
            Part::Devices => self.room = Room::Grows,
            Part::Looks => self.looks = false,
            Part::Growth | Part::Resizes => self.created_bytes = self.size,
            _ => {}
        }
    }

    /// A text for traces.
    pub fn describe(&self) -> String {
        let layout = &self.layout;
        let mut text = format!(
            "{:?} {:?} {:?} size {:#x} cluster {} extended {} version {} refcount bits {} lazy {} data {:?} encryption {:?} room {:?} preallocation {:?}\n\
             VM state {:?} grain {:?} alignment {} zeroes_fast {} punches_holes {} allocates {:?} pace {:?}",
            self.kind,
            self.profile,
            self.prepared,
            self.size,
            layout.cluster_bytes(),
            layout.extended_l2,
            layout.version,
            layout.refcount_bits,
            layout.lazy_refcounts,
            self.data,
            self.encryption,
            self.room,
            self.preallocation,
            self.vm_state,
            self.grain,
            self.alignment_bytes,
            self.zeroes_fast,
            self.punches_holes,
            self.allocates,
            self.pace,
        );
        for below in &self.below {
            text.push_str(&format!("\nbelow: {below:?}"));
        }
        for round in &self.rounds {
            text.push_str(&format!("\nround: {round:?}"));
        }
        text
    }
}
