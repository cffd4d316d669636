//! The mixture of runs that a soak makes, the gate makes, and planted mistakes meet: half of them
//! are drawn, an eighth is directed at one goal after the other, an eighth at one barrier after the
//! other, a quarter tells stories, after every sixteenth comes one about chains, half way between
//! these one about raw disks, and after every eighth one about graphs.

use crate::goals::{self, Goal};
use crate::graph;
use crate::rng::Rng;
use crate::seeds;
use crate::stories;

/// Runs by their numbers.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// The numbers of all goals that a run can reach, in an order in which neighbours differ.
    goals: Vec<usize>,
    /// The numbers of those that are barriers.
    barriers: Vec<usize>,
}

impl Default for Mixture {
    fn default() -> Mixture {
        let goals = Goal::all();
        let possible = (0..goals.len()).filter(|number| goals[*number].is_possible());
        let is_barrier = |number: &usize| matches!(goals[*number], Goal::Barrier(_));
        let (barriers, mut numbers): (Vec<usize>, Vec<usize>) = possible.partition(is_barrier);
        Rng::derived(0, "spread", 0).shuffle(&mut numbers);
        Mixture {
            goals: numbers,
            barriers,
        }
    }
}

impl Mixture {
    /// The seeds of a run: its own, and now and then one about chains, raw disks or graphs.
    pub fn seeds(&self, run: u64) -> impl Iterator<Item = u64> + use<> {
        let more = match run % 16 {
            15 => Some(seeds::CHAINS + run / 16),
            7 => Some(seeds::RAW + run / 16),
            3 | 11 => Some(graph::FIRST_SEED + run / 8),
            _ => None,
        };
        std::iter::once(self.seed(run)).chain(more)
    }

    fn seed(&self, run: u64) -> u64 {
        let quarter = run / 4;
        match run % 4 {
            0 => 2 * quarter,
            1 => {
                let goals = match quarter % 2 {
                    0 => &self.goals,
                    _ => &self.barriers,
                };
                let (eighth, count) = (quarter / 2, goals.len() as u64);
                goals::seed(goals[(eighth % count) as usize], eighth / count)
            }
            2 => 2 * quarter + 1,
            _ => stories::seed(quarter),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stories::Story;
    use std::collections::BTreeSet;

    #[test]
    fn no_run_is_made_twice_and_all_kinds_are() {
        let mixture = Mixture::default();
        let count = 8 * mixture.goals.len() as u64;
        let seeds: Vec<u64> = (0..count).flat_map(|run| mixture.seeds(run)).collect();
        let different: BTreeSet<u64> = seeds.iter().copied().collect();
        assert_eq!(different.len(), seeds.len());
        let goals = seeds.iter().filter(|seed| Goal::of(**seed).is_some());
        assert_eq!(goals.count() as u64, count / 4);
        let stories: Vec<Story> = seeds.iter().filter_map(|seed| Story::of(*seed)).collect();
        assert_eq!(stories.len() as u64, count / 4);
        assert!(Story::all().all(|story| stories.contains(&story)));
        for first in [seeds::CHAINS, seeds::RAW] {
            let others = seeds
                .iter()
                .filter(|seed| (first..first + count).contains(seed));
            assert_eq!(others.count() as u64, count / 16);
        }
        let graphs = seeds.iter().filter(|seed| **seed >= graph::FIRST_SEED);
        assert_eq!(graphs.count() as u64, count / 8);
    }
}
