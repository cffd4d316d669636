//! How the runs of profiles are shaped.

use cowslip::image::{DiscardPolicy, WritePolicy};
use cowslip::qcow2::create::Preallocation;

use crate::config::{Below, Config, Data, Ending, Layout, Round};
use crate::directed;
use crate::disk::Pace;
use crate::disk::fault::{Duration, EIO, ENOSPC, Fault, Verb};
use crate::model::{Grain, SECTOR_BYTES};
use crate::rng::Rng;
use crate::shapes::some_fail;
use crate::stories;

use super::Profile;

/// Shapes a drawn qcow2 configuration.
pub(crate) fn shape(config: &mut Config, seed: u64) {
    let rng = &mut Rng::derived(seed, "profile", 1);
    match config.profile {
        Profile::Usual => {
            for round in &mut config.rounds {
                if rng.chance(30) {
                    at_barrier(round, rng);
                }
            }
        }
        Profile::Churn => churn(config, rng),
        Profile::Crowded => {
            crowded(config, rng);
            narrow(config, seed);
        }
        Profile::TightMetadata => {
            tight_metadata(config, rng);
            growing(config, seed);
        }
        Profile::Shared => {
            shared(config, rng);
            quiet(config, seed);
        }
        Profile::Directed(goal) => return directed::shape(config, goal, rng),
        Profile::Story(story) => return stories::shape(config, story, rng),
    }
    strike(config, seed);
    snapshotting(config, seed);
    tracking(config, seed);
    if config.profile != Profile::Usual && config.layout.version == 3 {
        config.layout.lazy_refcounts = Rng::derived(seed, "lazy", 0).chance(15);
    }
    // Lazy ones are made dirty as by another program, which does not keep to our rules.
    let ours = config.layout.version == 3 && !config.layout.lazy_refcounts;
    config.prepared.autoclear = ours && rng.chance(25);
}

/// A small disk with all of it in one window.
fn small(config: &mut Config, rng: &mut Rng, layout: Layout, clusters: u64) {
    let cluster = layout.cluster_bytes();
    let odd = rng.chance(30) && cluster > SECTOR_BYTES;
    let size = clusters * cluster - if odd { SECTOR_BYTES } else { 0 };
    if rng.chance(70) {
        config.grain = Grain::new(vec![0]);
    }
    config.size = size;
    config.created_bytes = size;
    config.crammed = None;
    let granules = size / SECTOR_BYTES * config.grain.per_sector();
    config.windows = std::iter::once(0..granules).collect();
    config.layout = layout;
    config.preallocation = Preallocation::Off;
    if config.layout.version == 2 {
        config.data = Data::Inside;
    }
    config.below.clear();
    if config.data != Data::ExternalRaw && rng.chance(25) {
        let size = rng.pick(&[size, size / 2 / SECTOR_BYTES * SECTOR_BYTES + SECTOR_BYTES]);
        config.below.push(Below { layout: None, size });
    }
}

fn plain_layout(rng: &mut Rng, cluster_bits: &[u32]) -> Layout {
    Layout {
        cluster_bits: rng.pick(cluster_bits),
        extended_l2: false,
        version: if rng.chance(85) { 3 } else { 2 },
        refcount_bits: 16,
        lazy_refcounts: false,
    }
}

fn extended_layout(rng: &mut Rng) -> Layout {
    Layout {
        cluster_bits: rng.pick(&[14, 14, 15, 16]),
        extended_l2: true,
        version: 3,
        refcount_bits: 16,
        lazy_refcounts: false,
    }
}

