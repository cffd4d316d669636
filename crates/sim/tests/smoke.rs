//! A small budget of seeds, the same ones every time, and the proof that the suite can fail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cowslip_sim::config::{Config, Ending, Kind};
use cowslip_sim::disk::Lie;
use cowslip_sim::graph;
use cowslip_sim::mixture::Mixture;
use cowslip_sim::perform::run;
use cowslip_sim::run::Changes;
use cowslip_sim::seeds;
use cowslip_sim::shrink;
use cowslip_sim::soak::Soak;
use cowslip_sim::stories::Story;
use cowslip_sim::trace::Trace;

fn pass(kind: Kind, seeds: std::ops::Range<u64>) {
    let changes = Changes::default();
    for seed in seeds {
        let report = run(seed, kind, &changes, Trace::off());
        if let Some(what) = report.failure {
            panic!(
                "seed {seed}: {what}\n{}",
                shrink::command(seed, kind, &changes)
            );
        }
    }
}

/// The first seed with which a broken disk is noticed.
fn caught(kind: Kind, edit: fn(&mut Config), seeds: u64) -> Option<u64> {
    let changes = Changes {
        edit: Some(edit),
        ..Changes::default()
    };
    (0..seeds).find(|seed| run(*seed, kind, &changes, Trace::off()).failure.is_some())
}

#[test]
fn the_reference_passes() {
    pass(Kind::Plain, 0..150);
}

#[test]
fn raw_images_pass() {
    pass(Kind::Raw, 0..60);
}

/// Drawn runs, directed ones, stories and chains, as a soak makes them.
fn mixture_passes(runs: std::ops::Range<u64>) {
    let mixture = Mixture::default();
    for seed in runs.flat_map(|run| mixture.seeds(run)) {
        pass(Kind::Qcow2, seed..seed + 1);
    }
}

#[test]
fn qcow2_images_pass() {
    mixture_passes(0..500);
}

/// The same seeds' successors, on a second thread of the test runner.
#[test]
fn more_qcow2_images_pass() {
    mixture_passes(500..1000);
}

