//! The configuration of a run, drawn from its seed.

use cowslip::image::{
    AllocPolicy, CopyOnRead, DetectZeroes, DiscardPolicy, WritePolicy, ZeroMethod,
};
use cowslip::luks::CipherMode;
use cowslip::qcow2::create::Preallocation;

use crate::disk::fault::{Duration, EIO, ENOSPC, Fault, Verb};
use crate::disk::{Allocates, Lie, Pace};
use crate::model::{Grain, Granules, SECTOR_BYTES};
use crate::names::{BOTTOM, DATA, TOP};
use crate::profile::{self, Profile};
use crate::raw;
use crate::rng::Rng;
use crate::seeds;

mod draws;

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

/// Bytes that the windows of a usual run have together, at most.
const WINDOWS_BYTES: u64 = 512 << 10;
/// Bytes that they have where the file is to grow by more than a session grows without allocating.
const WIDE_WINDOWS_BYTES: u64 = 4 << 20;
/// The largest disk.
const DISK_BYTES_MAX: u64 = 8 << 30;
/// Limit of the space that is allocated in advance, since it is written, at least in part.
pub(crate) const PREALLOCATED_BYTES_MAX: u64 = 64 << 20;

impl Layout {
    fn draw(rng: &mut Rng) -> Layout {
        let extended_l2 = rng.chance(35);
        // Large clusters are slow to copy, and seldom do what small ones do not.
        let large = rng.chance(8);
        let cluster_bits = match (extended_l2, large) {
            (true, false) => rng.pick(&[14, 14, 15, 16]),
            (false, false) => rng.pick(&[9, 9, 9, 10, 11, 12, 12, 13, 14, 15, 16, 16]),
            (_, true) => rng.pick(&[17, 18, 19, 20, 21]),
        };
        let version = if extended_l2 || rng.chance(85) { 3 } else { 2 };
        let refcount_bits = if version == 2 {
            16
        } else {
            rng.pick(&[1, 2, 4, 8, 16, 16, 16, 16, 32, 64])
        };
        Layout {
            cluster_bits,
            extended_l2,
            version,
            refcount_bits,
            lazy_refcounts: version == 3 && rng.chance(20),
        }
    }

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

    /// Draws a size near which a disk's size lies: mostly a few clusters, sometimes many tables.
    fn draw_about(&self, rng: &mut Rng, resizes: bool) -> u64 {
        let cluster = self.cluster_bytes();
        let about = match rng.below(16) {
            0 | 1 => rng.between(4, 64) << 20,
            2 | 3 => 4096,
            4 | 5 => self.slice_coverage_bytes() * rng.between(5, 16),
            _ => rng.between(16 << 10, WINDOWS_BYTES),
        };
        let about = match self.cluster_bits {
            17.. => about.max(cluster * rng.between(2, 12)),
            _ => about,
        };
        if resizes && rng.chance(60) {
            return about
                .max(self.table_coverage_bytes() * rng.between(1, 4))
                .min(DISK_BYTES_MAX);
        }
        about.min(DISK_BYTES_MAX)
    }
}

fn draw_grain(rng: &mut Rng) -> Grain {
    match rng.below(10) {
        0 => Grain::new(vec![0, 12, 100, 300, 500]),
        1 => Grain::new(vec![0, 64, 128, 256]),
        2 => Grain::new(vec![0, 255]),
        3 => Grain::new(vec![0, 13]),
        _ => Grain::new(vec![0]),
    }
}

/// A size near `about`, in sectors, often not a whole number of clusters.
fn draw_size(rng: &mut Rng, about: u64, cluster_bytes: u64) -> u64 {
    let whole = about.next_multiple_of(cluster_bytes);
    match rng.below(3) {
        0 => whole,
        1 => whole - cluster_bytes + rng.between(1, cluster_bytes / 512) * 512,
        _ => rng.between(about / 1024 + 1, about / 512) * 512,
    }
}

