//! The coverage matrix is full: a crash falls on each cell that can be reached, on the issue and
//! the completion of each kind of operation, and on each event of a run.

use cowslip_sim::config::Kind;
use cowslip_sim::goals::{self, Goal};
use cowslip_sim::run::{Changes, run};
use cowslip_sim::soak::Soak;
use cowslip_sim::trace::Trace;

#[test]
fn no_cell_of_the_matrix_stays_empty() {
    let changes = Changes::default();
    let soak = Soak::new(Kind::Qcow2, &changes, 2);
    soak.campaign(0, false, |_, _| ());
    assert_eq!(soak.failures(), []);
    let summary = soak.summary();
    assert_eq!(summary.gaps(), Vec::<String>::new());
    assert!(summary.totals.runs < 2000, "{} runs", summary.totals.runs);
}

/// A run whose disk grows, and with it its L1 table: cut short after each of its issues and
/// completions.
#[test]
fn a_crash_falls_on_each_event() {
    let goals = Goal::all();
    let grows = |goal: &Goal| format!("{goal:?}") == "Cell(Roots, L1Table, Extended)";
    let number = goals.iter().position(grows).expect("there is such a cell");
    let seed = goals::seed(number, 0);
    for moment in 1..160 {
        let changes = Changes {
            moment: Some(moment),
            ..Changes::default()
        };
        let report = run(seed, Kind::Qcow2, &changes, Trace::off());
        assert_eq!(report.failure, None, "moment {moment}");
        assert!(report.totals.crashes > 0, "moment {moment}");
    }
}
