//! Where the crashes and faults of a run fell: write-back stage by what else was going on by what
//! kind of image it was. An empty cell is a place that nobody has looked at.

use std::collections::BTreeMap;

use cowslip::qcow2::probe::{Observation, Stage};

use crate::barriers::Barrier;
use crate::config::{Config, Data, Kind};
use crate::disk::Moment;
use crate::disk::fault::{EIO, ENOSPC, Verb};
use crate::goals::Goal;
use crate::matrix::{
    FAULTS, FEATURES, Feature, Phase, Point, SITUATIONS, Situation, Target, excused, impossible,
    points, rare, stage_name,
};
use crate::profile::Profile;
use crate::rng::Rng;

const STAGES: usize = Stage::ALL.len();

impl Target {
    /// The place that a directed run is aimed at, and the first event there or one of the next.
    pub fn of(config: &Config, rng: &mut Rng) -> Option<Target> {
        let Profile::Directed(Goal::Cell(stage, situation, _)) = config.profile else {
            return None;
        };
        let situation = match situation {
            // That is so by where the aim is taken.
            Situation::Recovery => Situation::Any,
            _ => situation,
        };
        let skip = match stage {
            Stage::Idle => rng.below(60),
            Stage::CountBlocks | Stage::CountTable if situation == Situation::Joiner => 0,
            _ => rng.pick(&[0, 0, 0, 1, 2, 4]),
        };
        Some(Target {
            stage,
            situation,
            skip,
            events: 1,
        })
    }

    /// A place that this run can reach.
    pub fn draw(config: &Config, rng: &mut Rng) -> Target {
        let can = |stage, situation| {
            let fits = match situation {
                Situation::RefcountTable => config.crammed.is_some(),
                Situation::L1Table => config.created_bytes < config.size,
                Situation::Snapshot => config.rounds.iter().any(|r| r.snapshots_percent > 0),
                Situation::Recovery => false,
                _ => true,
            };
            let mut features = FEATURES.iter();
            fits && features.all(|(feature, _)| {
                !has(config, *feature) || excused(stage, situation, *feature).is_none()
            })
        };
        let mut places = Vec::new();
        for stage in Stage::ALL {
            let situations = SITUATIONS.iter().map(|(situation, _)| *situation);
            let situations: Vec<_> = situations.filter(|s| can(stage, *s)).collect();
            if !situations.is_empty() {
                places.push((stage, situations));
            }
        }
        let (stage, situations) = rng.pick(&places);
        Target {
            stage,
            situation: rng.pick(&situations),
            skip: 0,
            events: rng.between(1, 4),
        }
    }
}

