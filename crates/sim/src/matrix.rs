//! The places at which crashes and faults fall: write-back stage by what else was going on by what
//! kind of image it was, operations that fail, and events with which the power fails. Which of them
//! nothing can reach, and why.

use cowslip::qcow2::probe::Stage;

use crate::disk::Moment;
use crate::disk::fault::{EIO, ENOSPC, Verb};

/// Activity at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Situation {
    /// Anything.
    Any,
    /// Clusters wait in the quarantine.
    Quarantine,
    /// The refcount table moves or has just moved.
    RefcountTable,
    /// The L1 table moves because the disk grows.
    L1Table,
    /// A snapshot is being made, applied or deleted.
    Snapshot,
    /// A slice of L2 has been evicted since the last cycle.
    Eviction,
    /// Several requests fill one cluster.
    Joiner,
    /// A hole is being punched, or was and is not durable.
    Punch,
    /// The image is being recovered from a crash before.
    Recovery,
}

/// Feature of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// None of the others.
    Plain,
    /// Extended L2 entries.
    Extended,
    /// Compressed writes.
    Compressed,
    /// An external data file.
    DataFile,
    /// Clusters of 512 bytes in a file that asks for 4096.
    Tiny,
}

pub(crate) const SITUATIONS: [(Situation, &str); 9] = [
    (Situation::Any, "any"),
    (Situation::Quarantine, "quarantine"),
    (Situation::RefcountTable, "refcount table"),
    (Situation::L1Table, "L1 growth"),
    (Situation::Snapshot, "snapshot"),
    (Situation::Eviction, "eviction"),
    (Situation::Joiner, "joiner"),
    (Situation::Punch, "punch"),
    (Situation::Recovery, "recovery"),
];

pub(crate) const FEATURES: [(Feature, &str); 5] = [
    (Feature::Plain, "plain"),
    (Feature::Extended, "extended L2"),
    (Feature::Compressed, "compressed"),
    (Feature::DataFile, "data file"),
    (Feature::Tiny, "512 on 4096"),
];

/// The short name of a stage, for tables and traces.
pub fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Idle => "-",
        Stage::CountBlocks => "count-block",
        Stage::CountTable => "count-table",
        Stage::Raise => "A:raise",
        Stage::Slices => "B:L2",
        Stage::Roots => "B:L1+header",
        Stage::Lower => "C:lower",
        Stage::Release => "C:release",
    }
}

/// Why nothing can fall there; `None` if something can.
pub fn impossible(stage: Stage, situation: Situation, feature: Feature) -> Option<&'static str> {
    let follows_barrier = matches!(stage, Stage::Slices | Stage::CountTable);
    match (situation, feature) {
        (Situation::Snapshot, Feature::DataFile) => {
            Some("a snapshot would not contain what is in a data file, so there are none")
        }
        (Situation::Punch, Feature::Tiny) if follows_barrier => Some(
            "holes are punched by the holder of the turn, as no cluster is larger than a block of the host, and a barrier comes before this stage",
        ),
        (Situation::Punch, Feature::Extended) if stage == Stage::CountTable => Some(
            "where subclusters are larger than a block of the host, the refcount table reaches further than files here, but for few that another goal puts at its end",
        ),
        _ => None,
    }
}

/// Why no run is aimed there and none is asked for, though it can fall there by chance.
pub(crate) fn rare(stage: Stage, situation: Situation, feature: Feature) -> Option<&'static str> {
    let opens = matches!(stage, Stage::Lower | Stage::Release);
    let frees = opens || situation == Situation::Quarantine;
    (feature == Feature::DataFile && frees).then_some(
        "clusters of a data file are never freed, and tables only when the disk shrinks: see the stories",
    )
}

/// Why nothing is asked for there; `None` if something is.
pub fn excused(stage: Stage, situation: Situation, feature: Feature) -> Option<&'static str> {
    impossible(stage, situation, feature).or_else(|| rare(stage, situation, feature))
}

/// A place for a crash to fall on, beside those that a number of events finds by chance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Write-back is in this stage.
    pub stage: Stage,
    /// And this is so.
    pub situation: Situation,
    /// Issues and completions to skip there.
    pub skip: u64,
    /// Issues and completions from there on.
    pub events: u64,
}

/// Activity of a run when the power fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Opening the image.
    Opening,
    /// Serving the first requests after an ending, or the flush after them.
    Recovery,
    /// Serving requests.
    Requests,
    /// The disk changes its size.
    Resize,
    /// Closing the image.
    Closing,
}

/// Operations that a phase is sure to have: the power must fail with an issue and a completion of
/// each.
const POINTS: [(Phase, Verb); 18] = [
    (Phase::Opening, Verb::Query),
    (Phase::Opening, Verb::Read),
    (Phase::Recovery, Verb::Read),
    (Phase::Recovery, Verb::Write),
    (Phase::Recovery, Verb::SetLen),
    (Phase::Recovery, Verb::Flush),
    (Phase::Requests, Verb::Read),
    (Phase::Requests, Verb::Write),
    (Phase::Requests, Verb::Zero),
    (Phase::Requests, Verb::Discard),
    (Phase::Requests, Verb::Allocate),
    (Phase::Requests, Verb::SetLen),
    (Phase::Requests, Verb::Flush),
    (Phase::Resize, Verb::Write),
    (Phase::Resize, Verb::Flush),
    (Phase::Closing, Verb::Write),
    (Phase::Closing, Verb::SetLen),
    (Phase::Closing, Verb::Flush),
];

/// An event with which the power fails.
pub type Point = (Phase, Verb, Moment);

/// All that must have been met.
pub(crate) fn points() -> impl Iterator<Item = Point> {
    let both = [Moment::Issue, Moment::Completion];
    POINTS
        .into_iter()
        .flat_map(move |(phase, verb)| both.map(|moment| (phase, verb, moment)))
}

/// Faults that a run of sufficient size must have delivered.
pub(crate) const FAULTS: [(Verb, i32); 13] = [
    (Verb::Query, EIO),
    (Verb::Read, EIO),
    (Verb::Write, EIO),
    (Verb::Write, ENOSPC),
    (Verb::Zero, EIO),
    (Verb::Zero, ENOSPC),
    (Verb::Discard, EIO),
    (Verb::Allocate, EIO),
    (Verb::Allocate, ENOSPC),
    (Verb::Flush, EIO),
    (Verb::Flush, ENOSPC),
    (Verb::SetLen, EIO),
    (Verb::SetLen, ENOSPC),
];
