//! Disks and rounds of requests that stories and barriers begin with, and failures in rounds.

use cowslip::image::{DiscardPolicy, WritePolicy};

use crate::config::{Config, Ending, Round};
use crate::disk::fault::{Duration, Fault, Verb};
use crate::model::SECTOR_BYTES;
use crate::rng::Rng;

/// Requests without anything special, and no end but that which the story has.
pub(crate) fn usual(round: &mut Round, rng: &mut Rng) {
    round.requests = 200;
    round.depth = rng.pick(&[8, 16, 24]);
    round.hot_percent = 0;
    round.whole_percent = rng.pick(&[20, 50, 80]);
    round.span_clusters = 0;
    round.companions = 0;
    round.narrow_bytes = 0;
    round.narrow_requests = 8;
    round.narrow_whole_percent = 30;
    round.fua_percent = 0;
    round.weights = [10, 45, 8, 8, 12, 0];
    round.barrier = None;
    round.faults.clear();
    round.slow_tasks = false;
    round.after_fault = None;
    round.discard = DiscardPolicy::Unmap;
    round.write_policy = WritePolicy::Writeback;
    round.resizes = false;
    round.grows_at = None;
    round.shrinks_at = None;
    round.maintained = rng.chance(30);
    round.cache_bytes = 1 << 20;
    round.ending = Ending::Crash(100_000);
}

/// Blocks and slices that count 64 clusters each, and a disk that needs many of them.
pub(crate) fn small_counts(config: &mut Config, rng: &mut Rng) {
    config.layout.cluster_bits = 9;
    config.layout.refcount_bits = 64;
    whole(config, rng.between(24, 48) * 64);
}

/// Makes a disk of `clusters` clusters, all of it in use.
pub(crate) fn whole(config: &mut Config, clusters: u64) {
    config.size = clusters * config.layout.cluster_bytes();
    config.created_bytes = config.size;
    config.windows = std::iter::once(0..config.size / SECTOR_BYTES).collect();
}

/// Makes a disk of few clusters, whose subclusters one request after the other is for.
pub(crate) fn narrow(config: &mut Config, round: &mut Round, requests: u64, rng: &mut Rng) {
    config.layout.cluster_bits = 14;
    whole(config, rng.between(2, 4));
    round.whole_percent = 0;
    round.narrow_bytes = config.layout.cluster_bytes() / 32 * rng.between(1, 2);
    round.narrow_requests = requests;
    round.narrow_whole_percent = 95;
    round.weights = [0, 30, 40, 0, 30, 0];
}

/// Makes a disk of `count` tables, a few clusters of each of which are in use.
pub(crate) fn tables(config: &mut Config, count: u64) {
    let step = config.layout.table_coverage_bytes();
    config.size = count * step;
    config.created_bytes = config.size;
    let used = 4 * config.layout.cluster_bytes() / SECTOR_BYTES;
    let starts = (0..count).map(|table| table * step / SECTOR_BYTES);
    config.windows = starts.map(|start| start..start + used).collect();
}

/// Makes some operations of a kind fail, each once.
pub(crate) fn some_fail(rng: &mut Rng, (verb, errno): (Verb, i32), among: u64) -> Vec<Fault> {
    let count = rng.between(1, 8);
    let faults = (0..count).map(|_| Fault {
        verb,
        after: rng.below(among),
        errno,
        duration: Duration::Once,
        file: None,
    });
    faults.collect()
}