/// Key of a fault table: operation, error, file.
type FaultKey = (&'static str, &'static str, &'static str);

/// An axis and a value of it.
pub(crate) type Drawn = (&'static str, String);

/// Where the crashes and faults of some runs fell, and what was drawn.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    cells: [[[u64; FEATURES.len()]; SITUATIONS.len()]; STAGES],
    faults: BTreeMap<FaultKey, [u64; STAGES]>,
    points: BTreeMap<(Phase, Moment, &'static str), u64>,
    drawn: BTreeMap<Drawn, u64>,
    /// Looks at barriers that runs were aimed at.
    barriers: BTreeMap<Barrier, u64>,
}

/// Whether a disk has the feature.
pub(crate) fn has(config: &Config, feature: Feature) -> bool {
    let tiny = config.layout.cluster_bits == 9 && config.alignment_bytes == 4096;
    let compressed = config.rounds.iter().any(|round| round.weights[5] > 0);
    match feature {
        Feature::Extended => config.layout.extended_l2,
        Feature::Compressed => compressed,
        Feature::DataFile => config.data != Data::Inside,
        Feature::Tiny => tiny,
        Feature::Plain => FEATURES[1..].iter().all(|(other, _)| !has(config, *other)),
    }
}

/// State of the image when something happened to it.
#[derive(Clone, Copy, Debug)]
pub struct Sight {
    /// The engine's own view.
    pub observed: Observation,
    /// A hole is not durable.
    pub hole_at_risk: bool,
    /// The session has not recovered from the crash before it yet.
    pub recovering: bool,
}

impl Sight {
    /// Whether something was so.
    pub fn is(&self, situation: Situation) -> bool {
        match situation {
            Situation::Any => true,
            Situation::Quarantine => self.observed.quarantined > 0,
            Situation::RefcountTable => self.observed.refcount_table_moved,
            Situation::L1Table => self.observed.l1_table_moved,
            Situation::Snapshot => self.observed.snapshots_change,
            Situation::Eviction => self.observed.evicted > 0,
            Situation::Joiner => self.observed.joined > 0,
            Situation::Punch => self.hole_at_risk,
            Situation::Recovery => self.recovering,
        }
    }

    /// Whether it counts for the matrix. Three of its impossible cells have exceptions, at which no
    /// run aims. A change of snapshots has one barrier for counts, tables and flags, so a hole of
    /// the cycle before it may still be at risk at the flags. New refcount blocks and their entries
    /// may be durable by themselves, so a hole that a compaction has punched before may be at risk
    /// then. A file that lies far out, for the sake of another goal, may need entries of the
    /// refcount table while a hole is punched in place.
    fn counts(&self, situation: Situation, feature: Feature) -> bool {
        let excepted = match (self.observed.stage, feature) {
            (Stage::Slices, Feature::Tiny) => self.observed.snapshots_change,
            (Stage::CountTable, Feature::Extended | Feature::Tiny) => true,
            _ => false,
        };
        !(excepted && situation == Situation::Punch)
    }
}

/// Says which part of a sight is impossible, and why.
pub fn contradiction(config: &Config, sight: &Sight) -> Option<String> {
    let stage = sight.observed.stage;
    for (situation, name) in SITUATIONS.iter().filter(|(s, _)| sight.is(*s)) {
        let has = |feature| has(config, feature) && sight.counts(*situation, feature);
        for (feature, of) in FEATURES.iter().filter(|(f, _)| has(*f)) {
            if let Some(why) = impossible(stage, *situation, *feature) {
                let stage = stage_name(stage);
                return Some(format!("{stage} x {name} x {of} was reached, but {why}"));
            }
        }
    }
    None
}

impl Coverage {
    /// Whether a goal has been reached.
    pub fn has_reached(&self, goal: Goal) -> bool {
        match goal {
            Goal::Cell(stage, situation, feature) => {
                let situation = SITUATIONS.iter().position(|(s, _)| *s == situation);
                let feature = FEATURES.iter().position(|(f, _)| *f == feature);
                let places = situation.zip(feature);
                places.is_some_and(|(s, f)| self.cells[stage as usize][s][f] > 0)
            }
            Goal::Fault(verb, errno) => {
                let names = (verb_name(verb), errno_name(errno));
                self.faults.keys().any(|key| (key.0, key.1) == names)
            }
            Goal::Point((phase, verb, moment)) => {
                let key = (phase, moment, verb_name(verb));
                self.points.contains_key(&key)
            }
            Goal::Barrier(barrier) => self.barriers.contains_key(&barrier),
        }
    }

    /// Wanted values that no run has drawn.
    pub(crate) fn undrawn(&self) -> Vec<Drawn> {
        let wanted = wanted_axes().into_iter();
        wanted.filter(|value| !self.has_drawn(value)).collect()
    }

    /// Whether a run has drawn a value.
    pub(crate) fn has_drawn(&self, value: &Drawn) -> bool {
        self.drawn.contains_key(value)
    }

    /// A crash fell here.
    pub fn crash(&mut self, config: &Config, sight: &Sight) {
        let stage = &mut self.cells[sight.observed.stage as usize];
        for (cells, (situation, _)) in stage.iter_mut().zip(SITUATIONS) {
            for (cell, (feature, _)) in cells.iter_mut().zip(FEATURES) {
                let is_there = sight.is(situation) && sight.counts(situation, feature);
                *cell += u64::from(is_there && has(config, feature));
            }
        }
    }

    /// The power failed with this event.
    pub fn point(&mut self, (phase, verb, moment): Point) {
        let key = (phase, moment, verb_name(verb));
        *self.points.entry(key).or_default() += 1;
    }

    /// A fault was delivered here.
    pub fn fault(&mut self, stage: Stage, (verb, errno): (Verb, i32), file: Option<&'static str>) {
        let key = (
            verb_name(verb),
            errno_name(errno),
            file.unwrap_or("any file"),
        );
        self.faults.entry(key).or_default()[stage as usize] += 1;
    }

    /// Counts looks at the loss of structures around a barrier.
    pub(crate) fn barrier(&mut self, barrier: Barrier, looks: u64) {
        if looks > 0 {
            *self.barriers.entry(barrier).or_default() += looks;
        }
    }

    /// A run was drawn.
    pub fn draw(&mut self, config: &Config) {
        for key in axes(config) {
            *self.drawn.entry(key).or_default() += 1;
        }
    }

    /// Adds those of other runs.
    pub fn add(&mut self, other: &Coverage) {
        let cells = self.cells.as_flattened_mut().as_flattened_mut();
        let others = other.cells.as_flattened().as_flattened();
        for (cell, more) in cells.iter_mut().zip(others) {
            *cell += more;
        }
        for (key, stages) in &other.faults {
            let counts = self.faults.entry(*key).or_default();
            for (count, more) in counts.iter_mut().zip(stages) {
                *count += more;
            }
        }
        for (key, more) in &other.points {
            *self.points.entry(*key).or_default() += more;
        }
        for (key, more) in &other.drawn {
            *self.drawn.entry(key.clone()).or_default() += more;
        }
        for (barrier, more) in &other.barriers {
            self.barrier(*barrier, *more);
        }
    }

    /// Returns all cells, each with its count and why it must be empty, if it must.
    fn each(&self) -> impl Iterator<Item = (Stage, usize, usize, u64, Option<&'static str>)> {
        let places = Stage::ALL.into_iter().flat_map(|stage| {
            let of_stage = (0..SITUATIONS.len())
                .flat_map(move |situation| (0..FEATURES.len()).map(move |f| (situation, f)));
            of_stage.map(move |(situation, feature)| (stage, situation, feature))
        });
        places.map(|(stage, situation, feature)| {
            let count = self.cells[stage as usize][situation][feature];
            let why = excused(stage, SITUATIONS[situation].0, FEATURES[feature].0);
            (stage, situation, feature, count, why)
        })
    }

    /// Lists gaps that a run of sufficient size must not have: cells that are empty and could be
    /// hit, cells that were hit and could not be, kinds of faults and of images that never came.
    pub fn gaps(&self) -> Vec<String> {
        let mut gaps = Vec::new();
        for (stage, situation, feature, count, why) in self.each() {
            let name = format!(
                "{} x {} x {}",
                stage_name(stage),
                SITUATIONS[situation].1,
                FEATURES[feature].1
            );
            match (count, why) {
                (0, None) => gaps.push(format!("no crash fell on {name}")),
                (1.., Some(why))
                    if rare(stage, SITUATIONS[situation].0, FEATURES[feature].0).is_none() =>
                {
                    gaps.push(format!("{count} crashes fell on {name}, but {why}"));
                }
                _ => {}
            }
        }
        for (verb, errno) in FAULTS {
            if !self.has_reached(Goal::Fault(verb, errno)) {
                let (verb, errno) = (verb_name(verb), errno_name(errno));
                gaps.push(format!("no {verb} failed with {errno}"));
            }
        }
        for point in points().filter(|point| !self.has_reached(Goal::Point(*point))) {
            let (phase, verb, moment) = (point.0, verb_name(point.1), point.2);
            gaps.push(format!(
                "no power failure with the {moment:?} of a {verb}, {phase:?}"
            ));
        }
        let all = Barrier::ALL.into_iter();
        for barrier in all.filter(|barrier| !self.has_reached(Goal::Barrier(*barrier))) {
            gaps.push(format!("nothing was lost around the barrier {barrier:?}"));
        }
        let undrawn = self.undrawn().into_iter();
        gaps.extend(undrawn.map(|(axis, value)| format!("no run had {axis} {value}")));
        gaps
    }

    /// Tables for people.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for (index, (feature, name)) in FEATURES.iter().enumerate() {
            text += &format!("\n{name:<16}");
            for stage in Stage::ALL {
                text += &format!("{:>12}", stage_name(stage));
            }
            text.push('\n');
            for (row, (situation, name)) in SITUATIONS.iter().enumerate() {
                text += &format!("  {name:<14}");
                for stage in Stage::ALL {
                    let count = self.cells[stage as usize][row][index];
                    match excused(stage, *situation, *feature) {
                        Some(_) if count == 0 => text.push_str("           ."),
                        _ => {
                            text += &format!("{count:>12}");
                        }
                    }
                }
                text.push('\n');
            }
        }
        text += &format!("\n{:<34}", "faults");
        for stage in Stage::ALL {
            text += &format!("{:>12}", stage_name(stage));
        }
        for ((verb, errno, file), stages) in &self.faults {
            text += &format!("\n  {:<32}", format!("{verb} {errno}, {file}"));
            for count in stages {
                text += &format!("{count:>12}");
            }
        }
        text.push_str("\n\npower failures with");
        let mut last = None;
        for ((phase, moment, verb), count) in &self.points {
            if last.replace((phase, moment)) != Some((phase, moment)) {
                text += &format!("\n  {phase:?}, {moment:?}:");
            }
            text += &format!(" {verb} {count},");
        }
        text.push_str("\n\nlooks around barriers");
        for (barrier, count) in &self.barriers {
            text += &format!("\n  {barrier:?} {count}");
        }
        text.push_str("\n\ndrawn");
        let mut axis = "";
        for ((name, value), count) in &self.drawn {
            if axis != *name {
                axis = name;
                text += &format!("\n  {name}:");
            }
            text += &format!(" {value} {count},");
        }
        text.push('\n');
        text
    }

    /// The same as JSON: members of an object, without its braces.
    pub fn json(&self) -> String {
        let mut text = "\"cells\":[".to_string();
        for (stage, situation, feature, count, why) in self.each() {
            let why = why.map_or(String::new(), |why| format!(",\"impossible\":\"{why}\""));
            text += &format!(
                "{{\"stage\":\"{}\",\"situation\":\"{}\",\"feature\":\"{}\",\"crashes\":{count}{why}}},",
                stage_name(stage),
                SITUATIONS[situation].1,
                FEATURES[feature].1,
            );
        }
        text.truncate(text.trim_end_matches(',').len());
        text.push_str("],\"faults\":[");
        for ((verb, errno, file), stages) in &self.faults {
            for (stage, count) in Stage::ALL.iter().zip(stages) {
                let stage = stage_name(*stage);
                text += &format!(
                    "{{\"verb\":\"{verb}\",\"errno\":\"{errno}\",\"file\":\"{file}\",\"stage\":\"{stage}\",\"count\":{count}}},"
                );
            }
        }
        text.truncate(text.trim_end_matches(',').len());
        text.push_str("],\"power_failures\":[");
        for ((phase, moment, verb), count) in &self.points {
            text += &format!(
                "{{\"phase\":\"{phase:?}\",\"moment\":\"{moment:?}\",\"verb\":\"{verb}\",\"count\":{count}}},"
            );
        }
        text.truncate(text.trim_end_matches(',').len());
        text.push_str("],\"drawn\":[");
        for ((axis, value), count) in &self.drawn {
            text += &format!("{{\"axis\":\"{axis}\",\"value\":\"{value}\",\"runs\":{count}}},");
        }
        text.truncate(text.trim_end_matches(',').len());
        text.push(']');
        text
    }
}

