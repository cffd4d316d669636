//! How the runs of stories are shaped.

use cowslip::qcow2::create::Preallocation;

use crate::config::{Below, Config, Data, Ending, Layout, Prepared, Round};
use crate::disk::Pace;
use crate::disk::fault::{Duration, EIO, ENOSPC, Fault, Verb};
use crate::model::Grain;
use crate::rng::Rng;
use crate::shapes::{narrow, small_counts, tables, usual, whole};

use super::{Story, later};

/// Shapes a drawn qcow2 configuration.
pub(crate) fn shape(config: &mut Config, story: Story, rng: &mut Rng) {
    config.preallocation = Preallocation::Off;
    config.prepared = Prepared::default();
    config.below.clear();
    config.crammed = None;
    config.data = Data::Inside;
    config.alignment_bytes = rng.pick(&[1, 512]);
    config.grain = Grain::new(vec![0]);
    config.layout = Layout {
        cluster_bits: rng.pick(&[9, 9, 10, 12]),
        extended_l2: false,
        version: 3,
        refcount_bits: 16,
        lazy_refcounts: false,
    };
    let mut round = config.rounds[0].clone();
    usual(&mut round, rng);
    if story.is_later() {
        return later::shape(config, story, (round, rng));
    }
    let rounds = order(config, story, &mut round, rng);
    config.rounds = vec![round; rounds];
    if story == Story::FlushedOften {
        for round in &mut config.rounds {
            round.ending = Ending::Crash(rng.between(4, 80));
        }
    }
    if story == Story::BitmapsCutShort {
        for (number, round) in config.rounds.iter_mut().enumerate() {
            let crash = Ending::Crash(rng.between(4, 120));
            round.ending = match round.faults.is_empty() {
                true => rng.pick(&[Ending::Close, Ending::Close, crash]),
                false => Ending::Close,
            };
            // Tables of bitmaps get another length when a large disk does.
            if round.resizes && number % 2 == 1 {
                let at = Some(rng.below(round.requests));
                match rng.chance(50) {
                    true => round.shrinks_at = at,
                    false => round.grows_at = at,
                }
                round.ending = Ending::Crash(rng.between(40, 400));
            }
        }
    }
    if story == Story::ShrinkCutShort {
        config.rounds[0].shrinks_at = Some(rng.below(20));
        config.rounds[1].grows_at = Some(rng.below(6));
    }
    if story == Story::BuiltOnSand {
        config.rounds.iter_mut().step_by(2).for_each(|round| {
            // The first write flushes, and a cycle that allocates has two flushes, each of them two
            // events: most die as the second begins.
            round.barrier = Some(rng.pick(&[0, 0, 0, 1, 3]));
            let first = rng.pick(&[3, 5, 5, 4]);
            round.ending = Ending::Kill(first + 4 * rng.below(2));
            round.weights = [0, 40, 0, 25, 8, 0];
            round.fua_percent = 0;
            round.depth = 16;
        });
    }
}

/// Shapes a run that shows the order of writes. Returns how many such sessions follow one another.
fn order(config: &mut Config, story: Story, round: &mut Round, rng: &mut Rng) -> usize {
    let mut rounds = 1;
    match story {
        Story::BlocksAdded => {
            small_counts(config, rng);
            round.requests = 400;
            round.span_clusters = 12;
            round.weights = [3, 60, 4, 4, 10, 0];
        }
        Story::TablesCopied => {
            config.layout.cluster_bits = 9;
            config.prepared.filled = true;
            config.prepared.snapshots = 1;
            tables(config, rng.between(6, 14));
            config.pace = rng.pick(&[Pace::Mixed, Pace::Prompt, Pace::Stragglers]);
            round.depth = rng.pick(&[2, 2, 3, 4]);
            round.requests = 120;
            round.weights = [5, 50, 3, 5, 30, 0];
        }
        Story::ShrinkCutShort => {
            whole(config, rng.between(4, 24));
            config.prepared.filled = true;
            config.data = rng.pick(&[Data::Inside, Data::Inside, Data::ExternalRaw]);
            round.requests = 40;
            round.weights = [35, 15, 5, 5, 10, 0];
            rounds = 2;
        }
        Story::BuiltOnSand => {
            whole(config, rng.between(8, 32));
            config.data = rng.pick(&[Data::Inside, Data::Inside, Data::External]);
            round.requests = 40;
            round.whole_percent = 100;
            round.maintained = false;
            round.weights = [5, 40, 0, 0, 0, 0];
            round.fua_percent = 100;
            // Few at a time, since the first that allocates flushes all of it.
            round.depth = rng.pick(&[1, 2, 3]);
            round.ending = Ending::Crash(rng.between(2, 16));
            rounds = 20;
        }
        Story::FlushedOften => {
            config.pace = rng.pick(&[Pace::Mixed, Pace::Prompt, Pace::Stragglers]);
            config.prepared.filled = rng.chance(50);
            config.layout.extended_l2 = rng.chance(70);
            // As a flush begins, or just after.
            round.barrier = Some(rng.pick(&[0, 0, 1]));
            round.requests = 300;
            rounds = 12;
            round.depth = rng.pick(&[1, 1, 2, 3]);
            round.whole_percent = rng.pick(&[0, 20]);
            round.weights = [3, 45, rng.pick(&[0, 20]), 5, 40, 0];
            if config.layout.extended_l2 {
                // Subclusters are punched and filled again, for which no count changes.
                narrow(config, round, 400, rng);
                round.depth = 1;
            } else {
                whole(config, rng.between(16, 96));
            }
        }
        Story::RepairCutShort => {
            whole(config, rng.between(8, 40));
            config.layout.lazy_refcounts = true;
            config.prepared.filled = rng.chance(50);
            round.requests = 60;
            round.ending = Ending::Crash(rng.between(60, 400));
            rounds = 4;
        }
        Story::HolesLate => rounds = holes_late(config, round, rng),
        Story::SnapshotsCutShort => rounds = snapshots_cut_short(config, round, rng),
        Story::BitmapsCutShort => rounds = bitmaps_cut_short(config, round, rng),
        _ => return failures(config, story, round, rng),
    }
    rounds
}