/// A few ranges of the disk that together are small, the last bytes of the disk among them.
fn draw_windows(rng: &mut Rng, size: u64, together: u64, grain: &Grain) -> Vec<Granules> {
    let granules = |start: u64, end: u64| {
        let per_sector = grain.per_sector();
        start / SECTOR_BYTES * per_sector..end / SECTOR_BYTES * per_sector
    };
    if size <= together {
        return vec![granules(0, size)];
    }
    if size >= 8 << 20 && rng.chance(50) {
        // Many small ones, so that many tables are in use.
        let (step, part) = (size / 8 / SECTOR_BYTES * SECTOR_BYTES, together / 8);
        let windows = (0..8).map(|index| {
            let start = index * step + rng.below((step - part) / SECTOR_BYTES) * SECTOR_BYTES;
            match index {
                7 => granules(size - part, size),
                _ => granules(start, start + part),
            }
        });
        return windows.collect();
    }
    let part = together / 4;
    let middle = rng.between(part * 2, size - part * 2) / SECTOR_BYTES * SECTOR_BYTES;
    let end = size - part;
    let mut windows = vec![granules(0, part)];
    if middle + part < end {
        windows.push(granules(middle, middle + part));
    }
    windows.push(granules(end, size));
    windows
}

/// The chain below a disk of this size.
fn draw_below(rng: &mut Rng, size: u64, data: Data) -> Vec<Below> {
    let mut below = Vec::new();
    // A raw data file cannot have a backing file.
    if data != Data::ExternalRaw && rng.chance(40) {
        for _ in 0..rng.between(1, 2) {
            let layout = Layout::draw(rng);
            let about = rng.pick(&[size / 2 + 512, size, size + 65536]);
            let about = draw_size(rng, about.max(1024), layout.cluster_bytes());
            below.push(Below {
                layout: (!below.is_empty() || rng.chance(50)).then_some(layout),
                size: about,
            });
        }
    }
    below
}

/// The file that a failure strikes.
fn draw_file(rng: &mut Rng, data: Data, below: &[Below]) -> Option<&'static str> {
    match rng.below(4) {
        0 => Some(TOP),
        1 if data != Data::Inside => Some(DATA),
        2 if !below.is_empty() => Some(BOTTOM),
        _ => None,
    }
}

/// A failure of the disk.
pub(crate) fn draw_faults(rng: &mut Rng) -> Vec<Fault> {
    let verb = rng.pick(&[
        Verb::Write,
        Verb::Write,
        Verb::Flush,
        Verb::Flush,
        Verb::Read,
        Verb::Allocate,
        Verb::Zero,
        Verb::Discard,
        Verb::SetLen,
    ]);
    let errno = match verb {
        Verb::Write | Verb::Allocate | Verb::Zero | Verb::SetLen | Verb::Flush
            if rng.chance(50) =>
        {
            ENOSPC
        }
        _ => EIO,
    };
    let scale = match verb {
        Verb::Zero => 3,
        Verb::Flush | Verb::Allocate | Verb::SetLen | Verb::Discard => 8,
        _ => 60,
    };
    vec![Fault {
        verb,
        after: rng.below(scale),
        errno,
        duration: rng.pick(&[Duration::Once, Duration::Once, Duration::Forever]),
        file: None,
    }]
}

impl Round {
    /// Many requests at a few places, space that is freed and taken again and again, and frequent
    /// flushes: where reuse that comes too early is seen.
    fn crowd(&mut self) {
        self.requests = 300;
        self.depth = self.depth.max(16);
        self.hot_percent = 90;
        self.discard = DiscardPolicy::Unmap;
        self.weights[..5].copy_from_slice(&[25, 40, 10, 15, 10]);
    }

    /// Many large writes all over, so that the file grows and allocates ahead of need.
    fn fill(&mut self, rng: &mut Rng) {
        if rng.chance(40) {
            self.faults = vec![Fault {
                verb: Verb::Allocate,
                after: 0,
                errno: rng.pick(&[EIO, ENOSPC]),
                duration: rng.pick(&[Duration::Once, Duration::Forever]),
                file: None,
            }];
        }
        self.requests = 300;
        self.depth = self.depth.max(8);
        self.hot_percent = 0;
        self.weights = [5, 60, 2, 2, 4, 0];
    }

