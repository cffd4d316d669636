//! Stories: situations in which a write path that has the order of its steps wrong does damage,
//! each brought about on purpose. Their seeds lie beyond those of directed runs, and the disk that
//! loses power in them is out for trouble: it likes to keep what came last and to lose what that
//! builds on.

use cowslip::qcow2::probe::Stage;

use crate::disk::Moment;
use crate::disk::fault::Verb;
use crate::matrix::{Phase, Situation, Target};
use crate::rng::Rng;
use crate::seeds;

mod later;
mod shape;

pub(crate) use shape::shape;

/// Runs of each story in a soak.
const RUNS: u64 = 10;

/// The events of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Story {
    /// Refcount blocks are added to the table that there is, and the power fails as they become
    /// reachable.
    BlocksAdded,
    /// Counts or L1 entries cannot be written for want of space; the next cycle has only the rest
    /// to write, and then the power fails.
    CountsFail,
    /// Tables that a snapshot shares are copied beside cycles, by requests that end within them.
    TablesCopied,
    /// A shrinking is cut short by the power, and the disk grows again in the next session.
    ShrinkCutShort,
    /// A durable write fails among others that are acknowledged, and flushes.
    DurableWriteFails,
    /// Dirty images, whose repairs are crashed around their flushes.
    RepairCutShort,
    /// Compressed clusters find no space, and the image is closed in order.
    CompressedFails,
    /// Writes of parts of new space fail, and zeroes and writes come after them in the same
    /// subclusters.
    PartsFail,
    /// A process dies between writes and their flush, and durable writes of the next one build on
    /// what it left.
    BuiltOnSand,
    /// Holes in clusters that stay mapped come late, and writes want the same subclusters, or the
    /// cluster is given up, meanwhile.
    HolesLate,
    /// Few writes between flushes, into space whose zeroes are young.
    FlushedOften,
    /// Snapshots are taken, applied and deleted, and the power fails meanwhile.
    SnapshotsCutShort,
    /// Bitmaps follow writes, are changed between them, and the power fails as they are stored.
    BitmapsCutShort,
    /// Bitmaps are changed while slow writes are under way, and what these write is read.
    BitmapsUnderWrites,
    /// Bitmaps whose tables and bits have many pieces.
    BitmapsInPieces,
    /// Durable writes go over many tables, of which few fit into the cache, and only their last
    /// parts are in place.
    DurableWritesLong,
    /// Disks with raw data files shrink and grow, and the power fails as they do.
    DataFilesCut,
    /// New tables come to lie where others had their data, in cycles that have nothing else to
    /// order.
    TablesOnUsedSpace,
    /// The L1 table and the refcount table move, tables come into being and are copied, snapshots
    /// come and go.
    RootsMove,
    /// Refcount blocks are added one after the other, and their table moves.
    CountsGrow,
    /// Encrypted images, under requests that are not aligned to sectors, with snapshots.
    Encrypted,
    /// Disks whose refcount blocks count little shrink and grow, and the power fails as blocks are
    /// dropped.
    BlocksDropped,
}

impl Story {
    /// The stories with seeds from [`seeds::STORIES`] on.
    pub const ALL: [Story; 13] = [
        Story::BlocksAdded,
        Story::CountsFail,
        Story::TablesCopied,
        Story::ShrinkCutShort,
        Story::DurableWriteFails,
        Story::RepairCutShort,
        Story::CompressedFails,
        Story::PartsFail,
        Story::BuiltOnSand,
        Story::HolesLate,
        Story::FlushedOften,
        Story::SnapshotsCutShort,
        Story::BitmapsCutShort,
    ];

    /// The stories with seeds from [`seeds::LATER_STORIES`] on.
    pub const LATER: [Story; 9] = [
        Story::BitmapsUnderWrites,
        Story::BitmapsInPieces,
        Story::DurableWritesLong,
        Story::DataFilesCut,
        Story::TablesOnUsedSpace,
        Story::RootsMove,
        Story::CountsGrow,
        Story::Encrypted,
        Story::BlocksDropped,
    ];

    /// All of either kind.
    pub fn all() -> impl Iterator<Item = Story> {
        Story::ALL.into_iter().chain(Story::LATER)
    }

