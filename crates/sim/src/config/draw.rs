//! The draw of a configuration from a seed, which its profile shapes then.

use cowslip::image::{
    AllocPolicy, CopyOnRead, DetectZeroes, DiscardPolicy, WritePolicy, ZeroMethod,
};
use cowslip::qcow2::create::Preallocation;

use crate::disk::fault::{Duration, EIO, ENOSPC, Fault, Verb};
use crate::disk::{Allocates, Lie, Pace};
use crate::model::{Grain, Granules, SECTOR_BYTES};
use crate::names::{BOTTOM, DATA, TOP};
use crate::profile::{self, Profile};
use crate::raw;
use crate::rng::Rng;
use crate::seeds;

use super::{
    Below, Config, Data, Encryption, Ending, Kind, Layout, PREALLOCATED_BYTES_MAX, Part, Prepared,
    Room, Round,
};

/// Bytes that the windows of a usual run have together, at most.
const WINDOWS_BYTES: u64 = 512 << 10;
/// Bytes that they have where the file is to grow by more than a session grows without allocating.
const WIDE_WINDOWS_BYTES: u64 = 4 << 20;
/// The largest disk.
const DISK_BYTES_MAX: u64 = 8 << 30;

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
}
