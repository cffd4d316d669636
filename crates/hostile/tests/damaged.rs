//! Seeded damage of valid images: the same as the fuzz target `image_damage`, but for its choices, which
//! follow from a seed.
//!
//! `COWSLIP_SEED=n` replays one seed, `COWSLIP_SEEDS=n` tries more of them.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip_hostile::damage::damage;
use cowslip_hostile::draw::Draw;
use cowslip_hostile::file::Watched;
use cowslip_hostile::{samples, session};

/// Seeds that are tried by default: about 20 seconds in a debug build.
const SEEDS: u64 = 6000;
/// A generous limit for the work on one small image.
const TIME_MAX: Duration = Duration::from_secs(10);

fn try_seed(seed: u64) {
    let mut draw = Draw::from_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let sample = &samples::all()[draw.below(samples::COUNT as u64) as usize];
    let bytes = damage(sample, &mut draw);
    let began = Instant::now();
    session::look(&Arc::new(Watched::new(bytes.clone())), &mut draw);
    session::change(&Arc::new(Watched::new(bytes)), &mut draw);
    assert!(began.elapsed() < TIME_MAX, "took {:?}", began.elapsed());
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap())
}

#[test]
fn damaged_images_are_errors_and_nothing_worse() {
    for sample in samples::all() {
        let file = Arc::new(Watched::new(sample.clone()));
        assert!(session::run_check(&file).unwrap().is_clean());
    }
    if let Some(seed) = number("COWSLIP_SEED") {
        return try_seed(seed);
    }
    let seeds = number("COWSLIP_SEEDS").unwrap_or(SEEDS);
    let failed: Vec<u64> = (0..seeds)
        .filter(|&seed| {
            let tried = catch_unwind(AssertUnwindSafe(|| try_seed(seed)));
            if tried.is_err() {
                eprintln!("^ COWSLIP_SEED={seed}");
            }
            tried.is_err()
        })
        .collect();
    assert!(
        failed.is_empty(),
        "{} seeds failed: {failed:?}",
        failed.len()
    );
}