fn verb_name(verb: Verb) -> &'static str {
    match verb {
        Verb::Read => "read",
        Verb::Write => "write",
        Verb::DurableWrite => "durable write",
        Verb::CountWrite => "write of counts",
        Verb::L1Write => "write of L1",
        Verb::Zero => "zero",
        Verb::Discard => "punch",
        Verb::Allocate => "allocate",
        Verb::Flush => "flush",
        Verb::SetLen => "set_len",
        Verb::Query => "query",
    }
}

fn errno_name(errno: i32) -> &'static str {
    match errno {
        EIO => "EIO",
        ENOSPC => "ENOSPC",
        _ => "another error",
    }
}

/// Returns the values that were drawn for a run, one of each axis.
fn axes(config: &Config) -> Vec<Drawn> {
    let layout = &config.layout;
    if config.kind != Kind::Qcow2 {
        return Vec::new();
    }
    let entries = if layout.extended_l2 {
        "clusters, extended L2"
    } else {
        "clusters"
    };
    let mut axes = vec![
        (entries, layout.cluster_bytes().to_string()),
        ("refcount bits", layout.refcount_bits.to_string()),
        ("version", layout.version.to_string()),
        ("alignment", config.alignment_bytes.to_string()),
        ("data", format!("{:?}", config.data)),
        ("preallocation", format!("{:?}", config.preallocation)),
        ("layers below", config.below.len().to_string()),
        ("allocates", format!("{:?}", config.allocates)),
        ("pace", format!("{:?}", config.pace)),
        ("punches holes", config.punches_holes.to_string()),
        ("zeroes fast", config.zeroes_fast.to_string()),
    ];
    axes.extend(config.rounds.iter().flat_map(|round| {
        let slices = round.cache_bytes / layout.cluster_bytes().min(4096);
        let cache = match slices {
            0 => "default".to_string(),
            1..=8 => format!("{slices} slices"),
            _ => "1 MiB".to_string(),
        };
        [
            ("cache", cache),
            ("discard", format!("{:?}", round.discard)),
            ("allocation", format!("{:?}", round.alloc_policy)),
            ("write policy", format!("{:?}", round.write_policy)),
            ("depth", round.depth.to_string()),
            ("resizes", round.resizes.to_string()),
            ("VM state", format!("{} %", round.vm_state_percent)),
            ("allocations", format!("{} %", round.allocates_percent)),
            ("compactions", format!("{} %", round.compacts_percent)),
            ("maintained", round.maintained.to_string()),
            ("durable writes", format!("{} %", round.fua_percent)),
        ]
    }));
    axes.sort();
    axes.dedup();
    axes
}

