//! Requests: drawn from the seed one by one, so that a run without some of them keeps the others.

use crate::bitmaps;
use crate::config::{Config, Round};
use crate::model::{Granules, SECTOR_BYTES, WriteId};
use crate::remembered::What;
use crate::rng::Rng;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Read.
    Read,
    /// Write a stamp.
    Write {
        /// Durable when it completes.
        fua: bool,
    },
    /// Write a stamp, compressed: whole clusters only.
    Compressed,
    /// Write zeroes.
    Zeroes {
        /// The space may be given back.
        may_unmap: bool,
        /// Durable when it completes.
        fua: bool,
    },
    /// Discard.
    Discard,
    /// Allocate space in advance: no byte changes.
    Allocate,
    /// Compact the file: no byte changes.
    Compact,
    /// Flush.
    Flush,
    /// Change the size of the disk.
    Resize(u64),
    /// Do something with the internal snapshots.
    Snapshot(What),
    /// Do something with the persistent bitmaps.
    Bitmap(bitmaps::What),
    /// Read or write the VM state.
    VmState(Way),
}

/// Whether bytes come or go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The snapshot is read.
    Read,
    /// A stamp is written.
    Write,
}

impl Verb {
    /// Whether it changes what the disk is, so that a guest keeps away from it meanwhile.
    pub fn wants_to_be_alone(self) -> bool {
        matches!(self, Verb::Resize(_) | Verb::Snapshot(_))
    }

    /// Whether it is about a range of the disk.
    pub fn has_range(self) -> bool {
        !matches!(self, Verb::Flush | Verb::Compact | Verb::Bitmap(_)) && !self.wants_to_be_alone()
    }
}

/// A request of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its number in the run, and that of the bytes that it writes.
    pub id: WriteId,
    /// Its operation.
    pub verb: Verb,
    /// Its range, on the disk or in the VM state; empty for a flush.
    pub granules: Granules,
}

/// Numbers below this belong to the bytes that were there before the run.
const FIRST_ID: WriteId = 1000;
/// Numbers of a round.
const IDS_PER_ROUND: WriteId = 10_000;

/// The number of a request.
pub fn request_id(round: usize, index: u64) -> WriteId {
    FIRST_ID + round as WriteId * IDS_PER_ROUND + index as WriteId
}

/// The request of this number.
pub fn draw(seed: u64, config: &Config, round_index: usize, index: u64) -> Request {
    let round = &config.rounds[round_index];
    let id = request_id(round_index, index);
    let rng = &mut Rng::derived(seed, "request", u64::from(id));
    if round.grows_at == Some(index) {
        return Request {
            id,
            verb: Verb::Resize(config.size),
            granules: 0..0,
        };
    }
    if round.shrinks_at == Some(index) {
        let sectors = config.size / SECTOR_BYTES;
        return Request {
            id,
            verb: Verb::Resize(rng.between(1, sectors * 3 / 4) * SECTOR_BYTES),
            granules: 0..0,
        };
    }
    if round.resizes && rng.chance(5) {
        let sectors = config.size / SECTOR_BYTES;
        // Beyond what the disk had at first there is nothing to see, but L1 has to grow.
        let most = sectors * rng.pick(&[1, 1, 3]);
        let size = rng.between(sectors / 4 + 1, most) * SECTOR_BYTES;
        return Request {
            id,
            verb: Verb::Resize(size),
            granules: 0..0,
        };
    }
    if round.snapshots_percent > 0 && rng.chance(round.snapshots_percent) {
        let what = rng.pick(&[What::Take, What::Take, What::Apply, What::Delete]);
        return Request {
            id,
            verb: Verb::Snapshot(what),
            granules: 0..0,
        };
    }
    if round.vm_state_percent > 0 && rng.chance(round.vm_state_percent) {
        return Request {
            id,
            verb: Verb::VmState(rng.pick(&[Way::Read, Way::Write, Way::Write])),
            granules: draw_in_vm_state(config, rng),
        };
    }
    if round.bitmaps_percent > 0 && rng.chance(round.bitmaps_percent) {
        return Request {
            id,
            verb: Verb::Bitmap(rng.pick(&bitmaps::What::ALL)),
            granules: 0..0,
        };
    }
    let fua = rng.chance(round.fua_percent);
    let verb = match rng.weighted(&round.weights) {
        0 => Verb::Read,
        1 => Verb::Write { fua },
        2 => Verb::Zeroes {
            may_unmap: rng.chance(50),
            fua,
        },
        3 => Verb::Discard,
        4 => Verb::Flush,
        _ => Verb::Compressed,
    };
    let verb = compaction(allocation(verb, (seed, round, id)), (seed, round, id));
    let granules = match verb {
        Verb::Flush | Verb::Compact => 0..0,
        Verb::Write { .. } if round.companions > 0 && !rng.chance(10) => {
            let group = u64::from(id) / round.companions;
            let place = &mut Rng::derived(seed, "companions", group);
            draw_beside(config, place, rng)
        }
        _ => draw_granules(seed, config, (round_index, round), index, rng),
    };
    if verb == Verb::Compressed {
        return Request {
            id,
            verb,
            granules: whole_cluster(config, round, &granules),
        };
    }
    Request { id, verb, granules }
}