/// Sessions of many requests that end at any time.
fn busy(config: &mut Config, rng: &mut Rng, each: impl Fn(&mut Round, &mut Rng)) {
    let count = rng.between(1, 2);
    let model = config.rounds[0].clone();
    config.rounds = (0..count).map(|_| model.clone()).collect();
    for round in &mut config.rounds {
        round.requests = 300;
        round.depth = rng.pick(&[12, 24, 32]);
        round.hot_percent = 0;
        round.discard = DiscardPolicy::Unmap;
        round.write_policy = WritePolicy::Writeback;
        round.fua_percent = rng.pick(&[0, 0, 10]);
        round.faults.clear();
        round.resizes = false;
        round.ending = match rng.below(10) {
            0..=5 => Ending::Crash(rng.between(20, 1200)),
            6 => Ending::Kill(rng.between(20, 1200)),
            _ => Ending::Close,
        };
        if rng.chance(50) {
            at_barrier(round, rng);
        }
        each(round, rng);
    }
}

/// A process that dies, and durable writes or flushes that build on what it left unflushed. It dies
/// between the writes of a cycle's entries and their flush: the events of flushes are those of the
/// session's first write, then four a cycle.
fn built_on_sand(config: &mut Config, rng: &mut Rng) {
    let (mut first, mut second) = (config.rounds[0].clone(), config.rounds[0].clone());
    let entries_flushed = 2 + 4 * rng.below(4) + 3;
    first.barrier = Some(rng.pick(&[0, 0, 0, 1, 3]));
    first.ending = Ending::Kill(entries_flushed);
    first.weights = [0, 40, 5, 5, 4, 0];
    second.barrier = None;
    second.ending = Ending::Crash(rng.between(2, 60));
    (second.weights, second.fua_percent) = match rng.chance(60) {
        true => ([0, 40, 0, 0, 0, 0], 100),
        false => ([20, 0, 0, 0, 20, 0], 0),
    };
    config.rounds = vec![first, second];
}

/// Failures, after which the session goes on: what a failed cycle has forgotten shows when the next
/// one succeeds and the power fails. A failure while counts grow latches the image, so where they
/// do there are few.
fn strike(config: &mut Config, seed: u64) {
    if config.profile == Profile::Usual {
        return;
    }
    for (round, index) in config.rounds.iter_mut().zip(0..) {
        let rng = &mut Rng::derived(seed, "strike", index);
        let grows = config.profile == Profile::TightMetadata && config.layout.refcount_bits == 64;
        if !round.faults.is_empty() || !rng.chance(if grows { 10 } else { 40 }) {
            continue;
        }
        match rng.below(4) {
            0 => {
                let verb = rng.pick(&[Verb::Write, Verb::Write, Verb::Write, Verb::SetLen]);
                let among = rng.pick(&[20, 60, 200, 600]);
                round.faults = some_fail(rng, (verb, ENOSPC), among);
                round.after_fault = rng.chance(60).then(|| rng.between(1, 120));
            }
            1 => {
                // Few requests, so that the next cycle has little to write but what is left.
                round.depth = rng.pick(&[1, 2, 4]);
                round.requests = 200;
                round.weights[..5].copy_from_slice(&[5, 40, 4, 8, 30]);
                let among = rng.pick(&[40, 100, 200]);
                round.faults = some_fail(rng, (Verb::Write, ENOSPC), among);
                round.after_fault = Some(rng.between(1, 60));
            }
            2 => {
                round.weights[4] += 15;
                let errno = rng.pick(&[EIO, ENOSPC, ENOSPC]);
                round.faults = some_fail(rng, (Verb::Flush, errno), 30);
                round.faults.truncate(1);
            }
            _ => {
                round.fua_percent = 60;
                round.weights[..5].copy_from_slice(&[5, 50, 2, 2, 20]);
                let errno = rng.pick(&[EIO, ENOSPC]);
                round.faults = some_fail(rng, (Verb::Write, errno), 100);
                round.faults.truncate(1);
            }
        }
    }
}