/// Holes in clusters that stay mapped, slow ones among them. How many such sessions follow one
/// another.
fn holes_late(config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
    config.layout.extended_l2 = rng.chance(50);
    config.prepared.filled = rng.chance(50);
    config.punches_holes = rng.chance(90);
    config.pace = Pace::SlowHoles;
    round.ending = rng.pick(&[Ending::Close, Ending::Crash(100_000)]);
    if config.layout.extended_l2 {
        // The same few subclusters again and again.
        config.layout.cluster_bits = rng.pick(&[14, 16]);
        whole(config, rng.between(2, 4));
        round.requests = 400;
        round.weights = [15, 40, 0, 30, 15, 0];
        round.whole_percent = 0;
        round.narrow_bytes = config.layout.cluster_bytes() / 32 * rng.between(2, 8);
        round.narrow_requests = rng.pick(&[40, 100, 400]);
        round.narrow_whole_percent = 70;
    } else {
        // Clusters of a snapshot must not get holes; where there is none, clusters change hands.
        config.layout.cluster_bits = rng.pick(&[13, 14, 15]);
        config.prepared.filled = true;
        config.prepared.snapshots = rng.pick(&[0, 0, 1]);
        round.requests = 800;
        round.depth = 24;
        round.whole_percent = 50;
        round.weights = [10, 35, 0, 40, 15, 0];
        if config.prepared.snapshots == 0 {
            // So few that one which is given up, while a hole in it is on its way, is another's at
            // once.
            whole(config, 2);
            config.punches_holes = true;
            round.depth = rng.pick(&[4, 8]);
            round.weights = [0, 40, 0, 35, 25, 0];
            round.ending = Ending::Close;
            return 10;
        }
        whole(config, rng.between(2, 10));
    }
    1
}

/// Snapshots of a disk of few clusters, some of which are shared. How many such sessions follow one
/// another.
fn snapshots_cut_short(config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
    config.layout.version = rng.pick(&[2, 3, 3]);
    if config.layout.version == 3 {
        config.layout.refcount_bits = rng.pick(&[4, 8, 16, 64]);
        config.layout.extended_l2 = rng.chance(30);
    }
    if config.layout.extended_l2 {
        config.layout.cluster_bits = 14;
    }
    config.prepared.filled = rng.chance(80);
    config.prepared.snapshots = rng.pick(&[0, 1, 2]);
    whole(config, rng.between(4, 24));
    round.requests = 150;
    round.depth = rng.pick(&[2, 6]);
    round.snapshots_percent = rng.pick(&[8, 20]);
    round.weights[5] = rng.pick(&[0, 0, 15]);
    round.cache_bytes = rng.pick(&[1, 1 << 20]);
    6
}

/// Bitmaps of a disk of few clusters, whose bits take several clusters where these are small. How
/// many such sessions follow one another.
fn bitmaps_cut_short(config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
    config.layout.extended_l2 = rng.chance(30);
    if config.layout.extended_l2 {
        config.layout.cluster_bits = 14;
    }
    config.data = rng.pick(&[Data::Inside, Data::Inside, Data::Inside, Data::External]);
    config.prepared.filled = rng.chance(50);
    round.bitmaps_percent = rng.pick(&[10, 25, 50]);
    round.resizes = rng.chance(40);
    match round.resizes && !config.layout.extended_l2 {
        true => {
            config.layout.cluster_bits = 9;
            tables(config, rng.between(100, 300));
            round.bitmaps_percent = 60;
        }
        false => whole(config, rng.between(4, 24)),
    }
    round.requests = rng.pick(&[4, 12, 30]);
    round.depth = rng.pick(&[1, 2, 6]);
    round.weights = [5, 30, 15, 15, 10, 0];
    if config.data == Data::Inside {
        round.weights[5] = rng.pick(&[0, 15]);
    }
    if rng.chance(50) {
        // Some of what a write in place has left is there, and no other write sets its bits.
        config.prepared.filled = true;
        round.resizes = false;
        whole(config, rng.between(16, 64));
        round.requests = rng.pick(&[12, 30]);
        round.bitmaps_percent = 10;
        round.weights = [10, 45, 5, 0, 5, 0];
        let errno = rng.pick(&[EIO, ENOSPC]);
        let faults = (0..rng.between(2, 8)).map(|_| fails(Verb::Write, errno, rng.below(40)));
        round.faults = faults.collect();
    }
    8
}

