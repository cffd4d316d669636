//! How the runs about a barrier are shaped.

use cowslip::image::{AllocPolicy, ZeroMethod};

use crate::config::{Below, Config, Data, Ending, Round};
use crate::disk::Pace;
use crate::model::SECTOR_BYTES;
use crate::rng::Rng;
use crate::shapes::{narrow, small_counts, tables, usual, whole};

use super::Barrier;

impl Barrier {
    /// Shapes a configuration, which has no peculiarities yet, so that it is crossed often.
    pub(crate) fn shape(self, config: &mut Config, rng: &mut Rng) {
        let mut round = config.rounds[0].clone();
        usual(&mut round, rng);
        config.layout.cluster_bits = rng.pick(&[9, 9, 10, 12]);
        config.layout.extended_l2 = false;
        config.layout.version = 3;
        config.layout.refcount_bits = 16;
        config.layout.lazy_refcounts = false;
        config.alignment_bytes = rng.pick(&[1, 512]);
        config.pace = rng.pick(&[Pace::Prompt, Pace::Mixed, Pace::Stragglers]);
        round.requests = 60;
        round.depth = rng.pick(&[1, 2, 4]);
        round.maintained = false;
        let moment = rng.between(20, 300);
        round.ending = rng.pick(&[Ending::Close, Ending::Crash(moment)]);
        whole(config, rng.between(16, 48));
        let rounds = match self {
            Barrier::LeftBehind | Barrier::Autoclear | Barrier::DurableWrite | Barrier::Repair => {
                self.between_sessions(config, &mut round, rng)
            }
            Barrier::Blocks | Barrier::CountTable | Barrier::L1 | Barrier::Snapshots => {
                self.roots(config, &mut round, rng)
            }
            Barrier::BitmapMarks | Barrier::BitmapStore => {
                return bitmaps(config, round, rng);
            }
            _ => self.cycles(config, &mut round, rng),
        };
        config.rounds = vec![round; rounds];
        if self == Barrier::LeftBehind {
            for round in config.rounds.iter_mut().step_by(2) {
                round.barrier = Some(rng.pick(&[0, 0, 1, 3]));
                round.ending = Ending::Kill(rng.pick(&[3, 5, 5, 4]) + 4 * rng.below(2));
                round.weights = [0, 40, 0, 25, 8, 0];
                round.fua_percent = 0;
            }
        }
        if matches!(self, Barrier::Shrink | Barrier::DataFileCut) {
            for (number, round) in config.rounds.iter_mut().enumerate() {
                let at = Some(rng.between(2, 24));
                match number % 2 {
                    0 => round.shrinks_at = at,
                    _ => round.grows_at = Some(rng.below(6)),
                }
            }
        }
    }

    /// The barriers of write-back. How many sessions follow one another.
    fn cycles(self, config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
        match self {
            Barrier::Counts => {
                // Two cycles of a session raise counts one by one; later ones raise them ahead.
                round.depth = 1;
                round.requests = rng.pick(&[6, 10]);
                round.whole_percent = rng.pick(&[0, 100]);
                round.weights = [0, 40, 2, 10, 40, 0];
                16
            }
            Barrier::DataFile => {
                config.data = rng.pick(&[Data::External, Data::ExternalRaw]);
                round.weights = [5, 40, 8, 8, 25, 0];
                4
            }
            Barrier::Tables => {
                config.layout.cluster_bits = 9;
                tables(config, rng.between(30, 120));
                if rng.chance(50) {
                    // Zero clusters make a table that promises no bytes.
                    let (layout, size) = (None, config.size);
                    config.below.push(Below { layout, size });
                }
                round.requests = 100;
                round.weights = [2, rng.pick(&[5, 40]), 25, 10, 30, 0];
                2
            }
            Barrier::Clearing => {
                config.prepared.filled = true;
                whole(config, rng.between(4, 12));
                round.requests = 120;
                round.depth = rng.pick(&[2, 6]);
                round.whole_percent = 90;
                round.weights = [8, 35, 8, 30, 20, 0];
                2
            }
            Barrier::Zeroes => {
                config.prepared.filled = rng.chance(50);
                config.layout.extended_l2 = rng.chance(60);
                round.alloc_policy = AllocPolicy::Sparse;
                round.zero_method = rng.pick(&[ZeroMethod::Auto, ZeroMethod::Fresh]);
                // Some are under way while a cycle is, and end within it.
                round.depth = rng.pick(&[1, 2, 3, 4]);
                config.pace = rng.pick(&[Pace::Mixed, Pace::Stragglers, Pace::SlowHoles]);
                config.punches_holes = rng.chance(85);
                round.requests = 200;
                round.weights = [2, 40, 15, 20, 35, 0];
                if config.layout.extended_l2 {
                    narrow(config, round, 60, rng);
                }
                4
            }
            _ => {
                // The disk shrinks and grows.
                config.prepared.filled = true;
                if self == Barrier::DataFileCut {
                    config.data = Data::ExternalRaw;
                    config.zeroes_fast = true;
                }
                round.requests = 30;
                round.whole_percent = 80;
                round.weights = [20, 60, 4, 4, 6, 0];
                8
            }
        }
    }

