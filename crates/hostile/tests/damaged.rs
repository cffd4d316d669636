//! Seeded damage of valid images: the same as the fuzz target `image_damage`, but for its choices,
//! which follow from a seed.
//!
//! `COWSLIP_SEED=n` replays one seed, `COWSLIP_SEEDS=n` tries more of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip_hostile::damage::damage;
use cowslip_hostile::draw::Draw;
use cowslip_hostile::file::Watched;
use cowslip_hostile::{samples, session};

/// Seeds that are tried by default: about 10 seconds in a debug build.
const SEEDS: u64 = 3000;
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

/// Counts behind the end of the file that are not 0, as a crash leaves them: all, every second, and
/// in ever longer gaps. What is written then is counted once, and nothing lies on it.
#[test]
fn growth_steps_over_counts_beyond_the_end() {
    let sample = &samples::all()[0];
    let layout = cowslip_hostile::layout::Layout::of(sample);
    let clusters = sample.len().div_ceil(512);
    // 16-bit counts: 256 in a block of 512 bytes.
    let counts_of = |cluster: usize| {
        let block = layout.refcount_blocks.get(cluster / 256)?;
        Some(block.start + cluster % 256 * 2)
    };
    let beyond = clusters..layout.refcount_blocks.len() * 256;
    assert!(beyond.len() > 20, "the sample has counts to spare");
    let patterns: [fn(usize) -> bool; 3] = [|_| true, |i| i % 2 == 0, |i| i.isqrt().pow(2) == i];
    for pattern in patterns {
        let mut bytes = sample.clone();
        for cluster in beyond.clone().filter(|&i| pattern(i - beyond.start)) {
            bytes[counts_of(cluster).unwrap() + 1] = 1;
        }
        let file = Arc::new(Watched::new(bytes));
        let gate = session::OneDataFile::new();
        let mut draw = Draw::from_seed(3);
        let image = session::open(&file, &gate, true, &mut draw).unwrap();
        let data = cowslip::Buf::from(vec![9; 400_000]);
        session::block_on(image.write(600_000, data, Default::default())).unwrap();
        session::block_on(image.close()).unwrap();
        let result = session::run_check(&file).unwrap();
        assert_eq!(
            (result.corruptions, result.check_errors),
            (0, 0),
            "{result:?}"
        );
        let image = session::open(&file, &gate, false, &mut draw).unwrap();
        let read = image.read(600_000, cowslip::BufMut::zeroed(400_000));
        let read = session::block_on(read).unwrap();
        assert!(read.iter().all(|&byte| byte == 9));
    }
}
