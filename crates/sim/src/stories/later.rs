//! The stories of what the simulator once did not see. Most of them are looked at often
//! ([`look`](crate::look)), so that few of their sessions have to end with the power.

use cowslip::image::{AllocPolicy, CopyOnRead, WritePolicy, ZeroMethod};

use crate::config::{Below, Config, Data, Ending, Round};
use crate::disk::Pace;
use crate::model::{Grain, SECTOR_BYTES};
use crate::rng::Rng;
use crate::shapes::{small_counts, tables, whole};
use crate::stories::Story;

/// Shapes a configuration whose usual round this is.
pub(super) fn shape(config: &mut Config, story: Story, (mut round, rng): (Round, &mut Rng)) {
    round.ending = match rng.below(3) {
        0 => Ending::Close,
        _ => Ending::Crash(rng.between(20, 600)),
    };
    let rounds = match story {
        Story::BitmapsUnderWrites => bitmaps_under_writes(config, &mut round, rng),
        Story::BitmapsInPieces => bitmaps_in_pieces(config, &mut round, rng),
        Story::DurableWritesLong => durable_writes_long(config, &mut round, rng),
        Story::DataFilesCut => return data_files_cut(config, (round, rng)),
        Story::TablesOnUsedSpace => tables_on_used_space(config, &mut round, rng),
        Story::RootsMove => return roots_move(config, (round, rng)),
        Story::BlocksDropped => return blocks_dropped(config, (round, rng)),
        Story::CountsGrow => counts_grow(config, &mut round, rng),
        _ => encrypted(config, &mut round, rng),
    };
    config.rounds = vec![round; rounds];
}

/// Writes that take long, in place or not, reads of the same few places, and a change of a bitmap
/// now and then. How many such sessions follow one another.
fn bitmaps_under_writes(config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
    config.prepared.filled = rng.chance(70);
    config.data = rng.pick(&[Data::Inside, Data::Inside, Data::External]);
    config.pace = rng.pick(&[Pace::SlowWrites, Pace::SlowWrites, Pace::Stragglers]);
    whole(config, rng.between(4, 16));
    round.requests = rng.pick(&[60, 150]);
    round.depth = rng.pick(&[8, 16, 24]);
    round.whole_percent = rng.pick(&[0, 20]);
    round.bitmaps_percent = rng.pick(&[8, 15, 25]);
    round.weights = [45, 40, 4, 4, 4, 0];
    if config.data == Data::Inside {
        round.weights[5] = rng.pick(&[0, 0, 10]);
    }
    round.ending = Ending::Close;
    if rng.chance(40) {
        // What reads copy from below is no change, where so few writes go that this shows.
        config.prepared.filled = false;
        whole(config, rng.between(60, 160));
        let (layout, size) = (None, config.size);
        config.below.push(Below { layout, size });
        round.copy_on_read = CopyOnRead::All;
        round.weights = [75, 12, 2, 2, 4, 0];
    }
    4
}

/// A large disk of which all parts are written, so that the bits of each piece are mixed, around
/// the places where tables, slices and pages of bits meet. Some disks gain most of what they have,
/// which is dirty as a whole. How many such sessions follow one another.
fn bitmaps_in_pieces(config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
    config.layout.cluster_bits = 9;
    let count = rng.between(40, 1000);
    tables(config, count);
    let (table, few) = (config.layout.table_coverage_bytes() / SECTOR_BYTES, 3);
    // Each of several tables.
    let meetings = (1..count).step_by(count.div_ceil(60) as usize);
    let around = |table_number: u64| table_number * table - few..table_number * table + few;
    // Bits of a page meet in the middle of the largest.
    let page = count > 520;
    config.windows = meetings.map(around).collect();
    if page && !config.windows.contains(&around(512)) {
        config.windows.push(around(512));
        config.windows.sort_by_key(|window| window.start);
    }
    if rng.chance(40) {
        config.created_bytes = config.size / rng.between(2, 20) / SECTOR_BYTES * SECTOR_BYTES;
        round.grows_at = Some(rng.below(40));
        round.resizes = rng.chance(50);
    }
    round.bitmap_piece_bytes = rng.pick(&[8, 16, 64, 256]);
    round.bitmaps_percent = rng.pick(&[10, 20]);
    round.requests = rng.pick(&[60, 150]);
    round.weights = [5, 60, 8, 8, 4, 0];
    round.ending = rng.pick(&[Ending::Close, Ending::Close, Ending::Crash(200)]);
    5
}

