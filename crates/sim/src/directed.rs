//! Runs that are made to reach one goal: which seeds they have, and how they are shaped.

use cowslip::image::{DiscardPolicy, WritePolicy};
use cowslip::qcow2::create::Preallocation;
use cowslip::qcow2::probe::Stage;

use crate::config::{Config, Data, Ending, Layout, Prepared};
use crate::coverage::Coverage;
use crate::disk::fault::{Duration, Fault, Verb};
use crate::disk::{Allocates, Pace};
use crate::goals::{Goal, seed};
use crate::matrix::{Feature, Phase, Point, Situation};
use crate::model::{Grain, SECTOR_BYTES};
use crate::rng::Rng;

/// Seeds that are looked at for one that draws a wanted value.
const LOOKED_AT: u64 = 20_000;

/// Seeds for an attempt at what `coverage` lacks; in the first attempt, seeds for every goal, the
/// impossible ones too: what is said to be impossible must withstand being aimed at.
pub fn seeds(coverage: &Coverage, attempt: u64, all: bool) -> Vec<u64> {
    let goals = Goal::all().into_iter().enumerate();
    let open = |goal: &Goal| goal.is_possible() && !coverage.has_reached(*goal);
    let wanted = goals.filter(|(_, goal)| all || open(goal));
    wanted.map(|(number, _)| seed(number, attempt)).collect()
}

/// Usual seeds whose runs have the values that `coverage` has not seen drawn.
pub fn drawing(coverage: &Coverage, attempt: u64) -> Vec<u64> {
    let mut lacking = coverage.undrawn();
    let mut seeds = Vec::new();
    for seed in attempt * LOOKED_AT..(attempt + 1) * LOOKED_AT {
        if lacking.is_empty() {
            break;
        }
        let mut probe = Coverage::default();
        probe.draw(&Config::draw(seed, crate::config::Kind::Qcow2));
        let before = lacking.len();
        lacking.retain(|value| !probe.has_drawn(value));
        if lacking.len() < before {
            seeds.push(seed);
        }
    }
    seeds
}

/// Shapes a drawn qcow2 configuration.
pub(crate) fn shape(config: &mut Config, goal: Goal, rng: &mut Rng) {
    config.preallocation = Preallocation::Off;
    config.prepared = Prepared::default();
    config.below.clear();
    config.crammed = None;
    config.data = Data::Inside;
    match goal {
        Goal::Cell(stage, situation, feature) => {
            Shaping {
                stage,
                situation,
                feature,
                config,
                rng,
            }
            .cell();
        }
        Goal::Fault(verb, errno) => fault(config, (verb, errno), rng),
        Goal::Point(point) => power_failure(config, point),
        Goal::Barrier(barrier) => barrier.shape(config, rng),
    }
}

/// A run that is aimed at a cell.
struct Shaping<'a> {
    stage: Stage,
    situation: Situation,
    feature: Feature,
    config: &'a mut Config,
    rng: &'a mut Rng,
}

