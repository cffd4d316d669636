//! How a simulated disk behaves: when operations complete, what it breaks, what a power failure
//! takes.

use super::fault::Verb;
use super::structure::{Structure, Structures};
use crate::rng::Rng;

/// How operations are delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// All are due at once.
    Prompt,
    /// Short delays.
    Mixed,
    /// Most are due at once, a few come very late.
    Stragglers,
    /// Reads come late, so that much happens under them.
    SlowReads,
    /// Many reads come so late that a cycle of write-back and more fit under them.
    LateReads,
    /// Writes come late.
    SlowWrites,
    /// Zeroing comes late.
    SlowZeroes,
    /// Holes come late.
    SlowHoles,
}

impl Pace {
    pub(super) fn delay(self, verb: Verb, rng: &mut Rng) -> u64 {
        let slow = match self {
            Pace::Prompt => return 0,
            Pace::Mixed => return rng.below(8),
            Pace::Stragglers => rng.chance(8),
            Pace::SlowReads => verb == Verb::Read && rng.chance(60),
            Pace::LateReads if verb == Verb::Read && rng.chance(50) => return rng.below(800),
            Pace::LateReads => false,
            Pace::SlowWrites => verb == Verb::Write && rng.chance(30),
            Pace::SlowZeroes => verb == Verb::Zero && rng.chance(70),
            Pace::SlowHoles if verb == Verb::Discard && rng.chance(35) => return rng.below(900),
            Pace::SlowHoles => false,
        };
        rng.below(if slow { 400 } else { 3 })
    }
}

/// Ways in which a disk breaks its promise, to prove that the suite can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// None: the disk is honest.
    None,
    /// A flush answers and does nothing.
    FlushDoesNothing,
    /// A flush forgets a fifth of what it should cover.
    FlushForgetsSome,
    /// A durable write is as volatile as others.
    DurableWritesAreNot,
}

/// How it chooses what a power failure takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Losses {
    /// All kinds of losses of caches without power.
    Any,
    /// Losses that show best in which order operations were done.
    Adverse,
    /// All but the writes of one structure: what it builds on is lost.
    AllBut(Structure),
    /// The writes of one structure: what builds on it survives.
    Of(Structure),
}

impl Losses {
    /// The ways to lose writes of one structure, or of all others, where several are at risk.
    pub fn by_structure(at_risk: Structures) -> impl Iterator<Item = Losses> {
        let both = |structure| [Losses::AllBut(structure), Losses::Of(structure)];
        let several = at_risk.iter().nth(1).is_some();
        at_risk.iter().filter(move |_| several).flat_map(both)
    }
}

/// Operations on space that a file allows beyond the engine's capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocates {
    /// `allocate` works.
    Yes,
    /// `allocate` is unsupported.
    No,
}
