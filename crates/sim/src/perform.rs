//! The run of a seed, whatever it is about.

use std::cell::RefCell;
use std::rc::Rc;

use crate::config::Kind;
use crate::coverage::Coverage;
use crate::graph::{self, Figures};
use crate::run::{self, Changes, Report};
use crate::seeds;
use crate::totals::Totals;
use crate::trace::Trace;

/// Performs the run of a seed. A panic of the engine is a finding like any other.
pub fn run(seed: u64, kind: Kind, changes: &Changes, trace: Trace) -> Report {
    if !(seeds::GRAPHS..seeds::COMPACTIONS).contains(&seed) || kind != Kind::Qcow2 {
        return run::run(seed, kind, changes, trace);
    }
    let figures: Rc<RefCell<Figures>> = Rc::default();
    let failure = match crate::panics::catch(|| graph::run(seed, &trace, &figures)) {
        Ok(Ok(())) => None,
        Ok(Err(what)) => Some(what),
        Err(panic) => Some(panic),
    };
    if let Some(what) = &failure {
        trace.line(|| format!("FAILED: {what}"));
    }
    let figures = *figures.borrow();
    Report {
        totals: Totals {
            runs: 1,
            requests: figures.requests,
            operations: figures.operations,
            crashes: figures.crashes,
            closes: figures.closes,
            faults: figures.faults,
            ..Totals::default()
        },
        failure,
        begun: Vec::new(),
        coverage: Coverage::default(),
        rounds: 0,
        events: 0,
        trace,
    }
}
