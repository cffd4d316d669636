//! The whole engine on several threads in orders that seeds decide.
//!
//! `COWSLIP_SHUTTLE_SEEDS=N` runs more seeds than the gate does, `COWSLIP_SHUTTLE_SEED=S` starts at
//! S.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

extern crate cowslip_on_shuttle as cowslip;

mod scenario;

use scenario::{Case, run, run_seed, run_with_drops};

#[test]
fn several_threads_on_one_image_in_seeded_orders() {
    run_seeds(run);
}

#[test]
fn requests_dropped_at_any_moment_in_seeded_orders() {
    run_seeds(run_with_drops);
}

fn run_seeds(run: fn(&Case)) {
    let variable = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let first: u64 = variable("COWSLIP_SHUTTLE_SEED").unwrap_or(1);
    let seeds: u64 = variable("COWSLIP_SHUTTLE_SEEDS").unwrap_or(300);
    for seed in first..first + seeds {
        let outcome = std::panic::catch_unwind(|| run_seed(seed, run));
        assert!(
            outcome.is_ok(),
            "seed {seed}: {:?}; again with COWSLIP_SHUTTLE_SEED={seed} COWSLIP_SHUTTLE_SEEDS=1",
            Case::of_seed(seed)
        );
    }
    println!("{seeds} seeds");
}