/// Durable writes over up to thirty tables, the first parts of which have no space yet while the
/// last ones have, and nothing else that would make them durable. How many such sessions follow one
/// another.
fn durable_writes_long(config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
    config.layout.cluster_bits = 9;
    config.prepared.filled = true;
    config.data = rng.pick(&[Data::Inside, Data::Inside, Data::External]);
    // Sixty-four clusters to a table.
    whole(config, 64 * rng.between(12, 40));
    round.cache_bytes = 1;
    round.depth = rng.pick(&[1, 1, 2, 3]);
    round.requests = 40;
    round.whole_percent = 100;
    round.span_clusters = 64 * rng.between(5, 30);
    round.fua_percent = 100;
    round.maintained = false;
    round.weights = [5, 45, 15, 25, 0, 0];
    if rng.chance(40) {
        // Some leave a mapping that is not durable, over which a durable one goes in place.
        whole(config, 64 * rng.between(2, 4));
        round.fua_percent = rng.pick(&[20, 50]);
        round.span_clusters = 64 * 4;
        round.whole_percent = 50;
        round.requests = 120;
        round.cache_bytes = 1 << 20;
        round.weights = [5, 70, 5, 8, 0, 0];
    } else if rng.chance(20) {
        round.write_policy = WritePolicy::Writethrough;
    }
    round.ending = Ending::Crash(rng.between(10, 700));
    8
}

/// A disk that becomes smaller and larger again in each session, filled between.
fn data_files_cut(config: &mut Config, (mut round, rng): (Round, &mut Rng)) {
    config.data = Data::ExternalRaw;
    config.prepared.filled = true;
    config.zeroes_fast = true;
    whole(config, rng.between(8, 32));
    round.requests = 30;
    round.weights = [20, 60, 4, 4, 6, 0];
    round.whole_percent = 80;
    let session = |number: u64, rng: &mut Rng| {
        let mut round = round.clone();
        round.shrinks_at = number.is_multiple_of(2).then(|| rng.below(24));
        round.grows_at = (number % 2 == 1).then(|| rng.below(6));
        round.ending = match rng.chance(50) {
            true => Ending::Close,
            false => Ending::Crash(rng.between(40, 400)),
        };
        round
    };
    config.rounds = (0..8).map(|number| session(number, rng)).collect();
}

/// A disk of many tables over another, much of which is given up or becomes zeroes, and few
/// requests between flushes: entries of zeroes in a new table promise no bytes. How many such
/// sessions follow one another.
fn tables_on_used_space(config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
    config.layout.cluster_bits = rng.pick(&[9, 9, 10, 12]);
    config.prepared.filled = true;
    // Clusters that are given up keep their bytes, and the file grows by zeroes.
    config.punches_holes = rng.chance(20);
    tables(config, rng.between(60, 250));
    let (layout, size) = (None, config.size);
    config.below.push(Below { layout, size });
    round.alloc_policy = AllocPolicy::Sparse;
    round.zero_method = rng.pick(&[ZeroMethod::Auto, ZeroMethod::Fresh]);
    round.depth = rng.pick(&[1, 1, 2]);
    round.requests = 250;
    round.whole_percent = rng.pick(&[80, 100]);
    round.weights = [2, rng.pick(&[8, 20]), 36, 18, 36, 0];
    round.ending = Ending::Crash(rng.between(200, 3000));
    3
}