    /// The barriers around a root that changes. How many sessions follow one another.
    fn roots(self, config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
        match self {
            Barrier::Blocks | Barrier::CountTable => {
                small_counts(config, rng);
                if self == Barrier::CountTable {
                    config.crammed = Some(rng.below(30));
                }
                round.span_clusters = rng.pick(&[12, 40]);
                round.whole_percent = 80;
                round.requests = 150;
                round.weights = [3, 60, 4, 8, rng.pick(&[4, 15]), 0];
                round.ending = Ending::Crash(rng.between(40, 1200));
                3
            }
            Barrier::L1 => {
                config.layout.cluster_bits = 9;
                tables(config, rng.between(60, 120));
                config.prepared.filled = true;
                let small = config.size / rng.between(10, 40);
                config.created_bytes = small / 512 * 512;
                round.resizes = true;
                round.depth = rng.pick(&[2, 6]);
                round.weights = [5, 50, 6, 8, 15, 0];
                round.grows_at = Some(rng.between(4, 30));
                2
            }
            _ => {
                config.prepared.filled = true;
                config.prepared.snapshots = rng.pick(&[0, 1]);
                config.layout.version = rng.pick(&[2, 3, 3]);
                whole(config, rng.between(4, 16));
                round.snapshots_percent = 25;
                round.weights = [8, 45, 8, 8, 12, 0];
                4
            }
        }
    }

    /// The barriers at the beginning of a session, and those of durable writes. How many sessions
    /// follow one another.
    fn between_sessions(self, config: &mut Config, round: &mut Round, rng: &mut Rng) -> usize {
        round.requests = 30;
        match self {
            Barrier::LeftBehind => {
                config.data = rng.pick(&[Data::Inside, Data::Inside, Data::External]);
                round.whole_percent = 100;
                round.fua_percent = 100;
                round.depth = rng.pick(&[1, 2, 3]);
                round.weights = [5, 40, 0, 0, 0, 0];
                round.ending = Ending::Crash(rng.between(2, 16));
                10
            }
            Barrier::Autoclear => {
                config.prepared.autoclear = true;
                config.prepared.filled = true;
                // The first bytes of the guest go in place, so that nothing else is flushed first.
                round.weights = [0, 40, 0, 0, 20, 0];
                round.depth = rng.pick(&[4, 8]);
                2
            }
            Barrier::Repair => {
                config.layout.lazy_refcounts = true;
                config.prepared.filled = rng.chance(50);
                round.ending = Ending::Crash(rng.between(40, 200));
                4
            }
            _ => {
                config.prepared.filled = rng.chance(50);
                round.fua_percent = rng.pick(&[50, 100]);
                round.weights = [5, 60, 10, 20, 0, 0];
                round.depth = rng.pick(&[1, 3, 8]);
                4
            }
        }
    }
}

/// Few requests between changes of bitmaps. Half of the disks are so large that tables of bitmaps,
/// and the pages in which bits are kept, have boundaries on them, and many of their bits are alike.
fn bitmaps(config: &mut Config, mut round: Round, rng: &mut Rng) {
    config.prepared.filled = rng.chance(50);
    round.bitmaps_percent = rng.pick(&[15, 30]);
    round.requests = rng.pick(&[8, 16, 30]);
    round.weights = [5, 50, 8, 8, 8, 0];
    round.ending = rng.pick(&[Ending::Close, Ending::Close, Ending::Crash(100)]);
    if rng.chance(50) {
        config.rounds = vec![round; 8];
        return;
    }
    config.layout.cluster_bits = 9;
    let count = rng.pick(&[130, 300, 600, 1100]);
    tables(config, count);
    let table = config.layout.table_coverage_bytes() / SECTOR_BYTES;
    let last = (count / 64 * 64).min(count - 1);
    // The bits of a table's entry cover 64 tables, those of a page 512: their ends are of interest.
    let meetings = [1, 64, 512, 1024, last];
    let meetings = meetings.into_iter().filter(|number| *number <= last);
    let around = |number: u64| number * table - 3..number * table + 3;
    config.windows = meetings.map(around).collect();
    config.windows.dedup();
    config.created_bytes = table * SECTOR_BYTES * rng.between(2, 100);
    round.bitmap_piece_bytes = rng.pick(&[0, 8, 64]);
    // The disk gets another size in sessions that do nothing else, and the first time behind
    // changes.
    let session = |number: u64| {
        let mut round = round.clone();
        match number % 3 {
            0 => round.grows_at = (number == 0).then_some(12),
            1 => round.shrinks_at = Some(0),
            _ => round.grows_at = Some(0),
        }
        round.requests = match number {
            0 => 30,
            _ if number.is_multiple_of(3) => round.requests,
            _ => 1 + number % 2,
        };
        if number == 0 {
            round.bitmaps_percent = 30;
            round.ending = Ending::Close;
        }
        round
    };
    config.rounds = (0..8).map(session).collect();
}
