//! The mixture of runs that a soak makes, the gate makes, and planted mistakes meet: half of them are
//! drawn, a quarter is directed at one goal after the other, a quarter tells stories, and after every
//! sixteenth comes one about chains.

use crate::chains;
use crate::directed::{self, Goal};
use crate::rng::Rng;
use crate::stories;

/// Runs by their numbers.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// The numbers of all goals that a run can reach, in an order in which neighbours differ.
    goals: Vec<usize>,
}

impl Default for Mixture {
    fn default() -> Mixture {
        let goals = Goal::all();
        let mut numbers: Vec<usize> = (0..goals.len())
            .filter(|number| goals[*number].is_possible())
            .collect();
        Rng::derived(0, "spread", 0).shuffle(&mut numbers);
        Mixture { goals: numbers }
    }
}

impl Mixture {
    /// The seeds of a run: its own, and now and then one about chains.
    pub fn seeds(&self, run: u64) -> impl Iterator<Item = u64> + use<> {
        let of_chains = (run % 16 == 15).then_some(chains::FIRST_SEED + run / 16);
        std::iter::once(self.seed(run)).chain(of_chains)
    }

    fn seed(&self, run: u64) -> u64 {
        let (quarter, count) = (run / 4, self.goals.len() as u64);
        match run % 4 {
            0 => 2 * quarter,
            1 => directed::seed(self.goals[(quarter % count) as usize], quarter / count),
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
        let count = 4 * mixture.goals.len() as u64;
        let seeds: Vec<u64> = (0..count).flat_map(|run| mixture.seeds(run)).collect();
        let different: BTreeSet<u64> = seeds.iter().copied().collect();
        assert_eq!(different.len(), seeds.len());
        let goals = seeds.iter().filter(|seed| Goal::of(**seed).is_some());
        assert_eq!(goals.count() as u64, count / 4);
        let told: Vec<Story> = seeds.iter().filter_map(|seed| Story::of(*seed)).collect();
        assert_eq!(told.len() as u64, count / 4);
        assert!(Story::all().all(|story| told.contains(&story)));
        let of_chains = seeds.iter().filter(|seed| **seed >= chains::FIRST_SEED);
        assert_eq!(of_chains.count() as u64, count / 16);
    }
}