    /// Returns the story of a seed, if it has one.
    pub fn of(seed: u64) -> Option<Story> {
        let (stories, number) = match seed {
            seeds::LATER_STORIES..seeds::CHAINS => (&Story::LATER[..], seed - seeds::LATER_STORIES),
            seeds::STORIES..seeds::LATER_STORIES => (&Story::ALL[..], seed - seeds::STORIES),
            _ => return None,
        };
        Some(stories[(number % stories.len() as u64) as usize])
    }

    fn is_later(self) -> bool {
        Story::LATER.contains(&self)
    }

    /// Where the power fails.
    pub(crate) fn target(self, rng: &mut Rng) -> Option<Target> {
        let (stage, skip, events) = match self {
            Story::BlocksAdded => (Stage::CountTable, rng.below(30), rng.between(1, 5)),
            Story::TablesCopied => {
                let stage = rng.pick(&[Stage::Release, Stage::Raise, Stage::Slices, Stage::Idle]);
                (stage, rng.below(60), rng.between(1, 3))
            }
            Story::SnapshotsCutShort => {
                let stages = [
                    Stage::Raise,
                    Stage::Slices,
                    Stage::Roots,
                    Stage::Lower,
                    Stage::Release,
                ];
                (rng.pick(&stages), rng.below(40), rng.between(1, 6))
            }
            _ => return None,
        };
        Some(Target {
            stage,
            situation: match self {
                Story::SnapshotsCutShort => Situation::Snapshot,
                _ => Situation::Any,
            },
            skip,
            events,
        })
    }

    /// The event in this phase of a session with which the power fails.
    pub(crate) fn event(
        self,
        phase: Phase,
        index: usize,
        rng: &mut Rng,
    ) -> Option<(Verb, Moment, u64)> {
        let verb = rng.pick(&[Verb::Write, Verb::Flush, Verb::Flush]);
        let moment = rng.pick(&[Moment::Issue, Moment::Completion]);
        // Some shrinkings end in order.
        if self == Story::ShrinkCutShort && rng.chance(30) {
            return None;
        }
        let most = match (self, phase, index) {
            (Story::ShrinkCutShort, Phase::Resize, 0) => 4,
            // The last write is that of the header.
            (Story::RepairCutShort, Phase::Opening, _) if verb == Verb::Write => 4,
            (Story::RepairCutShort, Phase::Opening, _) => 7,
            (Story::BitmapsCutShort, Phase::Closing, _) => 12,
            _ => return None,
        };
        Some((verb, moment, rng.between(1, most)))
    }

    /// Percent of the flushes of a session at which it is looked what a power failure would leave,
    /// and how many looks there are at most.
    pub(crate) fn looks(self) -> (u64, u64) {
        match self.is_later() {
            true => (80, 30),
            false => (60, 20),
        }
    }

    /// Openings that the power ends, before one that it does not.
    pub(crate) fn broken_openings(self) -> usize {
        match self {
            Story::RepairCutShort => 3,
            _ => 0,
        }
    }
}

/// The seeds of stories, one of either kind after the other.
pub(crate) fn seed(number: u64) -> u64 {
    let first = if number.is_multiple_of(2) {
        seeds::STORIES
    } else {
        seeds::LATER_STORIES
    };
    first + number / 2
}

/// Seeds for some runs of each story.
pub(crate) fn seeds(attempt: u64) -> Vec<u64> {
    let of = |first: u64, stories: usize| {
        let count = RUNS * stories as u64;
        (0..count).map(move |run| first + attempt * count + run)
    };
    let later = of(seeds::LATER_STORIES, Story::LATER.len());
    of(seeds::STORIES, Story::ALL.len()).chain(later).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Kind};
    use crate::profile::Profile;

    #[test]
    fn seeds_from_there_on_are_one_story_after_the_other() {
        assert_eq!(Story::of(seeds::STORIES - 1), None);
        assert_eq!(Story::of(seeds::CHAINS), None);
        let kinds = [
            (seeds::STORIES, &Story::ALL[..]),
            (seeds::LATER_STORIES, &Story::LATER[..]),
        ];
        for (first, stories) in kinds {
            for (number, story) in (0..).zip(stories) {
                let seed = first + stories.len() as u64 + number;
                assert_eq!(Story::of(seed), Some(*story));
                let config = Config::draw(seed, Kind::Qcow2);
                assert_eq!(config.profile, Profile::Story(*story));
            }
        }
    }
}