/// A request for space in place of another one; drawn apart, so that a run without them keeps the
/// others.
fn allocation(verb: Verb, (seed, round, id): (u64, &Round, WriteId)) -> Verb {
    let percent = round.allocates_percent;
    let is_one = percent > 0 && Rng::derived(seed, "allocates", u64::from(id)).chance(percent);
    match is_one && verb != Verb::Flush {
        true => Verb::Allocate,
        false => verb,
    }
}

/// A compaction in place of another request; drawn apart, likewise.
fn compaction(verb: Verb, (seed, round, id): (u64, &Round, WriteId)) -> Verb {
    let percent = round.compacts_percent;
    match percent > 0 && Rng::derived(seed, "compacts", u64::from(id)).chance(percent) {
        true => Verb::Compact,
        false => verb,
    }
}

/// The cluster of the first granule, as far as the disk goes.
fn whole_cluster(config: &Config, round: &Round, granules: &Granules) -> Granules {
    let grain = &config.grain;
    let cluster = config.layout.cluster_bytes();
    let inside = |window: &&Granules| window.contains(&granules.start);
    let window = config
        .windows
        .iter()
        .find(inside)
        .expect("it was drawn there");
    let (low, high) = (grain.start(window.start), grain.start(window.end));
    let mut start = grain.start(granules.start) / cluster * cluster;
    if start < low {
        start += cluster;
    }
    let end = (start + cluster).min(config.size);
    let part = end < start + cluster && round.resizes;
    if end > high || start >= end || part {
        // The window holds no such cluster, or it is a part of one that ends where the disk may
        // not.
        return granules.start..granules.start;
    }
    grain.index_of(start)..grain.index_of(end - 1) + 1
}

/// Units that requests like to be aligned to and to fill.
fn draw_unit(config: &Config, rng: &mut Rng) -> u64 {
    let cluster = config.layout.cluster_bytes();
    match rng.below(6) {
        0 => cluster,
        1 => (cluster / 32).max(512),
        2 => 4096,
        3 => cluster * 2,
        _ => 512,
    }
}

/// A few sectors of a window of the VM state.
fn draw_in_vm_state(config: &Config, rng: &mut Rng) -> Granules {
    let window = rng.pick(&config.vm_state);
    let sectors = (window.end - window.start) / config.grain.per_sector();
    let first = rng.below(sectors);
    let most = rng.pick(&[2, 20]);
    let end = first + rng.between(1, most.min(sectors - first));
    let granule = |sector: u64| window.start + sector * config.grain.per_sector();
    granule(first)..granule(end)
}

