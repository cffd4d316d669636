//! Mistakes that the orders of threads must bring to light. A process of its own: hundreds of
//! panics are wanted here, and silencing them would silence those of other tests.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

extern crate cowslip_on_shuttle as cowslip;

#[path = "../../../sim/src/planted/engine.rs"]
mod engine;
mod scenario;

use scenario::{run, run_seed};

/// Mistakes that need several requests at a time, or a crash beside them, to do harm.
const CONCURRENT: &[&str] = &[
    "MappingBeforeData",
    "NoBarrierBeforeEntries",
    "QuarantineOpenedAtCut",
    "EpochIgnored",
    "LostWakeupOfLease",
    "LeaseReleasedEarly",
    "L1BeforeTable",
    "FuaBeforeMapping",
    "FlushJoinsEarlierCut",
    "LiveTableHandedOut",
];

#[test]
#[ignore = "cargo xtask mistakes runs it in its copy of the sources"]
fn planted_mistakes_are_noticed() {
    const SEEDS_MAX: u64 = 2000;
    for name in CONCURRENT {
        let is_known = engine::KNOWN.iter().any(|(known, ..)| known == name);
        assert!(is_known, "this engine cannot make {name}");
    }
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let mut missed = Vec::new();
    for &mistake in CONCURRENT {
        match (1..=SEEDS_MAX).find(|&seed| fails(seed, Some(mistake))) {
            Some(seed) => {
                println!("{mistake}: noticed by seed {seed}");
                if fails(seed, None) {
                    missed.push((mistake, "fails without it"));
                }
            }
            None => missed.push((mistake, "not noticed")),
        }
    }
    std::panic::set_hook(loud);
    assert_eq!(missed, [], "in {SEEDS_MAX} seeds each");
}

/// Whether a seed fails with a mistake. On a thread of its own: a run that panics leaves shuttle's
/// state of its thread behind.
fn fails(seed: u64, mistake: Option<&'static str>) -> bool {
    let run = std::thread::spawn(move || {
        engine::plant(mistake);
        run_seed(seed, run);
    });
    run.join().is_err()
}