impl Shaping<'_> {
    fn cell(&mut self) {
        self.config.layout = self.layout();
        if self.feature == Feature::DataFile {
            self.config.data = self.rng.pick(&[Data::External, Data::ExternalRaw]);
        }
        self.config.alignment_bytes = match (self.feature, self.config.layout.cluster_bits) {
            (Feature::Tiny, _) => 4096,
            (_, 9) => self.rng.pick(&[1, 512]),
            _ => self.rng.pick(&[1, 512, 4096]),
        };
        self.windows();
        self.config.prepared.filled = match self.situation {
            Situation::Joiner => self.rng.chance(20),
            Situation::Quarantine | Situation::Punch => self.rng.chance(85),
            Situation::Eviction if self.feature == Feature::DataFile => true,
            Situation::RefcountTable if self.feature == Feature::DataFile => self.rng.chance(60),
            Situation::Snapshot if self.feature != Feature::DataFile => self.rng.chance(85),
            _ if self.frees() => self.rng.chance(85),
            _ => self.rng.chance(40),
        };
        if self.counts_grow() && !self.joins_while_growing() {
            let (least, most) = match (self.feature, self.situation) {
                (Feature::DataFile, _) if self.config.prepared.filled => (0, 0),
                (Feature::DataFile, Situation::Joiner) => (1, 5),
                (_, Situation::L1Table) | (Feature::DataFile, _) => (0, 2),
                (_, Situation::Recovery) => (0, 4),
                (_, Situation::Any | Situation::RefcountTable | Situation::Joiner) => (0, 8),
                _ => (0, 30),
            };
            self.config.crammed = Some(self.rng.between(least, most));
        }
        self.config.punches_holes |= self.situation == Situation::Punch;
        self.config.pace = match self.situation {
            Situation::Punch if self.stage == Stage::Lower => Pace::LateReads,
            Situation::Joiner if self.joins_while_growing() => Pace::SlowWrites,
            Situation::Joiner => self
                .rng
                .pick(&[Pace::SlowWrites, Pace::Stragglers, Pace::Mixed]),
            _ => self.rng.pick(&[
                Pace::Mixed,
                Pace::Stragglers,
                Pace::SlowReads,
                Pace::SlowWrites,
                Pace::LateReads,
            ]),
        };
        self.rounds();
    }

    /// The counts must grow for the cell to be reached.
    fn counts_grow(&self) -> bool {
        matches!(self.stage, Stage::CountBlocks | Stage::CountTable)
            || self.situation == Situation::RefcountTable
    }

    /// Writes of parts of the smallest clusters must meet while counts grow with each step of the
    /// file. Space that was there at opening is not known to be zeroes, so nobody joins in it.
    fn joins_while_growing(&self) -> bool {
        self.situation == Situation::Joiner
            && self.counts_grow()
            && !matches!(self.feature, Feature::Extended | Feature::DataFile)
    }

    /// Holes must be punched beside the holder of the turn: in subclusters larger than a block of
    /// the host.
    fn punches_in_place(&self) -> bool {
        let beside = matches!(self.stage, Stage::Slices | Stage::CountTable);
        self.situation == Situation::Punch
            && (self.feature == Feature::DataFile || (beside && self.feature != Feature::Tiny))
    }

    /// Clusters must become free for it.
    fn frees(&self) -> bool {
        matches!(self.stage, Stage::Lower | Stage::Release)
    }

    /// Many tables must be in use for it.
    fn needs_tables(&self) -> bool {
        self.stage == Stage::Roots
            || self.situation == Situation::L1Table
            || (self.feature == Feature::DataFile && self.counts_grow())
    }

    fn layout(&mut self) -> Layout {
        let (joiner, grows) = (self.situation == Situation::Joiner, self.counts_grow());
        let steps = self.joins_while_growing();
        let in_place = self.punches_in_place();
        let rng = &mut *self.rng;
        // All of a cluster of a data file is filled at once, unless it has subclusters.
        let extended = match self.feature {
            Feature::Extended => true,
            Feature::DataFile => joiner || (!in_place && rng.chance(30)),
            _ => false,
        };
        let cluster_bits = match self.feature {
            Feature::Tiny => 9,
            _ if steps => 9,
            _ if in_place && extended => 18,
            _ if in_place => 13,
            _ if extended => 14,
            _ if joiner => rng.pick(&[11, 11, 14]),
            _ => rng.pick(&[9, 9, 10, 12, 12]),
        };
        let version = match extended || steps || self.feature == Feature::DataFile || rng.chance(85)
        {
            true => 3,
            false => 2,
        };
        let refcount_bits = match version {
            2 => 16,
            // Else their table reaches too far for a file to be extended to its end.
            _ if grows && extended => 64,
            _ if steps => 64,
            _ if grows => rng.pick(&[16, 64, 64]),
            _ => rng.pick(&[1, 16, 16, 64]),
        };
        Layout {
            cluster_bits,
            extended_l2: extended,
            version,
            refcount_bits,
            lazy_refcounts: false,
        }
    }

    /// A sparse disk, of which a few clusters of some slices or tables are used.
    fn windows(&mut self) {
        let steps = self.joins_while_growing();
        let (tables, moves) = (self.needs_tables(), self.situation == Situation::L1Table);
        let layout = &self.config.layout;
        let cluster = layout.cluster_bytes();
        let rng = &mut *self.rng;
        let wide = self.situation == Situation::Eviction || rng.chance(30);
        let (step, count) = match (tables, wide) {
            // Nearly all tables are there from the start if the disk is filled, but not all.
            (true, _) if self.feature == Feature::DataFile && !moves => {
                (layout.table_coverage_bytes(), rng.between(14, 22))
            }
            (true, _) => (layout.table_coverage_bytes(), rng.between(6, 12)),
            _ if steps => (layout.slice_coverage_bytes(), rng.between(6, 8)),
            (false, true) => (layout.slice_coverage_bytes(), rng.between(6, 12)),
            (false, false) => (layout.slice_coverage_bytes(), rng.between(1, 3)),
        };
        let clusters = match layout.cluster_bits {
            _ if steps => 32,
            ..=10 => 16,
            11..=13 => 4,
            _ if count > 12 => 1,
            _ => 2,
        };
        let clusters = if count < 4 { clusters * 2 } else { clusters };
        let odd = cluster > SECTOR_BYTES && rng.chance(30);
        // The last bytes of the disk are in the last window.
        let whole = if count == 1 {
            clusters * cluster
        } else {
            count * step
        };
        let size = whole - if odd { SECTOR_BYTES } else { 0 };
        let fine = self.situation == Situation::Joiner && cluster == SECTOR_BYTES;
        self.config.grain = match (fine, rng.chance(80)) {
            (true, _) => Grain::new(vec![0, 64, 128, 256]),
            (false, true) => Grain::new(vec![0]),
            (false, false) => Grain::new(vec![0, 255]),
        };
        let per_sector = self.config.grain.per_sector();
        let windows = (0..count).map(|index| {
            let start = match index + 1 == count {
                true => size.saturating_sub(clusters * cluster),
                false => index * step,
            };
            let end = size.min(start + clusters * cluster);
            start / SECTOR_BYTES * per_sector..end / SECTOR_BYTES * per_sector
        });
        self.config.windows = windows.collect();
        self.config.size = size;
        self.config.created_bytes = match self.situation {
            Situation::L1Table => size / rng.between(4, 6) / SECTOR_BYTES * SECTOR_BYTES,
            _ => size,
        };
    }

    fn rounds(&mut self) {
        let (opens, steps) = (self.frees(), self.joins_while_growing());
        let in_place = self.punches_in_place();
        let frees = opens || matches!(self.situation, Situation::Quarantine | Situation::Punch);
        let mut round = self.config.rounds[0].clone();
        let rng = &mut *self.rng;
        round.requests = 300;
        round.depth = rng.pick(&[24, 32, 48]);
        if (self.situation, self.stage) == (Situation::Punch, Stage::Lower) {
            round.depth = 8;
        }
        round.hot_percent = 0;
        round.barrier = None;
        round.faults.clear();
        round.discard = DiscardPolicy::Unmap;
        round.write_policy = WritePolicy::Writeback;
        round.fua_percent = rng.pick(&[0, 0, 10]);
        round.ending = Ending::Crash(rng.between(200, 1500));
        // In a cycle a barrier comes before L1; a resize writes it, and the header, without one.
        let unflushed = (self.situation, self.stage) == (Situation::Punch, Stage::Roots);
        round.resizes = rng.chance(if unflushed { 70 } else { 10 });
        round.maintained = rng.chance(match self.situation {
            Situation::Punch => 0,
            _ => 50,
        });
        round.cache_bytes = match self.situation {
            Situation::Eviction => 1,
            _ => rng.pick(&[1, 1 << 20]),
        };
        let compressed = if self.feature == Feature::Compressed {
            12
        } else {
            0
        };
        round.weights = match (self.situation, self.stage) {
            // A cycle that finds nothing new, after one that punched: only late readers have held
            // back what it frees.
            (Situation::Punch, Stage::Lower) => [35, 3, 0, 12, 50, compressed / 4],
            (Situation::Joiner, _) if steps => [3, 70, 0, 0, 4, compressed / 2],
            (Situation::Joiner, _) if opens => [5, 50, 5, 15, 12, compressed / 2],
            (Situation::Joiner, _) => [5, 60, 5, 3, 8, compressed / 2],
            _ if frees => [10, 35, 8, 22, 12, compressed],
            _ => [10, 45, 8, 8, 8, compressed],
        };
        round.whole_percent = match self.situation {
            Situation::Joiner if opens => 60,
            Situation::Joiner if steps => 100,
            Situation::Joiner => 0,
            _ if in_place => rng.pick(&[30, 50]),
            _ if frees => rng.pick(&[60, 90]),
            _ => rng.pick(&[0, 20, 50]),
        };
        if self.situation == Situation::Joiner {
            round.companions = rng.between(3, 8);
            round.requests = if steps { 900 } else { 300 };
        }
        if steps || (self.feature == Feature::Tiny && frees) {
            // The file must grow; and only whole blocks of the host are punched.
            round.span_clusters = 24;
        }
        round.grows_at = (self.config.created_bytes < self.config.size).then(|| match self.stage {
            Stage::CountBlocks | Stage::CountTable if self.situation == Situation::L1Table => {
                rng.below(6)
            }
            Stage::Lower | Stage::Release => rng.between(20, 80),
            _ => rng.between(10, 60),
        });
        if self.situation == Situation::Snapshot {
            let rng = &mut *self.rng;
            round.snapshots_percent = rng.pick(&[10, 25]);
            round.resizes = false;
            // What only a snapshot has is given up when it goes, and what shares clusters is
            // copied.
            round.ending = Ending::Crash(rng.between(2000, 6000));
        }
        self.config.rounds = vec![round];
        if self.situation == Situation::Recovery {
            self.before_recovery();
        }
    }

    /// A session that ends soon, so that what is to be reached is still to come.
    fn before_recovery(&mut self) {
        let mut first = self.config.rounds[0].clone();
        let grows = matches!(self.stage, Stage::CountBlocks | Stage::CountTable);
        first.ending = Ending::Crash(match grows || self.stage == Stage::Roots {
            true => self.rng.between(1, 12),
            false => self.rng.between(20, 300),
        });
        self.config.rounds.insert(0, first);
    }
}