    /// Removes options that a kind of disk does not have.
    fn restrict(&mut self, kind: Kind, data: Data) {
        if kind != Kind::Qcow2 || data != Data::Inside {
            self.weights[5] = 0;
        }
        if kind == Kind::Plain {
            self.discard = DiscardPolicy::Unmap;
            self.write_policy = WritePolicy::Writeback;
            // The reference does not serialise flushes, and of two in flight one may report nothing
            // of the other's failure.
            let flushes = |fault: &Fault| matches!(fault.verb, Verb::Flush | Verb::Write);
            if self.faults.iter().any(flushes) {
                self.depth = 1;
            }
        }
    }

    fn draw(rng: &mut Rng, layout: &Layout, last: bool) -> Round {
        let scale = rng.pick(&[30, 200, 1000, 3000]);
        let moment = rng.between(1, scale);
        let ending = match rng.below(10) {
            0..=6 => Ending::Crash(moment),
            7 => Ending::Kill(moment),
            _ => Ending::Close,
        };
        let swarm = |rng: &mut Rng, usual: u64| if rng.chance(25) { 0 } else { usual };
        let weights = [
            swarm(rng, 20),
            40,
            swarm(rng, 12),
            swarm(rng, 10),
            swarm(rng, 8),
            if rng.chance(20) { 10 } else { 0 },
        ];
        Round {
            requests: rng.pick(&[10, 40, 120, 300]),
            depth: rng.pick(&[1, 2, 8, 8, 16, 32]),
            ending: if last && rng.chance(50) {
                Ending::Close
            } else {
                ending
            },
            faults: if rng.chance(15) {
                draw_faults(rng)
            } else {
                Vec::new()
            },
            after_fault: None,
            maintained: rng.chance(40),
            weights,
            resizes: false,
            snapshots_percent: 0,
            vm_state_percent: 0,
            bitmaps_percent: 0,
            allocates_percent: 0,
            compacts_percent: 0,
            cut_short: None,
            fua_percent: rng.pick(&[0, 0, 5, 30]),
            hot_percent: rng.pick(&[0, 50, 90]),
            barrier: None,
            whole_percent: 0,
            companions: 0,
            span_clusters: 0,
            grows_at: None,
            shrinks_at: None,
            slow_tasks: false,
            narrow_bytes: 0,
            narrow_requests: 8,
            narrow_whole_percent: 30,
            cache_bytes: match rng.below(3) {
                0 => 0,
                1 => rng.between(1, 8) * layout.cluster_bytes().min(4096),
                _ => 1 << 20,
            },
            discard: rng.pick(&[
                DiscardPolicy::Unmap,
                DiscardPolicy::Unmap,
                DiscardPolicy::Ignore,
            ]),
            discard_no_unref: false,
            detect_zeroes: DetectZeroes::Off,
            zero_method: ZeroMethod::Auto,
            alloc_policy: AllocPolicy::Auto,
            write_policy: if rng.chance(10) {
                WritePolicy::Writethrough
            } else {
                WritePolicy::Writeback
            },
            copy_on_read: CopyOnRead::Off,
            compress: false,
            bitmap_piece_bytes: 0,
        }
    }
}

/// The rounds of a run.
fn draw_rounds(
    rng: &mut Rng,
    (seed, kind, wide): (u64, Kind, bool),
    layout: &Layout,
    (data, below, resizes): (Data, &[Below], bool),
) -> Vec<Round> {
    let count = rng.between(1, 4);
    let mut rounds: Vec<Round> = (1..=count)
        .map(|n| Round::draw(rng, layout, n == count))
        .collect();
    let crowded = Rng::derived(seed, "crowded", 0).chance(25);
    for round in &mut rounds {
        round.resizes = resizes;
        if crowded {
            round.crowd();
        }
        if wide {
            round.fill(&mut Rng::derived(seed, "fill", round.requests));
        }
        let rng = &mut Rng::derived(seed, "faulty file", round.requests);
        for fault in &mut round.faults {
            fault.file = draw_file(rng, data, below);
        }
        round.restrict(kind, data);
    }
    rounds
}

