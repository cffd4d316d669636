//! Runs about compactions: each session has one that the power, or the end of the process, cuts
//! short, and the next session begins with what it has left.
//!
//! Runs of their own, with seeds from 7 * 2^40 on. All else is as in drawn runs: profiles, layouts,
//! chains, snapshots, bitmaps, ciphers, devices, requests beside the compaction and failures of the
//! disk, want of space more often.

use crate::config::{Config, Ending, Kind};
use crate::disk::fault::{ENOSPC, Verb};
use crate::rng::Rng;
use crate::seeds;
use crate::shapes::some_fail;

/// Issues and completions after which a session ends of which no compaction has.
const EVENTS_MAX: u64 = 1 << 20;

/// The run of a seed: a drawn one, which is about compactions if its seed says so.
pub(crate) fn config_of(seed: u64, kind: Kind) -> Config {
    let mut config = Config::draw(seed, kind);
    if seed >= seeds::COMPACTIONS && kind == Kind::Qcow2 {
        shape(&mut config, seed);
    }
    config
}

/// Shapes a drawn configuration.
fn shape(config: &mut Config, seed: u64) {
    let rng = &mut Rng::derived(seed, "cut short", 0);
    let drawn = config.rounds.clone();
    config.rounds = drawn
        .into_iter()
        .cycle()
        .take(rng.between(6, 12) as usize)
        .collect();
    for round in &mut config.rounds {
        round.requests = rng.pick(&[20, 60, 120]);
        round.depth = rng.pick(&[1, 2, 4, 8, 16]);
        round.compacts_percent = rng.pick(&[4, 8, 15]);
        round.cut_short = Some(rng.bits());
        round.ending = match rng.chance(10) {
            true => Ending::Kill(EVENTS_MAX),
            false => Ending::Crash(EVENTS_MAX),
        };
        round.barrier = None;
        // So that there is something to move, and room for it.
        round.weights[1] = round.weights[1].max(20);
        round.weights[3] = round.weights[3].max(10);
        if round.faults.is_empty() && rng.chance(15) {
            let verb = rng.pick(&[Verb::Write, Verb::Write, Verb::Allocate, Verb::SetLen]);
            let among = rng.pick(&[60, 200, 600]);
            round.faults = some_fail(rng, (verb, ENOSPC), among);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::perform::run;
    use crate::run::Changes;
    use crate::totals::Totals;
    use crate::trace::Trace;

    #[test]
    fn each_session_is_to_be_cut_short_elsewhere() {
        let seeds = seeds::COMPACTIONS..seeds::COMPACTIONS + 50;
        let configs = seeds.map(|seed| config_of(seed, Kind::Qcow2));
        let rounds: Vec<_> = configs.flat_map(|config| config.rounds).collect();
        let places: BTreeSet<_> = rounds.iter().map(|round| round.cut_short).collect();
        assert!(rounds.len() >= 300);
        assert_eq!(places.len(), rounds.len());
        let other = config_of(seeds::COMPACTIONS - 1, Kind::Qcow2);
        assert!(other.rounds.iter().all(|round| round.cut_short.is_none()));
    }

    #[test]
    fn most_of_their_crashes_fall_into_compactions() {
        let mut totals = Totals::default();
        for seed in seeds::COMPACTIONS..seeds::COMPACTIONS + 30 {
            let report = run(seed, Kind::Qcow2, &Changes::default(), Trace::off());
            assert_eq!(report.failure, None, "seed {seed}");
            totals.add(&report.totals);
        }
        assert!(totals.crashes > 200, "{totals:?}");
        assert!(totals.compaction_crashes * 2 > totals.crashes, "{totals:?}");
        assert!(
            totals.changing_crashes * 2 > totals.compaction_crashes,
            "{totals:?}"
        );
    }
}