/// Shapes a run with failures and their leftovers. Returns how many such sessions follow one
/// another.
fn failures(config: &mut Config, story: Story, round: &mut Round, rng: &mut Rng) -> usize {
    let mut rounds = 1;
    match story {
        Story::CountsFail => {
            small_counts(config, rng);
            round.depth = rng.pick(&[1, 1, 2, 3]);
            round.weights = [5, 40, 4, 6, 45, 0];
            round.after_fault = Some(rng.between(4, 40));
            let verb = rng.pick(&[Verb::CountWrite, Verb::L1Write]);
            round.faults = vec![fails(verb, ENOSPC, rng.below(8))];
            if verb == Verb::L1Write {
                // A few tables that are new for long. Where nothing lies below, an entry without
                // its bytes shows what was there before.
                whole(config, rng.between(2, 6) * 64);
                let (layout, size) = (None, config.size);
                config.below.push(Below { layout, size });
                // The barrier of a cycle that fails too makes durable what the first one wrote of
                // L1.
                round.faults = (0..3).map(|at| fails(verb, ENOSPC, at)).collect();
                round.after_fault = Some(rng.between(8, 60));
                round.depth = rng.pick(&[2, 3, 4]);
                round.weights = [0, 75, 0, 0, 25, 0];
            }
        }
        Story::DurableWriteFails => {
            whole(config, rng.between(16, 64));
            config.prepared.filled = true;
            config.data = rng.pick(&[Data::Inside, Data::Inside, Data::External]);
            config.pace = rng.pick(&[Pace::Mixed, Pace::Prompt, Pace::SlowWrites]);
            round.requests = 150;
            round.whole_percent = 0;
            round.fua_percent = rng.pick(&[15, 40, 80]);
            round.slow_tasks = rng.chance(85);
            round.weights = [0, 70, 0, 0, rng.pick(&[8, 25]), 0];
            let errno = rng.pick(&[EIO, ENOSPC]);
            round.faults = vec![fails(Verb::DurableWrite, errno, rng.below(12))];
            rounds = 5;
        }
        Story::CompressedFails => {
            whole(config, rng.between(8, 40));
            round.requests = 80;
            round.weights = [5, 15, 2, 5, 10, 60];
            let errno = rng.pick(&[EIO, ENOSPC]);
            let faults = (0..rng.between(1, 6)).map(|_| fails(Verb::Write, errno, rng.below(60)));
            round.faults = faults.collect();
            round.ending = Ending::Close;
        }
        Story::PartsFail => {
            // Subclusters of several sectors, so that a part of one can be written.
            config.layout.cluster_bits = 16;
            config.layout.extended_l2 = true;
            whole(config, rng.between(4, 8));
            // Leftovers of a failed write are erased beside writes that fill the same subcluster.
            config.pace = rng.pick(&[
                Pace::SlowWrites,
                Pace::Stragglers,
                Pace::SlowZeroes,
                Pace::Mixed,
            ]);
            round.requests = 400;
            round.whole_percent = 0;
            round.narrow_bytes = config.layout.cluster_bytes() / 32 * rng.between(1, 3);
            round.weights = [15, 50, 25, 0, 2, 0];
            let errno = rng.pick(&[EIO, ENOSPC]);
            let faults = (0..40).map(|_| fails(Verb::Write, errno, rng.below(250)));
            round.faults = faults.collect();
            // Erasing what they have left fails as well.
            if rng.chance(50) {
                erasures_fail(config, round, errno, rng);
            }
        }
        _ => unreachable!("its story is about the order of writes"),
    }
    rounds
}

/// Erasing what failed writes have left fails, too: it stays beside a slow write, is read as what
/// was there before, and then another write fills the same subcluster.
fn erasures_fail(config: &mut Config, round: &mut Round, errno: i32, rng: &mut Rng) {
    config.pace = Pace::SlowWrites;
    round.depth = rng.pick(&[4, 5, 6]);
    round.requests = 1000;
    round.narrow_bytes = config.layout.cluster_bytes() / 32;
    round.narrow_requests = 12;
    round.narrow_whole_percent = 0;
    round.weights = [50, 50, 0, 0, 1, 0];
    let faults = (0..200).map(|_| fails(Verb::Write, errno, rng.below(600)));
    round.faults.extend(faults);
    round.faults.push(Fault {
        duration: Duration::Forever,
        ..fails(Verb::Zero, errno, 0)
    });
}

fn fails(verb: Verb, errno: i32, after: u64) -> Fault {
    Fault {
        verb,
        after,
        errno,
        duration: Duration::Once,
        file: None,
    }
}