fn draw_preallocation(
    rng: &mut Rng,
    (stands_alone, size): (bool, u64),
    allocates: Allocates,
) -> Preallocation {
    if !stands_alone || size > PREALLOCATED_BYTES_MAX || !rng.chance(15) {
        return Preallocation::Off;
    }
    match rng.below(3) {
        0 if allocates == Allocates::Yes => Preallocation::Falloc,
        1 => Preallocation::Full,
        _ => Preallocation::Metadata,
    }
}

impl Config {
    /// The run of a seed.
    pub fn draw(seed: u64, kind: Kind) -> Config {
        let rng = &mut Rng::derived(seed, "config", 0);
        let layout = Layout::draw(rng);
        let cluster = layout.cluster_bytes();
        let resizes = kind == Kind::Qcow2 && Rng::derived(seed, "resizes", 0).chance(20);
        let wide = kind == Kind::Qcow2 && Rng::derived(seed, "wide", 0).chance(5);
        let about = match wide {
            true => WIDE_WINDOWS_BYTES,
            false => layout.draw_about(rng, resizes),
        };
        let size = draw_size(rng, about, cluster);
        let grain = if wide {
            Grain::new(vec![0])
        } else {
            draw_grain(rng)
        };
        let together = if wide {
            WIDE_WINDOWS_BYTES
        } else {
            WINDOWS_BYTES
        };
        let windows = draw_windows(rng, size, together, &grain);
        let data = match rng.below(10) {
            0 if layout.version == 3 => Data::External,
            1 if layout.version == 3 => Data::ExternalRaw,
            _ => Data::Inside,
        };
        let below = draw_below(rng, size, data);
        let plain = kind == Kind::Plain;
        let rounds = draw_rounds(rng, (seed, kind, wide), &layout, (data, &below, resizes));
        let allocates = rng.pick(&[Allocates::Yes, Allocates::Yes, Allocates::No]);
        let mut config = Config {
            kind,
            profile: Profile::Usual,
            prepared: Prepared::default(),
            size,
            created_bytes: match Rng::derived(seed, "created", 0).below(10) {
                small @ 0..7 if resizes => (size * (small + 1) / 10).next_multiple_of(512),
                _ => size,
            },
            crammed: (kind == Kind::Qcow2 && Rng::derived(seed, "crammed", 0).chance(12))
                .then(|| Rng::derived(seed, "spare", 0).below(40)),
            data: if kind == Kind::Qcow2 {
                data
            } else {
                Data::Inside
            },
            encryption: Encryption::None,
            room: Room::Grows,
            preallocation: draw_preallocation(rng, (below.is_empty(), size), allocates),
            below: if kind == Kind::Qcow2 {
                below
            } else {
                Vec::new()
            },
            grain,
            windows,
            vm_state: Vec::new(),
            alignment_bytes: match layout.cluster_bits {
                _ if plain => 1,
                9 => rng.pick(&[1, 512, 4096, 4096]),
                _ => rng.pick(&[1, 512, 512, 4096]),
            },
            zeroes_fast: plain || rng.chance(80),
            punches_holes: rng.chance(85),
            allocates,
            pace: rng.pick(&[
                Pace::Prompt,
                Pace::Mixed,
                Pace::Mixed,
                Pace::Stragglers,
                Pace::SlowReads,
                Pace::SlowWrites,
            ]),
            lie: Lie::None,
            looks: true,
            rounds,
            layout,
        };
        config.shape(seed);
        config
    }

    fn shape(&mut self, seed: u64) {
        if (seeds::RAW..seeds::GRAPHS).contains(&seed) && self.kind == Kind::Qcow2 {
            return raw::shape(self, seed);
        }
        if self.kind == Kind::Qcow2 {
            self.profile = Profile::draw(seed);
            profile::shape(self, seed);
            self.draw_policies(seed);
            self.draw_vm_state(seed);
            self.draw_filters(seed);
            self.draw_encryption(seed);
            self.draw_pieces(seed);
            self.draw_room(seed);
            self.draw_allocations(seed);
            self.draw_compactions(seed);
        }
        if self.size > PREALLOCATED_BYTES_MAX && self.resizes_write_zeroes() {
            self.leave_out(Part::Resizes);
        }
    }

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
