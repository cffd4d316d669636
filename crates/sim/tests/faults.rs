//! Failures of the disk that the engine once took for harmless.

use cowslip_sim::config::{Config, Ending, Kind};
use cowslip_sim::disk::fault::{Duration, EIO, ENOSPC, Fault, Verb};
use cowslip_sim::run::{Changes, run};
use cowslip_sim::trace::Trace;

/// Runs seeds of a changed configuration; none may fail, and the fault must have struck.
fn pass_edited(kind: Kind, seeds: std::ops::Range<u64>, edit: fn(&mut Config)) {
    let changes = Changes {
        edit: Some(edit),
        ..Changes::default()
    };
    let mut struck = 0;
    for seed in seeds {
        let report = run(seed, kind, &changes, Trace::off());
        struck += report.totals.faults;
        if let Some(what) = report.failure {
            panic!("seed {seed} of this test: {what}");
        }
    }
    assert!(struck > 20, "the fault struck {struck} times");
}

/// Makes the run one round of writes at few places, with a fault.
fn one_round(config: &mut Config, verb: Verb, errno: i32, fua_percent: u64) {
    let mut round = config.rounds[0].clone();
    round.requests = 120;
    round.depth = 8;
    round.weights = [5, 40, 5, 5, 12, 0];
    round.hot_percent = 50;
    round.fua_percent = fua_percent;
    round.resizes = false;
    round.ending = Ending::Crash(100_000);
    round.faults = vec![Fault {
        verb,
        after: config.size / 512 % 5,
        errno,
        duration: Duration::Once,
        file: None,
    }];
    config.rounds = vec![round];
}

#[test]
fn a_flush_that_fails_for_want_of_space_has_lost_bytes_like_any_other() {
    pass_edited(Kind::Qcow2, 0..100, |config| {
        one_round(config, Verb::Flush, ENOSPC, 0);
    });
}

#[test]
fn a_durable_write_that_fails_may_report_the_loss_of_other_bytes() {
    let edit = |config: &mut Config| one_round(config, Verb::Write, EIO, 50);
    pass_edited(Kind::Qcow2, 0..60, edit);
    pass_edited(Kind::Raw, 0..60, edit);
}

#[test]
fn a_durable_write_is_not_acknowledged_beside_one_that_has_found_its_loss() {
    let edit = |config: &mut Config| {
        one_round(config, Verb::Write, EIO, 90);
        config.rounds[0].depth = 32;
        config.rounds[0].requests = 300;
        config.rounds[0].weights = [5, 50, 2, 2, 6, 0];
        config.rounds[0].faults[0].after = 10 + config.size / 512 % 60;
    };
    pass_edited(Kind::Qcow2, 0..150, edit);
    pass_edited(Kind::Raw, 0..60, edit);
}