/// A few granules of a cluster that other requests have drawn too, from a copy of `place`.
fn draw_beside(config: &Config, place: &mut Rng, rng: &mut Rng) -> Granules {
    let grain = &config.grain;
    let window = place.pick(&config.windows);
    let (start, end) = (grain.start(window.start), grain.start(window.end));
    let cluster = config.layout.cluster_bytes();
    let near = place.between(start, end - 1) / cluster * cluster;
    let near = near.max(start)..(near + cluster).min(end);
    let granules = grain.index_of(near.start)..grain.index_of(near.end - 1) + 1;
    let first = rng.between(granules.start, granules.end - 1);
    // Small ones, since those that overlap wait for each other.
    let more = if rng.chance(75) { 0 } else { rng.below(4) };
    let last = (first + more).min(granules.end - 1);
    match rng.chance(5) {
        true => granules,
        false => first..last + 1,
    }
}

/// Whole subclusters or sectors of a few bytes of the disk, the next ones every few requests.
fn draw_narrow(
    config: &Config,
    (window, index): (&Granules, u64),
    round: &Round,
    rng: &mut Rng,
) -> Granules {
    let grain = &config.grain;
    let subcluster = config.layout.cluster_bytes() / 32;
    let unit = if rng.chance(round.narrow_whole_percent) {
        subcluster
    } else {
        SECTOR_BYTES
    };
    let places = index / round.narrow_requests;
    let place = (places * round.narrow_bytes) % config.size / subcluster * subcluster;
    let start = place + rng.below(round.narrow_bytes / unit) * unit;
    let end = start + unit * rng.pick(&[1, 1, 1, 2]);
    let (first, last) = (grain.index_of(start), grain.index_of(end - 1) + 1);
    let first = first.clamp(window.start, window.end - 1);
    first..last.clamp(first + 1, window.end)
}

fn draw_granules(
    seed: u64,
    config: &Config,
    round: (usize, &Round),
    index: u64,
    rng: &mut Rng,
) -> Granules {
    let window = rng.pick(&config.windows);
    let grain = &config.grain;
    let (start, end) = (grain.start(window.start), grain.start(window.end));
    let unit = draw_unit(config, rng);
    let near = if rng.chance(round.1.hot_percent) {
        // A few places in each round are hot, the same ones for all of its requests.
        let spot = round.0 as u64 * 4 + rng.below(3);
        let spots = &mut Rng::derived(seed, "hot spot", spot);
        let place = spots.between(start, end - 1);
        let cluster = config.layout.cluster_bytes();
        place / cluster * cluster + rng.below(cluster * 2)
    } else {
        rng.between(start, end - 1)
    };
    if rng.chance(round.1.whole_percent) {
        let cluster = config.layout.cluster_bytes();
        let first = grain.index_of((near / cluster * cluster).clamp(start, end - 1));
        let clusters = match round.1.span_clusters {
            0 => rng.pick(&[1, 1, 1, 2, 3]),
            most => rng.between(1, most),
        };
        let last = near / cluster * cluster + cluster * clusters;
        let last = grain.index_of((last - 1).clamp(start, end - 1)).max(first);
        return first..(last + 1).min(window.end);
    }
    if round.1.narrow_bytes > 0 {
        return draw_narrow(config, (&window, index), round.1, rng);
    }
    let unaligned = rng.chance(30);
    let len = match rng.below(10) {
        0 => unit * rng.between(1, 8),
        1..=3 => unit,
        _ => rng.between(1, unit),
    }
    .min(128 << 10);
    let aligned = if unaligned { near } else { near / unit * unit };
    let first = grain.index_of(aligned.clamp(start, end - 1));
    let last_byte = (grain.start(first) + len - 1).clamp(start, end - 1);
    let last = grain.index_of(last_byte).max(first);
    first..(last + 1).min(window.end)
}