/// A disk of blocks that count sixty-four clusters each, which becomes smaller and larger again in
/// each session. What is written in several sessions has blocks that others count.
fn blocks_dropped(config: &mut Config, (mut round, rng): (Round, &mut Rng)) {
    small_counts(config, rng);
    whole(config, rng.between(4, 16) * 64);
    config.prepared.filled = rng.chance(50);
    config.prepared.snapshots = rng.pick(&[0, 0, 0, 1]);
    config.data = rng.pick(&[Data::Inside, Data::Inside, Data::Inside, Data::External]);
    if config.data != Data::Inside {
        config.prepared.snapshots = 0;
    }
    config.punches_holes = rng.chance(80);
    round.requests = 40;
    round.depth = rng.pick(&[1, 4, 16]);
    round.span_clusters = rng.pick(&[12, 40, 90]);
    round.whole_percent = 80;
    round.weights = [10, 60, 4, 10, 6, 0];
    round.cache_bytes = rng.pick(&[1, 1 << 20]);
    let session = |number: u64, rng: &mut Rng| {
        let mut round = round.clone();
        match number % 2 {
            0 => round.shrinks_at = Some(rng.below(36)),
            _ => round.grows_at = Some(rng.below(4)),
        }
        round.resizes = rng.chance(20);
        round.ending = match rng.chance(60) {
            true => Ending::Close,
            false => Ending::Crash(rng.between(40, 600)),
        };
        round
    };
    config.rounds = (0..8).map(|number| session(number, rng)).collect();
}

/// A small disk that grows to many tables, whose tables a snapshot shares or not.
fn roots_move(config: &mut Config, (mut round, rng): (Round, &mut Rng)) {
    config.layout.cluster_bits = 9;
    config.layout.refcount_bits = rng.pick(&[16, 64]);
    config.prepared.filled = true;
    config.crammed = rng.chance(40).then(|| rng.below(20));
    tables(config, rng.between(70, 200));
    config.created_bytes = config.size / rng.between(8, 40) / SECTOR_BYTES * SECTOR_BYTES;
    round.requests = 120;
    round.depth = rng.pick(&[1, 2, 6]);
    round.cache_bytes = rng.pick(&[1, 1 << 20]);
    round.snapshots_percent = rng.pick(&[0, 0, 4, 10]);
    round.resizes = rng.chance(60);
    round.weights = [8, 45, 6, 8, 20, 0];
    let mut first = round.clone();
    first.grows_at = Some(rng.below(30));
    first.resizes = false;
    let last = rng.between(1, 3) as usize;
    config.rounds = vec![round; last];
    config.rounds.insert(0, first);
}

/// Blocks that count sixty-four clusters each, a table with little room, large writes. How many
/// such sessions follow one another.
fn counts_grow(config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
    small_counts(config, rng);
    config.crammed = rng.chance(50).then(|| rng.below(30));
    if rng.chance(30) {
        // A cluster at a time.
        round.depth = 1;
        round.whole_percent = 0;
    } else {
        round.span_clusters = rng.pick(&[12, 40, 90]);
    }
    round.requests = 250;
    round.weights = [3, 60, 4, 4, rng.pick(&[4, 20]), 0];
    round.ending = Ending::Crash(rng.between(200, 4000));
    2
}

/// Requests of any alignment to a few clusters. How many such sessions follow one another.
fn encrypted(config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
    config.layout.extended_l2 = rng.chance(30);
    config.layout.cluster_bits = match config.layout.extended_l2 {
        true => 14,
        false => rng.pick(&[9, 10, 12, 16]),
    };
    config.layout.version = rng.pick(&[3, 3, 2]);
    if config.layout.extended_l2 {
        config.layout.version = 3;
    }
    if config.layout.version == 3 && rng.chance(30) {
        config.data = Data::External;
    }
    config.encrypt(rng);
    config.alignment_bytes = rng.pick(&[1, 512, 4096]);
    config.prepared.filled = rng.chance(60);
    config.prepared.snapshots = match config.data {
        Data::Inside => rng.pick(&[0, 0, 1]),
        _ => 0,
    };
    let most = if config.layout.cluster_bits == 16 {
        4
    } else {
        24
    };
    whole(config, rng.between(3, most));
    config.grain = Grain::new(rng.pick(&[vec![0], vec![0, 255], vec![0, 64, 128, 256]]));
    let granules = config.size / SECTOR_BYTES * config.grain.per_sector();
    config.windows = std::iter::once(0..granules).collect();
    round.requests = 100;
    round.whole_percent = rng.pick(&[0, 30]);
    round.fua_percent = rng.pick(&[0, 20]);
    round.weights = [25, 45, 10, 8, 12, 0];
    if config.data == Data::Inside {
        round.snapshots_percent = rng.pick(&[0, 5]);
    }
    3
}
