//! A run of the engine as it was built, by as many seeds as the environment says. `cargo xtask
//! mutants`, which can run nothing but tests, uses it; the gate has its own seeds in `smoke.rs`.

use std::process::Command;

/// Seeds to run, in decimal.
const SEEDS: &str = "COWSLIP_SIM_SEEDS";

#[test]
#[ignore = "takes minutes; cargo xtask mutants runs it"]
fn as_many_seeds_as_are_asked_for_pass() {
    let seeds = std::env::var(SEEDS).expect("COWSLIP_SIM_SEEDS says how many seeds to run");
    let status = Command::new(env!("CARGO_BIN_EXE_cowslip-sim"))
        .args(["--seeds", &seeds, "--start", "0", "--jobs", "2"])
        .status()
        .expect("the simulator was built with this test");
    assert!(status.success(), "the simulator found a fault: {status}");
}
