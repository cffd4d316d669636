//! Goals of directed runs, each with seeds of its own: a cell of the coverage matrix, a kind of
//! fault, an event with which the power fails, or a barrier. The seeds lie beyond all others, so
//! that no other run depends on which goals there are.

use cowslip::qcow2::probe::Stage;

use crate::barriers::Barrier;
use crate::disk::fault::Verb;
use crate::matrix::{FAULTS, FEATURES, Feature, Point, SITUATIONS, Situation, excused, points};
use crate::seeds;

const CELLS: usize = Stage::ALL.len() * SITUATIONS.len() * FEATURES.len();
/// Seeds between two attempts at one goal.
const STRIDE: u64 = 512;

/// The goal of a directed run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// A crash falls on this cell.
    Cell(Stage, Situation, Feature),
    /// Failure of such an operation with this error.
    Fault(Verb, i32),
    /// The power fails with this event.
    Point(Point),
    /// A look at the files that a power failure around this barrier would leave.
    Barrier(Barrier),
}

impl Goal {
    /// All goals, by their numbers; impossible ones too.
    pub fn all() -> Vec<Goal> {
        let mut goals = Vec::with_capacity(CELLS + FAULTS.len());
        for stage in Stage::ALL {
            for (situation, _) in SITUATIONS {
                goals.extend(FEATURES.map(|(feature, _)| Goal::Cell(stage, situation, feature)));
            }
        }
        goals.extend(FAULTS.map(|(verb, errno)| Goal::Fault(verb, errno)));
        goals.extend(points().map(Goal::Point));
        goals.extend(Barrier::ALL.map(Goal::Barrier));
        assert!(
            goals.len() <= STRIDE as usize,
            "each goal has seeds of its own"
        );
        goals
    }

    /// The goal of a directed seed; none if another run stands for it.
    pub fn of(seed: u64) -> Option<Goal> {
        let directed = seeds::DIRECTED..seeds::STORIES;
        let number = directed.contains(&seed).then(|| seed - seeds::DIRECTED)? % STRIDE;
        Goal::all().get(number as usize).copied()
    }

    /// Whether a run can reach it.
    pub fn is_possible(self) -> bool {
        match self {
            Goal::Cell(stage, situation, feature) => excused(stage, situation, feature).is_none(),
            Goal::Fault(..) | Goal::Point(_) | Goal::Barrier(_) => true,
        }
    }
}

/// The seed of an attempt at the goal of this number.
pub fn seed(goal: usize, attempt: u64) -> u64 {
    seeds::DIRECTED + attempt * STRIDE + goal as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_goal_has_seeds_of_its_own_that_say_which_it_is() {
        for (number, goal) in Goal::all().into_iter().enumerate() {
            for attempt in [0, 1, 77] {
                assert_eq!(Goal::of(seed(number, attempt)), Some(goal));
            }
        }
        assert_eq!(Goal::of(0), None);
        assert_eq!(Goal::of(seeds::DIRECTED - 1), None);
    }
}