/// Values of axes that a run of sufficient size must have drawn.
fn wanted_axes() -> Vec<Drawn> {
    let clusters = (9..=21).map(|bits| ("clusters", (1u64 << bits).to_string()));
    let extended = (14..=21).map(|bits| ("clusters, extended L2", (1u64 << bits).to_string()));
    let counts = [1, 2, 4, 8, 16, 32, 64].map(|bits| ("refcount bits", bits.to_string()));
    let alignments = [1, 512, 4096].map(|bytes| ("alignment", bytes.to_string()));
    let slices = (1..=8).map(|slices| ("cache", format!("{slices} slices")));
    clusters
        .chain(extended)
        .chain(counts)
        .chain(alignments)
        .chain(slices)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sight(stage: Stage) -> Sight {
        Sight {
            observed: Observation {
                stage,
                quarantined: 1,
                joined: 0,
                evicted: 0,
                refcount_table_moved: false,
                l1_table_moved: false,
                snapshots_change: false,
            },
            hole_at_risk: false,
            recovering: true,
        }
    }

    #[test]
    fn a_change_of_snapshots_has_no_barrier_before_its_flags() {
        let mut config = Config::draw(1, Kind::Qcow2);
        (config.layout.cluster_bits, config.alignment_bytes) = (9, 4096);
        config.data = Data::Inside;
        let mut seen = sight(Stage::Slices);
        seen.hole_at_risk = true;
        assert!(contradiction(&config, &seen).is_some());
        seen.observed.snapshots_change = true;
        assert_eq!(contradiction(&config, &seen), None);
    }

    #[test]
    fn gaps_are_empty_cells_that_could_be_hit_and_hits_that_could_not_be() {
        let mut config = Config::draw(1, Kind::Qcow2);
        config.data = Data::External;
        let mut coverage = Coverage::default();
        let before = coverage.gaps();
        let gap = "no crash fell on B:L2 x recovery x data file".to_string();
        assert!(before.contains(&gap));
        let impossible = |gap: &String| gap.contains("snapshot x data file");
        assert!(!before.iter().any(impossible));
        let mut seen = sight(Stage::Slices);
        seen.observed.snapshots_change = true;
        coverage.crash(&config, &seen);
        let after = coverage.gaps();
        assert!(!after.contains(&gap));
        let odd = "1 crashes fell on B:L2 x snapshot x data file, but";
        assert!(after.iter().any(|gap| gap.starts_with(odd)));
        let mut twice = coverage.clone();
        twice.add(&coverage);
        assert!(twice.describe().contains("recovery"));
        assert!(
            twice
                .json()
                .contains("\"situation\":\"recovery\",\"feature\":\"data file\",\"crashes\":2")
        );
    }
}