/// Tests of seeds that have found something once.
macro_rules! seeds_pass {
    ($($(#[$found:meta])+ $test:ident: $($seed:literal),+;)+) => {$(
        $(#[$found])+
        #[test]
        fn $test() {
            for seed in [$($seed),+] {
                pass(Kind::Qcow2, seed..seed + 1);
            }
        }
    )+};
}

seeds_pass! {
    /// A snapshot was taken while a hole was not durable; no barrier comes before its flags are
    /// cleared, and the simulator said that one did.
    snapshots_clear_flags_beside_holes: 1_099_511_969_349;

    /// Leaks beside flags that were not set yet: a compaction punched their space, and set the
    /// flags with no barrier between, as the change of snapshots would have that was cut short.
    /// Then holes that a compaction had punched, before refcount blocks that were durable by
    /// themselves. Neither puts anything at risk, and the matrix of crashes said that it could not
    /// be.
    holes_of_compactions_need_no_barrier_before_flags_and_counts:
        7_697_571_559_463, 7_697_571_577_034;

    /// A defragmentation under a small budget: a cluster that could not go where it was planned
    /// kept all that came after from going home, and each of many rounds read all tables once more.
    a_defragmentation_of_small_clusters_ends: 490_068_578;

    /// The new L1 table of a disk that grows could not be written, and its cluster stayed counted.
    space_of_a_table_that_could_not_be_written_is_free_again: 900_656;

    /// The header that refers to another bitmap directory was written, and the write failed; the
    /// close went on to write the hint on allocation where the old header had it.
    nothing_is_written_by_a_header_that_may_be_another_one: 2_199_023_259_022;

    /// A bitmap was removed, and the disk got another size: its table was leaked, or of the wrong
    /// length after a crash.
    a_removed_bitmap_does_not_outlive_another_size: 2_199_123_261_899, 200_015_486;

    /// A crash had left a table of a snapshot counted once too often, and a downgrade took that for
    /// the references to the table: its zero clusters lost more counts than they had.
    a_downgrade_goes_by_references_not_by_leaked_counts: 4_398_071_541_935, 4_398_071_546_156;

    /// There was no space to copy the tables that a snapshot shares, and the disk became smaller:
    /// data behind its new end was still there, as VM state.
    a_shrink_without_space_empties_the_vm_state: 200_400_315;

    /// A process died while it took a snapshot, the next one saw it, and its first flush failed:
    /// the snapshot may be gone after a power failure, and the simulator said that it may not.
    a_failed_flush_may_lose_the_snapshot_of_a_process_that_died: 200_145_958;

    /// A data file on a device whose length was no multiple of its blocks: the last block of a disk
    /// that grew was read and written beyond its end. No device is like that; the simulator's was.
    devices_of_data_files_end_with_a_whole_block: 400_001_125;

    /// A write that failed because of a neighbour had left its bytes in space that others
    /// published.
    a_write_that_fails_beside_another_fails_those_beside_it: 2_199_029_635_816;
}

/// The later stories, each once.
#[test]
fn later_stories_pass() {
    let count = 8 * Story::LATER.len() as u64;
    pass(
        Kind::Qcow2,
        seeds::LATER_STORIES..seeds::LATER_STORIES + count,
    );
}

/// Overlays that are rebased and committed, with power failures in between.
#[test]
fn chains_pass() {
    pass(Kind::Qcow2, seeds::CHAINS..seeds::CHAINS + 40);
}

/// Chains that change under their guests, with power failures in between.
#[test]
fn graphs_pass() {
    // Those before are in the mixture.
    pass(
        Kind::Qcow2,
        graph::FIRST_SEED + 125..graph::FIRST_SEED + 200,
    );
}

#[test]
fn a_seed_repeats_itself() {
    for seed in 0..8 {
        let once = || run(seed, Kind::Qcow2, &Changes::default(), Trace::off());
        let (first, second) = (once(), once());
        assert_eq!(
            first.trace.fingerprint(),
            second.trace.fingerprint(),
            "seed {seed}"
        );
        assert_eq!(first.failure, second.failure);
    }
}

#[test]
fn a_disk_whose_flush_does_nothing_is_caught() {
    for kind in [Kind::Plain, Kind::Qcow2] {
        let seed = caught(kind, |config| config.lie = Lie::FlushDoesNothing, 60);
        assert!(seed.is_some(), "{kind:?} does not notice");
    }
}

#[test]
fn a_disk_whose_flush_forgets_some_is_caught() {
    for kind in [Kind::Plain, Kind::Qcow2] {
        let seed = caught(kind, |config| config.lie = Lie::FlushForgetsSome, 150);
        assert!(seed.is_some(), "{kind:?} does not notice");
    }
}

#[test]
fn a_disk_whose_durable_writes_are_not_is_caught() {
    let edit = |config: &mut Config| {
        config.lie = Lie::DurableWritesAreNot;
        for round in &mut config.rounds {
            round.fua_percent = 50;
            round.weights[4] = 0;
        }
    };
    let seed = caught(Kind::Plain, edit, 100);
    assert!(seed.is_some(), "nobody notices");
}

/// Runs seeds of a changed configuration; none may fail.
fn pass_edited(seeds: std::ops::Range<u64>, edit: fn(&mut Config)) {
    let changes = Changes {
        edit: Some(edit),
        ..Changes::default()
    };
    for seed in seeds {
        let report = run(seed, Kind::Qcow2, &changes, Trace::off());
        if let Some(what) = report.failure {
            panic!("seed {seed} of this test: {what}");
        }
    }
}

#[test]
fn durable_writes_do_not_build_on_what_a_dead_process_left_unflushed() {
    pass_edited(0..150, |config| {
        let mut first = config.rounds[0].clone();
        first.requests = 40;
        first.faults.clear();
        first.weights = [0, 40, 5, 5, 4, 0];
        first.hot_percent = 90;
        let mut second = first.clone();
        first.ending = Ending::Kill(40);
        second.weights = [0, 40, 0, 0, 0, 0];
        second.fua_percent = 100;
        second.ending = Ending::Crash(30);
        config.rounds = vec![first, second];
    });
}

/// The next session finds the snapshot in the system's memory, and flushes before it writes.
#[test]
fn a_power_failure_may_take_back_a_snapshot_that_a_dead_process_did_not_flush() {
    pass(Kind::Qcow2, 3_000_248..3_000_249);
    pass_edited(0..150, |config| {
        let mut first = config.rounds[0].clone();
        let moment = first.requests % 60;
        first.requests = 40;
        first.faults.clear();
        first.snapshots_percent = 100;
        let mut second = first.clone();
        first.ending = Ending::Kill(moment);
        second.weights = [0, 40, 0, 0, 0, 0];
        second.snapshots_percent = 0;
        (first.resizes, second.resizes) = (false, false);
        second.fua_percent = 100;
        second.ending = Ending::Crash(1 + moment % 7);
        config.rounds = vec![first, second];
    });
}

/// An interrupted soak begins no further run, and has the sum of those that ended.
#[test]
fn an_interrupted_soak_keeps_its_figures() {
    let changes = Changes::default();
    let mut soak = Soak::new(Kind::Qcow2, &changes, 1);
    let (interruption, reports) = (soak.interruption(), AtomicU64::new(0));
    soak.report_progress(Duration::ZERO, move |summary, _| {
        let earlier = reports.fetch_add(1, Ordering::Relaxed);
        assert_eq!(summary.totals.runs, earlier + 1);
        interruption.store(earlier == 2, Ordering::Relaxed);
    });
    soak.range(0..1000, |seed, what| panic!("seed {seed}: {what}"));
    assert!(soak.was_interrupted());
    assert_eq!(soak.summary().totals.runs, 3);
}