/// A few subclusters of one or two clusters, zeroed and written under each other, some in vain.
fn narrow(config: &mut Config, seed: u64) {
    let rng = &mut Rng::derived(seed, "narrow", 0);
    if !config.layout.extended_l2 || !rng.chance(70) {
        return;
    }
    // Subclusters of several sectors, so that a part of one can be written.
    let clusters = rng.between(2, 4);
    let layout = Layout {
        cluster_bits: 16,
        ..config.layout.clone()
    };
    small(config, rng, layout, clusters);
    config.below.clear();
    config.prepared.filled = false;
    config.pace = rng.pick(&[Pace::SlowWrites, Pace::SlowWrites, Pace::Stragglers]);
    for round in &mut config.rounds {
        round.weights = [20, 45, 20, 2, 2, 0];
        round.whole_percent = 2;
        round.narrow_bytes = config.layout.cluster_bytes() / 32 * rng.between(1, 3);
        if rng.chance(60) {
            let errno = rng.pick(&[EIO, ENOSPC, ENOSPC]);
            round.faults = some_fail(rng, (Verb::Write, errno), 150);
        }
    }
}

/// Many tables that come into being one after the other, and counts that grow with them.
fn growing(config: &mut Config, seed: u64) {
    let rng = &mut Rng::derived(seed, "growing", 0);
    if config.layout.version < 3 || config.data != Data::Inside || !rng.chance(40) {
        return;
    }
    let layout = Layout {
        cluster_bits: 9,
        refcount_bits: 64,
        ..config.layout.clone()
    };
    let tables = rng.between(24, 64);
    small(config, rng, layout, tables * 64);
    config.prepared.filled = false;
    for round in &mut config.rounds {
        round.weights = [5, 60, 4, 4, 12, 0];
        if let (Ending::Crash(_), true) = (round.ending, rng.chance(60)) {
            round.ending = Ending::Crash(rng.between(3, 20));
            round.barrier = Some(rng.pick(&[0, 0, 1, 2, 4, 8]));
        }
    }
}

/// Snapshots and so few requests that none is under way now and then.
fn quiet(config: &mut Config, seed: u64) {
    let rng = &mut Rng::derived(seed, "quiet", 0);
    if rng.chance(30) {
        for round in &mut config.rounds {
            round.depth = rng.pick(&[1, 2, 3]);
            round.maintained = true;
            round.weights[4] = 20;
        }
    }
}

/// Snapshots are taken, applied and deleted between requests.
fn snapshotting(config: &mut Config, seed: u64) {
    let rng = &mut Rng::derived(seed, "snapshotting", 0);
    let percent = match config.profile {
        Profile::Shared => 60,
        Profile::TightMetadata => 30,
        _ => 12,
    };
    // Version 2 does not resize a disk that has snapshots.
    let resizes = |round: &Round| round.resizes || round.grows_at.is_some();
    let fixed = config.layout.version == 2 && config.rounds.iter().any(resizes);
    if config.data != Data::Inside || fixed || !rng.chance(percent) {
        return;
    }
    for round in &mut config.rounds {
        round.snapshots_percent = rng.pick(&[2, 5, 15]);
    }
}

/// Bitmaps follow what is written, and are changed between requests.
fn tracking(config: &mut Config, seed: u64) {
    let rng = &mut Rng::derived(seed, "tracking", 0);
    if !rng.chance(25) {
        return;
    }
    // Each change waits for the requests under way, and crashes shall find many of these.
    for round in &mut config.rounds {
        round.bitmaps_percent = rng.pick(&[1, 2, 4]);
    }
}

/// Lets a session end around a flush, where most is at risk and the order of writes shows.
fn at_barrier(round: &mut Round, rng: &mut Rng) {
    let flushes = rng.pick(&[6, 20, 60]);
    let (moment, then) = (rng.between(1, flushes), rng.pick(&[0, 0, 1, 2, 4, 8]));
    round.ending = match round.ending {
        Ending::Close => return,
        Ending::Kill(_) => Ending::Kill(moment),
        Ending::Crash(_) => Ending::Crash(moment),
    };
    round.barrier = Some(then);
}