/// Requests that meet this failure.
fn fault(config: &mut Config, (verb, errno): (Verb, i32), rng: &mut Rng) {
    requests(config, verb);
    config.rounds[0].ending = Ending::Crash(rng.between(500, 2000));
    config.rounds[0].faults = vec![Fault {
        verb,
        after: rng.below(3),
        errno,
        duration: Duration::Once,
        file: None,
    }];
}

/// Sessions that meet this event; the power fails with it, or not before they have ended.
fn power_failure(config: &mut Config, (phase, verb, _): Point) {
    requests(config, verb);
    let round = &mut config.rounds[0];
    round.maintained = false;
    round.ending = match phase {
        Phase::Closing => Ending::Close,
        _ => Ending::Crash(100_000),
    };
    if phase == Phase::Closing {
        // Little of it is durable before.
        round.weights[4] = 1;
    }
    if phase == Phase::Resize {
        round.grows_at = Some(20);
        config.created_bytes = (config.size / 2).next_multiple_of(SECTOR_BYTES);
    }
    if phase == Phase::Recovery {
        let mut first = round.clone();
        first.ending = Ending::Crash(3);
        config.rounds.insert(0, first);
    }
}

/// Requests that have such operations done.
fn requests(config: &mut Config, verb: Verb) {
    config.layout.version = 3;
    config.zeroes_fast = true;
    config.allocates = Allocates::Yes;
    config.punches_holes = true;
    config.created_bytes = config.size;
    // Only the data file of a raw image has ranges zeroed by one call.
    if verb == Verb::Zero {
        config.data = Data::ExternalRaw;
    }
    // Only a file that grows much is allocated in advance.
    if verb == Verb::Allocate {
        config.layout.cluster_bits = 16;
        config.size = 4 << 20;
        config.created_bytes = config.size;
        config.grain = Grain::new(vec![0]);
        config.windows = std::iter::once(0..config.size / SECTOR_BYTES).collect();
    }
    config.prepared.filled = matches!(verb, Verb::Discard | Verb::Read);
    let mut round = config.rounds[0].clone();
    round.requests = 300;
    round.depth = 16;
    round.barrier = None;
    round.resizes = false;
    round.discard = DiscardPolicy::Unmap;
    round.hot_percent = 0;
    round.weights = [10, 40, 20, 15, 10, 0];
    round.faults.clear();
    config.rounds = vec![round];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_is_aimed_at_a_cell_has_its_feature() {
        for (number, goal) in Goal::all().into_iter().enumerate() {
            let config = Config::draw(seed(number, 3), crate::config::Kind::Qcow2);
            if let Goal::Cell(_, _, feature) = goal {
                assert!(crate::coverage::has(&config, feature), "{goal:?}");
            }
        }
    }
}