fn churn(config: &mut Config, rng: &mut Rng) {
    let extended = rng.chance(20);
    let layout = match extended {
        true => extended_layout(rng),
        false => plain_layout(rng, &[9, 9, 10, 12, 12]),
    };
    let clusters = rng.between(3, 12);
    small(config, rng, layout, clusters);
    config.prepared.filled = rng.chance(80);
    config.pace = rng.pick(&[
        Pace::LateReads,
        Pace::LateReads,
        Pace::LateReads,
        Pace::SlowReads,
        Pace::SlowWrites,
        Pace::Stragglers,
    ]);
    let late = config.pace == Pace::LateReads;
    busy(config, rng, |round, rng| {
        round.whole_percent = rng.pick(&[50, 80, 95]);
        round.requests = if late { 600 } else { 300 };
        // Late reads must leave room for others, since nothing waits for them.
        let reads = if late { 8 } else { rng.pick(&[10, 30]) };
        round.depth = if late { 32 } else { round.depth };
        round.weights = [reads, 30, 8, 22, rng.pick(&[8, 16]), 0];
    });
    if rng.chance(25) {
        built_on_sand(config, rng);
    }
}

fn crowded(config: &mut Config, rng: &mut Rng) {
    let layout = match rng.chance(70) {
        true => extended_layout(rng),
        false => plain_layout(rng, &[12, 13, 16]),
    };
    let clusters = rng.between(1, 4);
    small(config, rng, layout, clusters);
    config.prepared.filled = rng.chance(30);
    config.pace = rng.pick(&[Pace::SlowWrites, Pace::Stragglers, Pace::SlowReads]);
    busy(config, rng, |round, rng| {
        round.whole_percent = rng.pick(&[0, 5, 20]);
        round.weights = [15, 45, 15, 6, rng.pick(&[3, 10]), 0];
        if rng.chance(60) {
            let verb = rng.pick(&[Verb::Write, Verb::Write, Verb::Flush, Verb::Read]);
            round.faults = vec![Fault {
                verb,
                after: rng.below(if verb == Verb::Flush { 8 } else { 80 }),
                errno: rng.pick(&[EIO, EIO, ENOSPC]),
                duration: Duration::Once,
                file: None,
            }];
        }
    });
}

fn tight_metadata(config: &mut Config, rng: &mut Rng) {
    let mut layout = plain_layout(rng, &[9, 9, 9, 10]);
    if layout.version == 3 {
        layout.refcount_bits = rng.pick(&[1, 1, 2, 16, 64, 64]);
    }
    let narrow = layout.refcount_bits <= 2;
    if rng.chance(85) {
        config.data = Data::Inside;
    }
    let tables = rng.between(5, 16);
    let clusters = tables * layout.cluster_bytes() / 8;
    small(config, rng, layout, clusters);
    config.crammed = rng.chance(60).then(|| rng.below(40));
    config.prepared.filled = rng.chance(40);
    let resizes = rng.chance(40);
    busy(config, rng, |round, rng| {
        round.cache_bytes = 1;
        round.whole_percent = rng.pick(&[0, 30]);
        round.resizes = resizes;
        round.weights = [20, 40, 6, 12, 6, if narrow { 25 } else { 0 }];
    });
    if config.data != Data::Inside {
        config
            .rounds
            .iter_mut()
            .for_each(|round| round.weights[5] = 0);
    }
}

fn shared(config: &mut Config, rng: &mut Rng) {
    let mut layout = match rng.chance(35) {
        true => extended_layout(rng),
        false => plain_layout(rng, &[9, 10, 12, 12, 16]),
    };
    if layout.version == 3 {
        layout.refcount_bits = rng.pick(&[4, 16, 16, 64]);
    }
    config.data = Data::Inside;
    let clusters = rng.between(2, 20);
    small(config, rng, layout, clusters);
    config.prepared.filled = true;
    config.prepared.snapshots = rng.pick(&[1, 1, 2]);
    let resizes = config.layout.version == 3 && rng.chance(20);
    busy(config, rng, |round, rng| {
        round.whole_percent = rng.pick(&[0, 20, 60]);
        round.resizes = resizes;
        round.weights = [15, 40, 8, 8, 8, if rng.chance(20) { 8 } else { 0 }];
        round.cache_bytes = rng.pick(&[1, 1 << 20]);
    });
}
